//! `usage.attention` as answers have it.

use serde_json::{Value, json};
use taper_attention::AttentionUsage;

/// Where phases stand in it.
const PHASES: [&str; 3] = ["/prefill", "/decode", "/speculation/draft"];

/// One choice's: what its type says, but for a density of nothing, as of the decode of one token, which the prompt gives.
pub fn attention(usage: &AttentionUsage) -> Value {
    let mut told = json!(usage);
    let draft = usage.speculation.as_ref().and_then(|speculation| speculation.draft.as_ref());
    for (place, phase) in PHASES.iter().zip([Some(&usage.prefill), Some(&usage.decode), draft]) {
        if let (Some(Value::Object(told)), Some(phase)) = (told.pointer_mut(place), phase)
            && !phase.has_read()
        {
            told.shift_remove("density");
        }
    }
    told
}

/// Puts the same into a schema of the type.
pub(crate) fn describe(phase: &mut Value) {
    let about = "Share of (query, key) pairs attended to, the causal pairs within the model's window as the whole; absent where there were none.";
    phase["properties"]["density"]["description"] = json!(about);
    if let Value::Array(required) = &mut phase["required"] {
        required.retain(|name| name != "density");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use taper_attention::{GuessUsage, PhaseUsage, SpeculationUsage};

    #[test]
    fn nothing_has_no_density() {
        let phase = |budget_max: u64| PhaseUsage {
            method: "dense",
            over: None,
            density: 1.0,
            scored: None,
            budget_mean: budget_max as f64,
            budget_max,
            seed: 7,
            promise: None,
            dense_heads: None,
            cra: None,
            audit: None,
        };
        let guesses = GuessUsage::default();
        let draft = |budget_max| SpeculationUsage {
            drafted: 0,
            accepted: 0,
            acceptance: 0.0,
            draft: Some(phase(budget_max)),
            lookup: Some(guesses),
        };
        for (read, none) in [(3, 0), (0, 3)] {
            let usage = AttentionUsage {
                prefill: phase(read),
                decode: phase(none),
                speculation: Some(draft(none)),
                trace: None,
            };
            let told = attention(&usage);
            for (place, most) in PHASES.iter().zip([read, none, none]) {
                let phase = told.pointer(place).unwrap();
                let density = (most > 0).then_some(json!(1.0));
                assert_eq!((phase.get("density"), &phase["budget_max"]), (density.as_ref(), &json!(most)), "{place}");
            }
        }
    }
}
