//! The file of an artefact: tensors and where they are from, written whole after every layer.

use super::error::TrainError;
use super::recall::LayerReport;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use taper_attention::ModelKey;

/// A tensor to be stored.
#[derive(Debug, Clone)]
pub(super) enum Values {
    /// f32.
    F32(Vec<f32>),
    /// u32.
    U32(Vec<u32>),
}

/// A named tensor with its shape.
pub(super) type Named = (String, Vec<usize>, Values);

/// The file.
#[derive(Debug)]
pub(super) struct Artefact {
    path: PathBuf,
    header: HashMap<String, String>,
    reports: BTreeMap<usize, LayerReport>,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

/// Fields of the header that two runs must agree on for one to go on with the other's file.
const SAME: [&str; 6] = ["format", "method", "model", "text", "seed", "options"];

/// What training is known by.
pub(super) struct Origin<'a> {
    pub method: &'a str,
    pub model: &'a ModelKey,
    pub text: String,
    pub tokens: usize,
    pub seed: u64,
    pub options: String,
}

impl Artefact {
    /// A new file `<folder>/<method>.safetensors`, or with `resume` the one that is there.
    ///
    /// # Errors
    /// A file that is there without `resume`, or that another model, text or setting made.
    pub fn open(folder: &Path, origin: &Origin, resume: bool) -> Result<Self, TrainError> {
        let path = folder.join(format!("{}.safetensors", origin.method));
        let fields = [
            ("format", "taper-artefact-1"),
            ("method", origin.method),
            ("model", &origin.model.fingerprint),
            ("text", &origin.text),
            ("tokens", &origin.tokens.to_string()),
            ("seed", &origin.seed.to_string()),
            ("options", &origin.options),
            ("version", env!("CARGO_PKG_VERSION")),
        ];
        let header = fields.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let mut new = Self { path, header, reports: BTreeMap::new(), tensors: BTreeMap::new() };
        match std::fs::read(&new.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                std::fs::create_dir_all(folder).map_err(|e| TrainError::file(folder, e))?;
            }
            Err(error) => return Err(TrainError::file(&new.path, error)),
            Ok(_) if !resume => {
                return Err(TrainError::file(&new.path, "exists; --resume keeps its layers, or name another --out"));
            }
            Ok(bytes) => new.take_in(&bytes).map_err(|message| TrainError::file(&new.path, message))?,
        }
        Ok(new)
    }

    fn take_in(&mut self, bytes: &[u8]) -> Result<(), String> {
        let invalid = |e: safetensors::SafeTensorError| format!("is no safetensors file: {e}");
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(invalid)?;
        let there = metadata.metadata().clone().unwrap_or_default();
        for key in SAME {
            let (found, own) = (there.get(key).map_or("", String::as_str), self.header[key].as_str());
            if found != own {
                return Err(format!(
                    "was made with {key} {found:?}, this run has {own:?}: --resume cannot go on with it"
                ));
            }
        }
        if let Some(reports) = there.get("held_out") {
            let reports: Vec<LayerReport> =
                serde_json::from_str(reports).map_err(|e| format!("the header's `held_out`: {e}"))?;
            self.reports = reports.into_iter().map(|report| (report.layer, report)).collect();
        }
        for (name, view) in SafeTensors::deserialize(bytes).map_err(invalid)?.tensors() {
            self.tensors.insert(name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
        }
        Ok(())
    }

    /// Whether a layer is finished.
    pub fn has(&self, layer: usize) -> bool {
        let prefix = format!("layers.{layer}.");
        self.tensors.keys().any(|name| name.starts_with(&prefix))
    }

    /// Whether there is anything in it.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Adds tensors and what was measured of them.
    pub fn add(&mut self, tensors: Vec<Named>, reports: impl IntoIterator<Item = LayerReport>) {
        for (name, shape, values) in tensors {
            let (dtype, bytes) = match values {
                Values::F32(x) => (Dtype::F32, x.iter().flat_map(|x| x.to_le_bytes()).collect()),
                Values::U32(x) => (Dtype::U32, x.iter().flat_map(|x| x.to_le_bytes()).collect()),
            };
            self.tensors.insert(name, (dtype, shape, bytes));
        }
        for mut report in reports {
            // Short numbers come back from the file as they were.
            report.recalls.iter_mut().flat_map(|r| &mut r.mass).for_each(|x| *x = (*x * 1e6).round() / 1e6);
            self.reports.insert(report.layer, report);
        }
    }

    /// What was measured, by layer.
    pub fn reports(&self) -> Vec<LayerReport> {
        self.reports.values().cloned().collect()
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the file in one move: whoever reads it finds a whole one, whenever the run ends.
    ///
    /// # Errors
    /// What the system says.
    pub fn save(&self) -> Result<(), TrainError> {
        let fail = |message: String| TrainError::file(&self.path, message);
        let mut header = self.header.clone();
        header.insert("held_out".into(), serde_json::json!(self.reports()).to_string());
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            TensorView::new(*dtype, shape.clone(), bytes).map(|view| (name.as_str(), view))
        });
        let views = views.collect::<Result<Vec<_>, _>>().map_err(|e| fail(e.to_string()))?;
        let bytes = safetensors::serialize(views, Some(header)).map_err(|e| fail(e.to_string()))?;
        let part = self.path.with_extension("safetensors.part");
        let write = || {
            use std::io::Write;
            let mut file = std::fs::File::create(&part)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            std::fs::rename(&part, &self.path)
        };
        write().map_err(|e: std::io::Error| fail(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use taper_attention::AttentionShape;

    fn model() -> ModelKey {
        let shape = AttentionShape { layers: 2, q_heads: 2, kv_heads: 1, head_dim: 4, window: None };
        ModelKey { shape, fingerprint: "f".into() }
    }

    fn origin(model: &ModelKey, seed: u64) -> Origin<'_> {
        Origin { method: "kmeans", model, text: "t".into(), tokens: 7, seed, options: "o".into() }
    }

    #[test]
    fn a_file_is_gone_on_with_only_if_it_is_the_same_runs() {
        let (folder, model) = (tempfile::tempdir().unwrap(), model());
        let folder = &folder.path().join("new");
        let mut file = Artefact::open(folder, &origin(&model, 1), false).unwrap();
        assert!(file.is_empty());
        let report = LayerReport { layer: 1, recalls: Vec::new() };
        file.add(vec![("layers.1.x".into(), vec![2], Values::F32(vec![1.0, 2.0]))], [report.clone()]);
        file.save().unwrap();
        let again = Artefact::open(folder, &origin(&model, 1), true).unwrap();
        assert_eq!((again.has(1), again.has(0), again.reports()), (true, false, vec![report]));
        assert_eq!(again.tensors, file.tensors);
        let error = |seed, resume| Artefact::open(folder, &origin(&model, seed), resume).unwrap_err().to_string();
        assert!(error(1, false).contains("--resume"));
        assert!(error(2, true).contains(r#"seed "1", this run has "2""#));
        std::fs::write(folder.join("kmeans.safetensors"), "no").unwrap();
        assert!(error(1, true).contains("kmeans.safetensors: is no safetensors file"));
    }
}
