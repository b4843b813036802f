use super::*;

#[test]
fn generation_tags_vanish_with_their_whitespace_marks() {
    for (text, expected) in [
        ("a {% generation %}b{% endgeneration %} c", "a {# #}b{# #} c"),
        ("a {%- generation -%} b {%- endgeneration %}c", "a {#- -#} b {#- #}c"),
        ("{% if x %}{{ '{%' }}{% endif %}", "{% if x %}{{ '{%' }}{% endif %}"),
        ("{% set generation = 1 %}", "{% set generation = 1 %}"),
        ("open {% generation", "open {% generation"),
        ("", ""),
    ] {
        assert_eq!(without_generation_tags(text), expected);
    }
}
