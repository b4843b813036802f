//! The block pool: storage, reference counts, the free list.

use crate::BlockTable;
use crate::index::{Index, IndexShape};
use crate::prefix::{PrefixKey, Prefixes};
use candle_core::{DType, Device, Tensor};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use taper_kernels::index::Part;
use taper_kernels::kv::{self, BLOCK_TOKENS, PagedKv};
use taper_kernels::offload::{self, FileTail, HostTail};

/// What a pool stores for each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Layers that have a cache.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl KvShape {
    /// Bytes of one 64-token block over all layers, keys and values.
    pub fn block_bytes(&self, dtype: DType) -> usize {
        2 * self.layers * self.kv_heads * BLOCK_TOKENS * self.head_dim * dtype.size_in_bytes()
    }
}

/// Why the pool refused.
#[derive(Debug, thiserror::Error)]
pub enum KvError {
    /// No free block is left.
    #[error("the KV cache is full: {wanted} more blocks of 64 tokens wanted, {free} of {total} free")]
    OutOfBlocks {
        /// Blocks asked for.
        wanted: usize,
        /// Blocks free.
        free: usize,
        /// Blocks of the pool.
        total: usize,
    },
    /// The file of the blocks beyond memory cannot be had.
    #[error("{}: no file of {bytes} bytes for the KV cache: {reason}", .folder.display())]
    File {
        /// The folder that it should be in.
        folder: PathBuf,
        /// Its size.
        bytes: u64,
        /// What is in the way.
        reason: String,
    },
    /// The pinned host memory of the blocks beyond the device's cannot be had.
    #[error("no {bytes} bytes of pinned host memory for the KV cache: {reason}")]
    Host {
        /// What the blocks take.
        bytes: u64,
        /// What is in the way.
        reason: String,
    },
    /// The device refused.
    #[error("KV cache: {0}")]
    Device(#[from] candle_core::Error),
}

/// Blocks of keys and values with reference counts, and the indices over them.
#[derive(Debug)]
pub struct KvPool {
    shape: KvShape,
    dtype: DType,
    device: Device,
    indices: HashMap<String, Index>,
    /// Counts the times that an index was asked for, and had before this step.
    clock: u64,
    step: u64,
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
    references: Vec<u32>,
    /// The lowest first, so that blocks in memory go before the offloaded ones.
    free: BinaryHeap<Reverse<u32>>,
    prefixes: Prefixes,
    /// What of keys and values lies in a file, or in the host's memory beside a device's: the last blocks, so many.
    tails: Vec<FileTail>,
    host_tails: Vec<HostTail>,
    offloaded: usize,
    /// How many of these some table holds.
    offloaded_held: usize,
}

impl KvPool {
    /// Makes a pool of `blocks` blocks of dtype f32, f16 or bf16.
    ///
    /// On the CPU the memory is reserved but only touched as blocks are written.
    ///
    /// # Errors
    /// [`KvError::Device`] if the device lacks the memory or the dtype is another.
    pub fn new(shape: KvShape, dtype: DType, blocks: usize, device: &Device) -> Result<Self, KvError> {
        Self::zeros((shape, dtype, device), (blocks, 0))
    }

    /// The same, of which the last few blocks are to lie elsewhere.
    fn zeros(
        (shape, dtype, device): (KvShape, DType, &Device),
        (blocks, offloaded): (usize, usize),
    ) -> Result<Self, KvError> {
        let dims = (blocks, shape.kv_heads, BLOCK_TOKENS, shape.head_dim);
        let make = || (0..shape.layers).map(|_| kv::zeros(dims, dtype, device)).collect::<Result<Vec<_>, _>>();
        Ok(Self::over((shape, dtype, device), make()?, make()?, (blocks, offloaded)))
    }

    /// A pool over its tensors, of so many blocks, of which the last few lie elsewhere.
    fn over(
        (shape, dtype, device): (KvShape, DType, &Device),
        keys: Vec<Tensor>,
        values: Vec<Tensor>,
        (blocks, offloaded): (usize, usize),
    ) -> Self {
        Self {
            shape,
            dtype,
            device: device.clone(),
            indices: HashMap::new(),
            clock: 0,
            step: 0,
            keys,
            values,
            references: vec![0; blocks],
            free: (0..blocks as u32).map(Reverse).collect(),
            prefixes: Prefixes::new(blocks, blocks - offloaded),
            tails: Vec::new(),
            host_tails: Vec::new(),
            offloaded,
            offloaded_held: 0,
        }
    }

    /// Makes a pool on the CPU of `memory` blocks in memory and `file` more in a file in a folder, whose room is taken at
    /// once. The file has no name and goes with the pool. Blocks in memory are taken first; none moves afterwards. Indices
    /// stay in memory.
    ///
    /// # Errors
    /// [`KvError::File`] if the folder cannot have the file; else as [`new`](Self::new).
    pub fn with_file(
        shape: KvShape,
        dtype: DType,
        (memory, file): (usize, usize),
        folder: &Path,
    ) -> Result<Self, KvError> {
        let tensors = 2 * shape.layers;
        let each = offload::file_bytes(file * shape.block_bytes(dtype) / tensors.max(1));
        let bytes = each * tensors as u64;
        let refused = |reason: &dyn Display| KvError::File { folder: folder.into(), bytes, reason: reason.to_string() };
        let handle = tempfile::tempfile_in(folder).and_then(|handle| offload::reserve(&handle, bytes).map(|()| handle));
        let handle = Arc::new(handle.map_err(|error| refused(&error))?);
        let mut pool = Self::zeros((shape, dtype, &Device::Cpu), (memory + file, file))?;
        for (tensor, place) in pool.keys.iter().chain(&pool.values).zip(0..) {
            let tail = FileTail::new(tensor, memory, Arc::clone(&handle), place * each);
            pool.tails.push(tail.map_err(|error| refused(&error))?);
        }
        Ok(pool)
    }

    /// Makes a pool on a CUDA device of `memory` blocks there and `host` more in pinned memory of the host's, which is taken
    /// at once. Blocks of the device are taken first; none moves afterwards. Indices are the device's.
    ///
    /// # Errors
    /// [`KvError::Host`] if one of them cannot have so much; [`KvError::Device`] for a dtype of no cache.
    pub fn with_host(
        shape: KvShape,
        dtype: DType,
        (memory, host): (usize, usize),
        device: &Device,
    ) -> Result<Self, KvError> {
        let dims = (memory + host, shape.kv_heads, BLOCK_TOKENS, shape.head_dim);
        let bytes = (host * shape.block_bytes(dtype)) as u64;
        let mut tails = Vec::new();
        let mut make = || -> Result<Vec<Tensor>, KvError> {
            let one = |_| {
                let made = HostTail::zeros(dims, dtype, memory, device);
                let (tensor, tail) = made.map_err(|e| KvError::Host { bytes, reason: e.to_string() })?;
                tails.push(tail);
                Ok(tensor)
            };
            (0..shape.layers).map(one).collect()
        };
        let (keys, values) = (make()?, make()?);
        let mut pool = Self::over((shape, dtype, device), keys, values, (memory + host, host));
        pool.host_tails = tails;
        Ok(pool)
    }

    /// What the pool stores for each token.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// The dtype of keys and values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where they are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Blocks of the pool.
    pub fn blocks(&self) -> usize {
        self.references.len()
    }

    /// Bytes of their keys and values.
    pub fn bytes(&self) -> u64 {
        self.blocks() as u64 * self.shape.block_bytes(self.dtype) as u64
    }

    /// Blocks of these that lie in a file, or in the host's memory.
    pub fn offloaded_blocks(&self) -> usize {
        self.offloaded
    }

    /// Blocks of these that some table holds.
    pub fn offloaded_held(&self) -> usize {
        self.offloaded_held
    }

    /// One more table holds a block: whether it is the first.
    fn hold(&mut self, block: u32) -> bool {
        let count = &mut self.references[block as usize];
        *count += 1;
        let first = *count == 1;
        self.offloaded_held += usize::from(first && self.lies_elsewhere(block));
        first
    }

    /// One table less holds a block: whether it was the last.
    fn let_go(&mut self, block: u32) -> bool {
        let count = &mut self.references[block as usize];
        *count -= 1;
        let last = *count == 0;
        self.offloaded_held -= usize::from(last && self.lies_elsewhere(block));
        last
    }

    fn lies_elsewhere(&self, block: u32) -> bool {
        block as usize >= self.blocks() - self.offloaded
    }

    /// Bytes of pinned host memory that a device's pool holds.
    pub fn host_bytes(&self) -> usize {
        self.host_tails.iter().map(HostTail::host_bytes).sum()
    }

    /// Has the file take what its blocks hold, and gives their memory back, as the system does for want of memory.
    ///
    /// # Errors
    /// The system's.
    pub fn page_out(&self) -> Result<(), KvError> {
        Ok(self.tails.iter().try_for_each(FileTail::page_out)?)
    }

    /// Blocks that no table holds, those that are remembered for later prompts included.
    pub fn free_blocks(&self) -> usize {
        self.free.len() + self.prefixes.idle()
    }

    /// Makes room for `tokens` tokens in all; a no-op if the table has it. All or nothing.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`].
    pub fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> Result<(), KvError> {
        let wanted = tokens.div_ceil(BLOCK_TOKENS).saturating_sub(table.blocks.len());
        let free = self.free_blocks();
        if wanted > free {
            return Err(KvError::OutOfBlocks { wanted, free, total: self.blocks() });
        }
        for _ in 0..wanted {
            let block = self.take().expect("counted above");
            self.hold(block);
            self.indices.values_mut().for_each(|index| index.keep(block, 0));
            table.blocks.push(block);
        }
        Ok(())
    }

    /// A block that no table holds: of those at hand a free one before a remembered one, and then of those elsewhere. What is
    /// cached for whoever asks next does not drive who asks now out of memory.
    fn take(&mut self) -> Option<u32> {
        let at_hand = self.free.peek().is_some_and(|&Reverse(block)| !self.lies_elsewhere(block));
        if !at_hand && let Some(block) = self.prefixes.evict(false) {
            return Some(block);
        }
        self.free.pop().map(|Reverse(block)| block).or_else(|| self.prefixes.evict(true))
    }

    /// Gives the table's blocks back; a block is free once no table holds it. Remembered ones keep what they hold until
    /// the room is needed; a prompt's end goes before its beginning.
    pub fn release(&mut self, table: &mut BlockTable) {
        for block in table.blocks.drain(..).rev() {
            if self.let_go(block) && !self.prefixes.keep(block) {
                self.free.push(Reverse(block));
            }
        }
    }

    /// How many of a prompt's first blocks are remembered.
    pub fn remembered(&self, keys: &[PrefixKey]) -> usize {
        keys.iter().take_while(|key| self.prefixes.find(key).is_some()).count()
    }

    /// How many of the blocks that the keys stand for some table holds.
    pub fn held(&self, keys: &[PrefixKey]) -> usize {
        let held = |key: &&PrefixKey| self.prefixes.find(key).is_some_and(|block| self.references[block as usize] > 0);
        keys.iter().filter(held).count()
    }

    /// A table over a prompt's first blocks, as many as are [remembered](Self::remembered).
    pub fn recall(&mut self, keys: &[PrefixKey]) -> BlockTable {
        let blocks: Vec<u32> = keys.iter().map_while(|key| self.prefixes.find(key)).collect();
        for &block in &blocks {
            if self.hold(block) {
                self.prefixes.hold(block);
            }
        }
        BlockTable { blocks }
    }

    /// Remembers the first blocks of a table, as many as there are keys, for later prompts: those from `from` on, which are full.
    pub fn remember(&mut self, table: &BlockTable, keys: &[PrefixKey], from: usize) {
        table.blocks.iter().zip(keys).skip(from).for_each(|(&block, &key)| self.prefixes.remember(key, block));
    }

    /// Whether a block is the one that is remembered for a key.
    pub fn remembers(&self, block: u32, key: &PrefixKey) -> bool {
        self.prefixes.find(key) == Some(block)
    }

    /// A second table over the first `tokens` tokens: whole blocks are shared, a started block is copied.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`] if there is no block for the copy; nothing is held then.
    pub fn fork(&mut self, table: &BlockTable, tokens: usize) -> Result<BlockTable, KvError> {
        let whole = tokens / BLOCK_TOKENS;
        let mut fork = BlockTable { blocks: table.blocks[..whole].to_vec() };
        for &block in &fork.blocks {
            self.hold(block);
        }
        if !tokens.is_multiple_of(BLOCK_TOKENS) {
            let copied = self.grow(&mut fork, tokens).and_then(|()| {
                let (from, to) = (table.blocks[whole], fork.blocks[whole]);
                self.copy_block(from, to)?;
                // The copy ends at `tokens`, however many the original has.
                self.indices.values_mut().for_each(|index| index.keep(to, tokens % BLOCK_TOKENS));
                Ok(())
            });
            if let Err(error) = copied {
                self.release(&mut fork);
                return Err(error);
            }
        }
        Ok(fork)
    }

    /// A table of this pool over a copy of the first `tokens` tokens that `table` has in another pool, on any device.
    ///
    /// # Errors
    /// A pool for another model, or [`KvError::OutOfBlocks`]; nothing is held then.
    pub fn adopt(&mut self, other: &KvPool, table: &BlockTable, tokens: usize) -> Result<BlockTable, KvError> {
        if self.shape != other.shape {
            let message = format!("a cache of {:?} cannot take over from one of {:?}", self.shape, other.shape);
            return Err(candle_core::Error::Msg(message).into());
        }
        let mut own = BlockTable::default();
        self.grow(&mut own, tokens)?;
        let blocks = &table.blocks[..tokens.div_ceil(BLOCK_TOKENS)];
        let slots: Vec<u32> = (0..tokens).map(|token| own.slot(token)).collect();
        let copy = || {
            let blocks = Tensor::from_slice(blocks, blocks.len(), &other.device)?;
            let rows = |of: &Tensor| {
                let blocks = of.index_select(&blocks, 0)?.to_device(&self.device)?.to_dtype(DType::F32)?;
                let rows = blocks.transpose(1, 2)?.flatten_to(1)?;
                rows.narrow(0, 0, tokens)?.contiguous()
            };
            (0..self.shape.layers).try_for_each(|layer| {
                kv::append(&self.keys[layer], &rows(&other.keys[layer])?, &slots)?;
                kv::append(&self.values[layer], &rows(&other.values[layer])?, &slots)
            })
        };
        let copied: candle_core::Result<()> = if tokens == 0 { Ok(()) } else { copy() };
        if let Err(error) = copied {
            self.release(&mut own);
            return Err(error.into());
        }
        Ok(own)
    }

    /// Lets all tokens but the first `tokens` go, as if they had never been appended. A started block that another table
    /// shares is copied first.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`] if there is no block for the copy; the table is as before then.
    pub fn truncate(&mut self, table: &mut BlockTable, tokens: usize) -> Result<(), KvError> {
        let (keep, started) = (tokens.div_ceil(BLOCK_TOKENS).min(table.blocks.len()), tokens % BLOCK_TOKENS);
        if started > 0 && keep * BLOCK_TOKENS > tokens {
            let block = table.blocks[keep - 1];
            if self.references[block as usize] > 1 {
                let mut own = BlockTable::default();
                self.grow(&mut own, 1)?;
                if let Err(error) = self.copy_block(block, own.blocks[0]) {
                    self.release(&mut own);
                    return Err(error);
                }
                std::mem::swap(&mut table.blocks[keep - 1], &mut own.blocks[0]);
                self.release(&mut own);
            }
            let block = table.blocks[keep - 1];
            self.prefixes.forget(block);
            self.indices.values_mut().for_each(|index| index.keep(block, started));
        }
        let mut rest = BlockTable { blocks: table.blocks.split_off(keep) };
        self.release(&mut rest);
        Ok(())
    }

    /// Forgets what was [remembered](Self::remember) of a table's blocks from `from` on: no other prompt takes them over.
    pub fn forget(&mut self, table: &BlockTable, from: usize) {
        table.blocks.iter().skip(from).for_each(|&block| self.prefixes.forget(block));
    }

    /// Lets the indices forget what they have taken in after the first `tokens` tokens of a table, which were appended but
    /// are not kept.
    pub fn unindex(&mut self, table: &BlockTable, tokens: usize) {
        for (i, &block) in table.blocks.iter().enumerate().skip(tokens / BLOCK_TOKENS) {
            let keep = tokens.saturating_sub(i * BLOCK_TOKENS);
            self.indices.values_mut().for_each(|index| index.keep(block, keep));
        }
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), KvError> {
        self.keys.iter().chain(&self.values).try_for_each(|t| kv::copy_block(t, from, to))?;
        self.indices.values_mut().try_for_each(|index| index.copy(from, to))
    }

    /// One layer of an index `[blocks, kv_heads, rows, width]` that has taken in the first so many tokens of each table.
    ///
    /// Equal names share one index, made when it is first asked for. All together stay half as large as the cache, unless
    /// those of one step are larger: others are dropped, the one not asked for the longest first. `extend` takes in what is
    /// missing, unless it is no more than the last `behind` tokens of each table: it gets the index's tensor, the layer's cache
    /// and the rows.
    ///
    /// # Errors
    /// What `extend` says, a name whose shape was another before, or a device without the memory.
    pub fn index(
        &mut self,
        (name, shape): (&str, IndexShape),
        layer: usize,
        (tables, behind): (&[(&BlockTable, usize)], usize),
        extend: impl FnOnce(&Tensor, PagedKv, &[Part]) -> candle_core::Result<()>,
    ) -> Result<Tensor, KvError> {
        if !self.indices.contains_key(name) {
            self.indices.insert(name.to_owned(), Index::new(shape, self.shape.layers));
        }
        let index = &self.indices[name];
        if index.shape != shape {
            let message = format!("index {name}: {shape:?} asked for, {:?} kept", index.shape);
            return Err(candle_core::Error::Msg(message).into());
        }
        if index.layers[layer].tensor.is_none() {
            self.make_room(name, shape);
        }
        self.clock += 1;
        let index = self.indices.get_mut(name).expect("inserted above");
        index.used = self.clock;
        let of_layer = &mut index.layers[layer];
        of_layer.make(shape, (self.references.len(), self.shape.kv_heads), &self.device)?;
        let tensor = of_layer.tensor.clone().expect("made above");
        let parts = match behind == 0 || tables.iter().any(|&table| of_layer.lacks(table) > behind) {
            true => of_layer.missing(tables),
            false => Vec::new(),
        };
        if !parts.is_empty() {
            extend(&tensor, PagedKv { k: &self.keys[layer], v: &self.values[layer] }, &parts)?;
            of_layer.taken(&parts);
        }
        Ok(tensor)
    }

    /// How many of the first so many tokens of a table one layer of an index lacks, from the first one on that it has not taken
    /// in.
    pub fn index_lacks(&self, name: &str, layer: usize, (table, tokens): (&BlockTable, usize)) -> usize {
        self.indices.get(name).map_or(tokens, |index| index.layers[layer].lacks((table, tokens)))
    }

    /// A step begins: indices that it asks for stay to its end.
    pub fn begin_step(&mut self) {
        self.step = self.clock;
    }

    /// Drops the indices that the latest step has not asked for; whether there were any. Each is worked out again when
    /// it is asked for.
    pub fn drop_idle_indices(&mut self) -> bool {
        let before = self.indices.len();
        self.indices.retain(|_, index| index.used > self.step);
        self.indices.len() < before
    }

    /// Drops indices, the one not asked for the longest first, until another layer of an index makes all of them half as large
    /// as the cache at most, or this step has asked for all that are left. What is dropped is worked out again when it is
    /// asked for.
    fn make_room(&mut self, name: &str, shape: IndexShape) {
        let blocks = self.references.len();
        let layer = blocks * self.shape.kv_heads * shape.rows * shape.width * shape.dtype.size_in_bytes();
        let most = blocks * self.shape.block_bytes(self.dtype) / 2;
        while layer + self.indices.values().map(Index::bytes).sum::<usize>() > most {
            let others = self.indices.iter().filter(|(other, index)| *other != name && index.used <= self.step);
            let Some(oldest) = others.min_by_key(|(_, index)| index.used).map(|(other, _)| other.clone()) else {
                return;
            };
            self.indices.remove(&oldest);
        }
    }

    /// Stores one layer's keys and values `[T, kv_heads, head_dim]` (f32) of the tokens at `slots` (`block * 64 + row`).
    ///
    /// # Errors
    /// A shape or dtype that differs.
    pub fn append(&self, layer: usize, k: &Tensor, v: &Tensor, slots: &[u32]) -> Result<(), KvError> {
        kv::append(&self.keys[layer], k, slots)?;
        kv::append(&self.values[layer], v, slots)?;
        Ok(())
    }

    /// Stores one layer's keys and values from joint projections, rotated on their way: see [`kv::append_joint`].
    ///
    /// # Errors
    /// A shape or dtype that differs.
    pub fn append_joint(
        &self,
        layer: usize,
        qkv: &Tensor,
        angles: &Tensor,
        slots: &[u32],
        keep: Option<&[Option<Tensor>]>,
    ) -> Result<Option<Tensor>, KvError> {
        let keep = keep.map(|rows| kv::Keep { rows, layer });
        Ok(kv::append_joint(self.layer(layer), qkv, angles, slots, keep)?)
    }

    /// One layer's keys and values.
    pub fn layer(&self, layer: usize) -> PagedKv<'_> {
        PagedKv { k: &self.keys[layer], v: &self.values[layer] }
    }

    /// Checks that reference counts, free list and the tables given (all that exist) agree.
    ///
    /// # Panics
    /// If they do not: a bug, found by tests and by an idle engine.
    pub fn check_integrity<'a>(&self, tables: impl IntoIterator<Item = &'a BlockTable>) {
        let mut held = vec![0u32; self.blocks()];
        for table in tables {
            for &block in &table.blocks {
                held[block as usize] += 1;
            }
        }
        assert_eq!(held, self.references, "reference counts differ from the tables");
        let elsewhere = held[self.blocks() - self.offloaded..].iter().filter(|&&tables| tables > 0).count();
        assert_eq!(elsewhere, self.offloaded_held, "the count of held blocks elsewhere differs from them");
        let mut free: Vec<u32> =
            self.free.iter().map(|Reverse(block)| *block).chain(self.prefixes.idle_blocks()).collect();
        free.sort_unstable();
        let idle: Vec<u32> = (0..self.blocks() as u32).filter(|&b| held[b as usize] == 0).collect();
        assert_eq!(free, idle, "the free list differs from the unheld blocks");
    }
}

#[cfg(test)]
mod tests;
