//! A pool of more elements than 32 bits count, and a sequence in its last blocks: every operation gives the bits that it gives
//! in a small pool. Takes 22 GB of the device's memory.

use crate::cache::{Numbers, device, u32s};
use crate::step::{perceptron, short_perceptron};
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{DType, Storage, Tensor};
use taper_kernels::budget::{Promise, Rule};
use taper_kernels::cuda::{self, Batch, Tiles, View, prefill_tiles};
use taper_kernels::decode::{
    By, Certainty, Decode, DecodeRow, Foreseen, Importance, Over, Sampling, Selection, Spread, Targets, attend,
    importance, sample, sample_certain, sample_some, sample_values, scores, top_k, top_p, top_paying,
};
use taper_kernels::index::clusters::{self, Centroids, Probes};
use taper_kernels::index::{Part, bounds, codes, labels, norms, quantized};
use taper_kernels::kv::{self, BLOCK_TOKENS, PagedKv};
use taper_kernels::mlp::{self, Activation, Mlp, PerHead};
use taper_kernels::philox::Stream;
use taper_kernels::prefill::{
    self, HeadReads, Hierarchy, Lists, Mask, Rows, Sums, pooled, prefill, probe, query_blocks, sums,
};

const KV_HEADS: usize = 8;
const GROUP: usize = 4;
const HEAD_DIM: usize = 128;
const DTYPE: DType = DType::BF16;
const TOKENS: usize = 500;
/// Blocks of the sequence.
const USED: usize = TOKENS.div_ceil(BLOCK_TOKENS);
/// Of the large pool: the sequence's begin at element 2³², 8.6 GB from the start.
const BLOCKS: usize = (1 << 32) / (KV_HEADS * BLOCK_TOKENS * HEAD_DIM) + USED;
/// What the rows of a decode step see.
const LENS: [usize; 3] = [70, 333, TOKENS];
/// Sinks and window.
const FIXED: (usize, usize) = (5, 37);
const CLUSTERS: usize = 20;
const CHANNELS: usize = 64;

/// A pool whose last blocks are the sequence's.
struct Side {
    k: Tensor,
    v: Tensor,
    table: Vec<u32>,
}

/// What both sides are given.
struct Given {
    k: Tensor,
    v: Tensor,
    /// Of the rows of a decode step, and of all tokens.
    q: Tensor,
    prompt: Tensor,
    /// Joint projections of the last ten tokens, and their angles.
    joint: Tensor,
    angles: Tensor,
    streams: Vec<Stream>,
    centroids: PerHead<Centroids>,
    /// Of keys, of queries, and the logits of the clusters.
    maps: [PerHead<Mlp>; 3],
}

impl Given {
    fn new(numbers: &mut Numbers) -> Self {
        let (on, q_heads) = (device(), KV_HEADS * GROUP);
        let mut tensor = |shape: &[usize], dtype| numbers.tensor(shape, dtype).to_device(&on).unwrap();
        let (k, v) = (tensor(&[TOKENS, KV_HEADS, HEAD_DIM], DTYPE), tensor(&[TOKENS, KV_HEADS, HEAD_DIM], DTYPE));
        let (q, prompt) =
            (tensor(&[LENS.len(), q_heads, HEAD_DIM], DTYPE), tensor(&[TOKENS, q_heads, HEAD_DIM], DTYPE));
        let joint = tensor(&[10, (q_heads + 2 * KV_HEADS) * HEAD_DIM], DTYPE).to_dtype(DTYPE).unwrap();
        let angles = tensor(&[10, HEAD_DIM], DType::F32);
        let streams = LENS.map(|n| Stream { seed: numbers.next(), layer: 3, head: 0, position: n as u32 - 1 });
        let mut centroid = || (0..CLUSTERS * HEAD_DIM).map(|_| numbers.normal()).collect::<Vec<_>>();
        let centroids = (0..KV_HEADS).map(|_| Centroids::new(&centroid(), HEAD_DIM).unwrap()).collect();
        let hashes = |numbers: &mut Numbers| perceptron(numbers, &[HEAD_DIM, 24, codes::BITS], Activation::Silu);
        let classes = |numbers: &mut Numbers| short_perceptron(numbers, &[HEAD_DIM, 40, CLUSTERS], Activation::Relu);
        let maps = [
            (0..q_heads).map(|_| hashes(numbers)).collect(),
            (0..q_heads).map(|_| hashes(numbers)).collect(),
            (0..KV_HEADS).map(|_| classes(numbers)).collect(),
        ];
        // Values lean one way, and keys tell one another apart little enough for a sample to keep a promise.
        let (k, v) = ((k * 0.5).unwrap(), (v + 1.0).unwrap());
        Self { k, v, q, prompt, joint, angles, streams: streams.to_vec(), centroids, maps }
    }
}

/// The bits of a tensor.
fn bits(t: &Tensor) -> Vec<u32> {
    let t = t.flatten_all().unwrap();
    match t.dtype() {
        DType::U32 => t.to_vec1().unwrap(),
        _ => t.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect(),
    }
}

/// Those of the last [`USED`] blocks of a pool or an index, of which nothing else is copied.
fn last_blocks(t: &Tensor) -> Vec<u32> {
    let (all, each) = (t.elem_count(), t.elem_count() / t.dim(0).unwrap());
    let last = all - USED * each..all;
    let (storage, layout) = t.storage_and_layout();
    assert_eq!(layout.contiguous_offsets(), Some((0, all)));
    let Storage::Cuda(storage) = &*storage else { panic!("in host memory") };
    let on = &storage.device;
    match &storage.slice {
        CudaStorageSlice::BF16(x) => {
            on.clone_dtoh(&x.slice(last)).unwrap().into_iter().map(|x| x.to_bits().into()).collect()
        }
        CudaStorageSlice::I16(x) => on.clone_dtoh(&x.slice(last)).unwrap().into_iter().map(|x| x as u32).collect(),
        CudaStorageSlice::F32(x) => on.clone_dtoh(&x.slice(last)).unwrap().into_iter().map(f32::to_bits).collect(),
        CudaStorageSlice::U32(x) => on.clone_dtoh(&x.slice(last)).unwrap(),
        _ => panic!("{:?}", t.dtype()),
    }
}

impl Side {
    /// In a pool of zeros; the rows behind the sequence's last token are NaN.
    fn new(blocks: usize, given: &Given) -> Self {
        let pool = || kv::zeros((blocks, KV_HEADS, BLOCK_TOKENS, HEAD_DIM), DTYPE, &device()).unwrap();
        let first = blocks - USED;
        let side =
            Self { k: pool(), v: pool(), table: (0..USED).map(|i| (first + (3 * i + 1) % USED) as u32).collect() };
        let none = Tensor::full(f32::NAN, (BLOCK_TOKENS, KV_HEADS, HEAD_DIM), &device()).unwrap();
        for (rows, pool) in [(&given.k, &side.k), (&given.v, &side.v)] {
            kv::append(pool, &none, &side.slots((USED - 1) * BLOCK_TOKENS, USED * BLOCK_TOKENS)).unwrap();
            kv::append(pool, rows, &side.slots(0, TOKENS)).unwrap();
        }
        side
    }

    fn slots(&self, from: usize, to: usize) -> Vec<u32> {
        (from..to).map(|t| self.table[t / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (t % BLOCK_TOKENS) as u32).collect()
    }

    fn kv(&self) -> PagedKv<'_> {
        PagedKv { k: &self.k, v: &self.v }
    }

    /// What `run` says of rows that see the first so many tokens each.
    fn decode<T>(&self, q: &Tensor, lens: &[usize], run: impl FnOnce(&Decode) -> T) -> T {
        let rows: Vec<_> = lens.iter().map(|&n| DecodeRow { table: &self.table, visible: 0..n }).collect();
        run(&Decode { q, kv: self.kv(), rows: &rows })
    }

    /// What `choose` has the rows of a decode step read, and what reading it gives.
    fn reads(&self, q: &Tensor, choose: impl FnOnce(&Decode) -> Selection) -> Vec<u32> {
        self.decode(q, &LENS, |batch| {
            let selection = choose(batch);
            let mut all = bits(&attend(batch, &selection, None).unwrap());
            all.extend(selection.counts(batch.rows).unwrap().into_iter().map(|n| n as u32));
            all
        })
    }

    /// What rows of the prompt, from one on, are given by what `run` makes of them.
    fn prompt<T>(&self, given: &Given, from: usize, run: impl FnOnce(&Rows) -> T) -> T {
        let positions: Vec<u32> = (from as u32..TOKENS as u32).collect();
        let q = given.prompt.narrow(0, from, TOKENS - from).unwrap().contiguous().unwrap();
        run(&Rows { q: &q, kv: self.kv(), table: &self.table, positions: &positions, window: None })
    }

    /// An index over all of it: a prompt's whole blocks, and a few tokens behind them.
    fn index(
        &self,
        (rows, width): (usize, usize),
        dtype: DType,
        extend: impl Fn(&Tensor, &[Part]) -> candle_core::Result<()>,
    ) -> Tensor {
        let index = kv::zeros((self.k.dim(0).unwrap(), KV_HEADS, rows, width), dtype, &device()).unwrap();
        for (from, to) in [(0, TOKENS - 7), (TOKENS - 7, TOKENS)] {
            let of = |(i, &block): (usize, &u32)| {
                let start = i * BLOCK_TOKENS;
                let rows = from.max(start)..to.min(start + BLOCK_TOKENS);
                (!rows.is_empty()).then(|| Part { block, rows: rows.start - start..rows.end - start, start })
            };
            extend(&index, &self.table.iter().enumerate().filter_map(of).collect::<Vec<_>>()).unwrap();
        }
        index
    }

    fn bounds(&self, page: usize) -> Tensor {
        self.index(bounds::shape(page, HEAD_DIM), DTYPE, |index, parts| bounds::extend(index, &self.k, parts))
    }

    fn norms(&self, page: usize) -> Tensor {
        self.index((BLOCK_TOKENS / page, 1), DType::F32, |index, parts| norms::extend(index, &self.v, parts))
    }

    fn labels(&self) -> Tensor {
        self.index((BLOCK_TOKENS, CHANNELS), DTYPE, |index, parts| labels::extend(index, &self.k, parts, &channels()))
    }

    fn quantized(&self) -> Tensor {
        self.index(quantized::shape(HEAD_DIM), DType::U32, |index, parts| quantized::extend(index, &self.k, parts))
    }

    fn codes(&self, given: &Given) -> Tensor {
        let maps = &given.maps[0];
        self.index((BLOCK_TOKENS, GROUP), DType::U32, |index, parts| codes::extend(index, &self.k, parts, maps))
    }

    fn clusters(&self, given: &Given) -> Tensor {
        self.index((BLOCK_TOKENS, 1), DType::I16, |index, parts| {
            clusters::extend(index, &self.k, parts, &given.centroids, None)
        })
    }
}

fn channels() -> Vec<Vec<u32>> {
    (0..KV_HEADS).map(|head| (0..CHANNELS).map(|c| ((3 * c + head) % HEAD_DIM) as u32).collect()).collect()
}

/// All heads of all rows.
fn every<T: Clone>(x: T) -> Vec<T> {
    vec![x; LENS.len() * KV_HEADS]
}

/// The heaviest 60 tokens by what is known of them, sinks and window.
fn heaviest(batch: &Decode, of: &Importance) -> Selection {
    top_k(batch.rows, of, FIXED.0, FIXED.1, &every(60)).unwrap()
}

/// Those that are cheaper to read than to sample around.
fn paying(batch: &Decode, of: &Importance) -> Selection {
    top_paying(batch.rows, of, FIXED, &every(TOKENS), Some(1e-4)).unwrap()
}

fn by_scores(batch: &Decode, over: Over) -> Importance {
    importance(&scores(batch, &every(true)).unwrap(), over)
}

fn dense() -> Selection {
    Selection::dense(LENS.len(), KV_HEADS)
}

fn sink_window(batch: &Decode) -> Selection {
    Selection::sink_window(batch.rows, KV_HEADS, FIXED.0, FIXED.1)
}

/// Some of whose lists are sampled, or the kernel that samples has read nothing.
fn with_a_sample(selection: Selection) -> Selection {
    let budgets = selection.budgets().unwrap().expect("a sample's budgets");
    assert!(budgets.iter().any(|budget| !budget.dense && budget.sampled < budget.residual), "nothing is sampled");
    selection
}

fn values(batch: &Decode, given: &Given, selection: &Selection, spread: Spread) -> Selection {
    sample_values(batch, selection, By::Keys, &given.streams, 16, spread).unwrap()
}

fn outputs((out, lse): (Tensor, Tensor)) -> Vec<u32> {
    [bits(&out), bits(&lse)].concat()
}

/// Attention of a whole prompt by what its heads read.
fn by_heads(rows: &Rows, runs: &[std::ops::Range<usize>], reads: Vec<HeadReads>) -> Vec<u32> {
    let selection = prefill::Selection::new(runs.to_vec(), reads).unwrap();
    outputs(prefill(rows, (&selection).into()).unwrap())
}

type Operation = fn(&Side, &Given) -> Vec<u32>;

/// Everything that reads or writes through block tables, or blocks by their numbers. What changes the pools comes last.
const OPERATIONS: &[(&str, Operation)] = &[
    ("append", |s, _| [last_blocks(&s.k), last_blocks(&s.v)].concat()),
    ("dense decode", |s, g| s.reads(&g.q, |_| dense())),
    ("dense rows of an answer that is checked", |s, g| {
        let last = [TOKENS - 2, TOKENS - 1, TOKENS];
        s.decode(&g.q, &last, |batch| bits(&attend(batch, &dense(), None).unwrap()))
    }),
    ("sinks and window", |s, g| s.reads(&g.q, sink_window)),
    ("scores", |s, g| {
        let (q, lens) = (g.q.to_dtype(DTYPE).unwrap(), u32s(LENS.map(|n| n as u32).to_vec()));
        let tables = u32s(s.table.repeat(LENS.len())).reshape((LENS.len(), USED)).unwrap();
        let batch = Batch { q: &q, kv: s.kv(), tables: &tables, lens: &lens, max_len: TOKENS };
        let found = cuda::scores(&batch, &q, View::Rows(&s.k), 0.1).unwrap();
        let all: Vec<Vec<Vec<f32>>> = found.values().to_vec3().unwrap();
        let seen = all.iter().zip(LENS).flat_map(|(row, n)| row.iter().flat_map(move |head| &head[..n]));
        seen.map(|x| x.to_bits()).chain(bits(found.lse())).collect()
    }),
    ("lists by scores", |s, g| s.reads(&g.q, |b| heaviest(b, &by_scores(b, Over::Sum)))),
    ("lists that pay", |s, g| s.reads(&g.q, |b| paying(b, &by_scores(b, Over::Max)))),
    ("lists that hold a share", |s, g| {
        s.reads(&g.q, |b| top_p(b.rows, &by_scores(b, Over::Sum), FIXED.0, FIXED.1, 0.7, GROUP).unwrap())
    }),
    ("pages", |s, g| {
        let index = s.bounds(16);
        s.reads(&g.q, |b| heaviest(b, &bounds::importance(b, &index, &every(true), Over::Sum).unwrap()))
    }),
    ("pages that pay", |s, g| {
        let index = s.bounds(4);
        s.reads(&g.q, |b| paying(b, &bounds::importance(b, &index, &every(true), Over::Max).unwrap()))
    }),
    ("labels", |s, g| {
        let index = s.labels();
        let of = |b: &Decode| labels::importance(b, &index, &channels(), &every(true), Over::Sum).unwrap();
        s.reads(&g.q, |b| heaviest(b, &of(b)))
    }),
    ("quantized keys", |s, g| {
        let index = s.quantized();
        s.reads(&g.q, |b| heaviest(b, &quantized::importance(b, &index, &every(true), Over::Sum).unwrap()))
    }),
    ("quantized keys that pay", |s, g| {
        let index = s.quantized();
        s.reads(&g.q, |b| paying(b, &quantized::importance(b, &index, &every(true), Over::Max).unwrap()))
    }),
    ("codes", |s, g| {
        let index = s.codes(g);
        s.reads(&g.q, |b| heaviest(b, &codes::importance(b, &index, &g.maps[1], &every(true)).unwrap()))
    }),
    ("clusters", |s, g| {
        let (index, logits) = (s.clusters(g), mlp::per_head(&g.maps[2], &g.q, None).unwrap());
        s.reads(&g.q, |b| clusters::select(b, &index, &logits, FIXED, Probes::Clusters(5, usize::MAX)).unwrap())
    }),
    ("sampled", |s, g| {
        let loose = Promise::new(Rule::Chi2, 0.6, 0.3);
        let how =
            Sampling { promise: loose.clone(), hopeless: loose, pilot_tokens: 16, pilot_share: 0.01, dense_share: 0.9 };
        s.reads(&g.q, |b| {
            with_a_sample(sample(b, &sink_window(b), &Foreseen::default(), None, &g.streams, &how).unwrap().0)
        })
    }),
    ("a sample of a given size", |s, g| {
        s.reads(&g.q, |b| sample_some(b, &sink_window(b), &every(20), &g.streams).unwrap())
    }),
    ("certain", |s, g| {
        let (bounds, norms) = (s.bounds(16), s.norms(16));
        let how = Certainty { epsilon: 6.0, delta: 0.5, pilot_tokens: 16, dense_share: 0.95 };
        // Keys that weigh nearly the same: the longest row is sampled.
        let q = (&g.q * 0.05).unwrap();
        s.reads(&q, |b| {
            let of = sample_certain(b, &sink_window(b), None, &g.streams, (&bounds, &norms), &how).unwrap();
            with_a_sample(of.0)
        })
    }),
    ("values", |s, g| s.reads(&g.q, |b| values(b, g, &dense(), Spread::Whole(Targets::Systematic)))),
    ("values of each tile", |s, g| s.reads(&g.q, |b| values(b, g, &dense(), Spread::EachTile(128)))),
    ("values of lists", |s, g| {
        s.reads(&g.q, |b| values(b, g, &heaviest(b, &by_scores(b, Over::Sum)), Spread::Whole(Targets::Stratified)))
    }),
    ("prefill", |s, g| s.prompt(g, 0, |rows| outputs(prefill(rows, Mask::Causal.into()).unwrap()))),
    ("prefill of few rows", |s, g| {
        s.prompt(g, TOKENS - 5, |rows| outputs(prefill(rows, Mask::Causal.into()).unwrap()))
    }),
    ("prefill of sinks and window", |s, g| {
        let mask = Mask::SinkWindow { sink: FIXED.0, window: FIXED.1 };
        s.prompt(g, 0, |rows| outputs(prefill(rows, mask.into()).unwrap()))
    }),
    ("prefill of tiles", |s, g| {
        let q = g.prompt.to_dtype(DTYPE).unwrap();
        let tiles = Tiles::span(&q, 0..TOKENS as u32, 0).unwrap();
        let tables = u32s(s.table.clone()).reshape((1, USED)).unwrap();
        outputs(prefill_tiles(&q, s.kv(), &tables, &tiles, &Default::default()).unwrap())
    }),
    ("prefill over lists", |s, g| {
        let runs = query_blocks(0..TOKENS, BLOCK_TOKENS);
        // Every third block, and tokens of others.
        let blocks: Lists =
            (0..runs.len()).map(|run| (0..=run as u32).filter(|b| b % 3 == 1).collect::<Vec<_>>()).collect();
        let tokens: Lists = (0..runs.len()).map(|run| (0..64 * run as u32).step_by(29).collect::<Vec<_>>()).collect();
        let reads = HeadReads { mask: Mask::Causal, blocks: Some(blocks.into()), tokens };
        s.prompt(g, 0, |rows| by_heads(rows, &runs, vec![reads; KV_HEADS]))
    }),
    ("blocks by means", |s, g| {
        let (runs, heads) = (query_blocks(0..TOKENS, BLOCK_TOKENS), (0..KV_HEADS).map(|head| (head, 2)));
        let heads: Vec<_> = heads.collect();
        s.prompt(g, 0, |rows| by_heads(rows, &runs, pooled(rows, &runs, &heads).unwrap().0))
    }),
    ("probe", |s, g| {
        let stages = [(64, 320), (16, 128), (4, 48)].map(|(chunk, keep)| prefill::Stage { chunk, keep }).to_vec();
        let how = Hierarchy { sink: 0, window: 0, average: 4, stages, full_at: 0 };
        let runs = query_blocks(0..TOKENS, BLOCK_TOKENS);
        s.prompt(g, 0, |rows| by_heads(rows, &runs, probe(rows, &runs, &how).unwrap().0))
    }),
    ("sums", |s, g| {
        let Sums { columns, diagonals, lse } = s.prompt(g, TOKENS - 64, |rows| sums(rows).unwrap());
        [bits(&columns), bits(&diagonals), bits(&lse)].concat()
    }),
    ("bounds", |s, _| last_blocks(&s.bounds(4))),
    ("norms of values", |s, _| last_blocks(&s.norms(4))),
    ("channels", |s, _| last_blocks(&s.labels())),
    ("two bits a channel", |s, _| last_blocks(&s.quantized())),
    ("codes of keys", |s, g| last_blocks(&s.codes(g))),
    ("clusters of keys", |s, g| last_blocks(&s.clusters(g))),
    ("joint projections", |s, g| {
        let q = kv::append_joint(s.kv(), &g.joint, &g.angles, &s.slots(TOKENS - 10, TOKENS), None).unwrap();
        [bits(&q.expect("an operation for 16 bits")), last_blocks(&s.k), last_blocks(&s.v)].concat()
    }),
    ("copied blocks", |s, _| {
        kv::copy_block(&s.k, s.table[1], s.table[4]).unwrap();
        kv::copy_block(&s.v, s.table[2], s.table[0]).unwrap();
        [last_blocks(&s.k), last_blocks(&s.v)].concat()
    }),
];

#[test]
fn the_last_blocks_of_a_large_pool_are_as_those_of_a_small_one() {
    let given = Given::new(&mut Numbers(131));
    let (near, far) = (Side::new(USED, &given), Side::new(BLOCKS, &given));
    assert!((BLOCKS - USED) * KV_HEADS * BLOCK_TOKENS * HEAD_DIM > u32::MAX as usize);
    let mut wrong = Vec::new();
    for (name, run) in OPERATIONS {
        let (expected, got) = (run(&near, &given), run(&far, &given));
        assert!(expected.iter().any(|x| *x != expected[0]), "{name}: nothing to tell results by");
        if got != expected {
            let apart = expected.iter().zip(&got).filter(|(a, b)| a != b).count();
            wrong.push(format!("{name}: {apart} of {} differ", expected.len()));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
