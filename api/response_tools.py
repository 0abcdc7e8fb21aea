"""The tools of OpenAI's Responses API: the functions that a model gets for them, and what a call of one comes to.

A custom tool takes a text where others take JSON; its function has that text as the argument `input`.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field
from typing import Any

from api.checks import ApiError, CheckContext, Refusal, ToolChoice, check_function, known_keys
from text.messages import call_name

TOOL_KEYS = {  # by type, the keys that count
    "function": ("type", "name", "description", "parameters", "strict"),
    "custom": ("type", "name", "description", "format"), "namespace": ("type", "name", "description", "tools"),
}  # fmt: skip
LEFT_OUT = ("image_generation", "local_shell", "tool_search", "web_search")  # the types that may be missing begin so
NO_MORE = {"description": None, "parameters": None, "strict": None}  # what a response says of a tool that does not


@dataclass
class Tools:
    """The tools of a request."""

    repeated: list[dict[str, Any]] = field(default_factory=list)  # by a response
    functions: list[dict[str, Any]] = field(default_factory=list)  # that the model gets, in the shape of a chat's
    called: dict[str, dict[str, str]] = field(default_factory=dict)  # by function: its tool's type, name and namespace

    def choice(self, choice: ToolChoice | None) -> str | dict[str, Any]:
        """A choice of tools as a response repeats it."""
        if choice is None or choice.names is None:
            return choice.mode if choice else "auto"
        tools = [self.called[name] for name in choice.names]
        return tools[0] if choice.single else {"type": "allowed_tools", "mode": choice.mode, "tools": tools}

    def add(self, tools: Any, context: CheckContext, space: str | None = None) -> None:
        """Add a list of tools, which may belong to a namespace. A ValueError says which of them is wrong."""
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError(f"tools is {reprlib.repr(tools)}; it must be a list of objects")
        for i, tool in enumerate(tools):
            kind = tool.get("type") or "function"
            if str(kind).startswith(LEFT_OUT):
                context.ignore(kind)
            elif kind == "namespace" and space is None and isinstance(tool.get("name"), str):
                known_keys(tool, TOOL_KEYS[kind], context, extended=True)
                self.add(tool.get("tools"), context, tool["name"])
            else:
                function = function_of(tool, kind, i, context)
                reference = {"type": kind, "name": function["name"]} | ({} if space is None else {"namespace": space})
                name = function["name"] = call_name(space, function["name"])
                check_function(function, i)
                if name not in self.called:
                    self.functions.append({"type": "function", "function": function})
                if self.called.setdefault(name, reference) != reference:
                    raise ApiError(400, f"two of the tools would both be {reprlib.repr(name)} to the model", "tools")


def response_tools(value: list[dict[str, Any]], context: CheckContext) -> Tools:
    tools = Tools()
    tools.add(value, context)
    typed = [tool | {"type": tool.get("type") or "function"} for tool in value]
    shown = [tool for tool in typed if not tool["type"].startswith(LEFT_OUT)]
    tools.repeated = [(NO_MORE if tool["type"] == "function" else {}) | tool for tool in shown]
    return tools


def function_of(tool: dict[str, Any], kind: Any, i: int, context: CheckContext) -> dict[str, Any]:
    """The function that stands for the i-th tool of a list, which is of this type."""
    if kind not in ("function", "custom"):
        words = f"tool {i} is of the type {reprlib.repr(kind)}; it must be function, custom, or a namespace with a name"
        raise Refusal(words, "unsupported_parameter")
    known_keys(tool, TOOL_KEYS[kind], context, extended=True)
    function = {key: tool[key] for key in TOOL_KEYS["function"][1:] if tool.get(key) is not None}
    check_function(function, i)
    if kind == "function":
        return function
    about = f"{tool.get('description') or ''}\nThe argument `input` is the text that this tool takes, as it is."
    form, text = tool.get("format") or {"type": "text"}, {"type": "string"}
    match [form.get(key) for key in ("type", "syntax", "definition")] if isinstance(form, dict) else []:
        case ["grammar", "regex", str(definition)]:
            text["pattern"] = f"^(?:{definition})$"
        case ["grammar", "lark", str(definition)]:  # it stands in JSON or tags, where no grammar of its own can hold
            context.ignore("format")
            about += f" It must follow this Lark grammar:\n{definition}"
        case _ if form != {"type": "text"}:
            words = "it must be text, or a grammar with a definition, whose syntax is lark or regex"
            raise ValueError(f"tool {i} has the format {reprlib.repr(form)}; {words}")
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return function | {"description": about.strip(), "parameters": schema, "strict": "pattern" in text}
