//! What a request's attention came to: density, budgets, audited errors.

use crate::spec::AttentionSpec;
use serde::Serialize;
use taper_kernels::decode::Budget;

/// Counts of one phase of one sequence, over all layers and heads.
#[derive(Debug, Clone, Default)]
pub(crate) struct PhaseReport {
    /// (query, key) pairs read and there, per KV head.
    read: u64,
    there: u64,
    /// (query, KV head) pairs, for the mean budget.
    queries: u64,
    most: u64,
    /// Query heads that went dense to keep a promise.
    dense_heads: Option<u64>,
    /// Relative errors of audited heads.
    errors: Vec<f32>,
}

impl PhaseReport {
    /// Adds queries that read `read` of `there` pairs in all, at most `most` keys each.
    pub fn add(&mut self, queries: u64, read: u64, there: u64, most: u64) {
        self.queries += queries;
        self.read += read;
        self.there += there;
        self.most = self.most.max(most);
    }

    /// Adds what sampling came to.
    pub fn add_budgets(&mut self, budgets: &[Budget]) {
        *self.dense_heads.get_or_insert(0) += budgets.iter().filter(|b| b.dense).count() as u64;
    }

    /// Adds audited heads.
    pub fn add_errors(&mut self, errors: impl IntoIterator<Item = f32>) {
        self.errors.extend(errors);
    }

    fn usage(&self, method: &'static str, seed: u64, epsilon: Option<f64>) -> PhaseUsage {
        let share = |a: u64, b: u64| if b == 0 { 1.0 } else { a as f64 / b as f64 };
        PhaseUsage {
            method,
            density: share(self.read, self.there),
            budget_mean: if self.queries == 0 { 0.0 } else { self.read as f64 / self.queries as f64 },
            budget_max: self.most,
            seed,
            dense_heads: self.dense_heads,
            audit: AuditUsage::of(&self.errors, epsilon),
        }
    }
}

/// The reports of both phases.
#[derive(Debug, Clone, Default)]
pub(crate) struct Report {
    pub prefill: PhaseReport,
    pub decode: PhaseReport,
}

/// What a request's attention came to: the body of `usage.attention`.
#[derive(Debug, Clone, Serialize)]
pub struct AttentionUsage {
    /// The prompt.
    pub prefill: PhaseUsage,
    /// The generated tokens.
    pub decode: PhaseUsage,
}

/// One phase of [`AttentionUsage`].
#[derive(Debug, Clone, Serialize)]
pub struct PhaseUsage {
    /// The method.
    pub method: &'static str,
    /// Share of (query, key) pairs read, the causal pairs within the model's window as the whole; 1 if there were none.
    pub density: f64,
    /// Keys read per query, layer and KV head, on average.
    pub budget_mean: f64,
    /// The most keys that one query read in one layer and KV head; for prefill the mean of the densest chunk.
    pub budget_max: u64,
    /// Seed of the method's random draws.
    pub seed: u64,
    /// Query heads (per layer and token) that read everything to keep a promise; absent where none is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_heads: Option<u64>,
    /// Errors against dense attention; absent if nothing was audited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audit: Option<AuditUsage>,
}

/// Relative errors ‖o − o_dense‖₂ / ‖o_dense‖₂ of audited heads.
#[derive(Debug, Clone, Serialize)]
pub struct AuditUsage {
    /// Heads audited (per layer and token).
    pub heads: u64,
    /// Mean relative error.
    pub error_mean: f64,
    /// 99th percentile of the relative error.
    pub error_p99: f64,
    /// Largest relative error.
    pub error_max: f64,
    /// Share of heads whose error is over epsilon; absent where the method promises none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub over_epsilon: Option<f64>,
}

impl AuditUsage {
    fn of(errors: &[f32], epsilon: Option<f64>) -> Option<Self> {
        let mut sorted = errors.to_vec();
        sorted.sort_by(f32::total_cmp);
        let &last = sorted.last()?;
        let count = sorted.len();
        let over = |epsilon: f64| sorted.iter().filter(|e| e.is_nan() || f64::from(**e) > epsilon).count();
        Some(Self {
            heads: count as u64,
            error_mean: sorted.iter().map(|e| f64::from(*e)).sum::<f64>() / count as f64,
            error_p99: f64::from(sorted[(count * 99).div_ceil(100) - 1]),
            error_max: f64::from(last),
            over_epsilon: epsilon.map(|epsilon| over(epsilon) as f64 / count as f64),
        })
    }
}

impl Report {
    pub fn usage(&self, spec: &AttentionSpec, seed: u64) -> AttentionUsage {
        AttentionUsage {
            prefill: self.prefill.usage(spec.prefill.name, seed, None),
            decode: self.decode.usage(spec.decode.name, seed, spec.decode.method.epsilon()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_and_shares_are_those_of_the_errors() {
        let errors: Vec<f32> = (1..=200).map(|i| i as f32 / 1000.0).collect();
        let audit = AuditUsage::of(&errors, Some(0.1505)).unwrap();
        assert_eq!((audit.heads, audit.over_epsilon), (200, Some(0.25)));
        assert!((audit.error_mean - 0.1005).abs() < 1e-6);
        assert!((audit.error_p99 - 0.198).abs() < 1e-6 && (audit.error_max - 0.2).abs() < 1e-6);
        assert!(AuditUsage::of(&[], None).is_none());
        assert_eq!(AuditUsage::of(&[f32::NAN], Some(0.5)).unwrap().over_epsilon, Some(1.0));
    }
}
