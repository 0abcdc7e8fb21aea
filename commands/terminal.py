"""A conversation in the terminal, and the continuation of a text: `python server.py chat` and `server.py complete`.

On stdout is nothing but answers. All else goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError

from api.adapters import read_module
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
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HELP = '''  /reset        forget what was said, but for the system message
  /system TEXT  set the system message; without TEXT there is none
  /model NAME   have another model answer, or an adapter; without NAME they are listed
  /help         show this
  /exit         end, as Ctrl-D does
A line that ends with a backslash goes on in the next one, and """ opens and
closes a text of several lines.
Ctrl-C stops an answer; what it has said stays in the conversation.'''


@dataclass(frozen=True)
class AnswerOptions:
    """Options of both commands beside the engine's. None leaves it to the model, or to the server of `url`."""

    GROUPS: ClassVar[dict[str, str]] = {  # titles in the help, and the first option of each
        "answers": "temperature", "instead of an engine": "url", "memory and batches": "max_num_seqs",
        "adapters": "lora_modules",
    }  # fmt: skip
    url: str | None = option(None, "server that answers, like http://127.0.0.1:8000; MODEL is then one of its names")
    api_key: str | None = option(None, "that server's key (default: the first in the variable MANTA_API_KEY)")
    max_num_seqs: int = option(1, "sequences in one step; more would only take memory", 1, 65536)
    lora_modules: tuple[str, ...] = option((), "NAME=PATH of an adapter that answers, or several: then the first does")
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


@dataclass(frozen=True)
class CompleteOptions(AnswerOptions):
    """Options of `complete`."""

    prompt: str | None = option(None, "text to go on from (default: what stdin has)")


class TooLongError(ValueError):
    """The context does not hold the prompt."""


def say(text: str) -> None:
    """Write a line to stderr, if it can be written to."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """The text without the characters by which a model, or a server, could command the terminal."""
    return text.translate(CONTROLS)


class ShownAnswer:
    """An answer as it arrives."""

    def __init__(self) -> None:
        self.text, self.num_tokens = "", 0  # its tokens are 0 until the server tells
        self.finish_reason: str | None = None
        self.begun = self.first = time.monotonic()

    def show(self, text: str) -> None:
        """Add this text, and write it to stdout."""
        if text and not self.text:
            self.first = time.monotonic()
        self.text += text
        print(printable(text), end="", flush=True)

    def end(self) -> None:
        """Begin a new line, and tell a terminal how fast the answer came."""
        if not self.text.endswith("\n"):
            print(flush=True)
        if self.num_tokens and sys.stderr.isatty():
            rate = (self.num_tokens - 1) / max(time.monotonic() - self.first, 1e-9)
            waited = self.first - self.begun
            say(f"{DIM}{self.num_tokens} tokens, the first after {waited:.2f} s, then {rate:.1f} tok/s{PLAIN}")


@contextlib.contextmanager
def own_server(flags: list[str]) -> Iterator[tuple[str, str]]:
    """Start a server with these flags, which ends with the `with` block; gives its URL and the key that it takes.
    Ctrl-C does not reach it. If it does not start, it says why, and this is a SystemExit."""
    key = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, str(SERVER), *flags, "--port=0"], text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"MANTA_API_KEY": key},
        preexec_fn=partial(end_with_parent, signal.SIGTERM),
    )  # fmt: skip
    assert process.stderr
    try:
        for line in process.stderr:
            if address := ADDRESS.fullmatch(line.rstrip()):
                break
            say(line.rstrip())
        else:
            raise SystemExit(2)
        threading.Thread(target=show_trouble, args=[process.stderr], daemon=True).start()
        yield address[1], key
    finally:
        process.terminate()
        process.wait()


def show_trouble(lines: Iterable[str]) -> None:
    """Show what a server says, but for the lines about its requests."""
    for line in lines:
        if not NEWS.search(line):
            say(line.rstrip())


def error_of(content: Any) -> tuple[str, Any]:
    """The message and the code of an error, as OpenAI's API has it. Raises one of MALFORMED if it is none."""
    error = content["error"]
    return printable(error["message"]), error.get("code")


class Model:
    """A model of a server with OpenAI's API, or the first one of its list; `fields` go into each request. A ValueError
    if the server does not answer or has no such model."""

    def __init__(self, url: str, api_key: str, model: str | None, fields: dict[str, Any]):
        if not re.fullmatch(r"https?://\S+", url):
            raise ValueError(f"url is {url!r}; it must be like http://127.0.0.1:8000")
        self.url, self.fields = url.rstrip("/").removesuffix("/v1"), fields
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        with self._open("/v1/models") as response:
            try:
                names = [entry["id"] for entry in json.load(response)["data"]]
            except MALFORMED:
                raise ValueError(f"{self.url}/v1/models is no list of models, as OpenAI's API has it") from None
        if model not in (None, *names) or not names:
            raise ValueError(f"{self.url} has no model {model!r}; it has {', '.join(map(repr, names))}")
        self.names, self.model = names, model or names[0]

    def _open(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            return urllib.request.urlopen(request, timeout=None if data else CONNECT_TIMEOUT)
        except HTTPError as refused:
            try:
                with refused:
                    message, code = error_of(json.load(refused))
            except MALFORMED:
                raise ValueError(f"{self.url} answers with {refused.code} {refused.reason}") from None
            too_long = code == "context_length_exceeded" or "maximum context length" in message  # vLLM has no such code
            raise (TooLongError if too_long else ValueError)(message) from None
        except (OSError, HTTPException) as error:
            raise ValueError(f"{self.url} does not answer: {getattr(error, 'reason', error)}") from None

    def answer(self, prompt: str | list[dict[str, Any]], answer: ShownAnswer) -> None:
        """Answer a text or a conversation, and show the answer as it comes. A ValueError if the prompt is refused, a
        `TooLongError` if the context does not hold it, and a RuntimeError if an answer that was begun cannot go on."""
        path, field = ("/v1/completions", "prompt") if isinstance(prompt, str) else ("/v1/chat/completions", "messages")
        body = {"model": self.model, field: prompt, "stream": True, "stream_options": {"include_usage": True}}
        with self._open(path, body | self.fields) as response:
            for text, finish_reason, num_tokens in self._news(response):
                answer.finish_reason = finish_reason or answer.finish_reason
                answer.num_tokens = num_tokens or answer.num_tokens
                answer.show(text)

    def _news(self, response: HTTPResponse) -> Iterator[tuple[str, str | None, int]]:
        """The text, the finish reason and the number of tokens of each event, which may have none of them."""
        try:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                if (data := line[5:].strip()) == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(error_of(event)[0])
                choice = (event.get("choices") or [{}])[0]
                text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                yield text, choice.get("finish_reason"), (event.get("usage") or {}).get("completion_tokens", 0)
        except (OSError, HTTPException, *MALFORMED) as error:
            raise RuntimeError(f"the answer of {self.url} breaks off: {error!r}") from None
        raise RuntimeError(f"the answer of {self.url} breaks off")


class Chat:
    """A conversation with a model, which may have a system message. Messages come from stdin, a line each."""

    def __init__(self, model: Model, system: str | None):
        self.model, self.system = model, system
        self.messages: list[dict[str, Any]] = []
        self.tty = sys.stdin.isatty()
        self.code = 0  # the exit code: 1 if something was refused and nobody sits there to try again

    def run(self) -> int:
        """Talk until the end of stdin or /exit; returns the exit code. At a terminal Ctrl-C stops an answer alone."""
        if self.tty:
            with contextlib.suppress(ImportError):  # with it, `input` edits lines and remembers them
                import readline  # noqa: F401
            say("/help lists the commands; Ctrl-D ends the conversation.")
        while True:
            try:
                line = self._read("> ")
                if line.startswith("/"):
                    self._command(line)
                elif (text := self._whole(line)).strip():
                    self._ask(text)
            except EOFError:
                if self.tty:
                    say("")
                return self.code
            except KeyboardInterrupt:
                if not self.tty:
                    raise
                say("\nCtrl-D ends the conversation.")  # the terminal has shown ^C

    def _read(self, prompt: str) -> str:
        if self.tty and sys.stdout.isatty():
            return input(prompt)
        if self.tty:  # stdout is a file, which gets answers alone
            print(prompt, end="", file=sys.stderr, flush=True)
        return input()

    def _whole(self, line: str) -> str:
        """The message that this line begins."""
        quoted = line.startswith('"""')
        lines = [line[3:] if quoted else line]
        end = '"""' if quoted else "\\"
        while lines[-1].endswith(end) != quoted:
            if not quoted:
                lines[-1] = lines[-1].removesuffix(end)
            try:
                lines.append(self._read("... "))
            except EOFError:  # a pipe ends here, and so does the message
                break
        return "\n".join(lines).removesuffix(end)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/exit":
            raise EOFError
        if name == "/help":
            say(HELP)
        elif name == "/reset":
            self.messages.clear()
        elif name == "/system":
            self.system = rest.strip()
        elif name == "/model" and rest.strip() in self.model.names:
            self.model.model = rest.strip()
        elif name == "/model":
            self._refuse(f"the models here are {printable(', '.join(self.model.names))}")
        else:
            self._refuse(f"there is no command {printable(name)}; /help lists them, and after a space it is a message")

    def _refuse(self, message: str) -> None:
        say(message)
        self.code = 0 if self.tty else 1

    def _ask(self, text: str) -> None:
        """Send a message and show its answer. The conversation keeps both if there is an answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*self.messages, {"role": "user", "content": text}]
        answer, trouble = ShownAnswer(), ""
        try:
            self.model.answer([*system, *messages], answer)
        except KeyboardInterrupt:
            if not self.tty:
                raise
        except TooLongError as error:
            trouble = f"the conversation has become too long: {error}; /reset forgets it"
        except (ValueError, RuntimeError) as error:
            trouble = f"error: {error}"
        if answer.text or answer.finish_reason:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
            answer.end()
        elif not trouble:
            say("\nThere is no answer, so the question is forgotten.")
        if trouble:
            self._refuse(trouble)
        elif answer.finish_reason == "length":
            say("The answer is cut, because max_tokens are reached or the context is full, which /reset makes empty.")


def chat(argv: list[str]) -> None:
    """Talk with a model in the terminal; see `run`."""
    about = "Talk with a model. Each line of stdin is a message; /help lists what else may be said."
    parser = OptionParser(ChatOptions, EngineConfig, command="chat", description=about)
    run(parser, ChatOptions, lambda opened, options: Chat(opened(), options.system).run(), argv)


def complete(argv: list[str]) -> None:
    """Go on from a text; see `run`."""
    about = "Go on from a text, until the model ends or Ctrl-C. A newline at the end of stdin does not belong to it."
    parser = OptionParser(CompleteOptions, EngineConfig, command="complete", description=about)
    parser.add_argument("-p", dest="prompt", default=argparse.SUPPRESS, metavar="STR", help="the same as --prompt")
    run(parser, CompleteOptions, go_on, argv)


def go_on(opened: Callable[[], Model], options: CompleteOptions) -> int:
    """Go on from the prompt, or else the text on stdin; returns the exit code. A refused prompt is a ValueError."""
    if (prompt := options.prompt) is None:
        if sys.stdin.isatty():
            say("The text ends with Ctrl-D at the beginning of a line.")
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise ValueError("the prompt is empty; give -p TEXT, or a text on stdin")
    model, answer, code = opened(), ShownAnswer(), 0
    try:
        model.answer(prompt, answer)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except RuntimeError as error:
        say(f"error: {error}")
        code = 1
    answer.end()
    return code


def run(parser: OptionParser, cls: type[AnswerOptions], act: Callable[..., int], argv: list[str]) -> None:
    """Call `act` with what opens the model, and with the options, and exit: with the code that `act` returns, 2 after a
    line that says why it cannot begin, 1 if stdout cannot be written, and 130 after Ctrl-C."""
    flags = parser.read(argv)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what the terminal has no character for must end nothing
    try:
        with exit_on_mistake(parser), contextlib.ExitStack() as stack:
            options = from_flags(cls, flags)
            sys.exit(act(partial(open_model, flags, options, stack), options))
    except OSError as error:  # stdout is full, or nobody reads it
        if not isinstance(error, BrokenPipeError):
            say(f"{parser.prog}: error: {error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the interpreter still holds for it
        sys.exit(1)


def open_model(flags: argparse.Namespace, options: AnswerOptions, stack: contextlib.ExitStack) -> Model:
    """The model that the options name; a ValueError if it cannot be used. The stack ends the server that is started for
    it."""
    if options.url is not None:
        local = {"lora_modules", *(f.name for f in dataclasses.fields(EngineConfig))} - {"model", *SAMPLING}
        refuse_given(flags, sorted(local), "with --url there is no engine that it could concern")
        key = options.api_key or os.environ.get("MANTA_API_KEY", "").partition(",")[0]
        return Model(options.url, key, getattr(flags, "model", None), options.sampling)
    refuse_given(flags, ["api_key"], "without --url there is no server that it could be for")
    vars(flags).setdefault("max_num_seqs", options.max_num_seqs)
    config = find_model(from_flags(EngineConfig, flags))
    config.allow("to get answers", "task", "auto", "generate")
    config.allow("where text comes and goes", "skip_tokenizer_init", False)
    if isinstance(options, ChatOptions) and not Tokenizer(config.folder).has_chat_template:
        raise ValueError(f"{config.model} has no chat template; `{PROG} complete` goes on from a text")
    words = [*words_of(EngineConfig, flags), "--disable-log-stats"]  # they would come between a conversation's lines
    words += [f"--lora-modules={module}" for module in options.lora_modules]
    if config.distributed_executor_backend == "auto" and config.world_size == 1:
        words.append("--distributed-executor-backend=uni")
    adapters = [read_module(module).name for module in options.lora_modules]
    url, key = stack.enter_context(own_server(words))
    # Answers are as long as the context holds, and tell how many tokens they have also where they are stopped.
    fields: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if config.model == DEMO and isinstance(options, ChatOptions):
        say("This is the demo, a very small model. Try: Who are you?")
    fields |= {"max_tokens": -1} if isinstance(options, CompleteOptions) else {}
    return Model(url, key, adapters[0] if adapters else None, fields | options.sampling)
