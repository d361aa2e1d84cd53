"""FlashAttention-3 and FlashMLA called by PyTorch beside headway: the same two files, the same batches, one run.

    python3 bench/peers/cuda_libraries.py --headway target/release/headway --kernels FOLDER [--filter REGEX] [--json FILE]

Needs a Hopper GPU, PyTorch for CUDA 13, and the folder that `headway kernels fetch flash-attn` wrote. headway runs as `bench
attention --from-stdin` and measures a case when it is named; PyTorch measures the same case right after it, so that both have
the card as warm as the other. Method, batches, rotation and data are those of the `semantics` in `cases-cuda.json`: pages of 16
scattered over 40 GiB, tables that are five times the second-level cache, numbers uniform in (-2, 2), medians of nine. A schedule
is made once a table, outside of what is timed. What differs on purpose is a column: calls replayed from a graph or queued one by
one (headway's are replayed, or queued with --queued: as it does in an engine's prefills), and where keys and values of a page lie (HND, NHD: key beside value as in headway's pages; planes: keys apart from values)."""

import argparse
import ctypes
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
CASES = ROOT / "crates/headway/src/cli/bench/cases-cuda.json"
PAGE, POOL, COLD = 16, 40 << 30, 5
REPLAY, WARM_UP, MOST_CALLS, SAMPLES = 2e-3, 10e-3, 256, 9
MLA_PAGE, MLA_ROW, MLA_RANK, MLA_CONTEXT = 64, 576, 512, 4096


def load(folder, name):
    path = str(pathlib.Path(folder) / name)
    try:
        torch.ops.load_library(path)
    except OSError:
        # A symbol that is never called may be missing.
        ctypes.CDLL(path, mode=os.RTLD_LAZY)


def seconds(body):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    body()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def measure(call, rotation, captured):
    """Median seconds of a call."""
    call(0)
    torch.cuda.synchronize()
    wanted = min(max(math.ceil(REPLAY / max(seconds(lambda: call(1)), 1e-9)), 1), MOST_CALLS)
    calls = -(-wanted // rotation) * rotation

    def queue():
        for i in range(calls):
            call(i)

    replay = queue
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            queue()
        replay = graph.replay
    warm = 0.0
    while warm < WARM_UP:
        warm += max(seconds(replay), 1e-6)
    return statistics.median(seconds(replay) for _ in range(SAMPLES)) / calls


def rotation_of(bytes_of_call, most):
    cold = COLD * torch.cuda.get_device_properties(0).L2_cache_size
    return min(max(-(-cold // bytes_of_call), 1), max(most, 1))


def uniform(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").uniform_(-2, 2)


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class FlashAttention:
    """Softmax attention over pages."""

    def __init__(self, folder):
        load(folder, "_vllm_fa3_C.abi3.so")
        self.ops = torch.ops._vllm_fa3_C
        self.pool = uniform(POOL // 2)

    def pages(self, layout, kv_heads, size):
        """Keys and values, each `[pages, tokens, heads, size]`."""
        n = POOL // (PAGE * kv_heads * 2 * size * 2)
        pool = self.pool[: n * PAGE * kv_heads * 2 * size]
        if layout == "planes":
            return tuple(pool.view(2, n, PAGE, kv_heads, size))
        if layout == "NHD":
            pool = pool.view(n, PAGE, kv_heads, 2 * size)
        else:
            pool = pool.view(n, kv_heads, PAGE, 2 * size).transpose(1, 2)
        return pool[..., :size], pool[..., size:]

    def measure(self, case, heads, layout, captured):
        h, kv, size = (heads[n] for n in ("num_heads", "num_kv_heads", "head_size"))
        new, lens = zip(*case["seqs"])
        k, v = self.pages(layout, kv, size)
        needed = [-(-n // PAGE) for n in lens]
        stride = max(needed)
        tables = rotation_of(sum(lens) * kv * size * 4, k.shape[0] // sum(needed))
        order = torch.randperm(k.shape[0], generator=torch.Generator().manual_seed(0)).to(torch.int32)
        starts = ints([sum(new[:i]) for i in range(len(new) + 1)])
        used, rows = ints(lens), sum(new)
        page_tables, schedules = [], []
        most_q, most_k = max(new), max(lens)
        for t in range(tables):
            own = order[t * sum(needed) : (t + 1) * sum(needed)]
            table = torch.zeros(len(lens), stride, dtype=torch.int32)
            for row, part in zip(table, own.split(needed)):
                row[: len(part)] = part
            page_tables.append(table.cuda())
            schedules.append(
                self.ops.get_scheduler_metadata(
                    len(lens), most_q, most_k, h, kv, size, size, torch.bfloat16, used, starts, None, None, None, None,
                    PAGE, 0, True, -1, 0, False, 0, None, 0,
                )
            )
        q, out = uniform(rows, h, size), torch.empty(rows, h, size, dtype=torch.bfloat16, device="cuda")

        def call(i):
            i %= tables
            self.ops.fwd(
                q, k, v, None, None, None, out, starts, None, None, None, used, most_q, most_k, page_tables[i], None, None,
                None, None, None, None, None, None, size**-0.5, True, -1, 0, 0.0, True, schedules[i], 0, None, 0, None, 1, 0,
                None,
            )

        return measure(call, tables, captured)


class FlashMla:
    """Decodes of latent attention."""

    def __init__(self, folder):
        load(folder, "_flashmla_C.abi3.so")
        self.ops = torch.ops._flashmla_C

    def measure(self, heads, batch):
        blocks = batch * MLA_CONTEXT // MLA_PAGE
        tables = rotation_of(blocks * MLA_PAGE * MLA_ROW * 2, 1 << 20)
        cache = uniform(blocks * tables, MLA_PAGE, 1, MLA_ROW)
        order = torch.randperm(blocks * tables).to(torch.int32).cuda().view(tables, batch, -1)
        lens, q = ints([MLA_CONTEXT] * batch), uniform(batch, 1, heads, MLA_ROW)
        out = torch.empty(batch, 1, heads, MLA_RANK, dtype=torch.bfloat16, device="cuda")

        def run(i, *plan):
            return self.ops.dense_decode_fwd(q, cache, MLA_RANK, lens, order[i % tables], 0.05, False, *plan, out)

        plan = run(0, None, None)[2:]
        return measure(lambda i: run(i, *plan), tables, True)


class Headway:
    """`headway bench attention --from-stdin`."""

    def __init__(self, program, folder, queued):
        command = [program, "bench", "attention", "--device", "cuda:0", "--backend", "FLASH_ATTN", "--from-stdin", "--json"]
        command += [] if queued else ["--replay-all"]
        environment = os.environ | {"HEADWAY_KERNELS_DIR": str(folder)}
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def measure(self, name):
        self.child.stdin.write(name + "\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"headway ended with {self.child.wait()}")
        return json.loads(line)["median_ms"] * 1e-3

    def end(self):
        self.child.stdin.close()
        self.child.wait()


# How PyTorch calls: name, layout, whether replayed from a graph.
WAYS = [("graph", "HND", True), ("queued", "HND", False), ("graph NHD", "NHD", True), ("graph planes", "planes", True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headway", required=True)
    parser.add_argument("--kernels", required=True)
    parser.add_argument("--filter", default="", help="over `case heads`; `mla` for FlashMLA's rows")
    parser.add_argument("--ways", default=",".join(w[0] for w in WAYS), help="of PyTorch's calls, separated by commas")
    parser.add_argument("--queued", action="store_true", help="headway queues prefills and mixed batches")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    file = json.loads(CASES.read_text())
    wanted = re.compile(arguments.filter).search
    ways = [w for w in WAYS if w[0] in arguments.ways.split(",")]
    heads = [h for h in file["heads"] if "latent" not in h]
    cases = [c for c in file["cases"] if not c.get("latent") and c["kind"] != "write"]
    runs = [(c, h) for h in heads for c in cases if wanted(f"{c['id']} {h['id']}")]
    lines = []

    def say(line):
        lines.append(line)
        if arguments.json:
            pathlib.Path(arguments.json).write_text("".join(json.dumps(x) + "\n" for x in lines))

    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; microseconds", flush=True)
    if runs:
        headway, library = Headway(arguments.headway, arguments.kernels, arguments.queued), FlashAttention(arguments.kernels)
        print(f"{'case':<26} {'heads':>9} {'headway':>9}" + "".join(f" {w[0]:>13}" for w in ways) + f" {'first/headway':>14}")
        for case, h in runs:
            ours = headway.measure(f"{case['id']} {h['id']} bf16")
            theirs = [library.measure(case, h, layout, captured) for _, layout, captured in ways]
            again = headway.measure(f"{case['id']} {h['id']} bf16")
            ours = min(ours, again)
            print(
                f"{case['id']:<26} {h['id']:>9} {ours * 1e6:9.1f}" + "".join(f" {t * 1e6:13.1f}" for t in theirs)
                + f" {theirs[0] / ours:14.3f}",
                flush=True,
            )
            say({"case": case["id"], "heads": h["id"], "headway_us": ours * 1e6, "again_us": again * 1e6}
                | {w[0]: t * 1e6 for w, t in zip(ways, theirs)})
        headway.end()
        del library
        torch.cuda.empty_cache()
    mla = [(h, b) for h in (16, 128) for b in (1, 8, 32, 64, 128) if wanted(f"mla {h} {b}")]
    if mla:
        library = FlashMla(arguments.kernels)
        print("FlashMLA's decodes at 4096 (headway's: cargo run --release -p headway-cuda --example cuda_mla_speed)")
        for h, b in mla:
            took = library.measure(h, b)
            print(f"heads {h:3} batch {b:3} {took * 1e6:9.1f}", flush=True)
            say({"case": "mla", "heads": h, "batch": b, "graph": took * 1e6})
    if not lines:
        sys.exit(f"--filter {arguments.filter}: nothing matches")


if __name__ == "__main__":
    main()
