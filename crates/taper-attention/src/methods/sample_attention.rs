//! SampleAttention: the columns and diagonals in which the probability of a few sampled rows lies.
//!
//! The prompt is cut into `chunks`, the i-th of which ends before token i S / chunks. The probabilities of a chunk's last
//! `block` rows are summed by blocks of keys and by blocks of diagonals, over the query heads that share a KV head; of
//! each the fewest that hold a share `alpha_c` and `alpha_s` are read by all rows of the chunk, and besides their own
//! block and block 0.
//!
//! What the sampled rows, and no others, keep of their probability is measured: mean and least over them, their query heads
//! and the layers are reported as `cra`. The choice was made by these rows, so that a chunk's other rows may keep less; the
//! paper's CRA is the least of all rows. What becomes of rows drawn at random, `audit` measures.
//!
//! # Causality
//! Every row reads only what stands before it, but which of it depends on the chunk's last rows. A prompt is chosen for
//! chunk by chunk, each whole, however long the engine's own chunks are.
//!
//! # The artefact `sample_attention.toml`
//! Thresholds tuned for one model, by the length of the prompt; chosen by `tuning: "file"`.
//!
//! ```toml
//! format = "taper-artefact-1"
//! method = "sample_attention"
//! model = "…"         # the model's fingerprint
//! [[bands]]
//! below = 16384       # for prompts of fewer tokens; the last band has no limit
//! alpha_c = 0.98
//! alpha_s = 0.9
//! chunks = 1
//! [[bands]]
//! alpha_c = 0.95
//! alpha_s = 0.95
//! chunks = 2
//! [trained]           # what made it; optional
//! ```

use super::Entry;
use crate::artifacts::{ArtifactFile, ArtifactKind, Artifacts, Loaded};
use crate::method::{PrefillChoice, PrefillLayer, PrefillMethod};
use crate::schema::{parse, schema_of};
use crate::spec::SpecResult;
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::borrow::Cow;
use std::sync::Arc;
use taper_kernels::prefill::stripes::{Shares, by_share};
use taper_kernels::prefill::{Selection, query_blocks, sums};

pub(super) static PREFILL: Entry<dyn PrefillMethod> = Entry {
    name: "sample_attention",
    summary: "The blocks of keys and of diagonals that hold a share of the probability of a few sampled rows.",
    source: "SampleAttention, Algorithm 1, and Table 6 for `tuning`; one choice for the query heads of a KV head, and \
             block 0 and a row's own block are always read",
    schema: schema_of::<Params>,
    build: |value, path, artifacts| {
        let params: Params = parse(value, path)?;
        let json = json!(params);
        Ok((Arc::new(SampleAttention::new(&params, path, artifacts)?), json))
    },
    artifacts: &[ARTIFACT],
};

const ARTIFACT: ArtifactKind =
    ArtifactKind { file: "sample_attention.toml", made_by: "taper train sample_attention", read: read_bands };

/// What is kept of the prompt's columns and diagonals.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Params {
    /// Share of the sampled probability that the columns hold; 1 is dense attention.
    #[schemars(range(min = 0, max = 1))]
    alpha_c: f64,
    /// Share of the sampled probability that the diagonals hold; 1 is dense attention.
    #[schemars(range(min = 0, max = 1))]
    alpha_s: f64,
    /// Parts of the prompt that sample and choose for themselves.
    #[schemars(range(min = 1, max = 1024))]
    chunks: usize,
    /// Rows that are sampled at a chunk's end, and tokens of a block of keys or diagonals: a multiple of 64.
    #[schemars(range(min = 64, max = 4096), extend("multipleOf" = 64))]
    block: usize,
    /// Shorter prompts are dense.
    #[schemars(range(min = 0, max = 1_048_576))]
    min_tokens: usize,
    /// Thresholds by the prompt's length, in place of alpha_c, alpha_s and chunks.
    tuning: Tuning,
}

impl Default for Params {
    fn default() -> Self {
        // The cheapest of nine pairs that answered as dense attention did, at every length (bench/fidelity.md).
        Self { alpha_c: 0.98, alpha_s: 0.85, chunks: 1, block: 64, min_tokens: 16_384, tuning: Tuning::None }
    }
}

/// Thresholds by the prompt's length.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(inline)]
enum Tuning {
    /// alpha_c, alpha_s and chunks as they are given.
    None,
    /// The paper's for GLM4 9B, for accuracy.
    #[serde(rename = "glm4-9b")]
    Glm49b,
    /// The paper's for GLM4 9B, for speed.
    #[serde(rename = "glm4-9b-speed")]
    Glm49bSpeed,
    /// The paper's for InternLM2 7B, for accuracy.
    #[serde(rename = "internlm2-7b")]
    Internlm27b,
    /// The paper's for InternLM2 7B, for speed.
    #[serde(rename = "internlm2-7b-speed")]
    Internlm27bSpeed,
    /// Those of the artefact sample_attention.toml.
    File,
}

/// Thresholds for prompts of fewer than `below` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Band {
    #[serde(default = "no_limit")]
    below: usize,
    alpha_c: f64,
    alpha_s: f64,
    chunks: usize,
}

fn no_limit() -> usize {
    usize::MAX
}

/// The ends of Table 6's length bands.
const ENDS: [usize; 5] = [16_384, 49_152, 81_920, 114_688, usize::MAX];

/// A row of Table 6: (alpha_c, alpha_s, chunks) of each band.
const fn bands(table: [(f64, f64, usize); 5]) -> [Band; 5] {
    let mut bands = [Band { below: 0, alpha_c: 0.0, alpha_s: 0.0, chunks: 0 }; 5];
    let mut i = 0;
    while i < 5 {
        let (alpha_c, alpha_s, chunks) = table[i];
        bands[i] = Band { below: ENDS[i], alpha_c, alpha_s, chunks };
        i += 1;
    }
    bands
}

/// Accuracy, speed.
static GLM4: [[Band; 5]; 2] = [
    bands([(0.98, 0.9, 1), (0.95, 0.95, 1), (0.95, 0.95, 1), (0.9, 0.9, 2), (0.95, 0.85, 1)]),
    bands([(0.85, 0.85, 1), (0.85, 0.8, 1), (0.8, 0.8, 1), (0.8, 0.8, 1), (0.8, 0.8, 1)]),
];

/// Accuracy, speed.
static INTERNLM2: [[Band; 5]; 2] = [
    bands([(0.98, 0.95, 1), (0.95, 0.9, 1), (0.92, 0.92, 1), (0.92, 0.9, 2), (0.95, 0.9, 2)]),
    bands([(0.85, 0.85, 1), (0.8, 0.8, 1), (0.8, 0.8, 1), (0.8, 0.8, 1), (0.8, 0.8, 1)]),
];

/// The artefact's content besides its header.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bands {
    bands: Vec<Band>,
}

fn read_bands(file: &ArtifactFile) -> std::result::Result<Loaded, String> {
    let Bands { bands } = file.toml("sample_attention")?;
    let share = |x: f64| (0.0..=1.0).contains(&x);
    if let Some(bad) = bands.iter().find(|b| !share(b.alpha_c) || !share(b.alpha_s) || !(1..=1024).contains(&b.chunks))
    {
        return Err(format!("holds {bad:?}; alpha_c and alpha_s are 0 to 1, chunks 1 to 1024"));
    }
    if !bands.is_sorted_by(|a, b| a.below < b.below) || bands.last().is_none_or(|b| b.below != usize::MAX) {
        return Err("`below` must rise from band to band, and the last band must have none".to_owned());
    }
    Ok(Arc::new(bands))
}

#[derive(Debug)]
struct SampleAttention {
    /// By rising length; the last has no limit.
    bands: Cow<'static, [Band]>,
    block: usize,
    min_tokens: usize,
}

impl SampleAttention {
    fn new(params: &Params, path: &str, artifacts: &Artifacts) -> SpecResult<Self> {
        let &Params { alpha_c, alpha_s, chunks, block, min_tokens, tuning } = params;
        let bands: Cow<'static, [Band]> = match tuning {
            Tuning::None => vec![Band { below: usize::MAX, alpha_c, alpha_s, chunks }].into(),
            Tuning::Glm49b => GLM4[0][..].into(),
            Tuning::Glm49bSpeed => GLM4[1][..].into(),
            Tuning::Internlm27b => INTERNLM2[0][..].into(),
            Tuning::Internlm27bSpeed => INTERNLM2[1][..].into(),
            Tuning::File => {
                artifacts.get::<Vec<Band>>(&ARTIFACT, &format!("{path}.tuning"))?.as_slice().to_vec().into()
            }
        };
        Ok(Self { bands, block, min_tokens })
    }

    /// The thresholds for a prompt, or none for one that is dense.
    fn band(&self, prompt: usize) -> Option<&Band> {
        if prompt < self.min_tokens { None } else { self.bands.iter().find(|band| prompt < band.below) }
    }
}

impl PrefillMethod for SampleAttention {
    fn choose(&self, layer: &PrefillLayer) -> Result<PrefillChoice> {
        let Some(band) = self.band(layer.prompt) else { return Ok(PrefillChoice::default()) };
        let (rows, positions) = (layer.rows(), layer.positions());
        let sampled = self.block.min(rows);
        let first = rows - sampled;
        let q = layer.q.narrow(0, first, sampled)?;
        let sums = sums(&layer.select(&q, &positions[first..]))?;
        let shares = Shares { columns: band.alpha_c, slashes: band.alpha_s, block_tokens: self.block };
        let runs = query_blocks(layer.start..layer.start + rows, self.block);
        let heads = by_share(&sums, layer.kv_heads(), &shares, &runs, layer.window)?;
        Ok(PrefillChoice {
            selection: Some(Selection::new(runs, heads)?),
            measured: Some((layer.start + first, sums.lse)),
            scored: layer.pairs(&positions[first..]),
        })
    }

    fn reuse(&self, prompt: usize, cached: usize) -> usize {
        // A prompt that is cut into chunks of its own length attends by them; others densely.
        if self.band(prompt).is_some() { 0 } else { cached }
    }

    fn cut(&self, start: usize, prompt: usize, max: usize) -> usize {
        match self.band(prompt) {
            // The end of the chunk that `start` is in: (i + 1) S / chunks, rounded down.
            Some(band) => {
                let ends = (1..=band.chunks).map(|i| (i as u128 * prompt as u128 / band.chunks as u128) as usize);
                ends.into_iter().find(|&end| end > start).unwrap_or(prompt)
            }
            None => prompt.min(start.saturating_add(max)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SpecError;
    use crate::artifacts::ModelKey;
    use crate::layer::AttentionShape;
    use crate::methods::prefill;
    use serde_json::Value;

    fn method(value: Value, artifacts: &Artifacts) -> std::result::Result<Arc<dyn PrefillMethod>, SpecError> {
        prefill(&value, "attention.prefill", artifacts).map(|chosen| chosen.method)
    }

    #[test]
    fn chunks_end_at_their_share_of_the_prompt() {
        let cuts = |chunks: usize, prompt: usize| {
            let settings = json!({ "method": "sample_attention", "chunks": chunks, "min_tokens": 0 });
            let method = method(settings, &Artifacts::default()).unwrap();
            let mut cuts = vec![0];
            while *cuts.last().unwrap() < prompt {
                cuts.push(method.cut(*cuts.last().unwrap(), prompt, 10));
            }
            cuts
        };
        assert_eq!(cuts(1, 1000), [0, 1000]);
        assert_eq!(cuts(3, 1000), [0, 333, 666, 1000]);
        assert_eq!(cuts(7, 3), [0, 1, 2, 3]);
        let dense = method(json!({ "method": "sample_attention" }), &Artifacts::default()).unwrap();
        assert_eq!(dense.cut(5, 1000, 10), 15, "a prompt below min_tokens is cut as any other");
    }

    /// Table 6 as the paper prints it, a line a model: by length accuracy|speed of alpha_c; alpha_s; chunks.
    const TABLE_6: [(&str, &str); 2] = [
        (
            "glm4-9b",
            "<16K .98|.85; .90|.85; 1|1 - 16-48K .95|.85; .95|.80; 1|1 - 48-80K .95|.80; .95|.80; 1|1 - \
             80-112K .90|.80; .90|.80; 2|1 - >=112K .95|.80; .85|.80; 1|1",
        ),
        (
            "internlm2-7b",
            "<16K .98|.85; .95|.85; 1|1 - 16-48K .95|.80; .90|.80; 1|1 - 48-80K .92|.80; .92|.80; 1|1 - \
             80-112K .92|.80; .90|.80; 2|1 - >=112K .95|.80; .90|.80; 2|1",
        ),
    ];

    #[test]
    fn a_tuning_follows_the_prompts_length() {
        let mut checked = 0;
        for ((model, table), speed) in TABLE_6.into_iter().flat_map(|row| [(row, false), (row, true)]) {
            let name = if speed { format!("{model}-speed") } else { model.to_owned() };
            let params: Params = parse(&json!({ "tuning": name }), "attention.prefill").unwrap();
            let tuned = SampleAttention::new(&Params { min_tokens: 0, ..params }, "", &Artifacts::default()).unwrap();
            let lengths = [0, 16, 48, 80, 112, 10_000].map(|k| k * 1024);
            for (cell, ends) in table.split(" - ").zip(lengths.windows(2)) {
                let numbers = cell.split_once(' ').unwrap().1.split("; ").map(|both| {
                    let (accurate, fast) = both.split_once('|').unwrap();
                    if speed { fast } else { accurate }.parse::<f64>().unwrap()
                });
                for prompt in [ends[0], ends[1] - 1] {
                    let band = tuned.band(prompt).unwrap();
                    let found = [band.alpha_c, band.alpha_s, band.chunks as f64];
                    assert_eq!(found.to_vec(), numbers.clone().collect::<Vec<_>>(), "{name}: {cell} at {prompt}");
                }
                checked += 1;
            }
        }
        assert_eq!(checked, 20);
        let chunks =
            method(json!({ "method": "sample_attention", "tuning": "glm4-9b" }), &Artifacts::default()).unwrap();
        assert_eq!((chunks.cut(0, 100_000, 10), chunks.cut(0, 20_000, 10)), (50_000, 20_000));
    }

    #[test]
    fn the_artefact_is_read_or_refused() {
        let shape = AttentionShape { layers: 1, q_heads: 2, kv_heads: 1, head_dim: 16, window: None };
        let model = ModelKey { shape, fingerprint: "abc".into() };
        let head = "format = \"taper-artefact-1\"\nmethod = \"sample_attention\"\nmodel = \"abc\"\n";
        let band = "[[bands]]\nalpha_c = 0.9\nalpha_s = 0.8\nchunks = 4\n";
        let read = |text: String| Artifacts::default().with(ARTIFACT.file, text.as_bytes(), &model);
        let artifacts = read(format!("{head}[[bands]]\nbelow = 20000\nalpha_c = 1\nalpha_s = 1.0\nchunks = 2\n{band}"));
        let settings = json!({ "method": "sample_attention", "tuning": "file" });
        let tuned = method(settings.clone(), &artifacts.unwrap()).unwrap();
        assert_eq!((tuned.cut(0, 18_000, 10), tuned.cut(0, 40_000, 10)), (9_000, 10_000));
        let error = method(settings, &Artifacts::default()).unwrap_err();
        assert!(error.path == "attention.prefill.tuning" && error.message.contains("sample_attention.toml"), "{error}");
        for (text, message) in [
            (band.to_owned(), "lacks the field `format`"),
            (head.replace("abc", "abd") + band, "another model"),
            (head.replace("sample_attention", "minference") + band, "`method` is \"minference\""),
            (format!("{head}{}", band.replace("0.9", "1.5")), "alpha_c and alpha_s are 0 to 1"),
            (format!("{head}{band}below = 100\n"), "the last band must have none"),
            (format!("{head}{band}more = 1\n"), "unknown field `more`"),
            (head.to_owned(), "missing field `bands`"),
            ("\u{0}".to_owned(), "is no TOML file"),
        ] {
            let error = read(text.clone()).unwrap_err();
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}
