//! `taper generate`.

use crate::args::GenerateArgs;
use crate::load::{self, Loaded};
use crate::talk::Prompt;
use crate::{config, talk};
use anyhow::{Context, Result};
use std::path::Path;
use std::sync::Arc;
use taper_engine::Message;

/// Continues the prompt and prints the result.
///
/// # Errors
/// What the model, the prompt or the attention lacks.
pub fn run(args: GenerateArgs) -> Result<()> {
    let text = match (args.prompt, &args.prompt_file) {
        (None, Some(file)) => read(file).with_context(|| format!("--prompt-file: {}", file.display()))?,
        (prompt, _) => prompt.unwrap_or_default(),
    };
    let config = config::model(args.model)?;
    let Loaded { engine, attention, .. } = load::engine(&config)?;
    let prompt =
        if args.chat { Prompt::chat(&engine, &[Message::new("user", text)])? } else { Prompt::plain(&engine, &text)? };
    let show = |text: &str| if args.stream { talk::print(text) } else { Ok(()) };
    // Ctrl-C ends the process: there is nothing to keep.
    let never = std::future::pending::<()>();
    let (text, usage) = talk::run(&engine, prompt, Arc::new(attention), &args.sampling, never, show)?;
    if !args.stream {
        talk::print(&text)?;
    }
    talk::print("\n")?;
    usage.iter().for_each(talk::report);
    Ok(())
}

/// A file's text, less the line break that editors and echo put at the end.
fn read(file: &Path) -> std::io::Result<String> {
    let mut text = match file.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin())?,
        _ => std::fs::read_to_string(file)?,
    };
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_line_break_at_its_end_that_is_not_meant() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("prompt.txt");
        for (text, meant) in
            [("a\nb", "a\nb"), ("a\n", "a"), ("a\n\n", "a\n"), ("a\r\n", "a"), ("a\r", "a\r"), ("", "")]
        {
            std::fs::write(&file, text).unwrap();
            assert_eq!(read(&file).unwrap(), meant, "{text:?}");
        }
    }
}
