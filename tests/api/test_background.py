"""Responses in the background: who may read, cancel and forget them, their events, and the bound of what is kept."""

from __future__ import annotations

import json
from typing import Any

import gevent
from flask.testing import FlaskClient
from gevent.lock import Semaphore

from plan import EngineOutput
from scripted import BROKEN, FACTS, TOKENIZER, ScriptedClient, client_of, refusal, told
from test_responses import ASK, TOKENS, ask, check, post, typed_events


class Gated(ScriptedClient):
    """An engine that tells of a token only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Semaphore(0)

    def get_output(self, stream: Any, timeout: float | None = None) -> EngineOutput:
        self.gate.acquire()
        return stream.get(0)

    def tell(self, tokens: int) -> None:
        for _ in range(tokens):
            self.gate.release()
        gevent.sleep(0)  # now the responses in the background take them


def run(http_client: FlaskClient, key: str = "", **fields: Any) -> str:
    """The path of a response that has begun in the background."""
    begun = ask(http_client, key, background=True, **fields)
    assert (begun["status"], begun["background"], begun["output"]) == ("in_progress", True, [])
    return f"{ASK}/{begun['id']}"


def test_it_runs_while_nobody_reads_it() -> None:
    http_client = client_of(engine := Gated())
    url = run(http_client)
    engine.tell(2)
    assert http_client.get(url).json["status"] == "in_progress" and len(engine.open) == 1
    reader = http_client.get(f"{url}?stream=true&starting_after=3").iter_encoded()
    later = [next(reader), next(reader)]
    engine.tell(7)
    later += reader
    every = typed_events(http_client.get(f"{url}?stream=true"))
    for i, event in enumerate(every):
        check("ResponseStreamEvent")(event)
        assert event["sequence_number"] == i
    assert [json.loads(frame.partition(b"data: ")[2]) for frame in later] == every[4:]
    whole = http_client.get(url).json
    assert whole == every[-1]["response"] and whole["status"] == "incomplete"
    assert whole["output"][0]["content"][0]["text"] == TOKENIZER.decode(TOKENS[:9])
    assert http_client.post(url + "/cancel").json == whole  # too late, which is no mistake
    streamed = typed_events(post(client_of(ScriptedClient()), ASK, background=True, stream=True))
    assert [event["type"] for event in streamed] == [event["type"] for event in every]
    for query in ("stream=1", "starting_after=1", "stream=true&starting_after=x"):
        assert refusal(http_client.get(f"{url}?{query}"))["param"] in query
    assert "needs store" in refusal(post(http_client, ASK, background=True, store=False))["message"]
    closed = client_of(engine, max_stored_responses=0)
    assert "max_stored_responses" in refusal(post(closed, ASK, background=True))["message"]


def test_its_client_alone_can_end_it() -> None:
    http_client = client_of(engine := Gated(), api_key=("red", "blue"))
    red, blue = {"X-Api-Key": "red"}, {"X-Api-Key": "blue"}
    url = run(http_client, "red")
    engine.tell(3)
    refusal(http_client.post(url + "/cancel", headers=blue), 404)
    refusal(http_client.get(url + "?stream=true", headers=blue), 404)
    cancelled = http_client.post(url + "/cancel", headers=red).json
    check("Response")(cancelled)
    assert cancelled["status"] == "cancelled" and not engine.open
    assert cancelled["output"][0]["content"][0]["text"] == TOKENIZER.decode(TOKENS[:3])
    assert http_client.get(url, headers=red).json == cancelled
    *_, last = typed_events(http_client.get(url + "?stream=true", headers=red))
    assert last["type"] == "response.output_text.delta"
    url = run(http_client, "red")
    http_client.delete(url, headers=red)
    gevent.sleep(0)
    assert not engine.open
    refusal(http_client.get(url, headers=red), 404)
    engine.script = [told(TOKENS[:3]), BROKEN]
    url = run(http_client, "red")
    engine.tell(2)
    assert http_client.get(url, headers=red).json["error"] == {"code": "server_error", "message": "worker died"}


def test_what_is_kept_of_it_is_bounded() -> None:
    http_client = client_of(engine := Gated(), FACTS | {"max_model_len": 2048}, max_stored_response_bytes=2**16)
    url = run(http_client, max_output_tokens=999)
    engine.tell(999)
    assert http_client.get(url).json["status"] == "incomplete"
    error = refusal(http_client.get(url + "?stream=true"))  # the first events are no longer there
    first = int(error["message"].partition("from ")[2].split()[0])
    *_, last = events = typed_events(http_client.get(f"{url}?stream=true&starting_after={first}"))
    assert events[0]["sequence_number"] == first + 1 > 100 and last["type"] == "response.incomplete"
    several = client_of(engine := Gated(), max_stored_responses=2)
    urls = [run(several)]
    engine.tell(9)
    urls.append(run(several))
    assert several.get(urls[0]).json["status"] == "incomplete"  # it has ended, and is the latest used
    urls.append(run(several))
    gevent.sleep(0)
    assert len(engine.open) == 3 and [several.get(url).status_code for url in urls] == [404, 200, 200]
    urls.append(run(several))
    gevent.sleep(0)
    assert len(engine.open) == 3  # the first of those that run has ended, as nobody could read it
    assert [several.get(url).status_code for url in urls] == [404, 404, 200, 200]
