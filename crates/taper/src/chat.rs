//! `taper chat`: a conversation in the terminal.

use crate::args::ChatArgs;
use crate::interrupt::Answers;
use crate::load::{self, Loaded};
use crate::talk::Prompt;
use crate::{config, talk};
use anyhow::Result;
use std::io::{BufRead, IsTerminal};
use std::sync::Arc;
use taper_engine::Message;

/// What a line may begin with, other than what is said to the model.
const COMMANDS: &str = "/attention, /reset, /quit";

/// What is meant by a line.
#[derive(Debug, PartialEq)]
enum Line<'a> {
    Empty,
    Quit,
    Reset,
    Attention(&'a str),
    /// A slash and a word, which hardly is for the model.
    Unknown(&'a str),
    Said(&'a str),
}

impl<'a> Line<'a> {
    fn read(line: &'a str) -> Self {
        let text = line.trim();
        match text.split_once(char::is_whitespace).unwrap_or((text, "")) {
            ("", _) => Self::Empty,
            _ if !line.starts_with('/') => Self::Said(text),
            ("/quit", _) => Self::Quit,
            ("/reset", _) => Self::Reset,
            ("/attention", rest) => Self::Attention(rest.trim()),
            (command, _) => Self::Unknown(command),
        }
    }
}

/// Reads lines, answers each, keeps the conversation.
///
/// # Errors
/// A model that cannot be loaded or a terminal that is gone; a refused line is only reported.
pub fn run(args: ChatArgs) -> Result<()> {
    let mut config = config::model(args.model)?;
    // Every turn's prompt begins with the turns before it.
    config.cache.prefix = true;
    let Loaded { engine, artifacts, attention, .. } = load::engine(&config)?;
    let mut attention = Arc::new(attention);
    let answers = Answers::new()?;
    let system = args.system.map(|content| Message::new("system", content));
    let mut messages: Vec<Message> = system.iter().cloned().collect();
    let prompt = std::io::stdin().is_terminal();
    if prompt {
        eprintln!("{}; {COMMANDS}", engine.model().id);
    }
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if prompt {
            talk::print("> ")?;
        }
        let Some(line) = lines.next().transpose()? else { break };
        match Line::read(&line) {
            Line::Empty => continue,
            Line::Quit => break,
            Line::Reset => messages = system.iter().cloned().collect(),
            Line::Attention(text) => match config.presets.find(text, &artifacts) {
                Ok(spec) => {
                    let (prefill, decode) = spec.names();
                    eprintln!("prompts go by {prefill}, answers by {decode}");
                    attention = Arc::new(spec);
                }
                Err(error) => eprintln!("{}", talk::told(&error)),
            },
            Line::Unknown(command) => {
                eprintln!(
                    "{command} is no command; there are {COMMANDS}. A line that begins with a space goes to the model."
                );
            }
            Line::Said(text) => {
                messages.push(Message::new("user", text));
                let stop = answers.begin();
                let answer = Prompt::chat(&engine, &messages).and_then(|prompt| {
                    talk::run(&engine, prompt, Arc::clone(&attention), &args.sampling, stop, talk::print)
                });
                let stopped = answers.end();
                talk::print("\n")?;
                match answer {
                    // Templates want an answer between two questions: one that never began takes its question along.
                    Ok((content, _)) if stopped && content.is_empty() => {
                        messages.pop();
                    }
                    Ok((content, usage)) => {
                        messages.push(Message::new("assistant", content));
                        usage.iter().for_each(talk::report);
                    }
                    Err(error) => {
                        messages.pop();
                        eprintln!("{}", talk::told(&error));
                    }
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_begins_a_command_and_a_space_what_is_said() {
        for (line, meant) in [
            ("  ", Line::Empty),
            ("/quit", Line::Quit),
            ("/reset ", Line::Reset),
            ("/attention  quest", Line::Attention("quest")),
            ("/attention", Line::Attention("")),
            ("/help me", Line::Unknown("/help")),
            ("/Quit", Line::Unknown("/Quit")),
            (" /etc/passwd is what?", Line::Said("/etc/passwd is what?")),
            ("what is /quit", Line::Said("what is /quit")),
        ] {
            assert_eq!(Line::read(line), meant, "{line:?}");
        }
    }
}
