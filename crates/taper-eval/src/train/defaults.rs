//! What trainers take where nothing is said: numbers for the plan, and the same in words for who asks.

use std::fmt::{self, Display, Formatter};
use taper_attention::AttentionShape;

/// So many tokens, or such a part of the sequences' length if that is less.
#[derive(Debug, Clone, Copy)]
pub(super) struct Near {
    tokens: usize,
    part: usize,
}

impl Near {
    pub fn of(self, length: usize) -> usize {
        self.tokens.min(length / self.part)
    }
}

impl Display for Near {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.part {
            1 => write!(f, "{}", self.tokens),
            4 => write!(f, "{}, at most a quarter of --length", self.tokens),
            part => write!(f, "{}, at most 1/{part} of --length", self.tokens),
        }
    }
}

/// What a method learns so many of.
#[derive(Debug, Clone, Copy)]
enum Count {
    Channels,
    Clusters,
    Keys,
}

/// Width of hidden layers.
#[derive(Debug, Clone, Copy)]
enum Width {
    Units(usize),
    Heads(usize),
}

/// A network and its training.
#[derive(Debug, Clone, Copy)]
pub(super) struct Net {
    hidden: Width,
    pub iterations: usize,
    pub batch: usize,
    /// What a step learns from so many of.
    of: &'static str,
    pub learning_rate: f64,
}

impl Net {
    pub fn hidden(self, head_dim: usize) -> usize {
        match self.hidden {
            Width::Units(units) => units,
            Width::Heads(times) => times * head_dim,
        }
    }
}

/// Those of a method; none of what it has no use for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Defaults {
    count: Option<Count>,
    /// Sinks and window.
    pub near: Option<(Near, Near)>,
    pub network: Option<Net>,
}

const fn near(tokens: usize, part: usize) -> Near {
    Near { tokens, part }
}

const CLUSTERED: Option<(Near, Near)> = Some((near(1, 1), near(2047, 4)));

pub(super) const DOUBLE_SPARSITY: Defaults =
    Defaults { count: Some(Count::Channels), near: Some((near(4, 16), near(64, 16))), network: None };
pub(super) const KMEANS: Defaults = Defaults { count: Some(Count::Clusters), near: CLUSTERED, network: None };
pub(super) const SAAP: Defaults = Defaults {
    count: Some(Count::Clusters),
    near: CLUSTERED,
    network: Some(Net { hidden: Width::Heads(4), iterations: 1000, batch: 1000, of: "queries", learning_rate: 1e-3 }),
};
pub(super) const HASH_ATTENTION: Defaults = Defaults {
    count: None,
    near: Some((near(128, 16), near(128, 16))),
    network: Some(Net { hidden: Width::Units(128), iterations: 1500, batch: 64, of: "rows", learning_rate: 1e-3 }),
};
pub(super) const MINFERENCE: Defaults = Defaults { count: Some(Count::Keys), near: None, network: None };
pub(super) const SAMPLE_ATTENTION: Defaults = Defaults { count: None, near: None, network: None };

impl Defaults {
    /// Channels, clusters or keys, for sequences of a length with so many keys to learn from.
    pub fn count(&self, shape: &AttentionShape, length: usize, keys: usize) -> usize {
        match self.count {
            None => 0,
            Some(Count::Channels) => (shape.head_dim / 4).max(1),
            Some(Count::Clusters) => (4 * ((length as f64).sqrt() as usize).next_power_of_two()).min(keys),
            Some(Count::Keys) => (length / 8).max(512).min(length),
        }
    }

    fn said(&self, option: &str) -> Option<String> {
        Some(match (option, self.count, self.near, self.network) {
            ("channels", Some(Count::Channels), ..) => "a quarter of its width".to_owned(),
            ("clusters", Some(Count::Clusters), ..) => "four times the root of --length, as a power of two".to_owned(),
            ("keys", Some(Count::Keys), ..) => "an eighth of --length, at least 512".to_owned(),
            ("sink", _, Some((sink, _)), _) => sink.to_string(),
            ("window", _, Some((_, window)), _) => window.to_string(),
            ("hidden", .., Some(Net { hidden: Width::Units(units), .. })) => units.to_string(),
            ("hidden", .., Some(Net { hidden: Width::Heads(times), .. })) => format!("{times} times a head's"),
            ("iterations", .., Some(net)) => net.iterations.to_string(),
            ("batch", .., Some(net)) => format!("{} {}", net.batch, net.of),
            ("learning_rate", .., Some(net)) => format!("{:e}", net.learning_rate),
            _ => return None,
        })
    }
}

/// What a method that is trained takes where an option is not given, in words; none of an option that it does not have.
pub fn default_of(method: &str, option: &str) -> Option<String> {
    let defaults = match method {
        "double_sparsity" => DOUBLE_SPARSITY,
        "kmeans" => KMEANS,
        "saap" => SAAP,
        "hash_attention" => HASH_ATTENTION,
        "minference" => MINFERENCE,
        _ => return None,
    };
    defaults.said(option)
}
