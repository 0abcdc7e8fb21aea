"""LlamaIndex, by OpenAILike and OpenAILikeEmbedding."""

import asyncio
import os

import openai
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

FIELDS = {
    "model": "demo", "api_base": os.environ["DEMO_URL"] + "/v1", "api_key": "none", "temperature": 0, "max_retries": 0,
    "context_window": 1024, "max_tokens": 32,
}  # fmt: skip
SUM = [ChatMessage(role="user", content="What is 23 + 58?")]
chats, texts = OpenAILike(**FIELDS, is_chat_model=True), OpenAILike(**FIELDS)

answer = chats.chat(SUM)
assert "81" in answer.message.content and answer.raw.usage.prompt_tokens > 0
assert "".join(part.delta or "" for part in chats.stream_chat(SUM)) == answer.message.content
assert chats.complete(SUM[0].content).text == answer.message.content
longer = [ChatMessage(role="system", content="Be brief."), *SUM]
assert chats.chat(longer).raw.usage.prompt_tokens > answer.raw.usage.prompt_tokens

text = texts.complete("To be, or not").text
assert text and "".join(part.delta for part in texts.stream_complete("To be, or not")) == text


async def asynchronous():
    assert "81" in (await chats.achat(SUM)).message.content
    stream = await chats.astream_chat(SUM)
    assert "81" in "".join([part.delta or "" async for part in stream])


asyncio.run(asynchronous())

try:
    chats.chat(SUM, temperature=-1)
except openai.BadRequestError as error:
    assert "temperature" in str(error)
else:
    raise AssertionError("a negative temperature is not refused")

embedder = OpenAILikeEmbedding(
    model_name="embedder", api_base=os.environ["EMBEDDER_URL"] + "/v1", api_key="none", max_retries=0
)
found = embedder.get_text_embedding_batch(["To be", "or not to be", "that is the question"] * 5)
assert [len(vector) for vector in found] == [64] * 15
one = embedder.get_query_embedding("or not to be")
assert max(abs(a - b) for a, b in zip(found[1], one, strict=True)) < 1e-5
