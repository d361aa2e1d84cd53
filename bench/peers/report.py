"""The table of a run, in Markdown: medians, ratios of headway to the best peer, geometric means beside the targets."""

import json
import math

import plot

# Ratios to the best peer that are asked for: of the geometric mean over a family's cases, and of each case.
TARGETS = {
    ("decode", "bf16"): (1.25, 0.95),
    ("decode", "f16"): (1.1, None),
    ("decode", "f32"): (1.1, None),
    ("prefill", "bf16"): (1.2, 0.95),
    ("mixed", "bf16"): (1.3, None),
    ("write", "bf16"): (1.0, None),
    ("write", "f16"): (1.0, None),
    ("write", "f32"): (1.0, None),
}
# Microseconds at most, by KV cache groups and requests.
METADATA_TARGETS = {(1, 32): 3, (1, 1024): 15, (5, 32): 10}
KINDS = ("decode", "prefill", "mixed", "write")

# What is measured of an engine: title, unit, whether more is better, targets by weights (`q4` or `bf16`).
ENGINE = {
    "prefill": ("prefill of 512 tokens", "tokens/s", True, {"bf16": 1.2}),
    "decode": ("decode, one request", "tokens/s", True, {"bf16": 1.2, "q4": 1.0}),
    "concurrent": ("requests together (16; 4 with --quick), output", "tokens/s", True, {"bf16": 1.3, "q4": 1.3}),
    "first_token": ("start to first token", "s", False, {"bf16": 1.0, "q4": 1.0}),
    "peak_mib": ("peak memory", "MiB", False, {"bf16": 1.0, "q4": 1.0}),
}


def write(run, out):
    (out / "raw.json").write_text(json.dumps(run, indent=1))
    (out / "table.md").write_text(markdown(run))
    if any(r["share_of_ceiling"] for r in run["attention"]):
        (out / "share.svg").write_text(plot.svg(run))


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def by_case(results):
    """{(dtype, kind): {(heads, case): {peer: line}}} in the order of the run."""
    out = {}
    for r in results:
        out.setdefault((r["dtype"], r["kind"]), {}).setdefault((r["heads"], r["case"]), {})[r["peer"]] = r
    return out


def best_peer(lines):
    others = [r for p, r in lines.items() if p != "headway"]
    return min(others, key=lambda r: r["median_ms"], default=None)


def ratio(lines):
    """How many times quicker headway is than the best peer of the case; None where it was alone."""
    best = best_peer(lines)
    return best["median_ms"] / lines["headway"]["median_ms"] if best and "headway" in lines else None


def markdown(run):
    text = [f"# headway beside its peers\n\n{about(run)}"]
    if run["attention"]:
        text += [means(run["attention"]), *attention(run["attention"])]
    if run["metadata"]:
        text.append(metadata(run["metadata"]))
    if run["engine"]:
        text.append(engine(run["engine"]))
    if run["notes"]:
        text.append("## Left out\n\n" + "\n".join(f"- {what}: {why}" for what, why in run["notes"].items()))
    return "\n\n".join(text) + "\n"


def about(run):
    versions = ", ".join(f"{k} {v}" for k, v in run["versions"].items())
    quick = " Run with --quick: fewer cases and samples, a smaller pool; not for comparing." if run["quick"] else ""
    busy = [r["others_cpu"] for r in run["attention"] + run["engine"] if "others_cpu" in r]
    others = (
        f" Other processes used up to {max(busy):.2f} cores meanwhile (median {sorted(busy)[len(busy) // 2]:.2f})."
        if busy
        else ""
    )
    return (
        f"{run['cpu']} ({run['level']}), {run['threads']} threads, Linux {run['kernel']}, {run['date']}; {versions}. "
        f"All in turn in one run of {run['minutes']:.1f} minutes; medians (least-most).{others}{quick}"
    )


def means(results):
    rows = [
        "## Ratios\n\nTimes quicker than the best peer of each case.\n",
        "| family | cases | geometric mean | target | least | target | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for (dtype, kind), cases in by_case(results).items():
        ratios = [x for x in map(ratio, cases.values()) if x]
        if not ratios:
            continue
        mean, least = geometric_mean(ratios), min(ratios)
        want, floor = TARGETS.get((kind, dtype), (None, None))
        met = "" if want is None else "yes" if mean >= want and least >= (floor or 0) else "no"
        show = lambda x: "" if x is None else f"{x:.2f}"
        rows.append(
            f"| {kind}, {dtype} | {len(ratios)} | {mean:.2f} | {show(want)} | {least:.2f} | {show(floor)} | {met} |"
        )
    return "\n".join(rows)


def attention(results):
    for (dtype, kind), cases in by_case(results).items():
        unit = next(iter(next(iter(cases.values())).values()))["unit"]
        peers = list(dict.fromkeys(p for lines in cases.values() for p in lines if p != "headway"))
        rows = [f"## {kind}, {dtype}: ms, {unit}, share of the ceiling\n"]
        rows.append(
            "| heads | case | headway | " + unit + " | share | ratio to the best peer | " + " | ".join(peers) + " |"
        )
        rows.append("|---" * (6 + len(peers)) + "|")
        for (heads, case), lines in cases.items():
            best, ours, times = best_peer(lines), lines.get("headway"), ratio(lines)
            cells = [cell(lines.get(p), bold=best is not None and p == best["peer"]) for p in peers]
            share = f"{ours['share_of_ceiling']:.0%}" if ours["share_of_ceiling"] else ""
            rows.append(
                f"| {heads} | {case} | {cell(ours)} | {ours['rate']:.3g} | {share} | {f'{times:.2f}' if times else ''} | "
                + " | ".join(cells)
                + " |"
            )
        yield "\n".join(rows)


def cell(r, bold=False):
    if r is None:
        return "-"
    middle = f"{r['median_ms']:.4g}"
    return f"{f'**{middle}**' if bold else middle} ({r['min_ms']:.3g}-{r['max_ms']:.3g})"


def metadata(results):
    """A row a number of KV cache groups and requests; a column an engine."""
    peers = list(dict.fromkeys(r["peer"] for r in results if r["peer"] != "headway"))
    rows = [
        "## A step's metadata: us, 32 layers\n",
        "| KV cache groups | requests | headway | target | " + " | ".join(peers) + " | times quicker |",
        "|---" * (5 + len(peers)) + "|",
    ]
    for groups, requests in sorted({(r["groups"], r["requests"]) for r in results}):
        at = {r["peer"]: r for r in results if (r["groups"], r["requests"]) == (groups, requests)}
        show = lambda r: f"{r['median_us']:.3g} ({r['rounds_us'][0]:.3g}-{r['rounds_us'][-1]:.3g})" if r else "-"
        best = min((at[p]["median_us"] for p in peers if p in at), default=None)
        times = f"{best / at['headway']['median_us']:.0f}" if best and "headway" in at else ""
        want = METADATA_TARGETS.get((groups, requests), "")
        cells = " | ".join(show(at.get(p)) for p in peers)
        rows.append(f"| {groups} | {requests} | {show(at.get('headway'))} | {want} | {cells} | {times} |")
    return "\n".join(rows)


def engine(results):
    """A row a model, weights and figure; a column an engine."""
    peers = list(dict.fromkeys(r["peer"] for r in results if r["peer"] != "headway"))
    rows = [
        "## Engines\n",
        "| model | weights | | headway | " + " | ".join(peers) + " | ratio to the best peer | target |",
    ]
    rows.append("|---" * (6 + len(peers)) + "|")
    for model, weights in dict.fromkeys((r["model"], r["weights"]) for r in results):
        lines = {r["peer"]: r for r in results if (r["model"], r["weights"]) == (model, weights)}
        for key, (title, unit, more, targets) in ENGINE.items():
            values = {p: r[key]["median"] for p, r in lines.items() if r.get(key)}
            if not values:
                continue
            others = [v for p, v in values.items() if p != "headway"]
            times = ""
            if others and "headway" in values:
                best = max(others) if more else min(others)
                times = f"{values['headway'] / best if more else best / values['headway']:.2f}"
            want = targets.get("bf16" if weights == "bf16" else "q4")
            show = lambda p: engine_cell(lines.get(p, {}).get(key))
            rows.append(
                f"| {model} | {weights} | {title}, {unit} | {show('headway')} | "
                + " | ".join(map(show, peers))
                + f" | {times} | {f'{want:.1f}' if want else ''} |"
            )
        same = ", ".join(
            f"{p} {r['same_tokens']} of {r['greedy_tokens']}" for p, r in lines.items() if "same_tokens" in r
        )
        if same:
            rows.append(
                f"| {model} | {weights} | first greedy tokens equal to headway's | "
                + " | ".join([""] * (len(peers) + 1))
                + f" | {same} | |"
            )
    return "\n".join(rows) + "\n\nRatios above 1 are in headway's favour, for times and memory too."


def engine_cell(v):
    if not v:
        return "-"
    return f"{v['median']:.3g} ({v['min']:.3g}-{v['max']:.3g})" if v["min"] != v["max"] else f"{v['median']:.3g}"
