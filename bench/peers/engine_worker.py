"""An engine in a process of its own: engine_worker.py llama|vllm MODEL THREADS CONTEXT REQUESTS VOCAB [eager].

Loads the model, generates one token of a 128-token prompt and says so; then answers each line
`{"many": PROMPTS, "output": TOKENS, "ids": WANTED}` with the seconds of the whole, the seconds after the
first token (of a single prompt), and the first answer's ids."""

import json
import os
import sys
import threading
import time

import prompts


class Llama:
    """llama.cpp's server loop without its HTTP part, as xllamacpp offers it."""

    def __init__(self, model, threads, context, requests):
        import xllamacpp

        p = xllamacpp.CommonParams()
        p.model.path = model
        p.n_ctx, p.n_parallel, p.kv_unified = context * requests, requests, False
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
        p.warmup = False  # the first token comes sooner
        self.server = xllamacpp.Server(p)

    def one(self, prompt, output, ids):
        ask = {"prompt": prompt, "n_predict": output, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        answer = self.server.handle_completions({**ask, "logprobs": 1} if ids else ask)
        if "timings" not in answer:
            raise RuntimeError(f"llama.cpp: {answer}")
        return answer

    def generate(self, many, output, ids=False):
        answers = [None] * len(many)

        def run(i):
            answers[i] = self.one(many[i], output, ids)

        start = time.perf_counter()
        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(many))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        total = time.perf_counter() - start
        if not all(answers):
            raise RuntimeError("llama.cpp: a request failed")
        tokens = [t["id"] for t in answers[0]["choices"][0]["logprobs"]["content"]] if ids else []
        return total, answers[0]["timings"]["predicted_ms"] / 1e3, tokens


class Vllm:
    def __init__(self, model, threads, context, requests, eager):
        from vllm import LLM, SamplingParams

        self.params = lambda n: SamplingParams(
            temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False
        )
        self.llm = LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=context,
            max_num_seqs=requests,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            enforce_eager=eager,
            skip_tokenizer_init=True,
            seed=0,
        )
        self.number = 0

    def generate(self, many, output, ids=False):
        engine = self.llm.llm_engine
        start = time.perf_counter()
        first_id = str(self.number)
        for prompt in many:
            engine.add_request(str(self.number), {"prompt_token_ids": prompt}, self.params(output))
            self.number += 1
        first, tokens = None, []
        while engine.has_unfinished_requests():
            for o in engine.step():
                if o.request_id.split("-")[0] == first_id and o.outputs[0].token_ids:
                    first = first or time.perf_counter()
                    tokens = list(o.outputs[0].token_ids)
        end = time.perf_counter()
        return end - start, end - first, tokens


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    which, model, *numbers = sys.argv[1:6] + sys.argv[6:7]
    threads, context, requests, vocab = map(int, numbers)
    engine = (
        Llama(model, threads, context, requests)
        if which == "llama"
        else Vllm(model, threads, context, requests, "eager" in sys.argv)
    )

    def answer(many, output, ids=False):
        total, after_first, tokens = engine.generate(many, output, ids)
        answers.write(json.dumps({"seconds": total, "after_first": after_first, "tokens": tokens}) + "\n")
        answers.flush()

    answer([prompts.ids(128, vocab, 0)], 1)
    for line in sys.stdin:
        ask = json.loads(line)
        answer(**ask)
    os._exit(0)  # some runtimes' threads don't end by themselves


if __name__ == "__main__":
    main()
