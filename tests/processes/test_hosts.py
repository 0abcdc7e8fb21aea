"""Engines on other hosts: who is let in, how processes find each other, and what happens when one is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config import DEMO, EngineConfig
from engine import LLM
from gate_pair import NEW, OLD, SECRET, Pair, new_pair
from network import ip, two_namespaces
from plan import Health
from processes import handshake
from processes.client import EngineDeadError, MPClient, Stream
from processes.connection import Connection, to_frame
from processes.fleet import Fleet
from processes.gate import GateProcess
from processes.handshake import MAGIC, NONCE, HandshakeError, admit, differences, prove, read_secret, settings_of
from processes.messages import Attach, Join, Load, Loads
from ring import Codec
from sampling_params import SamplingParams
from served import ROOT, alive, command, eventually

# --- who is let in ----------------------------------------------------------------------------------------------------


def meet(mine: str, theirs: str) -> tuple[list[Exception], bytes]:
    """What the two sides of a handshake raise, and all that the dialling side has sent."""
    gate, node = socket.socketpair()
    raised: list[Exception] = []
    sent = bytearray()
    real = node.sendall

    def let_in() -> None:
        try:
            admit(gate, mine)
        except OSError as error:
            raised.append(error)

    thread = threading.Thread(target=let_in)
    thread.start()
    with gate, node:
        spy = SimpleNamespace(recv=node.recv, settimeout=node.settimeout)
        spy.sendall = lambda data: (sent.extend(data), real(data))
        try:
            prove(spy, theirs)
        except OSError as error:
            raised.append(error)
        thread.join(10)
    return raised, bytes(sent)


def test_who_knows_the_secret_is_let_in_and_does_not_send_it():
    raised, sent = meet(SECRET, SECRET)
    again, other = meet(SECRET, SECRET)
    assert not raised and not again and SECRET.encode() not in sent
    assert len(sent) == len(MAGIC) + 2 * NONCE and sent != other  # nothing that was overheard is good again


def test_with_another_secret_both_sides_refuse():
    raised, _ = meet(SECRET, SECRET + ".")
    assert [type(error) for error in raised] == [HandshakeError, HandshakeError]
    assert {str(error) for error in raised} == {"it has another secret"}


def test_a_gate_that_does_not_know_the_secret_is_refused():
    """It cannot answer with what the other side has sent, because each side's proof names its part."""
    gate, node = socket.socketpair()
    with gate, node:
        gate.sendall(MAGIC + bytes(NONCE))
        threading.Thread(target=lambda: gate.sendall(gate.recv(1024)[-NONCE:]), daemon=True).start()
        with pytest.raises(HandshakeError, match="another secret"):
            prove(node, SECRET)


def test_hosts_differ_in_words_that_name_both():
    config = EngineConfig(DEMO, data_parallel_size=2)
    mine, theirs = settings_of(config), settings_of(EngineConfig(DEMO, data_parallel_size=2, block_size=16))
    assert not differences(mine, dict(mine), "a", "b")
    assert differences(theirs, mine, "host a", "the server's") == "block_size is 16 on host a and 64 on the server's"
    assert differences(mine | {"version": "0"}, mine, "a", "b").startswith("version is 0 on a and ")


@pytest.mark.parametrize("content", [SECRET + "\n", None])
def test_the_secret_is_in_a_file_or_in_the_environment(tmp_path: Path, content: str | None):
    fields: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_address": "a"}
    environment = {} if content else {handshake.SECRET: SECRET}
    if content:
        (tmp_path / "secret").write_text(content)
        fields["data_parallel_secret_file"] = str(tmp_path / "secret")
    assert read_secret(EngineConfig(**fields), environment) == SECRET and not environment


def test_the_only_engine_may_be_on_another_host():
    fields = {"data_parallel_size_local": 0, "data_parallel_address": "127.0.0.1", "data_parallel_rpc_port": 29654}
    fleet = Fleet(EngineConfig(**fields, device="cpu"), SECRET)
    fleet._open_gate(fleet.coordinator.address)
    try:
        assert fleet.gate.options["ranks"] == [0] and not fleet.engines
    finally:
        fleet.stop()


@pytest.mark.parametrize(
    ("environment", "path", "words"),
    [({}, None, "neither"), ({handshake.SECRET: "x" * 15}, None, "15 characters"), ({}, "/none", "cannot be read")],
)
def test_a_secret_that_is_none_is_refused(environment: dict[str, str], path: str | None, words: str):
    fields = {"data_parallel_size": 2, "data_parallel_address": "a", "data_parallel_secret_file": path}
    with pytest.raises(ValueError, match=words) as refused:
        read_secret(EngineConfig(**fields, headless=True), environment)
    assert "x" * 15 not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data_parallel_size_local": 3}, "data_parallel_size_local is 3; it must be from 0 to data_parallel_size, 2"),
        ({"data_parallel_size_local": 1}, "data_parallel_address is not given"),
        ({"data_parallel_start_rank": 1}, "data_parallel_start_rank is 1; on the server's host, without headless"),
        ({"headless": True, "data_parallel_start_rank": 1, "data_parallel_address": "a"}, "must be below"),
    ],
)
def test_options_that_do_not_go_together_are_refused(fields: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**{"data_parallel_size": 2} | fields)


# --- a gate and a host in this process --------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[Pair]:
    with new_pair() as made:
        yield made


def test_a_client_reaches_an_engine_of_another_host_and_this_the_coordinator(pair: Pair, monkeypatch):
    monkeypatch.setattr("processes.connection.GRACE", 0.05)
    client = MPClient(pair.clients[0], 1)  # it waits until the host is there
    node = pair.join()
    node.wait(10)
    eventually(lambda: pair.gate.complete.is_set() and client.trouble is None, 10)
    assert pair.gate.facts == {1: {"rank": 1} | OLD} and client.connection.far
    assert [sock.family for sock in pair.servers.clients] == [socket.AF_INET]
    heard: list[Any] = []
    engine = Connection(node.address, heard.append, lambda connection: connection.send(Load(1, 2, 3)))
    assert pair.frames.inbox.get(timeout=10)[1] == Load(1, 2, 3)
    pair.frames.publish(Loads([(0, 0)]))
    eventually(lambda: Loads([(0, 0)]) in heard, 10)
    engine.close()
    client.shutdown()


def test_a_link_that_is_lost_is_made_again_and_streams_go_on(pair: Pair):
    node, client = pair.join(), MPClient(pair.clients[0], 1)
    eventually(lambda: client.trouble is None, 10)
    first, link = client.connection.socket, pair.gate.links[1]
    link.sock.shutdown(socket.SHUT_RDWR)
    eventually(lambda: pair.gate.links.get(1) not in (None, link), 10)
    pair.servers.publish(Health("a word"))
    eventually(lambda: client.trouble == "a word", 10)
    assert client.connection.socket is first  # neither end needs the link
    stream = client.streams["a"] = Stream()
    first.shutdown(socket.SHUT_RDWR)
    with pytest.raises(EngineDeadError, match="or its host is out of reach: a word"):
        stream.get(timeout=10)
    eventually(lambda: client.connection.socket is not first and client.trouble is None, 10)
    assert not node.refused
    client.shutdown()


@pytest.mark.parametrize(
    ("secret", "block_size", "words"),
    [(SECRET + "x", 64, "it has another secret"), (SECRET, 16, "block_size is 16 on host 127.0.0.1 and 64 on the s")],
)
def test_a_host_that_cannot_join_is_told_why_and_so_is_the_log(pair: Pair, caplog, secret, block_size, words):
    fields = {name: getattr(pair.config, name) for name in vars(pair.config)} | {"block_size": block_size}
    node = pair.join(secret, EngineConfig(**fields))
    with pytest.raises(ConnectionError, match=words):
        node.wait(10)
    eventually(lambda: sum(words in record.message for record in caplog.records) == 1, 10)


def test_a_second_host_with_the_same_engines_waits(pair: Pair):
    pair.join().wait(10)
    with pytest.raises(ConnectionError, match=r"has engine 1, and so has 127.0.0.1, which came first; 0.3 s are over"):
        pair.join().wait(0.3)


class UpdatedEngine(SimpleNamespace):
    """An engine that has been given new weights when its host looks after it."""

    def wait(self) -> None:
        pass

    def check(self) -> None:
        self.facts = self.facts | NEW


def test_a_host_that_is_started_anew_is_told_the_weights_that_its_engine_had_last(pair: Pair):
    reports: list[dict[str, Any]] = []
    pair.gate.on_facts = reports.append  # which the gate's successor is given
    node = pair.join()
    node.wait(10)
    assert node.weights == {}
    engine = UpdatedEngine(address=pair.engine[0], facts={"rank": 1} | OLD)

    def run() -> None:
        with contextlib.suppress(ConnectionError):
            node.run({1: engine})

    runs = threading.Thread(target=run)
    runs.start()
    eventually(lambda: pair.gate.facts.get(1) == {"rank": 1} | NEW, 10)
    assert reports[-1] == {"1": {"rank": 1} | NEW}
    node.refused = "it ends"
    runs.join(10)
    node.link.shutdown(socket.SHUT_RDWR)
    eventually(lambda: not pair.gate.links, 10)
    after = pair.join()
    after.wait(10)
    assert after.weights == {1: NEW}


def test_a_gate_that_replaces_another_knows_the_weights_of_engines(pair: Pair):
    clients, coordinator = socket.socketpair(), socket.socketpair()
    port = socket.create_server(("127.0.0.1", 0))
    config = replace(pair.config, data_parallel_rpc_port=port.getsockname()[1])
    server = replace(config, headless=False, data_parallel_start_rank=None)
    gate = GateProcess(server, SECRET, port, {1: clients[1]}, coordinator[0])
    node = pair.join(config=config)
    gate.wait()
    node.engines[1].facts = {"rank": 1} | NEW
    node._tell(1)

    def looked() -> bool:
        gate.check()
        return gate.facts == {"1": {"rank": 1} | NEW}

    eventually(looked, 10)
    node.refused, link = "it ends", node.link
    os.kill(first := gate.process.pid, signal.SIGKILL)
    eventually(lambda: looked() and gate.process.pid != first and not gate.starting, 30)
    link.close()
    after = pair.join(config=config)
    after.wait(30)
    assert after.weights == {1: NEW}
    gate.stop()
    for used in (*clients, *coordinator):
        used.close()


STRANGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"", b"\0" * 2000, MAGIC, MAGIC + os.urandom(2 * NONCE),
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + os.urandom(64),
]  # fmt: skip


def test_strangers_disturb_nobody_and_cost_one_line_a_while(pair: Pair, caplog):
    node, client = pair.join(), MPClient(pair.clients[0], 1)
    eventually(lambda: client.trouble is None, 10)
    for data in STRANGE:
        with socket.create_connection(pair.port.getsockname(), 10) as stranger:
            stranger.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1 << 16):
                    pass

    def lines() -> list[str]:
        return [record.message for record in caplog.records if "refused a connection from 127.0.0.1" in record.message]

    eventually(lambda: pair.gate.refusals.unlogged == len(STRANGE) - 1, 10)
    assert len(lines()) == 1 and "more since" not in lines()[0]
    pair.gate.refusals.next = 0.0  # a while is over
    socket.create_connection(pair.port.getsockname(), 10).close()
    eventually(lambda: len(lines()) == 2, 10)
    assert f"({len(STRANGE) - 1} more since the last such line, the latest: refused" in lines()[1]
    assert client.trouble is None and not node.refused
    client.shutdown()


def test_who_knows_the_secret_but_sends_no_message_is_refused(pair: Pair, caplog):
    for data, words in (
        (b"\xff\xff\xff\xff", "at most"),
        (b"\x03\0\0\0abc", "is no message"),
        (to_frame(Codec(), Attach("no such ticket")), ""),
    ):
        pair.gate.refusals.next = 0.0
        with socket.create_connection(pair.port.getsockname(), 10) as sock:
            prove(sock, SECRET)
            sock.sendall(data)
            assert sock.recv(1) == b""
        eventually(lambda: any(words in record.message for record in caplog.records), 10)  # noqa: B023
    with socket.create_connection(pair.port.getsockname(), 10) as sock:
        prove(sock, SECRET)
        sock.sendall(to_frame(Codec(), Join("x", [0, 7], pair.gate.settings)))
        assert b"has engines 0, 7; other hosts are to have engine 1" in sock.recv(1 << 16)


# --- two hosts --------------------------------------------------------------------------------------------------------

# Streams, one after the other in each of several threads, for some seconds: how each ended.
LOAD = """
import http.client, json, sys, threading, time
readers, seconds, tokens = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
begun, found = time.monotonic(), []

def ask(i):
    body = {"prompt": f"{i}. Enter the SERVANT", "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True}
    told = {"prompt": i, "text": "", "error": None, "status": 0, "ended": False, "begun": time.monotonic() - begun}
    try:
        client = http.client.HTTPConnection("127.0.0.1", 8000, timeout=60)
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = client.getresponse()
        told["status"] = reply.status
        if reply.status != 200:
            told["error"] = json.loads(reply.read())["error"]["message"]
        for line in reply if reply.status == 200 else ():
            if line == b"data: [DONE]\\n":
                told["ended"] = True
                break
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    told["error"] = event["error"]["message"]
                else:
                    told["text"] += event["choices"][0]["text"]
    except (OSError, http.client.HTTPException) as error:
        told["error"] = repr(error)
    told["seconds"] = time.monotonic() - begun - told["begun"]
    found.append(told)
    if told["error"]:
        time.sleep(0.2)

def read(i):
    while time.monotonic() < begun + seconds:
        ask(i)

threads = [threading.Thread(target=read, args=(i,)) for i in range(readers)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(found))
"""


class TwoHosts:
    """A server in one namespace, and a headless host in another; each has one engine."""

    def __init__(self, names: list[str], folder: Path):
        self.names, self.folder = names, folder
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), handshake.SECRET: SECRET}
        self.logs = [folder / "server.log", folder / "node.log"]
        self.processes = [self.start(0), self.start(1)]
        try:
            eventually(lambda: "http://127.0.0.1:8000" in self.log(0) or self.processes[0].poll() is not None, 90)
            assert self.processes[0].poll() is None, self.log(0) + self.log(1)
        except BaseException:
            self.close()
            raise

    def start(self, host: int, *flags: str) -> subprocess.Popen[bytes]:
        fixed = ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--data-parallel-size", "2"]
        fixed += ["--data-parallel-size-local", "1", "--data-parallel-address", "10.213.77.1"]
        fixed += ["--headless", "--data-parallel-start-rank", "1"] if host else ["--port", "8000"]
        run = ["ip", "netns", "exec", self.names[host], sys.executable, "server.py", *fixed, *flags]
        with open(self.logs[host], "a") as log:
            return subprocess.Popen(run, cwd=ROOT, env=self.environment, stderr=log)

    def log(self, host: int) -> str:
        return self.logs[host].read_text()

    def load(self, readers: int, seconds: float, tokens: int = 60) -> subprocess.Popen[str]:
        """Streams for so long; see LOAD."""
        run = ["ip", "netns", "exec", self.names[0], sys.executable, "-c", LOAD]
        return subprocess.Popen([*run, *map(str, (readers, seconds, tokens))], stdout=subprocess.PIPE, text=True)

    def get(self, path: str) -> str:
        run = ["ip", "netns", "exec", self.names[0], "curl", "-s", "-m", "5", f"http://127.0.0.1:8000{path}"]
        return subprocess.run(run, capture_output=True, text=True).stdout

    def both_serve(self) -> bool:
        told = self.get("/metrics")
        return all(f'num_requests_running{{engine="{i}"' in told for i in range(2))

    def cut(self, seconds: float) -> None:
        """Take the cable out for so long."""
        ip("-n", self.names[0], "link", "set", "cable", "down")
        time.sleep(seconds)
        ip("-n", self.names[0], "link", "set", "cable", "up")

    def find(self, host: int, name: str) -> int:
        """A process by its name."""

        def below(pid: int) -> list[int]:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [pid, *(descendant for child in children for descendant in below(int(child)))]

        return next(pid for pid in below(self.processes[host].pid) if f"manta: {name}" in command(pid))

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_namespaces() as names:
        made = TwoHosts(names, tmp_path)
        try:
            yield made
        finally:
            made.close()


def answers_of(load: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, _ = load.communicate(timeout=180)
    answers = json.loads(out)
    texts: dict[int, set[str]] = {}
    for one in answers:
        if one["ended"] and not one["error"]:
            texts.setdefault(one["prompt"], set()).add(one["text"])
    assert all(len(distinct) == 1 for distinct in texts.values())  # the same on both hosts, and nothing came twice
    return answers


@pytest.mark.full
def test_two_hosts_answer_and_a_short_cut_costs_nobody_anything(two: TwoHosts) -> None:
    server = two.processes[0].pid
    assert SECRET not in command(server) + Path(f"/proc/{two.find(0, 'gate')}/environ").read_text()
    load = two.load(8, 8)
    time.sleep(1)
    two.cut(5)
    answers = answers_of(load)
    assert all(one["ended"] and not one["error"] for one in answers) and len(answers) > 16
    assert max(one["seconds"] for one in answers) >= 4  # some were cut off
    metrics = two.get("/metrics")
    counts = [float(line.split()[-1]) for line in metrics.splitlines() if "generation_tokens_total{" in line]
    assert len(counts) == 2 and min(counts) > 100
    gone = two.find(1, "engine")
    two.processes[1].terminate()
    assert two.processes[1].wait(30) == 0
    eventually(lambda: not alive(gone), 10)
    again = answers_of(two.load(4, 1))
    assert all(one["ended"] and not one["error"] for one in again)
    two.processes[1] = two.start(1)  # the host is back, in other processes
    eventually(two.both_serve, 60)
    two.processes[0].terminate()
    assert two.processes[0].wait(30) == 0, two.log(0)


# --- several engines of a script --------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_script_has_several_engines(llm: LLM) -> None:
    prompts = [f"Enter the {i}th SERVANT, with a torch.\n\n" * (1 + 3 * (i % 2)) for i in range(10)]
    params = [SamplingParams(temperature=0, max_tokens=20 + 4 * i, ignore_eos=True) for i in range(10)]
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(DEMO, data_parallel_size=2, device="cpu", dtype="float32", threads=1) as several:
        outputs = several.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == answers
        metrics = several.get_metrics()
        assert set(metrics) == {0, 1} and min(one["generation_tokens_total"] for one in metrics.values()) > 0
        with pytest.raises(ValueError, match="at most 1023 leave room"):
            several.generate([[5] * 5000], use_tqdm=False)
        assert several.reset_prefix_cache() and len(several.collective_rpc("block_bytes")) == 2
        engine = several.llm_engine
        for i in range(4):
            engine.add_request(str(i), prompts[i], params[i])
            with pytest.raises(ValueError, match=f"request id '{i}' is in use by a request in flight"):
                engine.add_request(str(i), prompts[i], params[i])
        done: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
        assert [done[str(i)] for i in range(4)] == answers[:4]
        with pytest.raises(ValueError, match="in other processes, so it has no"):
            _ = several.core
    with pytest.raises(ValueError, match="closed"):
        several.generate("a")
