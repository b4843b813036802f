//! Request bodies: bytes to a JSON object, off the async threads, because tokenizing a long prompt takes a while.

use crate::app::App;
use crate::error::ApiError;
use crate::keys::Place;
use crate::request_id::RequestId;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use futures_util::StreamExt;
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Instant;
use taper_engine::RequestError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes in which the room for bodies is counted.
pub(crate) const PIECE: usize = 1024;

/// Bytes that one of a body's values takes once it is parsed, which of numbers is far more than their text.
const VALUE: usize = size_of::<Value>();

/// So many bodies of the largest size may be read and parsed at a time.
pub(crate) const BODIES: usize = 16;

/// Bytes above which a body has to wait for other large ones before it is parsed.
const LARGE: usize = 256 << 10;

/// Bodies that are parsed at a time, one for each core: large ones, which take seconds, do not hold up small ones. Nor do
/// grammars hold up bodies, or bodies grammars, for which there are places of their own.
pub(crate) struct Parsing {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    grammars: Arc<Semaphore>,
}

impl Default for Parsing {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let [small, large, grammars] =
            [cores, cores.div_ceil(2), cores.div_ceil(2)].map(|places| Arc::new(Semaphore::new(places)));
        Self { small, large, grammars }
    }
}

impl Parsing {
    async fn turn(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let lane = if bytes > LARGE { &self.large } else { &self.small };
        Arc::clone(lane).acquire_owned().await.ok()
    }
}

/// Values of a JSON text so far, at most.
#[derive(Default)]
struct Values {
    count: usize,
    in_text: bool,
    escaped: bool,
}

impl Values {
    fn see(&mut self, part: &[u8]) {
        for byte in part {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = self.in_text,
                b'"' => self.in_text = !self.in_text,
                // Behind each of these one begins, or none.
                b',' | b'[' | b'{' | b':' if !self.in_text => self.count += 1,
                _ => {}
            }
        }
    }
}

/// What an endpoint reads of a body. A grammar that it asks for is compiled apart.
pub(crate) trait Parsed: Send + 'static {
    /// Whether there is one to compile.
    fn has_grammar(&self) -> bool {
        false
    }

    /// Compiles it.
    fn compile(&mut self, _app: &App) -> Result<(), ApiError> {
        Ok(())
    }
}

impl Parsed for Value {}

/// Does work off the async threads. It goes on where its client leaves, and keeps what it holds until then.
async fn apart<T: Send + 'static, H: Send + 'static>(
    app: &Arc<App>,
    held: H,
    work: impl FnOnce(&App) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, H), ApiError> {
    let app = Arc::clone(app);
    let done = tokio::task::spawn_blocking(move || work(&app).map(|done| (done, held)));
    done.await.unwrap_or_else(|panic| {
        tracing::error!(%panic, "parsing a request panicked");
        Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "reading the request failed"))
    })
}

/// A body within the size limit, with its room among all that are read or parsed, its key's place, and when its request came.
pub(crate) struct Body {
    bytes: Vec<u8>,
    room: Option<OwnedSemaphorePermit>,
    place: Option<Place>,
    came: Instant,
}

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
    let came = request.extensions().get().map_or_else(Instant::now, |RequestId { came, .. }| *came);
    let place = request.extensions().get().cloned();
    let body = request.into_body();
    let told = http_body::Body::size_hint(&body).lower();
    if told > most as u64 {
        return Err(large());
    }
    // Memory that nothing is written to costs nothing, and what does not grow is not copied.
    let (mut bytes, mut room) = (Vec::with_capacity(told as usize), None::<OwnedSemaphorePermit>);
    let mut parts = body.into_data_stream();
    let mut values = Values::default();
    while let Some(part) = parts.next().await {
        let part =
            part.map_err(|e| ApiError::new(StatusCode::BAD_REQUEST, format!("reading the request body: {e}")))?;
        if bytes.len() + part.len() > most {
            return Err(large());
        }
        values.see(&part);
        let has = room.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let wanted = (bytes.len() + part.len()).max(values.count * VALUE).div_ceil(PIECE);
        if wanted > app.pieces {
            let message = format!(
                "the request body has {} JSON values and more, which would take more memory than there is for bodies",
                values.count
            );
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        let more = wanted - has;
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
    Ok(Body { bytes, room, place, came })
}

impl Body {
    /// Parses the object and hands it to an endpoint's own parser; no longer than a request may take.
    pub(crate) async fn parse<T: Parsed>(
        self,
        app: &Arc<App>,
        endpoint: fn(&App, &Map<String, Value>) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let deadline = app.config.request_timeout.and_then(|most| self.came.checked_add(most));
        let parsed = async {
            let turn = app.parsing.turn(self.bytes.len()).await;
            let Self { bytes, room, place, .. } = self;
            let (mut parsed, (turn, held)) =
                apart(app, (turn, (room, place)), move |app| endpoint(app, &object(&bytes)?)).await?;
            drop(turn);
            if !parsed.has_grammar() {
                return Ok(parsed);
            }
            let turn = Arc::clone(&app.parsing.grammars).acquire_owned().await.ok();
            let compiled = apart(app, (turn, held), move |app| parsed.compile(app).map(|()| parsed));
            compiled.await.map(|(parsed, _)| parsed)
        };
        match deadline {
            Some(deadline) => {
                let parsed = tokio::time::timeout_at(deadline.into(), parsed).await;
                parsed.unwrap_or_else(|_| Err(RequestError::Deadline.into()))
            }
            None => parsed.await,
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ServerConfig;
    use crate::app::App;
    use serde_json::json;
    use std::time::Duration;
    use taper_engine::EngineConfig;
    use taper_engine::stub::StubBackend;

    #[tokio::test]
    async fn grammars_do_not_hold_up_bodies_nor_bodies_grammars() {
        let engine = StubBackend::new("ok").engine(EngineConfig::default());
        let app = Arc::new(App::new(engine.into(), ServerConfig::default()));
        let parse = |body: Value| {
            let body = Body { bytes: body.to_string().into_bytes(), room: None, place: None, came: Instant::now() };
            body.parse(&app, crate::completions::parse)
        };
        let plain = || parse(json!({"prompt": "hi"}));
        let held = || parse(json!({"prompt": "hi", "structured_outputs": {"regex": "ok"}}));
        let taken =
            |places: &Arc<Semaphore>| Arc::clone(places).try_acquire_many_owned(places.available_permits() as u32);

        let grammars = taken(&app.parsing.grammars).unwrap();
        assert!(plain().await.unwrap().grammar.is_none());
        let mut waits = std::pin::pin!(held());
        assert!(tokio::time::timeout(Duration::from_secs(1), &mut waits).await.is_err(), "there is no place");
        // Its body is read: what it waits for is its grammar alone.
        let bodies = [taken(&app.parsing.small).unwrap(), taken(&app.parsing.large).unwrap()];
        drop(grammars);
        assert!(waits.await.unwrap().grammar.is_some());
        drop(bodies);
        assert!(held().await.unwrap().grammar.is_some());
    }

    #[test]
    fn values_are_those_outside_of_texts() {
        for (text, most) in
            [(r#"{"prompt": [1, 2, 3], "n": 1}"#, 7), (r#"{"prompt": "a, b: [c] {d} \" , \\", "n": 1}"#, 4), ("[]", 1)]
        {
            for cut in 0..text.len() {
                let mut values = Values::default();
                let (one, two) = text.as_bytes().split_at(cut);
                [one, two].iter().for_each(|part| values.see(part));
                assert_eq!(values.count, most, "{text} cut at {cut}");
            }
        }
    }
}
