//! How much a tokenizer.json may make of a text. A file comes from strangers, and a few words of it can turn a short
//! text into more than memory holds: a space that is replaced by a megabyte, and each of its letters again.

use crate::error::ModelError;
use base64::Engine;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::Value;
use std::path::Path;

/// Bytes that normalizers may make of one. SentencePiece's make twelve at most, where a text of spaces alone has one before it.
const GROWTH_MAX: usize = 256;

/// Pieces that a post-processor may put together, each the text or a special token, and tokens that it may have for one.
const PIECES_MAX: usize = 64;

/// Refuses a file whose normalizers or post-processors make too much of a text. What decodes makes nothing: tokens are
/// turned into text without it.
pub(super) fn check(path: &Path, normalizer: &Value, post_processor: &Value) -> Result<(), ModelError> {
    let growth = normalized(normalizer).map_err(|reason| ModelError::invalid(path, "normalizer", reason))?;
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

/// The most bytes that become of one byte. What a part is, the library tells by its fields where its `type` is missing or
/// none that it knows: so all fields count, whatever the type.
fn normalized(normalizer: &Value) -> Result<usize, String> {
    let bytes = |value: &Value| value.as_str().map_or(0, str::len);
    let all = normalizer["normalizers"].as_array().into_iter().flatten();
    let sequence =
        all.map(normalized).try_fold(1usize, |product, one| Ok::<_, String>(product.saturating_mul(one?)))?;
    let replaced = match &normalizer["pattern"]["String"] {
        Value::String(pattern) => bytes(&normalizer["content"]).div_ceil(pattern.len().max(1)),
        // An expression may fit between two characters as well.
        _ => bytes(&normalizer["content"]) + 1,
    };
    // It stands before each part of a text between special tokens.
    let prepended = bytes(&normalizer["prepend"]) + 1;
    // Nearly every byte becomes a letter of two, each time.
    let spelt = if normalizer["type"] == "ByteLevel" { 2 } else { 1 };
    let mapped = normalizer["precompiled_charsmap"].as_str().map_or(Ok(1), longest_mapped)?;
    Ok(sequence.max(replaced).max(prepended).max(spelt).max(mapped))
}

/// The longest text that a table of SentencePiece's has for some characters: in base64 the bytes of a trie, the trie, and
/// texts that each end with a 0.
fn longest_mapped(table: &str) -> Result<usize, String> {
    const BASE64: GeneralPurpose = GeneralPurpose::new(
        &base64::alphabet::STANDARD,
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    let table = BASE64.decode(table).map_err(|e| format!("has a precompiled_charsmap that is no base64: {e}"))?;
    let (trie, rest) = table.split_first_chunk().map_or((0, &[][..]), |(size, rest)| (u32::from_le_bytes(*size), rest));
    // The library makes room for as much as it says.
    let texts = rest.get(trie as usize..).filter(|_| trie > 0).ok_or_else(|| {
        format!("has a precompiled_charsmap with a trie of {trie} bytes, of which there are {}", rest.len())
    })?;
    Ok(texts.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0))
}

/// As of normalizers, all fields count.
fn put_together(processor: &Value) -> usize {
    let places = |list: &Value| list.as_array().map_or(0, Vec::len);
    let all = processor["processors"].as_array().into_iter().flatten();
    let sequence = all.map(put_together).fold(1, |product: usize, pieces| product.saturating_mul(pieces));
    let special = processor["special_tokens"].as_object().into_iter().flat_map(|map| map.values());
    let tokens = special.map(|token| places(&token["ids"])).max().unwrap_or(0);
    sequence.max(tokens).max(places(&processor["single"]))
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
            (sequence(vec![json!({"type": "ByteLevel"}); 9]), "512"),
        ] {
            let message = check(bad).unwrap_err();
            assert_eq!(
                message,
                format!("tokenizer.json: normalizer: makes up to {growth} bytes of one; at most 256 are taken")
            );
        }
    }

    #[test]
    fn bytes_become_letters_of_two_again_and_again() {
        use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};
        let all = json!({"type": "Sequence", "normalizers": vec![json!({"type": "ByteLevel"}); 4]});
        let mut text = NormalizedString::from(" ");
        serde_json::from_value::<NormalizerWrapper>(all.clone()).unwrap().normalize(&mut text).unwrap();
        assert_eq!((text.get().len(), normalized(&all)), (16, Ok(16)));
    }

    /// The library goes by a part's fields where its type is not one that it knows.
    #[test]
    fn what_a_part_calls_itself_hides_nothing() {
        let long = "x".repeat(1 << 20);
        let parts = [
            json!({"pattern": {"String": "a"}, "content": long}),
            json!({"type": "Other", "pattern": {"String": "a"}, "content": long}),
            json!({"prepend": long}),
            json!({"normalizers": [{"type": "NFC"}, {"pattern": {"String": "a"}, "content": long}]}),
        ];
        for part in parts {
            let told = check(Path::new("t"), &part, &Value::Null).unwrap_err().to_string();
            assert!(told.contains("at most 256 are taken"), "{told}");
        }
        // So the library reads them.
        let tokens = |normalizer: Value, post_processor: Value| {
            let model = json!({"type": "BPE", "vocab": {"a": 0, "x": 1}, "merges": []});
            let file = json!({"version": "1.0", "added_tokens": [], "normalizer": normalizer,
                "post_processor": post_processor, "model": model});
            let tokenizer: tokenizers::Tokenizer = file.to_string().parse().unwrap();
            tokenizer.encode("aa", true).unwrap().get_ids().len()
        };
        let replace = json!({"type": "Other", "pattern": {"String": "a"}, "content": "xxx"});
        let twice = vec![json!({"Sequence": {"id": "A", "type_id": 0}}); 2];
        let template = json!({"type": "Other", "single": twice, "pair": [], "special_tokens": {}});
        assert_eq!((tokens(replace, Value::Null), tokens(Value::Null, template)), (6, 4));
        let template = json!({"type": "Other", "single": vec![json!({}); 65], "pair": [], "special_tokens": {}});
        for processor in [template.clone(), json!({"processors": [template]})] {
            assert!(check(Path::new("t"), &Value::Null, &processor).is_err());
        }
    }

    #[test]
    fn a_table_of_characters_says_what_it_makes_of_one() {
        let table = |trie: u32, there: usize, texts: &[u8]| {
            let bytes = [&trie.to_le_bytes()[..], &vec![0; there], texts].concat();
            json!({"type": "Precompiled", "precompiled_charsmap": base64::prelude::BASE64_STANDARD.encode(bytes)})
        };
        let check = |normalizer: Value| check(Path::new("t"), &normalizer, &Value::Null).map_err(|e| e.to_string());
        check(table(8, 8, "fi\0صلى الله عليه وسلم\0".as_bytes())).unwrap();
        for (bad, says) in [
            (table(8, 8, &[b'x'; 1 << 20]), "makes up to 1048576 bytes of one"),
            (table(u32::MAX, 8, b"x"), "a trie of 4294967295 bytes, of which there are 9"),
            (table(0, 0, b"x"), "a trie of 0 bytes"),
            (json!({"type": "Precompiled", "precompiled_charsmap": "?"}), "no base64"),
        ] {
            let told = check(bad).unwrap_err();
            assert!(told.contains(says), "{told}");
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
