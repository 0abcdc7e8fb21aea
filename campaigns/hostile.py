"""What a hostile client may send, by kind: for the storm, and for `campaigns/two_keys.py`.

A kind has a name, a function that makes the bytes of one request, and a way in which they are sent (`Way`). No two
requests of a kind are the same, because the engine remembers which grammars it has refused.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT, TALK = {"prompt": "Once", "max_tokens": 8}, [{"role": "user", "content": "Hi"}]
CONTEXT, VOCABULARY = 1024, 1024  # of the demo
LONGEST = 60.0  # seconds that a hostile request may take to be answered: most of it waiting for its client's turn


WORK = (  # the kinds that are answered with tokens
    "properties by structured_outputs", "many answers", "beams", "prompts at the limit", "answers to the limit",
    "bias of all", "long stops", "bad words", "logprobs", "batch", "responses", "pipelined", "silent", "slow",
    "small and many answers", "logprobs of answers", "many required properties", "half closed", "leaves at once",
    "leaves a stream", "stream that is read",
)  # fmt: skip


# --- grammars ---------------------------------------------------------------------------------------------------------


def rules(name: str) -> str:
    """A Lark grammar in which 3,000 rules refer to each other in a chain."""
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(3000)), f'r3000: "{name}"'])


def references(name: str) -> dict[str, Any]:
    """A schema in which 2,800 definitions refer to each other in a chain."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2800)}
    return {"title": name, "type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain}


def endless(name: str) -> dict[str, Any]:
    """A schema for which nobody can make an automaton: of the multiples of a large prime."""
    value = {"type": "integer", "multipleOf": 99999989}
    return {"title": name, "type": "object", "properties": {"a": value}, "required": ["a"]}


def thousands(name: str) -> dict[str, Any]:
    """A schema of thousands of properties, each of them a pattern."""
    properties = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 9}}}$"} for i in range(4000)}
    return {"title": name, "type": "object", "properties": properties, "required": [*properties]}


def nested(name: str) -> dict[str, Any]:
    """A schema of lists that lie in each other, 200 deep."""
    schema: dict[str, Any] = {"title": name}
    for _ in range(200):
        schema = {"type": "array", "items": schema, "minItems": 9}
    return schema


def tools(schema: dict[str, Any], count: int = 1) -> list[dict[str, Any]]:
    """Functions that take what a schema says."""
    return [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema, "strict": True}} for i in range(count)
    ]


def with_schema(schema: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """A request by each field that takes a schema: its path and body, by the field's name."""
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    chat = {"messages": TALK, "max_tokens": 8}
    (tool,) = tools(schema)
    flat = {"name": "f0", "description": "a", "input_schema": schema}
    return {
        "response_format": (CHAT, chat | {"response_format": named}),
        "structured_outputs": (COMPLETIONS, PROMPT | {"structured_outputs": {"json": schema}}),
        "guided_json": (COMPLETIONS, PROMPT | {"guided_json": schema}),
        "json_schema": (COMPLETIONS, PROMPT | {"json_schema": json.dumps(schema)}),
        "format": (CHAT, chat | {"format": schema}),
        "tools": (CHAT, chat | {"tools": [tool], "tool_choice": "required"}),
        "text.format": ("/v1/responses", {
            "input": "Hi", "max_output_tokens": 8,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
        }),
        "output_config.format": ("/v1/messages", chat | {
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        }),
        "input_schema": ("/v1/messages", chat | {"tools": [flat], "tool_choice": {"type": "any"}}),
    }  # fmt: skip


def false_ones(name: str) -> dict[str, Any]:
    """A schema with 12,000 alternatives that nothing fulfils."""
    return {"title": name, "oneOf": [False] * 12_000}


def alike(name: str) -> dict[str, Any]:
    """A schema with 90 alternatives of 500 properties each, which differ in one value."""
    required = [f"{i:x}" for i in range(500)] + ["z"]
    ones = [{"type": "object", "required": required, "properties": {"z": {"const": i}}} for i in range(90)]
    return {"title": name, "oneOf": ones}


def many_required(name: str) -> dict[str, Any]:
    """A schema with 8,000 required properties and 80 KB of definitions that nothing refers to."""
    names = [f"p{i}" for i in range(8000)]
    return {
        "type": "object", "title": name, "$defs": {"a": {"description": "x" * 80_000}},
        "properties": dict.fromkeys(names, True), "required": names,
    }  # fmt: skip


def called(arguments: str) -> list[dict[str, Any]]:
    """A conversation with a call of these arguments."""
    call = {"id": "a", "type": "function", "function": {"name": "f0", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "a", "content": "1"}
    return [*TALK, {"role": "assistant", "tool_calls": [call]}, answer]


def with_rules(grammar: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """A request by each field that takes a grammar: its path and body, by the field's name."""
    return {
        "structured_outputs.grammar": (COMPLETIONS, PROMPT | {"structured_outputs": {"grammar": grammar}}),
        "guided_grammar": (COMPLETIONS, PROMPT | {"guided_grammar": grammar}),
        "ebnf": (COMPLETIONS, PROMPT | {"ebnf": grammar}),
        "grammar": (CHAT, {"messages": TALK, "max_tokens": 8, "grammar": grammar}),
    }


def harmful(name: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Requests by each field whose grammar is a chain, or endless, or large: their paths and bodies."""
    requests = {f"rules by {field}": sent for field, sent in with_rules(rules(name)).items()}
    for what, schema in (("references", references), ("multiples", endless), ("properties", thousands)):
        requests |= {f"{what} by {field}": sent for field, sent in with_schema(schema(name)).items()}
    return requests


# --- all kinds --------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """How a request is sent.

    Attributes:
        share: of its bytes that are sent at all.
        slow: whether they are sent a byte at a time, for some seconds.
        half: whether the client ends what it sends before it reads.
        reads: bytes of the reply that it reads before it leaves; None: all.
        silent: connections that say nothing beside it for some seconds.
    """

    share: float = 1.0
    slow: bool = False
    half: bool = False
    reads: int | None = None
    silent: int = 0


class Kind(NamedTuple):
    """A kind of hostile requests."""

    make: Callable[[str], bytes]  # of the client's key
    way: Way = Way()


def request(key: str, path: str, body: dict[str, Any] | bytes, more: str = "Connection: close\r\n") -> bytes:
    """The bytes of a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n{more}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def heavy(name: Callable[[], str]) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Arguments of `request`, by kind, for much that is read before the engine sees it."""
    close = "Connection: close\r\n"
    long = "".join(f"X-{i}: {'a' * 60_000}\r\n" for i in range(9))

    def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
        return CHAT, {"messages": TALK, "max_tokens": 8} | fields

    def functions() -> dict[str, Any]:
        named = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(4000)]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
        return {"tools": tools({"title": name(), "type": "object"}, 4000), "tool_choice": choice}

    return {
        "false alternatives": lambda: with_schema(false_ones(name()))["response_format"],
        "alternatives of many names": lambda: with_schema(alike(name()))["structured_outputs"],
        "many required properties": lambda: with_schema(many_required(name()))["tools"],
        "arguments of many numbers": lambda: chat(messages=called(f'{{"{name()}": [{"1," * 400_000}1]}}')),
        "arguments that are no JSON": lambda: chat(messages=called(f'{{"{name()}": {"x" * 400_000}')),
        "allowed tools": lambda: chat(**functions()),
        "small and many answers": lambda: (COMPLETIONS, PROMPT | {"n": 1024, "max_tokens": 99, "user": name()}),
        "logprobs of answers": lambda: (COMPLETIONS, PROMPT | {"n": 1024, "max_tokens": 1000, "logprobs": 20}),
        "hundreds of tools": lambda: chat(tools=tools({"title": name(), "type": "object"}, 300)),
        "long headers": lambda: (COMPLETIONS, PROMPT, close + long),
    }


def kinds(rng: random.Random) -> dict[str, Kind]:
    """All kinds, by name."""

    def name() -> str:
        return f"n{rng.getrandbits(60)}"

    def ids(count: int) -> list[int]:
        return [rng.randrange(10, VOCABULARY) for _ in range(count)]

    def posts(path: str, body: Callable[[], dict[str, Any] | bytes]) -> Callable[[str], bytes]:
        return lambda key: request(key, path, body())

    def asks(**fields: Callable[[], Any]) -> Callable[[str], bytes]:
        return posts(COMPLETIONS, lambda: PROMPT | {field: value() for field, value in fields.items()})

    def schema(make: Callable[[str], dict[str, Any]], field: str) -> Callable[[str], bytes]:
        return lambda key: request(key, *with_schema(make(name()))[field])

    def lark(field: str) -> Callable[[str], bytes]:
        return lambda key: request(key, *with_rules(rules(name()))[field])

    def chain(key: str) -> bytes:  # of stored responses, each with all that came before it
        body = {"input": "a " * 300, "max_output_tokens": 1, "store": True, "previous_response_id": "resp_" + name()}
        first = request(key, "/v1/responses", body | {"previous_response_id": None}, "")
        return first * 5 + request(key, "/v1/responses", body)

    def wrong_keys(key: str) -> bytes:
        return request("x" * 5000, COMPLETIONS, PROMPT, "") * 20 + request(name(), COMPLETIONS, PROMPT)

    def long_answer() -> dict[str, Any]:
        return {"prompt": ids(9), "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 8}

    whole = {"prompt": lambda: ids(CONTEXT - 9)}
    made: dict[str, Callable[[str], bytes]] = {f"rules by {field}": lark(field) for field in with_rules("")}
    made |= {f"references by {field}": schema(references, field) for field in with_schema({})}
    made |= {
        "multiples": schema(endless, "response_format"),
        "multiples in tools": schema(endless, "tools"),
        "properties by structured_outputs": schema(thousands, "structured_outputs"),
        "enum": schema(lambda title: {"enum": [f"{title}-{i}" for i in range(7000)]}, "guided_json"),
        "pattern": schema(lambda title: {"pattern": f"^(({title}|a*)*b{{1,999}}){{1,999}}$"}, "format"),
        "regex": asks(guided_regex=lambda: f"({name()}|.*.*.*a){{500}}{{500}}"),
        "choices": asks(guided_choice=lambda: [name() + "x" * 250 for _ in range(930)]),
        "deep schema": schema(nested, "json_schema"),
        "deep body": posts(COMPLETIONS, lambda: b'{"prompt":' + b"[" * 10**6),
        "large text": posts(COMPLETIONS, lambda: {"prompt": name() * 10**6}),
        "many ids": posts(COMPLETIONS, lambda: b'{"prompt": [[' + b"5,7," * 3 * 10**6 + b"5]]}"),
        "many lists": posts(COMPLETIONS, lambda: b'{"prompt": [' + b"[5]," * 30_000 + b"[5]]}"),
        "no JSON": posts(COMPLETIONS, lambda: b'{"prompt": "' + b"\\u00" * 10**6),
        "wrong types": asks(temperature=lambda: {"a": [name()]}, n=lambda: "many"),
        "out of range": asks(top_p=lambda: rng.random() + 1, max_tokens=lambda: -(10**9)),
        "many answers": asks(n=lambda: 64, seed=lambda: rng.getrandbits(30)),
        "beams": asks(use_beam_search=lambda: True, n=lambda: 16, prompt=lambda: ids(50)),
        "prompts at the limit": asks(**whole),
        "answers to the limit": asks(prompt=lambda: ids(9), max_tokens=lambda: CONTEXT - 9, ignore_eos=lambda: True),
        "bias of all": asks(logit_bias=lambda: {str(i): rng.random() for i in range(VOCABULARY)}, n=lambda: 16),
        "stop strings": asks(stop=lambda: [name() for _ in range(5000)]),
        "long stops": asks(stop=lambda: [name() + "a" * 490 for _ in range(64)], max_tokens=lambda: 200, n=lambda: 4),
        "bad words": asks(bad_words=lambda: [name()[:9] for _ in range(64)], n=lambda: 8),
        "bad tokens": asks(prompt=lambda: [*ids(900), 10**9]),
        "logprobs": asks(prompt_logprobs=lambda: 20, logprobs=lambda: 20, n=lambda: 8, **whole),
        "batch": asks(prompt=lambda: [ids(60) for _ in range(200)]),
        "conversation": posts(CHAT, lambda: {"messages": TALK * 5000 + [{"role": "user", "content": name()}]}),
        "embeddings": posts("/v1/embeddings", lambda: {"input": [name() * 99] * 1000}),
        "rerank": posts("/rerank", lambda: {"query": "a", "documents": [name() * 99] * 1000}),
        "tokenize": posts("/tokenize", lambda: {"prompt": name() * 10**5, "return_token_strs": True}),
        "detokenize": posts("/detokenize", lambda: {"tokens": [VOCABULARY + 5] * 10**5}),
        "template": posts(CHAT, lambda: {"messages": TALK, "chat_template": "{{ 'a' * 10**9 }}"}),
        "responses": chain,
        "wrong keys": wrong_keys,
        "pipelined": lambda key: request(key, COMPLETIONS, PROMPT, "") * 30 + request(key, COMPLETIONS, PROMPT),
    }  # fmt: skip
    made |= {kind: lambda key, sent=sent: request(key, *sent()) for kind, sent in heavy(name).items()}
    long = posts(COMPLETIONS, long_answer)
    ways = {
        "silent": Kind(asks(n=lambda: 1), Way(silent=200)),
        "half a body": Kind(asks(stop=lambda: [name() * 99]), Way(share=0.5, half=True)),
        "slow": Kind(asks(n=lambda: 1), Way(slow=True)),
        "half closed": Kind(asks(n=lambda: 8), Way(half=True)),
        "leaves at once": Kind(long, Way(reads=0)),
        "leaves a stream": Kind(long, Way(reads=2000)),
        "leaves a grammar": Kind(schema(endless, "guided_json"), Way(reads=0)),
        "stream that is read": Kind(long),
    }
    return {kind: Kind(make) for kind, make in made.items()} | ways


# --- how they are sent ------------------------------------------------------------------------------------------------


def send(port: int, raw: bytes, way: Way, timeout: float = LONGEST) -> tuple[list[int], bytes]:
    """Send a request and read the replies to it: their statuses, and what the last of them says.

    Raises:
        TimeoutError: a reply did not come in time.
        OSError: the server does not listen.
    """
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(way.silent)]
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        sock.settimeout(timeout)
        with contextlib.suppress(ConnectionError):  # what is refused early may be read no further
            for i in range(20 * way.slow):
                sock.sendall(raw[i : i + 1])
                time.sleep(0.1)
            sock.sendall(raw[20 * way.slow : int(len(raw) * way.share)])
            if way.half:
                sock.shutdown(socket.SHUT_WR)
        got, until = bytearray(), time.monotonic() + timeout
        with contextlib.suppress(ConnectionError):
            while (way.reads is None or len(got) < way.reads) and (part := sock.recv(2**16)):
                got += part
                if time.monotonic() > until:
                    raise TimeoutError(f"the reply goes on after {timeout:g} s")
        time.sleep(2 * bool(others))
    replies = bytes(got).split(b"HTTP/1.1 ")[1:]
    statuses = [int(reply[:3]) for reply in replies if not reply.startswith(b"100")]
    return statuses, replies[-1].partition(b"\r\n\r\n")[2] if replies else b""
