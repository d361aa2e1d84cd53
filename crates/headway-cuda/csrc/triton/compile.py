"""Compiles the forms that standard input lists, without a GPU, and answers with what each launch needs.

Standard input: {"triton": version, "arch": 90, "shared": bytes a block may have, "out": folder, "forms": [{"name",
"kernel", "dtype", "constants", "num_warps", "num_stages"}]}. Standard output: {"triton": version, "forms": [{"name",
"function", "shared", "num_warps", "num_stages", "keys", "num_ctas", "global_scratch", "profile_scratch", "arguments"}]}; the
folder gets NAME.cubin.
"""

import json
import pathlib
import sys

import triton

wanted = json.load(sys.stdin)
if triton.__version__ != wanted["triton"]:
    # Before anything of it is used: what is below may not be there.
    print(json.dumps({"triton": triton.__version__, "forms": []}))
    sys.exit()

import attention
import latent
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Arguments by their type, and what they are multiples of.
POINTERS = {
    "out": "T", "q": "T", "cache": "T", "block_table": "i32", "query_start_loc": "i32", "seq_lens": "i32",
    "causal_flags": "u8", "sinks": "fp32", "part_out": "fp32", "part_sums": "fp32", "q_rope": "T",
}
TYPES = {"block_stride": "i64", "head_stride": "i64", "reciprocal": "u32", "scale": "fp32", "cap": "fp32"}
STRIDES = ("out_token", "out_head", "q_token", "q_head", "block_stride", "token_stride", "head_stride", "v_offset")


def source(form):
    name = form["kernel"]
    kernel = getattr(attention, name) if hasattr(attention, name) else getattr(latent, name)
    constants, signature, attrs = form["constants"], {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in POINTERS:
            signature[name] = "*" + POINTERS[name].replace("T", form["dtype"])
            if name not in ("causal_flags", "sinks"):
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = TYPES.get(name, "i32")
            if name in STRIDES:
                # 16 bytes.
                attrs[(i,)] = [["tt.divisibility", 8]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)


def smaller(form):
    """The same with a stage less, then with half the keys of a step; `None`: there is none."""
    constants = form["constants"]
    if form["num_stages"] > 1:
        return {**form, "num_stages": form["num_stages"] - 1}
    if constants.get("N", 0) > 16:
        return {**form, "constants": {**constants, "N": constants["N"] // 2}, "num_stages": 2}
    return None


def compile_form(form):
    target = GPUTarget("cuda", wanted["arch"], 32)
    while True:
        options = {"num_warps": form["num_warps"], "num_stages": form["num_stages"]}
        made = triton.compile(source(form), target=target, options=options)
        other = None if made.metadata.shared <= wanted["shared"] else smaller(form)
        if other is None:
            break
        form = other
    m = made.metadata
    out = pathlib.Path(wanted["out"])
    (out / (form["name"] + ".cubin")).write_bytes(made.asm["cubin"])
    signature = [t for t in source(form).signature.values() if t != "constexpr"]
    return {
        "name": form["name"],
        "function": m.name,
        "shared": m.shared,
        "num_warps": m.num_warps,
        "num_stages": form["num_stages"],
        "keys": form["constants"].get("N"),
        "num_ctas": m.num_ctas,
        "global_scratch": m.global_scratch_size,
        "profile_scratch": m.profile_scratch_size,
        # Both scratch areas' addresses follow the arguments of the source.
        "arguments": signature + ["scratch", "scratch"],
    }


forms = []
for form in wanted["forms"]:
    print(form["name"], file=sys.stderr, flush=True)
    forms.append(compile_form(form))
print(json.dumps({"triton": triton.__version__, "forms": forms}))
