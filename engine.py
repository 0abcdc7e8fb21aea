"""The engine: one loop that owns the scheduler, and its faces.

    EngineCore      scheduler + executor; each `step()` plans, runs and reports
    LLM             the core in the caller's own process: `LLM("demo").generate("To be, or not")`
    launch_engine   the core in a process of its own, for the server; `MPClient` is the API process's end of it

The engine process reads its options from standard input, and that pipe is also its leash: when the other end closes,
because the server ended or was killed, the engine leaves. Clients talk to it over a Unix socket in a private folder:
a frame is four bytes of length and a msgpack message of one of the types below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from config import VERSION, EngineConfig, ModelConfig, SamplingParams
from executor import UniExecutor
from journal import Journal
from outputs import Choices, CompletionOutput, RequestOutput
from scheduler import EngineOutput, Request, Scheduler
from tokenizer import Tokenizer

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "EngineCore", "RequestOutput", "SamplingParams"]  # for scripts

SEND_TIMEOUT = 30  # seconds that a client may leave its socket full before it counts as gone
STOP_TIMEOUT = 10  # seconds that the engine process has to leave before it is killed


class EngineDeadError(RuntimeError):
    """The engine process is gone, and this request with it."""


class EngineCore:
    """The scheduler and its executor.

    Args:
        config: the engine's options.

    Raises:
        ValueError: the model or the options are not usable; the message is one line.
    """

    def __init__(self, config: EngineConfig):
        self.model_config = ModelConfig.from_folder(config.model)
        self.executor = UniExecutor(config, self.model_config)
        self.facts = self.executor.facts() | {
            "model": config.model,
            "architecture": self.model_config.architecture,
            "scheduling_policy": config.scheduling_policy,
        }
        names = ("num_blocks", "max_model_len", "vocab_size", "num_host_blocks", "window", "swap_cost")
        sizes = {name: self.facts[name] for name in names} | {"eos_token_ids": self.model_config.eos_token_ids}
        self.scheduler, self.journal = Scheduler(config, **sizes), None
        if config.log_scheduler:
            self.journal = Journal(config.log_scheduler, config, sizes)
            self.scheduler.clock = self.journal.clock

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        salt: str = "",
        priority: int = 0,
    ) -> None:
        """Queue a request; a lower priority goes first, where that is the policy.

        Raises:
            ValueError: it can never run; see `Scheduler.add`.
        """
        request = Request(request_id, prompt_token_ids, params, salt, priority)
        if self.journal:
            self.journal.tick()
        self.scheduler.add(request)
        if self.journal:
            self.journal.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one of its samples; what is unknown has just finished."""
        self.scheduler.abort(request_id, index)
        if self.journal:
            self.journal.abort(request_id, index)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work()

    def step(self) -> list[EngineOutput]:
        """Plan a step, run it, and return what it brought."""
        if self.journal:
            self.journal.tick()
        plan = self.scheduler.schedule()
        self.executor.submit(plan)
        result = self.executor.result()
        if self.journal:
            self.journal.step(plan, self.scheduler, result)
        return self.scheduler.update(plan, result)

    def metrics(self) -> dict[str, float]:
        """Gauges and counters, by vLLM's names."""
        return self.scheduler.metrics()

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Where a request's time went; None if it is unknown, or finished so long ago that it is forgotten."""
        return self.scheduler.explain(request_id)

    def explain_prompts(self, name: str, most: int) -> list[dict[str, Any]]:
        """The same of the requests `name-0`, `name-1`, ... below `most`, but for those that are unknown."""
        return [story for i in range(most) if (story := self.explain(f"{name}-{i}")) is not None]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.scheduler.reset_prefix_cache()
        if self.journal:
            self.journal.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Assert that the scheduler's and the block manager's books agree."""
        self.scheduler.check_integrity()

    def start_log(self) -> str:
        """Four lines that say what was started and how much fits."""
        f = self.facts
        tokens = f["num_blocks"] * f["block_size"]
        compiled = f", steps of one sequence compiled in {f['compile_seconds']} s" if f["compile_seconds"] else ""
        return (
            f"Manta {VERSION}: {f['model']}\n"
            f"  model     {f['architecture']}, {f['parameters']:,} parameters in {f['dtype']}\n"
            f"  device    {f['device']}, {f['backend']}.py{compiled}\n"
            f"  KV cache  {f['num_blocks']:,} blocks of {f['block_size']} = {tokens:,} tokens in "
            f"{f['kv_bytes'] / 2**20:,.0f} MiB: {tokens // f['max_model_len']} requests at the full length of "
            f"{f['max_model_len']:,}"
        )


# --- in the caller's process ----------------------------------------------------------------------------------------


class LLM:
    """A model in this process, for scripts.

    Args:
        model: folder in Hugging Face layout.
        fields: any of `EngineConfig`'s.

    Raises:
        ValueError: a field is unknown or out of range, or the model cannot be loaded.
    """

    def __init__(self, model: str = EngineConfig.model, **fields: Any):
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        self.config = EngineConfig(model=model, **fields)
        self.tokenizer = Tokenizer(model)
        self.core = EngineCore(self.config)
        self.ids = itertools.count()

    def generate(
        self,
        prompts: str | list[str] | list[int] | list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids); outputs come in the order of the prompts.

        `priority` has a number for each prompt, the lowest goes first; the policy must be `priority`.

        Raises:
            ValueError: a prompt is empty, too long or has tokens outside of the vocabulary; nothing is run then.
        """
        items: list[Any] = (
            [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else list(prompts)
        )
        if isinstance(sampling_params, list):
            if len(sampling_params) != len(items):
                raise ValueError(f"sampling_params has {len(sampling_params)} entries for {len(items)} prompts")
            params = sampling_params
        else:
            params = [sampling_params or SamplingParams()] * len(items)
        requests = [self._request(item, p) for item, p in zip(items, params, strict=True)]
        if priority is not None and self.config.scheduling_policy != "priority":
            raise ValueError(f"priority is given; scheduling_policy is {self.config.scheduling_policy!r}")
        ranks = [0] * len(items) if priority is None else priority
        if len(ranks) != len(items):
            raise ValueError(f"priority has {len(ranks)} entries for {len(items)} prompts")
        live = {}
        try:
            for request, rank in zip(requests, ranks, strict=True):
                self.core.add(request.request_id, request.prompt_token_ids, request.params, "", rank)
                live[request.request_id] = request
            self._run(live, use_tqdm)
        finally:  # a bad prompt, or Ctrl-C: leave nothing behind for the next call
            for request_id in live:
                self.core.abort(request_id)
        return [request.output() for request in requests]

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`.

        `template_kwargs` go to the chat template.
        """
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], dict) else messages
        rendered = [self.tokenizer.render(conversation, **template_kwargs) for conversation in conversations]
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in rendered]
        return self.generate(ids, sampling_params, use_tqdm)

    def _request(self, item: str | list[int], params: SamplingParams) -> Choices:
        text, ids = (item, self.tokenizer.encode(item)) if isinstance(item, str) else (None, item)
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError(f"a prompt is {item!r:.80}; it must be a string or a list of token ids")
        return Choices(str(next(self.ids)), text, ids, params, self.tokenizer)

    def _run(self, live: dict[str, Choices], use_tqdm: bool) -> None:
        begun, prefilled, decoded = time.monotonic(), 0, 0
        with tqdm(total=len(live), desc="Generating", unit="request", disable=not use_tqdm) as bar:
            while live:
                for output in self.core.step():
                    request = live[output.request_id]
                    if request.metrics.first_token_time is None:
                        prefilled += len(request.prompt_token_ids)
                    decoded += len(output.token_ids)
                    request.push(output, self.core.abort)
                    if request.finished:
                        del live[output.request_id]
                        bar.update()
                seconds = time.monotonic() - begun
                rates = f"prefill {prefilled / seconds:,.0f} tok/s, decode {decoded / seconds:,.0f} tok/s"
                bar.set_postfix_str(rates, refresh=False)


# --- in a process of its own ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Add:
    """Client to engine: a new request."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    salt: str = ""
    priority: int = 0


@dataclass(slots=True)
class Abort:
    """Client to engine: the request is no longer wanted, or one of its samples."""

    request_id: str
    index: int | None = None


@dataclass(slots=True)
class Call:
    """Client to engine: a utility call, answered by the `Reply` of the same id."""

    call_id: int
    method: str
    args: list[Any] = dataclasses.field(default_factory=list)


@dataclass(slots=True)
class Outputs:
    """Engine to client: one step's news of the client's requests."""

    outputs: list[EngineOutput]


@dataclass(slots=True)
class Reply:
    """Engine to client: what a utility call returned, or what was wrong with it."""

    call_id: int
    value: Any = None
    error: str | None = None


UTILITIES = ("metrics", "explain", "explain_prompts", "reset_prefix_cache", "check_integrity")
ToEngine = Add | Abort | Call
ToClient = Outputs | Reply


def send_frame(sock: socket.socket, message: ToEngine | ToClient) -> None:
    """Write one message."""
    import msgspec  # here, because a script that uses `LLM` has no need of it

    payload = msgspec.msgpack.encode((type(message).__name__, message))
    sock.sendall(struct.pack("<I", len(payload)) + payload)


def read_frames(sock: socket.socket) -> Iterator[Any]:
    """Yield the messages that arrive until the other end closes, or sends what is none."""
    import msgspec

    envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
    bodies = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in (Add, Abort, Call, Outputs, Reply)}
    with sock.makefile("rb") as file, contextlib.suppress(ConnectionError, ValueError, KeyError):
        while len(header := file.read(4)) == 4:
            name, body = envelope.decode(file.read(struct.unpack("<I", header)[0]))
            yield bodies[name].decode(body)


class EngineServer:
    """The loop of the engine process: reads its clients' messages between steps and sends each its outputs."""

    def __init__(self, core: EngineCore, listener: socket.socket):
        self.core, self.listener = core, listener
        self.inbox: queue.SimpleQueue[tuple[socket.socket, ToEngine | None]] = queue.SimpleQueue()
        self.owners: dict[str, socket.socket] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self.listener.accept()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT, 0))
            threading.Thread(target=self._read, args=(client,), daemon=True).start()

    def _read(self, client: socket.socket) -> None:
        for message in read_frames(client):
            self.inbox.put((client, message))
        self.inbox.put((client, None))

    def run(self) -> None:
        """Serve for ever; an idle engine sleeps in `inbox.get`."""
        while True:
            while not self.core.has_work() or not self.inbox.empty():
                self._handle(*self.inbox.get())
            news: dict[socket.socket, list[EngineOutput]] = {}
            for output in self.core.step():
                news.setdefault(self.owners[output.request_id], []).append(output)
                if output.finished:
                    del self.owners[output.request_id]
            for client, outputs in news.items():
                self._send(client, Outputs(outputs))

    def _send(self, client: socket.socket, message: ToClient) -> None:
        try:
            send_frame(client, message)
        except OSError:  # gone, or stuck for SEND_TIMEOUT: its reader thread reports the end
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def _handle(self, client: socket.socket, message: ToEngine | None) -> None:
        if isinstance(message, Add):
            try:
                self.core.add(
                    message.request_id, message.prompt_token_ids, message.params, message.salt, message.priority
                )
                self.owners[message.request_id] = client
            except ValueError as error:
                refused = EngineOutput(message.request_id, [], "error", error=str(error), finished=True)
                self._send(client, Outputs([refused]))
        elif isinstance(message, Abort):
            if message.request_id in self.owners:
                self.core.abort(message.request_id, message.index)
                if message.index is None:
                    del self.owners[message.request_id]
        elif isinstance(message, Call):
            self._send(client, self._call(message))
        else:
            for request_id in [id for id, owner in self.owners.items() if owner is client]:
                del self.owners[request_id]
                self.core.abort(request_id)
            client.close()

    def _call(self, call: Call) -> Reply:
        if call.method not in UTILITIES:
            return Reply(call.call_id, error=f"no utility {call.method!r}; there are {', '.join(UTILITIES)}")
        try:
            return Reply(call.call_id, getattr(self.core, call.method)(*call.args))
        except Exception as error:  # the caller's to hear of, and no reason for the engine to end
            return Reply(call.call_id, error=repr(error))


def engine_main() -> None:
    """What the engine process runs: options from standard input, the facts to standard output, then the loop."""
    options = json.loads(sys.stdin.buffer.readline())
    folder = options.pop("socket_folder")
    ready = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may reach the handshake

    def leash() -> None:
        while os.read(0, 1):  # ends when the last process that holds the other end is gone; unbuffered, because
            pass  # a lock held here would abort the interpreter when it exits
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=leash, daemon=True).start()
    try:
        core = EngineCore(EngineConfig(**options))
    except ValueError as error:
        print(f"server.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(core.start_log(), file=sys.stderr, flush=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(folder, "engine"))
    listener.listen()
    with ready:
        ready.write(json.dumps(core.facts) + "\n")
    try:
        EngineServer(core, listener).run()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


class EngineProcess:
    """The server's hold on its engine process. Made by `launch_engine`."""

    def __init__(self, process: subprocess.Popen[bytes], folder: str, facts: dict[str, Any]):
        self.process, self.folder, self.facts = process, folder, facts
        self.path = os.path.join(folder, "engine")

    @property
    def alive(self) -> bool:
        """Whether the process runs; only its parent can tell."""
        return self.process.poll() is None

    def forget(self) -> None:
        """In a forked child: let go of the leash, so that it hangs on the parent alone."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.returncode = 0  # not our child: there is nothing to wait for

    def stop(self) -> None:
        """End the process and remove its socket."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def launch_engine(config: EngineConfig) -> EngineProcess:
    """Start the engine in a process of its own and wait until it is ready; its progress goes to standard error.

    A session of its own keeps the terminal's Ctrl-C from it: the server drains first, then lets go of the leash.

    Raises:
        SystemExit: it could not start, and has said why in one line.
    """
    folder = tempfile.mkdtemp(prefix="manta-")
    command = [sys.executable, os.path.abspath(__file__)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    engine = EngineProcess(process, folder, {})
    try:
        assert process.stdin and process.stdout
        options = dataclasses.asdict(config) | {"beside_server": True, "socket_folder": folder}
        process.stdin.write(json.dumps(options).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        process.stdout.close()
        if not line:
            raise SystemExit(process.wait() or 1)
        engine.facts = json.loads(line)
    except BaseException:
        engine.stop()
        raise
    return engine


class Stream:
    """The outputs of one request as they come, or of several that were added with it."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[EngineOutput | Exception] = queue.SimpleQueue()

    def get(self, timeout: float | None = None) -> EngineOutput:
        """The next output.

        Raises:
            queue.Empty: none came within `timeout` seconds.
            EngineDeadError: none will come. So it is with whatever other exception was put into the queue.
        """
        item = self.queue.get(timeout=timeout)
        if isinstance(item, Exception):
            raise item
        return item


class MPClient:
    """An API process's connection to the engine process.

    Plain sockets, threads and queues, so that gevent's patching turns it into greenlets where the server wants that.

    Args:
        path: of the engine's Unix socket.
    """

    def __init__(self, path: str):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.lock = threading.Lock()
        self.streams: dict[str, Stream] = {}
        self.calls: dict[int, queue.SimpleQueue[Reply | None]] = {}
        self.call_ids = itertools.count()
        self.alive = True
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for message in read_frames(self.socket):
            if isinstance(message, Reply):
                if waiter := self.calls.get(message.call_id):
                    waiter.put(message)
                continue
            for output in message.outputs:
                stream = self.streams.get(output.request_id)
                if output.finished:
                    self.streams.pop(output.request_id, None)
                if stream:
                    stream.queue.put(output)
        with self.lock:
            self.alive = False
            streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.queue.put(EngineDeadError("the engine process has ended"))
        for waiter in list(self.calls.values()):
            waiter.put(None)

    def _send(self, message: ToEngine, register: Callable[[], None] = lambda: None) -> None:
        with self.lock:
            if not self.alive:
                raise EngineDeadError("the engine process has ended")
            register()
            with contextlib.suppress(OSError):  # a broken socket: the reader tells everyone
                send_frame(self.socket, message)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        salt: str = "",
        stream: Stream | None = None,
        priority: int = 0,
    ) -> Stream:
        """Send a request; a refusal comes as an output with `finish_reason` "error".

        Its outputs go into `stream`, or else into a new one; that is returned.

        Raises:
            EngineDeadError: there is no engine.
        """
        target = stream or Stream()
        message = Add(request_id, prompt_token_ids, params, salt, priority)
        self._send(message, lambda: self.streams.update({request_id: target}))
        return target

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Give a request up; it yields nothing more. With an index, give up that one of its samples."""
        if self.streams.get(request_id) if index is not None else self.streams.pop(request_id, None):
            with contextlib.suppress(EngineDeadError):
                self._send(Abort(request_id, index))

    def call(self, method: str, *args: Any, timeout: float = 10.0) -> Any:
        """Run a utility of the engine and return its value.

        Raises:
            ValueError: the engine does not have it, or it failed.
            TimeoutError: no answer came within `timeout` seconds.
            EngineDeadError: there is no engine.
        """
        call_id, waiter = next(self.call_ids), queue.SimpleQueue[Reply | None]()
        self.calls[call_id] = waiter
        try:
            self._send(Call(call_id, method, list(args)))
            reply = waiter.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"the engine did not answer {method!r} within {timeout} s") from None
        finally:
            del self.calls[call_id]
        if reply is None:
            raise EngineDeadError("the engine process has ended")
        if reply.error:
            raise ValueError(reply.error)
        return reply.value

    def close(self) -> None:
        """Hang up; the engine drops what this client still had running."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


if __name__ == "__main__":
    engine_main()
