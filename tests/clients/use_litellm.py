"""LiteLLM, with the server as a provider of OpenAI's, vLLM's and Anthropic's kind, and by its router."""

import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(os.environ["CLIENTS"]).parent))
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would download a list of prices

import litellm

from agent_bodies import PICTURE

URL, EMBEDDER = os.environ["DEMO_URL"], os.environ["EMBEDDER_URL"] + "/v1"
SUM = [{"role": "user", "content": "What is 23 + 58?"}]
FIELDS = {"messages": SUM, "temperature": 0, "api_key": "none", "num_retries": 0, "max_tokens": 32}
OPENAI = {"model": "openai/demo", "api_base": URL + "/v1"}
KINDS = (OPENAI, {"model": "hosted_vllm/demo", "api_base": URL + "/v1"}, {"model": "anthropic/demo", "api_base": URL})


def refused(kind, **fields):
    try:
        litellm.completion(**FIELDS | OPENAI | fields)
    except kind as error:
        return error
    raise AssertionError(f"{fields} is not refused")


def chat(kind):
    answer = litellm.completion(**FIELDS, **kind)
    text = answer.choices[0].message.content
    assert "81" in text and answer.choices[0].finish_reason == "stop" and answer.usage.prompt_tokens > 0, answer
    chunks = list(litellm.completion(**FIELDS, **kind, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    rebuilt = litellm.stream_chunk_builder(chunks, messages=SUM)
    assert rebuilt.usage.completion_tokens == answer.usage.completion_tokens
    assert "8" not in (litellm.completion(**FIELDS, **kind, stop=["8"]).choices[0].message.content or "")


def pictures(kind):
    """Each kind sends two, of which one is in an earlier turn."""
    seeing = kind | {"api_base": kind["api_base"].replace(URL, os.environ["SEEING_URL"])}
    seeing["model"] = seeing["model"].replace("demo", "scripted")
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
    asks = [{"role": "user", "content": [image, {"type": "text", "text": "Please play seen."}]}]
    for want in "I see 1.", "I see 2.":
        answer = litellm.completion(**FIELDS | {"messages": asks}, **seeing).choices[0].message.content
        assert answer == want, answer
        asks = [*asks, {"role": "assistant", "content": answer}, asks[0]]


def others():
    answer = litellm.completion(**FIELDS, **OPENAI, logprobs=True, top_logprobs=2, n=2, seed=1, user="me")
    assert len(answer.choices) == 2 and len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    done = litellm.text_completion(
        model="text-completion-openai/demo", api_base=URL + "/v1", prompt="To be", max_tokens=4, api_key="none"
    )
    assert done.usage.completion_tokens == 4
    said = litellm.responses(**OPENAI, input="What is 23 + 58?", temperature=0, api_key="none")
    assert "81" in said.output[0].content[0].text
    batch = litellm.batch_completion(**FIELDS | OPENAI | {"messages": [SUM] * 4})
    assert ["81" in one.choices[0].message.content for one in batch] == [True] * 4
    embedded = litellm.embedding(
        model="openai/embedder", api_base=EMBEDDER, input=["To be", "or not"], api_key="none", encoding_format="float"
    )
    assert [len(entry["embedding"]) for entry in embedded.data] == [64] * 2
    ranked = litellm.rerank(
        model="hosted_vllm/embedder", api_base=EMBEDDER, query="To be", documents=["or not", "To be"], api_key="none"
    )
    assert ranked.results[0]["index"] == 1, ranked


def errors():
    refused(litellm.BadRequestError, temperature=-1)
    refused(litellm.NotFoundError, model="openai/other")
    refused(litellm.ContextWindowExceededError, messages=[{"role": "user", "content": "word " * 5000}])
    refused(litellm.ContextWindowExceededError, max_tokens=5000)


async def routed():
    router = litellm.Router(
        [{"model_name": "sums", "litellm_params": OPENAI | {"api_key": "none"}}], num_retries=0, set_verbose=False
    )

    async def ask(a):
        words = [{"role": "user", "content": f"What is {a} + 58?"}]
        stream = await router.acompletion("sums", words, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    sums = [str(a + 58) in text for a, text in enumerate(await asyncio.gather(*map(ask, range(16))))]
    assert sum(sums) >= 13, sums


for kind in KINDS:
    chat(kind)
    pictures(kind)
others()
errors()
asyncio.run(routed())
