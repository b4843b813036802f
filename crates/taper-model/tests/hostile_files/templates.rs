//! Chat templates that would never end, or fill the memory, or nest without end.

use super::{limits, said};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, Value, json};
use taper_model::{ChatMessage, ChatTemplate, ModelError};

/// A template's text for a conversation with odd parts.
fn rendered(template: String) -> Result<String, ModelError> {
    limits::within(1 << 30, move || {
        let Value::Object(special) = json!({"bos_token": "<s>", "eos_token": "</s>"}) else { unreachable!() };
        let template = ChatTemplate::new(&template, special)?;
        let mut messages = vec![ChatMessage::new("system", ""), ChatMessage::new("user", "hi"), ChatMessage::default()];
        messages[2]
            .extra
            .insert("tool_calls".to_owned(), json!([{"function": {"name": "f", "arguments": {"a": [1, {}]}}}]));
        messages.push(ChatMessage::new("\u{0}", "x".repeat(5000)));
        let variables: Map<String, Value> =
            json!({"tools": [{"a": 1.5}], "deep": deep(100)}).as_object().unwrap().clone();
        template.render(&messages, true, &variables)
    })
}

fn deep(levels: usize) -> Value {
    (0..levels).fold(json!(1), |inner, _| json!([inner]))
}

/// More time than there is.
const LONG: &[&str] = &[
    "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in range(1000000000) %}x{% endfor %}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for x in [[1]] recursive %}{{ loop([x, x]) }}{% endfor %}",
];

/// Texts and lists that double.
const GROWING: &[&str] = &[
    "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = ns.s.replace('a', 'aaaa') %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = ns.s | replace('', ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = ns.s * 9 %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = ns.s.join([ns.s, ns.s]) %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = ns.s.join(ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = ns.s | tojson ~ ns.s | tojson %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = '%s%s' | format(ns.s, ns.s) %}{% endfor %}",
    "{% set ns = namespace(s=['ab']) %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s | length }}",
    "{% set ns = namespace(s=['ab']) %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=['ab']) %}{% for i in range(64) %}{% set ns.s = ns.s * 64 %}{% endfor %}{{ ns.s | list | length }}",
    "{% set ns = namespace(s=['ab']) %}{% for i in range(64) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=['ab']) %}{% for i in range(64) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson }}",
    "{% set ns = namespace(s=['ab']) %}{% for i in range(64) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s ~ '' }}",
    "{% set ns = namespace(s=['ab']) %}{% for i in range(64) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s == ns.s }}",
];

/// Many that are large.
const MANY: &[&str] = &[
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + ['a' * 90000000 ~ i] %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + [[i] * 90000000] %}{% endfor %}",
    "{% set s = 'a' * 90000000 %}{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l, s | upper] %}{% endfor %}",
    "{% set s = 'a' * 90000000 %}{% for i in range(99999) %}{% if 'b' in s %}{% endif %}{% endfor %}",
    "{% set s = 'a' * 90000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "{% for i in range(99999) %}{{ messages | tojson }}{% endfor %}",
];

/// Many that are made neither by an operator nor by a filter, or in pieces of which each takes more than its letters.
const COPIED: &[&str] = &[
    "{{ dict(*('x' * 100000000)) }}",
    "{% set s = 'a' * 90000000 %}{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l, s[1:]] %}{% endfor %}",
    "{% set s = 'a' * 90000000 %}{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l, s[::-1]] %}{% endfor %}",
    "{% set s = [1] * 5000000 %}{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l, s[1:]] %}{% endfor %}",
    "{% set s = '%+' * 900000 %}{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l, strftime_now(s)] %}{% endfor %}",
    "{% set s = 'a' * 90000000 %}{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l, debug(s)] %}{% endfor %}",
    "{% set ns = namespace(l=[], d={}) %}{% for i in range(9999) %}{% set ns.d = dict(ns.d, **{i | string: i}) %}{% set ns.l = [ns.l, ns.d] %}{% endfor %}",
    "{{ ('a' * 80000000) | list | length }}",
    "{{ ('a ' * 40000000) | split | length }}",
    "{{ ('a ' * 40000000).split() | length }}{{ ('a ' * 40000000).split(' ') | length }}",
    "{{ ('a\n' * 40000000).splitlines() | length }}{{ ('a\n' * 40000000) | lines | length }}",
    "{{ ('a ' * 40000000).rsplit(' ') | length }}",
    "{{ ('a\\n' * 1000000) | indent(1000) | length }}",
    "{{ ['a' * 20000] | map('replace', 'a', 'b' * 100000) | list | length }}",
    "{{ ['a\\n' * 1000000] | map('indent', 1000) | list | length }}",
    "{{ ['a' * 60000000] | map('list') | list | length }}",
    "{{ [['a'] * 100000] | map('join', 'b' * 20000) | list | length }}",
    "{% set ns = namespace(s=[1] * 2000000) %}{% for i in range(190) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s | pprint }}",
    "{% set ns = namespace(s=[1] * 100000) %}{% for i in range(190) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s | tojson(indent=100) }}",
    "{{ ([1] * 1000000) | tojson(separators=['a' * 3000, ':']) }}",
    "{{ (['a' * 1000000] * 2000) | sum(start='') | length }}",
    "{{ ('x' * 100000000) | select | length }}",
    "{{ ('x' * 100000000) | reject('none') | length }}",
    "{{ ('x' * 100000000) | selectattr('a', 'undefined') | length }}",
    "{{ ('x' * 100000000) | rejectattr('a') | length }}",
    "{{ ('x' * 100000000) | groupby('a') | length }}",
    "{{ ('x' * 5000000) | sort(attribute='a,b,c') | length }}",
    "{{ ([1] * 100000) | sort(attribute='a,' * 1000) | length }}",
    "{{ ('x' * 100000000) | map('default') | length }}",
    "{{ ('x' * 100000000) | map('first') | length }}",
    "{{ ('x' * 100000000) | map(attribute='a', default=1) | length }}",
    "{{ ('x' * 100000000) | join('') | length }}",
    "{{ ('x' * 100000000) | chain([1]) | list | length }}",
    "{{ ('x' * 100000000) | chain([1]) | last }}",
    "{{ [('x' * 100000000) | chain([1])] | tojson | length }}",
    "{{ ([1] | chain('x' * 100000000))[::-1] | length }}",
    "{{ [1] | chain('x' * 100000000) | map('default') | length }}",
    "{{ ('x' * 100000000) | zip('y' * 100000000) | list | length }}",
    "{{ ('x' * 100000000) | zip('y' | chain('y' * 100000000)) | list | length }}",
    "{{ (('x' * 100000) | chain([1])) | join('b' * 100000) | length }}",
    "{{ ('b' * 100000).join(('x' * 100000) | chain([1])) | length }}",
    "{% set ns = namespace(s='x' | chain([1])) %}{% for i in range(64) %}{% set ns.s = ns.s | chain(ns.s) %}{% endfor %}{{ ns.s | list | length }}",
    "{% set ns = namespace(s='x' | chain([1])) %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s | list | length }}",
];

/// Numbers that say how much.
const WIDE: &[&str] = &[
    "{{ tools | tojson(indent=99999999999) }}",
    "{{ tools | tojson(indent=18446744073709551615) }}",
    "{{ tools | tojson(separators=['a' * 9000000, 'b' * 9000000]) }}",
    "{{ 'a\nb' | indent(99999999999) }}",
    "{{ '%99999999999d' | format(1) }}",
    "{{ '{:>99999999999}'.format(1) }}",
    "{{ 'a'.zfill(99999999999) }}{{ 'a'.ljust(99999999999) }}{{ 'a'.center(99999999999) }}",
    "{{ [1] | batch(99999999999) | list }}",
    "{{ [1] | batch(99999999999, 0) | list }}",
    "{{ [1] | slice(99999999999) | list }}",
    "{{ strftime_now('%9999999999Y') }}{{ strftime_now('%Y' * 9000000) }}",
    "{{ 2 ** 9999999999 }}{{ 1 // 0 }}",
    "{{ 1 % 0 }}",
    "{{ (-9223372036854775807 - 1) // -1 }}",
    "{{ 1.0 | round(99999999999) }}{{ 1 | round(-99999999999) }}",
];

/// Values, calls and templates within each other.
const DEEP: &[&str] = &[
    "{% set ns = namespace(s=1) %}{% for i in range(100000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=1) %}{% for i in range(100000) %}{% set ns.s = {'a': ns.s} %}{% endfor %}{{ ns.s | tojson }}",
    "{% set ns = namespace(s=1) %}{% for i in range(100000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s ~ '' }}",
    "{% set ns = namespace(s=1) %}{% for i in range(100000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s == [ns.s] }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(100000) %}{% set ns.s = ns.s | reverse %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(100000) %}{% set ns.s = ns.s | map('string') %}{% endfor %}{{ ns.s | list }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(100000) %}{% set ns.s = ns.s | batch(2) %}{% endfor %}{{ ns.s | list }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(100000) %}{% set ns.s = ns.s | chain([2]) %}{% endfor %}{{ ns.s | list }}",
    "{% set ns = namespace(s=1) %}{% set ns.s = ns %}{{ ns }}{{ ns | tojson }}",
    "{% macro m(x) %}{{ m([x]) }}{% endmacro %}{{ m(1) }}",
    "{% macro m() %}{{ caller() }}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{% call m() %}{% endcall %}",
    "{% include 'chat_template' %}",
    "{% extends 'chat_template' %}{% block a %}{{ self.a() }}{% endblock %}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% import 'chat_template' as c %}{{ c.m() }}{% macro m() %}{% endmacro %}",
];

/// Renders each, and expects an error of those that cannot be rendered.
fn end(bombs: &[&str], wants_error: bool) {
    for bomb in bombs {
        let error = rendered((*bomb).to_owned()).err();
        assert!(!wants_error || error.is_some(), "renders: {bomb}");
        error.map(|error| said(Err::<(), _>(error)));
    }
}

#[test]
fn a_template_that_would_run_for_ever_is_an_error() {
    end(LONG, true);
}

#[test]
fn a_template_whose_texts_double_ends() {
    end(GROWING, false);
}

#[test]
fn a_template_that_keeps_many_large_values_is_an_error() {
    end(MANY, true);
}

#[test]
fn a_template_that_copies_large_values_is_an_error() {
    end(COPIED, true);
}

#[test]
fn a_template_that_asks_for_absurd_widths_ends() {
    end(WIDE, false);
}

#[test]
fn a_template_that_nests_values_without_end_ends() {
    end(DEEP, false);
}

#[test]
fn a_long_conversation_renders_by_a_template_that_looks_at_all_of_it_for_each_message() {
    let text = "{% set ns = namespace(text='') %}{% for m in messages %}{% if m.content is string and 'x' in m.content %}\
                {% set ns.text = ns.text ~ m.role | upper + ': ' ~ m.content | trim | replace('a', 'b') %}{% endif %}\
                {{ (messages | selectattr('role', 'equalto', 'user') | list | length) * 2 + loop.index }}\
                {{ messages[loop.index0:] | length }}{% endfor %}{{ messages | tojson }}";
    let template = ChatTemplate::new(text, Map::new()).unwrap();
    let messages: Vec<_> = (0..300).map(|_| ChatMessage::new("user", "abcx".repeat(250))).collect();
    let rendered = template.render(&messages, true, &Map::new()).unwrap();
    assert!(rendered.starts_with("601300602299") && rendered.len() > 300_000, "{:.100}", rendered);
}

#[test]
fn what_has_no_length_is_walked_through_like_a_list() {
    for (template, text) in [
        ("{{ 'ab' | chain([1], 'c') | list }}", "['a', 'b', 1, 'c']"),
        ("{{ 'ab' | chain([1]) | chain('c') | last }}", "c"),
        ("{{ 'ab' | chain([1]) | map('default') | join('-') }}", "a-b-1"),
        ("{{ 'ab' | zip('cd' | chain([1])) | list }}", "[['a', 'c'], ['b', 'd']]"),
        ("{{ ('ab' | chain([1]))[::-1] | list }}", "[1, 'b', 'a']"),
        ("{{ '-'.join('ab' | chain('c')) }}", "a-b-c"),
        ("{{ 'ab' | select | list }}{{ 'ab' | map('upper') | list }}", "['a', 'b']['A', 'B']"),
    ] {
        assert_eq!(rendered(template.to_owned()).unwrap(), text, "{template}");
    }
}

#[test]
fn templates_nested_without_end_are_errors() {
    for (open, close) in [
        ("{{ [", "] }}"),
        ("{{ (", ") }}"),
        ("{{ -", " }}"),
        ("{{ not ", " }}"),
        ("{{ {1: ", "} }}"),
        ("{{ a.", " }}"),
        ("{{ a[", " }}"),
        ("{{ a(", " }}"),
        ("{{ a|b", " }}"),
        ("{{ 1 if ", " }}"),
        ("{{ a ~ ", "}}"),
        ("{{ a ** ", "}}"),
    ] {
        let (start, part) = open.split_at(3);
        let end = if close.contains(' ') { close.split_at(close.find(' ').unwrap()).0 } else { "" };
        // As deep as the longest template can be, but for operators, the compiling of which takes seconds there.
        let deepest = (128 << 10) / (part.len() + end.len()) - 20;
        for depth in [100, if open.contains('~') || open.contains('*') { 2000 } else { deepest }, 1_000_000] {
            let text = format!("{start}{}1{} }}}}", part.repeat(depth), end.repeat(depth));
            said(rendered(text));
        }
    }
    for (open, close) in
        [("{% if 1 %}", "{% endif %}"), ("{% for a in [1] %}", "{% endfor %}"), ("{% set a %}", "{% endset %}")]
    {
        for depth in [100, (128 << 10) / (open.len() + close.len()) - 1] {
            said(rendered(open.repeat(depth) + "x" + &close.repeat(depth)));
        }
    }
}

/// Something that may stand in a template.
fn part() -> impl Strategy<Value = String> {
    let values = || {
        select(vec![
            "messages",
            "messages[0]",
            "messages[-9]",
            "messages[0].content",
            "tools",
            "deep",
            "x",
            "ns.s",
            "loop",
            "loop.index",
            "none",
            "true",
            "-1",
            "0",
            "1e400",
            "99999999999999999999999",
            "'a'",
            "'%s%d%x'",
            "[]",
            "{}",
            "[1, 'a', none]",
            "{'a': [1]}",
            "range(9)",
            "namespace(a=1)",
            "caller",
            "self",
            "m",
            "raise_exception",
            "'é▁🙂'",
            "undefined.a.b",
            "messages[1:0:-1]",
            "messages[::0]",
            "'abc'[99:]",
            "strftime_now",
            "(1, 2)",
            "cycler",
            "joiner()",
            "lipsum",
        ])
    };
    let operators =
        select(vec!["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and", "or", "is", "."]);
    let filters = select(vec![
        "abs",
        "attr('a')",
        "batch(2)",
        "bool",
        "capitalize",
        "chain([1])",
        "count",
        "d('x')",
        "default",
        "dictsort",
        "escape",
        "first",
        "float",
        "format(1, 'a')",
        "groupby('role')",
        "indent(4)",
        "int",
        "items",
        "join(',')",
        "join",
        "last",
        "length",
        "lines",
        "list",
        "lower",
        "map('upper')",
        "map(attribute='role')",
        "max",
        "min",
        "pprint",
        "reject('none')",
        "rejectattr('a')",
        "replace('a', 'b')",
        "reverse",
        "round(2)",
        "safe",
        "select('string')",
        "selectattr('role')",
        "slice(3)",
        "sort",
        "split('a')",
        "string",
        "sum",
        "title",
        "tojson",
        "tojson(indent=2)",
        "trim",
        "unique",
        "upper",
        "zip([1])",
        "nothing",
        "tojson(1, 2, 3)",
        "tojson(indent=-1)",
        "sort(attribute='role')",
        "map('nothing')",
        "urlencode",
    ]);
    let methods = select(vec![
        "upper()",
        "split()",
        "split('')",
        "strip('a')",
        "startswith('a')",
        "get('a')",
        "items()",
        "keys()",
        "replace('', 'a')",
        "join(['a'])",
        "format(1)",
        "count('')",
        "find('')",
        "nothing()",
        "a.b.c",
        "__class__",
        "append(1)",
        "rsplit('a', -1)",
        "splitlines()",
        "title()",
        "isdigit()",
        "zfill(9)",
        "encode()",
        "index('q')",
        "lstrip()",
        "removeprefix('a')",
    ]);
    let expression = (values(), operators, values(), filters, methods, 0u8..6).prop_map(
        |(a, op, b, filter, method, form)| match form {
            0 => format!("{a} {op} {b}"),
            1 => format!("{a} | {filter}"),
            2 => format!("({a}).{method}"),
            3 => format!("({a} {op} {b}) | {filter} | {filter}"),
            4 => format!("{a}({b})"),
            _ => format!("{a}[{b}] is {filter}"),
        },
    );
    (expression, values(), 0u8..9).prop_map(|(e, v, form)| match form {
        0 => format!("{{% for x in {e} %}}{{{{ x }}}}{{{{ loop.index }}}}{{% endfor %}}"),
        1 => format!("{{% set x = {e} %}}{{{{ x }}}}"),
        2 => format!("{{% if {e} %}}a{{% elif {v} %}}b{{% else %}}c{{% endif %}}"),
        3 => format!("{{% set ns.s = {e} %}}"),
        4 => format!("{{% macro m(x={e}) %}}{{{{ x }}}}{{% endmacro %}}{{{{ m({v}) }}}}"),
        5 => format!("{{% set ns = namespace(s={e}) %}}"),
        6 => format!("{{% generation %}}{{%- {e} -%}}"),
        _ => format!("{{{{ {e} }}}}"),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn a_template_of_odd_parts_renders_or_is_an_error(parts in prop::collection::vec(part(), 1..5)) {
        said(rendered(parts.concat()));
    }

    #[test]
    fn a_template_of_odd_characters_renders_or_is_an_error(text in "(\\{\\{|\\{%|%\\}|\\}\\}|#|-|[a-z]{1,6}|[ 0-9.,|~(')\\[\\]]){0,30}") {
        said(rendered(text));
    }
}
