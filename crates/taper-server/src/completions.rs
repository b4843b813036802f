//! `/v1/completions`: the request.

use crate::answer::{Call, Kind, Prompt};
use crate::app::App;
use crate::error::{self, ApiError};
use crate::fields::Fields;
use crate::{attention, knobs, sampling, structured};
use serde_json::{Map, Value};
use std::sync::Arc;

/// Length of an answer whose request names none, as in OpenAI's API.
const DEFAULT_TOKENS: usize = 16;

/// Parses and tokenizes a text completion.
pub(crate) fn parse(app: &App, map: &Map<String, Value>) -> Result<Call, ApiError> {
    let mut fields = Fields::new(map, "");
    app.check_model(fields.text("model")?)?;
    let prompts = fields.get("prompt");
    let echo = fields.bool("echo")?.unwrap_or(false);
    let marks = fields.bool("add_special_tokens")?.unwrap_or(true);
    // A prompt that is only wanted back needs no answer.
    let mut common = sampling::read(&mut fields, app, if echo { 0 } else { 1 })?;
    let kept = common.choices;
    common.choices = best_of(&mut fields, &common)?;
    let logprobs = fields.int("logprobs", 0..=20)?.map(|n| n as usize);
    let (attention, mut ignored) = attention::read(&mut fields, &app.config)?;
    let (shape, grammar_field) = structured::read(&mut fields)?.unzip();
    ignored.extend(knobs::unknown(map, fields.unread())?);
    ignored.append(&mut common.ignored);
    let most = app.config.prompts.min(app.engine.queue_limit());
    let reading = Reading { name: "prompt", most, marks, echo: echo.then_some(common.special) };
    let mut prompts = read_prompts(app, prompts, &reading)?;
    // As in vLLM, where the model's own length may be less than a completion's, and not more.
    let default = app.config.max_tokens.map_or(DEFAULT_TOKENS, |own| own.min(DEFAULT_TOKENS));
    common.default_length(app, Some(default), prompts.iter().map(|p| p.tokens.len()));
    let presets = app.config.live.presets();
    for prompt in &mut prompts {
        prompt.question_tokens = attention::plain_question(&attention, &presets, map, prompt.tokens.len())?;
    }
    Ok(Call {
        kind: Kind::Text,
        continues: true,
        kept,
        prompts,
        prompt_field: "prompt",
        common,
        logprobs,
        tools: None,
        shape,
        grammar: None,
        grammar_field,
        attention: Arc::new(attention),
        ignored,
    })
}

/// Answers drawn, of which the `n` best are kept.
fn best_of(fields: &mut Fields<'_>, common: &sampling::Common) -> Result<usize, ApiError> {
    let n = common.choices;
    let drawn = fields.int("best_of", 1..=sampling::MAX_CHOICES)?.map_or(n, |best_of| best_of as usize);
    if drawn < n {
        return Err(ApiError::invalid("best_of", format!("best_of is {drawn}, fewer than the n = {n} answers wanted")));
    }
    if drawn > n && common.stream {
        let message = format!(
            "best_of is {drawn} and n is {n}: which answers are the best shows at their end, so they cannot be streamed"
        );
        return Err(ApiError::invalid("best_of", message));
    }
    Ok(drawn)
}

/// How prompts are read.
pub(crate) struct Reading {
    /// Their field.
    pub(crate) name: &'static str,
    /// How many there may be.
    pub(crate) most: usize,
    /// Whether texts get the marks that the model wants at their start.
    pub(crate) marks: bool,
    /// Whether they come back, and then whether with marks between texts.
    pub(crate) echo: Option<bool>,
}

/// A string, token ids, or an array of either.
pub(crate) fn read_prompts(app: &App, value: Option<&Value>, reading: &Reading) -> Result<Vec<Prompt>, ApiError> {
    let &Reading { name, most, marks, echo } = reading;
    let wrong = || {
        ApiError::invalid(
            name,
            format!("{name} must be a string, an array of strings, an array of token ids, or an array of such arrays"),
        )
    };
    let one = |value: &Value| match value {
        Value::String(text) => {
            let tokens = app.engine.text().prompt(text, marks);
            let tokens = tokens.map_err(|e| error::text(&e, name))?;
            let echo = echo.map(|_| text.clone());
            Ok(Prompt { tokens, question_tokens: 0, echo })
        }
        Value::Array(list) => {
            let tokens = sampling::ids(list).ok_or_else(wrong)?;
            let echo = echo.map(|special| app.engine.text().decode(&tokens, special));
            Ok(Prompt { tokens, question_tokens: 0, echo })
        }
        _ => Err(wrong()),
    };
    match value {
        Some(Value::Array(list)) if list.iter().any(|v| v.is_string() || v.is_array()) => {
            if list.len() > most {
                let message = format!("{name} has {} prompts; at most {most} are taken", list.len());
                return Err(ApiError::invalid(name, message));
            }
            list.iter().map(one).collect()
        }
        Some(value) => Ok(vec![one(value)?]),
        None => Err(ApiError::invalid(name, format!("{name} is missing"))),
    }
}
