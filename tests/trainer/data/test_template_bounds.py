# ruff: noqa: E501 - templates
"""A template that does not end, or makes more than memory holds, is refused; others are as ever."""

from __future__ import annotations

import threading

import pytest
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.data.template_sandbox import compile_template

ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops with a filter": "{% for a in range(9999) %}{% for b in range(9999) if b < 0 %}"
    "{% endfor %}{% endfor %}",
    "a macro of itself": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "doubled text": "{% set n = namespace(s='x') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}"
    "{% endfor %}",
    "added text": "{% set n = namespace(s='x') %}{% for a in range(60) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}",
    "added lists": "{% set n = namespace(s=[1]) %}{% for a in range(60) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}",
    "repeated text": "{{ 'x' * 10000000000 }}",
    "repeated lists": "{{ 10000000000 * [1] }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width of a value": "{{ '%*d' % (1000000000, 1) }}",
    "a width of format": "{{ '{:1000000000}'.format(1) }}",
    "a width within a width": "{{ '{:{}{}}'.format(1, 9999, 9999) }}",
    "a filter's width": "{{ '%1000000000d'|format(1) }}",
    "center": "{{ 'x'.center(1000000000) }}",
    "the filter center": "{{ 'x'|center(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "indent": "{{ 'x\nx'|indent(1000000000) }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "tojson": "{{ [1]|tojson(indent=1000000000) }}",
    "replaced": "{% set s = 'x' * 1000000 %}{{ s.replace('x', s) }}",
    "replaced by a filter": "{% set s = 'x' * 1000000 %}{{ s|replace('x', s) }}",
    "joined": "{% set s = 'x' * 10000000 %}{{ s.join([s] * 1000) }}",
    "joined by a filter": "{% set s = 'x' * 10000000 %}{{ ([s] * 1000)|join(s) }}",
    "many parts": "{% set s = 'x' * 1000000 %}{{ ('%(a)s' * 1000) % {'a': s} }}",
    "doubled blocks": "{% set n = namespace(s='x') %}{% for a in range(60) %}"
    "{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}{% endfor %}",
    "doubled by a format": "{% set n = namespace(s='x') %}{% for a in range(60) %}"
    "{% set n.s = '%s%s' % (n.s, n.s) %}{% endfor %}",
    "doubled by a join": "{% set n = namespace(s='x') %}{% for a in range(60) %}"
    "{% set n.s = [n.s, n.s]|join %}{% endfor %}",
    "powers": "{{ 10 ** 10000000000 }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_it_ends(source: str):
    with pytest.raises(SecurityError, match=r"does not end|too large"):
        compile_template(source)()


def test_random_text_is_not_there():
    with pytest.raises(UndefinedError, match="lipsum"):
        compile_template("{{ lipsum(5) }}")()


ORDINARY = """
{%- for m in messages if m.role != 'x' %}{{ loop.index }}/{{ loop.length }}{{ loop.revindex0 }}
{{- loop.first }}{{ loop.last }}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}
{{- loop.cycle('a', 'b') }}{{ m.role + ': ' ~ m.text }}{% if loop.index == 3 %}{% break %}{% endif %}
{%- else %}none{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k * 3 }}{{ v + 1 }}{{ v ** 2 }}
{%- endfor %}{% for n in tree recursive %}({{ n.v }}{{ loop(n.c) if n.c }}){% endfor %}
{%- for x in () %}{% else %}empty{% endfor %}{{ [1] + [2] }}{{ 1.5 + 2 }}
{{- '%s-%05d' % ('a', 3) }}{{ '%d%%' % 99999 }}{{ '{:>8}|{}'.format('b', 1) }}{{ 7 % 4 }}
{{- 'c'.center(9) }}{{ 'c'|center(9) }}{{ ['a', 'b']|join(', ') }}{{ ', '.join(['a', 'b']) }}
{{- 'aXa'.replace('X', '12345') }}{{ 'aXa'|replace('a', '-') }}{{ 'a\nb'|indent(4) }}
{{- [1, 2, 3]|batch(2)|list }}{{ 'x y z'|truncate(4) }}{{ 123456|string }}{{ '%s'|format('{99999}') }}
{%- set block %}in {{ 'block' }}{% endset %}{{ block }}
{%- macro f(a) %}{{ a }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(2) %}!{% endcall %}
"""


@pytest.mark.parametrize("count", [0, 1, 5])
def test_what_ends_is_as_jinja_renders_it(count: int):
    variables = {
        "messages": [{"role": f"r{n}", "text": "t" * n} for n in range(count)],
        "tree": [{"v": 1, "c": [{"v": 2, "c": []}]}],
    }
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    wanted = plain.from_string(ORDINARY).render(**variables)
    assert compile_template(ORDINARY)(**variables) == wanted


def test_each_rendering_and_each_thread_counts_for_itself():
    render = compile_template("{% for a in range(90000) %}{% endfor %}{{ done }}")
    results: list[str] = []

    def often() -> None:
        results.extend(render(done="x") for _ in range(14))

    threads = [threading.Thread(target=often) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["x"] * 28
