"""The status page in headless Chromium: what is drawn, a chat, no error in the console; a picture of it.

    python tools/clients/page.py URL PICTURE.png

Needs Chromium and its driver (Debian: chromium, chromium-driver).
"""

import shutil
import sys
import time

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait


def main(url: str, picture: str) -> None:
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,1500", "--force-device-scale-factor=1"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Named, so that no driver is looked for elsewhere.
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        page.get(url)
        wait = WebDriverWait(page, 60)
        text = lambda id: page.find_element(By.ID, id).text
        wait.until(lambda _: text("state") == "ready")
        wait.until(lambda _: page.find_elements(By.CSS_SELECTOR, "#layers rect"))
        layers = len(page.find_elements(By.CSS_SELECTOR, "#layers rect"))
        groups = len(page.find_elements(By.CSS_SELECTOR, "#groups tr")) - 1
        assert layers and groups, (layers, groups)
        print(f"ok  {layers} layers in {groups} groups drawn; model {text('model')!r}, {text('device')!r}")
        box = page.find_element(By.NAME, "text")
        box.send_keys("What is the capital of France? Answer in one sentence.\n")
        answer = lambda: page.find_elements(By.CSS_SELECTOR, "#talk p.assistant")[-1].text
        wait.until(lambda _: page.find_element(By.CSS_SELECTOR, "#ask button").text == "Send" and answer() not in ("", "…"))
        print("ok  the model said:", repr(answer()[:100]))
        assert not page.find_elements(By.CSS_SELECTOR, "#talk .bad")
        time.sleep(3)
        total = text("total")
        assert int(total.split()[0]) > 0, total
        points = page.find_element(By.CSS_SELECTOR, "#c-rate polyline").get_attribute("points").split()
        assert len(points) >= 3, points
        print(f"ok  {total}; KV {text('pages')}; first token {text('ttft')}; {len(points)} points in a chart")
        worst = [line for line in page.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
        assert not worst, worst
        print("ok  nothing in the console")
        page.save_screenshot(picture)
        print("picture:", picture)
    finally:
        page.quit()


if __name__ == "__main__":
    main(*sys.argv[1:3])
