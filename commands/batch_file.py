"""A file of requests in, a file of answers out: what `server.py batch` runs.

Both files have the format of OpenAI's batches. Between them and the engine process there is no HTTP: a line goes to
`Api.answer`, as the body of a request does. A batch may end at any time, also by `kill -9`: when it is started again
with the same files, it runs the lines that have no answer yet, and those that were refused and have been mended. The
last answer of a custom_id is the one that counts.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import hashlib
import itertools
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import gevent
import msgspec
from gevent.event import AsyncResult, Event
from gevent.lock import Semaphore
from gevent.pool import Group
from tqdm import tqdm

from api.bodies import RAW_FIELDS, parse_json
from api.checks import ApiError, Face, as_sent
from api.faces import FACES
from api.generation import Caller, Events, as_api_error
from api.options import ServerConfig
from api.routes import Api
from observe.logs import counted, warn_once
from processes.child import LOOK
from processes.client import EngineDeadError

ATTEMPTS = 3  # times that a line is run if the engine process ends meanwhile; the last time, no other such line runs
LINES_AT_ONCE = 64  # that are read before others get their turn
READ_AT_ONCE = 2**20  # bytes of a line that is too large
FIRST_BYTES = b'{"id":"batch_req_'  # of each line of the output
REQUIRED = ("custom_id", "method", "url", "body")  # of a line of the input
FACE_OF = {path: face for face in FACES for path in face.paths}


# --- the files --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Line:
    """A line of the input. `read` finds its author's name for it, its face and its body, which is not decoded."""

    number: int  # from 1
    text: bytes  # at most one byte more than is allowed
    id: str = ""  # of the line's answer; the same line in the same place always has the same
    custom_id: str | None = None
    face: Face | None = None
    body: bytes = b""

    def read(self, config: ServerConfig) -> None:
        """Find the face and the body of a line; an `ApiError` if it is no request, with any `custom_id` set."""
        self.id = "batch_req_" + digest(b"%d %b" % (self.number, self.text)).hex()
        if len(self.text.rstrip(b"\r\n")) > config.max_body_bytes:
            raise ApiError(413, f"the line is larger than {config.max_body_bytes} bytes (max_body_bytes)")
        try:
            fields = RAW_FIELDS.decode(self.text)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the line is no JSON object: {error}", None, "invalid_json_line") from None
        self.custom_id = text_of(fields, "custom_id")
        method, url = text_of(fields, "method"), text_of(fields, "url")
        if method != "POST":
            raise ApiError(400, f"method is {method!r:.80}; it must be POST", "method", "invalid_method")
        if url not in FACE_OF:
            raise ApiError(400, f"url is {url!r:.80}; it must be one of {', '.join(FACE_OF)}", "url", "invalid_url")
        if "body" not in fields:
            raise ApiError(400, "body is missing", "body", "missing_required_parameter")
        if not config.allow_unknown_fields and (unknown := [name for name in fields if name not in REQUIRED]):
            message = f"the line has {unknown[0]!r:.80}; it must have {', '.join(REQUIRED)}, and nothing else"
            raise ApiError(400, message, unknown[0][:80], "unknown_parameter")
        self.face, self.body = FACE_OF[url], bytes(fields["body"])
        self.text = b""  # the body is all that is needed now, and may be large


def text_of(fields: dict[str, msgspec.Raw], name: str) -> str:
    """A field of a line, which must be a string that is not empty; else an `ApiError`."""
    if name not in fields:
        raise ApiError(400, f"{name} is missing", name, "missing_required_parameter")
    try:
        text = msgspec.json.decode(fields[name], type=str)
    except ValueError:
        text = ""
    if not text:
        raise ApiError(400, f"{name} is {bytes(fields[name])[:80]!r}; it must be a string, not empty", name)
    return text


def read_lines(file: BinaryIO, most: int) -> Iterator[Line]:
    """The lines of a file that are not blank. Of one with more than `most` bytes, only one byte more is kept."""
    for number in itertools.count(1):
        text = part = file.readline(most + 1)
        if not text:
            return
        while not part.endswith(b"\n") and (part := file.readline(READ_AT_ONCE)):
            gevent.sleep(0)  # a line may have no end
        if number % LINES_AT_ONCE == 0:
            gevent.sleep(0)
        if number == 1:
            text = text.removeprefix(codecs.BOM_UTF8)
        if text.strip():
            yield Line(number, text)


class Answered(msgspec.Struct):
    """A line of the output. Its error has the number of the input's line if that is no request."""

    id: str
    custom_id: str | None
    error: dict[str, Any] | None
    response: dict[str, Any] | None = None


class Answers:
    """The output, which one batch at a time writes.

    The lines of an earlier run are read, and one that has no end is cut off. A ValueError, if it is no file or cannot
    be written, if another batch is doing so, or if it holds what no batch has written.
    """

    def __init__(self, path: str):
        self.path = path
        self.ids: dict[bytes, bool] = {}  # of each custom_id that has an answer or runs, whether this run has seen it
        self.refused: dict[bytes, str] = {}  # of each custom_id whose last answer refuses its line, that line's `id`
        self.reported: set[str] = set()  # the `id` of each line that the output calls no request
        try:
            if os.path.exists(path) and not os.path.isfile(path):  # a device may answer reads for ever
                raise ValueError(f"{path} is no file; the output must be one")
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lifts it when this process is gone
            self._read()
        except OSError as error:
            busy = isinstance(error, BlockingIOError)
            why = "another batch writes to it" if busy else f"it cannot be locked and read: {error.strerror}"
            raise ValueError(f"{path} is not free: {why}") from None

    def _read(self) -> None:
        size = 0  # of the whole lines
        with open(self.fd, "rb", closefd=False) as file:
            for number, text in enumerate(file, 1):
                whole = text.endswith(b"\n")
                try:
                    if not text.startswith(FIRST_BYTES if whole else FIRST_BYTES[: len(text)]):
                        raise ValueError(f"it does not begin with {FIRST_BYTES.decode()}")
                    if not whole:
                        break
                    answered = msgspec.json.decode(text, type=Answered)
                except ValueError as error:
                    must = "the output must be a new file, or one that a batch has begun"
                    raise ValueError(f"line {number} of {self.path} is no batch's: {error}; {must}") from None
                size += len(text)
                if answered.custom_id is None or (answered.error and "line" in answered.error):
                    self.reported.add(answered.id)
                else:
                    self.ids[key := digest(answered.custom_id.encode())] = False
                    if 400 <= (answered.response or {}).get("status_code", 0) < 500:
                        self.refused[key] = answered.id
                    else:
                        self.refused.pop(key, None)
        os.ftruncate(self.fd, size)

    def claim(self, custom_id: str, id: str) -> bool:
        """Whether no earlier run has answered this line, or it was refused then and has been mended since.

        An `ApiError`, if this run has seen another line of its name.
        """
        key = digest(custom_id.encode())
        if seen := self.ids.get(key):
            message = f"custom_id is {custom_id!r:.200}, and so is that of a line before; each must have its own"
            raise ApiError(400, message, "custom_id", "duplicate_custom_id")
        self.ids[key] = True
        return seen is None or self.refused.get(key, id) != id

    def write(self, answer: dict[str, Any]) -> None:
        """Append a line, which stays if this process is killed; an OSError if, say, the disk is full."""
        text = memoryview(msgspec.json.encode(answer) + b"\n")
        assert text[: len(FIRST_BYTES)] == FIRST_BYTES
        while text:
            text = text[os.write(self.fd, text) :]


def digest(text: bytes) -> bytes:
    """Stands for a line or a custom_id, which may be long."""
    return hashlib.blake2b(text, digest_size=16).digest()


# --- running them -----------------------------------------------------------------------------------------------------


class BatchRun:
    """Runs the lines of a file. It is to be made and run where gevent has patched the standard library.

    The engine has at most `width` answers in flight, unless a single line asks for more.
    """

    def __init__(self, api: Api, answers: Answers, width: int, bar: tqdm[Any]):
        self.api, self.answers, self.width, self.bar = api, answers, width, bar
        self.begun = time.monotonic()
        self.lines, self.room = Group(), Event()  # those in flight; and that one of them has ended
        self.flying = self.held = 0  # how many they are, and how many bytes
        self.alone = Semaphore()
        # Lines answered, refused and failed among these, and skipped; and tokens, prefill and decode.
        self.counts: Counter[str] = Counter()
        self.ended = AsyncResult()  # a value when all lines have an answer, or the exception that ends the batch before

    def run(self, file: BinaryIO, look: Callable[[], None]) -> None:
        """Run all lines that have no answer yet, and `look` now and then.

        What `look` or `ended` raises, like an OSError because an answer cannot be written, drops those that run.
        """
        runner = gevent.spawn(self._run_all, file)
        try:
            while not self.ended.ready():
                look()
                self.ended.wait(LOOK)
            self.ended.get()
        finally:
            runner.kill()
            self.lines.kill()

    def _run_all(self, file: BinaryIO) -> None:
        try:
            for line in read_lines(file, self.api.config.max_body_bytes):
                size = len(line.text)
                if self._to_run(line):
                    while self.flying and not self._has_room(size):
                        self.room.clear()
                        self.room.wait()
                    self.flying, self.held = self.flying + 1, self.held + size
                    running = self.lines.spawn(self._run, line, size)
                    running.link_exception(lambda broken: self.ended.set_exception(broken.exception))
        except OSError as error:
            self.ended.set_exception(OSError(f"the input cannot be read: {error.strerror}"))
            return
        self.lines.join()
        if not self.ended.ready():
            self.ended.set()

    def _has_room(self, size: int) -> bool:
        most = self.api.config.max_body_bytes_in_flight
        return max(self.flying, self.api.board.in_flight) < self.width and self.held + size <= most

    def _to_run(self, line: Line) -> bool:
        """Whether a line is to be run. If not, it has an answer: it had one before, or gets one as it is no request."""
        try:
            line.read(self.api.config)
            assert line.custom_id
            if self.answers.claim(line.custom_id, line.id):
                return True
        except ApiError as error:
            if line.id not in self.answers.reported:
                self._write(line, uuid.uuid4().hex, error, {"line": line.number})
                return False
        self.counts["skipped"] += 1
        self.bar.update()
        return False

    def _run(self, line: Line, size: int) -> None:
        name = uuid.uuid4().hex
        answer: dict[str, Any] | list[Any] | ApiError
        try:
            try:
                answer = self._answer(line, name)
            except Exception as error:  # must not end the other lines
                answer = as_api_error(error)
            self._write(line, name, answer, {})
        finally:
            self.flying, self.held = self.flying - 1, self.held - size
            self.room.set()

    def _answer(self, line: Line, name: str) -> dict[str, Any] | list[Any]:
        """The route's answer. If the engine process ends meanwhile, its successor runs the line again."""
        fields = parse_json(line.body, self.api.config, self.api.facts["max_model_len"])
        line.body = b""
        assert line.face
        for key in ("stream", "background"):
            if fields.get(key) is True:
                raise ApiError(400, f"{key} is true; in a batch it must be false", key)
        for attempt in range(1, ATTEMPTS + 1):
            # A line may be what ends the process. It should not end it for the others again and again.
            with self.alone if attempt == ATTEMPTS else contextlib.nullcontext(), as_sent(line.face, fields):
                while self.api.client.trouble:
                    gevent.sleep(LOOK / 10)
                try:
                    answer = self.api.answer(line.face, fields, caller := Caller(name, "batch"))
                except EngineDeadError as error:
                    if attempt == ATTEMPTS:
                        raise ApiError(503, f"{error}; it was so {ATTEMPTS} times when this line was run") from None
                else:
                    assert not isinstance(answer, Events)
                    for key in caller.ignored:
                        warn_once(f"{line.face.paths[0]}: {key} is accepted, and changes nothing")
                    return answer
        raise AssertionError("the last attempt returns or raises")

    def _write(
        self, line: Line, name: str, answer: dict[str, Any] | list[Any] | ApiError, place: dict[str, int]
    ) -> None:
        """Write the answer to a line; `place` has its number if it is no request."""
        if self.ended.ready():  # perhaps because an earlier answer could not be written
            return
        error, status = None, 200
        body: Any = answer
        if isinstance(answer, ApiError):
            status, body = answer.status, answer.body()
            mistake = body["error"]
            code = mistake["code"] or mistake["type"]
            error = {"code": code, "message": mistake["message"], "param": mistake["param"]} | place
        response = {"status_code": status, "request_id": name, "body": body}
        try:
            self.answers.write({"id": line.id, "custom_id": line.custom_id, "response": response, "error": error})
        except OSError as failure:
            self.ended.set_exception(OSError(f"{self.answers.path} cannot be written: {failure.strerror}"))
            return
        self.counts["answered"] += 1
        self.counts["refused"] += 400 <= status < 500
        self.counts["failed"] += status >= 500
        usage = (isinstance(body, dict) and body.get("usage")) or {}  # by OpenAI's words or by Anthropic's
        self.counts["prefill"] += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        self.counts["decode"] += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        seconds = time.monotonic() - self.begun
        rates = (f"{name} {self.counts[name] / seconds:,.0f} tok/s" for name in ("prefill", "decode"))
        self.bar.set_postfix_str(", ".join(rates), refresh=False)
        self.bar.update()

    def summary(self) -> str:
        answered, refused, failed, skipped = (self.counts[n] for n in ("answered", "refused", "failed", "skipped"))
        earlier = f"; {skipped} had an answer from an earlier run" if skipped else ""
        return f"{counted(answered, 'line')} answered, of them {refused} refused and {failed} failed{earlier}"
