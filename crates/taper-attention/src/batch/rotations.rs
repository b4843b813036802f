//! The rotary embedding of a step's sequences, for methods that take it off.

use crate::layer::Rotary;
use std::sync::OnceLock;
use taper_kernels::rotary::{Rotation, Rotations};

/// One for all sequences, or, where it heeds the length, one for each length of a prompt. They last for a step, so that what is made
/// of them in one layer serves the others.
pub(super) struct StepRotations<'a> {
    rotary: &'a dyn Rotary,
    of: Vec<(usize, Rotations<'a>)>,
}

impl<'a> StepRotations<'a> {
    /// For sequences whose prompts are so long.
    pub fn new(rotary: &'a dyn Rotary, prompts: impl IntoIterator<Item = usize>) -> Self {
        let mut rotations = Self { rotary, of: Vec::new() };
        for prompt in prompts {
            let length = rotations.length(prompt);
            if rotations.of.iter().all(|(known, _)| *known != length) {
                rotations.of.push((length, of_length(rotary, length)));
            }
        }
        rotations
    }

    /// What they go by of a prompt's length.
    fn length(&self, prompt: usize) -> usize {
        if self.rotary.heeds_length() { prompt } else { 0 }
    }

    /// Whether they differ from sequence to sequence.
    pub fn heed_length(&self) -> bool {
        self.rotary.heeds_length()
    }

    /// That of a sequence whose prompt is so long, one of those that it was made for.
    pub fn of(&self, prompt: usize) -> &Rotations<'a> {
        let length = self.length(prompt);
        let found = self.of.iter().find(|(known, _)| *known == length);
        &found.expect("a rotary embedding for each of a step's sequences").1
    }
}

/// The turn of each token of a sequence whose prompt is so long.
fn of_length(rotary: &dyn Rotary, prompt: usize) -> Rotations<'_> {
    // Those of all positions, or of the prompt's where they heed the length, are made once, and only if they are wanted.
    let shared = OnceLock::new();
    Rotations::new(move |position| match rotary.heeds_length() && position >= prompt {
        true => Rotation::new(position, &rotary.frequencies(position + 1), rotary.factor()),
        false => Rotation::new(position, shared.get_or_init(|| rotary.frequencies(prompt)), rotary.factor()),
    })
}
