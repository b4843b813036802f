//! The registry: a method is a file and a line here.

mod bigbird;
mod delta;
mod dense;
mod double_sparsity;
mod hash_attention;
mod hip;
mod kmeans;
pub(crate) mod minference;
mod oracle_top_k;
mod oracle_top_p;
mod quantized_keys;
mod quest;
mod random_sample;
mod saap;
mod sample_attention;
mod santa;
mod streaming_llm;
mod vattention;

use crate::artifacts::{ArtifactKind, Artifacts, Place};
use crate::dense_below;
use crate::method::{DecodeMethod, Predictor, PrefillMethod};
use crate::schema::{check_parameters, nearest, parse};
use crate::spec::{Chosen, SpecError, SpecResult};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::Arc;

static PREFILL: &[&Entry<dyn PrefillMethod>] = &[
    &bigbird::PREFILL,
    &delta::PREFILL,
    &dense::PREFILL,
    &hip::PREFILL,
    &minference::PREFILL,
    &sample_attention::PREFILL,
    &streaming_llm::PREFILL,
];

static DECODE: &[&Entry<dyn DecodeMethod>] = &[
    &dense::DECODE,
    &double_sparsity::DECODE,
    &hash_attention::DECODE,
    &kmeans::DECODE,
    &oracle_top_k::DECODE,
    &oracle_top_p::DECODE,
    &quantized_keys::DECODE,
    &quest::DECODE,
    &random_sample::DECODE,
    &saap::DECODE,
    &santa::DECODE,
    &streaming_llm::DECODE,
    &vattention::DECODE,
];

static PREDICTORS: &[&Entry<dyn Predictor>] = &[
    &double_sparsity::PREDICTOR,
    &hash_attention::PREDICTOR,
    &kmeans::PREDICTOR,
    &oracle_top_k::PREDICTOR,
    &quantized_keys::PREDICTOR,
    &quest::PREDICTOR,
    &saap::PREDICTOR,
];

/// From parameters, their path and the artefacts at hand to a method and its parameters with defaults.
type Build<M> = fn(&Value, &str, &Artifacts) -> SpecResult<(Arc<M>, Value)>;

/// A method as the registry knows it.
struct Entry<M: ?Sized + 'static> {
    name: &'static str,
    summary: &'static str,
    /// Paper and section.
    source: &'static str,
    /// JSON Schema of its parameters.
    schema: fn() -> Value,
    /// Reads the parameters; returns the method and its parameters with every default filled in.
    build: Build<M>,
    /// What it must have learnt offline.
    artifacts: &'static [ArtifactKind],
}

/// The JSON Schema of what a method's object may say.
type Schema<M> = fn(&Entry<M>) -> Value;

/// What `GET /v1/attention/methods` says of a method.
#[derive(Debug, Clone, Serialize)]
pub struct MethodInfo {
    /// The name on the wire.
    pub name: &'static str,
    /// `prefill`, `decode`, or `predictor` for what other methods build on.
    pub phase: &'static str,
    /// One sentence.
    pub summary: &'static str,
    /// Paper and section.
    pub source: &'static str,
    /// JSON Schema of the parameters, with defaults and ranges.
    pub parameters: Value,
    /// What it may have learnt offline.
    pub artifacts: Vec<ArtifactInfo>,
}

/// A file of the folder that `--artifacts` names, as a method reads it.
#[derive(Debug, Clone, Serialize)]
pub struct ArtifactInfo {
    /// The file's name.
    pub file: &'static str,
    /// The command that makes one.
    pub made_by: &'static str,
    /// Whether the method by its defaults is refused without it.
    pub needed: bool,
}

/// Every method, prefill first, each phase by name.
pub fn catalogue() -> Vec<MethodInfo> {
    fn infos<M: ?Sized>(phase: &'static str, entries: &[&Entry<M>], schema: Schema<M>) -> Vec<MethodInfo> {
        let info = |e: &&Entry<M>| MethodInfo {
            name: e.name,
            phase,
            summary: e.summary,
            source: e.source,
            parameters: schema(e),
            artifacts: e.artifacts.iter().map(|kind| learnt(e, kind)).collect(),
        };
        entries.iter().map(info).collect()
    }
    [
        infos("prefill", PREFILL, |entry| (entry.schema)()),
        infos("decode", DECODE, decode_schema),
        infos("predictor", PREDICTORS, |entry| (entry.schema)()),
    ]
    .concat()
}

/// What a method of this name attends: answers (`decode`), and where it cannot, prompts (`prefill`).
pub fn phase_of(method: &str) -> Option<&'static str> {
    let decode = DECODE.iter().any(|entry| entry.name == method).then_some("decode");
    decode.or_else(|| PREFILL.iter().any(|entry| entry.name == method).then_some("prefill"))
}

/// What a method's artefact is to it.
fn learnt<M: ?Sized>(entry: &Entry<M>, kind: &ArtifactKind) -> ArtifactInfo {
    let without = (entry.build)(&json!({ "method": entry.name }), "", &Artifacts::default());
    let needed = without.is_err_and(|error| error.artefact == Some(kind.file));
    ArtifactInfo { file: kind.file, made_by: kind.made_by, needed }
}

/// A method that is its own parameters, and its wire's form.
fn read<P: JsonSchema + DeserializeOwned + Serialize>(value: &Value, path: &str) -> SpecResult<(Arc<P>, Value)> {
    let method: P = parse(value, path)?;
    let json = json!(method);
    Ok((Arc::new(method), json))
}

/// Whether it is dense attention.
pub(crate) fn is_dense<M: ?Sized>(chosen: &Chosen<M>) -> bool {
    chosen.name == dense::DECODE.name
}

/// What a decode method's object may say: its own parameters, and what every one but the dense one takes.
fn decode_schema(entry: &Entry<dyn DecodeMethod>) -> Value {
    let mut schema = (entry.schema)();
    if entry.name != dense::DECODE.name {
        schema["properties"][dense_below::FIELD] = dense_below::property();
    }
    schema
}

pub(crate) fn prefill(value: &Value, path: &str, artifacts: &Artifacts) -> SpecResult<Chosen<dyn PrefillMethod>> {
    choose(("prefill method", PREFILL, |entry| (entry.schema)()), value, path, artifacts, |_| None)
}

pub(crate) fn decode(value: &Value, path: &str, artifacts: &Artifacts) -> SpecResult<Chosen<dyn DecodeMethod>> {
    let chosen = choose(("decode method", DECODE, decode_schema), value, path, artifacts, |m| {
        m.host_only().filter(|_| artifacts.place() == Place::Device)
    })?;
    Ok(match dense_below::least(value) {
        Some(least) => dense_below::over(chosen, least),
        None => chosen,
    })
}

fn predictor(value: &Value, path: &str, artifacts: &Artifacts) -> SpecResult<Chosen<dyn Predictor>> {
    choose(("predictor", PREDICTORS, |entry| (entry.schema)()), value, path, artifacts, |m| {
        m.host_only().filter(|_| artifacts.place() == Place::Device)
    })
}

/// Every kind of artefact that some method needs.
pub(crate) fn artifacts() -> Vec<ArtifactKind> {
    let all = PREFILL.iter().flat_map(|e| e.artifacts).chain(DECODE.iter().flat_map(|e| e.artifacts));
    let mut kinds: Vec<ArtifactKind> = all.chain(PREDICTORS.iter().flat_map(|e| e.artifacts)).copied().collect();
    kinds.sort_by_key(|kind| kind.file);
    kinds.dedup_by_key(|kind| kind.file);
    kinds
}

/// A method's object; one that is only named is an object that names it.
pub(crate) fn whole(value: &Value) -> Cow<'_, Value> {
    match value {
        Value::String(name) => Cow::Owned(json!({ "method": name })),
        value => Cow::Borrowed(value),
    }
}

/// The JSON Schema of a parameter that is a method of a phase in its turn: an object, or a name.
fn parameter(phase: &str, description: &str) -> schemars::Schema {
    schemars::json_schema!({ "type": ["object", "string"], "description": description, "x-method-of": phase })
}

/// The method that `value` names; `stuck` says what of one cannot be done where it would run.
fn choose<M: ?Sized>(
    (kind, entries, schema): (&str, &[&Entry<M>], Schema<M>),
    value: &Value,
    path: &str,
    artifacts: &Artifacts,
    stuck: impl Fn(&M) -> Option<String>,
) -> SpecResult<Chosen<M>> {
    let known = || entries.iter().map(|e| e.name).collect::<Vec<_>>();
    let value = &*whole(value);
    let Value::Object(fields) = value else {
        let name = entries[0].name;
        let message = format!("must be a {kind}'s name or an object such as {{\"method\": \"{name}\"}}; got {value}");
        return Err(SpecError::new(path, message));
    };
    let name = fields.get("method").ok_or_else(|| {
        SpecError::new(format!("{path}.method"), format!("is missing; {kind}s: {}", known().join(", ")))
    })?;
    let Some(entry) = entries.iter().find(|e| name == e.name) else {
        let hint = name.as_str().and_then(|n| nearest(n, &known()));
        let elsewhere = || catalogue().iter().find(|other| name == other.name).map(|other| other.phase);
        let hint = match hint {
            Some(name) => format!(", did you mean `{name}`?"),
            None => elsewhere().map_or(String::new(), |phase| match phase {
                "predictor" => ", which is a predictor".into(),
                phase => format!(", which is a {phase} method"),
            }),
        };
        let message = format!("unknown {kind} {name}{hint}; {kind}s: {}", known().join(", "));
        return Err(SpecError::new(format!("{path}.method"), message));
    };
    check_parameters(entry.name, fields, &schema(entry), path)?;
    let (method, mut json) = (entry.build)(value, path, artifacts)?;
    if let Some(what) = stuck(&method) {
        let plain = |e: &&&Entry<M>| (e.build)(&json!({ "method": e.name }), path, artifacts);
        let able = entries.iter().filter(|e| plain(e).is_ok_and(|(method, _)| stuck(&method).is_none()));
        let able: Vec<&str> = able.map(|e| e.name).collect();
        let message =
            format!("{what} runs on the CPU only, and this model does not; {kind}s here: {}", able.join(", "));
        return Err(SpecError::new(format!("{path}.method"), message));
    }
    json["method"] = Value::from(entry.name);
    Ok(Chosen { name: entry.name, json, method })
}

#[cfg(test)]
pub(crate) mod tests;
