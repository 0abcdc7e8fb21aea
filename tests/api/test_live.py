"""What /live shows: who owns which block, what has just happened, and to whom it is told."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from itertools import pairwise
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import EnvironBuilder
from werkzeug.wsgi import ClosingIterator

from api import viewers
from api.options import ServerConfig
from api.routes import Api
from api.viewers import CACHED, FREE, MOST_UNREAD, SHARED, blocks_of
from fake_worker import Engine, prompt
from observe.live import LINGER, MAX_MOVED, MAX_REQUESTS, MAX_STEPS, Recorder
from plan import Adapter, Reply
from processes.child import Board
from processes.client import EngineDeadError
from ring import Codec
from sampling_params import SamplingParams
from scripted import FACTS, TOKENIZER, ScriptedClient, refusal
from sequence import SequenceGroup
from served import Server, eventually
from server import create_app


class Watched(Engine):
    """An engine of integers with a recorder, which it tells of its steps as `EngineCore` does."""

    def __init__(self, rank: int = 0, **fields: Any):
        super().__init__(**fields)
        self.recorder = Recorder(self.scheduler, rank, clock=lambda: self.now)
        schedule, update = self.scheduler.schedule, self.scheduler.update

        def planned() -> Any:
            plan = schedule()
            if self.recorder.recording:
                self.recorder.planned(plan)
            return plan

        def landed(plan: Any, result: Any) -> Any:
            if self.recorder.recording:
                self.recorder.landed(result)
            return update(plan, result)

        self.scheduler.schedule, self.scheduler.update = planned, landed

    def look(self, before: dict[str, int] | None = None) -> dict[str, Any]:
        return self.recorder.live({self.recorder.rank: before or {}})


def owners_of(engine: Watched) -> list[int]:
    """The owner of each block, by the scheduler's own books."""
    holders: dict[int, list[int]] = {}
    for seq in engine.scheduler.running:
        for block in (block for table in seq.tables for block in table if block >= 0):
            holders.setdefault(block, []).append(seq.key[1])
    for request in engine.scheduler.admission.samples.holders:
        for block in (block for table in request.prompt_tables for block in table if block >= 0):
            holders.setdefault(block, [request.seqs[0].key[1]])
    pool, owners = engine.scheduler.blocks, []
    for block, count in enumerate(pool.ref_counts):
        mine = holders.get(block, [])
        assert bool(mine) == bool(count)
        free = FREE if pool.hashes[block] is None else CACHED
        owners.append(SHARED if len(mine) > 1 else mine[0] if mine else free)
    return owners


@pytest.mark.parametrize("windows", [(0,), (0, 6)])
def test_the_block_map_says_who_owns_each_block(windows: tuple[int, ...]) -> None:
    """With prompts that share a beginning, samples that wait for their prompt, and too few slots for all."""
    engine, seen = Watched(windows=windows, max_num_seqs=4), set()
    for i in range(3):
        engine.add(f"{i}", prompt(20) + [i] * 5, max_tokens=8, ignore_eos=True)
    engine.add("samples", prompt(18, 3), n=5, max_tokens=6, ignore_eos=True)
    engine.add("last", prompt(9, 5), max_tokens=8, ignore_eos=True)
    kept = False
    while engine.scheduler.has_work():
        engine.step()
        kept = kept or bool(engine.scheduler.admission.samples.holders)
        runs = blocks_of(engine.look())
        owners = [owner for owner, length in runs for _ in range(length)]
        assert owners == owners_of(engine)
        assert len(runs) == 1 + sum(a != b for a, b in pairwise(owners))
        seen.update(owners)
    assert kept and {FREE, CACHED, SHARED, 1, 2, 3, 4, 5} <= seen


def test_what_has_happened_is_told_once_however_often_one_asks() -> None:
    """Steps, preemptions and moves of a starved pool, to one who asks after each step and to one who asks seldom."""
    engine = Watched(num_blocks=20, max_model_len=40, num_host_blocks=40, preemption_mode="swap")
    for i in range(6):
        engine.add(f"{i}", prompt(11, i), n=2, max_tokens=25, ignore_eos=True)
    often, seldom = [engine.look()], [engine.look()]
    assert not often[0]["steps"] and not often[0]["finished"] and not any(often[0]["moves"].values())
    preempted = []
    while engine.scheduler.has_work():
        engine.now += 1.0
        engine.step()
        preempted.append(len(engine.scheduler.admission.preempted))
        often.append(engine.look(often[-1]["totals"]))
        if len(engine.plans) % 5 == 0:
            seldom.append(engine.look(seldom[-1]["totals"]))
    seldom.append(engine.look(seldom[-1]["totals"]))
    plans = engine.plans
    for looks in (often, seldom):
        steps = [step for look in looks for step in look["steps"]]
        assert [step["step"] for step in steps] == [plan.step for plan in plans]
        assert [step["prefill"] + step["decode"] for step in steps] == [sum(n for _, n in plan.rows) for plan in plans]
        assert [step["preempted"] for step in steps] == preempted
        moved = [(look["moves"]["out"], look["moves"]["in"], look["moves"]["copies"]) for look in looks]
        wanted = [sum(len(moves) for moves in kind) for kind in zip(*map(moves_of, plans), strict=True)]
        assert [sum(column) for column in zip(*moved, strict=True)] == wanted and all(wanted)
        out, back = ([b for look in looks for b in look["moves"][name]] for name in ("blocks_out", "blocks_in"))
        assert out == [block for plan in plans for block, _ in plan.swap_out]
        assert back == [block for plan in plans for _, block in plan.swap_in]
        assert [ended["id"] for look in looks for ended in look["finished"]] == engine.finished
    assert sum(preempted) == often[-1]["counters"]["preemptions"] > 0
    swapped = [row for look in often for row in look["requests"] if row["state"] == "swapped"]
    assert swapped and all(row["preemptions"] and row["output"] and row["computed"] for row in swapped)


def moves_of(plan: Any) -> tuple[list[Any], ...]:
    return plan.swap_out, plan.swap_in, plan.copies


def test_a_step_tells_its_tokens_and_how_long_its_result_took() -> None:
    engine = Watched(depth=2)
    before = engine.look()["totals"]
    engine.add("a", prompt(20), max_tokens=5, ignore_eos=True)
    engine.add("b", prompt(7, 2), max_tokens=5, ignore_eos=True)
    while engine.scheduler.has_work():
        engine.now += 0.5
        engine.step()
    steps = engine.look(before)["steps"]
    assert [(step["prefill"], step["decode"]) for step in steps[:4]] == [(16, 0), (11, 0), (0, 2), (0, 2)]
    assert {step["ms"] for step in steps} == {500.0}  # planned while the one before ran


def test_steps_that_bring_no_result_are_not_told() -> None:
    engine = Watched(depth=2)
    before = engine.look()["totals"]
    engine.add("a", prompt(20), max_tokens=8, ignore_eos=True)
    engine.step()
    engine.lose(True)
    lost = engine.scheduler.step
    engine.run()
    assert [step["step"] for step in engine.look(before)["steps"]] == [*range(lost, engine.scheduler.step)]


def test_only_the_latest_is_kept() -> None:
    engine = Watched(num_blocks=200, num_host_blocks=400, max_model_len=250, preemption_mode="swap", max_num_seqs=4)
    before = engine.look()["totals"]
    for i in range(70):
        engine.add(f"{i}", prompt(20, i), max_tokens=9, ignore_eos=True)
    engine.run()
    look = engine.look(before)
    assert len(look["steps"]) == MAX_STEPS < engine.scheduler.step
    assert len(look["moves"]["blocks_out"]) == MAX_MOVED < look["moves"]["out"]
    assert [row["id"] for row in look["finished"]] == engine.finished[-64:]


def test_nothing_is_noted_while_nobody_asks() -> None:
    engine = Watched()
    engine.add("a", prompt(5), max_tokens=60, ignore_eos=True)
    engine.step()
    assert not engine.recorder.recording
    before = engine.look()["totals"]
    engine.now += LINGER
    engine.step()
    assert len(engine.look(before)["steps"]) == 1
    engine.now += LINGER + 0.1
    engine.step(3)
    assert not engine.recorder.recording and not engine.recorder.flying
    assert len(engine.look(before)["steps"]) == 1
    engine.step()
    assert [step["step"] for step in engine.look(before)["steps"]] == [1, 5]


def test_queues_are_listed_in_their_order_and_counted_in_full() -> None:
    engine = Watched(scheduling_policy="priority", max_num_seqs=2)
    names = [f"{i}" for i in range(MAX_REQUESTS + 20)]
    for i, name in enumerate(names):
        engine.add(name, prompt(5), priority=i * 7 % 11, client="me", max_tokens=9, ignore_eos=True)
    engine.step()
    look = engine.look()
    assert look["counts"] == {"waiting": len(names) - 2, "running": 2, "swapped": 0}
    first = sorted(names, key=lambda name: (int(name) * 7 % 11, int(name)))[:MAX_REQUESTS]
    assert [row["id"] for row in look["requests"]] == first
    assert [row["state"] for row in look["requests"]] == ["running"] * 2 + ["waiting"] * (MAX_REQUESTS - 2)
    running, waiting = look["requests"][0], look["requests"][-1]
    row = {"id": "0", "client": "me", "state": "running", "prompt": 5, "computed": 5, "output": 1, "preemptions": 0}
    assert running == {"key": 1, "adapter": None} | row
    assert (waiting["computed"], waiting["output"], waiting["key"]) == (0, 0, int(waiting["id"]) + 1)


def test_a_finished_request_tells_its_times_and_its_ends() -> None:
    engine = Watched(max_num_seqs=2)
    before = engine.look()["totals"]
    for name, n in (("a", 2), ("b", 1), ("c", 1)):
        engine.add(name, prompt(9), n=n, client=f"of {name}", max_tokens=4, ignore_eos=True)
    engine.scheduler.abort("c")
    while engine.scheduler.has_work():
        engine.now += 1.0
        engine.step()
    c, b, a = engine.look(before)["finished"]
    row = {"prompt": 9, "preemptions": 0, "adapter": None}
    assert a == {"id": "a", "client": "of a", "reason": "length", "output": 8, "ttft": 1.0, "e2e": engine.now} | row
    assert c == {"id": "c", "client": "of c", "reason": "abort", "output": 0, "ttft": None, "e2e": 0.0} | row
    assert b["ttft"] > 1.0 and b["e2e"] == b["ttft"] + 3
    assert engine.scheduler.reports.explain("b")["first_token_seconds"] == b["ttft"]


def test_whoever_has_an_adapter_or_waits_for_it_is_told() -> None:
    engine = Watched(enable_lora=True, max_loras=1, max_num_seqs=3)
    engine.look()
    for i, name in enumerate(("shout", "whisper")):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.scheduler.add(SequenceGroup(name[0], prompt(9), params, name, adapter=Adapter(name, i, name)))
        engine.answers[name[0]] = {0: []}
    reports = engine.scheduler.reports
    engine.now += 1.0
    engine.step()
    look = engine.look()
    assert look["counts"] == {"waiting": 1, "running": 1, "swapped": 0}
    rows = [(row["adapter"], row["state"]) for row in look["requests"]]
    assert rows == [("shout", "running"), ("whisper", "waiting")]
    names = {"max_lora": "1", "running_lora_adapters": "shout", "waiting_lora_adapters": "sing,whisper"}
    assert reports.adapters(["sing", "sing"]) == names
    assert reports.metrics()["num_requests_waiting_by_reason"] == {"capacity": 0, "deferred": 1}
    while engine.scheduler.has_work():
        engine.now += 1.0
        engine.step()
    assert sorted(row["adapter"] for row in engine.look(look["totals"])["finished"]) == ["shout", "whisper"]
    story = reports.explain("w")
    assert story["adapter"] == "whisper" and story["answers"][0]["stays"][0]["waited_for"]["adapters"] >= 3
    assert not reports.adapters([])["running_lora_adapters"]


# --- to whom it is told ----------------------------------------------------------------------------------------------


class Asked(ScriptedClient):
    """A client of engines of integers, each asked when a test lets it: `ticks` counts how often it may still be."""

    def __init__(self, *engines: Watched):
        super().__init__()
        self.engines, self.ticks, self.asked = engines, threading.Semaphore(0), 0

    def utility(self, method: str, *args: Any) -> dict[int, Any]:
        assert method == "live"
        self.ticks.acquire()
        self.asked += 1
        if self.trouble:
            raise EngineDeadError(self.trouble)
        (before,), codec = Codec().decode(Codec().encode(Reply(0, list(args)))).value, Codec()
        looks = {e.recorder.rank: e.recorder.live(before) for e in self.engines}
        return {rank: codec.decode(codec.encode(Reply(0, look))).value for rank, look in looks.items()}


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Opens streams of an app around `Asked`; returns app, streams and the API."""
    monkeypatch.setattr(viewers, "PERIOD", 0.0)
    opened: list[tuple[Asked, Api, list[ClosingIterator]]] = []

    def watch(engine: Asked, count: int = 1, headers: Any = None, **config: Any) -> tuple[Flask, list[Any], Api]:
        api = Api(engine, TOKENIZER, FACTS, ServerConfig(**config), ["manta"], Board())
        app = create_app(api)
        bodies = [body_of(app, headers) for _ in range(count)]
        opened.append((engine, api, bodies))
        return app, [events_of(body) for body in bodies], api

    yield watch
    for engine, api, bodies in opened:
        for body in bodies:
            body.close()
        assert not api.viewers.viewers
        engine.ticks.release()
        eventually(lambda api=api: not api.viewers.asking)  # it asks for nobody


def body_of(app: Flask, headers: Any) -> ClosingIterator:
    """The body of a stream, of which nothing has been read; Flask's test client would wait for an event."""
    started: list[str] = []
    body = app(EnvironBuilder("/live", headers=headers).get_environ(), lambda status, _: started.append(status))
    assert started == ["200 OK"]
    return body


def events_of(body: ClosingIterator) -> Iterator[Any]:
    for event in body:
        assert event.startswith(b"data: {") and event.endswith(b"}\n\n")
        yield json.loads(event[6:])


def test_ten_viewers_cost_the_engine_one_question_a_tick(watching: Any) -> None:
    engine = Asked(Watched())
    _, streams, api = watching(engine, 10)
    mine = api.board.tag("address", "")  # of those who have none
    for name, client in (("x", mine), ("y", "another's")):
        engine.engines[0].add(f"cmpl-{name}-0", prompt(9), client=client, max_tokens=4, ignore_eos=True)
    for count in range(1, 4):
        engine.ticks.release()
        events = [next(stream) for stream in streams]
        assert engine.asked == count and all(event == events[0] for event in events)
        assert [request["id"] for request in events[0]["engines"][0]["requests"]] == ["cmpl-x", None]
        assert [len(event["engines"][0]["steps"]) for event in events] == [count > 1] * 10
        engine.engines[0].step()


def test_an_event_has_the_fields_that_it_promises(watching: Any) -> None:
    engine = Asked(Watched(rank=0), Watched(rank=1, num_blocks=8, num_host_blocks=4))
    _, (stream,), api = watching(engine)
    mine = api.board.tag("address", "")
    engine.engines[1].add("cmpl-x-0", prompt(9), client=mine, max_tokens=4, ignore_eos=True)
    engine.engines[1].step()
    engine.ticks.release()
    event = next(stream)
    assert set(event) == {"time", "engines"} and [part["rank"] for part in event["engines"]] == [0, 1]
    assert event["engines"][1] == {
        "rank": 1, "block_size": 4, "num_blocks": 8, "num_host_blocks": 4, "max_num_seqs": 8,
        "counts": {"waiting": 0, "running": 1, "swapped": 0},
        "requests": [{"key": 1, "id": "cmpl-x", "adapter": None, "state": "running", "prompt": 9, "computed": 9,
                      "output": 1, "preemptions": 0}],
        "blocks": [[1, 3], [0, 5]], "moves": {"out": 0, "in": 0, "copies": 0, "blocks_out": [], "blocks_in": []},
        "steps": [], "finished": [],
        "counters": {"prompt_tokens": 9, "generation_tokens": 1, "preemptions": 0, "prefix_hit_tokens": 0,
                     "prefix_query_tokens": 9, "draft_tokens": 0, "accepted_tokens": 0},
    }  # fmt: skip


def test_a_key_sees_the_ids_of_its_own_requests_alone(watching: Any) -> None:
    engine, headers = Asked(Watched()), {key: {"X-Api-Key": key} for key in ("one", "two")}
    app, (mine,), api = watching(engine, headers=headers["one"], api_key=("one", "two"))
    for key in ("one", "two"):
        for name in ("ends", "runs"):
            tokens = 1 if name == "ends" else 30
            tag = api.board.tag("key", key)
            engine.engines[0].add(f"{name}-{key}-0", prompt(9), client=tag, max_tokens=tokens, ignore_eos=True)
    with contextlib.closing(body_of(app, headers["two"])) as body:
        theirs = events_of(body)
        for _ in range(2):
            engine.ticks.release()
            (seen,), (other,) = next(mine)["engines"], next(theirs)["engines"]
            engine.engines[0].step(3)
        for part, name in (("requests", "runs"), ("finished", "ends")):
            assert [row["id"] for row in seen[part]] == [f"{name}-one", None]
            assert [row["id"] for row in other[part]] == [None, f"{name}-two"]
            assert not any("client" in row for row in seen[part])
        assert seen["blocks"] == other["blocks"] and api.board.tag("key", "two") not in str(seen)


def test_more_viewers_than_may_watch_are_refused(watching: Any) -> None:
    engine = Asked(Watched())
    app, (first, _), _ = watching(engine, 2, max_live_viewers=2)
    ask = partial(app.test_client().open, "/live", environ_overrides={"REMOTE_ADDR": ""})  # as those who watch
    assert "max_live_viewers" in refusal(ask(), 429)["message"]
    assert ask(method="HEAD").status_code == 429
    engine.ticks.release()
    assert next(first)


def test_who_watches_twenty_times_keeps_no_other_key_out(watching: Any) -> None:
    engine, headers = Asked(Watched()), {key: {"X-Api-Key": key} for key in ("one", "two")}
    app, _, api = watching(engine, 20, headers["one"], max_live_viewers=20, api_key=("one", "two"))
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(contextlib.closing(body_of(app, headers["two"])))
        assert len(api.viewers.viewers) == 30
        for key in ("one", "two"):
            assert "max_live_viewers" in refusal(app.test_client().get("/live", headers=headers[key]), 429)["message"]


def test_who_has_left_is_counted_no_more(watching: Any) -> None:
    """Also who never began to read, or wanted no body."""
    engine = Asked(Watched())
    app, (stream,), api = watching(engine, max_live_viewers=2)
    engine.ticks.release()
    assert next(stream)
    body_of(app, None).close()
    with app.test_client().head("/live") as head:
        assert head.status_code == 200
    assert len(api.viewers.viewers) == 1


def test_who_does_not_read_is_cut_off_and_nobody_else(watching: Any) -> None:
    engine = Asked(Watched())
    _, (lazy, keen), _ = watching(engine, 2)
    for _ in range(MOST_UNREAD + 10):
        engine.ticks.release()
        assert next(keen)
    assert len(list(lazy)) == MOST_UNREAD


def test_trouble_is_told_and_then_it_goes_on(watching: Any) -> None:
    engine = Asked(Watched())
    _, (stream,), _ = watching(engine)
    engine.trouble = "/a/folder/engine has ended"
    engine.ticks.release()
    event = next(stream)
    assert (event["engines"], event["trouble"]) == ([], "engine has ended")
    engine.trouble = None
    engine.ticks.release()
    assert "trouble" not in (event := next(stream)) and len(event["engines"]) == 1


def test_a_successor_of_the_engine_tells_what_it_has_done_itself(watching: Any) -> None:
    first, second = Watched(), Watched()
    engine = Asked(first)
    _, (stream,), _ = watching(engine)
    for steps in (8, 3):
        engine.engines[0].add("cmpl-x-0", prompt(9), max_tokens=99, ignore_eos=True)
        for _ in range(2):
            engine.ticks.release()
            (seen,) = next(stream)["engines"]
            engine.engines[0].step(steps)
        engine.engines = (second,)
    assert len(seen["steps"]) == 3


def test_draining_ends_the_streams_and_refuses_more(watching: Any) -> None:
    engine = Asked(Watched())
    app, (stream,), api = watching(engine)
    engine.ticks.release()
    assert next(stream) and not api.board.in_flight
    api.board.draining = True
    engine.ticks.release()
    assert not list(stream)
    assert "shutting down" in refusal(app.test_client().get("/live"), 503)["message"]


def test_after_a_mistake_of_ours_nobody_waits_for_ever(watching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, mistakes = Asked(Watched()), []
    monkeypatch.setattr(threading, "excepthook", lambda mistake: mistakes.append(mistake.exc_type))
    _, (stream,), _ = watching(engine)
    engine.engines = (None,)
    engine.ticks.release()
    assert not list(stream)
    eventually(lambda: mistakes == [AttributeError])


# --- the real thing --------------------------------------------------------------------------------------------------


def read(response: HTTPResponse) -> Any:
    """The next event; None at the end."""
    if not (line := response.readline()):
        return None
    assert line.startswith(b"data: ") and response.readline() == b"\n"
    return json.loads(line[6:])


class Seen:
    """What a stream shows of so many requests, which should be enough to take several events."""

    def __init__(self, server: Server, count: int):
        self.server, self.count, self.rows, self.totals, self.blocks = server, count, [], Counter(), set()
        asker = threading.Thread(target=self.ask)
        with contextlib.closing(HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
            connection.request("GET", "/live")
            response = connection.getresponse()
            assert response.headers["Content-Type"] == "text/event-stream"
            asker.start()
            while self.totals["finished"] < self.count:
                (engine,) = read(response)["engines"]
                self.blocks |= {engine["num_blocks"], sum(length for _, length in engine["blocks"])}
                self.rows += engine["requests"]
                self.totals["finished"] += len(engine["finished"])
                self.totals["out"] += len(engine["moves"]["blocks_out"])
                self.totals["steps"] += len(engine["steps"])
                self.totals["preempted"] += sum(step["preempted"] for step in engine["steps"])
        asker.join()
        self.states = {row["state"] for row in self.rows}
        assert {row["id"] for row in self.rows} == {self.id} and server.get(f"/explain/{self.id}")[0] == 200
        assert len({row["key"] for row in self.rows}) == self.count and self.totals["steps"] >= 90

    def ask(self) -> None:
        fields = {"prompt": ["Once upon a time"] * self.count, "max_tokens": 90, "ignore_eos": True}
        self.id = json.loads(self.server.post("/v1/completions", fields)[1])["id"]


def test_the_stream_shows_requests_that_run(server: Server) -> None:
    eventually(lambda: server.running() == 0)
    seen = Seen(server, 24)
    assert len(seen.blocks) == 1 and "running" in seen.states and not seen.totals["preempted"]
