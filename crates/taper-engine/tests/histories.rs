//! Random histories of a small engine: requests come, are read, dropped and late; some ask for trouble. Whatever happens
//! to the others, each that was taken ends once, with the answer that it gets alone and without drafts, and nothing stays behind.

use proptest::prelude::*;
use serde_json::json;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use taper_attention::{Artifacts, AttentionSpec};
use taper_engine::stub::{StubBackend, StubText};
use taper_engine::watched::{Seen, Watched};
use taper_engine::{
    Engine, EngineConfig, Event, Events, Finish, Limits, ModelInfo, Request, RequestError, SamplingParams, Scored,
    Shape, StopRules, SubmitError, Usage,
};

/// Something that happens.
#[derive(Debug, Clone)]
enum Act {
    Submit(Wish),
    /// The client of one of those taken, by number, reads so many events.
    Read(usize, usize),
    /// The client of one goes away.
    Drop(usize),
    /// So many microseconds pass.
    Wait(u64),
}

/// A request.
#[derive(Debug, Clone)]
struct Wish {
    prompt: usize,
    max_tokens: usize,
    choices: usize,
    temperature: f32,
    seed: u64,
    ignore_eos: bool,
    /// Tokens drafted at a time.
    drafts: usize,
    logprobs: bool,
    /// Whether the prompt's tokens are scored.
    scored: bool,
    priority: i64,
    /// A row of tokens of the answer that must not come.
    banned: bool,
    /// Whether tokens cost something once they have come.
    penalized: bool,
    /// Texts and tokens that end the answer, whether they are shown, and how many tokens come before.
    ends: (&'static [&'static str], Option<u8>, bool),
    least: usize,
    /// What the answer must be.
    shape: Option<&'static (&'static str, RangeInclusive<char>)>,
    /// What the [stub](StubBackend) does at its sight.
    trouble: Option<&'static str>,
    /// Microseconds until its deadline.
    deadline: Option<u64>,
}

impl Wish {
    fn attention(&self) -> AttentionSpec {
        let speculate = match self.drafts {
            0 => json!(null),
            tokens if tokens % 2 == 0 => json!({ "method": "quest", "tokens": tokens, "lookup": tokens / 2 }),
            tokens => json!({ "method": "quest", "tokens": tokens }),
        };
        AttentionSpec::from_json(&json!({ "speculate": speculate }), "attention", &Artifacts::default()).unwrap()
    }

    fn request(&self, engine: &Engine) -> Request {
        // The word first, so that it is seen in the first chunk.
        let word = self.trouble.unwrap_or_default();
        let prompt = word.bytes().chain(std::iter::repeat_n(b'x', self.prompt)).map(u32::from).collect();
        let (strings, token, shown) = self.ends;
        Request {
            id: "history".into(),
            prompt,
            attention: Arc::new(self.attention()),
            sampling: SamplingParams {
                temperature: self.temperature,
                top_p: 0.95,
                seed: self.seed,
                banned: self.banned.then(|| b"len".map(u32::from).to_vec()).into_iter().collect(),
                frequency_penalty: if self.penalized { 0.5 } else { 0.0 },
                repetition_penalty: if self.penalized { 1.2 } else { 1.0 },
                ..Default::default()
            },
            grammar: self.shape.map(|(shape, _)| engine.grammar(&Shape::Regex((*shape).into())).unwrap()),
            stop: StopRules {
                strings: strings.iter().map(|string| (*string).into()).collect(),
                tokens: token.into_iter().map(u32::from).collect(),
                ignore_eos: self.ignore_eos,
                min_tokens: self.least,
                max_tokens: Some(self.max_tokens),
                shown,
            },
            choices: self.choices,
            logprobs: self.logprobs.then_some(0),
            prompt_logprobs: self.scored.then_some(1),
            priority: self.priority,
            deadline: self.deadline.map(|micros| Instant::now() + Duration::from_micros(micros)),
            ..Request::default()
        }
    }
}

/// What has come of a request so far.
#[derive(Debug, Default, Clone)]
struct Answer {
    scored: Option<Vec<Scored>>,
    /// By choice: tokens, text, how it ended.
    choices: Vec<(Vec<u32>, String, Option<Finish>)>,
    end: Option<Result<Usage, RequestError>>,
}

impl Answer {
    fn take(&mut self, event: Event) {
        assert!(self.end.is_none(), "nothing follows the last event");
        match event {
            Event::Embedding(_) => panic!("not asked for"),
            Event::Prefilled => assert!(self.choices.is_empty(), "the prompt is in before the first token, and once"),
            Event::Prompt(scored) => {
                assert!(self.choices.is_empty() && self.scored.is_none(), "before the first token, and once");
                self.scored = Some(scored);
            }
            Event::Delta(delta) => {
                self.choices.resize_with(self.choices.len().max(delta.choice + 1), Default::default);
                let (tokens, text, finish) = &mut self.choices[delta.choice];
                assert_eq!(*finish, None, "nothing follows a choice's end");
                tokens.extend(delta.tokens.iter().map(|record| record.chosen.token));
                text.push_str(&delta.text);
                *finish = delta.finish;
            }
            Event::Done(usage) => self.end = Some(Ok(usage)),
            Event::Failed(error) => self.end = Some(Err(error)),
        }
    }

    fn finish(mut self, mut events: Events) -> Self {
        while let Some(event) = events.blocking_recv() {
            self.take(event);
        }
        self
    }
}

const CONTEXT: usize = 640;

/// An engine over the stub with so many blocks and the memory for steps of so many tokens, and its idle checks that passed.
fn engine(
    (blocks, memory): (usize, usize),
    (multiple, draws): (usize, bool),
    config: EngineConfig,
) -> (Engine, Arc<Seen>) {
    let mut stub = StubBackend { draws, memory, ..StubBackend::new("an answer of some length, which repeats") };
    stub.limits = Limits { context_tokens: CONTEXT, cache_tokens: blocks * 64, ..stub.limits };
    stub.chunk_multiple = multiple;
    let watched = Watched::new(stub);
    let seen = Arc::clone(&watched.seen);
    let model = ModelInfo { id: "stub".into(), created: 0 };
    (Engine::start(watched, Arc::new(StubText), model, config).unwrap(), seen)
}

fn wish() -> impl Strategy<Value = Wish> {
    let trouble =
        prop_oneof![12 => Just(None), 1 => Just(Some("FAIL")), 1 => Just(Some("PANIC")), 1 => Just(Some("NAN"))];
    let deadline = prop_oneof![6 => Just(None), 1 => (0u64..3000).prop_map(Some)];
    let sampling = (prop_oneof![Just(0f32), Just(4f32)], any::<u64>(), any::<bool>());
    let drafts = (prop_oneof![2 => Just(0), 1 => 1usize..16], any::<bool>());
    let more = (prop::bool::weighted(0.2), -1i64..=1, prop::bool::weighted(0.2));
    let strings = prop_oneof![
        12 => Just(&[][..]),
        1 => Just(&["h, w", "some length", "zz"][..]),
        1 => Just(&["a"][..]),
        1 => Just(&["an answer of some length, which repeats"][..])
    ];
    let ends = (strings, prop_oneof![12 => Just(None), 1 => Just(Some(b'g'))], any::<bool>());
    let ends = (ends, prop_oneof![2 => Just(0), 1 => 1usize..60]);
    let shape = prop_oneof![12 => Just(None), 1 => Just(Some(&SHAPES[0])), 1 => Just(Some(&SHAPES[1]))];
    let answer = prop_oneof![1 => 0usize..60, 1 => 150usize..350];
    let prompt = prop_oneof![2 => 1usize..80, 1 => 80usize..280];
    let sampling = (sampling, drafts, more, (any::<bool>(), shape));
    (prompt, answer, 1usize..4, sampling, (trouble, deadline), ends).prop_map(
        |(prompt, max_tokens, choices, sampling, (trouble, deadline), (ends, least))| {
            let (sampling, (drafts, logprobs), (scored, priority, banned), (penalized, shape)) = sampling;
            let (temperature, seed, ignore_eos) = sampling;
            Wish {
                prompt,
                max_tokens,
                choices,
                temperature,
                seed,
                ignore_eos,
                drafts,
                logprobs,
                scored,
                priority,
                banned,
                penalized,
                ends,
                least,
                shape,
                trouble,
                deadline,
            }
        },
    )
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => wish().prop_map(Act::Submit),
        3 => (any::<usize>(), 1usize..30).prop_map(|(who, events)| Act::Read(who, events)),
        1 => any::<usize>().prop_map(Act::Drop),
        2 => (0u64..500).prop_map(Act::Wait),
    ]
}

/// What answers may have to be, and the letters that these have beside blanks.
static SHAPES: [(&str, RangeInclusive<char>); 2] = [("[a-z ]{3,90}", 'a'..='z'), ("([a-d]{2,6} )+", 'a'..='d')];

/// Whether a text has no letter that its shape does not have.
fn fits(wish: &Wish, text: &str) -> bool {
    wish.shape.is_none_or(|(_, letters)| text.chars().all(|c| letters.contains(&c) || c == ' '))
}

static TRIED: AtomicU32 = AtomicU32::new(0);
static PREEMPTED: AtomicU32 = AtomicU32::new(0);

#[test]
fn every_history_ends_well() {
    any_history_ends_well();
    let (tried, preempted) = (TRIED.load(Ordering::SeqCst), PREEMPTED.load(Ordering::SeqCst));
    // Some 100 of 2,000 do; with whom a request meets is for the clock to say.
    assert!(preempted > tried / 50, "{preempted} of {tried} histories saw a request lose its place");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    fn any_history_ends_well(
        acts in prop::collection::vec(act(), 1..40),
        (blocks, multiple, queue) in (6usize..24, prop_oneof![Just(1usize), Just(16), Just(200)], 1usize..40),
        (chunk_tokens, sequences) in (prop_oneof![Just(1usize), Just(7), Just(64), Just(512)], 1usize..12),
        (draws, memory) in (any::<bool>(), prop_oneof![2 => Just(usize::MAX), 1 => 300usize..900]),
        last in wish(),
    ) {
        let config = EngineConfig { queue, chunk_tokens, sequences, stretch: 2.0 };
        let (small, seen) = engine((blocks, memory), (multiple, draws), config);
        let (mut taken, mut dropped) = (Vec::new(), 0);
        for act in acts {
            match act {
                Act::Submit(wish) => match small.submit(wish.request(&small)) {
                    Ok(events) => taken.push((wish, events, Answer::default())),
                    Err(SubmitError::Busy { queued, .. }) => prop_assert!(queued >= queue),
                    Err(SubmitError::Cache { needed, limit, .. }) => prop_assert!(needed > limit),
                    Err(error) => prop_assert!(false, "{error}"),
                },
                Act::Read(who, count) if !taken.is_empty() => {
                    let at = who % taken.len();
                    let (_, events, answer) = &mut taken[at];
                    (0..count).map_while(|_| events.try_recv().ok()).for_each(|event| answer.take(event));
                }
                Act::Drop(who) if !taken.is_empty() => {
                    taken.swap_remove(who % taken.len());
                    dropped += 1;
                }
                Act::Wait(micros) => std::thread::sleep(Duration::from_micros(micros)),
                _ => {}
            }
        }
        let (alone, _) = engine((64, usize::MAX), (1, false), EngineConfig::default());
        for (wish, events, answer) in taken {
            let answer = answer.finish(events);
            let expected = Wish { deadline: None, drafts: 0, ..wish.clone() };
            let expected = Answer::default().finish(alone.submit(expected.request(&alone)).unwrap());
            match (&answer.end, &expected.end) {
                (Some(Err(RequestError::Deadline)), _) => {
                    prop_assert!(wish.deadline.is_some());
                    for (own, all) in answer.choices.iter().zip(&expected.choices) {
                        prop_assert!(all.0.starts_with(&own.0), "{wish:?}");
                    }
                }
                (Some(Ok(usage)), Some(Ok(other))) => {
                    prop_assert_eq!(&answer.choices, &expected.choices, "{:?}", wish);
                    prop_assert_eq!(&answer.scored, &expected.scored, "{:?}", wish);
                    let scored = wish.scored.then(|| usage.prompt_tokens - 1);
                    prop_assert_eq!(answer.scored.as_ref().map(Vec::len), scored, "{:?}", wish);
                    let banned = |text: &str| wish.banned && text.contains("len");
                    prop_assert!(!answer.choices.iter().any(|(_, text, _)| banned(text)), "{wish:?}");
                    prop_assert!(answer.choices.iter().all(|(_, text, _)| fits(&wish, text)), "{wish:?}: {answer:?}");
                    prop_assert_eq!(usage.prompt_tokens, other.prompt_tokens);
                    prop_assert_eq!(usage.completion_tokens, other.completion_tokens);
                    prop_assert_eq!(usage.attention.len(), wish.choices);
                    prop_assert!(answer.choices.iter().all(|(.., finish)| finish.is_some()));
                }
                (Some(Err(error)), Some(Err(other))) => {
                    prop_assert!(wish.trouble.is_some());
                    prop_assert_eq!(error, other);
                }
                // A draft meets what an answer ends before.
                (Some(Err(_)), Some(Ok(_))) if wish.trouble.is_some() && wish.drafts > 0 => {}
                (end, other) => prop_assert!(false, "{wish:?} ended {end:?}, alone {other:?}"),
            }
        }
        // Those that were dropped leave too, and the engine that has nothing to do finds nothing left.
        let started = Instant::now();
        while small.load().waiting + small.load().running > 0 {
            prop_assert!(started.elapsed() < Duration::from_secs(10), "{:?} after {dropped} went away", small.load());
            std::thread::sleep(Duration::from_micros(200));
        }
        let checks = seen.checks.load(Ordering::SeqCst);
        let last = Wish { prompt: 1, max_tokens: 1, choices: 1, trouble: None, deadline: None, shape: None, ..last };
        let last = Answer::default().finish(small.submit(last.request(&small)).unwrap());
        prop_assert!(matches!(last.end, Some(Ok(_))));
        while seen.checks.load(Ordering::SeqCst) == checks {
            prop_assert!(started.elapsed() < Duration::from_secs(10), "the idle engine is not sound");
            std::thread::sleep(Duration::from_micros(200));
        }
        prop_assert_eq!(seen.free.load(Ordering::SeqCst), blocks);
        TRIED.fetch_add(1, Ordering::SeqCst);
        PREEMPTED.fetch_add(u32::from(small.load().counts.preemptions > 0), Ordering::SeqCst);
    }
}
