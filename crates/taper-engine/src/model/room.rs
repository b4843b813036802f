//! How large the KV cache is: what was asked for, or what the memory that is free has room for.

use super::LoadError;
use candle_core::Device;
use taper_kv_cache::BLOCK_TOKENS;
use taper_model::{free_memory, size};

/// Contexts that a cache in host memory has room for at most, where nobody says how large it shall be.
const HOST_CONTEXTS: usize = 16;

/// Blocks of a cache of which one takes `block_bytes`; `context` is how many one sequence of full length has.
pub(super) fn blocks(
    asked: Option<u64>,
    block_bytes: usize,
    context: usize,
    device: &Device,
) -> Result<usize, LoadError> {
    let free = free_memory(device);
    match asked {
        Some(bytes) => {
            fits(bytes, free)?;
            fit(bytes, block_bytes)
        }
        None => {
            let bytes = free.map_or((context * block_bytes) as u64, |free| free / 4);
            fit(bytes, block_bytes).map(|blocks| blocks.min(HOST_CONTEXTS * context))
        }
    }
}

/// Refuses a cache that is larger than what is free, where that is known.
pub(super) fn fits(bytes: u64, free: Option<u64>) -> Result<(), LoadError> {
    match free {
        Some(free) if bytes > free => Err(LoadError::Cache(format!(
            "{} wanted (--kv-memory), and {} are free beside the weights: less of it, or weights of fewer bytes (--dtype), fit",
            size(bytes),
            size(free)
        ))),
        _ => Ok(()),
    }
}

/// Blocks that fit into so many bytes.
pub(super) fn fit(bytes: u64, block_bytes: usize) -> Result<usize, LoadError> {
    match usize::try_from(bytes / block_bytes as u64).unwrap_or(usize::MAX) {
        0 => Err(LoadError::Cache(format!("one block of {BLOCK_TOKENS} tokens takes {block_bytes} bytes"))),
        blocks => Ok(blocks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_takes_what_it_is_given_and_never_more_than_sixteen_contexts() {
        assert_eq!(blocks(Some(1000), 100, 4, &Device::Cpu).unwrap(), 10);
        assert!((1..=64).contains(&blocks(None, 100, 4, &Device::Cpu).unwrap()));
        let error = blocks(Some(99), 100, 4, &Device::Cpu).unwrap_err().to_string();
        assert_eq!(error, "the KV cache: one block of 64 tokens takes 100 bytes");
    }

    #[test]
    fn a_cache_larger_than_what_is_free_is_refused_with_both_numbers() {
        fits(5 << 30, Some(5 << 30)).unwrap();
        fits(u64::MAX, None).unwrap();
        let error = fits(5 << 30, Some(3 << 29)).unwrap_err().to_string();
        assert!(error.starts_with("the KV cache: 5.0 GiB wanted (--kv-memory), and 1.5 GiB are free"), "{error}");
        // No machine has as much.
        let error = blocks(Some(1 << 60), 100, 4, &Device::Cpu).unwrap_err().to_string();
        assert!(error.contains("--kv-memory"), "{error}");
    }
}
