//! The response object as it grows, and the events that tell of it.

use crate::answer::{Call, Kind, logprobs, unix_now, usage};
use crate::app::App;
use crate::error::ApiError;
use crate::request_id::{Failed, RequestId};
use crate::tools::{Calls, Told};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use taper_engine::{Delta, Finish, TokenRecord, Usage};

/// One response on its way.
pub(super) struct Builder {
    app: Arc<App>,
    id: String,
    failed: Failed,
    created: u64,
    /// Whether log probabilities are wanted.
    logprobs: bool,
    /// Tokens whose text has not been told.
    tokens: Vec<TokenRecord>,
    echo: Map<String, Value>,
    calls: Option<Calls>,
    /// Items that are whole.
    output: Vec<Value>,
    /// The one that grows: a message's text, or a call's arguments.
    open: Option<Value>,
    finish: Option<Finish>,
    events: u64,
}

impl Builder {
    pub(super) fn new(app: &Arc<App>, asked: RequestId, echo: Map<String, Value>, call: &Call) -> Self {
        let (output, open, finish) = (Vec::new(), None, None);
        let (calls, logprobs) = (call.calls(app.engine.text()), call.logprobs.is_some());
        Self {
            app: Arc::clone(app),
            id: asked.id,
            failed: asked.failed,
            created: unix_now(),
            logprobs,
            tokens: Vec::new(),
            echo,
            calls,
            output,
            open,
            finish,
            events: 0,
        }
    }

    /// The response with a status, as it is now.
    fn response(&self, status: &str) -> Value {
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": false,
            "error": null,
            "incomplete_details": null,
            "model": self.app.model_name(),
            "output": self.output,
            "previous_response_id": null,
            "store": false,
            "truncation": "disabled",
            "usage": null,
        });
        response.as_object_mut().into_iter().for_each(|map| map.extend(self.echo.clone()));
        response
    }

    /// An event, numbered.
    fn event(&mut self, kind: &str, more: Value) -> Value {
        let mut event = json!({"type": kind, "sequence_number": self.events});
        self.events += 1;
        if let (Some(event), Value::Object(more)) = (event.as_object_mut(), more) {
            event.extend(more);
        }
        event
    }

    /// The events before any text.
    pub(super) fn opening(&mut self) -> Vec<Value> {
        let response = self.response("in_progress");
        ["response.created", "response.in_progress"].map(|kind| self.event(kind, json!({"response": response}))).into()
    }

    /// Takes more of the answer.
    pub(super) fn delta(&mut self, delta: &Delta) -> Vec<Value> {
        self.finish.clone_from(&delta.finish);
        if self.logprobs {
            self.tokens.extend_from_slice(&delta.tokens);
        }
        let mut told = match &mut self.calls {
            Some(calls) => {
                let mut told = calls.push(&delta.text);
                if delta.finish.is_some() {
                    told.extend(calls.finish());
                }
                told
            }
            None if delta.text.is_empty() => Vec::new(),
            None => vec![Told::Text(delta.text.clone())],
        };
        // What has no text at the end: a part of a character, a token that is not shown.
        if self.finish.is_some() && self.calls.is_none() && told.is_empty() && !self.tokens.is_empty() {
            told.push(Told::Text(String::new()));
        }
        told.into_iter().flat_map(|told| self.told(told)).collect()
    }

    fn told(&mut self, told: Told) -> Vec<Value> {
        let mut events = Vec::new();
        // They go with the next text; a call's have no place.
        let tokens = std::mem::take(&mut self.tokens);
        match told {
            Told::Text(text) => {
                if self.open.as_ref().is_none_or(|open| open["type"] != "message") {
                    events.extend(self.message());
                }
                let place = self.place();
                let logprobs = self.logprobs(&tokens);
                if let Some(part) = self.open.as_mut().and_then(|open| open.pointer_mut("/content/0")) {
                    if let Value::String(all) = &mut part["text"] {
                        all.push_str(&text);
                    }
                    if let (Value::Array(all), Value::Array(more)) = (&mut part["logprobs"], &logprobs) {
                        all.extend_from_slice(more);
                    }
                }
                let delta = json!({"delta": text, "logprobs": logprobs});
                events.push(self.event("response.output_text.delta", of_part(&place, delta)));
            }
            Told::Call { id, name, .. } => {
                events.extend(self.close("completed"));
                let item = json!({"type": "function_call", "id": self.name("fc"), "call_id": id, "name": name, "arguments": "", "status": "in_progress"});
                events.extend(self.begin(item));
            }
            Told::Arguments { text, .. } => {
                let place = self.place();
                if let Some(Value::String(all)) = self.open.as_mut().and_then(|open| open.get_mut("arguments")) {
                    all.push_str(&text);
                }
                events.push(self.event("response.function_call_arguments.delta", with(&place, json!({"delta": text}))));
            }
        }
        events
    }

    /// Log probabilities, where they are wanted.
    fn logprobs(&self, tokens: &[TokenRecord]) -> Value {
        match self.logprobs {
            true => logprobs(Kind::Chat, self.app.engine.text(), tokens)["content"].take(),
            false => json!([]),
        }
    }

    /// A name for the next item.
    fn name(&self, kind: &str) -> String {
        format!("{kind}_{}_{}", self.id.trim_start_matches("resp_"), self.output.len())
    }

    /// The number and name of the item that grows, for events about it.
    fn place(&self) -> Value {
        json!({"output_index": self.output.len(), "item_id": self.open.as_ref().map(|open| open["id"].clone())})
    }

    fn begin(&mut self, item: Value) -> Vec<Value> {
        let added = json!({"output_index": self.output.len(), "item": item});
        self.open = Some(item);
        vec![self.event("response.output_item.added", added)]
    }

    /// Begins a message.
    fn message(&mut self) -> Vec<Value> {
        let mut events = self.close("completed");
        let item = json!({"type": "message", "id": self.name("msg"), "status": "in_progress", "role": "assistant", "content": []});
        events.extend(self.begin(item));
        let part = json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
        if let Some(open) = &mut self.open {
            open["content"] = json!([part]);
        }
        let place = self.place();
        events.push(self.event("response.content_part.added", of_part(&place, json!({"part": part}))));
        events
    }

    /// Ends the item that grows.
    fn close(&mut self, status: &str) -> Vec<Value> {
        let place = self.place();
        let Some(mut item) = self.open.take() else { return Vec::new() };
        item["status"] = json!(status);
        let mut events = Vec::new();
        if item["type"] == "message" {
            let part = item["content"][0].clone();
            let done = json!({"text": part["text"], "logprobs": part["logprobs"]});
            events.push(self.event("response.output_text.done", of_part(&place, done)));
            events.push(self.event("response.content_part.done", of_part(&place, json!({"part": part}))));
        } else {
            let all = json!({"arguments": item["arguments"], "name": item["name"]});
            events.push(self.event("response.function_call_arguments.done", with(&place, all)));
        }
        let done = json!({"output_index": self.output.len(), "item": item});
        events.push(self.event("response.output_item.done", done));
        self.output.push(item);
        events
    }

    /// Ends the last item, in a response of this status.
    fn end(&mut self, status: &str) -> Vec<Value> {
        // A call may be whole where the answer is not, and a stop string may have cut it short.
        let whole = self.calls.as_ref().is_none_or(Calls::whole);
        let call = self.open.as_ref().is_some_and(|open| open["type"] == "function_call");
        self.close(match (call, whole) {
            (true, true) => "completed",
            (true, false) => "incomplete",
            (false, _) => status,
        })
    }

    /// The end: its events, and the whole response.
    pub(super) fn done(&mut self, total: Usage) -> (Vec<Value>, Value) {
        let cut = self.finish == Some(Finish::Length);
        let status = if cut { "incomplete" } else { "completed" };
        let mut events = Vec::new();
        if self.open.is_none() && self.output.is_empty() && !self.calls.as_ref().is_some_and(Calls::forced) {
            events.extend(self.message());
        }
        events.extend(self.end(status));
        let mut response = self.response(status);
        if cut {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        let usage = usage(total);
        response["usage"] = json!({
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "attention": usage["attention"],
        });
        events.push(self.event(&format!("response.{status}"), json!({"response": response})));
        (events, response)
    }

    /// The end of one that failed after it had begun, with what there was of it.
    pub(super) fn failed(&mut self, error: &ApiError) -> Vec<Value> {
        self.failed.by(error);
        let mut events = self.end("incomplete");
        let mut response = self.response("failed");
        let code = match error.status {
            400..500 => "invalid_prompt",
            _ => "server_error",
        };
        response["error"] = json!({"code": code, "message": error.body()["error"]["message"]});
        events.push(self.event("response.failed", json!({"response": response})));
        events
    }
}

/// An event about the only part of a message.
fn of_part(place: &Value, more: Value) -> Value {
    with(&with(place, json!({"content_index": 0})), more)
}

fn with(place: &Value, more: Value) -> Value {
    let mut all = place.clone();
    if let (Some(all), Value::Object(more)) = (all.as_object_mut(), more) {
        all.extend(more);
    }
    all
}
