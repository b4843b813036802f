//! Every request leaves a line in the log and a count, whatever becomes of it.

use crate::app::App;
use crate::error;
use crate::holding::holding;
use crate::keys::KeyName;
use crate::request_id::RequestId;
use crate::spans::PROBES;
use axum::body::HttpBody;
use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use std::sync::Arc;
use std::time::Instant;

/// The status of a request whose client left before it had the whole answer, by nginx's custom.
const LEFT: u16 = 499;

/// The most characters of a path in the log.
const PATH_MAX: usize = 300;

/// Writes the line once the answer was sent, or nobody waits for more of it.
pub(crate) async fn around(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(|route| route.as_str().to_owned());
    let method = match *request.method() {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        // Clients may make names of methods up.
        _ => "other",
    };
    let bare = *request.method() == Method::HEAD;
    let path = request.uri().path().to_owned();
    let key = KeyName::default();
    request.extensions_mut().insert(key.clone());
    let mut line = Line { app, method, route, path, id: request.extensions().get().cloned(), key, status: LEFT };
    let response = next.run(request).await;
    let status = response.status().as_u16();
    if bare || response.body().is_end_stream() {
        line.status = status;
        return response;
    }
    holding(response, Some((line, status)), |held| {
        held.take().into_iter().for_each(|(mut line, status)| line.status = status);
    })
}

struct Line {
    app: Arc<App>,
    method: &'static str,
    route: Option<String>,
    path: String,
    id: Option<RequestId>,
    key: KeyName,
    status: u16,
}

impl Drop for Line {
    fn drop(&mut self) {
        let Self { app, method, route, path, id, key, status } = self;
        // Where an error ended a stream its status was not the one at the head.
        *status = id.as_ref().and_then(|id| id.failed.status()).unwrap_or(*status);
        app.metrics.answered(route.as_deref().unwrap_or("none"), method, *status);
        if route.as_deref().is_some_and(|route| PROBES.contains(&route)) {
            return;
        }
        let (id, came) = id.as_ref().map_or(("", Instant::now()), |id| (id.id.as_str(), id.came));
        let seconds = came.elapsed().as_secs_f64();
        let (key, path) = (key.0.get(), error::beginning(path, PATH_MAX));
        let path = path.as_ref();
        if *status >= 500 {
            tracing::warn!(id, method, path, status, seconds, key, "answered");
        } else {
            tracing::info!(id, method, path, status, seconds, key, "answered");
        }
    }
}
