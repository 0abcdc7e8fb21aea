"""The page at `/` in a real browser, before a real server. What a server seldom does is put in between."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from served import Server, eventually

pytest.importorskip("playwright.sync_api", reason="it drives the browser")
pytest.importorskip("axe_playwright_python", reason="it finds what keeps people out")
from playwright.sync_api import Page, Route, expect

from browsing import (  # noqa: F401
    CHAT,
    LIVE,
    MARKS,
    answered,
    ask,
    browser,
    chunk,
    events,
    excused,
    grave,
    open_page,
    page,
    server,
    streams,
    surely,
    without_end,
)

pytestmark = MARKS


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_conversation(page: Page) -> None:
    ask(page, "My cat is Otto.")
    expect(answered(page)).to_have_text("OK.")
    ask(page, "What is my cat?")
    expect(answered(page, 2)).to_have_text("Otto")
    expect(page.locator("#announcer")).to_have_text("The model: Otto")
    expect(page.locator(".assistant .actions").last).to_contain_text(
        re.compile(r"^\d tokens · [\d.,]+ tokens/s · first after \d")
    )
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_role("button", name="What is 23 + 58?").click()
    expect(answered(page)).to_have_text("81")


def test_an_answer_streams_and_stops(open_page: Callable[..., Page], server: Server) -> None:
    page = open_page({CHAT: without_end})
    ask(page, "Tell me a story.")
    text = page.locator(".assistant .text")
    expect(text).not_to_be_empty()
    first = text.inner_text()
    expect(text).not_to_have_text(first)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".assistant .actions")).to_contain_text("stopped")
    expect(page.get_by_label("Your message", exact=True)).to_be_focused()
    assert text.inner_text().startswith(first)
    eventually(lambda: server.running() == 0)


def test_settings_are_the_models_unless_they_say_otherwise(page: Page) -> None:
    with page.expect_request(CHAT) as request:
        ask(page, "Hi")
    messages = [{"role": "user", "content": "Hi"}]
    assert request.value.post_data_json == {
        "messages": messages, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    answered(page)
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "max_tokens": 3, "seed": 7}
    for name, value in settings.items():
        page.locator(f"[name={name}]").fill(str(value))
    with page.expect_request(CHAT) as request:
        ask(page, "Hi")
    body = request.value.post_data_json
    assert body.items() >= settings.items()
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, *messages]
    expect(page.locator(".assistant .actions")).to_contain_text("3 tokens")


def test_what_the_server_refuses_is_said_in_its_words(page: Page, excused: list[str]) -> None:
    excused.append("400 (BAD REQUEST)")
    page.get_by_text("Settings").click()
    for value, words in (("warm", "Temperature is 'warm'"), ("-1", "Temperature is -1")):
        page.get_by_label("Temperature").fill(value)
        ask(page, "What is 3 + 4?")
        answered(page)
        expect(page.locator(".actions .trouble")).to_contain_text(words)
        page.get_by_role("button", name="New chat").click()
    ask(page, "What is 3 + 4?")
    answered(page)
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Try again").click()
    expect(answered(page)).to_have_text("7")


@pytest.mark.parametrize(("width", "height"), [(380, 700), (900, 900), (1440, 900)])
def test_the_chat_scrolls_to_the_answer_and_nothing_shows_below_the_composer(
    open_page: Callable[..., Page], width: int, height: int
) -> None:
    text = "\n".join(f"Line {i}" for i in range(200))
    page = open_page({CHAT: streams(chunk(text), chunk("", "stop"))}, viewport={"width": width, "height": height})
    ask(page, "Hi")
    answered(page)
    scroll, composer = page.locator("#conversation").bounding_box(), page.locator("#composer").bounding_box()
    last = page.locator(".assistant .actions").bounding_box()
    assert scroll and composer and last
    assert last["y"] + last["height"] <= scroll["y"] + scroll["height"] + 8 <= composer["y"] + 8
    assert composer["y"] + composer["height"] <= height


def test_a_message_that_is_too_long_comes_back(page: Page, excused: list[str]) -> None:
    excused.append("400 (BAD REQUEST)")
    ask(page, "What is 1 + 1?")
    answered(page)
    ask(page, long := "word " * 3000)
    expect(page.get_by_role("alert")).to_contain_text("maximum context length is 1000 tokens")
    expect(page.get_by_label("Your message", exact=True)).to_have_value(long.strip())
    expect(page.locator(".message")).to_have_count(2)
    ask(page, "What is 2 + 2?")
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(answered(page, 2)).to_have_text("4")


@pytest.mark.parametrize(
    ("handler", "words", "text"),
    [
        (streams(chunk("So"), {"error": {"message": "the worker died"}}), "The worker died.", "So"),
        (streams(chunk("So")), "The answer broke off.", "So"),
        (lambda route: route.abort(), "The server cannot be reached.", ""),
        (lambda route: route.fulfill(status=502, body="<h1>Bad</h1>"), "The server answered 502 Bad Gateway.", ""),
    ],
)
def test_trouble(
    open_page: Callable[..., Page], excused: list[str], handler: Callable[[Route], None], words: str, text: str
) -> None:
    excused += [] if text else ["Failed to load resource"]
    page = open_page({CHAT: handler})
    ask(page, "Hi")
    expect(answered(page)).to_have_text(text)
    expect(page.locator(".actions .trouble")).to_have_text(words)
    expect(page.locator("#announcer")).to_have_text(words)


def test_text_is_never_markup(open_page: Callable[..., Page]) -> None:
    text = '<img src=x onerror="document.title=1">\n  &amp; <b>bold</b>'
    logprobs = [{"token": text, "logprob": 0.0, "bytes": list(text.encode()), "top_logprobs": []}]
    page = open_page({CHAT: streams(chunk(text), chunk("", "stop"))})
    ask(page, text)
    assert answered(page).inner_text() == text == page.locator(".user .text").inner_text()
    page.route(CHAT, streams(chunk(text, logprobs=logprobs), chunk("", "stop")))
    page.get_by_text("Settings").click()
    page.get_by_label("how likely").check()
    page.get_by_role("button", name="Regenerate").click()
    assert answered(page).inner_text() == text
    page.locator(".token").hover()
    assert page.locator("#tip").inner_text().startswith("<img")
    assert page.locator("img, .text b").count() == 0


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_tokens_show_what_else_they_might_have_been(page: Page) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("how likely").check()
    ask(page, "What is 23 + 58?")
    expect(answered(page)).to_have_text("81<|end|>")
    tokens, tip = page.locator(".token"), page.get_by_role("tooltip")
    expect(tokens).to_have_text(["8", "1", "<|end|>"])
    expect(page.locator(".ended")).to_have_text(["<|end|>"])
    tokens.nth(1).hover()
    expect(tip.locator(".choice")).to_have_count(5)
    expect(tip.locator(".choice.chosen")).to_have_text(re.compile(r"^1\s*\d+\.\d %$"))
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    tokens.first.focus()
    expect(tip.locator(".chosen")).to_contain_text("8")
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tip.locator(".chosen")).to_contain_text("1")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.keyboard.press("End")
    expect(tokens.last).to_be_focused()
    ask(page, "And 1 + 1?")
    answered(page, 2)  # what was said does not hold the token that ended it
    with page.expect_request(CHAT) as request:
        page.get_by_role("button", name="Regenerate").last.click()
    assert request.value.post_data_json["messages"][1]["content"] == "81"
    answered(page, 2)


def test_tokens_that_cut_a_character_are_one(open_page: Callable[..., Page]) -> None:
    def token(part: bytes, logprob: float) -> dict[str, Any]:
        name = part.decode(errors="replace")
        return {"token": name, "logprob": logprob, "bytes": list(part), "top_logprobs": []}

    parts = [token(b"caf\xc3", -0.1), token(b"\xa9", -2.0), token(b"!", -0.1), token(b"\xe2", -0.1)]
    page = open_page({CHAT: streams(chunk("café!\ufffd", logprobs=parts), chunk("", "length"))})
    page.get_by_text("Settings").click()
    page.get_by_label("how likely").check()
    ask(page, "Hi")
    answered(page)
    expect(page.locator(".token")).to_have_text(["caf", "é", "!", "\ufffd"])
    doubts = page.locator(".token").evaluate_all("all => all.map(one => +one.style.getPropertyValue('--doubt'))")
    assert doubts == pytest.approx([0.095, 0.865, 0.095, 0.095], abs=0.001)


# --- the API key -----------------------------------------------------------------------------------------------------


def test_the_key_is_asked_for_once(open_page: Callable[..., Page], excused: list[str]) -> None:
    excused.append("401 (Unauthorized)")
    sent = []

    def guarded(route: Route) -> None:
        key = route.request.headers.get("authorization")
        sent.append((route.request.url.rpartition("/")[2], key))
        if key == "Bearer right":
            return route.continue_()
        error = {"message": "the API key is missing or wrong", "code": "invalid_api_key"}
        return route.fulfill(status=401, json={"error": error})

    guards = re.compile("/(live|v1/.*)$")
    page = open_page({guards: guarded})
    dialog = page.get_by_role("dialog", name="This server wants an API key")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#model")).to_have_text("The server wants an API key.")
    expect(page.locator("#stream")).to_have_text("The server wants an API key.")
    page.get_by_role("button", name="Connect now").click()
    for key in ("wrong", "right"):
        expect(page.locator("#key-trouble")).to_be_visible(visible=key == "right")
        page.get_by_label("API key", exact=True).fill(key)
        page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    ask(page, "What is 1 + 1?")
    expect(answered(page)).to_have_text("2")
    assert sent[-1] == ("completions", "Bearer right")
    page.reload()
    expect(page.locator("#model")).to_contain_text("demo")
    expect(dialog).to_be_hidden()


# --- the engine, with a stream that the test writes ------------------------------------------------------------------

WRITTEN = """
  const others = window.fetch;
  window.opened = [];
  window.fetch = (path, options) => {
    if (path !== "live") return others(path, options);
    window.opened.push(options.signal);
    const body = new ReadableStream({ start(stream) { window.stream = stream; } });
    options.signal.addEventListener("abort", () => window.stream.error(options.signal.reason));
    return Promise.resolve(new Response(body));
  };
"""
NO_MOVES = {"out": 0, "in": 0, "copies": 0, "blocks_out": [], "blocks_in": []}
COUNTERS = ("prompt_tokens", "generation_tokens", "preemptions", "prefix_hit_tokens", "prefix_query_tokens",
            "draft_tokens", "accepted_tokens")  # fmt: skip


def engine(rank: int = 0, **changes: Any) -> dict[str, Any]:
    """An engine in an event of /live: one request runs in 3 of 10 blocks, another key's waits."""
    mine = {"key": 1, "id": "chatcmpl-1f2e3d4c5b", "state": "running", "prompt": 90, "computed": 90, "output": 5}
    other = {"key": 2, "id": None, "state": "waiting", "prompt": 7, "computed": 0, "output": 0}
    return {
        "rank": rank, "block_size": 16, "num_blocks": 10, "num_host_blocks": 4, "max_num_seqs": 8,
        "counts": {"waiting": 1, "running": 1, "swapped": 0}, "blocks": [[1, 3], [-2, 1], [-1, 2], [0, 4]],
        "requests": [mine | {"preemptions": 2}, other | {"preemptions": 0}], "moves": NO_MOVES,
        "steps": [{"step": 1, "ms": 2.5, "prefill": 90, "decode": 1, "preempted": 1}], "finished": [],
        "counters": dict.fromkeys(COUNTERS, 0),
    } | changes  # fmt: skip


@pytest.fixture
def live(open_page: Callable[..., Page]) -> Callable[..., Page]:
    """Opens the page with a stream whose events come when `send` says so."""
    return functools.partial(open_page, script=WRITTEN)


def send(page: Page, *engines: dict[str, Any], time: float = 1.0, **more: Any) -> None:
    text = events({"time": time, "engines": engines} | more)
    page.evaluate("text => stream.enqueue(new TextEncoder().encode(text))", text)


def colour_of_block(page: Page, number: int, x: int = 12) -> list[int]:
    """What the middle of a block's cell looks like; all cells are in the first line."""
    script = """([number, x]) => {
      const copy = new OffscreenCanvas(blocks.width, blocks.height).getContext("2d");
      copy.drawImage(blocks, 0, 0);
      return [...copy.getImageData(26 * number + x, 12, 1, 1).data];
    }"""
    return page.evaluate(script, [number, x])


def test_the_map_shows_whose_each_block_is(live: Callable[..., Page]) -> None:
    page = live()
    send(page, engine())
    words = "4 of 10 blocks of 16 tokens in use · 1 shared · 2 cached · 4 free · 4 more on the host"
    expect(page.locator("#blocks-text")).to_have_text(words)
    expect(page.locator("#used")).to_have_text("40 %")
    mine, cached, free = (colour_of_block(page, i) for i in (0, 4, 9))
    assert colour_of_block(page, 2) == mine and colour_of_block(page, 6) == free
    assert len({tuple(colour) for colour in (mine, cached, free)}) == 3
    send(page, engine(blocks=[[0, 1], [7, 9]], moves=NO_MOVES | {"out": 1, "blocks_out": [0]}), time=1.2)
    expect(page.locator("#blocks-text")).to_contain_text("now moving: 1 out, 0 in")
    expect(page.locator("#blocks-text")).to_contain_text("9 of 10")
    assert colour_of_block(page, 9) not in (mine, free)
    row = page.locator("#requests .row").first
    expect(row).to_have_text("1f2e3d4c5 out · preempted 2× · running")
    expect(page.locator("#requests .row").last).to_have_text("another key’s request0 of 7 read · waiting")
    expect(page.locator("#requests .row").last).to_be_disabled()
    expect(page.locator("#steps-text")).to_contain_text("Step 1: 1 decoding, 90 prompt tokens, 1 preempted, 2.5 ms")


def lit(page: Page) -> float:
    """The share of the map's cells that are not the colour of a free block."""
    script = """() => {
      const copy = new OffscreenCanvas(blocks.width, blocks.height).getContext("2d");
      copy.drawImage(blocks, 0, 0);
      const { data } = copy.getImageData(0, 0, blocks.width, blocks.height);
      const ink = document.querySelector("[data-ink=free]");
      const free = getComputedStyle(ink).backgroundColor.match(/\\d+/g).map(Number);
      let [all, others] = [0, 0];
      for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3] < 255) continue;
        all++;
        others += free.some((part, which) => Math.abs(part - data[i + which]) > 3);
      }
      return others / all;
    }"""
    return page.evaluate(script)


def test_the_map_of_a_large_pool_is_as_large_as_what_is_used(live: Callable[..., Page]) -> None:
    page = live()
    streams = [run for key in range(1, 21) for run in ([key, 7], [0, 190])]
    send(page, engine(num_blocks=4096, blocks=[*streams, [0, 156]]))
    expect(page.locator("#blocks-text")).to_contain_text("140 of 4,096 blocks")
    eventually(lambda: lit(page) > 0.8)
    high = page.locator("#blocks").evaluate("canvas => canvas.clientHeight")
    moved = [run for key in range(21, 41) for run in ([0, 190], [key, 7])]  # the same in other blocks
    send(page, engine(num_blocks=4096, blocks=[*moved, [0, 156]]), time=2)
    expect(page.locator("#used")).to_have_text("3 %")
    eventually(lambda: lit(page) > 0.8)
    assert page.locator("#blocks").evaluate("canvas => canvas.clientHeight") == high
    send(page, engine(num_blocks=8192, blocks=[[1, 3000], [0, 5192]]), time=3)
    expect(page.locator("#cells-text")).to_contain_text("Each cell stands for 4 blocks.")
    eventually(lambda: 0.3 < lit(page) < 0.45)


def test_your_own_request_has_its_first_words_as_its_name(live: Callable[..., Page]) -> None:
    page = live()
    page.route(CHAT, streams(chunk("Yes."), chunk("", "stop")))
    ask(page, "Is this request mine, or is it somebody else's, whom I do not know?")
    answered(page)
    mine = engine()["requests"][0] | {"id": "chatcmpl-1", "key": 5}
    end = {"id": "chatcmpl-1", "reason": "stop", "prompt": 9, "output": 3, "ttft": 0.1, "e2e": 0.2, "preemptions": 0}
    send(page, engine(requests=[mine, *engine()["requests"]], blocks=[[5, 5], [1, 5]], finished=[end]))
    words = "“Is this request mine, or is it somebody …”"
    expect(page.locator("#requests .row.mine .name")).to_have_text([words])
    expect(page.locator("#finished .row.mine .name")).to_have_text([words])
    text = page.evaluate("getComputedStyle(document.body).color.match(/\\d+/g).map(Number)")
    eventually(lambda: colour_of_block(page, 0, 1)[:3] == text)
    assert colour_of_block(page, 7, 1)[:3] != text


def test_nothing_empty_is_shown_and_plots_tell_their_values(live: Callable[..., Page]) -> None:
    page = live()
    send(page, engine(requests=[], steps=[], blocks=[[0, 10]]))
    expect(page.locator("#quiet")).to_be_visible()
    expect(page.locator(".card:visible")).to_have_count(2)
    for i in range(6):
        step = {"step": i, "ms": 2.5, "prefill": 0, "decode": 40 + i, "preempted": 0}
        counters = dict.fromkeys(COUNTERS, 0) | {"generation_tokens": 30 * i}
        send(page, engine(steps=[step], counters=counters), time=1 + i)
    expect(page.locator("#quiet")).to_be_hidden()
    expect(page.locator(".card:visible")).to_have_count(8)
    expect(page.locator("#throughput-text")).to_contain_text("30 generated")
    for plot, left, words in (
        ("steps", False, "Step 5: 45 decoding, 0 prompt tokens, 2.5 ms"),
        ("throughput", False, "0 s ago: 30 generated and 0 prompt tokens a second"),
        ("throughput", True, "5 s ago: 0 generated and 0 prompt tokens a second"),
    ):
        page.locator(f"#{plot}").scroll_into_view_if_needed()
        page.wait_for_timeout(100)  # because a tip hides when something scrolls
        box = page.locator(f"#{plot}").bounding_box()
        assert box
        page.locator(f"#{plot}").hover(position={"x": 60 if left else box["width"] - 3, "y": 30})
        expect(page.get_by_role("tooltip")).to_have_text(words)
    scale = """id => {
      const copy = new OffscreenCanvas(44, 400).getContext("2d");
      copy.drawImage(document.getElementById(id), 0, 0);
      return copy.getImageData(0, 0, 44, 400).data.some(Boolean);
    }"""
    assert page.evaluate(scale, "steps") and page.evaluate(scale, "latency")


def test_rates_are_of_the_last_second(live: Callable[..., Page]) -> None:
    page = live()
    for i in range(11):
        done = {"generation_tokens": 10 * i * i, "prompt_tokens": 20 * i}
        done |= {"prefix_query_tokens": 8, "prefix_hit_tokens": 2}
        end = {"id": None, "reason": "stop", "prompt": 1, "output": 1, "ttft": i / 10, "e2e": i / 5, "preemptions": 0}
        send(page, engine(counters=dict.fromkeys(COUNTERS, 0) | done, finished=[end]), time=i / 5)
    expect(page.locator("#throughput-text")).to_have_text("750 generated and 100 prompt tokens a second")
    expect(page.locator("#hits")).to_have_text("25 %")
    expect(page.locator("#drafts")).to_be_hidden()
    expect(page.locator("#latency-text")).to_have_text("Median of the last 11: first token 0.50 s, end 1.00 s")
    send(page, engine(counters=dict.fromkeys(COUNTERS, 0) | {"draft_tokens": 40, "accepted_tokens": 10}), time=2.2)
    expect(page.locator("#drafts")).to_have_text("25 %")
    send(page, engine(), time=3)  # the engine has begun anew
    expect(page.locator("#rate")).to_have_text("0")
    expect(page.locator("#latency-text")).to_have_text("No request has finished yet.")


def test_several_engines_have_tabs(live: Callable[..., Page]) -> None:
    page = live()
    send(page, engine(0), engine(1, blocks=[[0, 10]]))
    tabs = page.get_by_role("group", name="Which engine")
    expect(tabs.get_by_role("radio")).to_have_count(2)
    expect(page.locator("#used")).to_have_text("40 %")
    tabs.get_by_role("radio", name="Engine 0").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#used")).to_have_text("0 %")
    send(page, engine(0), engine(1, blocks=[[0, 5], [3, 5]]))
    expect(page.locator("#used")).to_have_text("50 %")
    send(page, engine(0))
    expect(tabs).to_be_hidden()
    expect(page.locator("#used")).to_have_text("40 %")


def test_the_stream_says_how_it_is(live: Callable[..., Page]) -> None:
    page, stream = live(), "#stream"
    send(page, engine())
    expect(page.locator(stream)).to_have_text("Live")
    send(page, trouble="engine 0 does not answer")
    expect(page.locator(stream)).to_have_text("Engine 0 does not answer.")
    expect(page.locator("#used")).to_have_text("40 %")
    page.evaluate("stream.close()")
    expect(page.locator(stream)).to_contain_text("The connection was lost. Next try in")
    eventually(lambda: page.evaluate("opened.length") == 2)
    send(page, engine(blocks=[[0, 10]]))
    expect(page.locator(stream)).to_have_text("Live")
    expect(page.locator("#used")).to_have_text("0 %")


def test_pauses_grow(open_page: Callable[..., Page], excused: list[str]) -> None:
    excused.append("ERR_FAILED")
    page = open_page({LIVE: lambda route: route.abort()})
    page.clock.install(time=0)
    page.clock.pause_at(1000)
    page.reload()
    for pause in ("0.50", "1.00", "2.00", "4.00", "8.00", "15.0", "15.0"):
        expect(page.locator("#stream")).to_have_text(f"The server cannot be reached. Next try in {pause} s.")
        page.clock.run_for(round(1000 * float(pause)))


def test_nothing_streams_while_the_page_is_hidden(live: Callable[..., Page]) -> None:
    page = live()
    send(page, engine())
    become = """hidden => {
      Object.defineProperty(document, "hidden", { get: () => hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(become, True)
    assert page.evaluate("opened.map((signal) => signal.aborted)") == [True]
    page.evaluate(become, False)
    assert page.evaluate("opened.map((signal) => signal.aborted)") == [True, False]
    send(page, engine())
    expect(page.locator("#stream")).to_have_text("Live")


# --- the engine itself -----------------------------------------------------------------------------------------------


def test_a_preempted_request_is_found_and_explained(page: Page, server: Server) -> None:
    expect(page.locator("#stream")).to_have_text("Live")
    expect(page.locator("#requests-text")).to_have_text("Nothing runs.")
    write = functools.partial(server.client().completions.create, model="demo", prompt="Once", max_tokens=400)
    with ThreadPoolExecutor() as pool:
        requests = [pool.submit(write, seed=i, extra_body={"ignore_eos": True}) for i in range(3)]
        expect(page.locator("#requests .row").first).to_contain_text("out · running")
        used = page.locator("#used").inner_text()
        expect(page.locator("#used")).not_to_have_text(used)
        assert [answer.result().usage.completion_tokens for answer in requests] == [400] * 3
    expect(page.locator("#requests-text")).to_have_text("Nothing runs.")
    expect(page.locator("#rate")).not_to_have_text("–")
    expect(page.locator("#latency-text")).to_contain_text("Median of the last")
    lost = page.locator("#finished .row").filter(has_text="preempted").first
    lost.focus()
    page.keyboard.press("Enter")
    story = page.get_by_role("dialog", name="Where the time went")
    expect(story.locator(".phases")).to_contain_text(re.compile("preempted by (swap|recompute) for [0-9a-f]{8}"))
    expect(story.locator(".phases")).to_contain_text(re.compile("aited for free blocks"))
    expect(story).to_contain_text("400 out · ended by length")
    expect(story.locator(".track .prefill")).to_have_count(1)
    seconds = story.locator(".track .part").evaluate_all(
        "parts => parts.reduce((sum, part) => sum + +part.style.getPropertyValue('--milliseconds'), 0) / 1000"
    )
    id = story.locator("#story-id").inner_text()
    assert seconds == pytest.approx(json.loads(server.get(f"/explain/{id}")[1])["prompts"][0]["seconds"], rel=0.01)
    page.keyboard.press("Escape")
    expect(lost).to_be_focused()


def test_a_request_is_explained_while_it_runs(open_page: Callable[..., Page]) -> None:
    page = open_page({CHAT: without_end})
    ask(page, "Tell me a story.")
    page.locator("#requests .row").click()
    expect(page.locator("#story")).to_contain_text("so far")
    page.locator("#stop").dispatch_event("click")
    expect(page.locator("#story")).to_contain_text("in all · ")


# --- for everybody ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1440, "dark"), (380, "light")])
def test_everybody_can_use_it(live: Callable[..., Page], width: int, scheme: str) -> None:
    page = live(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    end = {"id": "chatcmpl-2", "reason": "stop", "prompt": 120, "output": 32, "ttft": 0.012, "e2e": 0.4}
    send(page, engine(finished=[end | {"preemptions": 1}]), engine(1))
    page.get_by_text("Settings").click()
    page.get_by_label("how likely").check()
    ask(page, "Spell wonderful backwards.")
    answered(page)
    page.locator(".token").nth(2).hover()
    assert grave(page) == []
    page.get_by_role("button", name="Explain").click()
    expect(page.locator("#story .phases li").first).to_be_visible()
    assert grave(page) == []


def test_nothing_scrolls_sideways(live: Callable[..., Page]) -> None:
    page = live({CHAT: streams(chunk("long" * 200), chunk("", "stop"))})
    send(page, engine(), engine(1))
    page.get_by_text("Settings").click()
    ask(page, "long" * 200)
    answered(page)
    for width in (380, 700, 1000, 1440, 3840):
        page.set_viewport_size({"width": width, "height": 900})
        for box in ("document.documentElement", "conversation", "story"):
            assert page.evaluate(f"{box}.scrollWidth <= {box}.clientWidth"), (width, box)


def test_the_map_is_light_or_dark_as_the_page_is(live: Callable[..., Page]) -> None:
    page = live(color_scheme="light")
    send(page, engine(blocks=[[0, 10]]))
    expect(page.locator("#used")).to_have_text("0 %")
    light = colour_of_block(page, 0)
    page.emulate_media(color_scheme="dark")
    eventually(lambda: sum(colour_of_block(page, 0)[:3]) < sum(light[:3]) / 2)
