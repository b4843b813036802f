//! How much work on prompts, in tokens through all layers, a step does without making those who wait for their next token
//! wait too long.

/// What steps took so far: moving averages.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Seconds a row of a step that only generates.
    row: Option<f64>,
    /// Seconds a prompt token, beside rows or not.
    prompt: Option<f64>,
    /// Steps since the last one that only generated.
    mixed: usize,
}

/// Weight of the latest step.
const LATEST: f64 = 0.2;
/// Prompt tokens of a step, beside answers, while their time is not known, and the least of any step that takes some.
const LEAST: usize = 4;
/// After so many steps with prompts one goes without, to see how long rows take by now.
const PROBE: usize = 32;

impl Pace {
    /// Learns from a step of `rows` generated tokens and `prompt` tokens' work on prompts.
    pub fn note(&mut self, rows: usize, prompt: usize, seconds: f64) {
        let mix = |old: &mut Option<f64>, new: f64| *old = Some(old.map_or(new, |old| old + LATEST * (new - old)));
        if prompt == 0 {
            mix(&mut self.row, seconds / rows.max(1) as f64);
            self.mixed = 0;
        } else {
            self.mixed += usize::from(rows > 0);
            let rows = self.row.unwrap_or(0.0) * rows as f64;
            // Rows that took longer than thought must not make prompts look free.
            mix(&mut self.prompt, (seconds - rows).max(seconds / 4.0) / prompt as f64);
        }
    }

    /// Prompt tokens that make a step of `rows` generated tokens at most `stretch` times as long; none where it is not
    /// known, or not known any more, how long these take alone.
    pub fn prompt_tokens(&self, rows: usize, stretch: f64, most: usize) -> usize {
        let Some(row) = self.row.filter(|_| self.mixed < PROBE) else { return 0 };
        let Some(prompt) = self.prompt else { return LEAST.min(most) };
        let tokens = (stretch - 1.0) * row * rows as f64 / prompt.max(f64::MIN_POSITIVE);
        (tokens as usize).clamp(LEAST.min(most), most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_take_what_is_left_of_a_steps_time() {
        let mut pace = Pace::default();
        // 10 ms a row, 2 ms a prompt token.
        assert_eq!(pace.prompt_tokens(8, 2.0, 512), 0, "nothing is known: rows alone, to see");
        pace.note(8, 0, 0.08);
        assert_eq!(pace.prompt_tokens(8, 2.0, 512), 4, "prompts are not known");
        pace.note(0, 100, 0.2);
        assert_eq!(pace.prompt_tokens(8, 2.0, 512), 40);
        assert_eq!(pace.prompt_tokens(8, 1.5, 512), 20);
        assert_eq!(pace.prompt_tokens(1, 1.0, 512), 4, "prompts never stand still");
        assert_eq!(pace.prompt_tokens(8, 100.0, 512), 512);
        // Rows take 30 ms by now, which a step with prompts does not tell from prompts that take longer.
        let mut without = 0;
        for _ in 0..500 {
            let tokens = pace.prompt_tokens(8, 2.0, 512);
            without += usize::from(tokens == 0);
            pace.note(8, tokens, 0.24 + 0.002 * tokens as f64);
        }
        assert_eq!(without, 500 / 33);
        let tokens = pace.prompt_tokens(8, 2.0, 512);
        assert!((100..=140).contains(&tokens), "{tokens} of 120");
    }
}
