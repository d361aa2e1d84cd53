"""The emulated processor and its memory: bochscpu's C interface, driven through ctypes.

Guest memory is one block of host memory, mapped one to one: a virtual address is an offset into
`Machine.memory`. Everything runs in ring 0, where `hlt` stops the processor: the entry of system calls is
one. Pages are readable, writable and executable; only the first 2 MiB are not there, so that a null
pointer faults.
"""

import ctypes
import importlib.util
import mmap
import os
import struct
import subprocess
import tempfile
from ctypes import c_int, c_uint16, c_uint32, c_uint64, c_void_p

HERE = os.path.dirname(os.path.abspath(__file__))
REGISTERS = "rax rcx rdx rbx rsp rbp rsi rdi r8 r9 r10 r11 r12 r13 r14 r15".split()
FS = 4
HALTED, FAULT, QUANTUM = 1, 2, 3
EXCEPTIONS = {0: "#DE", 1: "#DB", 3: "#BP", 6: "#UD", 7: "#NM", 12: "#SS", 13: "#GP", 14: "#PF", 16: "#MF",
              17: "#AC", 19: "#XM"}
# Number in the emulator's list, and what CPUID must then say of family and model.
MODELS = {"sapphire_rapids": (30, 0x806F0)}
# x87, SSE, AVX, the three parts of AVX-512; tile configuration and tile data.
XCR0, XCR0_AMX = 0xE7, 0x60000

# Code that the processor itself runs: (place in the last page, bytes).
STUBS = {
    "syscall": (0x00, "f4"),  # hlt
    "xsetbv": (0x10, "0f01d1 f4"),  # xsetbv; hlt
    "cpuid": (0x18, "0fa2 f4"),  # cpuid; hlt
    "save": (0x20, "9c5e 480fae27 f4"),  # pushfq; pop rsi; xsave64 [rdi]; hlt
    "restore": (0x30, "480fae2f f4"),  # xrstor64 [rdi]; hlt
}


class Report(ctypes.Structure):
    _fields_ = [("why", c_uint32), ("vector", c_uint32), ("error", c_uint32), ("instructions", c_uint64),
                ("quantum", c_uint64), ("opcodes", c_uint64 * 8192), ("sample", (ctypes.c_uint8 * 16) * 8192)]


class Tiles(ctypes.Structure):
    _fields_ = [("config", ctypes.c_uint8 * 64), ("data", ctypes.c_uint8 * 8192), ("permitted", c_uint32),
                ("executed", c_uint64), ("products", c_uint64)]


def load_library():
    """The helper, compiled, and the wheel's library: its C functions, not its Python module."""
    out = os.path.join(tempfile.mkdtemp(prefix="emulate-"), "helper.so")
    source = os.path.join(HERE, "helper.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-w", "-o", out, source], check=True)
    helper = ctypes.CDLL(out, ctypes.RTLD_GLOBAL)
    spec = importlib.util.find_spec("bochscpu")
    if spec is None:
        raise SystemExit("emulate: no module bochscpu; pip install bochscpu-python")
    folder = os.path.dirname(spec.origin)
    shared = next(f for f in os.listdir(folder) if f.startswith("_bochscpu") and f.endswith(".so"))
    return helper, ctypes.CDLL(os.path.join(folder, shared))


class Machine:
    def __init__(self, model="sapphire_rapids", size=2 << 30, amx=True, watch=0):
        self.helper, self.lib = load_library()
        lib = self.lib
        address = lambda f: ctypes.cast(f, c_void_p)
        self.helper.choose.argtypes = [c_void_p, c_void_p, c_uint32]
        self.helper.choose(address(lib.sim_get_param_enum), address(lib.sim_new_param_enum), MODELS[model][0])
        leaf_7 = address(lib._ZNK17sapphire_rapids_t20get_std_cpuid_leaf_7EjP16cpuid_function_t)
        self.helper.announce.argtypes = [c_void_p, c_int]
        self.helper.announce(leaf_7, amx)
        lib.bochscpu_cpu_new.restype = c_void_p
        lib.bochscpu_cpu_run.argtypes = [c_void_p, c_void_p]
        lib.cpu_get_reg64.restype = lib.cpu_get_pc.restype = lib.cpu_get_cr2.restype = c_uint64
        lib.cpu_set_reg64.argtypes = [c_uint32, c_uint32, c_uint64]
        lib.cpu_set_pc.argtypes = [c_uint32, c_uint64]
        lib.cpu_set_seg.argtypes = [c_uint32, c_uint32, c_uint32, c_uint16, c_uint64, c_uint32, c_uint16]
        lib.cpu_set_cr3.argtypes = lib.cpu_set_lstar.argtypes = lib.cpu_set_star.argtypes = [c_uint32, c_uint64]
        self.cpu = lib.bochscpu_cpu_new(0)
        self.size, self.default_watch = size, watch
        # Private, so that pages which are given back read as zero again.
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.helper.prepare.argtypes = [c_void_p] * 8 + [c_uint64]
        self.helper.prepare(self.cpu, address(lib.bochscpu_cpu_stop), address(lib.bochscpu_instr_bx_opcode),
                            address(lib.bochscpu_cpu_rip), address(lib.bochscpu_cpu_set_rip),
                            address(lib.cpu_get_reg64), address(lib.bochscpu_mem_page_insert), self.base, size)
        self.report = Report.in_dll(self.helper, "report")
        self.tiles = Tiles.in_dll(self.helper, "tiles")
        self.chain = ctypes.addressof((c_void_p * 2).in_dll(self.helper, "chain"))
        self.fs_base = 0
        self._long_mode()
        self._check(MODELS[model][1], amx)

    def _long_mode(self):
        lib, put = self.lib, self.memory
        # Page tables in the first megabyte: pages of 2 MiB, present, writable, for everyone.
        put[0x1000:0x1008] = struct.pack("<Q", 0x2007)
        for gib in range((self.size + (1 << 30) - 1) >> 30):
            directory = 0x10000 + gib * 0x1000
            put[0x2000 + gib * 8:0x2008 + gib * 8] = struct.pack("<Q", directory | 7)
            pages = [(gib << 30 | i << 21) | 0x87 for i in range(512)]
            pages = [p if p >> 21 and (p & ~0xfff) < self.size else 0 for p in pages]
            put[directory:directory + 4096] = struct.pack("<512Q", *pages)
        # The stubs lie in the last page.
        self.stubs = {}
        for name, (at, code) in STUBS.items():
            at += self.size - 4096
            code = bytes.fromhex(code)
            put[at:at + len(code)] = code
            self.stubs[name] = at
        lib.cpu_set_cr3(0, 0x1000)
        lib.cpu_set_cr4(0, 1 << 5 | 1 << 9 | 1 << 10 | 1 << 16 | 1 << 18)
        lib.cpu_set_efer(0, 0x501)
        lib.cpu_set_cr0(0, 0x80010033)
        lib.cpu_set_seg(0, 1, 1, 0x10, 0, 0xFFFFFFFF, 0xA09B)
        for segment in (0, 2, 3, FS, 5):
            lib.cpu_set_seg(0, segment, 1, 0x18, 0, 0xFFFFFFFF, 0xC093)
        lib.cpu_set_star(0, 0x10 << 32)
        lib.cpu_set_lstar(0, self.stubs["syscall"])
        lib.cpu_set_fmask(0, 0)
        lib.cpu_set_eflags(0, 2)
        lib.cpu_set_mxcsr(0, 0x1F80)
        lib.cpu_set_mode(0)
        self.set(rcx=0, rax=XCR0, rdx=0)
        self.stub("xsetbv")
        self.watch(self.default_watch)

    def _check(self, signature, amx):
        """The processor is the one that was asked for; AMX is put into what it says of itself."""
        self.set(rax=1)
        self.stub("cpuid")
        found = self.get("rax")
        if found & 0xFFFF0 != signature:
            raise SystemExit(f"emulate: the emulator made processor {found:#x}, not {signature:#x}")
        if amx:
            self.lib.cpu_set_xcr0(0, XCR0 | XCR0_AMX)

    def watch(self, level):
        self.helper.watch(level)

    def run(self):
        """Runs until the processor stops; says why: HALTED, FAULT or QUANTUM."""
        self.report.why = 0
        self.lib.bochscpu_cpu_run(self.cpu, self.chain)
        return self.report.why

    def stub(self, name):
        """Runs one of the stubs, with registers as they are."""
        self.pc = self.stubs[name]
        if self.run() != HALTED:
            raise SystemExit(f"emulate: '{name}' ended with {self.fault()}")

    def fault(self):
        r = self.report
        cr2 = f" at {self.lib.cpu_get_cr2(0):#x}" if r.vector == 14 else ""
        return f"{EXCEPTIONS.get(r.vector, r.vector)}({r.error:#x}){cr2}"

    def get(self, name):
        return self.lib.cpu_get_reg64(0, REGISTERS.index(name))

    def set(self, **values):
        for name, value in values.items():
            self.lib.cpu_set_reg64(0, REGISTERS.index(name), value & (1 << 64) - 1)

    @property
    def pc(self):
        return self.lib.cpu_get_pc(0)

    @pc.setter
    def pc(self, value):
        self.lib.cpu_set_pc(0, value)

    def set_fs(self, base):
        self.fs_base = base
        self.lib.cpu_set_seg(0, FS, 1, 0x18, base, 0xFFFFFFFF, 0xC093)

    def registers(self):
        """The general registers, the program counter and fs. Flags are computed lazily: `save` leaves them in rsi."""
        lib = self.lib
        return [lib.cpu_get_reg64(0, i) for i in range(16)], lib.cpu_get_pc(0), self.fs_base

    def set_registers(self, context):
        registers, pc, fs, flags = context
        for i, value in enumerate(registers):
            self.lib.cpu_set_reg64(0, i, value)
        self.lib.cpu_set_eflags(0, flags)
        self.set_fs(fs)
        self.pc = pc

    def zero(self, at, length):
        ctypes.memset(self.base + at, 0, length)
