"""Chat templates that want too much: they are refused soon, and with a reason."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from text import templates
from text.templates import MAX_SOURCE, TemplateEnvironment, compile_template, run_template, text_size

CHARS = 100_000


def run(source: str, seconds: float = 10.0, chars: int = CHARS, **variables: Any) -> str:
    environment = TemplateEnvironment(chars, seconds)
    return run_template(compile_template(environment, source), variables)


LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("BODY", ""),
        LOOP.replace("BODY", "{% set x = j %}"),
        LOOP.replace("BODY", "{% if false %}a{% endif %}"),
        "{% set x %}" + LOOP.replace("BODY", "{{ '' }}") + "{% endset %}",
        "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{{ range(100000) | map('upper') | select('eq', 1) | list }}{% endfor %}",
        "{% for i in range(100000) %}{% if range(100000) | sum %}{% endif %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in [range(60)|list] recursive %}{% if i %}{{ loop([i[1:], i[1:]]) }}{% endif %}{% endfor %}",
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}{% for i in range(100000) %}"
        "{% call f() %}{% for j in range(1000) %}{% endfor %}{% endcall %}{% endfor %}",
        "{% for i in range(100000) if range(100000) | list == range(100000) | list and false %}{% endfor %}",
        "{% set s = 'a' * 50000 %}{% for i in range(100000) if [" + "s[1:]," * 5000 + "] %}{% endfor %}",
        "{{ [1] | slice(100000000000) | list }}",
    ],
)
def test_time_is_limited_between_any_two_nodes(source: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"took more than 0.05 seconds|more than \d+ items"):
        run(source, 0.05, 10**9)
    assert time.monotonic() - begun < 20  # for ever is what it would take


NESTED = "{% set n = namespace(l=[1] * 10) %}{% for i in range(30) %}{% set n.l = [n.l] * 10 %}{% endfor %}"
DOUBLED = "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = BODY %}{% endfor %}"


@pytest.mark.parametrize(
    "expression",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ ('a' * 10**10) | length }}",
        "{% set x = 'a' * 10**10 %}",
        "{% if 'a' * 10**10 == 'b' %}{% endif %}",
        "{% autoescape 'a' * 10**10 %}{% endautoescape %}",
        "{% for i in [1] * 10**10 %}{% endfor %}",
        "{{ ((1,) * 10**10) | length }}",
        "{{ 10**(10**10) }}",
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%.10000000000f' % 1 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**10) }}",
        "{{ '{x:10000000000}'.format_map({'x': 1}) }}",
        "{{ 'a'.center(10**10) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ ['a'] | map('center', 10**10) | list }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a'.rjust(10**10) }}",
        "{{ 'a'.zfill(10**10) }}",
        "{{ ('a' | attr('zfill'))(10**10) }}",
        "{{ 'a'.encode().zfill(10**10) }}",
        "{{ 'a\\tb'.expandtabs(10**10) }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{{ (1).to_bytes(10**10) }}",
        "{{ ('a' * 50000).replace('a', 'b' * 50000) }}",
        "{{ ('a' * 50000) | replace('a', 'b' * 50000) }}",
        "{{ ('a' * 50000).replace('', 'b' * 50000) }}",
        "{{ (['a' * 50000] * 50000) | join }}",
        "{{ ('a' * 50000).join(range(50000) | map('string')) }}",
        "{{ ('a' * 50000).join(['a'] * 50000) }}",
        "{{ 'a' | indent(10**10, first=true) }}",
        "{{ ('a\\n' * 40000) | indent(40000) }}",
        "{{ [1] | batch(10**10, 0) | list }}",
        "{{ {'a': [1]} | tojson(indent=10**10) }}",
        "{{ range(1000) | list | tojson(separators=('a' * 50000, ':')) }}",
        "{{ 5 | round(-10**10) }}",
        "{{ ([range(100000) | list] * 50000) | sum(start=[]) }}",
        "{{ lipsum(n=10**10) }}",
        "{{ 'a' | wordwrap(1, wrapstring='b' * 50000) }}",
        "{{ ('a' * 90000).rfind('b' + 'a' * 45000) }}",
        "{% set x %}{% for i in range(90000) %}{{ 'a' * 90000 }}{% endfor %}{% endset %}",
        "{% macro f() %}{% for i in range(90000) %}{{ 'a' * 9 }}{% endfor %}{% endmacro %}{% if f() %}{% endif %}",
        "{% filter upper %}{% for i in range(90000) %}{{ 'a' * 9 }}{% endfor %}{% endfilter %}",
        "{% for i in range(90000) %}aaaaaaaaa{% endfor %}",
        "{% set n = namespace(l=[]) %}{% for i in range(90000) %}{% set n.l = n.l + ['a' * 90000] %}{% endfor %}",
        "{% set n = namespace(l=[], s='a' * 90000) %}{% for i in range(90000) %}{% set n.l = n.l + [n.s[1:]] %}"
        "{% endfor %}",
        "{% set n = namespace(l=[]) %}{% for i in range(90000) %}{% set n.l = [n.l, [1] * 90000] %}{% endfor %}",
        DOUBLED.replace("BODY", "n.s + n.s"),
        DOUBLED.replace("BODY", "n.s ~ n.s"),
        DOUBLED.replace("BODY", "'%s%s' % (n.s, n.s)"),
        DOUBLED.replace("BODY", "'{0}{0}'.format(n.s)"),
        DOUBLED.replace("BODY", "[n.s, n.s] | join"),
        DOUBLED.replace("BODY", "n.s.replace('ab', 'abab')"),
        DOUBLED.replace("'ab'", "[1]").replace("BODY", "n.s + n.s"),
        NESTED + "{{ n.l }}",
        NESTED + "{{ n }}",
        NESTED + "{{ {'a': n.l}.values() }}",
        NESTED + "{{ n.l ~ '' }}",
        NESTED + "{{ n.l | string }}",
        NESTED + "{{ n.l | upper }}",
        NESTED + "{{ n.l | tojson }}",
        NESTED + "{{ '%s' % n.l }}",
        NESTED + "{{ '{}'.format(n.l) }}",
        NESTED + "{{ n.l | join }}",
        NESTED + "{{ 'a' | replace('a', n.l) }}",
    ],
)
def test_growth_is_limited(monkeypatch: pytest.MonkeyPatch, expression: str) -> None:
    monkeypatch.setattr(templates, "MAX_LISTED", 2**19)  # with more it takes a second until they are counted
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"max_template_chars|items|bits|unsafe|sum adds|lipsum|wordwrap"):
        run(expression)
    assert time.monotonic() - begun < 5


@pytest.mark.full
def test_the_limit_of_lists_is_soon_reached() -> None:
    begun = time.monotonic()
    with pytest.raises(ValueError, match="max_template_chars"):
        run(NESTED + "{{ n.l }}")
    assert time.monotonic() - begun < 5


def test_compiling_computes_nothing_that_can_grow() -> None:
    environment = TemplateEnvironment(CHARS, 1.0)
    for source in ("{{ 'a' * 10**10 }}", "{{ 'a' | center(10**10) }}", "{% set x = 10**10**10 %}"):
        compile_template(environment, source)


@pytest.mark.parametrize(
    "source",
    [
        "a" * (MAX_SOURCE + 1),
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "{% for a in b %}" * 100 + "{% endfor %}" * 100,
    ],
)
def test_what_is_too_large_or_too_deep_does_not_compile(source: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        compile_template(TemplateEnvironment(CHARS, 1.0), source)
    assert "\n" not in str(caught.value)


def test_others_run_while_a_template_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    own, others = threading.get_ident(), time.sleep

    def sleep(seconds: float) -> None:
        if threading.get_ident() != own:  # what an earlier test has left running
            return others(seconds)
        pauses.append(seconds)
        until = time.monotonic() + 0.02  # this is not the template's time
        while time.monotonic() < until:
            pass

    monkeypatch.setattr(time, "sleep", sleep)
    begun = time.monotonic()
    with pytest.raises(ValueError, match="took more"):
        run(LOOP.replace("BODY", ""), seconds=0.4)
    assert len(pauses) > 1 and time.monotonic() - begun > 0.4 + 0.02 * len(pauses)


def test_ordinary_operations_are_as_ever() -> None:
    assert run("{{ 'a' * 3 ~ 2 ** 3 }}{{ [1] * 2 + [3] }}{{ (1, 2) }}") == "aaa8[1, 1, 3](1, 2)"
    assert run("{{ '%5.1f|%s' % (1.25, 'x') }}{{ '{:>4}{a}'.format(1, a=2) }}") == "  1.2|x   12"
    assert run("{{ ['a', 'b'] | join('-') }}{{ '-'.join(['a', 'b']) }}{{ 'abc'.replace('b', 'xx') }}") == "a-ba-baxxc"
    assert run("{{ 'a\nb' | indent(2) }}{{ 'ab'.center(4) }}{{ x[1:] }}{{ x[0] == 1 < 2 }}", x=[1, 2]) == (
        "a\n  b ab [2]True"
    )
    assert run("{{ {'a': [1]} | tojson(indent=2) }}{{ [3, 1] | sort | first }}{{ [1, 2] | sum }}") == (
        '{\n  "a": [\n    1\n  ]\n}13'
    )
    assert run("{{ [1, 2, 3] | batch(2, 0) | list }}{{ 2.5 | round(0) }}{{ none ~ x }}{{ x }}") == (
        "[[1, 2], [3, 0]]2.0None"
    )
    assert run("{{ (x is defined and x > 1) or 'no' }}{{ 1 if x is none else x in [2] }}", x=2) == "TrueTrue"
    assert run("{% autoescape true %}{{ '<' ~ x }}{{ x }}{% endautoescape %}", x="<b>") == "&lt;&lt;b&gt;&lt;b&gt;"


@pytest.mark.parametrize("listed", [2**19, pytest.param(templates.MAX_LISTED, marks=pytest.mark.full)])
def test_the_size_of_a_text_is_estimated(monkeypatch: pytest.MonkeyPatch, listed: int) -> None:
    monkeypatch.setattr(templates, "MAX_LISTED", listed)
    for value in ("abc", [1, "a", None], {"a": {"b": [1.5, True]}}, [[[]]], {1, 2}, {"a": 1}.items()):
        assert len(str(value)) / 4 < text_size(value) < 40 + 8 * len(str(value))
    many: Any = "a"
    for _ in range(100):
        many = [many] * 100
    assert text_size(many) > 2**30
