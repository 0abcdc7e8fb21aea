"""Where an answer ends, and which template renders its question, as the many files of a checkpoint say it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from config import DEMO
from model_config import ModelConfig
from scripted import CHAT, ScriptedClient, client_of, post
from tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo's small files, in which nothing but the tokenizer names the end of an answer."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (path := Path(DEMO, name)).exists():
            shutil.copy(path, tmp_path)
    edit(tmp_path / "config.json", eos_token_id=None)
    edit(tmp_path / "generation_config.json", eos_token_id=None)
    return tmp_path


@pytest.fixture
def http_client(engine: ScriptedClient) -> FlaskClient:
    return client_of(engine, trust_request_chat_template=True)


def edit(path: Path, **changes: Any) -> None:
    """Set the fields of a JSON file; None takes one out."""
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({name: value for name, value in (raw | changes).items() if value is not None}))


def ends_of(folder: Path) -> tuple[int, ...]:
    return ModelConfig.from_folder(str(folder)).eos_token_ids


def test_the_tokenizers_own_files_say_what_ends_an_answer(folder: Path) -> None:
    names = {token: id for id, token in enumerate(map(Tokenizer(DEMO).token, range(20)))}
    first, second, *_ = (text for text in names if text.startswith("<"))
    config, tokens = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    edit(config, eos_token=None, added_tokens_decoder=None)
    assert ends_of(folder) == ()
    edit(config, eos_token=first)
    assert ends_of(folder) == (names[first],)
    edit(config, eos_token={"content": first, "lstrip": False}, eot_token=second)
    assert set(ends_of(folder)) == {names[first], names[second]}
    edit(config, eos_token=None, eot_token=None)
    edit(tokens, eos_token=second)
    assert ends_of(folder) == (names[second],)
    edit(folder / "generation_config.json", eos_token_id=[7])
    assert ends_of(folder) == (7, names[second])  # what the model says comes first
    edit(config, added_tokens_decoder={"9": {"content": second}})
    assert ends_of(folder) == (7, 9)


@pytest.mark.parametrize(
    ("eos", "decoder"),
    [
        ("<nowhere>", None), (5, None), ({"content": [1]}, None), ("<a>", {"x": 5}), ("<a>", [1]),
        ("<a>", {"9999": {"content": "<a>"}}),
    ],
)  # fmt: skip
def test_what_is_malformed_there_ends_nothing(folder: Path, eos: Any, decoder: Any) -> None:
    edit(folder / "tokenizer_config.json", eos_token=eos, added_tokens_decoder=decoder)
    assert ends_of(folder) == ()


def test_further_templates_lie_in_a_folder_of_their_own(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").write_text("plain")
    folder_of_others = folder / "additional_chat_templates"
    folder_of_others.mkdir()
    (folder_of_others / "tool_use.jinja").write_text("{{ tools | length }} tools")
    (folder_of_others / "rag.jinja").write_text("{{ documents | length }} documents")
    tokenizer, talk = Tokenizer(str(folder)), [{"role": "user", "content": "Hi"}]
    assert tokenizer.render(talk) == "plain"
    assert tokenizer.render(talk, tools=[{"name": "f"}]) == "1 tools"
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer(str(folder)).render(talk, documents=[{}, {}], tools=[{}]) == "1 tools"


TURNS = "{% for m in messages %}{{ open }}{{ m.role }}\n{{ m.content }}{{ close }}\n{% endfor %}"


def test_a_template_shows_what_ends_a_turn(http_client: FlaskClient, engine: ScriptedClient) -> None:
    """A token that the model's files name nowhere then ends a chat, but where it is to go on past all ends."""
    tokenizer = Tokenizer(DEMO)
    other = next(id for id in sorted(tokenizer.special_ids) if id > 1)  # 0 and 1 are the model's own ends
    written = TURNS.replace("{{ open }}", "").replace("{{ close }}", tokenizer.token(other))
    assert tokenizer.turn_end(written) == other
    before_next = TURNS.replace("{{ open }}", tokenizer.token(other)).replace("{{ close }}", "")
    assert tokenizer.turn_end(before_next) == other  # it stands before the next turn
    assert tokenizer.turn_end("{% for m in messages %}{{ m.content }}\n{% endfor %}") is None
    assert tokenizer.turn_end("{{ raise_exception('no') }}") is None
    for fields, ends in (
        ({"chat_template": written}, (other,)), ({"chat_template": written, "stop_token_ids": [9]}, (9, other)),
        ({"chat_template": written, "ignore_eos": True}, ()), ({}, ()),
    ):  # fmt: skip
        assert post(http_client, CHAT, **fields).status_code == 200
        assert engine.added[-1][1].stop_token_ids == ends
