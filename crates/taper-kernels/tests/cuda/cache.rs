//! What the tests share: the device, numbers, caches on both sides, errors.

use candle_core::{DType, Device, Tensor};
use taper_kernels::cuda::Batch;
use taper_kernels::decode::{Decode, DecodeRow};
use taper_kernels::index::Part;
use taper_kernels::kv::{self, BLOCK_TOKENS, PagedKv};

pub use crate::numbers::Numbers;

/// bf16 keeps 8 bits of a number; an output's relative error stays below this.
pub const LIMIT: f64 = 1e-2;
/// Dtypes, head sizes and (KV heads, group) that operations are tried with.
pub const GRID: [(DType, usize, usize, usize); 8] = [
    (DType::BF16, 128, 2, 4),
    (DType::BF16, 128, 1, 3),
    (DType::BF16, 64, 2, 8),
    (DType::BF16, 64, 3, 1),
    (DType::F16, 128, 2, 1),
    (DType::F16, 128, 1, 8),
    (DType::F16, 64, 2, 4),
    (DType::F16, 64, 2, 3),
];
/// Groups of other sizes: up to 16 query heads share a KV head, more than 8 by another tile of matrix products.
const GROUPS: [(DType, usize, usize, usize); 15] = [
    (DType::BF16, 128, 2, 5),
    (DType::F16, 64, 1, 6),
    (DType::BF16, 64, 2, 7),
    (DType::F16, 128, 1, 9),
    (DType::BF16, 128, 2, 10),
    (DType::BF16, 64, 1, 11),
    (DType::F16, 64, 2, 12),
    (DType::F16, 128, 1, 13),
    (DType::BF16, 128, 1, 14),
    (DType::BF16, 64, 2, 15),
    (DType::F16, 128, 1, 16),
    (DType::BF16, 128, 2, 2),
    (DType::BF16, 64, 1, 2),
    (DType::F16, 128, 1, 2),
    (DType::F16, 64, 3, 2),
];

/// All of `GRID`, and every other size of a group.
pub fn every_group() -> impl Iterator<Item = (DType, usize, usize, usize)> {
    GRID.into_iter().chain(GROUPS)
}

/// The first CUDA device. There must be one: a build with the feature has no other way to pass.
pub fn device() -> Device {
    // candle's stream is the thread's, so each test, which has a thread, has a device of its own.
    thread_local!(static DEVICE: Device =
        Device::new_cuda_with_stream(0).expect("the tests of the feature `cuda` need a CUDA device"));
    DEVICE.with(Clone::clone)
}

impl Numbers {
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// f32, on the CPU, of values that the dtype holds exactly.
    pub fn tensor(&mut self, shape: &[usize], dtype: DType) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.normal()).collect();
        let exact = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        exact.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap()
    }

    /// Whole numbers between -2 and 2, f32, on the CPU.
    pub fn whole(&mut self, shape: &[usize]) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.below(5) as f32 - 2.0).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    /// So many of `0..n`, ascending.
    pub fn some(&mut self, n: usize, of: usize) -> Vec<u32> {
        let mut ids: Vec<u32> = (0..n as u32).filter(|_| self.below(of) == 0).collect();
        ids.dedup();
        ids
    }
}

/// Sequences in one pool on both sides; its blocks are shuffled and its unused rows NaN.
pub struct Caches {
    pub cpu: (Tensor, Tensor),
    pub cuda: (Tensor, Tensor),
    pub tables: Vec<Vec<u32>>,
    pub lens: Vec<usize>,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: DType,
}

impl Caches {
    /// Values have the mean given, so that outputs are not all noise.
    pub fn new(
        numbers: &mut Numbers,
        lens: &[usize],
        kv_heads: usize,
        head_dim: usize,
        dtype: DType,
        mean: f64,
    ) -> Self {
        let needed: usize = lens.iter().map(|n| n.div_ceil(BLOCK_TOKENS)).sum();
        let blocks = needed + 3;
        let mut order: Vec<u32> = (0..blocks as u32).collect();
        for i in (1..blocks).rev() {
            order.swap(i, numbers.below(i + 1));
        }
        let mut tables = Vec::new();
        for n in lens {
            tables.push(order.split_off(order.len() - n.div_ceil(BLOCK_TOKENS)));
        }
        let device = device();
        let pool = |device: &Device| {
            let shape = (blocks, kv_heads, BLOCK_TOKENS, head_dim);
            Tensor::full(f32::NAN, shape, device).unwrap().to_dtype(dtype).unwrap().contiguous().unwrap()
        };
        let pools = |device: &Device| (pool(device), pool(device));
        let (cpu, cuda) = (pools(&Device::Cpu), pools(&device));
        for (table, &n) in tables.iter().zip(lens) {
            let slot = |t: usize| table[t / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (t % BLOCK_TOKENS) as u32;
            let slots: Vec<u32> = (0..n).map(slot).collect();
            let k = numbers.tensor(&[n, kv_heads, head_dim], dtype);
            let v = (numbers.tensor(&[n, kv_heads, head_dim], dtype) + mean).unwrap();
            for (rows, cpu, cuda) in [(k, &cpu.0, &cuda.0), (v, &cpu.1, &cuda.1)] {
                kv::append(cpu, &rows, &slots).unwrap();
                kv::append(cuda, &rows.to_device(&device).unwrap(), &slots).unwrap();
            }
        }
        Self { cpu, cuda, tables, lens: lens.to_vec(), kv_heads, head_dim, dtype }
    }

    /// Keys that are small whole numbers, in place of the others, with which sums are exact.
    pub fn whole_keys(self, numbers: &mut Numbers) -> Self {
        for (i, &n) in self.lens.iter().enumerate() {
            self.set_keys(i, &numbers.whole(&[n, self.kv_heads, self.head_dim]));
        }
        self
    }

    /// Keys `[tokens, kv_heads, head_dim]` in place of those of sequence `i`.
    pub fn set_keys(&self, i: usize, k: &Tensor) {
        let slot = |t: usize| self.tables[i][t / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (t % BLOCK_TOKENS) as u32;
        let slots: Vec<u32> = (0..self.lens[i]).map(slot).collect();
        kv::append(&self.cpu.0, k, &slots).unwrap();
        kv::append(&self.cuda.0, &k.to_device(&device()).unwrap(), &slots).unwrap();
    }

    pub fn on_cpu(&self) -> PagedKv<'_> {
        PagedKv { k: &self.cpu.0, v: &self.cpu.1 }
    }

    pub fn on_cuda(&self) -> PagedKv<'_> {
        PagedKv { k: &self.cuda.0, v: &self.cuda.1 }
    }

    /// One row a sequence, which sees all of it.
    pub fn rows(&self) -> Vec<DecodeRow<'_>> {
        self.tables.iter().zip(&self.lens).map(|(table, &n)| DecodeRow { table, visible: 0..n }).collect()
    }

    /// Block tables `[sequences, stride]`.
    pub fn device_tables(&self) -> Tensor {
        let stride = self.tables.iter().map(Vec::len).max().unwrap();
        let padded = |table: &Vec<u32>| [table.clone(), vec![0; stride - table.len()]].concat();
        let all: Vec<u32> = self.tables.iter().flat_map(padded).collect();
        Tensor::from_vec(all, (self.tables.len(), stride), &device()).unwrap()
    }

    /// The lengths as the device reads them.
    pub fn device_lens(&self) -> Tensor {
        u32s(self.lens.iter().map(|&n| n as u32).collect())
    }

    /// Tokens `from` to `to` of every sequence that has any of them.
    pub fn parts(&self, from: usize, to: usize) -> Vec<Part> {
        let part = |(i, &block): (usize, &u32), n: usize| {
            let start = i * BLOCK_TOKENS;
            let rows =
                from.max(start).min(start + BLOCK_TOKENS) - start..to.min(n).clamp(start, start + BLOCK_TOKENS) - start;
            (!rows.is_empty()).then_some(Part { block, rows, start })
        };
        let of = |(table, &n): (&Vec<u32>, &usize)| {
            table.iter().enumerate().filter_map(|at| part(at, n)).collect::<Vec<_>>()
        };
        self.tables.iter().zip(&self.lens).flat_map(of).collect()
    }
}

/// Queries on both sides: f32 on the CPU, the cache's dtype on the device; and the batch's tables and lengths.
pub struct Queries {
    pub cpu: Tensor,
    pub cuda: Tensor,
    pub tables: Tensor,
    pub lens: Tensor,
    pub max_len: usize,
}

impl Queries {
    pub fn new(numbers: &mut Numbers, caches: &Caches, group: usize) -> Self {
        let cpu = numbers.tensor(&[caches.lens.len(), caches.kv_heads * group, caches.head_dim], caches.dtype);
        let cuda = cpu.to_device(&device()).unwrap().to_dtype(caches.dtype).unwrap();
        let max_len = *caches.lens.iter().max().unwrap();
        Self { cpu, cuda, tables: caches.device_tables(), lens: caches.device_lens(), max_len }
    }

    pub fn batch<'a>(&'a self, caches: &'a Caches) -> Batch<'a> {
        let (q, kv) = (&self.cuda, caches.on_cuda());
        Batch { q, kv, tables: &self.tables, lens: &self.lens, max_len: self.max_len }
    }

    pub fn decode<'a>(&'a self, caches: &'a Caches, rows: &'a [DecodeRow<'a>]) -> Decode<'a> {
        Decode { q: &self.cpu, kv: caches.on_cpu(), rows }
    }
}

pub fn u32s(values: Vec<u32>) -> Tensor {
    let n = values.len();
    Tensor::from_vec(values, n, &device()).unwrap()
}

/// All elements, in f64.
pub fn elements(t: &Tensor) -> Vec<f64> {
    let t = t.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    t.to_vec1::<f32>().unwrap().into_iter().map(f64::from).collect()
}

/// ‖a − b‖ / ‖b‖ over all elements; NaN anywhere gives NaN, which no bound admits.
pub fn relative(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    relative_of(&elements(a), &elements(b))
}

pub fn relative_of(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
    difference.sqrt() / b.iter().map(|b| b * b).sum::<f64>().sqrt().max(1e-30)
}

/// The largest difference; equal infinities do not differ.
pub fn furthest(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let apart = |(a, b): (f64, f64)| if a == b { 0.0 } else { (a - b).abs() };
    let worst = |worst: f64, x: f64| if x.is_nan() || x > worst { x } else { worst };
    elements(a).into_iter().zip(elements(b)).map(apart).fold(0.0, worst)
}

/// Labels of the CPU `[blocks, kv_heads, 64, channels]`, which lie channel by channel there, key by key as on a device.
pub fn by_key(labels: &Tensor) -> Tensor {
    let (blocks, heads, rows, width) = labels.dims4().unwrap();
    labels.reshape((blocks, heads, width, rows)).unwrap().transpose(2, 3).unwrap().contiguous().unwrap()
}

/// Fails where `error` is not below `limit`; NaN never is.
#[track_caller]
pub fn below(error: f64, limit: f64, what: &str) {
    assert!(error < limit, "{what}: {error:.3e}, limit {limit:.1e}");
}

/// What `set` makes of some of a tensor's numbers.
pub fn with(x: &Tensor, set: impl Fn(&mut [f32])) -> Tensor {
    let mut values = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    set(&mut values);
    Tensor::from_vec(values, x.dims(), &device()).unwrap().to_dtype(x.dtype()).unwrap()
}

/// Which heads of each row are wholly no numbers; fails where only a part of one is.
#[track_caller]
pub fn none(out: &Tensor) -> Vec<Vec<bool>> {
    let rows = out.to_dtype(DType::F32).unwrap().to_vec3::<f32>().unwrap();
    let of = |head: &Vec<f32>| {
        let nan = head.iter().filter(|x| x.is_nan()).count();
        assert!(nan == 0 || nan == head.len(), "{nan} of {} numbers are none", head.len());
        nan > 0
    };
    rows.iter().map(|row| row.iter().map(of).collect()).collect()
}
