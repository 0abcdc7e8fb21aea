"""The log: what its lines look like whatever is in them, a line for each request, throughput, and processes' names."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.generation import LEFT, ClientGone, unquoted
from engine import SamplingParams
from observe import logs
from observe.logs import JsonFormatter, StatLogger, TextFormatter, console, logger
from plan import EngineCoreRequest
from processes.client import EngineDeadError, MPClient
from processes.engine_process import EngineServer
from scripted import BODIES, BROKEN, CHAT, COMPLETIONS, FACTS, TOKENIZER, ScriptedClient, client_of, post, told
from served import ROOT, Server, eventually, serving

FORGED = "2026-01-01 00:00:00.000 ERROR engine 0: it burns"
HOSTILE = f"a\n{FORGED}\r\x1b[2J\x7f b\x85c\u2028d\u202ee 日"


def record(message: str, name: str = logger.name, **fields: Any) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": name, "levelname": "INFO", "msg": message, "processName": "api 0"})
    made.__dict__.update(fields)
    return made


# --- lines ------------------------------------------------------------------------------------------------------------


def test_nothing_that_is_said_can_look_like_a_line_of_its_own() -> None:
    line = TextFormatter().format(record(HOSTILE))
    assert re.fullmatch(r"[\x20-\x7e]+", line) and line.isascii() and len(line.splitlines()) == 1
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO api 0: a\\x0a2026", line)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        failed = record("it failed", exc_info=sys.exc_info())
    first, *rest = TextFormatter().format(failed).split("\n")
    assert first.endswith("it failed") and "ValueError: a" in "".join(rest)
    assert all(re.fullmatch(r" {4}[\x20-\x7e]*", line) for line in rest)


def test_a_line_of_json_has_the_message_the_facts_and_the_traceback() -> None:
    line = JsonFormatter().format(record(HOSTILE, facts={"status": 200}))
    assert line.isascii() and len(line.splitlines()) == 1
    fields = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", fields.pop("time"))
    assert fields == {"level": "info", "process": "api 0", "message": HOSTILE, "status": 200}
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        failed = JsonFormatter().format(record("it failed", exc_info=sys.exc_info()))
    assert HOSTILE in json.loads(failed)["traceback"]


def test_what_goes_to_the_console_comes_bare() -> None:
    """But in JSON it is an object like any other."""
    said = record("server.py: error: port is taken", console.name)
    assert TextFormatter().format(said) == "server.py: error: port is taken"
    assert json.loads(JsonFormatter().format(said))["message"] == "server.py: error: port is taken"


@pytest.mark.parametrize("before", ["", "os.close(2)", "sys.stderr.close()"], ids=["full disk", "no file", "closed"])
@pytest.mark.parametrize("name", [None, "manta"])
def test_what_cannot_be_said_ends_nothing(before: str, name: str | None) -> None:
    code = (
        f"import logging, os, sys; from observe import logs\n{before}\nlogs.set_up('info', 'text', {name!r})\n"
        "for text in ('a' * 10**6, 'b'):\n    logs.logger.info(text)\n    logging.getLogger('other').error(text)\n"
        "print('goes on')"
    )
    if name:  # then others speak for themselves
        code = code.replace("logging.getLogger('other').error(text)", "pass")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=full, check=True)
    assert done.stdout == b"goes on\n"


def test_a_script_that_has_set_up_logging_gets_what_is_said_its_own_way() -> None:
    code = (
        "import logging, sys; from observe import logs\n{}\nlogs.set_up('info', 'text', 'manta')\n"
        "logs.logger.info('a')\nlogs.logger.debug('b')\nlogging.getLogger('other').warning('c')"
    )
    for before, lines in (
        ("logging.basicConfig(format='mine: %(message)s')", ["mine: a", "mine: c"]),
        ("", ["INFO MainProcess: a", "c"]),
    ):
        command = [sys.executable, "-c", code.format(before)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert [re.sub(r"^2.* INFO", "INFO", line) for line in done.stderr.splitlines()] == lines


# --- a line for each request ------------------------------------------------------------------------------------------


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """Returns the records that have come since it was called last."""
    caplog.set_level(logging.DEBUG, logger.name)

    def records() -> list[logging.LogRecord]:
        new = [record for record in caplog.records if hasattr(record, "facts")]
        caplog.clear()
        return new

    return records


def read(response: Any) -> Any:
    response.get_data()
    response.close()
    return response


def test_a_request_has_a_line_in_the_log(engine: ScriptedClient, said: Any) -> None:
    http_client, tokens = client_of(engine, api_key=("secret-key",)), len(TOKENIZER.encode("To be"))
    key = {"Authorization": "Bearer secret-key", "X-Request-Id": "mine"}
    for stream in (False, True):
        body = BODIES[COMPLETIONS] | {"n": 2, "max_tokens": 3, "stream": stream}
        read(http_client.post(COMPLETIONS, json=body, headers=key))
        (line,) = said()
        facts = dict(line.facts)
        assert 0 <= facts.pop("queue_seconds") <= facts.pop("first_token_seconds") <= facts.pop("seconds") < 60
        assert facts.pop("id").startswith("cmpl-")
        assert facts == {
            "request_id": "mine", "client": engine.clients[-1], "method": "POST", "path": COMPLETIONS, "status": 200,
            "ended": "length", "model": "manta", "stream": stream, "n": 2, "prompt_tokens": tokens, "cached_tokens": 2,
            "output_tokens": 6,
        }  # fmt: skip
        assert line.levelname == "INFO" and re.fullmatch(
            rf"POST /v1/completions 200 in \d\.\d{{3}} s, cmpl-\w{{32}} \(mine\): length; tokens: {tokens} prompt "
            r"\(2 cached\), 6 output, 0\.000 s in the queue, \d\.\d{3} s to the first token",
            line.getMessage(),
        )


@pytest.mark.parametrize("stream", [False, True])
def test_it_says_why_the_request_has_ended(engine: ScriptedClient, said: Any, stream: bool) -> None:
    ids = TOKENIZER.encode("To be")
    stop = told(ids, "stop")
    ending = told(ids, "stop")
    ending.stop_reason = ids[-1]
    stop.finished = ending.finished = True
    for script, fields, status, ended in (
        ([stop], {}, 200, "stop"),
        ([ending], {}, 200, "stop token"),
        ([told(ids[:1]), told(ids[1:])], {"stop": "be"}, 200, "stop string"),
        ([BROKEN], {}, 503, "worker died"),
        ([told([], "error", error="the prompt is 'secret'")], {}, 400, "the prompt is '...'"),
        ([EngineDeadError("it's gone")], {}, 503, "it's gone"),
        ([told(ids[:1]), BROKEN], {}, 200 if stream else 503, "worker died"),
        ([told(ids[:1]), ClientGone()], {}, 200 if stream else 499, LEFT),
        (None, {"temperature": "secret"}, 400, "temperature is '...': it must be a number from 0.0 to 100.0"),
    ):
        engine.script = script
        read(post(client_of(engine), COMPLETIONS, stream=stream, **fields))
        (line,) = said()
        assert (line.facts["status"], line.facts["ended"]) == (status, ended)
        assert f" {status} in " in line.getMessage() and f": {ended}" in line.getMessage()


def test_a_client_that_leaves_a_stream_is_in_the_log(engine: ScriptedClient, said: Any) -> None:
    """Gunicorn, which cannot write to it any more, closes the response."""
    response = client_of(engine).post(CHAT, json=BODIES[CHAT] | {"stream": True, "max_tokens": 9}, buffered=False)
    next(response.iter_encoded())
    assert not said()
    response.close()
    (line,) = said()
    assert line.facts["ended"] == LEFT and line.facts["output_tokens"] == 1


def test_a_line_has_no_text_of_the_request(engine: ScriptedClient, said: Any) -> None:
    secret = "it's a \"secret\" \\' of \n mine"
    chat = [{"role": "user", "content": secret}]
    embedder = client_of(engine, FACTS | {"task": "embed", "hidden_size": 3, "vector_size": 3})
    for http_client, route, body in (
        (client_of(engine), COMPLETIONS, {"prompt": secret, "stop": "secret", "max_tokens": 1}),
        (client_of(engine), CHAT, {"messages": chat, "max_tokens": 1}),
        (client_of(engine), CHAT, {"messages": secret}),
        (client_of(engine), CHAT, {"messages": [*chat, {"role": secret, "content": {secret: secret}}]}),
        (client_of(engine), CHAT, {"messages": chat, "tools": chat}),
        (client_of(engine), COMPLETIONS, {"prompt": {secret: secret}}),
        (client_of(engine), COMPLETIONS, {secret: secret}),
        (client_of(engine), COMPLETIONS, {"prompt": "a", "suffix": secret}),
        (client_of(engine), COMPLETIONS, {"prompt": "a", "stop": [secret, 1]}),
        (embedder, "/v1/embeddings", {"input": [secret]}),
    ):
        read(http_client.post(route, json=body))
        (request,) = said()
        line = TextFormatter().format(request) + JsonFormatter().format(request)
        assert not re.search("secret|mine|Hello", line), line
    assert request.facts["prompt_tokens"] == len(TOKENIZER.encode(secret)) and request.facts["output_tokens"] == 0


def test_what_is_quoted_is_left_out_up_to_its_last_quote() -> None:
    """A text may have quotes of its own, and what stands between two texts goes with them."""
    for text in ("a", "it's mine", 'say "mine" or "yours"', "it's \"mine\", it's", "a\n'mine'\nb"):
        assert unquoted(f"stop is {text!r}; why") == "stop is '...'; why"
    assert unquoted("it is 'a' and, at 5, 'mine' or \"b\"") == "it is '...' or '...'"
    assert unquoted("the engine process has ended") == "the engine process has ended"


def test_a_hostile_request_breaks_no_line(engine: ScriptedClient, said: Any) -> None:
    http_client = client_of(engine, api_key=("secret-key",))
    for path in ("/a%0Ab?secret=1", "/a%E2%80%A8b%C2%85c%C2%9Bd", "/a 200 in 0.1 s, cmpl-0: stop"):
        for headers in ({}, {"Authorization": "Bearer secret-key", "X-Request-Id": "a b"}):
            response = read(http_client.get(path, headers=headers))
            (request,) = said()
            assert request.facts["request_id"] == response.headers["X-Request-Id"] != "a b"
            assert request.facts["status"] == response.status_code == 404
            assert re.fullmatch("/a%[%0-9A-Za-z,.:-]+", request.facts["path"]) and "secret" not in request.getMessage()
            for formatter in (TextFormatter(), JsonFormatter()):
                line = formatter.format(request)
                assert re.fullmatch(r"[\x20-\x7e]+", line)
                assert f"GET {request.facts['path']} {response.status_code}" in line


def test_what_programs_ask_for_all_the_time_is_said_at_debug_alone(engine: ScriptedClient, said: Any, caplog):
    http_client = client_of(engine)
    for path, level in (("/health", "DEBUG"), ("/metrics", "DEBUG"), ("/v1/models", "INFO")):
        read(http_client.get(path))
        (line,) = said()
        assert line.levelname == level
    caplog.set_level(logging.WARNING, logger.name)
    read(post(http_client, COMPLETIONS))
    assert not said()


# --- throughput -------------------------------------------------------------------------------------------------------


def test_throughput_is_of_the_time_since_the_last_line(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total")
    metrics = {f"num_requests_{state}": 0 for state in ("running", "waiting", "swapped")}
    metrics |= dict.fromkeys(names, 0) | {"kv_cache_usage_perc": 0.0}
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    stats = StatLogger(lambda: dict(metrics))

    def after(seconds: float, **more: float) -> list[str]:
        nonlocal now
        now += seconds
        metrics.update(more)
        stats.log_if_due()
        return [line.getMessage() for line in said()]

    begun = {"prompt_tokens_total": 3000, "num_requests_running": 2, "num_requests_swapped": 1}
    assert after(9, **begun) == []
    assert after(3, generation_tokens_total=60, prefix_cache_queries_total=2000, prefix_cache_hits_total=500) == [
        "prompt 250.0 tok/s, generation 5.0 tok/s; 2 requests running, 1 waiting, 0.0% of KV blocks in use, "
        "25.0% of prompts cached"
    ]
    assert after(10, kv_cache_usage_perc=0.125, num_requests_swapped=0) == [
        "prompt 0.0 tok/s, generation 0.0 tok/s; 2 requests running, 0 waiting, 12.5% of KV blocks in use"
    ]
    assert after(10, num_requests_running=0, generation_tokens_total=90, kv_cache_usage_perc=0)[0].startswith(
        "prompt 0.0 tok/s, generation 3.0 tok/s; 0 requests running"
    )
    assert after(10) == after(3600) == []
    assert after(10, generation_tokens_total=100)[0].startswith("prompt 0.0 tok/s, generation 1.0 tok/s")


@pytest.mark.parametrize("silent", [True, False])
def test_an_engine_tells_its_throughput_while_it_works(make_llm: Any, monkeypatch, said: Any, silent: bool):
    monkeypatch.setattr(logs, "STATS_INTERVAL", 0.02)
    time.sleep(1.5)  # engines of other tests that still idle in this process have a last word to say, at a heartbeat
    said()
    core, (address, listener) = make_llm(disable_log_stats=silent).core, socket.socketpair()
    threading.Thread(target=EngineServer(core, listener).run, daemon=True).start()
    with address:
        client = MPClient(address)
        stream = client.add_request(EngineCoreRequest("a", [5] * 10, SamplingParams(max_tokens=60, ignore_eos=True)))
        while not stream.get(timeout=30).finished:
            pass
        lines: list[str] = []

        def ended() -> bool:
            lines.extend(line.getMessage() for line in said())
            return bool(lines) and "; 0 requests running" in lines[-1]

        if silent:
            client.utility("do_log_stats")  # who asks is told
            assert ended() and len(lines) == 1
        else:
            eventually(ended)
            assert sum("; 1 request running" in line for line in lines) > 1
        client.shutdown()


def test_a_script_asks_for_the_throughput(make_llm: Any, said: Any) -> None:
    llm = make_llm()
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert not said()
    llm.llm_engine.do_log_stats()
    (line,) = said()
    assert line.facts["generation_tokens_per_second"] > 0
    llm.close()


# --- in processes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--threads", "1", "--api-server-count", "2", "--data-parallel-size", "2", "--metrics-key", "sk-hidden")
    with serving(tmp_path_factory.mktemp("logged"), *flags, "--log-format", "json", "--log-level", "debug") as running:
        eventually(lambda: "manta: api 1" in titles(running))
        yield running


def titles(server: Server) -> dict[str, int]:
    """The processes of a server by what `ps` shows of them."""
    return {Path(f"/proc/{pid}/cmdline").read_text().strip("\0"): pid for pid in server.family()}


@pytest.mark.full
def test_processes_are_called_what_they_are_and_show_no_keys(server: Server) -> None:
    by_title = titles(server)
    named = {title for title in by_title if title.startswith("manta: ")}
    assert named == {
        "manta: server", "manta: coordinator", "manta: api 0", "manta: api 1", "manta: engine 0", "manta: engine 1",
        "manta: worker 0 of engine 0", "manta: worker 0 of engine 1",
    }  # fmt: skip
    assert all("resource_tracker" in title for title in by_title.keys() - named)  # multiprocessing's own
    assert not any("sk-hidden" in title for title in by_title)


@pytest.mark.full
def test_every_line_of_a_server_is_an_object(server: Server) -> None:
    """What starts, requests, one that is no HTTP, gunicorn's own words, and what is replaced."""

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in server.log.read_text().splitlines()]

    def line(words: str) -> dict[str, Any]:
        eventually(lambda: words in server.log.read_text())
        return next(entry for entry in lines() if words in entry["message"])

    assert line("Manta ")["process"] == "engine 0" and re.match("api [01]", line("  server    http")["process"])
    id = json.loads(server.post(COMPLETIONS, {"prompt": "Once", "max_tokens": 4})[1])["id"]
    assert line(f"{id}: length")["output_tokens"] == 4
    assert server.get("/health")[0] == 200 and line("GET /health 200")["level"] == "debug"
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"NO HTTP\n" + FORGED.encode() + b"\r\n\r\n")
        sock.recv(100)
    assert (line("this is no request")["status"], line("this is no request")["method"]) == (400, "")
    os.kill(api := titles(server)["manta: api 1"], signal.SIGKILL)
    assert line(f"(pid:{api})")["level"] == "error"  # says gunicorn
    eventually(lambda: "manta: api 2" in titles(server))
    os.kill(titles(server)["manta: worker 0 of engine 1"], signal.SIGKILL)
    replaced = line("rank 0 has died (SIGKILL)")
    assert (replaced["level"], replaced["process"]) == ("warning", "engine 1")
    assert {entry["level"] for entry in lines()} == {"debug", "info", "warning", "error"}
