"""Marks of traced strings."""

from aerie.chat.tracing import compile_template, trace


def test_marks_survive_template_operations():
    template = compile_template(
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{% set y %}a{{ m | trim }}{% endset %}"
        "{{ 'x' ~ m ~ 'y' }}|{{ y }}|{{ f(m) }}|{{ 'a' + m }}|{{ [m, m] | join(', ') }}|"
        "{{ ' '.join([m, m]) }}|{{ {'k': [m]} | tojson }}|{{ m.split('l')[1] }}|"
        "{{ m | replace('h', 'j') }}|{{ m[1:-1] }}|{{ m | upper }}|{{ m.partition('l')[2] }}|"
        "{{ m.rstrip() }}|{% for c in m %}{{ c }}{% endfor %}"
    )
    text = template(m=trace(' h"llo ', 0, "user", "content"))
    pieces = []
    for mark in text.marks:
        piece = str.__str__(text)[mark.start : mark.end]
        pieces.append(piece)
    whole = ' h"llo '
    assert pieces == [
        whole, 'h"llo', whole, whole, whole, whole, whole, whole, ' h\\"llo ', "",
        ' j"llo ', 'h"llo', ' H"LLO ', "lo ", ' h"llo', whole,
    ]  # fmt: skip
