//! Text to tokens and back over HTTP.

mod support;

use axum::http::StatusCode;
use serde_json::{Value, json};
use support::server;

#[tokio::test]
async fn a_prompt_and_messages_are_the_tokens_that_a_request_has() {
    let server = server("x");
    let answer = server.post("/tokenize", json!({"model": "stub", "prompt": "hé"})).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let tokens = json!([104, 195, 169]);
    assert_eq!(answer.json(), json!({"count": 3, "max_model_len": 512, "token_strs": null, "tokens": tokens}));
    let named = server.post("/tokenize", json!({"prompt": "hi", "return_token_strs": true})).await.json();
    assert_eq!(named["token_strs"], json!(["h", "i"]));
    let attended = server.post("/tokenize", json!({"prompt": "hi", "attention": "quest", "epsilon": 0.1})).await;
    assert_eq!(attended.json()["tokens"], json!([104, 105]));
    let back = server.post("/detokenize", json!({"model": "stub", "tokens": tokens})).await;
    assert_eq!(back.json(), json!({"prompt": "hé"}));

    let messages = json!([{"role": "user", "content": "hi"}]);
    let chat = server.post("/tokenize", json!({"messages": messages})).await.json();
    let with = json!({"messages": messages, "add_special_tokens": true});
    assert_eq!(server.post("/tokenize", with).await.json(), chat, "the template says what stands before them");
    let asked = server.chat(json!({"messages": messages})).await.json();
    assert_eq!(chat["count"], asked["usage"]["prompt_tokens"]);
    // Not ready for an answer: without the assistant's opening.
    let turns = server.post("/tokenize", json!({"messages": messages, "add_generation_prompt": false})).await.json();
    let [ready, turns] = [&chat, &turns].map(|answer| answer["tokens"].as_array().unwrap());
    assert!(turns.len() <= ready.len() && ready[..turns.len()] == turns[..], "{turns:?} of {ready:?}");
    // An answer that goes on with the last message ends where its text does.
    let open = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So be"}]);
    let body = json!({"messages": open, "continue_final_message": true});
    let prompt = server.post("/tokenize", body.clone()).await.json();
    let text = server.post("/detokenize", json!({"tokens": prompt["tokens"]})).await.json();
    assert_eq!(text["prompt"], "<user>hi\n<assistant>So be");
    let asked = server.chat(body).await.json();
    assert_eq!(asked["usage"]["prompt_tokens"], prompt["count"]);
}

#[tokio::test]
async fn what_cannot_be_is_refused_with_its_field() {
    let server = server("x");
    let open = |role: &str, text: &str, ready: bool| json!({"messages": [{"role": role, "content": text}], "continue_final_message": true, "add_generation_prompt": ready});
    let cases: [(&str, Value, &str); 13] = [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 3}), "prompt"),
        ("/tokenize", json!({"prompt": "a", "messages": []}), "prompt"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/tokenize", json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        ("/tokenize", json!({"messages": [], "add_generation_prompt": 0}), "add_generation_prompt"),
        ("/tokenize", json!({"prompt": "a", "add_special_tokens": 1}), "add_special_tokens"),
        ("/tokenize", open("user", "So", false), "continue_final_message"),
        ("/tokenize", open("assistant", " \n", false), "continue_final_message"),
        ("/tokenize", open("assistant", "So", true), "continue_final_message"),
        ("/v1/completions", json!({"prompt": "a", "continue_final_message": true}), "continue_final_message"),
        ("/detokenize", json!({"tokens": "a"}), "tokens"),
        ("/detokenize", json!({"tokens": [1, 257]}), "tokens"),
    ];
    for (path, body, param) in cases {
        let answer = server.post(path, body.clone()).await;
        assert_eq!((answer.status, answer.error().1), (StatusCode::BAD_REQUEST, json!(param)), "{path} {body}");
    }
    assert_eq!(server.post("/detokenize", json!({"model": "other", "tokens": []})).await.status, StatusCode::NOT_FOUND);
}
