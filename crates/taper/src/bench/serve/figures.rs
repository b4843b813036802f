//! What a load came to: latencies, rates, goodput, errors.

use super::args::BenchServeArgs;
use super::client::Seen;
use anyhow::{Result, bail};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// Milliseconds that a good request stays under.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Target {
    pub ttft: Option<f64>,
    pub itl: Option<f64>,
    pub tpot: Option<f64>,
    pub e2e: Option<f64>,
}

impl Target {
    /// From `ttft=2000,tpot=100`.
    pub fn parse(text: &str) -> Result<Self> {
        let mut target = Self::default();
        for part in text.split(',') {
            let (name, limit) = part.split_once('=').unwrap_or((part, ""));
            let place = match name.trim() {
                "ttft" => &mut target.ttft,
                "itl" => &mut target.itl,
                "tpot" => &mut target.tpot,
                "e2e" => &mut target.e2e,
                other => bail!("--goodput: {other:?} must be ttft, itl, tpot or e2e"),
            };
            match limit.trim().parse::<f64>() {
                Ok(limit) if limit.is_finite() && limit > 0.0 => *place = Some(limit),
                _ => bail!("--goodput: {part:?} needs milliseconds, as in ttft=2000"),
            }
        }
        Ok(target)
    }
}

/// Milliseconds by rank, of some times.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Times {
    pub mean: f64,
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
    /// All, ascending, for the plot.
    #[serde(skip)]
    pub all: Vec<f64>,
}

impl Times {
    fn new(mut all: Vec<f64>) -> Self {
        all.sort_by(f64::total_cmp);
        let at = |share: f64| percentile(&all, share);
        let mean = if all.is_empty() { 0.0 } else { all.iter().sum::<f64>() / all.len() as f64 };
        Self { mean, p50: at(0.5), p95: at(0.95), p99: at(0.99), max: at(1.0), all }
    }
}

/// The value at a rank of sorted values, between two of them by interpolation; 0 of none.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let at = last as f64 * share;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (at - low as f64)
}

/// All figures of a load.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    pub seconds: f64,
    pub completed: usize,
    pub cancelled: usize,
    /// Messages, and how many requests ended with each.
    pub errors: BTreeMap<String, usize>,
    /// Completed requests whose server did not say how long their prompts are: these are not in the figures of prompts.
    pub unstated: usize,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    /// Completed requests, tokens of their answers, and tokens of both kinds, a second.
    pub requests_per_s: f64,
    pub output_per_s: f64,
    pub total_per_s: f64,
    pub ttft: Times,
    pub itl: Times,
    pub tpot: Times,
    pub e2e: Times,
    pub target: Option<Target>,
    /// Completed requests a second that met the target, and their share of all that were not cancelled.
    pub goodput_per_s: Option<f64>,
    pub good: Option<f64>,
}

const MS: f64 = 1000.0;

/// Milliseconds of one completed request.
struct Request {
    ttft: f64,
    itl: Vec<f64>,
    tpot: Option<f64>,
    e2e: f64,
}

impl Request {
    fn new(seen: &Seen) -> Option<Self> {
        let all = || seen.texts.iter().flatten().copied();
        let (first, last) = (all().reduce(f64::min)?, all().reduce(f64::max)?);
        // Choices are as long as one another, as far as can be seen.
        let tokens = seen.completion_tokens.unwrap_or(seen.texts() as u64) as f64 / seen.texts.len() as f64;
        Some(Self {
            ttft: (first - seen.sent) * MS,
            itl: seen.texts.iter().flat_map(|one| one.windows(2)).map(|pair| (pair[1] - pair[0]) * MS).collect(),
            tpot: (tokens > 1.0).then(|| (last - first) * MS / (tokens - 1.0)),
            e2e: (seen.ended - seen.sent) * MS,
        })
    }

    fn meets(&self, target: &Target) -> bool {
        let under = |value: f64, limit: Option<f64>| limit.is_none_or(|limit| value <= limit);
        under(self.ttft, target.ttft)
            && under(self.e2e, target.e2e)
            && under(self.tpot.unwrap_or(0.0), target.tpot)
            && self.itl.iter().all(|&gap| under(gap, target.itl))
    }
}

impl Figures {
    pub fn new(seen: &[Seen], elapsed: Duration, target: Option<Target>) -> Self {
        let seconds = elapsed.as_secs_f64().max(f64::MIN_POSITIVE);
        let mut errors = BTreeMap::new();
        seen.iter().filter_map(|s| s.error.clone()).for_each(|error| *errors.entry(error).or_insert(0) += 1);
        let cancelled = seen.iter().filter(|s| s.left).count();
        let done: Vec<&Seen> = seen.iter().filter(|s| s.error.is_none() && !s.left).collect();
        let requests: Vec<Request> = done.iter().filter_map(|s| Request::new(s)).collect();
        let sum = |of: fn(&Seen) -> Option<u64>| done.iter().filter_map(|s| of(s)).sum::<u64>();
        let prompt_tokens = sum(|s| s.prompt_tokens);
        let completion_tokens = sum(|s| Some(s.completion_tokens.unwrap_or(s.texts() as u64)));
        let good = target.map(|target| requests.iter().filter(|r| r.meets(&target)).count() as f64);
        Self {
            seconds,
            completed: done.len(),
            cancelled,
            errors,
            unstated: done.iter().filter(|s| s.prompt_tokens.is_none()).count(),
            prompt_tokens,
            cached_tokens: sum(|s| s.cached_tokens),
            completion_tokens,
            requests_per_s: done.len() as f64 / seconds,
            output_per_s: completion_tokens as f64 / seconds,
            total_per_s: (prompt_tokens + completion_tokens) as f64 / seconds,
            ttft: Times::new(requests.iter().map(|r| r.ttft).collect()),
            itl: Times::new(requests.iter().flat_map(|r| r.itl.clone()).collect()),
            tpot: Times::new(requests.iter().filter_map(|r| r.tpot).collect()),
            e2e: Times::new(requests.iter().map(|r| r.e2e).collect()),
            target,
            goodput_per_s: good.map(|good| good / seconds),
            good: good.map(|good| good / (seen.len() - cancelled).max(1) as f64),
        }
    }

    /// For a terminal.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let mut line = |text: String| _ = writeln!(out, "{text}");
        line(format!(
            "{} completed, {} cancelled, {} failed in {:.2} s",
            self.completed,
            self.cancelled,
            self.errors.values().sum::<usize>(),
            self.seconds
        ));
        self.errors.iter().for_each(|(error, count)| line(format!("  {count} x {error}")));
        if self.unstated > 0 {
            line(format!(
                "  {} without a count of prompt tokens from the server, which are missing below",
                self.unstated
            ));
        }
        line(format!(
            "{} prompt tokens ({} cached), {} answer tokens: {:.2} requests/s, {:.1} answer tokens/s, {:.1} tokens/s",
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            self.requests_per_s,
            self.output_per_s,
            self.total_per_s
        ));
        if let (Some(rate), Some(share)) = (self.goodput_per_s, self.good) {
            line(format!("goodput {rate:.2} requests/s, {:.1} % of those not cancelled", share * 100.0));
        }
        line(format!("{:>10} {:>10} {:>10} {:>10} {:>10} {:>10}", "ms", "mean", "p50", "p95", "p99", "max"));
        for (name, times) in [("TTFT", &self.ttft), ("ITL", &self.itl), ("TPOT", &self.tpot), ("end", &self.e2e)] {
            let Times { mean, p50, p95, p99, max, .. } = times;
            line(format!("{name:>10} {mean:>10.1} {p50:>10.1} {p95:>10.1} {p99:>10.1} {max:>10.1}"));
        }
        out
    }

    /// Figures, settings and every request.
    pub fn json(&self, args: &BenchServeArgs, model: &str, seen: &[Seen]) -> Value {
        json!({
            "settings": {
                "url": args.url, "model": model, "endpoint": args.endpoint, "requests": args.requests, "clients": args.rate.is_none().then_some(args.clients),
                "rate": args.rate, "prompt": args.prompt, "output": args.output, "shared_prefix": args.shared_prefix,
                "cancel": args.cancel, "warm_up": args.warm_up, "extra": args.extra, "goodput": args.goodput,
                "timeout": args.timeout, "seed": args.seed,
            },
            "figures": self,
            "requests": seen,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two with texts, one whose answer was empty, one who left, one who was refused.
    fn seen() -> Vec<Seen> {
        let (first, last) = (vec![0.5, 0.75, 1.25], vec![2.0]);
        let tokens = |prompt, cached, completion| Seen {
            prompt_tokens: prompt,
            cached_tokens: cached,
            completion_tokens: completion,
            ..Seen::default()
        };
        vec![
            Seen { texts: vec![first], ended: 1.5, ..tokens(Some(10), Some(4), Some(5)) },
            Seen { sent: 1.0, texts: vec![last], ended: 2.25, ..tokens(Some(20), None, None) },
            Seen { sent: 2.0, ended: 2.5, ..tokens(Some(5), None, Some(1)) },
            Seen { texts: vec![vec![1.0]], left: true, ..tokens(Some(1000), Some(1000), Some(1000)) },
            Seen { error: Some("HTTP 503: full".into()), ..Seen::default() },
        ]
    }

    #[test]
    fn figures_are_those_worked_out_by_hand() {
        let figures = Figures::new(&seen(), Duration::from_secs(4), Some(Target::parse("ttft=600").unwrap()));
        let expected = "\
3 completed, 1 cancelled, 1 failed in 4.00 s
  1 x HTTP 503: full
35 prompt tokens (4 cached), 7 answer tokens: 0.75 requests/s, 1.8 answer tokens/s, 10.5 tokens/s
goodput 0.25 requests/s, 25.0 % of those not cancelled
        ms       mean        p50        p95        p99        max
      TTFT      750.0      750.0      975.0      995.0     1000.0
       ITL      375.0      375.0      487.5      497.5      500.0
      TPOT      187.5      187.5      187.5      187.5      187.5
       end     1375.0     1375.0     1487.5     1497.5     1500.0
";
        assert_eq!(figures.table(), expected);
        assert_eq!((figures.output_per_s, figures.requests_per_s), (1.75, 0.75));
        // Two choices by turns: the gaps are those within each.
        let two = Seen { texts: vec![vec![1.0, 3.0], vec![2.0, 4.0]], completion_tokens: Some(4), ..Seen::default() };
        let figures = Figures::new(&[two], Duration::from_secs(4), None);
        assert_eq!((figures.itl.all, figures.tpot.all), (vec![2000.0; 2], vec![3000.0]));
        let mut silent = seen();
        silent[0].prompt_tokens = None;
        let table = Figures::new(&silent, Duration::from_secs(4), None).table();
        assert!(table.contains("  1 without a count of prompt tokens"), "{table}");
    }

    #[test]
    fn a_good_request_meets_every_target() {
        for (target, good) in [
            ("ttft=499", 0.0),
            ("ttft=500", 1.0),
            ("ttft=1000", 2.0),
            // One text has no gaps, and one token no time after it.
            ("itl=499", 1.0),
            ("itl=500", 2.0),
            ("tpot=187", 1.0),
            ("tpot=187.5", 2.0),
            ("e2e=1250", 1.0),
            ("ttft=500,e2e=1500", 1.0),
            ("ttft=500,e2e=1250", 0.0),
        ] {
            let figures = Figures::new(&seen(), Duration::from_secs(4), Some(Target::parse(target).unwrap()));
            assert_eq!((figures.good, figures.goodput_per_s), (Some(good / 4.0), Some(good / 4.0)), "{target}");
        }
    }

    #[test]
    fn nothing_seen_gives_zeros() {
        let figures = Figures::new(&[], Duration::from_secs(1), None);
        assert_eq!((figures.completed, figures.good, figures.ttft.max, figures.total_per_s), (0, None, 0.0, 0.0));
    }
}
