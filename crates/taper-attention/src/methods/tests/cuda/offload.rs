//! A cache whose tail lies in the host's memory, beside one that is all on the device.

use super::*;
use candle_core::cuda_backend::cudarc::driver::result::mem_get_info;
use taper_kernels::kv;

const KV: KvShape = KvShape { layers: 1, kv_heads: SHAPE.kv_heads, head_dim: SHAPE.head_dim };
/// Of 313 blocks 128 fill the device's first page of 2 MiB.
const TOKENS: usize = 20_000;

/// What a history of sequences gives: a prompt in head and tail and what follows it, twice, with a fork of the second.
fn history(spec: &Value, pool: &mut KvPool, input: &Input, device: &Device) -> Vec<(Vec<f32>, Value)> {
    let spec = Arc::new(AttentionSpec::from_json(spec, "attention", &artifacts(device)).unwrap());
    let start = |n: usize| Sequence::new(Arc::clone(&spec), 5, n);
    let part = |n: usize| Input {
        q: input.q.narrow(0, 0, n).unwrap(),
        k: input.k.narrow(0, 0, n).unwrap(),
        v: input.v.narrow(0, 0, n).unwrap(),
    };
    // The third takes what the first gives back, and goes on in the tail.
    let (mut short, mut long) = (start(6_000), start(12_000));
    let mut outs = vec![
        (advance(&mut short, pool, &part(6_003), device, false), json!(short.usage())),
        (advance(&mut long, pool, &part(12_005), device, false), json!(long.usage())),
    ];
    pool.release(short.table_mut());
    let mut third = start(7_000);
    outs.push((advance(&mut third, pool, &part(7_010), device, true), json!(third.usage())));
    assert!(long.table().blocks().iter().any(|&block| block >= 200) && third.table().blocks()[0] < 94);
    let mut fork = third.fork(pool, 9).unwrap();
    outs.push((advance(&mut fork, pool, &part(7_030), device, true), json!(fork.usage())));
    [long, third, fork].iter_mut().for_each(|sequence| pool.release(sequence.table_mut()));
    pool.check_integrity([]);
    let mut whole = start(TOKENS - 7);
    outs.push((advance(&mut whole, pool, &part(TOKENS), device, false), json!(whole.usage())));
    pool.release(whole.table_mut());
    outs
}

#[test]
fn a_tail_in_the_hosts_memory_gives_the_same_to_the_bit() {
    let device = Device::new_cuda_with_stream(0).expect("the feature `cuda` needs a CUDA device");
    let normal = |heads: usize| {
        let x = Tensor::randn(0f32, 1.0, (TOKENS, heads, SHAPE.head_dim), &device).unwrap();
        exact(x)
    };
    let input = Input { q: normal(SHAPE.q_heads), k: normal(SHAPE.kv_heads), v: normal(SHAPE.kv_heads) };
    let blocks = TOKENS.div_ceil(64);
    let mut memory = KvPool::new(KV, DType::BF16, blocks, &device).unwrap();
    let mut both = KvPool::with_host(KV, DType::BF16, (100, blocks - 100), &device).unwrap();
    // Of 313 blocks of 16 KiB, 2 MiB on the device and the rest in whole pages.
    assert_eq!((both.blocks(), both.offloaded_blocks(), both.host_bytes()), (313, 213, 2 * 2 * (2 << 20)));
    for decode in [
        json!({ "method": "dense" }),
        json!({ "method": "vattention", "epsilon": 0.2 }),
        json!({ "method": "quest", "k": 0.1 }),
        json!({ "method": "santa" }),
    ] {
        let spec = json!({ "decode": decode, "audit": true });
        let expected = history(&spec, &mut memory, &input, &device);
        let got = history(&spec, &mut both, &input, &device);
        for (i, ((a, used), (b, used_of_both))) in expected.iter().zip(&got).enumerate() {
            let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same && a.len() == b.len() && used == used_of_both, "{decode}: sequence {i}");
        }
    }
    let keys = both.layer(0).k.clone();
    drop(both);
    let row = Tensor::zeros((1, SHAPE.kv_heads, SHAPE.head_dim), DType::F32, &device).unwrap();
    assert!(kv::append(&keys, &row, &[0]).is_err(), "a pool outlives its memory only in name");
    device.synchronize().unwrap();
}

#[test]
fn memory_of_both_is_given_back_and_too_much_is_refused_with_its_number() {
    let device = Device::new_cuda_with_stream(0).expect("the feature `cuda` needs a CUDA device");
    let device_free = || mem_get_info().unwrap().0 as f64 / f64::from(1 << 30);
    let host_free = || {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = text.lines().find(|line| line.starts_with("MemAvailable")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / f64::from(1 << 20)
    };
    let at_first = (device_free(), host_free());
    // 4 GiB on the device and 2 GiB in the host's memory: far more than what tests beside this one take and give.
    let pool = KvPool::with_host(KV, DType::BF16, (131_072, 65_536), &device).unwrap();
    device.synchronize().unwrap();
    assert_eq!(pool.host_bytes(), 2 << 30);
    let held = (device_free(), host_free());
    assert!(at_first.0 - held.0 > 3.0 && at_first.1 - held.1 > 1.5, "{at_first:?} before, {held:?} with the pool");
    drop(pool);
    let after = (device_free(), host_free());
    assert!(at_first.0 - after.0 < 1.0 && at_first.1 - after.1 < 0.5, "{at_first:?} before, {after:?} after the pool");
    // A tebibyte of keys and values.
    let error = KvPool::with_host(KV, DType::BF16, (131_072, 1 << 25), &device).unwrap_err().to_string();
    let wanted =
        "no 1099511627776 bytes of pinned host memory for the KV cache: 549755813888 bytes of pinned host memory: ";
    assert!(error.starts_with(wanted), "{error}");
    let after = (device_free(), host_free());
    assert!(
        at_first.0 - after.0 < 1.0 && at_first.1 - after.1 < 0.5,
        "{at_first:?} before, {after:?} after the refusal"
    );
}
