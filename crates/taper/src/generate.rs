//! `taper generate`.

use crate::args::GenerateArgs;
use crate::load::{self, Loaded};
use crate::talk::Prompt;
use crate::{config, talk};
use anyhow::Result;
use std::sync::Arc;
use taper_engine::Message;

/// Continues the prompt and prints the result.
///
/// # Errors
/// What the model, the prompt or the attention lacks.
pub fn run(args: GenerateArgs) -> Result<()> {
    let config = config::model(args.model)?;
    let Loaded { engine, attention, .. } = load::engine(&config)?;
    let prompt = if args.chat {
        Prompt::chat(&engine, &[Message::new("user", args.prompt)])?
    } else {
        Prompt::plain(&engine, &args.prompt)?
    };
    let show = |text: &str| if args.stream { talk::print(text) } else { Ok(()) };
    // Ctrl-C ends the process: there is nothing to keep.
    let never = std::future::pending::<()>();
    let text = talk::run(&engine, prompt, Arc::new(attention), &args.sampling, never, show)?;
    if !args.stream {
        talk::print(&text)?;
    }
    talk::print("\n")?;
    Ok(())
}
