//! The span of one prompt's way through the engine: vLLM's names where the meaning is the same, and under `taper.` what
//! attention did.

use super::{ERROR_TYPE, Spans};
use crate::answer::{Call, Kind};
use crate::fields::exact;
use opentelemetry::trace::{Span, Status, TraceContextExt, Tracer};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::SdkTracer;
use std::time::{Duration, Instant, SystemTime};
use taper_attention::{AttentionUsage, PhaseUsage};
use taper_engine::{Event, Finish, Usage};

/// The span's name, which is vLLM's.
const NAME: &str = "llm_request";

/// One prompt on its way. Dropped before its end, nobody wants its answer any more.
pub(crate) struct Generation {
    tracer: SdkTracer,
    /// Of the HTTP request.
    outer: Context,
    /// Of this prompt.
    context: Context,
    began: (SystemTime, Instant),
    /// Whether the first token was, or none is wanted.
    told: bool,
    finishes: Vec<StringValue>,
    ended: bool,
}

impl Spans {
    /// A span within that of the HTTP request that is being answered, if that one is recorded.
    pub(crate) fn generation(&self, call: &Call, id: &str, model: &str) -> Option<Generation> {
        let outer = Context::current();
        if !outer.span().is_recording() {
            return None;
        }
        let began = (SystemTime::now(), Instant::now());
        let builder = self.tracer.span_builder(NAME).with_start_time(began.0).with_attributes(asked(call, id, model));
        let span = builder.start_with_context(&self.tracer, &outer);
        let context = outer.with_span(span);
        Some(Generation {
            tracer: self.tracer.clone(),
            outer,
            context,
            began,
            told: !call.answers(),
            finishes: Vec::new(),
            ended: false,
        })
    }
}

/// What a request asks for.
fn asked(call: &Call, id: &str, model: &str) -> Vec<KeyValue> {
    let operation = match call.kind {
        Kind::Chat => "chat",
        Kind::Text => "text_completion",
        Kind::Embedding => "embeddings",
    };
    let mut all = vec![
        KeyValue::new("gen_ai.operation.name", operation),
        KeyValue::new("gen_ai.provider.name", "taper"),
        KeyValue::new("gen_ai.request.model", model.to_owned()),
        KeyValue::new("gen_ai.request.id", id.to_owned()),
    ];
    if call.kind == Kind::Embedding {
        return all;
    }
    let common = &call.common;
    let sampling = &common.sampling;
    all.extend([
        KeyValue::new("gen_ai.request.n", count(common.choices)),
        KeyValue::new("gen_ai.request.temperature", exact(sampling.temperature)),
        KeyValue::new("gen_ai.request.top_p", exact(sampling.top_p)),
    ]);
    all.extend(common.stop.max_tokens.map(|most| KeyValue::new("gen_ai.request.max_tokens", count(most))));
    all.extend(sampling.top_k.map(|k| KeyValue::new("gen_ai.request.top_k", count(k))));
    all
}

fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn seconds(name: &'static str, time: Duration) -> KeyValue {
    KeyValue::new(name, time.as_secs_f64())
}

impl Generation {
    /// Takes an event into account.
    pub(crate) fn see(&mut self, event: &Event) {
        match event {
            Event::Prefilled | Event::Prompt(_) | Event::Embedding(_) => {}
            Event::Delta(delta) => {
                if !std::mem::replace(&mut self.told, true) {
                    let took = self.began.1.elapsed();
                    self.context.span().set_attribute(seconds("gen_ai.latency.time_to_first_token", took));
                }
                let reason = |finish: &Finish| if *finish == Finish::Length { "length" } else { "stop" };
                self.finishes.extend(delta.finish.as_ref().map(|finish| reason(finish).into()));
            }
            Event::Done(usage) => {
                self.stages(usage);
                self.context.span().set_attributes(cost(usage));
                self.end();
            }
            Event::Failed(error) => {
                self.context.span().set_attribute(KeyValue::new(ERROR_TYPE, "failed"));
                self.context.span().set_status(Status::error(error.to_string()));
                // A stream that fails later than at its head is a 200.
                self.outer.span().set_status(Status::error(error.to_string()));
                self.end();
            }
        }
    }

    /// Spans of what the time was spent on, one after the other.
    fn stages(&self, usage: &Usage) {
        let times = usage.times;
        let mut at = self.began.0;
        for (name, took) in [("queue", times.queued), ("prefill", times.prefill), ("decode", times.decode)] {
            let builder = self.tracer.span_builder(name).with_start_time(at);
            at += took;
            // An embedding is not decoded.
            if name != "decode" || usage.completion_tokens > 0 {
                builder.start_with_context(&self.tracer, &self.context).end_with_timestamp(at);
            }
        }
    }

    fn end(&mut self) {
        let span = self.context.span();
        span.set_attribute(seconds("gen_ai.latency.e2e", self.began.1.elapsed()));
        let finishes = std::mem::take(&mut self.finishes);
        if !finishes.is_empty() {
            span.set_attribute(KeyValue::new("gen_ai.response.finish_reasons", Value::Array(Array::String(finishes))));
        }
        span.end();
        self.ended = true;
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended {
            self.context.span().set_attribute(KeyValue::new(ERROR_TYPE, "cancelled"));
            self.context.span().set_status(Status::error("nobody waited for the end of the answer"));
            self.end();
        }
    }
}

/// What a request came to; of its choices' attention the first one's, as in the answer's `usage`.
fn cost(usage: &Usage) -> Vec<KeyValue> {
    let times = usage.times;
    let (prompt, completion) = (count(usage.prompt_tokens), count(usage.completion_tokens));
    let mut all = vec![
        // vLLM's names, then the conventions' present ones.
        KeyValue::new("gen_ai.usage.prompt_tokens", prompt),
        KeyValue::new("gen_ai.usage.completion_tokens", completion),
        KeyValue::new("gen_ai.usage.input_tokens", prompt),
        KeyValue::new("gen_ai.usage.output_tokens", completion),
        KeyValue::new("gen_ai.usage.cache_read.input_tokens", count(usage.cached_tokens)),
        seconds("gen_ai.latency.time_in_queue", times.queued),
        seconds("gen_ai.latency.time_in_model_prefill", times.prefill),
        seconds("gen_ai.latency.time_in_model_decode", times.decode),
        seconds("gen_ai.latency.time_in_model_inference", times.prefill + times.decode),
    ];
    if let Some(AttentionUsage { prefill, decode, speculation, .. }) = usage.attention.first() {
        all.extend(phase("prefill", prefill));
        all.extend(phase("decode", decode));
        let name = "taper.attention.speculation.acceptance";
        all.extend(speculation.as_ref().map(|drafts| KeyValue::new(name, drafts.acceptance)));
    }
    all
}

fn phase(name: &str, usage: &PhaseUsage) -> Vec<KeyValue> {
    let at = |what: &str, value: Value| KeyValue::new(format!("taper.attention.{name}.{what}"), value);
    let mut all = vec![at("method", usage.method.into())];
    if usage.has_read() {
        all.extend([at("density", usage.density.into()), at("budget_mean", usage.budget_mean.into())]);
    }
    all.extend(usage.dense_heads.map(|heads| at("dense_heads", count(heads as usize).into())));
    if let Some(audit) = &usage.audit {
        all.extend([
            at("audit.heads", count(audit.heads as usize).into()),
            at("audit.error_mean", audit.error_mean.into()),
            at("audit.error_p99", audit.error_p99.into()),
        ]);
        all.extend(audit.over_epsilon.map(|share| at("audit.over_epsilon", share.into())));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_read_nothing_has_no_density() {
        for (budget_max, told) in [(3, 3), (0, 1)] {
            let (method, density, budget_mean) = ("quest", 0.5, budget_max as f64);
            let (over, scored, promise, dense_heads, cra, audit) = Default::default();
            let seed = 7;
            let usage = PhaseUsage {
                method,
                over,
                density,
                scored,
                budget_mean,
                budget_max,
                seed,
                promise,
                dense_heads,
                cra,
                audit,
            };
            assert_eq!(phase("decode", &usage).len(), told);
        }
    }
}
