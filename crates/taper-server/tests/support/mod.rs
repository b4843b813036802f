//! A router over the real engine with the scripted model, and requests to it.
#![allow(dead_code)] // Each test file uses its part.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use taper_engine::stub::{Probe, StubBackend};
use taper_engine::{Engine, EngineConfig};
use taper_server::{ServerConfig, router};
use tower::ServiceExt;

pub struct Server {
    pub engine: Arc<Engine>,
    pub probe: Arc<Probe>,
    pub router: Router,
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    /// The `error` object, checked against the status and OpenAI's four fields.
    pub fn error(&self) -> (String, Value) {
        let body = self.json();
        let error = &body["error"];
        assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
        assert_eq!(error.as_object().unwrap().len(), 4, "{body}");
        assert_eq!(error["code"], self.status.as_u16());
        assert!(error["type"].is_string());
        (error["message"].as_str().unwrap().to_string(), error["param"].clone())
    }

    /// The payloads of a stream's events; checks the framing byte by byte.
    pub fn events(&self) -> Vec<Value> {
        let body = self.text.strip_suffix("data: [DONE]\n\n").expect("[DONE] comes last");
        let mut events = Vec::new();
        for event in body.split_terminator("\n\n") {
            if event.starts_with(':') {
                assert_eq!(event, ": keep-alive");
                continue;
            }
            let data = event.strip_prefix("data: ").expect("each event is one data line");
            assert!(!data.contains('\n'));
            events.push(serde_json::from_str(data).expect("JSON"));
        }
        events
    }
}

pub fn server(script: &str) -> Server {
    custom(StubBackend::new(script), EngineConfig::default(), ServerConfig::default())
}

pub fn custom(backend: StubBackend, engine: EngineConfig, config: ServerConfig) -> Server {
    let probe = Arc::clone(&backend.probe);
    let engine = Arc::new(backend.engine(engine));
    let router = router(Arc::clone(&engine), config);
    Server { engine, probe, router }
}

impl Server {
    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = to_bytes(body, usize::MAX).await.unwrap();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        Answer { status: parts.status, headers: parts.headers, text }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.post_raw(path, body.to_string()).await
    }

    pub async fn post_raw(&self, path: &str, body: String) -> Answer {
        self.send(Request::post(path).body(Body::from(body)).unwrap()).await
    }

    pub async fn chat(&self, body: Value) -> Answer {
        self.post("/v1/chat/completions", body).await
    }

    pub async fn complete(&self, body: Value) -> Answer {
        self.post("/v1/completions", body).await
    }
}

/// The body of a text completion with these fields.
pub fn complete(extra: Value) -> Value {
    let mut body = json!({"model": "stub", "prompt": "hi", "temperature": 0});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

pub async fn wait(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
