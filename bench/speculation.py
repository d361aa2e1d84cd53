#!/usr/bin/env python3
"""Speculative decoding on a text that repeats and on one that doesn't: K = 0, 2, 4, 8 in turn in one run, and each rate
over that of K = 0 in the same round.

    python3 bench/speculation.py --headway target/release/headway --model smollm2-135m-instruct --rounds 5
"""
import argparse
import json
import os
import statistics
import subprocess

PROPERTY = '''    @property
    def {0}(self):
        """The {0} of the run."""
        return self._{0}

    @{0}.setter
    def {0}(self, value):
        if value is None:
            raise ValueError("{0} must not be None")
        self._{0} = value

'''
NAMES = ["width", "height", "depth", "colour", "weight", "price"]
CODE = (
    'class Settings:\n    """The settings of a run."""\n\n'
    + f"    def __init__(self, {', '.join(NAMES)}):\n"
    + "".join(f"        self._{n} = {n}\n" for n in NAMES)
    + "\n"
    + PROPERTY.format("width")
    + PROPERTY.format("height")
    + "    @property\n    def depth(self):\n"
)
STORY = (
    "Late in the autumn a letter came to the lighthouse, and with it a small wooden box. The keeper, who had not spoken "
    "to anyone for eleven days, put both on the table and went out to look at the sea first. When he came back"
)
TEXTS = {
    "repetitive": [CODE],
    "novel": [STORY, "--temperature", "0.8", "--top-p", "0.95", "--seed", "7"],
}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--headway", default="target/release/headway")
    p.add_argument("--model", default="smollm2-135m-instruct")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--tokens", type=int, default=192)
    a = p.parse_args()
    runs = {}
    for round_ in range(a.rounds):
        for name, (prompt, *sampling) in TEXTS.items():
            for k in (0, 2, 4, 8):
                command = [a.headway, "generate", "--model", a.model, "--json", "--ignore-eos"]
                command += ["--max-tokens", str(a.tokens), "--speculative-tokens", str(k), *sampling, prompt]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                answer = json.loads(done.stdout.splitlines()[-1])
                runs.setdefault((name, k), []).append(answer)
        print(f"round {round_ + 1}: load {os.getloadavg()[0]:.1f}", flush=True)
    rate = lambda o: o["timings"]["decode_tokens"] / o["timings"]["decode_s"]
    for (name, k), answers in runs.items():
        plain = runs[name, 0]
        ratios = [rate(x) / rate(y) for x, y in zip(answers, plain)]
        same = all(x["token_ids"] == plain[0]["token_ids"] for x in answers)
        line = f"{name:<11} K {k}: {statistics.median(map(rate, answers)):7.1f} tokens/s"
        line += f", {statistics.median(ratios):.2f} of K 0 ({min(ratios):.2f}-{max(ratios):.2f})"
        line += ", the same tokens" if same else ", other tokens"
        if k:
            s = answers[0]["speculation"]
            line += f"; {s['accepted_tokens']} of {s['drafted_tokens']} in {s['drafts']} drafts"
        print(line)


if __name__ == "__main__":
    main()
