//! One request from the terminal: what `generate` and `chat` share.

use crate::args::SamplingArgs;
use anyhow::{Context, Result, anyhow};
use std::io::Write;
use std::pin::pin;
use std::sync::Arc;
use taper_attention::AttentionSpec;
use taper_engine::{Engine, Event, Message, Request, SamplingParams, StopRules, Usage, question};

/// An error with all that led to it, each reason once: some say in their own words what caused them.
pub fn told(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// What is put to a model.
pub struct Prompt {
    tokens: Vec<u32>,
    /// How many of them the last user message is; none in text without messages.
    question: Option<usize>,
}

impl Prompt {
    /// Messages, ready for the assistant's answer.
    ///
    /// # Errors
    /// What the chat template refuses.
    pub fn chat(engine: &Engine, messages: &[Message]) -> Result<Self> {
        let (text, variables) = (engine.text(), serde_json::Map::new());
        let tokens = text.chat(messages, &variables)?;
        Ok(Self { question: question(text, messages, &variables, &tokens), tokens })
    }

    /// Text as it is.
    ///
    /// # Errors
    /// What the tokenizer refuses.
    pub fn plain(engine: &Engine, text: &str) -> Result<Self> {
        Ok(Self { tokens: engine.text().encode(text, true)?, question: None })
    }
}

/// Runs a prompt and hands over text as it comes; returns the whole text and what it took, if that is asked for, or what there is
/// of it when `stop` comes.
///
/// # Errors
/// A prompt that does not fit, a step that failed, or a terminal that is gone.
pub fn run(
    engine: &Engine,
    Prompt { tokens: prompt, question }: Prompt,
    attention: Arc<AttentionSpec>,
    args: &SamplingArgs,
    stop: impl Future,
    mut show: impl FnMut(&str) -> std::io::Result<()>,
) -> Result<(String, Option<Usage>)> {
    // The longest answer that fits is what a person means by a number that is too large.
    let prompt_tokens = prompt.len();
    let question_tokens = (attention.question_of(prompt_tokens, || question))
        .map_err(|error| anyhow!("{} {}", error.path, error.message))?;
    let room = engine.room(prompt_tokens, 1);
    if let Some(warning) = clamped(args.max_tokens, prompt_tokens, room) {
        eprintln!("{warning}");
    }
    let request = Request {
        id: "terminal".into(),
        prompt,
        // Text without messages goes on.
        continues: question.is_none(),
        question_tokens,
        attention,
        sampling: SamplingParams {
            temperature: args.temperature,
            top_p: args.top_p,
            top_k: args.top_k,
            // So that attention that samples is the same each time.
            seed: args
                .seed
                .unwrap_or_else(|| if args.temperature == 0.0 { 0 } else { u64::from(rand::random::<u32>()) }),
            ..SamplingParams::default()
        },
        stop: StopRules { max_tokens: Some(args.max_tokens.min(room.max(1))), ..StopRules::default() },
        ..Request::default()
    };
    let mut events = engine.submit(request)?;
    let mut text = String::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let mut stop = pin!(stop);
    loop {
        let event = runtime.block_on(async {
            tokio::select! {
                event = events.recv() => Some(event),
                _ = &mut stop => None,
            }
        });
        // Nobody takes its events any more: the request ends with the step under way.
        let Some(event) = event else { return Ok((text, None)) };
        match event.context("the engine stopped before the answer was complete")? {
            Event::Prefilled | Event::Prompt(_) | Event::Embedding(_) => {}
            Event::Delta(delta) => {
                show(&delta.text)?;
                text.push_str(&delta.text);
            }
            Event::Done(usage) => return Ok((text, args.usage.then_some(usage))),
            Event::Failed(error) => return Err(error.into()),
        }
    }
}

/// What is said where an answer may not be as long as it was wanted. A prompt that leaves no room at all is refused.
fn clamped(wanted: usize, prompt: usize, room: usize) -> Option<String> {
    let fits = || {
        format!(
            "warning: --max-tokens: {wanted} is more than fits after the prompt's {prompt} tokens; at most {room} are generated"
        )
    };
    (0 < room && room < wanted).then(fits)
}

/// Prints text as it comes.
///
/// # Errors
/// A terminal that is gone.
pub fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Says what an answer took, once its line has ended.
pub fn report(usage: &Usage) {
    eprintln!("prompt {} tokens, answer {} tokens", usage.prompt_tokens, usage.completion_tokens);
    for attention in &usage.attention {
        eprintln!("attention {}", taper_server::attention_usage(attention));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_too_large_is_said_to_be() {
        let says =
            "warning: --max-tokens: 300 is more than fits after the prompt's 12 tokens; at most 200 are generated";
        assert_eq!(clamped(300, 12, 200).as_deref(), Some(says));
        assert_eq!((clamped(200, 12, 200), clamped(300, 12, 0)), (None, None));
    }
}
