//! Delta Attention: a sparse prefill corrected by dense rows.
//!
//! Every `gamma`-th row (an anchor) is attended densely too, and the difference is added to the rows up to the next
//! anchor. The last rows are dense unless `tail` is 0: they are part of the method, not a detail.

use super::{Entry, parameter, prefill};
use crate::method::{Carry, KeyCounts, PrefillChoice, PrefillLayer, PrefillMethod, PrefillOutput};
use crate::schema::{parse, schema_of};
use crate::spec::{Chosen, SpecError};
use candle_core::{Result, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use taper_kernels::correct::{Anchors, Correction, correct};
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kernels::prefill::Mask;

pub(super) static PREFILL: Entry<dyn PrefillMethod> = Entry {
    name: "delta",
    summary: "A sparse prefill corrected by the difference to dense attention at every gamma-th row.",
    source: "Willette et al. 2025, Delta Attention: Algorithm 1 and Equation 5; rows are counted from 0",
    schema: schema_of::<Params>,
    build: |value, path, artifacts| {
        let params: Params = parse(value, path)?;
        let base = prefill(&params.base, &format!("{path}.base"), artifacts)?;
        if base.name == PREFILL.name {
            return Err(SpecError::new(
                format!("{path}.base.method"),
                "delta does not correct itself; base must be another method",
            ));
        }
        let json = json!(Params { base: base.json.clone(), ..params });
        Ok((Arc::new(Delta { gamma: params.gamma, tail: params.tail, mode: params.mode, base }), json))
    },
    artifacts: &[],
};

/// How the prompt is corrected.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Params {
    /// Rows from one dense anchor to the next; 1 is dense attention.
    #[schemars(range(min = 1, max = 1_048_576))]
    gamma: usize,
    /// Last rows of the prompt that are dense, at least: the tail begins at a multiple of gamma and has gamma rows or more. 0 is
    /// no tail; then rows are corrected up to the prompt's end.
    #[schemars(range(min = 0, max = 1_048_576))]
    tail: usize,
    /// What becomes of the difference at an anchor.
    mode: Mode,
    /// The sparse prefill method underneath.
    #[schemars(schema_with = "base_schema")]
    base: Value,
}

fn base_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    parameter("prefill", "The sparse prefill method underneath.")
}

/// What becomes of the difference at an anchor.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
enum Mode {
    /// It is added to the rows up to the next anchor.
    Delta,
    /// It corrects the anchor alone.
    Recompute,
}

impl Default for Params {
    fn default() -> Self {
        Self { gamma: 64, tail: 128, mode: Mode::Delta, base: json!({ "method": "streaming_llm" }) }
    }
}

#[derive(Debug)]
struct Delta {
    gamma: usize,
    tail: usize,
    mode: Mode,
    base: Chosen<dyn PrefillMethod>,
}

impl Delta {
    /// Where the dense tail of a prompt begins: a multiple of gamma, 0 for a prompt that is all tail, and the prompt's end
    /// where there is none.
    fn tail_start(&self, prompt: usize) -> usize {
        match self.tail {
            0 => prompt,
            least => prompt.saturating_sub(least.max(self.gamma)) / self.gamma * self.gamma,
        }
    }

    /// How many of the rows are attended sparsely and corrected: those before the tail.
    fn sparse(&self, layer: &PrefillLayer) -> usize {
        match self.gamma == 1 || self.base.name == "dense" {
            true => 0,
            false => self.tail_start(layer.prompt).clamp(layer.start, layer.start + layer.rows()) - layer.start,
        }
    }
}

impl PrefillMethod for Delta {
    fn choose(&self, chunk: &PrefillLayer) -> Result<PrefillChoice> {
        // The base sees the tail's rows too: it may go by the prompt's last queries.
        if self.sparse(chunk) > 0 { self.base.method.choose(chunk) } else { Ok(PrefillChoice::default()) }
    }

    fn attend(&self, layer: &PrefillLayer, choice: &PrefillChoice, carry: &mut Carry) -> Result<PrefillOutput> {
        let (start, rows, sparse) = (layer.start, layer.rows(), self.sparse(layer));
        if sparse == 0 {
            let mut dense = layer.attend(Mask::Causal)?;
            if choice.measured.is_some() {
                dense.kept = self.base.method.attend(layer, choice, carry.base())?.kept;
            }
            return Ok(dense);
        }
        // Anchors are so by their position.
        let anchors = Anchors { first: start.next_multiple_of(self.gamma) - start, gamma: self.gamma };
        let dense_rows: Vec<u32> = anchors.below(sparse).chain(sparse..rows).map(|r| r as u32).collect();
        // The tail's too: rows that the base measures may be among them.
        let base = self.base.method.attend(layer, choice, carry.base())?;
        let dense = match dense_rows.is_empty() {
            // Between two anchors, as a prompt's last rows may be where it has no tail.
            true => PrefillOutput { out: base.out.narrow(0, 0, 0)?, keys: KeyCounts::default(), kept: Vec::new() },
            false => {
                let positions: Vec<u32> = dense_rows.iter().map(|r| start as u32 + r).collect();
                let q = layer.q.index_select(&Tensor::new(dense_rows.as_slice(), layer.q.device())?, 0)?;
                layer.attend_rows(&q, &positions, Mask::Causal)?
            }
        };
        let correction = match self.mode {
            Mode::Delta => Correction::Propagate,
            Mode::Recompute => Correction::Replace,
        };
        let (out, last) = correct((&base.out, sparse), &dense.out, anchors, carry.rows.as_ref(), correction)?;
        carry.rows = last;
        // A dense row reads all that its sparse one does.
        let mut keys = base.keys;
        keys.replace(&dense_rows, &dense.keys);
        Ok(PrefillOutput { out, keys, kept: base.kept })
    }

    fn cut(&self, start: usize, prompt: usize, max: usize) -> usize {
        self.base.method.cut(start, prompt, max)
    }

    fn reuse(&self, prompt: usize, cached: usize) -> usize {
        if self.gamma == 1 || self.base.name == "dense" {
            return cached;
        }
        // Where the next row is an anchor, what the anchor before it found is not needed; rows of the tail are dense.
        let mut tokens =
            self.base.method.reuse(prompt, cached).min(self.tail_start(prompt)) / BLOCK_TOKENS * BLOCK_TOKENS;
        while !tokens.is_multiple_of(self.gamma) {
            tokens = self.base.method.reuse(prompt, tokens - BLOCK_TOKENS);
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Artifacts;

    fn delta(gamma: usize, tail: usize, base: &str) -> Delta {
        let base = prefill(&json!({ "method": base }), "base", &Artifacts::default()).expect("a method");
        Delta { gamma, tail, mode: Mode::Delta, base }
    }

    #[test]
    fn what_a_prompt_takes_over_ends_before_its_tail_and_before_an_anchor() {
        for (gamma, tail, prompt, cached, taken) in [
            (64, 128, 1000, 960, 832),
            (64, 128, 1000, 512, 512),
            (64, 128, 150, 128, 0),
            (48, 128, 2000, 1920, 1728),
            (100, 128, 4000, 3968, 3200),
            (100, 128, 4000, 1536, 0),
            (1, 128, 1000, 960, 960),
            // Another tail, or none: then rows attend alike however long the prompt is.
            (64, 300, 1000, 960, 640),
            (64, 1, 1000, 960, 896),
            (64, 5000, 1000, 960, 0),
            (64, 0, 1000, 960, 960),
            (48, 0, 2000, 1984, 1920),
            (100, 0, 4000, 3968, 3200),
        ] {
            let found = delta(gamma, tail, "streaming_llm").reuse(prompt, cached);
            assert_eq!(found, taken, "gamma {gamma}, tail {tail}, {cached} of {prompt}");
        }
        assert_eq!(delta(64, 128, "dense").reuse(1000, 960), 960, "dense all over");
        for tail in [0, 128] {
            assert_eq!(delta(64, tail, "hip").reuse(1000, 960), 0, "as its base");
        }
    }

    #[test]
    fn the_tail_starts_at_a_multiple_of_gamma_and_holds_at_least_what_is_asked_for() {
        for (gamma, tail, prompt, start) in [
            (64, 128, 100, 0),
            (64, 128, 128, 0),
            (64, 128, 191, 0),
            (64, 128, 192, 64),
            (64, 128, 1000, 832),
            (200, 128, 1000, 800),
            (1, 128, 130, 2),
            (64, 1, 1000, 896),
            (64, 500, 1000, 448),
            (64, 0, 1000, 1000),
            (64, 0, 1, 1),
        ] {
            assert_eq!(delta(gamma, tail, "dense").tail_start(prompt), start, "gamma {gamma}, tail {tail}, {prompt}");
        }
    }
}
