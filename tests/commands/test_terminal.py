"""A conversation in the terminal, and the continuation of a text, by an engine and by a server."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from commands import terminal as ours
from commands.terminal import Chat, printable, show
from config import DEMO
from served import alive
from server import main

ROOT = Path(__file__).parent.parent.parent
ENGINE = ("--device", "cpu", "--dtype", "float32", "--temperature", "0")
SUM = "What is 23 + 58?"


class Script:
    """A model that says what stands for it here, or raises it."""

    is_cut = False

    def __init__(self, *says: str | BaseException | tuple[str, BaseException]):
        self.says, self.asked = list(says), []

    def answer(self, prompt: Any) -> Iterator[str]:
        self.asked.append([(message["role"], message["content"]) for message in prompt])
        text, ending = says if isinstance(says := self.says.pop(0), tuple) else (says, says)
        if isinstance(text, str):
            yield from text
        if isinstance(ending, BaseException):
            raise ending


def talk(monkeypatch: pytest.MonkeyPatch, model: Script, text: str, tty: bool = False, system: str = "") -> None:
    """A conversation in which these lines are typed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: tty)
    Chat(model, system).run()


def test_a_conversation_remembers(monkeypatch, capsys):
    model = Script("one", "two\n", "three")
    talk(monkeypatch, model, "a\n\n  \n /b\n/reset\nc", system="s")
    assert model.asked == [
        [("system", "s"), ("user", "a")],
        [("system", "s"), ("user", "a"), ("assistant", "one"), ("user", " /b")],
        [("system", "s"), ("user", "c")],
    ]
    assert capsys.readouterr() == ("one\ntwo\nthree\n", "")


def test_the_system_message_can_change(monkeypatch):
    model = Script("1", "2")
    talk(monkeypatch, model, "/system  be kind \na\n/system\nb\n")
    assert model.asked[0] == [("system", "be kind"), ("user", "a")]
    assert model.asked[1] == [("user", "a"), ("assistant", "1"), ("user", "b")]


def test_a_picture_goes_with_the_next_message(monkeypatch, capsys, tmp_path):
    (tmp_path / "a b.png").write_bytes(b"abc")
    model = Script("1", "2")
    talk(monkeypatch, model, f"/image {tmp_path}/a b.png\nlook\n/image {tmp_path}\nmore\n", tty=True)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}}
    first = ("user", [image, {"type": "text", "text": "look"}])
    assert model.asked == [[first], [first, ("assistant", "1"), ("user", "more")]]
    assert f"error: the image '{tmp_path}' cannot be read: Is a directory" in capsys.readouterr().err


def test_what_is_refused_is_told_and_forgotten(monkeypatch, capsys):
    model = Script(ValueError("bad"), ("half", ValueError("gone")), "yes")
    talk(monkeypatch, model, "b\nc\nd\n/resett\n", tty=True)
    assert model.asked[1] == [("user", "c")] and model.asked[2][:-1] == [("user", "c"), ("assistant", "half")]
    shown = capsys.readouterr()
    assert shown.out == "half\nyes\n"
    lines = shown.err.splitlines()
    assert lines[3:5] == ["error: bad", "error: gone"] and "/reset and /system, not '/resett'" in lines[5]
    for text in ("a\nb\n", "/resett\nb\n"):
        model = Script(ValueError("bad"))
        with pytest.raises(ValueError, match="bad" if text[0] == "a" else "resett"):
            talk(monkeypatch, model, text)


def test_a_cut_answer_is_told(monkeypatch, capsys):
    model = Script("half")
    model.is_cut = True
    talk(monkeypatch, model, "a\n")
    assert capsys.readouterr().err.startswith("The answer is cut")


def test_ctrl_c_keeps_what_was_said(monkeypatch, capsys):
    model = Script(("half", KeyboardInterrupt()), KeyboardInterrupt(), "yes")
    talk(monkeypatch, model, "a\nb\nc\n", tty=True)
    assert model.asked[2] == [("user", "a"), ("assistant", "half"), ("user", "c")]
    shown = capsys.readouterr()
    assert shown.out == "half\nyes\n" and "/system TEXT" in shown.err and shown.err.count("Ctrl-D ends") == 3
    with pytest.raises(KeyboardInterrupt):
        talk(monkeypatch, Script(("half", KeyboardInterrupt())), "a\n")


def test_a_model_cannot_command_the_terminal(capsys):
    every = "".join(map(chr, range(256)))
    shown: list[str] = []
    show([every, "\x1b]0;title\x07\xf6\u2028"], shown)
    kept = [chr(i) for i in range(256) if not (i < 32 or 127 <= i < 160) or chr(i) in "\n\t"]
    assert capsys.readouterr().out == printable("".join(shown)) + "\n" == "".join(kept) + "]0;title\xf6\u2028\n"


# --- an engine --------------------------------------------------------------------------------------------------------


class Terminal:
    """`python server.py ...` at a terminal of its own."""

    def __init__(self, *argv: str):
        self.master, slave = pty.openpty()
        # What a session opens first is its terminal, from which Ctrl-C comes as a signal.
        code = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, sys.executable, "server.py", *argv],
            cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env=os.environ | {"TERM": "dumb", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def until(self, pattern: str, seconds: float = 60) -> str:
        """What has been shown since the last call, up to what matches the pattern."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert select.select([self.master], [], [], max(0, deadline - time.monotonic()))[0], self.seen
            self.seen += os.read(self.master, 4096).decode(errors="replace")
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt_prompt(self) -> None:
        """Ctrl-C at a prompt; one that comes just before Python waits for a key is only told with the next."""
        self.type("\x03")
        if not select.select([self.master], [], [], 20)[0]:
            self.type("\x03")


@contextlib.contextmanager
def terminal(*argv: str) -> Iterator[Terminal]:
    it = Terminal(*argv)
    try:
        yield it
    finally:
        it.process.kill()
        it.process.wait()
        os.close(it.master)


def check_talk(it: Terminal, questions: list[tuple[str, str]]) -> None:
    """Ask each question, whose answer begins like this and does not end by itself, stop it, and end with Ctrl-D."""
    it.until(r"Ctrl-D ends.*\s+> ")
    for question, beginning in questions:
        it.type(f"{question}\n")
        it.until(rf"\n{beginning}\w+")
        it.type("\x03")
        it.until(r"Ctrl-D ends.*\s+> ")
        it.type("/system You add.\n")
        it.until("> ")
        it.type("/reset\n")
        it.until("> ")
    it.type("/foo\n")
    it.until(r"not '/foo'.*\s+> ")
    it.interrupt_prompt()
    it.until(r"Ctrl-D ends.*\s+> ")
    it.type("\x04")
    assert it.process.wait(30) == 0


def run(*argv: str, text: str = "", code: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run `server.py` with a text on stdin."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | more.pop("env", {})
    options = {"stdout": subprocess.PIPE} | more
    done = subprocess.run(
        [sys.executable, "server.py", *argv], cwd=ROOT, input=text, env=environment, stderr=subprocess.PIPE, text=True,
        timeout=120, **options,
    )  # fmt: skip
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.full
def test_a_conversation_by_a_pipe(tmp_path):
    (tmp_path / "options.toml").write_text('device = "cpu"\ndtype = "float"\ntemperature = 0\nmax-model-len = 64\n')
    long = "Repeat: " + "so " * 80
    done = run("chat", "demo", "--config", str(tmp_path / "options.toml"), text=f"{SUM}\n{long}\n", code=2)
    assert done.stdout == "81\n"
    last = done.stderr.splitlines()[-1]
    said = r"server.py chat: error: this model's maximum context length is 64 tokens; .* it has \d+, .*"
    assert re.fullmatch(said, last)


@pytest.mark.full
def test_an_engine_that_cannot_start_has_said_why():
    done = run("chat", *ENGINE, "--max-model-len", "99999", code=2)
    assert done.stderr == "server.py: error: max_model_len is 99999; the model was made for at most 1024\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["chat", "--max-tokens", "0"], "chat: error: max_tokens is 0; it must be "),
        (["complete", "--temperature", "-1"], "complete: error: temperature is -1.0; it must be "),
        (["chat", "-p", "x"], "chat: error: there is no option -p"),
        (["complete", "--system", "x"], "complete: error: there is no option --system"),
        (["chat", "--skip-tokenizer-init"], "skip_tokenizer_init is True"),
        (["chat", "--task", "embed"], "task is 'embed'; to get answers it must be 'auto' or 'generate'"),
        (["chat", "plain"], "plain has no chat template; `server.py complete` goes on from a text"),
        (["chat", "--api-key", "x"], "--api-key is given; without --url there is no server that it could be for"),
        (["chat", "--url", "127.0.0.1:8000"], "url is '127.0.0.1:8000'; it must be like http://127.0.0.1:8000"),
        (["chat", "--url", "file:///etc/passwd"], "it must be like http://"),
        (["chat", "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer: "),
        (["chat", "--url", "http://127.0.0.1:1", "--max-num-seqs", "3"], "--max-num-seqs is given; with --url"),
        (["chat", "--lora-modules", "a=b"], "there is no option --lora-modules"),
        (["complete"], "complete: error: the prompt is empty; give -p TEXT, or a text on stdin"),
    ],
)
def test_what_cannot_begin_is_one_line(tmp_path, monkeypatch, capsys, argv, words):
    shutil.copytree(DEMO, tmp_path / "plain", ignore=shutil.ignore_patterns("*.py", "*.jinja", "__pycache__"))
    config = json.loads(Path(DEMO, "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    code = ask(monkeypatch, *argv)
    shown = capsys.readouterr()
    assert code == 2 and not shown.out and shown.err.count("\n") == 1 and words in shown.err


# --- a server ---------------------------------------------------------------------------------------------------------


def ask(monkeypatch: pytest.MonkeyPatch, *argv: str, text: str = "") -> int:
    """The exit code of `server.py` with this text on stdin."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    try:
        main([*argv])
    except SystemExit as ended:
        return ended.code
    return 0


def test_a_server_answers(server, monkeypatch, capsys):
    url, greedy = f"http://127.0.0.1:{server.port}", ("--temperature", "0")
    long = "Repeat: " + "so " * 1100
    text = f"{SUM}\n/reset\nWhat is 2 + 3?\n{long}\n"
    assert ask(monkeypatch, "chat", "--url", url, *greedy, text=text) == 2
    shown = capsys.readouterr()
    assert shown.out == "81\n5\n" and shown.err.count("\n") == 1
    assert re.match(r"server.py chat: error: .*maximum context length is 1024 ", shown.err)
    begun = ("complete", "demo", "--url", f"{url}/v1/", "--max-tokens", "20", *greedy)
    assert ask(monkeypatch, *begun, "-p", "To be, or") == 0
    answer = server.post("/v1/completions", {"prompt": "To be, or", "max_tokens": 20, "temperature": 0})[1]
    whole = json.loads(answer)["choices"][0]["text"]
    assert capsys.readouterr() == (printable(whole).removesuffix("\n") + "\n", "")
    assert ask(monkeypatch, *begun, text="\n") == 2 and "the prompt is empty" in capsys.readouterr().err
    assert ask(monkeypatch, "chat", "other", "--url", url) == 2
    assert "has no model 'other'; it has 'demo'" in capsys.readouterr().err


def test_an_output_that_takes_nothing_is_one_line(server):
    url = f"http://127.0.0.1:{server.port}"
    argv = ("complete", "--url", url, "-p", "To be, or")
    with open("/dev/full", "w") as full:
        done = run(*argv, code=1, stdout=full)
    assert done.stderr == "server.py complete: error: [Errno 28] No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    assert run(*argv, code=1, stdout=writer).stderr == ""
    os.close(writer)


class Strange(BaseHTTPRequestHandler):
    """A server that answers a text, or the last message, with itself, as it stands there; `endless` without an end."""

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self.reply(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["Authorization"])
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        if text == "endless":
            self.go_on()
        else:
            self.reply(text.replace("|", "\n\n").encode().decode("unicode_escape").encode())

    def reply(self, body: bytes) -> None:
        self.send_response(500 if b"refused" in body else 200)
        self.end_headers()
        self.wfile.write(body)

    def go_on(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has hung up
            for i in itertools.count(1):
                choice = {"text": "so", "delta": {"content": "so"}}
                event = {"choices": [choice], "usage": {"completion_tokens": i}}
                self.wfile.write(b"data: %s\n\n" % json.dumps(event).encode())
                time.sleep(0.01)
        self.server.left.set()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def strange() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Strange)
    server.url, server.keys, server.asked = f"http://127.0.0.1:{server.server_port}", [], []
    server.left = threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("events", "out", "err"),
    [
        ('data: {"choices": [{"delta": {"content": "a\\\\u001b[2Jb"}}]}|data: [DONE]', "a[2Jb\n", ""),
        ('data: {"choices": [{"delta": {"content": "a"}}]}|', "a\n", "breaks off"),
        ('data: {"choices": [{"text": "a"}]}|data: {"error": {"message": "no\\\\u001b[2J"}}', "a\n", "no[2J"),
        ("data: {|", "", "breaks off: Expecting property name"),
        ('data: {"choices": 3}|', "", "breaks off: 'int' object is not subscriptable"),
        ("refused", "", "answers with 500 Internal Server Error"),
        ('{"error": {"message": "refused: maximum context length"}}', "", "error: refused: maximum context length"),
    ],
)
def test_a_strange_server_ends_nothing(strange, monkeypatch, capsys, events, out, err):
    code = ask(monkeypatch, "chat", "--url", strange.url, text=f"{events}\n")
    said = capsys.readouterr()
    assert code == 2 * bool(err) and said.out == out and err in said.err and said.err.count("\n") == bool(err)


def test_ctrl_c_stops_an_answer_but_not_the_conversation(strange):
    with terminal("chat", "--url", strange.url) as it:
        check_talk(it, [("endless", "so"), ("endless", "so")])
    assert [len(asked["messages"]) for asked in strange.asked] == [1, 2]  # the other is the system message


def test_ctrl_c_hangs_up(strange):
    with terminal("complete", "--url", strange.url, "-p", "endless") as it:
        it.until(r"\w{2}")
        it.type("\x03")
        assert it.process.wait(30) == 130
    assert strange.left.wait(30)


WELL = 'data: {"choices": [{"text": "a", "delta": {"content": "a"}}]}|data: [DONE]'


def test_a_key_goes_with_all_that_is_asked(strange, monkeypatch, capsys):
    monkeypatch.setenv("MANTA_API_KEY", "sesame,other")
    assert ask(monkeypatch, "chat", "--url", strange.url, "--api-key", "given", text=f"{WELL}\n") == 0
    assert ask(monkeypatch, "complete", "m", "--url", f"{strange.url}/v1/", "-p", WELL) == 0
    assert strange.keys == ["Bearer given"] * 2 + ["Bearer sesame"] * 2 and capsys.readouterr() == ("a\n" * 2, "")
    monkeypatch.delenv("MANTA_API_KEY")
    assert ask(monkeypatch, "chat", "--url", strange.url, text=f"{WELL}\n") == 0 and strange.keys[-1] is None


OWN = """
import json, os, pathlib, signal, sys
about = [sys.argv[1:], os.environ["MANTA_API_KEY"], os.getpid()]
pathlib.Path(__file__).with_name("about").write_text(json.dumps(about))
print("  model     one of a test", "2026-01-01 00:00:00.000 INFO begun", LAST, sep="\\n", file=sys.stderr, flush=True)
signal.pause() if LAST.startswith("  server") else sys.exit(2)
"""


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Makes something else the server of one's own: a process that says this last, as its address or before it ends."""
    made: list[Any] = []

    class Kept(subprocess.Popen):
        def __init__(self, *args: Any, **more: Any):
            super().__init__(*args, **more)
            made.append(self)

    def make(last: str) -> Path:
        (tmp_path / "own.py").write_text(f"LAST = {last!r}\n{OWN}")
        monkeypatch.setattr(ours, "SERVER", tmp_path / "own.py")
        monkeypatch.setattr(subprocess, "Popen", Kept)
        return tmp_path / "about"

    yield make
    for process in made:
        assert process.returncode is not None
        process.stderr.close()


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_server_of_ones_own_gets_the_engines_options(own, strange, monkeypatch, capsys, command):
    about = own(f"  server    {strange.url}")
    options = ["--max-model-len=64", "--max-num-batched-tokens=64", "--no-enable-prefix-caching", "--temperature=0.5"]
    assert ask(monkeypatch, command, "demo", *options, text=f"{WELL}\n") == 0
    assert capsys.readouterr().out == "a\n"
    argv, key, pid = json.loads(about.read_text())
    assert set(argv) == {
        "--model=demo", "--max-model-len=64", "--no-enable-prefix-caching", "--max-num-seqs=1", "--disable-log-stats",
        "--distributed-executor-backend=uni", "--port=0", "--max-num-batched-tokens=64",
    }  # fmt: skip
    assert not alive(pid) and len(key) == 32 and strange.keys == [f"Bearer {key}"] * 2
    fields = {"temperature": 0.5, "stream": True} | ({"max_tokens": -1} if command == "complete" else {})
    (body,) = strange.asked
    assert {name: body[name] for name in body if name not in ("model", "prompt", "messages")} == fields


def test_a_server_of_ones_own_that_cannot_start_has_said_why(own, monkeypatch, capsys):
    own("server.py: error: no")
    assert ask(monkeypatch, "chat", "demo") == 2
    said = capsys.readouterr()
    assert not said.out and said.err.splitlines()[-1] == "server.py: error: no"


def test_of_what_a_server_of_ones_own_says_requests_are_left_out(capsys):
    news = ["2026-01-01 00:00:00.000 INFO a request\n", '{"level": "info"}\n', "  goodbye\n"]
    ours.follow(["  server    http://127.0.0.1:9\n", *news, "a worker has died \n"], addresses := SimpleQueue())
    assert capsys.readouterr() == ("", "a worker has died\n")
    assert [addresses.get(), addresses.get()] == ["http://127.0.0.1:9", ""]
