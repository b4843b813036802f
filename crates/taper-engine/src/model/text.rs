//! A model's tokenizer and chat template.

use crate::calls::{self, CallFormat};
use crate::text::{Message, Text, TextError, TokenStream};
use serde_json::{Map, Value};
use std::sync::{Mutex, PoisonError};
use taper_model::{ChatTemplate, ModelError, StreamDecoder, TextStart, Tokenizer};

/// Bytes that a token of plain text hardly has: a text with more of them for each token of the context is probed before it is
/// tokenized whole.
const TOKEN_BYTES: usize = 8;

/// Bytes above which a text waits for other large ones: a megabyte takes a hundred of memory while it is tokenized.
const LARGE: usize = 1 << 20;

/// Contexts whose tokens are counted for who wants to know how many there are.
const COUNTED: usize = 16;

/// What is said of messages to a base model.
const NO_TEMPLATE: &str =
    "the model has no chat template, which the server's --chat-template FILE may give it; a text completion needs none";

/// A model's tokenizer and template.
pub struct ModelText {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    /// Tokens of the longest prompt.
    context: usize,
    /// Held while a text of more than [`LARGE`] bytes is tokenized.
    large: Mutex<()>,
}

impl ModelText {
    /// Of a model whose longest prompt has so many tokens.
    pub fn new(tokenizer: Tokenizer, template: Option<ChatTemplate>, context: usize) -> Self {
        Self { tokenizer, template, context, large: Mutex::default() }
    }

    /// The tokens of a text. One of far more than `most` is not read to its end, which takes a core seconds, and a hundred
    /// megabytes of memory, for each of its own.
    fn tokens(&self, text: &str, special: bool, most: usize) -> Result<Vec<u32>, TextError> {
        let _alone = (text.len() > LARGE).then(|| self.large.lock().unwrap_or_else(PoisonError::into_inner));
        let encode = |text: &str| self.tokenizer.encode(text, special).map_err(failed);
        let piece = most.saturating_mul(TOKEN_BYTES);
        if text.len() > piece {
            let (mut rest, mut tokens) = (text, 0);
            while !rest.is_empty() {
                let end = (piece..rest.len()).find(|end| rest.is_char_boundary(*end)).unwrap_or(rest.len());
                let (first, after) = rest.split_at(end);
                // A cut may make a few more of them; half as many again it does not.
                tokens += encode(first)?.len();
                if tokens > most + most / 2 + 64 {
                    let bytes = text.len();
                    let times =
                        if most > self.context { format!(" than {COUNTED} times as many") } else { String::new() };
                    // Begun as `SubmitError::Context` is.
                    let message = format!(
                        "This model's maximum context length is {} tokens; a text of {bytes} bytes has far more{times}",
                        self.context
                    );
                    return Err(TextError::Refused(message));
                }
                rest = after;
            }
        }
        encode(text)
    }
}

impl ModelText {
    /// The tokens of messages, by one of the template's ways to end them.
    fn rendered(
        &self,
        messages: &[Message],
        variables: &Map<String, Value>,
        render: impl Fn(&ChatTemplate, &[Message], &Map<String, Value>) -> Result<String, ModelError>,
    ) -> Result<Vec<u32>, TextError> {
        let template = self.template.as_ref().ok_or_else(|| TextError::Refused(NO_TEMPLATE.into()))?;
        let mut messages = messages.to_vec();
        if !template.says("developer") {
            // OpenAI's newer word for the same.
            let developers = messages.iter_mut().filter(|message| message.role == "developer");
            developers.for_each(|message| message.role = "system".into());
        }
        if !template.says("tools") {
            let tools = variables.get("tools").and_then(Value::as_array);
            messages = calls::told(&messages, tools.map_or(&[], Vec::as_slice));
        }
        let text = render(template, &messages, variables).or_else(|error| match error {
            // Some know no system messages, and want users and the assistant to take turns.
            ModelError::TemplateRefused(_) => render(template, &calls::folded(&messages), variables).map_err(|_| error),
            other => Err(other),
        });
        self.tokens(&text.map_err(failed)?, false, self.context)
    }
}

/// Whose fault it is that a text has no tokens.
fn failed(error: ModelError) -> TextError {
    let message = error.to_string();
    match error {
        ModelError::TemplateBusy(_) => TextError::Busy(message),
        ModelError::TemplateRefused(_) | ModelError::Encode(_) => TextError::Refused(message),
        _ => TextError::Failed(message),
    }
}

impl Text for ModelText {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        self.tokens(text, special, self.context.saturating_mul(COUNTED))
    }

    fn prompt(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        self.tokens(text, special, self.context)
    }

    fn chat(&self, messages: &[Message], variables: &Map<String, Value>) -> Result<Vec<u32>, TextError> {
        self.rendered(messages, variables, |by, messages, variables| by.render(messages, true, variables))
    }

    fn turns(&self, messages: &[Message], variables: &Map<String, Value>) -> Result<Vec<u32>, TextError> {
        self.rendered(messages, variables, |by, messages, variables| by.render(messages, false, variables))
    }

    fn open(&self, messages: &[Message], variables: &Map<String, Value>) -> Result<Vec<u32>, TextError> {
        self.rendered(messages, variables, ChatTemplate::render_open)
    }

    fn call_format(&self) -> CallFormat {
        self.template.as_ref().map_or(CallFormat::Tagged, CallFormat::of)
    }

    fn mark(&self, mark: &str) -> Option<u32> {
        self.tokenizer.token_id(mark).filter(|token| self.special(*token))
    }

    fn decode(&self, tokens: &[u32], special: bool) -> String {
        self.tokenizer.decode(tokens, !special)
    }

    fn token_bytes(&self, token: u32) -> Vec<u8> {
        self.tokenizer.token_bytes(token).to_vec()
    }

    fn special(&self, token: u32) -> bool {
        self.tokenizer.is_special(token)
    }

    fn eos(&self) -> &[u32] {
        self.tokenizer.eos_tokens()
    }

    fn stream(&self, continues: bool, special: bool) -> Box<dyn TokenStream> {
        let start = if continues { TextStart::Continued } else { TextStart::Fresh };
        Box::new(self.tokenizer.stream(start, !special))
    }
}

impl TokenStream for StreamDecoder {
    fn push(&mut self, token: u32) -> String {
        StreamDecoder::push(self, token)
    }

    fn finish(&mut self) -> String {
        StreamDecoder::finish(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use taper_model::{ModelFiles, ResolvedModel};

    fn text(context: usize) -> ModelText {
        under(None, context)
    }

    fn under(template: Option<&str>, context: usize) -> ModelText {
        let template = template.map(|text| ChatTemplate::new(text, Map::new()).unwrap());
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../taper-model/tests/golden");
        let folder = tempfile::tempdir().unwrap();
        let fixture = std::fs::read(golden.join("tokenizers/smollm.json")).unwrap();
        let fixture: Value = serde_json::from_slice(&fixture).unwrap();
        std::fs::copy(golden.join("llama3/config.json"), folder.path().join("config.json")).unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), fixture["tokenizer"].to_string()).unwrap();
        let model = ResolvedModel { name: "tiny".into(), files: ModelFiles::Folder(folder.path().to_owned()) };
        ModelText::new(Tokenizer::load(&model).unwrap(), template, context)
    }

    #[test]
    fn messages_are_put_otherwise_for_a_template_that_refuses_them_and_not_for_one_that_fails() {
        let of = |at_system: &str| {
            let template = format!("{{% if messages[0].role == 'system' %}}{{{{ {at_system} }}}}{{% endif %}}hi");
            let messages = [Message::new("system", "a"), Message::new("user", "b")];
            under(Some(&template), 100).chat(&messages, &Map::new())
        };
        assert_eq!(of("raise_exception('no')").unwrap(), text(100).encode("hi", false).unwrap());
        let failed = of("nothing()").unwrap_err();
        assert!(matches!(&failed, TextError::Failed(reason) if reason.contains("nothing")), "{failed:?}");
        let refused = under(Some("{{ raise_exception('no') }}"), 100).chat(&[Message::new("user", "b")], &Map::new());
        assert!(matches!(refused, Err(TextError::Refused(_))), "{refused:?}");
    }

    /// Else this would take a minute and gigabytes.
    #[test]
    fn a_text_that_no_context_holds_is_not_read_to_its_end() {
        let text = text(100);
        for long in
            ["word ".repeat(3 << 20), "é".repeat(4 << 20), format!("{}{}", " ".repeat(700), "a b ".repeat(4 << 20))]
        {
            let error = text.prompt(&long, true).unwrap_err().to_string();
            let told = "This model's maximum context length is 100 tokens; a text of";
            assert_eq!(error, format!("{told} {} bytes has far more", long.len()));
        }
    }

    #[test]
    fn a_text_that_may_fit_is_tokenized_whole() {
        let whole = text(1 << 20);
        let word = |token| String::from_utf8(whole.tokenizer.token_bytes(token).to_vec()).ok();
        let words = (0..whole.tokenizer.vocab_size() as u32).filter_map(word);
        let longest = words.filter(|word| word.chars().all(char::is_alphabetic)).max_by_key(String::len).unwrap();
        let long = format!("{longest} ").repeat(40);
        let tokens = whole.encode(&long, false).unwrap();
        let context = tokens.len().min(long.len() / TOKEN_BYTES - 1);
        assert!(tokens.len() < context + context / 2 + 64, "it is probed, and may fit");
        assert_eq!(text(context).prompt(&long, false).unwrap(), tokens);
        // To count them there is more room.
        let more = "word ".repeat(400);
        assert!(text(100).prompt(&more, false).is_err() && text(100).encode(&more, false).is_ok());
        let error = text(100).encode(&"word ".repeat(1 << 20), false).unwrap_err().to_string();
        assert!(error.ends_with("has far more than 16 times as many"), "{error}");
    }
}
