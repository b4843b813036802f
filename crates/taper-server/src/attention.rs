//! From a request's knobs to its attention: the `attention` object, the short forms, and vLLM's `vllm_xargs`.

use crate::app::ServerConfig;
use crate::error::ApiError;
use crate::fields::{Fields, brief};
use crate::knobs::near_miss;
use crate::live::Presets;
use serde_json::{Map, Value, json};
use taper_attention::{AttentionSpec, SpecError, Wire, nearest, phase_of};

/// What the request says of attention, in one shape whatever the spelling.
#[derive(Debug, Default)]
struct Knobs {
    attention: Option<Value>,
    epsilon: Option<Value>,
    delta: Option<Value>,
    gamma: Option<Value>,
    /// Paths that came from `vllm_xargs`, with the key there.
    origin: Vec<(String, String)>,
    /// Other keys of `vllm_xargs`.
    ignored: Vec<String>,
}

/// Reads all knobs and resolves them over the server's preset; returns the ignored keys of `vllm_xargs` too.
pub(crate) fn read(fields: &mut Fields<'_>, config: &ServerConfig) -> Result<(AttentionSpec, Vec<String>), ApiError> {
    let mut knobs = Knobs {
        attention: fields.get("attention").cloned(),
        epsilon: fields.get("epsilon").cloned(),
        delta: fields.get("delta").cloned(),
        gamma: fields.get("gamma").cloned(),
        ..Knobs::default()
    };
    if let Some(bag) = fields.object("vllm_xargs")? {
        knobs.xargs(bag)?;
    }
    let presets = config.live.presets();
    let mut base = config.live.attention();
    let named = knobs.attention.as_ref().and_then(Value::as_str).map(str::to_owned);
    if let Some(name) = &named {
        // A preset stands for all of it, a method for its phase by its defaults; the short forms still go over either.
        knobs.attention = if let Some(preset) = presets.get(name) {
            base = preset.clone().into();
            None
        } else if let Some(phase) = phase_of(name) {
            Some(json!({(phase): name}))
        } else {
            let presets: Vec<&str> = presets.keys().map(String::as_str).collect();
            let message = format!("attention: no {}", nameless(name, &presets));
            return Err(ApiError::invalid("attention", message));
        };
    }
    let wire = Wire {
        attention: knobs.attention.as_ref(),
        epsilon: knobs.epsilon.as_ref(),
        delta: knobs.delta.as_ref(),
        gamma: knobs.gamma.as_ref(),
    };
    match AttentionSpec::resolve(&base, &wire, &config.artifacts) {
        Ok(spec) => Ok((spec, knobs.ignored)),
        Err(error) => {
            // Of a method's name the request has no more than that.
            let path = if named.is_some() && error.path.starts_with("attention.") { "attention" } else { &error.path };
            let path = knobs.key(path).map_or(path.to_owned(), |key| format!("vllm_xargs.{key}"));
            let message = format!("{path}: {}", error.message);
            Err(ApiError::invalid(path, message))
        }
    }
}

/// That neither a preset nor a method has this name, what was most likely meant, and what there is.
pub fn nameless(name: &str, presets: &[&str]) -> String {
    let methods = taper_attention::catalogue();
    let mut methods: Vec<&str> = methods.iter().filter(|m| m.phase != "predictor").map(|m| m.name).collect();
    methods.sort_unstable();
    methods.dedup();
    let hint = nearest(name, &[presets, &methods].concat());
    let hint = hint.map_or(String::new(), |name| format!(", did you mean {name:?}?"));
    let (name, presets, methods) = (brief(&name.into()), presets.join(", "), methods.join(", "));
    format!("preset or method is called {name}{hint}; presets: {presets}; methods: {methods}")
}

/// Tokens of a prompt's end that are the question; `found` says where it begins if the request does not.
pub(crate) fn question(
    spec: &AttentionSpec,
    prompt: usize,
    found: impl FnOnce() -> Option<usize>,
) -> Result<usize, ApiError> {
    let named = |error: SpecError| {
        let message = format!("{} {}", error.path, error.message);
        ApiError::invalid(error.path, message)
    };
    spec.question_of(prompt, found).map_err(named)
}

/// The same of a prompt without messages: none, where it is the server's default alone that speaks of a question.
pub(crate) fn plain_question(
    spec: &AttentionSpec,
    presets: &Presets,
    map: &Map<String, Value>,
    prompt: usize,
) -> Result<usize, ApiError> {
    let at = |field: &str, key: &str| map.get(field).and_then(|of| of.get(key));
    let preset = [map.get("attention"), at("vllm_xargs", "attention_preset")].into_iter().flatten();
    let preset = preset.filter_map(Value::as_str).any(|name| presets.contains_key(name));
    let asks = preset || at("attention", "question").or(at("vllm_xargs", "attention_question")).is_some();
    question(spec, prompt, || (!asks).then_some(0))
}

impl Knobs {
    fn xargs(&mut self, bag: &Map<String, Value>) -> Result<(), ApiError> {
        for (key, value) in bag {
            let path = format!("vllm_xargs.{key}");
            let Some(name) = key.strip_prefix("attention_") else {
                if let Some(meant) = meant(key) {
                    return Err(ApiError::invalid(&path, format!("unknown key `{key}`; did you mean {meant}?")));
                }
                self.ignored.push(path);
                continue;
            };
            let value = scalar(&path, value)?;
            match name {
                "epsilon" => put(&mut self.epsilon, value, &path)?,
                "delta" => put(&mut self.delta, value, &path)?,
                "gamma" => put(&mut self.gamma, value, &path)?,
                "preset" if value.is_string() => put(&mut self.attention, value, &path)?,
                _ => {
                    let place = place(name).filter(|_| slip(name).is_none()).ok_or_else(|| {
                        let hint = meant(name).map_or(String::new(), |meant| format!(", did you mean {meant}?"));
                        ApiError::invalid(&path, format!("unknown key `{key}`{hint}; known: {KEYS}"))
                    })?;
                    self.nest(&place, value, &path)?;
                    self.origin.push((format!("attention.{}", place.join(".")), key.clone()));
                    continue;
                }
            }
            let path = if name == "preset" { "attention" } else { name };
            self.origin.push((path.to_string(), key.clone()));
        }
        Ok(())
    }

    /// The key of `vllm_xargs` that says what is at a path, or has to where others speak of the same method.
    fn key(&self, path: &str) -> Option<String> {
        if let Some((_, key)) = self.origin.iter().find(|(from, _)| from == path) {
            return Some(key.clone());
        }
        let phase = path.strip_prefix("attention.")?.strip_suffix(".method")?;
        let beside = format!("attention.{phase}.");
        let missing = self.attention.as_ref()?.pointer(&format!("/{phase}/method")).is_none();
        let here = missing && self.origin.iter().any(|(from, _)| from.starts_with(&beside));
        here.then(|| format!("attention_{phase}_method"))
    }

    /// Sets a field inside the `attention` object, which is made if the request has none.
    fn nest(&mut self, place: &[&str], value: Value, path: &str) -> Result<(), ApiError> {
        let mut at = self.attention.get_or_insert_with(|| Value::Object(Map::new()));
        for (depth, &part) in place.iter().enumerate() {
            let Some(object) = at.as_object_mut() else {
                return Err(ApiError::invalid("attention", "attention must be an object"));
            };
            if depth + 1 == place.len() {
                if object.contains_key(part) {
                    return Err(twice(path));
                }
                object.insert(part.to_string(), value);
                return Ok(());
            }
            at = object.entry(part).or_insert_with(|| Value::Object(Map::new()));
            if at.is_string() {
                // A method's name stands for its object.
                *at = json!({"method": at.take()});
            }
        }
        Ok(())
    }
}

/// The keys of `vllm_xargs` that speak of attention.
const KEYS: &str = "attention_preset, attention_epsilon, attention_delta, attention_gamma, attention_audit, attention_trace, \
                    attention_question, attention_question_tokens, attention_prefill_<field>, attention_decode_<field>";

/// The keys of `vllm_xargs` that an unknown one most likely means.
fn meant(key: &str) -> Option<&'static str> {
    Some(match near_miss(key).or_else(|| slip(key))? {
        "epsilon" => "`attention_epsilon`",
        "delta" => "`attention_delta`",
        "gamma" => "`attention_gamma`",
        "attention.audit" => "`attention_audit`",
        "attention.trace" => "`attention_trace`",
        "attention.speculate" => "`attention` with `speculate` in it, which holds more than a scalar",
        "attention.prefill" | "attention.prefill.method" => "`attention_prefill_method`",
        "attention.decode" | "attention.decode.method" => "`attention_decode_method`",
        // The bag holds scalars, so the whole object has no key in it.
        _ => "`attention_prefill_method` or `attention_decode_method`",
    })
}

/// The method whose name's place it is but for a slip; names of parameters are for the method to look at.
fn slip(name: &str) -> Option<&'static str> {
    let (phase, field) = name.split_once('_')?;
    let near = field != "method" && nearest(field, &["method"]).is_some();
    match phase {
        "prefill" if near => Some("attention.prefill.method"),
        "decode" if near => Some("attention.decode.method"),
        _ => None,
    }
}

/// Where `prefill_method` and the like belong in the `attention` object.
fn place(name: &str) -> Option<Vec<&str>> {
    if matches!(name, "audit" | "trace" | "question" | "question_tokens") {
        return Some(vec![name]);
    }
    let (phase, field) = name.split_once('_')?;
    (matches!(phase, "prefill" | "decode") && !field.is_empty()).then(|| vec![phase, field])
}

fn put(slot: &mut Option<Value>, value: Value, path: &str) -> Result<(), ApiError> {
    if slot.is_some() {
        return Err(twice(path));
    }
    *slot = Some(value);
    Ok(())
}

fn twice(path: &str) -> ApiError {
    ApiError::invalid(path, format!("{path} sets what the request sets elsewhere too; keep one of them"))
}

/// Gateways may pass numbers as strings, since vLLM allows both.
fn scalar(path: &str, value: &Value) -> Result<Value, ApiError> {
    match value {
        Value::Number(_) | Value::Bool(_) => Ok(value.clone()),
        Value::String(text) => Ok(match serde_json::from_str::<Value>(text) {
            Ok(number @ (Value::Number(_) | Value::Bool(_))) => number,
            _ => value.clone(),
        }),
        other => Err(ApiError::invalid(
            path,
            format!("{path} must be a string, a number or a boolean, not {}", brief(other)),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn knobs(attention: Option<Value>, bag: Value) -> Result<Knobs, ApiError> {
        let mut knobs = Knobs { attention, ..Knobs::default() };
        knobs.xargs(bag.as_object().unwrap()).map(|()| knobs)
    }

    #[test]
    fn scalars_find_their_places() {
        let k = knobs(
            None,
            json!({"attention_epsilon": "0.05", "attention_prefill_method": "streaming_llm",
                   "attention_prefill_window": 512, "attention_audit": 0.01, "attention_question": "decode",
                   "attention_question_tokens": "40", "other": "x"}),
        )
        .unwrap();
        assert_eq!(k.epsilon, Some(json!(0.05)));
        assert_eq!(
            k.attention,
            Some(json!({"prefill": {"method": "streaming_llm", "window": 512}, "audit": 0.01, "question": "decode",
                        "question_tokens": 40}))
        );
        assert_eq!(k.ignored, ["vllm_xargs.other"]);
    }

    #[test]
    fn scalars_go_beside_a_method_that_is_only_named() {
        let named = || Some(json!({"decode": "quest"}));
        let k = knobs(named(), json!({"attention_decode_k": 0.1})).unwrap();
        assert_eq!(k.attention, Some(json!({"decode": {"method": "quest", "k": 0.1}})));
        let e = knobs(named(), json!({"attention_decode_method": "quest"})).unwrap_err();
        assert!(e.message.contains("keep one"), "{e}");
    }

    #[test]
    fn misspelt_or_doubled_keys_are_refused() {
        let refused = |attention, bag| knobs(attention, bag).unwrap_err();
        for (key, meant) in [
            ("epsilon", "`attention_epsilon`"),
            ("Delta", "`attention_delta`"),
            ("gama", "`attention_gamma`"),
            ("audit", "`attention_audit`"),
            ("prefill", "`attention_prefill_method`"),
            ("prefill_method", "`attention_prefill_method`"),
            ("decode", "`attention_decode_method`"),
            ("decodeMethod", "`attention_decode_method`"),
            ("decode_metho", "`attention_decode_method`"),
            ("attention", "`attention_prefill_method` or `attention_decode_method`"),
            ("attn_method", "`attention_prefill_method` or `attention_decode_method`"),
        ] {
            let e = refused(None, json!({key: 0.1}));
            assert_eq!(e.message, format!("unknown key `{key}`; did you mean {meant}?"));
            for key in meant.split(" or ") {
                let key = key.trim_matches('`');
                assert!(knobs(None, json!({key: 0.1})).is_ok(), "{key} exists");
            }
        }
        assert_eq!(
            refused(None, json!({"attention_epsilonn": 0.1})).message,
            format!("unknown key `attention_epsilonn`, did you mean `attention_epsilon`?; known: {KEYS}")
        );
        assert_eq!(
            refused(None, json!({"attention_epsilonn": 0.1})).param.as_deref(),
            Some("vllm_xargs.attention_epsilonn")
        );
        for (key, meant) in [
            ("attention_decode_metho", "attention_decode_method"),
            ("attention_decode_Method", "attention_decode_method"),
            ("attention_prefill_mehtod", "attention_prefill_method"),
        ] {
            let e = refused(None, json!({key: "quest"}));
            assert_eq!(e.message, format!("unknown key `{key}`, did you mean `{meant}`?; known: {KEYS}"));
            assert_eq!(e.param, Some(format!("vllm_xargs.{key}")));
        }
        let e = refused(Some(json!({"decode": {"method": "dense"}})), json!({"attention_decode_method": "vattention"}));
        assert!(e.message.contains("keep one"), "{e}");
        assert!(refused(None, json!({"attention_gamma": [1]})).message.contains("not an array"));
    }

    #[test]
    fn what_is_missing_or_wrong_has_its_key() {
        let k = knobs(None, json!({"attention_decode_k": 3, "attention_epsilon": 0.1})).unwrap();
        for (path, key) in [
            ("attention.decode.k", Some("attention_decode_k")),
            ("attention.decode.method", Some("attention_decode_method")),
            ("epsilon", Some("attention_epsilon")),
            ("attention.prefill.method", None),
            ("delta", None),
        ] {
            assert_eq!(k.key(path).as_deref(), key, "{path}");
        }
        // Said elsewhere, it is wrong there.
        let k = knobs(Some(json!({"decode": "quest"})), json!({"attention_decode_k": 3})).unwrap();
        assert_eq!(k.key("attention.decode.method"), None);
    }

    /// What only the server's default says of a question is none of a plain prompt's; what the request says must be whole.
    #[test]
    fn a_plain_prompts_question_is_the_requests_own() {
        let dense = json!({"question": "dense"});
        let spec = AttentionSpec::from_json(&dense, "attention", &Default::default()).unwrap();
        let presets = [("a preset".to_owned(), spec.clone())].into();
        let of = |request: Value| plain_question(&spec, &presets, request.as_object().unwrap(), 9).ok();
        for (request, tokens) in [
            (json!({}), Some(0)),
            (json!({"attention": {"audit": 0.1}}), Some(0)),
            (json!({"attention": dense}), None),
            (json!({"attention": "a preset"}), None),
            (json!({"attention": "quest"}), Some(0)),
            (json!({"vllm_xargs": {"attention_preset": "quest"}}), Some(0)),
            (json!({"vllm_xargs": {"attention_question": "dense"}}), None),
            (json!({"vllm_xargs": {"attention_preset": "a preset"}}), None),
            (json!({"attention": {"audit": 0.1}, "vllm_xargs": {"attention_question": "dense"}}), None),
        ] {
            assert_eq!(of(request.clone()), tokens, "{request}");
        }
    }
}
