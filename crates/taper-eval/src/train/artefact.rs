//! The file of an artefact: tensors, or rows of a TOML table, and where they are from; written whole after every layer.

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
    body: Body,
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// What it holds.
#[derive(Debug, PartialEq)]
enum Body {
    /// safetensors, by name.
    Tensors(Tensors),
    /// TOML: rows of the array of tables `array` by layer, those without a layer under 0, and what stands before them.
    Rows { array: &'static str, before: &'static str, rows: BTreeMap<usize, Vec<toml::Table>> },
}

/// Layers that were not learned read everything.
const DENSE: &str = "default = { pattern = \"a_shape\", init = 0, local = 1048576 }\n";

impl Body {
    /// An empty one, by method.
    fn of(method: &str) -> Self {
        let rows = |array, before| Self::Rows { array, before, rows: BTreeMap::new() };
        match method {
            "minference" => rows("heads", DENSE),
            "sample_attention" => rows("bands", ""),
            _ => Self::Tensors(BTreeMap::new()),
        }
    }

    fn extension(&self) -> &'static str {
        match self {
            Self::Tensors(_) => "safetensors",
            Self::Rows { .. } => "toml",
        }
    }
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
    /// A new file `<folder>/<method>.safetensors`, or `.toml`, or with `resume` the one that is there.
    ///
    /// # Errors
    /// A file that is there without `resume`, or that another model, text or setting made; a folder that nothing can be written to.
    pub fn open(folder: &Path, origin: &Origin, resume: bool) -> Result<Self, TrainError> {
        let body = Body::of(origin.method);
        let path = folder.join(format!("{}.{}", origin.method, body.extension()));
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
        let mut new = Self { path, header, reports: BTreeMap::new(), body };
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
        // Hours may lie between this and the first layer to be written.
        let part = new.part();
        std::fs::File::create(&part)
            .and_then(|_| std::fs::remove_file(&part))
            .map_err(|error| TrainError::file(&part, error))?;
        Ok(new)
    }

    /// What is written before it takes the file's place.
    fn part(&self) -> PathBuf {
        self.path.with_extension(format!("{}.part", self.body.extension()))
    }

    fn take_in(&mut self, bytes: &[u8]) -> Result<(), String> {
        let there = match &mut self.body {
            Body::Tensors(tensors) => read_tensors(bytes, tensors)?,
            Body::Rows { array, rows, .. } => read_rows(bytes, array, rows)?,
        };
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
        Ok(())
    }

    /// Whether a layer is finished.
    pub fn has(&self, layer: usize) -> bool {
        match &self.body {
            Body::Tensors(tensors) => {
                let prefix = format!("layers.{layer}.");
                tensors.keys().any(|name| name.starts_with(&prefix))
            }
            Body::Rows { rows, .. } => rows.contains_key(&layer),
        }
    }

    /// Whether there is anything in it.
    pub fn is_empty(&self) -> bool {
        match &self.body {
            Body::Tensors(tensors) => tensors.is_empty(),
            Body::Rows { rows, .. } => rows.is_empty(),
        }
    }

    /// Adds tensors and what was measured of them.
    pub fn add(&mut self, tensors: Vec<Named>, reports: impl IntoIterator<Item = LayerReport>) {
        let Body::Tensors(all) = &mut self.body else { unreachable!("a file of rows is given rows") };
        for (name, shape, values) in tensors {
            let (dtype, bytes) = match values {
                Values::F32(x) => (Dtype::F32, x.iter().flat_map(|x| x.to_le_bytes()).collect()),
                Values::U32(x) => (Dtype::U32, x.iter().flat_map(|x| x.to_le_bytes()).collect()),
            };
            all.insert(name, (dtype, shape, bytes));
        }
        self.add_reports(reports);
    }

    /// Adds the rows of a layer, or all that there are, and what was measured of them.
    pub fn add_rows(&mut self, layer: usize, rows: Vec<toml::Table>, reports: impl IntoIterator<Item = LayerReport>) {
        let Body::Rows { rows: all, .. } = &mut self.body else { unreachable!("a file of tensors is given tensors") };
        all.insert(layer, rows);
        self.add_reports(reports);
    }

    fn add_reports(&mut self, reports: impl IntoIterator<Item = LayerReport>) {
        for mut report in reports {
            // Short numbers come back from the file as they were.
            let masses = report.recalls.iter_mut().flat_map(|r| &mut r.mass);
            let kept = report.kept.iter_mut().flat_map(|k| [&mut k.density, &mut k.mean, &mut k.min]);
            masses.chain(kept).for_each(|x| *x = (*x * 1e6).round() / 1e6);
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
        let bytes = match &self.body {
            Body::Tensors(tensors) => {
                let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
                    TensorView::new(*dtype, shape.clone(), bytes).map(|view| (name.as_str(), view))
                });
                let views = views.collect::<Result<Vec<_>, _>>().map_err(|e| fail(e.to_string()))?;
                safetensors::serialize(views, Some(header)).map_err(|e| fail(e.to_string()))?
            }
            Body::Rows { array, before, rows } => write_rows(&header, array, before, rows).into_bytes(),
        };
        let part = self.part();
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

/// Takes in tensors; returns the header.
fn read_tensors(bytes: &[u8], tensors: &mut Tensors) -> Result<HashMap<String, String>, String> {
    let invalid = |e: safetensors::SafeTensorError| format!("is no safetensors file: {e}");
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(invalid)?;
    for (name, view) in SafeTensors::deserialize(bytes).map_err(invalid)?.tensors() {
        tensors.insert(name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
    }
    Ok(metadata.metadata().clone().unwrap_or_default())
}

/// Fields of the header that the readers of TOML files look at; the others stand in the table `trained`.
const AT_THE_TOP: [&str; 3] = ["format", "method", "model"];

/// Takes in the rows of an array of tables; returns the header.
fn read_rows(
    bytes: &[u8],
    array: &str,
    rows: &mut BTreeMap<usize, Vec<toml::Table>>,
) -> Result<HashMap<String, String>, String> {
    let invalid = |e: &dyn std::fmt::Display| format!("is no TOML file: {e}");
    let text = std::str::from_utf8(bytes).map_err(|e| invalid(&e))?;
    let mut table: toml::Table = text.parse().map_err(|e| invalid(&e))?;
    if let Some(toml::Value::Array(all)) = table.remove(array) {
        for row in all {
            let toml::Value::Table(row) = row else { return Err(format!("`{array}` holds {row}, not a table")) };
            let layer = row.get("layer").and_then(toml::Value::as_integer).unwrap_or(0);
            let layer = usize::try_from(layer).map_err(|_| format!("`{array}` holds layer {layer}"))?;
            rows.entry(layer).or_default().push(row);
        }
    }
    let trained = match table.remove("trained") {
        Some(toml::Value::Table(trained)) => trained,
        _ => toml::Table::new(),
    };
    let text = |(key, value): (String, toml::Value)| Some((key, value.as_str()?.to_owned()));
    Ok(table.into_iter().chain(trained).filter_map(text).collect())
}

fn write_rows(
    header: &HashMap<String, String>,
    array: &str,
    before: &str,
    rows: &BTreeMap<usize, Vec<toml::Table>>,
) -> String {
    let line = |key: &str, value: &toml::Value| format!("{key} = {value}\n");
    let field = |key: &str| line(key, &toml::Value::String(header[key].clone()));
    let mut text: String = AT_THE_TOP.map(field).concat() + before;
    for row in rows.values().flatten() {
        text += &format!("\n[[{array}]]\n");
        row.iter().for_each(|(key, value)| text += &line(key, value));
    }
    text += "\n[trained]\n";
    let mut others: Vec<&String> = header.keys().filter(|key| !AT_THE_TOP.contains(&key.as_str())).collect();
    others.sort();
    others.into_iter().for_each(|key| text += &field(key));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::{Kept, Recall};
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
        let report = LayerReport { layer: 1, ..LayerReport::default() };
        file.add(vec![("layers.1.x".into(), vec![2], Values::F32(vec![1.0, 2.0]))], [report.clone()]);
        file.save().unwrap();
        let again = Artefact::open(folder, &origin(&model, 1), true).unwrap();
        assert_eq!((again.has(1), again.has(0), again.reports()), (true, false, vec![report]));
        assert_eq!(again.body, file.body);
        let error = |seed, resume| Artefact::open(folder, &origin(&model, seed), resume).unwrap_err().to_string();
        assert!(error(1, false).contains("--resume"));
        assert!(error(2, true).contains(r#"seed "1", this run has "2""#));
        std::fs::write(folder.join("kmeans.safetensors"), "no").unwrap();
        assert!(error(1, true).contains("kmeans.safetensors: is no safetensors file"));
    }

    #[test]
    fn a_folder_that_takes_no_file_is_known_before_anything_is_learned() {
        let (folder, model) = (tempfile::tempdir().unwrap(), model());
        Artefact::open(folder.path(), &origin(&model, 1), false).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing stays behind");
        // Who may write everywhere cannot write where a folder is.
        std::fs::create_dir(folder.path().join("kmeans.safetensors.part")).unwrap();
        let error = Artefact::open(folder.path(), &origin(&model, 1), false).unwrap_err().to_string();
        assert!(error.contains("kmeans.safetensors.part: "), "{error}");
    }

    /// What was measured of a model whose scores are no numbers must not keep its file from being gone on with.
    #[test]
    fn measures_that_are_no_numbers_come_back() {
        let (folder, model) = (tempfile::tempdir().unwrap(), model());
        let mut file = Artefact::open(folder.path(), &origin(&model, 1), false).unwrap();
        let recalls = vec![Recall { name: "x".into(), queries: 1, mass: [0.5, f64::NAN, 0.5, 0.5] }];
        let kept = vec![Kept { name: "y".into(), queries: 1, density: 0.5, mean: f64::NAN, min: f64::NAN }];
        file.add(Vec::new(), [LayerReport { layer: 1, recalls, kept }]);
        file.save().unwrap();
        let again = Artefact::open(folder.path(), &origin(&model, 1), true).unwrap();
        assert_eq!(format!("{:?}", again.reports()), format!("{:?}", file.reports()));
    }

    #[test]
    fn rows_come_back_by_layer_and_whatever_the_text_is_called() {
        let (folder, model) = (tempfile::tempdir().unwrap(), model());
        let text = "a \"text\"\n[trained]";
        let origin = |seed| Origin { method: "minference", text: text.into(), ..origin(&model, seed) };
        let mut file = Artefact::open(folder.path(), &origin(1), false).unwrap();
        let row = |layer: i64| -> toml::Table { format!("layer = {layer}\nreads = {{ x = 0.5 }}").parse().unwrap() };
        file.add_rows(1, vec![row(1), row(1)], [LayerReport { layer: 1, ..LayerReport::default() }]);
        file.save().unwrap();
        let again = Artefact::open(folder.path(), &origin(1), true).unwrap();
        assert_eq!((again.has(1), again.has(0), again.is_empty()), (true, false, false));
        assert_eq!(
            (&again.body, again.reports(), &again.header["text"]),
            (&file.body, file.reports(), &text.to_owned())
        );
        let error = |seed| Artefact::open(folder.path(), &origin(seed), true).unwrap_err().to_string();
        assert!(error(2).contains(r#"seed "1", this run has "2""#));
        for (content, says) in
            [("heads = [3]", "not a table"), ("[[heads]]\nlayer = -1", "layer -1"), ("\u{0}", "is no TOML file")]
        {
            std::fs::write(folder.path().join("minference.toml"), content).unwrap();
            assert!(error(1).contains(says), "{content}: {}", error(1));
        }
    }

    /// No prefix and no changed byte of a file may do more than be an error.
    #[test]
    fn a_damaged_file_is_gone_on_with_or_an_error_that_names_it() {
        let (folder, model) = (tempfile::tempdir().unwrap(), model());
        let origin = |method| Origin { method, ..origin(&model, 1) };
        let row: toml::Table = "layer = 1\nreads = { x = 0.5 }".parse().unwrap();
        for method in ["kmeans", "minference"] {
            let mut file = Artefact::open(folder.path(), &origin(method), false).unwrap();
            let report = LayerReport { layer: 1, ..LayerReport::default() };
            match method {
                "kmeans" => file.add(vec![("layers.1.x".into(), vec![1], Values::F32(vec![1.0]))], [report]),
                _ => file.add_rows(1, vec![row.clone()], [report]),
            }
            file.save().unwrap();
            let whole = std::fs::read(file.path()).unwrap();
            let open = |bytes: &[u8]| {
                std::fs::write(file.path(), bytes).unwrap();
                if let Err(error) = Artefact::open(folder.path(), &origin(method), true) {
                    assert!(error.to_string().contains(method), "{error}");
                }
            };
            for at in 0..whole.len() {
                open(&whole[..at]);
                for flip in [0x01, 0x10, 0x80, 0xff] {
                    let mut bytes = whole.clone();
                    bytes[at] ^= flip;
                    open(&bytes);
                }
            }
        }
    }
}
