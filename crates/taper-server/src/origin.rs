//! Web pages of others must not make a server work that asks nobody for a key: browsers send such requests without asking
//! first, as long as their bodies pass for plain text.

use crate::app::{App, Origins};
use crate::error::ApiError;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// What says in browsers' requests whose page asks; theirs alone to set.
const SITE: &str = "sec-fetch-site";

/// Refuses what another's page wants done. A key no page sends without being told it.
pub(crate) async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let asks = request.method() == Method::POST && app.config.live.keys().is_empty();
    match stranger(request.headers(), &app.config.origins) {
        Some(origin) if asks => {
            let message =
                format!("requests from pages of {origin} are not taken here; --cors-origins names those that are");
            ApiError::new(StatusCode::FORBIDDEN, message).into_response()
        }
        _ => next.run(request).await,
    }
}

/// The origin of a page that is neither the server's own nor among those that may ask.
fn stranger(headers: &HeaderMap, origins: &Origins) -> Option<String> {
    let text = |value: &axum::http::HeaderValue| value.to_str().map(str::to_owned).unwrap_or_default();
    let origin = headers.get(header::ORIGIN).map(text)?;
    let known = match origins {
        Origins::None => false,
        Origins::Any => true,
        Origins::These(these) => these.contains(&origin),
    };
    let own = match headers.get(SITE) {
        // What a proxy makes of the host does not matter then.
        Some(site) => site == "same-origin" || site == "none",
        None => {
            let of = origin.split_once("://").and_then(|(_, rest)| rest.parse::<Authority>().ok());
            let host = headers.get(header::HOST).map(text).and_then(|host| host.parse::<Authority>().ok());
            of.is_some() && of == host
        }
    };
    (!known && !own).then_some(origin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn pages_of_others_are_strangers_and_programs_are_not() {
        let these = Origins::These(vec!["https://friend.example".into()]);
        let is = |headers: &[(&'static str, &'static str)], origins: &Origins| {
            let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
            stranger(&headers.collect(), origins)
        };
        let evil = Some("https://evil.example".to_owned());
        for (headers, expected) in [
            (&[("host", "localhost:8080")][..], None),
            (&[("origin", "http://localhost:8080"), ("host", "localhost:8080")], None),
            (&[("origin", "http://localhost:8080"), ("host", "127.0.0.1:1"), ("sec-fetch-site", "same-origin")], None),
            (&[("origin", "https://friend.example"), ("host", "localhost:8080")], None),
            (&[("origin", "https://evil.example"), ("host", "localhost:8080")], evil.clone()),
            (&[("origin", "https://evil.example"), ("host", "evil.example"), ("sec-fetch-site", "cross-site")], evil),
            (&[("origin", "null"), ("host", "localhost:8080")], Some("null".into())),
            (&[("origin", "http://localhost:3000"), ("host", "localhost:8080")], Some("http://localhost:3000".into())),
        ] {
            assert_eq!(is(headers, &these), expected, "{headers:?}");
        }
        let evil = &[("origin", "https://evil.example"), ("host", "localhost:8080")];
        assert_eq!(is(evil, &Origins::Any), None);
        assert!(is(evil, &Origins::None).is_some());
    }
}
