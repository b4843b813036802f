//! Spans of requests, for OpenTelemetry: one of each HTTP request, until its answer is sent, and in it one of each prompt.

mod generation;

pub(crate) use generation::Generation;

use crate::holding::holding;
use crate::request_id::RequestId;
use axum::body::HttpBody;
use axum::extract::{MatchedPath, Request, State};
use axum::http::uri::Authority;
use axum::http::{Method, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::Response;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{FutureExt, SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracer;

/// What machines ask every few seconds has no spans.
pub(crate) const PROBES: [&str; 3] = ["/health", "/ready", "/metrics"];

/// Those that the semantic conventions know.
const METHODS: [Method; 9] = [
    Method::CONNECT,
    Method::DELETE,
    Method::GET,
    Method::HEAD,
    Method::OPTIONS,
    Method::PATCH,
    Method::POST,
    Method::PUT,
    Method::TRACE,
];

/// The semantic conventions' name for what went wrong.
const ERROR_TYPE: &str = "error.type";

/// Where the spans of requests go.
#[derive(Debug, Clone)]
pub struct Spans {
    tracer: SdkTracer,
    scheme: &'static str,
}

impl Spans {
    /// To `tracer`, of a server that speaks HTTPS, or HTTP.
    pub fn new(tracer: SdkTracer, https: bool) -> Self {
        Self { tracer, scheme: if https { "https" } else { "http" } }
    }

    /// The span of a request, within its client's if the header `traceparent` names one.
    fn open(&self, request: &Request) -> Open {
        let headers = request.headers();
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
        // Clients may make names of methods up, and there should not be as many names of spans.
        let method = if METHODS.contains(request.method()) { request.method().as_str() } else { "_OTHER" };
        let text = |name: header::HeaderName| headers.get(name)?.to_str().ok().map(str::to_owned);
        let mut attributes = vec![
            KeyValue::new("http.request.method", method.to_owned()),
            KeyValue::new("url.path", request.uri().path().to_owned()),
            KeyValue::new("url.scheme", self.scheme),
        ];
        let mut name = if method == "_OTHER" { "HTTP" } else { method }.to_owned();
        if let Some(route) = request.extensions().get::<MatchedPath>() {
            name = format!("{name} {}", route.as_str());
            attributes.push(KeyValue::new("http.route", route.as_str().to_owned()));
        }
        if method == "_OTHER" {
            attributes.push(KeyValue::new("http.request.method_original", request.method().to_string()));
        }
        if let Some(RequestId { id, .. }) = request.extensions().get() {
            attributes.push(KeyValue::new("taper.request_id", id.clone()));
        }
        if let Some(host) = text(header::HOST).and_then(|host| host.parse::<Authority>().ok()) {
            attributes.push(KeyValue::new("server.address", host.host().to_owned()));
            attributes.extend(host.port_u16().map(|port| KeyValue::new("server.port", i64::from(port))));
        }
        attributes.extend(text(header::USER_AGENT).map(|agent| KeyValue::new("user_agent.original", agent)));
        attributes.extend(version(request.version()).map(|text| KeyValue::new("network.protocol.version", text)));
        let builder = self.tracer.span_builder(name).with_kind(SpanKind::Server).with_attributes(attributes);
        let span = builder.start_with_context(&self.tracer, &parent);
        Open { context: parent.with_span(span), whole: false, failed: false }
    }
}

fn version(version: Version) -> Option<&'static str> {
    match version {
        Version::HTTP_10 => Some("1.0"),
        Version::HTTP_11 => Some("1.1"),
        _ => None,
    }
}

/// Has a span around every request but probes.
pub(crate) async fn around(State(spans): State<Spans>, request: Request, next: Next) -> Response {
    if request.extensions().get::<MatchedPath>().is_some_and(|route| PROBES.contains(&route.as_str())) {
        return next.run(request).await;
    }
    let bare = request.method() == Method::HEAD;
    let mut open = spans.open(&request);
    let response = next.run(request).with_context(open.context.clone()).await;
    open.answered(response.status());
    open.whole = bare || response.body().is_end_stream();
    // The span ends once all is sent, not when the connection lets go of the answer.
    holding(response, Some(open), |open| open.take().into_iter().for_each(|mut open| open.whole = true))
}

/// A request's span, until this is dropped.
struct Open {
    context: Context,
    /// Whether the client was sent everything.
    whole: bool,
    /// Whether the status says that the server failed.
    failed: bool,
}

impl Open {
    fn answered(&mut self, status: StatusCode) {
        self.failed = status.is_server_error();
        let span = self.context.span();
        span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status.as_u16())));
        // What a client did wrong is no error of the server's.
        if self.failed {
            span.set_attribute(KeyValue::new(ERROR_TYPE, status.as_u16().to_string()));
            span.set_status(Status::error(""));
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let span = self.context.span();
        if !self.whole && !self.failed {
            span.set_attribute(KeyValue::new(ERROR_TYPE, "cancelled"));
            span.set_status(Status::error("the connection ended before the answer did"));
        }
        span.end();
    }
}
