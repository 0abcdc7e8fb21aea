"""What each route does, without HTTP: fields that have been checked become prompts, and these an answer.

    Api         the routes; `answer` is the way in
    Caller      who asks
    Events      an answer that comes in parts

`api/fields.py` says what a request may hold, and `api/replies.py` shapes what goes out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import reprlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gevent.threadpool import ThreadPool

from api.anthropic import Messages
from api.checks import in_parts
from api.fields import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    PARAMS,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    ApiError,
    read_fields,
    too_long,
    without_folders,
)
from api.options import ServerConfig
from api.reading import Parsers, Reading
from api.replies import Client, Job, Peer, Run, classes, ranks, run_requests, scores, vectors
from api.response_store import Store, refuse_query
from api.responses import Responses, as_chat, renamed
from api.structure import structure_of
from api.viewers import Viewers, exposition
from config import VERSION
from outputs import Vector, cosine, numbers
from processes.child import Board
from sampling_params import PoolingParams, SamplingParams
from text.messages import item_messages
from tokenizer import LONG_TEXT, Tokenizer

CUT_MARGIN = 64  # tokens beyond those that are kept of a text, so that where it is cut changes none of them
TEXT_THREADS = 2  # of each API process, that turn long texts into tokens


@dataclass(slots=True)
class Caller:
    """Who asks, and how to tell whether somebody still waits for the answer.

    Attributes:
        name: of the request, unique, which is a part of the reply's id.
        client: whose request it is, as far as fairness, cached prefixes and `explain` are concerned.
        peer: the other end of the connection; None where there is none to look at.
        release: is called when nothing refers to the request's body any more.
        job: what the engine does for it, once it has been sent there.
    """

    name: str
    client: str
    peer: Peer | None = None
    release: Callable[[], None] = lambda: None
    job: Job | None = None


class Events(NamedTuple):
    """A reply that comes in parts, and what must be called once it has ended, however it ended."""

    events: Iterator[bytes]
    close: Callable[[], None]


class Api:
    """What each route does, and what the routes share.

    Args:
        client: of the engine, or of several.
        tokenizer: of the model.
        facts: `max_model_len`, `vocab_size` and more, as the engine reports them.
        config: the caps and keys.
        names: of the model, the first is what replies say.
        board: shared with the other API processes.
    """

    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer,
        facts: dict[str, Any],
        config: ServerConfig,
        names: Sequence[str],
        board: Board,
    ):
        self.client, self.tokenizer, self.facts, self.config, self.names = client, tokenizer, facts, config, names
        self.board, self.threads = board, ThreadPool(TEXT_THREADS)
        self.started, self.store = int(time.time()), Store(config)
        self.viewers, self.parsers = Viewers(client, config, board), Parsers(config, tokenizer)
        self.answers: dict[str, Callable[[dict[str, Any], Caller], dict[str, Any] | Events]] = {
            COMPLETIONS: self.completions, CHAT: self.chat, TOKENIZE: self.tokenize, DETOKENIZE: self.detokenize,
            EMBEDDINGS: self.embeddings, POOLING: self.pool, CLASSIFY: self.classify, SCORE: self.score,
            RERANK: self.rerank,
            RESPONSES: self.responses, MESSAGES: self.messages, COUNT_TOKENS: self.count_tokens,
        }  # fmt: skip

    def answer(self, route: str, body: dict[str, Any], caller: Caller) -> dict[str, Any] | Events:
        """The reply to a request of one of `protocol.ROUTES`.

        Raises:
            ApiError: the request is refused, or the engine has failed.
            EngineDeadError, ClientGone: see `Run.news`.
        """
        fields = read_fields(route, body, self.config)
        del body  # it may be large
        fields["model"] = self._name(fields["model"])
        return self.answers[route](fields, caller)

    def completions(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any] | Events:
        """Texts that go on from prompts."""
        special, output = fields["add_special_tokens"] is not False, self._least_output(fields, 16)
        given = self._around_gap(fields) if fields["suffix"] else fields["prompt"]
        prompts = [self._prompt(fields, prompt, special, output) for prompt in given]
        return self._generate(COMPLETIONS, fields, caller, prompts, default_max_tokens=16)

    def chat(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any] | Events:
        """The next message of a conversation."""
        prompt, reading = self._conversation(fields)
        return self._generate(CHAT, fields, caller, [prompt], default_max_tokens=None, reading=reading)

    def responses(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any] | Events:
        """The next message of a conversation, in the shapes of OpenAI's Responses API."""
        if fields["store"] is None:
            fields["store"] = not self.store.closed
        elif fields["store"] and self.store.closed:
            raise ApiError(400, f"store is true; {self.store.closed}", "store")
        owner, previous, items = caller.client, fields["previous_response_id"], fields.pop("input")
        for i, item in enumerate(items):
            item["id"] = item["id"] or f"msg_{caller.name}_{i}"
        if previous is not None:
            items = self.store.conversation(owner, previous) + items
        keep = self.store.keeper(owner, items) if fields["store"] else lambda response: None
        messages = item_messages(items)
        if fields["instructions"] is not None:
            messages = [{"role": "system", "content": fields["instructions"]}, *messages]
        chat = as_chat(
            fields, messages, max_tokens=fields["max_output_tokens"],
            reasoning_effort=fields["reasoning"].get("effort"), response_format=fields["text"].get("structure"),
        )  # fmt: skip
        names = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}
        with renamed(**names, response_format="text.format"):
            prompt, reading = self._conversation(chat)
            shape = functools.partial(Responses, fields, keep)
            return self._generate(RESPONSES, chat, caller, [prompt], None, shape, reading)

    def messages(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any] | Events:
        """The next message of a conversation, or the rest of its last one, in the shapes of Anthropic's API."""
        with renamed(prompt="messages", response_format="output_config.format"):
            chat = self._turns(fields) | {"stop": fields["stop_sequences"]}
            prompt, reading = self._conversation(chat)
            return self._generate(MESSAGES, chat, caller, [prompt], None, Messages, reading)

    def count_tokens(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """How many tokens the prompt of such a request has."""
        with renamed(prompt="messages"):
            chat = self._turns(fields)
            return {"input_tokens": len(self._prompt(chat, self._render(chat), False)[1])}

    def tokenize(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """The tokens of a text or a conversation."""
        special = fields["add_special_tokens"]
        if fields["messages"] is not None:
            ids = self._prompt(fields, self._render(fields), bool(special))[1]
        elif fields["prompt"] is not None and isinstance(fields["prompt"][0], str) and len(fields["prompt"]) == 1:
            ids = self._prompt(fields, fields["prompt"][0], special is not False)[1]
        else:
            raise ApiError(400, "prompt must be a string, or messages a list of messages", "prompt")
        strings = None
        if fields["return_token_strs"] is not False:
            strings = [self.tokenizer.token(id) for part in in_parts(ids) for id in part]
        limit = self.facts["max_model_len"]
        return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}

    def detokenize(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """The text of tokens."""
        ids, limit, size = fields["tokens"], self.facts["max_model_len"], self.facts["vocab_size"]
        if len(ids) > limit:
            raise ApiError(400, f"tokens has {len(ids)} ids; at most {limit} are allowed (max_model_len)", "tokens")
        if (highest := max(ids, default=0)) >= size:
            raise ApiError(400, f"tokens has the id {highest}; allowed: 0 to {size - 1}", "tokens")
        return {"prompt": self.tokenizer.decode(ids, skip_special_tokens=False)}

    # --- routes that sample nothing ----------------------------------------------------------------------------------

    def embeddings(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """A vector for each prompt."""
        prompts = self._inputs(fields, "embed")
        found = self._pool("embd-", fields, caller, prompts, fields["dimensions"])
        data = vectors("embedding", "embedding", found, fields["encoding_format"])
        return self._listed("embd-", fields, caller, prompts, data)

    def pool(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """What the model makes of each prompt: a vector, or what its classification head says."""
        prompts, task = self._inputs(fields, "embed", "score", "classify"), self.facts["task"]
        if fields["task"] not in (None, task, "classify" if task == "score" else task):
            raise ApiError(400, f"task is {fields['task']}; this server's is {task}", "task")
        found = self._pool("pool-", fields, caller, prompts, fields["dimensions"])
        data = vectors("pooling", "data", found, fields["encoding_format"])
        return self._listed("pool-", fields, caller, prompts, data)

    def classify(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """The probability of each label for each prompt."""
        prompts = self._inputs(fields, "classify", "score")
        data = classes(self._pool("classify-", fields, caller, prompts), self.facts["labels"])
        return self._listed("classify-", fields, caller, prompts, data)

    def score(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """How well each of `text_2` goes with its partner in `text_1`, or with the only one there."""
        first, second = fields["text_1"], fields["text_2"]
        if len(first) not in (1, len(second)):
            message = f"text_1 has {len(first)} texts for {len(second)} of text_2; it must have as many, or 1"
            raise ApiError(400, message, "text_1")
        found, prompts = self._compare("score-", fields, caller, first, second)
        return self._listed("score-", fields, caller, prompts, scores(found))

    def rerank(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """Documents in the order of how well they answer a query."""
        documents = fields["documents"]
        found, prompts = self._compare("rerank-", fields, caller, [fields["query"]], documents)
        top_n = fields["top_n"] or len(documents)
        results = ranks(found, documents, top_n, fields["return_documents"])
        count = sum(len(ids) for _, ids in prompts)
        used = {"prompt_tokens": count, "total_tokens": count}
        return {"id": "rerank-" + caller.name, "model": fields["model"], "usage": used, "results": results}

    def _compare(
        self, kind: str, fields: dict[str, Any], caller: Caller, first: list[str], second: list[str]
    ) -> tuple[list[float], list[tuple[str | None, list[int]]]]:
        """How well texts go together, and the prompts that were run for it.

        For an embedder that is the cosine of two embeddings. For a classifier with one label, it is what the classifier
        says of both texts as one prompt.
        """
        self._need_task("embed", "score")
        if self.facts["task"] == "score":
            pairs = zip(first * (len(second) // len(first)), second, strict=True)
            prompts: list[Any] = [self._prompt(fields, pair, True) for pair in pairs]
            return [numbers(found)[0] for found in self._pool(kind, fields, caller, prompts)], prompts
        prompts = [self._prompt(fields, text, True) for text in first + second]
        found = [numbers(pooled) for pooled in self._pool(kind, fields, caller, prompts)]
        left = found[: len(first)] * (len(second) // len(first))
        return [cosine(a, b) for a, b in zip(left, found[len(first) :], strict=True)], prompts

    def _inputs(self, fields: dict[str, Any], *tasks: str) -> list[tuple[str | None, list[int]]]:
        self._need_task(*tasks)
        return [self._prompt(fields, prompt, fields["add_special_tokens"] is not False) for prompt in fields["input"]]

    def _need_task(self, *tasks: str) -> None:
        if (task := self.facts["task"]) not in tasks:
            needed = " or ".join(tasks)
            raise ApiError(400, f"this server's task is {task}; this route needs {needed} (--task)", "model")

    def _pool(
        self,
        kind: str,
        fields: dict[str, Any],
        caller: Caller,
        prompts: list[tuple[str | None, list[int]]],
        dimensions: int | None = None,
    ) -> list[bytes]:
        """The vector of each prompt."""
        limit, name = self.facts["max_model_len"], kind + caller.name
        self._check_priority(fields)
        for _, ids in prompts:
            if len(ids) > limit:
                raise too_long(limit, f"a prompt is too long: it has {len(ids)}")
        if dimensions is not None and dimensions > (most := self.facts["hidden_size"]):
            raise ApiError(400, f"dimensions is {dimensions}; at most {most} are there", "dimensions")
        params = PoolingParams(dimensions, fields["use_activation"])
        vectors = [Vector(f"{name}-{i}", ids, params) for i, (_, ids) in enumerate(prompts)]
        with self._admitted(len(vectors), caller):
            caller.job = Job(name, fields, vectors)
            config = self.config
            for _ in run_requests(vectors, fields, caller.client, self.client, caller.peer, config.request_timeout):
                pass
        return [vector.pooled for vector in vectors]

    def _listed(self, kind: str, fields: dict[str, Any], caller: Caller, prompts: Any, data: Any) -> dict[str, Any]:
        count, now = sum(len(ids) for _, ids in prompts), int(time.time())
        head = {"id": kind + caller.name, "object": "list", "created": now, "model": fields["model"]}
        return head | {"data": data, "usage": {"prompt_tokens": count, "total_tokens": count}}

    # --- facts -------------------------------------------------------------------------------------------------------

    def models(self) -> dict[str, Any]:
        """The model's names."""
        return {"object": "list", "data": [self.model(name) for name in self.names]}

    def model(self, name: str) -> dict[str, Any]:
        """What is told of a model; an `ApiError` if there is none of that name."""
        limit, id = self.facts["max_model_len"], self._name(name)
        return {
            "id": id, "object": "model", "created": self.started, "owned_by": "manta", "root": self.names[0],
            "parent": None, "max_model_len": limit,
        }  # fmt: skip

    def health(self) -> dict[str, Any]:
        """That the engine can run requests; an `ApiError` if it cannot."""
        if self.client.trouble:
            raise ApiError(503, without_folders(self.client.trouble))
        return {"status": "ok"}

    def version(self) -> dict[str, Any]:
        """Of Manta."""
        return {"version": VERSION}

    def metrics(self) -> bytes:
        """What the engines count, as Prometheus reads it."""
        return exposition(self.client.utility("metrics"), self.config.metrics_prefix, self.names[0])

    def response(self, id: str, client: str, query: Mapping[str, str]) -> dict[str, Any]:
        """A stored response of this client's; an `ApiError` if there is none."""
        refuse_query(query)
        return self.store.response(client, id)

    def input_items(self, id: str, client: str, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of the items that such a response was made from."""
        return self.store.page(client, id, query)

    def delete_response(self, id: str, client: str) -> dict[str, Any]:
        """Forget such a response."""
        return self.store.delete(client, id)

    def cancel_response(self, id: str, client: str) -> dict[str, Any]:
        """Refuses, as no response is made in the background, and only such can be cancelled."""
        status = self.store.response(client, id)["status"]
        message = f"the response is {status}, but not in the background; to cancel it, close the connection"
        raise ApiError(400, message, "response_id")

    def live(self, client: str) -> Events:
        """What the engines do, as it happens; see `api/viewers.py`."""
        viewer = self.viewers.enter(client)
        return Events(self.viewers.events(viewer), functools.partial(self.viewers.leave, viewer))

    def explain(self, id: str, client: str) -> dict[str, Any]:
        """Where the time of a request went, prompt by prompt."""
        found = self.client.utility("explain_prompts", id, self.config.max_prompts, client)
        prompts = sorted(
            itertools.chain(*found.values()), key=lambda story: int(story["request_id"].rpartition("-")[2])
        )
        if not prompts:
            known = "the engine knows those that run and the latest that have finished"
            raise ApiError(404, f"there is no request {repr(id)[:100]}; {known}", "id")
        return {"id": id, "prompts": prompts}

    def _name(self, name: str | None) -> str:
        if name is not None and name not in self.names:
            message = f"there is no model {reprlib.repr(name)} here; there is {', '.join(self.names)}"
            raise ApiError(404, message, "model", "model_not_found")
        return name or self.names[0]

    def _turns(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A request for Anthropic's Messages API as one for chat completions."""
        messages, system, thinking = fields["messages"], fields["system"], fields["thinking"]
        messages = messages if system is None else [{"role": "system", "content": system}, *messages]
        structure, older = fields["output_config"].get("structure"), fields["output_format"]
        if structure is not None and older is not None:
            message = "output_config.format and output_format are both given; one is enough"
            raise ApiError(400, message, "output_format")
        asked = {"enabled": True, "disabled": False}.get(thinking.get("type"))
        variables = {} if asked is None else {"enable_thinking": asked}
        if asked and thinking["budget_tokens"] is not None:  # which some templates tell the model
            variables["thinking_budget"] = thinking["budget_tokens"]
        chat = as_chat(
            fields, messages, reasoning_effort=fields["output_config"].get("effort"),
            chat_template_kwargs=variables | fields["chat_template_kwargs"],
            continue_final_message=messages[-1]["role"] == "assistant",
            response_format=older if structure is None else structure,
            include_reasoning=thinking.get("display") != "omitted",
        )  # fmt: skip
        if chat["thinking_token_budget"] is None and self.parsers.reasoning_parser(chat):  # others keep to any budget
            chat["thinking_token_budget"] = thinking.get("budget_tokens")
        return chat

    def _conversation(self, fields: dict[str, Any]) -> tuple[tuple[str | None, list[int]], Reading | None]:
        """The prompt for a conversation with its tokens, and how the answers to it are read."""
        output, text = self._least_output(fields, None), self._render(fields)
        prompt = self._prompt(fields, text, bool(fields["add_special_tokens"]), output)
        return prompt, self.parsers.reading(fields, text)

    def _render(self, fields: dict[str, Any]) -> str:
        go_on, opening = fields["continue_final_message"], fields["add_generation_prompt"]
        opening = not go_on if opening is None else opening
        variables, effort = fields["chat_template_kwargs"], fields["reasoning_effort"]
        if effort is not None:
            named = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
            variables = named | variables
        source = fields["chat_template"]
        if source is not None and (trouble := self.threads.apply(self._compile, (source,))):
            raise ApiError(400, trouble, "chat_template")
        fixed = opening, go_on, fields["tools"] or None, source, fields["documents"]
        try:
            return self.tokenizer.render(fields["messages"], *fixed, **variables)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None

    def _around_gap(self, fields: dict[str, Any]) -> list[str]:
        """The prompts of a request with a `suffix`, which ends at what marks the end of a gap, too."""
        if not isinstance(fields["prompt"][0], str):
            raise ApiError(400, "suffix is given; then prompt must be a text, not token ids", "suffix")
        if fields.get("echo"):
            raise ApiError(400, "suffix is given; with it echo must be false", "suffix")
        try:
            form, ends = self.tokenizer.gap
        except ValueError as error:
            raise ApiError(400, f"suffix is {reprlib.repr(fields['suffix'])}: {error}", "suffix") from None
        if not fields["ignore_eos"]:
            fields["stop_token_ids"] = [*(fields["stop_token_ids"] or ()), *ends]
        return [form.format(prefix=prefix, suffix=fields["suffix"]) for prefix in fields["prompt"]]

    def _compile(self, source: str) -> str | None:
        """Compile a request's chat template, which takes up to seconds; returns what is wrong with it.

        It is not raised, because gevent would write the traceback of what a thread raises to stderr.
        """
        try:
            self.tokenizer.template(source)
        except ValueError as error:
            return str(error)
        return None

    def _prompt(
        self,
        fields: dict[str, Any],
        prompt: str | list[int] | tuple[str, str],
        add_special_tokens: bool,
        output: int = 0,
    ) -> tuple[str | None, list[int]]:
        """A prompt's text, if that is all of it, and its tokens, after `truncate_prompt_tokens`.

        A pair of texts is one prompt. `output` is how many tokens -1 leaves to the output.
        """
        limit, keep = self.facts["max_model_len"], fields["truncate_prompt_tokens"]
        if keep is None:
            return self._tokens(prompt, add_special_tokens)
        if keep > limit:
            message = f"truncate_prompt_tokens is {keep}; it must be -1, or from 1 to {limit} (max_model_len)"
            raise ApiError(400, message, "truncate_prompt_tokens")
        keep = max(1, limit - output) if keep == -1 else keep
        # As in vLLM: an answer follows the end of its prompt, and embedders were trained with texts cut at their end.
        side = fields["truncation_side"] or ("left" if self.facts["task"] == "generate" else "right")
        return self._tokens(prompt, add_special_tokens, keep, side)

    def _tokens(
        self,
        prompt: str | list[int] | tuple[str, str],
        add_special_tokens: bool,
        keep: int | None = None,
        side: str = "left",
    ) -> tuple[str | None, list[int]]:
        limit, vocab_size = self.facts["max_model_len"], self.facts["vocab_size"]
        if isinstance(prompt, list):
            if (highest := max(map(max, in_parts(prompt)))) >= vocab_size:
                raise ApiError(400, f"the prompt has token id {highest}; allowed: 0 to {vocab_size - 1}", "prompt")
            if keep is None:
                return None, prompt
            return None, (prompt[:keep] if side == "right" else prompt[-keep:])
        texts: tuple[str, ...] = (prompt,) if isinstance(prompt, str) else prompt
        if keep is not None:
            longest = (keep + CUT_MARGIN) * self.tokenizer.longest_token  # nothing beyond is kept
            texts = tuple(text[:longest] if side == "right" else text[-longest:] for text in texts)
        size = sum(map(len, texts))
        if keep is None and size > limit * self.tokenizer.longest_token:  # it would hold up everyone, for nothing
            raise too_long(limit, f"the prompt is too long: it has {size} characters", "prompt")
        run = self.threads.apply if size > LONG_TEXT else lambda encode, arguments: encode(*arguments)
        cut = False
        if keep is not None:
            ids, cut = run(self.tokenizer.encode_cut, (texts, keep, side, add_special_tokens))
        elif isinstance(prompt, str):
            ids = run(self.tokenizer.encode, (prompt, add_special_tokens))
        else:
            ids = run(self.tokenizer.encode_pair, prompt)
        if not ids:
            raise ApiError(400, "the prompt is empty; it must have at least 1 token", "prompt")
        return (None if cut or not isinstance(prompt, str) else prompt), ids

    def _generate(
        self,
        route: str,
        fields: dict[str, Any],
        caller: Caller,
        prompts: list[Any],
        default_max_tokens: int | None,
        shape: Callable[..., Run] = Run,
        reading: Reading | None = None,
    ) -> dict[str, Any] | Events:
        if fields["stream_options"] is not None and not fields["stream"]:
            raise ApiError(400, "stream_options is only for stream: true", "stream_options")
        self._need_task("generate")
        self._check_priority(fields)
        params = self._params(route, fields, [len(ids) for _, ids in prompts], default_max_tokens, reading)
        admitted = self._admitted(len(prompts) * params[0].num_sequences, caller)
        if self.config.api_key and not self.config.share_prefix_cache:
            fields["cache_salt"] = self.board.tag("salt", caller.client, fields["cache_salt"])
        run = caller.job = shape(caller.name, caller.client, route, fields, prompts, params, self.tokenizer, reading)
        news = run.news(self.client, caller.peer, self.config.request_timeout)
        with contextlib.ExitStack() as stack:
            stack.enter_context(admitted)
            stack.callback(news.close)
            first = next(news)  # what the engine refuses is a 400 in a stream, too
            if not fields["stream"]:
                for _ in news:
                    pass
                return run.whole()
            return Events(run.events(itertools.chain([first], news)), stack.pop_all().close)

    def _check_priority(self, fields: dict[str, Any]) -> None:
        if fields["priority"] and (policy := self.facts["scheduling_policy"]) != "priority":
            raise ApiError(400, f"priority is {fields['priority']}; under the policy {policy} it must be 0", "priority")

    def _admitted(self, answers: int, caller: Caller) -> contextlib.AbstractContextManager[None]:
        """A context in which so many answers are in flight, if there may be as many; the body is no longer needed."""
        if (in_flight := self.board.in_flight) + answers > self.config.max_queue:
            cap = f"{self.config.max_queue} (max_queue)"
            raise ApiError(429, f"{in_flight} answers are in flight and {answers} would come; at most {cap}")
        caller.release()
        return self.board.counted(answers)

    def _least_output(self, fields: dict[str, Any], default: int | None) -> int:
        """Tokens that a request wants for its output at least, which a prompt that is cut to the context leaves."""
        asked = fields["max_tokens"] if fields["max_completion_tokens"] is None else fields["max_completion_tokens"]
        defaults = self.facts["default_sampling"]
        return max(1, asked if asked is not None else min(default or 1, defaults.get("max_tokens", default or 1)))

    def _params(
        self, route: str, fields: dict[str, Any], lengths: list[int], default: int | None, reading: Reading | None
    ) -> list[SamplingParams]:
        """Sampling parameters for prompts of these lengths; the output is bounded by what they leave of the context.

        What the request does not say is as the model's generation_config.json says. `default` is how many tokens of
        output the route has at most then; None leaves it to the context.
        """
        limit = self.facts["max_model_len"]
        field = "max_tokens" if fields["max_completion_tokens"] is None else "max_completion_tokens"
        scores = self._scores(route, fields, lengths)
        echoes = route == COMPLETIONS and fields["echo"]
        if (asked := fields[field]) == 0 and not echoes and fields["prompt_logprobs"] is None:
            message = f"{field} is 0; it must be at least 1, or -1 for what is left, but for echo and prompt_logprobs"
            raise ApiError(400, message, field)
        if asked == 0:  # the record has none without prompt_logprobs
            scores = {"prompt_logprobs": 0} | scores
        defaults = self.facts["default_sampling"]
        most = min(default or limit, defaults.get("max_tokens", limit))  # where the request does not say
        if asked == -1:  # all that is left
            asked, most = None, limit
        for length in lengths:
            if length + (asked != 0) > limit:
                raise too_long(limit, f"the prompt is too long: it has {length}, which leaves none for the output")
            if asked and length + asked > limit:
                message = f"the prompt's {length} and max_tokens {asked} are {length + asked}"
                raise too_long(limit, message, "max_tokens")
        left = [min(most if asked is None else asked, limit - length) for length in lengths]
        given = {param: fields[param] for param in PARAMS if fields[param] is not None}
        if not fields["use_beam_search"]:  # which takes the model's probabilities as they are
            given = {**defaults, **given}
        if given.get("bad_words"):
            given["bad_word_ids"] = self.tokenizer.bad_word_ids(given["bad_words"])
        try:
            given |= reading.params if reading else {"structured_outputs": structure_of(fields)}
            params = SamplingParams(**given | scores | {"max_tokens": left[0]})
            params.check_vocabulary(self.facts["vocab_size"])
            each = [dataclasses.replace(params, max_tokens=tokens) for tokens in left]
        except ValueError as error:
            raise ApiError(400, str(error), str(error).partition(" ")[0]) from None
        self._check_samples(params, len(left), sum(left), fields["stream"])
        return each

    def _scores(self, route: str, fields: dict[str, Any], lengths: list[int]) -> dict[str, int]:
        """How many log-probabilities the engine is asked for, as arguments of `SamplingParams`."""
        cap = self.facts["max_logprobs"]
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            if (count := fields.get(name)) is not None and count > cap:
                raise ApiError(400, f"{name} is {count}; it must be from 0 to {cap} (max_logprobs)", name)
        top, of_prompt, found = fields["logprobs"], fields["prompt_logprobs"], {}
        if route != COMPLETIONS:  # the others have the fields of a chat
            if fields["top_logprobs"] and not top:
                message = f"top_logprobs is {fields['top_logprobs']}; it needs logprobs: true"
                raise ApiError(400, message, "top_logprobs")
            top = fields["top_logprobs"] or 0 if top else None
        if of_prompt is not None and fields["stream"]:
            raise ApiError(400, f"prompt_logprobs is {of_prompt}; it is not for stream: true", "prompt_logprobs")
        echoed = top if fields["echo"] and route == COMPLETIONS else None
        told = sum(
            (1 + count) * sum(lengths) * (fields["n"] or 1) for count in (of_prompt, echoed) if count is not None
        )
        if told > (most := self.config.max_prompt_logprobs):
            name = "prompt_logprobs" if echoed is None else "logprobs"
            message = f"prompts' tokens times {name} times n are {told}; at most {most} (max_prompt_logprobs)"
            raise ApiError(400, message, name)
        if top is not None:
            found["logprobs"] = top
        if of_prompt is not None or echoed is not None:
            found["prompt_logprobs"] = max(of_prompt or 0, echoed or 0)
        return found

    def _check_samples(self, params: SamplingParams, prompts: int, tokens: int, stream: bool) -> None:
        """Whether so many answers to so many prompts, of so many tokens where each has one answer, are allowed."""
        name = next(name for name in ("beam_width", "best_of", "n") if getattr(params, name) is not None)
        answers, tokens = prompts * params.num_sequences, tokens * params.num_sequences
        if answers > (cap := self.config.max_choices):
            raise ApiError(400, f"prompts times {name} is {answers}; at most {cap} (max_choices)", name)
        if tokens > (cap := self.config.max_output_tokens):
            message = f"prompts times {name} times max_tokens is {tokens}; at most {cap} (max_output_tokens)"
            raise ApiError(400, message, "max_tokens")
        if (listed := prompts * params.num_listed) > (cap := self.config.max_listed_tokens):
            message = f"prompts times listed token ids are {listed}; at most {cap} are allowed (max_listed_tokens)"
            raise ApiError(400, message)
        if stream and params.use_beam_search:
            raise ApiError(400, "stream is true; with use_beam_search it must be false", "stream")
        if stream and params.num_samples > params.n:
            message = f"stream is true; with best_of {params.best_of} above n, {params.n}, it must be false"
            raise ApiError(400, message, "stream")
