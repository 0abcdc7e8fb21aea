"""Chat templates: Jinja as transformers 5 sets it up, with bounds on what a template may write and how long it may run.

Jinja's sandbox keeps a template from Python's insides. Every turn of a loop and every call looks at the clock, and now
and then lets other requests of the process run, because a client's messages decide how many there are. What else a
template computes has no bound: templates are the operator's, of the model's folder or of clients that he trusts.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SOURCE = 2**18  # characters of a template, which compile in some 3 s; real ones have some thousands
MAX_SECONDS = 10.0  # that a template may run
SLICE = 0.01  # seconds that a template runs before others may


class TimedContext(Context):
    """The variables of one run of a template, and the time that it has left."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.deadline = time.monotonic() + MAX_SECONDS
        self.wake = min(self.deadline, time.monotonic() + SLICE)

    def tick(self) -> None:
        """Look at the clock, and let other greenlets run now and then; their time does not count."""
        if (now := time.monotonic()) > self.wake:
            if now > self.deadline:
                raise TemplateError(f"it took more than {MAX_SECONDS} seconds")
            time.sleep(0)
            rested = time.monotonic()
            self.deadline += rested - now
            self.wake = min(self.deadline, rested + SLICE)


class GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; for a server it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as transformers 5 sets it up for chat templates; each may write `max_chars`."""

    context_class = TimedContext
    intercepted_binops = frozenset({"*", "**"})  # not computed while a template is compiled

    def __init__(self, max_chars: int):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols],
            optimized=False,  # or filters of constants would run while a template is compiled
        )  # fmt: skip
        self.max_chars = max_chars
        now = datetime.datetime.now
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda format: now().strftime(format)}
        self.filters["tojson"] = _tojson

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """A template's tree, in which each turn of a loop begins with a call, and so with a look at the clock."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            turn = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(turn).set_lineno(loop.lineno))
        return tree

    def turn(self) -> None:
        """A turn of a loop begins."""

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a function or a method."""
        assert isinstance(context, TimedContext)
        context.tick()
        return super().call(context, function, *args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    value = [*value] if isinstance(value, Iterator) else value  # as `map` and `select` make one
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# --- what a template expects ------------------------------------------------------------------------------------------


class ChatTemplate(NamedTuple):
    """A compiled chat template, and the form that it expects messages in."""

    template: Template
    source: str
    takes_parts: bool  # a message's content may be a list of parts
    takes_text: bool  # it may be a string
    knows_developer: bool  # the role `developer` has a meaning of its own
    roles: frozenset[str]  # with which it compares that of a message
    shows_one_call: bool  # the first of a message's calls alone


PART_FILTERS = ("map", "reject", "rejectattr", "select", "selectattr")  # they take a list
ALIASES = 4  # times that one variable is set to another; real templates have one or two
TEXT_TESTS = ("iterable", "mapping", "sequence", "string")  # a template with one of these tells texts from lists


def names_of(tree: nodes.Template, key: str) -> set[str]:
    """The variables that hold what a message has under a key: set to it, or parameters that get it."""
    macros = {macro.name: [arg.name for arg in macro.args] for macro in tree.find_all(nodes.Macro)}
    pairs = [(a.target.name, a.node) for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name)]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and (parameters := macros.get(call.node.name)):
            pairs += [*zip(parameters, call.args, strict=False), *((arg.key, arg.value) for arg in call.kwargs)]
    names: set[str] = set()
    for _ in range(ALIASES):
        names |= {name for name, value in pairs if is_value(value, key, names)}
    return names


def is_value(node: nodes.Node | None, key: Any, names: set[str]) -> bool:
    """Whether an expression is `message.key`, however it is spelled, or one of the variables `names`."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == key
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == key


def read_template(environment: TemplateEnvironment, source: str) -> ChatTemplate:
    """Compile a chat template and find out what it expects; a ValueError if it is none, or too large.

    It takes parts if it goes through the content of messages, as vLLM's `--chat-template-content-format auto` has it.
    vLLM then makes parts of every text; here a template that looks which of them it was given is given either.
    """
    if len(source) > MAX_SOURCE:
        raise ValueError(f"it has {len(source)} characters; at most {MAX_SOURCE} are allowed")
    try:
        template, tree = environment.from_string(source), environment.parse(source)
    except Exception as error:  # deep nesting ends in a RecursionError, a SyntaxError or a MemoryError
        raise ValueError(str(error) or type(error).__name__) from None
    contents, calls = names_of(tree, "content"), names_of(tree, "tool_calls")
    walked: list[nodes.Node] = [loop.iter for loop in tree.find_all(nodes.For)]
    walked += [used for used in tree.find_all(nodes.Filter) if used.name in PART_FILTERS]
    takes_parts = any(is_value(unfiltered(node), "content", contents) for node in walked)
    asks_kind = any(is_value(t.node, "content", contents) for t in tree.find_all(nodes.Test) if t.name in TEXT_TESTS)
    developer = any(constant.value == "developer" for constant in tree.find_all(nodes.Const))
    firsts: list[nodes.Node | None] = [item.node for item in tree.find_all(nodes.Getitem) if is_value(item, 0, set())]
    firsts += [used.node for used in tree.find_all(nodes.Filter) if used.name == "first"]
    one, all_ = (any(is_value(unfiltered(n), "tool_calls", calls) for n in group) for group in (firsts, walked))
    names = names_of(tree, "role")
    compared = [test for test in tree.find_all(nodes.Compare) if is_value(test.expr, "role", names)]
    constants = (const.value for test in compared for operand in test.ops for const in operand.find_all(nodes.Const))
    roles = frozenset(value for value in constants if isinstance(value, str))
    return ChatTemplate(template, source, takes_parts, not takes_parts or asks_kind, developer, roles, one and not all_)


def unfiltered(node: nodes.Node | None) -> nodes.Node | None:
    """An expression without its filters."""
    while isinstance(node, nodes.Filter):
        node = node.node
    return node


def run_template(template: Template, variables: dict[str, Any]) -> str:
    """The text that a template writes; a ValueError if it fails, refuses its variables, or goes beyond a limit."""
    assert isinstance(template.environment, TemplateEnvironment)
    most, pieces, chars = template.environment.max_chars, [], 0
    try:
        context = template.new_context(variables)
        assert isinstance(context, TimedContext)
        for piece in template.root_render_func(context):
            context.tick()
            pieces.append(piece)
            chars += len(piece)
            if chars > most:
                raise TemplateError(f"it wrote more than max_template_chars, {most} characters")
    except Exception as error:  # a template is a program: str + None in it is a TypeError, and so on
        raise ValueError(f"chat template: {error}") from None
    return "".join(pieces)
