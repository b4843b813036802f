//! Spans of requests, as an exporter gets them.

mod support;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use futures_util::StreamExt;
use opentelemetry::Value;
use opentelemetry::trace::{SpanId, SpanKind, Status, TraceId, TracerProvider};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use serde_json::json;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use support::{Server, custom, wait};
use taper_engine::EngineConfig;
use taper_engine::stub::StubBackend;
use taper_server::{ServerConfig, Spans};
use tower::ServiceExt;

/// Spans that have ended, in the order of their ends.
#[derive(Debug, Clone, Default)]
struct Recorder(Arc<Mutex<Vec<SpanData>>>);

impl SpanExporter for Recorder {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.0.lock().unwrap().extend(batch);
        Ok(())
    }
}

impl Recorder {
    fn names(&self) -> Vec<String> {
        self.0.lock().unwrap().iter().map(|span| span.name.to_string()).collect()
    }

    fn all(&self, name: &str) -> Vec<SpanData> {
        self.0.lock().unwrap().iter().filter(|span| span.name == name).cloned().collect()
    }

    /// The only span of that name.
    fn one(&self, name: &str) -> SpanData {
        let mut all = self.all(name);
        assert_eq!(all.len(), 1, "{:?}", self.names());
        all.remove(0)
    }
}

fn traced(script: &str) -> (Server, Recorder) {
    let recorder = Recorder::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(recorder.clone()).build();
    let spans = Some(Spans::new(provider.tracer("test"), true));
    let server =
        custom(StubBackend::new(script), EngineConfig::default(), ServerConfig { spans, ..ServerConfig::default() });
    (server, recorder)
}

fn value(span: &SpanData, key: &str) -> Option<Value> {
    let mut values = span.attributes.iter().filter(|one| one.key.as_str() == key).map(|one| one.value.clone());
    let value = values.next();
    assert_eq!(values.next(), None, "{key} is there twice");
    value
}

fn text(span: &SpanData, key: &str) -> String {
    value(span, key).map_or_else(String::new, |value| value.to_string())
}

fn number(span: &SpanData, key: &str) -> f64 {
    match value(span, key) {
        Some(Value::F64(x)) => x,
        Some(Value::I64(n)) => n as f64,
        other => panic!("{key}: {other:?}"),
    }
}

fn seconds(span: &SpanData) -> f64 {
    span.end_time.duration_since(span.start_time).unwrap().as_secs_f64()
}

const COMPLETIONS: &str = "POST /v1/completions";

#[tokio::test]
async fn a_request_is_a_tree_of_spans_that_says_what_it_asked_for_and_cost() {
    let (server, recorder) = traced("Hello!");
    let body = json!({
        "prompt": "hi", "temperature": 0.9, "top_p": 0.7, "top_k": 5, "max_tokens": 20, "n": 2,
        "attention": {"decode": {"method": "streaming_llm"}},
    });
    let request = Request::post("/v1/completions?a=b")
        .header("x-request-id", "mine")
        .header("user-agent", "tests")
        .header("host", "taper.test:81")
        .body(Body::from(body.to_string()));
    assert_eq!(server.send(request.unwrap()).await.status, StatusCode::OK);
    assert_eq!(recorder.names(), ["queue", "prefill", "decode", "llm_request", COMPLETIONS]);

    let http = recorder.one(COMPLETIONS);
    assert_eq!((http.span_kind.clone(), http.status.clone()), (SpanKind::Server, Status::Unset));
    assert_eq!(http.parent_span_id, SpanId::INVALID);
    for (key, said) in [
        ("http.request.method", "POST"),
        ("http.route", "/v1/completions"),
        ("url.path", "/v1/completions"),
        ("url.scheme", "https"),
        ("http.response.status_code", "200"),
        ("server.address", "taper.test"),
        ("server.port", "81"),
        ("user_agent.original", "tests"),
        ("network.protocol.version", "1.1"),
        ("taper.request_id", "mine"),
        ("error.type", ""),
    ] {
        assert_eq!(text(&http, key), said, "{key}");
    }

    let llm = recorder.one("llm_request");
    assert_eq!((llm.parent_span_id, &llm.status), (http.span_context.span_id(), &Status::Unset));
    for (key, said) in [
        ("gen_ai.operation.name", "text_completion"),
        ("gen_ai.request.model", "stub"),
        ("gen_ai.request.id", "cmpl-mine"),
        ("gen_ai.request.temperature", "0.9"),
        ("gen_ai.request.top_p", "0.7"),
        ("gen_ai.request.top_k", "5"),
        ("gen_ai.request.max_tokens", "20"),
        ("gen_ai.request.n", "2"),
        ("gen_ai.response.finish_reasons", "[\"stop\",\"stop\"]"),
        ("gen_ai.usage.prompt_tokens", "2"),
        // Six bytes and the end token, twice.
        ("gen_ai.usage.completion_tokens", "14"),
        ("gen_ai.usage.input_tokens", "2"),
        ("gen_ai.usage.output_tokens", "14"),
        ("taper.attention.prefill.method", "dense"),
        // A stub reads nothing.
        ("taper.attention.prefill.density", ""),
        ("taper.attention.decode.method", "streaming_llm"),
    ] {
        assert_eq!(text(&llm, key), said, "{key}");
    }
    let time = |name: &str| number(&llm, &format!("gen_ai.latency.{name}"));
    let (queued, prefill, decode) =
        (time("time_in_queue"), time("time_in_model_prefill"), time("time_in_model_decode"));
    assert!((time("time_in_model_inference") - prefill - decode).abs() < 1e-9);
    assert!(time("time_to_first_token") <= time("e2e") && time("e2e") <= seconds(&http));

    // One after the other, as long as the engine says.
    let mut at = llm.start_time;
    for (name, took) in [("queue", queued), ("prefill", prefill), ("decode", decode)] {
        let stage = recorder.one(name);
        assert_eq!((stage.parent_span_id, stage.start_time), (llm.span_context.span_id(), at), "{name}");
        assert!((seconds(&stage) - took).abs() < 1e-6, "{name}");
        at = stage.end_time;
    }
}

#[tokio::test]
async fn an_audit_is_told_and_each_prompt_has_a_span_of_its_own() {
    let (server, recorder) = traced("Hello!");
    let body = json!({"prompt": ["a", "bc"], "epsilon": 0.1, "delta": 0.1, "attention": {"audit": true}});
    let answer = server.complete(body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let llm = recorder.all("llm_request");
    assert_eq!(llm.iter().map(|span| number(span, "gen_ai.usage.prompt_tokens")).sum::<f64>(), 3.0);
    let http = recorder.one(COMPLETIONS).span_context;
    for span in llm {
        assert_eq!(span.parent_span_id, http.span_id());
        assert_eq!(span.span_context.trace_id(), http.trace_id());
        assert_eq!(text(&span, "taper.attention.decode.method"), "vattention");
        let audit = &answer.json()["usage"]["attention"]["decode"]["audit"];
        assert_eq!(value(&span, "taper.attention.decode.audit.error_mean").is_some(), audit.is_object());
    }
}

#[tokio::test]
async fn an_embedding_is_not_decoded() {
    let (server, recorder) = traced("Hello!");
    assert_eq!(server.post("/v1/embeddings", json!({"input": "hi"})).await.status, StatusCode::OK);
    assert_eq!(recorder.names(), ["queue", "prefill", "llm_request", "POST /v1/embeddings"]);
    let llm = recorder.one("llm_request");
    assert_eq!(text(&llm, "gen_ai.operation.name"), "embeddings");
    assert_eq!(value(&llm, "gen_ai.request.temperature"), None);
}

#[tokio::test]
async fn spans_are_within_the_client_s_own() {
    let (server, recorder) = traced("Hello!");
    let send = async |traceparent: &str| {
        let request = Request::post("/v1/chat/completions").header("traceparent", traceparent);
        let body = json!({"messages": [{"role": "user", "content": "hi"}]});
        server.send(request.body(Body::from(body.to_string())).unwrap()).await.status
    };
    assert_eq!(send("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01").await, StatusCode::OK);
    let trace = TraceId::from_hex("4bf92f3577b34da6a3ce929d0e0e4736").unwrap();
    for name in recorder.names() {
        assert_eq!(recorder.one(&name).span_context.trace_id(), trace, "{name}");
    }
    let http = recorder.one("POST /v1/chat/completions");
    assert_eq!(http.parent_span_id, SpanId::from_hex("00f067aa0ba902b7").unwrap());
    assert!(http.parent_span_is_remote);

    // One that is not sampled has no spans here either.
    let before = recorder.names().len();
    assert_eq!(send("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00").await, StatusCode::OK);
    assert_eq!(recorder.names().len(), before);
    // What makes no sense is passed over.
    for wrong in ["", "00-0-0-01", "00-00000000000000000000000000000000-00f067aa0ba902b7-01"] {
        recorder.0.lock().unwrap().clear();
        assert_eq!(send(wrong).await, StatusCode::OK);
        assert_eq!(recorder.one("POST /v1/chat/completions").parent_span_id, SpanId::INVALID, "{wrong:?}");
    }
}

#[tokio::test]
async fn a_streamed_answer_s_span_ends_with_the_stream() {
    let (server, recorder) = traced("Hello!");
    let body = json!({"prompt": "SLOW", "max_tokens": 6, "stream": true});
    let request = Request::post("/v1/completions").body(Body::from(body.to_string())).unwrap();
    let response = server.router.clone().oneshot(request).await.unwrap();
    assert!(recorder.names().is_empty(), "the head is not the answer");
    let mut body = response.into_body().into_data_stream();
    while let Some(data) = body.next().await {
        let last = data.unwrap().ends_with(b"[DONE]\n\n");
        assert_eq!(recorder.all(COMPLETIONS).len(), 0);
        if last {
            break;
        }
    }
    assert!(body.next().await.is_none());
    let (http, llm) = (recorder.one(COMPLETIONS), recorder.one("llm_request"));
    assert_eq!((&http.status, &llm.status), (&Status::Unset, &Status::Unset));
    // Five steps of 20 ms after the one that made the first token.
    assert!(seconds(&http) >= 0.1 && seconds(&llm) >= 0.1, "{}", seconds(&http));
    assert!(seconds(&llm) <= seconds(&http));
    assert_eq!(text(&llm, "gen_ai.response.finish_reasons"), "[\"length\"]");
    assert!(number(&llm, "gen_ai.latency.time_to_first_token") < number(&llm, "gen_ai.latency.e2e"));
}

#[tokio::test]
async fn a_client_that_vanishes_ends_its_spans_as_errors() {
    for stream in [true, false] {
        let (server, recorder) = traced(&"x".repeat(400));
        let mut asked = Box::pin(server.complete(json!({"prompt": "SLOW", "max_tokens": 300, "stream": stream})));
        let before = server.probe.steps.load(Ordering::SeqCst);
        tokio::select! {
            _ = &mut asked => panic!("it ended"),
            () = wait("steps", || server.probe.steps.load(Ordering::SeqCst) >= before + 7) => {}
        }
        drop(asked);
        for name in [COMPLETIONS, "llm_request"] {
            let span = recorder.one(name);
            assert!(matches!(span.status, Status::Error { .. }), "{name}");
            assert_eq!(text(&span, "error.type"), "cancelled", "{name}");
        }
        assert!(seconds(&recorder.one("llm_request")) >= 0.1);
        wait("it is let go of", || server.engine.load().running == 0).await;
    }
}

#[tokio::test]
async fn failures_are_errors_and_what_clients_did_wrong_is_not() {
    let (server, recorder) = traced("Hello!");
    let failed = |description: &str, status: Status| matches!(status, Status::Error { description: d } if d.contains(description));
    for (stream, status) in [(false, 500), (true, 200)] {
        // The third token fails, when a stream has had its head.
        let answer = server.complete(json!({"prompt": "NAN", "stream": stream})).await;
        assert_eq!(answer.status.as_u16(), status, "{}", answer.text);
        for name in [COMPLETIONS, "llm_request"] {
            assert!(failed("not finite", recorder.one(name).status), "{name}");
        }
        assert_eq!(text(&recorder.one("llm_request"), "error.type"), "failed");
        let http = recorder.one(COMPLETIONS);
        assert_eq!(text(&http, "error.type"), if stream { "" } else { "500" });
        recorder.0.lock().unwrap().clear();
    }

    assert_eq!(server.complete(json!({"prompt": ""})).await.status, StatusCode::BAD_REQUEST);
    let http = recorder.one(COMPLETIONS);
    assert_eq!((text(&http, "http.response.status_code").as_str(), &http.status), ("400", &Status::Unset));
    assert_eq!(recorder.names().len(), 1);

    server.engine.drain();
    assert_eq!(server.complete(json!({"prompt": "hi"})).await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(failed("", recorder.all(COMPLETIONS).remove(1).status));
}

#[tokio::test]
async fn probes_have_no_spans_and_names_are_few() {
    let (server, recorder) = traced("Hello!");
    for path in ["/health", "/ready", "/metrics"] {
        server.get(path).await;
    }
    assert!(recorder.names().is_empty());
    server.get("/v1/models/some/model").await;
    server.get("/no/such/path").await;
    for method in ["HEAD", "BREW"] {
        server.send(Request::builder().method(method).uri("/v1/models").body(Body::empty()).unwrap()).await;
    }
    assert_eq!(recorder.names(), ["GET /v1/models/{*id}", "GET", "HEAD /v1/models", "HTTP /v1/models"]);
    assert_eq!(text(&recorder.one("HTTP /v1/models"), "http.request.method_original"), "BREW");
    assert!(recorder.0.lock().unwrap().iter().all(|span| span.status == Status::Unset));
}
