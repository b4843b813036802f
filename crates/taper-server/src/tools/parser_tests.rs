use super::*;
use proptest::prelude::*;

/// What is said, with neighbours of a kind joined: text as it is, `name(arguments)` for each call.
fn joined(said: Vec<Said>) -> Vec<String> {
    let (mut all, mut spoke) = (Vec::<String>::new(), false);
    for said in said {
        let speaks = matches!(said, Said::Text(_));
        match (said, all.last_mut()) {
            (Said::Text(text), Some(last)) if spoke => last.push_str(&text),
            (Said::Text(text), _) => all.push(text),
            (Said::Call { name }, _) => all.push(format!("{name}:")),
            (Said::Arguments(text), last) => last.expect("a call before its arguments").push_str(&text),
        }
        spoke = speaks;
    }
    all
}

fn parse(format: CallFormat, pieces: &[&str]) -> Vec<String> {
    joined(said(format, pieces, false))
}

fn said(format: CallFormat, pieces: &[&str], forced: bool) -> Vec<Said> {
    let mut parser = Parser::new(format, vec!["f".into(), "g".into()], None, usize::MAX, forced);
    let mut said: Vec<Said> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    said.extend(parser.finish());
    assert!(said.iter().all(|s| !matches!(s, Said::Text(text) | Said::Arguments(text) if text.is_empty())));
    said
}

/// Answers, by format, and what they say.
const CASES: &[(CallFormat, &str, &[&str])] = &[
    (CallFormat::Tagged, "Hello.", &["Hello."]),
    (CallFormat::Tagged, "1 <tool 2 <tool_", &["1 <tool 2 <tool_"]),
    (CallFormat::Tagged, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>", &["f:{\"x\": 1}"]),
    (
        CallFormat::Tagged,
        "I look.\n<tool_call>{\"arguments\": {}, \"name\": \"f\"}</tool_call>\n<tool_call>\n{\"name\":\"h\",\"arguments\":{\"a\":[\"}\"]}}\n</tool_call>\n",
        &["I look.\n", "f:{}", "h:{\"a\":[\"}\"]}"],
    ),
    (
        CallFormat::Tagged,
        "<tool_call>[{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": {}}]</tool_call> so.",
        &["f:{}", "g:{}", " so."],
    ),
    (CallFormat::Tagged, "<tool_call>{\"name\": \"f\"}</tool_call>", &["f:{}"]),
    (CallFormat::Tagged, "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"x\\\": 1}\"}", &["f:{\"x\": 1}"]),
    (CallFormat::Tagged, "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": ", &["f:{\"x\": "]),
    (CallFormat::Tagged, "<tool_call>{\"name\": \"f\", \"arguments\": null}</tool_call>", &["f:{}"]),
    // A brace too few loses nothing of what follows.
    (
        CallFormat::Tagged,
        "<tool_call>{\"name\":\"f\",\"arguments\":{\"x\":1}\n</tool_call>\n<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>",
        &["f:{\"x\":1}", "g:{}"],
    ),
    (CallFormat::Tagged, "<tool_call>{\"name\": \"f\"</tool_call> so", &["f:{}", " so"]),
    (
        CallFormat::Tagged,
        "<tool_call>{\"name\":\"f\",\"arguments\":{\"x\":\"</tool_call>\"}}</tool_call>",
        &["f:{\"x\":\"</tool_call>\"}"],
    ),
    (CallFormat::Tagged, "<tool_call>{\"name\": ", &["{\"name\": "]),
    (CallFormat::Tagged, "<tool_call>what?", &["what?"]),
    (CallFormat::Tagged, "{\"name\": \"f\", \"arguments\": {}}", &["{\"name\": \"f\", \"arguments\": {}}"]),
    (CallFormat::Llama, "{\"name\": \"f\", \"parameters\": {\"x\": \"é\"}}", &["f:{\"x\": \"é\"}"]),
    (CallFormat::Llama, "  {\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}", &["f:{}"]),
    (
        CallFormat::Llama,
        "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {\"y\": 2}}",
        &["f:{}", "g:{\"y\": 2}"],
    ),
    (
        CallFormat::Llama,
        "{\"name\": \"Ada\", \"parameters\": {}} is it",
        &["{\"name\": \"Ada\", \"parameters\": {}} is it"],
    ),
    (CallFormat::Llama, "{\"age\": 3}", &["{\"age\": 3}"]),
    (
        CallFormat::Llama,
        "It is {\"name\": \"f\", \"parameters\": {}}",
        &["It is {\"name\": \"f\", \"parameters\": {}}"],
    ),
    (CallFormat::Llama, "{\"name\": \"f\"", &["{\"name\": \"f\""]),
    (
        CallFormat::Mistral,
        "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 1}}, {\"name\": \"g\", \"arguments\": {}}]",
        &["f:{\"x\": 1}", "g:{}"],
    ),
    (CallFormat::Mistral, "So: [TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}] ok", &["So: ", "f:{}", " ok"]),
    (CallFormat::Mistral, "[1, 2] is no call", &["[1, 2] is no call"]),
    (
        CallFormat::MistralNamed,
        "[TOOL_CALLS]f[ARGS]{\"x\": {\"y\": 1}}[TOOL_CALLS]g[ARGS]{}",
        &["f:{\"x\": {\"y\": 1}}", "g:{}"],
    ),
    (CallFormat::MistralNamed, "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}", &["f:{}"]),
    (CallFormat::MistralNamed, "[TOOL_CALLS]f{\"x\": 1}", &["f:{\"x\": 1}"]),
];

#[test]
fn calls_are_found_in_every_format() {
    for (format, text, said) in CASES {
        assert_eq!(parse(*format, &[text]), *said, "{format:?} {text}");
    }
}

#[test]
fn arguments_stream_as_they_come() {
    let mut parser = Parser::new(CallFormat::Tagged, vec!["f".into()], None, 1, false);
    assert_eq!(parser.push("<tool_call>\n{\"name\": \"f\", \"argu"), []);
    assert_eq!(parser.push("ments\": {\"x"), [Said::Call { name: "f".into() }, Said::Arguments("{\"x".into())]);
    assert_eq!(parser.push("\": 1"), [Said::Arguments("\": 1".into())]);
    assert_eq!(parser.push("}}"), [Said::Arguments("}".into())]);
    assert_eq!(
        parser.push("\n</tool_call>\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>"),
        [],
        "one too many"
    );
    assert_eq!((parser.finish(), parser.calls), (Vec::new(), 1));
}

proptest! {
    /// Wherever an answer is cut, the same is said.
    #[test]
    fn cuts_do_not_matter(case in 0..CASES.len(), cuts in prop::collection::vec(0usize..120, 0..12)) {
        let (format, text, said) = CASES[case];
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|at| *at <= text.len() && text.is_char_boundary(*at)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        prop_assert_eq!(parse(format, &pieces), said);
    }

    /// Whatever comes is read to its end, and nothing without a mark is lost.
    #[test]
    fn any_text_is_read(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "{", "}", "\"name\"", ":", "\"f\"",
            ",", "\"arguments\"", "[", "]", " ", "\n", "é", "\\", "\"",
        ]), 0..24),
        format in prop::sample::select(vec![CallFormat::Tagged, CallFormat::Llama, CallFormat::Mistral, CallFormat::MistralNamed]),
    ) {
        let text = parts.concat();
        let whole = parse(format, &[&text]);
        let pieces: Vec<&str> = parts.clone();
        prop_assert_eq!(&parse(format, &pieces), &whole);
        let mark = Parser::new(format, Vec::new(), None, 1, false).mark();
        let bare = format == CallFormat::Llama && text.trim_start().starts_with('{');
        if !text.contains(mark) && !bare {
            prop_assert_eq!(whole.concat(), text);
        }
    }
}

/// In every format, and none of them counts as the one call that may be made.
#[test]
fn calls_of_functions_that_are_not_allowed_are_dropped() {
    for (format, text) in [
        (
            CallFormat::Tagged,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call><tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>",
        ),
        (
            CallFormat::Mistral,
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": 1}}, {\"name\": \"g\", \"arguments\": {}}]",
        ),
        (CallFormat::MistralNamed, "[TOOL_CALLS]f[ARGS]{\"x\": 1}[TOOL_CALLS]g[ARGS]{}"),
        (CallFormat::Llama, "{\"name\": \"f\", \"parameters\": {\"x\": 1}}; {\"name\": \"g\", \"parameters\": {}}"),
    ] {
        let names = || vec!["f".into(), "g".into()];
        for (only, most, expected) in [
            (None, usize::MAX, &["f", "g"][..]),
            (None, 1, &["f"]),
            (Some(vec!["g".to_string()]), usize::MAX, &["g"]),
            (Some(vec!["g".to_string()]), 1, &["g"]),
            (Some(vec!["f".to_string()]), 1, &["f"]),
        ] {
            for step in [1, 7, text.len()] {
                let mut parser = Parser::new(format, names(), only.clone(), most, false);
                let mut said = Vec::new();
                for piece in text.as_bytes().chunks(step) {
                    said.extend(parser.push(std::str::from_utf8(piece).unwrap()));
                }
                said.extend(parser.finish());
                let called = said
                    .iter()
                    .filter_map(|said| if let Said::Call { name } = said { Some(name.as_str()) } else { None });
                assert_eq!(called.collect::<Vec<_>>(), expected, "{format:?} {only:?} {most} {said:?}");
                let told = said.iter().any(|said| matches!(said, Said::Text(text) if text.contains("name")));
                assert!(!told && !parser.within(), "{format:?} {said:?}");
            }
        }
    }
}

#[test]
fn an_end_within_a_call_is_known() {
    let mut parser = Parser::new(CallFormat::Tagged, vec!["f".into()], None, usize::MAX, false);
    for (text, within) in [
        ("<tool_call>{\"name\": \"f\",", false),
        (" \"arguments\": {\"x\"", true),
        (": 1", true),
        // Nothing is left to say of it.
        ("}", false),
        (", \"odd\": {", false),
        ("}}", false),
        ("</tool_call>", false),
    ] {
        parser.push(text);
        assert_eq!(parser.within(), within, "{text}");
    }
    let mut parser = Parser::new(CallFormat::MistralNamed, vec!["f".into()], None, usize::MAX, false);
    for (text, within) in [("[TOOL_CALLS]f[ARGS]", false), ("{\"x\": {}", true), ("}", false)] {
        parser.push(text);
        assert_eq!(parser.within(), within, "{text}");
    }
}

/// Wherever an answer is cut: with calls that were asked for nothing is text, and otherwise nothing after the first one.
#[test]
fn an_unfinished_call_is_no_text_where_it_can_be_nothing_else() {
    for (format, first, second) in [
        (
            CallFormat::Tagged,
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}",
            "\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
        ),
        (
            CallFormat::Mistral,
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": 1}}",
            ", {\"name\": \"g\", \"arguments\": {}}]",
        ),
        (CallFormat::MistralNamed, "[TOOL_CALLS]f[ARGS]{\"x\": 1}", "[TOOL_CALLS]g[ARGS]{}"),
        (CallFormat::Llama, "{\"name\": \"f\", \"parameters\": {\"x\": 1}}", "; {\"name\": \"g\", \"parameters\": {}}"),
    ] {
        let all = [first, second].concat();
        let whole = parse(format, &[&all]);
        assert_eq!(whole, ["f:{\"x\": 1}", "g:{}"], "{format:?}");
        for end in 0..=all.len() {
            let cut = &all[..end];
            for forced in [true, false] {
                let said = said(format, &[cut], forced);
                let text = said.iter().any(|said| matches!(said, Said::Text(_)));
                assert!(!text || !forced && end < first.len(), "{cut}: {said:?}");
                if forced {
                    let said = joined(said);
                    assert!(said.iter().zip(&whole).all(|(said, whole)| whole.starts_with(said)), "{cut}: {said:?}");
                }
            }
        }
    }
}
