"""A real browser before a real server, for the tests of the page."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright import sync_api as playwright
from playwright.sync_api import Browser, Page, Route, expect

from served import Server, serving

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MARKS = [pytest.mark.full, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the path")]
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
CHAT, LIVE = "**/v1/chat/completions", "**/live"
expect.set_options(timeout=60_000)  # milliseconds: a busy machine may take long over an answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A pool of 64 blocks, in which one answer of a thousand tokens fits and two do not."""
    flags = ("--block-size", "16", "--num-gpu-blocks-override", "64", "--max-model-len", "1000")
    with serving(tmp_path_factory.mktemp("page"), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def excused() -> list[str]:
    """Words of the complaints that a test means the browser to write to its console. All others fail the test."""
    return []


@pytest.fixture
def open_page(server: Server, browser: Browser, excused: list[str]) -> Iterator[Callable[..., Page]]:
    """Opens the page with routes in between and a script before its own; options are of the browser's context."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def opened(routes: dict[Any, Callable[[Route], None]] | None = None, script: str = "", **options: Any) -> Page:
        contexts.append(browser.new_context(**({"viewport": {"width": 1440, "height": 900}} | options)))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        for url, handler in (routes or {}).items():
            page.route(url, handler)
        page.add_init_script(script)
        page.goto(f"http://127.0.0.1:{server.port}/")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [line for line in complaints if not any(words in line for words in excused)] == []


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    return open_page()


def events(*news: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in news)


def streams(*news: dict[str, Any]) -> Callable[[Route], None]:
    """Answers a request with these events, and hangs up."""
    return lambda route: route.fulfill(content_type="text/event-stream", body=events(*news))


def chunk(content: str, reason: str | None = None, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": reason}
    return {"id": "chatcmpl-1", "choices": [choice | {"logprobs": logprobs and {"content": logprobs}}]}


def surely(route: Route) -> None:
    """Has the model write what is likeliest, because a sampled sum is wrong once in a while."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"temperature": 0}))


def without_end(route: Route) -> None:
    """Has the model write on until the context is full."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True, "temperature": 1}))


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your message", exact=True).fill(text)
    page.get_by_label("Your message", exact=True).press("Enter")


def answered(page: Page, count: int = 1) -> Any:
    """The text of the latest of so many answers, once it has ended."""
    expect(page.get_by_role("button", name=re.compile("Regenerate|Try again"))).to_have_count(count)
    return page.locator(".assistant .text").last


def grave(page: Page) -> list[str]:
    """What axe finds that keeps somebody from using the page."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found
            if each["impact"] in ("serious", "critical")]  # fmt: skip
