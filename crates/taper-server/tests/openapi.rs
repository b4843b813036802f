//! What `/openapi.json` says is what the server does.

mod support;

use boon::{Compiler, Schemas};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use support::{Server, server};

const AT: &str = "http://taper/openapi.json";

async fn document(server: &Server) -> Value {
    let answer = server.get("/openapi.json").await;
    assert_eq!((answer.status.as_u16(), &answer.headers["content-type"]), (200, &"application/json".parse().unwrap()));
    answer.json()
}

/// Whether a value is as the schema at a place of the document says.
fn fits(document: &Value, place: &str, value: &Value) -> Result<(), String> {
    let mut compiler = Compiler::new();
    compiler.add_resource(AT, document.clone()).unwrap();
    let mut schemas = Schemas::new();
    let schema = compiler.compile(&format!("{AT}#{place}"), &mut schemas).unwrap();
    schemas.validate(value, schema).map_err(|error| format!("{error:#}: {value}"))
}

fn schema(name: &str) -> String {
    format!("/components/schemas/{name}")
}

#[tokio::test]
async fn every_path_answers_and_every_reference_leads_somewhere() {
    let server = server("x");
    let document = document(&server).await;
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"), "{}", document["openapi"]);
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() >= 13, "{:?}", paths.keys());
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().unwrap() {
            assert!(operation["summary"].is_string() && operation["tags"].is_array(), "{method} {path}");
            let status = match method.as_str() {
                "get" => server.get(&path.replace("{id}", "stub")).await.status,
                _ => server.post(path, json!({})).await.status,
            };
            assert!([200, 400, 404].contains(&status.as_u16()), "{method} {path}: {status}");
            assert!(status != 404 || path.contains("{id}"), "{method} {path}");
        }
    }
    let text = document.to_string();
    for reference in text.split("\"$ref\":\"").skip(1) {
        let place = reference.split('"').next().unwrap().trim_start_matches('#');
        assert!(document.pointer(place).is_some(), "{place}");
    }
}

#[tokio::test]
async fn every_field_that_is_told_is_known() {
    let server = server("hello there");
    let document = document(&server).await;
    for (path, name) in [
        ("/v1/chat/completions", "ChatRequest"),
        ("/v1/completions", "TextRequest"),
        ("/v1/responses", "ResponseRequest"),
        ("/v1/embeddings", "EmbeddingRequest"),
        ("/tokenize", "TokenizeRequest"),
        ("/detokenize", "DetokenizeRequest"),
    ] {
        let names = properties(&document, &document["components"]["schemas"][name]);
        assert!(names.len() > 1, "{name}: {names:?}");
        for field in names {
            // No field takes this. One that nobody reads would be passed over.
            let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "prompt": "a", "input": "a", "tokens": [1],
                "stream": true, "logprobs": true});
            match path {
                "/v1/completions" => body["logprobs"] = json!(1),
                "/tokenize"
                    if !["model", "prompt", "add_special_tokens", "return_token_strs"].contains(&field.as_str()) =>
                {
                    body["prompt"] = Value::Null;
                }
                "/tokenize" => body["messages"] = Value::Null,
                "/v1/responses" => body = json!({"input": "a", "stream": true}),
                _ => {}
            }
            let answer = server.post(path, body.clone()).await;
            assert_eq!(answer.status, 200, "{path} without {field}: {}", answer.text);
            body[&field] = json!([[{"x": false}]]);
            let answer = server.post(path, body.clone()).await;
            assert_eq!(answer.status, 400, "{path} takes {field} as anything: {}", answer.text);
        }
    }
}

/// Names of the fields that the server's source reads, of whatever object.
fn read_somewhere() -> BTreeSet<String> {
    fn sources(folder: &Path, all: &mut String) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => sources(&path, all),
                false => all.push_str(&std::fs::read_to_string(path).unwrap_or_default()),
            }
        }
    }
    let mut all = String::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut all);
    let by = ["bool", "text", "int", "seed", "number", "object", "array", "get", "peek"].map(|by| format!(".{by}(\""));
    let names = by.iter().flat_map(|by| all.split(by.as_str()).skip(1)).filter_map(|rest| rest.split_once('"'));
    let plain = |name: &&str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    names.map(|(name, _)| name).filter(plain).map(str::to_owned).collect()
}

#[tokio::test]
async fn every_field_that_is_read_is_told() {
    let server = server("hello there");
    let document = document(&server).await;
    let names = read_somewhere();
    for name in ["temperature", "continue_final_message", "best_of", "dimensions", "truncation", "return_token_strs"] {
        assert!(names.contains(name), "{name}: {names:?}");
    }
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    for (path, name, body) in [
        ("/v1/chat/completions", "ChatRequest", &chat),
        ("/v1/completions", "TextRequest", &json!({"prompt": "a"})),
        ("/v1/responses", "ResponseRequest", &json!({"input": "a"})),
        ("/v1/embeddings", "EmbeddingRequest", &json!({"input": "a"})),
        ("/tokenize", "TokenizeRequest", &chat),
        ("/tokenize", "TokenizeRequest", &json!({"prompt": "a"})),
        ("/detokenize", "DetokenizeRequest", &json!({"tokens": [1]})),
    ] {
        let told = properties(&document, &document["components"]["schemas"][name]);
        for field in names.iter().filter(|&name| !told.contains(name)) {
            let mut body = body.clone();
            body[field] = json!([[{"x": false}]]);
            let answer = server.post(path, body).await;
            if answer.status == 200 {
                continue;
            }
            // What has no place here may be refused for that.
            let (message, _) = answer.error();
            let none =
                ["is not supported", "would change the answer", "did you mean", "is a chat's", "both be", "not both"];
            assert!(none.iter().any(|none| message.contains(none)), "{path} reads {field}, untold: {message}");
        }
    }
}

/// The names of a schema's fields, those of its parts with them.
fn properties(document: &Value, schema: &Value) -> Vec<String> {
    if let Some(place) = schema["$ref"].as_str() {
        return properties(document, document.pointer(place.trim_start_matches('#')).unwrap());
    }
    let own = schema["properties"].as_object().into_iter().flat_map(|map| map.keys().cloned());
    let parts = schema["allOf"].as_array().into_iter().flatten().flat_map(|part| properties(document, part));
    own.chain(parts).collect()
}

#[tokio::test]
async fn requests_and_their_answers_are_as_it_says() {
    let server = server("hello there, how are you");
    let document = document(&server).await;
    let user = json!([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]);
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let attention = json!({"decode": {"method": "vattention", "epsilon": 0.2}, "audit": true, "trace": true});
    for (path, request, answers, body) in [
        ("/v1/chat/completions", "ChatRequest", "ChatCompletion", json!({"messages": user})),
        (
            "/v1/chat/completions",
            "ChatRequest",
            "ChatCompletion",
            json!({"messages": [user[0], {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
                "response_format": {"type": "json_object", "schema": {"type": "object"}}, "max_tokens": 5}),
        ),
        (
            "/v1/chat/completions",
            "ChatRequest",
            "ChatCompletion",
            json!({"messages": user, "attention": attention, "n": 2, "seed": -3, "stop": ["x"], "max_tokens": 3,
                "logit_bias": {"3": 1}, "logprobs": true, "top_logprobs": 2, "tools": [tool], "tool_choice": "auto",
                "temperature": 0, "top_k": -1, "timeout": 30}),
        ),
        (
            "/v1/completions",
            "TextRequest",
            "TextCompletion",
            json!({"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1}),
        ),
        ("/v1/completions", "TextRequest", "TextCompletion", json!({"prompt": [1, 2], "echo": true, "epsilon": 0.1})),
        (
            "/v1/completions",
            "TextRequest",
            "TextCompletion",
            json!({"prompt": [1, 2], "echo": true, "logprobs": 1, "max_tokens": 0, "best_of": 2, "priority": 1}),
        ),
        (
            "/v1/responses",
            "ResponseRequest",
            "ResponseAnswer",
            json!({"input": "hi", "max_output_tokens": 9, "top_logprobs": 1, "n": 1, "store": false, "metadata": {"a": "b"},
                "truncation": "auto", "add_generation_prompt": true}),
        ),
        ("/v1/embeddings", "EmbeddingRequest", "Embeddings", json!({"input": ["a", "b"], "encoding_format": "base64"})),
        ("/tokenize", "TokenizeRequest", "Tokens", json!({"prompt": "hello", "return_token_strs": true})),
        ("/detokenize", "DetokenizeRequest", "Prompt", json!({"tokens": [1, 2]})),
    ] {
        fits(&document, &schema(request), &body).unwrap();
        let answer = server.post(path, body.clone()).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text);
        fits(&document, &schema(answers), &answer.json()).unwrap();
        let wrong = server.post(path, json!({"model": 3})).await;
        assert_eq!(wrong.status, 400);
        fits(&document, &schema("Failure"), &wrong.json()).unwrap();
    }
    for (body, path, chunk) in [
        (
            json!({"messages": user, "stream": true, "stream_options": {"include_usage": true}}),
            "/v1/chat/completions",
            "ChatChunk",
        ),
        (json!({"prompt": "a", "stream": true}), "/v1/completions", "TextCompletion"),
    ] {
        for event in server.post(path, body).await.events() {
            fits(&document, &schema(chunk), &event).unwrap();
        }
    }
    for (path, name) in
        [("/v1/models", "Models"), ("/v1/models/stub", "Model"), ("/ready", "Ready"), ("/version", "Version")]
    {
        let answer = server.get(path).await;
        if answer.status == 200 {
            fits(&document, &schema(name), &answer.json()).unwrap();
        }
        assert!(answer.status == 200 || path == "/v1/models/stub", "{path}: {}", answer.text);
    }
    // What cannot be is not said to be possible.
    for (name, body) in [
        ("ChatRequest", json!({"messages": []})),
        ("ChatRequest", json!({"messages": user, "temperature": 3})),
        ("ChatRequest", json!({"messages": [{"role": "user", "content": [{"type": "refusal", "text": "no"}]}]})),
        ("ResponseRequest", json!({"input": "a", "truncation": "never"})),
        ("ChatRequest", json!({"messages": user, "attention": {"decode": {"method": "nonsense"}}})),
        ("TextRequest", json!({"prompt": {}})),
        ("EmbeddingRequest", json!({"input": "a", "encoding_format": "int8"})),
        ("DetokenizeRequest", json!({"tokens": "a"})),
    ] {
        assert!(fits(&document, &schema(name), &body).is_err(), "{name}: {body}");
    }
}
