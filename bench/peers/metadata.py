"""A step's attention metadata: `headway bench builder` and vLLM's builders, in turn, in one run."""

import json
import subprocess
import time

import environment

REQUESTS, GROUPS, ROUNDS = "1,32,256,1024", "1,2,5", 3
LIMIT = 300


def run(options, log, results, notes):
    """Appends a line a number of requests, of groups, and an engine: the least of the rounds' medians and all of them."""
    found = {}
    commands = {"headway": headway, "vllm": vllm}
    for turn in range(ROUNDS):
        for peer, ask in commands.items():
            if peer in notes or time.monotonic() > options.deadline:
                continue
            log(f"metadata, round {turn + 1}: {peer}")
            try:
                for key, us in ask(options):
                    found.setdefault((key, peer), []).append(us)
            except (subprocess.SubprocessError, ValueError, KeyError) as e:
                notes[f"{peer}, metadata"] = f"{e}; {options.log_file} has what it printed"
    for ((requests, groups), peer), us in found.items():
        us = sorted(us)
        results.append(
            {"requests": requests, "groups": groups, "peer": peer, "median_us": us[len(us) // 2], "rounds_us": us}
        )


def headway(options):
    command = [options.headway, "bench", "builder", "--json", "--requests", REQUESTS, "--groups", GROUPS]
    command += ["--threads", str(options.threads)]
    for line in lines(options, command):
        yield (line["requests"], line["kv_cache_groups"]), line["build_us"]


def vllm(options):
    command = [environment.PYTHON, environment.HERE / "peer_vllm_metadata.py", REQUESTS, GROUPS]
    for line in lines(options, command):
        # One group as its builder alone, without what a step does around it: the quicker of the two.
        if (line["what"], line["groups"]) in (("build", 1), ("step", 2), ("step", 5)):
            yield (line["requests"], line["groups"]), line["build_us"]


def lines(options, command):
    with open(options.log_file, "ab") as errors:
        done = subprocess.run(
            command,
            check=True,
            timeout=LIMIT,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment.child_environment(options.threads),
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
