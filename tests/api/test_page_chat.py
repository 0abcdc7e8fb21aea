"""What the page keeps of chats, what can be done with them, and how answers look."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="it drives the browser")
pytest.importorskip("axe_playwright_python", reason="it finds what keeps people out")
from playwright.sync_api import Page, Route, expect

from browsing import (  # noqa: F401
    CHAT,
    MARKS,
    answered,
    ask,
    browser,
    chunk,
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
PROMPT = "Your message"
DENIED = "for (const name of ['localStorage', 'sessionStorage']) delete window[name], " + (
    "Object.defineProperty(window, name, { get() { throw new DOMException('denied', 'SecurityError'); } });"
)
FULL = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); };"


def prompt(page: Page) -> Any:
    return page.get_by_label(PROMPT, exact=True)


def says(text: str) -> dict[str, Any]:
    return {CHAT: streams(chunk(text), chunk("", "stop"))}


def delta(**parts: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": parts, "finish_reason": None, "logprobs": None}
    return {"id": "chatcmpl-1", "choices": [choice]}


# --- chats -----------------------------------------------------------------------------------------------------------


def test_a_reload_keeps_the_chat_and_the_list_of_chats(page: Page) -> None:
    expect(prompt(page)).to_be_focused()
    page.route(CHAT, surely)
    ask(page, "What is 1 + 1?")
    answered(page)
    expect(prompt(page)).to_be_focused()
    page.get_by_role("button", name="New chat").click()
    ask(page, "What is 2 + 2?")
    answered(page)
    page.reload()
    expect(answered(page)).to_have_text("4")
    page.get_by_text("Chats (2)").click()
    page.get_by_role("button", name=re.compile(r"^What is 1 \+ 1\?")).click()
    expect(answered(page)).to_have_text("2")
    page.get_by_role("button", name="Delete “What is 1 + 1?”").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#chats-list li")).to_have_count(1)
    page.get_by_role("button", name="Undo delete").click()
    expect(answered(page)).to_have_text("2")
    expect(page.locator("#chats-list li")).to_have_count(2)


def test_a_new_chat_is_undone(open_page: Callable[..., Page]) -> None:
    page = open_page(says("Yes."))
    ask(page, "Hi")
    answered(page)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(answered(page)).to_have_text("Yes.")
    expect(page.get_by_role("button", name="Undo")).to_be_hidden()


@pytest.mark.parametrize("script", [DENIED, FULL])
def test_the_page_works_where_nothing_is_stored(open_page: Callable[..., Page], script: str) -> None:
    page = open_page(says("Yes."), script=script)
    for count in (1, 2):
        ask(page, "Hi")
        expect(answered(page, count)).to_have_text("Yes.")
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("Chats (1)").click()
    page.get_by_role("button", name=re.compile("^Hi")).click()
    expect(answered(page, 2)).to_have_text("Yes.")


def test_what_is_stored_is_bounded_and_what_is_broken_is_left_out(open_page: Callable[..., Page]) -> None:
    page = open_page(says("Yes."))
    store = """(most) => {
      const turns = [{ parent: -1, role: "user", content: "Old".padEnd(most, ".") }];
      const chats = Array.from({ length: 80 }, (_, i) => ({ id: `c${i}`, changed: i, leaf: 0, turns }));
      chats.push(null, { id: 3 }, { id: "x", changed: 1, leaf: 0, turns: [{ parent: 0, role: "user", content: "a" }] });
      localStorage.setItem(`manta-chats:${location.pathname}`, JSON.stringify(chats));
    }"""
    for length, kept in ((3, 50), (50_000, 40)):
        page.evaluate(store, length)
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("#chats-summary")).to_have_text("Chats (80)")
        ask(page, "Hi")
        answered(page)
        expect(page.locator("#chats-summary")).to_have_text(f"Chats ({kept})")
        assert page.evaluate("Object.values(localStorage).join('').length") < 2_000_100


def test_escape_stops_an_answer_and_its_rate_is_told(open_page: Callable[..., Page]) -> None:
    page = open_page({CHAT: without_end})
    ask(page, "Tell me a story.")
    expect(page.locator(".assistant .text")).not_to_be_empty()
    page.keyboard.press("Escape")
    words = re.compile(r"^\d+ tokens? · [\d.,]+ tokens/s · first after .* · stopped")
    expect(page.locator(".assistant .actions")).to_have_text(words)
    expect(prompt(page)).to_be_focused()


def test_a_chat_and_an_answer_are_copied_and_saved(open_page: Callable[..., Page]) -> None:
    page = open_page(says("So *it* is."), permissions=["clipboard-read", "clipboard-write"])
    ask(page, "Hi")
    answered(page)
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "So *it* is."
    page.get_by_text("Chats (1)").click()
    page.get_by_role("button", name="Copy as Markdown").click()
    expect(page.get_by_role("button", name="Copied").last).to_be_visible()
    markdown = "## You\n\nHi\n\n## The model\n\nSo *it* is.\n"
    assert page.evaluate("navigator.clipboard.readText()") == markdown
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as Markdown").click()
    assert saved.value.suggested_filename == "chat.md" and saved.value.path().read_text() == markdown
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as JSON").click()
    turns = json.loads(saved.value.path().read_text())["turns"]
    assert [(turn["role"], turn["parent"]) for turn in turns] == [("user", -1), ("assistant", 0)]


# --- settings --------------------------------------------------------------------------------------------------------


def lists(*names: str) -> Callable[[Route], None]:
    """Answers that there are these models."""
    cards = [{"id": name, "root": "folder", "max_model_len": 1000} for name in names]
    return lambda route: route.fulfill(json={"object": "list", "data": cards})


def test_one_of_several_models_is_chosen(open_page: Callable[..., Page]) -> None:
    page = open_page(says("Yes.") | {"**/v1/models": lists("base", "products", "capitals")})
    choice = page.get_by_label("Model", exact=True)
    expect(choice.locator("option")).to_have_text(["base", "products", "capitals"])
    for count, name in enumerate(("base", "capitals"), 1):
        choice.select_option(name)
        with page.expect_request(CHAT) as request:
            ask(page, "Hi")
        assert request.value.post_data_json["model"] == name
        answered(page, count)
        expect(page.locator(".assistant .actions").last).to_contain_text(f" · {name}")
    assert not grave(page)
    page.reload()
    expect(choice).to_have_value("capitals")
    page.route("**/v1/models", lists("base", "products"))
    page.reload()
    expect(choice).to_have_value("base")


def test_there_is_no_choice_of_one_model(open_page: Callable[..., Page]) -> None:
    page = open_page(says("Yes."))
    expect(page.locator("#model")).to_contain_text("tokens of context")
    with page.expect_request(CHAT) as request:
        ask(page, "Hi")
    assert "model" not in request.value.post_data_json
    expect(page.get_by_label("Model", exact=True)).to_be_hidden()


def test_a_reload_keeps_the_settings(open_page: Callable[..., Page]) -> None:
    page = open_page(says("Yes."))
    page.get_by_text("Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("calculator").check()
    page.reload()
    expect(page.get_by_text("Settings (changed)")).to_be_visible()
    with page.expect_request(CHAT) as request:
        ask(page, "Hi")
    body = request.value.post_data_json
    assert "tools" in body and "logprobs" not in body
    assert body["temperature"] == 0.5 and body["messages"][0] == {"role": "system", "content": "Be brief."}
    page.get_by_text("Settings").click()
    page.get_by_label("System prompt").fill("")
    page.get_by_label("Temperature").fill("")
    page.get_by_label("calculator").uncheck()
    expect(page.locator("#settings-summary")).to_have_text("Settings")
    page.evaluate("localStorage.setItem(`manta-settings:${location.pathname}`, '{broken')")
    page.reload()
    expect(page.get_by_label("Temperature")).to_have_value("")


# --- versions --------------------------------------------------------------------------------------------------------


def test_edits_and_new_answers_are_versions(page: Page) -> None:
    page.route(CHAT, surely)
    ask(page, "What is 2 + 2?")
    answered(page)
    ask(page, "What is 4 + 4?")
    answered(page, 2)
    page.get_by_role("button", name="Edit").first.click()
    editor = page.get_by_label("Edit your message")
    expect(editor).to_be_focused()
    expect(editor).to_have_value("What is 2 + 2?")
    editor.fill("What is 3 + 3?")
    page.keyboard.press("Escape")
    expect(page.locator(".user .text").first).to_have_text("What is 2 + 2?")
    page.get_by_role("button", name="Edit").first.click()
    editor.fill("What is 3 + 3?")
    with page.expect_request(CHAT) as request:
        editor.press("Enter")
    assert [message["content"] for message in request.value.post_data_json["messages"]] == ["What is 3 + 3?"]
    expect(answered(page)).to_have_text("6")
    expect(page.locator(".user .versions")).to_have_text("‹2 / 2›")
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".assistant .text")).to_have_text(["4", "8"])
    page.get_by_role("button", name="Regenerate").first.click()
    expect(page.locator(".assistant .text")).to_have_text(["4"])
    expect(prompt(page)).to_be_focused()
    expect(page.locator(".assistant .versions")).to_have_text("‹2 / 2›")
    page.reload()
    expect(page.locator(".assistant .versions")).to_have_text("‹2 / 2›")
    page.locator(".assistant").get_by_role("button", name="Previous version").click()
    expect(page.locator(".assistant .text")).to_have_text(["4", "8"])


def test_an_edit_that_is_too_long_is_opened_again(page: Page, excused: list[str]) -> None:
    excused.append("400 (BAD REQUEST)")
    ask(page, "What is 1 + 1?")
    answered(page)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("word " * 3000)
    page.get_by_label("Edit your message").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The edited message was not sent. This model's maximum context")
    expect(page.get_by_label("Edit your message")).to_have_value(("word " * 3000).strip())
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator(".versions")).to_have_count(0)


def test_errors_name_the_label(page: Page, excused: list[str]) -> None:
    excused.append("400 (BAD REQUEST)")
    page.get_by_text("Settings").click()
    page.get_by_label("Top p").fill("3")
    ask(page, "Hi")
    answered(page)
    expect(page.locator(".actions .trouble")).to_have_text("Top p is 3: it must be a number from 0.0 to 1.0.")
    expect(page.get_by_label("Top p")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Top p").fill("0.5")
    expect(page.get_by_label("Top p")).not_to_have_attribute("aria-invalid", "true")


# --- Markdown, reasoning and tools -----------------------------------------------------------------------------------

MARKDOWN = r"""# Head
One **bold**, *italic*, `co*d*e`, snake_case_name, 2 * 3 * 4, [a link](https://a.example/x_(y)).
[bad](javascript:alert(1)) [worse](data:text/html,x) <script>document.title = "x"</script> <img src=x onerror=alert(1)>

- one
  - two
    ```python
    x = 1

    y = "<b>"
    ```
3. three

| a | b |
|---|--:|
| 1 | <i>2</i> |

> quote

~~~
open"""


def test_markdown_is_elements_and_nothing_in_it_runs(open_page: Callable[..., Page]) -> None:
    page = open_page(says(MARKDOWN), permissions=["clipboard-read", "clipboard-write"])
    ask(page, "**Hi** <b>you</b>")
    text = answered(page)
    expect(page.locator(".user .text")).to_have_text("**Hi** <b>you</b>")
    wanted = {
        "h3": ["Head"], "strong": ["bold"], "em": ["italic"], "p code": ["co*d*e"], "ul ul > li": [re.compile("^two")],
        "pre": ['x = 1\n\ny = "<b>"', "open"], "ol[start='3'] > li": ["three"], "td": ["1", "<i>2</i>"],
        "td.right": ["<i>2</i>"], "blockquote": ["quote"], "a": ["a link"], "script, img, b, i": [],
    }  # fmt: skip
    for selector, texts in wanted.items():
        expect(text.locator(selector)).to_have_text(texts)
    expect(text.locator("p").first).to_contain_text("snake_case_name, 2 * 3 * 4")
    expect(text.locator("p").first).to_contain_text("[bad](javascript:alert(1)) [worse](data:text/html,x) <script>")
    link = text.locator("a")
    expect(link).to_have_attribute("href", "https://a.example/x_(y)")
    expect(link).to_have_attribute("rel", re.compile("noopener"))
    text.get_by_role("button", name="Copy code").first.click()
    expect(text.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == 'x = 1\n\ny = "<b>"'


def test_markdown_that_grows_is_what_it_is_at_once_and_takes_no_time(page: Page) -> None:
    grown, whole, longest = page.evaluate(
        """async (text) => {
      const { render } = await import("./markdown.js");
      const [grown, whole, other] = [0, 1, 2].map(() => document.createElement("div"));
      for (let end = 0; end <= text.length; end++) render(grown, text.slice(0, end));
      render(whole, text);
      const hostile = ["*a ", "_a ", "**a ", "[", "[a](", ">", "|a", "- ", "`` ` ", "  - x\\n", "~~~ ", "https://a"];
      const times = [...hostile, "```" + " ".repeat(100000) + "`"].map((part) => {
        const begun = performance.now();
        render(other, part.repeat(part.length > 99 ? 1 : 10000) + "\\n|-|");
        return performance.now() - begun;
      });
      return [grown.outerHTML, whole.outerHTML, Math.max(...times)];
    }""",
        MARKDOWN,
    )
    assert grown == whole
    assert longest < 1500  # ms, for up to 90,000 characters; what looks on to the end each time takes tens of seconds


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_folded_away(open_page: Callable[..., Page], name: str) -> None:
    news = delta(**{name: "Let me **think**."}), delta(content="Yes."), chunk("", "stop")
    page = open_page({CHAT: streams(*news)})
    ask(page, "Hi")
    expect(answered(page)).to_have_text("Yes.")
    thought = page.locator("details.reasoning")
    expect(thought.locator("strong")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator("strong")).to_have_text("think")
    with page.expect_request(CHAT) as request:
        ask(page, "And?")
    assert request.value.post_data_json["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_the_demo_says_what_it_can_do_and_calls_the_calculator(page: Page) -> None:
    page.route(CHAT, surely)
    expect(page.locator("#about")).to_contain_text("This is the demo: a model of 2.6 million parameters")
    page.get_by_role("button", name="What is 12 * 34?").click()
    expect(page.locator(".call")).to_have_text("calculator: 12 × 34 = 408")
    expect(answered(page)).to_have_text("The answer is 408.")
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="My cat is Ada.").click()
    expect(answered(page)).to_have_text("OK.")
    expect(prompt(page)).to_have_value("What is my cat?")
    page.keyboard.press("Enter")
    expect(answered(page, 2)).to_have_text("Ada")


def test_a_tool_that_is_called_for_ever_ends(open_page: Callable[..., Page]) -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "rm", "arguments": "{}"}}
    requests: list[Any] = []

    def calls(route: Route) -> None:
        requests.append(route.request.post_data_json["messages"])
        streams(delta(tool_calls=[call]), chunk("", "tool_calls"))(route)

    page = open_page({CHAT: calls})
    ask(page, "Hi")
    answered(page)
    expect(page.locator(".actions .trouble")).to_have_text("The model called tools 8 times on end.")
    assert requests[-1][-1] == {"role": "tool", "tool_call_id": "call_1", "content": "error: no tool does rm({})"}
    assert len(requests) == 8


def test_other_models_show_no_examples_of_the_demo(open_page: Callable[..., Page]) -> None:
    models = {"data": [{"id": "demo", "root": "other", "max_model_len": 4096}]}
    page = open_page({"**/v1/models": lambda route: route.fulfill(json=models)})
    expect(page.locator("#model")).to_have_text("demo, 4,096 tokens of context")
    expect(page.locator(".chip")).to_have_count(0)


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (900, "dark"), (380, "light")])
def test_everybody_can_use_chats(open_page: Callable[..., Page], width: int, scheme: str) -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "rm", "arguments": "{}"}}
    thought = delta(reasoning="Hm."), delta(content=MARKDOWN), delta(tool_calls=[call]), chunk("", "length")
    view = {"width": width, "height": 900}
    page = open_page({CHAT: streams(*thought)}, viewport=view, color_scheme=scheme, reduced_motion="reduce")
    assert grave(page) == []
    ask(page, "Hi")
    answered(page)
    page.get_by_role("button", name="Regenerate").click()
    answered(page)
    page.locator("details").evaluate_all("all => all.forEach((one) => (one.open = true))")
    page.get_by_role("button", name="Edit").click()
    expect(page.locator(".versions")).to_be_visible()
    assert grave(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate("conversation.scrollWidth <= conversation.clientWidth")


# --- pictures ---------------------------------------------------------------------------------------------------------


GIVE = """([data, place, kind]) => {
  const transfer = new DataTransfer();
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  transfer.items.add(new File([bytes], "a.png", { type: "image/png" }));
  const more = { bubbles: true, cancelable: true };
  const event = kind === "drop" ? new DragEvent(kind, { dataTransfer: transfer, ...more })
    : new ClipboardEvent(kind, { clipboardData: transfer, ...more });
  document.getElementById(place).dispatchEvent(event);
}"""
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"


def test_a_picture_goes_with_the_message_and_comes_back_if_it_is_refused(page: Page, excused: list[str]) -> None:
    excused.append("400")
    error = {"message": "could not process image: messages[0].content[0]", "param": "messages", "code": None}
    page.route(CHAT, lambda route: route.fulfill(status=400, json={"error": error}))
    waiting, sent = page.locator("#pictures img"), page.locator(".message.user img")
    page.evaluate(GIVE, [PICTURE, "prompt", "paste"])
    expect(waiting).to_have_count(1)
    page.get_by_role("button", name="Remove picture 1").click()
    page.evaluate(GIVE, [PICTURE, "conversation", "drop"])
    expect(waiting).to_have_count(1)
    ask(page, "Look")
    expect(page.get_by_role("alert")).to_contain_text("Could not process image")
    expect(prompt(page)).to_have_value("Look")
    expect(waiting).to_have_count(1)
    file = {"name": "b.png", "mimeType": "image/png", "buffer": base64.b64decode(PICTURE)}
    page.locator("#file").set_input_files([file, file])
    expect(waiting).to_have_count(3)
    page.get_by_role("button", name="Remove picture 3").click()
    page.get_by_role("button", name="Remove picture 2").click()
    page.route(CHAT, says("A dot.")[CHAT])
    assert not grave(page)
    with page.expect_request(CHAT) as request:
        prompt(page).press("Enter")
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
    assert request.value.post_data_json["messages"][0]["content"] == [image, {"type": "text", "text": "Look"}]
    answered(page)
    expect(sent).to_have_count(1)
    page.reload()
    expect(page.get_by_text("A picture that is not stored")).to_be_visible()
