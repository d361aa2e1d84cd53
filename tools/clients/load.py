"""What serving costs: `headway serve` beside `headway bench engine`, and beside vLLM's CPU server under vLLM's own load generator.

    cargo build --release
    python tools/clients/load.py [--model MODEL] [--rounds 3] [--json target/load.json]
    bench/peers/run.py --quick                     # once: installs the peers and makes the bfloat16 model
    python tools/clients/load.py --only peer       # `vllm bench serve` against both servers, in turn

The first two parts need no package. Engine and server get one thread on the first processor, the client the second, so that what
the client costs isn't counted as the server's. Everything stays on this machine's loopback and ends by itself.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

import server as servers

sys.path.insert(0, str(servers.ROOT / "bench" / "peers"))
import environment  # noqa: E402

PARTS = ["overhead", "first", "peer"]
PEER_START_LIMIT, PEER_RUN_LIMIT = 900, 900
# vLLM's generator as the program that `vllm bench serve` is; the CPU wheel has another name, so its command line doesn't start.
GENERATOR = (
    "import argparse; from vllm.benchmarks import serve; p = argparse.ArgumentParser(); "
    "serve.add_cli_args(p); serve.main(p.parse_args())"
)


async def stream(port: int, body: dict) -> tuple[float, float, int]:
    """One streamed completion: seconds to the first event, seconds to the last, events."""
    text = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    began, first, events = time.monotonic(), None, 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + text)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the server answered {status.decode().strip()}")
    while (line := await reader.readline()) and b"[DONE]" not in line:
        if line.startswith(b"data: "):
            first = first or time.monotonic()
            events += 1
    writer.close()
    return first - began, time.monotonic() - began, events


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random ids, none shared: no prompt finds another's pages."""
    r = random.Random(seed)
    return [[r.randrange(1000, 30000) for _ in range(length)] for _ in range(count)]


def pinned(processors: set[int]):
    return lambda: os.sched_setaffinity(0, processors)


def engine(a, *options) -> dict:
    """`headway bench engine` on the first processor."""
    command = [str(servers.BINARY), "bench", "engine", "--model", a.model, "--threads", "1", "--json", *map(str, options)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, preexec_fn=pinned({a.cpus[0]})).stdout)


@contextlib.contextmanager
def alone(a):
    """`headway serve` on the first processor, this process on the second."""
    os.sched_setaffinity(0, {a.cpus[0]})  # inherited by the server
    server = servers.Server(a.model, "--threads", "1", "--log-level", "warn", "--served-model-name", "model")
    os.sched_setaffinity(0, {a.cpus[1]})
    try:
        yield server, int(server.url.rsplit(":", 1)[1])
    finally:
        os.sched_setaffinity(0, set(a.cpus))
        if server.process.poll() is None:
            server.end()


def processor_seconds(pid: int) -> dict[str, float]:
    """What each kind of thread of a process has used."""
    out: dict[str, float] = {}
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        name, used = (task / "comm").read_text().strip(), int((task / "schedstat").read_text().split()[0]) / 1e9
        out[name] = out.get(name, 0) + used
    return out


def overhead(a) -> dict:
    """Output tokens a second of 16 streams, in turn, and which share of the server's processor time its HTTP threads used."""
    shape, out = (a.prompt_len, a.output_len), {"engine": [], "served": [], "http_share": []}
    for round_ in range(a.rounds):
        got = engine(a, "--prompt-len", shape[0], "--output-len", shape[1], "--concurrency", a.streams, "--num-requests", a.streams)
        out["engine"].append(got["output_tokens_per_s"])
        with alone(a) as (server, port):
            asyncio.run(stream(port, {"model": "model", "prompt": prompts(1, 8, 999)[0], "max_tokens": 4}))

            async def all_of_them():
                body = {"model": "model", "max_tokens": shape[1], "ignore_eos": True, "temperature": 0}
                return await asyncio.gather(*(stream(port, {**body, "prompt": p}) for p in prompts(a.streams, shape[0], round_)))

            began, before = time.monotonic(), processor_seconds(server.process.pid)
            asyncio.run(all_of_them())
            out["served"].append(a.streams * shape[1] / (time.monotonic() - began))
            used = {k: v - before.get(k, 0) for k, v in processor_seconds(server.process.pid).items()}
            out["http_share"].append(1 - used["headway-engine"] / sum(used.values()))
    ratio = statistics.median(e / s for e, s in zip(out["engine"], out["served"])) - 1
    print(f"{a.streams} streams, {shape[0]} + {shape[1]} tokens, output tokens/s: engine {told(out['engine'])}, served {told(out['served'])}: "
          f"{ratio:+.1%} a token (median of pairs); HTTP threads used {statistics.median(out['http_share']):.2%} of the server's processor time")
    return {**out, "overhead": ratio}


def first(a) -> dict:
    """Milliseconds to the first token of one short prompt on an idle server."""
    out = {"engine": [], "served": []}
    for round_ in range(a.rounds):
        got = engine(a, "--prompt-len", 16, "--output-len", 2, "--concurrency", 1, "--num-requests", 20)
        out["engine"].append(got["time_to_first_token_ms"]["p50"])
        with alone(a) as (_, port):
            body = {"model": "model", "max_tokens": 2, "ignore_eos": True, "temperature": 0}
            times = [asyncio.run(stream(port, {**body, "prompt": p}))[0] * 1e3 for p in prompts(21, 16, 100 + round_)]
            out["served"].append(statistics.median(times[1:]))
    ratio = statistics.median(out["served"]) / statistics.median(out["engine"])
    print(f"first token of 16 prompt tokens, ms (p50 of 20): engine {told(out['engine'])}, served {told(out['served'])}: {ratio:.2f} times")
    return {**out, "ratio": ratio}


def told(values: list[float]) -> str:
    return ", ".join(f"{v:.1f}" for v in values)


def healthy(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200
    except (urllib.error.URLError, OSError):
        return False


def peer(a) -> dict | None:
    """Both servers up, vLLM's generator against each in turn; same weights, element type, threads and load."""
    library, why = environment.vllm_library(environment.site_packages())
    model = a.peer_model
    if library is None or not model.is_dir():
        print(f"NOT RUN beside vLLM: {why or f'{model} is missing'}; bench/peers/run.py makes both")
        return None
    threads = len(a.cpus)
    around = environment.child_environment(
        threads, VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND=f"{a.cpus[0]}-{a.cpus[-1]}",
        VLLM_CPU_NUM_OF_RESERVED_CPU="0", VLLM_LOGGING_LEVEL="WARNING")
    openmp = environment.HOME / "venv" / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}
    limits = ["--max-model-len", "768", "--max-num-seqs", str(a.streams)]
    began, port = time.monotonic(), 8123
    log = open(servers.ROOT / "target" / "vllm-server.log", "wb")
    other = subprocess.Popen(
        [str(environment.PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "model",
         "--dtype", a.peer_dtype, "--host", "127.0.0.1", "--port", str(port), *limits],
        env={**around, **preload}, stdout=log, stderr=log, preexec_fn=os.setsid)
    try:
        while not healthy(port):
            if other.poll() is not None or time.monotonic() - began > PEER_START_LIMIT:
                raise SystemExit(f"vLLM's server did not start; {log.name} has what it printed")
            time.sleep(0.5)
        out = {"start_s": {"vllm": time.monotonic() - began}, "runs": []}
        with servers.running(str(model), "--served-model-name", "model", "--log-level", "warn", *limits) as ours:
            out["start_s"]["headway"] = ours.start_seconds
            print(f"ready after, s: headway {ours.start_seconds:.2f}, vLLM {out['start_s']['vllm']:.0f}")
            for round_ in range(a.rounds):
                for name, url in (("headway", ours.url), ("vllm", f"http://127.0.0.1:{port}")):
                    got = generator(a, url, model, around, round_)
                    out["runs"].append({"server": name, **got})
                    print(f"{name:8} {got['output_throughput']:7.1f} output tokens/s, first token {got['median_ttft_ms']:7.0f} ms, "
                          f"{got['median_tpot_ms']:6.1f} ms a token, {got['completed']} of {got['num_prompts']} completed", flush=True)
        rate = {n: statistics.median(r["output_throughput"] for r in out["runs"] if r["server"] == n) for n in ("headway", "vllm")}
        print(f"headway serves {rate['headway'] / rate['vllm']:.2f} times vLLM's output tokens/s, and is ready "
              f"{out['start_s']['vllm'] / out['start_s']['headway']:.0f} times sooner")
        return out
    finally:
        # Its worker processes are of its session: all of them end.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(other.pid, 15)
        with contextlib.suppress(subprocess.TimeoutExpired):
            other.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(other.pid, 9)


def generator(a, url: str, model: pathlib.Path, around: dict, seed: int) -> dict:
    """`vllm bench serve`, its result file."""
    result = servers.ROOT / "target" / "vllm-bench-serve.json"
    subprocess.run(
        [str(environment.PYTHON), "-c", GENERATOR, "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions",
         "--model", "model", "--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", str(a.prompt_len),
         "--random-output-len", str(a.output_len), "--num-prompts", str(2 * a.streams), "--max-concurrency", str(a.streams),
         "--ignore-eos", "--temperature", "0", "--seed", str(seed), "--disable-tqdm", "--save-result",
         "--result-dir", str(result.parent), "--result-filename", result.name],
        env=around, check=True, timeout=PEER_RUN_LIMIT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return {k: v for k, v in json.loads(result.read_text()).items() if isinstance(v, (int, float, str))}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m-instruct")
    p.add_argument("--only", default="overhead,first", help=f"of {', '.join(PARTS)} [default: %(default)s]")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--streams", type=int, default=16)
    p.add_argument("--prompt-len", type=int, default=64)
    p.add_argument("--output-len", type=int, default=128)
    p.add_argument("--peer-model", type=pathlib.Path, default=environment.HOME / "models" / "smollm2-bf16")
    p.add_argument("--peer-dtype", default="bfloat16", help="vLLM's --dtype [default: %(default)s, as the weights]")
    p.add_argument("--json", type=pathlib.Path, default=servers.ROOT / "target" / "load.json")
    a = p.parse_args()
    a.cpus = sorted(os.sched_getaffinity(0))
    if len(a.cpus) < 2:
        raise SystemExit("two processors are needed: one for the server, one for the client")
    parts = a.only.split(",")
    if wrong := [k for k in parts if k not in PARTS]:
        raise SystemExit(f"--only {wrong[0]}: one of {', '.join(PARTS)} is needed")
    out = {"cpu": environment.cpu_name(), "model": a.model}
    for name, part in (("overhead", overhead), ("first", first), ("peer", peer)):
        if name in parts:
            out[name] = part(a)
    a.json.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
