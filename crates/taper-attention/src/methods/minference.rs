//! MInference: one of three patterns for each query head.
//!
//! - `a_shape`: the first `init` tokens and the last `local` ones.
//! - `vertical_slash`: the `vertical` keys and `slash` diagonals in which most of the last `queries` rows' probability
//!   lies. The first 30 keys and the 100 nearest diagonals are always among them; every block of 64 tokens that a
//!   diagonal crosses is read whole.
//! - `block_sparse`: a query block's own block and the best of those before it by mean query · mean key, `blocks` in all.
//!
//! `auto` gives the last rows of each head all three, with as many keys as vertical_slash reads there, and takes the one
//! that keeps the largest share of their probability. `file` takes each layer's and head's from the artefact.
//!
//! # Causality
//! Every row reads only what stands before it, but where columns and diagonals are wanted, which of it depends on the
//! prompt's last rows: then all of the prompt is chosen for at once. `block_sparse` goes by all rows of a block of 64.
//!
//! # The artefact `minference.toml`
//!
//! ```toml
//! format = "taper-artefact-1"
//! method = "minference"
//! model = "…"              # the model's fingerprint
//! default = { pattern = "vertical_slash", vertical = 1000, slash = 6096 }   # for heads that are not listed; optional
//! [[heads]]
//! layer = 0
//! head = 3
//! reads = { pattern = "a_shape", init = 128, local = 3968 }
//! [[heads]]
//! layer = 0
//! head = 4
//! reads = { pattern = "block_sparse", blocks = 100 }
//! [trained]                # what made it; optional
//! ```

use super::Entry;
use crate::artifacts::{ArtifactFile, ArtifactKind, Loaded};
use crate::method::{PrefillChoice, PrefillLayer, PrefillMethod, cut_at_blocks, kept};
use crate::schema::{parse, schema_of};
use candle_core::{Error, Result, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::ops::Range;
use std::sync::Arc;
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kernels::prefill::stripes::{Counts, by_count};
use taper_kernels::prefill::{HeadReads, Mask, Rows, Selection, Sums, pooled, query_blocks, sums};

pub(super) static PREFILL: Entry<dyn PrefillMethod> = Entry {
    name: "minference",
    summary: "For each query head the first and last tokens, its heaviest keys and diagonals, or its best blocks.",
    source: "Jiang et al. 2024, arXiv:2407.02490, Algorithms 1 to 3; the own block is always read, and `auto` chooses a \
             pattern by the mass that it keeps in this prompt, not offline",
    schema: schema_of::<Params>,
    build: |value, path, artifacts| {
        let params: Params = parse(value, path)?;
        let Params { vertical, slash, blocks, init, local, queries, .. } = params;
        let (a_shape, vertical_slash) = (Pattern::AShape { init, local }, Pattern::VerticalSlash { vertical, slash });
        let plan = match params.pattern {
            PatternName::Auto => Plan::Auto { init, vertical, slash },
            PatternName::AShape => Plan::One(a_shape),
            PatternName::VerticalSlash => Plan::One(vertical_slash),
            PatternName::BlockSparse => Plan::One(Pattern::BlockSparse { blocks }),
            PatternName::File => Plan::Table(artifacts.get(&ARTIFACT, &format!("{path}.pattern"))?),
        };
        Ok((Arc::new(MInference { plan, queries }), json!(params)))
    },
    artifacts: &[ARTIFACT],
};

const ARTIFACT: ArtifactKind =
    ArtifactKind { file: "minference.toml", made_by: "taper train minference", read: read_table };

/// Which pattern heads follow, and how much they read. What is not of the pattern chosen is ignored.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Params {
    /// The pattern of every head.
    pattern: PatternName,
    /// vertical_slash, auto: keys that all rows read, at least 30.
    #[schemars(range(min = 1, max = 1_048_576))]
    vertical: usize,
    /// vertical_slash, auto: diagonals, at least 100.
    #[schemars(range(min = 1, max = 1_048_576))]
    slash: usize,
    /// block_sparse: blocks of 64 tokens that a row reads, its own included.
    #[schemars(range(min = 1, max = 16_384))]
    blocks: usize,
    /// a_shape, auto: tokens at the start of the sequence.
    #[schemars(range(min = 0, max = 1_048_576))]
    init: usize,
    /// a_shape: most recent tokens, the query's own included.
    #[schemars(range(min = 1, max = 1_048_576))]
    local: usize,
    /// Last rows of the prompt that keys and diagonals are chosen by, and patterns by auto.
    #[schemars(range(min = 1, max = 1024))]
    queries: usize,
}

impl Default for Params {
    fn default() -> Self {
        let (vertical, slash, blocks, init, local) = (1000, 6096, 100, 128, 3968);
        Self { pattern: PatternName::Auto, vertical, slash, blocks, init, local, queries: 64 }
    }
}

/// The pattern of every head.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
enum PatternName {
    /// The one that keeps most of the last rows' probability, with as many keys as vertical_slash reads.
    Auto,
    /// The first and the last tokens.
    AShape,
    /// The heaviest keys and diagonals.
    VerticalSlash,
    /// The best blocks by their means.
    BlockSparse,
    /// Each layer's and head's from the artefact minference.toml.
    File,
}

/// What a head reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "pattern", rename_all = "snake_case", deny_unknown_fields)]
pub enum Pattern {
    /// The first and the last tokens.
    AShape {
        /// Tokens at the start of the sequence.
        init: usize,
        /// Most recent tokens, the query's own included, at least 1.
        local: usize,
    },
    /// The keys and diagonals in which most of some rows' probability lies.
    VerticalSlash {
        /// Keys, at least 30.
        vertical: usize,
        /// Diagonals, at least 100.
        slash: usize,
    },
    /// The best blocks by mean query · mean key.
    BlockSparse {
        /// Blocks of 64 tokens, a row's own included, at least 1.
        blocks: usize,
    },
}

/// How a head comes to its pattern.
#[derive(Debug)]
enum Plan {
    One(Pattern),
    Auto { init: usize, vertical: usize, slash: usize },
    Table(Arc<Table>),
}

/// The artefact: patterns `[layers][q_heads]`.
#[derive(Debug)]
struct Table(Vec<Vec<Pattern>>);

/// The artefact's content besides its header.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Heads {
    default: Option<Pattern>,
    #[serde(default)]
    heads: Vec<Head>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    layer: usize,
    head: usize,
    reads: Pattern,
}

fn read_table(file: &ArtifactFile) -> std::result::Result<Loaded, String> {
    let Heads { default, heads } = file.toml("minference")?;
    let shape = &file.model.shape;
    let mut table = vec![vec![None; shape.q_heads]; shape.layers];
    for Head { layer, head, reads } in heads {
        let Some(place) = table.get_mut(layer).and_then(|heads| heads.get_mut(head)) else {
            return Err(format!(
                "lists layer {layer}, head {head}; the model has {} layers of {} heads",
                shape.layers, shape.q_heads
            ));
        };
        if place.replace(reads).is_some() {
            return Err(format!("lists layer {layer}, head {head} twice"));
        }
    }
    let of = |(layer, heads): (usize, Vec<Option<Pattern>>)| {
        let of = |(head, own): (usize, Option<Pattern>)| {
            let pattern = own.or(default).ok_or_else(|| format!("lacks layer {layer}, head {head}, and a default"))?;
            let zero = matches!(pattern, Pattern::AShape { local: 0, .. } | Pattern::BlockSparse { blocks: 0 });
            if zero { Err(format!("holds {pattern:?}; `local` and `blocks` are at least 1")) } else { Ok(pattern) }
        };
        heads.into_iter().enumerate().map(of).collect::<std::result::Result<Vec<_>, String>>()
    };
    let table: Vec<_> = table.into_iter().enumerate().map(of).collect::<std::result::Result<_, _>>()?;
    Ok(Arc::new(Table(table)))
}

/// Keys at the start and diagonals next to the query that vertical_slash always reads.
const FORCED: Counts = Counts { columns: 30, slashes: 100 };

#[derive(Debug)]
struct MInference {
    plan: Plan,
    queries: usize,
}

impl PrefillMethod for MInference {
    fn choose(&self, layer: &PrefillLayer) -> Result<PrefillChoice> {
        let (rows, q_heads) = (layer.rows(), layer.q.dims()[1]);
        let mut patterns = match &self.plan {
            Plan::One(pattern) => vec![*pattern; q_heads],
            Plan::Auto { vertical, slash, .. } => {
                vec![Pattern::VerticalSlash { vertical: *vertical, slash: *slash }; q_heads]
            }
            Plan::Table(table) => table.0[layer.layer].clone(),
        };
        let positions = layer.positions();
        // The last rows, whose probabilities columns and diagonals are chosen by.
        let sampled = self.queries.min(rows);
        let first = rows - sampled;
        let q = layer.q.narrow(0, first, sampled)?;
        let stripes = patterns.iter().any(|p| matches!(p, Pattern::VerticalSlash { .. }));
        let sums = if stripes { Some(sums(&layer.select(&q, &positions[first..]))?) } else { None };
        let mut scored = if stripes { layer.pairs(&positions[first..]) } else { 0 };
        let runs = query_blocks(layer.start..layer.start + rows, BLOCK_TOKENS);
        if let (Plan::Auto { init, .. }, Some(sums)) = (&self.plan, &sums) {
            let last = &runs[runs.partition_point(|run| run.end <= layer.start + first)..];
            let looked_at;
            (patterns, looked_at) = best(layer, &patterns, *init, last, sums, first)?;
            scored += looked_at;
        }
        let (heads, products) = reads(&layer.select(&layer.q, &positions), &patterns, &runs, sums.as_ref())?;
        Ok(PrefillChoice {
            selection: Some(Selection::new(runs, heads)?),
            measured: sums.map(|sums| (layer.start + first, sums.lse)),
            scored: scored + products,
        })
    }

    fn cut(&self, start: usize, prompt: usize, max: usize) -> usize {
        let all = |is: fn(&Pattern) -> bool| match &self.plan {
            Plan::One(pattern) => is(pattern),
            Plan::Auto { .. } => false,
            Plan::Table(table) => table.0.iter().flatten().all(is),
        };
        if all(|p| matches!(p, Pattern::AShape { .. })) {
            prompt.min(start.saturating_add(max))
        } else if all(|p| !matches!(p, Pattern::VerticalSlash { .. })) {
            cut_at_blocks(BLOCK_TOKENS, start, prompt, max)
        } else {
            prompt
        }
    }
}

/// What the query heads read by their patterns, in runs of rows; block_sparse takes all of a run's rows. `sums` are those
/// of the rows that vertical_slash chooses by: without them it reads everything. Returns how many products of means
/// block_sparse took, too.
///
/// # Errors
/// A device error, a run without rows.
pub fn reads(
    rows: &Rows,
    patterns: &[Pattern],
    runs: &[Range<usize>],
    sums: Option<&Sums>,
) -> Result<(Vec<HeadReads>, u64)> {
    let wanted = |(head, pattern): (usize, &Pattern)| match pattern {
        Pattern::BlockSparse { blocks } => Some((head, *blocks)),
        _ => None,
    };
    let wanted: Vec<_> = patterns.iter().enumerate().filter_map(wanted).collect();
    let (blocks, products) = if wanted.is_empty() { Default::default() } else { pooled(rows, runs, &wanted)? };
    let striped = |(head, pattern): (usize, &Pattern)| match *pattern {
        Pattern::VerticalSlash { vertical, slash } => Some((head, Counts { columns: vertical, slashes: slash })),
        _ => None,
    };
    let striped: Vec<_> = patterns.iter().enumerate().filter_map(striped).collect();
    let stripes = sums.map_or(Ok(Vec::new()), |sums| by_count(sums, &striped, FORCED, runs, rows.window))?;
    let (mut blocks, mut stripes) = (blocks.into_iter(), stripes.into_iter());
    let of = |pattern: &Pattern| match *pattern {
        Pattern::AShape { init, local } => Some(Mask::SinkWindow { sink: init, window: local }.into()),
        Pattern::VerticalSlash { .. } => stripes.next(),
        Pattern::BlockSparse { .. } => blocks.next(),
    };
    let heads = patterns.iter().map(of).map(|reads| reads.unwrap_or(Mask::Causal.into())).collect();
    Ok((heads, products))
}

/// For each head the pattern that keeps most of the last rows' probability, with as many keys as its vertical_slash
/// reads for the last row; of equals the first. Returns how many products it took, too.
fn best(
    layer: &PrefillLayer,
    stripes: &[Pattern],
    init: usize,
    runs: &[Range<usize>],
    sums: &Sums,
    first: usize,
) -> Result<(Vec<Pattern>, u64)> {
    let all = layer.positions();
    let (rows, positions) = (layer.select(&layer.q, &all), &all[first..]);
    let q = layer.q.narrow(0, first, positions.len())?;
    let selected = |patterns: &[Pattern]| {
        let (heads, products) = reads(&rows, patterns, runs, Some(sums))?;
        Ok::<_, Error>((Selection::new(runs.to_vec(), heads)?, products))
    };
    let vertical_slash = selected(stripes)?;
    let keys = vertical_slash.0.counts(&positions[positions.len() - 1..], layer.window);
    let locals: Vec<usize> = keys.iter().map(|keys| keys.saturating_sub(init).max(1)).collect();
    let block_sparse: Vec<Pattern> =
        keys.iter().map(|keys| Pattern::BlockSparse { blocks: keys.div_ceil(BLOCK_TOKENS) }).collect();
    let a_shapes = locals.iter().map(|&local| Pattern::AShape { init, local });
    let mut best: Vec<(f32, Pattern)> = a_shape_shares(sums, init, &locals)?.into_iter().zip(a_shapes).collect();
    let mut scored = 0;
    for (patterns, (selection, products)) in [(stripes, vertical_slash), (&block_sparse, selected(&block_sparse)?)] {
        let (output, lse) = layer.attend_lse(&q, positions, (&selection).into())?;
        scored += products + output.keys.read(layer.q.dims()[1]);
        let shares = kept(&lse, &sums.lse)?;
        for (head, (best, pattern)) in best.iter_mut().zip(patterns).enumerate() {
            let share: f32 = shares.iter().skip(head).step_by(stripes.len()).sum();
            if share > best.0 {
                *best = (share, *pattern);
            }
        }
    }
    Ok((best.into_iter().map(|(_, pattern)| pattern).collect(), scored))
}

/// What heads that read their first `init` and their last tokens, so many each, keep of the rows' probability, by its sums: a
/// window is as many diagonals. Tokens that are first and last of a row count twice, in all for no more than the row has.
fn a_shape_shares(sums: &Sums, init: usize, locals: &[usize]) -> Result<Vec<f32>> {
    let n = sums.columns.dim(1)?;
    let part = |of: &Tensor, head: usize, count: usize| of.narrow(0, head, 1)?.narrow(1, 0, count.min(n))?.sum_all();
    let of = |(head, &local): (usize, &usize)| part(&sums.columns, head, init)? + part(&sums.diagonals, head, local)?;
    let shares = locals.iter().enumerate().map(of).collect::<Result<Vec<_>>>()?;
    let most = sums.lse.dim(0)? as f32;
    let cut = |share: f32| if share > most { most } else { share };
    Ok(Tensor::stack(&shares, 0)?.to_vec1::<f32>()?.into_iter().map(cut).collect())
}
