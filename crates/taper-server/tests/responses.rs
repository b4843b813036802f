//! `/v1/responses`: items in, items out, and the events between.

mod support;

use axum::http::StatusCode;
use serde_json::{Value, json};
use support::{Answer, Server, custom, server};
use taper_engine::EngineConfig;
use taper_engine::stub::StubBackend;
use taper_server::ServerConfig;

const CALLS: &str =
    "I look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Genève\"}}\n</tool_call>";

async fn ask(server: &Server, extra: Value) -> Answer {
    let mut body = json!({"model": "stub", "input": "hi", "temperature": 0});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    server.post("/v1/responses", body).await
}

async fn asked(server: &Server, extra: Value) -> Value {
    let answer = ask(server, extra).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    answer.json()
}

/// The events of a stream, each under its own name, in the order of their numbers.
fn events(answer: &Answer) -> Vec<Value> {
    assert!(answer.text.ends_with("\n\n"), "{}", answer.text);
    let parse = |(number, text): (usize, &str)| {
        let (name, data) = text.split_once('\n').expect("a name and data");
        let value: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(name.strip_prefix("event: "), value["type"].as_str());
        assert_eq!(value["sequence_number"], number);
        value
    };
    let events = answer.text.split_terminator("\n\n").filter(|text| !text.starts_with(':'));
    events.enumerate().map(parse).collect()
}

fn roomy(script: &str) -> Server {
    let mut backend = StubBackend::new(script);
    (backend.limits.context_tokens, backend.limits.cache_tokens) = (2048, 4096);
    custom(backend, EngineConfig::default(), ServerConfig::default())
}

#[tokio::test]
async fn a_response_in_one_piece() {
    let server = server("The sky is blue.");
    let response = asked(
        &server,
        json!({"instructions": "Be brief.", "max_output_tokens": 50, "metadata": {"a": "b"}, "store": true}),
    )
    .await;
    assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("completed")));
    assert!(response["id"].as_str().unwrap().starts_with("resp_"));
    let item = &response["output"][0];
    assert_eq!(
        (&item["type"], &item["role"], &item["status"]),
        (&json!("message"), &json!("assistant"), &json!("completed"))
    );
    assert_eq!(
        item["content"],
        json!([{"type": "output_text", "text": "The sky is blue.", "annotations": [], "logprobs": []}])
    );
    let usage = &response["usage"];
    assert_eq!(
        usage["total_tokens"].as_u64(),
        Some(usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap())
    );
    assert_eq!((&usage["output_tokens"], &usage["attention"]["decode"]["method"]), (&json!(17), &json!("dense")));
    for (field, value) in [
        ("instructions", json!("Be brief.")),
        ("max_output_tokens", json!(50)),
        ("metadata", json!({"a": "b"})),
        ("store", json!(false)),
    ] {
        assert_eq!(response[field], value, "{field}");
    }
    // The same prompt as the chat that it stands for.
    let chat = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]);
    let chat = server.chat(json!({"messages": chat, "temperature": 0})).await.json();
    assert_eq!(chat["usage"]["prompt_tokens"], usage["input_tokens"]);

    let cut = asked(&server, json!({"max_output_tokens": 7, "attention": {"decode": {"method": "quest"}}})).await;
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]),
        (&json!("incomplete"), &json!({"reason": "max_output_tokens"}))
    );
    assert_eq!(
        (&cut["output"][0]["content"][0]["text"], &cut["output"][0]["status"]),
        (&json!("The sky"), &json!("incomplete"))
    );
    assert_eq!(cut["usage"]["attention"]["decode"]["method"], "quest");
    // Null is as if it were not there, in what is said again as well.
    let nulls =
        json!({"tool_choice": null, "tools": null, "metadata": null, "parallel_tool_calls": null, "include": null});
    let again = asked(&server, nulls).await;
    assert_eq!(
        (&again["tool_choice"], &again["tools"], &again["metadata"], &again["parallel_tool_calls"]),
        (&json!("auto"), &json!([]), &json!({}), &json!(true))
    );
    let empty = asked(&self::server(""), json!({})).await;
    assert_eq!(empty["output"][0]["content"][0]["text"], "");
}

#[tokio::test]
async fn a_stream_tells_each_item_from_its_beginning_to_its_end() {
    let tools = json!([{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]);
    let server = roomy(CALLS);
    let whole = asked(&server, json!({"tools": tools})).await;
    let output = whole["output"].as_array().unwrap();
    assert_eq!(output.len(), 2);
    assert_eq!(output[0]["content"][0]["text"], "I look.\n");
    let call = &output[1];
    assert_eq!(
        (&call["type"], &call["name"], &call["arguments"]),
        (&json!("function_call"), &json!("get_weather"), &json!("{\"city\": \"Genève\"}"))
    );
    assert!(call["call_id"].as_str().unwrap().starts_with("call_"));

    let events = events(&ask(&server, json!({"tools": tools, "stream": true})).await);
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let joined = |kind: &str| {
        events.iter().filter(|e| e["type"] == kind).map(|e| e["delta"].as_str().unwrap()).collect::<String>()
    };
    assert_eq!(joined("response.output_text.delta"), "I look.\n");
    assert_eq!(joined("response.function_call_arguments.delta"), "{\"city\": \"Genève\"}");
    // Every event of an item names it, and the last one holds what was told.
    let last = &events[events.len() - 1]["response"];
    for event in events.iter().filter(|event| event.get("output_index").is_some()) {
        let item = &last["output"][event["output_index"].as_u64().unwrap() as usize];
        let named = event.get("item_id").unwrap_or(&event["item"]["id"]);
        assert_eq!(named, &item["id"], "{event}");
        if event["type"] == "response.output_item.done" {
            assert_eq!(&event["item"], item);
        }
    }
    let plain = |response: &Value| -> Vec<Value> {
        response["output"]
            .as_array()
            .unwrap()
            .iter()
            .map(|i| json!([i["content"], i["arguments"], i["name"]]))
            .collect()
    };
    assert_eq!((plain(last), &last["usage"]["output_tokens"]), (plain(&whole), &whole["usage"]["output_tokens"]));
}

#[tokio::test]
async fn log_probabilities_come_where_they_are_included() {
    // A character may take several tokens, of which the first have no text.
    let accents = server("Grüße 🙂");
    for stream in [false, true] {
        let answer =
            ask(&accents, json!({"top_logprobs": 0, "include": ["message.output_text.logprobs"], "stream": stream}))
                .await;
        let response = match stream {
            true => events(&answer).pop().unwrap()["response"].take(),
            false => answer.json(),
        };
        let part = &response["output"][0]["content"][0];
        let bytes = part["logprobs"].as_array().unwrap().iter().flat_map(|token| token["bytes"].as_array().unwrap());
        let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
        assert_eq!((part["text"].as_str(), String::from_utf8(bytes).as_deref()), (Some("Grüße 🙂"), Ok("Grüße 🙂")));
    }
    let server = server("The sky is blue.");
    for wanted in [json!({"include": ["message.output_text.logprobs"]}), json!({"top_logprobs": 2})] {
        let part = asked(&server, wanted.clone()).await["output"][0]["content"][0].clone();
        let tokens = part["logprobs"].as_array().unwrap();
        let text: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
        assert_eq!((text.as_str(), &part["text"]), ("The sky is blue.", &json!("The sky is blue.")));
        let top = wanted["top_logprobs"].as_u64().unwrap_or(0) as usize;
        assert!(tokens.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == top), "{part}");
        let mut stream = wanted.clone();
        stream["stream"] = json!(true);
        let events = events(&ask(&server, stream).await);
        let told: Vec<&Value> = events
            .iter()
            .filter(|event| event["type"] == "response.output_text.delta")
            .flat_map(|event| event["logprobs"].as_array().unwrap())
            .collect();
        assert_eq!(told, tokens.iter().collect::<Vec<_>>());
    }
    let stored =
        ask(&server, json!({"store": true, "truncation": "auto", "include": ["reasoning.encrypted_content"]})).await;
    assert_eq!(stored.headers["x-taper-ignored-fields"], "store, truncation, include");
}

#[tokio::test]
async fn a_conversation_comes_whole_with_calls_and_their_results() {
    let server = roomy("ok");
    let input = json!([
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_text", "text": "there"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"x\": 1}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"role": "user", "content": "and?"},
    ]);
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi\nthere"},
        {"role": "assistant", "tool_calls": [call("c1", "f", "{\"x\": 1}"), call("c2", "g", "{}")]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "and?"},
    ]);
    let chat = server.chat(json!({"messages": messages})).await.json();
    // Equal to the token, since the second finds the first one's in the cache or both count the same.
    assert_eq!(asked(&server, json!({"input": input})).await["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
}

#[tokio::test]
async fn what_was_said_before_a_call_is_of_the_same_turn() {
    let server = roomy("ok");
    let input = json!([
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": "two"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"role": "user", "content": "and?"},
    ]);
    let call =
        |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call("c1", "f"), call("c2", "g")]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "and?"},
    ]);
    let chat = server.chat(json!({"messages": messages})).await.json();
    // Of two turns there would be more.
    assert_eq!(asked(&server, json!({"input": input})).await["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    // Beside another's words a call begins a turn.
    let input = json!([{"role": "user", "content": "hi"}, {"type": "function_call", "name": "f", "arguments": "{}"}]);
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [
        {"id": null, "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]);
    let chat = server.chat(json!({"messages": messages})).await.json();
    assert_eq!(asked(&server, json!({"input": input})).await["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
}

#[tokio::test]
async fn numbers_come_back_as_they_were_written() {
    let server = server("ok");
    let answer = ask(&server, json!({"temperature": 0.7, "top_p": 0.95, "max_output_tokens": 1})).await;
    assert!(answer.text.contains("\"temperature\":0.7,"), "{}", answer.text);
    assert!(answer.text.contains("\"top_p\":0.95,") || answer.text.contains("\"top_p\":0.95}"), "{}", answer.text);
}

#[tokio::test]
async fn text_and_tools_are_held_to_schemas() {
    let server = roomy("~~ no");
    let schema = json!({"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": false});
    let format = json!({"format": {"type": "json_schema", "name": "x", "strict": true, "schema": schema}});
    let response = asked(&server, json!({"text": format, "temperature": 2, "max_output_tokens": 300})).await;
    assert_eq!(response["text"], format);
    let text: Value = serde_json::from_str(response["output"][0]["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(text == json!({"x": 1}) || text == json!({"x": 2}), "{text}");
    let tools = json!([{"type": "function", "name": "f", "parameters": schema, "strict": true}]);
    for choice in [json!("required"), json!({"type": "function", "name": "f"})] {
        let response =
            asked(&server, json!({"tools": tools, "tool_choice": choice, "temperature": 2, "max_output_tokens": 1000}))
                .await;
        assert_eq!((&response["output"][0]["type"], &response["tool_choice"]), (&json!("function_call"), &choice));
    }
}

#[tokio::test]
async fn a_call_that_is_asked_for_and_cut_short_is_no_message() {
    let server = roomy(CALLS);
    let tools = json!([{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]);
    let forced = |most: usize| json!({"tools": tools, "tool_choice": "required", "max_output_tokens": most});
    let none = asked(&server, forced(8)).await;
    assert_eq!((&none["output"], &none["status"]), (&json!([]), &json!("incomplete")), "{none}");
    let mut stream = forced(8);
    stream["stream"] = json!(true);
    let events = events(&ask(&server, stream).await);
    assert!(events.iter().all(|event| event.get("delta").is_none()), "{events:?}");
    // A call that is whole is complete, whatever was to follow.
    let one = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {}}\n</tool_call>";
    let server = roomy(&format!("{one}\n{one}"));
    // What closes its object and its tag a model may leave out.
    for (most, status) in [(one.len() - 15, "incomplete"), (one.len() - 14, "completed"), (one.len() + 20, "completed")]
    {
        let cut = asked(&server, forced(most)).await;
        let output = cut["output"].as_array().unwrap();
        assert_eq!(
            (output.len(), &output[0]["status"], &cut["status"]),
            (1, &json!(status), &json!("incomplete")),
            "{cut}"
        );
    }
}

#[tokio::test]
async fn what_cannot_be_is_refused_in_this_requests_words() {
    let server = server("x");
    for (extra, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [1]}), "input[0]"),
        (json!({"input": [{"type": "image"}]}), "input[0].type"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input[0].content[0]"),
        (json!({"input": [{"role": "user"}]}), "input[0].content"),
        (json!({"input": [{"role": "odd", "content": "x"}]}), "input"),
        // Items are counted, not what they become in a chat.
        (json!({"instructions": "Be brief.", "input": [{"role": "", "content": "x"}]}), "input[0].role"),
        (json!({"instructions": "Be brief.", "input": [{"content": "x"}]}), "input[0].role"),
        (json!({"input": [{"type": "reasoning"}, {"type": "function_call", "arguments": "{}"}]}), "input[1].name"),
        (json!({"input": [{"type": "function_call", "name": "f", "arguments": 1}]}), "input[0].arguments"),
        (json!({"input": [{"type": "function_call", "name": "f", "call_id": 1}]}), "input[0].call_id"),
        (json!({"input": [{"type": "function_call_output", "output": "x", "call_id": 1}]}), "input[0].call_id"),
        (json!({"input": "x".repeat(600)}), "input"),
        (json!({"instructions": 1}), "instructions"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"max_output_tokens": 5000}), "max_output_tokens"),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"background": true}), "background"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].name"),
        (json!({"tools": [{"type": "function", "name": "f", "parameters": 1}]}), "tools[0].parameters"),
        (json!({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function"}}), "tool_choice"),
        (json!({"n": 2}), "n"),
        (json!({"store": 1}), "store"),
        (json!({"truncation": "never"}), "truncation"),
        (json!({"max_tokens": 3}), "max_tokens"),
        (json!({"text": {"formt": {"type": "json_object"}}}), "text.formt"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema", "name": "x"}}}), "text.format.schema"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"epsilonn": 3}), "epsilonn"),
    ] {
        let answer = ask(&server, extra.clone()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{extra}: {}", answer.text);
        let (message, named) = answer.error();
        assert_eq!(named, param, "{extra}: {message}");
        assert!(
            !message.contains("messages") && !message.contains(".function") && !message.contains("response_format"),
            "{message}"
        );
    }
    let fails = |prompt: &str, stream: bool| json!({"input": prompt, "stream": stream, "max_output_tokens": 9, "ignore_eos": true});
    assert_eq!(ask(&server, fails("NIL", true)).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(ask(&server, fails("NAN", false)).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    let events = events(&ask(&server, fails("NAN", true)).await);
    let last = &events[events.len() - 1];
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert!(last["response"]["error"]["message"].as_str().unwrap().contains("not finite"), "{last}");
}

#[tokio::test]
async fn a_stream_that_fails_ends_with_what_there_was() {
    // The third token fails.
    let failed = |script: &'static str, tools: Value| async move {
        let extra = json!({"input": "NAN", "stream": true, "tools": tools});
        events(&ask(&roomy(script), extra).await)
    };
    let told = failed("The sky", json!([])).await;
    let last = &told[told.len() - 1]["response"];
    let output = last["output"].as_array().unwrap();
    assert_eq!((output.len(), &last["status"], &last["usage"]), (1, &json!("failed"), &Value::Null), "{last}");
    assert_eq!((&output[0]["status"], &output[0]["content"][0]["text"]), (&json!("incomplete"), &json!("Th")));
    let kinds: Vec<&str> = told.iter().rev().take(4).map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(
        kinds,
        ["response.failed", "response.output_item.done", "response.content_part.done", "response.output_text.done"]
    );
    assert_eq!(told[told.len() - 2]["item"], output[0]);
    // Nothing was told of what may become a call.
    let tools = json!([{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]);
    let told = failed("<tool_call>", tools).await;
    assert_eq!(told[told.len() - 1]["response"]["output"], json!([]));
}
