//! How models write that they call a function, and what is told to those whose template has no words for it.

use crate::text::Message;
use serde_json::{Map, Value, json};
use taper_model::ChatTemplate;

/// How a model writes that it calls a function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CallFormat {
    /// `<tool_call>`, a line with `{"name": …, "arguments": …}`, `</tool_call>`: Hermes models, and those told so.
    #[default]
    Tagged,
    /// `{"name": …, "parameters": …}` in place of an answer, maybe after `<|python_tag|>`: Llama 3.1 and later.
    Llama,
    /// `[TOOL_CALLS]`, then a list of `{"name": …, "arguments": …}`: Mistral.
    Mistral,
    /// `[TOOL_CALLS]`, the name, `[ARGS]`, the arguments: later Mistrals.
    MistralNamed,
}

impl CallFormat {
    /// The format that a chat template shows calls in.
    pub(crate) fn of(template: &ChatTemplate) -> Self {
        if template.says("[TOOL_CALLS]") {
            return if template.says("[ARGS]") { Self::MistralNamed } else { Self::Mistral };
        }
        // Llama's answers to calls have a role of this name.
        if template.says("<|python_tag|>") || template.says("ipython") { Self::Llama } else { Self::Tagged }
    }
}

/// What a template is given that knows nothing of tools: the functions in the system message, calls and results as text.
pub(crate) fn told(messages: &[Message], tools: &[Value]) -> Vec<Message> {
    let mut all: Vec<Message> = messages.iter().map(plain).collect();
    if tools.is_empty() {
        return all;
    }
    let lines: Vec<String> = tools.iter().map(|tool| tool.get("function").unwrap_or(tool).to_string()).collect();
    let about = format!(
        "You may call functions to help with the user's question. The functions, as JSON:\n<tools>\n{}\n</tools>\nTo call \
         one, answer with its name and arguments as JSON between tags:\n<tool_call>\n{{\"name\": \"…\", \"arguments\": \
         {{…}}}}\n</tool_call>",
        lines.join("\n")
    );
    match all.first_mut() {
        Some(first) if first.role == "system" => {
            let own = first.content.take().unwrap_or_default();
            first.content = Some(format!("{own}\n\n{about}"));
        }
        _ => all.insert(0, Message::new("system", about)),
    }
    all
}

/// The same said by a user and the assistant in turns: system messages begin what the user says next, and neighbours of
/// one role are one message, but for those that say more than text.
pub(crate) fn folded(messages: &[Message]) -> Vec<Message> {
    let mut all: Vec<Message> = Vec::new();
    for message in messages {
        let mut message = message.clone();
        if message.role == "system" {
            message.role = "user".into();
        }
        match all.last_mut() {
            Some(last) if last.role == message.role && last.extra.is_empty() && message.extra.is_empty() => {
                let texts = [last.content.take(), message.content].into_iter().flatten();
                last.content = Some(texts.collect::<Vec<_>>().join("\n\n"));
            }
            _ => all.push(message),
        }
    }
    all
}

/// A message as text alone, where it is about calls.
fn plain(message: &Message) -> Message {
    let calls = message.extra.get("tool_calls").and_then(Value::as_array);
    if calls.is_none() && message.role != "tool" {
        return message.clone();
    }
    let mut text = message.content.clone().unwrap_or_default();
    for call in calls.into_iter().flatten().filter_map(|call| call.get("function")) {
        let line = json!({"name": call["name"], "arguments": call["arguments"]});
        text.push_str(&format!("{}<tool_call>\n{line}\n</tool_call>", if text.is_empty() { "" } else { "\n" }));
    }
    if message.role == "tool" {
        text = format!("<tool_response>\n{text}\n</tool_response>");
    }
    let role = if message.role == "tool" { "user" } else { &message.role };
    Message { role: role.into(), content: Some(text), extra: Map::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(text: &str) -> ChatTemplate {
        ChatTemplate::new(text, Map::new()).unwrap()
    }

    #[test]
    fn a_template_shows_how_calls_are_written() {
        for (text, format) in [
            ("{{ messages[0].content }}", CallFormat::Tagged),
            ("{% if tools %}<tool_call>{% endif %}", CallFormat::Tagged),
            ("{% if message.role == 'ipython' %}{% endif %}", CallFormat::Llama),
            ("{{ '<|python_tag|>' }}", CallFormat::Llama),
            ("{{ '[TOOL_CALLS]' }}[", CallFormat::Mistral),
            ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", CallFormat::MistralNamed),
        ] {
            assert_eq!(CallFormat::of(&template(text)), format, "{text}");
        }
    }

    #[test]
    fn a_template_without_words_for_tools_is_told_in_text() {
        let mut asked = Message::new("assistant", "I look.");
        let call = json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}});
        asked.extra.insert("tool_calls".into(), json!([call]));
        let messages = [Message::new("user", "hi"), asked, Message::new("tool", "sun")];
        let tools = [json!({"type": "function", "function": {"name": "f"}})];
        let all = told(&messages, &tools);
        let text = |i: usize| (all[i].role.as_str(), all[i].content.as_deref().unwrap());
        assert_eq!(text(0).0, "system");
        assert!(text(0).1.contains("<tools>\n{\"name\":\"f\"}\n</tools>"), "{}", text(0).1);
        assert_eq!(text(1), ("user", "hi"));
        assert_eq!(
            text(2),
            ("assistant", "I look.\n<tool_call>\n{\"name\":\"f\",\"arguments\":{\"x\":1}}\n</tool_call>")
        );
        assert_eq!(text(3), ("user", "<tool_response>\nsun\n</tool_response>"));
        assert_eq!(told(&messages, &[])[..], all[1..], "the calls of before, and nothing about others");
        let all = told(&[Message::new("system", "Be brief.")], &tools);
        assert!(all.len() == 1 && all[0].content.as_deref().unwrap().starts_with("Be brief.\n\nYou may call"));
    }

    #[test]
    fn a_template_of_two_roles_that_take_turns_is_given_two() {
        let strict = template(
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}\
             [{{ m.role }}]{{ m.content }}{% endfor %}",
        );
        let [system, user, assistant] =
            ["system", "user", "assistant"].map(|role| Message::new(role, role.to_uppercase()));
        let messages = [system, user.clone(), assistant.clone(), user.clone(), user, assistant];
        assert!(strict.render(&messages, false, &Map::new()).is_err());
        assert_eq!(
            strict.render(&folded(&messages), false, &Map::new()).unwrap(),
            "[user]SYSTEM\n\nUSER[assistant]ASSISTANT[user]USER\n\nUSER[assistant]ASSISTANT"
        );
    }
}
