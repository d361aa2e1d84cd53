"""The attention cases: headway and its peers in turn, sample by sample, in one run."""

import statistics
import time

import cases
import environment
import link

START_LIMIT, PREPARE_LIMIT, SAMPLE_LIMIT = 300, 180, 120
# Seconds before each turn, in which threads of whoever was last stop spinning.
REST = 0.010
ROUNDS, QUICK_ROUNDS = 7, 3
# A peer that takes so many times the quickest one's time is sampled three times only.
FAR = 5


def run(options, log, results, notes):
    """Appends a line a case, heads, dtype and peer; notes say what was left out, and why."""
    file = cases.load(environment.CASES)
    peers = None
    try:
        for heads in file["heads"]:
            for dtype in options.dtypes:
                chosen = [c for c in file["cases"] if options.wants(c, heads, dtype)]
                if not chosen:
                    continue
                if time.monotonic() > options.deadline:
                    notes[f"{heads['id']} {dtype}"] = "not reached within --minutes"
                    continue
                peers = peers or start_peers(options, notes)
                peers = group(options, file, heads, dtype, chosen, peers, results, notes, log)
    finally:
        if peers:
            peers.end()


def start_peers(options, notes):
    worker = [environment.PYTHON, environment.HERE / "attention_peers.py", options.pool_bytes, options.threads]
    peers = link.Link(
        "the attention peers", worker, environment.child_environment(options.threads), options.cpus, options.log_file
    )
    hello = peers.ask({"do": "hello"}, START_LIMIT)
    notes.update(hello["absent"])
    options.versions.update(hello["versions"])
    return peers


def start_headway(options):
    command = [options.headway, "bench", "attention", "--json", "--from-stdin", "--repetitions", 1]
    command += ["--threads", options.threads, "--pool", options.pool_bytes >> 20, "--cases", environment.CASES]
    return link.Link("headway", command, environment.child_environment(options.threads), options.cpus, options.log_file)


def group(options, file, heads, dtype, chosen, peers, results, notes, log):
    """All cases of one head shape and dtype. headway starts anew and so measures its ceilings anew."""
    banned = set()
    checked = peers.ask({"do": "check", "heads": heads, "dtype": dtype}, START_LIMIT)
    for name, error in checked["errors"].items():
        if not error <= checked["allowed"]:
            banned.add(name)
            notes[f"{name} {heads['id']} {dtype}"] = (
                f"wrong by {error:g} on the small case, beyond {checked['allowed']:g}: not timed"
            )
    log(
        f"{heads['id']} {dtype}: outputs within {max(checked['errors'].values()):.2g} of float64 (allowed {checked['allowed']:g})"
    )
    ours = start_headway(options)
    try:
        for case in chosen:
            if time.monotonic() > options.deadline:
                notes[f"{case['id']} {heads['id']} {dtype}"] = "not reached within --minutes"
                continue
            while True:
                try:
                    found, left_out, others = measure(options, case, heads, dtype, ours, peers, banned)
                    break
                except TurnDied as e:
                    # The case is measured again without whoever ended the process.
                    banned.add(e.peer)
                    notes[f"{e.peer} {case['id']} {heads['id']} {dtype}"] = str(e)
                    peers = start_peers(options, notes)
            for name, why in left_out.items():
                notes[f"{name} ({case['kind']}, {dtype})"] = why
            lines = summarise(case, heads, dtype, options.threads, found, others)
            results.extend(lines)
            best = min((r for r in lines if r["peer"] != "headway"), key=lambda r: r["median_ms"], default=None)
            beside = f", {best['peer']} {best['median_ms']:.4g}" if best else ""
            log(f"  {case['id']:<22} headway {lines[0]['median_ms']:.4g} ms{beside} (others used {others:.2f} cores)")
    finally:
        ours.end()
    return peers


class TurnDied(Exception):
    def __init__(self, peer, why):
        super().__init__(str(why))
        self.peer = peer


def measure(options, case, heads, dtype, ours, peers, banned):
    """Samples by peer, in rounds: headway, then each peer, then again."""
    ask = {"do": "prepare", "case": case, "heads": heads, "dtype": dtype, "without": sorted(banned)}
    prepared = peers.ask(ask, PREPARE_LIMIT)
    samples = {name: [] for name in ["headway", *prepared["peers"]]}
    line = f"{case['id']} {heads['id']} {dtype}"
    meanwhile = link.Meanwhile([ours, peers])
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    wanted = dict.fromkeys(samples, rounds)
    for round_ in range(rounds):
        for name in [n for n in samples if len(samples[n]) < wanted[n]]:
            time.sleep(REST)
            if name == "headway":
                answer = ours.ask(line, SAMPLE_LIMIT)
                samples[name].append(
                    {
                        "ms": answer["median_ms"],
                        "ceiling": answer["ceiling"],
                        "block": answer["block_size"],
                        "isa": answer["isa"],
                    }
                )
            else:
                try:
                    samples[name].append(peers.ask({"do": "sample", "peer": name}, SAMPLE_LIMIT))
                except link.Died as e:
                    raise TurnDied(name, e) from None
        if round_ == 0:
            # Threads exist from the first call on.
            ours.pin()
            peers.pin()
            quickest = min(s[0]["ms"] for s in samples.values())
            for name, (first,) in samples.items():
                slow = first["ms"] > FAR * quickest or first["ms"] > 300
                wanted[name] = min(rounds, 3 if slow else 5 if first["ms"] > 100 else rounds)
    return samples, prepared["left_out"], meanwhile.cores()


def summarise(case, heads, dtype, threads, found, others):
    """A line a peer: median of its samples, rate, and share of the ceiling that headway measured."""
    amount, unit = cases.work(case, heads, dtype)
    ceiling = found["headway"][0]["ceiling"]
    lines = []
    for peer, samples in found.items():
        ms = [s["ms"] for s in samples]
        median = statistics.median(ms)
        rate = amount / median / 1e6
        lines.append({
            "bench": "attention", "peer": peer, "case": case["id"], "kind": case["kind"], "heads": heads["id"], "dtype": dtype,
            "threads": threads, "cache": case["cache"], "median_ms": median, "min_ms": min(ms), "max_ms": max(ms), "samples": len(ms),
            "rate": rate, "unit": unit, "ceiling": ceiling, "share_of_ceiling": rate / ceiling if ceiling else None,
            "others_cpu": others, **({"block_size": samples[0]["block"], "isa": samples[0]["isa"]} if peer == "headway" else {}),
        })  # fmt: skip
    return lines
