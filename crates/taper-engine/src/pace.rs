//! How much work on prompts, in tokens through all layers, a step does without making those who wait for their next token
//! wait too long.

/// What steps took so far.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Of steps that only generated: rows, and a moving average of the seconds over steps of so many.
    alone: Option<(usize, f64)>,
    /// The same of another number of rows, before.
    before: Option<(usize, f64)>,
    /// Seconds a prompt token, beside rows or not: a moving average.
    prompt: Option<f64>,
    /// Steps since the last one that only generated.
    mixed: usize,
}

/// Weight of the latest step.
const LATEST: f64 = 0.2;
/// Prompt tokens of a step, beside answers, while their time is not known, and the least of any step that takes some.
const LEAST: usize = 4;
/// Prompt tokens of a step without answers, and how many seconds more may take: so long whoever comes next may wait.
const ALONE: (usize, f64) = (512, 0.3);
/// The least of these where they take long, since weights are read once for all of a step, and how many seconds more
/// than the least may take.
const SLOW: (usize, f64) = (128, 1.0);
/// After so many steps with prompts one goes without, to see how long rows take by now.
const PROBE: usize = 32;

impl Pace {
    /// Learns from a step of `rows` generated tokens and `prompt` tokens' work on prompts.
    pub fn note(&mut self, rows: usize, prompt: usize, seconds: f64) {
        let mix = |old: f64, new: f64| old + LATEST * (new - old);
        if prompt == 0 {
            self.mixed = 0;
            match &mut self.alone {
                Some((seen, old)) if *seen == rows => *old = mix(*old, seconds),
                alone => self.before = alone.replace((rows, seconds)).or(self.before),
            }
        } else {
            self.mixed += usize::from(rows > 0);
            // Rows that take less than thought must not make prompts look free.
            let new = (seconds - self.alone(rows).unwrap_or(0.0)).max(seconds / 4.0) / prompt as f64;
            self.prompt = Some(self.prompt.map_or(new, |old| mix(old, new)));
        }
    }

    /// Seconds that a step of so many rows takes: a part that is the same for any number of them, and a part that grows with
    /// it, by two numbers that were seen. While there is one, what it takes at least.
    fn alone(&self, rows: usize) -> Option<f64> {
        let (seen, seconds) = self.alone?;
        let (further, share) = (rows as f64 - seen as f64, seconds / seen.max(1) as f64);
        let row = match self.before {
            Some((before, then)) => ((seconds - then) / (seen as f64 - before as f64)).clamp(0.0, share),
            None if further < 0.0 => share,
            None => 0.0,
        };
        Some(seconds + row * further)
    }

    /// Prompt tokens of a step that generates none, so many times two, or so many halves: the more, the less is lost
    /// between steps, and whether they take a little more or less makes no difference.
    pub fn alone_tokens(&self, most: usize) -> usize {
        let ((usual, seconds), (least, longest)) = (ALONE, SLOW);
        let takes = |tokens: usize| self.prompt.map(|prompt| tokens as f64 * prompt);
        let mut tokens = usual;
        while tokens < most && takes(2 * tokens).is_some_and(|takes| takes <= seconds) {
            tokens *= 2;
        }
        while tokens > least && takes(tokens).is_some_and(|takes| takes > longest) {
            tokens /= 2;
        }
        tokens.min(most)
    }

    /// Prompt tokens that make a step of `rows` generated tokens at most `stretch` times as long; none where it is not known,
    /// or not known any more, how long these take alone, but that never twice in a row.
    pub fn prompt_tokens(&self, rows: usize, stretch: f64, most: usize) -> usize {
        let Some(alone) = self.alone(rows) else { return 0 };
        // Many more rows than were seen, or many fewer, are worth a look of their own.
        let seen = || self.alone.into_iter().chain(self.before).map(|(seen, _)| seen);
        let near = seen().any(|seen| 2 * rows <= 3 * seen) && seen().any(|seen| 3 * rows >= 2 * seen);
        if !near && self.mixed > 0 || self.mixed >= PROBE {
            return 0;
        }
        let Some(prompt) = self.prompt.filter(|_| near) else { return LEAST.min(most) };
        let tokens = (stretch - 1.0) * alone / prompt.max(f64::MIN_POSITIVE);
        (tokens as usize).clamp(LEAST.min(most), most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn prompts_take_what_is_left_of_a_steps_time() {
        let mut pace = Pace::default();
        // 80 ms for 8 rows, 2 ms a prompt token.
        assert_eq!(pace.prompt_tokens(8, 2.0, 512), 0, "nothing is known: rows alone, to see");
        pace.note(8, 0, 0.08);
        assert_eq!(pace.prompt_tokens(8, 2.0, 512), 4, "prompts are not known");
        pace.note(0, 100, 0.2);
        assert_eq!(pace.prompt_tokens(8, 2.0, 512), 40);
        assert_eq!(pace.prompt_tokens(8, 1.5, 512), 20);
        assert_eq!(pace.prompt_tokens(6, 2.0, 512), 30, "fewer rows may take less time");
        assert_eq!(pace.prompt_tokens(12, 2.0, 512), 40, "more need not take more");
        assert_eq!((pace.prompt_tokens(13, 2.0, 512), pace.prompt_tokens(5, 2.0, 512)), (4, 4), "one has gone without");
        pace.note(8, 40, 0.16);
        assert_eq!((pace.prompt_tokens(13, 2.0, 512), pace.prompt_tokens(5, 2.0, 512)), (0, 0), "worth a look");
        assert_eq!(pace.prompt_tokens(8, 1.0, 512), 4, "prompts never stand still");
        assert_eq!(pace.prompt_tokens(8, 100.0, 512), 512);
        // Rows take 240 ms by now, which a step with prompts does not tell from prompts that take longer.
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

    #[test]
    fn a_prompt_alone_takes_a_third_of_a_second_or_a_second_but_no_fewer_tokens_than_are_worth_it() {
        let mut pace = Pace::default();
        assert_eq!((pace.alone_tokens(8192), pace.alone_tokens(100)), (512, 100), "nothing is known");
        // 1.5 ms a token: 200 in a third of a second, 512 in less than one.
        pace.note(0, 512, 0.768);
        assert_eq!((pace.alone_tokens(8192), pace.alone_tokens(100)), (512, 100));
        // A large model on few cores: 6 ms a token, 25 ms, 25 µs again.
        for (token, tokens) in [(0.006, 128), (0.025, 128), (0.003, 256), (25e-6, 8192)] {
            (0..100).for_each(|_| pace.note(0, 256, 256.0 * token));
            assert_eq!(pace.alone_tokens(8192), tokens, "{token} s a token");
        }
        // 3,000 in that time.
        let mut pace = Pace::default();
        pace.note(0, 512, 0.0512);
        assert_eq!((pace.alone_tokens(8192), pace.alone_tokens(1500)), (2048, 1500));
        pace.note(0, 2048, 0.22);
        assert_eq!(pace.alone_tokens(8192), 2048, "a little more");
        // The prompt's end takes longer than its beginning.
        (0..100).for_each(|_| pace.note(0, 2048, 0.5));
        assert_eq!(pace.alone_tokens(8192), 1024);
        (0..1000).for_each(|_| pace.note(0, 1024, 0.0));
        assert_eq!((pace.alone_tokens(8192), pace.alone_tokens(5000)), (8192, 5000));
    }

    /// Drafts make steps of one row and of many by turns.
    #[test]
    fn steps_of_few_rows_and_of_many_by_turns_leave_prompts_their_half() {
        for cycle in [&[1, 2][..], &[1, 1, 1, 1, 5], &[8, 16], &[4, 4, 9, 40]] {
            let (mut pace, mut tokens, mut due) = (Pace::default(), 0.0, 0.0);
            for rows in cycle.iter().copied().cycle().take(2000) {
                let beside = pace.prompt_tokens(rows, 2.0, 512);
                let alone = 0.04 + 0.001 * rows as f64;
                pace.note(rows, beside, alone + 0.0005 * beside as f64);
                (tokens, due) = (tokens + beside as f64, due + alone / 0.0005);
            }
            assert!((0.65 * due..1.1 * due).contains(&tokens), "{cycle:?}: {tokens} of {due}");
        }
    }

    proptest! {
        #[test]
        fn prompts_never_stand_still(steps in prop::collection::vec((1usize..200, 0f64..0.5), 1..200), stretch in 1f64..9.0) {
            let (mut pace, mut last) = (Pace::default(), 1);
            for (rows, seconds) in steps {
                let tokens = pace.prompt_tokens(rows, stretch, 512);
                prop_assert!(tokens + last > 0, "two steps without");
                pace.note(rows, tokens, seconds);
                last = tokens;
            }
        }
    }

    #[test]
    fn steps_keep_their_stretch_while_answers_come_and_go() {
        // Milliseconds: weights, rows, prompts.
        let alone = |rows: usize| 4.2 + 0.9 * rows as f64;
        let step = |rows: usize, tokens: usize| alone(rows) + 1.66 * tokens as f64;
        let (mut pace, mut most, mut tokens) = (Pace::default(), 0f64, 0);
        let mut due = 0.0;
        // One answer at first, then many at once, and some that end.
        let rows =
            [1; 40].into_iter().chain([8; 200]).chain([31; 200]).chain((1..31).rev().flat_map(|rows| [rows; 20]));
        for (at, rows) in rows.enumerate() {
            let beside = if at < 20 { 0 } else { pace.prompt_tokens(rows, 2.0, 512) };
            most = most.max(step(rows, beside) / alone(rows));
            tokens += beside;
            due += if at < 20 { 0.0 } else { alone(rows) / 1.66 };
            pace.note(rows, beside, step(rows, beside) / 1e3);
        }
        // The four tokens that a step takes anyway are 1.3 times as long as one row.
        assert!(most < 2.4, "a step took {most} times its time without prompts");
        assert!(tokens as f64 > 0.8 * due, "{tokens} prompt tokens of {due}");
    }

    /// Chunks of 2,048 tokens in slices of 1,024 rows: of a chunk's 33 passes the first is ten times as fast as the others, and
    /// a step does whole slices.
    #[test]
    fn the_fast_beginning_of_a_prompt_does_not_count_for_all_of_it() {
        let (mut pace, mut slices, mut longest, mut tokens, mut due) = (Pace::default(), 0, 0f64, 0.0, 0.0);
        pace.note(8, 0, 0.008);
        while slices < 8 * 66 {
            let beside = pace.prompt_tokens(8, 2.0, 512) as f64;
            let (mut done, mut seconds) = (0.0, 0.008);
            while done < beside {
                seconds += if slices % 66 < 2 { 0.000_13 } else { 0.001_3 };
                (done, slices) = (done + 1024.0 / 33.0, slices + 1);
            }
            pace.note(8, done as usize, seconds);
            (longest, tokens, due) =
                (longest.max(seconds / 0.008), tokens + done, due + 0.008 / 0.0013 * 1024.0 / 33.0);
        }
        assert!(longest < 2.5, "a step took {longest} times its time without prompts");
        assert!(tokens > 0.8 * due, "{tokens} prompt tokens of {due}");
    }
}
