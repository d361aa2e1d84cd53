#!/usr/bin/env python3
"""Runs the tests of static test binaries one by one under emulate.py, each with a limit of seconds.

A test that is over its limit is reported as such: it has not passed.
"""

import argparse
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--limit", type=int, default=600, metavar="SECONDS")
    p.add_argument("--skip", action="append", default=[], metavar="PART", help="leave out tests whose name has PART")
    p.add_argument("--only", action="append", default=[], metavar="PART")
    p.add_argument("--no-amx", action="store_true")
    p.add_argument("binaries", nargs="+")
    a = p.parse_args()
    counts = dict.fromkeys(["passed", "failed", "out of time", "left out"], 0)
    for binary in a.binaries:
        binary = os.path.abspath(binary)
        listed = subprocess.run([binary, "--list"], capture_output=True, text=True, check=True).stdout
        for test in [line[: -len(": test")] for line in listed.splitlines() if line.endswith(": test")]:
            if any(s in test for s in a.skip) or a.only and not any(s in test for s in a.only):
                counts["left out"] += 1
                continue
            command = [sys.executable, os.path.join(HERE, "emulate.py"), *(["--no-amx"] if a.no_amx else []),
                       binary, "--test-threads=1", "--exact", test]
            began = time.monotonic()
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=a.limit)
                result = "passed" if done.returncode == 0 and "1 passed" in done.stdout else "failed"
            except subprocess.TimeoutExpired:
                result = "out of time"
            counts[result] += 1
            print(f"{result:>12} {time.monotonic() - began:7.1f} s  {test}", flush=True)
            if result == "failed":
                print(done.stdout[-3000:] + done.stderr[-3000:], flush=True)
    print(", ".join(f"{n} {what}" for what, n in counts.items()))
    return 1 if counts["failed"] or counts["out of time"] else 0


if __name__ == "__main__":
    sys.exit(main())
