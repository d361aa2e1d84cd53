"""`run.py --self-test`: tables and plot of made-up numbers. No peers, only the standard library."""

import os
import pathlib
import sys
import tempfile
import xml.etree.ElementTree as ET

import attention
import cases
import engine
import environment
import link
import report


def made_up():
    """headway twice as quick as torch and 1.25 times as quick as vllm in every case, at half the ceiling."""
    file, lines = cases.load(environment.CASES), []
    for heads in file["heads"]:
        for dtype in ("bf16", "f32"):
            for case in file["cases"]:
                amount, _ = cases.work(case, heads, dtype)
                ms = amount / 20e6
                sample = lambda t: [{"ms": t * x, "ceiling": 40.0, "block": 16, "isa": "avx2"} for x in (0.9, 1.0, 1.2)]
                found = {"headway": sample(ms), "torch-sdpa-gqa": sample(2 * ms), "vllm-vec-32": sample(1.25 * ms)}
                lines += attention.summarise(case, heads, dtype, 2, found, 0.1)
    figures = lambda v: {"prefill": v, "decode": v / 4, "peak_mib": 1000 / v, "others_cpu": 0.1}
    tokens = {"headway": [1, 2, 3], "llama.cpp": [1, 2, 9], "vllm": [1, 2, 3]}
    rounds = {
        p: [figures(v), figures(v * 1.1), figures(v * 0.9)]
        for p, v in (("headway", 400.0), ("llama.cpp", 100.0), ("vllm", 200.0))
    }
    engines = [engine.line("smollm2", "bf16", p, r, tokens) for p, r in rounds.items()]
    fixed = {
        "quick": False,
        "threads": 2,
        "cpu": "a <CPU> & more",
        "level": "avx2",
        "kernel": "1",
        "date": "2000-01-01",
        "minutes": 1.0,
    }
    builders = [
        {"requests": 32, "groups": 5, "peer": p, "median_us": us, "rounds_us": [us, us]}
        for p, us in (("headway", 2.0), ("vllm", 90.0))
    ]
    return {"attention": lines, "metadata": builders, "engine": engines, "notes": {"vllm": "not here"}, "versions": {"torch": "1"}, **fixed}


def check(what, holds):
    if not holds:
        raise SystemExit(f"self-test: {what}")


def children(folder):
    """A child that answers, and one that doesn't."""
    talk = "import sys\nfor line in sys.stdin:\n    if 'answer' in line: print('{\"got\": 1}', flush=True)"
    cpus = sorted(os.sched_getaffinity(0))[:1]
    child = link.Link("child", [sys.executable, "-c", talk], dict(os.environ), cpus, folder / "log")
    check("a child answers", child.ask("answer", 20) == {"got": 1})
    check("its memory is seen", child.peak_mib() > 1)
    try:
        child.ask("nothing", 0.2)
        check("a silent child is an error", False)
    except link.Died as e:
        check("the error says so", "no answer within 0.2 s" in str(e))
    check("a silent child is ended", child.process.poll() is not None)


def run():
    chunk = next(c for c in cases.load(environment.CASES)["cases"] if c["id"] == "chunk_512_over_4096")
    heads = {"num_heads": 4, "num_kv_heads": 1, "head_size": 256}
    check(
        "operations of a prefill behind 4096 tokens",
        cases.operations(chunk, heads) == 4 * 256 * 4 * (512 * 4096 + 512 * 513 // 2),
    )
    check("bytes of a cache in float32", cases.cache_bytes(chunk, heads, "f32") == 4608 * 256 * 2 * 4)
    check("sequences grouped", cases.groups({"seqs": [[1, 8], [1, 8], [4, 4]]}) == [[1, 8, 2], [4, 4, 1]])
    check("a CPU with AVX2 has a vLLM library", environment.level({"avx2", "fma", "f16c"}) == "avx2")
    check("an old CPU has none", environment.vllm_library("/nowhere", set())[0] is None)
    check("geometric mean", abs(report.geometric_mean([1, 4]) - 2) < 1e-12)
    data = made_up()
    ratios = [report.ratio(c) for group in report.by_case(data["attention"]).values() for c in group.values()]
    check("ratios to the best peer", len(ratios) == 126 and all(abs(r - 1.25) < 1e-9 for r in ratios))
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        children(out)
        report.write(data, out)
        table = (out / "table.md").read_text()
        for row in (
            "| decode, bf16 | 36 | 1.25 | 1.25 | 1.25 | 0.95 | yes |",
            "| mixed, bf16 | 3 | 1.25 | 1.30 | 1.25 |  | no |",
            "| 5 | 32 | 2 (2-2) | 10 | 90 (90-90) | 45 |",
            "| 2.00 | 1.2 |",
            "llama.cpp 2 of 16, vllm 3 of 16",
        ):
            check(f"the table has {row!r}", row in table)
        widths = [len(line.split("|")) for line in table.splitlines() if line.startswith("|")]
        check("each row is as wide as its table", all(w >= 8 for w in widths))
        picture = ET.parse(out / "share.svg").getroot()
        dots = [c for c in picture.iter("{http://www.w3.org/2000/svg}circle") if list(c)]
        check("the plot has a dot a case and peer", len(dots) == 126 * 3)
    print("bench/peers: self-test passed")
    return 0
