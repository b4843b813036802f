//! How many keys to sample so that the output's relative error keeps a promise: vAttention's budgets.
//!
//! Source: vAttention (its Lemma 4.2 and Theorem 4.3) for `lemma` and `denominator`; the sharper rules follow from the
//! same central limit theorem applied to the error itself.

use statrs::distribution::{ContinuousCDF, Normal};

/// Which bound turns the moments of a sample into a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// The denominator alone: promises the softmax normaliser, not the output.
    Denominator,
    /// The paper's: errors of numerator and denominator bounded apart, factor 2.
    Lemma,
    /// The same with the exact inequality in place of the factor 2.
    Tight,
    /// The error of the ratio itself, with a scalar quantile.
    Ratio,
    /// The error of the ratio, with the quantile of its squared norm from the sample's covariance.
    Chi2,
}

/// Relative error at most `epsilon` with probability at least 1 − `delta`, per head and query.
#[derive(Debug, Clone)]
pub struct Promise {
    pub(crate) rule: Rule,
    pub(crate) epsilon: f64,
    /// Ways to split delta between numerator and denominator: (vector quantile, scalar quantile).
    pub(crate) splits: Vec<(f64, f64)>,
    /// Scalar quantile of the whole delta.
    pub(crate) whole: f64,
    /// Vector quantile of 0.9 delta.
    pub(crate) most: f64,
    /// One-sided quantile of delta to the power of [`TAIL`], for the squared norm.
    pub(crate) upper: f64,
    /// One-sided quantile of 0.1 delta, for the denominator's share.
    pub(crate) rest: f64,
    /// What the norm's quantile is at least, whatever the covariance.
    least: f64,
    /// And at most.
    greatest: f64,
    /// What the heaviest key's share of the variance, to the power of 3/2, counts for once more.
    pub(crate) unseen: f64,
}

/// Moments of `drawn` sampled keys that stand for `residual` unread ones, and the estimates they give.
///
/// With e = exp(score − max), v the value and o the estimated output: D sums e, N sums e v, R sums e (v − o).
#[derive(Debug, Clone, Copy)]
pub struct Moments {
    /// Keys that the sample stands for.
    pub residual: f64,
    /// Keys sampled.
    pub drawn: f64,
    /// Estimated D over all keys.
    pub denominator: f64,
    /// ‖N‖² of the estimated N.
    pub numerator_norm2: f64,
    /// ‖o‖².
    pub output_norm2: f64,
    /// Sample variance of e.
    pub variance_d: f64,
    /// Trace of the sample covariance of e v.
    pub trace_n: f64,
    /// Trace of the sample covariance of e (v − o).
    pub trace_r: f64,
    /// The heaviest sampled key's share of the sum of e², or, if that is more, of e²‖v‖².
    pub heaviest: f64,
}

/// What the moments say.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Verdict {
    /// So many sampled keys keep the promise; may exceed the residual.
    Sample(f64),
    /// The sample is too noisy to tell.
    Noisy,
    /// No sample will do: too little to measure the error against.
    Dense,
}

/// Below this, z²·Tr bounds the squared norm of a Gaussian vector no longer (Székely and Bakirov 2003).
const LEAST_VECTOR_QUANTILE: f64 = 1.24;
/// What keys heavier than all that were sampled add to the variance, in units of the heaviest's own share of it to the
/// power of 3/2, times the cube of ln(1 / delta). By exchangeability the share of such keys among those left is
/// exponential with mean 1 / (drawn + 1), and its 1 − delta quantile goes with ln(1 / delta); how much heavier they are
/// does so again, and how far the sample's own variance falls short where it missed them. A key is heavy by its weight or
/// by its value, which no predictor ranks by. Factor and powers are calibrated on real heads and held against others
/// (bench/promise.md and its history): without them single heads break their promise.
const UNSEEN: f64 = 0.5;
/// By what power of delta the norm's quantile is taken: errors of samples of some hundred keys go beyond a Gaussian's
/// by more the further out one asks. Calibrated as `UNSEEN`: with 1 heads of the first layer break promises of 0.05,
/// and none of 0.1 and more.
const TAIL: f64 = 1.05;
/// Share of a squared norm that must remain once its noise is taken off.
const LEAST_SIGNAL: f64 = 0.25;

impl Promise {
    /// `epsilon` and `delta` in (0, 1).
    ///
    /// # Panics
    /// If they are not.
    pub fn new(rule: Rule, epsilon: f64, delta: f64) -> Self {
        assert!(epsilon > 0.0 && epsilon < 1.0 && delta > 0.0 && delta < 1.0, "epsilon {epsilon}, delta {delta}");
        let normal = Normal::standard();
        let two_sided = |d: f64| normal.inverse_cdf(1.0 - d / 2.0);
        let vector = |d: f64| two_sided(d).max(LEAST_VECTOR_QUANTILE);
        let split = |share: f64| (vector(delta * (1.0 - share)), two_sided(delta * share));
        let mut promise = Self {
            rule,
            epsilon,
            splits: [0.02, 0.05, 0.1, 0.2, 0.3, 0.5].map(split).to_vec(),
            whole: two_sided(delta),
            most: vector(0.9 * delta),
            upper: normal.inverse_cdf(1.0 - delta.powf(TAIL)),
            rest: normal.inverse_cdf(1.0 - 0.1 * delta),
            least: 1.0,
            greatest: 1.0,
            unseen: UNSEEN * (-delta.ln()).powi(3),
        };
        // As a function of the spread's root the quantile is concave, so its least value is at an end.
        promise.least = promise.norm_quantile(1.0).min(1.0);
        // The cube of 1 − s + z √s is largest at √s = z / 2, and at 0 for negative z.
        promise.greatest = (1.0 + promise.upper.max(0.0).powi(2) / 4.0).powf(1.5);
        promise
    }

    /// The budget. `alignment` gives Tr(S²) / Tr(S)² of the covariance S of R, in (0, 1], and is asked only where it matters: not
    /// if more than `limit` keys are needed whatever it is, nor if no more than `limit` are and either more than `enough` or no
    /// more than were drawn. Budgets within one of these are all one to the caller, and may be given too low.
    pub fn verdict(&self, m: &Moments, (enough, limit): (f64, f64), alignment: impl FnOnce() -> f64) -> Verdict {
        let n = m.residual;
        let scalar = n * root(m.variance_d) / m.denominator;
        // Each rule gives the root of the budget with replacement from the norm that errors are measured against.
        match self.rule {
            Rule::Denominator => sample_of(self.whole * scalar / self.epsilon, n),
            Rule::Lemma | Rule::Tight => {
                let deviation = n * root(m.trace_n);
                let bound = |norm: f64| {
                    let bound = |&(c, z): &(f64, f64)| match self.rule {
                        Rule::Lemma => (c * deviation / norm + z * scalar) / (self.epsilon / 2.0),
                        _ => (c * deviation / norm + (1.0 + self.epsilon) * z * scalar) / self.epsilon,
                    };
                    self.splits.iter().map(bound).fold(f64::INFINITY, f64::min)
                };
                match self.norm(m.numerator_norm2, m.trace_n, m, 1.0, |norm| sample_of(bound(norm), n).over(limit)) {
                    Ok(norm) => sample_of(bound(norm), n),
                    Err(verdict) => verdict,
                }
            }
            Rule::Ratio | Rule::Chi2 => {
                // The denominator's own error changes the output's to second order only: chi2 leaves it out.
                let (least, rest, unseen) = match self.rule {
                    Rule::Ratio => (self.most, self.rest * scalar, 0.0),
                    _ => (self.least, 0.0, self.unseen * m.heaviest.powf(1.5)),
                };
                let deviation = n * root(m.trace_r * (1.0 + unseen)) / (self.epsilon * m.denominator);
                let bound = |c: f64, norm: f64| sample_of(c * deviation / norm + rest, n);
                let norm =
                    self.norm(m.output_norm2, m.trace_r, m, m.denominator, |norm| bound(least, norm).over(limit));
                match norm {
                    Err(verdict) => verdict,
                    Ok(norm) => {
                        let at_least = bound(least, norm);
                        let all_one = || {
                            let at_most = bound(self.greatest, norm);
                            at_most.below(limit) && (at_least.over(enough) || !at_most.over(m.drawn))
                        };
                        if self.rule == Rule::Ratio || at_least.over(limit) || all_one() {
                            return at_least;
                        }
                        bound(self.norm_quantile(alignment()), norm)
                    }
                }
            }
        }
    }

    /// A norm with the sample's noise taken off its square; `scale` turns sums into the norm's unit. `hopeless` says
    /// whether a norm is so small that no sample will do: if that of the noisy square is, no larger sample is asked for.
    fn norm(
        &self,
        norm2: f64,
        trace: f64,
        m: &Moments,
        scale: f64,
        hopeless: impl FnOnce(f64) -> bool,
    ) -> Result<f64, Verdict> {
        if norm2 <= 0.0 || !norm2.is_finite() || hopeless(norm2.sqrt()) {
            return Err(Verdict::Dense);
        }
        let noise = m.residual.powi(2) * trace.max(0.0) * (1.0 / m.drawn - 1.0 / m.residual) / scale.powi(2);
        let signal = norm2 - noise;
        if signal < LEAST_SIGNAL * norm2 { Err(Verdict::Noisy) } else { Ok(signal.sqrt()) }
    }

    /// The 1 − delta quantile of ‖N(0, S)‖ over sqrt(Tr S), from Tr(S²) / Tr(S)²: Satterthwaite's gamma, by Wilson and
    /// Hilferty.
    fn norm_quantile(&self, alignment: f64) -> f64 {
        let spread = 2.0 * alignment / 9.0;
        (1.0 - spread + self.upper * spread.sqrt()).max(0.0).powi(3).sqrt()
    }
}

/// The square root of a variance, which rounding may have taken below 0; NaN stays NaN.
fn root(variance: f64) -> f64 {
    if variance < 0.0 { 0.0 } else { variance.sqrt() }
}

/// The budget whose error without replacement equals that of `root²` draws with it.
fn sample_of(root: f64, n: f64) -> Verdict {
    let b = root * root;
    if b.is_nan() {
        return Verdict::Dense;
    }
    Verdict::Sample(if b.is_infinite() { n } else { (b / (1.0 + b / n)).ceil() })
}

impl Verdict {
    /// Whether fewer keys than `limit` are needed.
    fn below(self, limit: f64) -> bool {
        matches!(self, Self::Sample(b) if b < limit)
    }

    /// Whether more keys than `limit` are needed.
    fn over(self, limit: f64) -> bool {
        matches!(self, Self::Sample(b) if b > limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn moments() -> impl Strategy<Value = Moments> {
        (100f64..1e6, 64f64..99.0, 0.0..2f64, 0.0..2f64).prop_map(|(residual, drawn, spread, signal)| Moments {
            residual,
            drawn,
            denominator: residual,
            numerator_norm2: (residual * signal).powi(2),
            output_norm2: signal * signal,
            variance_d: spread * spread,
            trace_n: spread,
            trace_r: spread,
            heaviest: 1.0 / drawn,
        })
    }

    #[test]
    fn quantiles_of_the_squared_norm_agree_with_chi_square_tables() {
        // chi²(0.95) with 1, 10 and 64 degrees of freedom: 3.841, 18.307, 83.675.
        let promise = Promise::new(Rule::Chi2, 0.1, 0.05f64.powf(1.0 / TAIL));
        for (freedom, quantile) in [(1.0f64, 3.841f64), (10.0, 18.307), (64.0, 83.675)] {
            let c = promise.norm_quantile(1.0 / freedom);
            assert!((c * c * freedom / quantile - 1.0).abs() < 0.03, "{freedom}: {}", c * c * freedom);
        }
    }

    #[test]
    fn a_constant_residual_needs_no_more_than_the_pilot() {
        let m = Moments {
            residual: 1000.0,
            drawn: 64.0,
            denominator: 1000.0,
            numerator_norm2: 1e6,
            output_norm2: 1.0,
            variance_d: 0.0,
            trace_n: 0.0,
            trace_r: 0.0,
            heaviest: 0.0,
        };
        for rule in [Rule::Denominator, Rule::Lemma, Rule::Tight, Rule::Ratio, Rule::Chi2] {
            assert_eq!(
                Promise::new(rule, 0.05, 0.05).verdict(&m, (500.0, 500.0), || 1.0),
                Verdict::Sample(0.0),
                "{rule:?}"
            );
        }
    }

    #[test]
    fn an_output_of_zero_goes_dense_and_a_noisy_one_grows() {
        let m = Moments {
            residual: 1000.0,
            drawn: 64.0,
            denominator: 1000.0,
            numerator_norm2: 0.0,
            output_norm2: 0.0,
            variance_d: 1.0,
            trace_n: 1.0,
            trace_r: 1.0,
            heaviest: 0.0,
        };
        let promise = Promise::new(Rule::Chi2, 0.05, 0.05);
        assert_eq!(promise.verdict(&m, (500.0, 500.0), || 1.0), Verdict::Dense);
        // Three quarters of the squared norm are noise: tell later, unless even with the noise no sample would do.
        let noisy = Moments { trace_r: 52.0, output_norm2: 1.0, variance_d: 0.0, ..m };
        assert_eq!(Promise::new(Rule::Chi2, 0.5, 0.05).verdict(&noisy, (500.0, 500.0), || 1.0), Verdict::Noisy);
        assert_eq!(promise.verdict(&noisy, (500.0, 500.0), || 1.0), Verdict::Dense);
        assert_eq!(promise.verdict(&Moments { output_norm2: f64::NAN, ..m }, (500.0, 500.0), || 1.0), Verdict::Dense);
        let sound = Moments { output_norm2: 1.0, trace_r: f64::NAN, ..m };
        assert_eq!(promise.verdict(&sound, (500.0, 500.0), || 1.0), Verdict::Dense);
    }

    proptest! {
        #[test]
        fn budgets_stay_below_the_residual_and_fall_with_epsilon_and_delta(m in moments()) {
            for rule in [Rule::Denominator, Rule::Lemma, Rule::Tight, Rule::Ratio, Rule::Chi2] {
                let budget = |epsilon, delta| {
                    match Promise::new(rule, epsilon, delta).verdict(&m, (f64::INFINITY, f64::INFINITY), || 1.0 / 8.0) {
                        Verdict::Sample(b) => b,
                        Verdict::Noisy | Verdict::Dense => m.residual,
                    }
                };
                let b = budget(0.1, 0.1);
                prop_assert!(b <= m.residual.ceil());
                prop_assert!(budget(0.05, 0.1) >= b && budget(0.1, 0.05) >= b, "{rule:?}");
            }
        }

        #[test]
        fn the_tight_rule_never_asks_for_more_than_the_lemma(m in moments()) {
            let budget = |rule| Promise::new(rule, 0.1, 0.1).verdict(&m, (f64::INFINITY, f64::INFINITY), || 1.0);
            if let (Verdict::Sample(lemma), Verdict::Sample(tight)) = (budget(Rule::Lemma), budget(Rule::Tight)) {
                prop_assert!(tight <= lemma);
            }
        }

        #[test]
        fn an_alignment_that_is_not_asked_for_changes_no_decision(
            m in moments(), share in 0f64..1.0, enough in 60f64..300.0, limit in 60f64..1e6, delta in 0.01f64..0.9,
        ) {
            let promise = Promise::new(Rule::Chi2, 0.1, delta);
            let enough = enough.max(m.drawn);
            let decided = |verdict| match verdict {
                Verdict::Sample(b) if b < limit => Some(b.clamp(m.drawn, enough)),
                Verdict::Sample(_) | Verdict::Dense => None,
                Verdict::Noisy => Some(0.0),
            };
            // Of a promise that knows of no greatest quantile every budget hangs on the alignment.
            let asking = Promise { greatest: f64::INFINITY, ..promise.clone() };
            let whole = asking.verdict(&m, (enough, limit), || share);
            prop_assert_eq!(decided(promise.verdict(&m, (enough, limit), || share)), decided(whole));
        }
    }
}
