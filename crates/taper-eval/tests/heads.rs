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

/// What promises of one epsilon cost where they were measured, by delta: the keys read over the keys there, the share of draws
/// that read everything to keep the promise, and the share whose size the promise decided.
type Costs = [[f64; 3]; DELTAS.len()];

/// What finds the keys that are read exactly: all scores, and what does where nothing is said.
const ORACLE: &str = "oracle";
const DEFAULT: &str = "quantized_keys";

/// No head breaks a promise of these epsilons; what became of each with every delta. A rule that always reads everything keeps
/// all promises, and one that believes its first look decides nothing: so a promise reads an eighth more than it was measured
/// to at most, goes dense in 3 of 100 draws more, and decides three fifths of the draws that it did, less 1 of 100. Seeds, text
/// and model are fixed, so that chance has no part in these bounds. The instruction set does, by which the model rounds: where
/// one machine decided 6.1 % of the draws another one decided 4.5.
fn kept(top: &str, length: usize, layers: &[usize], epsilons: &[(f64, Costs)], draws: usize) -> Vec<Promised> {
    let mut method = json!({ "method": "vattention" });
    if top != DEFAULT {
        method["top"] = json!({ "method": top });
    }
    let values: Vec<f64> = epsilons.iter().map(|(epsilon, _)| *epsilon).collect();
    let methods = with_promises(&[method], &values, &DELTAS, &Artifacts::default()).unwrap();
    let rows = measure(methods, length, layers, draws);
    assert_eq!(rows.len(), DELTAS.len() * epsilons.len());
    let promised = |(row, [density, dense, decided]): (HeadsRow, &[f64; 3])| {
        let promise = row.promise.clone().unwrap();
        assert_eq!((promise.broken, row.heads), (0, 9 * layers.len()), "{row:?}");
        let within = row.density <= 1.125 * density && promise.dense <= dense + 0.03;
        assert!(
            within && promise.decided >= 0.6 * decided - 0.01,
            "density, dense, decided {:?}: {row:?}",
            [density, dense, decided]
        );
        promise
    };
    rows.into_iter().zip(epsilons.iter().flat_map(|(_, costs)| costs)).map(promised).collect()
}

/// 12 promises, 27 heads, 2,000 draws each. A promise kept exactly by every head would fail the test in a third of all
/// seeds (324 times 1 in 1,000); most heads are far below theirs, and the seed is fixed.
#[test]
fn every_promise_is_kept_on_an_early_a_middle_and_a_late_layer() {
    let costs = [
        (0.05, [[0.489, 0.130, 0.223], [0.460, 0.086, 0.119], [0.438, 0.047, 0.075], [0.424, 0.022, 0.067]]),
        (0.1, [[0.391, 0.007, 0.174], [0.383, 0.0, 0.061], [0.382, 0.0, 0.002], [0.382, 0.0, 0.0]]),
        (0.2, [[0.359, 0.002, 0.080], [0.355, 0.0, 0.021], [0.355, 0.0, 0.003], [0.355, 0.0, 0.0]]),
    ];
    kept(ORACLE, 1024, &LAYERS, &costs, 2000);
}

/// The tightest, where a longer context leaves more to chance, on the first layer, a middle and a late one, over all
/// scores and over those of quantised keys. Promises kept exactly would fail the test in a fifth of all seeds (216
/// times 1 in 1,000). Nor is the rule far too cautious: where it decides, a sixth of what it allows goes wrong at
/// least; not so over quantised keys, which take more of them to be heavy.
#[test]
fn the_tightest_promises_are_kept_over_4096_tokens() {
    let costs = [[0.215, 0.0, 0.707], [0.207, 0.0, 0.541], [0.202, 0.0, 0.397], [0.197, 0.0, 0.283]];
    for (promise, delta) in kept(ORACLE, 4096, &[0, 14, 28], &[(0.05, costs)], 500).iter().zip(DELTAS) {
        assert!(promise.decided_over > delta / 6.0, "{delta}: {promise:?}");
    }
    let costs = [[0.262, 0.003, 0.624], [0.251, 0.0, 0.500], [0.244, 0.0, 0.373], [0.238, 0.0, 0.258]];
    kept(DEFAULT, 4096, &[0, 14, 28], &[(0.05, costs)], 500);
}

/// The first two layers, which a debug build soon comes to: heads of layer 0 come nearest to breaking theirs (bench/promise.md).
/// Eight promises, 18 heads: kept exactly, they would fail the test in a seventh of all seeds (144 times 1 in 1,000).
#[test]
fn promises_are_kept_over_8192_tokens() {
    let costs = [
        (0.05, [[0.173, 0.0, 0.697], [0.167, 0.0, 0.547], [0.162, 0.0, 0.473], [0.158, 0.0, 0.352]]),
        (0.1, [[0.117, 0.0, 0.610], [0.112, 0.0, 0.485], [0.108, 0.0, 0.363], [0.106, 0.0, 0.237]]),
    ];
    kept(ORACLE, 8192, &[0, 1], &costs, 500);
}

/// A middle and a late layer, in fewer draws, since 8,192 tokens take a debug build longer to come there than to be
/// drawn from. Twice as many promises of as many heads as above: kept exactly, they would fail the test in a quarter of
/// all seeds. A head is found that breaks its promise of 0.05 in more than a tenth of its draws (21 of 200 are
/// allowed), one of 0.4 in more than half.
#[test]
fn promises_are_kept_over_8192_tokens_on_a_middle_and_a_late_layer() {
    let costs = [
        (0.05, [[0.105, 0.0, 0.772], [0.096, 0.0, 0.599], [0.091, 0.0, 0.407], [0.088, 0.0, 0.232]]),
        (0.1, [[0.086, 0.0, 0.710], [0.079, 0.0, 0.523], [0.074, 0.0, 0.323], [0.072, 0.0, 0.175]]),
    ];
    kept(ORACLE, 8192, &[14, 23], &costs, 200);
    let costs = [
        (0.05, [[0.137, 0.001, 0.507], [0.130, 0.0, 0.382], [0.126, 0.0, 0.222], [0.124, 0.0, 0.125]]),
        (0.1, [[0.107, 0.001, 0.509], [0.100, 0.0, 0.374], [0.095, 0.0, 0.238], [0.093, 0.0, 0.119]]),
    ];
    kept(DEFAULT, 8192, &[14, 23], &costs, 200);
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

/// The order of the variances, iid above stratified and that at least systematic, head by head: of each pair the
/// logarithms' difference, summed over 27 heads, in units of its standard error, which is 0.3 to 0.4 % of a variance.
/// Measured are ratios of 2.8 and 1.19. Were stratified and systematic draws equal, the second comparison would fail in
/// 1 of 740 seeds; it fails at even odds where systematic ones err by 0.9 % more, nearly always at 2 %.
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
