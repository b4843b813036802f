//! A model that loads at once.

use std::path::Path;

/// A folder with a model of a context of 64 tokens, and a tokenizer of one letter.
pub fn model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../taper-model/tests/golden/smollm2");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.join(file), folder.path().join(file)).expect("copied");
    }
    let bytes = r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}"#;
    let model = r#"{"type": "BPE", "vocab": {"x": 0}, "merges": []}"#;
    let tokenizer = format!(
        r#"{{"version": "1.0", "added_tokens": [], "pre_tokenizer": {bytes}, "decoder": {bytes}, "model": {model}}}"#
    );
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer).expect("written");
    folder
}
