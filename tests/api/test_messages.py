"""What clients of Anthropic's Messages API send beside text: which of it is shown, told, acted upon, and refused."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from api.anthropic import CLIENT_TOOLS, SERVER_TOOLS
from scripted import CHAT, FACTS, ScriptedClient, client_of, error_of, refusal
from test_responses import COUNT, HI, TALK, post, prompt_of
from text.messages import BLOCKS

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
TEXT = {"type": "text", "text": "x"}
NOTES = {"type": "document", "title": "Notes", "context": "Of May.", "source": {"type": "text", "data": "It rains."}}
PARTS = {"type": "document", "source": {"type": "content", "content": [TEXT, TEXT | {"text": "y"}]}}
FOUND = {"type": "search_result", "title": "Rain", "source": "https://rain", "content": [TEXT]}
ADD = {"name": "add", "input_schema": {"type": "object"}}
EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}


@pytest.fixture
def http_client(engine: ScriptedClient) -> FlaskClient:
    return client_of(engine, FACTS | {"max_model_len": 1024})


def ignored(http_client: FlaskClient, route: str = TALK, **fields: Any) -> set[str]:
    """What the reply to a good request names as ignored."""
    response = post(http_client, route, **fields)
    assert response.status_code == 200, response.text
    return set(filter(None, response.headers.get("X-Manta-Ignored", "").split(", ")))


def result_of(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": list(content)}


def wrote(tool: str, content: Any) -> dict[str, Any]:
    """What a tool of Anthropic's servers wrote."""
    return {"type": f"{tool}_tool_result", "tool_use_id": "s", "content": content}


# --- what is shown as text --------------------------------------------------------------------------------------------


SHOWN = [
    (NOTES, "Notes\nOf May.\nIt rains."),
    (PARTS, "x\ny"),
    (FOUND, "Rain\nhttps://rain\nx"),
    ({"type": "tool_reference", "tool_name": "add"}, "add"),
    ({"type": "container_upload", "file_id": "file_5"}, "file_5"),
    ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": "ü"}}, 'web_search\n{"q": "ü"}'),
    ({"type": "mcp_tool_use", "id": "s", "server_name": "git", "name": "log", "input": {}}, "git\nlog\n{}"),
    (wrote("mcp", [TEXT]), "x"),
    (wrote("mcp", "plain"), "plain"),
    (wrote("web_search", [{"type": "web_search_result", "title": "a", "url": "b", "encrypted_content": "c"}]), "a\nb"),
    (wrote("web_search", {"type": "web_search_tool_result_error", "error_code": "unavailable"}), "unavailable"),
    (wrote("web_fetch", {"type": "web_fetch_result", "url": "b", "content": NOTES}), "b\nNotes\nOf May.\nIt rains."),
    (wrote("code_execution", {"type": "code_execution_result", "stdout": "1", "stderr": "2", "return_code": 0,
     "content": [{"type": "code_execution_output", "file_id": "f"}]}), "f\n1\n2"),
    (wrote("bash_code_execution", {"type": "bash_code_execution_result", "stdout": "1", "content": []}), "1"),
    (wrote("text_editor_code_execution",
     {"type": "text_editor_code_execution_str_replace_result", "lines": ["-a", "+b"], "old_start": 5}), "-a\n+b"),
    (wrote("tool_search", {"type": "tool_search_tool_search_result",
     "tool_references": [{"type": "tool_reference", "tool_name": "add"}]}), "add"),
    (wrote("advisor", {"type": "advisor_redacted_result", "encrypted_content": "x"}), ""),
    ({"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}, ""),
    ({"type": "mcp_tool_listing", "mcp_server_name": "git", "tools": [{"name": "log"}]}, ""),
    ({"type": "compaction", "content": None}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("block", "text"), SHOWN)
def test_what_others_tools_and_documents_hold_is_shown_as_text(
    http_client: FlaskClient, engine: ScriptedClient, block: dict[str, Any], text: str
) -> None:
    def prompt(*messages: tuple[str, Any]) -> list[int]:
        talk = [{"role": role, "content": content} for role, content in messages]
        assert post(http_client, TALK, messages=talk).status_code == 200
        return engine.added.pop()[0]

    after = f"{text}\nx" if text else "x"
    assert prompt(("user", [block])) == prompt_of(("user", text))
    assert prompt(("user", [block, TEXT])) == prompt_of(("user", after))
    assert prompt(("user", [result_of(block, TEXT)])) == prompt_of(("tool", after))
    talk = ("user", "Hi"), ("assistant", after), ("user", "So?")
    assert prompt(talk[0], ("assistant", [block, TEXT]), talk[2]) == prompt_of(*talk)


def test_all_kinds_that_are_shown_are_tried() -> None:
    handled = {"text", "tool_use", "tool_result", "thinking", "redacted_thinking"}
    assert {block["type"] for block, _ in SHOWN} == BLOCKS.keys() - handled


def test_the_summary_of_a_compaction_stands_for_all_before_it(http_client: FlaskClient, engine: ScriptedClient) -> None:
    summary = {"type": "compaction", "content": "They met.", "encrypted_content": "x"}
    called = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    talk = [
        *HI, {"role": "assistant", "content": [TEXT, called]}, {"role": "user", "content": [result_of(TEXT)]},
        {"role": "assistant", "content": [TEXT | {"text": "gone"}, summary, TEXT]},
        {"role": "user", "content": [{"type": "compaction", "content": None}, TEXT | {"text": "And?"}]},
    ]  # fmt: skip
    assert ignored(http_client, messages=talk, system="Be brief.") == {"messages.encrypted_content"}
    shown = prompt_of(("system", "Be brief."), ("user", "They met."), ("assistant", "x"), ("user", "And?"))
    assert engine.added.pop()[0] == shown
    talk[3]["content"] = [TEXT, summary]
    assert ignored(http_client, messages=talk) and engine.added[0][0] == prompt_of(("user", "They met.\nAnd?"))


def test_claude_codes_note_to_its_makers_is_left_out(http_client: FlaskClient, engine: ScriptedClient) -> None:
    note = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.1d9; cc_entrypoint=cli;"}
    named = {"system.x-anthropic-billing-header"}
    for rest, talk in (([TEXT, TEXT], [("system", "x\nx"), ("user", "Hi")]), ([], [("user", "Hi")])):
        assert ignored(http_client, system=[note, *rest]) == named
        assert engine.added.pop()[0] == prompt_of(*talk)
        counted = post(http_client, COUNT, system=[note, *rest])
        assert counted.json == {"input_tokens": len(prompt_of(*talk))}


# --- what changes nothing ---------------------------------------------------------------------------------------------


def test_what_changes_nothing_is_accepted_and_named(http_client: FlaskClient, engine: ScriptedClient) -> None:
    plain = post(http_client, TALK).json["content"]
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "compact_20260112", "trigger": None}]
    fields = {
        "context_management": {"edits": edits}, "betas": ["a"], "speed": "fast", "fallbacks": [{"model": "x"}],
        "compaction": {}, "safeguards": [{"type": "dangerous_tool_use"}], "mcp_servers": [], "billing_policy": {},
    }  # fmt: skip
    for route in (TALK, COUNT):
        all_fields = fields | {"output_config": {"task_budget": {"type": "tokens", "total": 5}}}
        assert ignored(http_client, route, **all_fields) == {*fields, "output_config.task_budget"}
    binding = {"block_binding": {"prefix_mismatch_behavior": "drop_block"}}
    for thinking, named in (
        ({"type": "adaptive", "display": "updates"}, set()), ({"type": "between_tools"}, set()),
        ({"type": "adaptive", **binding}, {"thinking.block_binding"}),
    ):  # fmt: skip
        assert ignored(http_client, thinking=thinking) == named
    body = {"messages": HI, "max_tokens": 9}
    answer = http_client.post(f"{TALK}?beta=true", json=body, headers={"anthropic-beta": "a"})
    assert answer.json["content"] == plain and len({str(params) for _, params, _ in engine.added}) == 1


def test_keys_that_clients_extend_by_the_month_are_ignored_and_named(http_client: FlaskClient) -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    talk = [
        {"role": "user", "content": [TEXT | marked], "id": "msg_5"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "t", "name": "add", "input": {}, "caller": {"type": "direct"}},
        ]},
        {"role": "user", "content": [result_of(FOUND | {"citations": {"enabled": True}}) | {"toolset_name": "x"}]},
    ]  # fmt: skip
    named = ["id", "caller", "toolset_name", "citations"]
    for route in (TALK, COUNT):
        assert ignored(http_client, route, messages=talk) == {f"messages.{name}" for name in named}
        assert ignored(http_client, route, system=[TEXT | marked | {"new": None, "old": 1}]) == {"system.old"}
    keys = ("defer_loading", "input_examples", "allowed_callers", "annotations", "new")
    names = ignored(http_client, tools=[ADD | {key: [] for key in keys}], tool_choice={"type": "none"})
    assert names == {f"tools.{key}" for key in keys}


HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SHORT = {"cache_control": {"type": "ephemeral", "ttl": "5m", "scope": "global"}}


@pytest.mark.parametrize(
    ("fields", "retention"),
    [
        ({}, 0),
        ({"cache_control": None}, 0),
        (SHORT, 300),
        (HOUR, 3600),
        ({"system": [TEXT | SHORT, TEXT | HOUR]}, 3600),
        ({"messages": [{"role": "user", "content": [TEXT | {"cache_control": {"type": "ephemeral"}}]}]}, 300),
        ({"messages": [{"role": "user", "content": [result_of(TEXT | HOUR)]}]}, 3600),
        ({"tools": [ADD]}, 300),
        ({"tools": [ADD | HOUR]}, 3600),
    ],
    ids=str,
)
def test_a_mark_says_for_how_long_a_prefix_is_kept(
    http_client: FlaskClient, engine: ScriptedClient, fields: dict[str, Any], retention: int
) -> None:
    assert not any(name.endswith("cache_control") for name in ignored(http_client, **fields))
    assert engine.retentions == [retention]


@pytest.mark.parametrize("mark", [{"ttl": "1d"}, {"ttl": 5}, {"type": "eternal"}, {"kind": 1}, []], ids=str)
def test_other_marks_are_refused(http_client: FlaskClient, mark: Any) -> None:
    for fields in ({"cache_control": mark}, {"system": [TEXT | {"cache_control": mark}]}):
        for route in (TALK, COUNT):
            error_of(post(http_client, route, **fields), 400, "invalid_request_error")


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVER_TOOLS)
def test_tools_of_anthropics_servers_are_left_out(http_client: FlaskClient, engine: ScriptedClient, name: str) -> None:
    theirs = {"type": f"{name}_20990101", "name": name, "max_uses": 5}
    for tools, kept in (([theirs], []), ([theirs, ADD | {"strict": True}], [ADD])):
        assert ignored(http_client, tools=tools) == {f"tools.{name}_20990101"}
        shown = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}} for _ in kept]
        assert engine.added.pop()[0] == prompt_of(("user", "Hi"), tools=shown or None)
        chosen = post(http_client, TALK, tools=tools, tool_choice={"type": "tool", "name": name})
        assert f"tool_choice names '{name}'" in error_of(chosen, 400, "invalid_request_error")
    assert "it needs tools" in error_of(post(http_client, TALK, tools=[theirs], tool_choice={"type": "any"}), 400,
                                        "invalid_request_error")  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "commands", "keys"),
    [
        ("text_editor_20250728", "view create str_replace insert", ["insert_text"]),
        ("text_editor_20990101", "view create str_replace insert", ["insert_text"]),
        ("text_editor_20250124", "view create str_replace insert undo_edit", []),
        ("memory_20250818", "view create str_replace insert delete rename", ["insert_text", "old_path", "new_path"]),
    ],
)
def test_the_schema_of_published_tools_is_told(
    http_client: FlaskClient, engine: ScriptedClient, kind: str, commands: str, keys: list[str]
) -> None:
    assert ignored(http_client, tools=[{"type": kind, "name": "edit", "max_characters": 5}]) == {"tools.max_characters"}
    tool_row = CLIENT_TOOLS.get(kind) or CLIENT_TOOLS[kind[:-9]]
    properties = tool_row["parameters"]["properties"]
    assert properties["command"]["enum"] == commands.split()
    both = ["path", "view_range", "file_text", "old_str", "new_str", "insert_line"]
    assert list(properties) == ["command", *both, *keys]
    shown = [{"type": "function", "function": {"name": "edit", **tool_row}}]
    assert engine.added[0][0] == prompt_of(("user", "Hi"), tools=shown)


def test_an_answer_calls_a_published_tool(http_client: FlaskClient, engine: ScriptedClient) -> None:
    tools = [{"type": "bash_20250124", "name": "bash"}, EDITOR | {"description": "Mine."}]
    engine.says = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    answer = post(http_client, TALK, tools=tools, tool_choice={"type": "tool", "name": "bash"}, max_tokens=500).json
    (block,) = answer["content"]
    assert (block["name"], block["input"], answer["stop_reason"]) == ("bash", {"command": "ls"}, "tool_use")


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_max_tokens_are_cut_to_what_is_left_of_the_context(engine: ScriptedClient) -> None:
    http_client, room = client_of(engine), FACTS["max_model_len"] - len(prompt_of(("user", "Hi")))
    for limit, kept in ((room - 1, room - 1), (room, room), (room + 1, room), (2**31 - 1, room)):
        assert post(http_client, TALK, max_tokens=limit).json["usage"]["output_tokens"] == kept
    body = {"messages": HI, "max_tokens": 2**31 - 1}
    assert "context" in refusal(http_client.post(CHAT, json=body))["message"]
    answer = client_of(engine, clamp_max_tokens=True).post(CHAT, json=body).json
    assert answer["usage"]["completion_tokens"] == room and answer["choices"][0]["finish_reason"] == "length"
    for words in ("a " * 100, "x" * 100_000):  # which leaves nothing
        long = post(http_client, TALK, messages=[{"role": "user", "content": words}])
        assert "prompt is too long" in error_of(long, 400, "invalid_request_error")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([TEXT, IMAGE], "could not process image: message 0: content[1] must be"),
        ([result_of(TEXT), result_of(TEXT, IMAGE)], "could not process image: message 0: content[1].content[1] must"),
        ([PDF], "could not process pdf: message 0: content[0].source must be of the type text or content"),
        ([PDF | {"source": {"type": "url", "url": "https://x"}}], "could not process pdf"),
        ([PDF | {"source": {"type": []}}], "could not process pdf"),
        ([PDF | {"source": {"type": "content", "content": [TEXT, IMAGE]}}], "content[0].source.content[1] must be"),
        ([PDF | {"source": {"type": "text"}}], "content[0].source.data must be"),
        ([PDF | {"source": "x"}], "source must be an object"),
        ([FOUND | {"content": "x"}], "content must be a list"),
        ([result_of({"type": "tool_reference"})], "tool_name must be a string"),
        ([result_of({"type": "search_result"})], "title must be a string"),
        ([result_of({"type": "tool_use", "id": "t", "name": "x"})], "could not process tool_use"),
        ([result_of({"type": "thinking", "thinking": "x"})], "could not process thinking"),
        ([result_of(result_of(TEXT))], "could not process tool_result"),
        ([result_of(5)], "content[0].content[0] must be"),
        ([result_of(None)], "content[0].content[0] must be"),
        ([result_of({"type": ["x_result"]})], "content[0].content[0] must be"),
        ([{"type": "tool_result", "tool_use_id": "t", "content": 5}], "content[0].content must be"),
        ([wrote("web_fetch", {"type": "web_fetch_result", "content": PDF})], "could not process pdf"),
        ([wrote("web_search", {"type": "picture"})], "could not process picture"),
        ([wrote("web_search", {"type": "web_search_result", "title": 5})], "content.title must be"),
        ([wrote("unheard_of", "x")], "could not process unheard_of_tool_result"),
        ([{"type": "x" * 10_000}], "could not process xxx"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused_with_its_place(
    http_client: FlaskClient, engine: ScriptedClient, content: list[Any], words: str
) -> None:
    """Claude Code takes an image out of its history where it reads that one could not be processed."""
    filler = [{"role": "assistant", "content": [TEXT | {"text": "x" * 999}] * 5}] * 9
    for route in (TALK, COUNT):
        response = post(http_client, route, messages=[{"role": "user", "content": content}, *filler])
        message = error_of(response, 400, "invalid_request_error")
        assert message.startswith("messages is ") and words in message, message
    assert not engine.added and post(http_client, TALK).status_code == 200


def test_keys_that_are_not_read_may_hold_anything(http_client: FlaskClient) -> None:
    odd: list[Any] = [{"type": []}, {}, 5, [IMAGE], None]
    blocks = [TEXT | {"content": odd, "input": odd, "source": IMAGE}, NOTES | {"content": odd}]
    assert ignored(http_client, messages=[{"role": "user", "content": blocks}])
    used = {"type": "tool_use", "id": "t", "name": "x", "input": {}, "content": odd, "\x00": 1, "a, b": 1}
    talk = [*HI, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result_of(TEXT)]}]
    assert ignored(http_client, messages=talk) == {"messages.content", "messages.?"}


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "computer_20250124", "name": "computer"}, "of the type 'computer_20250124'"),
        ({"type": "mcp_toolset", "mcp_server_name": "x"}, "of the type 'mcp_toolset'"),
        ({"type": "function", "name": "x", "parameters": {}}, "of the type 'function'"),
        ({"type": ["bash"], "name": "x"}, "of the type"), ({"type": "bash_20250124"}, "tool 0 has the name None"),
        ({"name": "x", "parameters": {}}, "no input_schema"), ({"name": "x", "input_schema": None}, "no input_schema"),
        (ADD | {"input_schema": 5}, "parameters 5"), (EDITOR | {"strict": 5}, "strict 5"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_told_are_refused(http_client: FlaskClient, tool: dict[str, Any], words: str) -> None:
    for route in (TALK, COUNT):
        assert words in error_of(post(http_client, route, tools=[tool]), 400, "invalid_request_error")
