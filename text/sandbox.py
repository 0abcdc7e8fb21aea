"""Grammars are compiled, and first tried in a process that may come to harm.

    Grammar        a compiled grammar; `compile_text` makes it
    Sandbox        the process in which a grammar is tried first
    sandbox_main   what that process runs

llguidance does the parsing: it compiles schemas, regular expressions and Lark to lexers and an Earley parser, and walks
a tree of the vocabulary for the tokens that fit. What takes long in it runs without the GIL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np
import psutil

from config import run_file
from executor import end_with_parent, name_process
from sampling_params import StructuredOutputsParams
from text.schemas import grammar_text

START_TIMEOUT = 60.0  # seconds that the sandbox may take to read the vocabulary
ENDING = 1.0  # seconds that the sandbox may take to end
REMEMBERED = 600.0  # seconds in which a grammar that was refused is refused at once
LEAST_SIZE = 2**17  # bytes that a grammar takes at least
NICE = 5  # how far a grammar in the sandbox stands back for what serves requests
MAX_LEXER_STATES = 50_000  # of a grammar: up to 2 KiB each
MAX_SAID = 300  # characters of an error


class Grammar(NamedTuple):
    """A compiled grammar."""

    matcher: Any  # an LLMatcher at the beginning; its copies are advanced
    first: np.ndarray  # [words] uint32: the mask there
    size: int  # bytes that it takes


class Limits(NamedTuple):
    """Limits of a grammar in the sandbox."""

    cpu_time: int = 5  # seconds of a core
    time: float = 15.0  # seconds by the clock, on a machine that has much else to do
    memory: int = 2**29  # bytes
    stack: int = 2**22  # bytes; some 1,500 rules that refer to each other in a chain

    def __str__(self) -> str:
        return f"{self.cpu_time} s, {self.memory >> 20} MiB of memory or {self.stack >> 20} MiB of stack"


class Refused(ValueError):
    """Why a grammar cannot be compiled, and until when that is remembered."""

    def __init__(self, why: str):
        super().__init__(why)
        self.until = time.monotonic() + REMEMBERED


def text_of(wanted: StructuredOutputsParams) -> str:
    """Write structured outputs as llguidance's grammar. `Refused` if they are malformed."""
    try:
        return grammar_text(wanted)
    except MemoryError:
        raise
    except Exception as error:  # the converter of GBNF raises its own
        raise Refused(f"structured_outputs cannot be read: {brief(str(error))}") from None


def compile_text(tokenizer: Any, text: str, words: int, size: int) -> Grammar:
    """Compile a grammar of llguidance. `Refused` if it is none, or too complex."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    try:
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        first = mask_of(matcher, words)
    except BaseException as error:  # the library's panics are not even Exceptions
        raise Refused(f"structured_outputs cannot be compiled: {brief(str(error))}") from None
    if matcher.is_error() or not first.any():
        why = brief(matcher.get_error()) or "they allow no text"
        raise Refused(f"structured_outputs cannot be compiled: {why}")
    return Grammar(matcher, first, size)


def open_vocabulary(folder: str, vocab_size: int, eos_token_ids: Items[int]) -> Any:
    """The LLTokenizer of a model's folder. A ValueError if the model has no tokenizer, or names no token that ends an
    answer."""
    from llguidance import LLTokenizer

    from tokenizer import tokenizer_json

    if not (ends := [token for token in eos_token_ids if token < vocab_size]):
        raise ValueError("structured_outputs need a model that names its end-of-sequence token, and this one does not")
    return LLTokenizer(tokenizer_json(folder), n_vocab=vocab_size, eos_token=ends)


def mask_of(matcher: Any, words: int) -> np.ndarray:
    """The mask [words] uint32 of what a matcher allows next; nothing, if it is in error."""
    mask = np.zeros(words, dtype=np.uint32)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return mask


def brief(error: str) -> str:
    """An error of the library, which may quote a grammar at length, in a short line."""
    return " ".join(error.split())[:MAX_SAID]


# --- the process ------------------------------------------------------------------------------------------------------

Held = list[tuple[subprocess.Popen[bytes], socket.socket]]  # a process and its address, if there is one


class Sandbox:
    """A process that tries grammars: one may overflow the stack, take all memory, or never end.

    It reads the vocabulary once, and forks for each grammar, so that other grammars do not suffer. It starts when it is
    first needed, ends with this process, however that ends, and is replaced if it died.
    """

    def __init__(self, *vocabulary: Any):
        self.vocabulary, self.lock = vocabulary, threading.RLock()  # of `open_vocabulary`
        self.limits = Limits()
        self.held: Held = []
        self.close = weakref.finalize(self, end_process, self.held, self.lock)

    def start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process and its address; it is started if it is not there. A ValueError if this is closed."""
        with self.lock:
            if not self.close.alive:
                raise ValueError("structured_outputs cannot be compiled: the engine has ended")
            if self.held and self.held[0][0].poll() is None:
                return self.held[0]
            end_process(self.held, self.lock)
            address, listener = socket.socketpair()
            with listener:
                options: dict[str, Any] = {"stdin": listener, "stdout": subprocess.DEVNULL, "start_new_session": True}
                process = run_file(__file__, json.dumps(self.vocabulary), **options)
            self.held.append((process, address))
            return self.held[0]

    def check(self, wanted: StructuredOutputsParams) -> tuple[str, int]:
        """The text of a grammar, and the bytes that it takes compiled. `Refused` if it cannot be compiled; another
        ValueError if the process does not start, which has said why on stderr."""
        for _ in range(2):  # somebody may have killed it
            process, address = self.start()
            try:
                if not (reply := self._ask(address, wanted)):
                    process.wait(ENDING)
            except OSError:
                reply = {}
            except subprocess.TimeoutExpired:  # its fork alone has ended
                reply = {"error": f"structured_outputs cannot be compiled: that takes more than {self.limits}"}
            if "error" in reply:
                raise Refused(reply["error"])
            if reply:
                return reply["text"], reply["size"]
            process.kill()
            process.wait()
        raise ValueError("structured_outputs cannot be compiled now: the process that tries them has ended")

    def _ask(self, address: socket.socket, wanted: StructuredOutputsParams) -> dict[str, Any]:
        """The answer of a fork; an empty one if it has ended without a word."""
        sock, theirs = socket.socketpair()
        with sock, sock.makefile("rb") as file:
            with theirs:
                socket.send_fds(address, [b"\0"], [theirs.fileno()])
            sock.settimeout(START_TIMEOUT)
            sock.sendall(json.dumps([dataclasses.asdict(wanted), self.limits]).encode() + b"\n")
            return json.loads(file.readline() or "{}")


def end_process(held: Held, lock: threading.RLock) -> None:
    """End a sandbox's process, if there is one; the list is empty afterwards."""
    with lock:
        while held:
            process, address = held.pop()
            address.close()
            process.kill()
            process.wait()


def sandbox_main() -> None:
    """Run the sandbox's process, until nobody is left who could send a grammar."""
    name_process("grammars")
    end_with_parent(signal.SIGKILL)
    folder, vocab_size, eos_token_ids = json.loads(sys.argv[1])
    tokenizer, words = open_vocabulary(folder, vocab_size, eos_token_ids), -(-vocab_size // 32)
    compile_text(tokenizer, text_of(StructuredOutputsParams(grammar='start: "a"')), words, 0)  # loads what forks need
    listener = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that forks leave nothing behind
    while fds := socket.recv_fds(listener, 1, 1)[1]:
        with socket.socket(fileno=fds[0]) as client:
            if os.fork() == 0:
                try:
                    attempt(tokenizer, words, client)
                finally:
                    os._exit(0)


def tell(client: socket.socket, **said: Any) -> None:
    """Answer a client."""
    client.sendall(json.dumps(said).encode() + b"\n")


def attempt(tokenizer: Any, words: int, client: socket.socket) -> None:
    """In a fork: compile a client's grammar, and tell what came of it; what goes beyond a limit ends it before."""
    import resource  # here, because Windows has none

    end_with_parent(signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library writes there how it dies
    with client.makefile("rb") as lines:
        fields, sizes = json.loads(lines.readline())
    wanted, limits = StructuredOutputsParams(**fields), Limits(*sizes)
    os.nice(NICE)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory is short, this ends first
    signal.setitimer(signal.ITIMER_REAL, limits.time)
    space = psutil.Process().memory_info().vms + limits.memory
    for name, most in (("CORE", 0), ("CPU", limits.cpu_time), ("AS", space)):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # this system lacks it, or a lower one holds
            number = getattr(resource, f"RLIMIT_{name}")
            resource.setrlimit(number, (most, resource.getrlimit(number)[1]))

    def run() -> None:
        try:
            before = own_memory()
            text = text_of(wanted)
            grammar = compile_text(tokenizer, text, words, 0)
            grammar.matcher.deep_copy()
            tell(client, text=text, size=max(own_memory() - before, LEAST_SIZE))
        except Refused as error:
            tell(client, error=str(error))

    threading.stack_size(limits.stack)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def own_memory() -> int:
    """Bytes of memory that this process has, without what it shares by files."""
    memory = psutil.Process().memory_info()
    return memory.rss - getattr(memory, "shared", 0)


if __name__ == "__main__":
    sandbox_main()
