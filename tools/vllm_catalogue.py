#!/usr/bin/env python3
"""Makes a data file of the vLLM catalogue out of two tables and a file of conditions.

    tools/vllm_catalogue.py RULEBOOKS.json PRIORITIES.json CONDITIONS.json > src/process/catalog/data/vllm-X.Y.Z.json

RULEBOOKS and PRIORITIES are conformance tables (`rulebooks`, `selection_priorities`; plain or gzip): what vLLM's own classes
answered. They carry every rule book, and what varies with the compute capability becomes an override here. CONDITIONS is
written by hand: what depends on more than the capability (found from the `selection` table), and the order of backends.
"""

import collections
import gzip
import json
import sys

CONFIGS = {"default config": {}, "spec3": {"num_speculative_tokens": {"from": 1}}, "dcp2": {"use_dcp": True}}
FLAGS = {  # rule book field -> the table's
    "is_sparse": "is_sparse",
    "supports_sinks": "supports_sink",
    "supports_inexact_query_lens": "supports_device_cpu_query_lens_mismatch",
    **{
        "supports_" + f: "supports_" + f
        for f in "sliding_window alibi_sqrt non_causal batch_invariance kv_connector pcp dcp rswa non_causal_dcp mm_prefix "
        "per_head_quant_scales unset_kv_cache_dtype kv_cache_update_bypass".split()
    },
    "forward_includes_kv_cache_update": "forward_includes_kv_cache_update",
}
BUILDER = {
    "class": "class",
    "class_reorder_batch_threshold": "reorder_batch_threshold_class",
    "supports_update_block_table": "supports_update_block_table",
    "requires_block_table_width": "requires_block_table_width",
    "class_supports_draft_decode_update": "supports_draft_decode_metadata_update",
    "supports_non_causal_multi_token_dcp": "supports_non_causal_multi_token_dcp",
    "query_len_support": "query_len_support",
}


def load(path):
    with (gzip.open if path.endswith(".gz") else open)(path, "rt") as f:
        return json.load(f)


def answer(expected, capability, path):
    """The answer at a dotted path for one capability; None where there is none."""
    for group in expected.get("varies_by_device_capability", {}).get(path, []):
        if capability in group["capabilities"]:
            return group["value"]
    value = expected
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value


def block_sizes(value):
    return [{"exact": v} if isinstance(v, int) else v for v in value or []]


def head_sizes(runs):
    if runs == [[1, 1024, 1]]:
        return []  # any
    # A run in steps of one that reaches the end of what was tried has no end.
    return [
        {"first": a, "step": s} if z == 1024 and s == 1 else {"first": a, "last": z, "step": s} for a, z, s in runs
    ]


def ranges(accepted, tried):
    """Runs of neighbouring capabilities; a run covers its last major version, and has no end where the tried ones end."""
    runs = []
    for i, capability in enumerate(tried):
        if capability not in accepted:
            continue
        if i and tried[i - 1] in accepted:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    out = []
    for a, z in runs:
        r = {"from": tried[a]} if a else {}
        if z + 1 < len(tried):
            major = tried[z].split(".")[0]
            r["to"] = tried[z] if tried[z + 1].split(".")[0] == major else f"{major}.9"
        out.append(r)
    return out


def rules_at(case, e, cap):
    get = lambda path: answer(e, cap, path)
    mla, ssm = get("is_mla"), get("is_ssm")
    name = case["input"]["registry_name"]
    sizes = block_sizes(get("supported_kernel_block_sizes"))
    accepted = get("accepted_block_sizes")
    exact = [s["exact"] for s in sizes if "exact" in s]
    preferred = get("preferred_block_size") or {}
    preferred = {n: answer(e, cap, f"preferred_block_size.{n}") for n in ["1", "8", "16", "32", "64", "128", "256"]}
    rules = {
        "kind": "state_space" if ssm else "mla" if mla else "standard",
        "platform": {"ROCM": "rocm", "XPU": "xpu", "CPU": "cpu", "AMX": "cpu"}.get(name.split("_")[0], "cuda"),
        "dtypes": get("supported_dtypes"),
        "kv_cache_dtypes": get("supported_kv_cache_dtypes"),
        "head_sizes": head_sizes(get("accepted_head_sizes_1_to_1024")),
        "kernel_block_sizes": sizes,
        # Cuts no manager block into smaller ones: a multiple of an exact size is not accepted.
        "whole_blocks_only": bool(exact) and len(exact) == len(sizes) and accepted == sorted(exact),
        "kv_cache_layouts": get("supported_kv_cache_layouts") or [],
        "attn_types": get("supported_attn_types"),
        "preferred_block_size": None,
        "fallback_block_size": None,
    }
    if len(set(preferred.values())) == 1 and accepted != exact:
        rules["preferred_block_size"] = preferred["1"]
    elif preferred["1"] != min([n for s in sizes for n in s.values()], default=1):
        rules["fallback_block_size"] = preferred["1"]
    for field, path in FLAGS.items():
        value = get(path)
        assert value is not None, (name, path)
        rules[field] = value
    return rules


def length(default, speculative):
    return "decode_query_len" if (default, speculative) == (1, 4) else default


def builder_at(e, cap, config):
    get = lambda path: answer(e, cap, "builder." + path)
    # The two configurations without speculation tell one token from a whole decode step by the one with it.
    base = config if config != "spec3" else "default config"
    pair = lambda path: length(get(path.format(base)), get(path.format("spec3")))
    if config == "dcp2":
        pair = lambda path: length(get(path.format("dcp2")), get(path.format("spec3")))
    facts = {field: get(path) for field, path in BUILDER.items()}
    facts |= {
        "graph_support": get(f"cudagraph_support.{config}.default"),
        "varlen_graph_max_query_len": pair("varlen_cudagraph_max_query_len.{}"),
        "reorder_batch_threshold": pair("instance.{}.threshold"),
        "supports_draft_decode_update": get(f"instance.{config}.supports_draft_decode_metadata_update"),
    }
    return facts


def difference(base, other):
    return {k: v for k, v in other.items() if k not in base or base[k] != v}


def most_common(values):
    counted = collections.Counter(json.dumps(v, sort_keys=True) for v in values)
    return json.loads(counted.most_common(1)[0][0])


def most_common_fields(objects):
    return {k: most_common([o[k] for o in objects]) for k in objects[0]}


def vary(section, at, capabilities):
    """The most common answers, and an override for each set of capabilities that answers otherwise."""
    answers = {cap: at(cap) for cap in capabilities}
    base = most_common_fields(list(answers.values()))
    groups = collections.OrderedDict()
    for field in base:
        others = collections.OrderedDict()
        for cap, a in answers.items():
            if a[field] != base[field]:
                others.setdefault(json.dumps(a[field]), []).append(cap)
        for value, caps in others.items():
            groups.setdefault(tuple(caps), {})[field] = json.loads(value)
    overrides = [
        {"when": {"compute_capability": ranges(caps, capabilities)}, section: fields} for caps, fields in groups.items()
    ]
    return base, overrides


def merged(overrides):
    """One override a condition."""
    by_condition = collections.OrderedDict()
    for o in overrides:
        one = by_condition.setdefault(json.dumps(o["when"], sort_keys=True), {"when": o["when"]})
        for section in ["rules", "builder"]:
            if section in o:
                one.setdefault(section, {}).update(o[section])
    return list(by_condition.values())


def backend(case, capabilities):
    e = case["expected"]
    name = case["input"]["registry_name"]
    entry = {"name": name}
    if e["name"] != name:
        entry["own_name"] = e["name"]
    entry |= {"registry": case["input"]["registry"], "class": e["class"], "module": e["module"]}
    entry["rules"], overrides = vary("rules", lambda cap: rules_at(case, e, cap), capabilities)
    accepted = e["compute_capabilities"]
    entry["rules"]["compute_capabilities"] = None if accepted == capabilities else ranges(accepted, capabilities)
    entry["builder"], more = vary("builder", lambda cap: builder_at(e, cap, "default config"), capabilities)
    overrides += more
    # What speculation and context parallelism change, for each capability.
    for config in ["spec3", "dcp2"]:
        changes = collections.OrderedDict()
        for cap in capabilities:
            change = difference(builder_at(e, cap, "default config"), builder_at(e, cap, config))
            changes.setdefault(json.dumps(change), []).append(cap)
        for change, caps in changes.items():
            if json.loads(change):
                when = dict(CONFIGS[config])
                if caps != capabilities:
                    when["compute_capability"] = ranges(caps, capabilities)
                overrides.append({"when": when, "builder": json.loads(change)})
    # Graph support by the sample specs that differ from the plain one in the head size.
    for head in [256, 512]:
        changes = collections.OrderedDict()
        for cap in capabilities:
            of = lambda spec: answer(e, cap, f"builder.cudagraph_support.default config.{spec}")
            if of(f"head{head}") not in (None, of("default")):
                changes.setdefault(of(f"head{head}"), []).append(cap)
        for support, caps in changes.items():
            when = {"head_size": head, "compute_capability": ranges(caps, capabilities)}
            overrides.append({"when": when, "builder": {"graph_support": support}})
    impl = e["impl"]
    entry["impl"] = None if "not_offered" in impl else impl
    entry["declared"] = {"head_sizes": e["supported_head_sizes"], "dtypes": e["supported_dtypes_declared"]}
    spec = e["customized_spec"].get("default")
    if spec and spec["changed"]:
        stride = spec["block_stride_alignment"]
        if isinstance(stride, dict):
            stride = {"tokens": stride["multiple_of"]}
        elif stride is not None:
            states = stride // spec["state_content_size_bytes"]
            stride = {"states": states}
        entry["spec"] = {"block_stride_alignment": stride}
    if e["kv_cache_shape_sample"]:
        entry["offers_kv_cache_shape"] = True
    entry["overrides"] = overrides
    return entry


def compact(value, indent=0, width=128):
    """JSON whose objects and lists stay on one line where they fit."""
    flat = json.dumps(value)
    if len(flat) + indent <= width or not isinstance(value, (dict, list)) or not value:
        return flat
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        inner = ",\n".join(f"{pad}{json.dumps(k)}: {compact(v, indent + 2, width - len(k) - 5)}" for k, v in value.items())
        return "{\n" + inner + "\n" + " " * indent + "}"
    # Short items fill lines.
    items = [compact(v, indent + 2, width - 1) for v in value]
    if all("\n" not in i and len(i) < 40 for i in items):
        lines, line = [], pad
        for i in items:
            if len(line) + len(i) > width:
                lines.append(line.rstrip())
                line = pad
            line += i + ", "
        lines.append(line.rstrip().rstrip(","))
        return "[\n" + "\n".join(lines) + "\n" + " " * indent + "]"
    return "[\n" + ",\n".join(pad + i for i in items) + "\n" + " " * indent + "]"


def vision(table, capabilities):
    lists = collections.OrderedDict()
    for cap in capabilities:
        lists.setdefault(tuple(table["vit_backends"][cap]), []).append(cap)
    return [
        {"when": {"compute_capability": ranges(caps, capabilities)}, "backends": list(order)} for order, caps in lists.items()
    ]


def main():
    rulebooks, priorities, conditions = map(load, sys.argv[1:4])
    capabilities = rulebooks["device_capabilities"]
    entries = [backend(case, capabilities) for case in rulebooks["cases"]]
    # What most backends answer is said once.
    sections = ["rules", "builder", "impl"]
    defaults = {s: most_common_fields([b[s] for b in entries if b[s] is not None]) for s in sections}
    for d in defaults.values():
        for own in ["kind", "class"]:
            d.pop(own, None)
    # Selection does not ask for these: a model names its backend where it needs one that has them.
    defaults["rules"] |= {
        f"supports_{f}": True for f in ["different_v_head_size", "logit_soft_cap", "alibi", "chunked_local"]
    }
    for b in entries:
        for s in sections:
            if b[s] is not None:
                b[s] = difference(defaults[s], b[s])
        hand = conditions["backends"].get(b["name"], {})
        b["overrides"] += hand.get("overrides", [])
        b["overrides"] = merged(b["overrides"])
        b["refuses"] = hand.get("refuses", [])
        for key in ["overrides", "refuses"]:
            if not b[key]:
                del b[key]
    missing = set(conditions["backends"]) - {b["name"] for b in entries}
    assert not missing, missing
    out = {
        "engine": "vllm",
        "version": rulebooks["source"].split()[1],
        "source": rulebooks["source"],
        "capabilities": capabilities,
        "defaults": defaults,
        "backends": entries,
        "without_rule_book": sorted({n["registry_name"].split(":")[-1] for n in rulebooks["not_importable"]}),
        "assumptions": conditions["assumptions"],
        "platforms": conditions["platforms"],
        "vision": vision(priorities, capabilities),
    }
    print(compact(out))


if __name__ == "__main__":
    main()
