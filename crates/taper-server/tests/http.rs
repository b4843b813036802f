//! Answers in one piece, and every refusal.

mod support;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use support::{complete, custom, server, wait};
use taper_attention::{Artifacts, AttentionShape, ModelKey, Place};
use taper_engine::stub::StubBackend;
use taper_engine::{EngineConfig, Load};
use taper_server::ServerConfig;
use tower::ServiceExt;

fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "stub", "messages": [{"role": "user", "content": "hi"}], "temperature": 0});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn the_looking_endpoints() {
    let server = server("x");
    let health = server.get("/health").await;
    assert_eq!((health.status, health.text.as_str()), (StatusCode::OK, ""));
    let ready = server.get("/ready").await;
    assert_eq!(ready.status, StatusCode::OK);
    assert_eq!(ready.json(), json!({"waiting": 0, "running": 0, "cache_tokens": 1024, "offloaded_tokens": 0}));
    assert_eq!(server.get("/version").await.json(), json!({"version": env!("CARGO_PKG_VERSION")}));
    let card =
        json!({"id": "stub", "object": "model", "created": 1_700_000_000, "owned_by": "taper", "max_model_len": 512});
    assert_eq!(server.get("/v1/models").await.json(), json!({"object": "list", "data": [card]}));
    assert_eq!(server.get("/v1/models/stub").await.json(), card);
    let missing = server.get("/v1/models/org/other").await;
    assert_eq!(missing.status, StatusCode::NOT_FOUND);
    assert_eq!(missing.error().1, "model");
    let methods = server.get("/v1/attention/methods").await.json();
    let names: Vec<&str> = methods["data"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"dense"), "{names:?}");
}

#[tokio::test]
async fn paths_and_methods_that_do_not_exist() {
    let server = server("x");
    let missing = server.get("/v1/nothing").await;
    assert_eq!(missing.status, StatusCode::NOT_FOUND);
    assert_eq!(missing.error().0, "no such path: /v1/nothing");
    for (path, meant) in [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/healthz", "/health"),
    ] {
        let missed = server.get(path).await;
        assert_eq!(missed.error().0, format!("no such path: {path}; did you mean {meant}?"));
        assert_ne!(server.get(meant).await.status, StatusCode::NOT_FOUND);
    }
    assert_eq!(missing.json()["error"]["type"], "NotFoundError");
    let wrong = server.get("/v1/completions").await;
    assert_eq!(wrong.status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(wrong.headers["allow"], "POST");
    assert_eq!(wrong.json()["error"]["type"], "Method Not Allowed");
    assert!(wrong.error().0.starts_with("/v1/completions does not take GET"), "{}", wrong.text);
}

#[tokio::test]
async fn a_chat_completion() {
    let answer = server("Hello!").chat(chat(json!({}))).await;
    assert_eq!(answer.status, StatusCode::OK);
    let mut body = answer.json();
    let id = body["id"].take();
    assert!(id.as_str().unwrap().starts_with("chatcmpl-"));
    assert!(body["created"].take().as_u64().unwrap() > 1_700_000_000);
    assert!(body["usage"]["attention"].take().is_object());
    assert_eq!(
        body,
        json!({
            "id": null, "object": "chat.completion", "created": null, "model": "stub",
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!"},
                "logprobs": null, "finish_reason": "stop", "stop_reason": null,
            }],
            "usage": {
                "prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27,
                "prompt_tokens_details": {"cached_tokens": 0}, "attention": null,
            },
        })
    );
}

#[tokio::test]
async fn message_content_may_come_in_parts() {
    let server = server("x");
    let parts = json!([{"type": "text", "text": "h"}, {"type": "refusal", "refusal": "i"}]);
    let prompt = async |content| {
        let body = chat(json!({"messages": [{"role": "user", "content": content}]}));
        server.chat(body).await.json()["usage"]["prompt_tokens"].clone()
    };
    assert_eq!(prompt(parts).await, prompt(json!("h\ni")).await);
}

#[tokio::test]
async fn a_text_completion_of_every_kind_of_prompt() {
    let server = server("abcdefghijklmnopqrstuvwxyz");
    for (prompt, count, tokens) in [
        (json!("hi"), 1, 2),
        (json!(["hi", "you"]), 2, 5),
        (json!([104, 105]), 1, 2),
        (json!([[104], [105, 106]]), 2, 3),
    ] {
        let body = server.complete(complete(json!({"prompt": prompt}))).await.json();
        assert_eq!(body["object"], "text_completion");
        assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
        let choices = body["choices"].as_array().unwrap();
        assert_eq!(choices.len(), count);
        for (index, choice) in choices.iter().enumerate() {
            assert_eq!(choice["index"], index);
            assert_eq!(choice["text"], "abcdefghijklmnop", "sixteen tokens by default");
            assert_eq!(choice["finish_reason"], "length");
        }
        assert_eq!(body["usage"]["prompt_tokens"], tokens);
        assert_eq!(body["usage"]["completion_tokens"], 16 * count);
    }
}

#[tokio::test]
async fn several_choices_echo_and_stop() {
    let server = server("one two");
    let body = complete(json!({"prompt": ["a", "b"], "n": 2, "echo": true, "stop": " t", "max_tokens": 9}));
    let body = server.complete(body).await.json();
    let choices = body["choices"].as_array().unwrap();
    let texts: Vec<&str> = choices.iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["aone", "aone", "bone", "bone"]);
    assert_eq!(choices[3]["stop_reason"], " t");
    assert_eq!(body["usage"]["attention"]["choices"].as_array().unwrap().len(), 4);
    let body = server.complete(complete(json!({"stop_token_ids": [b't'], "max_tokens": 9}))).await.json();
    assert_eq!(body["choices"][0]["stop_reason"], u32::from(b't'));
}

#[tokio::test]
async fn logprobs_in_both_formats() {
    let server = server("aéb");
    let body = server.chat(chat(json!({"logprobs": true, "top_logprobs": 2}))).await.json();
    let content = body["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(content.len(), 4);
    assert_eq!(content[0]["token"], "a");
    assert_eq!(content[1]["bytes"], json!([0xc3]), "half a character has its own byte");
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert!(content[0]["logprob"].as_f64().unwrap() < 0.0);
    let body = server.complete(complete(json!({"logprobs": 1}))).await.json();
    let logprobs = &body["choices"][0]["logprobs"];
    assert_eq!(logprobs["text_offset"], json!([0, 1, 1, 2]), "characters, not bytes");
    assert_eq!(logprobs["tokens"][0], "a");
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 1);
}

#[tokio::test]
async fn a_seed_repeats_and_requests_do_not_disturb_each_other() {
    let server = server("some words to say");
    let body = complete(json!({"temperature": 2, "seed": -7, "max_tokens": 20, "ignore_eos": true}));
    let first = server.complete(body.clone()).await.json()["choices"][0]["text"].clone();
    let other = complete(json!({"temperature": 2, "seed": 8, "max_tokens": 20, "ignore_eos": true}));
    let (second, other) = tokio::join!(server.complete(body), server.complete(other));
    assert_eq!(first, second.json()["choices"][0]["text"]);
    assert_ne!(first, other.json()["choices"][0]["text"]);
}

#[tokio::test]
async fn every_seed_of_64_bits_is_taken_and_the_reported_one_draws_the_same() {
    let server = server("some words to say");
    let ask = |seed: Value| {
        server.complete(complete(json!({"temperature": 2, "seed": seed, "max_tokens": 20, "ignore_eos": true})))
    };
    for seed in [json!(-7), json!(i64::MIN), json!(i64::MAX), json!(u64::MAX), json!(0), json!(16.0)] {
        let first = ask(seed.clone()).await;
        assert_eq!(first.status, StatusCode::OK, "{seed}: {}", first.text);
        let first = first.json();
        let reported = first["usage"]["attention"]["decode"]["seed"].clone();
        assert!(reported.is_i64(), "{seed} is reported as {reported}");
        let again = ask(reported.clone()).await.json();
        assert_eq!(again["choices"], first["choices"], "{seed} and {reported}");
        assert_eq!(again["usage"]["attention"]["decode"]["seed"], reported);
    }
    assert_eq!(ask(json!(-7)).await.json()["usage"]["attention"]["decode"]["seed"], -7);
    for seed in ["18446744073709551616", "-9223372036854775809", "1e300", "\"7\""] {
        let body = complete(json!({})).to_string().replacen('{', &format!("{{\"seed\":{seed},"), 1);
        let answer = server.post_raw("/v1/completions", body).await;
        assert_eq!((answer.status, answer.error().1), (StatusCode::BAD_REQUEST, json!("seed")), "{seed}");
    }
}

#[tokio::test]
async fn every_field_out_of_range_is_a_400_that_names_it_and_the_range() {
    let server = server("x");
    for (field, value, says) in [
        ("temperature", json!(2.5), "[0, 2]"),
        ("temperature", json!("hot"), "[0, 2]"),
        ("top_p", json!(0), "(0, 1]"),
        ("top_k", json!(-2), "at least -1"),
        ("min_p", json!(1.5), "[0, 1]"),
        ("presence_penalty", json!(3), "[-2, 2]"),
        ("frequency_penalty", json!(-2.1), "[-2, 2]"),
        ("repetition_penalty", json!(0), "[0.01, 10]"),
        ("seed", json!(1.5), "integer"),
        ("max_tokens", json!(0), "at least 1"),
        ("max_completion_tokens", json!(-1), "at least 1"),
        ("n", json!(0), "[1, 32]"),
        ("n", json!(33), "[1, 32]"),
        ("stop", json!([""]), "none empty"),
        ("stop", json!(7), "string"),
        ("stop_token_ids", json!(["a"]), "token ids"),
        ("logit_bias", json!([1]), "object"),
        ("stream", json!("yes"), "true or false"),
        ("stream_options", json!({"include_usage": true}), "stream: true"),
        ("ignore_eos", json!(1), "true or false"),
        ("model", json!(1), "string"),
        ("vllm_xargs", json!(1), "object"),
    ] {
        let mut extra = json!({});
        extra[field] = value;
        for answer in [server.chat(chat(extra.clone())).await, server.complete(complete(extra.clone())).await] {
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{extra}");
            let (message, param) = answer.error();
            assert_eq!(param, field, "{message}");
            assert!(message.contains(says), "{message} should say {says}");
        }
    }
    for (extra, param) in [
        (json!({"logit_bias": {"x": 1}}), "logit_bias.x"),
        (json!({"logit_bias": {"5": 101}}), "logit_bias.5"),
        (json!({"logit_bias": {"257": 1}}), "logit_bias.257"),
        (json!({"logit_bias": {"05": 1}}), "logit_bias.05"),
        (json!({"stop_token_ids": [257]}), "stop_token_ids"),
        (json!({"stop_token_ids": vec![1; 1025]}), "stop_token_ids"),
        (json!({"stop": "x".repeat(1025)}), "stop"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": null}), "messages"),
        (json!({"messages": [1]}), "messages[0]"),
        (json!({"messages": [{"content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages[0].content[0].type"),
        (json!({"messages": [{"role": "odd", "content": "x"}]}), "messages"),
        (json!({"tools": [{}]}), "tools[0].type"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"min_tokens": -1}), "min_tokens"),
        (json!({"cache_salt": ""}), "cache_salt"),
        (json!({"cache_salt": 1}), "cache_salt"),
        (json!({"cache_salt": "s".repeat(1025)}), "cache_salt"),
        (json!({"min_tokens": 5, "max_tokens": 4}), "min_tokens"),
        (json!({"guided_json": {}}), "guided_json"),
        (json!({"guided_decoding": {"regex": "a"}}), "guided_decoding"),
        (json!({"regex": "a+"}), "regex"),
        (json!({"n_predict": 9}), "n_predict"),
        // The last message is the user's.
        (json!({"continue_final_message": true}), "continue_final_message"),
        (json!({"continue_final_message": 1}), "continue_final_message"),
        (json!({"add_generation_prompt": false}), "add_generation_prompt"),
        (json!({"prompt_logprobs": 1}), "prompt_logprobs"),
        (json!({"return_token_ids": true}), "return_token_ids"),
        (json!({"truncate_prompt_tokens": 1}), "truncate_prompt_tokens"),
        (json!({"chat_template": "x"}), "chat_template"),
        (json!({"documents": [{}]}), "documents"),
        (json!({"grammar": "root ::= a"}), "grammar"),
        (json!({"max_tokens": 500}), "max_tokens"),
        (json!({"messages": [{"role": "user", "content": "p".repeat(600)}]}), "messages"),
        (json!({"n": 3, "max_completion_tokens": 400}), "max_completion_tokens"),
    ] {
        let answer = server.chat(chat(extra.clone())).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{extra}");
        assert_eq!(answer.error().1, param, "{extra}");
    }
    for (extra, param) in [
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": [1, "a"]}), "prompt"),
        (json!({"prompt": [99999]}), "prompt"),
        (json!({"prompt": vec!["x"; 65]}), "prompt"),
        (json!({"logprobs": 21}), "logprobs"),
        (json!({"suffix": "x"}), "suffix"),
    ] {
        let answer = server.complete(complete(extra.clone())).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{extra}");
        assert_eq!(answer.error().1, param, "{extra}");
    }
}

#[tokio::test]
async fn a_template_that_fails_or_has_no_time_is_not_the_clients_fault() {
    let server = server("x");
    let ask = async |role: &str| server.chat(chat(json!({"messages": [{"role": role, "content": "x"}]}))).await;
    let failed = ask("broken").await;
    assert_eq!((failed.status, failed.error().0.as_str()), (StatusCode::INTERNAL_SERVER_ERROR, "the template fails"));
    assert_eq!(failed.headers["x-should-retry"], "false");
    let busy = ask("slow").await;
    assert_eq!((busy.status, busy.headers["retry-after"].to_str().unwrap()), (StatusCode::SERVICE_UNAVAILABLE, "1"));
}

#[tokio::test]
async fn bodies_that_are_no_request() {
    let small = ServerConfig { body_bytes: 1000, ..Default::default() };
    let server = custom(StubBackend::new("x"), EngineConfig::default(), small);
    for raw in ["", "{", "[]", "7", "{\"a\":1}x", "\u{0}"] {
        let answer = server.post_raw("/v1/chat/completions", raw.into()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{raw}");
        answer.error();
    }
    let deep = "[".repeat(200);
    assert_eq!(server.post_raw("/v1/completions", deep).await.status, StatusCode::BAD_REQUEST);
    let large = server.complete(complete(json!({"prompt": "p".repeat(1001)}))).await;
    assert_eq!(large.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(large.error().0, "the request body is larger than 1000 bytes, the limit here");
    assert_eq!(large.json()["error"]["type"], "Payload Too Large");
    // What is small as text may be large once it is parsed.
    let many = server.complete(complete(json!({ "prompt": vec![0; 450] }))).await;
    assert_eq!(many.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(many.error().0.contains("JSON values and more"), "{:?}", many.error());
    assert_ne!(
        server.complete(complete(json!({ "prompt": ",".repeat(450) }))).await.status,
        StatusCode::PAYLOAD_TOO_LARGE
    );
}

#[tokio::test]
async fn bodies_that_are_on_their_way_have_a_limit_together() {
    let small = ServerConfig { body_bytes: 4096, body_timeout: Duration::from_secs(30), ..Default::default() };
    let server = custom(StubBackend::new("x"), EngineConfig::default(), small);
    // Bodies that come but for their end.
    let (begun, mut all_begun) = tokio::sync::mpsc::channel(16);
    let (ends, slow): (Vec<_>, Vec<_>) = (0..16)
        .map(|_| {
            let (end, ended) = tokio::sync::oneshot::channel::<()>();
            let begun = begun.clone();
            let rest = async move {
                // Asked for once what came before is taken.
                begun.send(()).await.unwrap();
                ended.await.map(|()| r#"{"prompt": "p"}"#.to_string()).map_err(std::io::Error::other)
            };
            let first = stream::iter([Ok::<_, std::io::Error>(" ".repeat(4000))]);
            let body = Body::from_stream(first.chain(stream::once(rest)));
            let request = Request::post("/v1/completions").body(body).unwrap();
            (end, tokio::spawn(server.router.clone().oneshot(request)))
        })
        .unzip();
    for _ in 0..16 {
        all_begun.recv().await.unwrap();
    }
    let refused = server.complete(complete(json!({}))).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.error().0.contains("too many large request bodies") && refused.headers["retry-after"] == "1");
    ends.into_iter().for_each(|end| end.send(()).unwrap());
    for slow in slow {
        assert_eq!(slow.await.unwrap().unwrap().status(), 200, "those that were on their way are taken");
    }
    assert_eq!(server.complete(complete(json!({}))).await.status, 200);
}

#[tokio::test]
async fn every_answer_carries_the_requests_name() {
    let server = server("x");
    let send = async |path: &str, id: &str, body: Value| {
        let request = Request::post(path).header("X-Request-Id", id).body(Body::from(body.to_string()));
        server.send(request.unwrap()).await
    };
    let answer = send("/v1/chat/completions", "trace-1:a", chat(json!({}))).await;
    assert_eq!(answer.headers["x-request-id"], "trace-1:a");
    assert_eq!(answer.json()["id"], "chatcmpl-trace-1:a");
    let stream = send("/v1/completions", "b.2", complete(json!({"stream": true}))).await;
    assert_eq!(stream.headers["x-request-id"], "b.2");
    assert!(stream.events().iter().all(|e| e["id"] == "cmpl-b.2"), "{}", stream.text);
    for (path, body, status) in
        [("/v1/chat/completions", json!({}), 400), ("/v1/nothing", json!({}), 404), ("/v1/models", json!({}), 405)]
    {
        let answer = send(path, "c", body).await;
        assert_eq!((answer.status.as_u16(), &answer.headers["x-request-id"]), (status, &"c".parse().unwrap()));
    }
    let answer = send("/v1/completions", "not a name", complete(json!({}))).await;
    let made = answer.headers["x-request-id"].to_str().unwrap().to_string();
    assert!(made.len() == 32 && made.bytes().all(|b| b.is_ascii_hexdigit()), "{made}");
    assert_eq!(answer.json()["id"], format!("cmpl-{made}"));
    assert_ne!(server.get("/health").await.headers["x-request-id"], made.as_str());
}

#[tokio::test]
async fn another_model_is_a_404() {
    let answer = server("x").chat(chat(json!({"model": "gpt-4"}))).await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert_eq!(answer.error().1, "model");
}

#[tokio::test]
async fn unknown_fields_are_named_and_near_misses_refused() {
    let server = server("x");
    let answer =
        server.chat(chat(json!({"user": "me", "weird\u{e9}": 1, "vllm_xargs": {"other": 2}, "foo": null}))).await;
    assert_eq!(answer.status, StatusCode::OK);
    let header = answer.headers["x-taper-ignored-fields"].to_str().unwrap();
    let mut names: Vec<&str> = header.split(", ").collect();
    names.sort_unstable();
    assert_eq!(names, ["user", "vllm_xargs.other", "weird?"]);
    assert!(!server.chat(chat(json!({}))).await.headers.contains_key("x-taper-ignored-fields"));
    // What clients send by default, and what would change nothing here.
    for harmless in [
        json!({"truncate_prompt_tokens": -1}),
        json!({"n_predict": 7, "max_tokens": 7}),
        json!({"grammar": "", "logits_processors": [], "documents": [], "json_schema": {}}),
        json!({"stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true, "odd": 1}}),
    ] {
        let answer = server.chat(chat(harmless.clone())).await;
        assert_eq!(answer.status, StatusCode::OK, "{harmless}: {}", answer.text);
        assert!(answer.headers.contains_key("x-taper-ignored-fields"), "{harmless}");
    }
    for (field, meant) in
        [("epsilonn", "`epsilon`"), ("Gamma", "`gamma`"), ("attn", "`attention`"), ("dleta", "`delta`")]
    {
        let mut extra = json!({});
        extra[field] = json!(0.1);
        for answer in [server.chat(chat(extra.clone())).await, server.complete(complete(extra.clone())).await] {
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{field}");
            let (message, param) = answer.error();
            assert_eq!(param, field);
            assert!(message.contains(meant), "{message}");
        }
    }
    let (message, param) = server.chat(chat(json!({"extra_body": {"epsilon": 0.1}}))).await.error();
    assert_eq!(param, "extra_body");
    assert!(message.contains("top level"), "{message}");
}

/// Channels of eight elements, for which a device has no kernel.
fn narrow_channels(folder: &Path) -> Artifacts {
    let metadata = json!({ "format": "taper-artefact-1", "method": "double_sparsity", "model": "abc" });
    let tensor = json!({ "dtype": "U32", "shape": [1, 1, 8], "data_offsets": [0, 32] });
    let header = json!({ "__metadata__": metadata, "channels": tensor }).to_string();
    let data = (0..8u32).flat_map(u32::to_le_bytes);
    let bytes: Vec<u8> = (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).chain(data).collect();
    std::fs::write(folder.join("double_sparsity.safetensors"), bytes).unwrap();
    let shape = AttentionShape { layers: 1, q_heads: 2, kv_heads: 1, head_dim: 64, window: None };
    Artifacts::open(folder, &ModelKey { shape, fingerprint: "abc".to_owned() }).unwrap()
}

#[tokio::test]
async fn attention_that_the_models_device_lacks_is_refused_with_what_there_is() {
    let folder = tempfile::tempdir().unwrap();
    let artifacts = narrow_channels(folder.path()).at(Place::Device);
    let config = ServerConfig { artifacts: Arc::new(artifacts), ..Default::default() };
    let server = custom(StubBackend::new("abc"), EngineConfig::default(), config);
    for (extra, field) in [
        (json!({ "attention": { "decode": { "method": "double_sparsity" } } }), "attention.decode.method"),
        (
            json!({ "vllm_xargs": { "attention_decode_method": "double_sparsity" } }),
            "vllm_xargs.attention_decode_method",
        ),
    ] {
        let answer = server.chat(chat(extra)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        let (message, param) = answer.error();
        assert_eq!(param, field, "{message}");
        assert!(message.contains("dense, ") && message.contains("streaming_llm"), "{message}");
    }
    assert_eq!(server.chat(chat(json!({ "epsilon": 0.1 }))).await.status, StatusCode::OK);
}

#[tokio::test]
async fn attention_is_chosen_by_every_spelling_and_reported() {
    let server = server("x");
    let vattention = json!({"decode": {"method": "vattention", "epsilon": 0.2}});
    let received = || json!(server.probe.attention.lock().unwrap().take().expect("a request came"));
    for extra in [
        json!({"attention": vattention}),
        json!({"epsilon": 0.2}),
        json!({"vllm_xargs": {"attention_epsilon": 0.2}}),
        json!({"vllm_xargs": {"attention_epsilon": "0.2"}}),
        json!({"vllm_xargs": {"attention_decode_method": "vattention", "attention_decode_epsilon": 0.2}}),
    ] {
        let answer = server.chat(chat(extra.clone())).await;
        assert_eq!(answer.status, StatusCode::OK, "{extra}: {}", answer.text);
        let usage = &answer.json()["usage"]["attention"];
        assert_eq!(
            (&usage["decode"]["method"], &usage["decode"]["over"]),
            (&json!("vattention"), &json!("quantized_keys")),
            "{extra}: {usage}"
        );
        let spec = received();
        assert_eq!((&spec["decode"]["epsilon"], &spec["decode"]["delta"]), (&json!(0.2), &json!(0.1)), "{extra}");
    }
    for (extra, phase, field, value) in [
        (json!({"delta": 0.03}), "decode", "delta", json!(0.03)),
        (json!({"epsilon": 0.2, "delta": 0.03}), "decode", "delta", json!(0.03)),
        (json!({"vllm_xargs": {"attention_delta": "0.03"}}), "decode", "delta", json!(0.03)),
        (json!({"gamma": 16}), "prefill", "gamma", json!(16)),
        (json!({"vllm_xargs": {"attention_gamma": 16}}), "prefill", "gamma", json!(16)),
        (
            json!({"vllm_xargs": {"attention_prefill_method": "streaming_llm", "attention_prefill_window": "77"}}),
            "prefill",
            "window",
            json!(77),
        ),
        (
            json!({"vllm_xargs": {"attention_decode_method": "streaming_llm", "attention_decode_sink": 3}}),
            "decode",
            "sink",
            json!(3),
        ),
    ] {
        let answer = server.complete(complete(extra.clone())).await;
        assert_eq!(answer.status, StatusCode::OK, "{extra}: {}", answer.text);
        assert_eq!(received()[phase][field], value, "{extra}");
    }
    for (extra, audit) in [
        (json!({"attention": {"audit": 0.25}}), 0.25),
        (json!({"vllm_xargs": {"attention_audit": 0.25}}), 0.25),
        (json!({"vllm_xargs": {"attention_audit": "true"}}), 1.0),
    ] {
        server.chat(chat(extra.clone())).await;
        assert_eq!(received()["audit"], audit, "{extra}");
    }
    let dense = server.chat(chat(json!({}))).await.json();
    assert_eq!(dense["usage"]["attention"]["decode"]["method"], "dense");
    for (extra, param) in [
        (json!({"epsilon": 0}), "epsilon"),
        (json!({"vllm_xargs": {"attention_epsilon": 7}}), "vllm_xargs.attention_epsilon"),
        (json!({"attention": {"decode": {"method": "nonsense"}}}), "attention.decode.method"),
        (json!({"vllm_xargs": {"attention_decode_method": "nonsense"}}), "vllm_xargs.attention_decode_method"),
        (json!({"epsilon": 0.1, "vllm_xargs": {"attention_epsilon": 0.1}}), "vllm_xargs.attention_epsilon"),
    ] {
        let answer = server.chat(chat(extra.clone())).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{extra}");
        assert_eq!(answer.error().1, param, "{extra}");
    }
}

#[tokio::test]
async fn faults_of_the_engine_are_a_500_and_the_server_goes_on() {
    let server = server("long enough");
    for prompt in ["FAIL", "PANIC", "NAN"] {
        let answer = server.complete(complete(json!({"prompt": prompt}))).await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR, "{prompt}");
        answer.error();
    }
    assert_eq!(server.complete(complete(json!({}))).await.status, StatusCode::OK);
    assert_eq!(server.get("/health").await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_full_queue_is_a_503_with_retry_after() {
    let engine = EngineConfig { queue: 1, sequences: 1, ..Default::default() };
    let server = custom(StubBackend::new("abc"), engine, ServerConfig::default());
    server.probe.hang.store(true, Ordering::SeqCst);
    let slow = || server.complete(complete(json!({"prompt": "HANG"})));
    let third = async {
        // The first one waits for a moment too.
        let load = || server.engine.load();
        wait("one runs, one waits", || matches!(load(), Load { running: 1, waiting: 1, .. })).await;
        let third = server.complete(complete(json!({}))).await;
        server.probe.hang.store(false, Ordering::SeqCst);
        third
    };
    let second = async {
        wait("one runs", || server.engine.load().running == 1).await;
        slow().await
    };
    let (first, second, third) = tokio::join!(slow(), second, third);
    assert_eq!((first.status, second.status), (StatusCode::OK, StatusCode::OK));
    assert_eq!(third.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(third.headers["retry-after"], "1");
    third.error();
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_a_504_and_frees_its_place() {
    let config = ServerConfig { request_timeout: Some(Duration::from_secs(1)), ..ServerConfig::default() };
    let server = custom(StubBackend::new("a long answer"), EngineConfig::default(), config);
    server.probe.hang.store(true, Ordering::SeqCst);
    let slow = server.complete(complete(json!({"prompt": "HANG"}))).await;
    assert_eq!(slow.status, StatusCode::GATEWAY_TIMEOUT);
    assert!(slow.error().0.contains("deadline"));
    server.probe.hang.store(false, Ordering::SeqCst);
    wait("it is idle", || server.engine.load().running == 0).await;
    assert_eq!(server.complete(complete(json!({}))).await.status, StatusCode::OK);
    let over = server.complete(complete(json!({"timeout": 1.5}))).await.error();
    assert_eq!(over.0, "timeout must be a number in (0, 1], of seconds, not 1.5");
}

#[tokio::test]
async fn a_request_may_say_how_long_it_may_take() {
    let server = server("a long answer");
    let with = |timeout: Value| server.complete(complete(json!({"prompt": "SLOW", "timeout": timeout})));
    let late = with(json!(0.05)).await;
    assert_eq!(late.status, StatusCode::GATEWAY_TIMEOUT);
    assert!(late.error().0.contains("deadline"));
    for timeout in [json!(60), json!(1e300), json!(null)] {
        assert_eq!(with(timeout).await.status, StatusCode::OK);
    }
    for wrong in [json!(0), json!(-1), json!("5")] {
        let wrong = with(wrong).await;
        assert_eq!(wrong.status, StatusCode::BAD_REQUEST);
        assert!(wrong.error().0.starts_with("timeout must be a number in (0, ∞), of seconds, not "));
    }
}

/// What is quoted of a request, and what a line of the log says of it, has an end.
#[tokio::test]
async fn an_answer_does_not_repeat_all_of_a_bad_request() {
    let server = server("x");
    let long = "y".repeat(500_000);
    for body in [
        json!({"model": long}),
        json!({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": long}}}),
        json!({"attention": {long.clone(): 1}}),
        json!({"logit_bias": {long.clone(): 1}}),
        json!({"structured_outputs": {long.clone(): 1}}),
        json!({"response_format": {"type": long}}),
    ] {
        let answer = server.chat(chat(body)).await;
        assert!(answer.status.is_client_error() && answer.text.len() < 5000, "{} bytes", answer.text.len());
    }
}

#[tokio::test]
async fn a_stop_string_may_stand_at_the_answers_end() {
    let server = server("one two three");
    for stream in [false, true] {
        let body = json!({"prompt": "hi", "stop": " two", "include_stop_str_in_output": true, "stream": stream});
        let answer = server.complete(complete(body)).await;
        let text: String = match stream {
            false => answer.json()["choices"][0]["text"].as_str().unwrap().into(),
            true => answer.events().iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect(),
        };
        assert_eq!(text, "one two");
    }
    // So may a token that ends it, and the log probabilities are those of what is shown.
    for (extra, text) in [
        (json!({"stop": " two"}), "one"),
        (json!({"stop": " two", "include_stop_str_in_output": true}), "one two"),
        (json!({"stop": "wo t", "include_stop_str_in_output": true}), "one two t"),
        (json!({"stop_token_ids": [32]}), "one"),
        (json!({"stop_token_ids": [32], "include_stop_str_in_output": true}), "one "),
    ] {
        let mut body = complete(json!({"prompt": "hi", "logprobs": 0}));
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let choice = &server.complete(body).await.json()["choices"][0];
        let shown = choice["logprobs"]["tokens"].as_array().unwrap().iter().filter_map(|token| token.as_str());
        assert_eq!((&choice["text"], shown.collect::<String>()), (&json!(text), text.to_owned()), "{extra}");
        assert_eq!(choice["finish_reason"], "stop", "{extra}");
    }
}

/// The newer name goes first.
#[tokio::test]
async fn two_lengths_are_one() {
    let server = server("abcdefgh");
    let body = server.chat(chat(json!({"max_tokens": 2, "max_completion_tokens": 3}))).await.json();
    assert_eq!(body["choices"][0]["message"]["content"], "abc");
}
