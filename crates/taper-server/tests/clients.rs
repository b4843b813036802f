//! What clients of other servers send, and what their libraries look for in answers.

mod support;

use axum::http::StatusCode;
use serde_json::{Value, json};
use std::time::Instant;
use support::{custom, server};
use taper_engine::EngineConfig;
use taper_engine::stub::StubBackend;
use taper_server::ServerConfig;

fn chat(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "temperature": 0});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn what_is_too_long_is_said_in_words_that_libraries_know() {
    let server = server("x");
    let long = json!([{"role": "user", "content": "p".repeat(600)}]);
    for (extra, rest, param) in [
        (json!({"messages": long}), "the prompt has 618 and the answer asks for 1 more", "messages"),
        (json!({"max_tokens": 500}), "the prompt has 20 and the answer asks for 500 more", "max_tokens"),
    ] {
        let refused = server.chat(chat(extra)).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        let told = format!("This model's maximum context length is 512 tokens; {rest}");
        assert_eq!(refused.error(), (told, json!(param)));
    }
}

#[tokio::test]
async fn what_would_end_so_again_is_not_to_be_tried_again() {
    let server = server("a long answer");
    for (extra, status, retry) in [
        (json!({"prompt": "SLOW", "timeout": 0.05}), StatusCode::GATEWAY_TIMEOUT, Some("false")),
        (json!({"prompt": "NAN"}), StatusCode::INTERNAL_SERVER_ERROR, Some("false")),
        (json!({"prompt": "PANIC"}), StatusCode::INTERNAL_SERVER_ERROR, None),
        (json!({"prompt": ""}), StatusCode::BAD_REQUEST, None),
    ] {
        let failed = server.complete(extra.clone()).await;
        let told = failed.headers.get("x-should-retry").map(|told| told.to_str().unwrap());
        assert_eq!((failed.status, told), (status, retry), "{extra}");
    }
}

#[tokio::test]
async fn what_other_servers_call_otherwise_or_have_alone_is_refused() {
    let server = server("x");
    for (field, value, hint) in [
        ("repeat_penalty", json!(1.1), "repetition_penalty"),
        ("top_n_sigma", json!(1.5), ""),
        ("dynatemp_range", json!(0.5), ""),
        ("min_new_tokens", json!(3), "min_tokens"),
        ("max_new_tokens", json!(3), "max_tokens"),
        ("max_new_tokens", json!("3"), "max_tokens"),
        ("stop_regex", json!("a+"), "stop takes strings"),
        ("no_stop_trim", json!(true), "include_stop_str_in_output"),
        ("n_probs", json!(3), "logprobs"),
        ("t_max_predict_ms", json!(500), ""),
        ("lora", json!([{"id": 0, "scale": 1}]), ""),
        ("thinking_token_budget", json!(10), ""),
        ("add_special_tokens", json!(true), ""),
    ] {
        let mut extra = json!({});
        extra[field] = value;
        let (message, param) = server.chat(chat(extra.clone())).await.error();
        assert_eq!(param, field, "{message}");
        assert!(message.contains("would change the answer") && message.contains(hint), "{message}");
    }
    for harmless in [
        json!({"repeat_penalty": 1.0, "top_n_sigma": -1, "dynatemp_range": 0, "min_new_tokens": 0}),
        json!({"top_n_sigma": 0, "stop_regex": null}),
        json!({"stop_regex": "", "max_new_tokens": 3, "max_tokens": 3}),
        json!({"max_new_tokens": 3, "max_completion_tokens": 3.0, "min_new_tokens": 2, "min_tokens": 2}),
        json!({"repeat_penalty": 1.1, "repetition_penalty": 1.1}),
        json!({"no_stop_trim": false, "n_probs": 0, "t_max_predict_ms": -1, "lora": [], "add_special_tokens": false}),
        json!({"custom_params": {"top": 3}}),
    ] {
        let answer = server.chat(chat(harmless.clone())).await;
        assert_eq!(answer.status, StatusCode::OK, "{harmless}: {}", answer.text);
        assert!(answer.headers.contains_key("x-taper-ignored-fields"), "{harmless}");
    }
}

/// What looks as if it chose attention is never passed over, wherever it stands.
#[tokio::test]
async fn another_servers_bag_chooses_no_attention() {
    let server = server("x");
    for key in ["attention_epsilon", "epsilon", "decode_method"] {
        let (message, param) = server.chat(chat(json!({"custom_params": {key: 0.1}}))).await.error();
        assert_eq!(param, format!("custom_params.{key}"), "{message}");
        assert!(message.contains("vllm_xargs"), "{message}");
    }
}

#[tokio::test]
async fn fields_of_messages_that_have_no_effect_are_named() {
    let server = server("x");
    let with = |extra: Value| {
        let mut last = json!({"role": "assistant", "content": "a"});
        last.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        chat(json!({"messages": [{"role": "user", "content": "hi", "name": "me"}, last]}))
    };
    // As answers come back.
    let plain = json!({"refusal": null, "annotations": [], "audio": null, "function_call": null, "tool_calls": null,
        "prefix": false, "reasoning_content": ""});
    let answer = server.chat(with(plain)).await;
    assert_eq!((answer.status, answer.headers.get("x-taper-ignored-fields")), (StatusCode::OK, None));
    let answer = server.chat(with(json!({"reasoning_content": "so", "odd": 1, "id": "msg_1"}))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let named = answer.headers["x-taper-ignored-fields"].to_str().unwrap();
    assert_eq!(named, "messages[1].reasoning_content, messages[1].odd, messages[1].id");
    for (field, value, hint) in [
        ("function_call", json!({"name": "f", "arguments": "{}"}), "tool_calls"),
        ("prefix", json!(true), "continue_final_message"),
        ("partial", json!(true), "continue_final_message"),
    ] {
        let mut extra = json!({});
        extra[field] = value;
        for path in ["/v1/chat/completions", "/tokenize"] {
            let (message, param) = server.post(path, with(extra.clone())).await.error();
            assert_eq!(param, format!("messages[1].{field}"), "{message}");
            assert!(message.contains(hint), "{message}");
        }
    }
}

/// Else a core would be busy for seconds.
#[tokio::test]
async fn a_name_of_megabytes_is_compared_with_none() {
    let server = server("x");
    let start = Instant::now();
    let mut extra = json!({});
    extra["e".repeat(8 << 20)] = json!(1);
    assert_eq!(server.chat(chat(extra)).await.status, StatusCode::OK);
    let preset = server.chat(chat(json!({"attention": "e".repeat(8 << 20)}))).await;
    assert_eq!((preset.status, preset.error().1), (StatusCode::BAD_REQUEST, json!("attention")));
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

/// Of a text completion it is the protocol's 16 where that is less, as in vLLM.
#[tokio::test]
async fn an_answers_length_is_the_models_where_the_request_has_none() {
    let long = "abcdefghijklmnopqrstuvwxyz";
    let with = |max_tokens| {
        custom(StubBackend::new(long), EngineConfig::default(), ServerConfig { max_tokens, ..ServerConfig::default() })
    };
    let said = |answer: support::Answer| answer.json()["usage"]["completion_tokens"].as_u64().unwrap();
    for (most, expected) in [(Some(5), [5, 5, 5]), (Some(20), [20, 16, 20]), (None, [27, 16, 27])] {
        let server = with(most);
        let chat = said(server.chat(chat(json!({}))).await);
        let text = said(server.complete(json!({"prompt": "hi", "temperature": 0})).await);
        let items = server.post("/v1/responses", json!({"input": "hi", "temperature": 0})).await.json();
        assert_eq!([chat, text, items["usage"]["output_tokens"].as_u64().unwrap()], expected, "{most:?}");
    }
    let server = with(Some(5));
    assert_eq!(said(server.chat(chat(json!({"max_tokens": 9}))).await), 9);
    assert_eq!(said(server.chat(chat(json!({"min_tokens": 8}))).await), 8);
    // It makes nothing too long.
    let nearly = json!([{"role": "user", "content": "p".repeat(490)}]);
    assert_eq!(said(with(Some(1000)).chat(chat(json!({"messages": nearly}))).await), 4);
}
