#!/usr/bin/env python3
"""Renders chat templates with Python's jinja2, as Hugging Face does, for tests to compare with.

    python3 -m venv venv && venv/bin/pip install jinja2==3.1.6
    venv/bin/python scripts/chat_reference.py > tests/data/chat/cases.json
    venv/bin/python scripts/chat_reference.py FOLDER > other.json     # *.jinja from elsewhere
    TILEWRIGHT_CHAT_CASES=other.json cargo test --test chat           # compares with those as well

A case is a template, a conversation and either the text or the fact that the template refuses it.
"""

import datetime
import json
import pathlib
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = 1_700_000_000  # 14 November 2023, 22:13:20 UTC


class Generation(jinja2.ext.Extension):
    """Hugging Face's mark of what a model is trained on: it renders its content."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(pattern):
    return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime(pattern)


env = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols, jinja2.ext.do]
)
env.filters["tojson"] = tojson
env.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather at a place <now> & later",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Köln", 'a "b"']}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}

CONVERSATIONS = {
    "one": ([{"role": "user", "content": "Hello!"}], {}),
    "system": (
        [
            {"role": "system", "content": "You are terse.  "},
            {"role": "user", "content": "  What's 1 < 2?\n\nTell \"me\"\\n. "},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
            {"role": "user", "content": "ünïcödé 日本語 🎈\ttab {{ x }} {% y %}"},
        ],
        {},
    ),
    "odd": (
        [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": "a'b"},
            {"role": "user", "content": "\n"},
            {"role": "assistant", "content": "> quote"},
        ],
        {"add_generation_prompt": False},
    ),
    "tools": (
        [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": '{"sun": true}', "name": "weather", "tool_call_id": "call12345"},
        ],
        {"tools": TOOLS, "enable_thinking": False},
    ),
}

TEMPLATES = {
    "loop variables": """\
{% for m in messages %}
    {{ loop.index }}/{{ loop.length }} {{ loop.first }} {{ loop.last }} {{ loop.index0 }} {{ loop.revindex }}
    {%- if not loop.last %}, next {{ loop.nextitem.role }}{% endif %}
    {%- if loop.previtem is defined %}, before {{ loop.previtem.role }}{% endif +%}
    {{- loop.cycle('a', 'b') }}
{% endfor %}
""",
    "white space control": "a  {%- if true %}  b  {% endif -%}  c\n\n  {# note #}\n  {% if true %}\n d\n  {% endif %}\n{{ 'x' -}}\n\n y\n",
    "namespace": """\
{%- set ns = namespace(n=0, text='', last=none) -%}
{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{%- set ns.text = ns.text ~ m.role[0] -%}{%- set ns.last = m -%}{%- endfor -%}
{{ ns.n }} {{ ns.text }} {{ ns.last.content }}""",
    "split off thoughts": """\
{%- for m in messages -%}
{%- set content = m.content -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
[{{ thought }}]
{%- endif -%}
({{ content|trim }})
{%- endfor -%}""",
    "macro": """\
{%- macro say(role, text, mark='*', sep=': ') -%}
{{ mark }}{{ role|upper }}{{ sep }}{{ text }}{{ mark }}
{%- endmacro -%}
{%- for m in messages -%}{{ say(m.role, m.content) }}|{{ say(text=m.content|trim, role='r', mark='') }}{% endfor %}""",
    "call block": """\
{%- macro box(title) -%}<{{ title }}>{{ caller() }}</{{ title }}>{%- endmacro -%}
{%- for m in messages -%}{%- call box(m.role) -%}{{ m.content }}{%- endcall -%}{%- endfor -%}""",
    "set block": "{% set all %}{% for m in messages %}{{ m.content }};{% endfor %}{% endset %}{{ all|length }} {{ all|upper|trim }}",
    "roles must alternate": """\
{%- if messages[0]['role'] == 'system' -%}{%- set system = messages[0]['content'] -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('Roles must alternate!') }}{%- endif -%}
{%- if loop.index0 == 0 and system is defined -%}{%- set content = '<<' + system + '>>' + m['content'] -%}
{%- else -%}{%- set content = m['content'] -%}{%- endif -%}
{{ '[' + m['role'] + '] ' + content.strip() + ' ' }}
{%- endfor -%}""",
    "tools as json": """\
{%- if tools is defined and tools -%}{{ tools|tojson }}
{{ tools|tojson(indent=4) }}
{{ tools[0]|tojson(separators=(',', ':')) }}{{ {'b': 1, 'a': [1.5, none, true, 1e20]}|tojson(sort_keys=true) }}{%- endif -%}
{{ messages|tojson }}{{ messages[0]|tojson|e }}{{ 'é'|tojson(ensure_ascii=true) }}""",
    "tool calls": """\
{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- for call in m.tool_calls -%}
{%- set f = call.function -%}
<call>{"name": "{{ f.name }}", "arguments": {% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments|tojson }}{% endif %}}</call>
{%- for key, value in f.arguments.items() -%}<{{ key }}={{ value }}>{%- endfor -%}
{%- for key, value in f.arguments|dictsort -%}<{{ key }}={{ value|string|upper }}>{%- endfor -%}
{%- endfor -%}
{%- elif m.role == 'tool' -%}{{ m.get('name', 'none') }} {{ m.get('missing') }} {{ m.get('missing', 'there') }}{%- endif -%}
{%- endfor -%}""",
    "python values": "{{ [1, 'a', none, true, 1.0, {'k': (1, 2)}, \"it's\"] }} {{ {} }} {{ (1,) }} {{ 1e-7 }} {{ 10 / 4 }} {{ 7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 3 * 'ab' }} {{ [1] * 3 }} {{ 1 + true }} {{ messages }}",
    "undefined": "{{ nothing }}{{ nothing|default('d') }}{{ ''|default('e', true) }}{{ nothing is defined }}{{ nothing|length }}{{ nothing ~ 'x' }}{% for x in nothing %}x{% else %}none{% endfor %}{{ nothing|trim }}{{ not nothing }}{{ messages[99] is defined }}{{ messages[0].nope is none }}",
    "filters of lists": """\
{{ messages|map(attribute='role')|join(', ') }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ messages|rejectattr('role', 'eq', 'user')|map(attribute='content')|map('upper')|list }}
{{ messages|map(attribute='role')|unique|list }} {{ messages|map(attribute='content')|map('length')|sum }}
{{ [3, 1, 2]|sort|join }} {{ ['b', 'A', 'c']|sort|join }} {{ ['b', 'A', 'c']|sort(reverse=true, case_sensitive=true)|join }}
{{ [1, 2, 3, 4]|select('odd')|list }} {{ [1, 2, 3]|reject('even')|list }} {{ [1, 2]|first }} {{ 'abc'|last }} {{ [1, 2, 3]|max }} {{ [[2, 1], [1]]|min }}
{{ messages|selectattr('tool_calls')|list|length }} {{ messages|selectattr('tool_calls', 'defined')|list|length }} {{ [1, 2, 3]|reverse|list }} {{ 'abc'|reverse }}""",
    "filters of strings": "{{ 'hello wORLD-foo'|title }} {{ 'hELLO wORLD'|capitalize }} {{ ' x '|trim ~ '|' }} {{ 'xxaxx'|trim('x') }} {{ 'a-b-c'|replace('-', '+', 1) }} {{ 'a\nb\n\nc'|indent(2) }} {{ 'a\nb'|indent(2, true) }} {{ '<&\"\\'>'|e }} {{ 'abc'|list }} {{ '3.7'|float|int }} {{ 'x'|int }} {{ '42'|int + 1 }} {{ -3|abs }} {{ 2.5|round }} {{ 3.14159|round(2) }} {{ 5|string ~ 'x' }} {{ 'a,b'|replace(',', '')|length }}",
    "methods of strings": "{{ 'a b  c'.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ 'x\ny\r\nz'.splitlines() }} {{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'bc')) }} {{ 'abcabc'.find('c') }} {{ 'abcabc'.rfind('c') }} {{ 'abc'.count('b') }} {{ '-'.join(['a', 'b']) }} {{ '{} {}'.format('a', 1) }} {{ '{a}{0}'.format('x', a='y') }} {{ 'aXb'.lower() }} {{ 'ab'.title() }} {{ ' a '.strip() }}| {{ 'abc'.removeprefix('a') }} {{ '12'.isdigit() }} {{ 'a b c'.split(none, 1) }} {{ 'k=v=w'.partition('=') }} {{ ' a b '.rsplit(maxsplit=1) }}",
    "slices": "{{ 'abcdef'[1:3] }} {{ 'abcdef'[-2:] }} {{ 'abcdef'[::-1] }} {{ 'abcdef'[::2] }} {{ [1, 2, 3, 4][1:-1] }} {{ [1, 2, 3][::-1] }} {{ 'äöü'[1] }} {{ 'abc'[-1] }} {{ messages[-1].role }} {{ messages[:1]|length }} {{ 'abc'[5:] }}|{{ [1, 2, 3][5:1:-1] }} {{ (1, 2, 3)[1:] }} {{ 'abcdef'[4:1:-2] }}",
    "tests": "{{ 1 is number }} {{ 'a' is string }} {{ [] is sequence }} {{ {} is mapping }} {{ {} is iterable }} {{ none is none }} {{ 1 is integer }} {{ 1.0 is float }} {{ true is boolean }} {{ 3 is odd }} {{ 4 is divisibleby 2 }} {{ 'a' in 'abc' }} {{ 'a' in ['a'] }} {{ 'k' in {'k': 1} }} {{ 1 is in [1] }} {{ 'x' not in 'abc' }} {{ 1 is not none }} {{ true is true }} {{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' < 'b' }} {{ 1 == 1.0 }} {{ true == 1 }} {{ [1] == [1] }} {{ {'a': 1} == {'a': 1} }} {{ 'A' is upper }} {{ 'a' is lower }}",
    "conditions": "{{ 'a' if messages|length > 1 else 'b' }} {{ 'x' if false }} {{ messages and 'yes' }} {{ none or 'no' }} {{ not [] }} {{ 1 and 0 }} {% if messages|length == 1 %}one{% elif messages|length == 4 %}four{% else %}other{% endif %}",
    "break and continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }} {% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "filtered loop": "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% else %}nobody{% endfor %}{% for a, b in [(1, 2), (3, 4)] %}{{ a }}{{ b }}{% endfor %}{% for c in 'ab' %}{{ c }}.{% endfor %}{% for k in {'x': 1, 'y': 2} %}{{ k }}{% endfor %}{% for i in range(3) %}{{ i }}{% endfor %}{{ range(5, 0, -2)|list }}",
    "generation tags": "{% for m in messages %}{% if m.role == 'assistant' %}{%- generation -%}  {{ m.content }}  {%- endgeneration -%}{% else %}{{ m.content }}{% generation %}\nx{% endgeneration %}\n{% endif %}{% endfor %}",
    "date": "{{ strftime_now('%d %b %Y, %A %H:%M:%S %-d %B %y %j'[:-3]) }}{% if strftime_now is defined %} known{% endif %}",
    "scopes": "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}{% with y = 5 %}{{ y }}{% endwith %}{{ y is defined }}{% if true %}{% set z = 3 %}{% endif %}{{ z }}{% set a, b = 1, 2 %}{{ a }}{{ b }}{% filter upper %}low{% endfilter %}{% raw %}{{ raw }}{% endraw %}",
    "dicts": "{% set d = dict(a=1, b='x') %}{{ d.a }}{{ d['b'] }}{{ d|length }}{{ d.keys()|list }}{{ d.values()|list }}{{ d.items()|list }}{{ dict(d, c=3) }}{{ {'n': {'m': [1, 2]}}.n.m[1] }}{{ d|items|list }}{{ {1: 'i'}[1] }}",
    "numbers": "{{ 1000000 * 1000000 }} {{ 0.1 + 0.2 }} {{ 1e16 }} {{ 1.5e300 * 10 }} {{ 3 / 1 }} {{ 7 % 4 }} {{ 1_000 }} {{ -2 ** 2 }} {{ 5 - 8 }} {{ 2 * 3 + 4 * 5 }} {{ (2 + 3) * 4 }} {{ 2 * 3 * 4 }} {{ 10 // 3 * 3 }} {{ 1.0 * 2 }} {{ 100 * 1.1 }} {{ 'a' ~ 1.0 ~ none ~ true }}",
    "joined pieces": "{{ ['<|', messages[0].role, '|>', messages[0].content]|join('') }}{{ messages[0].content + '' }}{{ ('x' ~ messages[0].content ~ ' ')|trim }}{{ (messages[0].content ~ 'y').endswith('y') }}{{ ('<' ~ messages[0].content)[1:] }}{{ ('a' ~ messages[0].content)|length }}{{ ('a' ~ messages[0].content) == 'aHello!' }}{{ ('q ' ~ messages[0].content).split(' ') }}{{ ('A' ~ messages[0].content)|lower|replace('a', 'b')|capitalize }}{{ {'k': 'a' ~ messages[0].content}|tojson }}{{ ['a' ~ messages[0].content] }}{% for c in 'ab' ~ messages[0].content %}{{ c }}.{% endfor %}{{ ('ab' ~ messages[0].content)[2] }}{{ ('ab' ~ messages[0].content)|last }}",
}


def render(source, messages, variables):
    options = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", **variables}
    return env.from_string(source).render(messages=messages, **options)


def main():
    templates = TEMPLATES
    if len(sys.argv) > 1:
        files = sorted(pathlib.Path(sys.argv[1]).glob("*.jinja"))
        templates = {file.stem: file.read_text() for file in files}
    cases = []
    for name, source in templates.items():
        results = []
        for conversation, (messages, variables) in CONVERSATIONS.items():
            try:
                results.append({"conversation": conversation, "text": render(source, messages, variables)})
            except (jinja2.exceptions.TemplateError, TypeError, KeyError, ValueError) as error:
                results.append({"conversation": conversation, "error": str(error)})
        cases.append({"name": name, "template": source, "results": results})
    conversations = {
        name: {"messages": messages, "variables": variables} for name, (messages, variables) in CONVERSATIONS.items()
    }
    output = {"origin": f"scripts/chat_reference.py, jinja2 {jinja2.__version__}", "now": NOW}
    json.dump({**output, "conversations": conversations, "templates": cases}, sys.stdout, ensure_ascii=False, indent=1)
    print()


main()
