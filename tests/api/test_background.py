"""Responses in the background: who may read, cancel and forget them, and the bound of what is kept."""

from __future__ import annotations

from typing import Any

import gevent
from flask.testing import FlaskClient
from gevent.lock import Semaphore

from plan import EngineOutput
from scripted import BROKEN, TOKENIZER, ScriptedClient, client_of, refusal, told
from test_responses import ASK, TOKENS, ask, check, post


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
    engine.tell(7)
    whole = http_client.get(url).json
    check("Response")(whole)
    assert whole["status"] == "incomplete"
    assert whole["output"][0]["content"][0]["text"] == TOKENIZER.decode(TOKENS[:9])
    assert http_client.post(url + "/cancel").json == whole  # too late, which is no mistake
    assert refusal(post(http_client, ASK, background=True, stream=True))["param"] == "stream"
    for query in ("stream=true", "starting_after=1"):
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
    refusal(http_client.get(url, headers=blue), 404)
    cancelled = http_client.post(url + "/cancel", headers=red).json
    check("Response")(cancelled)
    assert cancelled["status"] == "cancelled" and not engine.open
    assert cancelled["output"][0]["content"][0]["text"] == TOKENIZER.decode(TOKENS[:3])
    assert http_client.get(url, headers=red).json == cancelled
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
