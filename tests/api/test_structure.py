"""Schemas of a request that no grammar can hold an answer to as a whole: what is left out is named, or refused."""

from __future__ import annotations

import json

import pytest

from scripted import CHAT, ScriptedClient, client_of, post, refusal
from text.schemas import LARGE

UNHELD = {"contains": {"type": "null"}, "propertyNames": {"type": "string"}, "type": "array", "uniqueItems": True}
UNHELD_FORMS = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": UNHELD, "strict": False}},
    "structured_outputs": {"json": UNHELD}, "guided_json": json.dumps(UNHELD), "json_schema": UNHELD, "format": UNHELD,
}  # fmt: skip


@pytest.mark.parametrize("name", UNHELD_FORMS)
def test_keywords_of_a_schema_that_no_grammar_can_hold_an_answer_to_are_named(engine: ScriptedClient, name: str):
    reply = post(client_of(engine), CHAT, **{name: UNHELD_FORMS[name]})
    named = f"{name}.contains, {name}.uniqueItems"
    assert (reply.status_code, reply.headers["X-Manta-Ignored"]) == (200, named)
    assert json.loads(engine.added[-1][1].structured_outputs.json) == {"type": "array"}


@pytest.mark.parametrize("strict", [True, False])
def test_a_large_schema_is_left_to_the_process_that_tries_it(engine: ScriptedClient, strict: bool) -> None:
    schema = UNHELD | {"description": "a" * LARGE}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
    reply = post(client_of(engine), CHAT, response_format=form)
    assert reply.status_code == 200 and "X-Manta-Ignored" not in reply.headers
    assert json.loads(engine.added[-1][1].structured_outputs.json) == schema


def test_keywords_that_no_grammar_can_hold_an_answer_to_are_refused_where_it_is_strict(engine: ScriptedClient) -> None:
    flat = {"type": "json_schema", "name": "a", "schema": UNHELD, "strict": True}
    body = {"model": "manta", "input": "Hi", "text": {"format": flat}}
    strict = {"type": "json_schema", "json_schema": {"name": "a", "schema": UNHELD, "strict": True}}
    for error in (
        refusal(post(client_of(engine), CHAT, response_format=strict)),
        refusal(client_of(engine).post("/v1/responses", json=body)),
    ):
        assert "no grammar can hold an answer to contains and uniqueItems" in error["message"]
        assert error["param"] in ("response_format", "text")
