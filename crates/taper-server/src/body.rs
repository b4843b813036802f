//! Request bodies: bytes to a JSON object, off the async threads, because tokenizing a long prompt takes a while.

use crate::app::App;
use crate::error::ApiError;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use futures_util::StreamExt;
use serde_json::{Map, Value};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Bytes in which the room for bodies is counted.
pub(crate) const PIECE: usize = 1024;

/// So many bodies of the largest size may be read and parsed at a time.
pub(crate) const BODIES: usize = 16;

/// A body within the size limit, and its room among all that are read or parsed.
pub(crate) struct Body(Vec<u8>, Option<OwnedSemaphorePermit>);

impl FromRequest<Arc<App>> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let seconds = app.config.body_timeout;
        tokio::time::timeout(seconds, read(request, app)).await.unwrap_or_else(|_| {
            let message = format!("the request body did not come within {} seconds", seconds.as_secs_f64());
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message))
        })
    }
}

/// Reads a body; it takes room as it comes, so that only what is there counts.
async fn read(request: Request, app: &App) -> Result<Body, ApiError> {
    let most = app.config.body_bytes;
    let large = || {
        let message = format!("the request body is larger than {most} bytes, the limit here");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    let body = request.into_body();
    if http_body::Body::size_hint(&body).lower() > most as u64 {
        return Err(large());
    }
    let (mut bytes, mut room) = (Vec::new(), None::<OwnedSemaphorePermit>);
    let mut parts = body.into_data_stream();
    while let Some(part) = parts.next().await {
        let part =
            part.map_err(|e| ApiError::new(StatusCode::BAD_REQUEST, format!("reading the request body: {e}")))?;
        if bytes.len() + part.len() > most {
            return Err(large());
        }
        let has = room.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = (bytes.len() + part.len()).div_ceil(PIECE) - has;
        let more = Arc::clone(&app.bodies).try_acquire_many_owned(more as u32).map_err(|_| {
            let message = "too many large request bodies are on their way; try again later";
            ApiError { retry_after: Some(1), ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message) }
        })?;
        match &mut room {
            Some(room) => room.merge(more),
            None => room = Some(more),
        }
        bytes.extend_from_slice(&part);
    }
    Ok(Body(bytes, room))
}

impl Body {
    /// Parses the object and hands it to an endpoint's own parser.
    pub(crate) async fn parse<T: Send + 'static>(
        self,
        app: &Arc<App>,
        endpoint: fn(&App, &Map<String, Value>) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let turn = Arc::clone(&app.parsing).acquire_owned().await;
        let app = Arc::clone(app);
        let parsed = tokio::task::spawn_blocking(move || {
            // The work goes on where its client leaves, and keeps its turn.
            let (_turn, Self(bytes, _room)) = (turn, self);
            endpoint(&app, &object(&bytes)?)
        });
        parsed.await.unwrap_or_else(|panic| {
            tracing::error!(%panic, "parsing a request panicked");
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "reading the request failed"))
        })
    }
}

fn object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let bad = |message| ApiError::new(StatusCode::BAD_REQUEST, message);
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(bad("the body must be a JSON object".to_string())),
        Err(error) => Err(bad(format!("the body is not valid JSON: {error}"))),
    }
}
