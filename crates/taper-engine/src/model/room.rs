//! How large the KV cache is: what was asked for, or what the memory that is free has room for.
//!
//! In host memory that is a quarter of what is free, for others want some too. A device is ours: the cache has all that is free
//! beside the weights, but for what else lies there while requests run ([`Needs::sum`]).

use super::{LoadError, PROMPT_ROWS, SCORED_ROWS};
use crate::EngineConfig;
use taper_attention::{DECODE_SEQUENCES, DECODE_TOKENS};
use taper_kernels::GRAPH_BYTES;
use taper_kv_cache::BLOCK_TOKENS;
use taper_model::{ModelConfig, size};

/// Contexts that a cache in host memory has room for at most, where nobody says how large it shall be. On a device they are as
/// many as answers are generated together, unless a setting says otherwise.
const HOST_CONTEXTS: u64 = 16;

/// What the graphs of steps hold at most.
const GRAPHS: u64 = GRAPH_BYTES as u64;
/// The code of kernels, the workspaces of libraries, and what is lost because memory is given out in pieces of some megabytes.
const LIBRARIES: u64 = 512 << 20;
/// Chunks of whole prompts that are underway at a time.
const CHUNKS: u64 = 2;
/// Bytes that a sample takes for each key and KV head of rows that are chosen for at a time: the keys themselves, where
/// somebody asks which they are, as many again since room grows by doubling. Scores are for up to half of the keys.
const DRAWN_BYTES: u64 = 8;
/// Of what is free this share is left alone, for other programs and the driver.
const SPARE: u64 = 20;

/// Bytes of what is on a device beside the weights while requests run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needs {
    /// A block of the cache, keys and values of all layers.
    pub(super) block: u64,
    /// Blocks of the cache that lie elsewhere, of which indices lie here all the same.
    pub(super) elsewhere: u64,
    /// Tokens of the longest sequence.
    pub(super) context: u64,
    /// What a chunk that is underway keeps of a token: residual stream, queries and angles.
    chunk_token: u64,
    /// What a sample takes of a token.
    sampled_token: u64,
    /// A position's turn, where an index takes in a prompt's keys with the rotary embedding taken off.
    turned_token: u64,
    /// What a step makes: the rows of a layer, and logits.
    step: u64,
}

impl Needs {
    pub(super) fn new(config: &ModelConfig, block: usize, elsewhere: usize) -> Self {
        let &ModelConfig { hidden_size, intermediate_size, q_heads, kv_heads, head_dim, vocab_size, .. } = config;
        let f32s = |numbers: usize| 4 * numbers as u64;
        // The residual stream and two of its like; queries, keys and values, and what they attended; gate and up, and their
        // product.
        let row = f32s(3 * hidden_size + (2 * q_heads + 2 * kv_heads) * head_dim + 3 * intermediate_size);
        Self {
            block: block as u64,
            elsewhere: elsewhere as u64,
            context: config.context_length as u64,
            chunk_token: f32s(hidden_size + (q_heads + 1) * head_dim),
            sampled_token: DRAWN_BYTES * kv_heads as u64 + f32s(q_heads),
            turned_token: f32s(head_dim),
            step: PROMPT_ROWS as u64 * row + SCORED_ROWS as u64 * f32s(2 * vocab_size),
        }
    }

    /// What no request runs without: the least that must be free beside a cache.
    pub(super) fn least(&self) -> u64 {
        LIBRARIES + self.step
    }

    /// The most blocks for which all of it fits into what is free. Indices are half as large as the whole cache at most, and
    /// prompts whose chunks are underway have their room in the cache, so that their tokens are no more than its own.
    pub(super) fn sum(&self, free: u64) -> Sum {
        let block_tokens = BLOCK_TOKENS as u64;
        let left = free.saturating_sub(self.beside(free, 0).all());
        let with_index = self.block + self.block / 2;
        // Up to so many tokens a larger cache has larger chunks too.
        let most_chunked = CHUNKS * self.context;
        let blocks = match left / (with_index + block_tokens * self.chunk_token) {
            few if few * block_tokens <= most_chunked => few,
            _ => left.saturating_sub(most_chunked * self.chunk_token) / with_index,
        };
        let most = EngineConfig::default().sequences as u64 * self.context.div_ceil(block_tokens);
        self.beside(free, blocks.min(most))
    }

    /// What there is beside a cache of so many blocks, and it.
    fn beside(&self, free: u64, blocks: u64) -> Sum {
        let sampled_tokens = (DECODE_SEQUENCES as u64 * self.context).min(self.context.max(DECODE_TOKENS as u64));
        Sum {
            free,
            spare: free / SPARE,
            graphs: GRAPHS,
            samples: self.sampled_token * sampled_tokens + self.turned_token * self.context,
            least: self.least(),
            chunks: (CHUNKS * self.context).min(blocks * BLOCK_TOKENS as u64) * self.chunk_token,
            indices: self.elsewhere * self.block / 2 + blocks * (self.block / 2),
            cache: blocks * self.block,
            blocks,
        }
    }
}

/// How the memory of a device is shared out, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sum {
    free: u64,
    spare: u64,
    graphs: u64,
    samples: u64,
    /// As [`Needs::least`].
    least: u64,
    chunks: u64,
    indices: u64,
    cache: u64,
    blocks: u64,
}

impl Sum {
    /// What takes how much.
    fn parts(&self) -> [(&'static str, u64); 7] {
        [
            ("left alone", self.spare),
            ("graphs of steps, at most", self.graphs),
            ("samples of decode methods, at most", self.samples),
            ("kernels and what a step makes", self.least),
            ("chunks of whole prompts, at most", self.chunks),
            ("indices of decode methods, at most", self.indices),
            ("keys and values", self.cache),
        ]
    }

    fn all(&self) -> u64 {
        self.parts().iter().map(|(_, bytes)| bytes).sum()
    }

    /// What may be wanted, if all of it ever is, and is not there.
    fn lacks(&self) -> u64 {
        (self.all() - self.spare).saturating_sub(self.free)
    }

    fn tell(&self) {
        tracing::info!("the device has {} free beside the weights, of which:", size(self.free));
        self.parts().iter().for_each(|(what, bytes)| tracing::info!("  {} {what}", size(*bytes)));
        tracing::info!("a cache of {} tokens", self.blocks * BLOCK_TOKENS as u64);
    }
}

/// Blocks of a cache on a device, of which so many bytes are `free`.
///
/// # Errors
/// A cache, or a rest, that does not fit, with the numbers.
pub(super) fn on_device(asked: Option<u64>, needs: &Needs, free: u64) -> Result<usize, LoadError> {
    if let Some(bytes) = asked {
        fits(bytes, needs.least(), free)?;
        let blocks = fit(bytes, needs.block)?;
        let sum = needs.beside(free, blocks as u64);
        if sum.lacks() > 0 {
            let beside = sum.graphs + sum.samples + sum.chunks + sum.indices;
            tracing::warn!(
                "beside a cache of {} (--kv-memory) there is {} less than the {} that graphs, samples, chunks and indices of some \
                 methods may take: steps that lack memory drop indices and go in several passes",
                size(bytes),
                size(sum.lacks()),
                size(beside)
            );
        }
        return Ok(blocks);
    }
    let sum = needs.sum(free);
    if sum.blocks == 0 {
        let parts: Vec<String> = sum.parts().iter().map(|(what, bytes)| format!("{} {what}", size(*bytes))).collect();
        return Err(LoadError::Cache(format!(
            "no room: {} are free beside the weights, of which {}; weights of fewer bytes (--dtype), a smaller --kv-offload \
             or an own --kv-memory fit",
            size(free),
            parts.join(", ")
        )));
    }
    sum.tell();
    Ok(sum.blocks as usize)
}

/// Blocks of a cache in host memory, of which so many bytes are free, where the system says so.
///
/// # Errors
/// A cache that does not fit, with the numbers.
pub(super) fn on_host(asked: Option<u64>, needs: &Needs, free: Option<u64>) -> Result<usize, LoadError> {
    let context = needs.context.div_ceil(BLOCK_TOKENS as u64);
    match (asked, free) {
        (Some(bytes), free) => {
            fits(bytes, 0, free.unwrap_or(u64::MAX))?;
            fit(bytes, needs.block)
        }
        (None, None) => Ok(context as usize),
        (None, Some(free)) => fit((free / 4).min(HOST_CONTEXTS * context * needs.block), needs.block),
    }
}

/// Refuses a cache that leaves less than `least` of what is free.
fn fits(bytes: u64, least: u64, free: u64) -> Result<(), LoadError> {
    if bytes.saturating_add(least) <= free {
        return Ok(());
    }
    let (wanted, free) = (size(bytes), size(free));
    let steps = if least > 0 { format!(", {} of it for the steps", size(least)) } else { String::new() };
    Err(LoadError::Cache(format!(
        "{wanted} wanted (--kv-memory), and {free} are free beside the weights{steps}: less of it, or weights of fewer bytes \
         (--dtype), fit"
    )))
}

/// Blocks that fit into so many bytes.
pub(super) fn fit(bytes: u64, block_bytes: u64) -> Result<usize, LoadError> {
    match usize::try_from(bytes / block_bytes).unwrap_or(usize::MAX) {
        0 => Err(LoadError::Cache(format!(
            "{bytes} bytes (--kv-memory, --kv-offload) hold no block of {BLOCK_TOKENS} tokens, which takes {block_bytes}"
        ))),
        blocks => Ok(blocks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;
    const SMALL: Needs =
        Needs { block: 100, elsewhere: 0, context: 256, chunk_token: 0, sampled_token: 0, turned_token: 0, step: 0 };

    fn said(blocks: Result<usize, LoadError>) -> String {
        blocks.unwrap_err().to_string()
    }

    #[test]
    fn the_cache_in_host_memory_takes_what_it_is_given_or_a_quarter_for_sixteen_contexts() {
        assert_eq!(on_host(Some(1000), &SMALL, Some(1000)).unwrap(), 10);
        assert_eq!(on_host(None, &SMALL, Some(4000)).unwrap(), 10);
        assert_eq!(on_host(None, &SMALL, Some(GIB)).unwrap(), 64);
        assert_eq!(on_host(None, &SMALL, None).unwrap(), 4);
        assert_eq!(
            said(on_host(Some(99), &SMALL, None)),
            "the KV cache: 99 bytes (--kv-memory, --kv-offload) hold no block of 64 tokens, which takes 100"
        );
    }

    #[test]
    fn a_cache_larger_than_what_is_free_is_refused_with_both_numbers() {
        let error = said(on_host(Some(5 * GIB), &SMALL, Some(3 * GIB / 2)));
        assert!(error.starts_with("the KV cache: 5.0 GiB wanted (--kv-memory), and 1.5 GiB are free"), "{error}");
        // A device needs some for its steps besides.
        on_device(Some(5 * GIB), &SMALL, 5 * GIB + LIBRARIES).unwrap();
        let error = said(on_device(Some(5 * GIB), &SMALL, 5 * GIB + LIBRARIES - 1));
        assert!(error.contains("5.5 GiB are free beside the weights, 512.0 MiB of it for the steps: less"), "{error}");
        let error = said(on_device(None, &SMALL, GIB));
        assert!(
            error.contains("no room: 1.0 GiB are free beside the weights, of which 51.2 MiB left alone"),
            "{error}"
        );
    }

    /// Llama 3.1 8B with weights and cache of 16 bits.
    fn eight_billion() -> Needs {
        Needs::new(&ModelConfig::of_shape("llama-3.1-8b").unwrap(), 8 << 20, 0)
    }

    #[test]
    fn an_8b_model_leaves_little_of_a_device_idle() {
        // An H200 with 139 GiB, of which the weights have 15; an H100 with 79.
        for (free, least) in [(124 * GIB, 65 * GIB), (64 * GIB, 30 * GIB)] {
            let sum = eight_billion().sum(free);
            assert!(sum.cache > least, "{sum:?}");
            let all = sum.all();
            assert!(all <= free && free - all < 2 * (8 << 20), "what nothing may take is less than a block: {sum:?}");
        }
        // A small model has as many contexts as answers are generated together, and no more.
        let small = Needs::new(&ModelConfig::of_shape("smollm2-135m").unwrap(), 2 * 30 * 3 * 64 * 64 * 2, 0);
        assert_eq!(small.sum(124 * GIB).blocks, 64 * 8192 / 64);
    }

    #[test]
    fn a_cache_that_was_asked_for_may_leave_methods_less_than_they_want() {
        let (needs, free) = (eight_billion(), 64 * GIB);
        let blocks = needs.sum(free).blocks;
        assert_eq!(needs.beside(free, blocks).lacks(), 0);
        // A twentieth is left alone; a cache that takes that and more has others want for it.
        let more = needs.beside(free, blocks + free / SPARE / needs.block);
        assert!(more.lacks() > 0, "{more:?}");
        assert_eq!(on_device(Some(more.cache), &needs, free).unwrap() as u64, more.blocks, "it is had all the same");
    }

    proptest! {
        #[test]
        fn a_device_is_never_promised_more_than_it_has_and_more_memory_is_never_a_smaller_cache(
            block in 1u64..64 << 20,
            elsewhere in 0u64..2000,
            context in 1u64..1 << 20,
            chunk_token in 0u64..1 << 17,
            sampled_token in 0u64..1 << 11,
            turned_token in 0u64..1 << 11,
            step in 0u64..4 * GIB,
            free in 0u64..300 * GIB,
            more in 0u64..8 * GIB,
        ) {
            let needs = Needs { block, elsewhere, context, chunk_token, sampled_token, turned_token, step };
            let sum = needs.sum(free);
            prop_assert!(sum.blocks == 0 || sum.all() <= free, "{:?}", sum);
            prop_assert!(needs.sum(free + more).blocks >= sum.blocks);
        }
    }
}
