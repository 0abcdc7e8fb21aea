"""The page of a server with several models, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from config import DEMO
from served import Server, eventually, serving

pytest.importorskip("playwright.sync_api", reason="it drives the browser")
pytest.importorskip("axe_playwright_python", reason="it finds what keeps people out")
from playwright.sync_api import Page, expect

from browsing import MARKS, answered, ask, browser, excused, open_page, page  # noqa: F401

pytestmark = MARKS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    tables = [f'[{name}]\npath = "{DEMO}"\nmemory = 0.8\nmax_num_seqs = 8\n' for name in ("one", "two")]
    (folder / "models.toml").write_text("".join(tables))
    with serving(folder, "--models", str(folder / "models.toml"), "--models-memory", "0.9", "--threads", "1") as server:
        yield server


def test_a_model_is_chosen_and_its_engine_is_shown(page: Page, server: Server) -> None:
    expect(page.locator("#model")).to_have_text("2 models, loaded on demand")
    expect(page.locator("#stream")).to_have_text("One is unloaded.")
    page.locator("#models").select_option("two")
    expect(page.locator("#stream")).to_have_text("Two is unloaded.")
    ask(page, "What is 23 + 58?")  # its stream begins with comments, if loading takes long
    expect(answered(page)).to_have_text("81")
    expect(page.locator("#stream")).to_have_text("Live")
    expect(page.locator("#requests, #running").first).to_be_visible()
    states = {card["id"]: card["state"] for card in json.loads(server.get("/v1/models")[1])["data"]}
    assert states == {"one": "unloaded", "two": "loaded"}
    page.reload()
    expect(page.locator("#models")).to_have_value("two")
    expect(page.locator("#stream")).to_have_text("Live")
    page.locator("#models").select_option("one")
    expect(page.locator("#stream")).to_have_text("One is unloaded.")
    ask(page, "Spell stone backwards.")  # goes on in the same chat with the other model
    eventually(lambda: json.loads(server.get("/v1/models/one")[1])["state"] == "loaded")
    expect(page.locator("#stream")).to_have_text("Live")
