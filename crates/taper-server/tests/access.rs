//! Who may ask, and how much: keys and their limits, what may change while the server runs, and web pages elsewhere.

mod support;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{Answer, Server, custom};
use taper_attention::{Artifacts, AttentionSpec};
use taper_engine::EngineConfig;
use taper_engine::stub::StubBackend;
use taper_server::{Keys, Live, Origins, Presets, ServerConfig};
use tower::ServiceExt;

fn chat() -> Value {
    json!({"model": "stub", "messages": [{"role": "user", "content": "hi"}], "temperature": 0})
}

fn complete() -> Value {
    json!({"model": "stub", "prompt": "hi", "temperature": 0})
}

fn with_keys(text: &str) -> ServerConfig {
    let live = Live::new(AttentionSpec::default(), Presets::new(), Keys::parse(text).unwrap());
    ServerConfig { live: live.into(), ..ServerConfig::default() }
}

/// A request of a key's.
fn of(key: &str, path: &str, body: Option<Value>) -> Request<Body> {
    let request = Request::builder().uri(path).header("authorization", format!("Bearer {key}"));
    match body {
        Some(body) => request.method("POST").body(Body::from(body.to_string())).unwrap(),
        None => request.body(Body::empty()).unwrap(),
    }
}

#[tokio::test]
async fn nobody_without_a_key_comes_in() {
    let server = custom(StubBackend::new("ok"), EngineConfig::default(), with_keys("[[keys]]\nname = 'a'\nkey = 'k'"));
    for path in ["/health", "/ready", "/version"] {
        assert_eq!(server.get(path).await.status, StatusCode::OK, "{path}");
    }
    for path in ["/v1/models", "/v1/attention/methods", "/v1/nothing"] {
        let refused = server.get(path).await;
        assert_eq!(refused.status, StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(refused.headers["www-authenticate"], "Bearer");
        assert!(refused.headers.contains_key("x-request-id"));
        assert_eq!(refused.error().0, "this server wants an API key: `Authorization: Bearer KEY`");
        assert_eq!(refused.json()["error"]["type"], "Unauthorized");
    }
    let wrong = server.send(of("l", "/v1/chat/completions", Some(chat()))).await;
    assert_eq!((wrong.status, wrong.error().0.as_str()), (StatusCode::UNAUTHORIZED, "the API key is not known here"));
    let right = server.send(of("k", "/v1/chat/completions", Some(chat()))).await;
    assert_eq!(right.json()["choices"][0]["message"]["content"], "ok");
    assert_eq!(server.send(of("k", "/v1/models", None)).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_key_over_its_limit_is_told_and_others_are_not() {
    let keys = "[[keys]]\nname = 'a'\nkey = 'k'\nrequests = 1\n[[keys]]\nname = 'b'\nkey = 'l'\n\
                [[keys]]\nname = 'c'\nkey = 'm'\nrequests_per_minute = 2";
    let server = custom(StubBackend::new("a long answer"), EngineConfig::default(), with_keys(keys));
    let slow = json!({"model": "stub", "prompt": "SLOW", "temperature": 0, "stream": true, "max_tokens": 400,
        "ignore_eos": true});
    let ask = |key: &'static str| server.send(of(key, "/v1/completions", Some(complete())));
    let first = server.router.clone().oneshot(of("k", "/v1/completions", Some(slow))).await.unwrap();
    assert_eq!(first.status(), StatusCode::OK);
    let second = ask("k").await;
    assert_eq!(second.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(second.headers["retry-after"], "1");
    assert_eq!(second.error().0, "too many requests of a's key at once: the limit is 1");
    assert_eq!(server.send(of("k", "/v1/models", None)).await.status, StatusCode::OK, "to look is free");
    assert_eq!(ask("l").await.status, StatusCode::OK);
    // The place is free again once the client has gone.
    drop(first);
    assert_eq!(ask("k").await.status, StatusCode::OK);
    assert_eq!(ask("k").await.status, StatusCode::OK, "an answer that was sent takes no place");
    for _ in 0..2 {
        assert_eq!(ask("m").await.status, StatusCode::OK);
    }
    let third = ask("m").await;
    assert_eq!(third.status, StatusCode::TOO_MANY_REQUESTS);
    let seconds: u64 = third.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=30).contains(&seconds), "{seconds}");
    assert_eq!(third.error().0, "too many requests of c's key in a minute: the limit is 2");
}

#[tokio::test]
async fn a_key_has_its_place_back_once_nothing_is_done_for_it() {
    let keys = "[[keys]]\nname = 'a'\nkey = 'k'\nrequests = 1";
    let server = custom(StubBackend::new("ok"), EngineConfig::default(), with_keys(keys));
    // Millions of numbers, which take a while to read.
    let body = format!("{{\"prompt\": [1{}]}}", ",1".repeat(3_000_000));
    let large = Request::post("/v1/completions").header("authorization", "Bearer k").body(Body::from(body)).unwrap();
    let left = tokio::time::timeout(Duration::from_millis(20), server.send(large)).await;
    assert!(left.is_err(), "it was not that long");
    let ask = || server.send(of("k", "/v1/completions", Some(complete())));
    assert_eq!(ask().await.status, StatusCode::TOO_MANY_REQUESTS, "the client has gone, its body is still read");
    let start = Instant::now();
    while ask().await.status == StatusCode::TOO_MANY_REQUESTS {
        assert!(start.elapsed() < Duration::from_secs(60), "waited in vain");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(ask().await.status, StatusCode::OK);
}

#[tokio::test]
async fn prompts_are_shared_by_keys_of_one_word_and_requests_of_one_salt() {
    let keys = "[[keys]]\nname = 'a'\nkey = 'k'\n[[keys]]\nname = 'b'\nkey = 'l'\nshares = 'team'\n\
                [[keys]]\nname = 'c'\nkey = 'm'\nshares = 'team'";
    let server = custom(StubBackend::new("ok"), EngineConfig::default(), with_keys(keys));
    let open = custom(StubBackend::new("ok"), EngineConfig::default(), ServerConfig::default());
    for (path, body) in [
        ("/v1/chat/completions", chat()),
        ("/v1/completions", complete()),
        ("/v1/responses", json!({"input": "hi"})),
        ("/v1/embeddings", json!({"input": "hi"})),
    ] {
        let salt = async |server: &Server, key: &str, salt: Option<&str>| {
            let mut body = body.clone();
            body["cache_salt"] = json!(salt);
            let answer = server.send(of(key, path, Some(body))).await;
            assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.text);
            assert!(!answer.headers.contains_key("x-taper-ignored-fields"), "{path}");
            server.probe.salt.lock().unwrap().clone()
        };
        assert_eq!(salt(&server, "l", None).await, salt(&server, "m", None).await, "{path}");
        assert_eq!(salt(&server, "l", Some("s")).await, salt(&server, "m", Some("s")).await, "{path}");
        assert_eq!(salt(&open, "", None).await, "", "{path}");
        let mut all = Vec::new();
        for own in [None, Some("s"), Some("t")] {
            all.extend([salt(&server, "k", own).await, salt(&server, "l", own).await, salt(&open, "", own).await]);
        }
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 9, "{path}: {all:?}");
    }
}

#[tokio::test]
async fn keys_and_attention_change_while_the_server_runs() {
    let text = "[[keys]]\nname = 'a'\nkey = 'k'\nrequests_per_minute = 2\n[[keys]]\nname = 'b'\nkey = 'l'";
    let config = with_keys(text);
    let live = Arc::clone(&config.live);
    let server = custom(StubBackend::new("ok"), EngineConfig::default(), config);
    let ask = |key: &'static str| server.send(of(key, "/v1/completions", Some(complete())));
    let decode = |answer: &Answer| answer.json()["usage"]["attention"]["decode"]["method"].clone();
    assert_eq!(decode(&ask("k").await), "dense");
    assert_eq!((ask("l").await.status, ask("m").await.status), (StatusCode::OK, StatusCode::UNAUTHORIZED));

    let spec = json!({"decode": {"method": "streaming_llm"}});
    let spec = || AttentionSpec::from_json(&spec, "attention", &Artifacts::default()).unwrap();
    let text = "[[keys]]\nname = 'a'\nkey = 'k'\nrequests_per_minute = 2\n[[keys]]\nname = 'c'\nkey = 'm'";
    live.set(spec(), Presets::new(), Keys::parse(text).unwrap());
    assert_eq!((ask("l").await.status, ask("m").await.status), (StatusCode::UNAUTHORIZED, StatusCode::OK));
    assert_eq!(decode(&ask("k").await), "streaming_llm");
    assert_eq!(ask("k").await.status, StatusCode::TOO_MANY_REQUESTS, "one was used up before");
    // Other limits begin anew.
    live.set(spec(), Presets::new(), Keys::parse(&text.replace("= 2", "= 3")).unwrap());
    assert_eq!(ask("k").await.status, StatusCode::OK);
}

/// What a browser hears on behalf of a page of this origin: before it asks, and when it does.
async fn page(server: &Server, origin: &str) -> (Answer, Answer) {
    let request = || Request::builder().uri("/v1/completions").header("origin", origin);
    let before = request()
        .method("OPTIONS")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type,x-stainless-os");
    let before = server.send(before.body(Body::empty()).unwrap()).await;
    let ask = request().method("POST").header("authorization", "Bearer k");
    (before, server.send(ask.body(Body::from(complete().to_string())).unwrap()).await)
}

#[tokio::test]
async fn pages_elsewhere_may_ask_only_where_the_server_says_so() {
    let origin = "https://example.com";
    let with = |origins| {
        let config = ServerConfig { origins, ..with_keys("[[keys]]\nname = 'a'\nkey = 'k'") };
        custom(StubBackend::new("ok"), EngineConfig::default(), config)
    };
    let allowed =
        |answer: &Answer| answer.headers.get("access-control-allow-origin").map(|v| v.to_str().unwrap().to_string());
    let (before, ask) = page(&with(Origins::None), origin).await;
    assert_eq!((allowed(&before), allowed(&ask), ask.status), (None, None, StatusCode::OK));
    for (origins, value) in
        [(Origins::Any, "*"), (Origins::These(vec![origin.into(), "http://localhost:3000".into()]), origin)]
    {
        let server = with(origins.clone());
        let (before, ask) = page(&server, origin).await;
        assert_eq!(before.status, StatusCode::OK, "without a key");
        assert_eq!((allowed(&before).as_deref(), allowed(&ask).as_deref()), (Some(value), Some(value)));
        let headers = before.headers["access-control-allow-headers"].to_str().unwrap();
        assert!(headers.contains("authorization") && headers.contains("x-stainless-os"), "{headers}");
        let shown = ask.headers["access-control-expose-headers"].to_str().unwrap();
        assert!(shown.contains("x-request-id") && shown.contains("x-should-retry"), "{shown}");
        let (before, ask) = page(&server, "https://elsewhere.com").await;
        let any = (origins == Origins::Any).then(|| "*".to_string());
        assert_eq!((allowed(&before), allowed(&ask)), (any.clone(), any));
        // A page without a key is refused like anyone else, and may read why.
        let refused = Request::post("/v1/completions").header("origin", origin).body(Body::empty()).unwrap();
        let refused = server.send(refused).await;
        assert_eq!((refused.status, allowed(&refused).as_deref()), (StatusCode::UNAUTHORIZED, Some(value)));
    }
}

/// By name, under the short forms; what is called so may change.
#[tokio::test]
async fn attention_may_be_a_presets_name() {
    let spec = |value: Value| AttentionSpec::from_json(&value, "attention", &Artifacts::default()).unwrap();
    let presets = |window: u32| {
        let long =
            spec(json!({"prefill": {"method": "streaming_llm", "window": window}, "decode": {"method": "quest"}}));
        Presets::from([("dense".into(), AttentionSpec::default()), ("long".into(), long)])
    };
    let live = Arc::new(Live::new(AttentionSpec::default(), presets(64), Keys::default()));
    let config = ServerConfig { live: Arc::clone(&live), ..ServerConfig::default() };
    let server = custom(StubBackend::new("ok"), EngineConfig::default(), config);
    let ask = async |extra: Value| {
        let mut body = complete();
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.complete(body).await
    };
    let used = async |extra: Value| {
        let usage = ask(extra).await.json()["usage"]["attention"].clone();
        (usage["prefill"]["method"].clone(), usage["decode"]["method"].clone())
    };
    assert_eq!(used(json!({})).await, (json!("dense"), json!("dense")));
    assert_eq!(used(json!({"attention": "long"})).await, (json!("streaming_llm"), json!("quest")));
    assert_eq!(
        used(json!({"vllm_xargs": {"attention_preset": "long"}})).await,
        (json!("streaming_llm"), json!("quest"))
    );
    assert_eq!(
        used(json!({"attention": "long", "epsilon": 0.1, "gamma": 8})).await,
        (json!("delta"), json!("vattention"))
    );
    let wrong = ask(json!({"attention": "lonk"})).await;
    let said = "attention: no preset or method is called \"lonk\", did you mean \"long\"?; presets: dense, long; methods: bigbird, ";
    let (message, param) = wrong.error();
    assert_eq!((wrong.status, param), (StatusCode::BAD_REQUEST, json!("attention")));
    assert!(message.starts_with(said), "{message}");
    // A method's name alone: the rest is the server's default.
    for (name, prefill, decode) in
        [("quest", "dense", "quest"), ("streaming_llm", "dense", "streaming_llm"), ("hip", "hip", "dense")]
    {
        assert_eq!(used(json!({"attention": name})).await, (json!(prefill), json!(decode)), "{name}");
    }
    assert_eq!(used(json!({"attention": "quest", "gamma": 8})).await, (json!("delta"), json!("quest")));
    for (named, field) in [
        (json!({"attention": "saap"}), "attention"),
        (json!({"vllm_xargs": {"attention_preset": "saap"}}), "vllm_xargs.attention_preset"),
    ] {
        let (message, param) = ask(named).await.error();
        assert_eq!(param, field, "{message}");
        assert!(message.starts_with(field) && message.contains("--artifacts"), "{message}");
    }
    let both = json!({"vllm_xargs": {"attention_preset": "long", "attention_decode_method": "dense"}});
    assert_eq!(ask(both).await.status, StatusCode::BAD_REQUEST);
    let listed = server.get("/v1/attention/methods").await.json()["presets"].clone();
    assert_eq!((listed.as_object().unwrap().len(), &listed["long"]["prefill"]["window"]), (2, &json!(64)));
    live.set(AttentionSpec::default(), presets(32), Keys::default());
    let listed = server.get("/v1/attention/methods").await.json()["presets"].clone();
    assert_eq!(listed["long"]["prefill"]["window"], 32);
}
