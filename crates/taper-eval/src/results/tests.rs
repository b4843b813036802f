use super::*;
use serde_json::json;

fn header() -> Header {
    let artifacts = BTreeMap::from([("saap.safetensors".to_owned(), "01ab".to_owned())]);
    Header {
        model: "tiny".into(),
        loaded: "f32, cache f16".into(),
        question: "prefill".into(),
        seed: 1,
        weights: None,
        artifacts,
    }
}

fn method(name: &str) -> Method {
    Method::read(Phase::Prefill, &json!({ "method": name }), &Default::default()).unwrap()
}

fn record(sample: usize, score: f64) -> Record {
    Record {
        task: Task::MultiKey3,
        length: 4096,
        sample,
        prefill: 0,
        decode: 0,
        prompt_tokens: 3900,
        score,
        prefill_density: 0.5,
        decode_density: None,
        prefill_error: Some(Audited { heads: 10 * (sample as u64 + 1), mean: sample as f64 }),
        decode_error: None,
        prefill_s: 1.0,
        decode_s: 0.25,
        answer: "é \"quoted\"".into(),
        wanted: vec!["x".into()],
    }
}

fn results(scores: &[f64]) -> Results {
    let mut results = Results::new(header());
    results.place(Phase::Prefill, &method("streaming_llm"));
    results.place(Phase::Decode, &method("dense"));
    results.records = scores.iter().enumerate().map(|(i, &score)| record(i, score)).collect();
    results
}

#[test]
fn cells_are_means_with_their_error() {
    let cells = results(&[1.0, 0.0, 1.0, 1.0]).cells();
    let [cell] = &cells[..] else { panic!("{cells:?}") };
    assert_eq!((cell.samples, cell.accuracy, cell.prefill.as_str()), (4, 0.75, "streaming_llm"));
    // Four scores with a spread of 1/2, over the root of four.
    assert!((cell.standard_error.unwrap() - 0.25).abs() < 1e-12);
    // Heads 10, 20, 30, 40 with errors 0, 1, 2, 3.
    assert_eq!(cell.prefill_error, Some(2.0));
    assert_eq!((cell.decode_density, cell.decode_error), (None, None));
    assert_eq!(results(&[1.0]).cells()[0].standard_error, None);
}

#[test]
fn a_file_comes_back_as_it_was_and_refuses_another_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.json");
    let mut saved = results(&[1.0, 0.5]);
    saved.save(&path).unwrap();
    let loaded = Results::load(&path, &header()).unwrap();
    assert_eq!(loaded, saved);
    assert!(loaded.has(Task::MultiKey3, 4096, 1, 0, 0) && !loaded.has(Task::MultiKey3, 4096, 2, 0, 0));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no part is left");

    let other = Header { seed: 2, ..header() };
    let error = Results::load(&path, &other).unwrap_err().to_string();
    assert!(error.ends_with("out.json: seed is 1; this run's is 2"), "{error}");
    let weights = |digest: &str| Header { weights: Some(digest.into()), ..header() };
    saved.header = weights("aa00");
    saved.save(&path).unwrap();
    let error = Results::load(&path, &weights("bb11")).unwrap_err().to_string();
    assert!(error.ends_with("weights aa00; this run's, of the same configuration, are bb11"), "{error}");
    assert_eq!(Results::load(&path, &weights("aa00")).unwrap().header.weights.as_deref(), Some("aa00"));
    // What was written before weights were told apart goes on.
    saved.header = header();
    saved.save(&path).unwrap();
    assert_eq!(Results::load(&path, &weights("aa00")).unwrap().header.weights, None);
    // Trained anew it is another method; an artefact that only one of them has says nothing of the other's answers.
    let with = |file: &str| Header { artifacts: BTreeMap::from([(file.to_owned(), "02cd".to_owned())]), ..header() };
    let error = Results::load(&path, &with("saap.safetensors")).unwrap_err().to_string();
    assert!(error.ends_with("out.json: saap.safetensors is 01ab; this run's is 02cd"), "{error}");
    let mut results = Results::new(with("kmeans.safetensors"));
    results.absorb(Results::load(&path, &results.header).unwrap());
    assert_eq!(results.header.artifacts.len(), 2);
}

#[test]
fn broken_files_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.json");
    let says = |text: &str| {
        fs::write(&path, text).unwrap();
        Results::load(&path, &header()).unwrap_err().to_string()
    };
    assert!(says("{").contains("is no result file"));
    assert!(says("[]").contains("is no result file"));
    let mut value = serde_json::to_value(results(&[1.0])).unwrap();
    value["records"][0]["decode"] = json!(7);
    assert!(says(&value.to_string()).contains("records[0]"));
    value["records"][0]["task"] = json!("multikey_9");
    assert!(says(&value.to_string()).contains("did you mean multikey_"));
    value["format"] = json!(9);
    value["records"] = json!([]);
    assert!(says(&value.to_string()).contains("format is 9"));
    fs::remove_file(&path).unwrap();
    assert!(matches!(Results::load(&path, &header()), Err(EvalError::Io { .. })));
    assert!(matches!(results(&[]).save(&folder.path().join("no/out.json")), Err(EvalError::Io { .. })));
}

#[test]
fn an_error_that_is_no_number_survives() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.json");
    let mut saved = results(&[1.0]);
    saved.records[0].prefill_error = Some(Audited { heads: 1, mean: f64::NAN });
    saved.save(&path).unwrap();
    let loaded = Results::load(&path, &header()).unwrap();
    assert!(loaded.records[0].prefill_error.unwrap().mean.is_nan());
}

#[test]
fn runs_of_other_questions_and_methods_are_put_together() {
    let mut whole = results(&[1.0, 0.0]);
    let mut other = Results::new(header());
    other.place(Phase::Prefill, &method("dense"));
    other.place(Phase::Prefill, &method("streaming_llm"));
    other.place(Phase::Decode, &method("dense"));
    let by = |sample, score, prefill| Record { prefill, ..record(sample, score) };
    // Known already, though with another score; a new question of a known method; a known question of a new method.
    other.records = vec![by(1, 0.5, 1), by(2, 1.0, 1), by(0, 0.25, 0)];
    whole.absorb(other);
    let methods: Vec<_> = whole.prefills.iter().map(|m| m.label.as_str()).collect();
    assert_eq!(methods, ["streaming_llm", "dense"]);
    let records: Vec<_> = whole.records.iter().map(|r| (r.sample, r.score, r.prefill)).collect();
    assert_eq!(records, [(0, 1.0, 0), (1, 0.0, 0), (2, 1.0, 0), (0, 0.25, 1)]);
}
