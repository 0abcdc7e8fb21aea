"""The Flask app around a scripted engine, for the tests of validation, framing and errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
from array import array
from typing import Any

from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from api.options import ServerConfig
from api.routes import Api
from config import DEMO
from plan import EngineCoreRequest, EngineOutput, Logprobs, Picture
from processes.child import Board
from processes.client import EngineDeadError, MPClient, Stream
from sampling_params import PoolingParams, SamplingParams
from server import create_app
from tokenizer import Tokenizer

FACTS = {
    "max_model_len": 64, "vocab_size": 1024, "scheduling_policy": "fcfs", "data_parallel_size": 1,
    "max_num_seqs": 4, "max_image_pixels": 10**6, "max_images": 16, "eos_token_ids": (0, 1), "max_logprobs": 20,
    "default_sampling": {}, "task": "generate", "prompts": {}, "default_prompt_name": None, "cuts_texts": False,
    "pair_template": "", "token_types": 0, "options": {"model": DEMO},
}  # fmt: skip
TEXT = "Hello, wörld 日本! "  # what the scripted engine answers, again and again
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {COMPLETIONS: {"prompt": "To be"}, CHAT: {"messages": [{"role": "user", "content": "Hi"}]}}
ANSWERING = BODIES | {
    "/v1/responses": {"input": "Hi"}, "/v1/messages": {"messages": BODIES[CHAT]["messages"], "max_tokens": 4},
}  # fmt: skip
TOKENIZER = Tokenizer(DEMO)
END = next(iter(sorted(TOKENIZER.special_ids)))  # a token that ends an answer
MISSING = object()


class ScriptedClient:
    """Stands in for `MPClient`: answers TEXT token by token, sample i from its i-th token on; or what `script` says.

    Where there is a text that it `says`, each answer is that, up to its limit.

    Log-probabilities are those of `made_up`: of token i of an answer at place i, of a prompt's at place -i.
    """

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.added: list[tuple[list[int], SamplingParams, str]] = []
        self.clients: list[str] = []  # of those
        self.pooled: list[tuple[list[int], PoolingParams]] = []
        self.open: set[str] = set()
        self.streams: dict[str, Stream] = {}
        self.aborted: list[tuple[str, int | None, str]] = []
        self.stories: dict[str, dict[str, Any]] = {}
        self.retentions: list[int] = []  # of each request
        self.pictures: list[list[Picture]] = []  # of each request
        self.script: list[EngineOutput | Exception] | None = None
        self.says: str | None = None

    def add_request(self, request: EngineCoreRequest, stream: Stream) -> Stream:
        if self.trouble:
            raise EngineDeadError(self.trouble)
        id, params = request.request_id, request.params
        if request.pooling is not None:
            self.pooled.append((request.prompt_token_ids, request.pooling))
            vector = vector_of(request.prompt_token_ids)
            stream.put(EngineOutput(id, [], "stop", finished=True, pooled=vector, time_in_queue=0.0))
            return stream
        self.added.append((request.prompt_token_ids, params, request.salt))
        self.clients.append(request.client)
        self.retentions.append(request.retention)
        self.pictures.append(request.pictures)
        self.open.add(id)
        self.streams[id] = stream
        for item in self.score(request.prompt_token_ids, params) if self.script is None else self.script:
            stream.put(dataclasses.replace(item, request_id=id) if isinstance(item, EngineOutput) else item)
        return stream

    def score(self, prompt: list[int], params: SamplingParams) -> list[EngineOutput | Exception]:
        """The answer with its log-probabilities; before it come those of the prompt, 3 tokens at a time."""
        news = [told([], "length", i) for i in range(params.n)] if params.max_tokens == 0 else []
        news, places = news or self.answer(params), [0] * params.n
        news[-1].finished = True
        if params.logprobs is not None:
            for output in news:
                place = places[output.index]
                output.logprobs = [made_up(id, i, params.logprobs) for i, id in enumerate(output.token_ids, place)]
                places[output.index] += len(output.token_ids)
        if params.prompt_logprobs is not None:
            scores = [made_up(prompt[i], -i, params.prompt_logprobs) for i in range(1, len(prompt))]
            last = len(scores) // 3 * 3  # these come with the first token
            parts = [scores[i : i + 3] for i in range(0, last, 3)]
            news[0].prompt_logprobs = scores[last:]
            news = [dataclasses.replace(told([]), prompt_logprobs=part) for part in parts] + news
        return list(news)

    def answer(self, params: SamplingParams) -> list[Any]:
        limit, samples = params.max_tokens or 1, params.n
        if self.says is not None:
            ids = [*TOKENIZER.encode(self.says, add_special_tokens=False), END][:limit]
            news = [told([id], None, i) for id in ids for i in range(samples)]
            for output in news[-samples:]:
                output.finish_reason = "stop" if ids[-1] == END else "length"
            return list(news)
        tokens = TOKENIZER.encode(TEXT) * (limit + samples)
        if params.use_beam_search:
            news = [told(tokens[i : i + limit], "length", i, logprob=-i) for i in range(samples)]
        else:
            news = [told([tokens[i + step]], None, i) for step in range(limit) for i in range(samples)]
        for output in news[-samples:]:
            output.finish_reason = "length"
        news[-1].finished = True
        return list(news)

    def get_output(self, stream: Stream, timeout: float | None = None) -> EngineOutput:
        return stream.get(timeout)

    fail = MPClient.fail

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        if index is None:
            self.open.discard(request_id)
        self.aborted.append((request_id, index, reason))

    def utility(self, method: str, *args: Any) -> dict[int, Any]:
        if method == "explain_prompts":
            name, most, _ = args
            return {0: [self.stories[id] for i in range(most) if (id := f"{name}-{i}") in self.stories]}
        if method == "live":
            return {}
        assert method == "metrics"
        return {0: {"num_requests_running": 3, "prompt_tokens_total": 70}}


def vector_of(ids: list[int]) -> bytes:
    """What the scripted engine makes of a prompt."""
    return array("f", [len(ids), ids[0], -0.5]).tobytes()


@functools.cache
def made_up(id: int, place: int, top: int) -> Logprobs:
    """Log-probabilities of a token at a place, and of some `top` others; it may be one of these."""
    random_ = random.Random(f"{id} {place}")
    ids = random_.sample([i for i in range(1024) if i != id], 20)
    values = sorted((-10 * random_.random() for _ in ids), reverse=True)
    values[-3:] = [-math.inf] * 3
    rank = random_.choice([1, 2, 4, 18, 25])
    if rank <= 20:
        ids[rank - 1] = id
    return Logprobs(values[rank - 1] if rank <= 20 else -math.inf, ids[:top], values[:top], rank)


def told(
    ids: list[int], finish: str | None = None, index: int = 0, error: str | None = None, logprob: float | None = None
) -> EngineOutput:
    """An output of a request; an error is its last, and of the others `finished` tells."""
    return EngineOutput(
        "any", ids, finish, None, num_cached_tokens=2, error=error, index=index, cumulative_logprob=logprob,
        finished=error is not None, time_in_queue=0.0)  # fmt: skip


BROKEN = EngineOutput("any", [], "error", error="worker died", finished=True, engine_fault=True)


def client_of(engine: ScriptedClient, facts: dict[str, Any] = FACTS, **config: Any) -> FlaskClient:
    names = ["manta", "org/other"]
    return create_app(Api(engine, TOKENIZER, facts, ServerConfig(**config), names, Board())).test_client()


def post(http_client: FlaskClient, route: str, **fields: Any) -> TestResponse:
    body = {name: value for name, value in (ANSWERING.get(route, {}) | fields).items() if value is not MISSING}
    return http_client.post(route, json=body)


def refusal(response: TestResponse, status: int = 400) -> dict[str, Any]:
    """The error, after a look at its form."""
    assert response.status_code == status, response.text
    assert response.mimetype == "application/json"
    error = json.loads(response.data)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    assert 0 < len(error["message"]) <= 1000
    return error


def error_of(response: TestResponse, status: int, kind: str) -> str:
    """The message of an error as Anthropic spells it."""
    assert response.status_code == status and response.mimetype == "application/json", response.text
    assert set(response.json) == {"type", "error"} and response.json["type"] == "error"
    assert set(response.json["error"]) == {"type", "message"} and response.json["error"]["type"] == kind
    return response.json["error"]["message"]


def refused(http_client: FlaskClient, route: str, **fields: Any) -> str:
    """The message of a mistake, after a look at its form, which is that of the route."""
    response = post(http_client, route, **fields)
    messages = route == "/v1/messages"
    return error_of(response, 400, "invalid_request_error") if messages else refusal(response)["message"]


def events(response: TestResponse) -> list[dict[str, Any]]:
    """The events of a stream, after a look at its framing."""
    assert response.status_code == 200, response.text
    assert response.mimetype == "text/event-stream" and response.headers["Cache-Control"] == "no-cache"
    frames = response.data.split(b"\n\n")
    response.close()  # as gunicorn does
    assert frames[-2:] == [b"data: [DONE]", b""]
    assert all(frame.startswith(b"data: {") and b"\n" not in frame for frame in frames[:-2])
    return [json.loads(frame[6:]) for frame in frames[:-2]]
