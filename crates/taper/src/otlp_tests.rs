//! The server with a collector beside it that takes, refuses, hangs, or is not there.

use super::*;
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use prost::Message;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use taper_engine::EngineConfig;
use taper_engine::stub::StubBackend;
use taper_server::ServerConfig;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::oneshot;

/// What a collector does.
#[derive(Clone, Copy, PartialEq)]
enum Mood {
    Takes,
    Refuses,
    Hangs,
}

struct Collector {
    mood: Mood,
    asked: AtomicUsize,
    got: Mutex<Vec<(HeaderMap, ExportTraceServiceRequest)>>,
}

impl Collector {
    /// Listens; where, and what it will have got.
    async fn start(mood: Mood) -> (String, Arc<Self>) {
        let collector = Arc::new(Self { mood, asked: AtomicUsize::new(0), got: Mutex::default() });
        let router = Router::new().route("/v1/traces", post(Self::take)).with_state(Arc::clone(&collector));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async { axum::serve(listener, router).await });
        (url, collector)
    }

    async fn take(State(collector): State<Arc<Self>>, headers: HeaderMap, body: axum::body::Bytes) -> StatusCode {
        collector.asked.fetch_add(1, Ordering::SeqCst);
        match collector.mood {
            Mood::Takes => {
                let batch = ExportTraceServiceRequest::decode(body).unwrap();
                collector.got.lock().unwrap().push((headers, batch));
                StatusCode::OK
            }
            Mood::Refuses => StatusCode::INTERNAL_SERVER_ERROR,
            Mood::Hangs => std::future::pending().await,
        }
    }
}

fn otlp(endpoint: &str, variables: &[(&str, &str)]) -> Result<Otlp> {
    let find = |name: &str| variables.iter().find(|(variable, _)| *variable == name).map(|(_, text)| text.to_string());
    Otlp::new(endpoint, find)
}

/// A server that listens, and how to stop it as `taper serve` does.
struct Server {
    url: String,
    stop: oneshot::Sender<()>,
    served: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn start(otlp: Otlp) -> Self {
        let exporter = otlp.start().unwrap();
        let config = ServerConfig { spans: Some(exporter.spans(false)), ..ServerConfig::default() };
        let engine = Arc::new(StubBackend::new("Hello!").engine(EngineConfig::default()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(async move {
            let stopped = async { drop(stopped.await) };
            taper_server::serve(listener, None, engine, config, stopped).await.unwrap();
            exporter.stop().await;
        });
        Self { url, stop, served }
    }

    /// A completion, whole or streamed.
    async fn ask(&self, headers: &[(&str, &str)], stream: bool) -> String {
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        let body = serde_json::json!({"prompt": "hi", "stream": stream});
        let mut request = http.post(format!("{}/v1/completions", self.url)).json(&body);
        for (name, text) in headers {
            request = request.header(*name, *text);
        }
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), 200);
        answer.text().await.unwrap()
    }

    /// How long stopping takes, the last batch with it.
    async fn stop(self) -> Duration {
        let since = Instant::now();
        self.stop.send(()).unwrap();
        self.served.await.unwrap();
        since.elapsed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_gets_the_tree_of_a_request_with_its_resource() {
    let (url, collector) = Collector::start(Mood::Takes).await;
    let server = Server::start(otlp(&url, &[("OTEL_SERVICE_NAME", "tests")]).unwrap()).await;
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    assert!(server.ask(&[("traceparent", parent)], true).await.ends_with("[DONE]\n\n"));
    assert!(server.stop().await < Duration::from_secs(3));

    let got = collector.got.lock().unwrap();
    assert_eq!(got.len(), 1, "one batch");
    let (headers, batch) = &got[0];
    assert_eq!(headers["content-type"], "application/x-protobuf");
    let [of_us] = &batch.resource_spans[..] else { panic!("one resource") };
    let resource = format!("{:?}", of_us.resource);
    for said in ["\"service.name\"", "\"tests\"", "\"service.version\"", "\"telemetry.sdk.language\""] {
        assert!(resource.contains(said), "{said}: {resource}");
    }
    let spans = &of_us.scope_spans[0].spans;
    let span = |name: &str| spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{name}: {spans:?}"));
    let (http, llm) = (span("POST /v1/completions"), span("llm_request"));
    assert_eq!((spans.len(), http.parent_span_id.as_slice()), (5, &0x00f0_67aa_0ba9_02b7_u64.to_be_bytes()[..]));
    assert_eq!(llm.parent_span_id, http.span_id);
    for name in ["queue", "prefill", "decode"] {
        assert_eq!(span(name).parent_span_id, llm.span_id, "{name}");
    }
    let trace = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736_u128.to_be_bytes();
    assert!(spans.iter().all(|span| span.trace_id == trace && span.start_time_unix_nano <= span.end_time_unix_nano));
    let has = |key: &str| llm.attributes.iter().any(|one| one.key == key);
    assert!(has("gen_ai.usage.completion_tokens") && has("gen_ai.latency.e2e") && has("taper.attention.decode.method"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_do_not_wait_for_a_collector_and_neither_does_the_end() {
    // Bound, so that nobody else gets the port, and never listening.
    let silent = TcpSocket::new_v4().unwrap();
    silent.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let nobody = silent.local_addr().unwrap();
    let (refuses, of_refusal) = Collector::start(Mood::Refuses).await;
    let (hangs, of_silence) = Collector::start(Mood::Hangs).await;
    for url in [&format!("http://{nobody}"), "http://no-such-host.invalid", &refuses, &hangs] {
        let since = Instant::now();
        let server = Server::start(otlp(url, &[]).unwrap()).await;
        for stream in [false, true] {
            let end = if stream { "[DONE]\n\n" } else { "}" };
            assert!(server.ask(&[], stream).await.ends_with(end));
        }
        assert!(since.elapsed() < Duration::from_secs(3), "{url}: {:?}", since.elapsed());
        let took = server.stop().await;
        assert!(took < FLUSH + Duration::from_secs(2), "{url}: {took:?}");
    }
    assert_eq!(of_refusal.asked.load(Ordering::SeqCst), 1, "a refusal is final");
    assert_eq!(of_silence.asked.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_collector_hangs_spans_are_dropped_rather_than_kept() {
    let (url, collector) = Collector::start(Mood::Hangs).await;
    let exporter = otlp(&url, &[]).unwrap().start().unwrap();
    let config = ServerConfig { spans: Some(exporter.spans(false)), ..ServerConfig::default() };
    let engine = Arc::new(StubBackend::new("Hello!").engine(EngineConfig::default()));
    let router = taper_server::router(engine, config);
    let ask = async |times: usize| {
        for _ in 0..times {
            let request = axum::http::Request::get("/version").body(Body::empty()).unwrap();
            let answer = tower::ServiceExt::oneshot(router.clone(), request).await.unwrap();
            assert_eq!(answer.status(), StatusCode::OK);
        }
    };
    // A batch of 512 is under way until the test ends,
    ask(512).await;
    while collector.asked.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    // 2,048 spans wait, and there is no room for more.
    let since = Instant::now();
    ask(3000).await;
    assert!(since.elapsed() < Duration::from_secs(8), "{:?}", since.elapsed());
    assert_eq!(collector.asked.load(Ordering::SeqCst), 1);
    let since = Instant::now();
    exporter.stop().await;
    assert!(since.elapsed() < FLUSH + Duration::from_secs(2));
}

#[tokio::test]
async fn a_collector_that_fails_is_mentioned_once_in_a_while() {
    let (url, collector) = Collector::start(Mood::Refuses).await;
    let client = Client {
        http: reqwest::Client::builder().no_proxy().build().unwrap(),
        runtime: tokio::runtime::Handle::current(),
        collector: url.clone(),
        said: Mutex::default(),
    };
    let send = async || {
        let request = Request::post(format!("{url}/v1/traces")).body(Bytes::new()).unwrap();
        client.send_bytes(request).await.unwrap().status()
    };
    let said = || *client.said.lock().unwrap();
    assert_eq!((said(), send().await), (None, StatusCode::INTERNAL_SERVER_ERROR));
    let first = said().expect("mentioned");
    send().await;
    assert_eq!((said(), collector.asked.load(Ordering::SeqCst)), (Some(first), 2), "not again at once");
    let Some(long_ago) = first.checked_sub(SILENCE) else { return };
    *client.said.lock().unwrap() = Some(long_ago);
    send().await;
    assert!(said() > Some(first), "but later");
}

#[test]
fn opentelemetry_s_own_variables_name_a_collector() {
    let of = |variables: &[(&str, &str)]| {
        let all: Vec<_> = variables.iter().map(|(name, text)| (name.into(), text.into())).collect();
        endpoint(&all)
    };
    let all = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318/");
    assert_eq!(of(&[]), None);
    assert_eq!(of(&[all]).unwrap(), "http://c:4318/v1/traces");
    assert_eq!(of(&[all, ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://d/x")]).unwrap(), "http://d/x");
    assert_eq!(of(&[all, ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")]).unwrap(), "http://c:4318/v1/traces");
    assert_eq!(of(&[all, ("OTEL_TRACES_EXPORTER", "otlp")]).unwrap(), "http://c:4318/v1/traces");
    assert_eq!(of(&[all, ("OTEL_TRACES_EXPORTER", "none")]), None);
    assert_eq!(of(&[all, ("OTEL_SDK_DISABLED", "True")]), None);
}

#[test]
fn mistakes_name_the_setting_or_the_variable_and_no_secret() {
    let said = |url: &str, variables: &[(&str, &str)]| format!("{:#}", otlp(url, variables).unwrap_err());
    let like = "otlp_traces_endpoint must be like http://localhost:4318/v1/traces, with http:// or https://";
    for wrong in ["localhost:4318", "grpc://localhost:4317", "collector", "http://", "file:///spans"] {
        assert!(said(wrong, &[]).starts_with(like), "{wrong}: {}", said(wrong, &[]));
    }
    for url in ["http://me:hidden@c", "http://c/v1/traces?token=hidden"] {
        let secret = said(url, &[]);
        assert!(secret.contains("OTEL_EXPORTER_OTLP_HEADERS") && !secret.contains("hidden"), "{secret}");
    }
    let good = "http://c:4318";
    let secret = said(good, &[("OTEL_EXPORTER_OTLP_HEADERS", "a=b,hidden")]);
    assert_eq!(secret, "OTEL_EXPORTER_OTLP_HEADERS: must be name=value, with commas between them");
    let protocol = said(good, &[("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]);
    assert!(protocol.starts_with("OTEL_EXPORTER_OTLP_PROTOCOL: \"grpc\": spans go by http/protobuf"), "{protocol}");
    let compression = said(good, &[("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd")]);
    assert_eq!(compression, "OTEL_EXPORTER_OTLP_COMPRESSION: \"zstd\": must be gzip or none");
    for text in ["0", "soon", "-1"] {
        let timeout = said(good, &[("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", text)]);
        assert!(timeout.starts_with("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT: "), "{timeout}");
    }
    let both = [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")];
    assert!(otlp(good, &both).is_ok());
    assert!(otlp(good, &[("OTEL_EXPORTER_OTLP_HEADERS", "a=b%20c, d=e,")]).is_ok());
    let path = |url: &str| otlp(url, &[]).unwrap().endpoint.to_string();
    assert_eq!(path(good), "http://c:4318/v1/traces");
    assert_eq!(path("https://c/own/path"), "https://c/own/path");
}
