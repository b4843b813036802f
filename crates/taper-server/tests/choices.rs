//! Which answers come back, when, how long they may be and what they may hold: `best_of`, `n`, `echo` with `logprobs`,
//! `allowed_token_ids`, `bad_words`, `priority`.

mod support;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use support::{Answer, complete, custom, server, wait};
use taper_engine::EngineConfig;
use taper_engine::stub::StubBackend;
use taper_server::ServerConfig;

fn texts(answer: &Answer) -> Vec<String> {
    assert_eq!(answer.status, 200, "{}", answer.text);
    let answer = answer.json();
    answer["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap().to_string()).collect()
}

/// A choice's `logprobs` as (token, log probability, offset, number of the most probable).
fn tokens(logprobs: &Value) -> Vec<(String, Option<f64>, usize, Option<usize>)> {
    let list = |name: &str| logprobs[name].as_array().unwrap().clone();
    let (tokens, own, top, offsets) =
        (list("tokens"), list("token_logprobs"), list("top_logprobs"), list("text_offset"));
    assert!([own.len(), top.len(), offsets.len()].iter().all(|len| *len == tokens.len()), "{logprobs}");
    let row = |i: usize| {
        let offset = offsets[i].as_u64().unwrap() as usize;
        (tokens[i].as_str().unwrap().into(), own[i].as_f64(), offset, top[i].as_object().map(|top| top.len()))
    };
    (0..tokens.len()).map(row).collect()
}

#[tokio::test]
async fn an_echoed_prompt_has_its_log_probabilities_before_the_answers() {
    let server = server("yz");
    let ask = json!({"prompt": "aab€", "echo": true, "logprobs": 2, "max_tokens": 2, "temperature": 0, "n": 2});
    let answer = server.complete(ask.clone()).await.json();
    assert_eq!(answer["usage"]["prompt_tokens"], 6);
    assert_eq!(answer["usage"]["completion_tokens"], 4);
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], "aab€yz");
        let tokens = tokens(&choice["logprobs"]);
        let offsets: Vec<usize> = tokens.iter().map(|(_, _, offset, _)| *offset).collect();
        assert_eq!(offsets, [0, 1, 2, 3, 3, 3, 4, 5], "characters, of which three bytes make one");
        assert_eq!((tokens[0].0.as_str(), tokens[0].1, tokens[0].3), ("a", None, None), "it comes after nothing");
        assert!(
            tokens[1..]
                .iter()
                .all(|(_, logprob, _, top)| logprob.is_some() && top.is_some_and(|top| (2..=3).contains(&top))),
            "{tokens:?}"
        );
        // The stub expects each token of a prompt once more.
        let likely: Vec<bool> = tokens[1..].iter().map(|(_, logprob, ..)| logprob.unwrap() > -0.1).collect();
        assert_eq!(likely, [true, false, false, false, false, true, true]);
    }
    // The same as a stream.
    let mut streamed = ask.clone();
    streamed["stream"] = json!(true);
    let events = server.complete(streamed).await.events();
    for index in 0..2 {
        let own: Vec<&Value> = events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == index).collect();
        let text: String = own.iter().map(|c| c["text"].as_str().unwrap()).collect();
        assert_eq!(text, "aab€yz");
        let told = own.iter().filter(|c| !c["logprobs"].is_null());
        let told: Vec<_> = told.flat_map(|c| tokens(&c["logprobs"])).collect();
        assert_eq!(told, tokens(&answer["choices"][index]["logprobs"]));
    }
}

#[tokio::test]
async fn a_prompt_alone_may_be_wanted_back() {
    let server = server("yz");
    let ask = json!({"prompt": ["ab", [99, 100]], "echo": true, "logprobs": 0, "max_tokens": 0});
    let answer = server.complete(ask).await;
    assert_eq!(texts(&answer), ["ab", "cd"]);
    let answer = answer.json();
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!((choice["finish_reason"].as_str(), tokens(&choice["logprobs"]).len()), (Some("length"), 2));
    }
    // A special token has a place where it is shown.
    for (shown, text, offsets) in [(true, "a<eos>b", json!([0, 1, 6])), (false, "ab", json!([0, 1, 1]))] {
        let ask = json!({"prompt": [97, 256, 98], "echo": true, "logprobs": 0, "max_tokens": 0, "skip_special_tokens": !shown});
        let choice = server.complete(ask).await.json()["choices"][0].take();
        assert_eq!((&choice["text"], &choice["logprobs"]["text_offset"]), (&json!(text), &offsets));
    }
    // Nothing comes after it, so that it may be as long as the context.
    let ask = |length| json!({"prompt": "p".repeat(length), "echo": true, "logprobs": 0, "max_tokens": 0, "n": 2});
    let whole = server.complete(ask(512)).await.json();
    assert_eq!(whole["choices"][1]["logprobs"]["token_logprobs"].as_array().unwrap().len(), 512);
    assert_eq!(
        (&whole["choices"][1]["finish_reason"], &whole["usage"]["completion_tokens"]),
        (&json!("length"), &json!(0))
    );
    let refused = server.complete(ask(513)).await;
    assert_eq!((refused.status.as_u16(), refused.error().1), (400, json!("prompt")));
    let plain = server.complete(json!({"prompt": "ab", "echo": true, "max_tokens": 0, "stream": true})).await;
    let text: String = plain.events().iter().map(|e| e["choices"][0]["text"].as_str().unwrap().to_string()).collect();
    assert_eq!(text, "ab");
    let many = json!({"prompt": vec!["p".repeat(400); 4], "echo": true, "logprobs": 20, "n": 32, "max_tokens": 1});
    let refused = server.complete(many).await;
    assert_eq!((refused.status.as_u16(), refused.error().1), (400, json!("echo")), "a million log probabilities");
    for (bytes, n, param) in [(1 << 20, 32, "prompt"), ((1 << 20) + 1, 32, "echo")] {
        // What may be echoed is still too long for the model.
        let refused = server.complete(json!({"prompt": "p".repeat(bytes), "echo": true, "n": n})).await;
        assert_eq!((refused.status.as_u16(), refused.error().1), (400, json!(param)), "{}", refused.text);
        if param == "echo" {
            let says = "echo: bytes of the prompts, times n, may be at most 33554432; here they are 33554464";
            assert_eq!(refused.error().0, says);
        }
    }
    let refused = server.complete(json!({"prompt": "ab", "max_tokens": 0})).await;
    assert_eq!((refused.status.as_u16(), refused.error().1), (400, json!("max_tokens")));
}

/// Each choice draws by numbers of its own, and all of them follow from the seed that each reports.
#[tokio::test]
async fn every_choice_reports_the_seed_that_draws_all_of_them_again() {
    let server = server("some words to say");
    let ask = |seed: i64| json!({"prompt": "p", "n": 3, "temperature": 2, "seed": seed, "max_tokens": 12, "ignore_eos": true});
    let first = server.complete(ask(i64::MIN)).await.json();
    let reported: Vec<&Value> = first["usage"]["attention"]["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| &choice["decode"]["seed"])
        .collect();
    assert_eq!(reported, [&json!(i64::MIN); 3]);
    let again = server.complete(ask(i64::MIN)).await.json();
    assert_eq!(again["choices"], first["choices"]);
}

/// Without a seed each prompt draws by one of its own, with one all by that.
#[tokio::test]
async fn equal_prompts_have_answers_of_their_own_unless_a_seed_is_given() {
    let server = server("some words to say");
    let ask = async |seed: Value| {
        let body = json!({"prompt": ["p", "p", "p", "p"], "temperature": 2, "seed": seed, "max_tokens": 12, "ignore_eos": true});
        let choices = server.complete(body).await.json()["choices"].as_array().unwrap().clone();
        choices.iter().map(|choice| choice["text"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(ask(json!(7)).await, vec![ask(json!(7)).await[0].clone(); 4]);
    for none in [json!(null), json!(-1)] {
        let drawn: HashSet<String> = ask(none.clone()).await.into_iter().chain(ask(none).await).collect();
        assert!(drawn.len() > 2, "{drawn:?}");
    }
}

#[tokio::test]
async fn the_best_of_many_answers_come_first() {
    let server = server("script");
    let ask = |more: Value| {
        let mut ask = json!({"prompt": ["p", "q"], "temperature": 2, "seed": 3, "max_tokens": 12, "attention": {"decode": {"method": "quest"}}});
        ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ask
    };
    let all = server.complete(ask(json!({"n": 8, "logprobs": 0}))).await.json();
    let own = |choice: &Value| -> Vec<f64> {
        tokens(&choice["logprobs"]).into_iter().map(|(_, logprob, ..)| logprob.unwrap()).collect()
    };
    let mean = |choice: &Value| match own(choice) {
        own if own.is_empty() => f64::NEG_INFINITY,
        own => own.iter().sum::<f64>() / own.len() as f64,
    };
    let best = |of: &[Value]| {
        let mut all: Vec<&Value> = of.iter().collect();
        all.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        all.into_iter().take(3).map(|choice| choice["text"].as_str().unwrap().to_string()).collect::<Vec<_>>()
    };
    let all = all["choices"].as_array().unwrap();
    let lengths: Vec<usize> = all.iter().map(|choice| own(choice).len()).collect();
    assert!(lengths.iter().any(|len| *len != lengths[0]), "a sum would do as well: {lengths:?}");
    let expected = [best(&all[..8]), best(&all[8..])].concat();
    let answer = server.complete(ask(json!({"n": 3, "best_of": 8}))).await;
    assert_eq!(texts(&answer), expected);
    let answer = answer.json();
    assert!(answer["choices"].as_array().unwrap().iter().all(|choice| choice["logprobs"].is_null()));
    assert_eq!(answer["choices"][5]["index"], 5);
    assert_eq!(answer["usage"]["attention"]["choices"].as_array().unwrap().len(), 6, "of those that are kept");
    let drawn: usize = all.iter().map(|choice| tokens(&choice["logprobs"]).len()).sum();
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() as usize >= drawn, "those not kept cost as much");
    for (more, why) in [
        (json!({"n": 3, "best_of": 2}), "best_of is 2, fewer than the n = 3 answers wanted"),
        (json!({"best_of": 2, "stream": true}), "cannot be streamed"),
        (json!({"best_of": 33}), "[1, 32]"),
    ] {
        let refused = server.complete(ask(more)).await;
        let (message, param) = refused.error();
        assert!(refused.status == 400 && param == "best_of" && message.contains(why), "{message}");
    }
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "best_of": 2});
    assert_eq!(server.chat(chat).await.error().1, "best_of", "a chat has none");
}

#[tokio::test]
async fn only_allowed_tokens_come_and_no_bad_word() {
    let server = server("hello hell");
    let ask = |more: Value| {
        let mut ask = json!({"prompt": "p", "temperature": 0, "max_tokens": 10});
        ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ask
    };
    assert_eq!(texts(&server.complete(ask(json!({"allowed_token_ids": [120]}))).await), ["xxxxxxxxxx"]);
    assert_eq!(texts(&server.complete(ask(json!({"bad_words": []}))).await), ["hello hell"]);
    let text = texts(&server.complete(ask(json!({"bad_words": ["  hell", "o"]}))).await).remove(0);
    assert!(!text.contains("hell") && !text.contains('o') && text.starts_with("hel"), "{text:?}");
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "allowed_token_ids": [104, 105], "max_tokens": 3,
        "temperature": 0, "priority": 3});
    assert_eq!(server.chat(chat).await.json()["choices"][0]["message"]["content"], "hhh");
    for (param, value) in [
        ("allowed_token_ids", json!([])),
        ("allowed_token_ids", json!(["a"])),
        ("allowed_token_ids", json!([9999])),
        ("bad_words", json!([""])),
        ("bad_words", json!("word")),
        ("bad_words", json!(vec!["w"; 1001])),
        ("priority", json!("high")),
        ("priority", json!(0.5)),
        ("priority", json!(-1)),
        ("bad_words", json!(["w".repeat(201)])),
    ] {
        let refused = server.complete(ask(json!({param: value}))).await;
        assert_eq!((refused.status.as_u16(), refused.error().1), (400, json!(param)), "{value}");
    }
    let nothing = server.complete(ask(json!({"allowed_token_ids": [104], "bad_words": ["h"]}))).await;
    assert_eq!(nothing.status, 400);
    assert!(nothing.error().0.contains("no token may come next"), "{}", nothing.text);
}

/// With one place, who waits for it goes by priority and not by when they came.
#[tokio::test]
async fn the_urgent_go_first() {
    let config = EngineConfig { sequences: 1, ..EngineConfig::default() };
    let server =
        custom(StubBackend::new("hello"), config, ServerConfig { least_priority: -10, ..ServerConfig::default() });
    let ask = |prompt: &str, priority: Value| server.complete(json!({"prompt": prompt, "priority": priority}));
    let said = |prompt: &str, priority: &str| {
        let body = Body::from(json!({"prompt": prompt, "priority": 9}).to_string());
        let request = Request::post("/v1/completions").header("x-vllm-priority", priority);
        server.send(request.body(body).unwrap())
    };
    server.probe.hang.store(true, Ordering::SeqCst);
    let first = ask("HANG HANG", json!(null));
    let others = async {
        wait("the first one runs", || server.engine.load().running == 1).await;
        let late = ask("12345", json!(5));
        let soon = async {
            wait("one waits", || server.engine.load().waiting == 1).await;
            // A gateway's header goes over the body's field.
            tokio::join!(said("1234567", "-10"), ask("123456", json!(0)))
        };
        let all = async {
            wait("all wait", || server.engine.load().waiting == 3).await;
            server.probe.hang.store(false, Ordering::SeqCst);
        };
        tokio::join!(late, soon, all)
    };
    tokio::join!(first, others);
    assert_eq!(*server.probe.prefilled.lock().unwrap(), [9, 7, 6, 5]);
    let refused = ask("1", json!(-11)).await;
    assert_eq!((refused.status.as_u16(), refused.error().1), (400, json!("priority")));
    for wrong in ["-11", "soon", "1.5", ""] {
        let (message, param) = said("1", wrong).await.error();
        assert!(message.contains("x-vllm-priority must be an integer of at least -10") && param.is_null(), "{message}");
    }
}

#[tokio::test]
async fn marks_are_added_to_a_text_unless_they_are_not_wanted() {
    let server = server("hello");
    for (path, field) in [("/v1/completions", "prompt"), ("/v1/embeddings", "input"), ("/tokenize", "prompt")] {
        for (wanted, tokens) in [(json!(null), 7), (json!(true), 7), (json!(false), 6)] {
            let answer = server.post(path, json!({field: "MARKED", "add_special_tokens": wanted})).await.json();
            let found = if path == "/tokenize" { &answer["count"] } else { &answer["usage"]["prompt_tokens"] };
            assert_eq!(found, tokens, "{path}: {answer}");
        }
    }
}

#[tokio::test]
async fn few_answers_are_traced_and_each_trace_is_said_once() {
    let server = server("hello");
    let ask = |n: usize, prompts: usize| json!({"prompt": vec!["p"; prompts], "n": n, "max_tokens": 2, "attention": {"trace": true}});
    for (n, prompts) in [(1, 1), (4, 1), (2, 2)] {
        let answer = server.complete(ask(n, prompts)).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        assert_eq!(answer.text.matches("\"trace\"").count(), n * prompts, "{}", answer.text);
    }
    for (n, prompts) in [(5, 1), (1, 5), (3, 2)] {
        let refused = server.complete(ask(n, prompts)).await;
        assert_eq!((refused.status.as_u16(), refused.error().1), (400, json!("attention.trace")));
    }
}

#[tokio::test]
async fn the_default_length_never_makes_a_prompt_too_long() {
    let body = complete(json!({"prompt": "p".repeat(505)}));
    let answer = server("abcdefghijklmnopqrstuvwxyz").complete(body).await.json();
    assert_eq!(answer["usage"]["completion_tokens"], 7);
    // Of two prompts the shorter may have less room: its last block is begun, and each answer has a copy.
    let mut backend = StubBackend::new("abcdefghijklmnopqrstuvwxyz");
    backend.limits.cache_tokens = 9 * 64;
    let server = custom(backend, EngineConfig::default(), ServerConfig::default());
    let body = complete(json!({"prompt": ["p".repeat(447), "p".repeat(448)], "n": 2}));
    let answer = server.complete(body).await.json();
    assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");
}

#[tokio::test]
async fn a_request_too_large_for_the_cache_names_what_makes_it_so() {
    let mut backend = StubBackend::new("x");
    backend.limits.cache_tokens = 256;
    let server = custom(backend, EngineConfig::default(), ServerConfig::default());
    for (length, extra, param) in [
        (300, json!({}), "prompt"),
        (256, json!({"max_tokens": 1}), "prompt"),
        (100, json!({"n": 4}), "n"),
        (100, json!({"n": 4, "max_tokens": 2}), "n"),
        (100, json!({"n": 2, "max_tokens": 100}), "max_tokens"),
        (100, json!({"max_completion_tokens": 200}), "max_completion_tokens"),
    ] {
        let mut body = complete(extra.clone());
        body["prompt"] = json!("p".repeat(length));
        let answer = server.complete(body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{extra}");
        let (message, at) = answer.error();
        assert_eq!(at, param, "{length} {extra}: {message}");
        assert!(message.contains("256 tokens") && message.contains(&format!("a prompt of {length}")), "{message}");
    }
    let chat = server.chat(json!({"messages": [{"role": "user", "content": "hi"}], "n": 5})).await;
    assert_eq!(chat.error().1, "n", "{}", chat.text);
    // The prompt's whole block once, and one for each answer.
    let shared = server.complete(complete(json!({"prompt": "p".repeat(100), "n": 3, "ignore_eos": true}))).await;
    assert_eq!(shared.json()["usage"]["completion_tokens"], 3 * 16, "{}", shared.text);
    let fits = server.complete(complete(json!({"prompt": "p".repeat(250), "ignore_eos": true}))).await;
    assert_eq!(fits.json()["usage"]["completion_tokens"], 6, "the default length shrinks: {}", fits.text);
}
