//! Finds the calls of functions in an answer as it comes.

use super::object::Object;
use taper_engine::CallFormat;

/// What ends a call that a tag began.
const CLOSE: &str = "</tool_call>";

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Said {
    /// Text for the reader.
    Text(String),
    /// A call begins.
    Call { name: String },
    /// More of the latest call's arguments, as JSON.
    Arguments(String),
}

/// Takes one choice's text piece by piece.
#[derive(Debug)]
pub(crate) struct Parser {
    format: CallFormat,
    names: Vec<String>,
    /// Functions that alone may be called, if not all of them: other calls are dropped.
    only: Option<Vec<String>>,
    /// Whether the answer is calls and nothing else: what is none is dropped.
    pub(super) forced: bool,
    /// Whether the latest call is one of those.
    skips: bool,
    /// Calls that may still begin; what more there are is dropped.
    left: usize,
    /// Calls so far.
    pub(crate) calls: usize,
    /// Text that is not passed on yet.
    held: String,
    state: State,
    /// Whether any text was passed on.
    spoke: bool,
    /// Whether a call was the latest thing to be said.
    called: bool,
}

#[derive(Debug)]
enum State {
    /// Text, in which a call may be announced.
    Text,
    /// Right after a mark, or after a call that more may follow.
    Between { marked: bool },
    /// A call's object, at the start of what is held.
    Object { object: Object, told: bool, sent: usize },
    /// A call's arguments alone, after its name.
    Arguments { object: Object, sent: usize },
}

impl Parser {
    /// `most` calls are told of.
    pub(super) fn new(
        format: CallFormat,
        names: Vec<String>,
        only: Option<Vec<String>>,
        most: usize,
        forced: bool,
    ) -> Self {
        Self {
            format,
            names,
            only,
            forced,
            skips: false,
            left: most,
            calls: 0,
            held: String::new(),
            state: State::Text,
            spoke: false,
            called: false,
        }
    }

    /// Takes more text; returns what became certain.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Said> {
        self.held.push_str(text);
        let mut said = Vec::new();
        while self.advance(&mut said) {}
        said
    }

    /// The rest at the answer's end: what looked like the beginning of a call and is none is text, except right after a call, to
    /// which another one was about to be added.
    pub(crate) fn finish(&mut self) -> Vec<Said> {
        let mut said = Vec::new();
        let begun = match &self.state {
            _ if self.called => true,
            State::Object { told, .. } => *told,
            State::Arguments { .. } => true,
            State::Between { .. } => CLOSE.starts_with(self.held.trim()),
            State::Text => false,
        };
        let rest = std::mem::take(&mut self.held);
        if !begun {
            self.text(rest, &mut said);
        }
        said
    }

    fn mark(&self) -> &'static str {
        match self.format {
            CallFormat::Tagged => "<tool_call>",
            CallFormat::Llama => "<|python_tag|>",
            CallFormat::Mistral | CallFormat::MistralNamed => "[TOOL_CALLS]",
        }
    }

    /// Passes text on; white space after a call is nothing to read.
    fn text(&mut self, text: String, said: &mut Vec<Said>) {
        if self.forced || text.is_empty() || self.called && text.trim().is_empty() {
            return;
        }
        self.called = false;
        self.spoke |= !text.trim().is_empty();
        said.push(Said::Text(text));
    }

    /// One step; whether there may be another.
    fn advance(&mut self, said: &mut Vec<Said>) -> bool {
        match self.state {
            State::Text => self.in_text(said),
            State::Between { marked } => self.between(marked, said),
            State::Object { .. } => self.in_object(said),
            State::Arguments { .. } => self.in_arguments(said),
        }
    }

    fn in_text(&mut self, said: &mut Vec<Said>) -> bool {
        let start = self.held.trim_start();
        if self.format == CallFormat::Llama && !self.spoke {
            // A bare object in place of an answer.
            if start.is_empty() {
                return false;
            }
            if start.starts_with('{') {
                self.state = State::Between { marked: false };
                return true;
            }
        }
        let mark = self.mark();
        if let Some(at) = self.held.find(mark) {
            let before = self.held[..at].to_string();
            self.held.drain(..at + mark.len());
            self.text(before, said);
            self.state = State::Between { marked: true };
            return true;
        }
        // What may be the beginning of a mark waits, and after a call white space does.
        let cut = self.held.len() - ending(&self.held, mark);
        if self.called && self.held[..cut].trim().is_empty() {
            return false;
        }
        let rest = self.held.split_off(cut);
        let text = std::mem::replace(&mut self.held, rest);
        self.text(text, said);
        false
    }

    fn between(&mut self, marked: bool, said: &mut Vec<Said>) -> bool {
        // What stands around objects.
        let around = |c: char| c.is_whitespace() || matches!(c, ',' | ';' | '[');
        let skipped = self.held.len() - self.held.trim_start_matches(around).len();
        self.held.drain(..skipped);
        let Some(first) = self.held.chars().next() else { return false };
        match (first, self.format) {
            ('{', _) => {
                self.state = State::Object { object: Object::default(), told: false, sent: 0 };
                true
            }
            (']', format) => {
                self.held.drain(..1);
                // A mark of its own ends what one began.
                self.state = if format == CallFormat::Tagged { State::Between { marked: false } } else { State::Text };
                true
            }
            ('<', CallFormat::Tagged) if self.held.starts_with(CLOSE) => {
                self.held.drain(..CLOSE.len());
                self.state = State::Text;
                true
            }
            ('<', CallFormat::Tagged) if CLOSE.starts_with(self.held.as_str()) => false,
            (_, CallFormat::Mistral | CallFormat::MistralNamed) if marked => {
                // A name, then maybe a mark, then arguments.
                let Some(brace) = self.held.find('{') else { return false };
                let before = self.held[..brace].trim_end();
                let before = before.strip_suffix("[ARGS]").unwrap_or(before);
                let name = before.split("[CALL_ID]").next().unwrap_or_default().trim().to_string();
                self.held.drain(..brace);
                self.begin(name, said);
                self.state = State::Arguments { object: Object::default(), sent: 0 };
                true
            }
            _ => {
                self.state = State::Text;
                true
            }
        }
    }

    fn begin(&mut self, name: String, said: &mut Vec<Said>) {
        self.called = true;
        self.skips = self.left == 0 || self.only.as_ref().is_some_and(|only| !only.contains(&name));
        if !self.skips {
            self.calls += 1;
            said.push(Said::Call { name });
        }
    }

    /// The latest call is whole.
    fn over(&mut self) {
        self.left -= usize::from(!self.skips);
    }

    /// Whether the text stops within a call that was told of, before its arguments' end: what ends the object around them a model
    /// may leave out.
    pub(crate) fn within(&self) -> bool {
        let open = match &self.state {
            State::Object { object, told, .. } => *told && object.arguments.is_none_or(|(_, end)| end.is_none()),
            State::Arguments { .. } => true,
            State::Text | State::Between { .. } => false,
        };
        open && !self.skips
    }

    /// Passes arguments on, unless the call is dropped.
    fn arguments(&self, text: &str, said: &mut Vec<Said>) {
        if !self.skips && !text.is_empty() {
            said.push(Said::Arguments(text.to_string()));
        }
    }

    fn in_object(&mut self, said: &mut Vec<Said>) -> bool {
        let State::Object { mut object, mut told, mut sent } =
            std::mem::replace(&mut self.state, State::Between { marked: false })
        else {
            return false;
        };
        let closed = self.read(&mut object);
        // A bare object may be anything; one after a mark is a call.
        let known = |name: &String| self.format != CallFormat::Llama || self.names.contains(name);
        let name = object.name.clone().filter(known);
        if let (Some(name), Some((start, end)), false) = (&name, object.arguments, told) {
            // Arguments that are no object are looked at once they are whole: a string holds them.
            if self.held[start..].starts_with('{') || end.is_some() {
                self.begin(name.clone(), said);
                told = true;
            }
        }
        if let (true, Some((start, end))) = (told, object.arguments) {
            let all = &self.held[start..end.unwrap_or(object.at)];
            match serde_json::from_str::<Option<String>>(all) {
                Ok(inner) => self.arguments(if sent == 0 { inner.as_deref().unwrap_or("{}") } else { "" }, said),
                Err(_) => self.arguments(&all[sent.min(all.len())..], said),
            }
            sent = all.len();
        }
        let Some(end) = object.end.or(closed.then_some(object.at)) else {
            self.state = State::Object { object, told, sent };
            return false;
        };
        let whole: String = self.held.drain(..end).collect();
        match (told, name) {
            (true, _) => self.over(),
            // A call of a function that takes nothing.
            (false, Some(name)) if object.arguments.is_none() && (self.format != CallFormat::Llama) => {
                self.begin(name, said);
                self.arguments("{}", said);
                self.over();
            }
            _ => {
                self.text(whole, said);
                self.state = State::Text;
            }
        }
        true
    }

    /// Looks at what is new of an object; whether it was left open, and the mark that ends its call is there all the same.
    fn read(&self, object: &mut Object) -> bool {
        if self.format != CallFormat::Tagged {
            object.read(&self.held);
            return false;
        }
        loop {
            let from = object.at;
            let Some(at) = self.held[from..].find(CLOSE).map(|at| from + at) else {
                let kept = ending(&self.held[from..], CLOSE);
                object.read(&self.held[..self.held.len() - kept]);
                return false;
            };
            object.read(&self.held[..at]);
            if object.end.is_some() || !object.in_string {
                return object.end.is_none();
            }
            // A string may say it.
            object.read(&self.held[..at + 1]);
        }
    }

    fn in_arguments(&mut self, said: &mut Vec<Said>) -> bool {
        let State::Arguments { mut object, sent } = std::mem::replace(&mut self.state, State::Text) else {
            return false;
        };
        object.read(&self.held);
        let end = object.end.unwrap_or(self.held.len());
        self.arguments(&self.held[sent..end], said);
        if object.end.is_none() {
            self.state = State::Arguments { object, sent: end };
            return false;
        }
        self.held.drain(..end);
        self.over();
        true
    }
}

/// Bytes at a text's end that may be the beginning of a mark.
fn ending(text: &str, mark: &str) -> usize {
    let longest = text.len().min(mark.len() - 1);
    (1..=longest).rev().find(|n| text.ends_with(&mark[..*n])).unwrap_or(0)
}

#[cfg(test)]
#[path = "parser_tests.rs"]
mod tests;
