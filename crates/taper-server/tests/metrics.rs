//! What Prometheus reads.

mod support;

use axum::http::StatusCode;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use support::{server, wait};

/// Every sample by its name and its labels, without those that all have.
fn samples(text: &str) -> BTreeMap<String, f64> {
    let mut kinds = BTreeMap::new();
    let mut found = BTreeMap::new();
    for line in text.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert_eq!(kinds.insert(name.to_owned(), kind.to_owned()), None, "{name} has two types");
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.contains("model_name=\"stub\"") && name.contains("engine=\"0\""), "{line}");
            let plain = name.replace("model_name=\"stub\"", "").replace("engine=\"0\"", "");
            let labels = plain.split_once('{').map_or("", |(_, labels)| labels.trim_end_matches('}'));
            let labels: Vec<&str> = labels.split(',').filter(|label| !label.is_empty()).collect();
            let bare = name.split('{').next().unwrap();
            let of = ["_bucket", "_sum", "_count"].iter().find_map(|end| bare.strip_suffix(end)).unwrap_or(bare);
            assert!(kinds.contains_key(of) || kinds.contains_key(bare), "{bare} has no type");
            found.insert(format!("{bare}{{{}}}", labels.join(",")), value.parse().unwrap());
        }
    }
    found
}

#[tokio::test]
async fn what_requests_came_to_is_counted() {
    let server = server("Hello!");
    let empty = server.get("/metrics").await;
    assert_eq!(
        (empty.status, &empty.headers["content-type"]),
        (StatusCode::OK, &"text/plain; version=0.0.4; charset=utf-8".parse().unwrap(),)
    );
    let before = samples(&empty.text);
    assert_eq!(before["vllm:num_requests_running{}"], 0.0);
    assert_eq!(before["vllm:kv_cache_usage_perc{}"], 0.0);
    assert_eq!(before["vllm:cache_config_info{block_size=\"64\",num_gpu_blocks=\"16\"}"], 1.0);
    let attention = json!({"decode": {"method": "streaming_llm"}});
    let two = server.complete(json!({"prompt": "hi", "temperature": 0, "n": 2, "attention": attention})).await;
    assert_eq!(two.status, StatusCode::OK, "{}", two.text);
    let short = server.complete(json!({"prompt": "hi", "max_tokens": 2})).await;
    assert_eq!(short.status, StatusCode::OK);
    let fails = server.complete(json!({"prompt": "PANIC"})).await;
    assert_eq!(fails.status, StatusCode::INTERNAL_SERVER_ERROR);
    let refused = server.complete(json!({"prompt": ""})).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);

    let after = samples(&server.get("/metrics").await.text);
    let counts = |name: &str| after.get(name).copied();
    assert_eq!(counts("vllm:request_success_total{finished_reason=\"stop\"}"), Some(2.0));
    assert_eq!(counts("vllm:request_success_total{finished_reason=\"length\"}"), Some(1.0));
    assert_eq!(counts("vllm:request_success_total{finished_reason=\"error\"}"), Some(1.0));
    assert_eq!(counts("vllm:request_success_total{finished_reason=\"abort\"}"), Some(0.0));
    // The one that failed had two tokens before.
    assert_eq!(counts("vllm:prompt_tokens_total{}"), Some(9.0));
    // Six bytes and the end token, twice; two bytes; two.
    assert_eq!(counts("vllm:generation_tokens_total{}"), Some(18.0));
    let requests = |status: &str| {
        counts(&format!("http_requests_total{{handler=\"/v1/completions\",method=\"POST\",status=\"{status}\"}}"))
    };
    assert_eq!((requests("2xx"), requests("4xx"), requests("5xx")), (Some(2.0), Some(1.0), Some(1.0)));
    for name in ["e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"] {
        assert_eq!(counts(&format!("vllm:{name}_seconds_count{{}}")), Some(2.0), "{name}");
    }
    assert_eq!(counts("vllm:time_to_first_token_seconds_count{}"), Some(3.0));
    assert!(counts("vllm:inter_token_latency_seconds_count{}") >= Some(11.0));
    let by = |method: &str, phase: &str| {
        counts(&format!("taper:attention_density_count{{method=\"{method}\",phase=\"{phase}\"}}"))
    };
    assert_eq!(
        (by("dense", "prefill"), by("streaming_llm", "decode"), by("dense", "decode")),
        (None, None, None),
        "a stub reads nothing, and nothing has no density"
    );
}

#[tokio::test]
async fn a_prompt_without_an_answer_has_no_first_token() {
    let server = server("Hello!");
    let answer = server.complete(json!({"prompt": "hi", "max_tokens": 0, "echo": true})).await;
    assert_eq!(answer.json()["choices"][0]["text"], "hi");
    let seen = samples(&server.get("/metrics").await.text);
    let counts = |name: &str| seen[&format!("vllm:{name}{{}}")];
    assert_eq!((counts("e2e_request_latency_seconds_count"), counts("prompt_tokens_total")), (1.0, 2.0));
    assert_eq!((counts("time_to_first_token_seconds_count"), counts("generation_tokens_total")), (0.0, 0.0));
}

/// Two tokens of a prompt, then each token of the answer, whose last one ends it.
#[tokio::test]
async fn steps_are_counted_by_their_tokens() {
    let server = server("Hello!");
    for told in 1..3 {
        let answer = server.complete(json!({"prompt": "hi", "temperature": 0})).await;
        assert_eq!(answer.json()["choices"][0]["text"], "Hello!");
        let seen = samples(&server.get("/metrics").await.text);
        let of = |sample: &str| seen[&format!("vllm:iteration_tokens_total_{sample}")];
        let [single, both, all, tokens] =
            [r#"bucket{le="1"}"#, r#"bucket{le="2"}"#, "count{}", "sum{}"].map(|sample| of(sample) / f64::from(told));
        assert_eq!((single, both, all, tokens), (6.0, 7.0, 7.0, 8.0), "after {told}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_is_counted_and_the_cache_is_seen_in_use() {
    let server = server(&"x".repeat(400));
    let seen = || async { samples(&server.get("/metrics").await.text) };
    let mut request = Box::pin(server.complete(json!({"prompt": "SLOW", "max_tokens": 300, "stream": true})));
    tokio::select! {
        _ = &mut request => panic!("it ended"),
        () = wait("steps", || server.probe.steps.load(Ordering::SeqCst) >= 7) => {}
    }
    let now = seen().await;
    assert!(now["vllm:kv_cache_usage_perc{}"] > 0.0 && now["vllm:num_requests_running{}"] == 1.0, "{now:?}");
    // Counted as they come, not at an end that this answer does not have.
    assert!(now["vllm:prompt_tokens_total{}"] == 4.0 && now["vllm:generation_tokens_total{}"] >= 2.0, "{now:?}");
    drop(request);
    wait("it is let go of", || server.engine.load().running == 0).await;
    let now = seen().await;
    assert_eq!(now["vllm:request_success_total{finished_reason=\"abort\"}"], 1.0);
    let late = server.complete(json!({"prompt": "SLOW", "max_tokens": 300, "timeout": 0.2})).await;
    assert_eq!(late.status, StatusCode::GATEWAY_TIMEOUT, "{}", late.text);
    wait("it is let go of", || server.engine.load().running == 0).await;
    let stream = json!({"prompt": "SLOW", "max_tokens": 300, "timeout": 1, "stream": true});
    assert_eq!(server.complete(stream).await.status, StatusCode::OK, "at its head");
    wait("it is let go of", || server.engine.load().running == 0).await;
    let now = seen().await;
    let requests = |status: &str| {
        let name = format!("http_requests_total{{handler=\"/v1/completions\",method=\"POST\",status=\"{status}\"}}");
        now.get(&name).copied()
    };
    assert_eq!((requests("2xx"), requests("4xx"), requests("5xx")), (None, Some(1.0), Some(2.0)));
    assert_eq!(now["vllm:request_success_total{finished_reason=\"abort\"}"], 3.0);
    assert_eq!(now["vllm:request_success_total{finished_reason=\"error\"}"], 0.0);
    assert_eq!(now["vllm:kv_cache_usage_perc{}"], 0.0);
}
