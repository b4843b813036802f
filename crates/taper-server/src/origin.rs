//! Web pages of others must not make a server work that asks nobody for a key: browsers send such requests without asking
//! first, as long as their bodies pass for plain text.

use crate::app::{App, Origins, ServerConfig};
use crate::error::ApiError;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;
use std::sync::Arc;

/// What says in browsers' requests whose page asks; theirs alone to set.
const SITE: &str = "sec-fetch-site";

/// Refuses what another's page wants done. A key no page sends without being told it.
pub(crate) async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let asks = request.method() == Method::POST && app.config.live.keys().is_empty();
    match stranger(request.headers(), &app.config) {
        Some(origin) if asks => {
            let message =
                format!("requests from pages of {origin} are not taken here; --cors-origins names those that are");
            ApiError::new(StatusCode::FORBIDDEN, message).into_response()
        }
        _ => next.run(request).await,
    }
}

/// The origin of a page that is neither the server's own nor among those that may ask.
///
/// A page is the server's own if it came from where it asks. That says little where a name's owner may say that it
/// stands for this very machine (DNS rebinding): on loopback the server goes by addresses and `localhost` alone.
fn stranger(headers: &HeaderMap, config: &ServerConfig) -> Option<String> {
    let text = |value: &axum::http::HeaderValue| value.to_str().map(str::to_owned).unwrap_or_default();
    let origin = headers.get(header::ORIGIN).map(text)?;
    let known = match &config.origins {
        Origins::None => false,
        Origins::Any => true,
        Origins::These(these) => these.contains(&origin),
    };
    let of = origin.split_once("://").and_then(|(_, rest)| rest.parse::<Authority>().ok());
    let named_here = !config.loopback || of.as_ref().is_some_and(|of| is_here(of.host()));
    let own = match headers.get(SITE) {
        // No page's request, as an extension's.
        Some(site) if site == "none" => true,
        // What a proxy makes of the host does not matter then.
        Some(site) => site == "same-origin" && named_here,
        None => {
            let host = headers.get(header::HOST).map(text).and_then(|host| host.parse::<Authority>().ok());
            of.is_some() && of == host && named_here
        }
    };
    (!known && !own).then_some(origin)
}

/// Whether a host is an address, or a name that stands for the browser's machine everywhere.
fn is_here(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let host = host.to_ascii_lowercase();
    address.is_ok() || host == "localhost" || host.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn pages_of_others_are_strangers_and_programs_are_not() {
        let these = Origins::These(vec!["https://friend.example".into()]);
        let at = |headers: &[(&'static str, &'static str)], origins: &Origins, loopback: bool| {
            let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
            stranger(
                &headers.collect(),
                &ServerConfig { origins: origins.clone(), loopback, ..ServerConfig::default() },
            )
        };
        let is = |headers: &[_], origins: &Origins| at(headers, origins, false);
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
        // A name that stands for this machine since its owner says so.
        for headers in [
            &[("origin", "http://evil.example:8080"), ("host", "evil.example:8080")][..],
            &[("origin", "http://evil.example:8080"), ("host", "evil.example:8080"), ("sec-fetch-site", "same-origin")],
            &[("origin", "http://localhost.evil.example"), ("host", "localhost.evil.example")],
        ] {
            assert_eq!(is(headers, &these), None, "{headers:?}");
            assert!(at(headers, &these, true).is_some(), "{headers:?}");
        }
        for origin in ["http://127.0.0.1:8080", "http://[::1]:8080", "http://LOCALHOST:8080", "http://taper.localhost"]
        {
            let headers = [("origin", origin), ("sec-fetch-site", "same-origin")];
            assert_eq!(at(&headers, &Origins::None, true), None, "{origin}");
        }
        let extension = [("origin", "chrome-extension://abc"), ("host", "localhost:8080"), ("sec-fetch-site", "none")];
        assert_eq!(at(&extension, &Origins::None, true), None);
        let friend = [("origin", "https://friend.example"), ("host", "friend.example")];
        assert_eq!(at(&friend, &these, true), None);
    }
}
