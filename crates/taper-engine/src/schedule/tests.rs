use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

fn prompt(cached: usize, known: usize, choices: usize) -> Standing {
    Standing { sequences: vec![place(cached, known)], forks: choices, again: 0 }
}

fn place(cached: usize, known: usize) -> Place {
    Place { cached, known, underway: Underway::default(), takes: 1 }
}

/// A prompt whose chunk of `tokens` tokens is underway.
fn underway(cached: usize, known: usize, tokens: usize, done: usize) -> Standing {
    let place = Place { underway: Underway { tokens, done }, ..place(cached, known) };
    Standing { sequences: vec![place], forks: 1, again: 0 }
}

fn answer(cached: &[usize]) -> Standing {
    Standing { sequences: cached.iter().map(|&cached| place(cached, cached + 1)).collect(), forks: 0, again: 0 }
}

fn budget(blocks: usize) -> Budget {
    Budget { alone: 512, beside: 32, blocks }
}

fn share(request: usize, sequence: usize, tokens: usize) -> Share {
    Share { request, sequence, tokens, effort: tokens, generates: false }
}

/// Some of the work on a chunk.
fn part(request: usize, tokens: usize, effort: usize) -> Share {
    Share { effort, ..share(request, 0, tokens) }
}

fn row(request: usize, sequence: usize) -> Share {
    Share { generates: true, ..share(request, sequence, 1) }
}

#[test]
fn answers_go_first_and_prompts_share_what_is_left() {
    let running = [answer(&[70, 80]), prompt(0, 20, 1), prompt(0, 600, 1), answer(&[5])];
    let step = plan(&running, budget(100), |_, max| max);
    let expected = [row(0, 0), row(0, 1), share(1, 0, 16), share(2, 0, 16), row(3, 0)];
    assert_eq!(step, Decision::Step(expected.into()), "a half each");
    let step = plan(&running[1..3], budget(100), |_, max| max);
    assert_eq!(step, Decision::Step(vec![share(0, 0, 20), share(1, 0, 492)]), "nobody waits for a token");
}

#[test]
fn a_chunk_that_cannot_be_cut_takes_no_more_of_a_step_than_another() {
    let running = [answer(&[9]), prompt(0, 600, 1), prompt(0, 600, 1)];
    let step = plan(&running, budget(100), |_, _| 600);
    assert_eq!(step, Decision::Step(vec![row(0, 0), part(1, 600, 16), part(2, 600, 16)]));
    let step = plan(&running[1..], budget(100), |_, _| 600);
    assert_eq!(step, Decision::Step(vec![part(0, 600, 256), part(1, 600, 256)]));
    let step = plan(&[prompt(0, 10, 1), prompt(0, 600, 1)], budget(100), |_, _| 600);
    assert_eq!(step, Decision::Step(vec![share(0, 0, 10), part(1, 600, 502)]));
    // What is underway ends with the work that is left, and the next chunk does not begin in the same step.
    let step = plan(&[underway(0, 900, 600, 590)], budget(100), |_, _| 600);
    assert_eq!(step, Decision::Step(vec![part(0, 600, 10)]));
    // Of two prompts the one with less work left has it first, however many tokens it has.
    let running = [prompt(0, 9000, 1), prompt(0, 500, 1), underway(0, 600, 600, 400)];
    let step = plan(&running, budget(1000), |request, max| if request == 2 { 600 } else { max });
    assert_eq!(step, Decision::Step(vec![share(0, 0, 256), share(1, 0, 56), part(2, 600, 200)]));
}

#[test]
fn a_more_urgent_chunk_begins_beside_two_others_where_half_a_step_ends_it() {
    let running = |tokens: usize| [prompt(0, tokens, 1), underway(0, 600, 600, 100), underway(0, 600, 600, 200)];
    let plan =
        |tokens: usize| plan(&running(tokens), budget(100), |request, _| if request == 0 { tokens } else { 600 });
    assert_eq!(plan(256), Decision::Step(vec![share(0, 0, 256), part(2, 600, 256)]));
    assert_eq!(plan(257), Decision::Step(vec![part(1, 600, 112), part(2, 600, 400)]));
}

#[test]
fn a_chunk_has_its_blocks_from_its_beginning() {
    // Ten blocks, and none later.
    assert_eq!(plan(&[prompt(0, 600, 1)], budget(9), |_, _| 600), Decision::Preempt);
    assert_eq!(plan(&[prompt(0, 600, 1)], budget(10), |_, _| 600), Decision::Step(vec![part(0, 600, 512)]));
    let step = plan(&[underway(0, 600, 600, 512)], budget(0), |_, _| 600);
    assert_eq!(step, Decision::Step(vec![part(0, 600, 88)]));
    let running = [Standing { forks: 3, ..underway(0, 600, 600, 512) }, answer(&[10])];
    // Those of the choices must be there in the chunk's last steps, since its work may end early.
    assert_eq!(plan(&running, budget(1), |_, _| 600), Decision::Preempt);
    assert_eq!(plan(&running, budget(2), |_, _| 600), Decision::Step(vec![part(0, 600, 32), row(1, 0)]));
    // Room that a running chunk has taken is no longer reserved for it.
    assert!(!admits(&[prompt(0, 600, 1)], 12, 8, (1, 1)));
    assert!(admits(&[underway(0, 600, 600, 3)], 4, 8, (1, 1)));
}

#[test]
fn what_comes_again_stops_before_the_last_known_token() {
    let again = |cached| Standing { sequences: vec![place(cached, 150)], forks: 0, again: 0 };
    assert_eq!(plan(&[again(100)], budget(100), |_, max| max), Decision::Step(vec![share(0, 0, 16)]), "few at a time");
    assert_eq!(plan(&[again(140)], budget(100), |_, max| max), Decision::Step(vec![share(0, 0, 9)]));
    let last = Standing { sequences: vec![place(149, 150)], forks: 0, again: 0 };
    assert_eq!(plan(&[last], budget(100), |_, max| max), Decision::Step(vec![row(0, 0)]));
}

#[test]
fn prompts_with_little_left_pass_those_with_much() {
    let running = [prompt(0, 16000, 1), prompt(100, 900, 1), prompt(0, 100, 1), prompt(500, 750, 1)];
    let step = plan(&running, budget(1000), |_, max| max);
    assert_eq!(step, Decision::Step(vec![share(0, 0, 256), share(2, 0, 100), share(3, 0, 156)]));
    // What the others leave of their half the oldest takes.
    let step = plan(&running[..1], budget(1000), |_, max| max);
    assert_eq!(step, Decision::Step(vec![share(0, 0, 512)]));
    let step = plan(&[prompt(0, 16000, 1), prompt(0, 100, 1)], budget(1000), |_, max| max);
    assert_eq!(step, Decision::Step(vec![share(0, 0, 412), share(1, 0, 100)]));
    // Those that are cut at 64 tokens begin them where there is work for 16.
    let step =
        plan(&[answer(&[9]), running[0].clone(), running[2].clone(), running[3].clone()], budget(1000), |_, max| {
            max.next_multiple_of(64)
        });
    assert_eq!(step, Decision::Step(vec![row(0, 0), part(1, 64, 16), part(2, 64, 16)]));
}

#[test]
fn a_prompts_last_token_is_no_row_of_an_answer() {
    let step = plan(&[answer(&[9]), prompt(99, 100, 1)], budget(1000), |_, max| max);
    assert_eq!(step, Decision::Step(vec![row(0, 0), share(1, 0, 1)]));
    let again = Standing { sequences: vec![place(100, 102)], forks: 0, again: 0 };
    assert_eq!((again.rows(), answer(&[9, 10]).rows(), prompt(99, 100, 2).rows()), (0, 2, 0));
    assert_eq!(plan(&[again], budget(100), |_, max| max), Decision::Step(vec![share(0, 0, 1)]));
}

#[test]
fn the_youngest_makes_room_and_nobody_else_waits_for_it() {
    // A full block wants another one.
    assert_eq!(plan(&[answer(&[64]), answer(&[10])], budget(0), |_, max| max), Decision::Preempt);
    assert_eq!(plan(&[answer(&[10]), answer(&[64])], budget(0), |_, max| max), Decision::Preempt);
    // The youngest one's prompt waits while others get on; an older one's does not.
    let step = plan(&[answer(&[10]), prompt(64, 200, 1)], budget(0), |_, max| max);
    assert_eq!(step, Decision::Step(vec![row(0, 0)]));
    assert_eq!(plan(&[prompt(64, 200, 1), answer(&[10])], budget(0), |_, max| max), Decision::Preempt);
    // The last chunk needs room for the other choices' copies of the started block.
    assert_eq!(plan(&[prompt(64, 70, 3)], budget(2), |_, max| max), Decision::Preempt);
    assert_eq!(plan(&[prompt(64, 70, 3)], budget(3), |_, max| max), Decision::Step(vec![share(0, 0, 6)]));
}

#[test]
fn choices_share_the_whole_blocks_of_their_prompt() {
    assert_eq!((wanted(100, []), wanted(100, [0]), wanted(128, [0])), (2, 2, 2));
    assert_eq!(wanted(100, [0; 4]), 1 + 4);
    assert_eq!(wanted(128, [0; 4]), 2);
    assert_eq!(wanted(100, [500, 20]), 1 + 9 + 1);
}

#[test]
fn a_request_starts_when_prompts_and_next_blocks_have_room() {
    assert!(admits(&[], 0, 1, (80, 2)), "alone it has all there is");
    let running = [prompt(0, 640, 1), answer(&[10])];
    // Ten blocks of the prompt still to come, one more for each, five and two for the new one.
    assert!(admits(&running, 19, 8, (5, 1)));
    assert!(!admits(&running, 18, 8, (5, 1)));
    assert!(!admits(&running, 1000, 2, (5, 1)));
}

/// A request of a simulated history.
#[derive(Debug, Clone)]
struct Simulated {
    priority: i64,
    arrival: usize,
    prompt: usize,
    answer: usize,
    /// The method takes prompts by so many tokens.
    chunk: usize,
    /// Tokens cached of the prompt's sequence, while it goes in.
    prefilled: Option<usize>,
    /// What comes after them.
    underway: Underway,
    /// Of each choice: tokens generated, tokens cached.
    choices_at: Vec<(usize, usize)>,
}

impl Simulated {
    fn standing(&self) -> Standing {
        match self.prefilled {
            Some(cached) => {
                let again = self.live().map(|(tokens, _)| blocks(self.prompt + tokens) - blocks(self.prompt)).sum();
                let place = Place { underway: self.underway, ..place(cached, self.prompt) };
                Standing { sequences: vec![place], forks: self.live().count(), again }
            }
            None => Standing {
                sequences: self.live().map(|&(generated, cached)| place(cached, self.prompt + generated)).collect(),
                forks: 0,
                again: 0,
            },
        }
    }

    fn order(&self) -> (i64, usize) {
        (self.priority, self.arrival)
    }

    fn live(&self) -> impl Iterator<Item = &(usize, usize)> {
        self.choices_at.iter().filter(|(generated, _)| *generated < self.answer)
    }

    fn held(&self) -> usize {
        let held = |tokens: usize| tokens.div_ceil(BLOCK_TOKENS);
        match self.prefilled {
            Some(cached) => held(cached + self.underway.tokens),
            // Whole blocks of the prompt are shared.
            None if self.live().count() == 0 => 0,
            None => {
                let shared = self.prompt / BLOCK_TOKENS;
                shared + self.live().map(|(_, cached)| held(*cached) - shared).sum::<usize>()
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Happens {
    Arrives { prompt: usize, answer: usize, choices: usize, chunk: usize, priority: i64 },
    Leaves(usize),
    Steps(usize),
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        3 => (1usize..900, 1usize..200, 1usize..4, prop_oneof![Just(1usize), Just(64), Just(2000)], -3i64..=3)
            .prop_map(|(prompt, answer, choices, chunk, priority)| {
                Happens::Arrives { prompt, answer, choices, chunk, priority }
            }),
        1 => (0usize..20).prop_map(Happens::Leaves),
        3 => (1usize..60).prop_map(Happens::Steps),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Blocks never run out under a step, no request is lost, and all that stay come to their end: in every history.
    #[test]
    fn every_history_ends_well(
        blocks in 20usize..80,
        (most, priorities) in (1usize..12, any::<bool>()),
        history in prop::collection::vec(happens(), 1..40),
    ) {
        let mut waiting: VecDeque<Simulated> = VecDeque::new();
        let mut running: Vec<Simulated> = Vec::new();
        let mut arrivals = 0;
        let (mut left, mut ended) = (0, 0);
        let mut steps = 0;
        let limit = 200_000;
        for event in history.into_iter().chain([Happens::Steps(limit)]) {
            let count = match event {
                Happens::Arrives { prompt, answer, choices, chunk, priority } => {
                    // What can never fit is not taken.
                    if (prompt + answer).div_ceil(BLOCK_TOKENS) * choices <= blocks {
                        let choices_at = vec![(0, 0); choices];
                        let (arrival, prefilled, underway) = (arrivals, Some(0), Underway::default());
                        let priority = if priorities { priority } else { 0 };
                        let new =
                            Simulated { priority, arrival, prompt, answer, chunk, prefilled, underway, choices_at };
                        let place = waiting.partition_point(|run| run.order() < new.order());
                        waiting.insert(place, new);
                        arrivals += 1;
                    }
                    0
                }
                Happens::Leaves(which) => {
                    if which < running.len() {
                        running.remove(which);
                        left += 1;
                    } else if waiting.remove(which - running.len()).is_some() {
                        left += 1;
                    }
                    0
                }
                Happens::Steps(count) => count,
            };
            for _ in 0..count {
                let free = |running: &[Simulated]| blocks - running.iter().map(Simulated::held).sum::<usize>();
                while let Some(next) = waiting.front() {
                    let standing: Vec<Standing> = running.iter().map(Simulated::standing).collect();
                    let known = wanted(next.prompt, next.live().map(|(generated, _)| *generated));
                    if !admits(&standing, free(&running), most, (known, next.live().count())) {
                        break;
                    }
                    let Some(next) = waiting.pop_front() else { break };
                    running.insert(running.partition_point(|run| run.order() < next.order()), next);
                }
                if running.is_empty() {
                    break;
                }
                steps += 1;
                prop_assert!(steps < limit, "it does not end");
                let shares = loop {
                    let standing: Vec<Standing> = running.iter().map(Simulated::standing).collect();
                    let budget = Budget { alone: 256, beside: 48, blocks: free(&running) };
                    let cut = |request: usize, max: usize| {
                        let run = &running[request];
                        match run.underway.tokens {
                            0 => max.max(run.chunk).min(run.prompt - run.prefilled.unwrap_or(0)),
                            tokens => tokens,
                        }
                    };
                    match plan(&standing, budget, cut) {
                        Decision::Step(shares) => break shares,
                        Decision::Preempt => {
                            prop_assert!(running.len() > 1, "a request that fits alone is never sent away alone");
                            let mut run = running.pop().expect("it runs");
                            (run.prefilled, run.underway) = (Some(0), Underway::default());
                            run.choices_at.iter_mut().for_each(|(_, cached)| *cached = 0);
                            waiting.push_front(run);
                        }
                    }
                };
                prop_assert!(!shares.is_empty(), "a step that does nothing");
                let prompts: Vec<&Share> = shares.iter().filter(|share| !share.generates).collect();
                let most = if prompts.len() < shares.len() { 48 } else { 256 };
                let work: usize = prompts.iter().map(|share| share.effort).sum();
                prop_assert!(work <= most, "a step does {work} tokens' work");
                let oldest = running[0].order();
                prop_assert!(running.iter().all(|run| run.order() >= oldest), "the first of those that run");
                // A more urgent one may lack room.
                let first = || running.iter().chain(&waiting).all(|run| run.order() >= oldest);
                prop_assert!(priorities || first(), "the oldest runs");
                let underway = running.iter().filter(|run| run.underway.tokens > 0).count();
                prop_assert!(underway <= 2, "{underway} chunks are underway");
                // Places are those before the step, which may be a choice's last.
                let live = |run: &Simulated| -> Vec<usize> {
                    let places = run.choices_at.iter().enumerate();
                    places.filter(|(_, (generated, _))| *generated < run.answer).map(|(place, _)| place).collect()
                };
                let places: Vec<Vec<usize>> = running.iter().map(live).collect();
                for share in shares {
                    let run = &mut running[share.request];
                    if let Some(cached) = run.prefilled {
                        let done = run.underway.done + share.effort;
                        prop_assert!(share.effort > 0 && done <= share.tokens, "work that there is");
                        if done < share.tokens {
                            run.underway = Underway { tokens: share.tokens, done };
                            continue;
                        }
                        run.underway = Underway::default();
                        run.prefilled = Some(cached + share.tokens);
                        if cached + share.tokens == run.prompt {
                            run.prefilled = None;
                            for (generated, cached) in &mut run.choices_at {
                                *generated = (*generated).max(1);
                                *cached = run.prompt;
                            }
                        }
                    } else {
                        let (generated, cached) = &mut run.choices_at[places[share.request][share.sequence]];
                        *cached += share.tokens;
                        prop_assert!(*cached <= run.prompt + *generated);
                        // The row of the last known token gives the next one.
                        *generated += usize::from(*cached == run.prompt + *generated);
                    }
                }
                let before = running.len();
                running.retain(|run| run.prefilled.is_some() || run.live().count() > 0);
                ended += before - running.len();
                prop_assert!(running.iter().map(Simulated::held).sum::<usize>() <= blocks, "blocks ran out");
                prop_assert_eq!(left + ended + running.len() + waiting.len(), arrivals, "a request was lost");
            }
        }
        prop_assert_eq!(left + ended, arrivals, "all come to an end");
    }
}

/// Prompts of so many tokens that arrive before the steps given, in that order; the steps that each was in after, counted
/// from its arrival. Steps do the work of `most` prompt tokens; every other prompt is cut nowhere, if `uncut`.
fn prompt_steps(arrivals: &[(usize, usize)], most: usize, uncut: bool) -> Vec<usize> {
    let mut done = vec![0; arrivals.len()];
    let mut running: Vec<(usize, Standing)> = Vec::new();
    let mut coming = arrivals.iter().copied().enumerate().peekable();
    for step in 0.. {
        while let Some((number, (_, tokens))) = coming.next_if(|(_, (arrival, _))| *arrival <= step) {
            running.push((number, prompt(0, tokens, 1)));
        }
        let standing: Vec<Standing> = running.iter().map(|(_, standing)| standing.clone()).collect();
        let budget = Budget { alone: most, beside: 0, blocks: usize::MAX };
        let cut = |request: usize, max: usize| {
            let (number, standing) = &running[request];
            if uncut && number % 2 == 0 { standing.sequences[0].left() } else { max }
        };
        let Decision::Step(shares) = plan(&standing, budget, cut) else { panic!("there is room for all") };
        assert!(shares.iter().map(|share| share.effort).sum::<usize>() <= most);
        for share in shares {
            let place = &mut running[share.request].1.sequences[0];
            place.underway = Underway { tokens: share.tokens, done: place.underway.done + share.effort };
            if place.underway.done == share.tokens {
                (place.cached, place.underway) = (place.cached + share.tokens, Underway::default());
            }
        }
        running.retain(|(number, standing)| {
            let in_prompt = standing.sequences[0].left() > 0;
            if !in_prompt {
                done[*number] = step + 1 - arrivals[*number].0;
            }
            in_prompt
        });
        if running.is_empty() && coming.peek().is_none() {
            break;
        }
    }
    done
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// A prompt's wait is bounded by those before it, whatever comes after.
    #[test]
    fn no_prompt_starves(
        mut arrivals in prop::collection::vec((0usize..40, prop_oneof![1usize..60, 1usize..3000]), 1..30),
        most in 1usize..300,
        uncut in any::<bool>(),
    ) {
        arrivals.sort_by_key(|(step, _)| *step);
        let half = most.div_ceil(2);
        let mut bound = 0;
        for (&(_, tokens), steps) in arrivals.iter().zip(prompt_steps(&arrivals, most, uncut)) {
            bound += tokens.div_ceil(half);
            prop_assert!(steps <= bound, "{steps} steps for {tokens} tokens, bound {bound}");
        }
    }

    /// Behind a long prompt the others wait for those with less left than they have, and not for it.
    #[test]
    fn a_short_prompt_waits_for_shorter_ones_alone(
        shorts in prop::collection::vec(1usize..1000, 1..20),
        most in 2usize..300,
        uncut in any::<bool>(),
    ) {
        let arrivals: Vec<_> = std::iter::once(16384).chain(shorts).map(|tokens| (0, tokens)).collect();
        let steps = prompt_steps(&arrivals, most, uncut);
        for (i, &(_, tokens)) in arrivals.iter().enumerate().skip(1) {
            let before = |(j, (_, other)): &(usize, &(usize, usize))| *other < tokens || *other == tokens && *j <= i;
            let sum: usize = arrivals.iter().enumerate().filter(before).map(|(_, (_, tokens))| tokens).sum();
            prop_assert!(steps[i] <= sum.div_ceil(most / 2), "{} steps for {tokens} after {sum}", steps[i]);
        }
    }
}
