//! One request over HTTP, and when what of its answer came.

use super::args::{BenchServeArgs, Endpoint};
use super::plan::Planned;
use anyhow::{Context, Result, bail};
use futures_util::StreamExt;
use reqwest::{RequestBuilder, Response, Url};
use serde::Serialize;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Sends requests.
pub struct Client {
    http: reqwest::Client,
    base: String,
    /// What is asked.
    pub model: String,
    endpoint: Endpoint,
    key: Option<String>,
}

/// What a client saw of its request. Times are seconds from the load's start.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Seen {
    pub number: usize,
    pub sent: f64,
    /// Most tokens of a choice.
    pub max_tokens: usize,
    /// When each text of each choice came.
    pub texts: Vec<Vec<f64>>,
    /// Why choices ended, as they did.
    pub finish: Vec<String>,
    pub ended: f64,
    /// Tokens by the server's own count.
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    pub completion_tokens: Option<u64>,
    /// The client left on purpose.
    pub left: bool,
    pub error: Option<String>,
}

impl Client {
    /// Asks the server for its model unless one is given.
    pub async fn new(args: &BenchServeArgs) -> Result<Self> {
        let http = reqwest::Client::builder().timeout(Duration::from_secs(args.timeout.into())).build()?;
        let key = std::env::var(&args.key_env).ok().filter(|key| !key.is_empty());
        let base = base(&args.url)?;
        let mut client = Self { http, base, model: String::new(), endpoint: args.endpoint, key };
        client.model = match &args.model {
            Some(model) => model.clone(),
            None => client.first_model().await.with_context(|| format!("{}/models", client.base))?,
        };
        Ok(client)
    }

    async fn first_model(&self) -> Result<String> {
        let answer = self.keyed(self.http.get(format!("{}/models", self.base))).send().await?;
        let models: Value = answer.error_for_status()?.json().await?;
        match models["data"][0]["id"].as_str() {
            Some(id) => Ok(id.to_owned()),
            None => bail!("lists no model; give --model"),
        }
    }

    fn keyed(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// Sends a request and reads its answer to the end, or until the client leaves. Failures are part of what is seen.
    pub async fn send(&self, planned: Planned, start: Instant) -> Seen {
        let (number, max_tokens) = (planned.number, planned.max_tokens);
        let mut seen = Seen { number, max_tokens, sent: start.elapsed().as_secs_f64(), ..Seen::default() };
        if let Err(error) = self.exchange(&planned, start, &mut seen).await {
            // The cause says more than "error sending request".
            seen.error = Some(error.root_cause().to_string());
        }
        seen.ended = start.elapsed().as_secs_f64();
        seen
    }

    async fn exchange(&self, planned: &Planned, start: Instant, seen: &mut Seen) -> Result<()> {
        let mut body = json!({
            "model": self.model,
            "stream": true,
            "stream_options": { "include_usage": true },
            "temperature": 0.0,
            "max_tokens": planned.max_tokens,
        });
        let path = match self.endpoint {
            Endpoint::Chat => {
                body["messages"] = json!([{ "role": "user", "content": planned.prompt }]);
                "chat/completions"
            }
            Endpoint::Completions => {
                body["prompt"] = json!(planned.prompt);
                "completions"
            }
        };
        for (field, value) in &planned.extra {
            body[field] = value.clone();
        }
        let request = self.keyed(self.http.post(format!("{}/{path}", self.base))).json(&body);
        let answer = request.send().await?;
        if !answer.status().is_success() {
            bail!("{}", refusal(answer).await);
        }
        let mut bytes = answer.bytes_stream();
        let mut lines = Lines::default();
        let mut done = false;
        while let Some(piece) = bytes.next().await {
            for data in lines.push(&piece?) {
                if data == "[DONE]" {
                    done = true;
                    continue;
                }
                let event: Value = serde_json::from_str(&data).with_context(|| format!("no JSON: {data}"))?;
                seen.take(&event, start)?;
                if planned.leaves_after.is_some_and(|after| seen.texts() > after) {
                    seen.left = true;
                    return Ok(());
                }
            }
        }
        if !done {
            bail!("the stream ended without [DONE]");
        }
        Ok(())
    }
}

/// Where the endpoints are: an address alone is taken for that of a server with the usual version.
pub fn base(url: &str) -> Result<String> {
    let parsed = Url::parse(url).ok().filter(|url| ["http", "https"].contains(&url.scheme()));
    let parsed = parsed.with_context(|| format!("--url: {url:?} must be like http://127.0.0.1:8080/v1"))?;
    let version = if parsed.path() == "/" { "/v1" } else { "" };
    Ok(format!("{}{version}", url.trim_end_matches('/')))
}

async fn refusal(answer: Response) -> String {
    let status = answer.status();
    let text = answer.text().await.unwrap_or_default();
    let message =
        serde_json::from_str::<Value>(&text).ok().and_then(|v| Some(v["error"]["message"].as_str()?.to_owned()));
    format!("HTTP {}: {}", status.as_u16(), message.unwrap_or(text))
}

impl Seen {
    /// Texts of all choices.
    pub fn texts(&self) -> usize {
        self.texts.iter().map(Vec::len).sum()
    }

    /// Takes one event of the stream.
    pub(super) fn take(&mut self, event: &Value, start: Instant) -> Result<()> {
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            bail!("{}", error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned));
        }
        let now = start.elapsed().as_secs_f64();
        for choice in event["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().unwrap_or(0) as usize;
            if index > 4096 {
                bail!("a choice with the index {index}");
            }
            self.texts.resize(self.texts.len().max(index + 1), Vec::new());
            if says(choice) {
                self.texts[index].push(now);
            }
            self.finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
        }
        let usage = &event["usage"];
        if usage.is_object() {
            self.prompt_tokens = usage["prompt_tokens"].as_u64();
            self.completion_tokens = usage["completion_tokens"].as_u64();
            self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
        }
        Ok(())
    }
}

/// Whether something of the answer comes with this part of a choice: text, a call of a function, or what the model thinks.
fn says(choice: &Value) -> bool {
    let delta = &choice["delta"];
    let text = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
    let texts = [&choice["text"], &delta["content"], &delta["reasoning_content"], &delta["reasoning"]];
    texts.into_iter().any(text) || delta["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty())
}

/// Cuts a stream of server-sent events into the data of its lines.
#[derive(Debug, Default)]
pub struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// The data lines that end in this piece.
    pub fn push(&mut self, piece: &[u8]) -> Vec<String> {
        self.rest.extend_from_slice(piece);
        let Some(end) = self.rest.iter().rposition(|&byte| byte == b'\n') else { return Vec::new() };
        let rest = self.rest.split_off(end + 1);
        let whole = std::mem::replace(&mut self.rest, rest);
        let text = String::from_utf8_lossy(&whole);
        text.lines().filter_map(|line| Some(line.strip_prefix("data:")?.trim().to_owned())).collect()
    }
}
