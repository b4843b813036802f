//! Dense attention: every visible key.

use super::Entry;
use crate::method::{Choice, DecodeMethod, DecodeStep, PrefillMethod};
use crate::schema::{parse, schema_of};
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::sync::Arc;
use taper_kernels::decode::{DecodeRow, Selection};

pub(super) static PREFILL: Entry<dyn PrefillMethod> = Entry {
    name: "dense",
    summary: "Every key at or before the query.",
    source: "Vaswani et al. 2017, arXiv:1706.03762",
    schema: schema_of::<Dense>,
    build: |value, path, _| Ok((Arc::new(parse::<Dense>(value, path)?), json!({}))),
    artifacts: &[],
};

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: PREFILL.name,
    summary: PREFILL.summary,
    source: PREFILL.source,
    schema: schema_of::<Dense>,
    build: |value, path, _| Ok((Arc::new(parse::<Dense>(value, path)?), json!({}))),
    artifacts: &[],
};

/// Takes no parameters.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
struct Dense {}

impl PrefillMethod for Dense {
    fn reuse(&self, _: usize, cached: usize) -> usize {
        cached
    }
}

impl DecodeMethod for Dense {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        Ok(Selection::dense(step.batch.rows.len(), step.kv_heads).into())
    }

    fn plain(&self, rows: &[DecodeRow], kv_heads: usize) -> Option<Selection> {
        Some(Selection::dense(rows.len(), kv_heads))
    }
}
