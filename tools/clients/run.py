"""Real clients against a real server: the `openai` package, LangChain, curl, schema fuzzing, the page, then faults.

    python -m venv target/clients && target/clients/bin/pip install -r tools/clients/requirements.txt
    cargo build --release
    target/clients/bin/python tools/clients/run.py [--model MODEL] [--only openai,curl] [--picture page.png]

Everything stays on this machine's loopback and ends by itself. A model that is no path is fetched first.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys

import server as servers

HERE = pathlib.Path(__file__).parent
KINDS = ["openai", "langchain", "curl", "fuzz", "page", "faults"]


def fuzz(url: str) -> list[str]:
    """Schemathesis on the served document: whatever is sent, no answer is a server error or of another shape."""
    tool = pathlib.Path(sys.executable).with_name("schemathesis")
    return [
        str(tool), "run", url + "/openapi.json", "--checks",
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        "--max-examples", "60", "--seed", "1", "--request-timeout", "60", "--suppress-health-check", "all",
        "--exclude-path", "/", "--phases", "examples,coverage,fuzzing",
    ]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m-instruct")
    p.add_argument("--only", default=",".join(KINDS))
    p.add_argument("--picture", default="target/page.png")
    a = p.parse_args()
    kinds = a.only.split(",")
    if wrong := [k for k in kinds if k not in KINDS]:
        raise SystemExit(f"--only {wrong[0]}: one of {', '.join(KINDS)} is needed")
    failed = []

    def tell(kind: str, command: list[str], folder: pathlib.Path = servers.ROOT) -> None:
        print(f"== {kind}", flush=True)
        if subprocess.run(command, cwd=folder).returncode != 0:
            failed.append(kind)

    with servers.running(a.model, "--served-model-name", "model", "--log-level", "warn", "--max-model-len", "2048") as s:
        print(f"server at {s.url} after {s.start_seconds:.2f} s", flush=True)
        for kind in ("openai", "langchain"):
            if kind in kinds:
                tell(kind, [sys.executable, str(HERE / f"{kind}_client.py"), s.url, "model"])
        if "curl" in kinds:
            tell("curl", [str(HERE / "curl.sh"), s.url])
        if "page" in kinds:
            if shutil.which("chromedriver"):
                tell("page", [sys.executable, str(HERE / "page.py"), s.url, a.picture])
            else:
                print("== page: NOT RUN, there is no chromedriver (Debian: chromium-driver)")
    if "fuzz" in kinds:
        # Answers are short, so that thousands of requests end soon.
        with servers.running(a.model, "--served-model-name", "model", "--log-level", "error", "--max-model-len", "256") as s:
            tell("fuzz", fuzz(s.url), servers.ROOT / "target")  # it keeps its findings in the folder it runs in
    if "faults" in kinds:
        tell("faults", [sys.executable, str(HERE / "faults.py"), a.model])
    print("failed: " + ", ".join(failed) if failed else "all fine")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
