//! What methods learned offline: files of a folder, read at the start, each made for one model.

mod random;

pub use random::Sizes;
#[cfg(test)]
pub(crate) use random::{noise, written};

use crate::layer::AttentionShape;
use crate::methods;
use crate::spec::SpecError;
use safetensors::{Dtype, SafeTensors, tensor::Metadata};
use serde::de::DeserializeOwned;
use std::any::Any;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use taper_kernels::mlp::{Activation, Mlp, PerHead};

/// Which model artefacts must have been made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelKey {
    /// Its heads and layers.
    pub shape: AttentionShape,
    /// A hash of its configuration; equal for the same model from different files.
    pub fingerprint: String,
}

/// An artefact that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("artefact {}: {message}", file.display())]
pub struct ArtifactError {
    /// The file.
    pub file: PathBuf,
    /// What is wrong with it and what is valid.
    pub message: String,
}

/// What methods find where they run: the artefacts at hand, the place, and what goes without saying there.
#[derive(Debug, Clone, Default)]
pub struct Artifacts {
    folder: Option<PathBuf>,
    loaded: BTreeMap<&'static str, Loaded>,
    /// What was made for another model, with the fingerprints of both.
    foreign: BTreeMap<&'static str, Foreign>,
    place: Place,
    dense_below: usize,
}

/// Whom an artefact fits, and whom it would have to.
#[derive(Debug, Clone, thiserror::Error)]
#[error("was made for another model ({made_for}); this one is {own}")]
struct Foreign {
    made_for: String,
    own: String,
}

/// Where the cache is that a method of generated tokens attends over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Place {
    /// In host memory: every method runs.
    #[default]
    Host,
    /// On a device of its own: methods and settings that only run in host memory are refused.
    Device,
}

/// What a file was read into.
pub(crate) type Loaded = Arc<dyn Any + Send + Sync>;

/// A kind of artefact, as its method declares it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ArtifactKind {
    /// The file's name in the folder.
    pub file: &'static str,
    /// What makes one.
    pub made_by: &'static str,
    /// Reads it; the message says what is wrong.
    pub read: fn(&ArtifactFile) -> Result<Loaded, String>,
}

/// A file being read.
pub(crate) struct ArtifactFile<'a> {
    /// Its bytes.
    pub bytes: &'a [u8],
    /// The model that it must fit.
    pub model: &'a ModelKey,
}

/// The most characters of a message, which may quote the file.
const MESSAGE_MAX: usize = 600;

impl ArtifactKind {
    /// Reads a file; what the message quotes of it is no longer than it helps and holds nothing that a terminal obeys.
    fn load(&self, file: &ArtifactFile) -> Result<Loaded, String> {
        (self.read)(file).map_err(|message| plain(&message))
    }
}

/// A message, or a piece of one, with no more of a file than helps and nothing that a terminal obeys.
fn plain(message: &str) -> String {
    let plain = |c: char| if c.is_control() && c != '\n' { char::REPLACEMENT_CHARACTER } else { c };
    let dots = if message.chars().nth(MESSAGE_MAX).is_some() { "…" } else { "" };
    message.chars().take(MESSAGE_MAX).map(plain).chain(dots.chars()).collect()
}

impl Artifacts {
    /// Reads every artefact that a folder has. One that was made for another model is [known](Self::foreign), and refused to
    /// whoever asks for it.
    ///
    /// # Errors
    /// [`ArtifactError`] with the file that is unreadable or malformed; a folder without any.
    pub fn open(folder: &Path, model: &ModelKey) -> Result<Self, ArtifactError> {
        let fail = |file: &Path, message: String| ArtifactError { file: file.to_owned(), message };
        let (mut loaded, mut foreign) = (BTreeMap::new(), BTreeMap::new());
        let kinds = methods::artifacts();
        for kind in &kinds {
            let path = folder.join(kind.file);
            // A device may never end, and a pipe waits for whoever writes.
            match std::fs::metadata(&path) {
                Ok(metadata) if metadata.is_file() => {}
                Ok(_) => return Err(fail(&path, "is not a regular file".to_owned())),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(fail(&path, error.to_string())),
            }
            let bytes = std::fs::read(&path).map_err(|error| fail(&path, error.to_string()))?;
            let file = ArtifactFile { bytes: &bytes, model };
            match file.foreign() {
                Some(found) => drop(foreign.insert(kind.file, found)),
                None => drop(loaded.insert(kind.file, kind.load(&file).map_err(|message| fail(&path, message))?)),
            }
        }
        if loaded.is_empty() && foreign.is_empty() {
            let known: Vec<&str> = kinds.iter().map(|kind| kind.file).collect();
            return Err(fail(folder, format!("holds none of {}", known.join(", "))));
        }
        Ok(Self { folder: Some(folder.to_owned()), loaded, foreign, place: Place::default(), dense_below: 0 })
    }

    /// The same, for methods that run there.
    #[must_use]
    pub fn at(self, place: Place) -> Self {
        Self { place, ..self }
    }

    /// The same, where rows that see fewer tokens read all of them by any decode method, unless a spec's `dense_below` says
    /// otherwise.
    #[must_use]
    pub fn with_dense_below(self, tokens: usize) -> Self {
        Self { dense_below: tokens, ..self }
    }

    /// From how many tokens on decode methods choose, where a spec does not say it.
    pub fn dense_below(&self) -> usize {
        self.dense_below
    }

    pub(crate) fn place(&self) -> Place {
        self.place
    }

    /// The names of those that are loaded.
    pub fn names(&self) -> Vec<&'static str> {
        self.loaded.keys().copied().collect()
    }

    /// Those that are there and made for another model: the files' names, and which.
    pub fn foreign(&self) -> impl Iterator<Item = (&'static str, String)> {
        self.foreign.iter().map(|(file, foreign)| (*file, foreign.to_string()))
    }

    /// One artefact, as the method at `path` of a request needs it.
    pub(crate) fn get<T: Any + Send + Sync>(&self, kind: &ArtifactKind, path: &str) -> Result<Arc<T>, SpecError> {
        let missing = || {
            let place = match (&self.folder, self.foreign.get(kind.file)) {
                (_, Some(foreign)) => foreign.to_string(),
                (Some(folder), _) => format!("is not in {}", folder.display()),
                (None, _) => "is not here: --artifacts DIR names the folder that has it".to_owned(),
            };
            let message = format!("needs the artefact {}, which {place}; `{}` makes it", kind.file, kind.made_by);
            SpecError { artefact: Some(kind.file), ..SpecError::new(path, message) }
        };
        let loaded = self.loaded.get(kind.file).ok_or_else(missing)?;
        Ok(loaded.clone().downcast().expect("a kind is read into one type"))
    }

    /// Takes in the content of a file that is not in a folder.
    pub(crate) fn with(mut self, file: &str, bytes: &[u8], model: &ModelKey) -> Result<Self, String> {
        let kind = methods::artifacts().into_iter().find(|kind| kind.file == file).expect("a kind of artefact");
        self.loaded.insert(kind.file, kind.load(&ArtifactFile { bytes, model })?);
        Ok(self)
    }
}

/// The tensors of a safetensors artefact whose header names its method and model.
pub(crate) struct Tensors<'a>(SafeTensors<'a>);

/// The header's fields: the format, the method, and the fingerprint of the model.
const FORMAT: (&str, &str) = ("format", "taper-artefact-1");
const MODEL: &str = "model";

impl<'a> ArtifactFile<'a> {
    /// What model it was made for, if it is an artefact of ours and that is another one.
    fn foreign(&self) -> Option<Foreign> {
        let header = |key: &str| match SafeTensors::read_metadata(self.bytes) {
            Ok((_, metadata)) => metadata.metadata().as_ref()?.get(key).cloned(),
            Err(_) => {
                let table: toml::Table = std::str::from_utf8(self.bytes).ok()?.parse().ok()?;
                Some(table.get(key)?.as_str()?.to_owned())
            }
        };
        (header(FORMAT.0)? == FORMAT.1).then_some(())?;
        self.unless_ours(&header(MODEL)?).err()
    }

    /// An error for what was made for another model.
    fn unless_ours(&self, made_for: &str) -> Result<(), Foreign> {
        let own = &self.model.fingerprint;
        if made_for == own { Ok(()) } else { Err(Foreign { made_for: plain(made_for), own: own.clone() }) }
    }

    /// The tensors, once the header agrees with the method and the model.
    pub fn tensors(&self, method: &str) -> Result<(Tensors<'a>, Metadata), String> {
        let (_, metadata) =
            SafeTensors::read_metadata(self.bytes).map_err(|e| format!("is no safetensors file: {e}"))?;
        let header = |key: &str| {
            let fields = metadata.metadata().as_ref();
            fields.and_then(|m| m.get(key)).map(String::as_str).ok_or_else(|| format!("the header lacks `{key}`"))
        };
        for (key, wanted) in [FORMAT, ("method", method)] {
            let found = header(key)?;
            if found != wanted {
                return Err(format!("the header's `{key}` is {found:?}; expected {wanted:?}"));
            }
        }
        self.unless_ours(header(MODEL)?).map_err(|foreign| foreign.to_string())?;
        let tensors = SafeTensors::deserialize(self.bytes).map_err(|e| format!("is no safetensors file: {e}"))?;
        Ok((Tensors(tensors), metadata))
    }

    /// The content of a TOML artefact, once its fields `format`, `method` and `model` agree with the method and the
    /// model; the other fields are `T`'s, but for the table `trained`, which says what made it.
    pub fn toml<T: DeserializeOwned>(&self, method: &str) -> Result<T, String> {
        let text = std::str::from_utf8(self.bytes).map_err(|e| format!("is no TOML file: {e}"))?;
        let mut table: toml::Table = text.parse().map_err(|e| format!("is no TOML file: {e}"))?;
        let mut field = |key: &str| match table.remove(key) {
            Some(toml::Value::String(found)) => Ok(found),
            Some(other) => Err(format!("`{key}` is {other}; expected a string")),
            None => Err(format!("lacks the field `{key}`")),
        };
        for (key, wanted) in [FORMAT, ("method", method)] {
            let found = field(key)?;
            if found != wanted {
                return Err(format!("`{key}` is {found:?}; expected {wanted:?}"));
            }
        }
        self.unless_ours(&field(MODEL)?).map_err(|foreign| foreign.to_string())?;
        table.remove("trained");
        table.try_into().map_err(|e: toml::de::Error| e.message().to_owned())
    }
}

impl Tensors<'_> {
    /// Shape of a tensor, if there is one of the name.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.0.tensor(name).ok().map(|t| t.shape().to_vec())
    }

    /// A tensor of finite f32 (or f16, or bf16) numbers of a shape; `0` in it stands for any size but none.
    pub fn numbers(&self, name: &str, shape: &[usize]) -> Result<(Vec<usize>, Vec<f32>), String> {
        let tensor = self.0.tensor(name).map_err(|_| format!("lacks the tensor `{name}`"))?;
        let data = tensor.data();
        let numbers: Vec<f32> = match tensor.dtype() {
            Dtype::F32 => data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::F16 => data.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::BF16 => data.as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect(),
            other => return Err(format!("`{name}` is {other:?}; expected F32, F16 or BF16")),
        };
        check_shape(name, tensor.shape(), shape)?;
        if !numbers.iter().all(|x| x.is_finite()) {
            return Err(format!("`{name}` holds NaN or infinity"));
        }
        Ok((tensor.shape().to_vec(), numbers))
    }

    /// Perceptrons side by side, one for each of `heads`, from `inputs` numbers to `outputs` in so many layers:
    /// `prefix.DEPTH.weight` `[heads, outputs, inputs]` and `prefix.DEPTH.bias` `[heads, outputs]`.
    pub fn perceptrons(
        &self,
        prefix: &str,
        heads: usize,
        (inputs, layers, outputs): (usize, usize, usize),
        activation: Activation,
    ) -> Result<PerHead<Mlp>, String> {
        let (mut all, mut width) = (vec![Vec::new(); heads], inputs);
        for depth in 0..layers {
            let wanted = if depth + 1 == layers { outputs } else { 0 };
            let (found, weight) = self.numbers(&format!("{prefix}.{depth}.weight"), &[heads, wanted, width])?;
            let (_, bias) = self.numbers(&format!("{prefix}.{depth}.bias"), &[heads, found[1]])?;
            let parts = weight.chunks(found[1] * width).zip(bias.chunks(found[1]));
            all.iter_mut()
                .zip(parts)
                .for_each(|(layers, (weight, bias))| layers.push((weight.to_vec(), bias.to_vec())));
            width = found[1];
        }
        all.into_iter().map(|layers| Mlp::new(layers, activation).map_err(|e| e.to_string())).collect()
    }

    /// A tensor of whole numbers below `limit` (u32 or i64) of a shape as in [`numbers`](Self::numbers).
    pub fn indices(&self, name: &str, shape: &[usize], limit: usize) -> Result<(Vec<usize>, Vec<u32>), String> {
        let tensor = self.0.tensor(name).map_err(|_| format!("lacks the tensor `{name}`"))?;
        let data = tensor.data();
        let numbers: Vec<i64> = match tensor.dtype() {
            Dtype::U32 => data.as_chunks().0.iter().map(|b| i64::from(u32::from_le_bytes(*b))).collect(),
            Dtype::I64 => data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
            other => return Err(format!("`{name}` is {other:?}; expected U32 or I64")),
        };
        check_shape(name, tensor.shape(), shape)?;
        if let Some(bad) = numbers.iter().find(|&&x| x < 0 || x >= limit as i64) {
            return Err(format!("`{name}` holds {bad}; valid are 0 to {}", limit - 1));
        }
        Ok((tensor.shape().to_vec(), numbers.into_iter().map(|x| x as u32).collect()))
    }
}

fn check_shape(name: &str, found: &[usize], wanted: &[usize]) -> Result<(), String> {
    let fits =
        found.len() == wanted.len() && found.iter().zip(wanted).all(|(f, w)| if *w == 0 { *f > 0 } else { f == w });
    let spelt =
        || wanted.iter().map(|w| if *w == 0 { "any".into() } else { w.to_string() }).collect::<Vec<_>>().join(", ");
    if fits { Ok(()) } else { Err(format!("`{name}` is {found:?}; expected [{}]", spelt())) }
}

#[cfg(test)]
mod tests;
