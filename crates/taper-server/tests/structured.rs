//! Answers that must be something: `response_format` and `structured_outputs`.

mod support;

use axum::http::StatusCode;
use serde_json::{Value, json};
use support::{Server, server};

/// What the stub would say.
const SCRIPT: &str = "~~~~ ~~~";

async fn content(server: &Server, extra: Value) -> String {
    let mut body =
        json!({"messages": [{"role": "user", "content": "hi"}], "seed": 3, "temperature": 2, "max_tokens": 200});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let answer = server.chat(body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    assert!(!answer.headers.contains_key("x-taper-ignored-fields"), "{:?}", answer.headers);
    let choice = &answer.json()["choices"][0];
    assert_eq!(choice["finish_reason"], "stop", "{choice}");
    choice["message"]["content"].as_str().unwrap().to_string()
}

#[tokio::test]
async fn every_way_to_say_what_an_answer_must_be() {
    let server = server(SCRIPT);
    let schema = json!({"type": "object", "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 10}}, "required": ["x"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
    for extra in [
        json!({"response_format": format}),
        json!({"structured_outputs": {"json": schema}}),
        json!({"structured_outputs": {"json": schema.to_string()}}),
        json!({"structured_outputs": {"json": schema, "whitespace_pattern": "[ ]"}}),
    ] {
        let value: Value = serde_json::from_str(&content(&server, extra.clone()).await).expect("JSON");
        assert!((10..100).contains(&value["x"].as_i64().unwrap()), "{extra}: {value}");
    }
    let compact = json!({"structured_outputs": {"json": schema, "disable_any_whitespace": true}});
    assert_eq!(content(&server, compact).await.len(), "{\"x\":10}".len());
    for extra in
        [json!({"response_format": {"type": "json_object"}}), json!({"structured_outputs": {"json_object": true}})]
    {
        let extra = json!({"logit_bias": {"125": 40}, "response_format": null})
            .as_object()
            .unwrap()
            .clone()
            .into_iter()
            .chain(extra.as_object().unwrap().clone())
            .collect();
        let text = content(&server, Value::Object(extra)).await;
        assert!(serde_json::from_str::<Value>(&text).expect("JSON").is_object(), "{text}");
    }
    let digits = content(&server, json!({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}})).await;
    assert!(digits.len() == 8 && digits.as_bytes()[3] == b'-', "{digits}");
    let chosen = content(&server, json!({"structured_outputs": {"choice": ["yes", "no"]}})).await;
    assert!(["yes", "no"].contains(&chosen.as_str()), "{chosen}");
    let lark = json!({"structured_outputs": {"grammar": "start: \"go \" (\"left\" | \"right\") \"!\""}});
    let ordered = content(&server, lark).await;
    assert!(["go left!", "go right!"].contains(&ordered.as_str()), "{ordered}");
    assert!(content(&server, json!({"response_format": {"type": "text"}})).await.starts_with('~'));
}

#[tokio::test]
async fn a_stream_and_a_text_completion_fit_too() {
    let server = server(SCRIPT);
    let regex = json!({"regex": "[0-9]{12}"});
    let body = json!({"prompt": ["a", "b"], "n": 2, "structured_outputs": regex, "max_tokens": 30, "stream": true});
    let mut texts = vec![String::new(); 4];
    for event in server.complete(body).await.events() {
        let choice = &event["choices"][0];
        texts[choice["index"].as_u64().unwrap() as usize].push_str(choice["text"].as_str().unwrap());
    }
    assert!(texts.iter().all(|text| text.len() == 12 && text.bytes().all(|b| b.is_ascii_digit())), "{texts:?}");
    // Cut short, an answer is the beginning of what it would be.
    let body = json!({"prompt": "a", "structured_outputs": regex, "max_tokens": 5});
    let answer = server.complete(body).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["choices"][0]["text"].as_str().unwrap().len(), 5);
}

#[tokio::test]
async fn what_cannot_be_is_refused_with_its_path() {
    let server = server(SCRIPT);
    let outputs = "structured_outputs";
    for (extra, param) in [
        (json!({"response_format": "json"}), "response_format"),
        (json!({"response_format": {}}), "response_format.type"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
            "response_format.json_schema.schema",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}),
            "response_format.json_schema.schema",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}}),
            "response_format.json_schema.schema",
        ),
        (json!({(outputs): []}), outputs),
        (json!({(outputs): {}}), outputs),
        (json!({(outputs): {"json_object": false}}), outputs),
        (json!({(outputs): {"json": {}, "regex": "a"}}), outputs),
        (json!({(outputs): {"json": "{"}}), "structured_outputs.json"),
        (json!({(outputs): {"json": [1]}}), "structured_outputs.json"),
        (json!({(outputs): {"regex": "("}}), "structured_outputs.regex"),
        (json!({(outputs): {"regex": 3}}), "structured_outputs.regex"),
        (json!({(outputs): {"choice": []}}), "structured_outputs.choice"),
        (json!({(outputs): {"choice": ["a", 1]}}), "structured_outputs.choice"),
        (json!({(outputs): {"choice": [""]}}), "structured_outputs.choice"),
        (json!({(outputs): {"grammar": "root ::= \"a\""}}), "structured_outputs.grammar"),
        (json!({(outputs): {"regexp": "a"}}), "structured_outputs.regexp"),
        (json!({(outputs): {"regex": "a", "whitespace_pattern": " "}}), "structured_outputs.whitespace_pattern"),
        (json!({(outputs): {"structural_tag": "{}"}}), "structured_outputs.structural_tag"),
        (json!({(outputs): {"regex": "a"}, "response_format": {"type": "json_object"}}), "structured_outputs.regex"),
        (json!({"guided_regex": "a"}), "guided_regex"),
        (json!({"guided_json": {}}), "guided_json"),
    ] {
        let mut body = json!({"prompt": "a"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let answer = server.complete(body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{extra}: {}", answer.text);
        let (message, named) = answer.error();
        assert_eq!(named, param, "{extra}: {message}");
        assert!(message.len() < 400 && message.contains(param), "{message}");
    }
    let (message, _) = server.complete(json!({"prompt": "a", "guided_json": {}})).await.error();
    assert!(message.contains("structured_outputs"), "{message}");
}

/// Some models write nothing but line ends where they may; JSON is as readable with one at a time.
#[tokio::test]
async fn white_space_between_parts_of_json_has_a_bound() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "array",
        "items": {"enum": [1, 2]}, "maxItems": 2}}, "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let ask = async |script: &str, extra: Value| content(&server(script), extra).await;
    let ways = [
        json!({"response_format": format}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        json!({"structured_outputs": {"json": schema}}),
    ];
    for way in &ways {
        let mut extra = way.clone();
        extra["temperature"] = json!(0);
        for script in ["{\"a\":1}", "{\"a\": 1, \"b\": [2]}", "{\n  \"a\": 1,\n  \"b\": [\n\t\t1,\r\n    2\n  ]\n}"] {
            assert_eq!(ask(script, extra.clone()).await, script, "{way}");
        }
        for (token, run) in [("10", "\n\n"), ("32", &" ".repeat(2)[..])] {
            extra["logit_bias"] = json!({token: 50});
            let text = ask("{\"a\": 1}", extra.clone()).await;
            let value: Value = serde_json::from_str(&text).expect("JSON");
            assert!(value["a"].is_i64() && text.contains(&run[..1]) && !text.contains(run), "{way} {text:?}");
        }
    }
    // Any JSON at all, and what a schema says itself.
    let any = json!({"structured_outputs": {"json": true}, "temperature": 0, "logit_bias": {"10": 50}});
    assert_eq!(ask("[1]", any).await, "[\n]");
    let own = json!({"json": schema, "whitespace_pattern": "\\n{1,3}"});
    let own = json!({"structured_outputs": own, "temperature": 0, "logit_bias": {"10": 50}});
    assert!(ask("{\"a\":1}", own).await.contains("\n\n\n"));
}
