//! Templates that exhaust time, memory or stack, and their errors.

/// Sources, and a word of each one's error.
pub fn all() -> Vec<(String, &'static str)> {
    let mut all = endless();
    all.extend(growing());
    all.extend(slow());
    all.extend(nested());
    all
}

fn with_word(sources: &[&str], word: &'static str) -> Vec<(String, &'static str)> {
    sources.iter().map(|source| ((*source).to_owned(), word)).collect()
}

fn endless() -> Vec<(String, &'static str)> {
    let in_loops = |body: &str| {
        "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}".to_owned()
            + body
            + "{% endfor %}{% endfor %}{% endfor %}"
    };
    let bodies = ["", "{% set x = 1 %}", "{% set x = [1] %}", "{{ a }}", "{% set x = loop.index + 1 * 2 %}"];
    let mut all: Vec<(String, &str)> = bodies.iter().map(|body| (in_loops(body), "more")).collect();
    all.extend(with_word(
        &[
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% macro f(n) %}{% for i in range(9) %}{{ f(n) }}{% endfor %}{% endmacro %}{{ f(1) }}",
        ],
        "recursion",
    ));
    all.extend(with_word(
        &[
            "{% macro f(n) %}{% if n > 0 %}{% for i in range(9) %}{{ f(n - 1) }}{% endfor %}{% endif %}{% endmacro %}{{ f(20) }}",
            "{% macro a(n) %}{{ b(n) }}{% endmacro %}{% macro b(n) %}{% for i in range(99999) %}{{ n }}{% endfor %}{% endmacro %}\
             {% for i in range(99999) %}{{ a(i) }}{% endfor %}",
        ],
        "more",
    ));
    all.extend(with_word(
        &[
            "{% for x in range(1000000000000) %}{% endfor %}",
            "{% for x in range(0, -9000000000000000000, -1) %}{% endfor %}",
        ],
        "range()",
    ));
    all
}

fn growing() -> Vec<(String, &'static str)> {
    let repeated = |step: &&str| {
        format!("{{% set ns = namespace(s='xy', l=[1, 2]) %}}{{% for i in range(60) %}}{step}{{% endfor %}}")
    };
    let steps = [
        "{% set ns.s = ns.s ~ ns.s %}",
        "{% set ns.s = ns.s + ns.s %}",
        "{% set ns.s = ns.s * 2 %}",
        "{% set ns.s = 2 * ns.s %}",
        "{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}",
        "{% set ns.s = [ns.s, ns.s]|join('-') %}",
        "{% set ns.s = ns.s.replace('x', ns.s) %}",
        "{% set ns.s = ns.s|replace('x', 'xx') %}",
        "{% set ns.s = '{0}{0}'.format(ns.s) %}",
        "{% set ns.s = ns.s.join(['a', 'b', 'c']) %}",
        "{% set ns.s = [ns.s, ns.s]|string %}",
        "{% set ns.s = {'a': ns.s, 'b': ns.s}|tojson %}",
        "{% set ns.s = (ns.s ~ '\\n')|indent(1000, true) * 2 %}",
        "{% set ns.s = ns.s|e ~ ns.s[::-1] %}",
        "{% set ns.s = ns.s|safe + '<' + ns.s %}",
        "{% set ns.s = (ns.s ~ ' y ' ~ ns.s).split()|join(' ') %}",
        "{% set ns.s = ns.s ~ messages[0].content ~ ns.s %}{% set ns.s = ns.s|upper|title|capitalize %}",
        "{% set ns.l = ns.l + ns.l %}",
        "{% set ns.l = ns.l * 2 %}",
        "{% set ns.l = [ns.l, ns.l] %}{% set ns.s = ns.l|string %}",
        "{% set ns.l = [ns.l, ns.l] %}{% if ns.l == [ns.l, ns.l] %}{% endif %}",
        "{% set ns.l = (ns.l|string ~ ns.l|string)|list %}",
        "{% macro m(a) %}{{ a }}{{ a }}{% endmacro %}{% set ns.s = m(ns.s) %}",
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% set s %}{% call m() %}{{ ns.s }}{% endcall %}{% endset %}\
         {% set ns.s = s %}",
        "{% set ns.s %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}{% endset %}",
    ];
    let mut all: Vec<(String, &str)> = steps.iter().map(|step| (repeated(step), "work")).collect();
    let long = "x".repeat(60_000);
    all.push((format!("{{% for i in range(100000) %}}{long}{{% endfor %}}"), "work"));
    all.push((format!("{{% set s %}}{{% for i in range(100000) %}}{long}{{% endfor %}}{{% endset %}}"), "work"));
    all.extend(with_word(
        &[
            "{{ 'x' * 1000000000 }}",
            "{{ 1000000000000 * ['x'] }}",
            "{{ ('x' * 100000000) ~ ('y' * 100000000) ~ ('z' * 100000000) }}",
            "{{ '' * 9000000000000000000 }}",
            "{% set s = 'x' * 15000000 %}{% for c in s %}{% endfor %}",
            "{% for i in range(100000) %}{% set x = {'a': 1, 'b': 2, 'c': 3, 'd': 4} %}{% endfor %}",
        ],
        "work",
    ));
    all
}

/// Operations that are slow for long texts or lists.
fn slow() -> Vec<(String, &'static str)> {
    let repeated =
        |(set, step): &(&str, &str)| format!("{{% set {set} %}}{{% for i in range(99999) %}}{step}{{% endfor %}}");
    let steps = [
        ("s = 'x' * 1000000", "{% if s in s %}{% endif %}"),
        ("s = 'x' * 1000000", "{% if s < s < s %}{% endif %}"),
        ("s = 'x' * 1000000", "{% set x = {s: 1}[s] %}"),
        ("s = 'aX' * 1000000", "{% set x = s|upper|lower|title %}"),
        ("s = 'a' * 100000", "{% set x = s.strip('bcdefghijklmnopqrstuvwxyz' * 1000) %}"),
        ("s = 'a' * 200000", "{% set x = s.count('a') %}"),
        ("s = 'ab' * 200000", "{% set x = s.split('a') %}"),
        ("s = 'a ' * 200000", "{% set x = s.split() %}"),
        ("s = 'a ' * 200000", "{% set x = s.rsplit(none, 100000) %}"),
        ("s = 'a\\n' * 200000", "{% set x = s.splitlines() %}"),
        ("s = 'a' * 200000", "{% set x = s.find('aaaaaaaab' * 1000) %}"),
        ("s = 'a' * 200000", "{% set x = s[5] %}"),
        ("l = range(100000)", "{% set x = l|sort %}"),
        ("l = range(100000)", "{% set x = l|unique|list %}"),
        ("l = range(100000)", "{% set x = l|map('string')|join|length %}"),
        ("l = range(100000)", "{% if -1 in l %}{% endif %}"),
    ];
    steps.iter().map(|step| (repeated(step), "work")).collect()
}

fn nested() -> Vec<(String, &'static str)> {
    let nested = |open: &str, close: &str, n: usize| open.repeat(n) + &close.repeat(n);
    let step =
        |step: &str| format!("{{% set ns = namespace(l=[]) %}}{{% for i in range(100000) %}}{step}{{% endfor %}}");
    vec![
        (nested("{% if true %}", "{% endif %}", 10_000), "nested operators"),
        ("{% macro a() %}".repeat(10_000), "nested operators"),
        (format!("{{{{ {} }}}}", nested("(", ")", 50_000)), "operators"),
        (format!("{{{{ {} }}}}", nested("[", "]", 50_000)), "operators"),
        (format!("{{{{ {}1 }}}}", "not ".repeat(50_000)), "operators"),
        (format!("{{{{ {}1 }}}}", "-".repeat(100_000)), "operators"),
        (format!("{{{{ 1{} }}}}", "+1".repeat(100_000)), "operators"),
        (format!("{{{{ x{} }}}}", ".a".repeat(100_000)), "operators"),
        (step("{% set ns.l = [ns.l] %}"), "nested containers"),
        (step("{% set ns.l = {'a': ns.l} %}"), "nested containers"),
        (step("{% set ns.l = (ns.l,) %}"), "nested containers"),
        (step("{% set ns.l = namespace(l=ns.l) %}"), "cannot hold"),
        (step("{% set ns.l = ns %}"), "cannot hold"),
        (step("{% set ns.l = [ns] %}"), "cannot hold"),
        (step("{% set ns.l = loop %}"), "cannot hold"),
        ("{% for x in [[1]] recursive %}{{ loop(x) }}{% endfor %}".into(), "recursive loop"),
        ("x".repeat(300_000), "source"),
        ("{{ 1 + 1 ".into(), "syntax"),
        ("{%".repeat(100_000), "syntax"),
        (format!("{{{{ {}", "{".repeat(200_000)), "syntax"),
        ("{# ".repeat(80_000), "syntax"),
        (format!("{{% raw %}}{}", "{%  ".repeat(60_000)), "syntax"),
        (format!("{{{{ '{}", "a\\".repeat(100_000)), "syntax"),
        (format!("{{{{ {} }}}}", "1_".repeat(100_000)), "syntax"),
    ]
}
