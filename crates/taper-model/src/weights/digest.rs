//! What tells a model's weights from others of the same shape, at the price of a few bytes of each tensor.

use super::safetensors::Files;
use crate::config::fingerprint;
use crate::error::ModelError;
use crate::gguf::Gguf;
use crate::source::{ModelFiles, ResolvedModel};
use sha2::{Digest, Sha256};

/// Places of a tensor that are looked at, from its beginning to its end, and the bytes of each. Training changes nearly every
/// weight of the tensors that it changes.
const PLACES: usize = 16;
const PLACE_BYTES: usize = 64;

/// The beginning of a SHA-256 over names, types and shapes of a checkpoint's tensors and a sample of their bytes.
/// However they are cut into files, it is the same; that of a GGUF file and of the folder that it was made from differ.
///
/// # Errors
/// [`ModelError`] naming the file that cannot be read.
pub fn weights_digest(model: &ResolvedModel) -> Result<String, ModelError> {
    Ok(match &model.files {
        ModelFiles::Folder(folder) => digest(Files::open(folder)?.tensors()),
        ModelFiles::Gguf(path) => digest(Gguf::open(path)?.tensors()),
    })
}

fn digest<'a>(tensors: impl Iterator<Item = (&'a str, String, &'a [u8])>) -> String {
    let mut tensors: Vec<_> = tensors.collect();
    tensors.sort_by_key(|(name, ..)| *name);
    let mut hash = Sha256::new();
    for (name, form, bytes) in tensors {
        hash.update(format!("{name:?} {form}\n"));
        if bytes.len() <= PLACES * PLACE_BYTES {
            hash.update(bytes);
            continue;
        }
        for place in 0..PLACES {
            let at = (bytes.len() - PLACE_BYTES) * place / (PLACES - 1);
            hash.update(&bytes[at..at + PLACE_BYTES]);
        }
    }
    fingerprint(hash)
}
