//! S²ANTA: exact probabilities from all keys, and a few values drawn from them.

use super::{Entry, decode, parameter};
use crate::method::{Choice, DecodeMethod, DecodeStep, KeyIndex};
use crate::schema::{parse, schema_of};
use crate::spec::{Chosen, SpecError};
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use taper_kernels::decode::{By, Spread, Targets, bernoulli_queries, sample_values};

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "santa",
    summary: "Reads every key and a few values, drawn by their probabilities: unbiased by exact scores and the kernels `prop` and `flash`.",
    source: "S²ANTA, section 3: SANTA (iid) and its stratified and systematic variants; `prop` draws with one offset over \
             the whole head, `prop_lr` and `flash` as the authors' kernels share draws out",
    schema: schema_of::<Params>,
    build: |value, path, artifacts| {
        let params: Params = parse(value, path)?;
        let within = decode(&params.within, &format!("{path}.within"), artifacts)?;
        if within.name == DECODE.name {
            let message = "santa does not sample its own sample; within must be another method";
            return Err(SpecError::new(format!("{path}.within.method"), message));
        }
        let json = json!(Params { within: within.json.clone(), ..params });
        Ok((Arc::new(Santa { params, within }), json))
    },
    artifacts: &[],
};

/// How many values are drawn, and how.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Params {
    /// Values drawn for each query head; under the kernel `flash` the same for every tile, at least one.
    #[schemars(range(min = 1, max = 65_536))]
    samples: usize,
    /// Where the draws fall, under the kernel `prop`; ignored under the others.
    variant: Variant,
    /// How draws are shared out along the keys.
    kernel: Kernel,
    /// Keys of a tile, under the kernels `prop_lr` and `flash`; ignored under `prop`.
    #[schemars(range(min = 1, max = 65_536))]
    tile: usize,
    /// How the probabilities come about.
    scores: Scoring,
    /// Draws of the query's features, under the scores `bernoulli`; ignored under `exact`.
    #[schemars(range(min = 1, max = 64))]
    draws: usize,
    /// Whether a KV head's query heads keep one set of features, under the scores `bernoulli`; ignored under `exact`.
    mean_query: bool,
    /// The keys to draw from: those that another decode method reads.
    #[schemars(schema_with = "within_schema")]
    within: Value,
}

fn within_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    parameter("decode", "The keys to draw from: those that another decode method reads.")
}

impl Default for Params {
    fn default() -> Self {
        Self {
            samples: 128,
            variant: Variant::Systematic,
            kernel: Kernel::Prop,
            tile: 256,
            scores: Scoring::Exact,
            draws: 4,
            mean_query: false,
            within: json!({ "method": "dense" }),
        }
    }
}

/// Where the draws fall.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
enum Variant {
    /// Anywhere, independently.
    Iid,
    /// One anywhere in each of as many equal parts of the mass.
    Stratified,
    /// At the same place in each part.
    Systematic,
}

/// How draws are shared out along the keys.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
enum Kernel {
    /// Over all keys at once; exactly unbiased.
    Prop,
    /// To each tile by largest remainder, as the authors' two-pass kernel; slightly biased.
    PropLr,
    /// As many to every tile, as the authors' one-pass kernel; unbiased, wants more samples.
    Flash,
}

/// How the probabilities come about.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
enum Scoring {
    /// From whole queries.
    Exact,
    /// From queries of which only randomly kept features are left: unbiased scores, biased probabilities.
    Bernoulli,
}

#[derive(Debug)]
struct Santa {
    params: Params,
    within: Chosen<dyn DecodeMethod>,
}

impl Santa {
    fn spread(&self) -> Spread {
        match (self.params.kernel, self.params.variant) {
            (Kernel::PropLr, _) => Spread::LargestRemainder(self.params.tile),
            (Kernel::Flash, _) => Spread::EachTile(self.params.tile),
            (Kernel::Prop, Variant::Iid) => Spread::Whole(Targets::Independent),
            (Kernel::Prop, Variant::Stratified) => Spread::Whole(Targets::Stratified),
            (Kernel::Prop, Variant::Systematic) => Spread::Whole(Targets::Systematic),
        }
    }

    /// The values to read of what `within` chose.
    fn draw(&self, step: &DecodeStep, chosen: Choice) -> Result<Choice> {
        let (samples, streams) = (self.params.samples, step.streams);
        let q;
        let by = if self.params.scores == Scoring::Bernoulli {
            q = bernoulli_queries(&step.batch, streams, self.params.draws, self.params.mean_query)?;
            By::Queries(&q)
        } else {
            chosen.scores.as_ref().map_or(By::Keys, By::Scores)
        };
        // Heads that draw score their keys for it, unless they are known. Where only a device knows how many those are, the
        // selection tells at the end of the step.
        let counts = match chosen.selection.counts_wait() {
            true => Vec::new(),
            false => chosen.selection.counts(step.batch.rows)?,
        };
        let known = |head| matches!(by, By::Scores(known) if known.has(head));
        let new = counts.into_iter().enumerate().filter(|&(head, keys)| keys > samples && !known(head));
        let mut scored = chosen.scored.clone();
        for (head, keys) in new {
            scored.resize(step.batch.rows.len(), 0);
            scored[head / step.kv_heads] += keys;
        }
        let selection = sample_values(&step.batch, &chosen.selection, by, streams, samples, self.spread())?;
        Ok(Choice { selection, scored, ..chosen })
    }
}

impl DecodeMethod for Santa {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        // In layers that it reads whole, the values are drawn of all.
        self.draw(step, step.choose(&*self.within.method)?)
    }

    fn reads_all(&self, keys: usize) -> bool {
        keys <= self.params.samples || self.within.method.reads_all(keys)
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        self.within.method.indices()
    }

    fn may_lack(&self, keys: usize) -> usize {
        self.within.method.may_lack(keys)
    }

    fn ahead(&self) -> bool {
        self.within.method.ahead()
    }

    fn indexed_from(&self) -> usize {
        self.within.method.indexed_from()
    }
}
