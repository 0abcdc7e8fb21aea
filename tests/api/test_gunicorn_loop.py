"""What the log says of an API process that stands still: gunicorn itself, around a scripted engine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api import gunicorn_loop
from api.gunicorn_loop import Gunicorn
from api.options import ServerConfig
from api.routes import Api
from observe.logs import set_up
from processes.child import Board, listen
from scripted import COMPLETIONS, FACTS, TOKENIZER, ScriptedClient
from served import ROOT, eventually
from server import create_app

PROMPTS = {"a loop of Python": "loop", "a long call of C": "call", "a signal that nobody has foreseen": "stop"}


def serve_what_stands_still() -> None:
    """Serve, in this process; some prompts stand still."""
    encode, config, board = TOKENIZER.encode, ServerConfig(port=0), Board()

    def stand_still(text: str, *more: bool) -> list[int]:
        while text == "loop":
            pass
        if text == "call":
            re.match("(a+)+$", "a" * 99 + "b")
        if text == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return encode(text, *more)

    TOKENIZER.encode = stand_still  # type: ignore[method-assign]
    gunicorn_loop.API_TIMEOUT = 1
    set_up("info", "text")
    nothing: Any = SimpleNamespace(disown=lambda: None, reap=lambda: None, check=lambda: None)
    api = Api(ScriptedClient(), TOKENIZER, FACTS, config, ["manta"], board)
    listener = listen(config.host, config.port, "--port")
    Gunicorn(lambda: create_app(api), listener, nothing, board, config).run()


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The log and the port of such a server."""
    log = tmp_path_factory.mktemp("standing") / "log"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with open(log, "w") as file:
        process = subprocess.Popen([sys.executable, __file__], env=environment, stderr=file)
    try:
        eventually(lambda: "\n" in log.read_text().partition("http://")[2])
        yield log, int(re.findall(r"http://127\.0\.0\.1:(\d+)", log.read_text())[0])
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.full
@pytest.mark.parametrize("what", PROMPTS)
def test_an_api_process_that_stands_still_is_replaced(standing: tuple[Path, int], what: str) -> None:
    """The log says where in the code it was, unless it cannot tell. What the request says stays out of the log."""
    log, port = standing
    prompt, before = PROMPTS[what], len(log.read_text())
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        body = f'{{"prompt": "{prompt}", "user": "secret"}}'
        connection.request("POST", COMPLETIONS, body)
        with contextlib.suppress(OSError, HTTPException):
            connection.getresponse()
    pattern = re.compile(r" ERROR server: api (\d+) has stood still for 1 s and is replaced \(pid \d+\)$", re.MULTILINE)
    eventually(lambda: pattern.search(log.read_text(), before))
    match = pattern.search(log.read_text(), before)
    assert match
    if what != "a signal that nobody has foreseen":
        at = rf"api {match[1]}: +File .* in stand_still"
        eventually(lambda: re.search(at, log.read_text()[before:]))
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:  # to its successor
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
    assert "secret" not in log.read_text()


if __name__ == "__main__":
    serve_what_stands_still()
