//! `/v1/embeddings`: what the model makes of a text, as the last layer's output for its last token, of length 1.

use crate::answer::{Call, Kind};
use crate::app::App;
use crate::body::Parsed;
use crate::completions::{Reading, read_prompts};
use crate::error::{self, ApiError};
use crate::fields::Fields;
use crate::openapi::answers::{Embedding, Embeddings, Numbers};
use crate::request_id::RequestId;
use crate::{answer, attention, knobs, sampling};
use axum::Json;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use futures_util::stream::StreamExt;
use serde_json::{Map, Value};
use std::sync::Arc;
use taper_engine::Event;

/// Most texts of one request, as in OpenAI's API.
const INPUTS: usize = 2048;

/// Texts of one request that wait or run at a time: others are to find room in the queue as well.
const AT_ONCE: usize = 32;

/// A request that was understood.
#[derive(Debug)]
pub(crate) struct Asked {
    call: Call,
    /// Whether numbers are written as little-endian f32 in base64.
    packed: bool,
    /// How many there have to be.
    dimensions: Option<usize>,
}

/// Parses and tokenizes the request.
pub(crate) fn parse(app: &App, map: &Map<String, Value>) -> Result<Asked, ApiError> {
    let mut fields = Fields::new(map, "");
    app.check_model(fields.text("model")?)?;
    let input = fields.get("input");
    let packed = match fields.text("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("encoding_format must be \"float\" or \"base64\", not {other:?}");
            return Err(ApiError::invalid("encoding_format", message));
        }
    };
    let dimensions = fields.int("dimensions", 1..=i64::MAX)?.map(|dimensions| dimensions as usize);
    let marks = fields.bool("add_special_tokens")?.unwrap_or(true);
    let (priority, salt) = (sampling::priority(&mut fields, app)?, sampling::salt(&mut fields)?);
    let timeout = sampling::timeout(&mut fields, app.config.request_timeout)?;
    let (attention, mut ignored) = attention::read(&mut fields, &app.config)?;
    ignored.extend(knobs::unknown(map, fields.unread())?);
    let reading = Reading { name: "input", most: INPUTS, marks, echo: None };
    let mut prompts = read_prompts(app, input, &reading)?;
    let presets = app.config.live.presets();
    for prompt in &mut prompts {
        prompt.question_tokens = attention::plain_question(&attention, &presets, map, prompt.tokens.len())?;
    }
    let call = Call {
        kind: Kind::Embedding,
        continues: true,
        kept: 1,
        prompts,
        prompt_field: "input",
        common: sampling::none(timeout, priority, salt),
        logprobs: None,
        tools: None,
        shape: None,
        grammar: None,
        grammar_field: None,
        attention: Arc::new(attention),
        ignored,
    };
    Ok(Asked { call, packed, dimensions })
}

impl Parsed for Asked {}

impl Asked {
    /// Queues every text and answers.
    pub(crate) async fn run(mut self, app: &Arc<App>, asked: RequestId) -> Result<Response, ApiError> {
        let asked = asked.named("embd-");
        let headers = self.call.headers(&asked.id);
        let parts = app.engine.parts().map_err(|error| error::refused(&error, "input", "", None))?;
        let mut rest = std::mem::take(&mut self.call.prompts);
        let count = rest.len();
        let mut data: Vec<Option<Embedding>> = Vec::new();
        data.resize_with(count, || None);
        let mut total = answer::Total::default();
        while !rest.is_empty() {
            let first = count - rest.len();
            self.call.prompts = rest.drain(..rest.len().min(AT_ONCE).min(app.engine.queue_limit())).collect();
            // What is taken is finished, whoever else comes, and even if the server is to end.
            let mut events = self.call.submit_part(app, &asked, Some(&parts).filter(|_| first > 0))?;
            while let Some((index, event)) = events.next().await {
                let index = first + index;
                match event {
                    Event::Prefilled | Event::Prompt(_) | Event::Delta(_) => {}
                    Event::Embedding(hidden) => {
                        self.check_dimensions(hidden.len())?;
                        data[index] = Some(Embedding { object: "embedding", index, embedding: self.written(&hidden) });
                    }
                    Event::Done(usage) => total.add(index, usage),
                    Event::Failed(error) => return Err(self.call.failed(error)),
                }
            }
            if total.done < count - rest.len() {
                return Err(answer::cut_off());
            }
        }
        let mut usage = total.json();
        usage.as_object_mut().into_iter().for_each(|usage| drop(usage.shift_remove("completion_tokens")));
        let data = data.into_iter().flatten().collect();
        let body = Embeddings { object: "list", data, model: app.model_name().to_owned(), usage };
        let mut response = Json(body).into_response();
        response.headers_mut().extend(headers);
        Ok(response)
    }

    fn check_dimensions(&self, own: usize) -> Result<(), ApiError> {
        match self.dimensions {
            Some(wanted) if wanted != own => {
                let message = format!("dimensions is {wanted}, but the model's own {own} is the only one served");
                Err(ApiError::invalid("dimensions", message))
            }
            _ => Ok(()),
        }
    }

    fn written(&self, hidden: &[f32]) -> Numbers {
        let length = hidden.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let scale = if length > 0.0 { 1.0 / length } else { 1.0 };
        let unit: Vec<f32> = hidden.iter().map(|x| (f64::from(*x) * scale) as f32).collect();
        match self.packed {
            true => {
                Numbers::Base64(BASE64_STANDARD.encode(unit.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()))
            }
            false => Numbers::Plain(unit),
        }
    }
}
