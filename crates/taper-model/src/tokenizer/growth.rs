//! How much a tokenizer.json may make of a text. A file comes from strangers, and a few words of it can turn a short
//! text into more than memory holds: a space that is replaced by a megabyte, and each of its letters again.

use crate::error::ModelError;
use base64::Engine;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::Value;
use std::path::Path;
use tokenizers::normalizers::Precompiled;

/// Bytes that normalizers and pre-tokenizers may make of one. T5's make 176 at most: eleven by its table, four by the
/// expression for many spaces, and four where each letter were a piece.
const GROWTH_MAX: usize = 256;

/// Pieces that a post-processor may put together, each the text or a special token, and tokens that it may have for one.
const PIECES_MAX: usize = 64;

/// One of the three kinds of parts that a text goes through.
struct Kind {
    /// What the file calls a part, and a list of them within one, which come one after the other.
    name: &'static str,
    list: &'static str,
    /// The most that a part makes of one, by itself. What a part is, the library tells by its fields where its `type` is
    /// missing or none that it knows: so all fields count, whatever the type, and those of the list too.
    growth: fn(&Value) -> Result<usize, String>,
    max: usize,
    too_much: fn(usize) -> String,
}

const NORMALIZER: Kind = Kind {
    name: "normalizer",
    list: "normalizers",
    growth: normalizer_growth,
    max: GROWTH_MAX,
    too_much: too_many_bytes,
};

const PRE_TOKENIZER: Kind = Kind {
    name: "pre_tokenizer",
    list: "pretokenizers",
    growth: |pre_tokenizer| Ok(pre_tokenizer_growth(pre_tokenizer)),
    max: GROWTH_MAX,
    too_much: too_many_bytes,
};

const POST_PROCESSOR: Kind = Kind {
    name: "post_processor",
    list: "processors",
    growth: |processor| Ok(pieces(processor)),
    max: PIECES_MAX,
    too_much: |pieces| {
        format!("puts {pieces} pieces together, or has as many tokens for one; at most {PIECES_MAX} are taken")
    },
};

fn too_many_bytes(growth: usize) -> String {
    format!("makes up to {growth} bytes of one, with the parts before it; at most {GROWTH_MAX} are taken")
}

/// Refuses a file whose normalizers, pre-tokenizers or post-processors make too much of a text, by the first part at which
/// it is too much. What decodes makes nothing: tokens are turned into text without it.
pub(super) fn check(
    path: &Path,
    normalizer: &Value,
    pre_tokenizer: &Value,
    post_processor: &Value,
) -> Result<(), ModelError> {
    let invalid = |(part, reason): (String, String)| ModelError::invalid(path, part, reason);
    let growth = NORMALIZER.growth(normalizer, 1).map_err(invalid)?;
    // Pieces are cut of what normalizers have made.
    PRE_TOKENIZER.growth(pre_tokenizer, growth).map_err(invalid)?;
    POST_PROCESSOR.growth(post_processor, 1).map_err(invalid)?;
    Ok(())
}

impl Kind {
    /// What a part makes of one, where those before it made `before` of it.
    ///
    /// # Errors
    /// The first part at which it is too much, as `normalizer.normalizers[2]`, and what it makes.
    fn growth(&self, part: &Value, before: usize) -> Result<usize, (String, String)> {
        self.growth_at(self.name.to_owned(), part, before)
    }

    fn growth_at(&self, at: String, part: &Value, before: usize) -> Result<usize, (String, String)> {
        let mut after = before;
        for (place, one) in part[self.list].as_array().into_iter().flatten().enumerate() {
            after = self.growth_at(format!("{at}.{}[{place}]", self.list), one, after)?;
        }
        match (self.growth)(part) {
            Ok(own) => after = after.max(before.saturating_mul(own)),
            Err(reason) => return Err((at, reason)),
        }
        if after > self.max { Err((at, (self.too_much)(after))) } else { Ok(after) }
    }
}

/// The most bytes that become of one byte.
fn normalizer_growth(normalizer: &Value) -> Result<usize, String> {
    let bytes = |value: &Value| value.as_str().map_or(0, str::len);
    let replaced = match &normalizer["pattern"]["String"] {
        Value::String(pattern) if !pattern.is_empty() => bytes(&normalizer["content"]).div_ceil(pattern.len()),
        // An expression may fit between two characters, as an empty text does.
        _ => bytes(&normalizer["content"]) + 1,
    };
    // It stands before each part of a text between special tokens.
    let prepended = bytes(&normalizer["prepend"]) + 1;
    let spelt = match normalizer["type"].as_str() {
        // Nearly every byte becomes a letter of two, each time; those that become longer in lower case are of two as well.
        Some("ByteLevel" | "Lowercase") => 2,
        // A letter's parts: of one in Sinhala three times as long, and eleven times where a letter is a phrase.
        Some("NFC" | "NFD") => 3,
        Some("NFKC" | "NFKD") => 11,
        // Takes letters apart, and puts spaces around Chinese ones.
        _ if !normalizer["handle_chinese_chars"].is_null() => 3,
        _ => 1,
    };
    let mapped = normalizer["precompiled_charsmap"].as_str().map_or(Ok(1), longest_mapped)?;
    Ok(replaced.max(prepended).max(spelt).max(mapped))
}

/// The same of a pre-tokenizer's pieces, each of which may be a byte.
fn pre_tokenizer_growth(pre_tokenizer: &Value) -> usize {
    let spelt = match (pre_tokenizer["type"] == "ByteLevel", &pre_tokenizer["add_prefix_space"]) {
        (false, _) => 1,
        (true, Value::Bool(false)) => 2,
        // A space before each piece is a letter of two as well.
        (true, _) => 4,
    };
    // It stands for each space, and before each piece.
    let replaced = pre_tokenizer["replacement"].as_str().map_or(1, |replacement| replacement.len() + 1);
    spelt.max(replaced)
}

/// Pieces that become of one, or the tokens of one of them.
fn pieces(processor: &Value) -> usize {
    let places = |list: &Value| list.as_array().map_or(0, Vec::len);
    let special = processor["special_tokens"].as_object().into_iter().flat_map(|map| map.values());
    let tokens = special.map(|token| places(&token["ids"])).max().unwrap_or(0);
    tokens.max(places(&processor["single"]))
}

/// The most bytes of a text that a table of SentencePiece's has for some characters, for one of theirs. It is in base64:
/// the bytes of a trie, the trie, and texts that each end with a 0.
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
    let longest = texts.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0);
    if longest.div_ceil(3) > GROWTH_MAX {
        return Ok(longest);
    }
    // The longest stand for characters of three bytes; which stand for shorter ones, the library tells.
    let short = ('\u{1}'..'\u{800}').map(String::from).chain(["\r\n".to_owned()]);
    let short = super::guarded(|| {
        let table = Precompiled::from(&table)?;
        Ok(short.map(|text| table.transform(&text).map_or(0, str::len).div_ceil(text.len())).max())
    })?;
    Ok(longest.div_ceil(3).max(short.unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn too_much(growth: &str) -> String {
        format!("makes up to {growth} bytes of one, with the parts before it; at most 256 are taken")
    }

    /// What a normalizer makes of one byte, whether or not that is too much.
    fn normalized(normalizer: &Value) -> usize {
        Kind { max: usize::MAX, ..NORMALIZER }.growth(normalizer, 1).unwrap()
    }

    #[test]
    fn what_real_files_have_is_taken_and_what_no_memory_holds_is_not() {
        let replace =
            |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let space = || json!({"String": " "});
        let sequence = |all: Vec<Value>| json!({"type": "Sequence", "normalizers": all});
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        let check = |normalizer: Value| {
            check(Path::new("tokenizer.json"), &normalizer, &Value::Null, &Value::Null).map_err(|e| e.to_string())
        };
        for good in [
            Value::Null,
            json!({"type": "NFC"}),
            sequence(vec![json!({"type": "NFKC"}), replace(space(), "▁")]),
            sequence(vec![prepend.clone(), replace(space(), "▁")]),
            sequence(vec![replace(json!({"Regex": " {2,}"}), " "), prepend, replace(space(), "▁")]),
            replace(json!({"String": "long"}), &"x".repeat(1024)),
        ] {
            check(good).unwrap();
        }
        let doubled = sequence(vec![replace(json!({"String": "a"}), "aaaa"); 30]);
        let long = replace(space(), &"x".repeat(1 << 20));
        for (bad, part, growth) in [
            (long.clone(), "", "1048576"),
            (sequence(vec![replace(space(), "▁"), long]), ".normalizers[1]", "3145728"),
            (replace(json!({"Regex": ""}), &"x".repeat(256)), "", "257"),
            (replace(json!({"String": ""}), &"x".repeat(256)), "", "257"),
            (sequence(vec![sequence(vec![doubled])]), ".normalizers[0].normalizers[0].normalizers[4]", "1024"),
            (json!({"type": "Prepend", "prepend": "x".repeat(300)}), "", "301"),
            (sequence(vec![json!({"type": "ByteLevel"}); 9]), ".normalizers[8]", "512"),
            (json!({"normalizers": [{"type": "NFC"}], "prepend": "x".repeat(300)}), "", "301"),
        ] {
            assert_eq!(check(bad).unwrap_err(), format!("tokenizer.json: normalizer{part}: {}", too_much(growth)));
        }
    }

    #[test]
    fn pieces_grow_after_their_text_has() {
        let sequence = |all: Vec<Value>| json!({"type": "Sequence", "pretokenizers": all});
        let byte_level = |space: bool| json!({"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": true});
        let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
        let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        let nfkc = json!({"type": "NFKC"});
        let check = |normalizer: &Value, pre_tokenizer: &Value| {
            check(Path::new("t"), normalizer, pre_tokenizer, &Value::Null).map_err(|e| e.to_string())
        };
        for good in [
            byte_level(true),
            sequence(vec![split("x"), byte_level(false)]),
            sequence(vec![json!({"type": "Digits", "individual_digits": true}), byte_level(true)]),
            metaspace.clone(),
            sequence(vec![json!({"type": "WhitespaceSplit"}), metaspace.clone()]),
        ] {
            check(&Value::Null, &good).unwrap();
            check(&nfkc, &good).unwrap();
        }
        assert!(check(&nfkc, &sequence(vec![byte_level(false); 4])).is_ok());
        for (normalizer, bad, part, growth) in [
            (&Value::Null, sequence(vec![byte_level(false); 40]), "[8]", "512"),
            (&Value::Null, sequence(vec![sequence(vec![byte_level(true); 5])]), "[0].pretokenizers[4]", "1024"),
            (&Value::Null, sequence(vec![metaspace.clone(); 5]), "[4]", "1024"),
            (&nfkc, sequence(vec![byte_level(false); 5]), "[4]", "352"),
        ] {
            let says = format!("t: pre_tokenizer.pretokenizers{part}: {}", too_much(growth));
            assert_eq!(check(normalizer, &bad), Err(says));
        }
        // So the library makes them.
        for (pre_tokenizer, text) in [
            (byte_level(true), "\u{1}"),
            (byte_level(false), "é"),
            (sequence(vec![split("(?s:.)"), byte_level(true)]), "\u{1}\u{1}"),
            (sequence(vec![byte_level(true); 3]), "\u{1}"),
            (sequence(vec![split("(?s:.)"), metaspace]), "aa"),
        ] {
            use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper};
            let library: PreTokenizerWrapper = serde_json::from_value(pre_tokenizer.clone()).unwrap();
            let mut pieces = PreTokenizedString::from(text);
            library.pre_tokenize(&mut pieces).unwrap();
            let pieces = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
            let made: usize = pieces.iter().map(|piece| piece.0.len()).sum();
            let most = PRE_TOKENIZER.growth(&pre_tokenizer, 1).unwrap();
            assert!(made > text.len() && made <= text.len() * most, "{pre_tokenizer}: {made}");
        }
    }

    #[test]
    fn letters_are_taken_apart() {
        use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};
        let bert = json!({"clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true});
        for (part, text, made) in [
            (json!({"type": "NFKC"}), "\u{fdfa}", 33),
            (json!({"type": "NFKD"}), "\u{fdfa}", 33),
            (json!({"type": "NFC"}), "\u{1d1c0}", 12),
            (json!({"type": "NFD"}), "\u{ddd}", 9),
            (json!({"type": "Lowercase"}), "\u{23e}", 3),
            (bert, "\u{ddd}", 6),
            (json!({"type": "Replace", "pattern": {"String": ""}, "content": "xx"}), "aaaa", 14),
        ] {
            let mut normalized_text = NormalizedString::from(text);
            let library: NormalizerWrapper = serde_json::from_value(part.clone()).unwrap();
            library.normalize(&mut normalized_text).unwrap();
            let growth = normalized(&part);
            assert_eq!(normalized_text.get().len(), made, "{part}");
            // A text that is replaced stands before the first letter too.
            assert!(made <= growth * text.len() + 2, "{part}: {growth}");
        }
        let all = json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFKD"}); 3]});
        assert_eq!(normalized(&all), 1331);
    }

    #[test]
    fn bytes_become_letters_of_two_again_and_again() {
        use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};
        let all = json!({"type": "Sequence", "normalizers": vec![json!({"type": "ByteLevel"}); 4]});
        let mut text = NormalizedString::from(" ");
        serde_json::from_value::<NormalizerWrapper>(all.clone()).unwrap().normalize(&mut text).unwrap();
        assert_eq!((text.get().len(), normalized(&all)), (16, 16));
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
            let told = check(Path::new("t"), &part, &Value::Null, &Value::Null).unwrap_err().to_string();
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
            assert!(check(Path::new("t"), &Value::Null, &Value::Null, &processor).is_err());
        }
    }

    #[test]
    fn a_table_of_characters_says_what_it_makes_of_one() {
        let coded = |bytes: Vec<u8>| json!({"type": "Precompiled", "precompiled_charsmap": base64::prelude::BASE64_STANDARD.encode(bytes)});
        let table =
            |trie: u32, there: usize, texts: &[u8]| coded([&trie.to_le_bytes()[..], &vec![0; there], texts].concat());
        let check = |normalizer: Value| {
            check(Path::new("t"), &normalizer, &Value::Null, &Value::Null).map_err(|e| e.to_string())
        };
        let phrase = "fi\0صلى الله عليه وسلم\0".as_bytes();
        check(table(1024, 1024, phrase)).unwrap();
        assert_eq!(normalized(&table(1024, 1024, phrase)), 11);
        let spaces = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"});
        let t5 = json!({"type": "Sequence", "normalizers": [table(1024, 1024, phrase), spaces]});
        let metaspace = json!({"type": "Metaspace", "replacement": "▁", "add_prefix_space": true});
        super::check(Path::new("t"), &t5, &metaspace, &Value::Null).unwrap();
        // The phrase for an `a`: a unit says what it is for, that a text is there, and what turns its place into that of
        // the text's beginning.
        let mut trie = vec![0u32; 256];
        trie[usize::from(b'a')] = u32::from(b'a') | 1 << 8 | 1 << 10;
        trie[usize::from(b'a') ^ 1] = 3;
        let trie: Vec<u8> = trie.iter().flat_map(|unit| unit.to_le_bytes()).collect();
        assert_eq!(normalized(&coded([&1024u32.to_le_bytes()[..], &trie, phrase].concat())), 33);
        for (bad, says) in [
            (table(8, 8, &[b'x'; 1 << 20]), "makes up to 1048576 bytes of one"),
            (table(u32::MAX, 8, b"x"), "a trie of 4294967295 bytes, of which there are 9"),
            (table(0, 0, b"x"), "a trie of 0 bytes"),
            (table(8, 8, b"x"), "contradict each other"),
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
        let check =
            |processor: Value| check(Path::new("t"), &Value::Null, &Value::Null, &processor).map_err(|e| e.to_string());
        assert!(check(template(3, 1)).is_ok() && check(json!({"type": "ByteLevel"})).is_ok());
        let sequence = json!({"type": "Sequence", "processors": vec![template(3, 1); 4]});
        for (bad, part, pieces) in
            [(template(65, 1), "", 65), (template(3, 65), "", 65), (sequence, ".processors[3]", 81)]
        {
            let says = format!("t: post_processor{part}: puts {pieces} pieces together");
            let told = check(bad).unwrap_err();
            assert!(told.starts_with(&says), "{told}");
        }
    }
}
