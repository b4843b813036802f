//! The questions of a plan in a file, so that another program can be asked the same. Asks nobody itself.

use super::Plan;
use crate::error::EvalError;
use crate::tasks::Task;
use crate::text::PromptText;
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// A question: one line of the file.
#[derive(Serialize)]
struct Line<'a> {
    task: Task,
    /// Length asked for: prompt and answer, in tokens.
    length: usize,
    sample: usize,
    /// The run's, of which each question has draws of its own.
    seed: u64,
    /// The prompt: both turns in the model's chat template.
    tokens: &'a [u32],
    /// How many of them come after the context.
    question_tokens: usize,
    /// Most tokens of an answer.
    answer_tokens: usize,
    /// The strings that a right answer contains.
    wanted: &'a [String],
}

/// Writes what [`run`](super::run) asks by the same plan and seed, a line of JSON for each question, in its order; the
/// number of questions.
///
/// # Errors
/// A length too short for a task, what the tokenizer says, or a file that cannot be written.
pub fn write_prompts(plan: &Plan, seed: u64, text: &dyn PromptText, path: &Path) -> Result<usize, EvalError> {
    let bad = |reason| EvalError::Io { path: path.to_owned(), reason };
    let mut file = BufWriter::new(File::create(path).map_err(bad)?);
    let mut count = 0;
    for (length, sample, task) in plan.questions() {
        let asked = task.sample(length, seed, sample, text)?;
        let line = Line {
            task,
            length,
            sample,
            seed,
            tokens: &asked.tokens,
            question_tokens: asked.question_tokens,
            answer_tokens: task.answer_tokens(),
            wanted: &asked.wanted,
        };
        let line = serde_json::to_vec(&line).map_err(|e| bad(e.into()))?;
        file.write_all(&line).and_then(|()| file.write_all(b"\n")).map_err(bad)?;
        count += 1;
    }
    file.flush().map_err(bad)?;
    Ok(count)
}
