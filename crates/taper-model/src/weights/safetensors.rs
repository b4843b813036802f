//! Float weights from safetensors: one file, or shards with an index.

use super::{Embedding, FileRows, Role, UNREAD, Weights, activation_dtype, expected_shape, float_dtype, unread_part};
use crate::config::{LoadOptions, ModelConfig};
use crate::error::{ModelError, quoted};
use crate::mapped::MappedFile;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde::Deserialize;
use std::cell::OnceCell;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use taper_kernels::linear::Linear;

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The output head's name. Who saves a tensor that has two names once may keep this one for the table of embeddings.
const HEAD: &str = "lm_head.weight";

/// The longest name of a file, in bytes, on the systems we run on.
const FILE_NAME_MAX: usize = 255;

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

/// One tensor's place.
struct Entry {
    file: usize,
    dtype: DType,
    shape: Vec<usize>,
    range: Range<usize>,
}

/// The tensors of a folder's files.
pub(super) struct Files {
    files: Vec<MappedFile>,
    entries: HashMap<String, Entry>,
    /// Where a tensor that is in no file should have been.
    listing: PathBuf,
}

/// An opened checkpoint with what its tensors must agree with.
pub(super) struct Safetensors<'a> {
    files: Files,
    config: &'a ModelConfig,
    options: LoadOptions,
    device: &'a Device,
    /// Whether the output head is the embedding table.
    tied: bool,
    /// The embedding table, where it is on the device.
    table: OnceCell<Tensor>,
}

impl Files {
    /// Maps the files and reads their headers.
    pub(super) fn open(folder: &Path) -> Result<Self, ModelError> {
        let (listing, names) = list(folder)?;
        let mut files = Self { files: Vec::new(), entries: HashMap::new(), listing };
        for name in names {
            files.add(&folder.join(name))?;
        }
        Ok(files)
    }

    /// Names, forms and bytes of all tensors, in no order.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&str, String, &[u8])> {
        let form = |entry: &Entry| format!("{:?} {:?}", entry.dtype, entry.shape);
        self.entries.iter().map(move |(name, entry)| (name.as_str(), form(entry), self.bytes(entry)))
    }

    fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.files[entry.file].bytes()[entry.range.clone()]
    }

    /// A role's tensor by its name. A network saved without its head (LlamaModel, MistralModel) leaves out the prefix.
    fn get(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name).or_else(|| self.entries.get(name.strip_prefix("model.")?))
    }

    /// Whether there is a head that could be the table of embeddings, and is not.
    fn has_own_head(&self) -> bool {
        let both = self.get(&name(Role::Embedding, 0)).zip(self.get(HEAD));
        both.is_some_and(|(table, head)| table.shape == head.shape && self.bytes(table) != self.bytes(head))
    }

    /// Refuses biases, which the configuration would have to tell of, unless they are 0, as converters write them; warns of
    /// other parts of layers that nothing reads.
    fn check_unread(&self) -> Result<(), ModelError> {
        let unread = self.unread();
        let adds =
            |name: &&&str| name.ends_with(".bias") && self.bytes(&self.entries[**name]).iter().any(|byte| *byte != 0);
        if let Some(bias) = unread.iter().find(adds) {
            return Err(ModelError::invalid(self.files[self.entries[*bias].file].path(), bias, UNREAD));
        }
        let others: Vec<&str> = unread.into_iter().filter(|name| !name.ends_with(".bias")).collect();
        if !others.is_empty() {
            let few = quoted(others[..others.len().min(3)].join(", "));
            let (path, count) = (self.listing.display(), others.len());
            tracing::warn!(
                "{path}: {count} tensors of layers are not read ({few}): answers may be others than they should be"
            );
        }
        Ok(())
    }

    /// Parts of layers that nothing reads, but for angles, which old files keep. In order of their names.
    fn unread(&self) -> Vec<&str> {
        let is_unread = |tensor: &&str| {
            let tensor = if tensor.starts_with("model.") { (*tensor).to_owned() } else { format!("model.{tensor}") };
            let part = unread_part(&tensor, "model.layers.", name);
            part.is_some_and(|part| part != "self_attn.rotary_emb.inv_freq")
        };
        let mut unread: Vec<&str> = self.entries.keys().map(String::as_str).filter(is_unread).collect();
        unread.sort_unstable();
        unread
    }

    fn add(&mut self, path: &Path) -> Result<(), ModelError> {
        let file = MappedFile::open(path)?;
        let bytes = file.bytes();
        // Checks that offsets are in order, agree with shapes, and end where the file does.
        let (header_size, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| {
            let hint = match e {
                SafeTensorError::MetadataIncompleteBuffer => " (truncated?)",
                _ => "",
            };
            ModelError::invalid(path, "header", format!("{e}{hint}"))
        })?;
        // The header's own length word comes before it.
        let data = header_size + 8;
        for (name, info) in metadata.tensors() {
            let dtype = match info.dtype {
                Dtype::F32 => DType::F32,
                Dtype::F16 => DType::F16,
                Dtype::BF16 => DType::BF16,
                // Buffers that older checkpoints carry; refused only if the network asks for one.
                _ => DType::U8,
            };
            let range = data + info.data_offsets.0..data + info.data_offsets.1;
            let entry = Entry { file: self.files.len(), dtype, shape: info.shape.clone(), range };
            self.entries.insert(name, entry);
        }
        self.files.push(file);
        Ok(())
    }
}

impl<'a> Safetensors<'a> {
    /// Maps the files and reads their headers.
    pub(super) fn open(
        folder: &Path,
        config: &'a ModelConfig,
        options: &LoadOptions,
        device: &'a Device,
    ) -> Result<Self, ModelError> {
        let files = Files::open(folder)?;
        if files.get(&name(Role::AttentionNorm, config.layers)).is_some() {
            let reason = format!("is {}, but the checkpoint holds more layers", config.layers);
            return Err(ModelError::invalid(&folder.join("config.json"), "num_hidden_layers", reason));
        }
        files.check_unread()?;
        let tied = config.tie_embeddings && !files.has_own_head();
        if config.tie_embeddings && !tied {
            tracing::warn!(
                "{}: tie_word_embeddings is true, but {HEAD} is another tensor than the table of embeddings: it is the output, as in \
                 transformers from version 5 on",
                files.listing.display()
            );
        }
        let (options, table) = (options.clone(), OnceCell::new());
        Ok(Self { files, config, options, device, tied, table })
    }

    /// A role's tensor, its shape and dtype checked.
    fn find(&self, role: Role, layer: usize) -> Result<&Entry, ModelError> {
        let name = name(role, layer);
        let missing = || match role {
            Role::Head => "lm_head.weight, without which only a model with tie_word_embeddings = true has an output,",
            _ => name.as_str(),
        };
        let shared = role == Role::Embedding && self.tied;
        let entry = self.files.get(&name).or_else(|| self.files.get(HEAD).filter(|_| shared));
        let entry = entry.ok_or_else(|| ModelError::missing(&self.files.listing, missing()))?;
        let path = self.file(entry).path();
        let expected = expected_shape(self.config, role);
        if entry.shape != expected {
            return Err(ModelError::shape(path, &name, &expected, &entry.shape));
        }
        if entry.dtype == DType::U8 {
            return Err(ModelError::unsupported(path, &name, "a dtype other than f32, f16 and bf16"));
        }
        Ok(entry)
    }

    /// The file that holds a tensor.
    fn file(&self, entry: &Entry) -> &MappedFile {
        &self.files.files[entry.file]
    }

    /// One dtype for the whole network, after the first layer's query projection.
    fn weight_dtype(&self) -> DType {
        let stored = self.files.get(&name(Role::Query, 0)).map_or(DType::F32, |entry| entry.dtype);
        float_dtype(&self.options, stored)
    }

    /// Whose tensor the output head is.
    fn head_role(&self) -> Role {
        if self.tied { Role::Embedding } else { Role::Head }
    }

    /// A tensor as it is stored, on the device.
    fn load(&self, role: Role, layer: usize, dtype: DType) -> Result<Tensor, ModelError> {
        let entry = self.find(role, layer)?;
        let bytes = self.files.bytes(entry);
        let tensor = Tensor::from_raw_buffer(bytes, entry.dtype, &entry.shape, self.device)?.to_dtype(dtype)?;
        self.file(entry).release(&entry.range);
        Ok(tensor)
    }
}

impl Weights for Safetensors<'_> {
    fn embedding(&self) -> Result<Embedding, ModelError> {
        let entry = self.find(Role::Embedding, 0)?;
        if self.device.is_cuda() {
            // A prompt's rows would come over the bus, by way of copies on the host.
            let table = self.load(Role::Embedding, 0, entry.dtype)?;
            return Ok(Embedding::Table(self.table.get_or_init(|| table).clone()));
        }
        Ok(Embedding::File(FileRows {
            file: self.file(entry).clone(),
            start: entry.range.start,
            rows: self.config.vocab_size,
            columns: self.config.hidden_size,
            dtype: match entry.dtype {
                DType::F16 => GgmlDType::F16,
                DType::BF16 => GgmlDType::BF16,
                _ => GgmlDType::F32,
            },
            device: self.device.clone(),
        }))
    }

    fn norm(&self, role: Role, layer: usize) -> Result<Tensor, ModelError> {
        self.load(role, layer, DType::F32)
    }

    fn projections(&self, roles: &[Role], layer: usize) -> Result<Vec<Linear>, ModelError> {
        let dtype = self.weight_dtype();
        let weights: Vec<Tensor> =
            roles.iter().map(|role| self.load(*role, layer, dtype)).collect::<Result<_, ModelError>>()?;
        let joint = if weights.len() == 1 { weights[0].clone() } else { Tensor::cat(&weights, 0)? };
        Ok(vec![Linear::dense(joint)?])
    }

    fn head(&self) -> Result<Linear, ModelError> {
        let role = self.head_role();
        let tied = self.table.get().filter(|table| role == Role::Embedding && table.dtype() == self.weight_dtype());
        let weight = tied.map_or_else(|| self.load(role, 0, self.weight_dtype()), |table| Ok(table.clone()))?;
        Ok(Linear::dense(weight)?)
    }

    fn bytes(&self, role: Role, layer: usize) -> Result<u64, ModelError> {
        let entry = self.find(if role == Role::Head { self.head_role() } else { role }, layer)?;
        let on_device = self.device.is_cuda();
        let dtype = match role {
            Role::Embedding if on_device => entry.dtype,
            Role::Embedding => return Ok(0),
            Role::Head if on_device && self.tied && entry.dtype == self.weight_dtype() => {
                return Ok(0);
            }
            role if role.is_norm() => DType::F32,
            _ => self.weight_dtype(),
        };
        Ok((entry.shape.iter().product::<usize>() * dtype.size_in_bytes()) as u64)
    }

    fn activation_dtype(&self) -> DType {
        activation_dtype(self.weight_dtype(), self.device)
    }
}

/// The files to map, and the one to blame for a tensor that none of them has.
fn list(folder: &Path) -> Result<(PathBuf, BTreeSet<String>), ModelError> {
    let index = folder.join(INDEX);
    let single = folder.join(SINGLE);
    // Beside a whole file an index is what is left of its parts.
    if single.exists() {
        return Ok((single, BTreeSet::from([SINGLE.to_owned()])));
    }
    if !index.exists() {
        return Err(ModelError::missing(folder, format!("{SINGLE} or {INDEX}")));
    }
    let names = indexed(&index)?;
    match names.iter().find(|name| !folder.join(name).exists()) {
        Some(name) => Err(ModelError::missing(&folder.join(name), "file")),
        None => Ok((index, names)),
    }
}

/// The files that an index names.
///
/// # Errors
/// An index that cannot be read or names what is no file of its folder.
pub(crate) fn indexed(index: &Path) -> Result<BTreeSet<String>, ModelError> {
    let parsed: Index = crate::json::read(index)?;
    let names: BTreeSet<String> = parsed.weight_map.into_values().collect();
    for name in &names {
        // An index may not lead out of its folder, nor fill a message with a name that no file has.
        let plain = Path::new(name).file_name().is_some_and(|file| file == name.as_str());
        if !plain || name.len() > FILE_NAME_MAX || name.contains(char::is_control) {
            return Err(ModelError::invalid(index, "weight_map", format!("'{name}' is not a plain file name")));
        }
    }
    Ok(names)
}

/// Hugging Face's names.
fn name(role: Role, layer: usize) -> String {
    let in_layer = |part: &str| format!("model.layers.{layer}.{part}.weight");
    match role {
        Role::Embedding => "model.embed_tokens.weight".to_owned(),
        Role::FinalNorm => "model.norm.weight".to_owned(),
        Role::Head => HEAD.to_owned(),
        Role::AttentionNorm => in_layer("input_layernorm"),
        Role::Query => in_layer("self_attn.q_proj"),
        Role::Key => in_layer("self_attn.k_proj"),
        Role::Value => in_layer("self_attn.v_proj"),
        Role::Output => in_layer("self_attn.o_proj"),
        Role::FeedForwardNorm => in_layer("post_attention_layernorm"),
        Role::Gate => in_layer("mlp.gate_proj"),
        Role::Up => in_layer("mlp.up_proj"),
        Role::Down => in_layer("mlp.down_proj"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_layers_that_nothing_reads_are_told() {
        let entry = || Entry { file: 0, dtype: DType::F32, shape: vec![1], range: 0..4 };
        let names = [
            "model.layers.0.self_attn.q_proj.weight",
            "layers.1.mlp.up_proj.weight",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "model.layers.1.self_attn.q_norm.weight",
            "layers.10.self_attn.q_proj.bias",
            "model.embed_tokens.weight",
            "lm_head.weight",
        ];
        let entries = names.map(|name| (name.to_owned(), entry())).into();
        let files = Files { files: Vec::new(), entries, listing: PathBuf::new() };
        assert_eq!(files.unread(), ["layers.10.self_attn.q_proj.bias", "model.layers.1.self_attn.q_norm.weight"]);
    }
}
