use super::*;
use crate::results::Header;
use serde_json::json;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use taper_attention::Sequence;
use taper_engine::stub::{EOS, Probe, StubBackend, StubText};
use taper_engine::{CacheDType, CacheOptions, Limits, ModelBackend, Text};
use taper_model::{LoadOptions, ModelFiles, ResolvedModel};

/// The stub's text, bytes as tokens, in as many tokens as `vocabulary` allows.
struct Bytes {
    vocabulary: u32,
    end: u32,
}

impl PromptText for Bytes {
    fn prompt(&self, user: &str, prefix: &str) -> Result<Vec<u32>, EvalError> {
        Ok(user.bytes().chain(prefix.bytes()).map(|byte| u32::from(byte) % self.vocabulary).collect())
    }

    fn decode(&self, tokens: &[u32]) -> String {
        StubText.decode(tokens, false)
    }

    fn ends(&self, token: u32) -> bool {
        token == self.end
    }
}

const STUB: Bytes = Bytes { vocabulary: 256, end: EOS };

/// Says stop after so many questions of it.
struct Follow {
    left: Cell<usize>,
    done: usize,
    begun: usize,
}

impl Follow {
    fn new(left: usize) -> Self {
        Self { left: Cell::new(left), done: 0, begun: 0 }
    }
}

impl Watch for Follow {
    fn stopped(&self) -> bool {
        self.left.set(self.left.get().saturating_sub(1));
        self.left.get() == 0
    }

    fn begins(&mut self, _: Task, _: usize, _: &Method) {
        self.begun += 1;
    }

    fn done(&mut self, answers: usize, _: &mut Results) -> Result<(), EvalError> {
        self.done += answers;
        Ok(())
    }
}

fn same_spec<B: Backend>(
    backend: &mut B,
    sequence: &B::Sequence,
    _: &Arc<AttentionSpec>,
    seed: u64,
) -> Result<B::Sequence, BackendError> {
    backend.fork(sequence, seed)
}

fn method(phase: Phase, value: serde_json::Value) -> Method {
    Method::read(phase, &value, &Artifacts::default()).unwrap()
}

fn plan(samples: usize) -> Plan {
    Plan {
        tasks: vec![Task::Single2, Task::MultiKey2],
        lengths: vec![3000],
        samples: 0..samples,
        prefills: vec![method(Phase::Prefill, json!({ "method": "dense" }))],
        decodes: vec![
            method(Phase::Decode, json!({ "method": "dense" })),
            method(Phase::Decode, json!({ "method": "streaming_llm" })),
        ],
        question: Question::Prefill,
        audit: 0.0,
        artifacts: Artifacts::default(),
        chunk_tokens: 512,
    }
}

fn results() -> Results {
    Results::new(Header {
        model: "stub".into(),
        loaded: String::new(),
        question: "prefill".into(),
        seed: 3,
        weights: None,
        artifacts: BTreeMap::new(),
    })
}

/// A stub that always answers what the first question wants.
fn stub() -> (StubBackend, Arc<Probe>) {
    let wanted = Task::Single2.sample(3000, 3, 0, &STUB).unwrap().wanted;
    let mut stub = StubBackend::new(&format!("It is {}.", wanted[0]));
    stub.limits = Limits { context_tokens: 4096, cache_tokens: 8192, ..stub.limits };
    let probe = Arc::clone(&stub.probe);
    (stub, probe)
}

fn run_stub(plan: &Plan, results: &mut Results, watch: &mut Follow) -> (Result<Outcome, EvalError>, Arc<Probe>) {
    let (mut backend, probe) = stub();
    let outcome = run(&mut backend, same_spec, &STUB, plan, results, watch);
    assert_eq!(probe.open.load(Ordering::SeqCst), 0, "every sequence is closed");
    (outcome, probe)
}

#[test]
fn a_prompt_is_prefilled_once_and_answered_by_every_decode_method() {
    let (mut results, mut watch) = (results(), Follow::new(usize::MAX));
    let (outcome, probe) = run_stub(&plan(2), &mut results, &mut watch);
    assert_eq!(outcome.unwrap(), Outcome::Complete);
    assert_eq!((watch.done, watch.begun, results.records.len()), (plan(2).answers(), 4, 8));
    let first = &results.records[0];
    assert_eq!((first.task, first.sample, first.score, first.answer.len()), (Task::Single2, 0, 1.0, 14));
    assert!(results.records[2..].iter().all(|r| r.score == 0.0), "another question wants something else");
    let chunks: usize = results.records.iter().map(|r| r.prompt_tokens.div_ceil(512)).sum::<usize>() / 2;
    // The prompt's last step gives an answer's first token; 14 more steps give 13 tokens and the end.
    assert_eq!(probe.steps.load(Ordering::SeqCst), chunks + 8 * 14);
}

#[test]
fn the_prompts_in_a_file_are_those_that_are_asked() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts.jsonl");
    let plan = Plan { lengths: vec![3000, 2000], ..plan(2) };
    assert_eq!(write_prompts(&plan, 3, &STUB, &file).unwrap(), 8);
    let text = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut results = results();
    run_stub(&plan, &mut results, &mut Follow::new(usize::MAX)).0.unwrap();
    assert_eq!(lines.len(), 8);
    // Two decode methods answer each.
    for (line, record) in lines.iter().zip(results.records.iter().step_by(2)) {
        let asked = record.task.sample(record.length, 3, record.sample, &STUB).unwrap();
        assert_eq!(record.prompt_tokens, asked.tokens.len());
        let expected = json!({
            "task": record.task, "length": record.length, "sample": record.sample, "seed": 3, "tokens": asked.tokens,
            "question_tokens": asked.question_tokens, "answer_tokens": 128, "wanted": record.wanted,
        });
        assert_eq!(*line, expected);
    }
    let short = Plan { lengths: vec![10], ..plan.clone() };
    assert!(matches!(write_prompts(&short, 3, &STUB, &file), Err(EvalError::Length { .. })));
    assert!(matches!(write_prompts(&plan, 3, &STUB, folder.path()), Err(EvalError::Io { .. })));
}

#[test]
fn what_is_there_is_not_run_again() {
    let (mut once, mut watch) = (results(), Follow::new(usize::MAX));
    run_stub(&plan(3), &mut once, &mut watch).0.unwrap();
    let mut twice = results();
    let mut short = plan(2);
    short.decodes.truncate(1);
    run_stub(&short, &mut twice, &mut Follow::new(usize::MAX)).0.unwrap();
    let mut watch = Follow::new(usize::MAX);
    run_stub(&plan(3), &mut twice, &mut watch).0.unwrap();
    assert_eq!((watch.done, watch.begun), (plan(3).answers(), 6));
    let answers = |results: &Results| {
        let mut all: Vec<_> =
            results.records.iter().map(|r| (r.task, r.sample, r.decode, r.answer.clone(), r.prompt_tokens)).collect();
        all.sort();
        all
    };
    assert_eq!(answers(&once), answers(&twice));
    let (mut first, mut last) = (results(), results());
    run_stub(&plan(2), &mut first, &mut Follow::new(usize::MAX)).0.unwrap();
    let rest = Plan { samples: 2..3, ..plan(1) };
    run_stub(&rest, &mut last, &mut Follow::new(usize::MAX)).0.unwrap();
    first.absorb(last);
    assert_eq!(answers(&once), answers(&first), "a grid cut in two gives the same answers");
    let (_, probe) = run_stub(&plan(3), &mut twice, &mut Follow::new(usize::MAX));
    assert_eq!(probe.steps.load(Ordering::SeqCst), 0);
}

#[test]
fn a_stop_keeps_whole_questions() {
    for checks in 1..60 {
        let (mut results, mut watch) = (results(), Follow::new(checks));
        let (outcome, _) = run_stub(&plan(1), &mut results, &mut watch);
        assert_eq!(outcome.unwrap(), Outcome::Stopped);
        assert!(results.records.len().is_multiple_of(2) && results.records.len() == watch.done);
    }
}

#[test]
fn a_plan_that_cannot_run_says_why() {
    let error = |change: fn(&mut Plan)| {
        let mut plan = plan(1);
        change(&mut plan);
        run_stub(&plan, &mut results(), &mut Follow::new(usize::MAX)).0.unwrap_err().to_string()
    };
    assert_eq!(error(|p| p.lengths = vec![4097]), "length 4097: the model's context holds 4096 tokens");
    assert!(error(|p| p.lengths = vec![200]).contains("single_2 takes some"));
    assert_eq!(error(|p| p.samples = 2..2), "nothing to run: samples must be at least 1");
    assert_eq!(error(|p| p.decodes.clear()), "nothing to run: decode methods must be at least 1");
    assert!(error(|p| p.audit = 7.0).starts_with("audit: "));
}

#[test]
fn logits_that_are_no_numbers_are_an_error() {
    assert!(likeliest(&[0.0, f32::NAN]).is_err() && likeliest(&[]).is_err());
    assert_eq!(likeliest(&[1.0, 3.0, 3.0]).unwrap(), 1);
    assert_eq!(likeliest(&[f32::NEG_INFINITY; 2]).unwrap(), 0);
}

/// What the program does: a fork goes on by its own decode method.
fn own_spec(
    backend: &mut ModelBackend,
    sequence: &Sequence,
    spec: &Arc<AttentionSpec>,
    seed: u64,
) -> Result<Sequence, BackendError> {
    let mut fork = backend.fork(sequence, seed)?;
    fork.decode_by(spec);
    Ok(fork)
}

/// A random model of two layers with a context of 4,096 tokens.
fn tiny(folder: &Path) -> ModelBackend {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../taper-model/tests/golden");
    let read = |path: &str| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(golden.join(path)).unwrap()).unwrap()
    };
    let mut config = read("smollm2/config.json");
    config["max_position_embeddings"] = json!(4096);
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    std::fs::copy(golden.join("smollm2/model.safetensors"), folder.join("model.safetensors")).unwrap();
    let tokenizer = read("tokenizers/smollm.json")["tokenizer"].to_string();
    std::fs::write(folder.join("tokenizer.json"), tokenizer).unwrap();
    let model = ResolvedModel { name: "tiny".into(), files: ModelFiles::Folder(folder.to_owned()) };
    let cache = CacheOptions { dtype: Some(CacheDType::F32), ..CacheOptions::default() };
    taper_engine::load(&model, &LoadOptions::default(), cache, &candle_core::Device::Cpu).unwrap().0
}

#[test]
fn a_real_model_reports_density_and_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut backend = tiny(folder.path());
    let text = Bytes { vocabulary: 64, end: u32::MAX };
    let streaming = json!({ "method": "streaming_llm", "window": 256 });
    let delta = json!({ "method": "delta", "gamma": 16, "base": streaming });
    let plan = Plan {
        tasks: vec![Task::MultiKey3],
        lengths: vec![2048],
        samples: 0..1,
        prefills: [json!({ "method": "dense" }), streaming, delta].map(|m| method(Phase::Prefill, m)).to_vec(),
        decodes: vec![method(Phase::Decode, json!({ "method": "streaming_llm", "window": 256 }))],
        question: Question::Prefill,
        audit: 0.5,
        artifacts: Artifacts::default(),
        chunk_tokens: 512,
    };
    let (mut results, mut watch) = (results(), Follow::new(usize::MAX));
    run(&mut backend, own_spec, &text, &plan, &mut results, &mut watch).unwrap();
    let cells = results.cells();
    let [dense, streaming, delta] = &cells[..] else { panic!("{cells:?}") };
    assert_eq!((dense.prefill_density, dense.prefill_error), (1.0, None), "it is what others are compared with");
    assert!(streaming.prefill_density < 0.3 && streaming.prefill_density < delta.prefill_density);
    // On random weights the correction need not help; that the errors differ shows that each method ran.
    assert!(streaming.prefill_error.unwrap() > 0.0 && delta.prefill_error != streaming.prefill_error);
    for cell in &cells {
        assert!((0.1..0.2).contains(&cell.decode_density.unwrap()) && cell.decode_error.unwrap() > 0.0, "{cell:?}");
    }
    backend.check_idle();
    let mut again = super::tests::results();
    run(&mut backend, own_spec, &text, &plan, &mut again, &mut Follow::new(usize::MAX)).unwrap();
    let scores = |r: &Results| r.records.iter().map(|r| (r.answer.clone(), r.decode_error)).collect::<Vec<_>>();
    assert_eq!(scores(&again), scores(&results), "equal runs give equal answers");
}

#[test]
fn answers_from_a_shared_prefill_are_those_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let mut backend = tiny(folder.path());
    let text = Bytes { vocabulary: 64, end: u32::MAX };
    let streaming = |window: usize| json!({ "method": "streaming_llm", "window": window });
    let top = json!({ "method": "oracle_top_k", "k": 16 });
    let decodes = [json!({ "method": "dense" }), streaming(64), top].map(|m| method(Phase::Decode, m));
    for question in [Question::Prefill, Question::Dense, Question::Decode] {
        let all = Plan {
            tasks: vec![Task::VariableTracking],
            lengths: vec![1500],
            samples: 0..1,
            prefills: vec![method(Phase::Prefill, streaming(128))],
            decodes: decodes.to_vec(),
            question,
            audit: 0.0,
            artifacts: Artifacts::default(),
            chunk_tokens: 512,
        };
        let mut shared = results();
        run(&mut backend, own_spec, &text, &all, &mut shared, &mut Follow::new(usize::MAX)).unwrap();
        let mut each = results();
        for decode in &decodes {
            let one = Plan { decodes: vec![decode.clone()], ..all.clone() };
            run(&mut backend, own_spec, &text, &one, &mut each, &mut Follow::new(usize::MAX)).unwrap();
        }
        let what = |r: &Results| {
            let of = |r: &Record| (r.decode, r.answer.clone(), r.prefill_density, r.decode_density);
            r.records.iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(what(&shared), what(&each), "{question:?}");
        let densities: Vec<f64> = shared.records.iter().map(|r| r.decode_density.unwrap()).collect();
        assert!(densities[0] == 1.0 && densities[1] < 0.2 && densities[2] != densities[1], "{densities:?}");
        backend.check_idle();
    }
}
