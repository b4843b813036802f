//! The page at `/`: files of `page/`, held in the binary, that ask for nothing of anybody else.

use crate::error::ApiError;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use include_dir::{Dir, File, include_dir};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::LazyLock;

static FILES: Dir = include_dir!("$CARGO_MANIFEST_DIR/page");

/// Each file's name and what its content is known by.
static TAGS: LazyLock<BTreeMap<&str, HeaderValue>> = LazyLock::new(|| {
    let tag = |file: &File<'static>| {
        let digest = Sha256::digest(file.contents());
        let hex: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        Some((file.path().to_str()?, HeaderValue::from_str(&format!("\"{hex}\"")).ok()?))
    };
    FILES.files().filter_map(tag).collect()
});

/// Nothing of other origins, nothing that stands in a document.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// `GET /`
pub(crate) async fn index(headers: HeaderMap) -> Response {
    answer("index.html", &headers)
}

/// `GET /docs`
pub(crate) async fn docs(headers: HeaderMap) -> Response {
    answer("docs.html", &headers)
}

/// `GET /page/{name}`
pub(crate) async fn file(Path(name): Path<String>, headers: HeaderMap) -> Response {
    answer(&name, &headers)
}

fn answer(name: &str, headers: &HeaderMap) -> Response {
    let (Some(file), Some(tag)) = (FILES.get_file(name), TAGS.get(name)) else {
        return ApiError::new(StatusCode::NOT_FOUND, format!("no such path: /page/{name}")).into_response();
    };
    let kind = match name.rsplit_once('.') {
        Some((_, "html")) => "text/html; charset=utf-8",
        Some((_, "js")) => "text/javascript; charset=utf-8",
        Some((_, "css")) => "text/css; charset=utf-8",
        Some((_, "svg")) => "image/svg+xml",
        _ => "application/octet-stream",
    };
    let fixed = |name: HeaderName, value: &'static str| (name, HeaderValue::from_static(value));
    let about = [
        fixed(header::CONTENT_TYPE, kind),
        fixed(header::CONTENT_SECURITY_POLICY, POLICY),
        fixed(header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        fixed(header::REFERRER_POLICY, "no-referrer"),
        // Asked for again each time, so that no page is older than its server; mostly there is nothing new.
        fixed(header::CACHE_CONTROL, "no-cache"),
        (header::ETAG, tag.clone()),
    ];
    if headers.get_all(header::IF_NONE_MATCH).iter().any(|known| known == tag) {
        return (StatusCode::NOT_MODIFIED, about).into_response();
    }
    (about, file.contents()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_files_ask_for_is_there() {
        assert!(TAGS.len() > 5 && TAGS.contains_key("index.html"), "{TAGS:?}");
        for file in FILES.files() {
            let text = file.contents_utf8().expect("a text");
            for asked in text.split(['"', '\'', '(', ')']) {
                let name = asked.strip_prefix("/page/").or_else(|| asked.strip_prefix("./"));
                let Some(name) = name.filter(|name| name.contains('.')) else { continue };
                assert!(FILES.get_file(name).is_some(), "{} asks for {asked}", file.path().display());
            }
            // The name of SVG is no address.
            let text = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!text.contains("http://") && !text.contains("https://"), "{}", file.path().display());
        }
    }

    #[test]
    fn a_file_that_is_known_is_not_sent_again() {
        let first = answer("index.html", &HeaderMap::new());
        assert_eq!(first.status(), StatusCode::OK);
        assert_eq!(first.headers()[header::CONTENT_TYPE], "text/html; charset=utf-8");
        let known = HeaderMap::from_iter([(header::IF_NONE_MATCH, first.headers()[header::ETAG].clone())]);
        assert_eq!(answer("index.html", &known).status(), StatusCode::NOT_MODIFIED);
        assert_eq!(answer("style.css", &known).status(), StatusCode::OK);
        assert_eq!(answer("../src/page.rs", &HeaderMap::new()).status(), StatusCode::NOT_FOUND);
    }
}
