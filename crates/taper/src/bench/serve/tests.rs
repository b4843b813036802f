//! The load against Taper's own server over the scripted model.

use super::client::{Lines, base};
use super::figures::{Times, percentile};
use super::*;
use clap::{CommandFactory, Parser};
use serde_json::{Value, json};
use taper_engine::EngineConfig;
use taper_engine::stub::StubBackend;
use taper_server::ServerConfig;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    args: BenchServeArgs,
}

fn args(line: &str) -> BenchServeArgs {
    Line::parse_from(std::iter::once("bench").chain(line.split_whitespace())).args
}

/// A server that answers eleven tokens to everything, and its address.
fn server(runtime: &tokio::runtime::Runtime) -> String {
    let mut backend = StubBackend::new("0123456789");
    backend.limits.context_tokens = 4096;
    backend.limits.cache_tokens = 65536;
    let engine = Arc::new(backend.engine(EngineConfig::default()));
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    runtime.spawn(taper_server::serve(listener, None, engine, ServerConfig::default(), std::future::pending()));
    format!("http://{address}/v1")
}

fn run_against_stub(line: &str) -> (Vec<Seen>, Figures) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let args = args(&format!("--url {} {line}", server(&runtime)));
    let plan = Plan::new(&args).unwrap();
    let Load { model, seen, elapsed } = runtime.block_on(load(&args, &plan)).unwrap();
    assert_eq!(model, "stub");
    let target = args.goodput.as_deref().map(|text| Target::parse(text).unwrap());
    let figures = Figures::new(&seen, elapsed, target);
    (seen, figures)
}

#[test]
fn a_closed_loop_is_answered_and_counted() {
    for endpoint in ["chat", "completions"] {
        let line =
            format!("--endpoint {endpoint} --requests 20 --clients 4 --prompt 10:30 --output 64 --goodput ttft=60000");
        let (seen, figures) = run_against_stub(&line);
        assert_eq!((figures.completed, figures.cancelled, figures.errors.len()), (20, 0, 0));
        assert_eq!(figures.completion_tokens, 20 * 11, "ten characters and the end token");
        assert!(figures.prompt_tokens > 20 * 10, "the server's count");
        assert_eq!(figures.good, Some(1.0));
        assert!(seen.iter().all(|one| one.texts() == 10 && one.ended >= one.texts[0][9] && one.finish == ["stop"]));
        assert!(figures.table().contains("20 completed, 0 cancelled, 0 failed"));
        let picture = plot::svg(&figures);
        assert!(picture.ends_with("</svg>\n"));
        let curves: Vec<Vec<f64>> = picture
            .lines()
            .filter_map(|line| line.split_once("<polyline"))
            .map(|(_, curve)| {
                let points = curve.split_once("points=\"").unwrap().1.split('"').next().unwrap();
                points.split([' ', ',']).map(|number| number.parse().unwrap()).collect()
            })
            .collect();
        // TTFT, ITL, TPOT and the end: to the right and upwards, within the frame.
        assert_eq!(curves.len(), 4);
        for curve in curves {
            let (x, y): (Vec<f64>, Vec<f64>) = curve.chunks(2).map(|point| (point[0], point[1])).unzip();
            assert_eq!((x.len(), y[0], y[200]), (201, 350.0, 40.0));
            assert!(
                x.is_sorted() && y.is_sorted_by(|a, b| a > b) && (60.0..=700.0).contains(&x[0]) && x[200] <= 700.0,
                "{x:?}"
            );
        }
    }
}

#[test]
fn an_open_loop_sends_at_its_times_and_clients_leave() {
    let line = "--rate 200 --requests 40 --prompt 5 --output 5:30 --cancel 0.5 --seed 3";
    let (seen, figures) = run_against_stub(line);
    assert!(figures.cancelled > 5 && figures.completed > 5, "{figures:?}");
    assert_eq!(figures.completed + figures.cancelled, 40);
    assert!(seen.iter().all(|one| !one.left || one.texts() <= 10));
    let plan = Plan::new(&args(line)).unwrap();
    for (one, planned) in seen.iter().zip(&plan.requests) {
        assert!(one.sent + 1e-3 >= planned.at.as_secs_f64(), "none goes before its time");
    }
}

#[test]
fn refusals_are_errors_with_the_servers_words() {
    let (_, figures) = run_against_stub("--warm-up 0 --requests 3 --prompt 5 --output 5000");
    assert!(figures.errors.keys().all(|e| e.starts_with("HTTP 400: ") && e.contains("context")), "{figures:?}");
    assert_eq!((figures.errors.values().sum::<usize>(), figures.completed), (3, 0));
    let gone = args("--url http://127.0.0.1:9/v1 --model x --warm-up 0 --requests 1");
    let error = run(gone).unwrap_err().to_string();
    assert!(error.contains("no request was answered"), "{error}");
}

#[test]
fn an_address_alone_gets_the_version() {
    for (url, wanted) in [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("http://localhost/", "http://localhost/v1"),
        ("https://a.b/v1/", "https://a.b/v1"),
        ("https://a.b/openai", "https://a.b/openai"),
    ] {
        assert_eq!(base(url).unwrap(), wanted);
    }
    for url in ["127.0.0.1:8080", "localhost:8080/v1", "ftp://a.b", ""] {
        let error = base(url).unwrap_err().to_string();
        assert_eq!(error, format!("--url: {url:?} must be like http://127.0.0.1:8080/v1"));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let url = server(&runtime);
    let args = args(&format!("--url {} --requests 2 --prompt 5 --output 5", url.trim_end_matches("/v1")));
    let Load { seen, .. } = runtime.block_on(load(&args, &Plan::new(&args).unwrap())).unwrap();
    assert!(seen.len() == 2 && seen.iter().all(|one| one.error.is_none()), "{seen:?}");
}

#[test]
fn plans_are_those_of_their_seed() {
    let line = "--requests 50 --prompt 20:40 --shared-prefix 10 --output 3:9 --rate 10";
    let plan = Plan::new(&args(line)).unwrap();
    assert_eq!(plan.requests, Plan::new(&args(line)).unwrap().requests);
    let other = Plan::new(&args(&format!("{line} --seed 1"))).unwrap();
    assert_ne!(plan.requests[0].prompt, other.requests[0].prompt);
    let beginning = |prompt: &str| prompt.split(' ').take(10).collect::<Vec<_>>().join(" ");
    let first = beginning(&plan.requests[0].prompt);
    for pair in plan.requests.windows(2) {
        assert!(pair[0].at < pair[1].at);
        assert_eq!(beginning(&pair[1].prompt), first);
        assert_ne!(pair[0].prompt, pair[1].prompt);
        assert!((20..=40).contains(&pair[0].prompt.split(' ').count()) && (3..=9).contains(&pair[0].max_tokens));
    }
    // A Poisson process of rate 10 takes 5 s for 50, ± 0.71; this is 4 standard deviations.
    let last = plan.requests[49].at.as_secs_f64();
    assert!((2.2..7.9).contains(&last), "{last}");
}

#[test]
fn lengths_with_a_tail_have_their_median_and_spread() {
    let plan = Plan::new(&args("--requests 2000 --prompt 100~0.5 --output 40~0")).unwrap();
    let lengths = plan.requests.iter().map(|request| request.prompt.split(' ').count() as f64);
    let mut logs: Vec<f64> = lengths.map(f64::ln).collect();
    logs.sort_by(f64::total_cmp);
    // Of 2,000: the median's deviation is 1.25 * 0.5 / sqrt(2000) = 0.014, that of a quantile at one deviation 0.017.
    for (share, expected) in [(0.1587, -0.5), (0.5, 0.0), (0.8413, 0.5)] {
        let seen = percentile(&logs, share) - 100f64.ln();
        assert!((seen - expected).abs() < 0.07, "{share}: {seen} for {expected}");
    }
    assert!(plan.requests.iter().all(|request| request.max_tokens == 40));
}

#[test]
fn mistakes_name_the_argument() {
    for (line, said) in [
        ("--prompt 0", "--prompt"),
        ("--prompt 9:3", "--prompt"),
        ("--prompt 9~-1", "--prompt"),
        ("--prompt 9~x", "--prompt"),
        ("--output 0~1", "--output"),
        ("--output 1:9999999", "--output"),
        ("--output x", "--output"),
        ("--cancel 1.5", "--cancel"),
        ("--rate -1", "--rate"),
        ("--rate nan", "--rate"),
        ("--rate 1e-30", "--rate"),
        ("--extra [1]", "--extra"),
    ] {
        let line = line.replace("--rate -", "--rate=-");
        let error = Plan::new(&args(&line)).unwrap_err().to_string();
        assert!(error.starts_with(said), "{line}: {error}");
    }
    for text in ["ttft", "ttft=", "ttft=-3", "latency=5"] {
        assert!(Target::parse(text).unwrap_err().to_string().starts_with("--goodput"), "{text}");
    }
    assert_eq!(
        Target::parse("ttft=2000,tpot=50").unwrap(),
        Target { ttft: Some(2000.0), tpot: Some(50.0), ..Target::default() }
    );
}

#[test]
fn whatever_comes_of_an_answer_is_counted() {
    let mut seen = Seen::default();
    let delta = |delta: Value| json!({"choices": [{"index": 0, "delta": delta}]});
    for (event, texts) in [
        (delta(json!({"role": "assistant", "content": ""})), 0),
        (delta(json!({"content": "a", "tool_calls": null})), 1),
        (delta(json!({"reasoning_content": "so"})), 2),
        (delta(json!({"reasoning": "so", "reasoning_content": "so"})), 3),
        (delta(json!({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]})), 4),
        (delta(json!({"tool_calls": [], "reasoning": ""})), 4),
        (json!({"choices": [{"index": 0, "text": "a"}]}), 5),
        (json!({"choices": [], "usage": {"prompt_tokens": 1}}), 5),
    ] {
        seen.take(&event, Instant::now()).unwrap();
        assert_eq!(seen.texts(), texts, "{event}");
    }
}

#[test]
fn a_run_says_all_that_it_was_asked() {
    let args = args("--endpoint completions --warm-up 3 --timeout 9 --goodput ttft=5,tpot=7 --extra {\"top_p\":0.5}");
    let told = Figures::new(&[], Duration::from_secs(1), None).json(&args, "stub", &[]);
    let settings = &told["settings"];
    for (name, value) in [
        ("model", json!("stub")),
        ("endpoint", json!("completions")),
        ("warm_up", json!(3)),
        ("timeout", json!(9)),
        ("goodput", json!("ttft=5,tpot=7")),
        ("extra", json!("{\"top_p\":0.5}")),
    ] {
        assert_eq!(settings[name], value, "{name}");
    }
    // Where it goes, and the key, make no difference to what is measured.
    let told = settings.as_object().unwrap();
    for argument in Line::command().get_arguments().filter_map(|argument| argument.get_long()) {
        let aside = ["json", "plot", "key-env", "help"].contains(&argument);
        assert_eq!(told.contains_key(&argument.replace('-', "_")), !aside, "--{argument}");
    }
}

#[test]
fn ranks_lie_between_values() {
    assert_eq!(percentile(&[], 0.5), 0.0);
    assert_eq!(percentile(&[7.0], 0.99), 7.0);
    assert_eq!(percentile(&[1.0, 2.0, 3.0, 4.0], 0.5), 2.5);
    assert_eq!(percentile(&[0.0, 10.0], 0.95), 9.5);
    assert_eq!(Times::default().p99, 0.0);
}

#[test]
fn events_are_cut_wherever_the_network_cuts_them() {
    let stream = "data: {\"a\": \"ü\"}\r\n\r\n: a comment\n\ndata:[DONE]\n\n";
    for size in 1..stream.len() {
        let mut lines = Lines::default();
        let all: Vec<String> = stream.as_bytes().chunks(size).flat_map(|piece| lines.push(piece)).collect();
        assert_eq!(all, ["{\"a\": \"ü\"}", "[DONE]"], "pieces of {size}");
    }
}
