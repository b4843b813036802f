//! One table: what went wrong -> status, type, message, `param`, headers.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::borrow::Cow;
use taper_engine::{RequestError, SubmitError, TextError};

/// An error as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status, and `code` in the body.
    pub status: u16,
    /// What to do about it.
    pub message: String,
    /// The field at fault, as a path (`attention.decode.epsilon`).
    pub param: Option<String>,
    /// Seconds after which a client that was refused for want of room should try again.
    pub retry_after: Option<u64>,
    /// Whether the same request would end so again, for what clients else try again of their own accord.
    pub lasting: bool,
}

/// Says to OpenAI's clients whether to try again, whatever the status; it is only said where they should not.
pub(crate) const RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// The most characters of a message and of a field's path, both of which may quote the request.
const MESSAGE_MAX: usize = 1000;
const PARAM_MAX: usize = 200;

/// The beginning of a text.
pub(crate) fn beginning(text: &str, most: usize) -> Cow<'_, str> {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}

impl ApiError {
    /// A field that cannot be accepted.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { status: 400, message: message.into(), param: Some(param.into()), retry_after: None, lasting: false }
    }

    /// An error without a field.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status: status.as_u16(), message: message.into(), param: None, retry_after: None, lasting: false }
    }

    /// The error object that goes under `error`, in a body or in a stream.
    pub fn body(&self) -> Value {
        // vLLM's names, and the protocol's own phrase where it has none.
        let kind = match self.status {
            400 => "BadRequestError",
            404 => "NotFoundError",
            500 => "InternalServerError",
            503 => "ServiceUnavailableError",
            _ => StatusCode::from_u16(self.status).ok().and_then(|s| s.canonical_reason()).unwrap_or("Error"),
        };
        let message = beginning(&self.message, MESSAGE_MAX);
        let param = self.param.as_deref().map(|param| beginning(param, PARAM_MAX));
        json!({"error": {"message": message, "type": kind, "param": param, "code": self.status}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.lasting {
            response.headers_mut().insert(RETRY, HeaderValue::from_static("false"));
        }
        response
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let status = match error {
            RequestError::Deadline => StatusCode::GATEWAY_TIMEOUT,
            // What it asks for is too much, and would be again.
            RequestError::Grammar(_) | RequestError::NoToken => StatusCode::BAD_REQUEST,
            // As those hear that come later.
            RequestError::Stopped(_) => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        // What had no time adds to what leaves others none, and the weights give the same numbers.
        let lasting = matches!(error, RequestError::Deadline | RequestError::NonFinite);
        let retry_after = matches!(error, RequestError::Stopped(_)).then_some(1);
        Self { lasting, retry_after, ..Self::new(status, error.to_string()) }
    }
}

/// A request that the engine did not take; `prompt` names the prompt's field, `count` that of the number of answers,
/// `max_tokens` the field that set the length if one did.
pub(crate) fn refused(error: &SubmitError, prompt: &str, count: &str, max_tokens: Option<&str>) -> ApiError {
    let message = error.to_string();
    match error {
        SubmitError::EmptyPrompt | SubmitError::UnknownToken { .. } => ApiError::invalid(prompt, message),
        SubmitError::Context { prompt: n, limit, .. } if n >= limit => ApiError::invalid(prompt, message),
        SubmitError::Context { .. } => ApiError::invalid(max_tokens.unwrap_or(prompt), message),
        // The first of prompt, n and length that is too much even with the least of what follows it.
        SubmitError::Cache { least, limit, .. } if least > limit => ApiError::invalid(prompt, message),
        SubmitError::Cache { fewest, limit, .. } if fewest > limit => ApiError::invalid(count, message),
        SubmitError::Cache { .. } => ApiError::invalid(max_tokens.unwrap_or(prompt), message),
        SubmitError::Busy { .. } | SubmitError::Draining | SubmitError::Dead => {
            let retry_after =
                Some(if let SubmitError::Busy { retry_seconds, .. } = error { *retry_seconds } else { 1 });
            ApiError { retry_after, ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message) }
        }
    }
}

/// A text that got no tokens; `param` names its field.
pub(crate) fn text(error: &TextError, param: &str) -> ApiError {
    let message = error.to_string();
    match error {
        TextError::Refused(_) => ApiError::invalid(param, message),
        TextError::Busy(_) => {
            ApiError { retry_after: Some(1), ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message) }
        }
        // A template that fails on messages fails on them again.
        TextError::Failed(_) => ApiError { lasting: true, ..ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message) },
    }
}
