//! The engine over backends that are slow or wrong: who waits for them, and who pays.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use taper_engine::stub::{Probe, StubBackend};
use taper_engine::{Engine, EngineConfig, Event, Events, Request, RequestError, Row, SamplingParams, StopRules};

fn request(prompt: &str) -> Request {
    Request {
        prompt: prompt.bytes().map(u32::from).collect(),
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        ..Request::default()
    }
}

/// One that goes on for long.
fn endless(prompt: &str) -> Request {
    let stop = StopRules { ignore_eos: true, max_tokens: Some(400), ..StopRules::default() };
    Request { stop, ..request(prompt) }
}

fn start(backend: StubBackend) -> (Engine, Arc<Probe>) {
    let probe = Arc::clone(&backend.probe);
    (backend.engine(EngineConfig::default()), probe)
}

/// The text of a request with one answer, or why there is none.
fn text(mut events: Events) -> Result<String, RequestError> {
    let mut text = String::new();
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Delta(delta) => text.push_str(&delta.text),
            Event::Failed(error) => return Err(error),
            _ => {}
        }
    }
    Ok(text)
}

#[test]
fn nobody_waits_while_it_is_found_out_what_a_prompt_begins_with() {
    let (engine, probe) = start(StubBackend::new("ab"));
    let reaches = |count: &AtomicUsize, times| {
        let start = Instant::now();
        while count.load(Ordering::SeqCst) < times {
            assert!(start.elapsed() < Duration::from_secs(60), "waited in vain");
            std::thread::yield_now();
        }
    };
    let first = engine.submit(endless("SLOW")).unwrap();
    // It has been looked at, and has begun.
    reaches(&probe.steps, 1);
    let look = probe.look.lock().unwrap();
    let second = engine.submit(request("hi")).unwrap();
    reaches(&probe.looked, 2);
    std::thread::scope(|scope| {
        let (told, tells) = std::sync::mpsc::channel();
        let engine = &engine;
        scope.spawn(move || told.send(engine.load().waiting));
        let waiting = tells.recv_timeout(Duration::from_secs(20));
        drop(look);
        assert_eq!(waiting, Ok(1));
    });
    assert_eq!(text(second), Ok("ab".into()));
    drop(first);
}

#[test]
fn rows_that_are_not_those_asked_for_end_requests_and_go_to_no_other() {
    type Spoils = fn(&mut Vec<Vec<Row>>);
    // What the one that is last hears, and what the other does.
    let wrong = |got, wanted| Err(RequestError::Rows { got, wanted });
    let more: Spoils = |rows| {
        if rows.len() == 2 {
            rows[1].push(Row::Token(None))
        }
    };
    let none: Spoils = |rows| {
        if rows.len() == 2 {
            rows[1].clear()
        }
    };
    let fewer: Spoils = |rows| drop(if rows.len() == 2 { rows.pop() } else { None });
    let most: Spoils = |rows| {
        if rows.len() == 2 {
            rows.push(Vec::new())
        }
    };
    let nothing = Err(RequestError::Step("the forward pass returned no logits".into()));
    let whole = Ok("abcabcabc".to_string());
    for (spoils, first, second) in [
        (more, whole.clone(), wrong(2, 1)),
        (none, whole, nothing),
        (fewer, wrong(1, 2), wrong(1, 2)),
        (most, wrong(3, 2), wrong(3, 2)),
    ] {
        let (engine, probe) = start(StubBackend { spoils: Some(spoils), ..StubBackend::new("abc") });
        let stop = StopRules { ignore_eos: true, max_tokens: Some(12), ..StopRules::default() };
        let asked = ["SLOW one", "SLOW two"].map(|prompt| Request { stop: stop.clone(), ..request(prompt) });
        let events = engine.submit_all(asked.into()).unwrap();
        let told: Vec<_> = events.into_iter().map(text).collect();
        assert_eq!(told, [first, second]);
        assert_eq!(text(engine.submit(request("hi")).unwrap()), Ok("abc".into()), "the engine goes on");
        assert_eq!(probe.open.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn steps_that_lack_memory_are_made_of_fewer_rows_from_then_on() {
    // Eight of two tokens each, and memory for five; or for all, once some was given back.
    for (spare, failed) in [(0, 3), (16, 1)] {
        let mut backend = StubBackend { memory: 5, spare, ..StubBackend::new("abc") };
        backend.limits.cache_tokens = 4096;
        let (engine, probe) = start(backend);
        let stop = StopRules { ignore_eos: true, max_tokens: Some(41), ..StopRules::default() };
        let asked = vec![Request { stop, ..request("hi") }; 8];
        let events = engine.submit_all(asked).unwrap();
        for told in events.into_iter().map(text).collect::<Vec<_>>() {
            assert_eq!(told, Ok("abc".repeat(10) + "a"));
        }
        assert_eq!(probe.lacked.load(Ordering::SeqCst), failed);
        // Two passes of four rows for each token, or one of eight.
        let passes = if spare == 0 { 2 } else { 1 };
        let steps = probe.steps.load(Ordering::SeqCst);
        assert!(steps <= 3 + 4 + 40 * passes + 1, "{steps}");
    }
}

#[test]
fn a_request_that_lacks_memory_alone_ends_and_no_other_does() {
    let (engine, _) = start(StubBackend { memory: 5, ..StubBackend::new("abc") });
    let events = engine.submit_all(["hi", "too long", "ho"].map(request).into()).unwrap();
    let told: Vec<_> = events.into_iter().map(text).collect();
    let lacks = Err(RequestError::Step("CUDA status 2 (out of memory)".into()));
    assert_eq!(told, [Ok("abc".into()), lacks.clone(), Ok("abc".into())]);

    // The others go together afterwards as they did before.
    let (engine, probe) = start(StubBackend::new("abc"));
    let stop = StopRules { ignore_eos: true, max_tokens: Some(41), ..StopRules::default() };
    let asked = ["hi", "ho", "HUGE", "he", "ha"].map(|prompt| Request { stop: stop.clone(), ..request(prompt) });
    let events = engine.submit_all(asked.into()).unwrap();
    let mut told: Vec<_> = events.into_iter().map(text).collect();
    assert_eq!(told.remove(2), lacks);
    assert!(told.iter().all(|told| *told == Ok("abc".repeat(10) + "a")), "{told:?}");
    // Five rows, the half of them that has it, it alone; and the rows of the others in one pass for each token.
    assert_eq!(probe.lacked.load(Ordering::SeqCst), 3);
    let steps = probe.steps.load(Ordering::SeqCst);
    assert!(steps <= 41 + 8, "{steps}");
}
