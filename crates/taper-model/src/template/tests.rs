use super::*;

#[test]
fn generation_tags_vanish_with_their_whitespace_marks() {
    for (text, expected) in [
        ("a {% generation %}b{% endgeneration %} c", "a {# #}b{# #} c"),
        ("a {%- generation -%} b {%- endgeneration %}c", "a {#- -#} b {#- #}c"),
        ("{% if x %}{{ '{%' }}{% endif %}", "{% if x %}{{ '{%' }}{% endif %}"),
        ("{% set generation = 1 %}", "{% set generation = 1 %}"),
        ("open {% generation", "open {% generation"),
        ("{%}", "{%}"),
        ("{%} {% generation %}%}", "{%} {% generation %}%}"),
        ("", ""),
    ] {
        assert_eq!(without_generation_tags(text), expected);
    }
}

#[test]
fn what_a_template_may_cost_is_said_when_it_costs_more() {
    let error = |text: &str| {
        let rendered = ChatTemplate::new(text, serde_json::Map::new())
            .and_then(|template| template.render(&[], false, &serde_json::Map::new()));
        rendered.unwrap_err().to_string()
    };
    for (text, part) in [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "ran out of fuel"),
        (
            "{% set x = 'a' * 99999999 %}{% for i in range(9) %}{{ x ~ i }}{% endfor %}",
            "makes more than 268435456 bytes",
        ),
        (
            "{% set n = namespace(x=1) %}{% for i in range(300) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
            "200 levels deep",
        ),
        ("{{ 'a' | indent(1001) }}", "indent takes numbers from -1000 to 1000, not 1001"),
        ("{{ 'In 10000: %-10000d' | format(1) }}", "width or precision takes at most four digits"),
        (&" ".repeat(TEXT_MAX + 1), "has 131073 bytes; at most 131072 are read"),
    ] {
        assert!(error(text).contains(part), "{text:.80}: {}", error(text));
    }
}

#[test]
fn an_error_names_the_line_also_of_an_operator() {
    for (expression, part) in [
        ("1 + {}", "unsupported types"),
        ("'a' * {}", "strings can only be multiplied"),
        ("1 in 2", "containment"),
        ("1 % {}", "unsupported types"),
        ("1[2:3]", "cannot be sliced"),
        ("{} | abs", "abs"),
    ] {
        let template = ChatTemplate::new(&format!("\n\n{{{{ {expression} }}}}\n"), serde_json::Map::new()).unwrap();
        let error = template.render(&[], false, &serde_json::Map::new()).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("(in chat_template:3)"), "{expression}: {error}");
    }
}
