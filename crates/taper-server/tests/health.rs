//! What is told of an engine that ends, has died, or hangs.

mod support;

use axum::http::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use support::{complete, custom, server, wait};
use taper_engine::EngineConfig;
use taper_engine::stub::StubBackend;
use taper_server::{Listening, ServerConfig};
use tokio::net::TcpListener;

#[tokio::test]
async fn while_the_model_loads_all_are_told_so() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = format!("http://{}", listener.local_addr().unwrap());
    let config = ServerConfig::default();
    let listening = Listening::start(listener, None, &config).unwrap();
    let client = reqwest::Client::new();
    for path in ["/health", "/ready", "/v1/models", "/"] {
        let answer = client.get(format!("{at}{path}")).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "{path}");
        assert_eq!(answer.headers()["retry-after"], "1", "{path}");
    }
    let asked = client.post(format!("{at}/v1/completions")).body(r#"{"prompt": "a"}"#).send().await.unwrap();
    let error = asked.json::<Value>().await.unwrap();
    assert_eq!(error["error"]["message"], "the model is still loading");
    // The client has kept its connection, which goes on with the engine.
    let engine = Arc::clone(&server("ok").engine);
    listening.open(Arc::clone(&engine), config);
    let answer = client.post(format!("{at}/v1/completions")).body(r#"{"prompt": "a"}"#).send().await.unwrap();
    assert_eq!(answer.json::<Value>().await.unwrap()["choices"][0]["text"], "ok");
    assert_eq!(client.get(format!("{at}/health")).send().await.unwrap().status(), 200);
    drop(client);
    listening.until(engine, std::future::ready(())).await.unwrap();
}

#[tokio::test]
async fn draining_refuses_new_requests_and_finishes_old_ones() {
    let server = server("abc");
    server.probe.hang.store(true, Ordering::SeqCst);
    let running = server.complete(complete(json!({"prompt": "HANG"})));
    let late = async {
        wait("it runs", || server.engine.load().running == 1).await;
        server.engine.drain();
        let late = server.complete(complete(json!({}))).await;
        let health = (server.get("/health").await.status, server.get("/ready").await.status);
        server.probe.hang.store(false, Ordering::SeqCst);
        (late, health)
    };
    let (first, (late, health)) = tokio::join!(running, late);
    assert_eq!(first.json()["choices"][0]["text"], "abc");
    assert_eq!(late.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(health, (StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE));
    tokio::time::timeout(Duration::from_secs(5), server.engine.idle()).await.unwrap();
    assert_eq!(server.get("/health").await.status, StatusCode::OK, "a drained engine is no dead one");
}

#[tokio::test]
async fn a_backend_that_died_is_told_by_health() {
    let server = server("abc");
    assert_eq!(server.complete(complete(json!({"prompt": "FAIL"}))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(server.get("/health").await.status, StatusCode::OK, "one request failed");
    assert_eq!(server.complete(complete(json!({"prompt": "DIE"}))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    wait("it dies", || server.engine.load().dead).await;
    let after = (server.get("/health").await.status, server.get("/ready").await.status);
    assert_eq!(after, (StatusCode::SERVICE_UNAVAILABLE, StatusCode::SERVICE_UNAVAILABLE));
}

#[tokio::test]
async fn who_waits_when_the_backend_dies_has_a_503_and_is_no_client_that_left() {
    let server = server("abc");
    server.probe.hang.store(true, Ordering::SeqCst);
    let hangs = server.complete(complete(json!({"prompt": "HANG, then DIE"})));
    let waits = async {
        wait("it runs", || server.engine.load().running == 1).await;
        let waits = server.complete(complete(json!({"prompt": "hi"})));
        let free = async {
            wait("it waits", || server.engine.load().waiting == 1).await;
            server.probe.hang.store(false, Ordering::SeqCst);
        };
        tokio::join!(waits, free).0
    };
    let (hung, waited) = tokio::join!(hangs, waits);
    assert_eq!((hung.status, waited.status), (StatusCode::INTERNAL_SERVER_ERROR, StatusCode::SERVICE_UNAVAILABLE));
    assert_eq!(waited.headers["retry-after"], "1");
    assert_eq!(waited.error().0, "the engine has stopped: the stub is dead");
    let metrics = server.get("/metrics").await.text;
    let ended = |reason: &str| metrics.lines().find(|line| line.contains(&format!("finished_reason=\"{reason}\"")));
    assert!(ended("error").unwrap().ends_with(" 2") && ended("abort").unwrap().ends_with(" 0"), "{metrics}");
}

#[tokio::test]
async fn a_step_that_hangs_is_told_by_health_and_keeps_no_client_beyond_its_deadline() {
    let config = ServerConfig { step_timeout: Duration::from_millis(100), ..ServerConfig::default() };
    let server = custom(StubBackend::new("abc"), EngineConfig::default(), config);
    server.probe.hang.store(true, Ordering::SeqCst);
    for stream in [false, true] {
        let late = server.complete(complete(json!({"prompt": "HANG", "timeout": 0.5, "stream": stream}))).await;
        assert_eq!(late.status, StatusCode::GATEWAY_TIMEOUT);
        assert!(late.error().0.contains("deadline"));
    }
    wait("it hangs for long", || server.engine.load().turn.is_some_and(|turn| turn > Duration::from_millis(100))).await;
    let health = server.get("/health").await;
    assert_eq!(health.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(health.error().0.starts_with("a step has taken "), "{}", health.text);
    assert_eq!(server.get("/ready").await.status, StatusCode::SERVICE_UNAVAILABLE);
    server.probe.hang.store(false, Ordering::SeqCst);
    wait("it goes on", || server.engine.load().running == 0 && server.engine.load().turn.is_none()).await;
    assert_eq!(server.get("/health").await.status, StatusCode::OK);
    assert_eq!(server.complete(complete(json!({}))).await.status, StatusCode::OK);
}
