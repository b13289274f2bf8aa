#!/usr/bin/env python3
"""Renders chat templates with `transformers`' own `apply_chat_template`, for `tests/chat.rs` to compare with.

    python3 -m venv venv && venv/bin/pip install jinja2==3.1.6 transformers==5.24.0
    scripts/test-data                                # the templates of real models, into target/test-data/chat-templates
    venv/bin/python scripts/chat_reference.py        # writes tests/data/chat/{cases,real}.json
    venv/bin/python scripts/chat_reference.py Qwen-Qwen3-0.6B parallel        # prints one text

`cases.json` has our own templates, each for a part of the language, with their rendered texts. `real.json` has
conversations and, for each model's template and conversation, the text's length and the start of its SHA-256, or that
the template refuses: models' templates are not ours to copy.
"""

import datetime
import hashlib
import json
import pathlib
import sys

import jinja2
import tokenizers
import transformers
from transformers.utils import chat_template_utils

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
REAL = REPOSITORY / "target/test-data/chat-templates"
NOW = 1_700_000_000  # 14 November 2023, 22:13:20 UTC
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class Clock(datetime.datetime):
    """A frozen clock, in UTC."""

    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, datetime.timezone.utc)


chat_template_utils.datetime = Clock
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, "<unk>")), **SPECIAL
)

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
    "surprises": "{{ 'yes' if messages|selectattr('nope') else 'no' }} {% set d = {'items': 1, 'x': 2} %}{{ d.items is callable }} {{ d['items'] }} {{ d.x }} {{ '<'|safe + '&' }} {{ '<'|e + '&' ~ '&' }} {{ none|map('upper')|list }}",
    "joined pieces": "{{ ['<|', messages[0].role, '|>', messages[0].content]|join('') }}{{ messages[0].content + '' }}{{ ('x' ~ messages[0].content ~ ' ')|trim }}{{ (messages[0].content ~ 'y').endswith('y') }}{{ ('<' ~ messages[0].content)[1:] }}{{ ('a' ~ messages[0].content)|length }}{{ ('a' ~ messages[0].content) == 'aHello!' }}{{ ('q ' ~ messages[0].content).split(' ') }}{{ ('A' ~ messages[0].content)|lower|replace('a', 'b')|capitalize }}{{ {'k': 'a' ~ messages[0].content}|tojson }}{{ ['a' ~ messages[0].content] }}{% for c in 'ab' ~ messages[0].content %}{{ c }}.{% endfor %}{{ ('ab' ~ messages[0].content)[2] }}{{ ('ab' ~ messages[0].content)|last }}",
}


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def call(number, name, **arguments):
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number, name, content):
    return {"role": "tool", "content": content, "name": name, "tool_call_id": f"call0000{number}"}


MORE_TOOLS = [
    *TOOLS,
    {
        "type": "function",
        "function": {
            "name": "convert",
            "description": "Converts an amount.\n\nRates are of the day.",
            "parameters": {
                "type": "object",
                "properties": {
                    "amount": {"type": "number", "description": "How much", "default": 1.5},
                    "to": {"type": "array", "items": {"type": "string"}, "description": "Currencies"},
                    "options": {
                        "type": "object",
                        "properties": {"round": {"type": "boolean"}, "mode": {"type": ["string", "null"]}},
                    },
                },
                "required": ["amount", "to"],
            },
            "return": {"type": "number"},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}},
]
DOCUMENTS = [
    {"title": "Köln", "text": "A city on the Rhine.\nIt has a cathedral.", "doc_id": 1},
    {"title": "\"Bonn\"", "text": "", "doc_id": 2},
]
WEATHER = [user("Weather in Köln?"), assistant("", tool_calls=[call(1, "weather", city="Köln", days=2)])]

# Arguments of `apply_chat_template`: messages, and further ones.
REAL_CONVERSATIONS = {
    "one": ([user("Hello!")], {}),
    "no prompt": ([user("Hello!"), assistant("Hi.")], {"add_generation_prompt": False}),
    "system": ([system("You are terse.  "), user("  What's 1 < 2?\n\nTell \"me\"\\n. ")], {}),
    "turns": ([user("One"), assistant("1"), user("Two"), assistant("2"), user("Three")], {}),
    "system and turns": ([system("Count."), user("One"), assistant("1"), user("Two"), assistant("2"), user("3?")], {}),
    "unicode": ([system("ünïcödé \u200b"), user("日本語 🎈\ttab {{ x }} {% y %} {# z #}"), assistant("é\u0301 ｜▁"), user("ß")], {}),
    "empty": ([system(""), user(""), assistant(""), user("\n")], {}),
    "thoughts in text": ([user("1+1?"), assistant("<think>\nIt is 2.\n</think>\n\nTwo."), user("2+2?")], {}),
    "thoughts apart": ([user("1+1?"), assistant("Two.", reasoning_content="It is 2.\n"), user("2+2?")], {}),
    "thoughts last": ([user("1+1?"), assistant("Two.", reasoning_content="It is 2.")], {"add_generation_prompt": False}),
    "thinking": ([user("Why?")], {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    "no thinking": ([system("Hm."), user("Why?")], {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}),
    "tools": ([user("Weather?")], {"tools": TOOLS}),
    "tools and system": ([system("Use tools."), user("Weather?")], {"tools": MORE_TOOLS}),
    "call": (WEATHER, {"tools": TOOLS, "add_generation_prompt": False}),
    "result": ([*WEATHER, result(1, "weather", '{"sun": true, "note": "<b>"}')], {"tools": TOOLS}),
    "result and answer": (
        [system("Use tools."), *WEATHER, result(1, "weather", "sunny"), assistant("Sunny."), user("And in Bonn?")],
        {"tools": MORE_TOOLS},
    ),
    "parallel": (
        [
            user("Weather in Köln and Bonn, and 5 EUR?"),
            assistant(
                "I look it up.",
                tool_calls=[
                    call(1, "weather", city="Köln"),
                    call(2, "weather", city='a "b"', days=1),
                    call(3, "convert", amount=5.0, to=["USD", "JPY"], options={"round": True, "mode": None}),
                ],
            ),
            result(1, "weather", "sunny"),
            result(2, "weather", "rain"),
            result(3, "convert", "[5.4, 800]"),
        ],
        {"tools": MORE_TOOLS},
    ),
    "call with thoughts": (
        [
            user("Weather in Köln?"),
            assistant("", reasoning_content="I need the weather.", tool_calls=[call(1, "weather", city="Köln")]),
            result(1, "weather", "sunny"),
        ],
        {"tools": TOOLS, "enable_thinking": True},
    ),
    "call without content": (
        [user("Time?"), {"role": "assistant", "content": None, "tool_calls": [call(1, "now")]}, result(1, "now", "12:00")],
        {"tools": MORE_TOOLS},
    ),
    "parts": (
        [
            {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
            {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]},
        ],
        {},
    ),
    "documents": ([system("Cite."), user("Where is Köln?")], {"documents": DOCUMENTS}),
    "prefill": ([user("Count"), assistant("One, two, ")], {"continue_final_message": True}),
    "prefill and system": ([system("Count."), user("Go"), assistant("One,\n\n  two")], {"continue_final_message": True}),
    "prefill of parts": (
        [user("Count"), {"role": "assistant", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": " two"}]}],
        {"continue_final_message": True},
    ),
    "assistant first": ([assistant("Welcome."), user("Hi")], {}),
    "same role twice": ([user("Hi"), user("Hello?"), assistant("Yes")], {"add_generation_prompt": False}),
    "developer": ([{"role": "developer", "content": "Be brief."}, user("Hi")], {}),
}


def render(source, messages, options):
    arguments = {"tokenize": False, "add_generation_prompt": "continue_final_message" not in options, **options}
    return tokenizer.apply_chat_template(messages, chat_template=source, **arguments)


def results(source, conversations):
    """The text or error, by conversation."""
    for name, (messages, options) in conversations.items():
        try:
            yield name, render(source, messages, options), None
        # Any Python exception means that the template cannot be rendered.
        except Exception as error:
            yield name, None, f"{type(error).__name__}: {error}".partition("\n")[0]


def described(conversations):
    return {name: {"messages": messages, "options": options} for name, (messages, options) in conversations.items()}


def write(name, about):
    origin = f"scripts/chat_reference.py, transformers {transformers.__version__}, jinja2 {jinja2.__version__}"
    text = json.dumps({"origin": origin, "now": NOW, "special": SPECIAL, **about}, ensure_ascii=False, indent=1)
    (REPOSITORY / "tests/data/chat" / name).write_text(text + "\n", encoding="utf-8")


def main():
    real = {file.stem: file.read_text(encoding="utf-8") for file in sorted(REAL.glob("*.jinja"))}
    if len(sys.argv) > 1:
        template, conversation = sys.argv[1:]
        sys.stdout.write(render(real[template], *REAL_CONVERSATIONS[conversation]))
        return
    cases = []
    for name, source in TEMPLATES.items():
        texts = [
            {"conversation": conversation, **({"error": error} if error else {"text": text})}
            for conversation, text, error in results(source, CONVERSATIONS)
        ]
        cases.append({"name": name, "template": source, "results": texts})
    write("cases.json", {"conversations": described(CONVERSATIONS), "templates": cases})
    if not real:
        sys.exit(f"there are no templates in {REAL}: run scripts/test-data")
    digests = {}
    for name, source in real.items():
        digests[name] = {
            conversation: f"refused: {error}"[:60] if error else f"{len(text)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
            for conversation, text, error in results(source, REAL_CONVERSATIONS)
        }
    write("real.json", {"conversations": described(REAL_CONVERSATIONS), "templates": digests})


main()
