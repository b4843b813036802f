//! What Prometheus reads at `/metrics`: vLLM's names where the meaning is the same, so that dashboards, autoscalers and
//! gateways made for it work, and under `taper:` what attention did.

use crate::answer::Call;
use crate::spans::Generation;
use prometheus::core::Collector;
use prometheus::{
    CounterVec, Encoder, Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts,
    Registry, TextEncoder,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use taper_attention::{AttentionUsage, PhaseUsage};
use taper_engine::{BLOCK_TOKENS, Engine, Event, Finish, RequestError, Steps, Usage};

/// Seconds until a first token, of a prompt, of a whole request.
const LONG: [f64; 16] =
    [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0];
/// Seconds between two tokens.
const SHORT: [f64; 14] = [0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0];
/// Tokens of a request.
const TOKENS: [f64; 18] = [
    1.0,
    4.0,
    16.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
    32768.0,
    65536.0,
    131_072.0,
    262_144.0,
    524_288.0,
    1_048_576.0,
];
/// Shares and relative errors.
const SHARES: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0];

/// Everything that is counted.
pub(crate) struct Metrics {
    registry: Registry,
    running: IntGauge,
    waiting: IntGauge,
    cache_usage: Gauge,
    offloaded: IntGauge,
    preemptions: IntCounter,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    prefix_queries: IntCounter,
    prefix_hits: IntCounter,
    ended: IntCounterVec,
    requests: IntCounterVec,
    first_token: Histogram,
    between_tokens: Histogram,
    per_token: Histogram,
    whole: Histogram,
    queued: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    request_prompt: Histogram,
    request_generation: Histogram,
    attention: Attention,
    steps: Histogram,
    /// The steps that were taken over from the engine; held while its counts are.
    scrape: Mutex<Steps>,
}

/// What attention did, by phase (`prefill`, `decode`, `draft`) and method.
struct Attention {
    density: HistogramVec,
    budget: HistogramVec,
    dense_heads: IntCounterVec,
    audited: IntCounterVec,
    over: IntCounterVec,
    allowed: CounterVec,
    error_mean: HistogramVec,
    error_p99: HistogramVec,
    drafted: IntCounter,
    accepted: IntCounter,
}

/// Makes metrics and registers them.
struct Maker {
    registry: Registry,
    labels: HashMap<String, String>,
}

impl Maker {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_labels(self.labels.clone())
    }

    fn add<M: Collector + Clone + 'static>(&self, made: prometheus::Result<M>) -> prometheus::Result<M> {
        let metric = made?;
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        self.add(IntGauge::with_opts(self.opts(name, help)))
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        self.add(IntCounter::with_opts(self.opts(name, help)))
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntCounterVec> {
        self.add(IntCounterVec::new(self.opts(name, help), labels))
    }

    fn buckets(&self, name: &str, help: &str, buckets: &[f64]) -> HistogramOpts {
        HistogramOpts { common_opts: self.opts(name, help), buckets: buckets.to_vec() }
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<Histogram> {
        self.add(Histogram::with_opts(self.buckets(name, help, buckets)))
    }

    fn histograms(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<HistogramVec> {
        self.add(HistogramVec::new(self.buckets(name, help, buckets), &BY))
    }
}

/// Labels of what attention did.
const BY: [&str; 2] = ["phase", "method"];

impl Attention {
    fn new(make: &Maker) -> prometheus::Result<Self> {
        Ok(Self {
            density: make.histograms(
                "taper:attention_density",
                "Share of (query, key) pairs attended to, of a prompt or of a choice of its answers.",
                &SHARES,
            )?,
            budget: make.histograms(
                "taper:attention_budget_tokens",
                "Keys read per query, layer and KV head on average, of a prompt or of a choice of its answers.",
                &TOKENS,
            )?,
            dense_heads: make.counters(
                "taper:attention_dense_heads_total",
                "Query heads, per layer and token, that read everything to keep a promise.",
                &BY,
            )?,
            audited: make.counters(
                "taper:audit_heads_total",
                "Query heads, per layer and token, compared with dense attention.",
                &BY,
            )?,
            over: make.counters(
                "taper:audit_over_epsilon_total",
                "Those of them whose relative error is over the promised epsilon.",
                &BY,
            )?,
            allowed: make.add(CounterVec::new(
                make.opts(
                    "taper:audit_over_allowed_total",
                    "How many may be: audited heads times the promised delta. Promises are kept while no more are over epsilon.",
                ),
                &BY,
            ))?,
            error_mean: make.histograms(
                "taper:audit_error_mean",
                "Mean relative error of a prompt's or a choice's audited heads.",
                &SHARES,
            )?,
            error_p99: make.histograms(
                "taper:audit_error_p99",
                "99th percentile of the relative errors of a prompt's or a choice's audited heads.",
                &SHARES,
            )?,
            drafted: make.counter("taper:draft_tokens_total", "Tokens drafted by a sparser method, or looked up in the text.")?,
            accepted: make.counter("taper:draft_tokens_accepted_total", "Drafted tokens that the answer has.")?,
        })
    }

    /// What the choices of a prompt came to, which they share.
    fn done(&self, choices: &[AttentionUsage]) {
        choices.first().into_iter().for_each(|choice| self.add("prefill", &choice.prefill));
        for choice in choices {
            self.add("decode", &choice.decode);
            if let Some(speculation) = &choice.speculation {
                speculation.draft.iter().for_each(|draft| self.add("draft", draft));
                self.drafted.inc_by(speculation.drafted);
                self.accepted.inc_by(speculation.accepted);
            }
        }
    }

    fn add(&self, phase: &str, usage: &PhaseUsage) {
        let of = [phase, usage.method];
        if usage.has_read() {
            self.density.with_label_values(&of).observe(usage.density);
            self.budget.with_label_values(&of).observe(usage.budget_mean);
        }
        if let Some(heads) = usage.dense_heads {
            self.dense_heads.with_label_values(&of).inc_by(heads);
        }
        if let Some(audit) = &usage.audit {
            self.audited.with_label_values(&of).inc_by(audit.heads);
            self.error_mean.with_label_values(&of).observe(audit.error_mean);
            self.error_p99.with_label_values(&of).observe(audit.error_p99);
            if let Some(share) = audit.over_epsilon {
                self.over.with_label_values(&of).inc_by((share * audit.heads as f64).round() as u64);
            }
            if let Some(delta) = audit.delta {
                self.allowed.with_label_values(&of).inc_by(delta * audit.heads as f64);
            }
        }
    }
}

impl Metrics {
    /// # Panics
    /// Never: names and labels are fixed, and each is registered once.
    pub(crate) fn new(engine: &Engine, model: &str) -> Self {
        Self::registered(engine, model).expect("every name is valid and registered once")
    }

    fn registered(engine: &Engine, model: &str) -> prometheus::Result<Self> {
        let labels = [("model_name", model), ("engine", "0")];
        let labels = labels.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let make = Maker { registry: Registry::new(), labels };
        let limits = engine.limits();
        let blocks = limits.cache_tokens / BLOCK_TOKENS;
        let info = make.opts("vllm:cache_config_info", "The KV cache, in blocks of tokens.");
        let (block_size, blocks) = (BLOCK_TOKENS.to_string(), blocks.to_string());
        let info = info.const_label("block_size", block_size).const_label("num_gpu_blocks", blocks);
        make.add(IntGauge::with_opts(info))?.set(1);
        let ended = make.counters(
            "vllm:request_success_total",
            "Choices that ended: stop, length, abort (the client left, or did not want to wait any longer), error.",
            &["finished_reason"],
        )?;
        // A rate sees no step from nothing to one.
        ["stop", "length", "abort", "error"].iter().for_each(|reason| drop(ended.with_label_values(&[reason])));
        Ok(Self {
            running: make.gauge("vllm:num_requests_running", "Requests that run.")?,
            waiting: make.gauge("vllm:num_requests_waiting", "Requests that wait, preempted ones among them.")?,
            cache_usage: make.add(Gauge::with_opts(
                make.opts("vllm:kv_cache_usage_perc", "Share of the KV cache's blocks that requests hold, 0 to 1."),
            ))?,
            offloaded: make.gauge(
                "taper:kv_offload_bytes",
                "Bytes of the KV cache outside its memory, in a file or in the host's memory beside a device, that requests hold.",
            )?,
            preemptions: make.counter(
                "vllm:num_preemptions_total",
                "How often a request gave its place in the KV cache up, to be computed again later.",
            )?,
            prompt_tokens: make.counter("vllm:prompt_tokens_total", "Tokens of prompts, cached ones included.")?,
            generation_tokens: make.counter("vllm:generation_tokens_total", "Tokens generated.")?,
            prefix_queries: make.counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the cache.")?,
            prefix_hits: make.counter("vllm:prefix_cache_hits_total", "Those that were there.")?,
            ended,
            requests: make.counters(
                "http_requests_total",
                "Requests by path, method and kind of status; that of a client that left before it had its answer is 4xx, and of a stream that an error ended the error's.",
                &["handler", "method", "status"],
            )?,
            first_token: make.histogram("vllm:time_to_first_token_seconds", "Time to the first token.", &LONG)?,
            between_tokens: make.histogram("vllm:inter_token_latency_seconds", "Time between two tokens.", &SHORT)?,
            per_token: make.histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time of a request's tokens after the first.",
                &SHORT,
            )?,
            whole: make.histogram("vllm:e2e_request_latency_seconds", "Time of a whole request.", &LONG)?,
            queued: make.histogram("vllm:request_queue_time_seconds", "Time that a request waited.", &LONG)?,
            prefill: make.histogram("vllm:request_prefill_time_seconds", "Time of a request's prompt.", &LONG)?,
            decode: make.histogram("vllm:request_decode_time_seconds", "Time of a request's answer.", &LONG)?,
            inference: make.histogram("vllm:request_inference_time_seconds", "Time of both.", &LONG)?,
            request_prompt: make.histogram("vllm:request_prompt_tokens", "Tokens of a request's prompt.", &TOKENS)?,
            request_generation: make.histogram(
                "vllm:request_generation_tokens",
                "Tokens that a request generated, over all choices.",
                &TOKENS,
            )?,
            attention: Attention::new(&make)?,
            steps: make.histogram(
                "vllm:iteration_tokens_total",
                "Tokens that went through the model in a step.",
                &std::array::from_fn::<_, { Steps::BINS }, _>(|bin| (1u64 << bin) as f64),
            )?,
            registry: make.registry,
            scrape: Mutex::default(),
        })
    }

    /// All of it as Prometheus reads it (text format 0.0.4), with how things stand now.
    pub(crate) fn text(&self, engine: &Engine) -> String {
        let mut seen = self.scrape.lock().unwrap_or_else(PoisonError::into_inner);
        let (load, limits) = (engine.load(), engine.limits());
        self.running.set(load.running as i64);
        self.waiting.set(load.waiting as i64);
        let blocks = (limits.cache_tokens / BLOCK_TOKENS).max(1);
        self.cache_usage.set(1.0 - (load.free_blocks.min(blocks) as f64 / blocks as f64));
        let block_bytes = limits.cache_bytes / blocks as u64;
        self.offloaded.set((load.offloaded_blocks as u64 * block_bytes) as i64);
        // What the engine counted since the last time.
        let counts = load.counts;
        for (metric, now) in [
            (&self.preemptions, counts.preemptions),
            (&self.prompt_tokens, counts.prompt_tokens),
            (&self.generation_tokens, counts.generated_tokens),
            (&self.prefix_queries, counts.prompt_tokens),
            (&self.prefix_hits, counts.cached_tokens),
        ] {
            metric.inc_by(now.saturating_sub(metric.get()));
        }
        let before = std::mem::replace(&mut *seen, load.steps);
        for bin in 0..Steps::BINS {
            let steps = load.steps.counts[bin] - before.counts[bin];
            let tokens = load.steps.tokens[bin] - before.tokens[bin];
            // Their mean lies in the same bin, and adds up to the same sum.
            (0..steps).for_each(|_| self.steps.observe(tokens as f64 / steps as f64));
        }
        let mut text = Vec::new();
        match TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            Ok(()) => String::from_utf8(text).unwrap_or_default(),
            Err(error) => {
                tracing::error!(%error, "the metrics could not be written");
                String::new()
            }
        }
    }

    /// Counts a request's answer.
    pub(crate) fn answered(&self, handler: &str, method: &str, status: u16) {
        self.requests.with_label_values(&[handler, method, &format!("{}xx", status / 100)]).inc();
    }

    /// Watches one prompt's events from now on; its span sees them too.
    pub(crate) fn watch(self: &Arc<Self>, call: &Call, came: Instant, span: Option<Generation>) -> Watch {
        let (choices, answers) = (call.common.choices, call.answers());
        let (metrics, latest) = (Arc::clone(self), vec![None; choices]);
        Watch { metrics, span, came, answers, latest, open: choices, unfinished: "abort" }
    }

    fn done(&self, took: Duration, usage: &Usage) {
        self.whole.observe(took.as_secs_f64());
        self.request_prompt.observe(usage.prompt_tokens as f64);
        self.request_generation.observe(usage.completion_tokens as f64);
        let times = usage.times;
        self.queued.observe(times.queued.as_secs_f64());
        self.prefill.observe(times.prefill.as_secs_f64());
        self.decode.observe(times.decode.as_secs_f64());
        self.inference.observe((times.prefill + times.decode).as_secs_f64());
        let each = usage.completion_tokens.checked_div(usage.attention.len()).unwrap_or(0);
        if each > 1 {
            self.per_token.observe(times.decode.as_secs_f64() / (each - 1) as f64);
        }
        self.attention.done(&usage.attention);
    }
}

/// One prompt on its way. Dropped before its end, its client has left.
pub(crate) struct Watch {
    metrics: Arc<Metrics>,
    span: Option<Generation>,
    came: Instant,
    /// Whether there is a first token to wait for.
    answers: bool,
    /// When each choice had its latest text.
    latest: Vec<Option<Instant>>,
    /// Choices that go on.
    open: usize,
    /// What those are that do not end by themselves.
    unfinished: &'static str,
}

impl Watch {
    /// Takes an event into account.
    pub(crate) fn see(&mut self, event: &Event) {
        self.span.iter_mut().for_each(|span| span.see(event));
        match event {
            Event::Prefilled | Event::Prompt(_) => {}
            Event::Delta(delta) => {
                let now = Instant::now();
                if self.answers && self.latest.iter().all(Option::is_none) {
                    self.metrics.first_token.observe((now - self.came).as_secs_f64());
                }
                let latest = self.latest.get_mut(delta.choice);
                if let Some(before) = latest.and_then(|latest| latest.replace(now)) {
                    self.metrics.between_tokens.observe((now - before).as_secs_f64());
                }
                if let Some(finish) = &delta.finish {
                    self.open = self.open.saturating_sub(1);
                    self.end(if *finish == Finish::Length { "length" } else { "stop" }, 1);
                }
            }
            Event::Embedding(_) => {
                self.open = 0;
                self.end("stop", 1);
            }
            Event::Done(usage) => self.metrics.done(self.came.elapsed(), usage),
            // That the time its client gave it is over is no fault.
            Event::Failed(RequestError::Deadline) => {}
            Event::Failed(_) => self.unfinished = "error",
        }
    }

    fn end(&self, reason: &str, choices: usize) {
        self.metrics.ended.with_label_values(&[reason]).inc_by(choices as u64);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.open > 0 {
            self.end(self.unfinished, self.open);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use taper_attention::AuditUsage;

    #[test]
    fn a_prompt_counts_once_and_what_read_nothing_has_no_density() {
        let make = Maker { registry: Registry::new(), labels: HashMap::new() };
        let attention = Attention::new(&make).unwrap();
        let phase = |budget_max: u64, heads: u64| PhaseUsage {
            method: "vattention",
            over: None,
            density: 0.25,
            scored: None,
            budget_mean: budget_max as f64,
            budget_max,
            seed: 7,
            promise: None,
            dense_heads: Some(3),
            cra: None,
            audit: Some(AuditUsage {
                heads,
                error_mean: 0.01,
                error_p99: 0.02,
                error_max: 0.03,
                over_epsilon: Some(0.1),
                delta: Some(0.2),
            }),
        };
        let choice =
            |read| AttentionUsage { prefill: phase(40, 50), decode: phase(read, 20), speculation: None, trace: None };
        attention.done(&[choice(9), choice(9), choice(0)]);
        let of = |phase: &str| {
            let of = [phase, "vattention"];
            let count = |all: &HistogramVec| all.with_label_values(&of).get_sample_count();
            let total = |all: &IntCounterVec| all.with_label_values(&of).get();
            let totals = [&attention.dense_heads, &attention.audited, &attention.over].map(total);
            (
                count(&attention.density),
                count(&attention.budget),
                totals,
                attention.allowed.with_label_values(&of).get(),
            )
        };
        assert_eq!(of("prefill"), (1, 1, [3, 50, 5], 10.0));
        assert_eq!(of("decode"), (2, 2, [9, 60, 6], 12.0));
        // As they are asked for.
        let text = TextEncoder::new().encode_to_string(&make.registry.gather()).unwrap();
        for line in [
            "taper:attention_density_count{method=\"vattention\",phase=\"decode\"} 2",
            "taper:attention_budget_tokens_count{method=\"vattention\",phase=\"prefill\"} 1",
            "taper:audit_heads_total{method=\"vattention\",phase=\"prefill\"} 50",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }
}
