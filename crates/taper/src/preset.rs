//! Presets of attention: the files of configs/attention, which the program carries, and those of a folder.

use crate::settings::wrong;
use anyhow::{Context, Result, anyhow, bail};
use include_dir::{Dir, include_dir};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use taper_attention::{Artifacts, AttentionSpec, phase_of};
use taper_server::nameless;

static OWN: Dir = include_dir!("$CARGO_MANIFEST_DIR/../../configs/attention");

/// Presets by their names.
#[derive(Debug, Clone)]
pub struct Presets(BTreeMap<String, Preset>);

/// One file.
#[derive(Debug, Clone)]
struct Preset {
    /// Where it is, for errors.
    place: String,
    /// Its first line, which says what it is for.
    about: String,
    value: Value,
}

impl Preset {
    fn parse(place: String, toml: &str) -> Result<Self> {
        let about = toml.lines().next().and_then(|line| line.strip_prefix('#')).unwrap_or_default().trim().into();
        let value: Value = toml::from_str(toml).map_err(|e| wrong(&place, toml, &e))?;
        Ok(Self { place, about, value })
    }

    fn spec(&self, artifacts: &Artifacts) -> Result<AttentionSpec> {
        spec(&self.value, artifacts).with_context(|| self.place.clone())
    }
}

impl Presets {
    /// The program's own, and those of a folder: every `.toml` file there, by its name. One that is called as one of
    /// the program's is in its place.
    ///
    /// # Errors
    /// A folder or file that cannot be read, or that is no TOML.
    pub fn read(folder: Option<&Path>) -> Result<Self> {
        let toml = |path: &Path| path.extension().is_some_and(|end| end == "toml");
        let name = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let mut all = BTreeMap::new();
        for file in OWN.files().filter(|file| toml(file.path())) {
            let text = file.contents_utf8().unwrap_or_default();
            all.insert(name(file.path()), Preset::parse(format!("preset {}", name(file.path())), text)?);
        }
        if let Some(folder) = folder {
            let place = || format!("presets: {}", folder.display());
            for entry in std::fs::read_dir(folder).with_context(place)? {
                let path = entry.with_context(place)?.path();
                if toml(&path) {
                    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                    all.insert(name(&path), Preset::parse(path.display().to_string(), &text)?);
                }
            }
        }
        Ok(Self(all))
    }

    /// Every name, and what it is for.
    pub fn names(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, preset)| (name.as_str(), preset.about.as_str()))
    }

    /// All of them, ready for use.
    ///
    /// # Errors
    /// The file, its field at fault and what is valid, or an artefact that is not there.
    pub fn specs(&self, artifacts: &Artifacts) -> Result<BTreeMap<String, AttentionSpec>> {
        self.0.iter().map(|(name, preset)| Ok((name.clone(), preset.spec(artifacts)?))).collect()
    }

    /// The JSON form of what follows `--attention`: JSON, a preset's name, or a method's, which then goes by its defaults: answers
    /// by a method of both phases, prompts by one for prompts alone, and all else is dense.
    ///
    /// # Errors
    /// Text that is no JSON, or a name that neither a preset nor a method has.
    pub fn check(&self, text: &str) -> Result<Value> {
        if text.trim_start().starts_with('{') {
            return serde_json::from_str(text).context("the attention is not valid JSON");
        }
        if let Some(preset) = self.0.get(text) {
            return Ok(preset.value.clone());
        }
        if let Some(phase) = phase_of(text) {
            return Ok(json!({(phase): text}));
        }
        let presets: Vec<&str> = self.0.keys().map(String::as_str).collect();
        bail!("no attention {}, or give JSON, such as {{\"decode\": \"quest\"}}", nameless(text, &presets))
    }

    /// What follows `--attention`, as [`check`](Self::check) reads it.
    ///
    /// # Errors
    /// As [`check`](Self::check), or what is no valid spec.
    pub fn find(&self, text: &str, artifacts: &Artifacts) -> Result<AttentionSpec> {
        let value = self.check(text)?;
        match self.0.get(text) {
            Some(preset) => preset.spec(artifacts),
            None => spec(&value, artifacts),
        }
    }
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

    fn find(text: &str) -> Result<AttentionSpec> {
        Presets::read(None).unwrap().find(text, &Artifacts::default())
    }

    #[test]
    fn every_preset_loads_and_dense_is_the_default() {
        let presets = Presets::read(None).unwrap();
        assert!(presets.specs(&Artifacts::default()).unwrap().len() >= 5, "{presets:?}");
        for (name, about) in presets.names() {
            assert!(!about.is_empty(), "{name} begins with a comment that says what it is for");
        }
        assert_eq!(find("dense").unwrap().names(), AttentionSpec::default().names());
        assert_eq!(find("delta-vattention").unwrap().names(), ("delta", "vattention"));
    }

    #[test]
    fn hip_searches_as_its_library_does_and_under_delta_as_that_paper_does() {
        let hip = serde_json::to_value(find(r#"{"prefill": {"method": "hip"}}"#).unwrap()).unwrap();
        let delta = serde_json::to_value(find("delta-hip").unwrap()).unwrap();
        let chunks = |hip: &serde_json::Value| {
            hip["stages"].as_array().unwrap().iter().map(|stage| stage["chunk"].as_u64().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(chunks(&hip["prefill"]), [256, 32, 8]);
        assert_eq!(chunks(&delta["prefill"]["base"]), [256, 8, 2]);
    }

    #[test]
    fn json_and_mistakes() {
        assert_eq!(find(r#" {"decode": {"method": "vattention"}}"#).unwrap().names(), ("dense", "vattention"));
        let error = |text| format!("{:#}", find(text).unwrap_err());
        assert!(error("{").contains("not valid JSON"));
        let bad = error(r#"{"decode": {"method": "vattention", "epsilon": 7}}"#);
        assert!(bad.starts_with("attention.decode.epsilon: "), "{bad}");
    }

    #[test]
    fn a_method_goes_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("quest.toml"), "[decode]\nmethod = 'santa'\n").unwrap();
        for (text, prefill, decode) in [
            ("quest", "dense", "quest"),
            ("streaming_llm", "dense", "streaming_llm"),
            ("hip", "hip", "dense"),
            // Presets go first.
            ("vattention", "dense", "vattention"),
            ("delta-vattention", "delta", "vattention"),
            (r#"{"prefill": "bigbird"}"#, "bigbird", "dense"),
        ] {
            assert_eq!(find(text).unwrap().names(), (prefill, decode), "{text}");
        }
        let other = Presets::read(Some(folder.path())).unwrap();
        assert_eq!(other.find("quest", &Artifacts::default()).unwrap().names(), ("dense", "santa"));
        for (text, says) in [
            ("qest", "no attention preset or method is called \"qest\", did you mean \"quest\"?; presets: "),
            ("vatention", ", did you mean \"vattention\"?"),
            ("oracle", "no attention preset or method is called \"oracle\""),
            ("", "methods: bigbird, delta, dense, "),
            ("saap", "saap"),
            ("{", "not valid JSON"),
        ] {
            let error = format!("{:#}", find(text).unwrap_err());
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn a_folder_adds_its_own_and_may_replace_ours() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let read = || Presets::read(Some(folder.path()));
        write("contracts.toml", "# Long contracts.\n[decode]\nmethod = 'quest'\n");
        write("delta.toml", "[prefill]\nmethod = 'streaming_llm'\n");
        write("notes.txt", "not one");
        let presets = read().unwrap();
        assert_eq!(presets.names().find(|(name, _)| *name == "contracts"), Some(("contracts", "Long contracts.")));
        let specs = presets.specs(&Artifacts::default()).unwrap();
        assert_eq!((specs["contracts"].names(), specs["delta"].names().0), (("dense", "quest"), "streaming_llm"));
        assert!(specs.contains_key("dense") && !specs.contains_key("notes"));
        write("bad.toml", "[decode]\nmethod = 'quest'\npage = 0\n");
        let error = format!("{:#}", read().unwrap().specs(&Artifacts::default()).unwrap_err());
        assert!(error.contains("bad.toml: attention.decode.page"), "{error}");
        write("bad.toml", "# A preset.\ndecode = ");
        let error = format!("{:#}", read().unwrap_err());
        assert!(error.contains("bad.toml:2: "), "{error}");
        let error = format!("{:#}", Presets::read(Some(Path::new("/nowhere"))).unwrap_err());
        assert!(error.starts_with("presets: /nowhere"), "{error}");
    }
}
