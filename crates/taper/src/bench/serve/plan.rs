//! What is sent when: a function of the arguments and the seed.

use super::args::BenchServeArgs;
use anyhow::{Context, Result, bail};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, LogNormal};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;
use std::time::Duration;

/// All requests of a run.
#[derive(Debug, Clone)]
pub struct Plan {
    pub arrivals: Arrivals,
    pub requests: Vec<Planned>,
    warm_up: Vec<Planned>,
}

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// By so many clients in turn.
    Closed(usize),
    /// So many a second.
    Open(f64),
}

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    pub number: usize,
    /// When it is sent, in an open loop.
    pub at: Duration,
    pub prompt: String,
    pub max_tokens: usize,
    /// After so many texts the client leaves.
    pub leaves_after: Option<usize>,
    pub extra: Map<String, Value>,
}

impl Plan {
    /// Checks the arguments.
    pub fn new(args: &BenchServeArgs) -> Result<Self> {
        let (prompt, output) = (Length::parse("--prompt", &args.prompt)?, Length::parse("--output", &args.output)?);
        let Ok(Value::Object(extra)) = serde_json::from_str(&args.extra) else {
            bail!("--extra: {:?} is no JSON object", args.extra);
        };
        if !(0.0..=1.0).contains(&args.cancel) {
            bail!("--cancel is {}; must be from 0 to 1", args.cancel);
        }
        let arrivals = match args.rate {
            None => Arrivals::Closed(args.clients),
            Some(rate) if (1e-3..=1e6).contains(&rate) => Arrivals::Open(rate),
            Some(rate) => bail!("--rate is {rate}; must be from 0.001 to 1000000"),
        };
        let mut rng = StdRng::seed_from_u64(args.seed);
        let shared = words(&mut rng, args.shared_prefix);
        let mut at = 0.0;
        let mut draw = |number: usize, rng: &mut StdRng| {
            if let Arrivals::Open(rate) = arrivals {
                // Gaps of a Poisson process.
                at += -(1.0 - rng.random::<f64>()).ln() / rate;
            }
            let (length, max_tokens) = (prompt.draw(rng), output.draw(rng));
            let own = words(rng, length.saturating_sub(shared.len()));
            let all: Vec<&str> = shared.iter().take(length).chain(&own).copied().collect();
            let leaves = rng.random::<f64>() < args.cancel;
            Planned {
                number,
                at: Duration::from_secs_f64(at),
                prompt: all.join(" "),
                max_tokens,
                leaves_after: leaves.then(|| rng.random_range(0..max_tokens.max(1))),
                extra: extra.clone(),
            }
        };
        let requests = (0..args.requests).map(|number| draw(number, &mut rng)).collect();
        let mut warm_up: Vec<Planned> = (0..args.warm_up).map(|number| draw(number, &mut rng)).collect();
        warm_up.iter_mut().for_each(|request| request.leaves_after = None);
        Ok(Self { arrivals, requests, warm_up })
    }

    /// Requests that come before, one after the other.
    pub fn warm_up(&self) -> impl Iterator<Item = Planned> {
        self.warm_up.iter().cloned()
    }
}

/// How lengths are drawn.
enum Length {
    Even(RangeInclusive<usize>),
    Tail(LogNormal<f64>),
}

impl Length {
    /// The longest, whatever is drawn.
    const MOST: usize = 1 << 20;

    /// `A`, `A:B` or `MEDIAN~SPREAD`.
    fn parse(name: &str, text: &str) -> Result<Self> {
        let number = |text: &str| text.trim().parse().ok().filter(|n| (1..=Self::MOST).contains(n));
        let wrong = || {
            let most = Self::MOST;
            format!("{name}: {text:?} must be a number from 1 to {most}, a range of them such as 100:2000, or 500~0.8")
        };
        if let Some((median, spread)) = text.split_once('~') {
            let spread = spread.trim().parse().ok().filter(|spread| (0.0..=3.0).contains(spread));
            let (median, spread) = number(median).zip(spread).with_context(wrong)?;
            return Ok(Self::Tail(LogNormal::new((median as f64).ln(), spread).context(wrong())?));
        }
        let (from, to) = text.split_once(':').unwrap_or((text, text));
        let (from, to) = number(from).zip(number(to)).with_context(wrong)?;
        if from > to {
            bail!("{name}: {text:?} ends before it begins");
        }
        Ok(Self::Even(from..=to))
    }

    fn draw(&self, rng: &mut StdRng) -> usize {
        match self {
            Self::Even(range) => rng.random_range(range.clone()),
            Self::Tail(tail) => (tail.sample(rng).round() as usize).clamp(1, Self::MOST),
        }
    }
}

fn words(rng: &mut StdRng, count: usize) -> Vec<&'static str> {
    (0..count).map(|_| *WORDS.choose(rng).expect("some words")).collect()
}

const WORDS: &[&str] = &[
    "water", "house", "light", "paper", "music", "river", "table", "green", "stone", "world", "night", "small",
    "great", "winter", "summer", "letter", "garden", "window", "market", "doctor", "school", "street", "number",
    "family", "people", "morning", "evening", "kitchen", "teacher", "captain", "village", "journey", "picture",
    "weather", "bridge", "forest", "island", "silver", "yellow", "animal", "answer", "century", "company", "country",
    "culture", "danger", "dinner", "father", "mother", "friend", "history", "hotel", "idea", "job", "king", "lady",
    "member", "nature", "office", "party", "problem", "question", "reason", "season", "story", "system", "theory",
    "thing", "train", "travel", "valley", "voice", "wall", "week", "wind", "word", "year",
];
