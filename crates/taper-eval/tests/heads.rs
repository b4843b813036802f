//! vAttention's promise and S²ANTA's variances on the default model's own heads. Fetches the model on first use.

use candle_core::Device;
use serde_json::json;
use taper_attention::Artifacts;
use taper_eval::train::{Corpus, CorpusSize};
use taper_eval::{HeadsPlan, HeadsRow, Method, Promised, heads, with_promises};
use taper_model::{LoadOptions, Model, Tokenizer, default_cache, resolve};

const LAYERS: [usize; 3] = [1, 14, 28];

/// The methods over the last of `length` tokens, every query head for itself.
fn measure(methods: Vec<Method>, length: usize, draws: usize) -> Vec<HeadsRow> {
    let files = resolve("default", &default_cache(), taper_model::Progress::Hidden).unwrap();
    let model = Model::load(&files, &LoadOptions::default(), &Device::Cpu).unwrap();
    let tokenizer = Tokenizer::load(&files).unwrap();
    let corpus = Corpus::prose(&tokenizer, 1, CorpusSize { length, sequences: 2 }).unwrap();
    let (layers, artifacts) = (LAYERS.to_vec(), Artifacts::default());
    let plan = HeadsPlan { layers, methods, draws, alone: true, seed: 1, texts: 1, artifacts };
    heads(&model, &corpus, &plan, &mut ()).unwrap()
}

const DELTAS: [f64; 4] = [0.05, 0.1, 0.2, 0.4];

/// No head breaks a promise of these epsilons; what became of each with every delta.
fn kept(length: usize, epsilons: &[f64], draws: usize) -> Vec<Promised> {
    let method = json!({ "method": "vattention" });
    let methods = with_promises(&[method], epsilons, &DELTAS, &Artifacts::default()).unwrap();
    let rows = measure(methods, length, draws);
    assert_eq!(rows.len(), DELTAS.len() * epsilons.len());
    let promised = |row: HeadsRow| {
        let promise = row.promise.clone().unwrap();
        assert_eq!((promise.broken, row.heads), (0, 27), "{row:?}");
        promise
    };
    rows.into_iter().map(promised).collect()
}

/// 12 promises, 27 heads, 2,000 draws each. A promise kept exactly by every head would fail the test in a third of all
/// seeds (324 times 1 in 1,000); most heads are far below theirs, and the seed is fixed.
#[test]
fn every_promise_is_kept_on_an_early_a_middle_and_a_late_layer() {
    kept(1024, &[0.05, 0.1, 0.2], 2000);
}

/// The tightest, where a longer context leaves more to chance: without what is added for keys unseen (`budget.rs`) two of these
/// heads break theirs. Promises kept exactly would fail the test in a tenth of all seeds. Nor is the rule far too cautious: where
/// it decides, an eighth of what it allows goes wrong at least.
#[test]
fn the_tightest_promises_are_kept_over_4096_tokens() {
    for (promise, delta) in kept(4096, &[0.05], 500).iter().zip(DELTAS) {
        assert!(promise.decided > 0.3 && promise.decided_over > delta / 8.0, "{delta}: {promise:?}");
    }
}

/// Measured are ratios of about 3 and 1.1; the means of 27 heads over 200 draws vary by a few percent.
#[test]
fn santas_ways_of_drawing_err_in_the_order_of_their_variances() {
    let santa = |variant| json!({ "method": "santa", "samples": 64, "variant": variant });
    let methods =
        with_promises(&["iid", "stratified", "systematic"].map(santa), &[], &[], &Artifacts::default()).unwrap();
    let rows = measure(methods, 1024, 200);
    let [iid, stratified, systematic] = [0, 1, 2].map(|i: usize| rows[i].rms.powi(2));
    assert!(iid > 1.5 * stratified && stratified > 0.95 * systematic, "{iid} {stratified} {systematic}");
}
