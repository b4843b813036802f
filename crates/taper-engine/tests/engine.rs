//! The engine over the scripted stub: order of events, stops, limits, cancellation, faults, draining.

use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use taper_attention::{Artifacts, AttentionSpec};
use taper_engine::stub::{EOS, Probe, StubBackend, StubText, VOCAB};
use taper_engine::{
    Engine, EngineConfig, Event, Events, Finish, Limits, ModelInfo, Request, RequestError, SamplingParams, StartError,
    StopRules, SubmitError, TokenRecord, Usage,
};

fn request(prompt: &str) -> Request {
    Request {
        id: "test".into(),
        prompt: prompt.bytes().map(u32::from).collect(),
        sampling: SamplingParams { temperature: 0.0, ..Default::default() },
        ..Request::default()
    }
}

fn stub(script: &str) -> (Engine, Arc<Probe>) {
    let backend = StubBackend::new(script);
    let probe = Arc::clone(&backend.probe);
    (backend.engine(EngineConfig::default()), probe)
}

#[derive(Debug, Default)]
struct Answer {
    texts: Vec<String>,
    tokens: Vec<TokenRecord>,
    finishes: Vec<Option<Finish>>,
    deltas: usize,
    end: Option<Result<Usage, RequestError>>,
    prefilled: bool,
}

/// Collects all events and checks their order on the way.
fn collect(mut events: Events) -> Answer {
    let mut answer = Answer::default();
    while let Some(event) = events.blocking_recv() {
        assert!(answer.end.is_none(), "nothing follows the last event");
        match event {
            Event::Embedding(_) | Event::Prompt(_) => panic!("not asked for"),
            Event::Prefilled => {
                assert!(!answer.prefilled && answer.deltas == 0);
                answer.prefilled = true;
            }
            Event::Delta(delta) => {
                assert!(answer.prefilled);
                if answer.texts.len() <= delta.choice {
                    answer.texts.resize(delta.choice + 1, String::new());
                    answer.finishes.resize(delta.choice + 1, None);
                }
                assert!(answer.finishes[delta.choice].is_none(), "nothing follows a choice's end");
                answer.deltas += 1;
                answer.texts[delta.choice].push_str(&delta.text);
                answer.tokens.extend(delta.tokens);
                answer.finishes[delta.choice] = delta.finish;
            }
            Event::Done(usage) => answer.end = Some(Ok(usage)),
            Event::Failed(error) => answer.end = Some(Err(error)),
        }
    }
    answer
}

fn run(engine: &Engine, request: Request) -> Answer {
    collect(engine.submit(request).expect("taken"))
}

fn wait(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn an_answer_ends_at_the_models_end_token() {
    let (engine, probe) = stub("Grüße");
    let answer = run(&engine, request("hi"));
    assert_eq!(answer.texts, ["Grüße"]);
    assert_eq!(answer.finishes, [Some(Finish::Eos)]);
    let usage = answer.end.unwrap().unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (2, 8), "seven bytes and the end token");
    assert_eq!(usage.attention.len(), 1);
    wait("the sequence is closed", || probe.open.load(Ordering::SeqCst) == 0);
}

#[test]
fn a_character_is_never_split() {
    let (engine, _) = stub("ü€😀");
    let mut events = engine.submit(request("hi")).unwrap();
    let mut texts = Vec::new();
    while let Some(event) = events.blocking_recv() {
        if let Event::Delta(delta) = event {
            texts.push(delta.text);
        }
    }
    assert_eq!(texts, ["ü", "€", "😀", ""]);
}

#[test]
fn max_tokens_ends_with_length_and_leaves_half_a_character_out() {
    let (engine, _) = stub("ab€");
    let mut r = request("hi");
    r.stop.max_tokens = Some(4);
    let answer = run(&engine, r);
    assert_eq!(answer.texts, ["ab"]);
    assert_eq!(answer.finishes, [Some(Finish::Length)]);
    assert_eq!(answer.end.unwrap().unwrap().completion_tokens, 4);
}

#[test]
fn without_max_tokens_the_context_is_the_limit() {
    let (engine, _) = stub("abc");
    let mut r = request(&"p".repeat(500));
    r.stop.ignore_eos = true;
    let answer = run(&engine, r);
    assert_eq!(answer.end.unwrap().unwrap().completion_tokens, 12);
    assert_eq!(answer.texts, ["abcabcabc"], "every fourth token is the ignored end");
}

#[test]
fn stop_strings_and_stop_tokens_end_a_choice() {
    let (engine, _) = stub("one two three");
    let mut r = request("hi");
    r.stop.strings = vec!["two".into()];
    r.logprobs = Some(0);
    let answer = run(&engine, r);
    assert_eq!(answer.texts, ["one "]);
    assert_eq!(answer.finishes, [Some(Finish::StopString("two".into()))]);
    assert_eq!(answer.tokens.len(), 4, "the stop string's own tokens are not shown");

    let (wide, _) = stub("€€ two");
    let mut r = request("hi");
    r.stop.strings = vec!["two".into()];
    r.logprobs = Some(0);
    assert_eq!(run(&wide, r).tokens.len(), 7, "whatever the characters' width");

    // What begins before `min_tokens` and ends behind them is found, what ends before them is not.
    for (least, expected) in [(6, Some("one ")), (7, None)] {
        let mut r = request("hi");
        (r.stop.strings, r.stop.min_tokens, r.logprobs) = (vec!["two".into()], least, Some(0));
        let answer = run(&engine, r);
        assert_eq!(answer.texts, [expected.unwrap_or("one two three")], "{least}");
        assert_eq!(answer.tokens.len(), answer.texts[0].len());
    }

    let mut r = request("hi");
    r.stop.tokens = vec![u32::from(b't')];
    let answer = run(&engine, r);
    assert_eq!(answer.texts, ["one "]);
    assert_eq!(answer.finishes, [Some(Finish::StopToken(u32::from(b't')))]);
}

#[test]
fn text_held_back_for_a_stop_string_comes_at_the_end() {
    let (engine, _) = stub("ab");
    let mut r = request("hi");
    r.stop.strings = vec!["bc".into()];
    let answer = run(&engine, r);
    assert_eq!((answer.texts, answer.deltas), (vec!["ab".to_string()], 2));
    assert_eq!(answer.finishes, [Some(Finish::Eos)]);
}

#[test]
fn logprobs_name_each_token_and_its_place() {
    let (engine, _) = stub("a€b");
    let mut r = request("hi");
    r.logprobs = Some(3);
    let tokens = run(&engine, r).tokens;
    let places: Vec<usize> = tokens.iter().map(|t| t.text_offset).collect();
    assert_eq!(places, [0, 1, 1, 1, 2], "in characters");
    assert_eq!(tokens[0].chosen.token, u32::from(b'a'));
    let expected = 12.0 - (12f32.exp() + 256.0).ln();
    assert!((tokens[0].chosen.logprob - expected).abs() < 1e-5);
    assert_eq!(tokens[0].top.len(), 3);
    assert_eq!(tokens[0].top[0], tokens[0].chosen);
}

#[test]
fn choices_share_the_prompt_and_are_repeatable() {
    let (engine, probe) = stub("some text");
    let make = |choices| {
        let mut r = request(&"p".repeat(100));
        r.choices = choices;
        r.sampling = SamplingParams { temperature: 3.0, seed: 9, ..Default::default() };
        r.stop.max_tokens = Some(6);
        r.stop.ignore_eos = true;
        r
    };
    let three = run(&engine, make(3));
    assert_eq!(three.texts.len(), 3);
    assert_ne!(three.texts[0], three.texts[1]);
    // One prefill and five decode steps for all three.
    assert_eq!(probe.steps.load(Ordering::SeqCst), 6);
    assert_eq!(three.end.unwrap().unwrap().completion_tokens, 18);
    let again = run(&engine, make(3));
    assert_eq!(three.texts, again.texts);
    assert_eq!(run(&engine, make(1)).texts[0], three.texts[0], "more choices do not change the first");
    wait("all are closed", || probe.open.load(Ordering::SeqCst) == 0);
}

#[test]
fn a_prompt_goes_in_by_chunks() {
    let backend = StubBackend::new("x");
    let probe = Arc::clone(&backend.probe);
    let engine = backend.engine(EngineConfig { chunk_tokens: 64, ..Default::default() });
    assert_eq!(run(&engine, request(&"p".repeat(200))).texts, ["x"]);
    assert_eq!(probe.longest.load(Ordering::SeqCst), 64);
    assert_eq!(probe.steps.load(Ordering::SeqCst), 4 + 1);
}

#[test]
fn a_chunk_that_cannot_be_cut_goes_in_over_several_steps() {
    let backend = StubBackend { chunk_multiple: 100, ..StubBackend::new("x") };
    let probe = Arc::clone(&backend.probe);
    let engine = backend.engine(EngineConfig { chunk_tokens: 64, ..Default::default() });
    assert_eq!(run(&engine, request(&"p".repeat(250))).texts, ["x"]);
    assert_eq!(probe.longest.load(Ordering::SeqCst), 64);
    // Two chunks of 100 take two steps each, the rest one.
    assert_eq!(probe.steps.load(Ordering::SeqCst), 5 + 1);
}

#[test]
fn a_request_that_can_never_fit_names_the_limit() {
    let (engine, _) = stub("x");
    let refused = |r: Request| engine.submit(r).unwrap_err();
    assert_eq!(refused(request("")), SubmitError::EmptyPrompt);
    assert_eq!(refused(request(&"p".repeat(512))), SubmitError::Context { prompt: 512, wanted: 1, limit: 512 });
    let mut r = request("hi");
    r.stop.max_tokens = Some(511);
    assert_eq!(refused(r.clone()), SubmitError::Context { prompt: 2, wanted: 511, limit: 512 });
    r.stop.max_tokens = Some(398);
    r.choices = 3;
    assert_eq!(
        refused(r).to_string(),
        "the KV cache holds 1024 tokens; the request needs 1344, in blocks of 64, for a prompt of 2 and 3 answers of \
         398"
    );
    let mut backend = StubBackend::new("x");
    backend.limits.offloaded_tokens = 512;
    let mut r = request("hi");
    (r.stop.max_tokens, r.choices) = (Some(398), 3);
    let error = backend.engine(EngineConfig::default()).submit(r).unwrap_err().to_string();
    assert!(
        error.starts_with("the KV cache holds 1024 tokens, 512 of them offloaded; the request needs 1344"),
        "{error}"
    );
    let mut r = request("hi");
    r.prompt.push(257);
    assert_eq!(refused(r), SubmitError::UnknownToken { token: 257, vocab: 257 });
    let mut r = request("hi");
    r.stop.max_tokens = Some(usize::MAX);
    assert!(matches!(refused(r), SubmitError::Context { .. }));
}

#[test]
fn a_client_that_leaves_ends_its_request_within_a_step() {
    let (engine, probe) = stub("a very long answer indeed");
    let mut r = request("SLOW");
    r.stop.ignore_eos = true;
    let mut events = engine.submit(r).unwrap();
    while !matches!(events.blocking_recv(), Some(Event::Delta(_))) {}
    drop(events);
    let steps = probe.steps.load(Ordering::SeqCst);
    wait("cancelled", || probe.open.load(Ordering::SeqCst) == 0);
    // The step under way when the client left, and one that began before the drop was seen here.
    assert!(probe.steps.load(Ordering::SeqCst) <= steps + 1);
    assert_eq!(run(&engine, request("hi")).finishes, [Some(Finish::Eos)]);
}

#[test]
fn a_client_that_leaves_during_prefill_ends_it_between_steps() {
    // Cut anywhere, and not at all.
    for chunk_multiple in [1, 1000] {
        let backend = StubBackend { chunk_multiple, ..StubBackend::new("x") };
        let probe = Arc::clone(&backend.probe);
        let engine = backend.engine(EngineConfig { chunk_tokens: 8, ..Default::default() });
        let events = engine.submit(request(&format!("SLOW{}", "p".repeat(400)))).unwrap();
        wait("the first step", || probe.steps.load(Ordering::SeqCst) >= 1);
        drop(events);
        let steps = probe.steps.load(Ordering::SeqCst);
        wait("cancelled", || probe.open.load(Ordering::SeqCst) == 0);
        assert!(probe.steps.load(Ordering::SeqCst) <= steps + 1, "of 51 steps");
        wait("it is idle", || probe.checks.load(Ordering::SeqCst) > 0);
    }
}

/// Requests by every way to draw, hot, so that the script is one choice among many.
fn sampled() -> Vec<Request> {
    let hot = |seed| SamplingParams { temperature: 3.0, seed, ..SamplingParams::default() };
    let with = |sampling, choices, logprobs| {
        let stop = StopRules { ignore_eos: true, max_tokens: Some(30), ..StopRules::default() };
        Request { sampling, choices, logprobs, stop, ..request("hi") }
    };
    vec![
        with(hot(1), 1, None),
        with(hot(2), 3, None),
        with(hot(3), 1, Some(2)),
        with(SamplingParams { top_k: Some(40), min_p: 0.001, ..hot(4) }, 1, None),
        with(SamplingParams { top_p: 0.6, ..hot(5) }, 2, None),
        with(SamplingParams { presence_penalty: 1.5, ..hot(6) }, 1, None),
        with(SamplingParams { logit_bias: vec![(65, 9.0)], ..hot(7) }, 1, None),
        with(SamplingParams { temperature: 0.0, ..hot(8) }, 1, None),
    ]
}

#[test]
fn tokens_that_the_backend_draws_are_those_that_the_engine_draws() {
    let answers = |draws| {
        let backend = StubBackend { draws, ..StubBackend::new("a script") };
        let probe = Arc::clone(&backend.probe);
        let engine = backend.engine(EngineConfig::default());
        let texts: Vec<_> = sampled().into_iter().map(|r| run(&engine, r).texts).collect();
        let failed = run(&engine, request("NAN")).end.unwrap().unwrap_err();
        assert_eq!(failed, RequestError::NonFinite);
        (texts, probe.drawn.load(Ordering::SeqCst))
    };
    let (by_engine, by_backend) = (answers(false), answers(true));
    assert_eq!(by_engine.0, by_backend.0);
    // One answer of 30 tokens and 29 of each of another two; then the first alone of two choices, and so on.
    assert_eq!((by_engine.1, by_backend.1), (0, 30 + 3 * 29 + 30 + 2 * 29 + 30 + 3));
}

#[test]
fn the_urgent_start_first_and_keep_their_place() {
    // One at a time, and the first holds the others up until all are there.
    let backend = StubBackend::new("x");
    let probe = Arc::clone(&backend.probe);
    let engine = backend.engine(EngineConfig { sequences: 1, ..EngineConfig::default() });
    let wish = |tokens: usize, priority| Request { priority, ..request(&"p".repeat(tokens)) };
    probe.hang.store(true, Ordering::SeqCst);
    let first = engine.submit(Request { priority: 9, ..request("HANG") }).unwrap();
    wait("it runs", || engine.load().running == 1);
    let rest =
        [(20, 0), (30, 5), (40, -5), (41, -5), (21, 0)].map(|(tokens, p)| engine.submit(wish(tokens, p)).unwrap());
    probe.hang.store(false, Ordering::SeqCst);
    std::iter::once(first).chain(rest).for_each(|events| assert!(collect(events).end.unwrap().is_ok()));
    assert_eq!(*probe.prefilled.lock().unwrap(), [4, 40, 41, 20, 21, 30]);

    // A cache that is too small for both: the one that is less urgent gives way, though it came first.
    let mut backend = StubBackend::new("x");
    backend.limits.cache_tokens = 640;
    let probe = Arc::clone(&backend.probe);
    let engine = backend.engine(EngineConfig::default());
    let long = |priority| {
        let stop = StopRules { ignore_eos: true, max_tokens: Some(100), ..StopRules::default() };
        Request { priority, stop, ..request(&format!("SLOW{}", "p".repeat(116))) }
    };
    let (third, patient) = (engine.submit(long(2)).unwrap(), engine.submit(long(1)).unwrap());
    let urgent = engine.submit(long(0)).unwrap();
    let ends = [urgent, patient, third].map(|events| std::thread::spawn(move || (collect(events).end, Instant::now())));
    let [urgent, patient, third] = ends.map(|end| end.join().unwrap());
    assert!([&urgent, &patient, &third].iter().all(|(end, _)| matches!(end, Some(Ok(_)))));
    assert!(probe.retracted.load(Ordering::SeqCst) > 0, "three times 220 tokens do not fit 640");
    assert!(urgent.1 < third.1 && patient.1 < third.1);
}

#[test]
fn drafts_do_not_show_in_an_answer() {
    let plain = StubBackend::new("a script").engine(EngineConfig::default());
    for (draws, tokens) in [(false, 1), (false, 4), (true, 4), (true, 15)] {
        let backend = StubBackend { draws, ..StubBackend::new("a script") };
        let probe = Arc::clone(&backend.probe);
        let engine = backend.engine(EngineConfig::default());
        let speculate = json!({ "speculate": { "method": "streaming_llm", "tokens": tokens } });
        let spec = AttentionSpec::from_json(&speculate, "attention", &Artifacts::default()).unwrap();
        let drafted = |r: Request| Request { attention: Arc::new(spec.clone()), ..r };
        for request in sampled() {
            let (answer, expected) = (run(&engine, drafted(request.clone())), run(&plain, request.clone()));
            assert_eq!(answer.texts, expected.texts, "{request:?}");
            assert_eq!(answer.tokens, expected.tokens, "{request:?}");
        }
        for end in ["EOS", "stop", "length"] {
            let stop = StopRules {
                strings: if end == "stop" { vec!["cri".into()] } else { Vec::new() },
                max_tokens: Some(if end == "length" { 5 } else { 100 }),
                ..StopRules::default()
            };
            let request = Request { stop, ..request("hi") };
            let (answer, expected) = (run(&engine, drafted(request.clone())), run(&plain, request));
            assert_eq!((answer.texts, answer.finishes), (expected.texts, expected.finishes), "{end}");
            // Drafts beyond an answer's end are none of its tokens.
            let usage = answer.end.unwrap().unwrap();
            let accepted = usage.attention[0].speculation.as_ref().unwrap().accepted;
            assert!(accepted < usage.completion_tokens as u64, "{end}: {accepted} of {}", usage.completion_tokens);
        }
        // Each check gives a token of its own beside the drafts that were right.
        let greedy = sampled().pop().unwrap();
        let before = probe.steps.load(Ordering::SeqCst);
        let usage = run(&engine, drafted(greedy)).end.unwrap().unwrap();
        let speculation = usage.attention[0].speculation.clone().unwrap();
        let checks = (probe.steps.load(Ordering::SeqCst) - before) as u64 - 1 - speculation.drafted;
        assert_eq!((usage.completion_tokens, speculation.accepted + checks), (30, 29));
        assert!(speculation.accepted > 0 && speculation.accepted < speculation.drafted, "{speculation:?}");
        assert_eq!(speculation.draft.unwrap().method, "streaming_llm");
        let failed = |prompt| run(&engine, drafted(request(prompt))).end.unwrap().unwrap_err();
        assert_eq!(failed("NAN"), RequestError::NonFinite);
        assert_eq!(failed("PANIC"), RequestError::Panic("the prompt asked for a panic".into()));
        wait("all are closed", || probe.open.load(Ordering::SeqCst) == 0);
    }
}

#[test]
fn faults_end_their_request_and_no_other() {
    let (engine, probe) = stub("long enough");
    let failed = |prompt| run(&engine, request(prompt)).end.unwrap().unwrap_err();
    assert_eq!(failed("NAN"), RequestError::NonFinite);
    assert_eq!(failed("PANIC"), RequestError::Panic("the prompt asked for a panic".into()));
    assert_eq!(failed("FAIL"), RequestError::Step("the prompt asked for it".into()));
    let early = run(&engine, request("FAIL"));
    assert!(!early.prefilled, "the failure comes before the first token");
    assert_eq!(run(&engine, request("hi")).texts, ["long enough"]);
    wait("all are closed", || probe.open.load(Ordering::SeqCst) == 0);
    assert!(!engine.load().dead);
}

#[test]
fn a_fault_in_one_request_is_not_seen_by_those_beside_it() {
    let engine = StubBackend::new("long enough").engine(EngineConfig::default());
    let prompts = ["SLOW", "PANIC", "SLOW and steady", "NAN", "FAIL", "hi"];
    let running: Vec<Events> = prompts.iter().map(|prompt| engine.submit(request(prompt)).unwrap()).collect();
    let mut ends = running.into_iter().map(collect);
    let mut next = || ends.next().expect("one for each");
    assert_eq!(next().texts, ["long enough"]);
    assert_eq!(next().end.unwrap().unwrap_err(), RequestError::Panic("the prompt asked for a panic".into()));
    assert_eq!(next().texts, ["long enough"]);
    assert_eq!(next().end.unwrap().unwrap_err(), RequestError::NonFinite);
    assert_eq!(next().end.unwrap().unwrap_err(), RequestError::Step("the prompt asked for it".into()));
    assert_eq!(next().texts, ["long enough"]);
}

#[test]
fn requests_run_together_and_keep_running_beside_a_long_prompt() {
    let limits = Limits { context_tokens: 512, cache_tokens: 4096, offloaded_tokens: 0, cache_bytes: 0, vocab: VOCAB };
    let backend = StubBackend { limits, ..StubBackend::new("some words that take a while") };
    let probe = Arc::clone(&backend.probe);
    let engine = backend.engine(EngineConfig::default());
    let first: Vec<Events> = (0..6).map(|_| engine.submit(request("SLOW")).unwrap()).collect();
    wait("all run", || engine.load().running == 6);
    let long = engine.submit(request(&"p".repeat(400))).unwrap();
    for events in first.into_iter().chain([long]) {
        assert_eq!(collect(events).texts, ["some words that take a while"]);
    }
    assert_eq!(probe.widest.load(Ordering::SeqCst), 7, "the prompt goes in beside them");
}

#[test]
fn short_prompts_do_not_wait_for_a_long_one() {
    let limits =
        Limits { context_tokens: 20_000, cache_tokens: 40_960, offloaded_tokens: 0, cache_bytes: 0, vocab: VOCAB };
    for chunk_multiple in [1, 20_000] {
        let backend = StubBackend { limits, chunk_multiple, ..StubBackend::new("abc") };
        let probe = Arc::clone(&backend.probe);
        let engine = backend.engine(EngineConfig { chunk_tokens: 1024, ..Default::default() });
        let long = engine.submit(request(&format!("SLOW{}", "p".repeat(16_380)))).unwrap();
        wait("its first steps", || probe.steps.load(Ordering::SeqCst) > 0);
        let shorts: Vec<Events> = (0..8).map(|i| engine.submit(request(&"p".repeat(500 - i))).unwrap()).collect();
        for events in shorts.into_iter().chain([long]) {
            assert_eq!(collect(events).texts, ["abc"]);
        }
        let prefilled = probe.prefilled.lock().unwrap();
        assert_eq!((prefilled.len(), prefilled.last()), (9, Some(&16_384)), "{prefilled:?}");
    }
}

#[test]
fn answers_to_a_prompt_need_room_for_what_they_do_not_share() {
    let script = "0123456789".repeat(30);
    let limits = Limits { cache_tokens: 8 * 64, ..StubBackend::new("x").limits };
    let stub = || StubBackend { limits, ..StubBackend::new(&script) };
    let engine = stub().engine(EngineConfig::default());
    let asks = |prompt: usize, choices: usize, tokens: usize| {
        let mut request = request(&"p".repeat(prompt));
        (request.choices, request.stop.max_tokens, request.stop.ignore_eos) = (choices, Some(tokens), true);
        request
    };
    for choices in [1, 2, 3, 5] {
        for prompt in [1, 63, 64, 65, 127, 128, 250, 256, 300, 400, 447, 448, 511] {
            let room = engine.room(prompt, choices);
            assert!(engine.submit(asks(prompt, choices, room + 1)).is_err(), "{prompt} {choices} {room}");
            // Nobody reads it, so it ends; two blocks more are none's.
            let taken = room == 0 || engine.submit(asks(prompt, choices, room)).is_ok();
            assert!(taken, "{prompt} {choices} {room}");
        }
    }
    // Three whole blocks once, and of each answer what begins with the fourth: up to the last token in all of the cache.
    assert_eq!(engine.room(250, 2), 6 + 64);
    for chunk_tokens in [512, 5] {
        let engine = stub().engine(EngineConfig { chunk_tokens, ..EngineConfig::default() });
        let two = collect(engine.submit(asks(250, 2, 70)).unwrap());
        assert_eq!(two.texts, [&script[..70], &script[..70]]);
        // As many as there are rows beside them, some of whom lose their places.
        let events = engine.submit_all(vec![asks(250, 2, 70), asks(129, 3, 90), asks(100, 4, 20), asks(63, 4, 65)]);
        for events in events.unwrap() {
            assert!(matches!(collect(events).end, Some(Ok(_))));
        }
    }
    let error = engine.submit(asks(250, 6, 6)).unwrap_err();
    let SubmitError::Cache { needed, least, fewest, limit, .. } = error else { panic!("{error}") };
    assert_eq!((needed, least, fewest, limit), (9 * 64, 4 * 64, 9 * 64, 8 * 64));
}

#[test]
fn an_embedding_needs_no_room_beyond_its_prompt() {
    let limits = Limits { cache_tokens: 8 * 64, ..StubBackend::new("x").limits };
    let engine = StubBackend { limits, ..StubBackend::new("x") }.engine(EngineConfig::default());
    let embeds = |tokens: usize| Request { embeds: true, ..request(&"p".repeat(tokens)) };
    // Beside one another, too: the cache has room for one at a time.
    let events = engine.submit_all(vec![embeds(512), embeds(511), embeds(512)]).unwrap();
    for (mut events, tokens) in events.into_iter().zip([512, 511, 512]) {
        let mut hidden = None;
        while let Some(event) = events.blocking_recv() {
            match event {
                Event::Embedding(found) => hidden = Some(found),
                Event::Done(usage) => assert_eq!((usage.prompt_tokens, usage.completion_tokens), (tokens, 0)),
                Event::Prefilled => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(hidden.unwrap()[1], 4.0 * tokens as f32);
    }
    let error = engine.submit(embeds(513)).unwrap_err();
    assert_eq!(error, SubmitError::Context { prompt: 513, wanted: 0, limit: 512 });
    assert_eq!(error.to_string(), "This model's maximum context length is 512 tokens; the prompt has 513");
    let limits = Limits { cache_tokens: 4 * 64, ..limits };
    let engine = StubBackend { limits, ..StubBackend::new("x") }.engine(EngineConfig::default());
    assert!(engine.submit(embeds(256)).is_ok());
    assert!(matches!(engine.submit(embeds(257)), Err(SubmitError::Cache { needed: 320, least: 320, limit: 256, .. })));
}

#[test]
fn a_request_that_loses_its_place_answers_as_if_it_had_not() {
    // Eight blocks; each request takes one to begin with and five in the end.
    let limits =
        Limits { context_tokens: 512, cache_tokens: 8 * 64, offloaded_tokens: 0, cache_bytes: 0, vocab: VOCAB };
    let script = "0123456789".repeat(30);
    for (chunk_tokens, chunk_multiple) in [(512, 1), (5, 1), (5, 1000)] {
        let backend = StubBackend { limits, chunk_multiple, ..StubBackend::new(&script) };
        let probe = Arc::clone(&backend.probe);
        let engine = backend.engine(EngineConfig { chunk_tokens, ..EngineConfig::default() });
        let events = engine.submit_all(vec![request(&"p".repeat(20)); 4]).unwrap();
        for events in events {
            let answer = collect(events);
            assert_eq!(answer.texts, [&*script]);
            assert_eq!(answer.end.unwrap().unwrap().completion_tokens, 301);
        }
        assert!(probe.retracted.load(Ordering::SeqCst) > 0 && engine.load().counts.preemptions > 0);
        wait("it is idle", || probe.checks.load(Ordering::SeqCst) > 0);
    }
}

/// What attention draws for one choice must not be what it draws for another.
#[test]
fn each_choice_has_an_attention_seed_of_its_own() {
    let (engine, probe) = stub("abc");
    let mut request = request("hi");
    (request.choices, request.sampling.seed) = (3, u64::MAX - 1);
    run(&engine, request);
    assert_eq!(*probe.seeds.lock().unwrap(), [u64::MAX - 1, u64::MAX, 0], "one that can be counted on from it");
}

#[test]
fn an_idle_engine_is_checked() {
    let (engine, probe) = stub("abc");
    let waiting = engine.submit_all(["SLOW", "FAIL", "hi"].map(request).into()).unwrap();
    waiting.into_iter().for_each(|events| drop(collect(events)));
    wait("it is idle", || engine.load().running == 0);
    assert_eq!(probe.checks.load(Ordering::SeqCst), 1, "only once nothing waits");
    // As if a request had been lost without being closed.
    probe.open.fetch_add(1, Ordering::SeqCst);
    assert_eq!(run(&engine, request("hi")).texts, ["abc"]);
    wait("it is idle", || engine.load().running == 0);
    assert_eq!(probe.checks.load(Ordering::SeqCst), 2);
    assert_eq!(run(&engine, request("hi")).texts, ["abc"], "it goes on");
}

#[test]
fn requests_queue_in_order_and_none_is_lost() {
    let (engine, _) = stub("abc");
    let waiting: Vec<Events> = (0..40).map(|_| engine.submit(request("hi")).unwrap()).collect();
    for events in waiting {
        assert_eq!(collect(events).texts, ["abc"]);
    }
}

#[test]
fn a_full_queue_refuses_and_draining_finishes_what_was_taken() {
    let backend = StubBackend::new("abc");
    let probe = Arc::clone(&backend.probe);
    probe.hang.store(true, Ordering::SeqCst);
    let engine = backend.engine(EngineConfig { queue: 1, sequences: 1, ..Default::default() });
    let running = engine.submit(request("HANG one")).unwrap();
    wait("the first runs", || engine.load().running == 1);
    let waiting = engine.submit(request("two")).unwrap();
    assert_eq!(engine.submit(request("three")).unwrap_err(), SubmitError::Busy { queued: 1, retry_seconds: 1 });
    engine.drain();
    assert_eq!(engine.submit(request("four")).unwrap_err(), SubmitError::Draining);
    probe.hang.store(false, Ordering::SeqCst);
    assert_eq!(collect(running).texts, ["abc"]);
    assert_eq!(collect(waiting).texts, ["abc"]);
    wait("the thread ends", || engine.load().dead);
    assert_eq!(engine.submit(request("five")).unwrap_err(), SubmitError::Draining);
}

#[test]
fn the_end_token_can_be_forbidden_by_bias() {
    let (engine, _) = stub("a");
    let mut r = request("hi");
    r.sampling.logit_bias = vec![(EOS, -100.0)];
    r.stop.max_tokens = Some(3);
    assert_eq!(run(&engine, r).finishes, [Some(Finish::Length)]);
}

#[test]
fn a_backend_that_fails_when_it_is_warmed_up_is_no_engine() {
    let backend = StubBackend { cold: true, ..StubBackend::new("no") };
    let model = ModelInfo { id: "stub".into(), created: 0 };
    let started = Engine::start(backend, Arc::new(StubText), model, EngineConfig::default());
    let Err(StartError::WarmUp(reason)) = started else { panic!("it started") };
    assert_eq!(reason, "it was asked to fail at once");
}

#[test]
fn a_backend_that_died_ends_the_engine_and_all_requests_and_one_that_failed_does_not() {
    let (engine, _) = stub("abc");
    let failed = collect(engine.submit(request("FAIL")).unwrap());
    assert!(matches!(failed.end, Some(Err(RequestError::Step(_)))));
    assert!(collect(engine.submit(request("fine")).unwrap()).end.unwrap().is_ok());
    assert!(!engine.load().dead);

    let both = engine.submit_all(["SLOW and long", "DIE"].map(request).into()).unwrap();
    let [beside, dying] = <[Events; 2]>::try_from(both).unwrap();
    let dying = collect(dying);
    assert!(matches!(dying.end, Some(Err(RequestError::Step(_)))));
    assert!(matches!(collect(beside).end, Some(Err(RequestError::Step(_)))));
    let start = Instant::now();
    while !engine.load().dead {
        assert!(start.elapsed() < Duration::from_secs(5), "it lives");
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(matches!(engine.submit(request("late")), Err(SubmitError::Dead)));
}

#[test]
fn who_waits_when_the_backend_dies_is_told_why() {
    let engine = StubBackend::new("abc").engine(EngineConfig { sequences: 1, ..EngineConfig::default() });
    let all = engine.submit_all(["DIE", "first in the queue", "second"].map(request).into()).unwrap();
    let ends: Vec<_> = all.into_iter().map(|events| collect(events).end.unwrap().map(drop)).collect();
    let waited = Err(RequestError::Stopped("the stub is dead".into()));
    assert!(matches!(ends[0], Err(RequestError::Step(_))), "{ends:?}");
    assert_eq!(ends[1..], [waited.clone(), waited]);
    wait("the thread ends", || engine.load().dead);
}
