//! The published schema and the parser agree on what a request may say of its attention.

mod support;

use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::{Value, json};
use std::sync::Arc;
use support::{custom, server};
use taper_attention::{Artifacts, AttentionSpec};
use taper_engine::EngineConfig;
use taper_engine::stub::StubBackend;
use taper_server::ServerConfig;

const GOOD: &[&str] = &[
    r#"{}"#,
    r#"{"audit": true}"#,
    r#"{"audit": 0}"#,
    r#"{"audit": 0.01}"#,
    r#"{"trace": true}"#,
    r#"{"speculate": null}"#,
    r#"{"speculate": {"method": "quest"}}"#,
    r#"{"speculate": {"method": "quest", "choose": "token"}}"#,
    r#"{"speculate": {"method": {"method": "quest", "k": 9}, "tokens": 15}}"#,
    r#"{"speculate": {"method": "quest", "lookup": 0}}"#,
    r#"{"speculate": {"lookup": 1}}"#,
    r#"{"speculate": {"lookup": 3.0, "tokens": 4.0}}"#,
    r#"{"speculate": {"lookup": 64, "tokens": 8, "method": "streaming_llm"}}"#,
    r#"{"prefill": {"method": "dense"}, "decode": {"method": "dense"}}"#,
    r#"{"prefill": {"method": "delta", "gamma": 16, "mode": "recompute"}}"#,
    r#"{"prefill": {"method": "delta", "gamma": 16.0, "base": {"method": "streaming_llm", "window": 9}}}"#,
    r#"{"prefill": {"method": "hip", "block_q": 128, "stages": [{"chunk": 64, "keep": 512.0}, {"chunk": 8.0, "keep": 9}]}}"#,
    r#"{"prefill": {"method": "minference", "pattern": "block_sparse", "blocks": 9}}"#,
    r#"{"prefill": {"method": "sample_attention", "alpha_c": 0, "block": 128, "tuning": "glm4-9b-speed"}}"#,
    r#"{"decode": {"method": "streaming_llm", "sink": 0, "window": 1048576}}"#,
    r#"{"decode": {"method": "oracle_top_k", "k": 0.5}}"#,
    r#"{"decode": {"method": "oracle_top_k", "k": 0}}"#,
    r#"{"decode": {"method": "oracle_top_k", "k": 1}}"#,
    r#"{"decode": {"method": "oracle_top_k", "k": 1048576.0}}"#,
    r#"{"decode": {"method": "vattention"}}"#,
    r#"{"decode": {"method": "vattention", "epsilon": 0.05, "rule": "tight", "top": {"method": "oracle"}}}"#,
    r#"{"decode": "dense"}"#,
    r#"{"prefill": "delta", "decode": "quest"}"#,
    r#"{"question": "decode", "question_tokens": 12}"#,
    r#"{"question": "dense"}"#,
    r#"{"decode": {"method": "quest", "page": 32, "k": 1024, "dense_layers": 0}}"#,
    r#"{"decode": {"method": "oracle_top_p", "p": 1}}"#,
    r#"{"decode": {"method": "random_sample", "rate": 0.2}}"#,
    r#"{"decode": {"method": "santa", "samples": 16, "variant": "iid", "within": {"method": "quest"}}}"#,
    r#"{"decode": {"method": "santa", "kernel": "flash", "tile": 32, "scores": "bernoulli", "draws": 8}}"#,
    r#"{"decode": {"method": "vattention", "top": {"method": "quest", "page": 64}}}"#,
    r#"{"decode": {"method": "vattention", "top_k": "auto"}}"#,
    r#"{"decode": {"method": "vattention", "pilot_share": 1, "dense_share": 0, "pilot_tokens": 2, "top_k": 7}}"#,
];

const BAD: &[&str] = &[
    r#"[]"#,
    r#""dense""#,
    r#"{"prefil": {"method": "dense"}}"#,
    r#"{"decode": null}"#,
    r#"{"decode": "nonsense"}"#,
    r#"{"decode": {}}"#,
    r#"{"decode": {"method": null}}"#,
    r#"{"decode": {"method": "nonsense"}}"#,
    r#"{"decode": {"method": "delta"}}"#,
    r#"{"prefill": {"method": "vattention"}}"#,
    r#"{"prefill": {"method": "dense", "window": 4}}"#,
    r#"{"prefill": {"method": "delta", "gamma": 0}}"#,
    r#"{"prefill": {"method": "delta", "gamma": 1.5}}"#,
    r#"{"prefill": {"method": "delta", "gamma": "64"}}"#,
    r#"{"prefill": {"method": "delta", "mode": "Delta"}}"#,
    r#"{"prefill": {"method": "delta", "base": {"method": "delta"}}}"#,
    r#"{"prefill": {"method": "delta", "base": {"window": 64}}}"#,
    r#"{"prefill": {"method": "delta", "base": {"method": "streaming_llm", "window": 0}}}"#,
    r#"{"prefill": {"method": "hip", "stages": []}}"#,
    r#"{"prefill": {"method": "hip", "stages": [{"chunk": 64}]}}"#,
    r#"{"prefill": {"method": "hip", "stages": [{"chunk": 64, "keep": 0}]}}"#,
    r#"{"prefill": {"method": "hip", "stages": [{"chunk": 64, "keep": 1, "more": 1}]}}"#,
    r#"{"prefill": {"method": "hip", "stages": {"chunk": 64, "keep": 1}}}"#,
    r#"{"prefill": {"method": "sample_attention", "block": 100}}"#,
    r#"{"prefill": {"method": "sample_attention", "tuning": "glm"}}"#,
    r#"{"decode": {"method": "streaming_llm", "sink": -1}}"#,
    r#"{"decode": {"method": "streaming_llm", "sink": 1e300}}"#,
    r#"{"decode": {"method": "streaming_llm", "sink": true}}"#,
    r#"{"decode": {"method": "oracle_top_k", "k": 1.5}}"#,
    r#"{"decode": {"method": "oracle_top_k", "k": -0.5}}"#,
    r#"{"decode": {"method": "oracle_top_k", "k": 1048577}}"#,
    r#"{"decode": {"method": "oracle_top_k", "k": "0.5"}}"#,
    r#"{"decode": {"method": "oracle_top_k", "k": "auto"}}"#,
    r#"{"decode": {"method": "vattention", "top_k": "most"}}"#,
    r#"{"decode": {"method": "vattention", "top_k": null}}"#,
    r#"{"decode": {"method": "vattention", "top_k": 1.5}}"#,
    r#"{"decode": {"method": "vattention", "top_k": -1}}"#,
    r#"{"decode": {"method": "vattention", "epsilon": 0}}"#,
    r#"{"decode": {"method": "vattention", "epsilon": 1}}"#,
    r#"{"decode": {"method": "vattention", "epsilonn": 0.1}}"#,
    r#"{"decode": {"method": "vattention", "rule": "none"}}"#,
    r#"{"decode": {"method": "vattention", "top": {"method": "dense"}}}"#,
    r#"{"decode": {"method": "vattention", "top": {"method": "oracle", "k": 4}}}"#,
    r#"{"decode": {"method": "vattention", "top": null}}"#,
    r#"{"decode": {"method": "vattention", "pilot_tokens": 1}}"#,
    r#"{"question": "sparse"}"#,
    r#"{"question_tokens": 0}"#,
    r#"{"question_tokens": 1.5}"#,
    r#"{"decode": {"method": "quest", "page": 24}}"#,
    r#"{"decode": {"method": "quest", "dense_layers": -1}}"#,
    r#"{"decode": {"method": "oracle_top_p", "p": 0}}"#,
    r#"{"decode": {"method": "oracle_top_p", "p": 1.1}}"#,
    r#"{"decode": {"method": "santa", "samples": 0}}"#,
    r#"{"decode": {"method": "santa", "variant": "none"}}"#,
    r#"{"decode": {"method": "santa", "draws": 65}}"#,
    r#"{"decode": {"method": "santa", "within": {"method": "santa"}}}"#,
    r#"{"decode": {"method": "vattention", "top": {"method": "streaming_llm"}}}"#,
    r#"{"audit": 1.5}"#,
    r#"{"audit": "true"}"#,
    r#"{"audit": null}"#,
    r#"{"trace": 1}"#,
    r#"{"trace": null}"#,
    r#"{"speculate": "quest"}"#,
    r#"{"speculate": {"tokens": 4}}"#,
    r#"{"speculate": {"lookup": 0}}"#,
    r#"{"speculate": {"lookup": 65}}"#,
    r#"{"speculate": {"lookup": "3"}}"#,
    r#"{"speculate": {"method": "quest", "lookup": null}}"#,
    r#"{"speculate": {"method": "delta"}}"#,
    r#"{"speculate": {"method": {"k": 4}}}"#,
    r#"{"speculate": {"method": "quest", "tokens": 16}}"#,
    r#"{"speculate": {"method": "quest", "tokens": 0}}"#,
    r#"{"speculate": {"method": "quest", "token": 4}}"#,
    r#"{"speculate": {"method": "quest", "choose": "once"}}"#,
    r#"{"speculate": {"method": "quest", "choose": null}}"#,
];

/// A schema, ready to check with.
struct Checker(Schemas, SchemaIndex);

impl Checker {
    fn new(schema: &Value) -> Self {
        let mut compiler = Compiler::new();
        compiler.add_resource("http://taper/schema", schema.clone()).expect("a resource");
        let mut schemas = Schemas::new();
        let index = compiler.compile("http://taper/schema", &mut schemas).expect("a sound schema");
        Self(schemas, index)
    }

    fn takes(&self, value: &Value) -> bool {
        self.0.validate(value, self.1).is_ok()
    }
}

#[tokio::test]
async fn schema_and_parser_take_the_same() {
    let document = server("x").get("/v1/attention/methods").await.json();
    let checker = Checker::new(&document["schema"]);
    for (texts, good) in [(GOOD, true), (BAD, false)] {
        for text in texts {
            let value: Value = serde_json::from_str(text).expect("JSON");
            assert_eq!(checker.takes(&value), good, "the schema on {text}");
            let parsed = AttentionSpec::from_json(&value, "attention", &Artifacts::default());
            assert_eq!(parsed.is_ok(), good, "the parser on {text}: {parsed:?}");
        }
    }
}

/// What a server has by default stands where other defaults stand, and holds for requests that say nothing.
#[tokio::test]
async fn contexts_read_whole_by_default_are_the_servers() {
    let artifacts = Arc::new(Artifacts::default().with_dense_below(512));
    let config = ServerConfig { artifacts, ..ServerConfig::default() };
    let server = custom(StubBackend::new("x"), EngineConfig::default(), config);
    let document = server.get("/v1/attention/methods").await.json();
    for method in document["data"].as_array().expect("a list") {
        let decodes = method["phase"] == "decode" && method["name"] != "dense";
        let default = &method["parameters"]["properties"]["dense_below"]["default"];
        assert_eq!(default, &if decodes { json!(512) } else { Value::Null }, "{}", method["name"]);
    }
    // In the whole object too, but not of drafts nor of what santa is within.
    let of = |methods: &Value| {
        let named = |method: &&Value| method["properties"]["method"]["const"] == "quest";
        let quest = methods["oneOf"].as_array().into_iter().flatten().find(named).expect("quest");
        quest["properties"]["dense_below"]["default"].clone()
    };
    let properties = &document["schema"]["properties"];
    assert_eq!(of(&properties["decode"]), json!(512));
    assert_eq!(of(&properties["speculate"]["properties"]["method"]), json!(0));
    let santa = document["data"].as_array().into_iter().flatten().find(|method| method["name"] == "santa");
    assert_eq!(of(&santa.expect("santa")["parameters"]["properties"]["within"]), json!(0));
}

#[tokio::test]
async fn every_methods_schema_names_it_and_takes_its_defaults() {
    let document = server("x").get("/v1/attention/methods").await.json();
    let whole = Checker::new(&document["schema"]);
    for method in document["data"].as_array().expect("a list") {
        let checker = Checker::new(&method["parameters"]);
        let mut object = json!({"method": method["name"]});
        assert!(checker.takes(&object), "{method}");
        for (name, property) in method["parameters"]["properties"].as_object().expect("properties") {
            if let Some(default) = property.get("default") {
                object[name] = default.clone();
            }
        }
        assert!(checker.takes(&object), "{object}");
        if let Some(phase) = method["phase"].as_str().filter(|p| *p != "predictor") {
            let spec = json!({ phase: object });
            assert!(whole.takes(&spec), "{spec}");
            let filled = match AttentionSpec::from_json(&spec, "attention", &Artifacts::default()) {
                // Right as JSON; what it lacks is on the server.
                Err(error) if error.artefact.is_some() => continue,
                spec => json!(spec.expect("its defaults are valid")),
            };
            assert!(whole.takes(&filled), "what the server says it does is what it takes: {filled}");
        }
        object["method"] = json!("another");
        assert!(!checker.takes(&object), "{object}");
        assert!(!checker.takes(&json!({})));
        assert!(!checker.takes(&json!({"method": method["name"], "unknown": 1})));
    }
}
