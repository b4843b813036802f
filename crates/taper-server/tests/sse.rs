//! Streams: the order of events, their framing, errors before and after the first token.

mod support;

use axum::http::StatusCode;
use serde_json::{Value, json};
use std::time::Duration;
use support::{custom, server};
use taper_engine::EngineConfig;
use taper_engine::stub::StubBackend;
use taper_server::ServerConfig;

fn chat(content: &str, extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": content}], "temperature": 0, "stream": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_chat_stream_begins_with_the_role_and_ends_with_usage() {
    let body = chat("hi", json!({"stream_options": {"include_usage": true}}));
    let answer = server("aé").chat(body).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.headers["content-type"], "text/event-stream");
    assert_eq!(answer.headers["cache-control"], "no-cache");
    assert_eq!(answer.headers["x-accel-buffering"], "no");
    let events = answer.events();
    let id = &events[0]["id"];
    assert!(id.as_str().unwrap().starts_with("chatcmpl-"));
    for event in &events {
        assert_eq!(&event["id"], id);
        assert_eq!(event["object"], "chat.completion.chunk");
        assert_eq!(event["model"], "stub");
    }
    let choices: Vec<Value> = events.iter().map(|e| e["choices"].clone()).collect();
    let choice = |delta: Value, reason: Value| json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason, "stop_reason": null}]);
    assert_eq!(
        choices,
        [
            choice(json!({"role": "assistant", "content": ""}), Value::Null),
            choice(json!({"content": "a"}), Value::Null),
            choice(json!({"content": "é"}), Value::Null),
            choice(json!({}), json!("stop")),
            json!([]),
        ]
    );
    let (last, others) = events.split_last().unwrap();
    assert_eq!(last["usage"]["completion_tokens"], 4);
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert!(last["usage"]["attention"].is_object());
    assert!(others.iter().all(|e| e.get("usage").is_none()));
}

#[tokio::test]
async fn without_include_usage_there_is_no_usage_chunk() {
    let events = server("a").chat(chat("hi", json!({}))).await.events();
    assert!(events.iter().all(|e| e.get("usage").is_none() && e["choices"][0].is_object()));
}

#[tokio::test]
async fn a_stream_says_what_the_whole_answer_says() {
    let server = server("some longer text, with a stop");
    let extra = json!({"n": 3, "temperature": 2, "seed": 3, "max_tokens": 12, "stop": ["x", "st"], "logprobs": true, "top_logprobs": 1});
    let mut whole = chat("hi", extra.clone());
    whole["stream"] = json!(false);
    let whole = server.chat(whole).await.json();
    let events = server.chat(chat("hi", extra)).await.events();
    for (index, expected) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let own: Vec<&Value> = events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == index).collect();
        assert_eq!(own[0]["delta"]["role"], "assistant");
        let text: String = own.iter().filter_map(|c| c["delta"]["content"].as_str()).collect();
        assert_eq!(text, expected["message"]["content"]);
        let tokens: Vec<Value> =
            own.iter().filter_map(|c| c["logprobs"]["content"].as_array()).flatten().cloned().collect();
        assert_eq!(json!(tokens), expected["logprobs"]["content"]);
        let (last, rest) = own.split_last().unwrap();
        assert_eq!(last["finish_reason"], expected["finish_reason"]);
        assert!(rest.iter().all(|c| c["finish_reason"].is_null()));
    }
}

#[tokio::test]
async fn a_text_stream_of_several_prompts() {
    let body = json!({"prompt": ["A", "B"], "echo": true, "stream": true, "temperature": 0, "stream_options": {"include_usage": true}});
    let answer = server("xyz").complete(body).await;
    let events = answer.events();
    for index in 0..2 {
        let text: String = events
            .iter()
            .filter(|e| e["choices"][0]["index"] == index)
            .map(|e| e["choices"][0]["text"].as_str().unwrap())
            .collect();
        assert_eq!(text, ["Axyz", "Bxyz"][index]);
    }
    assert!(events.iter().all(|e| e["object"] == "text_completion"));
    assert_eq!(events.last().unwrap()["usage"]["total_tokens"], 2 + 8);
}

#[tokio::test]
async fn a_prefill_that_fails_is_an_http_error() {
    for prompt in ["FAIL", "NIL"] {
        let answer = server("abc").chat(chat(prompt, json!({}))).await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR, "{prompt}");
        answer.error();
    }
}

#[tokio::test]
async fn a_failure_after_the_first_token_is_an_event_and_done_follows() {
    for prompt in ["PANIC", "NAN"] {
        let body = chat(prompt, json!({"stream_options": {"include_usage": true}}));
        let answer = server("abcdef").chat(body).await;
        assert_eq!(answer.status, StatusCode::OK);
        let events = answer.events();
        let (last, rest) = events.split_last().unwrap();
        assert_eq!(last["error"]["code"], 500, "{last}");
        assert_eq!(last["error"]["type"], "InternalServerError");
        assert_eq!(rest[1]["choices"][0]["delta"]["content"], "a");
        assert!(rest.iter().all(|e| e.get("usage").is_none()));
    }
}

#[tokio::test]
async fn a_long_prefill_sends_comments_and_its_failure_is_an_event() {
    let config = ServerConfig { keep_alive: Duration::from_millis(30), ..Default::default() };
    let engine = EngineConfig { chunk_tokens: 8, ..Default::default() };
    let server = custom(StubBackend::new("abc"), engine, config);
    let answer = server.chat(chat(&format!("SLOW {}", "p".repeat(300)), json!({}))).await;
    assert!(answer.text.contains(": keep-alive\n\n"), "{}", answer.text);
    assert_eq!(answer.events()[0]["choices"][0]["delta"]["role"], "assistant");
    // The prompt says FAIL only in its last chunk: by then the status has been sent.
    let answer = server.chat(chat(&format!("SLOW {} FAIL", "p".repeat(300)), json!({}))).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.events().last().unwrap()["error"]["code"], 500);
}
