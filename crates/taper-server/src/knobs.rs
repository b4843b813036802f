//! Fields that Taper does not know: named and ignored, unless they look like a misspelt knob or would change the
//! answer.
//!
//! A misspelt `epsilon` that quietly became dense attention would be the worst answer this server can give.

use crate::error::ApiError;
use crate::fields::brief;
use serde_json::{Map, Value};
use taper_attention::nearest;

/// The top-level fields that choose attention.
pub(crate) const KNOBS: [&str; 4] = ["attention", "epsilon", "delta", "gamma"];

/// Fields of OpenAI's API or of other servers with names of their own: never taken for a knob.
const FOREIGN: &[&str] = &[
    "add_generation_prompt",
    "add_special_tokens",
    "audio",
    "chat_template",
    "continue_final_message",
    "custom_params",
    "detokenize",
    "documents",
    "include_reasoning",
    "kv_transfer_params",
    "length_penalty",
    "lora_path",
    "metadata",
    "mm_processor_kwargs",
    "modalities",
    "prediction",
    "prompt_cache_key",
    "prompt_logprobs",
    "reasoning",
    "reasoning_effort",
    "request_id",
    "return_token_ids",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "thinking",
    "truncate_prompt_tokens",
    "typical_p",
    "use_beam_search",
    "user",
    "verbosity",
    "web_search_options",
];

/// Names that people use for a knob; their underscores and case do not count.
const ALIASES: &[(&str, &str)] = &[
    ("attentionmethod", "attention"),
    ("attentionconfig", "attention"),
    ("attentionspec", "attention"),
    ("attentionpreset", "attention"),
    ("attentionbackend", "attention"),
    ("sparseattention", "attention"),
    ("sparseattentionconfig", "attention"),
    ("attn", "attention"),
    ("attnmethod", "attention"),
    ("attnconfig", "attention"),
    ("attentions", "attention"),
    ("prefill", "attention.prefill"),
    ("prefillmethod", "attention.prefill.method"),
    ("decode", "attention.decode"),
    ("decodemethod", "attention.decode.method"),
    ("method", "attention.decode.method"),
    ("densebelow", "attention.decode.dense_below"),
    ("audit", "attention.audit"),
    ("trace", "attention.trace"),
    ("speculate", "attention.speculate"),
    ("eps", "epsilon"),
    ("attentionepsilon", "epsilon"),
    ("attentiondelta", "delta"),
    ("attentiongamma", "gamma"),
];

/// Fields that other servers know and that would change the answer: refused, not ignored.
const REFUSED: &[(&str, &str)] = &[
    (
        "extra_body",
        "extra_body is for the OpenAI client, which merges its content into the request: \
      put these fields at the top level of the JSON",
    ),
    ("function_call", "function_call is now tool_choice"),
    ("functions", "functions are now tools: [{\"type\": \"function\", \"function\": {…}}, …]"),
    ("guided_choice", "guided_choice is now structured_outputs: {\"choice\": […]}"),
    ("guided_decoding_backend", "guided_decoding_backend is gone: there is one, llguidance"),
    ("guided_grammar", "guided_grammar is now structured_outputs: {\"grammar\": \"…\"}"),
    ("guided_json", "guided_json is now structured_outputs: {\"json\": {…}}"),
    ("guided_regex", "guided_regex is now structured_outputs: {\"regex\": \"…\"}"),
    (
        "guided_whitespace_pattern",
        "guided_whitespace_pattern is now structured_outputs: {\"whitespace_pattern\": \"…\"}",
    ),
    ("suffix", "suffix is not supported"),
];

/// What holds an answer to a form in other servers' words.
const FORMS: [&str; 4] = ["regex", "ebnf", "json_schema", "grammar"];

/// Fields of a message that come back from other servers' answers, or say nothing of what is said.
const MESSAGE: &[&str] = &[
    "annotations",
    "audio",
    "cache_control",
    "id",
    "metadata",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
    "refusal",
    "status",
    "thinking",
    "timestamp",
    "type",
    "weight",
];

/// Whether clients of other servers send it.
pub(crate) fn known(name: &str) -> bool {
    if let Some((_, field)) = name.split_once("].").filter(|_| name.starts_with("messages[")) {
        return MESSAGE.contains(&field);
    }
    let nested = ["include", "text.verbosity", "truncation"];
    FOREIGN.contains(&name) || nested.contains(&name) || name.starts_with("stream_options.")
}

/// Sorts the fields that nothing read: an error for a near miss or a refused one, else their names.
pub(crate) fn unknown<'a>(
    map: &Map<String, Value>,
    unread: impl Iterator<Item = &'a str>,
) -> Result<Vec<String>, ApiError> {
    let mut ignored = Vec::new();
    for name in unread {
        let value = map.get(name).unwrap_or(&Value::Null);
        if value.is_null() {
            continue;
        }
        refuse(name, value, map)?;
        if !FOREIGN.contains(&name)
            && let Some(knob) = near_miss(name)
        {
            return Err(ApiError::invalid(name, format!("unknown field `{name}`; did you mean `{knob}`?")));
        }
        ignored.push(name.to_string());
    }
    Ok(ignored)
}

/// The same of the fields of a message at a path. What is empty, as a text that says nothing of a refusal, is no news.
pub(crate) fn unknown_of_message<'a>(
    path: &str,
    map: &Map<String, Value>,
    unread: impl Iterator<Item = &'a str>,
) -> Result<Vec<String>, ApiError> {
    let mut ignored = Vec::new();
    for name in unread {
        let value = &map[name];
        let hint = match name {
            "function_call" => "calls of functions are now tool_calls",
            // Of DeepSeek and Mistral, and of Moonshot.
            "prefix" | "partial" => {
                "continue_final_message: true, beside the messages, has an answer go on with the last one"
            }
            _ => "",
        };
        let path = format!("{path}.{name}");
        if value.is_null() || is_empty(value) || !hint.is_empty() && value == false {
            continue;
        }
        if !hint.is_empty() {
            return Err(ApiError::invalid(&path, format!("{path} is not supported here: {hint}")));
        }
        ignored.push(path);
    }
    Ok(ignored)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

fn refuse(name: &str, value: &Value, map: &Map<String, Value>) -> Result<(), ApiError> {
    if let Some((_, why)) = REFUSED.iter().find(|(field, _)| *field == name) {
        return Err(ApiError::invalid(name, *why));
    }
    if name == "custom_params"
        && let Some(key) = value.as_object().and_then(|bag| bag.keys().find(|key| says_attention(key)))
    {
        let path = format!("custom_params.{key}");
        let message = format!(
            "{path} is not read here; attention, epsilon, delta and gamma are fields of their own, or vllm_xargs.attention_… says them"
        );
        return Err(ApiError::invalid(path, message));
    }
    let hint = match name {
        "prompt_logprobs" => "; /v1/completions has echo with logprobs",
        _ if FORMS.contains(&name) => "; structured_outputs says what an answer must be",
        "n_predict" | "max_new_tokens" => "; max_tokens says how long an answer may be",
        "min_new_tokens" => "; min_tokens says how long an answer is at least",
        "repeat_penalty" => "; repetition_penalty is its name here",
        "stop_regex" => "; stop takes strings",
        "no_stop_trim" => "; include_stop_str_in_output is its name here",
        "n_probs" | "logprob_token_ids" => "; logprobs, in a chat with top_logprobs, says how many come",
        _ => "",
    };
    let is = |harmless: bool| value == &Value::Bool(harmless);
    let number = |harmless: &[f64]| value.as_f64().is_some_and(|x| harmless.contains(&x));
    // Some clients send other servers' names beside ours.
    let says = |own: &str| value.is_number() && map.get(own).is_some_and(|own| own.as_f64() == value.as_f64());
    let harmless = match name {
        _ if is_empty(value) => true,
        "n_predict" | "max_new_tokens" => says("max_tokens") || says("max_completion_tokens") || value == -1,
        // As much as the context holds: what is longer is refused for that.
        "truncate_prompt_tokens" => value == -1,
        "tool_choice" => matches!(value.as_str(), Some("none" | "auto")),
        "best_of" | "typical_p" | "tfs_z" => number(&[1.0]),
        "repeat_penalty" => number(&[1.0]) || says("repetition_penalty"),
        "mirostat" | "dry_multiplier" | "xtc_probability" | "dynatemp_range" => number(&[0.0]),
        "min_new_tokens" => number(&[0.0]) || says("min_tokens"),
        "top_n_sigma" => number(&[-1.0, 0.0]),
        "n_probs" => number(&[0.0]),
        "t_max_predict_ms" => value.as_f64().is_some_and(|most| most <= 0.0),
        // Of a chat's prompt the template says what stands before it.
        "add_special_tokens"
        | "continue_final_message"
        | "echo"
        | "no_stop_trim"
        | "prompt_logprobs"
        | "return_token_ids"
        | "return_tokens_as_token_ids"
        | "use_beam_search" => is(false),
        "add_generation_prompt" | "detokenize" => is(true),
        "modalities" => value == &serde_json::json!(["text"]),
        "tools" | "documents" | "chat_template" | "lora" | "lora_path" | "logits_processors" | "stop_regex" => false,
        "logprob_token_ids" | "repetition_detection" | "thinking_token_budget" => false,
        _ if FORMS.contains(&name) || name.starts_with("guided_") => false,
        _ => true,
    };
    if harmless {
        return Ok(());
    }
    let message = format!("{name} is not supported here: {} would change the answer{hint}", brief(value));
    Err(ApiError::invalid(name, message))
}

/// Whether a key of another server's bag speaks of attention.
fn says_attention(key: &str) -> bool {
    key.starts_with("attention") || near_miss(key).is_some()
}

/// The knob that an unknown name most likely means.
pub(crate) fn near_miss(name: &str) -> Option<&'static str> {
    let plain: String = name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect();
    if let Some((_, knob)) = ALIASES.iter().find(|(alias, _)| *alias == plain) {
        return Some(knob);
    }
    nearest(&plain, &KNOBS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_knobs_are_found() {
        for (name, knob) in [
            ("epsilonn", "epsilon"),
            ("Epsilon", "epsilon"),
            ("EPSILON", "epsilon"),
            ("espilon", "epsilon"),
            ("epsillon", "epsilon"),
            ("epsilon_", "epsilon"),
            ("eps", "epsilon"),
            ("Gamma", "gamma"),
            ("gama", "gamma"),
            ("gmama", "gamma"),
            ("gammas", "gamma"),
            ("Delta", "delta"),
            ("dleta", "delta"),
            ("detla", "delta"),
            ("attn", "attention"),
            ("Attention", "attention"),
            ("atention", "attention"),
            ("attenton", "attention"),
            ("sparse_attention", "attention"),
            ("decode", "attention.decode"),
            ("method", "attention.decode.method"),
            ("trace", "attention.trace"),
            ("speculate", "attention.speculate"),
            ("attention_epsilon", "epsilon"),
        ] {
            assert_eq!(near_miss(name), Some(knob), "{name}");
        }
    }

    #[test]
    fn names_of_their_own_are_left_alone() {
        for name in FOREIGN.iter().chain(&["temprature", "foo", "data", "beta", "alpha", "game", "question", "mention"])
        {
            assert!(FOREIGN.contains(name) || near_miss(name).is_none(), "{name}");
        }
        let map = serde_json::json!({"user": "u", "metadata": {}, "foo": 1, "tools": [], "x": null});
        let map = map.as_object().unwrap();
        let mut ignored = unknown(map, map.keys().map(String::as_str)).unwrap();
        ignored.sort();
        assert_eq!(ignored, ["foo", "metadata", "tools", "user"]);
    }
}
