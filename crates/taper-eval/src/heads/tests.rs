use super::*;
use crate::train::CorpusSize;
use std::path::Path;
use taper_model::{LoadOptions, ModelFiles, ResolvedModel};

/// A random model of two layers.
fn model() -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../taper-model/tests/golden/smollm2");
    let model = ResolvedModel { name: "tiny".into(), files: ModelFiles::Folder(folder) };
    Model::load(&model, &LoadOptions::default(), &Device::Cpu).unwrap()
}

fn corpus(length: usize) -> Corpus {
    let tokens: Vec<u32> = (0..2 * length as u32).map(|i| 3 + i * i % 59).collect();
    Corpus::cut("tokens", &tokens, &[1], CorpusSize { length, sequences: 2 }).unwrap()
}

fn plan(methods: &[Value], alone: bool) -> HeadsPlan {
    let artifacts = Artifacts::default();
    let methods = with_promises(methods, &[], &[], &artifacts).unwrap();
    HeadsPlan { layers: vec![0, 1], methods, draws: 40, alone, seed: 1, texts: 2, artifacts }
}

#[test]
fn dense_errs_nowhere_and_a_narrow_window_does() {
    let model = model();
    let methods = [
        json!({ "method": "dense" }),
        json!({ "method": "streaming_llm", "sink": 1, "window": 5 }),
        json!({ "method": "random_sample", "sink": 1, "window": 5, "rate": 0.1 }),
    ];
    let rows = heads(&model, &corpus(60), &plan(&methods, false), &mut ()).unwrap();
    let q_heads = model.attention_shape().q_heads;
    assert!(rows.iter().all(|row| row.length == 60 && row.heads == 4 * q_heads && row.promise.is_none()));
    assert_eq!((rows[0].density, rows[0].rms, rows[0].p99), (1.0, 0.0, 0.0));
    assert_eq!(rows[1].density, 0.1);
    assert!(rows[1].rms > 1e-3 && rows[1].p99 >= rows[1].rms as f32 as f64 / 2.0);
    assert!(rows[2].density > 0.1 && rows[2].density < 0.25 && rows[2].rms > 1e-3);
}

#[test]
fn a_choice_ahead_goes_by_the_token_before() {
    let model = model();
    let quest = |ahead: bool| json!({ "method": "quest", "page": 4, "k": 8, "sink": 1, "window": 4, "dense_layers": 0, "ahead": ahead });
    let rows = |length, methods: &[Value]| heads(&model, &corpus(length), &plan(methods, false), &mut ()).unwrap();
    let [own, before] = <[_; 2]>::try_from(rows(60, &[quest(false), quest(true)])).unwrap();
    // Pages of the same size are read, others for some heads, and the window ends at another place than the page does.
    assert!(own.squares != before.squares && own.rms > 1e-3 && before.rms > 1e-3, "{own:?} {before:?}");
    assert!((own.density - before.density).abs() < 0.1, "{own:?} {before:?}");
    let first = rows(1, &[quest(true)]);
    assert_eq!((first[0].density, first[0].rms), (1.0, 0.0), "no token stands before the first");
}

#[test]
fn a_promise_is_counted_and_alone_no_head_reads_more() {
    let model = model();
    let top = json!({ "method": "oracle" });
    let method = json!({ "method": "vattention", "epsilon": 0.5, "delta": 0.3, "sink": 1, "window": 4, "top_k": 4,
                         "pilot_tokens": 4, "dense_share": 0.9, "top": top });
    let [shared, alone] = [false, true]
        .map(|alone| heads(&model, &corpus(60), &plan(std::slice::from_ref(&method), alone), &mut ()).unwrap());
    let promise = |rows: &[HeadsRow]| rows[0].promise.clone().unwrap();
    assert_eq!(shared[0].heads, alone[0].heads);
    for rows in [&shared, &alone] {
        let p = promise(rows);
        assert!(p.over <= p.most && p.decided + p.dense <= 1.0 && p.decided_over <= 1.0, "{p:?}");
    }
    assert!(alone[0].density <= shared[0].density + 0.02, "{alone:?} {shared:?}");
}

#[test]
fn tallies_tell_violations_and_decided_draws() {
    let budget = |sampled, dense| Budget { residual: 100, sampled, pilot: 10, dense };
    let drawn = Replay {
        errors: vec![0.05, 0.2, f32::NAN, 0.3],
        keys: vec![10, 20, 30, 100],
        visible: 100,
        budgets: Some(vec![budget(10, false), budget(20, false), budget(30, false), budget(100, true)]),
        promise: Some((0.1, 0.25)),
    };
    let place = Place { text: 1, layer: 4, head: 7 };
    let mut tally = Tally { place, ..Tally::default() };
    (0..4).for_each(|draw| tally.add(&drawn, draw, draw));
    let row = summed(100, "x".into(), &[tally]);
    assert_eq!(row.density, 0.4);
    let (over, most, decided_over) = (0.75, 0.75, 1.0);
    let promise = Promised { over, most, worst: place, broken: 0, decided: 0.5, decided_over, spare: 0.0, dense: 0.25 };
    assert_eq!(row.promise, Some(promise));
    assert!(row.squares[0].mean.is_nan());
    // Squares 1, 9 and 17 up to rounding: a variance of 64.
    let Estimate { mean, error } = Tally { errors: vec![1.0, 3.0, 17f32.sqrt()], ..Tally::default() }.square();
    assert!((mean - 9.0).abs() < 1e-5 && (error - (64.0f64 / 3.0).sqrt()).abs() < 1e-5, "{mean} {error}");
    // 2,000 draws at 0.05.
    assert_eq!(most_violations(2000, 0.05), 131);
    let table = heads_table(&[row], Style::Markdown);
    assert!(table.contains("| 75.00 % | 75.00 % | 1/4/7 | 0 | 50.00 % | 100.00 % | 0.00 % | 25.00 % |"), "{table}");
}

#[test]
fn a_sample_that_is_larger_than_its_promise_takes_could_have_been_smaller() {
    let tally = |errors: [f32; 4], pilot| {
        let budget = Budget { residual: 1000, sampled: 40, pilot, dense: false };
        let decided = errors.map(|error| (error, budget)).into();
        Tally { decided, promise: Some((0.1, 0.25)), read: 800, ..Tally::default() }
    };
    let spare = |errors, pilot| summed(100, "x".into(), &[tally(errors, pilot)]).promise.unwrap().spare;
    // The third of four errs by half of epsilon: a quarter of 1 / 40 − 1 / 1000 is what 10.3 keys have.
    let errors = [0.02, 0.05, 0.01, 0.3];
    assert!((spare(errors, 10) - 4.0 * (40.0 - 10.309) / 800.0).abs() < 1e-5);
    assert!((spare(errors, 20) - 0.1).abs() < 1e-9, "the first look's keys are read anyway");
    assert!(spare([0.1; 4], 10).abs() < 1e-6, "exactly as large as it must be");
    assert!(spare([0.2; 4], 10) < -0.2, "too small");
    assert_eq!(spare([f32::NAN; 4], 10), 0.0);
}

#[test]
fn promises_are_crossed_and_others_left_alone() {
    let artifacts = Artifacts::default();
    let methods = [json!({ "method": "vattention" }), json!({ "method": "santa" })];
    let all = with_promises(&methods, &[0.05, 0.1], &[0.2], &artifacts).unwrap();
    let labels: Vec<&str> = all.iter().map(|m| m.label.as_str()).collect();
    assert_eq!(labels, ["vattention epsilon=0.05 delta=0.2", "vattention epsilon=0.1 delta=0.2", "santa"]);
    let error = with_promises(&methods, &[1.5], &[], &artifacts).unwrap_err().to_string();
    assert!(error.starts_with("decode.epsilon"), "{error}");
}

#[test]
fn layers_and_lengths_that_are_not_there_are_named() {
    let model = model();
    let wrong = HeadsPlan { layers: vec![7], ..plan(&[json!({ "method": "dense" })], false) };
    let error = heads(&model, &corpus(50), &wrong, &mut ()).unwrap_err().to_string();
    assert!(error.contains("--layers") && error.contains('7'), "{error}");
    let long = corpus(model.config().context_length + 1);
    let error = heads(&model, &long, &plan(&[json!({ "method": "dense" })], false), &mut ()).unwrap_err().to_string();
    assert!(error.contains("--length"), "{error}");
}
