//! API keys: who may ask, and how much at once.
//!
//! ```toml
//! [[keys]]
//! name = "alice"             # in the log and in messages
//! key = "a long random text" # or `sha256`, its digest in hex
//! requests = 8               # most at once, waiting ones included, of however many prompts and choices; optional
//! requests_per_minute = 120  # optional
//! shares = "team"            # keys of one word take over what their prompts begin with from each other; without it the name
//! ```

use crate::error::ApiError;
use crate::holding::holding;
use crate::live::Live;
use crate::request_id::RequestId;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The keys that are taken. With none, nobody is asked for one.
#[derive(Debug, Default)]
pub struct Keys(Vec<Holder>);

/// Whom a key belongs to.
struct Holder {
    name: String,
    digest: [u8; 32],
    /// A permit for each request that it may have at once, and how many these are.
    at_once: Option<(Arc<Semaphore>, usize)>,
    rate: Option<Arc<Rate>>,
    /// Holders with the same share what their prompts begin with, and no others: how fast an answer comes tells what
    /// was asked before.
    shares: Arc<str>,
}

// What stands for the key is nobody's business either.
impl fmt::Debug for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holder").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Requests that may come: a full minute's at once, then as time gives them.
struct Rate {
    per_minute: usize,
    /// How many may come, and when that was so.
    left: Mutex<(f64, Instant)>,
}

impl Rate {
    /// Gives one back that the server had no room for.
    fn give_back(&self) {
        let mut state = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 = (state.0 + 1.0).min(self.per_minute as f64);
    }

    /// Takes one request, or says how long there is none.
    fn take(&self, now: Instant) -> Result<(), Duration> {
        let mut state = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let each = 60.0 / self.per_minute as f64;
        let left = (state.0 + now.saturating_duration_since(state.1).as_secs_f64() / each).min(self.per_minute as f64);
        *state = (left, now);
        if left < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - left) * each));
        }
        state.0 -= 1.0;
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    keys: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    key: Option<String>,
    sha256: Option<String>,
    requests: Option<usize>,
    requests_per_minute: Option<usize>,
    shares: Option<String>,
}

impl Keys {
    /// Reads the text of a file of keys.
    ///
    /// # Errors
    /// The line or the key's name, and what is wrong with it; never the key.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|e| {
            let line = e.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            // What stands there is not repeated: it may be a key.
            let quotes = ["invalid type", "invalid value"].iter().any(|start| e.message().starts_with(start));
            format!("line {line}: {}", if quotes { "a value of another type than it must be" } else { e.message() })
        })?;
        let mut keys = Self::default();
        for Entry { name, key, sha256, requests, requests_per_minute, shares } in file.keys {
            let digest = match (key, sha256) {
                (Some(key), None) => checked(&name, &key)?,
                (None, Some(text)) => hex(&text).ok_or_else(|| format!("{name}: `sha256` must be 64 hex digits"))?,
                _ => return Err(format!("{name}: needs a `key`, or its `sha256`")),
            };
            if requests == Some(0) || requests_per_minute == Some(0) {
                return Err(format!("{name}: `requests` and `requests_per_minute` must be at least 1"));
            }
            keys.insert(Holder {
                shares: shares.unwrap_or_else(|| name.clone()).into(),
                name,
                digest,
                at_once: requests.map(|most| (Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS))), most)),
                rate: requests_per_minute.map(|per_minute| {
                    Rate { per_minute, left: Mutex::new((per_minute as f64, Instant::now())) }.into()
                }),
            })?;
        }
        Ok(keys)
    }

    /// Lets holders whose key and limits are as before go on from what they had used up.
    pub(crate) fn keep(&mut self, before: &Self) {
        for holder in &mut self.0 {
            let Some(old) = before.0.iter().find(|old| old.name == holder.name && old.digest == holder.digest) else {
                continue;
            };
            if holder.at_once.as_ref().map(|(_, most)| most) == old.at_once.as_ref().map(|(_, most)| most) {
                holder.at_once.clone_from(&old.at_once);
            }
            if holder.rate.as_ref().map(|rate| rate.per_minute) == old.rate.as_ref().map(|rate| rate.per_minute) {
                holder.rate.clone_from(&old.rate);
            }
        }
    }

    /// Takes a key without limits, too.
    ///
    /// # Errors
    /// A name or key that is there already, or a key that no header could hold.
    pub fn add(&mut self, name: &str, key: &str) -> Result<(), String> {
        self.insert(Holder {
            name: name.into(),
            digest: checked(name, key)?,
            at_once: None,
            rate: None,
            shares: name.into(),
        })
    }

    fn insert(&mut self, new: Holder) -> Result<(), String> {
        match self.0.iter().find(|old| old.name == new.name || old.digest == new.digest) {
            Some(old) if old.name == new.name => Err(format!("{}: the name is there twice", new.name)),
            Some(old) => Err(format!("{}: has the key of {}", new.name, old.name)),
            None => {
                self.0.push(new);
                Ok(())
            }
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn holder(&self, headers: &HeaderMap) -> Result<&Holder, ApiError> {
        let refused = |message: &str| ApiError::new(StatusCode::UNAUTHORIZED, message);
        let Some(value) = headers.get(header::AUTHORIZATION) else {
            return Err(refused("this server wants an API key: `Authorization: Bearer KEY`"));
        };
        let key = value.to_str().ok().and_then(|text| text.split_once(' '));
        let Some((_, key)) = key.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")) else {
            return Err(refused("the header Authorization is not `Bearer KEY`"));
        };
        // Digests, all of them and to their ends: how long that takes says nothing of the keys.
        let digest = digest(key.trim());
        let differ = |holder: &Holder| holder.digest.iter().zip(digest).fold(0, |all, (a, b)| all | (a ^ b));
        let found = self.0.iter().fold(None, |found, holder| if differ(holder) == 0 { Some(holder) } else { found });
        found.ok_or_else(|| refused("the API key is not known here"))
    }
}

impl Holder {
    /// Room for one more request, held until this is dropped; or why there is none, and how long.
    fn take(&self) -> Result<Option<OwnedSemaphorePermit>, (String, Duration)> {
        let name = &self.name;
        let permit = match &self.at_once {
            None => None,
            Some((permits, most)) => Some(Arc::clone(permits).try_acquire_owned().map_err(|_| {
                (format!("too many requests of {name}'s key at once: the limit is {most}"), Duration::from_secs(1))
            })?),
        };
        if let Some(rate) = &self.rate {
            let most = rate.per_minute;
            rate.take(Instant::now()).map_err(|wait| {
                (format!("too many requests of {name}'s key in a minute: the limit is {most}"), wait)
            })?;
        }
        Ok(permit)
    }
}

/// The digest of a key that a header can hold.
fn checked(name: &str, key: &str) -> Result<[u8; 32], String> {
    match !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Ok(digest(key)),
        false => Err(format!("{name}: a key is at least one visible ASCII character, and no spaces")),
    }
}

fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

fn hex(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u8> = text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect();
    bytes.try_into().ok().filter(|_| digits.len() == 64)
}

/// Lets nothing under `/v1`, and nothing that makes work elsewhere, through without a key, if there are any; what is asked
/// counts against the key's limits until its answer is sent.
pub(crate) async fn check(State(live): State<Arc<Live>>, mut request: Request, next: Next) -> Response {
    let keys = live.keys();
    let looks = request.method() != Method::POST && !request.uri().path().starts_with("/v1/");
    if keys.is_empty() || looks {
        return next.run(request).await;
    }
    let id = request.extensions().get().map_or("", |RequestId { id, .. }| id).to_owned();
    let holder = match keys.holder(request.headers()) {
        Ok(holder) => holder,
        Err(error) => {
            tracing::warn!(id, %error, "refused");
            let mut response = error.into_response();
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            return response;
        }
    };
    if let Some(KeyName(name)) = request.extensions().get() {
        let _ = name.set(holder.name.clone());
    }
    if let Some(id) = request.extensions_mut().get_mut::<RequestId>() {
        id.shares = Some(Arc::clone(&holder.shares));
    }
    if request.method() != Method::POST {
        return next.run(request).await;
    }
    match holder.take() {
        Ok(permit) => {
            let permit = permit.map(|permit| Place(permit.into()));
            // Work on the request may go on where its client leaves.
            if let Some(place) = &permit {
                request.extensions_mut().insert(place.clone());
            }
            let response = next.run(request).await;
            if let (StatusCode::SERVICE_UNAVAILABLE, Some(rate)) = (response.status(), &holder.rate) {
                rate.give_back();
            }
            match permit {
                None => response,
                // One of the key's places is taken until then.
                Some(place) => holding(response, place, |_| ()),
            }
        }
        Err((message, wait)) => {
            tracing::warn!(id, key = holder.name, reason = message, "refused");
            let retry_after = Some(wait.as_secs_f64().ceil().max(1.0) as u64);
            ApiError { retry_after, ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, message) }.into_response()
        }
    }
}

/// A key's place among those that may ask at once, taken for as long as somebody holds this.
#[derive(Debug, Clone)]
pub(crate) struct Place(#[expect(dead_code, reason = "it is held, not looked at")] Arc<OwnedSemaphorePermit>);

/// Whose key it is, once that is known, for who writes the log.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeyName(pub(crate) Arc<OnceLock<String>>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_who_may_come() {
        let of_b = Sha256::digest(b"b").iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let text = format!("[[keys]]\nname = \"a\"\nkey = \"secret\"\n[[keys]]\nname = \"b\"\nsha256 = \"{of_b}\"");
        let keys = Keys::parse(&text).unwrap();
        let holder = |value: &str| {
            let headers = HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap())]);
            keys.holder(&headers).map(|holder| holder.name.clone()).map_err(|e| (e.status, e.message))
        };
        assert_eq!(holder("Bearer secret"), Ok("a".into()));
        assert_eq!(holder("bearer  b "), Ok("b".into()));
        assert_eq!(holder("Bearer c"), Err((401, "the API key is not known here".into())));
        assert_eq!(holder("secret"), Err((401, "the header Authorization is not `Bearer KEY`".into())));
        assert!(keys.holder(&HeaderMap::new()).is_err());
        assert_eq!(format!("{keys:?}"), "Keys([Holder { name: \"a\", .. }, Holder { name: \"b\", .. }])");
    }

    #[test]
    fn a_file_that_cannot_be_used_says_why() {
        let entry = |rest: &str| Keys::parse(&format!("[[keys]]\nname = \"a\"\nkey = \"k\"\n{rest}")).unwrap_err();
        assert_eq!(entry("requests = 0"), "a: `requests` and `requests_per_minute` must be at least 1");
        assert_eq!(entry("[[keys]]\nname = \"a\"\nkey = \"l\""), "a: the name is there twice");
        assert_eq!(entry("[[keys]]\nname = \"b\"\nkey = \"k\""), "b: has the key of a");
        assert_eq!(entry("[[keys]]\nname = \"b\"\nsha256 = \"12\""), "b: `sha256` must be 64 hex digits");
        assert_eq!(entry("[[keys]]\nname = \"b\""), "b: needs a `key`, or its `sha256`");
        for key in ["", "two words", "new line\\n", "ü"] {
            let said = entry(&format!("[[keys]]\nname = \"b\"\nkey = \"{key}\""));
            assert_eq!(said, "b: a key is at least one visible ASCII character, and no spaces");
        }
        for (number, text) in
            ["key = 12345", "sha256 = 12345", "requests = \"12345\"", "key = [12345"].iter().enumerate()
        {
            let said = entry(&format!("[[keys]]\nname = \"b\"\n{text}"));
            assert!(said.starts_with("line 6: ") && !said.contains("12345"), "{number}: {said}");
        }
        assert!(entry("request = 1").starts_with("line 4: unknown field `request`"), "{}", entry("request = 1"));
    }

    #[test]
    fn a_rate_gives_a_minute_at_once_and_then_as_time_passes() {
        let start = Instant::now();
        let rate = Rate { per_minute: 30, left: Mutex::new((30.0, start)) };
        assert_eq!((0..40).filter(|_| rate.take(start).is_ok()).count(), 30);
        let wait = rate.take(start).unwrap_err();
        assert!((wait.as_secs_f64() - 2.0).abs() < 1e-6, "{wait:?}");
        assert!(rate.take(start + Duration::from_secs(1)).is_err());
        assert!(rate.take(start + Duration::from_millis(2001)).is_ok());
        let later = start + Duration::from_secs(1000);
        assert_eq!((0..40).filter(|_| rate.take(later).is_ok()).count(), 30, "no more than a minute's");
    }
}
