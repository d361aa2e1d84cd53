"""The attention peers in one process: PyTorch SDPA, vLLM's CPU kernels, ggml's flash attention.

Reads a JSON object a line (`do`: hello, check, prepare, sample) and answers each with one.
One process, so that they share the pool of keys and values; attention.py decides whose turn it is."""

import json
import math
import mmap
import os
import resource
import sys
import time
import warnings

import torch

import peer_ggml
import peer_torch
import peer_vllm
import reference

SAMPLE_S, WARM_UP_S, LONG_S = 6e-3, 0.5e-3, 0.1


class Pool:
    """Normally distributed bfloat16 values, which every dtype reads as its own."""

    def __init__(self, size):
        self.memory = mmap.mmap(-1, size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.fill()

    def fill(self):
        """Afresh, since what was written in one dtype can be no number, or a denormal one, in another."""
        values = self.view(torch.bfloat16)
        # An odd length, so that repetitions don't line up with blocks.
        some = torch.randn((1 << 22) + 1, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        for at in range(0, values.numel(), some.numel()):
            values[at : at + some.numel()] = some[: values.numel() - at]

    def view(self, dtype):
        return self.bytes[: self.bytes.numel() // 8 * 8].view(dtype)


class Sampler:
    """Times one peer's calls as `headway bench attention --repetitions 1` times its own: back-to-back calls of
    at least 6 ms; a sample in which a thread of ours was preempted is taken again, twice at most; where none
    was clean, the middle of the quicker half."""

    def __init__(self, call):
        self.call, self.count, self.first = call, 0, None

    def run(self, n):
        start = time.perf_counter()
        for i in range(self.count, self.count + n):
            self.call(i)
        self.count += n
        return time.perf_counter() - start

    def sample(self):
        warm, last = 0.0, self.first or 0.0
        while warm < WARM_UP_S and last < LONG_S:
            last = self.run(1)
            warm += last
        if self.first is None:
            self.first = last
        n = max(1, math.ceil(SAMPLE_S / self.first))
        taken = []
        for _ in range(3):
            before = preemptions()
            taken.append(self.run(n) / n)
            if preemptions() == before:
                return taken[-1], True
        quick = sorted(taken)[:2]
        return quick[1], False


def preemptions():
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class Peers:
    def __init__(self, pool_bytes, threads):
        torch.set_num_threads(threads)
        self.pool = Pool(pool_bytes)
        self.peers, self.absent = [], {}
        for module in (peer_torch, peer_vllm, peer_ggml):
            try:
                self.peers.append(module.Peer(self.pool, threads))
            except (ImportError, OSError, RuntimeError) as e:
                self.absent[module.NAME] = str(e)
        self.samplers, self.last = {}, None

    def hello(self, _):
        return {"versions": {p.NAME: p.version for p in self.peers}, "absent": self.absent}

    def check(self, ask):
        """Largest distance of each peer's output from float64, over a batch of decodes and prefills."""
        self.release()
        errors = {}
        for p in self.peers:
            errors.update(p.check(ask["heads"], ask["dtype"], reference))
        self.pool.fill()
        return {"errors": errors, "allowed": reference.ALLOWED[ask["dtype"]]}

    def prepare(self, ask):
        self.release()
        left_out, calls = {}, {}
        case, heads, dtype = ask["case"], ask["heads"], ask["dtype"]
        for p in self.peers:
            made, why = p.writes(case, heads, dtype) if case["kind"] == "write" else p.calls(case, heads, dtype)
            calls.update(made)
            left_out.update(why)
        self.samplers = {n: Sampler(c) for n, c in calls.items() if n not in ask.get("without", [])}
        return {"peers": list(self.samplers), "left_out": left_out}

    def sample(self, ask):
        seconds, clean = self.samplers[ask["peer"]].sample()
        return {"ms": seconds * 1e3, "clean": clean}

    def release(self):
        self.samplers = {}
        for p in self.peers:
            p.release()


def main():
    warnings.filterwarnings("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    peers = Peers(int(sys.argv[1]), int(sys.argv[2]))
    for line in sys.stdin:
        ask = json.loads(line)
        answer = getattr(peers, ask["do"])(ask)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
