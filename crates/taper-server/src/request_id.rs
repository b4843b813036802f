//! `X-Request-Id`: the client's name for its request, or one made here; in the answer's header and id, and in the log.
//! What else is known of a request before its body is read goes with it.

use crate::error::ApiError;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// vLLM's header, which gateways set.
pub(crate) const PRIORITY: HeaderName = HeaderName::from_static("x-vllm-priority");

/// Longest name that is taken over.
const LENGTH_MAX: usize = 128;

/// A request's name, when it came, and whom it comes from.
#[derive(Debug, Clone)]
pub(crate) struct RequestId {
    /// Plain characters, safe in headers, logs and JSON.
    pub(crate) id: String,
    /// Its time runs from here.
    pub(crate) came: Instant,
    /// Whose prompts it may share what they begin with, where there are keys.
    pub(crate) shares: Option<Arc<str>>,
    /// A gateway's word on its priority, which goes over the body's.
    pub(crate) priority: Option<HeaderValue>,
    /// What became of its stream.
    pub(crate) failed: Failed,
}

/// The status of the error that ended a stream, whose head had said another one, if one did.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failed(Arc<OnceLock<u16>>);

impl Failed {
    /// Says so.
    pub(crate) fn by(&self, error: &ApiError) {
        let _ = self.0.set(error.status);
    }

    /// That status.
    pub(crate) fn status(&self) -> Option<u16> {
        self.0.get().copied()
    }
}

impl RequestId {
    /// The same by the name that its answer has.
    pub(crate) fn named(self, prefix: &str) -> Self {
        Self { id: format!("{prefix}{}", self.id), ..self }
    }
}

/// Gives every request its name, and every answer the same in its header.
pub(crate) async fn name(mut request: Request, next: Next) -> Response {
    let id = request.headers().get(HEADER).and_then(accept).unwrap_or_else(make);
    let priority = request.headers().get(PRIORITY).cloned();
    request.extensions_mut().insert(RequestId {
        id: id.clone(),
        came: Instant::now(),
        shares: None,
        priority,
        failed: Failed::default(),
    });
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

/// The client's own name, unless it is too long or holds what could confuse a log.
fn accept(value: &HeaderValue) -> Option<String> {
    let text = value.to_str().ok()?;
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.:/+=@".contains(&b);
    let sound = (1..=LENGTH_MAX).contains(&text.len()) && text.bytes().all(plain);
    sound.then(|| text.to_owned())
}

fn make() -> String {
    format!("{:032x}", rand::random::<u128>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_names_are_taken_over_and_others_replaced() {
        let longest = "a".repeat(LENGTH_MAX);
        for text in ["a", "550e8400-e29b-41d4-a716-446655440000", "trace:1/span.2", &longest] {
            assert_eq!(accept(&HeaderValue::from_str(text).unwrap()), Some(text.to_owned()));
        }
        let too_long = "a".repeat(LENGTH_MAX + 1);
        for text in ["", "two words", "a\"b", "{}", "a\tb", &too_long] {
            assert_eq!(accept(&HeaderValue::from_str(text).unwrap()), None, "{text}");
        }
        assert_eq!(accept(&HeaderValue::from_bytes(b"\xff").unwrap()), None);
        assert_ne!(make(), make());
    }
}
