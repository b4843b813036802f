//! How much a tokenizer.json may make of a text. A file comes from strangers, and a few words of it can turn a short
//! text into more than memory holds: a space that is replaced by a megabyte, and each of its letters again.

use crate::error::ModelError;
use serde_json::Value;
use std::path::Path;

/// Bytes that normalizers may make of one. SentencePiece's make twelve at most, where a text of spaces alone has one before it.
const GROWTH_MAX: usize = 256;

/// Pieces that a post-processor may put together, each the text or a special token, and tokens that it may have for one.
const PIECES_MAX: usize = 64;

/// Refuses a file whose normalizers or post-processors make too much of a text. What decodes makes nothing: tokens are
/// turned into text without it.
pub(super) fn check(path: &Path, normalizer: &Value, post_processor: &Value) -> Result<(), ModelError> {
    let growth = normalized(normalizer);
    if growth > GROWTH_MAX {
        let reason = format!("makes up to {growth} bytes of one; at most {GROWTH_MAX} are taken");
        return Err(ModelError::invalid(path, "normalizer", reason));
    }
    let pieces = put_together(post_processor);
    if pieces > PIECES_MAX {
        let reason =
            format!("puts {pieces} pieces together, or has as many tokens for one; at most {PIECES_MAX} are taken");
        return Err(ModelError::invalid(path, "post_processor", reason));
    }
    Ok(())
}

/// The most bytes that become of one byte.
fn normalized(normalizer: &Value) -> usize {
    let bytes = |value: &Value| value.as_str().map_or(0, str::len);
    match normalizer["type"].as_str() {
        Some("Sequence") => {
            let all = normalizer["normalizers"].as_array().into_iter().flatten();
            all.map(normalized).fold(1, usize::saturating_mul)
        }
        Some("Replace") => match &normalizer["pattern"]["String"] {
            Value::String(pattern) => bytes(&normalizer["content"]).div_ceil(pattern.len().max(1)).max(1),
            // An expression may fit between two characters as well.
            _ => bytes(&normalizer["content"]) + 1,
        },
        // It stands before each part of a text between special tokens.
        Some("Prepend") => bytes(&normalizer["prepend"]) + 1,
        _ => 1,
    }
}

fn put_together(processor: &Value) -> usize {
    let places = |list: &Value| list.as_array().map_or(0, Vec::len);
    match processor["type"].as_str() {
        Some("Sequence") => {
            let all = processor["processors"].as_array().into_iter().flatten();
            all.map(put_together).fold(1, |product, pieces| product.saturating_mul(pieces.max(1)))
        }
        Some("TemplateProcessing") => {
            let special = processor["special_tokens"].as_object().into_iter().flat_map(|map| map.values());
            special.map(|token| places(&token["ids"])).max().unwrap_or(0).max(places(&processor["single"]))
        }
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_real_files_have_is_taken_and_what_no_memory_holds_is_not() {
        let replace =
            |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let space = || json!({"String": " "});
        let sequence = |all: Vec<Value>| json!({"type": "Sequence", "normalizers": all});
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        let check = |normalizer: Value| {
            check(Path::new("tokenizer.json"), &normalizer, &Value::Null).map_err(|e| e.to_string())
        };
        for good in [
            Value::Null,
            json!({"type": "NFC"}),
            sequence(vec![prepend.clone(), replace(space(), "▁")]),
            sequence(vec![replace(json!({"Regex": " {2,}"}), " "), prepend, replace(space(), "▁")]),
            replace(json!({"String": "long"}), &"x".repeat(1024)),
        ] {
            check(good).unwrap();
        }
        let doubled = sequence(vec![replace(json!({"String": "a"}), "aaaa"); 30]);
        for (bad, growth) in [
            (replace(space(), &"x".repeat(1 << 20)), "1048576"),
            (replace(json!({"Regex": ""}), &"x".repeat(256)), "257"),
            (sequence(vec![sequence(vec![doubled])]), "1152921504606846976"),
            (json!({"type": "Prepend", "prepend": "x".repeat(300)}), "301"),
        ] {
            let message = check(bad).unwrap_err();
            assert_eq!(
                message,
                format!("tokenizer.json: normalizer: makes up to {growth} bytes of one; at most 256 are taken")
            );
        }
    }

    #[test]
    fn a_text_is_not_put_together_with_itself_without_end() {
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let template = |pieces: usize, ids: usize| {
            let special = json!({"<s>": {"id": "<s>", "ids": vec![1; ids], "tokens": vec!["<s>"; ids]}});
            json!({"type": "TemplateProcessing", "single": vec![&text; pieces], "pair": [], "special_tokens": special})
        };
        let check = |processor: Value| check(Path::new("t"), &Value::Null, &processor).is_ok();
        assert!(check(template(3, 1)) && check(json!({"type": "ByteLevel"})));
        assert!(!check(template(65, 1)) && !check(template(3, 65)));
        assert!(!check(json!({"type": "Sequence", "processors": vec![template(3, 1); 4]})));
    }
}
