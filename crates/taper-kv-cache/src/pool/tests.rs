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
    pool.remember(&first, &keys, 0);
    let blocks = first.blocks()[..3].to_vec();
    let mut second = pool.recall(&keys[..2]);
    assert_eq!(second.blocks(), &blocks[..2]);
    pool.check_integrity([&first, &second]);
    assert_eq!((pool.held(&keys), pool.free_blocks()), (3, 0));
    pool.release(&mut first);
    assert_eq!((pool.held(&keys), pool.free_blocks()), (2, 2), "the third is remembered, and free");
    pool.release(&mut second);
    assert_eq!((pool.held(&keys), pool.free_blocks(), pool.prefixes.idle()), (0, 4, 3));

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
    pool.remember(&a, &keys, 0);
    pool.remember(&b, &keys, 0);
    let mut found = pool.recall(&keys);
    assert_eq!(found.blocks(), a.blocks());
    [&mut a, &mut b, &mut found].into_iter().for_each(|table| pool.release(table));
    assert_eq!((pool.free_blocks(), pool.prefixes.idle()), (4, 2));
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

/// A table of a random history, and what its tokens hold.
struct Written {
    table: BlockTable,
    values: Vec<f32>,
}

/// Lets a table grow by so many tokens of its own, if there is room.
fn write(pool: &mut KvPool, Written { table, values }: &mut Written, tokens: usize, value: impl Fn(usize) -> f32) {
    let end = values.len() + tokens;
    if pool.grow(table, end).is_err() {
        return;
    }
    let slots: Vec<u32> = (values.len()..end).map(|token| table.slot(token)).collect();
    let new: Vec<f32> = (values.len()..end).map(value).collect();
    let rows: Vec<f32> = new.iter().flat_map(|value| [*value; 4]).collect();
    let rows = Tensor::from_vec(rows, (tokens, 1, 4), &Device::Cpu).unwrap();
    pool.append(0, &rows, &(&rows * -1.0).unwrap(), &slots).unwrap();
    values.extend(new);
}

/// Fails unless every table reads what was written by it, or by the one it was forked from.
fn check(pool: &KvPool, tables: &[Written]) {
    let rows = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let (k, v) = (rows(pool.layer(0).k), rows(pool.layer(0).v));
    for Written { table, values } in tables {
        for (token, value) in values.iter().enumerate() {
            let at = table.slot(token) as usize * 4;
            assert_eq!((k[at], v[at + 3]), (*value, -value), "token {token} of {}", values.len());
        }
    }
    pool.check_integrity(tables.iter().map(|written| &written.table));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn no_history_leaks_frees_twice_or_overwrites(
        steps in prop::collection::vec((0u8..7, 0usize..5, 1usize..400), 1..100),
    ) {
        let mut pool = pool(12);
        // As if the last five were elsewhere, for their count.
        pool.offloaded = 5;
        // Tokens that count up are one prompt, of which a table is a beginning until it is cut back.
        let keys = PrefixKey::chain(b"", &(0..12 * 64).collect::<Vec<u32>>());
        let prompt = |token: usize| token as f32 + 1.0;
        let mut tables: Vec<Written> = Vec::new();
        for (number, (action, which, tokens)) in steps.into_iter().enumerate() {
            let which = which.min(tables.len().saturating_sub(1));
            match (action, tables.get_mut(which)) {
                (0, _) => {
                    let mut new = Written { table: BlockTable::default(), values: Vec::new() };
                    write(&mut pool, &mut new, tokens, prompt);
                    tables.push(new);
                }
                (1, Some(written)) => {
                    let pure = (0..written.values.len()).all(|token| written.values[token] == prompt(token));
                    let salt = if pure && which == 0 { 0.0 } else { 10_000.0 * (number + 1) as f32 };
                    write(&mut pool, written, tokens, |token| prompt(token) + salt);
                }
                (2, Some(Written { table, values })) => {
                    if let Ok(table) = pool.fork(table, values.len()) {
                        let values = values.clone();
                        tables.push(Written { table, values });
                    }
                }
                (3, Some(_)) => pool.release(&mut tables.swap_remove(which).table),
                (4, Some(Written { table, values })) => {
                    let pure = values.iter().zip(0..).take_while(|(value, token)| **value == prompt(*token)).count();
                    pool.remember(table, &keys[..pure / 64], 0);
                }
                (5, Some(Written { table, values })) => {
                    let keep = values.len().saturating_sub(tokens);
                    if pool.truncate(table, keep).is_ok() {
                        values.truncate(keep);
                    }
                }
                (6, _) => {
                    let table = pool.recall(&keys[..(tokens / 64).min(keys.len())]);
                    let values = (0..table.capacity()).map(prompt).collect();
                    tables.push(Written { table, values });
                }
                _ => {}
            }
            check(&pool, &tables);
        }
        tables.iter_mut().for_each(|written| pool.release(&mut written.table));
        pool.check_integrity([]);
        prop_assert_eq!(pool.free_blocks(), 12);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn blocks_in_memory_are_taken_first_and_those_in_the_file_hold_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let shape = KvShape { layers: 2, kv_heads: 3, head_dim: 24 };
    let mut both = KvPool::with_file(shape, DType::F16, (2, 7), folder.path()).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the file has no name");
    let mut memory = KvPool::new(shape, DType::F16, 9, &Device::Cpu).unwrap();
    assert_eq!((both.blocks(), both.offloaded_blocks(), memory.offloaded_blocks()), (9, 7, 0));
    let write = |pool: &mut KvPool| {
        let (mut first, mut second) = (BlockTable::default(), BlockTable::default());
        pool.grow(&mut first, 70).unwrap();
        pool.grow(&mut second, 150).unwrap();
        pool.release(&mut first);
        pool.grow(&mut second, 400).unwrap();
        assert_eq!(second.blocks(), [2, 3, 4, 0, 1, 5, 6], "memory again as soon as it is free");
        let slots: Vec<u32> = (0..400).map(|t| second.slot(t)).collect();
        let rows = Tensor::arange(0f32, 400. * 72., &Device::Cpu).unwrap().reshape((400, 3, 24)).unwrap();
        (0..2).for_each(|layer| pool.append(layer, &rows, &rows, &slots).unwrap());
        let fork = pool.fork(&second, 330).unwrap();
        assert_eq!(fork.blocks()[5], 7);
        pool.offloaded_held()
    };
    assert_eq!((write(&mut both), write(&mut memory)), (6, 0), "of blocks 2 to 8 all but the last");
    let read = |pool: &KvPool, layer: usize| {
        let PagedKv { k, v } = pool.layer(layer);
        [k, v].map(|t| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap())
    };
    both.page_out().unwrap();
    (0..2).for_each(|layer| assert!(read(&both, layer) == read(&memory, layer), "layer {layer}"));
}

/// What is remembered for others does not drive who asks now out of memory, and what lies in the file goes last.
#[cfg(target_os = "linux")]
#[test]
fn remembered_blocks_in_memory_go_before_free_ones_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 1 };
    let mut pool = KvPool::with_file(shape, DType::F32, (3, 3), folder.path()).unwrap();
    let key = |prompt: u32| PrefixKey::chain(b"", &[prompt; 64]);
    let mut ended = |prompt: u32, tokens: usize, held: &mut BlockTable| {
        let mut table = BlockTable::default();
        pool.grow(&mut table, 64).unwrap();
        pool.remember(&table, &key(prompt), 0);
        let block = table.blocks()[0];
        pool.release(&mut table);
        pool.grow(held, tokens).unwrap();
        pool.check_integrity([&*held]);
        (block, held.blocks().to_vec(), pool.prefixes.idle(), pool.offloaded_held())
    };
    let (mut none, mut held) = (BlockTable::default(), BlockTable::default());
    assert_eq!(ended(1, 0, &mut none), (0, vec![], 1, 0));
    assert_eq!(ended(2, 0, &mut none), (1, vec![], 2, 0));
    // The last free one at hand, then what was let go longest ago there; the file only once all of that is held.
    assert_eq!(ended(3, 128, &mut held), (2, vec![0, 1], 1, 0));
    assert_eq!(ended(4, 192, &mut held), (2, vec![0, 1, 2], 0, 0));
    assert_eq!(ended(5, 192, &mut held), (3, vec![0, 1, 2], 1, 0));
    // Free ones in the file before remembered ones there.
    assert_eq!(ended(6, 320, &mut held), (4, vec![0, 1, 2, 5, 3], 1, 2));
}

#[cfg(target_os = "linux")]
#[test]
fn a_file_that_cannot_be_had_is_an_error_that_says_where_and_how_large() {
    let folder = tempfile::tempdir().unwrap();
    let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 1 };
    let error = |blocks: usize, folder: &Path| {
        KvPool::with_file(shape, DType::F32, (1, blocks), folder).unwrap_err().to_string()
    };
    let none = folder.path().join("none");
    let message = error(1, &none);
    assert!(message.starts_with(&format!("{}: no file of 8192 bytes", none.display())), "{message}");
    // A petabyte or two.
    let message = error(1 << 42, folder.path());
    assert!(message.starts_with(&format!("{}: no file of ", folder.path().display())), "{message}");
    assert!(message.contains(&(1u64 << 51).to_string()) && message.contains("No space left"), "{message}");
}

#[test]
fn an_index_takes_a_row_in_once_for_all_who_share_it() {
    let mut pool = pool(12);
    let shape = IndexShape { rows: BLOCK_TOKENS, width: 1, dtype: DType::F32 };
    // Rows that the index takes in when it is asked for so many tokens of a table.
    let rows = |pool: &mut KvPool, table: &BlockTable, tokens: usize| {
        let mut rows = 0;
        let taken = |_: &Tensor, _: PagedKv, parts: &[Part]| {
            rows += parts.iter().map(|part| part.rows.len()).sum::<usize>();
            Ok(())
        };
        pool.index(("index", shape), 0, (&[(table, tokens)], 0), taken).unwrap();
        rows
    };
    let keys = PrefixKey::chain(b"", &(0..128).collect::<Vec<u32>>());
    let mut first = BlockTable::default();
    pool.grow(&mut first, 150).unwrap();
    assert_eq!((rows(&mut pool, &first, 140), rows(&mut pool, &first, 141)), (140, 1));
    // The fork has the whole blocks in common, and of the started one a copy with its part of the index.
    let mut fork = pool.fork(&first, 141).unwrap();
    assert_eq!((rows(&mut pool, &fork, 141), rows(&mut pool, &fork, 142), rows(&mut pool, &first, 141)), (0, 1, 0));
    pool.remember(&first, &keys, 0);
    [&mut first, &mut fork].into_iter().for_each(|table| pool.release(table));
    let mut later = pool.recall(&keys);
    assert_eq!((later.capacity(), rows(&mut pool, &later, 128)), (128, 0));
    pool.release(&mut later);
    // Another prompt in the same blocks.
    let mut other = BlockTable::default();
    pool.grow(&mut other, 12 * 64).unwrap();
    assert_eq!(rows(&mut pool, &other, 12 * 64), 12 * 64);
}

#[test]
fn an_index_may_lack_the_newest_tokens_until_there_are_more_of_them() {
    let mut pool = pool(8);
    let shape = IndexShape { rows: BLOCK_TOKENS, width: 1, dtype: DType::F32 };
    let [mut table, mut other] = [BlockTable::default(), BlockTable::default()];
    pool.grow(&mut table, 200).unwrap();
    pool.grow(&mut other, 200).unwrap();
    // What it takes in of two tables' first tokens, of which each may lack the last `behind`.
    let taken = |pool: &mut KvPool, tokens: [usize; 2], behind: usize| {
        let mut rows = Vec::new();
        let take = |_: &Tensor, _: PagedKv, parts: &[Part]| {
            rows.extend(parts.iter().map(|part| (part.start + part.rows.start, part.rows.len())));
            Ok(())
        };
        let tables = [(&table, tokens[0]), (&other, tokens[1])];
        pool.index(("index", shape), 0, (&tables, behind), take).unwrap();
        rows
    };
    assert_eq!(pool.index_lacks("index", 0, (&table, 120)), 120, "there is none");
    assert_eq!(taken(&mut pool, [120, 60], 8), [(0, 64), (64, 56), (0, 60)]);
    assert_eq!((taken(&mut pool, [128, 61], 8), taken(&mut pool, [121, 68], 8)), (vec![], vec![]));
    assert_eq!([128, 130].map(|tokens| pool.index_lacks("index", 0, (&table, tokens))), [8, 10]);
    // More than that of one, and both are up to date.
    assert_eq!(taken(&mut pool, [129, 62], 8), [(120, 8), (128, 1), (60, 2)]);
    assert_eq!((pool.index_lacks("index", 0, (&table, 129)), taken(&mut pool, [129, 62], 0)), (0, vec![]));
    // What is let go is lacked from there on.
    pool.unindex(&table, 100);
    assert_eq!((pool.index_lacks("index", 0, (&table, 129)), taken(&mut pool, [108, 62], 8)), (29, vec![]));
    assert_eq!(taken(&mut pool, [109, 62], 8), [(100, 9)]);
    [&mut table, &mut other].into_iter().for_each(|table| pool.release(table));
}

#[test]
fn what_is_taken_over_is_given_up_after_what_is_not() {
    let mut pool = pool(4);
    let key = |prompt: u32| PrefixKey::chain(b"", &vec![prompt; 64]);
    for prompt in [1, 2, 3] {
        let mut table = BlockTable::default();
        pool.grow(&mut table, 64).unwrap();
        pool.remember(&table, &key(prompt), 0);
        pool.release(&mut table);
    }
    // The oldest is the latest again.
    let mut again = pool.recall(&key(1));
    assert_eq!(again.capacity(), 64);
    pool.release(&mut again);
    let mut large = BlockTable::default();
    pool.grow(&mut large, 2 * 64).unwrap();
    assert_eq!([1, 2, 3].map(|prompt| pool.remembered(&key(prompt))), [1, 0, 1]);
    pool.grow(&mut large, 3 * 64).unwrap();
    assert_eq!([1, 2, 3].map(|prompt| pool.remembered(&key(prompt))), [1, 0, 0]);
}

#[test]
fn indices_take_half_as_much_as_the_cache_and_those_not_asked_for_make_room() {
    let mut pool = KvPool::new(KvShape { layers: 2, kv_heads: 1, head_dim: 4 }, DType::F32, 3, &Device::Cpu).unwrap();
    let mut table = BlockTable::default();
    pool.grow(&mut table, 100).unwrap();
    // A quarter of the cache each: 2 of its 8 numbers a token and layer.
    let quarter = IndexShape { rows: BLOCK_TOKENS, width: 2, dtype: DType::F32 };
    let mut ask = |name: &str, shape: IndexShape, new_step: bool| {
        let mut worked_out = 0;
        if new_step {
            pool.begin_step();
        }
        for layer in 0..2 {
            let taken = |_: &Tensor, _: PagedKv, parts: &[Part]| {
                worked_out += parts.len();
                Ok(())
            };
            pool.index((name, shape), layer, (&[(&table, 100)], 0), taken).unwrap();
        }
        let bytes: usize = pool.indices.values().map(Index::bytes).sum();
        (worked_out, bytes * 4 / (3 * pool.shape.block_bytes(DType::F32)))
    };
    assert_eq!(ask("a", quarter, true), (4, 1));
    assert_eq!(ask("b", quarter, true), (4, 2));
    assert_eq!((ask("a", quarter, true), ask("b", quarter, true)), ((0, 2), (0, 2)));
    assert_eq!(ask("c", quarter, true), (4, 2), "the first goes");
    assert_eq!((ask("b", quarter, true), ask("c", quarter, true)), ((0, 2), (0, 2)));
    assert_eq!(ask("a", quarter, true), (4, 2), "and comes again");
    assert_eq!((ask("b", quarter, true), ask("c", quarter, false)), ((4, 2), (4, 2)), "the others of before go");
    assert_eq!(ask("a", quarter, false), (4, 3), "a step keeps its own");
    assert_eq!(ask("large", IndexShape { width: 8, ..quarter }, true), (4, 4), "one alone may be larger");
    assert_eq!(ask("a", quarter, true), (4, 1));
}

#[test]
fn indices_that_a_step_does_not_ask_for_can_be_dropped() {
    let mut pool = pool(12);
    let shape = IndexShape { rows: BLOCK_TOKENS, width: 1, dtype: DType::F32 };
    let table = BlockTable::default();
    let ask =
        |pool: &mut KvPool, name| drop(pool.index((name, shape), 0, (&[(&table, 0)], 0), |_, _, _| Ok(())).unwrap());
    pool.begin_step();
    ["one", "two"].into_iter().for_each(|name| ask(&mut pool, name));
    assert!(!pool.drop_idle_indices(), "both are in use");
    pool.begin_step();
    ask(&mut pool, "two");
    assert!(pool.drop_idle_indices() && !pool.drop_idle_indices());
    assert_eq!(pool.indices.keys().collect::<Vec<_>>(), ["two"]);
}
