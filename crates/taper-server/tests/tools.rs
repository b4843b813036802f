//! Functions that a chat may call, or must.

mod support;

use axum::http::StatusCode;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use support::{Server, custom};
use taper_engine::stub::{StubBackend, StubText};
use taper_engine::{CallFormat, Engine, EngineConfig, Message, ModelInfo, Text, TextError, TokenStream};
use taper_server::{ServerConfig, router};

const CALLS: &str = "I look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Genève\"}}\n</tool_call>\n\
                     <tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>";

/// A stub with room for descriptions of tools.
fn server(script: &str) -> Server {
    let mut backend = StubBackend::new(script);
    (backend.limits.context_tokens, backend.limits.cache_tokens) = (2048, 4096);
    custom(backend, EngineConfig::default(), ServerConfig::default())
}

fn tools() -> Value {
    let city = json!({"$ref": "#/$defs/city"});
    let weather = json!({
        "type": "object",
        "properties": {"city": city, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": false,
        "$defs": {"city": {"enum": ["Paris", "Rome"]}},
    });
    json!([
        {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": weather}},
        {"type": "function", "function": {"name": "get_time"}},
    ])
}

fn chat(extra: Value) -> Value {
    let mut body =
        json!({"messages": [{"role": "user", "content": "hi"}], "tools": tools(), "max_tokens": 200, "temperature": 0});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn choice(server: &Server, extra: Value) -> Value {
    let answer = server.chat(chat(extra)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    answer.json()["choices"][0].clone()
}

/// What the deltas of a stream come to: content, calls, the reason to end.
fn joined(events: &[Value]) -> (String, Vec<(String, String, String)>, Value) {
    let (mut content, mut calls, mut reason) = (String::new(), Vec::new(), Value::Null);
    for choice in events.iter().filter_map(|event| event["choices"].get(0)) {
        assert!(reason.is_null(), "nothing after the end");
        content.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if let Some(id) = call["id"].as_str() {
                assert_eq!((index, &call["type"]), (calls.len(), &json!("function")));
                calls.push((id.to_string(), call["function"]["name"].as_str().unwrap().to_string(), String::new()));
            }
            let arguments = call["function"]["arguments"].as_str().unwrap();
            let last = calls.len() - 1;
            assert_eq!(index, last, "one after the other");
            calls[last].2.push_str(arguments);
        }
        reason = choice["finish_reason"].clone();
    }
    (content, calls, reason)
}

#[tokio::test]
async fn calls_that_the_model_chooses_to_make_whole_and_streamed() {
    let server = server(CALLS);
    let choice = choice(&server, json!({})).await;
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "I look.\n");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let function = |call: &Value| (call["type"].clone(), call["function"].clone());
    assert_eq!(
        function(&calls[0]),
        (json!("function"), json!({"name": "get_weather", "arguments": "{\"city\": \"Genève\"}"}))
    );
    assert_eq!(function(&calls[1]), (json!("function"), json!({"name": "get_time", "arguments": "{}"})));
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    let events = server.chat(chat(json!({"stream": true}))).await.events();
    let (content, told, reason) = joined(&events);
    assert_eq!((content.as_str(), reason), ("I look.\n", json!("tool_calls")));
    let told: Vec<(&str, &str)> = told.iter().map(|(_, name, arguments)| (name.as_str(), arguments.as_str())).collect();
    assert_eq!(told, [("get_weather", "{\"city\": \"Genève\"}"), ("get_time", "{}")]);
    let parts =
        events.iter().filter(|e| e.pointer("/choices/0/delta/tool_calls/0/function/arguments").is_some()).count();
    assert!(parts > 10, "arguments come as they are written: {parts}");
}

#[tokio::test]
async fn one_call_or_none_where_the_request_says_so() {
    let server = server(CALLS);
    let one = choice(&server, json!({"parallel_tool_calls": false})).await;
    assert_eq!(one["message"]["tool_calls"].as_array().unwrap().len(), 1);
    // Without tools a tag is text as any other.
    for extra in [json!({"tool_choice": "none"}), json!({"tools": []}), json!({"tools": null})] {
        let none = choice(&server, extra).await;
        assert_eq!((&none["message"]["content"], &none["finish_reason"]), (&json!(CALLS), &json!("stop")));
        assert!(none["message"].get("tool_calls").is_none());
    }
    // The model is told of what it may not call, so that a conversation keeps its beginning.
    let prompt = async |extra: Value| server.chat(chat(extra)).await.json()["usage"]["prompt_tokens"].clone();
    let told = prompt(json!({"tool_choice": "auto"})).await;
    assert_eq!(prompt(json!({"tool_choice": "none"})).await, told);
    assert_ne!(prompt(json!({"tools": []})).await, told);
    let cut = choice(&server, json!({"max_tokens": 60})).await;
    assert_eq!(
        (&cut["finish_reason"], &cut["message"]["tool_calls"][0]["function"]["name"]),
        (&json!("length"), &json!("get_weather"))
    );
    let asked = server.chat(chat(json!({"logprobs": true, "stream": true}))).await.events();
    let tokens: usize =
        asked.iter().filter_map(|e| Some(e.pointer("/choices/0/logprobs/content")?.as_array()?.len())).sum();
    assert_eq!(tokens, CALLS.len(), "every token's log probability, whatever became of its text");
}

#[tokio::test]
async fn a_call_that_is_asked_for_comes_and_fits_its_schema() {
    let server = server("~~~~ no");
    let hot = |seed, choice: Value| json!({"temperature": 2, "seed": seed, "tool_choice": choice, "max_tokens": 1500});
    let mut names = Vec::new();
    for seed in 0..12 {
        let choice = choice(&server, hot(seed, json!("required"))).await;
        let message = &choice["message"];
        assert_eq!((&choice["finish_reason"], &message["content"]), (&json!("tool_calls"), &Value::Null), "{choice}");
        for call in message["tool_calls"].as_array().unwrap() {
            let name = call["function"]["name"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
            match name {
                "get_weather" => {
                    assert!(["Paris", "Rome"].contains(&arguments["city"].as_str().unwrap()), "{arguments}");
                    assert!((1..=9).contains(&arguments["days"].as_i64().unwrap()), "{arguments}");
                }
                _ => assert_eq!(arguments, json!({})),
            }
            names.push(name.to_string());
        }
        let events = server
            .chat(chat(
                json!({"temperature": 2, "seed": seed, "tool_choice": "required", "stream": true, "max_tokens": 1500}),
            ))
            .await
            .events();
        let same: Vec<Value> = joined(&events)
            .1
            .into_iter()
            .map(|(_, name, arguments)| json!({"name": name, "arguments": arguments}))
            .collect();
        let whole: Vec<Value> =
            message["tool_calls"].as_array().unwrap().iter().map(|call| call["function"].clone()).collect();
        assert_eq!(same, whole);
    }
    assert!(
        names.len() > 12 && ["get_weather", "get_time"].iter().all(|name| names.iter().any(|n| n == name)),
        "{names:?}"
    );
    let named = json!({"type": "function", "function": {"name": "get_time"}});
    for seed in 0..4 {
        let choice = choice(&server, hot(seed, named.clone())).await;
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert!(calls.len() == 1 && calls[0]["function"]["name"] == "get_time", "{choice}");
    }
}

/// Cut short wherever it is, an answer that is to be a call is never text.
#[tokio::test]
async fn a_call_that_is_asked_for_and_cut_short_is_no_text() {
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    let script = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\", \"days\": 3}}\n</tool_call>\n\
                  <tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>";
    let server = server(script);
    for wish in [json!("required"), named] {
        for most in [1, 8, 20, 40, 66, 76, 85, 110] {
            let extra = json!({"tool_choice": wish, "max_tokens": most, "logprobs": true});
            let cut = choice(&server, extra.clone()).await;
            let message = &cut["message"];
            let ended = most == 110 && wish != "required";
            let reason = json!(if ended { "tool_calls" } else { "length" });
            assert_eq!((&message["content"], &cut["finish_reason"]), (&Value::Null, &reason), "{most}: {cut}");
            let mut streamed = extra;
            streamed["stream"] = json!(true);
            let events = server.chat(chat(streamed)).await.events();
            let texts = events.iter().filter_map(|event| event.pointer("/choices/0/delta/content"));
            assert!(texts.clone().all(Value::is_null) && texts.count() > 0, "{most}: {events:?}");
            let (_, told, ended) = joined(&events);
            let told: Vec<Value> =
                told.into_iter().map(|(_, name, arguments)| json!({"name": name, "arguments": arguments})).collect();
            let whole = message["tool_calls"].as_array().into_iter().flatten().map(|call| call["function"].clone());
            assert_eq!((told, ended), (whole.collect(), reason), "{most}");
        }
    }
    // Where the model chose to make it, it may be text still, but not after a call.
    let auto = choice(&server, json!({"max_tokens": 8})).await;
    assert_eq!(auto["message"]["content"], "<tool_ca", "{auto}");
    let auto = choice(&server, json!({"max_tokens": 110})).await;
    assert_eq!((&auto["message"]["content"], &auto["finish_reason"]), (&Value::Null, &json!("length")), "{auto}");
    assert_eq!(auto["message"]["tool_calls"].as_array().map(Vec::len), Some(1), "{auto}");
}

#[tokio::test]
async fn beside_tools_an_answer_can_be_held_to_a_schema() {
    let server = server("~~~~ no");
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}});
    let (mut said, mut called) = (0, 0);
    for seed in 0..30 {
        let choice =
            choice(&server, json!({"temperature": 2, "seed": seed, "response_format": format, "max_tokens": 1500}))
                .await;
        match choice["message"]["tool_calls"].as_array() {
            Some(_) => called += 1,
            None => {
                assert!(["1", "2"].contains(&choice["message"]["content"].as_str().unwrap()), "{choice}");
                said += 1;
            }
        }
    }
    assert!(said > 0 && called > 0, "{said} {called}");
}

#[tokio::test]
async fn the_template_reads_tools_calls_and_results() {
    let server = server("x");
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]);
    let body = json!({"messages": messages, "tools": [tools()[1]], "chat_template_kwargs": {"thinking": true}});
    let tokens = server.post("/tokenize", body.clone()).await.json();
    let text = server.post("/detokenize", json!({"tokens": tokens["tokens"]})).await.json();
    assert_eq!(
        text["prompt"],
        "<tools>[{\"type\":\"function\",\"function\":{\"name\":\"get_time\"}}]\n<user>hi\n<assistant>{\"tool_calls\":[{\"id\":\
         \"call_1\",\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"arguments\":{\"city\":\"Paris\"}}}]}\n<tool>sun\
         {\"tool_call_id\":\"call_1\"}\n<assistant>"
    );
    assert_eq!(server.chat(body).await.json()["usage"]["prompt_tokens"], tokens["count"]);
}

#[tokio::test]
async fn what_cannot_be_is_refused_with_its_path() {
    let server = server("x");
    let function = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    let called = |function: Value| json!({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]});
    for (extra, param) in [
        (json!({"tools": {}}), "tools"),
        (json!({"tools": [1]}), "tools[0]"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (function(json!({})), "tools[0].function.name"),
        (function(json!({"name": "two words"})), "tools[0].function.name"),
        (function(json!({"name": "f", "parameters": []})), "tools[0].function.parameters"),
        (json!({"tools": [tools()[0], tools()[0]]}), "tools[1].function.name"),
        (json!({"tools": vec![json!({"type": "function", "function": {"name": "f"}}); 129]}), "tools"),
        (json!({"tool_choice": "any"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function"}}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "g"}}}), "tool_choice"),
        (json!({"tool_choice": "required", "tools": []}), "tool_choice"),
        (json!({"tool_choice": "required", "response_format": {"type": "json_object"}}), "tool_choice"),
        (json!({"structured_outputs": {"regex": "a"}}), "structured_outputs"),
        (json!({"parallel_tool_calls": 1}), "parallel_tool_calls"),
        (json!({"functions": []}), "functions"),
        (json!({"chat_template_kwargs": {"tools": []}}), "chat_template_kwargs.tools"),
        (called(json!({"arguments": "{}"})), "messages[0].tool_calls[0].function.name"),
        (called(json!({"name": "f", "arguments": 3})), "messages[0].tool_calls[0].function.arguments"),
    ] {
        let answer = server.chat(chat(extra.clone())).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{extra}: {}", answer.text);
        assert_eq!(answer.error().1, param, "{extra}");
    }
    let bad = json!({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "what"}}}]});
    let (message, param) = server.chat(chat(bad)).await.error();
    assert_eq!(param, "tools[0].function.parameters", "{message}");
    // A text completion has no calls.
    let answer = server.complete(json!({"prompt": "a", "tools": tools()})).await;
    assert_eq!(answer.error().1, "tools");
}

/// Bytes as tokens, but the first three are marks, which no byte spells; and calls in a format of choice.
struct Marked(CallFormat);

const MARKS: [&str; 3] = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"];

struct Marks(Box<dyn TokenStream>, bool);

impl TokenStream for Marks {
    fn push(&mut self, token: u32) -> String {
        match MARKS.get(token as usize) {
            Some(mark) => {
                if self.1 {
                    (*mark).into()
                } else {
                    String::new()
                }
            }
            None => self.0.push(token),
        }
    }

    fn finish(&mut self) -> String {
        self.0.finish()
    }
}

impl Text for Marked {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        StubText.encode(text, special)
    }

    fn chat(&self, messages: &[Message], variables: &Map<String, Value>) -> Result<Vec<u32>, TextError> {
        StubText.chat(messages, variables)
    }

    fn open(&self, messages: &[Message], variables: &Map<String, Value>) -> Result<Vec<u32>, TextError> {
        StubText.open(messages, variables)
    }

    fn call_format(&self) -> CallFormat {
        self.0
    }

    fn mark(&self, mark: &str) -> Option<u32> {
        MARKS.iter().position(|one| *one == mark).map(|place| place as u32)
    }

    fn decode(&self, tokens: &[u32], special: bool) -> String {
        StubText.decode(tokens, special)
    }

    fn token_bytes(&self, token: u32) -> Vec<u8> {
        MARKS.get(token as usize).map_or_else(|| StubText.token_bytes(token), |mark| mark.as_bytes().to_vec())
    }

    fn special(&self, token: u32) -> bool {
        (token as usize) < MARKS.len() || StubText.special(token)
    }

    fn eos(&self) -> &[u32] {
        StubText.eos()
    }

    fn stream(&self, continues: bool, special: bool) -> Box<dyn TokenStream> {
        Box::new(Marks(StubText.stream(continues, special), special))
    }
}

#[tokio::test]
async fn every_format_is_asked_for_and_read() {
    for format in [CallFormat::Tagged, CallFormat::Llama, CallFormat::Mistral, CallFormat::MistralNamed] {
        let mut backend = StubBackend::new("~~~~ no");
        (backend.limits.context_tokens, backend.limits.cache_tokens) = (2048, 4096);
        let probe = Arc::clone(&backend.probe);
        let model = ModelInfo { id: "marked".into(), created: 0 };
        let engine = Engine::start(backend, Arc::new(Marked(format)), model, EngineConfig::default()).unwrap();
        let engine = Arc::new(engine);
        let router = router(Arc::clone(&engine), ServerConfig::default());
        let server = Server { engine, probe, router };
        let mut most = 0;
        for seed in 0..8 {
            let extra = json!({"temperature": 2, "seed": seed, "tool_choice": "required", "max_tokens": 1500});
            let choice = choice(&server, extra).await;
            assert_eq!(
                (&choice["finish_reason"], &choice["message"]["content"]),
                (&json!("tool_calls"), &Value::Null),
                "{choice}"
            );
            let calls = choice["message"]["tool_calls"].as_array().unwrap();
            for call in calls {
                let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
                assert!(
                    arguments.is_object() && call["function"]["name"].as_str().unwrap().starts_with("get_"),
                    "{call}"
                );
                let id = call["id"].as_str().unwrap();
                let nine = id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric());
                assert_eq!(nine, matches!(format, CallFormat::Mistral | CallFormat::MistralNamed), "{id}");
            }
            most = most.max(calls.len());
        }
        assert_eq!(most > 1, format != CallFormat::Llama, "{format:?}");
        // What is marked is no text that anyone reads.
        let shown = json!({"prompt": "a", "logit_bias": {"0": 100}, "max_tokens": 1, "temperature": 0});
        assert_eq!(server.complete(shown.clone()).await.json()["choices"][0]["text"], "");
        let mut shown = shown;
        shown["skip_special_tokens"] = json!(false);
        assert_eq!(server.complete(shown).await.json()["choices"][0]["text"], "[TOOL_CALLS]");
    }
}

#[tokio::test]
async fn some_of_the_tools_alone_may_be_called() {
    let server = server(CALLS);
    let allowed = |mode: &str, name: &str| {
        let tools = json!([{"type": "function", "function": {"name": name}}]);
        json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}})
    };
    // The model is told of all nonetheless.
    let body = server.chat(chat(allowed("required", "get_time"))).await.json();
    let all = server.chat(chat(json!({}))).await.json();
    assert_eq!(body["usage"]["prompt_tokens"], all["usage"]["prompt_tokens"]);
    let calls = body["choices"][0]["message"]["tool_calls"].as_array().unwrap();
    assert!(!calls.is_empty() && calls.iter().all(|call| call["function"]["name"] == "get_time"), "{body}");
    let auto = choice(&server, allowed("auto", "get_time")).await;
    let calls = auto["message"]["tool_calls"].as_array().unwrap();
    assert!(calls.len() == 1 && calls[0]["function"] == json!({"name": "get_time", "arguments": "{}"}), "{auto}");
    for (mode, name) in [("auto", "get_none"), ("sometimes", "get_time")] {
        let refused = server.chat(chat(allowed(mode, name))).await;
        assert_eq!((refused.status, refused.error().1), (StatusCode::BAD_REQUEST, json!("tool_choice")));
    }
}

/// A stop string may end an answer within a call, whose arguments are then nothing that can be read.
#[tokio::test]
async fn a_call_that_was_cut_short_is_not_said_to_be_one() {
    let server = server(CALLS);
    let cut = choice(&server, json!({"stop": "Gen"})).await;
    assert_eq!(cut["finish_reason"], "stop", "{cut}");
    let events = server.chat(chat(json!({"stop": "Gen", "stream": true}))).await.events();
    assert_eq!(joined(&events).2, "stop");
    // A model may leave out what closes the object around its arguments, and the tag.
    let open = self::server(CALLS.strip_suffix("}\n</tool_call>").unwrap());
    let left = choice(&open, json!({})).await;
    assert_eq!(
        (&left["finish_reason"], &left["message"]["tool_calls"][1]["function"]["arguments"]),
        (&json!("tool_calls"), &json!("{}")),
        "{left}"
    );
    let events = open.chat(chat(json!({"stream": true}))).await.events();
    assert_eq!(joined(&events).2, "tool_calls");
    // After it, it is one.
    let whole = choice(&server, json!({"stop": "get_time"})).await;
    assert_eq!(whole["finish_reason"], "tool_calls", "{whole}");
}

#[tokio::test]
async fn a_schema_that_is_none_is_found_among_the_tools() {
    let server = server(CALLS);
    let mut tools = tools();
    tools[1]["function"]["parameters"] = json!({"type": "zzz"});
    let refused = server.chat(chat(json!({"tools": tools, "tool_choice": "required"}))).await;
    let (message, param) = refused.error();
    assert_eq!((refused.status, param), (StatusCode::BAD_REQUEST, json!("tools[1].function.parameters")), "{message}");
    // What shows only on the way names its field as well.
    let endless = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}});
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "response_format": endless, "max_tokens": 9});
    let refused = server.chat(body).await;
    let (message, param) = refused.error();
    assert_eq!(
        (refused.status, param),
        (StatusCode::BAD_REQUEST, json!("response_format.json_schema.schema")),
        "{message}"
    );
    assert!(!message.contains("Bias"), "{message}");
}
