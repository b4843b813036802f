//! `taper chat`: a conversation in the terminal.

use crate::args::ChatArgs;
use crate::load::{self, Loaded};
use crate::{config, talk};
use anyhow::Result;
use serde_json::Map;
use std::io::{BufRead, IsTerminal};
use std::sync::Arc;
use taper_engine::Message;

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
    let system = args.system.map(|content| Message::new("system", content));
    let mut messages: Vec<Message> = system.iter().cloned().collect();
    let prompt = std::io::stdin().is_terminal();
    if prompt {
        eprintln!("{}; /attention, /reset, /quit", engine.model().id);
    }
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if prompt {
            talk::print("> ")?;
        }
        let Some(line) = lines.next().transpose()? else { break };
        let line = line.trim();
        match line.split_once(' ').unwrap_or((line, "")) {
            ("", _) => continue,
            ("/quit", _) => break,
            ("/reset", _) => messages = system.iter().cloned().collect(),
            ("/attention", text) => match config.presets.find(text.trim(), &artifacts) {
                Ok(spec) => attention = Arc::new(spec),
                Err(error) => eprintln!("{error:#}"),
            },
            _ => {
                messages.push(Message::new("user", line));
                let answer = engine.text().chat(&messages, &Map::new()).map_err(Into::into).and_then(|tokens| {
                    talk::run(&engine, tokens, false, Arc::clone(&attention), &args.sampling, talk::print)
                });
                match answer {
                    Ok((content, _)) => messages.push(Message::new("assistant", content)),
                    Err(error) => {
                        messages.pop();
                        eprintln!("{error:#}");
                    }
                }
                talk::print("\n")?;
            }
        }
    }
    Ok(())
}
