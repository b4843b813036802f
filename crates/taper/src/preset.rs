//! Presets of attention: the files of configs/attention, which the program carries.

use anyhow::{Context, Result, anyhow, bail};
use include_dir::{Dir, include_dir};
use serde_json::Value;
use taper_attention::{Artifacts, AttentionSpec, nearest};

static PRESETS: Dir = include_dir!("$CARGO_MANIFEST_DIR/../../configs/attention");

/// Every preset's name and TOML text, by name.
pub fn all() -> Vec<(&'static str, &'static str)> {
    let mut presets: Vec<_> = PRESETS
        .files()
        .filter(|file| file.path().extension().is_some_and(|e| e == "toml"))
        .filter_map(|file| Some((file.path().file_stem()?.to_str()?, file.contents_utf8()?)))
        .collect();
    presets.sort_unstable();
    presets
}

/// Reads what follows `--attention`: JSON, or a preset's name.
///
/// # Errors
/// JSON that is no valid spec, or a name that no preset has.
pub fn read(text: &str, artifacts: &Artifacts) -> Result<AttentionSpec> {
    if text.trim_start().starts_with('{') {
        let value: Value = serde_json::from_str(text).context("the attention is not valid JSON")?;
        return spec(&value, artifacts);
    }
    let presets = all();
    if let Some((name, toml)) = presets.iter().find(|(name, _)| *name == text) {
        let value: Value = toml::from_str(toml).with_context(|| format!("preset {name}"))?;
        return spec(&value, artifacts).with_context(|| format!("preset {name}"));
    }
    let names: Vec<&str> = presets.iter().map(|(name, _)| *name).collect();
    let hint = nearest(text, &names).map_or(String::new(), |name| format!(", did you mean {name}?"));
    bail!("no attention preset is called {text:?}{hint}; presets: {}; or give JSON", names.join(", "))
}

/// A spec from its JSON form.
///
/// # Errors
/// The field at fault and what is valid.
pub fn spec(value: &Value, artifacts: &Artifacts) -> Result<AttentionSpec> {
    AttentionSpec::from_json(value, "attention", artifacts).map_err(|e| anyhow!("{}: {e}", e.path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<AttentionSpec> {
        super::read(text, &Artifacts::default())
    }

    #[test]
    fn every_preset_loads_and_dense_is_the_default() {
        let presets = all();
        assert!(presets.len() >= 5, "{presets:?}");
        for (name, toml) in presets {
            read(name).unwrap_or_else(|e| panic!("{name}: {e:#}"));
            assert!(toml.starts_with("# "), "{name} begins with a comment that says what it is for");
        }
        assert_eq!(read("dense").unwrap().names(), AttentionSpec::default().names());
        assert_eq!(read("delta-vattention").unwrap().names(), ("delta", "vattention"));
    }

    #[test]
    fn json_and_mistakes() {
        assert_eq!(read(r#" {"decode": {"method": "vattention"}}"#).unwrap().names(), ("dense", "vattention"));
        let error = |text| format!("{:#}", read(text).unwrap_err());
        assert!(error("densee").contains("did you mean dense?"), "{}", error("densee"));
        assert!(error("{").contains("not valid JSON"));
        let bad = error(r#"{"decode": {"method": "vattention", "epsilon": 7}}"#);
        assert!(bad.starts_with("attention.decode.epsilon: "), "{bad}");
    }
}
