//! vAttention's promise and S²ANTA's variances on the default model's own heads. Fetches the model on first use.

use candle_core::Device;
use serde_json::json;
use taper_attention::Artifacts;
use taper_eval::train::{Corpus, CorpusSize};
use taper_eval::{HeadsPlan, HeadsRow, Method, Promised, heads, with_promises};
use taper_model::{LoadOptions, Model, Tokenizer, default_cache, resolve};

const LAYERS: [usize; 3] = [1, 14, 28];

/// The methods over the last of `length` tokens, every query head of some layers for itself.
fn measure(methods: Vec<Method>, length: usize, layers: &[usize], draws: usize) -> Vec<HeadsRow> {
    let files = resolve("default", &default_cache(), taper_model::Progress::Hidden).unwrap();
    let model = Model::load(&files, &LoadOptions::default(), &Device::Cpu).unwrap();
    let tokenizer = Tokenizer::load(&files).unwrap();
    let corpus = Corpus::prose(&tokenizer, 1, CorpusSize { length, sequences: 2 }).unwrap();
    let (layers, artifacts) = (layers.to_vec(), Artifacts::default());
    let plan = HeadsPlan { layers, methods, draws, alone: true, seed: 1, texts: 1, artifacts };
    heads(&model, &corpus, &plan, &mut ()).unwrap()
}

const DELTAS: [f64; 4] = [0.05, 0.1, 0.2, 0.4];

/// No head breaks a promise of these epsilons; what became of each with every delta.
fn kept(length: usize, layers: &[usize], epsilons: &[f64], draws: usize) -> Vec<Promised> {
    let method = json!({ "method": "vattention" });
    let methods = with_promises(&[method], epsilons, &DELTAS, &Artifacts::default()).unwrap();
    let rows = measure(methods, length, layers, draws);
    assert_eq!(rows.len(), DELTAS.len() * epsilons.len());
    let promised = |row: HeadsRow| {
        let promise = row.promise.clone().unwrap();
        assert_eq!((promise.broken, row.heads), (0, 9 * layers.len()), "{row:?}");
        promise
    };
    rows.into_iter().map(promised).collect()
}

/// 12 promises, 27 heads, 2,000 draws each. A promise kept exactly by every head would fail the test in a third of all
/// seeds (324 times 1 in 1,000); most heads are far below theirs, and the seed is fixed.
#[test]
fn every_promise_is_kept_on_an_early_a_middle_and_a_late_layer() {
    kept(1024, &LAYERS, &[0.05, 0.1, 0.2], 2000);
}

/// The tightest, where a longer context leaves more to chance: without what is added for keys unseen (`budget.rs`) two of these
/// heads break theirs. Promises kept exactly would fail the test in a tenth of all seeds. Nor is the rule far too cautious: where
/// it decides, an eighth of what it allows goes wrong at least.
#[test]
fn the_tightest_promises_are_kept_over_4096_tokens() {
    for (promise, delta) in kept(4096, &LAYERS, &[0.05], 500).iter().zip(DELTAS) {
        assert!(promise.decided > 0.3 && promise.decided_over > delta / 8.0, "{delta}: {promise:?}");
    }
}

/// Two layers, since a debug build takes 8,192 tokens through few in a minute: an early one, which has the heads that come
/// nearest to breaking theirs, and the next. Eight promises, 18 heads: kept exactly, they would fail the test in a seventh
/// of all seeds (144 times 1 in 1,000).
#[test]
fn promises_are_kept_over_8192_tokens() {
    kept(8192, &[1, 2], &[0.05, 0.1], 500);
}

/// By how many standard errors the logarithm of the error's variance is larger, on the average of all heads.
fn larger(a: &HeadsRow, b: &HeadsRow) -> f64 {
    let logs = a.squares.iter().zip(&b.squares);
    let (difference, variance) = logs.fold((0.0, 0.0), |(difference, variance), (a, b)| {
        let relative = (a.error / a.mean).powi(2) + (b.error / b.mean).powi(2);
        (difference + (a.mean / b.mean).ln(), variance + relative)
    });
    difference / variance.sqrt()
}

/// The order of the variances, iid above stratified and that at least systematic, head by head: of each pair the logarithms' difference,
/// summed over 27 heads, in units of its standard error, which is 0.3 to 0.4 % of a variance. Measured are ratios of 2.8 and 1.19. Were
/// stratified and systematic draws equal, the second comparison would fail in 1 of 740 seeds; it fails at even odds where systematic
/// ones err by 0.9 % more, nearly always at 2 %.
#[test]
fn santas_ways_of_drawing_err_in_the_order_of_their_variances() {
    let santa = |variant| json!({ "method": "santa", "samples": 64, "variant": variant });
    let methods =
        with_promises(&["iid", "stratified", "systematic"].map(santa), &[], &[], &Artifacts::default()).unwrap();
    let rows = measure(methods, 1024, &LAYERS, 1000);
    let [iid, stratified, systematic] = [0, 1, 2].map(|i: usize| &rows[i]);
    let above = [larger(iid, stratified), larger(stratified, systematic)];
    assert!(above[0] > 3.0 && above[1] > -3.0, "{above:?}");
}
