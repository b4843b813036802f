#[cfg(feature = "cuda")]
mod cuda;

use super::*;
use crate::stub::StubText;
use crate::watched::{Seen, Watched};
use crate::{Engine, EngineConfig, Event, Handover, ModelInfo, Request, RequestError, SamplingParams, StopRules};
use serde_json::json;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use taper_attention::Artifacts;
use taper_model::ModelFiles;

const BLOCKS: usize = 5;

#[test]
fn a_cache_is_of_the_type_of_a_devices_activations() {
    assert_eq!(own_dtype(true, DType::BF16), DType::BF16);
    assert_eq!(own_dtype(true, DType::F16), DType::F16);
    // Beside quantised weights activations are f32.
    assert_eq!(own_dtype(true, DType::F32), DType::F16);
    assert_eq!(own_dtype(false, DType::F32), DType::F16);
}

/// A real model, if a small one, with a context of one block and a cache of five.
fn backend() -> ModelBackend {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../taper-model/tests/golden/llama3");
    let resolved = ResolvedModel { name: "tiny".into(), files: ModelFiles::Folder(folder) };
    let model = Model::load(&resolved, &LoadOptions::default(), &Device::Cpu).unwrap();
    let shape = model.attention_shape();
    let shape = KvShape { layers: shape.layers, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
    let pool = KvPool::new(shape, DType::F32, BLOCKS, &Device::Cpu).unwrap();
    ModelBackend::new(model, pool, false)
}

#[test]
fn an_embedding_is_what_the_head_makes_logits_of() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../taper-model/tests/golden/llama3");
    let part = |part| {
        candle_core::safetensors::load(folder.join(format!("model-0000{part}-of-00002.safetensors")), &Device::Cpu)
    };
    let weights: std::collections::HashMap<_, _> = [1, 2].into_iter().flat_map(|i| part(i).unwrap()).collect();
    let (mut backend, prompt): (_, Vec<u32>) = (backend(), (10..30).collect());
    let mut row = |wanted: Wanted| {
        let mut sequence = backend.open(&Arc::default(), 1, &prompt, 0).unwrap();
        let row =
            backend.forward(vec![Input::whole(&mut sequence, &prompt, Some(wanted))]).unwrap().remove(0).remove(0);
        backend.close(sequence);
        row
    };
    let Row::Hidden(embedding) = row(Wanted::Hidden) else { panic!("no embedding") };
    let logits = row(Wanted::Logits).logits().unwrap();
    let width = embedding.len();
    let embedding = Tensor::from_vec(embedding, (width, 1), &Device::Cpu).unwrap();
    let product =
        weights["lm_head.weight"].to_dtype(DType::F32).unwrap().matmul(&embedding).unwrap().flatten_all().unwrap();
    for (i, (a, b)) in product.to_vec1::<f32>().unwrap().iter().zip(&logits).enumerate() {
        assert!((a - b).abs() < 1e-4 * (1.0 + b.abs()), "{i}: {a} and {b}");
    }
}

#[test]
fn a_sequence_handed_over_goes_on_as_it_would_have_where_it_was() {
    fn logits<B: Backend>(backend: &mut B, sequences: &mut [&mut B::Sequence], tokens: &[u32]) -> Vec<Vec<f32>> {
        let input = |sequence| Input::whole(sequence, tokens, Some(Wanted::Logits));
        let rows = backend.forward(sequences.iter_mut().map(|s| input(&mut **s)).collect()).unwrap();
        rows.into_iter().map(|mut rows| rows.remove(0).logits().unwrap()).collect()
    }
    let (spec, prompt): (_, Vec<u32>) = (Arc::new(AttentionSpec::default()), (10..30).collect());
    let mut alone = backend();
    let mut own = alone.open(&spec, 1, &prompt, 0).unwrap();
    let mut expected = vec![logits(&mut alone, &mut [&mut own], &prompt)];
    expected.extend([5, 6, 7].map(|token| logits(&mut alone, &mut [&mut own], &[token])));

    let mut both = Handover::new(backend(), backend());
    let mut first = both.open(&spec, 1, &prompt, 0).unwrap();
    logits(&mut both, &mut [&mut first], &prompt[..8]);
    assert!(both.hand_over(&first, &spec, 1).unwrap_err().0.contains("8 of 20 prompt tokens"));
    logits(&mut both, &mut [&mut first], &prompt[8..]);
    let mut second = both.hand_over(&first, &spec, 1).unwrap();
    let mut third = both.fork(&second, 2).unwrap();
    assert_eq!([&first, &second, &third].map(|held| held.answers), [false, true, true]);
    for (step, token) in [5, 6, 7].into_iter().enumerate() {
        for sequences in [&mut [&mut first][..], &mut [&mut third, &mut second]] {
            let rows = logits(&mut both, sequences, &[token]);
            assert!(rows.iter().all(|row| *row == expected[step + 1][0]), "step {step}");
        }
    }
    let inputs = [&mut first, &mut second].map(|sequence| Input::whole(sequence, &[8], Some(Wanted::Logits)));
    assert!(both.forward(inputs.into()).unwrap_err().0.contains("on another device"));
    assert_eq!((both.cached(&first), both.cached(&second)), (23, 23));
    assert_eq!(both.usage(&second).prefill.density, both.usage(&first).prefill.density);
    [first, second, third].into_iter().for_each(|held| both.close(held));
    both.check_idle();
}

/// One step of rows, each of a token and what it wants, and how the token after that is drawn.
fn step(
    backend: &mut ModelBackend,
    sequences: &mut [&mut Sequence],
    tokens: &[u32],
    next: Option<Draw>,
) -> Result<Vec<u32>, BackendError> {
    let input = |(sequence, token)| {
        let wants = Some(Wanted::Token(DRAW));
        Input { next, ..Input::whole(sequence, std::slice::from_ref(token), wants) }
    };
    let rows = backend.forward(sequences.iter_mut().map(|s| &mut **s).zip(tokens).map(input).collect())?;
    let token = |rows: Vec<Row>| if let [Row::Token(Some(token))] = rows[..] { token } else { panic!("{rows:?}") };
    Ok(rows.into_iter().map(token).collect())
}

const DRAW: Draw = Draw { temperature: 1.0, uniform: 0.37, ..Draw::LIKELIEST };

#[test]
fn a_step_begun_ahead_is_taken_where_it_is_what_is_asked_for_and_no_other() {
    let quest = json!({ "method": "quest", "dense_layers": 0, "sink": 1, "window": 2, "k": 4, "page": 4 });
    let top = json!({ "method": "quest", "page": 4 });
    let vattention = json!({ "method": "vattention", "epsilon": 0.3, "sink": 1, "window": 2, "top_k": 4, "pilot_tokens": 4, "top": top });
    for decode in [json!({ "method": "dense" }), quest, vattention, json!({ "method": "santa", "samples": 8 })] {
        steps_begun_ahead(&decode);
    }
}

fn steps_begun_ahead(decode: &serde_json::Value) {
    let spec = AttentionSpec::from_json(&json!({ "decode": decode }), "attention", &Artifacts::default()).unwrap();
    let spec = Arc::new(spec);
    let prompts = [(10..30).collect::<Vec<u32>>(), (5..12).collect(), (20..50).collect()];
    let opened = |runs_ahead| {
        let mut backend = backend();
        backend.run_ahead(runs_ahead);
        let sequences = prompts.each_ref().map(|prompt| {
            let mut sequence = backend.open(&spec, 1, prompt, 0).unwrap();
            backend.forward(vec![Input::whole(&mut sequence, prompt, Some(Wanted::Logits))]).unwrap();
            sequence
        });
        (backend, sequences)
    };
    let (mut plain, [mut a, mut b, mut c]) = opened(false);
    let (mut ahead, [mut x, mut y, mut z]) = opened(true);
    let mut follows = |of: [bool; 3], tokens: &[u32], next: Option<Draw>, followed: usize| {
        let before = ahead.followed;
        fn chosen(three: [&mut Sequence; 3], of: [bool; 3]) -> Vec<&mut Sequence> {
            three.into_iter().zip(of).filter_map(|(sequence, of)| of.then_some(sequence)).collect()
        }
        let mut rows = chosen([&mut a, &mut b, &mut c], of);
        let expected = step(&mut plain, &mut rows[..], tokens, None).unwrap();
        let mut rows = chosen([&mut x, &mut y, &mut z], of);
        let got = step(&mut ahead, &mut rows[..], tokens, next).unwrap();
        assert_eq!(got, expected);
        assert_eq!(ahead.followed - before, followed);
        assert_eq!([x.len(), y.len(), z.len()], [a.len(), b.len(), c.len()]);
        got
    };
    let all = [true; 3];
    let drawn = follows(all, &[1, 2, 3], Some(DRAW), 0);
    let drawn = follows(all, &drawn, Some(DRAW), 3);
    // One ends; the others follow.
    let drawn = follows([true, false, true], &[drawn[0], drawn[2]], Some(DRAW), 2);
    // One comes back by another token than it drew, with the others: they follow, it does not.
    let drawn = follows(all, &[drawn[0], 9, drawn[1]], Some(DRAW), 2);
    // After a step of two parts nothing is underway; then all go together again.
    let drawn = follows(all, &drawn, Some(DRAW), 0);
    let drawn = follows(all, &drawn, Some(DRAW), 3);
    // Other tokens, other draws than foreseen, the last token.
    let drawn = follows(all, &[drawn[0], drawn[1] ^ 1, drawn[2] ^ 1], Some(DRAW), 1);
    let drawn = follows(all, &drawn, Some(Draw { uniform: 0.5, ..DRAW }), 0);
    let drawn = follows(all, &drawn, None, 0);
    follows(all, &drawn, None, 0);
    for (without, with) in [(&a, &x), (&b, &y), (&c, &z)] {
        assert_eq!(json!(ahead.usage(with)), json!(plain.usage(without)));
    }
    for (backend, sequences) in [(plain, [a, b, c]), (ahead, [x, y, z])] {
        let mut backend = backend;
        sequences.into_iter().for_each(|sequence| backend.close(sequence));
        backend.check_idle();
    }
}

/// The engine over the real backend, slow enough to be cancelled, failing after the step asked for has written its keys;
/// with what is seen of it, and its steps.
fn engine(fails_at: usize) -> (Engine, Arc<Seen>, Arc<AtomicUsize>) {
    let (mut backend, steps) = (Watched::new(backend()), Arc::new(AtomicUsize::new(0)));
    let (seen, count) = (Arc::clone(&backend.seen), Arc::clone(&steps));
    backend.before = Box::new(|_| std::thread::sleep(Duration::from_millis(20)));
    backend.after = Box::new(move |inner| {
        assert!(inner.free_blocks() < BLOCKS, "a running request holds blocks");
        let step = count.fetch_add(1, Ordering::SeqCst) + 1;
        if step == fails_at { Err(BackendError("it was asked for".into())) } else { Ok(()) }
    });
    let model = ModelInfo { id: "tiny".into(), created: 0 };
    (Engine::start(backend, Arc::new(StubText), model, EngineConfig::default()).unwrap(), seen, steps)
}

/// Three answers of 44 tokens.
fn request() -> Request {
    Request {
        id: "test".into(),
        prompt: (1..=20).collect(),
        continues: true,
        sampling: SamplingParams { temperature: 1.0, seed: 1, ..SamplingParams::default() },
        stop: StopRules { ignore_eos: true, ..StopRules::default() },
        choices: 3,
        ..Request::default()
    }
}

/// Free blocks once nothing runs.
fn free_when_idle(engine: &Engine, seen: &Seen) -> usize {
    let start = Instant::now();
    while engine.load().running + engine.load().waiting > 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "it never ends");
        std::thread::sleep(Duration::from_millis(2));
    }
    seen.free.load(Ordering::SeqCst)
}

#[test]
fn a_cancelled_request_gives_its_blocks_back() {
    let (engine, seen, steps) = engine(usize::MAX);
    let mut events = engine.submit(request()).unwrap();
    while !matches!(events.blocking_recv(), Some(Event::Delta(_))) {}
    drop(events);
    assert_eq!(free_when_idle(&engine, &seen), BLOCKS);
    assert!(steps.load(Ordering::SeqCst) < 44, "it was cancelled, not finished");
}

#[test]
fn a_failing_step_gives_its_blocks_back() {
    for fails_at in [1, 7] {
        let (engine, seen, _) = engine(fails_at);
        let mut events = engine.submit(request()).unwrap();
        let mut last = None;
        while let Some(event) = events.blocking_recv() {
            last = Some(event);
        }
        assert!(matches!(last, Some(Event::Failed(RequestError::Step(_)))), "{last:?}");
        assert_eq!(free_when_idle(&engine, &seen), BLOCKS);
    }
}

#[test]
fn a_step_that_the_model_refuses_leaves_a_sequence_that_can_be_closed() {
    let mut backend = backend();
    let mut sequence = backend.open(&Arc::default(), 1, &[1, 2, 3], 0).unwrap();
    let tokens = [1, 2, 1_000_000];
    backend.forward(vec![Input::whole(&mut sequence, &tokens, Some(Wanted::Logits))]).unwrap_err();
    backend.close(sequence);
    backend.check_idle();
    assert_eq!(backend.pool.free_blocks(), BLOCKS);
}

#[test]
#[should_panic = "reference counts differ"]
fn blocks_that_nobody_holds_are_found() {
    let mut backend = backend();
    let mut sequence = backend.open(&Arc::default(), 1, &[1, 2, 3], 0).unwrap();
    backend.forward(vec![Input::whole(&mut sequence, &[1, 2, 3], Some(Wanted::Logits))]).unwrap();
    backend.check_idle();
}

#[test]
fn first_steps_that_fail_for_want_of_memory_say_what_has_taken_it() {
    let said = |reason: &str, free| tried(BackendError(reason.into()), 15 << 30, 40 << 30, free).0;
    let full = said("santa: CUDA status 2 (out of memory)", Some(1 << 20));
    assert!(full.contains("15.0 GiB of weights, 40.0 GiB of KV cache and 1.0 MiB free"), "{full}");
    assert!(full.contains("--kv-memory") && full.ends_with("(santa: CUDA status 2 (out of memory))"), "{full}");
    assert_eq!(said("no kernel", Some(1 << 20)), "the first steps fail: no kernel");
}

#[test]
fn a_step_begun_ahead_that_fails_beside_others_leaves_all_as_they_were() {
    let spec = json!({ "decode": { "method": "streaming_llm", "sink": 1, "window": 8 } });
    let spec = Arc::new(AttentionSpec::from_json(&spec, "attention", &Artifacts::default()).unwrap());
    let opened = || {
        let mut backend = backend();
        backend.run_ahead(true);
        let sequences = [10..30, 5..12, 20..50].map(|prompt: std::ops::Range<u32>| {
            let prompt: Vec<u32> = prompt.collect();
            let mut sequence = backend.open(&spec, 1, &prompt, 0).unwrap();
            backend.forward(vec![Input::whole(&mut sequence, &prompt, Some(Wanted::Logits))]).unwrap();
            sequence
        });
        (backend, sequences)
    };
    let lengths = |all: [&Sequence; 3]| all.map(Sequence::len);
    let (mut plain, [mut a, mut b, mut c]) = opened();
    let (mut broken, [mut x, mut y, mut z]) = opened();
    let first = step(&mut plain, &mut [&mut a, &mut b], &[1, 2], Some(DRAW)).unwrap();
    assert_eq!(step(&mut broken, &mut [&mut x, &mut y], &[1, 2], Some(DRAW)).unwrap(), first);
    let tokens = [first[0], first[1], 3];
    let expected = step(&mut plain, &mut [&mut a, &mut b, &mut c], &tokens, None).unwrap();
    assert_eq!(plain.followed, 2);

    // The rows begun ahead fail at their end, beside one that was not.
    let before = lengths([&x, &y, &z]);
    broken.ends = vec![Err(BackendError("asked for".into()))].into_iter();
    let failed = step(&mut broken, &mut [&mut x, &mut y, &mut z], &tokens, None).unwrap_err();
    assert_eq!((failed.0.as_str(), lengths([&x, &y, &z])), ("asked for", before));
    assert_eq!(step(&mut broken, &mut [&mut x, &mut y, &mut z], &tokens, None).unwrap(), expected);

    // The one that was not fails: its block is not to be had.
    let next = |drawn: &[u32]| [drawn[0], drawn[1], drawn[2]];
    let ahead = step(&mut broken, &mut [&mut x, &mut y], &expected[..2], Some(DRAW)).unwrap();
    let before = lengths([&x, &y, &z]);
    let long: Vec<u32> = (0..64 * BLOCKS as u32).map(|token| token % 50).collect();
    let mut large = broken.open(&spec, 1, &long, 0).unwrap();
    let wants = |sequence, tokens| Input::whole(sequence, tokens, Some(Wanted::Token(DRAW)));
    let inputs = vec![wants(&mut x, &ahead[..1]), wants(&mut y, &ahead[1..]), wants(&mut large, &long)];
    assert!(broken.forward(inputs).unwrap_err().0.contains("full"));
    assert_eq!((lengths([&x, &y, &z]), large.len()), (before, 0));
    broken.close(large);
    step(&mut plain, &mut [&mut a, &mut b], &expected[..2], None).unwrap();
    let tokens = next(&[ahead[0], ahead[1], expected[2]]);
    let expected = step(&mut plain, &mut [&mut a, &mut b, &mut c], &tokens, None).unwrap();
    assert_eq!(step(&mut broken, &mut [&mut x, &mut y, &mut z], &tokens, None).unwrap(), expected);
    // No token of a step that failed is reported beside that of the step that was tried again.
    for (without, with) in [(&a, &x), (&b, &y), (&c, &z)] {
        assert_eq!(json!(broken.usage(with)), json!(plain.usage(without)));
    }
    [x, y, z].into_iter().for_each(|sequence| broken.close(sequence));
    broken.check_idle();
}
