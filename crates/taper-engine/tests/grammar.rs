//! Answers that must fit a grammar, by a stub whose tokens are bytes and that would rather say something else.

use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use taper_attention::{Artifacts, AttentionSpec};
use taper_engine::stub::StubBackend;
use taper_engine::{
    Engine, EngineConfig, Event, Events, Finish, Limits, Request, RequestError, SamplingParams, Shape, StopRules, Usage,
};

/// What a stub says by itself, and no grammar here has.
const SCRIPT: &str = "~~~~ ~~~~~~~ ~~ ~~~ ~~~~";

fn engine() -> Engine {
    StubBackend::new(SCRIPT).engine(EngineConfig::default())
}

fn request(engine: &Engine, shape: &Shape, seed: u64) -> Request {
    Request {
        id: "test".into(),
        prompt: b"go on: ".iter().copied().map(u32::from).collect(),
        // So hot that bytes come by chance.
        sampling: SamplingParams { temperature: 2.0, seed, ..SamplingParams::default() },
        grammar: Some(engine.grammar(shape).unwrap()),
        stop: StopRules { max_tokens: Some(300), ..StopRules::default() },
        choices: 1,
        ..Request::default()
    }
}

/// Each choice's text and how it ended.
fn run(engine: &Engine, request: Request) -> (Vec<(String, Finish)>, Result<Usage, RequestError>) {
    collect(engine.submit(request).unwrap())
}

fn collect(mut events: Events) -> (Vec<(String, Finish)>, Result<Usage, RequestError>) {
    let mut answers = Vec::new();
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Prefilled | Event::Prompt(_) | Event::Embedding(_) => {}
            Event::Delta(delta) => {
                answers.resize(answers.len().max(delta.choice + 1), (String::new(), None));
                answers[delta.choice].0.push_str(&delta.text);
                answers[delta.choice].1 = delta.finish;
            }
            Event::Done(usage) => {
                let whole = |(text, finish): (String, Option<Finish>)| (text, finish.expect("an end"));
                return (answers.into_iter().map(whole).collect(), Ok(usage));
            }
            Event::Failed(error) => return (Vec::new(), Err(error)),
        }
    }
    panic!("no last event");
}

fn text(engine: &Engine, shape: &Shape, seed: u64) -> (String, Finish) {
    run(engine, request(engine, shape, seed)).0.remove(0)
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["cat", "dog"]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": false,
    })
}

fn check_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    let map = value.as_object().unwrap();
    assert!(map.keys().all(|key| ["name", "age", "kind", "tags"].contains(&key.as_str())), "{text}");
    assert!(map["name"].as_str().unwrap().chars().count() <= 8, "{text}");
    assert!((0..=120).contains(&map["age"].as_i64().unwrap()), "{text}");
    assert!(["cat", "dog"].contains(&map["kind"].as_str().unwrap()), "{text}");
    if let Some(tags) = map.get("tags") {
        let tags = tags.as_array().unwrap();
        assert!(tags.len() <= 3 && tags.iter().all(Value::is_boolean), "{text}");
    }
}

#[test]
fn json_fits_its_schema() {
    let engine = engine();
    let shape = Shape::Json(person());
    let texts: Vec<String> = (0..40)
        .map(|seed| {
            let (text, finish) = text(&engine, &shape, seed);
            assert!(matches!(finish, Finish::Whole | Finish::Eos), "{finish:?}: {text}");
            check_person(&text);
            text
        })
        .collect();
    assert!(texts.iter().any(|text| *text != texts[0]), "they are drawn");
}

#[test]
fn an_answer_ends_where_nothing_can_follow() {
    let engine = engine();
    let (text, finish) = text(&engine, &Shape::Regex("[0-9]{3}".into()), 1);
    assert!(text.len() == 3 && text.bytes().all(|b| b.is_ascii_digit()), "{text}");
    assert_eq!(finish, Finish::Whole);
    let texts = ["north".to_string(), "south \"pole\"\n".into(), "süd".into()];
    let mut seen = [false; 3];
    for seed in 0..60 {
        let (text, finish) = self::text(&engine, &Shape::Choice(texts.to_vec()), seed);
        assert_eq!(finish, Finish::Whole);
        seen[texts.iter().position(|t| *t == text).unwrap_or_else(|| panic!("{text}"))] = true;
    }
    assert_eq!(seen, [true; 3]);
}

#[test]
fn a_grammar_that_may_go_on_ends_by_the_end_token() {
    let engine = engine();
    let lark = Shape::Lark("start: item (\",\" item)*\nitem: /[a-c]/ | \"(\" start \")\"".into());
    for seed in 0..30 {
        let (text, finish) = text(&engine, &lark, seed);
        assert!(matches!(finish, Finish::Eos | Finish::Length), "{finish:?}: {text}");
        let depths = text.chars().scan(0i32, |depth, c| {
            *depth += i32::from(c == '(') - i32::from(c == ')');
            Some(*depth)
        });
        assert!(depths.clone().all(|depth| depth >= 0), "{text}");
        assert!(finish == Finish::Length || depths.last() == Some(0), "{text}");
        assert!(text.chars().all(|c| "abc(),".contains(c)), "{text}");
    }
}

#[test]
fn choices_drafts_and_drawing_on_the_device_change_nothing() {
    let shape = Shape::Json(person());
    let alone = engine();
    let mut backend = StubBackend::new(SCRIPT);
    backend.draws = true;
    let probe = Arc::clone(&backend.probe);
    let drawing = backend.engine(EngineConfig::default());
    for seed in 0..20 {
        let three = |engine: &Engine| Request { choices: 3, ..request(engine, &shape, seed) };
        let (texts, _) = run(&alone, three(&alone));
        texts.iter().for_each(|(text, _)| check_person(text));
        assert!(texts[0] != texts[1] || texts[1] != texts[2]);
        assert_eq!(texts, run(&drawing, three(&drawing)).0);
        let spec = AttentionSpec::from_json(
            &json!({"speculate": {"method": "streaming_llm", "tokens": 3}}),
            "attention",
            &Artifacts::default(),
        );
        let drafted = Request { attention: Arc::new(spec.unwrap()), ..three(&alone) };
        assert_eq!(texts, run(&alone, drafted).0, "seed {seed}");
    }
    assert_eq!(probe.drawn.load(Ordering::SeqCst), 0, "a device knows no grammar");
}

#[test]
fn penalties_biases_and_log_probabilities_go_with_a_grammar() {
    let engine = engine();
    let digits = Shape::Regex("[0-9]{20}".into());
    let sampling = SamplingParams {
        temperature: 0.0,
        frequency_penalty: 1.0,
        logit_bias: vec![(u32::from(b'7'), 0.5), (u32::from(b'x'), 100.0)],
        ..SamplingParams::default()
    };
    let request = Request { sampling, logprobs: Some(2), ..request(&engine, &digits, 0) };
    let (answers, usage) = run(&engine, request);
    assert_eq!(usage.unwrap().completion_tokens, 20, "and no end token");
    let count = |digit: char| answers[0].0.chars().filter(|c| *c == digit).count();
    assert!(('0'..='9').all(|digit| count(digit) == 2), "each taken once before any comes again: {}", answers[0].0);
    assert!(answers[0].0.starts_with('7'));
}

/// Grammars, counts that penalties go by, and least lengths go on where an answer was interrupted.
#[test]
fn an_answer_that_loses_its_place_goes_on_as_if_it_had_not() {
    let alone = engine();
    let small = StubBackend::new(SCRIPT);
    // Five blocks for four requests, each of which takes one to begin with and up to three in the end.
    let limits = Limits { cache_tokens: 5 * 64, ..small.limits };
    let small = StubBackend { limits, ..small }.engine(EngineConfig::default());
    let words = Shape::Lark("start: /[a-d]{2,6}/ (\" \" /[a-d]{2,6}/)*".into());
    for round in 0..5 {
        let requests = |engine: &Engine| -> Vec<Request> {
            let shapes =
                [Some(Shape::Json(person())), Some(words.clone()), Some(Shape::Regex("[0-9]{150}".into())), None];
            let of = |(i, shape): (usize, Option<Shape>)| Request {
                sampling: SamplingParams {
                    temperature: 1.5,
                    seed: 10 * round + i as u64,
                    frequency_penalty: 0.7,
                    presence_penalty: 0.3,
                    repetition_penalty: 1.2,
                    banned: [vec![u32::from(b'a'), u32::from(b'b')]].into(),
                    ..SamplingParams::default()
                },
                grammar: shape.map(|shape| engine.grammar(&shape).unwrap()),
                stop: StopRules { max_tokens: Some(170), min_tokens: 120, ..StopRules::default() },
                logprobs: Some(1),
                ..request(engine, &words, 0)
            };
            shapes.into_iter().enumerate().map(of).collect()
        };
        let expected: Vec<_> = requests(&alone).into_iter().map(|request| run(&alone, request).0).collect();
        let together: Vec<_> = small.submit_all(requests(&small)).unwrap().into_iter().map(collect).collect();
        for (i, (together, expected)) in together.into_iter().zip(expected).enumerate() {
            assert_eq!(together.0, expected, "round {round}, request {i}");
        }
    }
    assert!(small.load().counts.preemptions > 0);
    assert_eq!(alone.load().counts.preemptions, 0);
}

#[test]
fn what_cannot_be_kept_to_is_refused_in_words() {
    let engine = engine();
    for (shape, says) in [
        (Shape::Json(json!({"type": "nothing"})), "type"),
        (Shape::Json(json!({"$ref": "http://example.com/schema"})), "example.com"),
        (Shape::Json(json!(false)), "Unsatisfiable"),
        (Shape::Regex("(".into()), "regex"),
        (Shape::Lark("start: other".into()), "other"),
        (Shape::Lark(String::new()), "start"),
        (Shape::Choice(Vec::new()), "no text"),
        (Shape::Regex("(?=a)b".into()), "look"),
    ] {
        let error = engine.grammar(&shape).expect_err(&format!("{shape:?}")).to_string();
        assert!(error.to_lowercase().contains(&says.to_lowercase()) && error.len() < 600, "{shape:?}: {error}");
    }
}

/// What would take its compiler a stack or an age ends in words, and the process goes on.
#[test]
fn grammars_made_to_hurt_are_refused() {
    let engine = engine();
    let chain = |links: usize| {
        let links = (0..links).map(|i| (format!("a{i}"), json!({"$ref": format!("#/$defs/a{}", i + 1)})));
        let last = [(format!("a{}", links.len()), json!({"type": "integer"}))];
        json!({"$ref": "#/$defs/a0", "$defs": links.chain(last).collect::<serde_json::Map<_, _>>()})
    };
    let rules = |count: usize| {
        let rules: Vec<String> = (0..count).map(|i| format!("a{i}: a{}\n", i + 1)).collect();
        format!("start: a0\n{}a{count}: \"x\"\n", rules.concat())
    };
    // Whether any text fits so many is found by trying: 16 of them took all memory.
    let all = |count: usize| {
        let patterns = (0..count).map(|k| json!({"type": "string", "pattern": format!("(a|b)*a(a|b){{{k}}}")}));
        json!({"allOf": patterns.collect::<Vec<_>>()})
    };
    // Of what names another twice, and that the next one, the compiler makes one long expression.
    let twice: String = (0..17).map(|i| format!("A{i}: A{} A{}\n", i + 1, i + 1)).collect();
    let spaces = |option: &str| json!({"x-guidance": {option: "(a|b)?".repeat(20_000)}, "type": "object"});
    let patterns: serde_json::Map<_, _> = (0..5000).map(|i| (format!("^a{i:05}$"), json!({}))).collect();
    for (shape, says) in [
        (Shape::Json(chain(5000)), "references"),
        (Shape::Lark(rules(5000)), "rules"),
        (Shape::Lark(format!("start: %json {}", chain(5000))), "references"),
        (Shape::Json(json!({"patternProperties": patterns})), "patternProperties"),
        (Shape::Regex("a".repeat(300_000)), "bytes"),
        (Shape::Regex("(a|b)?".repeat(20_000)), "bytes in one regular expression"),
        (Shape::Json(json!({"type": "string", "pattern": "(a|b)?".repeat(20_000)})), "bytes in one regular expression"),
        (Shape::Lark(format!("start: /{}/", "(a|b)?".repeat(20_000))), "bytes in one regular expression"),
        (Shape::Lark(format!("start: A0\n{twice}A17: /(a|b)?/\n")), "bytes in one regular expression"),
        (Shape::Json(spaces("whitespace_pattern")), "bytes in one regular expression"),
        (Shape::Json(spaces("item_separator")), "bytes in one regular expression"),
        (Shape::Json(spaces("key_separator")), "bytes in one regular expression"),
        (Shape::Json(all(14)), "patterns that one text must fit"),
        (Shape::Lark(format!("start: %json {}", all(14))), "patterns that one text must fit"),
        (Shape::Lark(format!("start: A\nA: {}", ["/(a|b)*/"; 14].join(" & "))), "patterns that one text must fit"),
        // A quote in a comment, or in a mark, begins no text.
        (
            Shape::Lark(format!("start: A\n# \"\nA: {}\n# \"", ["/(a|b)*/"; 14].join(" & "))),
            "patterns that one text must fit",
        ),
    ] {
        let error = engine.grammar(&shape).expect_err(says).to_string();
        assert!(error.contains(says) && error.len() < 200, "{error}");
    }
    // As deep as is taken.
    let (text, _) = text(&engine, &Shape::Json(chain(900)), 1);
    assert!(text.parse::<f64>().is_ok(), "{text}");
    assert_eq!(self::text(&engine, &Shape::Lark(rules(900)), 1).0, "x");
}

/// A format that nobody here knows holds an answer to nothing, and a value that looks like one stays.
#[test]
fn unknown_formats_are_no_more_than_advice() {
    let engine = engine();
    let schema = json!({"type": "integer", "format": "int64", "minimum": 7, "maximum": 7});
    assert_eq!(text(&engine, &Shape::Json(schema), 1).0, "7");
    let value = json!({"format": "int64"});
    let answer = text(&engine, &Shape::Json(json!({"const": value})), 1).0;
    assert_eq!(serde_json::from_str::<Value>(&answer).unwrap(), value);
    let date = text(&engine, &Shape::Json(json!({"type": "string", "format": "date"})), 1).0;
    assert_eq!(date.len(), "\"2026-11-26\"".len(), "{date}");
}

#[test]
fn an_answer_has_its_least_tokens_before_it_may_end() {
    let engine = StubBackend::new("ab").engine(EngineConfig::default());
    let with = |min_tokens, strings: &[&str]| {
        let stop = StopRules {
            min_tokens,
            max_tokens: Some(40),
            strings: strings.iter().map(|s| (*s).to_string()).collect(),
            ..StopRules::default()
        };
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let request = Request { stop, sampling, grammar: None, ..request(&engine, &Shape::Regex("a".into()), 0) };
        let (answers, usage) = run(&engine, request);
        (answers[0].clone(), usage.unwrap().completion_tokens)
    };
    assert_eq!(with(0, &[]), (("ab".into(), Finish::Eos), 3));
    assert_eq!(with(2, &[]), (("ab".into(), Finish::Eos), 3));
    // At the end of the script any byte is as good; the first of equals is taken.
    assert_eq!(with(3, &[]), (("ab\0ab".into(), Finish::Eos), 6));
    assert_eq!(with(0, &["b"]), (("a".into(), Finish::StopString("b".into())), 2));
    assert_eq!(with(2, &["b"]), (("ab".into(), Finish::Eos), 3));
    assert_eq!(with(4, &["b"]), (("ab\0a".into(), Finish::StopString("b".into())), 5));
    // A grammar's end goes before it, also where the end is one of the request's own stops.
    let stop = StopRules { min_tokens: 9, max_tokens: Some(40), tokens: vec![u32::from(b'}')], ..StopRules::default() };
    let request = Request { stop, ..request(&engine, &Shape::Regex("x}".into()), 0) };
    assert_eq!(run(&engine, request).0, [("x".into(), Finish::StopToken(u32::from(b'}')))]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Whatever the grammar and the seed, one answer after another fits it.
    #[test]
    fn any_repetition_of_any_letters(low in 0usize..6, more in 0usize..6, letters in "[a-z]{1,6}", seed in 0u64..1000) {
        let engine = engine();
        let shape = Shape::Regex(format!("(x[{letters}]){{{low},{}}}", low + more));
        let (text, finish) = text(&engine, &shape, seed);
        prop_assert_ne!(finish, Finish::Length);
        prop_assert!(text.len() % 2 == 0 && (low..=low + more).contains(&(text.len() / 2)), "{}", text);
        let pairs: Vec<char> = text.chars().collect();
        prop_assert!(pairs.chunks(2).all(|pair| pair[0] == 'x' && letters.contains(pair[1])), "{}", text);
    }
}
