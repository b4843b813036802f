//! Delta Attention: a sparse prefill corrected by dense rows.
//!
//! Every `gamma`-th row (an anchor) is attended densely too, and the difference is added to the rows up to the next
//! anchor. The last rows are dense: they are part of the method, not a detail.

use super::{Entry, prefill};
use crate::method::{PrefillLayer, PrefillMethod, PrefillOutput};
use crate::schema::{parse, schema_of};
use crate::spec::Chosen;
use candle_core::{Result, Tensor, bail};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use taper_kernels::correct::{Correction, correct};
use taper_kernels::prefill::Mask;

pub(super) static PREFILL: Entry<dyn PrefillMethod> = Entry {
    name: "delta",
    summary: "A sparse prefill corrected by the difference to dense attention at every gamma-th row.",
    source: "Willette et al. 2025, Delta Attention: Algorithm 1 and Equation 5; rows are counted from 0",
    schema: schema_of::<Params>,
    build: |value, path| {
        let params: Params = parse("delta", value, path)?;
        let base = prefill(&params.base, &format!("{path}.base"))?;
        let json = json!(Params { base: base.json.clone(), ..params });
        Ok((Arc::new(Delta { gamma: params.gamma, mode: params.mode, base }), json))
    },
};

/// How the prompt is corrected.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Params {
    /// Rows from one dense anchor to the next; 1 is dense attention.
    #[schemars(range(min = 1, max = 1_048_576))]
    gamma: usize,
    /// What becomes of the difference at an anchor.
    mode: Mode,
    /// The sparse prefill method underneath.
    #[schemars(schema_with = "base_schema")]
    base: Value,
}

fn base_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "type": "object", "description": "The sparse prefill method underneath.", "x-method-of": "prefill" })
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
        Self { gamma: 64, mode: Mode::Delta, base: json!({ "method": "streaming_llm" }) }
    }
}

#[derive(Debug)]
struct Delta {
    gamma: usize,
    mode: Mode,
    base: Chosen<dyn PrefillMethod>,
}

/// Least number of dense rows at a prompt's end.
const LEAST_TAIL: usize = 128;

impl Delta {
    /// Where the dense tail of a prompt begins: a multiple of gamma, or 0 for a prompt that is all tail.
    fn tail(&self, prompt: usize) -> usize {
        prompt.saturating_sub(LEAST_TAIL.max(self.gamma)) / self.gamma * self.gamma
    }
}

impl PrefillMethod for Delta {
    fn chunk_multiple(&self) -> usize {
        // Both the base's cuts and the anchors must fall on chunk starts.
        let base = self.base.method.chunk_multiple();
        self.gamma / gcd(self.gamma, base) * base
    }

    fn attend(&self, layer: &PrefillLayer) -> Result<PrefillOutput> {
        let (start, rows) = (layer.start, layer.rows());
        if !start.is_multiple_of(self.gamma) {
            bail!("delta: a chunk starts at {start}, not at a multiple of gamma {}", self.gamma);
        }
        // Rows of this chunk before the tail: attended sparsely and corrected.
        let sparse = self.tail(layer.prompt).clamp(start, start + rows) - start;
        let dense_rows: Vec<u32> = (0..sparse).step_by(self.gamma).chain(sparse..rows).map(|r| r as u32).collect();
        let positions: Vec<u32> = dense_rows.iter().map(|r| start as u32 + r).collect();
        let q = if dense_rows.len() == rows {
            layer.q.clone()
        } else {
            let rows = dense_rows.len();
            layer.q.index_select(&Tensor::from_vec(dense_rows, rows, layer.q.device())?, 0)?
        };
        let dense = layer.attend_rows(&q, &positions, Mask::Causal)?;
        if sparse == 0 {
            return Ok(dense);
        }
        let base = self.base.method.attend(&layer.first(sparse)?)?;
        let correction = match self.mode {
            Mode::Delta => Correction::Propagate,
            Mode::Recompute => Correction::Replace,
        };
        let out = correct(&base.out, &dense.out, self.gamma, correction)?;
        Ok(PrefillOutput { out, pairs: base.pairs + dense.pairs })
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_starts_at_a_multiple_of_gamma_and_holds_at_least_128_rows() {
        let delta = |gamma| Delta {
            gamma,
            mode: Mode::Delta,
            base: prefill(&json!({ "method": "dense" }), "base").expect("dense"),
        };
        for (gamma, prompt, tail) in
            [(64, 100, 0), (64, 128, 0), (64, 191, 0), (64, 192, 64), (64, 1000, 832), (200, 1000, 800), (1, 130, 2)]
        {
            assert_eq!(delta(gamma).tail(prompt), tail, "gamma {gamma}, prompt {prompt}");
        }
    }
}
