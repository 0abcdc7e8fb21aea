"""Batches: the format, errors line by line, and going on after any end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from tqdm import tqdm

from api.options import ServerConfig
from api.routes import Api
from commands.batch import main, new_parser, open_files, read_flags
from commands.batch_file import ATTEMPTS, BatchRun, read_lines
from observe.logs import warn_once
from plan import EngineCoreRequest
from processes.child import Board
from processes.client import EngineDeadError, Stream
from scripted import BROKEN, CHAT, COMPLETIONS, FACTS, TEXT, TOKENIZER, ScriptedClient


def line(custom_id: Any, url: Any = COMPLETIONS, body: Any = None, **more: Any) -> dict[str, Any]:
    body = {"prompt": f"To be {custom_id}", "max_tokens": 4} if body is None else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more


class Files:
    """The input and the output of a batch in a folder, and a scripted engine to run it."""

    def __init__(self, folder: Path):
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"

    def ask(self, *lines: Any) -> None:
        texts = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
        self.source.write_bytes(b"".join(text + b"\n" for text in texts))

    def run(self, engine: ScriptedClient, width: int = 8, facts: dict[str, Any] = FACTS, **config: Any) -> BatchRun:
        file, answers = open_files(str(self.source), str(self.target))
        api = Api(engine, TOKENIZER, facts, ServerConfig(max_queue=2**40, **config), ["manta"], Board())
        batch = BatchRun(api, answers, width, tqdm(disable=True))
        with file:
            try:
                batch.run(file, lambda: None)
            finally:
                os.close(answers.fd)
        return batch

    def told(self) -> list[dict[str, Any]]:
        text = self.target.read_bytes()
        assert not text or text.endswith(b"\n")
        return [json.loads(each) for each in text.splitlines()]

    def by_id(self) -> dict[str, dict[str, Any]]:
        told = self.told()
        found = {each["custom_id"]: each for each in told}
        assert len(found) == len(told), "a line was answered twice"
        return found


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises where the block takes longer: it waits as greenlets do, or blocks all of them (two seconds later)."""

    def give_up(*_: Any) -> None:
        raise AssertionError("it blocks the loop")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds + 2)
    try:
        with gevent.Timeout(seconds):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


class Mortal(ScriptedClient):
    """An engine whose process ends whenever it is given a prompt with `word`, `deaths` times in all."""

    def __init__(self, word: str, deaths: int):
        super().__init__()
        self.word, self.deaths, self.beside = word, deaths, []

    def add_request(self, request: EngineCoreRequest, stream: Stream) -> Stream:
        if self.word in TOKENIZER.decode(request.prompt_token_ids) and self.deaths:
            self.deaths -= 1
            self.beside.append(len(self.open))
            stream.put(EngineDeadError("the engine process has ended"))
            return stream
        return super().add_request(request, stream)


def test_an_answer_has_openais_form(files, engine):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    files.ask(line("a"), line("b", CHAT, chat), line("c", "/tokenize", {"prompt": "To be"}))
    batch = files.run(engine)
    answers = files.by_id()
    for custom_id, answer in answers.items():
        assert list(answer) == ["id", "custom_id", "response", "error"]
        assert answer["id"].startswith("batch_req_") and answer["error"] is None
        assert list(answer["response"]) == ["status_code", "request_id", "body"]
        assert answer["response"]["status_code"] == 200
        if custom_id != "c":
            assert answer["response"]["body"]["id"].endswith(answer["response"]["request_id"])
    assert len({answer["id"] for answer in answers.values()}) == 3
    body = {custom_id: answer["response"]["body"] for custom_id, answer in answers.items()}
    assert body["a"]["object"] == "text_completion" and TEXT.startswith(body["a"]["choices"][0]["text"])
    assert body["b"]["object"] == "chat.completion" and TEXT.startswith(body["b"]["choices"][0]["message"]["content"])
    assert body["c"]["tokens"] == TOKENIZER.encode("To be")
    usages = [body[id]["usage"] for id in "ab"]
    assert batch.counts["prefill"] == sum(usage["prompt_tokens"] for usage in usages)
    assert batch.counts["decode"] == 8
    assert batch.summary() == "3 lines answered, of them 0 refused and 0 failed"


def test_lines_may_ask_for_vectors_and_scores(files, engine):
    bodies = {
        "/v1/embeddings": {"input": "a"}, "/score": {"text_1": "a", "text_2": "b"}, "/v2/embed": {"texts": ["a"]},
        "/v1/rerank": {"query": "a", "documents": ["b"]}, "/embed": {"inputs": ["a"]}, "/pooling": {"input": "a"},
    }  # fmt: skip
    files.ask(*(line(url, url, body) for url, body in bodies.items()))
    batch = files.run(engine, facts=FACTS | {"task": "embed", "vector_size": 32, "labels": ()})
    answers = {id: answer["response"] for id, answer in files.by_id().items()}
    assert set(answers) == set(bodies) and {answer["status_code"] for answer in answers.values()} == {200}
    assert len(answers["/embed"]["body"][0]) == len(answers["/v1/embeddings"]["body"]["data"][0]["embedding"]) == 3
    tokens = (answer["body"].get("usage") for id, answer in answers.items() if id != "/embed")
    assert batch.counts["prefill"] == sum(usage["prompt_tokens"] for usage in tokens if usage) > 0


def test_what_lines_have_that_changes_nothing_is_named_once(files, engine, caplog):
    warn_once.cache_clear()
    body = {"prompt": "To be", "max_tokens": 1, "user": "me"}
    files.ask(line("a", COMPLETIONS, body), line("b", COMPLETIONS, body), line("c", "/tokenize", {"prompt": "To be"}))
    files.run(engine)
    assert caplog.messages == ["/v1/completions: user is accepted, and changes nothing"]


BAD = {
    **dict.fromkeys((b"{", b"[1]", b"[" * 100_000, b'{"custom_id": "x', b"\xff\xfe"), ("invalid_json_line", None)),
    json.dumps({"method": "POST", "url": COMPLETIONS, "body": {}}).encode(): ("missing_required_parameter", None),
    **{json.dumps(line(custom_id)).encode(): ("invalid_request_error", None) for custom_id in ("", 7, None)},
    json.dumps(line("get", method="GET")).encode(): ("invalid_method", "get"),
    json.dumps(line("url", "/v1/nothing")).encode(): ("invalid_url", "url"),
    json.dumps(line("full", "http://x" + CHAT)).encode(): ("invalid_url", "full"),
    json.dumps({"custom_id": "no", "method": "POST", "url": CHAT}).encode(): ("missing_required_parameter", "no"),
    json.dumps(line("more", colour=1)).encode(): ("unknown_parameter", "more"),
    b'{"custom_id": "' + b"x" * 70_000 + b'"}': ("invalid_request_error", None),
}


def test_what_is_no_request_is_reported_and_ends_nothing(files, engine):
    files.ask(*BAD, line("good"))
    for _ in range(2):  # the second time, all is there already
        files.run(engine, max_body_bytes=200_000)
        answers = files.told()
        assert len(answers) == len(BAD) + 1
    for number, (answer, (code, custom_id)) in enumerate(zip(answers, BAD.values(), strict=False), 1):
        if number < len(BAD):
            assert answer["custom_id"] == custom_id
            assert answer["error"]["code"] == code and answer["error"]["line"] == number
            assert answer["response"]["status_code"] == 400
            assert answer["response"]["body"]["error"]["message"] == answer["error"]["message"]
    assert answers[-1]["custom_id"] == "good" and answers[-1]["error"] is None
    assert len(engine.added) == 1


def test_a_line_that_is_too_large_is_not_read_to_its_end(files, engine):
    exact = line("exact", body={"prompt": "x", "max_tokens": 1, "user": ""})
    exact["body"]["user"] = "u" * (2048 - len(json.dumps(exact)))
    assert len(json.dumps(exact)) == 2048
    files.ask(line("huge", body={"prompt": "x" * 2**20}), exact, line("after"))
    files.run(engine, max_body_bytes=2048)
    answers = files.told()
    assert [answer["response"]["status_code"] for answer in answers] == [413, 200, 200]
    assert "max_body_bytes" in answers[0]["error"]["message"] and answers[0]["error"]["line"] == 1
    with open(files.source, "rb") as file:
        assert [len(line.text) for line in read_lines(file, 2048)][:2] == [2049, 2049]


def test_a_refused_request_is_an_answer(files, engine):
    bodies = {
        "field": {"prompt": "x", "temperature": -1}, "stream": {"prompt": "x", "stream": True},
        "background": {"input": "x", "background": True}, "list": [1], "empty": {},
        "model": {"prompt": "x", "model": "other"},
        "deep": {"prompt": "x", "metadata": json.loads("[" * 50 + "]" * 50)},
    }  # fmt: skip
    good = line("off", body={"prompt": "x", "stream": False})
    files.ask(*(line(name, body=body) for name, body in bodies.items()), good)
    batch = files.run(engine)
    answers = files.by_id()
    status = {name: answer["response"]["status_code"] for name, answer in answers.items()}
    assert status == {name: 400 for name in bodies} | {"model": 404, "off": 200}
    assert [answers[name]["error"]["param"] for name in ("stream", "background")] == ["stream", "background"]
    assert answers["model"]["error"]["code"] == "model_not_found"
    error = answers["field"]["response"]["body"]["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == "temperature"
    assert "line" not in answers["field"]["error"]
    assert batch.counts["refused"] == len(bodies) and batch.counts["failed"] == 0
    assert "8 lines answered, of them 7 refused" in batch.summary()
    assert files.run(engine).counts["skipped"] == len(answers)


def test_an_engines_fault_is_the_lines_alone(files, engine):
    files.ask(line("a"), line("b"))
    engine.script = [BROKEN]
    assert files.run(engine).counts["failed"] == 2
    assert [each["response"]["status_code"] for each in files.told()] == [503, 503]


def test_a_custom_id_is_run_once(files, engine):
    files.ask(line("a"), line("b"), line("a"), line("a", CHAT), line("c"))
    for _ in range(2):
        files.run(engine)
        answers = files.told()
        assert len(answers) == 5
    twice = [answer for answer in answers if answer["error"]]
    assert [(answer["custom_id"], answer["error"]["code"], answer["error"]["line"]) for answer in twice] == [
        ("a", "duplicate_custom_id", 3), ("a", "duplicate_custom_id", 4)]  # fmt: skip
    assert len(engine.added) == 3


def test_a_run_goes_on_where_another_was_cut_short(files, engine):
    """At whatever byte the output ends, the next run leaves it as if nothing had happened."""
    lines = [line(str(i)) for i in range(6)]
    files.ask(*lines, b"{", line("3"))
    files.run(engine)
    whole = files.target.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    first, second = ends[0], ends[1]
    for end in (0, 1, 5, first - 1, first, first + 1, second - 1, len(whole) - 1, len(whole)):
        files.target.write_bytes(whole[:end])
        engine.added.clear()
        count = files.run(engine).counts["skipped"]
        answers = files.told()
        assert len(answers) == 8 and len({answer["id"] for answer in answers}) == 8
        assert count == whole[:end].count(b"\n")
        assert files.target.read_bytes().startswith(whole[:end].rpartition(b"\n")[0])
        skipped = sum(answer["error"] is None for answer in map(json.loads, whole.splitlines()[:count]))
        assert len(engine.added) == 6 - skipped


@pytest.mark.parametrize("wrong", [{"url": "/v1/nothing"}, {"body": {"prompt": "x", "temperature": -1}}])
def test_a_line_that_was_mended_is_run(files, engine, wrong):
    """Its last answer is the one that counts."""
    files.ask(line("a"), line("b", **wrong))
    files.run(engine)
    files.ask(line("a"), line("b"), line("c"))
    for _ in range(2):
        files.run(engine)
        assert sorted(answer["custom_id"] for answer in files.told()) == ["a", "b", "b", "c"]
        assert len(engine.added) == 3


@pytest.mark.parametrize("text", [b"my notes", b"my notes\n", b'{"id": "batch_req_1"}\n', b'{"id":"batch_req_1"}\n'])
def test_a_file_of_something_else_is_left_alone(files, engine, text):
    files.ask(line("a"))
    files.target.write_bytes(text)
    with pytest.raises(ValueError, match=r"line 1 of .*out.jsonl is no batch's"):
        files.run(engine)
    assert files.target.read_bytes() == text


@pytest.mark.parametrize("device", ["/dev/full", "/dev/zero", "/dev/null", "/dev"])
def test_the_output_is_a_file(files, engine, device):
    """/dev/full answers reads with zeros without end, which were taken for an earlier run's line."""
    files.ask(line("a"))
    files.target = Path(device)
    with pytest.raises(ValueError, match="is no file"):
        files.run(engine)


def test_an_input_that_is_a_pipe_is_refused(files):
    os.mkfifo(files.source)
    with within(20), pytest.raises(ValueError, match="is no file; the input must be one"):
        open_files(str(files.source), str(files.target))
    assert not files.target.exists()


def test_the_input_is_not_the_output(files, tmp_path):
    files.ask(line("a"))
    (tmp_path / "link").symlink_to(files.source)
    before = files.source.read_bytes()
    for target in (files.source, tmp_path / "link"):
        with pytest.raises(ValueError, match="two files"):
            open_files(str(files.source), str(target))
    for source, target in ((tmp_path / "none", files.target), (files.source, tmp_path / "none" / "x")):
        with pytest.raises(ValueError, match="cannot be"):
            open_files(str(source), str(target))
    assert files.source.read_bytes() == before


def test_lines_in_flight_are_bounded(files, engine, monkeypatch):
    """By their number, by their answers, and by the bytes of their bodies; one alone may have more than these."""
    api_answer, flying, most = Api.answer, [], []

    def answer(self: Api, face: Any, fields: dict[str, Any], caller: Any) -> Any:
        flying.append(caller)
        most.append(len(flying))
        gevent.sleep(0.001)
        self.answers.take("", fields.get("n", 1))
        gevent.sleep(0.001)
        flying.remove(caller)
        self.answers.take("", -fields.get("n", 1))
        return api_answer(self, face, fields, caller)

    monkeypatch.setattr(Api, "answer", answer)
    for width, lines, expected in (
        (4, [line(str(i)) for i in range(20)], 4),
        (4, [line(str(i), body={"prompt": "x", "user": "u" * 1000}) for i in range(20)], 2),
        (4, [line(str(i), body={"prompt": "x", "user": "u" * 1800}) for i in range(5)], 1),
    ):
        files.target.unlink(missing_ok=True)
        files.ask(*lines)
        most.clear()
        files.run(engine, width, max_body_bytes=2048, max_body_bytes_in_flight=2600)
        assert max(most) == expected and len(files.by_id()) == len(lines)


def test_blank_lines_and_foreign_line_ends_are_nothing(files, engine):
    first = b"\xef\xbb\xbf" + json.dumps(line("a")).encode() + b"\r"
    files.ask(first, b"", b"  ", line("b"))
    files.source.write_bytes(files.source.read_bytes()[:-1])  # the last line has no end
    files.run(engine)
    assert list(files.by_id()) == ["a", "b"]


@pytest.mark.parametrize("deaths", range(ATTEMPTS + 1))
def test_a_line_whose_engine_ends_is_run_again(files, deaths):
    """But not for ever: the line may be the reason."""
    engine = Mortal("poison", deaths)
    files.ask(line("a"), line("poison"), line("b"))
    batch = files.run(engine)
    status = {name: answer["response"]["status_code"] for name, answer in files.by_id().items()}
    assert status == {"a": 200, "b": 200, "poison": 503 if deaths == ATTEMPTS else 200}
    assert batch.counts["failed"] == (deaths == ATTEMPTS)


def test_lines_wait_for_a_new_engine(files, engine):
    engine.trouble = "the engine process has ended"
    files.ask(line("a"))
    gevent.spawn_later(0.05, setattr, engine, "trouble", None)
    files.run(engine)
    assert files.by_id()["a"]["response"]["status_code"] == 200


def test_a_full_disk_ends_the_batch(files, engine, monkeypatch):
    """What is there of the line that did not fit is cut off by the next run."""
    files.ask(*(line(str(i)) for i in range(5)))
    write, room = os.write, [700]

    def full(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        size = write(fd, data[: room[0]])
        room[0] -= size
        return size

    with monkeypatch.context() as patch:
        patch.setattr("commands.batch_file.os.write", full)
        with pytest.raises(OSError, match=r"out.jsonl cannot be written: No space left"):
            files.run(engine, 1)
    assert files.target.stat().st_size == 700
    files.run(engine)
    assert sorted(files.by_id()) == list("01234")


def test_options_are_the_engines_and_those_of_requests(capsys):
    files = ["-i", "a", "-o", "b"]
    flags = new_parser().read([*files, "--max-num-seqs", "7", "--max-prompts", "3"])
    engine_config, config = read_flags(flags)
    assert (flags.input_file, flags.output_file, engine_config.max_num_seqs, config.max_prompts) == ("a", "b", 7, 3)
    assert engine_config.scheduling_policy == "fcfs"
    for flags in (["--port", "1"], ["--api-key", "k"], ["--max-queue", "9"]):
        with pytest.raises(ValueError, match=f"{flags[0]} is given"):
            read_flags(new_parser().read([*files, *flags]))
    for argv in (["-i", "a"], [*files, "--max-nums", "1"], [*files, "c", "d"]):
        with pytest.raises(SystemExit) as ended:
            new_parser().read(argv)
        assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(SystemExit) as ended:
        main([*files, "--model", "/nowhere"])
    assert ended.value.code == 2 and "server.py batch: error: there is no folder" in capsys.readouterr().err
