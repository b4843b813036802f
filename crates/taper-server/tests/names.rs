//! What requests may call the model.

mod support;

use axum::http::StatusCode;
use serde_json::{Value, json};
use support::custom;
use taper_engine::EngineConfig;
use taper_engine::stub::StubBackend;
use taper_server::ServerConfig;

#[tokio::test]
async fn a_model_is_asked_for_by_any_of_its_names_and_answers_by_the_first() {
    let names = ["llama".to_owned(), "gpt-4o-mini".to_owned()];
    let config = ServerConfig { names: names.to_vec(), ..Default::default() };
    let server = custom(StubBackend::new("x"), EngineConfig::default(), config);
    let messages = json!([{"role": "user", "content": "hi"}]);
    let listed = server.get("/v1/models").await.json();
    let ids: Vec<&str> = listed["data"].as_array().unwrap().iter().map(|card| card["id"].as_str().unwrap()).collect();
    assert_eq!(ids, names);
    assert_eq!(server.get("/v1/models/gpt-4o-mini").await.json(), listed["data"][1]);
    for model in [json!("llama"), json!("gpt-4o-mini"), json!(""), Value::Null] {
        for (path, body) in [
            ("/v1/chat/completions", json!({"model": model, "messages": messages})),
            ("/v1/completions", json!({"model": model, "prompt": "hi"})),
            ("/v1/responses", json!({"model": model, "input": "hi"})),
            ("/v1/embeddings", json!({"model": model, "input": "hi"})),
        ] {
            let answer = server.post(path, body).await;
            assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.text);
            assert_eq!(answer.json()["model"], "llama", "{path}");
        }
    }
    let streamed = server.chat(json!({"model": "gpt-4o-mini", "messages": messages, "stream": true})).await;
    assert!(streamed.events().iter().all(|event| event["model"] == "llama"));
    // Its own name is none of them.
    let missing = server.chat(json!({"model": "stub", "messages": messages})).await;
    assert_eq!(missing.status, StatusCode::NOT_FOUND);
    let says = "the model `stub` is not served here; `llama`, `gpt-4o-mini` are";
    assert_eq!(missing.error(), (says.to_owned(), json!("model")));
    assert_eq!(server.get("/v1/models/stub").await.status, StatusCode::NOT_FOUND);
    assert!(server.get("/metrics").await.text.contains("model_name=\"llama\""));
}
