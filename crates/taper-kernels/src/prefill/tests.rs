use super::*;
use crate::testing::{Cache, Numbers, plain, relative_error};
use candle_core::DType;
use proptest::prelude::*;

fn check(
    isa: Isa,
    dtype: DType,
    (kv_heads, group, d): (usize, usize, usize),
    positions: &[u32],
    mask: Mask,
    window: Option<usize>,
) {
    let mut numbers = Numbers(positions.len() as u64 * 31 + d as u64);
    let tokens = *positions.last().unwrap() as usize + 1;
    let cache = Cache::new(&mut numbers, tokens, kv_heads, d, dtype);
    let q = numbers.tensor(&[positions.len(), kv_heads * group, d]);
    let out =
        prefill_with(isa, &Prefill { q: &q, kv: cache.kv(), table: &cache.table, positions, window, mask }).unwrap();
    let (q, out) = (q.to_vec3::<f32>().unwrap(), out.to_vec3::<f32>().unwrap());
    for (row, &position) in positions.iter().enumerate() {
        let keys = mask.keys(position as usize, window);
        for head in 0..kv_heads * group {
            let exact = cache.attend(&q[row][head], head / group, plain(&keys));
            let error = relative_error(&out[row][head], &exact);
            assert!(error < 1e-5, "{isa:?} {dtype:?} group {group} d {d} {mask:?} row {row} head {head}: {error}");
        }
    }
}

#[test]
fn agrees_with_f64_on_every_instruction_set_dtype_and_group() {
    for isa in Isa::available() {
        for (n, heads) in [
            (1, (1, 1, 64)),
            (2, (2, 3, 64)),
            (63, (1, 4, 16)),
            (65, (1, 8, 128)),
            (200, (2, 3, 64)),
            (130, (1, 2, 80)),
        ] {
            for mask in [Mask::Causal, Mask::SinkWindow { sink: 4, window: 37 }] {
                let positions: Vec<u32> = (0..n).collect();
                check(isa, DType::F32, heads, &positions, mask, None);
            }
        }
        let chunk: Vec<u32> = (150..300).collect();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            check(isa, dtype, (1, 3, 64), &chunk, Mask::Causal, None);
            check(isa, dtype, (1, 3, 64), &chunk, Mask::Causal, Some(70));
            check(isa, dtype, (1, 3, 64), &chunk, Mask::SinkWindow { sink: 100, window: 64 }, Some(120));
        }
    }
}

#[test]
fn rows_may_stand_far_apart() {
    let anchors: Vec<u32> = (0..20).map(|j| j * 64).chain(1250..1290).collect();
    for isa in Isa::available() {
        check(isa, DType::F16, (2, 3, 64), &anchors, Mask::Causal, None);
    }
}

#[test]
fn bad_rows_are_errors() {
    let mut numbers = Numbers(1);
    let cache = Cache::new(&mut numbers, 10, 1, 16, DType::F32);
    let q = numbers.tensor(&[2, 2, 16]);
    for positions in [&[3u32, 3][..], &[5, 4], &[0, 64], &[1]] {
        let args = Prefill { q: &q, kv: cache.kv(), table: &cache.table, positions, window: None, mask: Mask::Causal };
        assert!(prefill(&args).is_err(), "{positions:?}");
    }
}

proptest! {
    #[test]
    fn a_rows_keys_are_causal_and_disjoint_and_end_with_its_own(
        position in 0usize..300, sink in 0usize..100, window in 1usize..100, model in prop::option::of(1usize..200)
    ) {
        for mask in [Mask::Causal, Mask::SinkWindow { sink, window }] {
            let [a, b] = mask.keys(position, model);
            prop_assert!(a.start <= a.end && a.end <= b.start && b.start < b.end);
            prop_assert_eq!(b.end, position + 1);
            let lowest = (position + 1).saturating_sub(model.unwrap_or(usize::MAX));
            for key in 0..=position {
                let read = key >= lowest && match mask {
                    Mask::Causal => true,
                    Mask::SinkWindow { sink, window } => key < sink || key + window > position,
                };
                prop_assert_eq!(read, a.contains(&key) || b.contains(&key), "key {}", key);
            }
        }
    }
}
