//! The default model against transformers reading the same GGUF file. Fetches the model on first use.

mod common;

use common::{PlainAttention, load};
use serde::Deserialize;
use std::time::Instant;
use taper_model::{Model, Progress, ResolvedModel, TextStart, Tokenizer, default_cache, resolve};

/// A smaller gap between the best two logits than this is a tie, which rounding may break either way.
const TIE: f32 = 1e-3;

#[derive(Deserialize)]
struct Case {
    prompt: String,
    tokens: Vec<u32>,
    greedy: Vec<u32>,
    gaps: Vec<f32>,
}

fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string(common::golden().join("smollm2-greedy.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn default_model() -> ResolvedModel {
    resolve("default", &default_cache(), Progress::Hidden).unwrap()
}

/// Continues all prompts side by side, one batch a step, and returns each step's best tokens by prompt. The reference's
/// token goes on, so that one tie does not spoil what follows.
fn continue_all(model: &Model, cases: &[Case]) -> Vec<Vec<u32>> {
    let mut attention = PlainAttention::new(model.attention_shape(), cases.len());
    let mut best = vec![Vec::new(); cases.len()];
    for step in 0..cases[0].greedy.len() {
        let (mut tokens, mut positions, mut last) = (Vec::new(), Vec::new(), Vec::new());
        attention.sequence_of.clear();
        for (sequence, case) in cases.iter().enumerate() {
            let (fed, first) = match step {
                0 => (&case.tokens[..], 0),
                _ => (&case.greedy[step - 1..step], case.tokens.len() + step - 1),
            };
            tokens.extend(fed);
            positions.extend((first..first + fed.len()).map(|p| p as u32));
            attention.sequence_of.extend(fed.iter().map(|_| sequence));
            last.push(tokens.len() as u32 - 1);
        }
        let hidden = model.forward(&tokens, &positions, &mut attention).unwrap();
        let last = candle_core::Tensor::new(last, model.device()).unwrap();
        let logits = model.logits(&hidden.index_select(&last, 0).unwrap()).unwrap();
        let tokens: Vec<u32> = logits.argmax(1).unwrap().to_vec1().unwrap();
        for (best, token) in best.iter_mut().zip(tokens) {
            best.push(token);
        }
    }
    best
}

#[test]
fn greedy_tokens_equal_those_of_transformers() {
    let cases = cases();
    assert_eq!(cases.len(), 10);
    let model = load(&default_model(), true);
    let mut ties = 0;
    for (case, best) in cases.iter().zip(continue_all(&model, &cases)) {
        assert_eq!((case.greedy.len(), best.len()), (64, 64));
        for (i, token) in best.into_iter().enumerate() {
            if case.gaps[i] > TIE {
                assert_eq!(token, case.greedy[i], "{:?}, token {i}, gap {}", case.prompt, case.gaps[i]);
            } else {
                ties += 1;
            }
        }
    }
    assert!(ties < 10, "{ties} ties leave too little to compare");
}

/// Quantised products round activations to eight bits, so near ties may fall the other way; most tokens may not. All
/// prompts and their continuations run in one step here, as a prefill.
#[test]
fn the_quantised_model_mostly_agrees() {
    let cases = cases();
    let model = load(&default_model(), false);
    let mut attention = PlainAttention::new(model.attention_shape(), cases.len());
    let (mut tokens, mut positions, mut expected) = (Vec::new(), Vec::new(), Vec::new());
    for (sequence, case) in cases.iter().enumerate() {
        let text: Vec<u32> = case.tokens.iter().chain(&case.greedy[..63]).copied().collect();
        positions.extend(0..text.len() as u32);
        attention.sequence_of.extend(text.iter().map(|_| sequence));
        let first = (tokens.len() + case.tokens.len() - 1) as u32;
        expected.extend((first..).zip(case.greedy.iter().copied()));
        tokens.extend(text);
    }
    let hidden = model.forward(&tokens, &positions, &mut attention).unwrap();
    let rows: Vec<u32> = expected.iter().map(|(row, _)| *row).collect();
    let rows = candle_core::Tensor::new(rows, model.device()).unwrap();
    let logits = model.logits(&hidden.index_select(&rows, 0).unwrap()).unwrap();
    let best: Vec<u32> = logits.argmax(1).unwrap().to_vec1().unwrap();
    let agreeing = expected.iter().zip(&best).filter(|((_, token), best)| token == *best).count();
    assert!(agreeing >= 608, "{agreeing} of 640 tokens agree");
}

#[test]
fn the_tokenizer_rebuilt_from_the_file_encodes_as_transformers_does() {
    let tokenizer = Tokenizer::load(&default_model()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 49152);
    assert_eq!(tokenizer.eos_tokens(), [0, 2], "<|endoftext|> too, by its name");
    for case in cases() {
        assert_eq!(tokenizer.encode(&case.prompt, true).unwrap(), case.tokens, "{:?}", case.prompt);
        assert_eq!(tokenizer.decode(&case.tokens, false), case.prompt);
        let mut stream = tokenizer.stream(TextStart::Continued, true);
        let streamed: String = case.greedy.iter().map(|t| stream.push(*t)).collect::<String>() + &stream.finish();
        assert_eq!(streamed, tokenizer.decode(&case.greedy, true));
        assert!(!streamed.contains("<|im_end|>"));
    }
    // Digits stand alone in SmolLM2's pre-tokenizer.
    assert_eq!(tokenizer.encode("2018", false).unwrap().len(), 4);
}

#[test]
fn a_second_start_fetches_nothing() {
    let first = default_model();
    let start = Instant::now();
    assert_eq!(default_model(), first);
    assert!(start.elapsed().as_secs() < 2, "{:?}", start.elapsed());
}
