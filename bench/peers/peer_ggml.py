"""ggml's flash attention (llama.cpp), through the C functions that the wheel's library exports.

Keys and values lie as llama.cpp keeps them: token after token, all heads of a token together, no pages.
Queries and outputs are float32. The write is a part of llama.cpp's graph that ggml has no call of its own for."""

import ctypes
import math
import sysconfig
from ctypes import POINTER, Structure, c_bool, c_char, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p

import torch

import cases
import environment
from reference import batch

NAME = "ggml"
MOST_TABLES = 4096

# ggml's numbers of its types.
F32, F16, BF16 = 0, 1, 30
KINDS = {"bf16": {"ggml-f16": F16, "ggml-bf16": BF16}, "f16": {"ggml-f16": F16}, "f32": {"ggml-f32": F32}}
TORCH = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
OVERHEAD = 1 << 20


class Tensor(Structure):
    """ggml_tensor as far as its data; `Ggml` checks that this is how the library sees it."""

    _fields_ = [
        ("type", c_int),
        ("buffer", c_void_p),
        ("ne", c_int64 * 4),
        ("nb", c_size_t * 4),
        ("op", c_int),
        ("op_params", c_int32 * 16),
        ("flags", c_int32),
        ("src", c_void_p * 10),
        ("view_src", c_void_p),
        ("view_offs", c_size_t),
        ("data", c_void_p),
    ]


class Init(Structure):
    _fields_ = [("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool)]


class Plan(Structure):
    """ggml_cplan, with room behind it for what a later version adds."""

    _fields_ = [
        ("work_size", c_size_t),
        ("work", c_void_p),
        ("threads", c_int),
        ("pool", c_void_p),
        ("rest", c_char * 64),
    ]


class Ggml:
    def __init__(self):
        path = f"{sysconfig.get_paths()['platlib']}/xllamacpp/xllamacpp.abi3.so"
        self.lib = lib = ctypes.CDLL(path)
        t = POINTER(Tensor)
        for name, result, arguments in (
            ("ggml_init", c_void_p, [Init]),
            ("ggml_free", None, [c_void_p]),
            ("ggml_cpu_init", None, []),
            ("ggml_new_tensor_4d", t, [c_void_p, c_int, *[c_int64] * 4]),
            ("ggml_get_data", c_void_p, [t]),
            ("ggml_flash_attn_ext", t, [c_void_p, t, t, t, t, *[c_float] * 3]),
            ("ggml_new_graph", c_void_p, [c_void_p]),
            ("ggml_build_forward_expand", None, [c_void_p, t]),
            ("ggml_graph_plan", Plan, [c_void_p, c_int, c_void_p]),
            ("ggml_graph_compute", c_int, [c_void_p, POINTER(Plan)]),
        ):
            f = getattr(lib, name)
            f.restype, f.argtypes = result, arguments
        lib.ggml_cpu_init()
        cx = lib.ggml_init(Init(OVERHEAD, None, True))
        probe = lib.ggml_new_tensor_4d(cx, F16, 3, 5, 7, 11)
        probe.contents.data = 0x1230
        fits = list(probe.contents.ne) == [3, 5, 7, 11] and list(probe.contents.nb)[:3] == [2, 6, 30]
        if not fits or lib.ggml_get_data(probe) != 0x1230:
            raise RuntimeError(f"{path}: its tensors are laid out in another way than {environment.LLAMA}'s")
        lib.ggml_free(cx)


class Flash:
    """One call for sequences of equal lengths."""

    def __init__(self, ggml, kind, heads, q_len, kv_len, count, threads):
        self.lib = lib = ggml.lib
        h, hk, d = heads["num_heads"], heads["num_kv_heads"], heads["head_size"]
        size = TORCH[kind].itemsize
        self.cx = lib.ggml_init(Init(OVERHEAD, None, True))
        self.q = torch.randn(count, q_len, h, d)
        self.out = torch.empty_like(self.q)
        q = lib.ggml_new_tensor_4d(self.cx, F32, d, q_len, h, count)
        q.contents.nb[1:4] = [h * d * 4, d * 4, q_len * h * d * 4]
        self.kv = [lib.ggml_new_tensor_4d(self.cx, kind, d, kv_len, hk, count) for _ in "kv"]
        for t in self.kv:
            t.contents.nb[1:4] = [size * d * hk, size * d, size * d * hk * kv_len]
        mask = None
        if q_len > 1:
            hidden = ~torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
            self.mask = torch.zeros(q_len, kv_len, dtype=torch.float16).masked_fill_(hidden, -math.inf)
            mask = lib.ggml_new_tensor_4d(self.cx, F16, kv_len, q_len, 1, 1)
            mask.contents.data = self.mask.data_ptr()
        out = lib.ggml_flash_attn_ext(self.cx, q, *self.kv, mask, 1 / math.sqrt(d), 0.0, 0.0)
        self.graph = lib.ggml_new_graph(self.cx)
        lib.ggml_build_forward_expand(self.graph, out)
        q.contents.data, out.contents.data = self.q.data_ptr(), self.out.data_ptr()
        self.plan = lib.ggml_graph_plan(self.graph, threads, None)
        self.work = torch.empty(max(1, self.plan.work_size), dtype=torch.uint8)
        self.plan.work = self.work.data_ptr()
        self.bytes = count * kv_len * hk * d * size

    def run(self, keys, values):
        self.kv[0].contents.data, self.kv[1].contents.data = keys, values
        if self.lib.ggml_graph_compute(self.graph, ctypes.byref(self.plan)) != 0:
            raise RuntimeError("ggml_graph_compute failed")

    def free(self):
        self.lib.ggml_free(self.cx)


class Peer:
    NAME = NAME

    def __init__(self, pool, threads):
        self.ggml, self.pool, self.threads, self.made = Ggml(), pool, threads, []
        self.version = environment.LLAMA.split("==")[1]
        if environment.level() not in ("avx2", "other") and not self.ggml.lib.ggml_cpu_has_avx512():
            self.version += " (a build for AVX2, less than this CPU has)"

    def release(self):
        for f in self.made:
            f.free()
        self.made = []

    def calls(self, case, heads, dtype):
        calls, left_out = {}, {}
        base, size = self.pool.bytes.data_ptr(), self.pool.bytes.numel()
        for name, kind in KINDS[dtype].items():
            if kind == BF16 and case["kind"] != "decode":
                left_out[name] = "ggml has no blocked kernel for bf16 keys: 5 to 20 times slower than with f16 keys"
                continue
            parts = [Flash(self.ggml, kind, heads, q, kv, n, self.threads) for q, kv, n in cases.groups(case)]
            self.made += parts
            each = sum(2 * p.bytes for p in parts)
            if each > size:
                left_out[name] = "the case is larger than the pool"
                continue
            tables = min(MOST_TABLES, size // each) if case["cache"] == "cold" else 1

            def call(i, parts=parts, each=each, tables=tables):
                at = base + i % tables * each
                for p in parts:
                    p.run(at, at + p.bytes)
                    at += 2 * p.bytes

            calls[name] = call
        return calls, left_out

    def writes(self, case, heads, dtype):
        return {}, {"ggml": "no call of its own writes a cache"}

    def check(self, heads, dtype, reference):
        errors = {}
        for name, kind in KINDS[dtype].items():
            worst = 0.0
            for q, k, v in batch(heads, dtype):
                f = Flash(self.ggml, kind, heads, q.shape[0], k.shape[0], 1, self.threads)
                f.q.copy_(q[None].float())
                k, v = k.to(TORCH[kind]).contiguous(), v.to(TORCH[kind]).contiguous()
                f.run(k.data_ptr(), v.data_ptr())
                worst = max(worst, reference.error(f.out[0], f.q[0], k, v))
                f.free()
            errors[name] = worst
        return errors
