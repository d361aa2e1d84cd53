#!/usr/bin/env python3
"""Runs a static Linux program on an emulated processor with AVX-512, AVX512-BF16 and AMX. See README.md."""

import argparse
import os
import struct
import sys
import time

from linux import PAGE, Linux
from machine import MODELS, Machine

PIE_BASE = 0x400000
STACK = 64 << 20


def load(machine, path):
    """Copies the program's segments into memory; returns entry, program headers (address, size, count), end."""
    image = open(path, "rb").read()
    if image[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", image, 18)[0] != 62:
        raise SystemExit(f"emulate: {path} is no program for x86-64")
    kind, = struct.unpack_from("<H", image, 16)
    entry, at = struct.unpack_from("<QQ", image, 24)
    size, count = struct.unpack_from("<HH", image, 54)
    base = PIE_BASE if kind == 3 else 0
    headers, end = 0, 0
    for i in range(count):
        what, _, offset, address, _, in_file, in_memory, _ = struct.unpack_from("<IIQQQQQQ", image, at + i * size)
        if what == 3:
            raise SystemExit(f"emulate: {path} is linked dynamically; build it with -C target-feature=+crt-static")
        if what != 1:
            continue
        address += base
        machine.memory[address:address + in_file] = image[offset:offset + in_file]
        end = max(end, address + in_memory)
        if offset <= at < offset + in_file:
            headers = address + at - offset
    return base + entry, (headers, size, count), (end + PAGE - 1) // PAGE * PAGE


def stack(machine, top, arguments, environment, entry, headers):
    """Arguments, environment and auxiliary vector, as the kernel leaves them; returns the stack pointer."""
    at = top

    def put(data):
        nonlocal at
        at -= len(data)
        machine.memory[at:at + len(data)] = data
        return at

    strings = [put(s.encode() + b"\0") for s in arguments]
    variables = [put(f"{k}={v}".encode() + b"\0") for k, v in environment.items()]
    random = put(bytes(range(16)))
    aux = [(3, headers[0]), (4, headers[1]), (5, headers[2]), (6, PAGE), (9, entry), (16, 0xBFEBFBFF), (17, 100),
           (23, 0), (25, random), (26, 2), (31, strings[0]), (51, 16384), (0, 0)]
    words = [len(strings), *strings, 0, *variables, 0, *(w for pair in aux for w in pair)]
    at = (at - 8 * len(words)) & ~63
    machine.memory[at:at + 8 * len(words)] = struct.pack(f"<{len(words)}Q", *words)
    return at


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--cpu", choices=MODELS, default="sapphire_rapids")
    p.add_argument("--no-amx", action="store_true", help="a processor without AMX")
    p.add_argument("--cpus", type=int, default=1, help="processors that the program sees (default 1)")
    p.add_argument("--memory", type=int, default=2048, metavar="MIB")
    p.add_argument("--count", action="store_true", help="print instructions, by kind")
    p.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    p.add_argument("--log", action="store_true", help="print system calls")
    p.add_argument("program")
    p.add_argument("arguments", nargs=argparse.REMAINDER)
    a = p.parse_args()

    m = Machine(a.cpu, a.memory << 20, amx=not a.no_amx, watch=2 if a.count else 0)
    entry, headers, end = load(m, a.program)
    environment = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1", "RUST_BACKTRACE": "0"}
    environment |= dict(e.split("=", 1) for e in a.env)
    top = m.size - 2 * PAGE
    linux = Linux(m, end, m.size - STACK, a.cpus, a.log)
    pointer = stack(m, top, [a.program, *a.arguments], environment, entry, headers)
    m.set(**{r: 0 for r in "rax rbx rcx rdx rsi rdi rbp r8 r9 r10 r11".split()}, rsp=pointer)
    m.pc = entry
    began = time.monotonic()
    sys.stdout.flush()
    status = linux.run()
    seconds = time.monotonic() - began
    print(f"emulate: exit status {status} after {seconds:.1f} s; {m.tiles.executed} tile instructions, "
          f"{m.tiles.products} products in tiles", file=sys.stderr)
    if a.count:
        kinds = sorted(((n, i) for i, n in enumerate(m.report.opcodes) if n), reverse=True)
        print(f"emulate: {m.report.instructions} instructions", file=sys.stderr)
        for n, i in kinds[:40]:
            print(f"  {n:>12}  kind {i:>4}, such as {bytes(m.report.sample[i])[:11].hex()}", file=sys.stderr)
    os._exit(status)


if __name__ == "__main__":
    main()
