//! Whatever a body holds, the server answers it: with what was asked for, or with a 4xx that says what is wrong.

mod support;

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use support::{Server, server};
use tokio::runtime::Runtime;

const PATHS: [&str; 6] =
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"];

/// A body with much in it, for each path.
fn bodies() -> Vec<(&'static str, Value)> {
    let tools = json!([{"type": "function", "function": {"name": "f", "description": "d", "parameters":
        {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}]);
    let attention = json!({
        "prefill": {"method": "delta", "gamma": 16, "base": {"method": "streaming_llm", "sink": 4, "window": 64}},
        "decode": {"method": "vattention", "epsilon": 0.1, "delta": 0.1, "top": {"method": "quest", "page": 16}, "top_k": 0.1},
        "question": "decode", "question_tokens": 1, "audit": 0.5, "trace": true,
        "speculate": {"method": {"method": "quest", "k": 16}, "tokens": 2, "lookup": 2}});
    let messages = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": null, "tool_calls":
            [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "2"}]);
    let common = json!({"max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.1, "seed": 7, "logit_bias": {"3": -1}, "n": 2,
        "stop": ["q"], "stop_token_ids": [1], "ignore_eos": false, "skip_special_tokens": true, "timeout": 20, "priority": 1,
        "bad_words": ["bb"], "stream": true,
        "stream_options": {"include_usage": true}, "attention": attention, "vllm_xargs": {"other": 1}});
    let with = |more: Value| {
        let mut body = common.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let schema = json!({"type": "json_schema", "json_schema": {"name": "n", "schema":
        {"type": "object", "properties": {"a": {"type": "string"}}}}});
    vec![
        (
            PATHS[0],
            with(
                json!({"messages": messages, "tools": tools, "tool_choice": "auto", "logprobs": true, "top_logprobs": 2}),
            ),
        ),
        (PATHS[0], with(json!({"messages": messages, "response_format": schema, "chat_template_kwargs": {"a": 1}}))),
        (PATHS[0], json!({"messages": messages, "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}})),
        (
            PATHS[1],
            with(json!({"prompt": ["a", "b"], "logprobs": 1, "best_of": 2, "allowed_token_ids": [97, 98, 256]})),
        ),
        (
            PATHS[1],
            json!({"prompt": [[1, 2], [3]], "echo": true, "logprobs": 1, "max_tokens": 0, "best_of": 3, "epsilon": 0.1, "delta": 0.1, "gamma": 8}),
        ),
        (
            PATHS[2],
            json!({"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"}], "instructions": "i", "max_output_tokens": 2,
            "tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": "auto",
            "text": {"format": {"type": "text"}}, "stream": true}),
        ),
        (PATHS[3], json!({"input": ["a", "b"], "encoding_format": "float", "attention": {}})),
        (PATHS[4], json!({"prompt": "a", "add_special_tokens": true, "return_token_strs": true})),
        (PATHS[5], json!({"tokens": [1, 2, 3]})),
    ]
}

/// All places of a value, as pointers.
fn places(value: &Value, at: &str, all: &mut Vec<String>) {
    all.push(at.to_string());
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| places(value, &format!("{at}/{key}"), all)),
        Value::Array(list) => list.iter().enumerate().for_each(|(i, value)| places(value, &format!("{at}/{i}"), all)),
        _ => {}
    }
}

/// A value that nobody expects.
fn odd() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-3i64..40).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        Just(json!("")),
        Just(json!("<|im_start|>{{ 1/0 }}{% for x in y %}\u{0}")),
        Just(json!("(((((a*)*)*)*)*)*b")),
        Just(json!("start: start")),
        Just(json!("x".repeat(5000))),
    ];
    leaf.prop_recursive(4, 24, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec(("[a-z_]{1,12}|method|type|name|content|\\$ref", inner), 0..6)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

async fn answered(server: &Server, path: &str, body: String) {
    let answer = tokio::time::timeout(std::time::Duration::from_secs(30), server.post_raw(path, body.clone())).await;
    let answer = answer.unwrap_or_else(|_| panic!("{path} never answers {body}"));
    match answer.status.as_u16() {
        200 if answer.headers["content-type"] == "text/event-stream" => {
            assert!(answer.text.contains("data: [DONE]\n\n") || path == PATHS[2], "{path}: {body}: {}", answer.text);
            for data in answer.text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|d| *d != "[DONE]") {
                let event: Value = serde_json::from_str(data).unwrap_or_else(|e| panic!("{path}: {body}: {e}: {data}"));
                let error = [&event["error"], &event["response"]["error"]].into_iter().find(|error| !error.is_null());
                // The time that it was given may have been none.
                let late = error.is_some_and(|error| error.to_string().contains("deadline"));
                assert!(error.is_none() || late, "{path}: {body}: {data}");
            }
        }
        200 => drop(answer.json()),
        400..=499 => {
            let (message, _) = answer.error();
            assert!(!message.is_empty(), "{path}: {body}");
        }
        status => panic!("{path} answers {status} to {body}: {}", answer.text),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn bodies_with_odd_parts(which in any::<Index>(), changes in prop::collection::vec((any::<Index>(), prop::option::of(odd())), 1..4)) {
        let all = bodies();
        let (path, mut body) = all[which.index(all.len())].clone();
        for (place, value) in changes {
            let mut all = Vec::new();
            places(&body, "", &mut all);
            let place = &all[place.index(all.len())];
            match (value, place.rsplit_once('/')) {
                (None, Some((around, key))) => {
                    if let Some(map) = body.pointer_mut(around).and_then(Value::as_object_mut) {
                        map.remove(key);
                    }
                }
                (value, _) => *body.pointer_mut(place).unwrap() = value.unwrap_or_default(),
            }
        }
        Runtime::new().unwrap().block_on(async { answered(&server("hello there"), path, body.to_string()).await });
    }

    #[test]
    fn bytes_that_are_no_body(path in prop::sample::select(&PATHS[..]), text in "\\PC{0,40}|[\\[\\]{}\",:0-9a-z\\\\]{0,60}") {
        Runtime::new().unwrap().block_on(async { answered(&server("x"), path, text).await });
    }
}

#[tokio::test]
async fn deep_and_broken_texts_are_refused() {
    let server = server("x");
    for path in PATHS {
        for body in
            ["[".repeat(100_000), "{\"a\":".repeat(50_000), "\"\\ud800\"".into(), "{\"a\":1}{".into(), String::new()]
        {
            assert_eq!(server.post_raw(path, body).await.status, 400, "{path}");
        }
    }
    // A number that no type holds is no panic.
    for number in ["1e999", "-1e400", "123456789012345678901234567890", "0.1e-9999", "-0"] {
        let body = format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}], \"max_tokens\": 1, \"seed\": {number}, \"top_k\": {number}}}"
        );
        assert!(server.post_raw(PATHS[0], body).await.status.as_u16() < 500, "{number}");
    }
}

#[test]
fn the_bodies_that_are_changed_are_good_before() {
    Runtime::new().unwrap().block_on(async {
        for (path, body) in bodies() {
            let answer = server("hello there").post(path, body.clone()).await;
            assert_eq!(answer.status, 200, "{path}: {body}: {}", answer.text);
        }
    });
}
