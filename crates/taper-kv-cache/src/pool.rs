//! The block pool: storage, reference counts, the free list.

use crate::BlockTable;
use crate::index::{Index, IndexShape};
use crate::prefix::{PrefixKey, Prefixes};
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use taper_kernels::index::Part;
use taper_kernels::kv::{self, BLOCK_TOKENS, PagedKv};

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
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
    references: Vec<u32>,
    free: Vec<u32>,
    prefixes: Prefixes,
}

impl KvPool {
    /// Makes a pool of `blocks` blocks of dtype f32, f16 or bf16.
    ///
    /// On the CPU the memory is reserved but only touched as blocks are written.
    ///
    /// # Errors
    /// [`KvError::Device`] if the device lacks the memory or the dtype is another.
    pub fn new(shape: KvShape, dtype: DType, blocks: usize, device: &Device) -> Result<Self, KvError> {
        let dims = (blocks, shape.kv_heads, BLOCK_TOKENS, shape.head_dim);
        let make = || (0..shape.layers).map(|_| kv::zeros(dims, dtype, device)).collect::<Result<Vec<_>, _>>();
        Ok(Self {
            shape,
            dtype,
            device: device.clone(),
            indices: HashMap::new(),
            keys: make()?,
            values: make()?,
            references: vec![0; blocks],
            free: (0..blocks as u32).rev().collect(),
            prefixes: Prefixes::new(blocks),
        })
    }

    /// What the pool stores for each token.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// The dtype of keys and values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Blocks of the pool.
    pub fn blocks(&self) -> usize {
        self.references.len()
    }

    /// Blocks that no table holds, those that are remembered for later prompts included.
    pub fn free_blocks(&self) -> usize {
        self.free.len() + self.prefixes.idle()
    }

    /// Blocks that are remembered for later prompts and that no table holds.
    pub fn remembered_blocks(&self) -> usize {
        self.prefixes.idle()
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
            let block = self.free.pop().or_else(|| self.prefixes.evict()).expect("counted above");
            self.references[block as usize] = 1;
            self.indices.values_mut().for_each(|index| index.keep(block, 0));
            table.blocks.push(block);
        }
        Ok(())
    }

    /// Gives the table's blocks back; a block is free once no table holds it. Remembered ones keep what they hold until
    /// the room is needed; a prompt's end goes before its beginning.
    pub fn release(&mut self, table: &mut BlockTable) {
        for block in table.blocks.drain(..).rev() {
            let count = &mut self.references[block as usize];
            *count -= 1;
            if *count == 0 && !self.prefixes.keep(block) {
                self.free.push(block);
            }
        }
    }

    /// How many of a prompt's first blocks are remembered.
    pub fn remembered(&self, keys: &[PrefixKey]) -> usize {
        keys.iter().take_while(|key| self.prefixes.find(key).is_some()).count()
    }

    /// A table over a prompt's first blocks, as many as are [remembered](Self::remembered).
    pub fn recall(&mut self, keys: &[PrefixKey]) -> BlockTable {
        let blocks: Vec<u32> = keys.iter().map_while(|key| self.prefixes.find(key)).collect();
        for &block in &blocks {
            let count = &mut self.references[block as usize];
            *count += 1;
            if *count == 1 {
                self.prefixes.hold(block);
            }
        }
        BlockTable { blocks }
    }

    /// Remembers the first blocks of a table, which are full, for later prompts.
    pub fn remember(&mut self, table: &BlockTable, keys: &[PrefixKey]) {
        table.blocks.iter().zip(keys).for_each(|(&block, &key)| self.prefixes.remember(key, block));
    }

    /// A second table over the first `tokens` tokens: whole blocks are shared, a started block is copied.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`] if there is no block for the copy; nothing is held then.
    pub fn fork(&mut self, table: &BlockTable, tokens: usize) -> Result<BlockTable, KvError> {
        let whole = tokens / BLOCK_TOKENS;
        let mut fork = BlockTable { blocks: table.blocks[..whole].to_vec() };
        for &block in &fork.blocks {
            self.references[block as usize] += 1;
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
                self.copy_block(block, own.blocks[0])?;
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

    /// One layer of an index `[blocks, kv_heads, rows, width]` that has taken in the first `tokens` tokens of a table.
    ///
    /// Equal names share one index, made when it is first asked for. `extend` takes in what is missing: it gets the
    /// index's tensor, the layer's cache and the rows.
    ///
    /// # Errors
    /// What `extend` says, a name whose shape was another before, or a device without the memory.
    pub fn index(
        &mut self,
        (name, shape): (&str, IndexShape),
        layer: usize,
        (table, tokens): (&BlockTable, usize),
        extend: impl FnOnce(&Tensor, PagedKv, &[Part]) -> candle_core::Result<()>,
    ) -> Result<Tensor, KvError> {
        if !self.indices.contains_key(name) {
            self.indices.insert(name.to_owned(), Index::new(shape, self.shape.layers));
        }
        let index = self.indices.get_mut(name).expect("inserted above");
        if index.shape != shape {
            let message = format!("index {name}: {shape:?} asked for, {:?} kept", index.shape);
            return Err(candle_core::Error::Msg(message).into());
        }
        let of_layer = &mut index.layers[layer];
        of_layer.make(shape, (self.references.len(), self.shape.kv_heads), &self.device)?;
        let tensor = of_layer.tensor.clone().expect("made above");
        let parts = of_layer.missing(&table.blocks, tokens);
        if !parts.is_empty() {
            extend(&tensor, PagedKv { k: &self.keys[layer], v: &self.values[layer] }, &parts)?;
            of_layer.taken(&parts);
        }
        Ok(tensor)
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
    ) -> Result<Option<Tensor>, KvError> {
        Ok(kv::append_joint(self.layer(layer), qkv, angles, slots)?)
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
        let mut free: Vec<u32> = self.free.iter().copied().chain(self.prefixes.idle_blocks()).collect();
        free.sort_unstable();
        let idle: Vec<u32> = (0..self.blocks() as u32).filter(|&b| held[b as usize] == 0).collect();
        assert_eq!(free, idle, "the free list differs from the unheld blocks");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pool(blocks: usize) -> KvPool {
        let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 4 };
        KvPool::new(shape, DType::F32, blocks, &Device::Cpu).unwrap()
    }

    #[test]
    fn a_full_pool_says_what_is_missing_and_keeps_what_the_table_had() {
        let mut pool = pool(3);
        let mut table = BlockTable::default();
        pool.grow(&mut table, 65).unwrap();
        let error = pool.grow(&mut table, 64 * 4 + 1).unwrap_err();
        assert_eq!(error.to_string(), "the KV cache is full: 3 more blocks of 64 tokens wanted, 1 of 3 free");
        assert_eq!(table.capacity(), 128);
        pool.check_integrity([&table]);
    }

    #[test]
    fn a_fork_shares_whole_blocks_and_copies_the_started_one() {
        let mut pool = pool(8);
        let mut first = BlockTable::default();
        pool.grow(&mut first, 70).unwrap();
        let rows = Tensor::arange(0f32, 280., &Device::Cpu).unwrap().reshape((70, 1, 4)).unwrap();
        let slots: Vec<u32> = (0..70).map(|t| first.slot(t)).collect();
        pool.append(0, &rows, &rows, &slots).unwrap();
        let fork = pool.fork(&first, 70).unwrap();
        assert_eq!(fork.blocks()[0], first.blocks()[0]);
        assert_ne!(fork.blocks()[1], first.blocks()[1]);
        let k = pool.layer(0).k.to_vec4_rows();
        assert_eq!(k[fork.slot(69) as usize], k[first.slot(69) as usize]);
        pool.check_integrity([&first, &fork]);
    }

    #[test]
    fn an_adopted_table_holds_the_same_tokens_in_a_pool_of_another_type() {
        let shape = KvShape { layers: 2, kv_heads: 3, head_dim: 4 };
        let mut from = KvPool::new(shape, DType::F32, 5, &Device::Cpu).unwrap();
        let mut table = BlockTable::default();
        // Blocks out of order, and one that is not full.
        let mut other = BlockTable::default();
        from.grow(&mut other, 100).unwrap();
        from.grow(&mut table, 64).unwrap();
        from.release(&mut other);
        from.grow(&mut table, 150).unwrap();
        let slots: Vec<u32> = (0..150).map(|t| table.slot(t)).collect();
        let rows = |first: f32| {
            let rows = Tensor::arange(first, first + 1800., &Device::Cpu).unwrap();
            rows.reshape((150, 3, 4)).unwrap()
        };
        (0..2).for_each(|layer| from.append(layer, &rows(layer as f32), &rows(-1800. * layer as f32), &slots).unwrap());

        let mut to = KvPool::new(shape, DType::F16, 4, &Device::Cpu).unwrap();
        let own = to.adopt(&from, &table, 149).unwrap();
        assert_eq!(own.blocks().len(), 3);
        let read = |pool: &KvPool, table: &BlockTable, layer: usize| -> Vec<Vec<f32>> {
            let PagedKv { k, v } = pool.layer(layer);
            let row = |t: &Tensor, token: usize| {
                let block = t.get(table.slot(token) as usize / 64).unwrap().to_dtype(DType::F16).unwrap();
                let row = block.narrow(1, token % 64, 1).unwrap().to_dtype(DType::F32).unwrap();
                row.flatten_all().unwrap().to_vec1().unwrap()
            };
            (0..149).flat_map(|token| [row(k, token), row(v, token)]).collect()
        };
        (0..2).for_each(|layer| assert_eq!(read(&to, &own, layer), read(&from, &table, layer), "layer {layer}"));
        to.check_integrity([&own]);

        assert!(to.adopt(&from, &table, 100).is_err(), "one block is left");
        to.check_integrity([&own]);
        let wrong = KvPool::new(KvShape { layers: 1, ..shape }, DType::F16, 4, &Device::Cpu).unwrap();
        assert!(to.adopt(&wrong, &BlockTable::default(), 0).unwrap_err().to_string().contains("take over"));
    }

    #[test]
    fn a_prompt_finds_its_blocks_again_until_the_room_is_needed() {
        let mut pool = pool(4);
        let tokens: Vec<u32> = (0..200).collect();
        let keys = PrefixKey::chain(b"dense", &tokens);
        assert_eq!(keys.len(), 3);
        let mut first = BlockTable::default();
        pool.grow(&mut first, 200).unwrap();
        pool.remember(&first, &keys);
        let blocks = first.blocks()[..3].to_vec();
        let mut second = pool.recall(&keys[..2]);
        assert_eq!(second.blocks(), &blocks[..2]);
        pool.check_integrity([&first, &second]);
        pool.release(&mut first);
        pool.release(&mut second);
        assert_eq!((pool.free_blocks(), pool.remembered_blocks()), (4, 3));

        // Another way of making them, or another first token, is another prompt.
        let mut others = tokens.clone();
        others[0] = 7;
        for other in [PrefixKey::chain(b"delta", &tokens), PrefixKey::chain(b"dense", &others)] {
            assert_eq!(pool.remembered(&other), 0);
        }
        // Two blocks for something else: the free one, then the prompt's last.
        let mut third = BlockTable::default();
        pool.grow(&mut third, 128).unwrap();
        assert_eq!(pool.remembered(&keys), 2);
        let mut again = pool.recall(&keys);
        assert_eq!(again.blocks(), &blocks[..2]);
        assert!(pool.grow(&mut third, 129).is_err(), "what is held is not given up");
        pool.check_integrity([&third, &again]);
        // What is cut back is no longer what the key says.
        pool.truncate(&mut again, 100).unwrap();
        assert_eq!(pool.remembered(&keys), 1);
        pool.release(&mut again);
        pool.release(&mut third);
        pool.check_integrity([]);
    }

    #[test]
    fn a_block_is_remembered_once_for_a_key_and_for_one_key() {
        let mut pool = pool(4);
        let keys = PrefixKey::chain(b"", &[1; 128]);
        let (mut a, mut b) = (BlockTable::default(), BlockTable::default());
        pool.grow(&mut a, 128).unwrap();
        pool.grow(&mut b, 128).unwrap();
        pool.remember(&a, &keys);
        pool.remember(&b, &keys);
        let mut found = pool.recall(&keys);
        assert_eq!(found.blocks(), a.blocks());
        [&mut a, &mut b, &mut found].into_iter().for_each(|table| pool.release(table));
        assert_eq!((pool.free_blocks(), pool.remembered_blocks()), (4, 2));
        pool.check_integrity([]);
    }

    trait Rows {
        fn to_vec4_rows(&self) -> Vec<Vec<f32>>;
    }
    impl Rows for Tensor {
        fn to_vec4_rows(&self) -> Vec<Vec<f32>> {
            self.flatten(0, 2).unwrap().to_vec2().unwrap()
        }
    }

    proptest! {
        #[test]
        fn no_history_leaks_or_double_frees(steps in prop::collection::vec((0u8..6, 0usize..5, 1usize..400), 1..120)) {
            let mut pool = pool(12);
            // Tokens that count up are one prompt, of which every table is a beginning.
            let keys = PrefixKey::chain(b"", &(0..12 * 64).collect::<Vec<u32>>());
            let mut tables: Vec<(BlockTable, usize)> = Vec::new();
            for (action, which, tokens) in steps {
                match action {
                    0 => tables.push((BlockTable::default(), 0)),
                    1 if which < tables.len() => {
                        let (table, len) = &mut tables[which];
                        if pool.grow(table, *len + tokens).is_ok() {
                            *len += tokens;
                        }
                    }
                    2 if which < tables.len() => {
                        let (table, len) = &tables[which];
                        if let Ok(fork) = pool.fork(table, *len) {
                            let len = *len;
                            tables.push((fork, len));
                        }
                    }
                    3 if which < tables.len() => {
                        let (mut table, _) = tables.swap_remove(which);
                        pool.release(&mut table);
                    }
                    4 if which < tables.len() => {
                        let (table, len) = &tables[which];
                        pool.remember(table, &keys[..*len / 64]);
                    }
                    5 => {
                        let table = pool.recall(&keys[..(tokens / 64).min(keys.len())]);
                        let len = table.capacity();
                        tables.push((table, len));
                    }
                    _ => {}
                }
                pool.check_integrity(tables.iter().map(|(t, _)| t));
            }
        }
    }
}
