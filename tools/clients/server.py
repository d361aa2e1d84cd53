"""A headway server for a script: started on a free loopback port, ended with the script."""

import contextlib
import json
import pathlib
import re
import signal
import subprocess
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = ROOT / "target" / "release" / "headway"


class Server:
    """`headway serve` with more options."""

    def __init__(self, model: str, *options: str, binary: pathlib.Path = BINARY):
        began = time.monotonic()
        self.process = subprocess.Popen(
            [str(binary), "serve", "--model", model, "--port", "0", *options],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )
        self.log: list[str] = []
        self.url = ""
        ready = threading.Event()

        def read():
            for line in self.process.stderr:
                self.log.append(line.rstrip())
                if found := re.search(r"at (http://\S+) \(status page", line):
                    self.url = found[1]
                    ready.set()
            ready.set()

        threading.Thread(target=read, daemon=True).start()
        ready.wait(120)
        if not self.url:
            self.process.kill()
            raise SystemExit("the server did not start:\n" + "\n".join(self.log))
        self.start_seconds = time.monotonic() - began

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def metrics(self) -> dict[str, float]:
        out: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if found := re.match(r"headway:(\w+)(?:\{[^}]*\})? (\S+)", line):
                out[found[1]] = out.get(found[1], 0) + float(found[2])
        return out

    def rss_bytes(self) -> int:
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) * 1024

    def end(self, sig: int = signal.SIGTERM, patience: float = 60) -> int:
        """Asks it to end; its exit code."""
        self.process.send_signal(sig)
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise SystemExit(f"the server did not end within {patience} s")


@contextlib.contextmanager
def running(model: str, *options: str, binary: pathlib.Path = BINARY):
    server = Server(model, *options, binary=binary)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()
