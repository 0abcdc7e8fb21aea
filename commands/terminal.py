"""A conversation in the terminal, and the continuation of a text: `python server.py chat` and `server.py complete`.

On stdout is nothing but answers. All else goes to stderr.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar
from urllib.error import HTTPError

from checkpoints.hub import find_model
from commands.flags import OF_REQUESTS, OptionParser, exit_on_mistake, from_flags, refuse_given, words_of
from config import DEMO, PROG, EngineConfig, check_fields, option
from executor import end_with_parent
from sampling_params import SamplingParams
from tokenizer import Tokenizer

CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})  # what a terminal may obey
SAMPLING = (*OF_REQUESTS, "seed")  # of SamplingParams
MALFORMED = (ValueError, LookupError, TypeError, AttributeError)  # what comes of JSON that is not as it should be
CONNECT_TIMEOUT = 10  # seconds that a server may take to say which models it has
SERVER = Path(__file__).parents[1] / "server.py"
ADDRESS = re.compile(r"  server    (http://\S+)")  # what a server says when it is ready
# A server's words about requests and its end, which would come between the lines of a conversation.
NEWS = re.compile(r' INFO |"level": "info"|  goodbye')
HELP = """/reset forgets what was said; /system TEXT sets the system message, or removes it without TEXT.
/image FILE shows a picture with the next message.
Ctrl-C stops an answer and keeps what it has said; Ctrl-D ends the conversation."""


@dataclass(frozen=True)
class AnswerOptions:
    """Options of both commands beside the engine's. None leaves it to the model, or to the server of `url`."""

    GROUPS: ClassVar[dict[str, str]] = {  # titles in the help, and the first option of each
        "answers": "temperature", "instead of an engine": "url", "memory and batches": "max_num_seqs",
    }  # fmt: skip
    url: str | None = option(None, "server that answers, like http://127.0.0.1:8000; MODEL is then one of its names")
    api_key: str | None = option(None, "that server's key (default: the first in the variable MANTA_API_KEY)")
    max_num_seqs: int = option(1, "sequences in one step; more would only take memory", 1, 65536)
    temperature: float | None = option(None, "0 takes the likeliest token; higher values vary more")
    top_p: float | None = option(None, "keep the likeliest tokens whose probabilities reach this sum")
    top_k: int | None = option(None, "keep so many of the likeliest tokens")
    min_p: float | None = option(None, "keep tokens at least this times as likely as the likeliest")
    max_tokens: int | None = option(None, "tokens of an answer (default: what the context holds, or the server says)")
    seed: int | None = option(None, "makes answers the same each time, and dummy weights")
    ignore_eos: bool | None = option(None, "go on where the model would end, for measurements")

    def __post_init__(self) -> None:
        check_fields(self)
        SamplingParams(**self.sampling)  # for its checks

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were given."""
        return {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class ChatOptions(AnswerOptions):
    """Options of `chat`."""

    system: str | None = option(None, "system message of the conversation")


def say(text: str) -> None:
    """Write a line to stderr, if it can be written to."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """The text without the characters by which a model, or a server, could command the terminal."""
    return text.translate(CONTROLS)


def show(pieces: Iterable[str], shown: list[str]) -> None:
    """Write an answer to stdout as its pieces come, note them in `shown`, and end the line, whatever ends it."""
    try:
        for text in pieces:
            shown.append(text)
            print(printable(text), end="", flush=True)
    finally:
        if shown and not shown[-1].endswith("\n"):
            print(flush=True)


@contextlib.contextmanager
def own_server(flags: list[str]) -> Iterator[tuple[str, str]]:
    """Start a server with these flags, which ends with the `with` block; gives its URL and the key that it takes.
    Ctrl-C does not reach it. If it does not start, it says why, and this is a SystemExit."""
    key, addresses = secrets.token_hex(16), SimpleQueue[str]()
    process = subprocess.Popen(
        [sys.executable, str(SERVER), *flags, "--port=0"], text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"MANTA_API_KEY": key},
        preexec_fn=lambda: end_with_parent(signal.SIGTERM),
    )  # fmt: skip
    threading.Thread(target=follow, args=[process.stderr, addresses], daemon=True).start()
    try:
        if not (url := addresses.get()):
            raise SystemExit(2)
        yield url, key
    finally:
        process.terminate()
        process.wait()


def follow(lines: Iterable[str], addresses: SimpleQueue[str]) -> None:
    """Show what a server says, but for its news. Its address goes to `addresses`, and "" when it says no more."""
    for line in lines:
        if address := ADDRESS.fullmatch(line.rstrip()):
            addresses.put(address[1])
        elif not NEWS.search(line):
            say(line.rstrip())
    addresses.put("")


class Model:
    """A model of a server with OpenAI's API, or the first one of its list; `fields` go into each request. A ValueError
    if the server does not answer or has no such model."""

    def __init__(self, url: str, api_key: str, model: str | None, fields: dict[str, Any]):
        if not re.fullmatch(r"https?://\S+", url):
            raise ValueError(f"url is {url!r}; it must be like http://127.0.0.1:8000")
        self.url, self.fields = url.rstrip("/").removesuffix("/v1"), fields
        self.headers = {"Content-Type": "application/json"}
        self.headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        with self._open("/v1/models") as response:
            try:
                names = [entry["id"] for entry in json.load(response)["data"]]
            except MALFORMED:
                raise ValueError(f"{self.url}/v1/models is no list of models, as OpenAI's API has it") from None
        if model not in (None, *names) or not names:
            raise ValueError(f"{self.url} has no model {model!r}; it has {', '.join(map(repr, names))}")
        self.model = model or names[0]
        self.is_cut = False  # whether the latest answer has ended by max_tokens, or with the context

    def _open(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            return urllib.request.urlopen(request, timeout=None if data else CONNECT_TIMEOUT)
        except HTTPError as refused:
            message = f"{self.url} answers with {refused.code} {refused.reason}"
            with refused, contextlib.suppress(*MALFORMED):
                message = printable(json.load(refused)["error"]["message"])
            raise ValueError(message) from None
        except (OSError, HTTPException) as error:
            raise ValueError(f"{self.url} does not answer: {getattr(error, 'reason', error)}") from None

    def answer(self, prompt: str | list[dict[str, Any]]) -> Iterator[str]:
        """Yield the answer to a text or a conversation, by pieces: at least one, unless it is a ValueError, because the
        prompt is refused or the answer breaks off."""
        path, field = ("/v1/completions", "prompt") if isinstance(prompt, str) else ("/v1/chat/completions", "messages")
        with self._open(path, {"model": self.model, field: prompt, "stream": True} | self.fields) as response:
            try:
                for line in response:
                    if not line.startswith(b"data:"):
                        continue
                    if (data := line[5:].strip()) == b"[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise ValueError(printable(event["error"]["message"]))
                    choice = (event.get("choices") or [{}])[0]
                    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                    if text or choice.get("finish_reason"):
                        self.is_cut = choice.get("finish_reason") == "length"
                        yield text
                raise ValueError("it has no end")
            except (OSError, HTTPException, *MALFORMED) as error:
                raise ValueError(f"the answer of {self.url} breaks off: {error}") from None


class Chat:
    """A conversation with a model, which may have a system message. Messages come from stdin, a line each."""

    def __init__(self, model: Model, system: str | None):
        self.model, self.system = model, system
        self.messages: list[dict[str, Any]] = []
        self.images: list[dict[str, Any]] = []  # parts of the next message

    def run(self) -> None:
        """Talk until the end of stdin. At a terminal, a refusal and Ctrl-C end an answer alone."""
        if interactive := sys.stdin.isatty():
            with contextlib.suppress(ImportError):  # with it, `input` edits lines and remembers them
                import readline  # noqa: F401
            say(HELP)
        prompt = "> " if interactive and sys.stdout.isatty() else ""  # a file gets answers alone
        while True:
            try:
                line = input(prompt)
                command, _, rest = line.partition(" ")
                if command == "/reset":
                    self.messages.clear()
                elif command == "/system":
                    self.system = rest.strip()
                elif command == "/image":
                    self.images.append(image_of(rest.strip()))
                elif line.startswith("/"):
                    words = "the commands are /image, /reset and /system"
                    raise ValueError(f"{words}, not {command!r}; a message has a space first")
                elif line.strip():
                    self._ask(line)
            except EOFError:
                if interactive:
                    say("")
                return
            except (KeyboardInterrupt, ValueError) as error:
                if not interactive:
                    raise
                say(f"error: {error}" if isinstance(error, ValueError) else "\nCtrl-D ends the conversation.")

    def _ask(self, text: str) -> None:
        """Send a message and show its answer. The conversation keeps both if any of the answer has come."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = [*self.images, {"type": "text", "text": text}] if self.images else text
        messages = [*self.messages, {"role": "user", "content": content}]
        self.images = []
        shown: list[str] = []
        try:
            show(self.model.answer([*system, *messages]), shown)
        finally:
            if shown:
                self.messages = [*messages, {"role": "assistant", "content": "".join(shown)}]
        if self.model.is_cut:
            say("The answer is cut, because max_tokens are reached or the context is full, which /reset makes empty.")


def image_of(path: str) -> dict[str, Any]:
    """The part of a message that is the picture in a file; a ValueError if it cannot be read."""
    try:
        data = base64.b64encode(Path(path).expanduser().read_bytes()).decode()
    except OSError as error:
        raise ValueError(f"the image {path!r} cannot be read: {error.strerror}") from None
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}  # the bytes tell what it is


def chat(argv: list[str]) -> None:
    """Talk with a model in the terminal; see `exit_on_trouble`."""
    about = "Talk with a model. Each line of stdin is a message, but for /reset, /system TEXT and /image FILE."
    parser = OptionParser(ChatOptions, EngineConfig, command="chat", description=about)
    with exit_on_trouble(parser):
        flags = parser.read(argv)
        options = from_flags(ChatOptions, flags)
        with open_model(flags, options) as model:
            Chat(model, options.system).run()


def complete(argv: list[str]) -> None:
    """Go on from a text; see `exit_on_trouble`."""
    about = "Go on from a text, until the model ends or Ctrl-C. A newline at the end of stdin does not belong to it."
    parser = OptionParser(AnswerOptions, EngineConfig, command="complete", description=about)
    parser.add_argument("-p", "--prompt", metavar="STR", help="text to go on from (default: what stdin has)")
    with exit_on_trouble(parser):
        flags = parser.read(argv)
        options = from_flags(AnswerOptions, flags)
        prompt = sys.stdin.read().removesuffix("\n") if flags.prompt is None else flags.prompt
        if not prompt:
            raise ValueError("the prompt is empty; give -p TEXT, or a text on stdin")
        with open_model(flags, options) as model:
            show(model.answer(prompt), [])


@contextlib.contextmanager
def exit_on_trouble(parser: OptionParser) -> Iterator[None]:
    """Exit where the block raises: with 2 and a line for a ValueError, 130 after Ctrl-C, 1 if stdout takes nothing."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what the terminal has no character for must end nothing
    try:
        with exit_on_mistake(parser):
            yield
    except OSError as error:  # stdout is full, or nobody reads it
        if not isinstance(error, BrokenPipeError):
            say(f"{parser.prog}: error: {error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the interpreter still holds for it
        sys.exit(1)


@contextlib.contextmanager
def open_model(flags: argparse.Namespace, options: AnswerOptions) -> Iterator[Model]:
    """The model that the options name, of a server that is started for it unless `url` names one; a ValueError if it
    cannot be used."""
    if options.url is not None:
        local = {f.name for f in fields(EngineConfig)} - {"model", *SAMPLING}
        refuse_given(flags, sorted(local), "with --url there is no engine that it could concern")
        key = options.api_key or os.environ.get("MANTA_API_KEY", "").partition(",")[0]
        yield Model(options.url, key, getattr(flags, "model", None), options.sampling)
        return
    refuse_given(flags, ["api_key"], "without --url there is no server that it could be for")
    vars(flags).setdefault("max_num_seqs", options.max_num_seqs)
    config = find_model(from_flags(EngineConfig, flags))
    config.allow("to get answers", "task", "auto", "generate")
    config.allow("where text comes and goes", "skip_tokenizer_init", False)
    chats = isinstance(options, ChatOptions)
    if chats and not Tokenizer(config.folder).has_chat_template:
        raise ValueError(f"{config.model} has no chat template; `{PROG} complete` goes on from a text")
    words = [*words_of(EngineConfig, flags), "--disable-log-stats"]  # they would come between a conversation's lines
    if config.distributed_executor_backend == "auto" and config.world_size == 1:
        words.append("--distributed-executor-backend=uni")
    with own_server(words) as (url, key):
        if chats and config.model == DEMO:
            say("This is the demo, a very small model. Try: Who are you?")
        # A text goes on for as long as the context holds, as a chat does without max_tokens.
        yield Model(url, key, None, ({} if chats else {"max_tokens": -1}) | options.sampling)
