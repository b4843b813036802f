//! Chat templates against strings that transformers rendered.

mod common;

use candle_core::quantized::gguf_file::{self, Value as Field};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::Path;
use taper_model::{ChatMessage, ChatTemplate, ModelError, Progress, default_cache, resolve};

#[derive(Deserialize)]
struct Case {
    template: String,
    messages: Vec<ChatMessage>,
    variables: Map<String, Value>,
    /// None: the last message goes on.
    add_generation_prompt: Option<bool>,
    rendered: Option<String>,
    refused: Option<String>,
}

fn template(name: &str) -> ChatTemplate {
    if name == "smollm2" {
        let model = resolve("default", &default_cache(), Progress::Hidden).unwrap();
        return ChatTemplate::load(&model, None).unwrap().unwrap();
    }
    let path = common::golden().join("templates").join(format!("{name}.jinja"));
    ChatTemplate::new(&std::fs::read_to_string(path).unwrap(), Map::new()).unwrap()
}

#[test]
fn conversations_render_as_in_transformers() {
    let text = std::fs::read_to_string(common::golden().join("templates/cases.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
    let mut templates: HashMap<String, ChatTemplate> = HashMap::new();
    for (i, case) in cases.iter().enumerate() {
        let template = templates.entry(case.template.clone()).or_insert_with(|| template(&case.template));
        let got = match case.add_generation_prompt {
            Some(answer) => template.render(&case.messages, answer, &case.variables),
            None => template.render_open(&case.messages, &case.variables),
        };
        match (&case.rendered, &case.refused) {
            (Some(expected), None) => assert_eq!(&got.unwrap(), expected, "case {i}, {}", case.template),
            (None, Some(expected)) => match got {
                Err(ModelError::TemplateRefused(reason)) => assert_eq!(&reason, expected, "case {i}"),
                other => panic!("case {i}, {}: expected a refusal, got {other:?}", case.template),
            },
            _ => panic!("case {i} is neither rendered nor refused"),
        }
    }
}

#[test]
fn templates_come_from_every_place_that_checkpoints_keep_them() {
    let folder = tempfile::tempdir().unwrap();
    let model = common::folder(folder.path());
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let render = |variables: Value| {
        let template = ChatTemplate::load(&model, None).unwrap().unwrap();
        let Value::Object(variables) = variables else { panic!() };
        template.render(&[ChatMessage::new("user", "hi")], false, &variables).unwrap()
    };
    assert!(ChatTemplate::load(&model, None).unwrap().is_none());
    write("tokenizer_config.json", r#"{"bos_token": null}"#);
    assert!(ChatTemplate::load(&model, None).unwrap().is_none());

    write(
        "tokenizer_config.json",
        r#"{"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>",
            "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}"#,
    );
    assert_eq!(render(json!({})), "<s>hi</s>");

    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "default", "template": "plain"}, {"name": "rag", "template": "{% bad"},
            {"name": "tool_use", "template": "tools"}]}"#,
    );
    assert_eq!(render(json!({})), "plain");
    assert_eq!(render(json!({"tools": null})), "plain");
    assert_eq!(render(json!({"tools": []})), "tools");

    // Of two files that name a token, as transformers reads them.
    let template = r#""eos_token": "old", "chat_template": "{{ bos_token }}{{ eos_token }}""#;
    write("special_tokens_map.json", r#"{"bos_token": {"content": "<b>", "lstrip": false}, "eos_token": "<e>"}"#);
    write("tokenizer_config.json", &format!("{{{template}}}"));
    assert_eq!(render(json!({})), "<b><e>");
    write("tokenizer_config.json", &format!(r#"{{{template}, "added_tokens_decoder": {{}}}}"#));
    assert_eq!(render(json!({})), "old");
    write("special_tokens_map.json", r#"{"bos_token": 3}"#);
    write("tokenizer_config.json", &format!("{{{template}}}"));
    let error = ChatTemplate::load(&model, None).unwrap_err().to_string();
    assert!(error.contains("special_tokens_map.json: bos_token: must be a token's name"), "{error}");
    write("special_tokens_map.json", "{}");

    write("chat_template.jinja", "own {{ strftime_now('%Y') | length }}");
    assert_eq!(render(json!({})), "own 4");
}

#[test]
fn a_gguf_file_has_a_template_for_tools_beside_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let render = |templates: &[(&str, &str)], instead: Option<&Path>| {
        let path = folder.path().join("tiny.gguf");
        let text = |text: &str| Field::String(text.to_owned());
        let mut fields = vec![
            ("tokenizer.ggml.tokens".to_owned(), Field::Array(vec![text("<s>"), text("</s>")])),
            ("tokenizer.ggml.eos_token_id".to_owned(), Field::U32(1)),
        ];
        fields.extend(templates.iter().map(|(key, template)| (format!("tokenizer.{key}"), text(template))));
        let fields: Vec<(&str, &Field)> = fields.iter().map(|(key, field)| (key.as_str(), field)).collect();
        gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &fields, &[]).unwrap();
        let template = ChatTemplate::load(&common::gguf(&path), instead).unwrap()?;
        let tools = Map::from_iter([("tools".to_owned(), json!([]))]);
        let rendered = [Map::new(), tools].map(|variables| template.render(&[], false, &variables).unwrap());
        Some(rendered.join(", "))
    };
    let (chat, tools) = (("chat_template", "chat{{ eos_token }}"), ("chat_template.tool_use", "tools{{ eos_token }}"));
    assert_eq!(render(&[chat, tools], None).unwrap(), "chat</s>, tools</s>");
    assert_eq!(render(&[chat], None).unwrap(), "chat</s>, chat</s>");
    assert_eq!(render(&[tools], None), None);
    // One's own goes before both, and knows the model's tokens.
    let own = folder.path().join("own.jinja");
    std::fs::write(&own, "own{{ eos_token }}").unwrap();
    assert_eq!(render(&[chat, tools], Some(&own)).unwrap(), "own</s>, own</s>");
    assert_eq!(render(&[], Some(&own)).unwrap(), "own</s>, own</s>");
}

#[test]
fn one_s_own_template_stands_in_place_of_a_folders() {
    let folder = tempfile::tempdir().unwrap();
    let model = common::folder(folder.path());
    let config = r#"{"bos_token": "<b>", "chat_template": "{% broken"}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    let own = folder.path().join("own.jinja");
    let load = || ChatTemplate::load(&model, Some(&own)).map_err(|e| e.to_string());
    assert!(load().unwrap_err().contains("own.jinja: "), "it is not there");
    std::fs::write(&own, "{{ bos_token }}own").unwrap();
    assert_eq!(load().unwrap().unwrap().render(&[], false, &Map::new()).unwrap(), "<b>own");
    std::fs::write(&own, "{% if %}").unwrap();
    assert!(load().unwrap_err().contains("own.jinja: chat_template: "), "it is broken");
}

#[test]
fn broken_templates_name_their_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = common::folder(folder.path());
    let error = |config: &str| {
        std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        ChatTemplate::load(&model, None).unwrap_err().to_string()
    };
    for (config, part) in [
        (r#"{"chat_template": "{% if %}"}"#, "chat_template: "),
        (r#"{"chat_template": 3}"#, "must be a string or a list"),
        (r#"{"chat_template": [{"name": "other", "template": ""}]}"#, "none of the named templates"),
        (r#"{"bos_token": 3}"#, "bos_token: "),
        (r#"{"#, "file: "),
    ] {
        let message = error(config);
        assert!(message.contains("tokenizer_config.json: ") && message.contains(part), "{config}: {message}");
    }

    // What fails only while rendering is the template's fault, not the caller's.
    let template = ChatTemplate::new("{{ messages[0].content.nothing() }}", Map::new()).unwrap();
    let error = template.render(&[ChatMessage::new("user", "hi")], false, &Map::new()).unwrap_err();
    assert!(matches!(error, ModelError::Template(_)), "{error}");
    let template = ChatTemplate::new("{{ strftime_now('%!') }}", Map::new()).unwrap();
    assert!(template.render(&[], false, &Map::new()).is_err());
}
