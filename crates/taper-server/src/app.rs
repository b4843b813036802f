//! What every handler shares, and what stands around all of them.

use crate::body::{BODIES, PIECE, Parsing};
use crate::error::{self, ApiError};
use crate::keys;
use crate::live::Live;
use crate::metrics::{Metrics, Watch};
use crate::request_id;
use crate::spans::{self, Spans};
use crate::{access, answer, origin, routes};
use axum::Router;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};
use taper_attention::{Artifacts, nearest};
use taper_engine::{Engine, SamplingParams};
use tokio::sync::Semaphore;
use tower::util::option_layer;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// What the server adds to the engine.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Who may ask, and the attention of requests that say nothing of it.
    pub live: Arc<Live>,
    /// What methods learned offline for the model.
    pub artifacts: Arc<Artifacts>,
    /// What requests may call the model; the first stands in answers. With none, that is its own name.
    pub names: Vec<String>,
    /// Where spans of requests go, if anywhere.
    pub spans: Option<Spans>,
    /// Web pages that may ask.
    pub origins: Origins,
    /// Whether the server listens on loopback alone; [`serve`](crate::serve) says so.
    pub loopback: bool,
    /// How long a client may take to send a request's head, and idle between two requests.
    pub header_timeout: Duration,
    /// How long a client may take to send a request's body.
    pub body_timeout: Duration,
    /// How long a client may take nothing of what waits to be sent to it.
    pub write_timeout: Duration,
    /// Largest request body; all that are read at a time have sixteen times as much.
    pub body_bytes: usize,
    /// Most prompts of one text completion.
    pub prompts: usize,
    /// What requests are sampled by that say nothing of it: temperature, top_k, top_p, min_p and repetition_penalty.
    pub sampling: SamplingParams,
    /// Most tokens of an answer whose request does not say it; `None`: as many as fit, and of a text completion 16.
    pub max_tokens: Option<usize>,
    /// Least `priority` that requests may have: those with less go first.
    pub least_priority: i64,
    /// How long a request may take, waiting included; `None`: as long as it does.
    pub request_timeout: Option<Duration>,
    /// How long a step may take of a server that is well.
    pub step_timeout: Duration,
    /// Silence in a stream after which a comment keeps proxies from closing it.
    pub keep_alive: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            live: Arc::default(),
            artifacts: Arc::default(),
            names: Vec::new(),
            spans: None,
            origins: Origins::None,
            loopback: false,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            body_bytes: 16 << 20,
            prompts: 64,
            sampling: SamplingParams::default(),
            max_tokens: None,
            least_priority: 0,
            request_timeout: None,
            step_timeout: Duration::from_secs(300),
            keep_alive: Duration::from_secs(10),
        }
    }
}

/// Web pages from which browsers may ask.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Origins {
    /// From none but the server's own.
    #[default]
    None,
    /// From any.
    Any,
    /// From those of these origins, such as `https://example.com`.
    These(Vec<String>),
}

impl Origins {
    /// What answers browsers that ask before they ask.
    fn layer(&self) -> Option<CorsLayer> {
        let allowed = match self {
            Self::None => return None,
            Self::Any => AllowOrigin::any(),
            Self::These(origins) => {
                AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
            }
        };
        let shown = [request_id::HEADER, answer::IGNORED, header::RETRY_AFTER, error::RETRY];
        let layer = CorsLayer::new().allow_origin(allowed).allow_methods([Method::GET, Method::POST]);
        Some(layer.allow_headers(AllowHeaders::mirror_request()).expose_headers(shown))
    }
}

/// What every handler shares.
pub(crate) struct App {
    pub(crate) engine: Arc<Engine>,
    pub(crate) config: ServerConfig,
    pub(crate) metrics: Arc<Metrics>,
    /// Bodies that are parsed at a time.
    pub(crate) parsing: Parsing,
    /// Room for the bodies that are read or parsed, in [pieces](crate::body::PIECE).
    pub(crate) bodies: Arc<Semaphore>,
    /// How many there are in all.
    pub(crate) pieces: usize,
}

/// Paths that clients miss by a base with `/v1` too few or too many, or by a slip.
const PATHS: [&str; 12] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/models",
    "/v1/attention/methods",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/version",
    "/metrics",
];

/// The one that a path which leads nowhere most likely means.
fn meant(path: &str) -> Option<&'static str> {
    fn end(path: &str) -> &str {
        path.trim_end_matches('/').trim_start_matches("/v1")
    }
    let close = || nearest(path, &PATHS);
    PATHS.into_iter().find(|known| end(known) == end(path)).or_else(close)
}

/// All routes.
pub fn router(engine: Arc<Engine>, config: ServerConfig) -> Router {
    let live = Arc::clone(&config.live);
    let cors = config.origins.layer();
    let spans = config.spans.clone().map(|spans| middleware::from_fn_with_state(spans, spans::around));
    let app = Arc::new(App::new(engine, config));
    let guard = middleware::from_fn_with_state(Arc::clone(&app), origin::check);
    let line = middleware::from_fn_with_state(Arc::clone(&app), access::around);
    routes::all()
        .fallback(async |uri: Uri| {
            let hint = meant(uri.path()).map_or(String::new(), |path| format!("; did you mean {path}?"));
            ApiError::new(StatusCode::NOT_FOUND, format!("no such path: {}{hint}", uri.path()))
        })
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            let message = format!("{} does not take {method}; the header Allow names what it takes", uri.path());
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message)
        })
        .layer(middleware::from_fn_with_state(live, keys::check))
        .layer(guard)
        // What a browser asks beforehand has no key with it.
        .layer(option_layer(cors))
        .layer(option_layer(spans))
        .layer(line)
        .layer(middleware::from_fn(request_id::name))
        .with_state(app)
}

impl App {
    pub(crate) fn new(engine: Arc<Engine>, mut config: ServerConfig) -> Self {
        if config.names.is_empty() {
            config.names.push(engine.model().id.clone());
        }
        let pieces = config.body_bytes.div_ceil(PIECE).saturating_mul(BODIES).min(Semaphore::MAX_PERMITS);
        let metrics = Arc::new(Metrics::new(&engine, &config.names[0]));
        let bodies = Arc::new(Semaphore::new(pieces));
        Self { engine, config, metrics, parsing: Parsing::default(), bodies, pieces }
    }

    /// Watches one prompt's events from now on, for metrics and spans.
    pub(crate) fn watch(&self, call: &answer::Call, id: &str, came: Instant) -> Watch {
        let spans = self.config.spans.as_ref();
        let generation = spans.and_then(|spans| spans.generation(call, id, self.model_name()));
        self.metrics.watch(call, came, generation)
    }

    /// Refuses a token that the model lacks; `path` names its field.
    pub(crate) fn check_token(&self, token: u32, path: impl Display) -> Result<(), ApiError> {
        let vocab = self.engine.limits().vocab;
        if (token as usize) < vocab {
            return Ok(());
        }
        let message = format!("{path}: token {token} is not in the vocabulary of {vocab} tokens");
        Err(ApiError::invalid(path.to_string(), message))
    }

    /// What the model is called in answers.
    pub(crate) fn model_name(&self) -> &str {
        &self.config.names[0]
    }

    /// Refuses the name of a model that is not served; none means the one there is, and so does an empty one, as in vLLM.
    pub(crate) fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        let names = &self.config.names;
        let Some(name) = name.filter(|&name| !name.is_empty() && names.iter().all(|served| served != name)) else {
            return Ok(());
        };
        let served = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let is = if names.len() == 1 { "is" } else { "are" };
        Err(ApiError {
            param: Some("model".into()),
            ..ApiError::new(StatusCode::NOT_FOUND, format!("the model `{name}` is not served here; {served} {is}"))
        })
    }
}
