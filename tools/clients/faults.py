"""200 clients of which a third leave at random points, others send rubbish, read slowly or ask for what can't be; then
SIGTERM in the middle of a second wave. Afterwards: no page lost, memory back at its level, and every completed answer is
what an idle server says (both with --batch-invariant).

    python tools/clients/faults.py MODEL [--clients N]
"""

import argparse
import collections
import json
import random
import socket
import threading
import time

import server as servers

GREEDY = {"temperature": 0}


def request(index: int) -> tuple[str, dict]:
    """Request `index`: the same each time, greedy or seeded."""
    rng = random.Random(index)
    words = " ".join(rng.choice(["the", "sea", "a", "bird", "runs", "over", "green", "hills", "and", "sings"]) for _ in range(rng.randint(1, 60)))
    sampling = GREEDY if index % 2 else {"temperature": 0.8, "seed": index}
    return "/v1/completions", {"prompt": words, "max_tokens": rng.randint(1, 40), **sampling}


class Wire:
    """A request on a socket of its own."""

    def __init__(self, url: str, path: str, body: bytes, length: int | None = None):
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=120)
        head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n"
        try:
            self.socket.sendall(head.encode() + body)
        except OSError:
            pass  # refused before all was sent: the answer says why

    def read(self, most: int = 1 << 30, pause: float = 0) -> bytes:
        seen = b""
        while len(seen) < most:
            try:
                part = self.socket.recv(min(65536, most - len(seen)))
            except ConnectionResetError:
                break
            if not part:
                break
            seen += part
            time.sleep(pause)
        return seen

    def close(self) -> None:
        self.socket.close()


def whole(raw: bytes) -> tuple[int, str]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body.decode()


def text_of(body: str, stream: bool) -> str | None:
    """The answer's text; None where it did not come to its end."""
    if not stream:
        return json.loads(body)["choices"][0]["text"]
    events = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return None
    objects = [json.loads(e) for e in events[:-1]]
    if any("error" in o for o in objects):
        return None
    return "".join(o["choices"][0]["text"] for o in objects)


def client(url: str, index: int, tally: collections.Counter, answers: dict[int, str]) -> None:
    rng = random.Random(10_000 + index)
    kind = rng.choices(
        ["ask", "stream", "leave", "leave_stream", "rubbish", "huge", "slow", "invalid"],
        [22, 22, 17, 16, 6, 4, 6, 7])[0]
    time.sleep(rng.random() * 3)
    path, body = request(index)
    if kind in ("stream", "leave_stream", "slow"):
        body["stream"] = True
    if kind == "rubbish":
        raw = rng.choice([b"{", b"\xff\xfe", b"[]", json.dumps(body).encode()[:-3], b"{\"prompt\": \"\\ud800\"}"])
        status, _ = whole(Wire(url, path, raw).read())
        assert status in (400, 503), status
    elif kind == "huge":
        status, _ = whole(Wire(url, path, b"{" + b" " * 100_000, length=1 << 30).read())
        assert status in (413, 503), status
    elif kind == "invalid":
        wrong = rng.choice([{"temperature": -1}, {"max_tokens": 0}, {"model": "other"}, {"n": 0}, {"prompt": None}, {"top_p": 7}])
        status, _ = whole(Wire(url, path, json.dumps(body | wrong).encode()).read())
        assert status in (400, 404, 503), status
    elif kind.startswith("leave"):
        wire = Wire(url, path, json.dumps(body | {"max_tokens": 300}).encode())
        if kind == "leave_stream" and rng.random() < 0.7:
            wire.read(rng.randint(1, 3000))
        else:
            time.sleep(rng.random())
        wire.close()
    else:
        wire = Wire(url, path, json.dumps(body).encode())
        raw = wire.read(pause=0.01 if kind == "slow" else 0)
        status, answer = whole(raw)
        if status == 200 and (text := text_of(answer, body.get("stream", False))) is not None:
            answers[index] = text
        elif status not in (200, 503):
            raise AssertionError((status, answer))
        else:
            kind += " (ended by the server)"
    tally[kind] += 1


def wave(url: str, indices: range, tally: collections.Counter, answers: dict[int, str], faults: list) -> list[threading.Thread]:
    def run(index: int) -> None:
        try:
            client(url, index, tally, answers)
        except (ConnectionError, TimeoutError, IndexError, ValueError) as e:
            tally[f"cut off ({type(e).__name__})"] += 1
        except BaseException as e:  # noqa: BLE001: told at the end
            faults.append((index, repr(e)))

    threads = [threading.Thread(target=run, args=(i,)) for i in indices]
    for t in threads:
        t.start()
    return threads


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("model")
    p.add_argument("--clients", type=int, default=200)
    a = p.parse_args()
    options = ["--batch-invariant", "--max-num-seqs", "16", "--log-level", "error", "--kv-cache-memory", "64MiB"]
    with servers.running(a.model, *options) as idle:
        began = idle.rss_bytes()
        tally: collections.Counter = collections.Counter()
        answers: dict[int, str] = {}
        faults: list = []
        for t in wave(idle.url, range(a.clients), tally, answers, faults):
            t.join()
        first_level = 0
        until = time.monotonic() + 10
        while (m := idle.metrics())["num_requests_running"] + m["num_requests_waiting"] + m["kv_cache_used_pages"] and time.monotonic() < until:
            time.sleep(0.05)
        assert m["num_requests_running"] == m["num_requests_waiting"] == m["kv_cache_used_pages"] == 0, m
        print("first wave:", dict(tally))
        print(f"pages in use {m['kv_cache_used_pages']:.0f} of {m['kv_cache_total_pages']:.0f} ({m['kv_cache_cached_pages']:.0f} cached), preemptions {m['num_preemptions_total']:.0f}")
        first_level = idle.rss_bytes()
        # The same load again: memory that grows with it would be lost memory.
        for t in wave(idle.url, range(a.clients), collections.Counter(), {}, faults):
            t.join()
        second_level = idle.rss_bytes()
        print(f"memory at start {began >> 20} MiB, after a wave {first_level >> 20} MiB, after another {second_level >> 20} MiB")
        assert second_level < first_level * 1.05 + (8 << 20), "memory grows with load"
        same = sum(idle.post(path, body)["choices"][0]["text"] == answers[i] for i in sorted(answers) for path, body in [request(i)])
        print(f"{same} of {len(answers)} completed answers are those of the idle server")
        assert same == len(answers) > a.clients // 5
    print("exit code after SIGTERM:", idle.process.returncode)
    assert idle.process.returncode == 0
    ending = servers.Server(a.model, *options, "--grace-period", "20")
    tally, late = collections.Counter(), {}
    threads = wave(ending.url, range(a.clients), tally, late, faults)
    time.sleep(1.5)
    code = ending.end()
    for t in threads:
        t.join()
    print("SIGTERM in the middle:", dict(tally), "exit code", code)
    assert code == 0
    wrong = [i for i in late if i in answers and late[i] != answers[i]]
    print(f"{len(late)} answers completed before the end, {len(wrong)} of them other than before")
    assert not wrong
    assert not faults, faults
    print("ok  faults")


if __name__ == "__main__":
    main()
