//! Spans on their way to a collector: OTLP over HTTP, in batches, by a thread of their own. Whether they arrive, no request
//! notices.

use anyhow::{Context, Result, bail};
use async_trait::async_trait;
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::resource::{EnvResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use reqwest::{Url, redirect};
use std::ffi::OsString;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use taper_server::Spans;

/// How long a collector may take over a batch, where the environment does not say.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the last spans may take once the server has stopped.
const FLUSH: Duration = Duration::from_secs(3);
/// How often a collector that fails is mentioned in the log.
const SILENCE: Duration = Duration::from_secs(60);
/// Most of a collector's answer that is read.
const ANSWER_BYTES: usize = 1 << 20;

/// A collector, and how to reach it, checked. Samplers, batches, resources and compression OpenTelemetry's crates read from the
/// environment themselves.
#[derive(Debug, PartialEq, Eq)]
pub struct Otlp {
    endpoint: Url,
    patience: Duration,
    /// `OTEL_SERVICE_NAME`.
    service: Option<String>,
}

/// Where OpenTelemetry's own variables send spans, if they send them anywhere.
pub fn endpoint(environment: &[(OsString, OsString)]) -> Option<String> {
    let read = |name: &str| {
        let (_, text) = environment.iter().find(|(variable, text)| variable == name && !text.is_empty())?;
        Some(text.to_string_lossy().into_owned())
    };
    let off = read("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true"));
    if off || read("OTEL_TRACES_EXPORTER").is_some_and(|name| name != "otlp") {
        return None;
    }
    let of_all = || read("OTEL_EXPORTER_OTLP_ENDPOINT").map(|url| format!("{}/v1/traces", url.trim_end_matches('/')));
    read("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").or_else(of_all)
}

impl Otlp {
    /// The collector at `endpoint`; `variable` reads the environment.
    ///
    /// # Errors
    /// What is no URL of a collector, or a variable that says what is not here. Never what a header holds.
    pub fn new(endpoint: &str, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        // Of a pair the one for spans alone goes first.
        let either = |end: &str| {
            let names = [format!("OTEL_EXPORTER_OTLP_TRACES_{end}"), format!("OTEL_EXPORTER_OTLP_{end}")];
            names.into_iter().find_map(|name| variable(&name).filter(|text| !text.is_empty()).map(|text| (name, text)))
        };
        if let Some((name, protocol)) = either("PROTOCOL").filter(|(_, text)| text != "http/protobuf") {
            bail!("{name}: {protocol:?}: spans go by http/protobuf alone, for which collectors listen at port 4318");
        }
        if let Some((name, _)) = either("HEADERS").filter(|(_, text)| !text.split_terminator(',').all(is_header)) {
            bail!("{name}: must be name=value, with commas between them");
        }
        if let Some((name, text)) = either("COMPRESSION").filter(|(_, text)| text != "gzip" && text != "none") {
            bail!("{name}: {text:?}: must be gzip or none");
        }
        let patience = either("TIMEOUT").map(|(name, text)| match text.parse() {
            Ok(milliseconds @ 1..) => Ok(Duration::from_millis(milliseconds)),
            _ => bail!("{name}: {text:?}: must be milliseconds, at least 1"),
        });
        Ok(Self {
            endpoint: url(endpoint)?,
            patience: patience.unwrap_or(Ok(PATIENCE))?,
            service: variable("OTEL_SERVICE_NAME").filter(|name| !name.is_empty()),
        })
    }

    /// Makes ready to send; nothing is sent before there is something to send, so nobody waits for a collector.
    ///
    /// # Errors
    /// None that a setting could bring about.
    pub fn start(self) -> Result<Exporter> {
        // A redirection would send the headers, and what they hold, to somebody else.
        let http = reqwest::Client::builder().timeout(self.patience).redirect(redirect::Policy::none()).build()?;
        let client = Client {
            http,
            runtime: tokio::runtime::Handle::current(),
            collector: self.endpoint.origin().ascii_serialization(),
            said: Mutex::default(),
        };
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_endpoint(self.endpoint)
            .with_protocol(Protocol::HttpBinary)
            .with_timeout(self.patience)
            .build()
            .context("otlp_traces_endpoint")?;
        let resource = Resource::builder_empty()
            .with_service_name("taper")
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .with_detectors(&[Box::new(TelemetryResourceDetector), Box::new(EnvResourceDetector::new())])
            .with_attributes(self.service.map(|name| KeyValue::new("service.name", name)))
            .build();
        let provider =
            SdkTracerProvider::builder().with_resource(resource).with_batch_exporter(Quiet(exporter)).build();
        Ok(Exporter(provider))
    }
}

/// What a request may be sent to, with the path that collectors have where it says none.
fn url(text: &str) -> Result<Url> {
    let wrong = || "otlp_traces_endpoint must be like http://localhost:4318/v1/traces, with http:// or https://";
    let mut url: Url = text.parse().with_context(wrong)?;
    if !["http", "https"].contains(&url.scheme()) || !url.has_host() {
        bail!("{}", wrong());
    }
    if !url.username().is_empty() || url.password().is_some() {
        bail!("otlp_traces_endpoint must hold no name and password; headers come from OTEL_EXPORTER_OTLP_HEADERS");
    }
    if url.query().is_some() {
        bail!(
            "otlp_traces_endpoint must hold no query, since the log shows it; OTEL_EXPORTER_OTLP_HEADERS is for secrets"
        );
    }
    if url.path() == "/" {
        url.set_path("/v1/traces");
    }
    Ok(url)
}

/// Whether OpenTelemetry's crate would take it; what it does not, it leaves out.
fn is_header(pair: &str) -> bool {
    let name = |name: &str| reqwest::header::HeaderName::try_from(name.trim()).is_ok();
    pair.split_once('=').is_some_and(|(key, value)| name(key) && !value.trim().is_empty())
}

/// What sends spans.
pub struct Exporter(SdkTracerProvider);

impl Exporter {
    /// What makes the spans of a server that speaks HTTPS, or HTTP.
    pub fn spans(&self, https: bool) -> Spans {
        Spans::new(self.0.tracer("taper"), https)
    }

    /// Sends what there is, for as long as that may take.
    pub async fn stop(self) {
        // What went wrong the log has.
        let _ = tokio::task::spawn_blocking(move || self.0.shutdown_with_timeout(FLUSH)).await;
    }
}

/// Sends batches on the server's runtime, since the thread that asks has none.
#[derive(Debug)]
struct Client {
    http: reqwest::Client,
    runtime: tokio::runtime::Handle,
    /// For the log, without what a URL may hold besides.
    collector: String,
    /// When the log was last told of a failure.
    said: Mutex<Option<Instant>>,
}

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let sent = match reqwest::Request::try_from(request) {
            Ok(request) => self.runtime.spawn(exchange(self.http.clone(), request)).await?,
            Err(error) => Err(error),
        };
        match sent {
            Ok(response) => {
                if !response.status().is_success() {
                    self.failed(format!("it answered {}", response.status()));
                }
                Ok(response)
            }
            Err(error) => {
                let error = error.without_url();
                self.failed(format!("{:#}", anyhow::Error::new(error)));
                Err("not sent".into())
            }
        }
    }
}

impl Client {
    /// A collector that is not there is not there for every batch, of which there is one each few seconds.
    fn failed(&self, reason: String) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.is_none_or(|said| said.elapsed() >= SILENCE) {
            *said = Some(Instant::now());
            tracing::warn!(collector = self.collector, reason, "spans are lost: the collector does not take them");
        }
    }
}

async fn exchange(http: reqwest::Client, request: reqwest::Request) -> reqwest::Result<Response<Bytes>> {
    let mut response = http.execute(request).await?;
    let (status, headers) = (response.status(), std::mem::take(response.headers_mut()));
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk[..chunk.len().min(ANSWER_BYTES - body.len())]);
        if body.len() == ANSWER_BYTES {
            break;
        }
    }
    let mut response = Response::new(Bytes::from(body));
    (*response.status_mut(), *response.headers_mut()) = (status, headers);
    Ok(response)
}

/// An exporter whose failures [`Client`] has told already.
#[derive(Debug)]
struct Quiet(opentelemetry_otlp::SpanExporter);

impl SpanExporter for Quiet {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let _ = self.0.export(batch).await;
        Ok(())
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.0.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.0.set_resource(resource);
    }
}

#[cfg(test)]
#[path = "otlp_tests.rs"]
mod tests;
