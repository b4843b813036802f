//! `/v1/embeddings`.

mod support;

use axum::http::StatusCode;
use serde_json::{Value, json};
use support::{custom, server, wait};
use taper_engine::EngineConfig;
use taper_engine::stub::StubBackend;
use taper_server::ServerConfig;

/// What the stub makes of so many tokens, of length 1.
fn unit(tokens: f64) -> [f64; 3] {
    let length = 3.0f64.hypot(4.0 * tokens);
    [3.0 / length, 4.0 * tokens / length, 0.0]
}

fn near(value: &Value, tokens: f64) -> bool {
    let found: Vec<f64> = value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    found.len() == 3 && found.iter().zip(unit(tokens)).all(|(a, b)| (a - b).abs() < 1e-6)
}

#[tokio::test]
async fn one_vector_a_text_in_their_order() {
    let server = server("x");
    let answer = server.post("/v1/embeddings", json!({"model": "stub", "input": "abc"})).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let body = answer.json();
    assert_eq!((&body["object"], &body["model"]), (&json!("list"), &json!("stub")));
    assert_eq!((&body["data"][0]["object"], &body["data"][0]["index"]), (&json!("embedding"), &json!(0)));
    assert!(near(&body["data"][0]["embedding"], 3.0), "{body}");
    assert_eq!((&body["usage"]["prompt_tokens"], &body["usage"]["total_tokens"]), (&json!(3), &json!(3)));
    assert!(body["usage"].get("completion_tokens").is_none());
    assert_eq!(body["usage"]["attention"]["prefill"]["method"], "dense");
    for input in [json!(["a", "bcd", "ef"]), json!([[1], [2, 3, 4], [5, 6]])] {
        let body = server.post("/v1/embeddings", json!({"input": input})).await.json();
        for (index, tokens) in [1.0, 3.0, 2.0].into_iter().enumerate() {
            assert!(body["data"][index]["index"] == index && near(&body["data"][index]["embedding"], tokens), "{body}");
        }
        assert_eq!(body["usage"]["prompt_tokens"], 6);
    }
    let packed = server.post("/v1/embeddings", json!({"input": "abc", "encoding_format": "base64"})).await.json();
    // 3 and 12 over the root of 153, and 0, as little-endian f32.
    assert_eq!(packed["data"][0]["embedding"], "Qlt4PkJbeD8AAAAA");
    assert_eq!(server.engine.load().running, 0);
    let text = server.get("/metrics").await.text;
    assert!(
        text.contains("vllm:request_success_total{engine=\"0\",finished_reason=\"stop\",model_name=\"stub\"} 8"),
        "{text}"
    );
}

/// More than wait or run at a time, in their order; the queue has room for four.
#[tokio::test]
async fn many_texts_go_through_a_small_queue() {
    let engine = EngineConfig { queue: 4, ..EngineConfig::default() };
    let server = custom(StubBackend::new("x"), engine, ServerConfig::default());
    let texts: Vec<String> = (0..150).map(|i| "y".repeat(1 + i % 7)).collect();
    let body = server.post("/v1/embeddings", json!({"input": texts, "dimensions": 3})).await.json();
    assert_eq!(body["data"].as_array().unwrap().len(), 150);
    for (index, text) in texts.iter().enumerate() {
        let one = &body["data"][index];
        assert!(one["index"] == index && near(&one["embedding"], text.len() as f64), "{one}");
    }
    assert_eq!(body["usage"]["prompt_tokens"], texts.iter().map(String::len).sum::<usize>());
    // Others that fill the queue meanwhile, and an end of the server, do not break off what was taken.
    let slow = server.post("/v1/embeddings", json!({"input": vec!["SLOW"; 24]}));
    let others = async {
        wait("the first are underway", || server.engine.load().running > 0).await;
        for _ in 0..8 {
            server.post("/v1/embeddings", json!({"input": "z"})).await;
        }
        server.engine.drain();
        server.post("/v1/embeddings", json!({"input": "z"})).await.status
    };
    let (slow, refused) = tokio::join!(slow, others);
    assert_eq!((slow.status, refused), (StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE), "{}", slow.text);
    server.engine.idle().await;
}

#[tokio::test]
async fn many_texts_have_an_end_too() {
    let engine = EngineConfig { queue: 4, ..EngineConfig::default() };
    let server = custom(StubBackend::new("x"), engine, ServerConfig::default());
    let late = server.post("/v1/embeddings", json!({"input": vec!["SLOW"; 50], "timeout": 0.001})).await;
    assert_eq!(late.status, StatusCode::GATEWAY_TIMEOUT, "{}", late.text);
}

#[tokio::test]
async fn a_text_may_be_as_long_as_the_context() {
    let server = server("x");
    let body = server.post("/v1/embeddings", json!({"input": "p".repeat(512)})).await.json();
    assert!(near(&body["data"][0]["embedding"], 512.0), "{body}");
    let refused = server.post("/v1/embeddings", json!({"input": "p".repeat(513)})).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert_eq!(
        refused.error(),
        ("This model's maximum context length is 512 tokens; the prompt has 513".into(), json!("input"))
    );
}

#[tokio::test]
async fn what_cannot_be_is_refused() {
    let server = server("x");
    for (extra, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": ""}), "input"),
        (json!({"input": [1, "a"]}), "input"),
        (json!({"input": [999]}), "input"),
        (json!({"input": "p".repeat(600)}), "input"),
        (json!({"input": vec!["x"; 2049]}), "input"),
        (json!({"encoding_format": "int8"}), "encoding_format"),
        (json!({"dimensions": 8}), "dimensions"),
        (json!({"timeout": 0}), "timeout"),
        (json!({"truncate_prompt_tokens": 1}), "truncate_prompt_tokens"),
        (json!({"epsilonn": 8}), "epsilonn"),
    ] {
        let mut body = json!({"input": "a"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let answer = server.post("/v1/embeddings", body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{extra}: {}", answer.text);
        assert_eq!(answer.error().1, param, "{extra}");
    }
    let failed = server.post("/v1/embeddings", json!({"input": ["fine", "NIL"]})).await;
    assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(failed.error().0.contains("not finite"), "{}", failed.text);
}
