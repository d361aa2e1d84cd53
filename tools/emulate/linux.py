"""As much of Linux as a static test program asks for: files that are read, memory, threads, time.

Threads are run in turn, a quantum of instructions each, in the order in which they became ready. What a
program would learn of the machine it runs on (`/proc`, `/sys`) is not there.
"""

import collections
import ctypes
import errno
import os
import struct
import sys
import time

from machine import FAULT, HALTED, QUANTUM

PAGE = 4096
QUANTUM_LENGTH = 200_000
# What xsave writes, and below its end eight bytes of stack.
XSAVE_SIZE = 4096
CLONE_SETTLS, CLONE_PARENT_SETTID, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x80000, 0x100000, 0x200000, 0x1000000
XTILEDATA = 18


class Exit(Exception):
    pass


class Thread:
    def __init__(self, number, xsave):
        self.number, self.xsave = number, xsave
        self.context = None
        self.tiles = None
        self.clear_tid = 0
        self.waits_for = None  # (address, bits)
        self.deadline = None


class Linux:
    def __init__(self, machine, heap, top, cpus=1, log=False):
        self.m, self.cpus, self.log = machine, cpus, log
        self.heap_start = self.heap = heap
        self.heap_end = heap + (64 << 20)
        # Free ranges for mmap: {start: length}.
        self.free = {self.heap_end: top - self.heap_end}
        self.files = {0: 0, 1: 1, 2: 2}
        self.ready, self.waiting, self.numbers = collections.deque(), [], 1000
        self.thread = self._new_thread()
        self.unknown = set()

    # Threads.

    def _new_thread(self):
        self.numbers += 1
        return Thread(self.numbers, self.map(0, XSAVE_SIZE))

    def _stow(self, t):
        m = self.m
        registers = m.registers()
        t.tiles = bytes(m.tiles.config) + bytes(m.tiles.data)
        m.set(rdi=t.xsave, rax=-1, rdx=-1, rsp=t.xsave + XSAVE_SIZE)
        m.stub("save")
        t.context = (*registers, m.get("rsi"))

    def _resume(self, t):
        m = self.m
        m.set(rdi=t.xsave, rax=-1, rdx=-1)
        m.stub("restore")
        ctypes.memmove(m.tiles.config, t.tiles[:64], 64)
        ctypes.memmove(m.tiles.data, t.tiles[64:], 8192)
        m.set_registers(t.context)
        self.thread = t

    def _switch(self, to_end):
        """The next thread's turn; the running one goes to the end of the queue, or waits, or is over."""
        if to_end and not self.ready:
            self._wake_by_time()
            if not self.ready:
                return
        if self.thread is not None:
            self._stow(self.thread)
            (self.ready if to_end else self.waiting).append(self.thread)
        while not self.ready:
            deadlines = [t.deadline for t in self.waiting if t.deadline is not None]
            if not deadlines:
                raise Exit("all threads wait for one another")
            time.sleep(max(0.0, min(deadlines) - time.monotonic()))
            self._wake_by_time()
        self._resume(self.ready.popleft())

    def _wake_by_time(self):
        now = time.monotonic()
        for t in [t for t in self.waiting if t.deadline is not None and t.deadline <= now]:
            self._wake(t, -errno.ETIMEDOUT if t.waits_for else 0)

    def _wake(self, t, result):
        self.waiting.remove(t)
        registers, *rest = t.context
        t.context = ([result & (1 << 64) - 1] + registers[1:], *rest)
        t.waits_for = t.deadline = None
        self.ready.append(t)

    def run(self):
        """Runs the program to its end; returns its exit status."""
        m = self.m
        try:
            while True:
                others = self.ready or any(t.deadline is not None for t in self.waiting)
                m.report.quantum = QUANTUM_LENGTH if others else 0
                m.watch(max(m.default_watch, 1 if m.report.quantum else 0))
                why = m.run()
                if why == HALTED:
                    self._call()
                elif why == QUANTUM:
                    self._wake_by_time()
                    self._switch(to_end=True)
                elif why == FAULT:
                    at = m.pc
                    code = m.memory[at:at + 15].hex() if at < m.size else ""
                    raise Exit(f"{m.fault()} at {at:#x}: {code}")
                else:
                    raise Exit("the processor stopped for no reason")
        except Exit as e:
            if isinstance(e.args[0], int):
                return e.args[0]
            print(f"emulate: {e}", file=sys.stderr)
            return 139

    # System calls.

    def _call(self):
        m = self.m
        number = m.get("rax")
        arguments = [m.get(r) for r in ("rdi", "rsi", "rdx", "r10", "r8", "r9")]
        # As sysret does: rcx is where to go on, r11 the flags.
        m.pc = m.get("rcx")
        m.lib.cpu_set_eflags(0, m.get("r11") & 0xFFFFFFFF)
        name = CALLS.get(number)
        if name is None:
            if number not in self.unknown:
                self.unknown.add(number)
                if self.log:
                    print(f"emulate: no system call {number}", file=sys.stderr)
            result = -errno.ENOSYS
        else:
            try:
                result = getattr(self, name)(*arguments)
            except OSError as e:
                result = -e.errno
        if self.log and name:
            print(f"  {name}({', '.join(hex(a) for a in arguments)}) = {result}", file=sys.stderr)
        if result is not None:
            m.set(rax=result)

    def text(self, at):
        return bytes(self.m.memory[at:self.m.memory.find(b"\0", at)])

    def word(self, at):
        return struct.unpack("<I", self.m.memory[at:at + 4])[0]

    def put(self, at, form, *values):
        data = struct.pack(form, *values)
        self.m.memory[at:at + len(data)] = data

    def nothing(self, *_):
        return 0

    def exit_group(self, status, *_):
        raise Exit(status & 0xFF)

    def exit(self, status, *_):
        t, self.thread = self.thread, None
        if t.clear_tid:
            self.put(t.clear_tid, "<I", 0)
            self.wake(t.clear_tid, 1)
        if not self.ready and not self.waiting:
            raise Exit(status & 0xFF)
        self._switch(to_end=False)

    def abort(self, *arguments):
        raise Exit(f"signal {arguments[2] or arguments[1]}")

    # Memory.

    def brk(self, to, *_):
        if self.heap_start <= to <= self.heap_end:
            if to < self.heap:
                self.m.zero(to, self.heap - to)
            self.heap = to
        return self.heap

    def map(self, at, length, prot=3, flags=0x22, fd=-1, offset=0):
        length = (length + PAGE - 1) // PAGE * PAGE
        if flags & 0x10:  # MAP_FIXED
            self.unmap(at, length)
            start = next((s for s, n in self.free.items() if s <= at and at + length <= s + n), None)
        else:
            start = next((s for s, n in self.free.items() if n >= length), None)
            at = start
        if start is None:
            return -errno.ENOMEM
        n = self.free.pop(start)
        if at > start:
            self.free[start] = at - start
        if at + length < start + n:
            self.free[at + length] = start + n - at - length
        if not flags & 0x20:
            data = os.pread(self.files[fd], length, offset)
            self.m.memory[at:at + len(data)] = data
        return at

    def unmap(self, at, length, *_):
        length = (length + PAGE - 1) // PAGE * PAGE
        inside = [(s, n) for s, n in self.free.items() if s < at + length and at < s + n]
        if inside == [(at, length)]:
            return 0
        # Give the pages back to the host: they read as zero again.
        self.m.memory.madvise(4, at, length)
        for s, n in [(s, n) for s, n in self.free.items() if s <= at + length and at <= s + n]:
            del self.free[s]
            end = max(s + n, at + length)
            at = min(s, at)
            length = end - at
        self.free[at] = length
        return 0

    def remap(self, at, old, new, flags, *_):
        moved = self.map(0, new)
        if moved >= 0:
            n = min(old, new)
            ctypes.memmove(self.m.base + moved, self.m.base + at, n)
            self.unmap(at, old)
        return moved

    def advise(self, at, length, what, *_):
        if what == 4 and at % PAGE == 0:
            self.m.memory.madvise(4, at, (length + PAGE - 1) // PAGE * PAGE)
        return 0

    # Files: read only, but for the three standard ones.

    def openat(self, _, path, flags, *__):
        name = os.path.normpath(self.text(path).decode())
        random = name in ("/dev/random", "/dev/urandom")
        if flags & 3 or name.startswith(("/proc", "/sys", "/dev", "/etc")) and not random:
            return -errno.ENOENT
        fd = os.open(name, os.O_RDONLY)
        self.files[fd] = fd
        return fd

    def read(self, fd, at, n, *_):
        data = os.read(self.files[fd], n) if fd in self.files else b""
        self.m.memory[at:at + len(data)] = data
        return len(data)

    def write(self, fd, at, n, *_):
        if fd not in (1, 2):
            return -errno.EBADF
        return os.write(fd, self.m.memory[at:at + n])

    def writev(self, fd, at, count, *_):
        parts = [struct.unpack("<QQ", self.m.memory[at + 16 * i:at + 16 * i + 16]) for i in range(count)]
        return sum(self.write(fd, a, n) for a, n in parts)

    def close(self, fd, *_):
        if fd > 2 and self.files.pop(fd, None) is not None:
            os.close(fd)
        return 0

    def lseek(self, fd, offset, whence, *_):
        return os.lseek(self.files[fd], offset - (offset >> 63 << 64), whence)

    def _stat(self, s, at):
        self.m.zero(at, 144)
        self.put(at, "<QQQIII", s.st_dev, s.st_ino, s.st_nlink, s.st_mode, s.st_uid, s.st_gid)
        self.put(at + 48, "<QQQ", s.st_size, 4096, (s.st_size + 511) // 512)
        return 0

    def fstat(self, fd, at, *_):
        return self._stat(os.fstat(self.files[fd]), at)

    def fstatat(self, fd, path, at, flags, *_):
        name = self.text(path)
        return self._stat(os.stat(name) if name else os.fstat(self.files[fd]), at)

    def getcwd(self, at, n, *_):
        name = os.getcwdb() + b"\0"
        self.m.memory[at:at + len(name)] = name
        return len(name)

    def not_there(self, *_):
        return -errno.ENOENT

    def poll(self, at, count, *_):
        for i in range(count):
            wanted, = struct.unpack("<H", self.m.memory[at + 8 * i + 4:at + 8 * i + 6])
            self.put(at + 8 * i + 6, "<H", wanted & 1)
        return count

    # Threads and time.

    def clone(self, asked, stack, parent_tid, child_tid, tls, *_):
        if not asked & 0x100:  # CLONE_VM
            return -errno.ENOSYS
        t = self._new_thread()
        self._stow(self.thread)
        registers, pc, fs, flags = self.thread.context
        ctypes.memmove(self.m.base + t.xsave, self.m.base + self.thread.xsave, XSAVE_SIZE)
        self.m.set_registers(self.thread.context)
        child = list(registers)
        child[0], child[4] = 0, stack
        t.context = (child, pc, tls if asked & CLONE_SETTLS else fs, flags)
        t.tiles = bytes(64 + 8192)
        if asked & CLONE_PARENT_SETTID:
            self.put(parent_tid, "<I", t.number)
        if asked & CLONE_CHILD_SETTID:
            self.put(child_tid, "<I", t.number)
        if asked & CLONE_CHILD_CLEARTID:
            t.clear_tid = child_tid
        self.ready.append(t)
        return t.number

    def futex(self, at, operation, value, timeout, _, bits):
        what = operation & 0x7F
        if what in (0, 9):
            if self.word(at) != value & 0xFFFFFFFF:
                return -errno.EAGAIN
            t = self.thread
            t.waits_for = (at, bits if what == 9 else 0xFFFFFFFF)
            if timeout:
                seconds, nanos = struct.unpack("<qq", self.m.memory[timeout:timeout + 16])
                left = seconds + nanos * 1e-9
                if what == 9:  # a point in time
                    left -= time.time() if operation & 256 else time.monotonic()
                t.deadline = time.monotonic() + left
            self.m.set(rax=0)
            self._switch(to_end=False)
            return None
        if what in (1, 10):
            return self.wake(at, value, bits if what == 10 else 0xFFFFFFFF)
        return -errno.ENOSYS

    def wake(self, at, count, bits=0xFFFFFFFF):
        woken = [t for t in self.waiting if t.waits_for and t.waits_for[0] == at and t.waits_for[1] & bits][:count]
        for t in woken:
            self._wake(t, 0)
        return len(woken)

    def sched_yield(self, *_):
        self.m.set(rax=0)
        self._switch(to_end=True)
        return None

    def nanosleep(self, at, *_):
        seconds, nanos = struct.unpack("<qq", self.m.memory[at:at + 16])
        self.thread.deadline = time.monotonic() + seconds + nanos * 1e-9
        self.m.set(rax=0)
        self._switch(to_end=False)
        return None

    def clock_nanosleep(self, clock, flags, at, *_):
        return self.nanosleep(at) if not flags else -errno.ENOSYS

    def clock_gettime(self, clock, at, *_):
        self.put(at, "<qq", *divmod(time.clock_gettime_ns(clock & 7), 10**9))
        return 0

    def set_tid_address(self, at, *_):
        self.thread.clear_tid = at
        return self.thread.number

    def gettid(self, *_):
        return self.thread.number if self.thread else 0

    def sched_getaffinity(self, _, n, at, *__):
        self.m.zero(at, n)
        self.put(at, "<Q", (1 << self.cpus) - 1)
        return 8

    def getcpu(self, cpu, node, *_):
        for at in (cpu, node):
            if at:
                self.put(at, "<I", 0)
        return 0

    def arch_prctl(self, code, value, *_):
        if code == 0x1002:  # ARCH_SET_FS
            self.m.set_fs(value)
            return 0
        if code == 0x1023 and value == XTILEDATA:  # ARCH_REQ_XCOMP_PERM
            self.m.tiles.permitted = 1
            return 0
        return -errno.EINVAL

    def prlimit(self, _, what, new, old, *__):
        if old:
            self.put(old, "<QQ", 8 << 20, 8 << 20)
        return 0

    def getrandom(self, at, n, *_):
        self.m.memory[at:at + n] = bytes((i * 131 + 7) & 255 for i in range(n))
        return n


CALLS = {
    0: "read", 1: "write", 3: "close", 5: "fstat", 7: "poll", 8: "lseek", 9: "map", 10: "nothing", 11: "unmap",
    12: "brk", 13: "nothing", 14: "nothing", 16: "not_there", 20: "writev", 21: "not_there", 24: "sched_yield",
    25: "remap", 28: "advise", 35: "nanosleep", 39: "gettid", 56: "clone", 60: "exit", 62: "abort", 72: "nothing",
    79: "getcwd", 89: "not_there", 131: "nothing", 157: "nothing", 158: "arch_prctl", 186: "gettid",
    202: "futex", 203: "nothing", 204: "sched_getaffinity", 218: "set_tid_address", 228: "clock_gettime",
    230: "clock_nanosleep", 231: "exit_group", 234: "abort", 257: "openat", 262: "fstatat", 267: "not_there",
    273: "nothing", 302: "prlimit", 309: "getcpu", 318: "getrandom", 334: "nothing",
}
