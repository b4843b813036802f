//! The fields that chat and text completions share: sampling, stops, lengths, streaming.

use crate::app::App;
use crate::error::{self, ApiError};
use crate::fields::Fields;
use crate::request_id::PRIORITY;
use axum::http::{HeaderValue, StatusCode};
use serde_json::Value;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use taper_engine::{SamplingParams, StopRules, Text};

/// Most answers of one request.
pub(crate) const MAX_CHOICES: i64 = 32;
/// Most stop strings of one request.
const MAX_STOPS: usize = 16;
/// Characters of one of them at most.
const MAX_STOP: usize = 1024;
/// Tokens that end an answer at most.
const MAX_STOP_TOKENS: usize = 1024;
/// Characters of a salt at most.
const MAX_SALT: usize = 1024;
/// Most words of one request that must not come.
const MAX_BAD_WORDS: usize = 1000;
/// Most characters of such a word.
const MAX_BAD_WORD: usize = 200;

type Result<T> = std::result::Result<T, ApiError>;

/// What both endpoints read alike.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) sampling: SamplingParams,
    /// Whether the seed is one drawn for this request: each of its prompts has its own then.
    pub(crate) drawn_seed: bool,
    pub(crate) stop: StopRules,
    /// Answers drawn.
    pub(crate) choices: usize,
    /// Requests with less of it go first.
    pub(crate) priority: i64,
    /// A secret of those whose prompts share what they begin with.
    pub(crate) salt: Option<String>,
    /// Whether marks between texts are shown.
    pub(crate) special: bool,
    pub(crate) stream: bool,
    /// How long it may take, waiting included.
    pub(crate) timeout: Option<Duration>,
    /// Whether the stream ends with a usage chunk.
    pub(crate) include_usage: bool,
    /// The field that set the length, if one did; for errors.
    pub(crate) max_field: Option<&'static str>,
    /// Fields within others that had no effect.
    pub(crate) ignored: Vec<String>,
}

impl Common {
    /// Sets the length where the request names none. A default never makes a request of prompts of these lengths too long.
    pub(crate) fn default_length(
        &mut self,
        app: &App,
        default: Option<usize>,
        prompts: impl IntoIterator<Item = usize>,
    ) {
        if let (None, Some(most)) = (self.stop.max_tokens, default) {
            let room = prompts.into_iter().map(|prompt| app.engine.room(prompt, self.choices)).min().unwrap_or(0);
            self.stop.max_tokens = Some(most.max(self.stop.min_tokens).min(room.max(1)));
        }
    }
}

/// Reads them. An answer has at least `least` tokens' room.
pub(crate) fn read(fields: &mut Fields<'_>, app: &App, least: i64) -> Result<Common> {
    let (sampling, drawn_seed) = sampling(fields, app.engine.text(), &app.config.sampling)?;
    let (max_tokens, max_field) = max_tokens(fields, least)?;
    let min_tokens = fields.int("min_tokens", 0..=i64::MAX)?.unwrap_or(0) as usize;
    if let Some(most) = max_tokens.filter(|most| *most < min_tokens) {
        let message = format!("min_tokens is {min_tokens}, more than the {most} tokens that the answer may have");
        return Err(ApiError::invalid("min_tokens", message));
    }
    let stop = StopRules {
        strings: stops(fields)?,
        tokens: token_ids(fields)?,
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        min_tokens,
        max_tokens,
        shown: fields.bool("include_stop_str_in_output")?.unwrap_or(false),
    };
    let choices = fields.int("n", 1..=MAX_CHOICES)?.unwrap_or(1);
    let (priority, salt) = (priority(fields, app)?, salt(fields)?);
    let special = fields.bool("skip_special_tokens")? == Some(false);
    let timeout = timeout(fields, app.config.request_timeout)?;
    let stream = fields.bool("stream")?.unwrap_or(false);
    let (mut include_usage, mut ignored) = (false, Vec::new());
    if let Some(options_map) = fields.object("stream_options")? {
        if !stream {
            return Err(ApiError::invalid("stream_options", "stream_options needs stream: true"));
        }
        let mut options = Fields::new(options_map, "stream_options.");
        include_usage = options.bool("include_usage")?.unwrap_or(false);
        // None of them would change the answer.
        let others = options.unread().filter(|name| !options_map[*name].is_null());
        ignored = others.map(|name| options.path(name)).collect();
    }
    Ok(Common {
        sampling,
        drawn_seed,
        stop,
        choices: choices as usize,
        priority,
        salt,
        special,
        stream,
        timeout,
        include_usage,
        max_field,
        ignored,
    })
}

/// Requests with less of it go first; how little one may have is the server's to say.
pub(crate) fn priority(fields: &mut Fields<'_>, app: &App) -> Result<i64> {
    let least = app.config.least_priority;
    Ok(fields.int("priority", least..=i64::MAX)?.unwrap_or(least.max(0)))
}

/// The same by a header, which goes over the field.
pub(crate) fn said_priority(header: &HeaderValue, app: &App) -> Result<i64> {
    let least = app.config.least_priority;
    let said = header.to_str().ok().and_then(|text| text.trim().parse().ok()).filter(|priority| *priority >= least);
    let wrong = || {
        let message = format!("the header {PRIORITY} must be an integer of at least {least}; it is {header:?}");
        ApiError::new(StatusCode::BAD_REQUEST, message)
    };
    said.ok_or_else(wrong)
}

/// vLLM's `cache_salt`.
pub(crate) fn salt(fields: &mut Fields<'_>) -> Result<Option<String>> {
    match fields.text("cache_salt")? {
        Some(salt) if !(1..=MAX_SALT).contains(&salt.chars().count()) => {
            Err(ApiError::invalid("cache_salt", format!("cache_salt must be a string of 1 to {MAX_SALT} characters")))
        }
        salt => Ok(salt.map(Into::into)),
    }
}

/// What a request has that draws nothing.
pub(crate) fn none(timeout: Option<Duration>, priority: i64, salt: Option<String>) -> Common {
    Common {
        sampling: SamplingParams::default(),
        drawn_seed: false,
        stop: StopRules { max_tokens: Some(1), ..StopRules::default() },
        choices: 1,
        priority,
        salt,
        special: false,
        stream: false,
        timeout,
        include_usage: false,
        max_field: None,
        ignored: Vec::new(),
    }
}

/// `own` says what holds where the request says nothing; told beside is whether the seed was drawn.
fn sampling(fields: &mut Fields<'_>, text: &dyn Text, own: &SamplingParams) -> Result<(SamplingParams, bool)> {
    let penalty = |x: f64| (-2.0..=2.0).contains(&x);
    let unit = |x: f64| (0.0..=1.0).contains(&x);
    let temperature = fields.number("temperature", "[0, 2]", |x| (0.0..=2.0).contains(&x))?;
    let top_p = fields.number("top_p", "(0, 1]", |x| x > 0.0 && x <= 1.0)?;
    let min_p = fields.number("min_p", "[0, 1]", unit)?;
    // 0 and -1 both mean all, as in vLLM.
    let top_k = fields.int("top_k", -1..=i64::MAX)?;
    let presence = fields.number("presence_penalty", "[-2, 2]", penalty)?;
    let frequency = fields.number("frequency_penalty", "[-2, 2]", penalty)?;
    let repetition = fields.number("repetition_penalty", "[0.01, 10]", |x| (0.01..=10.0).contains(&x))?;
    let seed = fields.seed("seed")?;
    let temperature = temperature.unwrap_or(own.temperature);
    // Small enough for every JSON reader, so that the seed in the usage can be sent again. Whoever asks for the likeliest tokens
    // wants the same ones each time, also of attention that samples.
    let prompt = ["messages", "prompt", "input"].map(|name| fields.peek(name));
    let fresh = || if temperature == 0.0 { own_seed(&prompt) } else { draw_seed() };
    let params = SamplingParams {
        temperature,
        top_k: top_k.map_or(own.top_k, |k| (k > 0).then_some(k as usize)),
        top_p: top_p.unwrap_or(own.top_p),
        min_p: min_p.unwrap_or(own.min_p),
        seed: seed.unwrap_or_else(fresh),
        presence_penalty: presence.unwrap_or(0.0),
        frequency_penalty: frequency.unwrap_or(0.0),
        repetition_penalty: repetition.unwrap_or(own.repetition_penalty),
        logit_bias: logit_bias(fields)?,
        allowed: allowed(fields)?.map(Arc::from),
        banned: banned(fields, text)?.into(),
    };
    Ok((params, seed.is_none() && temperature > 0.0))
}

/// Seconds; at most, and without the field, what the server allows.
pub(crate) fn timeout(fields: &mut Fields<'_>, longest: Option<Duration>) -> Result<Option<Duration>> {
    let most = longest.map_or(f64::INFINITY, |longest| longest.as_secs_f64());
    let range = longest.map_or("(0, ∞), of seconds".into(), |_| format!("(0, {most}], of seconds"));
    let seconds = fields.number("timeout", &range, |seconds| seconds > 0.0 && seconds <= most)?;
    Ok(seconds.map(|seconds| Duration::try_from_secs_f32(seconds).unwrap_or(Duration::MAX)).or(longest))
}

fn logit_bias(fields: &mut Fields<'_>) -> Result<Vec<(u32, f32)>> {
    let Some(map) = fields.object("logit_bias")? else {
        return Ok(Vec::new());
    };
    let entry = |(token, bias): (&String, &Value)| {
        let path = format!("logit_bias.{token}");
        // As it is written, so that no token has two.
        let id = token.parse::<u32>().ok().filter(|id| id.to_string() == *token);
        let id = id.ok_or_else(|| ApiError::invalid(&path, format!("{path}: keys of logit_bias are token ids")))?;
        let bias = bias.as_f64().filter(|b| (-100.0..=100.0).contains(b));
        let bias = bias.ok_or_else(|| ApiError::invalid(&path, format!("{path} must be a number in [-100, 100]")))?;
        Ok((id, bias as f32))
    };
    map.iter().map(entry).collect()
}

fn allowed(fields: &mut Fields<'_>) -> Result<Option<Vec<u32>>> {
    let Some(list) = fields.array("allowed_token_ids")? else {
        return Ok(None);
    };
    let message = "allowed_token_ids must be an array of at least one token id";
    let mut ids =
        ids(list).filter(|ids| !ids.is_empty()).ok_or_else(|| ApiError::invalid("allowed_token_ids", message))?;
    ids.sort_unstable();
    ids.dedup();
    Ok(Some(ids))
}

/// What tokens a word may come as: as a text's beginning, and after a space.
fn banned(fields: &mut Fields<'_>, text: &dyn Text) -> Result<Vec<Vec<u32>>> {
    let wrong = || {
        let message = format!(
            "bad_words must be an array of up to {MAX_BAD_WORDS} strings, none blank or of over {MAX_BAD_WORD} characters"
        );
        ApiError::invalid("bad_words", message)
    };
    let list = fields.array("bad_words")?.map_or(&[][..], Vec::as_slice);
    if list.len() > MAX_BAD_WORDS {
        return Err(wrong());
    }
    let mut rows = HashSet::new();
    for value in list {
        let valid = |word: &&str| !word.is_empty() && word.chars().count() <= MAX_BAD_WORD;
        let word = value.as_str().map(str::trim_start).filter(valid).ok_or_else(wrong)?;
        for form in [word, &format!(" {word}")] {
            let tokens = text.encode(form, false).map_err(|e| error::text(&e, "bad_words"))?;
            rows.extend(Some(tokens).filter(|tokens| !tokens.is_empty()));
        }
    }
    Ok(rows.into_iter().collect())
}

fn max_tokens(fields: &mut Fields<'_>, least: i64) -> Result<(Option<usize>, Option<&'static str>)> {
    let old = fields.int("max_tokens", least..=i64::MAX)?;
    let new = fields.int("max_completion_tokens", least..=i64::MAX)?;
    // The newer name goes first.
    match (old, new) {
        (_, Some(n)) => Ok((Some(n as usize), Some("max_completion_tokens"))),
        (Some(n), None) => Ok((Some(n as usize), Some("max_tokens"))),
        (None, None) => Ok((None, None)),
    }
}

fn stops(fields: &mut Fields<'_>) -> Result<Vec<String>> {
    let wrong = || {
        let message = format!(
            "stop must be a string or an array of up to {MAX_STOPS} strings, none empty or of over {MAX_STOP} characters"
        );
        ApiError::invalid("stop", message)
    };
    let list = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    if list.len() > MAX_STOPS {
        return Err(wrong());
    }
    let valid = |stop: &&str| !stop.is_empty() && stop.chars().count() <= MAX_STOP;
    list.iter().map(|v| v.as_str().filter(valid).map(String::from).ok_or_else(wrong)).collect()
}

fn token_ids(fields: &mut Fields<'_>) -> Result<Vec<u32>> {
    let Some(list) = fields.array("stop_token_ids")? else {
        return Ok(Vec::new());
    };
    let message = || format!("stop_token_ids must be an array of up to {MAX_STOP_TOKENS} token ids");
    let few = (list.len() <= MAX_STOP_TOKENS).then_some(list);
    few.and_then(|list| ids(list)).ok_or_else(|| ApiError::invalid("stop_token_ids", message()))
}

/// An array of token ids; `None` if an element is something else.
pub(crate) fn ids(list: &[Value]) -> Option<Vec<u32>> {
    list.iter().map(|v| v.as_u64().and_then(|n| u32::try_from(n).ok())).collect()
}

/// A seed of 32 bits that nothing decides.
pub(crate) fn draw_seed() -> u64 {
    u64::from(rand::random::<u32>())
}

/// A seed of 32 bits that a prompt decides, by FNV-1a. Of one for all prompts the same tokens would be audited in every answer.
fn own_seed(prompt: &[Option<&Value>]) -> u64 {
    let bytes = prompt.iter().flatten().flat_map(|value| value.to_string().into_bytes());
    u64::from(bytes.fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use taper_engine::stub::StubText;

    #[test]
    fn without_a_seed_all_draws_are_random_but_at_temperature_0_they_are_the_prompts() {
        let seed = |body: Value| {
            let body = body.as_object().cloned().unwrap_or_default();
            sampling(&mut Fields::new(&body, ""), &StubText, &SamplingParams::default())
                .ok()
                .map(|(params, _)| params.seed)
        };
        let of = |prompt: &str| seed(json!({"temperature": 0, "prompt": prompt}));
        assert_eq!(of("a"), of("a"));
        assert_ne!(of("a"), of("b"));
        assert_eq!(of("a"), seed(json!({"stream": true, "prompt": "a", "temperature": 0})));
        assert!(of("a").is_some_and(|seed| u32::try_from(seed).is_ok()));
        assert_eq!(seed(json!({"temperature": 0, "seed": 7})), Some(7));
        assert_eq!(seed(json!({"seed": -2})), Some(u64::MAX - 1));
        // Of eight equal ones once in 2^224.
        for body in [json!({}), json!({"temperature": 0.1}), json!({"seed": -1}), json!({"seed": null})] {
            let seeds: HashSet<_> = (0..8).map(|_| seed(body.clone())).collect();
            assert!(seeds.len() > 1 && !seeds.contains(&None), "{body}");
        }
    }

    #[test]
    fn each_number_goes_where_its_name_says() {
        let body = json!({"temperature": 0.3, "top_p": 0.4, "min_p": 0.05, "top_k": 6, "seed": 7, "presence_penalty": 0.8,
            "frequency_penalty": -0.9, "repetition_penalty": 1.1, "allowed_token_ids": [11, 12], "logit_bias": {"13": -1}});
        let found = sampling(&mut Fields::new(body.as_object().unwrap(), ""), &StubText, &SamplingParams::default());
        let expected = SamplingParams {
            temperature: 0.3,
            top_k: Some(6),
            top_p: 0.4,
            min_p: 0.05,
            seed: 7,
            presence_penalty: 0.8,
            frequency_penalty: -0.9,
            repetition_penalty: 1.1,
            logit_bias: vec![(13, -1.0)],
            allowed: Some([11, 12].into()),
            banned: [].into(),
        };
        assert_eq!(found.ok(), Some((expected, false)));
    }

    #[test]
    fn what_a_request_does_not_say_is_the_models() {
        let own = SamplingParams {
            temperature: 0.6,
            top_k: Some(20),
            top_p: 0.9,
            min_p: 0.1,
            repetition_penalty: 1.1,
            ..Default::default()
        };
        let read = |body: Value| {
            let body = body.as_object().cloned().unwrap_or_default();
            let of = sampling(&mut Fields::new(&body, ""), &StubText, &own).ok();
            of.map(|(of, _)| (of.temperature, of.top_k, of.top_p, of.min_p, of.repetition_penalty))
        };
        assert_eq!(read(json!({"temperature": null})), Some((0.6, Some(20), 0.9, 0.1, 1.1)));
        let plain = json!({"temperature": 1, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1});
        assert_eq!(read(plain), Some((1.0, None, 1.0, 0.0, 1.0)));
    }
}
