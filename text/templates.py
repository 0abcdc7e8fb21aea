"""Chat templates: Jinja as transformers 5 sets it up, with bounds on what a template may cost.

A template comes with the model, from whoever made it, and it is a program: it has loops, macros and a `*` for strings.
Jinja's sandbox keeps it from Python's insides. The code here bounds its time and memory:

    Time            Every turn of a loop, every call, filter and comparison looks at the clock first.
    Text and lists  Where an operation can make much more than it was given, its size is estimated first. The size of
                    everything that was made is counted.
    Compilation     computes nothing that can grow, and the source has a limit.

So between two looks at the clock lies one operation on no more than the limits allow. A process that is killed when it
takes too long would need no bounds, but one greedy template would make all other conversations wait for it.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from types import GeneratorType
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SOURCE = 2**18  # characters of a template, which compile in some 3 s; real ones have some thousands
MAX_ITEMS = 2**20  # of a list
MAX_LISTED = 2**24  # characters of a list, with all that is in it
TOO_MUCH = 2**60
MAX_BITS = 2**14  # of a whole number; more than Python would print
REWRITES = 16  # times that a template may make as much text as it may write
JINJAS_OWN = ("_loop_vars", "_block_vars")  # keywords that Jinja adds to calls
SLICE = 0.01  # seconds that a template runs before others may
LEFT_OUT = ("lipsum", "pprint", "striptags", "urlize", "wordwrap", "xmlattr")  # for web pages, and hard to bound
UNSAFE_METHODS = {"expandtabs", "to_bytes", "translate"}
TEXT = (str, bytes)
CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)


class LimitError(TemplateError):
    """A template wants more than it may have."""


# --- what an operation is about to make ------------------------------------------------------------------------------


def text_size(value: Any, indent: int = 0, between: int = 2) -> int:
    """About how many characters a value has as text; `TOO_MUCH` for a list of more than `MAX_LISTED`.

    A list may stand in another many times, so a few lists can have a text that no memory holds. `indent` characters
    stand in front of an item for each list around it, and `between` of them between two items.
    """
    if isinstance(value, TEXT):
        return len(value)
    total, rest = 0, [(value, 0)]
    while rest:
        item, depth = rest.pop()
        if isinstance(item, Namespace):
            item = item._Namespace__attrs
        if isinstance(item, CONTAINERS):
            total += len(item) * (16 + between + (depth + 1) * indent)
            if total <= MAX_LISTED:
                rest += [(each, depth + 1) for each in item]
                rest += [(each, depth + 1) for each in item.values()] if isinstance(item, dict) else []
        else:
            total += len(item) if isinstance(item, str) else item.bit_length() if isinstance(item, int) else 8
        if total > MAX_LISTED:
            return TOO_MUCH
    return total


def _listed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with a list for each generator, which measuring would use up."""
    return tuple([list(arg) if isinstance(arg, GeneratorType) else arg for arg in args])


def _joined(values: Any, separator: Any = "", attribute: Any = None) -> int:
    return text_size(values, between=2 + text_size(separator))


def _replaced(text: Any, old: Any, new: Any, count: Any = None) -> int:
    size, longer = text_size(text), text_size(new)
    if isinstance(text, str) and isinstance(old, str) and size * longer > 2**16:  # worth a pass over the text
        return size + text.count(old) * longer
    return size + size * longer


def _padded(text: Any, width: Any = 80, fill: Any = None) -> int:
    return max(text_size(text), int(width))


def _indented(text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> int:
    size = text_size(text)
    lines = text.count("\n") + 1 if isinstance(text, str) else size
    return size + lines * (width if isinstance(width, int) else len(width))


def _formatted(pattern: Any, *values: Any, **named: Any) -> int:
    """Of `%` and of `str.format`; both repeat a value as often as they name it, and take widths."""
    pattern = str(pattern)
    widths = re.search(r"\*|\d{4}|:[^{}:]*\{", pattern)
    return TOO_MUCH if widths else len(pattern) + len(re.findall("[%{]", pattern)) * text_size((values, named))


def _as_json(value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None,
             sort_keys: Any = False) -> int:  # fmt: skip
    per_level = indent if isinstance(indent, int) else len(indent or "")
    return text_size(value, indent=per_level, between=2 + text_size(separators or ()))


def _summed(values: Any, attribute: Any = None, start: Any = 0) -> int:
    if isinstance(start, list | tuple):
        raise LimitError("sum adds numbers here, not lists")
    return 0


def _sought(text: Any, part: Any = None, *rest: Any) -> int:
    return len(text) * len(part or "") // 256  # Python seeks from the right by trying each place


# By the name of a filter or of a method of text: how many characters or items it makes, or takes the time of.
SIZES: dict[str, Callable[..., int]] = {
    "batch": lambda values, count, fill=None: int(count),
    "center": _padded, "ljust": _padded, "rjust": _padded, "zfill": _padded,
    "format": _formatted, "format_map": _formatted, "indent": _indented, "replace": _replaced,
    "round": lambda number, precision=0, method="common": abs(precision) * 2**16,
    "rfind": _sought, "rindex": _sought, "rpartition": _sought, "rsplit": _sought,
    "sum": _summed, "tojson": _as_json,
}  # fmt: skip
TEXT_FILTERS = (
    "capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "title", "trim", "truncate", "upper",
    "urlencode", "wordcount",
)  # fmt: skip
FILTER_SIZES = SIZES | {"join": _joined} | dict.fromkeys(TEXT_FILTERS, lambda value, *_, **__: text_size(value))
METHOD_SIZES = SIZES | {"join": lambda separator, values: _joined(values, separator)}


# --- the bounds ------------------------------------------------------------------------------------------------------


class BoundedContext(Context):
    """The variables of one run of a template, and the time that it has left."""

    environment: TemplateEnvironment

    def __init__(self, environment: TemplateEnvironment, *args: Any, **kwargs: Any):
        super().__init__(environment, *args, **kwargs)
        self.deadline = time.monotonic() + environment.max_seconds
        self.wake = min(self.deadline, time.monotonic() + SLICE)
        self.left = REWRITES * environment.max_chars  # that it may make; an item of a list counts as eight

    def tick(self) -> None:
        """Look at the clock, and let other greenlets run now and then; their time does not count."""
        if (now := time.monotonic()) > self.wake:
            if now > self.deadline:
                raise LimitError(f"it took more than {self.environment.max_seconds} seconds")
            time.sleep(0)
            rested = time.monotonic()
            self.deadline += rested - now
            self.wake = min(self.deadline, rested + SLICE)

    def bounded(self, value: Any) -> Any:
        """Count what an operation has made, and refuse it where it is too much, alone or with all before it."""
        if isinstance(value, TEXT):
            self.left -= len(value)
        elif isinstance(value, CONTAINERS):
            self.left -= 8 * len(value)
            self.environment.allow(len(value), text=False)
        elif isinstance(value, GeneratorType):
            return self._ticking(value)
        if self.left < 0:
            made = REWRITES * self.environment.max_chars
            raise LimitError(f"it made more than {made} characters, {REWRITES} times max_template_chars")
        return value

    def _ticking(self, values: Iterator[Any]) -> Iterator[Any]:
        for i, value in enumerate(values):
            self.tick()
            self.environment.allow(i + 1, text=False)
            yield self.bounded(value)

    def printable(self, value: Any) -> Any:
        """The value of an expression that is printed."""
        if not isinstance(value, str):
            self.environment.allow(text_size(value))
        return self.bounded(value)

    def joined(self, values: tuple[Any, ...]) -> Any:
        """`a ~ b ~ …`."""
        self.environment.allow(sum(map(text_size, values)))
        return self.bounded(markup_join(values) if self.eval_ctx.autoescape else str_join(values))


def takes_time(node: nodes.Node) -> bool:
    """Whether this is a comparison, but for one with a constant, which is short, and tests like `is string`."""
    if isinstance(node, nodes.Compare):
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        sought = any(operand.op in ("in", "notin") for operand in node.ops)
        return sought or not any(isinstance(operand, nodes.Const) for operand in operands)
    return isinstance(node, nodes.Test) and bool(node.args)


class BoundedGenerator(CodeGenerator):
    """Writes a template's Python with calls of its `BoundedContext`. `tick()` returns None, so `tick() or x` is `x`."""

    loop_test: nodes.Node | None = None
    loop_body: list[nodes.Node] | None = None

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        self.loop_test, self.loop_body = node.test, node.body
        super().visit_For(node, frame)

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        """The statements of a block. Only those of a loop need a tick: others run once, or are called, which ticks."""
        if nodes is self.loop_body:
            self.writeline("context.tick()")
        super().blockvisit(nodes, frame)

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Any node; one that takes time in proportion to its operands, and has no other hook, gets one here."""
        if isinstance(node, nodes.Add) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
            self.write("context.bounded(")
        elif node is self.loop_test or takes_time(node):
            self.write("(context.tick() or ")
        else:
            return super().visit(node, *args, **kwargs)
        super().visit(node, *args, **kwargs)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("context.joined((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def _make_finalize(self) -> Any:  # Jinja's hook around every expression that is printed
        return self._FinalizeInfo(self._default_finalize, "context.printable(")


class GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; for a server it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as transformers 5 sets it up for chat templates, with every operation bounded.

    No text that a template makes may have more than `max_chars`, nor may all that it writes.
    """

    code_generator_class = BoundedGenerator
    context_class = BoundedContext
    intercepted_binops = frozenset({"*", "**", "%", "/", "//"})  # go to `call_binop`, and are not folded, either

    def __init__(self, max_chars: int, max_seconds: float):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], optimized=False
        )
        self.max_chars, self.max_seconds = max_chars, max_seconds
        del self.globals["lipsum"]
        now = datetime.datetime.now
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda format: now().strftime(format)}
        filters = self.filters | {"tojson": _tojson}
        self.filters = {name: _bounded_filter(name, filters[name]) for name in filters if name not in LEFT_OUT}

    def allow(self, size: int, text: bool = True) -> None:
        """Refuse to make so many characters of text, or so many items of a list."""
        if text and size > self.max_chars:
            raise LimitError(f"it wrote more than max_template_chars, {self.max_chars} characters")
        if not text and size > MAX_ITEMS:
            raise LimitError(f"it made a list of more than {MAX_ITEMS} items")

    def concat(self, pieces: Iterable[str]) -> str:
        """The text of a macro, or of a block that is captured."""
        pieces = list(pieces)
        self.allow(sum(map(len, pieces)))
        return "".join(pieces)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in UNSAFE_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A safe `str.format`, which tells `call` what text it is a method of."""
        if wrapped := super().wrap_str_format(value):
            vars(wrapped)["__self__"] = value.__self__
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        assert isinstance(context, BoundedContext)
        if isinstance(left, int) and isinstance(right, int):
            mine, other = left.bit_length(), right.bit_length()
            if {"*": mine + other, "**": mine * right}.get(operator, max(mine, other)) > MAX_BITS:
                raise LimitError(f"it made a number of more than {MAX_BITS} bits")
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(times, int):
                    self.allow(len(one) * times, isinstance(one, TEXT))
        elif operator == "%" and isinstance(left, TEXT):
            self.allow(_formatted(left, right))
        return context.bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a function or a method."""
        assert isinstance(context, BoundedContext)
        context.tick()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, TEXT) and (size := METHOD_SIZES.get(function.__name__)):
            args = _listed(args)
            self.allow(size(owner, *args, **{name: kwargs[name] for name in kwargs if name not in JINJAS_OWN}))
        return context.bounded(super().call(context, function, *args, **kwargs))


def _bounded_filter(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with bounds. It asks for the context, so Jinja does not compute it at compile time."""
    size, wanted = FILTER_SIZES.get(name), getattr(filter, "jinja_pass_arg", None)

    @pass_context
    def bounded(context: BoundedContext, *args: Any, **kwargs: Any) -> Any:
        context.tick()
        if size:
            args = _listed(args)
            context.environment.allow(size(*args, **kwargs))
        if wanted is not None:
            first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
            args = (first[wanted.name], *args)
        return context.bounded(filter(*args, **kwargs))

    return bounded


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# --- what a template expects ------------------------------------------------------------------------------------------


class ChatTemplate(NamedTuple):
    """A compiled chat template, and the form that it expects messages in."""

    template: Template
    source: str
    takes_parts: bool  # a message's content may be a list of parts
    takes_text: bool  # it may be a string
    knows_developer: bool  # the role `developer` has a meaning of its own
    shows_one_call: bool  # of those of a message, the first


PART_FILTERS = ("map", "reject", "rejectattr", "select", "selectattr")  # they take a list
ALIASES = 4  # times that one variable is set to another; real templates have one or two
TEXT_TESTS = ("iterable", "mapping", "sequence", "string")  # a template with one of these tells texts from lists


def names_of(tree: nodes.Template, key: str) -> set[str]:
    """The variables that hold what a message has under a key: set to it, or parameters that get it."""
    macros = {macro.name: [arg.name for arg in macro.args] for macro in tree.find_all(nodes.Macro)}
    given = [(a.target.name, a.node) for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name)]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and (parameters := macros.get(call.node.name)):
            given += [*zip(parameters, call.args, strict=False), *((arg.key, arg.value) for arg in call.kwargs)]
    names: set[str] = set()
    for _ in range(ALIASES):
        names |= {name for name, value in given if is_value(value, key, names)}
    return names


def is_value(node: nodes.Node | None, key: Any, names: set[str]) -> bool:
    """Whether an expression is `message.key`, however it is spelled, or one of the variables `names`."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == key
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == key


def read_template(environment: TemplateEnvironment, source: str) -> ChatTemplate:
    """Compile a chat template and find out what it expects.

    It takes parts if it goes through the content of messages, as vLLM's `--chat-template-content-format auto` has it.
    vLLM then makes parts of every text; here a template that looks which of them it was given is given either.

    Raises:
        ValueError: it is no template, or too large.
    """
    template = compile_template(environment, source)
    tree = environment.parse(source)  # cannot fail any more
    contents, calls = names_of(tree, "content"), names_of(tree, "tool_calls")
    walked: list[nodes.Node] = [loop.iter for loop in tree.find_all(nodes.For)]
    walked += [used for used in tree.find_all(nodes.Filter) if used.name in PART_FILTERS]
    takes_parts = any(is_value(unfiltered(node), "content", contents) for node in walked)
    asked = any(is_value(t.node, "content", contents) for t in tree.find_all(nodes.Test) if t.name in TEXT_TESTS)
    developer = any(constant.value == "developer" for constant in tree.find_all(nodes.Const))
    firsts: list[nodes.Node | None] = [item.node for item in tree.find_all(nodes.Getitem) if is_value(item, 0, set())]
    firsts += [used.node for used in tree.find_all(nodes.Filter) if used.name == "first"]
    one, all_ = (any(is_value(unfiltered(n), "tool_calls", calls) for n in found) for found in (firsts, walked))
    return ChatTemplate(template, source, takes_parts, not takes_parts or asked, developer, one and not all_)


def unfiltered(node: nodes.Node | None) -> nodes.Node | None:
    """An expression without its filters."""
    while isinstance(node, nodes.Filter):
        node = node.node
    return node


# --- a template's life -----------------------------------------------------------------------------------------------


def compile_template(environment: TemplateEnvironment, source: str) -> Template:
    """A template that `run_template` takes; a ValueError if it is none, or too large."""
    if len(source) > MAX_SOURCE:
        raise ValueError(f"it has {len(source)} characters; at most {MAX_SOURCE} are allowed")
    try:
        return environment.from_string(source)
    except Exception as error:  # deep nesting ends in a RecursionError, a SyntaxError or a MemoryError
        raise ValueError(str(error) or type(error).__name__) from None


def run_template(template: Template, variables: dict[str, Any]) -> str:
    """The text that a template writes; a ValueError if it fails, refuses its variables, or goes beyond a limit."""
    environment = template.environment
    pieces, chars = [], 0
    assert isinstance(environment, TemplateEnvironment)
    try:
        context = template.new_context(variables)
        assert isinstance(context, BoundedContext)
        for piece in template.root_render_func(context):
            context.tick()
            pieces.append(piece)
            chars += len(piece)
            environment.allow(chars)
    except Exception as error:  # a template is a program: str + None in it is a TypeError, and so on
        raise ValueError(f"chat template: {error}") from None
    return "".join(pieces)
