//! A number of tokens, absolute or as a share of the context.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize, Serializer};
use std::borrow::Cow;

/// A whole number of tokens, or a share of a context below 1.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(from = "f64")]
pub enum Amount {
    /// So many tokens.
    Tokens(usize),
    /// So large a share, in [0, 1).
    Share(f64),
}

impl Amount {
    /// Tokens of a context of `n`, at most `n`; a share is rounded up.
    pub fn of(&self, n: usize) -> usize {
        match *self {
            Self::Tokens(tokens) => tokens.min(n),
            // Less what a product that should be whole is beyond it: 0.07 of 100 are 7.
            Self::Share(share) => ((share * n as f64 - 1e-9).ceil() as usize).min(n),
        }
    }

    /// Whether a number is an amount.
    pub fn is_valid(x: f64) -> bool {
        (0.0..1.0).contains(&x) || (x.fract() == 0.0 && (1.0..=1_048_576.0).contains(&x))
    }
}

impl From<f64> for Amount {
    fn from(x: f64) -> Self {
        if x < 1.0 { Self::Share(x) } else { Self::Tokens(x as usize) }
    }
}

impl Serialize for Amount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Tokens(tokens) => serializer.serialize_u64(tokens as u64),
            Self::Share(share) => serializer.serialize_f64(share),
        }
    }
}

/// An [`Amount`], or as many tokens as it takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AutoAmount {
    /// So many tokens.
    Amount(Amount),
    /// As many as it takes: the name [`AUTO`].
    Auto(Auto),
}

/// The name of as many as it takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Auto {
    /// The only one.
    Auto,
}

/// What is said in place of a number.
pub const AUTO: &str = "auto";

/// Marks a property that is an [`Amount`], or with [`AUTO`] for its value an [`AutoAmount`].
pub const AMOUNT: &str = "x-amount";

/// The schemas of the numbers that an [`Amount`] may be.
fn whole_or_share() -> [Schema; 2] {
    [
        json_schema!({ "type": "integer", "minimum": 0, "maximum": 1_048_576 }),
        json_schema!({ "type": "number", "minimum": 0, "exclusiveMaximum": 1 }),
    ]
}

impl JsonSchema for Amount {
    fn schema_name() -> Cow<'static, str> {
        "Amount".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let [whole, share] = whole_or_share();
        json_schema!({ "type": "number", "anyOf": [whole, share], AMOUNT: true })
    }
}

impl JsonSchema for AutoAmount {
    fn schema_name() -> Cow<'static, str> {
        "AutoAmount".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let [whole, share] = whole_or_share();
        json_schema!({ "anyOf": [whole, share, { "const": AUTO }], AMOUNT: AUTO })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_round_up_and_stay_within_the_context() {
        for (amount, n, tokens) in [
            (Amount::Share(0.02), 1000, 20),
            (Amount::Share(0.02), 1001, 21),
            (Amount::Share(0.07), 100, 7),
            (Amount::Share(0.55), 100, 55),
            (Amount::Share(0.0), 9, 0),
            (Amount::Tokens(7), 1000, 7),
            (Amount::Tokens(7), 5, 5),
        ] {
            assert_eq!(amount.of(n), tokens, "{amount:?} of {n}");
        }
        assert!(Amount::is_valid(0.5) && Amount::is_valid(0.0) && Amount::is_valid(1.0) && Amount::is_valid(128.0));
        assert!(
            !Amount::is_valid(1.5) && !Amount::is_valid(-0.1) && !Amount::is_valid(f64::NAN) && !Amount::is_valid(1e9)
        );
    }
}
