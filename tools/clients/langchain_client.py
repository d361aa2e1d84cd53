"""LangChain's OpenAI classes against a running server."""

import sys

from langchain_openai import ChatOpenAI, OpenAI


def main(url: str) -> None:
    about = {"base_url": url + "/v1", "api_key": "none", "model": sys.argv[2], "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(max_tokens=24, **about)
    said = chat.invoke([("system", "Answer briefly."), ("human", "Name a colour.")])
    print("ok  invoke:", repr(said.content), said.usage_metadata)
    assert said.content and said.usage_metadata["output_tokens"] > 0
    streamed = "".join(part.content for part in chat.stream([("system", "Answer briefly."), ("human", "Name a colour.")]))
    assert streamed == said.content, (streamed, said.content)
    print("ok  stream has the same text")
    both = chat.batch(["Name a colour.", "Name an animal."])
    assert all(b.content for b in both)
    print("ok  batch:", [b.content for b in both])
    text = OpenAI(max_tokens=8, **about).invoke("Once upon a time")
    assert text
    print("ok  completion:", repr(text))


if __name__ == "__main__":
    main(sys.argv[1])
