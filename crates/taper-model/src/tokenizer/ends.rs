//! What a text is put between: the token that opens a sequence, and the one that closes it.

use super::config::TokenizerConfig;
use crate::error::ModelError;
use serde_json::{Map, Value, json};
use tokenizers::{PostProcessorWrapper, Tokenizer};

/// A token by its name and id.
pub(super) type Named = (String, u32);

/// Puts texts between these tokens, instead of what the tokenizer had around them.
pub(super) fn surround(
    tokenizer: &mut Tokenizer,
    opens: Option<Named>,
    closes: Option<Named>,
) -> Result<(), serde_json::Error> {
    let token = |(name, _): &Named| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let mut single: Vec<Value> = opens.iter().map(token).collect();
    single.push(json!({"Sequence": {"id": "A", "type_id": 0}}));
    single.extend(closes.iter().map(token));
    let mut pair = single.clone();
    pair.push(json!({"Sequence": {"id": "B", "type_id": 1}}));
    let none = opens.is_none() && closes.is_none();
    let entry = |(name, id): Named| (name.clone(), json!({"id": name, "ids": [id], "tokens": [name]}));
    let special: Map<String, Value> = opens.into_iter().chain(closes).map(entry).collect();
    let processor = json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special});
    let processor = serde_json::from_value::<PostProcessorWrapper>(processor)?;
    tokenizer.with_post_processor((!none).then_some(processor));
    Ok(())
}

/// Heeds `add_bos_token` and `add_eos_token`, as the Llama tokenizers of transformers 4 do, vLLM with them, and llama.cpp
/// in what it converts: they stand above `post_processor`, and `add_bos_token` is true where it is not said. Where neither is
/// there, a template of `tokenizer.json` stands: transformers 5 writes what it adds into that one alone.
///
/// For other classes `tokenizer.json` alone says what stands around a text, in transformers too. A file that names no class
/// has its flags heeded, and none supposed.
pub(super) fn from_config(config: &TokenizerConfig, tokenizer: &mut Tokenizer) -> Result<(), ModelError> {
    let (bos, eos) = (config.flag("add_bos_token")?, config.flag("add_eos_token")?);
    let told = bos.is_some() || eos.is_some();
    let heeded = match config.class() {
        Some("LlamaTokenizer" | "LlamaTokenizerFast" | "CodeLlamaTokenizer" | "CodeLlamaTokenizerFast") => {
            told || !has_template(tokenizer)
        }
        Some(_) => false,
        None => told,
    };
    if !heeded {
        return Ok(());
    }
    let opens = wanted(config, tokenizer, "bos_token", "<s>", bos, true)?;
    let closes = wanted(config, tokenizer, "eos_token", "</s>", eos, false)?;
    surround(tokenizer, opens, closes).map_err(|e| ModelError::invalid(config.path(), "add_bos_token", e))
}

fn has_template(tokenizer: &Tokenizer) -> bool {
    let description = tokenizer.get_post_processor().map(serde_json::to_string);
    description.and_then(Result::ok).is_some_and(|text| text.contains(r#""type":"TemplateProcessing""#))
}

/// The token of a role, where it is to be added. `usual` is its name with Llama's tokenizers where the file has none.
fn wanted(
    config: &TokenizerConfig,
    tokenizer: &Tokenizer,
    role: &str,
    usual: &str,
    flag: Option<bool>,
    default: bool,
) -> Result<Option<Named>, ModelError> {
    if !flag.unwrap_or(default) {
        return Ok(None);
    }
    let name = if config.mentions(role) { config.token(role)? } else { Some(usual.to_owned()) };
    let token = name.and_then(|name| tokenizer.token_to_id(&name).map(|id| (name, id)));
    if token.is_none() && flag.is_some() {
        let reason = format!("is true, and {role} names no token of the vocabulary");
        return Err(ModelError::invalid(config.path(), format!("add_{role}"), reason));
    }
    Ok(token)
}
