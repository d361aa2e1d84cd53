"""The engine cases: whole models in headway, llama.cpp and vLLM, in turn, in one run."""

import json
import statistics
import subprocess
import time

import environment
import link
import prompts

# Names of `headway pull`, and what the prompts need to know.
MODELS = {"smollm2": ("smollm2-135m-instruct", 49152), "gemma3": ("gemma3-270m", 262144)}
PROMPT, SHORT, CONTEXT = 512, 128, 768
START_LIMIT, VLLM_START_LIMIT, RUN_LIMIT = 120, 600, 300
ROUNDS, PREFILLS, GREEDY = 2, 2, 16


def run(options, log, results, notes):
    """Appends a line a model, weights and engine; notes say what was left out, and why."""
    _, no_vllm = environment.vllm_library(environment.site_packages())
    if no_vllm or options.no_vllm:
        notes["vllm, engines"] = no_vllm or "--no-vllm"
    for name in options.models.split(","):
        if name not in MODELS:
            notes[name] = f"not known; {', '.join(MODELS)} are"
            continue
        pulled, vocab = MODELS[name]
        given = dict(pair.split("=", 1) for pair in options.model_file)
        source = given.get(name) or pull(options, pulled, log)
        try:
            folder, bf16 = convert(options, name, source, log)
        except subprocess.SubprocessError as e:
            notes[name] = f"{e}; {options.log_file} has what it printed"
            continue
        weights = {"q4": (source, source, None), "bf16": (folder, bf16, folder)}
        with_vllm = "vllm, engines" not in notes
        for kind, (ours, llama, vllm) in weights.items():
            if time.monotonic() > options.deadline:
                notes[f"{name} {kind}"] = "not reached within --minutes"
                continue
            results.extend(measure(options, name, kind, vocab, ours, llama, vllm if with_vllm else None, notes, log))


def pull(options, name, log):
    log(f"headway pull {name}")
    done = subprocess.run([options.headway, "pull", "--json", name], capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise SystemExit(f"run.py: headway pull {name}: {done.stderr.strip()}")
    return json.loads(done.stdout)["path"]


def convert(options, name, source, log):
    """The bf16 folder and GGUF of a model, made once."""
    folder, out = environment.HOME / "models" / f"{name}-bf16", environment.HOME / "models" / f"{name}-bf16.gguf"
    marker = folder / "made-from"
    if not marker.is_file() or marker.read_text() != str(source):
        log(f"converting {source} to bfloat16")
        folder.mkdir(parents=True, exist_ok=True)
        command = [environment.PYTHON, environment.HERE / "convert.py", source, folder, out]
        with open(options.log_file, "ab") as errors:
            subprocess.run(
                command,
                check=True,
                timeout=1200,
                stdout=errors,
                stderr=errors,
                env=environment.child_environment(options.threads),
            )
        marker.write_text(str(source))
    return folder, out


class Headway:
    """A fresh process a measurement: `bench engine`, which loads, warms up, and times without loading."""

    def __init__(self, options, model, vocab):
        self.options, self.model, self.vocab, self.child = options, model, vocab, None
        self.environment = environment.child_environment(options.threads)

    def run(self, *arguments):
        start = time.monotonic()
        child = link.Link(
            "headway",
            [self.options.headway, *arguments, "--model", self.model, "--threads", self.options.threads, "--json"],
            self.environment,
            self.options.cpus,
            self.options.log_file,
        )
        try:
            answer = child.answer(RUN_LIMIT)
            return answer, time.monotonic() - start
        finally:
            child.end()

    def bench(self, prompt, output, concurrency, requests):
        shape = [
            "--prompt-len",
            prompt,
            "--output-len",
            output,
            "--concurrency",
            concurrency,
            "--num-requests",
            requests,
        ]
        return self.run("bench", "engine", *shape)[0]

    def round(self, outputs):
        many = self.options.requests
        alone, together = self.bench(PROMPT, 1, 1, PREFILLS), self.bench(SHORT, outputs, many, many)
        decode = self.bench(SHORT, 2 * outputs + 1, 1, 1)
        ids = ",".join(map(str, prompts.ids(SHORT, self.vocab, 0)))
        _, first = self.run("generate", "--prompt-ids", ids, "--max-tokens", 1, "--ignore-eos")
        peak = max(a["peak_rss_bytes"] for a in (alone, together, decode)) / 2**20
        return {
            "prefill": alone["prefill_tokens_per_s"], "decode": decode["decode_tokens_per_s"],
            "concurrent": together["output_tokens_per_s"], "first_token": first, "peak_mib": peak,
        }  # fmt: skip

    def greedy(self):
        ids = ",".join(map(str, prompts.ids(SHORT, self.vocab, 0)))
        answer, _ = self.run("generate", "--prompt-ids", ids, "--max-tokens", GREEDY, "--ignore-eos")
        return answer["token_ids"]

    def end(self):
        pass


class Worker:
    """A peer that stays up; only its start is repeated for the time to the first token."""

    def __init__(self, options, kind, model, vocab):
        self.vocab, self.kind = vocab, kind
        more = {}
        if kind == "vllm":
            bind = f"{options.cpus[0]}-{options.cpus[-1]}" if len(options.cpus) > 1 else str(options.cpus[0])
            more = {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": bind,
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_LOGGING_LEVEL": "WARNING",
            }
            openmp = environment.HOME / "venv" / "lib" / "libiomp5.so"
            if openmp.is_file():
                more["LD_PRELOAD"] = str(openmp)
        self.requests = options.requests
        program = [environment.PYTHON, environment.HERE / "engine_worker.py", kind, model, options.threads, CONTEXT]
        end = [vocab, *["eager"] * (options.vllm_eager or options.quick)]
        around = environment.child_environment(options.threads, **more)
        self.start = lambda requests: link.Link(
            kind, [*program, requests, *end], around, options.cpus, options.log_file
        )
        self.limit = VLLM_START_LIMIT if kind == "vllm" else START_LIMIT
        self.child = self.start(self.requests)
        self.first = self.wait(self.child)
        # Warms up what a first large batch sets up.
        self.ask([prompts.ids(PROMPT, vocab, 100)], 2)

    def wait(self, child):
        child.answer(self.limit)
        return time.monotonic() - child.started

    def ask(self, many, output, ids=False):
        return self.child.ask({"many": many, "output": output, "ids": ids}, RUN_LIMIT)

    def round(self, outputs):
        ids = lambda n, i: prompts.ids(n, self.vocab, i)
        alone = sum(self.ask([ids(PROMPT, i)], 1)["seconds"] for i in range(PREFILLS))
        together = self.ask([ids(SHORT, i) for i in range(self.requests)], outputs)
        decode = self.ask([ids(SHORT, 0)], 2 * outputs + 1)
        first = self.first
        if self.kind == "llama":
            child = self.start(1)  # room for one request is made sooner than for all
            first = self.wait(child)
            child.end()
        return {
            "prefill": PREFILLS * PROMPT / alone, "decode": 2 * outputs / decode["after_first"],
            "concurrent": self.requests * outputs / together["seconds"], "first_token": first, "peak_mib": self.child.peak_mib(),
        }  # fmt: skip

    def greedy(self):
        return self.ask([prompts.ids(SHORT, self.vocab, 0)], GREEDY, ids=True)["tokens"]

    def end(self):
        self.child.end()


def measure(options, name, kind, vocab, ours, llama, vllm, notes, log):
    """A line an engine: each figure's median, least and most over the rounds."""
    label = f"{name} {kind}"
    engines, rounds = {"headway": Headway(options, ours, vocab)}, {}
    makers = {"llama.cpp": lambda: Worker(options, "llama", llama, vocab)}
    if vllm:
        makers["vllm"] = lambda: Worker(options, "vllm", vllm, vocab)
    try:
        for peer, make in makers.items():
            try:
                engines[peer] = make()
                log(f"{label}: {peer} is up after {engines[peer].first:.1f} s")
            except link.Died as e:
                notes[f"{peer} {label}"] = str(e)
        for _ in range(1 if options.quick else ROUNDS):
            for peer in list(engines):
                try:
                    meanwhile = link.Meanwhile([e.child for e in engines.values() if e.child])
                    rounds.setdefault(peer, []).append(engines[peer].round(16 if options.quick else options.output_len))
                    rounds[peer][-1]["others_cpu"] = meanwhile.cores()
                    log(f"{label}: {peer} " + ", ".join(f"{k} {v:.4g}" for k, v in rounds[peer][-1].items()))
                except link.Died as e:
                    if peer == "headway":
                        raise
                    notes[f"{peer} {label}"] = str(e)
                    engines.pop(peer).end()
        tokens = {}
        for peer, engine in engines.items():
            try:
                tokens[peer] = engine.greedy()
            except link.Died as e:
                notes[f"{peer} {label}"] = str(e)
    finally:
        for engine in engines.values():
            engine.end()
    return [line(name, kind, peer, rounds[peer], tokens) for peer in engines if rounds.get(peer)]


def line(name, kind, peer, rounds, tokens):
    figures = {"others_cpu": max(r["others_cpu"] for r in rounds)}
    for key in rounds[0].keys() - figures.keys():
        values = [r[key] for r in rounds]
        figures[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    equal = {}
    if peer != "headway" and {peer, "headway"} <= tokens.keys():
        pairs = list(zip(tokens["headway"], tokens[peer]))
        equal = {
            "same_tokens": next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)),
            "greedy_tokens": GREEDY,
        }
    return {"bench": "engine", "peer": peer, "model": name, "weights": kind, "rounds": len(rounds), **figures, **equal}
