"""Clients of an engine process: each gets its own outputs, and what it gave up or left behind ends."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine import SamplingParams
from executor import WorkerError
from plan import Call, EngineCoreRequest, EngineOutput, Health, Outputs, Reply
from processes import client as clients
from processes.child import FrameServer
from processes.client import BackgroundResources, EngineCoreClient, EngineDeadError, InprocClient, MPClient, Stream
from processes.connection import connect, read_frames, to_frame
from processes.engine_process import EngineServer
from processes.fleet import FleetClient
from processes.routing import DPClient, Router
from processes.suspects import Suspects
from ring import Codec
from served import ROOT, eventually

GREEDY = SamplingParams(temperature=0, max_tokens=48)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=24, seed=7, n=4)
OPENING = "ROMEO:\nWhat light"


@pytest.fixture
def served(make_llm):
    """An engine's server loop in a thread of this process, and its address."""
    core, (address, listener) = make_llm(num_gpu_blocks_override=64, block_size=16).core, socket.socketpair()
    threading.Thread(target=EngineServer(core, listener).run, daemon=True).start()
    with address:
        yield core, address


@contextlib.contextmanager
def frame_servers(count: int) -> Iterator[tuple[list[socket.socket], list[FrameServer]]]:
    """The addresses of engines that only accept clients, and the ends that do.

    Whoever waits in line when its client has long ended is accepted nevertheless. That must not happen while another
    test looks at what is open.
    """
    pairs = [socket.socketpair() for _ in range(count)]
    servers = [FrameServer(listener) for _, listener in pairs]
    yield [address for address, _ in pairs], servers
    for address, _ in pairs:
        address.close()
    eventually(lambda: all(listener.fileno() < 0 for _, listener in pairs))
    eventually(lambda: not any(drop_who_has_left(server) for server in servers))


def drop_who_has_left(server: FrameServer) -> set[socket.socket]:
    """The clients that are left."""
    while not server.inbox.empty():
        client, message = server.inbox.get()
        if message is None:
            server.drop(client)
    return server.clients


@pytest.fixture
def engines():
    """Two of them, and a coordinator."""
    with frame_servers(3) as made:
        yield made


def collect(stream) -> list[int]:
    ids: list[int] = []
    while True:
        output: EngineOutput = stream.get(timeout=30)
        ids += output.token_ids
        if output.finished:
            return ids


def test_clients_get_their_own_outputs(served, llm):
    prompts = [
        llm.tokenizer.encode(f"Enter the {i}th SERVANT, with a torch.\n\n" * (1 + 3 * (i % 2))) for i in range(10)
    ]
    params = [replace(GREEDY, max_tokens=20 + 4 * i, ignore_eos=True) for i in range(10)]
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    clients = [MPClient(served[1]) for _ in range(2)]
    streams = [
        clients[i % 2].add_request(EngineCoreRequest(str(i), *request))
        for i, request in enumerate(zip(prompts, params, strict=True))
    ]
    assert [collect(stream) for stream in streams] == answers
    assert clients[0].utility("metrics")[0]["num_requests_running"] == 0
    for client in clients:
        client.shutdown()


def test_the_parent_puts_an_engine_to_sleep_and_wakes_it_up(make_llm):
    """It hears when that is done. What fails ends the engine, and then it hears nothing."""
    core, (address, listener) = make_llm(num_gpu_blocks_override=64, block_size=16).core, socket.socketpair()
    server, done = EngineServer(core, listener), []
    server.on_called = lambda news: done.append((news, core.workers.is_sleeping()))
    for call in (Call(1, "sleep"), Call(2, "wake_up"), Call(3, "sleep", [7])):
        server.frames.inbox.put((None, call))
    with address, pytest.raises(ValueError, match="level is 7"):
        server.run()
    assert done == [({"called": 1}, True), ({"called": 2}, False)]


def test_workers_that_die_while_the_parent_lets_the_engine_sleep_end_it(make_llm, monkeypatch):
    core, (address, listener) = make_llm(num_gpu_blocks_override=64, block_size=16).core, socket.socketpair()
    server = EngineServer(core, listener)
    server.frames.inbox.put((None, Call(1, "sleep")))

    def check() -> None:
        if core.workers.is_sleeping():
            raise WorkerError("worker 0 has ended")

    monkeypatch.setattr(core.executor, "check", check)
    with address, pytest.raises(WorkerError, match="worker 0 has ended"):
        server.run()


def test_a_request_that_comes_while_the_engine_is_replaced_finds_the_new_one(make_llm, monkeypatch):
    """Nobody has accepted the client's connection yet: that is awaited for a moment, and no longer."""
    monkeypatch.setattr("processes.connection.GRACE", 0.05)
    monkeypatch.setattr("processes.client.GRACE", 0.05)
    core, (address, listener) = make_llm(num_gpu_blocks_override=64, block_size=16).core, socket.socketpair()
    client = MPClient(address)
    with pytest.raises(EngineDeadError, match="the engine process has ended"):
        client.utility("metrics")
    monkeypatch.setattr("processes.client.GRACE", 30.0)
    starter = threading.Timer(0.1, lambda: EngineServer(core, listener).run())
    starter.daemon = True
    starter.start()
    assert collect(client.add_request(EngineCoreRequest("a", [5, 6, 7], GREEDY)))
    client.shutdown()
    address.close()


def test_a_refusal_reaches_the_client(served):
    client = MPClient(served[1])
    output = client.add_request(EngineCoreRequest("a", [], GREEDY)).get(timeout=30)
    assert (output.finish_reason, output.error) == ("error", "the prompt is empty; it must have at least 1 token")
    assert output.finished and not client.streams
    with pytest.raises(ValueError, match="no utility 'eval'"):
        client.utility("eval")
    client.shutdown()


def test_a_client_that_leaves_takes_its_requests_along(served):
    _, address = served
    client, other = MPClient(address), MPClient(address)
    stream = client.add_request(EngineCoreRequest("a", [5] * 10, SamplingParams(max_tokens=900, ignore_eos=True)))
    stream.get(timeout=30)
    assert other.utility("metrics")[0]["num_requests_running"] == 1
    client.shutdown()
    for _ in range(1000):
        if other.utility("metrics")[0]["num_requests_running"] == 0:
            break
    else:
        pytest.fail("the request is still there")
    with pytest.raises(EngineDeadError):
        while True:
            stream.get(timeout=30)
    for call in (lambda: client.add_request(EngineCoreRequest("b", [5], GREEDY)), lambda: client.utility("metrics")[0]):
        with pytest.raises(ValueError, match="this client is shut down"):
            call()
    client.abort("a")
    client.shutdown()
    other.shutdown()


def test_many_requests_of_one_client_and_one_that_is_given_up(served):
    core, address = served
    client, prompt = MPClient(address), [5, 6, 7]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    streams = [client.add_request(EngineCoreRequest(str(i), prompt, params)) for i in range(3)]
    given_up = client.add_request(EngineCoreRequest("x", prompt, SamplingParams(max_tokens=900, ignore_eos=True)))
    given_up.get(timeout=30)
    client.abort("x")
    answers = [collect(stream) for stream in streams]
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 60
    assert client.utility("metrics")[0]["num_requests_running"] == 0
    assert not core.scheduler.has_work() and not client.streams
    client.shutdown()


def test_a_client_follows_all_samples_of_a_request(served, llm):
    params = replace(SAMPLED, n=8, seed=2, temperature=1.0, stop_token_ids=llm.tokenizer.encode("\n"))
    (output,) = llm.generate(OPENING, params, use_tqdm=False)
    wanted = [completion.token_ids for completion in output.outputs]
    assert len({len(answer) for answer in wanted}) > 1  # the end of one is not that of the request
    client, got = MPClient(served[1]), [[] for _ in range(8)]
    stream = client.add_request(EngineCoreRequest("a", llm.tokenizer.encode(OPENING), params))
    while True:
        output = stream.get(timeout=30)
        got[output.index] += output.token_ids
        if output.finished:
            break
    assert got == wanted and not client.streams
    client.add_request(EngineCoreRequest("b", [5] * 10, replace(SAMPLED, max_tokens=200, ignore_eos=True)), stream)
    heard = set()
    while heard != {0, 1, 2, 3}:
        heard.add(stream.get(timeout=30).index)
    for index in (0, 1, 3):
        client.abort("b", index)
    assert client.utility("metrics")[0]["num_requests_running"] == 1
    assert client.utility("explain", "b")[0] is not None and "b" in client.streams
    client.abort("b")
    client.abort("b")
    assert client.utility("metrics")[0]["num_requests_running"] == 0 and not client.streams
    client.shutdown()


def test_new_weights_come_after_the_requests_that_run_and_before_the_next(served, monkeypatch):
    core, address = served
    monkeypatch.setattr(core, "update_weights", lambda *source: len(core.scheduler.requests))
    client, params = MPClient(address), replace(GREEDY, max_tokens=16, ignore_eos=True)
    streams = [client.add_request(EngineCoreRequest("before", [5, 6, 7], params))]
    assert client.utility("update_weights", "folder") == {0: 0}
    streams.append(client.add_request(EngineCoreRequest("after", [5, 6, 7], params)))
    assert len({*map(tuple, map(collect, streams))}) == 1
    client.shutdown()


def test_a_client_can_ask_where_the_time_went(served):
    client = MPClient(served[1])
    long = SamplingParams(max_tokens=900, ignore_eos=True)
    client.add_request(EngineCoreRequest("x-0", [5] * 10, long)).get(timeout=30)
    collect(client.add_request(EngineCoreRequest("x-1", [5] * 10, SamplingParams(max_tokens=4, ignore_eos=True))))
    stories = [client.utility("explain", f"x-{i}")[0] for i in range(3)]
    assert [isinstance(story, dict) for story in stories] == [True, True, False] and stories[2] is None
    assert json.loads(json.dumps(stories[1])) == stories[1]
    explained = client.utility("explain_prompts", "x", 9)[0]
    assert len(explained) == 2 and explained[1] | {"client": ""} == stories[1] and "client" not in explained[1]
    assert len(client.utility("explain_prompts", "x", 1)[0]) == 1 and client.utility("explain_prompts", "y", 9)[0] == []
    with pytest.raises(ValueError, match="explain"):
        client.utility("explain")
    client.shutdown()


def test_messages_carry_sampling_params_whole():
    params = SamplingParams(
        temperature=0.5, stop=("a", "b"), stop_token_ids=(1, 2), seed=-(2**63), presence_penalty=-1,
        logit_bias={"7": 3, 2: -0.5}, allowed_token_ids=[2, 7],
    )  # fmt: skip
    one, other = socket.socketpair()
    with one, other:
        request = EngineCoreRequest("x", [1, 2], params)
        one.sendall(to_frame(Codec(), request))
        assert next(read_frames(other)) == request


def test_a_frame_that_is_no_message_ends_the_connection():
    for junk in (b"\x03\0\0\0abc", b"\x02\0\0\0\x91\xc0", b"\xff"):
        one, other = socket.socketpair()
        with other:
            with one:
                one.sendall(junk)
            assert list(read_frames(other)) == []


def test_a_client_that_does_not_read_holds_up_nobody(engines):
    (address, *_), (server, *_) = engines
    stuck, other = connect(address), MPClient(address)
    eventually(lambda: len(server.clients) == 2)
    story = Reply(0, "x" * 100_000)
    frame = to_frame(server.codec, story)
    for _ in range(50):  # far more than a socket holds
        server.publish(story)
    assert server.late  # it has gone on although one takes nothing
    eventually(lambda: other.connection.heard > 50)
    got = bytearray()  # and all that it was sent comes to it in the end
    while got.count(frame) < 50:
        got += stuck.recv(1 << 20)
    with stuck:
        other.shutdown()
    eventually(lambda: not server.late)


def test_a_request_that_ends_engine_processes_is_found_among_others(engines):
    """An engine ends whenever it has a certain request. All that it had is sent again, and some of it is answered."""
    ((address, *_), (server, *_)), suspects, names = engines, Suspects(), itertools.count()
    client = MPClient(address, suspects=suspects)

    def send(prompt: int) -> Stream:
        return client.add_request(EngineCoreRequest(f"{prompt}-{next(names)}", [prompt], GREEDY))

    def end_with(*prompts: int, words: Health | None = None) -> None:
        eventually(lambda: client.trouble is None)
        streams = [send(prompt) for prompt in prompts]
        if words:
            server.publish(words)
        for sock in [*server.clients]:
            sock.shutdown(socket.SHUT_RDWR)
            server.drop(sock)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=words and words.trouble):
                stream.get(timeout=10)

    end_with(1, words=Health("a user's class has failed", of_hook=True))
    assert not suspects.deaths and not suspects.flying
    end_with(1, 2, 3)
    end_with(1, 2, 3)
    eventually(lambda: client.trouble is None)
    innocent = send(1)
    with pytest.raises(EngineDeadError, match="others that are suspect"):
        send(2)
    name, *_ = client.streams
    server.publish(Outputs([EngineOutput(name, [5], "stop", finished=True)]))
    assert innocent.get(timeout=10).finished
    end_with(2, 1)  # the second is suspect no more
    eventually(lambda: client.trouble is None)
    refused = send(2).get(timeout=10)
    assert refused.finished and "3 engine processes have ended" in refused.error and not refused.engine_fault
    assert send(1).empty() and send(3).empty() and client.streams.keys() == suspects.flying.keys()
    client.shutdown()


def test_a_client_hears_of_trouble_that_was_there_before_it_came(engines):
    (address, *_), (server, *_) = engines
    server.health = Health("rank 0 has died")
    client = MPClient(address)
    assert client.trouble == "rank 0 has died"
    client.shutdown()


def test_a_client_notices_an_engine_that_says_nothing_and_takes_it_back(monkeypatch):
    monkeypatch.setattr("processes.child.HEARTBEAT", 0.1)
    monkeypatch.setattr("processes.connection.BEAT", 0.05)
    monkeypatch.setattr("processes.connection.STALL", 0.7)
    with frame_servers(1) as ((address,), (server,)):
        client = MPClient(address)
        eventually(lambda: client.trouble is None)
        with server.lock:  # as if the process was stopped
            eventually(lambda: client.trouble is not None, 30)
            assert "no sign of life" in client.trouble
            with pytest.raises(EngineDeadError, match="no sign of life"):
                client.utility("metrics")
        eventually(lambda: client.trouble is None)
        client.shutdown()


def test_a_client_under_gevent_comes_back_after_it_hung_up():
    """As it does when a message cannot be sent. To gevent's sockets that is an error of who reads meanwhile."""
    code = """if True:
        from gevent import monkey
        monkey.patch_all()
        import socket, time
        from processes import child, connection as connections
        address, listener = socket.socketpair()
        server, lost = child.FrameServer(listener), []
        connection = connections.Connection(address, print, lost=lost.append)
        assert connection.up.is_set()
        connection._hang_up()
        until = time.monotonic() + 20
        while not (lost and connection.up.is_set()) and time.monotonic() < until:
            time.sleep(0.01)
        assert lost and connection.up.is_set() and len(server.clients) == 2
        connection.close()
        time.sleep(0.1)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


# --- what ends with a client ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_left(servers: list[FrameServer]) -> Iterator[None]:
    """Check that afterwards, once the servers have dropped who has left, no more threads run and files are open."""

    def files() -> set[str]:
        folder, targets = "/proc/self/fd", set()
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # the folder itself, which was open while it was listed
                targets.add(os.readlink(f"{folder}/{name}"))
        return targets

    threads, before = set(threading.enumerate()), files()
    yield
    gc.collect()

    def is_over() -> bool:
        for server in servers:
            drop_who_has_left(server)
        return set(threading.enumerate()) <= threads and files() <= before

    eventually(is_over)


def wait_until_ready(client: MPClient | DPClient) -> None:
    eventually(lambda: client.trouble is None)


def dp_client(addresses: list[socket.socket]) -> DPClient:
    return DPClient(addresses[:2], addresses[2], Router(2, 16))


@pytest.mark.parametrize("how", ["forgotten", "forgotten in a circle", "closed"])
@pytest.mark.parametrize("new", [lambda addresses: MPClient(addresses[0]), dp_client], ids=["MPClient", "DPClient"])
def test_a_client_hangs_up_and_its_threads_end(engines, new, how):
    addresses, servers = engines
    with nothing_left(servers):
        client = new(addresses)
        wait_until_ready(client)
        stream = client.add_request(EngineCoreRequest("a", [5], GREEDY))  # which nobody will answer, and nobody reads
        if how == "closed":
            client.shutdown()
            with pytest.raises(EngineDeadError):
                stream.get(timeout=30)
            client.shutdown()
        elif how == "forgotten in a circle":
            client.itself = client
        del client, stream


def test_a_stream_that_may_still_be_read_keeps_its_client(served, engines):
    stream = MPClient(served[1]).add_request(EngineCoreRequest("a", [5, 6, 7], GREEDY))
    gc.collect()
    assert collect(stream)
    (client,) = stream.clients
    alive = weakref.ref(client)
    del client, stream
    assert alive() is None
    addresses, _ = engines
    stream = clients.Stream()
    reference = weakref.ref(client := dp_client(addresses))
    client.add_request(EngineCoreRequest("a", [5], GREEDY), stream)
    del client
    gc.collect()
    assert reference() is not None
    del stream
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_client_that_is_not_made_whole_leaves_nothing(engines, monkeypatch, after):
    """As if Ctrl-C had come while it waits for an engine, another one, or the coordinator."""
    addresses, servers = engines
    start, left = threading.Thread.start, iter(range(after))

    def fail(thread: threading.Thread) -> None:
        if thread.name.endswith(("(_run)", "(_watch)")) and next(left, None) is None:  # of a connection
            raise KeyboardInterrupt
        start(thread)

    with nothing_left(servers), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(KeyboardInterrupt):
            dp_client(addresses)


def test_what_a_client_has_started_ends_once_and_in_reverse():
    class Client:
        pass

    ended: list[str] = []
    client, entered = Client(), threading.Event()
    resources = BackgroundResources(client)
    resources.add(ended.append, "first")
    resources.run(lambda: ended.append(str(resources.ended.wait(30))))
    resources.add(ended.append, "last")
    if not (pid := os.fork()):  # the copy of a fork ends nothing
        resources()
        os._exit(len(ended))
    assert os.waitpid(pid, 0)[1] == 0
    del client
    assert ended == ["last", "True", "first"]
    resources()
    assert len(ended) == 3
    client, ended[:] = Client(), []
    resources = BackgroundResources(client)
    resources.add(ended.append, "first")

    def forget(held: list[Client]) -> None:  # the last reference goes in one of its own threads, which can't be joined
        held.clear()
        entered.set()

    held = [client]
    del client
    resources.run(forget, held)
    assert entered.wait(30)
    eventually(lambda: ended == ["first"])


# --- what clients have in common --------------------------------------------------------------------------------------


def methods(cls: type) -> dict[str, inspect.Signature]:
    """The signature of each public method, with its annotations, by its name."""
    found = inspect.getmembers(cls, inspect.isfunction)
    return {name: inspect.signature(function) for name, function in found if not name.startswith("_")}


def test_all_clients_have_one_face():
    wanted = methods(EngineCoreClient)
    assert wanted.keys() == {
        "shutdown", "add_request", "get_output", "abort", "utility", "utility_on_all", "collective_rpc",
    }  # fmt: skip
    for cls in (MPClient, InprocClient, DPClient, FleetClient):
        assert {name: method for name, method in methods(cls).items() if name in wanted} == wanted, cls


def test_workers_are_called_through_every_client(served, llm):
    client = MPClient(served[1])
    assert llm.client.collective_rpc("block_bytes") == llm.collective_rpc("block_bytes")
    assert client.collective_rpc("block_bytes") == served[0].workers.collective_rpc("block_bytes")
    client.shutdown()


def test_an_engine_outlives_news_of_a_request_that_nobody_has(caplog):
    owner = object()
    owners = {"known": owner}
    parts: dict[object, Outputs] = {}
    frames = SimpleNamespace(send=parts.__setitem__)
    server = SimpleNamespace(owners=owners, frames=frames, _owner_of=lambda name: EngineServer._owner_of(server, name))
    error = EngineOutput("gone", [], "error", error="why", finished=True)
    news = Outputs([error, EngineOutput("known", [5], "stop", finished=True)], [("gone", 0), ("known", 0)], [7, 8])
    EngineServer._hand_out(server, news)
    assert [*parts] == [owner] and not owners
    assert parts[owner].names == [("known", 0)] and [output.request_id for output in parts[owner].outputs] == ["known"]
    assert caplog.text.count("'gone'") == 2
