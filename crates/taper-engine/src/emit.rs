//! One choice's way from tokens to final text: decoding, stop rules, log probabilities, the end.

use crate::request::{Delta, Finish, Request, StopRules, TokenLogprob, TokenRecord};
use crate::stop::StopMatcher;
use crate::text::{Text, TokenStream};
use std::collections::VecDeque;

/// The text side of one choice.
pub(crate) struct Output {
    choice: usize,
    stream: Box<dyn TokenStream>,
    matcher: StopMatcher,
    rules: StopRules,
    eos: Vec<u32>,
    max_tokens: usize,
    logprobs: Option<usize>,
    /// Tokens whose text is not passed on yet.
    pending: VecDeque<Pending>,
    /// Bytes decoded, and how many characters they are.
    decoded: usize,
    characters: usize,
    /// Bytes passed on.
    emitted: usize,
    generated: usize,
}

/// A token just drawn, and its and the most probable ones' log probabilities where they are wanted.
pub(crate) struct Drawn {
    pub(crate) token: u32,
    pub(crate) logprobs: Option<(TokenLogprob, Vec<TokenLogprob>)>,
    /// Whether the request's grammar has nothing after it.
    pub(crate) last: bool,
}

/// A token, and the bytes of the choice's text that are its own.
struct Pending {
    record: TokenRecord,
    start: usize,
    end: usize,
}

impl Output {
    pub(crate) fn new(choice: usize, text: &dyn Text, request: &Request, max_tokens: usize) -> Self {
        Self {
            choice,
            stream: text.stream(request.continues, request.special),
            matcher: StopMatcher::new(&request.stop.strings),
            rules: request.stop.clone(),
            eos: text.eos().to_vec(),
            max_tokens,
            logprobs: request.logprobs,
            pending: VecDeque::new(),
            decoded: 0,
            characters: 0,
            emitted: 0,
            generated: 0,
        }
    }

    /// Tokens generated.
    pub(crate) fn generated(&self) -> usize {
        self.generated
    }

    /// Tokens that may still come.
    pub(crate) fn left(&self) -> usize {
        self.max_tokens.saturating_sub(self.generated)
    }

    /// How many of the most probable tokens go with each token's log probability, where these are wanted.
    pub(crate) fn logprobs(&self) -> Option<usize> {
        self.logprobs
    }

    /// Takes the token just drawn; returns what became final, if anything did.
    pub(crate) fn push(&mut self, Drawn { token, logprobs, last }: Drawn) -> Option<Delta> {
        self.generated += 1;
        let (mut ends, shown) = (self.stop_token(token), self.rules.shown);
        if let Some(finish) = ends.take_if(|finish| !shown || *finish == Finish::Eos) {
            return Some(self.end(String::new(), finish));
        }
        let piece = self.stream.push(token);
        if let Some((chosen, top)) = logprobs {
            let record = TokenRecord { chosen, top, text_offset: self.characters };
            self.pending.push_back(Pending { record, start: self.decoded, end: self.decoded + piece.len() });
        }
        self.decoded += piece.len();
        self.characters += piece.chars().count();
        let (text, hit) = self.search(&piece);
        if let Some(stop) = hit {
            return Some(self.cut(text, stop));
        }
        if let Some(finish) = ends {
            return Some(self.end(text, finish));
        }
        if last {
            return Some(self.end(text, Finish::Whole));
        }
        if self.generated >= self.max_tokens {
            return Some(self.end(text, Finish::Length));
        }
        self.emitted += text.len();
        let tokens = self.ready();
        (!text.is_empty() || !tokens.is_empty()).then_some(Delta { choice: self.choice, text, tokens, finish: None })
    }

    /// What of the text is safe to pass on, and the stop string that it ends, which none does before `min_tokens` have
    /// passed; what begins before and ends behind them is one, as in vLLM.
    fn search(&mut self, text: &str) -> (String, Option<String>) {
        match self.generated <= self.rules.min_tokens {
            true => (self.matcher.push_early(text), None),
            false => self.matcher.push(text),
        }
    }

    fn stop_token(&self, token: u32) -> Option<Finish> {
        if self.rules.tokens.contains(&token) {
            return Some(Finish::StopToken(token));
        }
        (!self.rules.ignore_eos && self.eos.contains(&token)).then_some(Finish::Eos)
    }

    /// Tokens whose whole text was passed on.
    fn ready(&mut self) -> Vec<TokenRecord> {
        let mut out = Vec::new();
        while self.pending.front().is_some_and(|token| token.end <= self.emitted) {
            out.extend(self.pending.pop_front().map(|token| token.record));
        }
        out
    }

    /// Ends without a stop string: what was held back is text after all.
    fn end(&mut self, mut text: String, finish: Finish) -> Delta {
        // A character that did not come whole is none.
        let tail = self.stream.finish();
        let (more, hit) = self.search(tail.trim_end_matches(char::REPLACEMENT_CHARACTER));
        text.push_str(&more);
        if let Some(stop) = hit {
            return self.cut(text, stop);
        }
        text.push_str(&self.matcher.finish());
        Delta {
            choice: self.choice,
            text,
            tokens: self.pending.drain(..).map(|token| token.record).collect(),
            finish: Some(finish),
        }
    }

    /// Ends at a stop string: tokens that begin at or after it are not shown, or behind it where it is shown itself.
    fn cut(&mut self, mut text: String, stop: String) -> Delta {
        if self.rules.shown {
            text.push_str(&stop);
        }
        self.emitted += text.len();
        let shown = self.pending.drain(..).filter(|token| token.start < self.emitted);
        let tokens = shown.map(|token| token.record).collect();
        Delta { choice: self.choice, text, tokens, finish: Some(Finish::StopString(stop)) }
    }
}
