"""The official `openai` package against a running server: every call that people make, and the errors they must see."""

import sys

import openai


def check(what: str, fine: bool, seen: object = "") -> None:
    print(f"{'ok ' if fine else 'BAD'} {what}" + (f": {seen}" if seen != "" else ""), flush=True)
    if not fine:
        sys.exit(1)


def main(url: str) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    check("models.list", bool(model), model)
    check("models.retrieve", client.models.retrieve(model).id == model)
    ask = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "What is the capital of France?"}]
    plain = client.chat.completions.create(model=model, messages=ask, max_tokens=24, temperature=0)
    text = plain.choices[0].message.content
    check("chat", bool(text) and plain.choices[0].finish_reason in ("stop", "length"), repr(text))
    usage = plain.usage
    check("chat usage", usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0, usage.total_tokens)

    chunks = list(client.chat.completions.create(
        model=model, messages=ask, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    check("chat stream has the same text", streamed == text)
    check("chat stream usage", chunks[-1].usage.completion_tokens == usage.completion_tokens)
    check("chat stream ends", [c.choices[0].finish_reason for c in chunks if c.choices][-1] == plain.choices[0].finish_reason)

    seeded = [client.chat.completions.create(model=model, messages=ask, max_tokens=16, temperature=1.0, seed=7)
              .choices[0].message.content for _ in range(2)]
    check("the same seed, the same answer", seeded[0] == seeded[1], repr(seeded[0]))
    several = client.chat.completions.create(model=model, messages=ask, max_completion_tokens=8, temperature=1.0, n=3)
    check("n", [c.index for c in several.choices] == [0, 1, 2])
    logs = client.chat.completions.create(
        model=model, messages=ask, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    best = all(e.top_logprobs[0].token == e.token and e.top_logprobs[0].logprob == e.logprob for e in logs)
    check("chat logprobs", len(logs) == 4 and best and all(len(e.top_logprobs) == 3 for e in logs))
    check("a token's bytes", b"".join(bytes(e.bytes) for e in logs).decode(errors="replace") != "")
    stop = client.chat.completions.create(model=model, messages=ask, max_tokens=24, temperature=0, stop=["Paris"])
    stopped = stop.choices[0]
    check("stop", "Paris" not in stopped.message.content and (("Paris" not in text) or stopped.finish_reason == "stop"))

    once = {"model": model, "prompt": "the the the the", "max_tokens": 24, "temperature": 0, "logprobs": 1}
    varied = client.completions.create(**once, presence_penalty=2, frequency_penalty=2).choices[0]
    plain_tokens, tokens = client.completions.create(**once).choices[0].logprobs.tokens, varied.logprobs.tokens
    check("penalties make tokens differ", len(set(tokens)) > len(set(plain_tokens)), f"{len(set(plain_tokens))} to {len(set(tokens))}")
    biased = client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=3, temperature=0, logit_bias={"42": 100}, logprobs=1)
    check("logit_bias", len(set(biased.choices[0].logprobs.tokens)) == 1, repr(biased.choices[0].text))

    done = client.completions.create(model=model, prompt="Once upon a time", max_tokens=12, temperature=0, logprobs=2)
    choice = done.choices[0]
    check("completion", bool(choice.text), repr(choice.text))
    check("completion logprobs", len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 12)
    parts = list(client.completions.create(model=model, prompt="Once upon a time", max_tokens=12, temperature=0, stream=True))
    check("completion stream", "".join(p.choices[0].text for p in parts) == choice.text)
    two = client.completions.create(model=model, prompt=["One", "Two"], max_tokens=4, n=2, temperature=0.5, echo=True)
    check("completion of two prompts, twice, with echo",
          [c.text[:3] for c in two.choices] == ["One", "One", "Two", "Two"])

    for what, call, error in [
        ("an unknown model", lambda: client.chat.completions.create(model="gpt-9", messages=ask), openai.NotFoundError),
        ("a temperature below 0", lambda: client.chat.completions.create(model=model, messages=ask, temperature=-1), openai.BadRequestError),
        ("a bias above 100", lambda: client.chat.completions.create(model=model, messages=ask, logit_bias={"1": 101}), openai.BadRequestError),
        ("no messages", lambda: client.chat.completions.create(model=model, messages=[]), openai.BadRequestError),
        ("a prompt that is too long", lambda: client.completions.create(model=model, prompt="a " * 50000), openai.BadRequestError),
        ("an unknown parameter", lambda: client.completions.create(model=model, prompt="a", extra_body={"nosuch": 1}), openai.BadRequestError),
    ]:
        try:
            call()
            check(f"{what} is refused", False)
        except error as e:
            check(f"{what} is refused", bool(e.body["message"]), f"{e.status_code} {e.param}: {e.body['message'][:90]}")
    stream = client.chat.completions.create(model=model, messages=ask, max_tokens=500, stream=True)
    next(iter(stream))
    stream.close()
    check("a stream that is closed", True)


if __name__ == "__main__":
    main(sys.argv[1])
