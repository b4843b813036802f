//! Every method at its limit equals dense, through the same batch that the engine uses: by settings that read everything,
//! and by settings that go all of the method's way and leave out only what has no say.

use super::*;
use std::ops::Range;

/// Settings at which a method reads everything: one row a method; a method without a row fails.
pub(super) fn limit(name: &str, phase: &str) -> Option<Value> {
    Some(match (phase, name) {
        (_, "dense") => json!({ "method": "dense" }),
        (_, "streaming_llm") => json!({ "method": "streaming_llm", "sink": 2, "window": 5000 }),
        ("prefill", "bigbird") => json!({ "method": "bigbird", "window": 5000 }),
        ("prefill", "delta") => {
            json!({ "method": "delta", "gamma": 1, "base": { "method": "streaming_llm", "sink": 1, "window": 8 } })
        }
        ("prefill", "hip") => json!({
            "method": "hip", "sink": 1, "window": 1, "stages": [{ "chunk": 8, "keep": 5000 }], "full_at": 0,
            "dense_layers": 0
        }),
        ("prefill", "minference") => json!({ "method": "minference", "vertical": 5000, "slash": 5000 }),
        ("prefill", "sample_attention") => {
            json!({ "method": "sample_attention", "alpha_c": 1, "alpha_s": 0, "chunks": 3, "min_tokens": 0 })
        }
        ("decode", "oracle_top_k" | "quantized_keys" | "quest" | "double_sparsity" | "hash_attention") => {
            json!({ "method": name, "k": 5000, "dense_layers": 0 })
        }
        ("decode", "oracle_top_p") => json!({ "method": "oracle_top_p", "p": 1, "sink": 1, "window": 1 }),
        ("decode", "random_sample") => json!({ "method": "random_sample", "rate": 5000, "sink": 1, "window": 1 }),
        ("decode", "santa") => json!({ "method": "santa", "samples": 5000 }),
        ("decode", "saap" | "kmeans") => {
            json!({ "method": name, "probes": 8, "sink": 1, "window": 1, "dense_layers": 0 })
        }
        ("decode", "vattention") => {
            json!({ "method": "vattention", "epsilon": 1e-9, "delta": 0.01, "sink": 2, "window": 3 })
        }
        _ => return None,
    })
}

/// What a sequence's heads are like.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Heads {
    /// Anything.
    Random,
    /// Some keys in the middle ([`gone`]) have next to no weight, whoever asks.
    Thin,
    /// All tokens but the first two and the last three are alike.
    Flat,
    /// The same, but that every other one is another, and its key the opposite.
    Halves,
    /// Four keys have a quarter of the weight each.
    Peaked,
}

/// The keys of [`Heads::Thin`] that weigh nothing: a whole block, or a page of one where there are few.
fn gone(n: usize) -> Range<usize> {
    match n {
        200.. => 64..128,
        50.. => 32..48,
        _ => 0..0,
    }
}

impl Heads {
    fn input(self, shape: AttentionShape, n: usize) -> Input {
        let Input { q, k, v } = Input::random(shape, n);
        let of = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (mut keys, mut values, width) = (of(&k), of(&v), shape.kv_heads * shape.head_dim);
        let q = match self {
            Self::Random | Self::Flat | Self::Halves => q,
            Self::Thin => (q + 1.0).unwrap(),
            Self::Peaked => {
                let heads: Vec<f32> = (0..shape.q_heads).map(|head| 1.0 + 0.25 * (head % 4) as f32).collect();
                Tensor::new(heads, &Device::Cpu)
                    .unwrap()
                    .reshape((1, shape.q_heads, 1))
                    .unwrap()
                    .broadcast_as(q.shape())
                    .unwrap()
                    .contiguous()
                    .unwrap()
            }
        };
        let peaks = [0, (n - 1) / 3, 2 * (n - 1) / 3, n - 1];
        for (at, key) in keys.chunks_exact_mut(width).enumerate() {
            match self {
                Self::Random | Self::Flat | Self::Halves => {}
                Self::Thin if gone(n).contains(&at) => key.fill(-4.0),
                Self::Thin => key.iter_mut().for_each(|x| *x += 1.0),
                Self::Peaked if peaks.contains(&at) => key.fill(2.0),
                Self::Peaked => key.iter_mut().for_each(|x| *x = 0.2 * *x - 2.0),
            }
        }
        if self == Self::Flat || self == Self::Halves {
            for token in 3..n.saturating_sub(3) {
                let at = token * width;
                keys.copy_within(2 * width..3 * width, at);
                values.copy_within(2 * width..3 * width, at);
                if self == Self::Halves && token % 2 == 1 {
                    keys[at..at + width].iter_mut().for_each(|x| *x = -*x);
                    values.copy_within(width..2 * width, at);
                }
            }
        }
        let tensor = |x: Vec<f32>| Tensor::from_vec(x, k.shape(), &Device::Cpu).unwrap();
        Input { q, k: tensor(keys), v: tensor(values) }
    }
}

/// Settings that leave something out, and heads of which it is nothing: at least one a method but `dense`.
fn own_way(name: &str, phase: &str, n: usize) -> Vec<(Heads, Value)> {
    let gone = gone(n);
    let (last, rest) = (n.saturating_sub(1) / 64, n - gone.len());
    let window = n - gone.end;
    let thin = |settings: Value| (Heads::Thin, settings);
    let streaming = json!({ "method": "streaming_llm", "sink": gone.start, "window": window });
    let sampled = |settings: Value| {
        let mut all = json!({
            "method": "vattention", "sink": 2, "window": 3, "epsilon": 0.5, "pilot_tokens": 8, "dense_share": 1, "top_k": 4
        });
        all.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        (Heads::Flat, all)
    };
    let drawn = |settings: Value| {
        let mut all = json!({ "method": "santa", "samples": 16 });
        all.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        (Heads::Peaked, all)
    };
    match (phase, name) {
        (_, "dense") => vec![],
        (_, "streaming_llm") => vec![thin(streaming)],
        ("prefill", "bigbird") => {
            let window = if n < 200 { 5000 } else { (last - 1) * 64 };
            vec![thin(json!({ "method": "bigbird", "global": 64, "window": window, "random": 0 }))]
        }
        ("prefill", "delta") => {
            // Rows of the tail are dense.
            let of = |mode: &str, tail: usize| {
                let window = window.saturating_sub(tail).max(1);
                let base = json!({ "method": "streaming_llm", "sink": gone.start, "window": window });
                thin(json!({ "method": "delta", "gamma": 5, "tail": tail, "mode": mode, "base": base }))
            };
            vec![of("delta", 128), of("recompute", 128), of("delta", 0), of("recompute", 0)]
        }
        ("prefill", "hip") => {
            // The last block of queries has more before it than it keeps, by what weighs nothing.
            let keep = (last * 64).saturating_sub(gone.len()).max(16);
            vec![thin(json!({
                "method": "hip", "sink": 0, "window": 0, "stages": [{ "chunk": 16, "keep": keep }], "full_at": 0,
                "dense_layers": 0
            }))]
        }
        ("prefill", "minference") => {
            let blocks = if n < 200 { last + 1 } else { last };
            vec![
                thin(json!({ "method": "minference", "pattern": "a_shape", "init": gone.start, "local": window })),
                thin(json!({ "method": "minference", "pattern": "vertical_slash", "vertical": rest, "slash": 1 })),
                thin(json!({ "method": "minference", "pattern": "block_sparse", "blocks": blocks })),
                thin(json!({ "method": "minference", "vertical": rest, "slash": 1, "init": gone.start })),
            ]
        }
        ("prefill", "sample_attention") => {
            vec![thin(json!({ "method": name, "alpha_c": 0.999_999, "alpha_s": 0, "min_tokens": 0 }))]
        }
        ("decode", "oracle_top_k" | "quantized_keys" | "double_sparsity" | "hash_attention") => {
            let k = rest.saturating_sub(2).max(1);
            vec![thin(json!({ "method": name, "k": k, "sink": 1, "window": 1, "dense_layers": 0 }))]
        }
        ("decode", "quest") => {
            let pages = (n.saturating_sub(2) / 16 + 1).saturating_sub(gone.len() / 16);
            vec![thin(json!({ "method": name, "k": 16 * pages, "sink": 1, "window": 1, "dense_layers": 0 }))]
        }
        // The nearest to 1 that f32 has: what weighs less is left out.
        ("decode", "oracle_top_p") => {
            vec![thin(json!({ "method": name, "p": 1.0 - 2f64.powi(-24), "sink": 1, "window": 1 }))]
        }
        ("decode", "random_sample") => {
            let rate = (n / 3).max(1);
            vec![(Heads::Flat, json!({ "method": name, "rate": rate, "sink": 2, "window": 3 }))]
        }
        // All clusters but the one that the keys without weight are alone in.
        ("decode", "saap" | "kmeans") => {
            let settings = json!({ "method": name, "probes": 7, "sink": 1, "window": 1, "dense_layers": 0 });
            let mut all = vec![thin(settings.clone())];
            if name == "kmeans" {
                let mut rotated = settings;
                rotated["rope"] = json!(true);
                all.push(thin(rotated));
            }
            all
        }
        ("decode", "santa") => vec![
            drawn(json!({})),
            drawn(json!({ "variant": "stratified" })),
            drawn(json!({ "kernel": "prop_lr", "tile": 16 })),
            drawn(json!({ "kernel": "flash", "tile": 16, "samples": 8 })),
            drawn(json!({ "scores": "bernoulli" })),
            drawn(json!({ "scores": "bernoulli", "mean_query": true })),
            drawn(json!({ "within": { "method": "oracle_top_k", "k": 20, "sink": 4, "window": 4 } })),
        ],
        ("decode", "vattention") => {
            let rules = ["chi2", "ratio", "tight", "lemma", "denominator"].map(|rule| sampled(json!({ "rule": rule })));
            let predictors = catalogue().into_iter().filter(|m| m.phase == "predictor");
            // By clusters keys that are alike are read together.
            let over = |top: Value| match sampled(json!({ "top": top })) {
                (_, all) if ["saap", "kmeans"].iter().any(|name| all["top"]["method"] == *name) => (Heads::Halves, all),
                flat => flat,
            };
            let tops = predictors.map(|m| over(json!({ "method": m.name })));
            // All clusters but the one that the keys without weight are alone in.
            let probes =
                ["saap", "kmeans"].map(|name| thin(sampled(json!({ "top": { "method": name, "probes": 7 } })).1));
            let hard = sampled(json!({ "tail": "hard", "epsilon": 0.9, "delta": 0.9 }));
            rules.into_iter().chain(tops).chain(probes).chain([hard]).collect()
        }
        _ => panic!("{phase} {name} has no settings that go its own way"),
    }
}

/// Everything that a method is held to at a length.
fn cases(method: &MethodInfo, n: usize) -> Vec<(Heads, Value)> {
    let (name, phase) = (method.name, method.phase);
    let everything = limit(name, phase).unwrap_or_else(|| panic!("no limit row for {phase} {name}"));
    let all = own_way(name, phase, n);
    assert!(!all.is_empty() || name == "dense", "{phase} {name} has no settings that go its own way");
    [vec![(Heads::Random, everything)], all].concat()
}

/// What is learned, such that no method that goes by it wants the keys without weight of [`Heads::Thin`], which are
/// alone in the first of 8 clusters.
fn artifacts(shape: AttentionShape) -> Artifacts {
    let (q_heads, kv_heads, d) = (shape.q_heads, shape.kv_heads, shape.head_dim);
    let tensor = |dims: (usize, usize, usize), of: &dyn Fn(usize, usize) -> f32| {
        let all = (0..dims.0).flat_map(|_| (0..dims.1 * dims.2).map(|i| of(i / dims.2, i % dims.2)));
        Tensor::from_vec(all.collect::<Vec<f32>>(), dims, &Device::Cpu).unwrap()
    };
    let one = |yes: bool| f32::from(u8::from(yes));
    // Maps whose bits say which of 16 parts of a vector have a positive sum, twice each.
    let map = |of: &str, heads: usize| {
        let named = |depth: usize, part: &str| format!("layers.0.{of}.{depth}.{part}");
        let bias = |width: usize, x: f32| Tensor::full(x, (heads, width), &Device::Cpu).unwrap();
        vec![
            (named(0, "weight"), tensor((heads, 16, d), &|row, column| one(column / (d / 16) == row))),
            (named(0, "bias"), bias(16, 0.0)),
            (named(1, "weight"), tensor((heads, 16, 16), &|row, column| one(row == column))),
            (named(1, "bias"), bias(16, 0.0)),
            (named(2, "weight"), tensor((heads, 32, 16), &|row, column| one(row % 16 == column))),
            (named(2, "bias"), bias(32, -0.1)),
        ]
    };
    let noise = random((8, d, 1), 5).flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let centroids = || {
        let of = |row: usize, column: usize| if row == 0 { -1.0 } else { 1.0 + noise[row * d + column] };
        vec![("layers.0.centroids".to_owned(), tensor((kv_heads, 8, d), &of))]
    };
    let classes = (0..kv_heads * 8).map(|i| if i % 8 == 0 { -1e4f32 } else { 0.0 }).collect();
    let classes = Tensor::from_vec(classes, (kv_heads, 8), &Device::Cpu).unwrap();
    let classifier = vec![
        (
            "layers.0.classifier.0.weight".to_owned(),
            tensor((kv_heads, 16, d), &|row, column| noise[(row * d + column) % (8 * d)]),
        ),
        ("layers.0.classifier.0.bias".to_owned(), Tensor::zeros((kv_heads, 16), DType::F32, &Device::Cpu).unwrap()),
        (
            "layers.0.classifier.1.weight".to_owned(),
            tensor((kv_heads, 8, 16), &|row, column| one(row != 0) * noise[column]),
        ),
        ("layers.0.classifier.1.bias".to_owned(), classes),
    ];
    let channels: Vec<u32> = (0..kv_heads).flat_map(|head| (0..8).map(move |c| (c * 5 + head) as u32)).collect();
    let channels = Tensor::from_vec(channels, (1, kv_heads, 8), &Device::Cpu).unwrap();
    let files = [
        ("double_sparsity", vec![("channels".to_owned(), channels)]),
        ("hash_attention", [map("query", q_heads), map("key", kv_heads)].concat()),
        ("kmeans", centroids()),
        ("kmeans-rope", centroids()),
        ("saap", [centroids(), classifier].concat()),
    ];
    let key = key(shape);
    files.iter().fold(Artifacts::default(), |all, (method, tensors)| {
        all.with(&format!("{method}.safetensors"), &artifact(method, tensors), &key).unwrap()
    })
}

const LENGTHS: [usize; 7] = [1, 2, 63, 64, 65, 1000, 4097];

/// Where the longest prompts are attended, a short one goes with each.
const LONG: [usize; 2] = [65, 4097];

/// Every GQA group and head size; the longest prompts with one KV head.
fn shapes(whole_prompts: bool) -> Vec<(AttentionShape, &'static [usize])> {
    let mut all = Vec::new();
    for group in [1, 3, 4, 8] {
        for head_dim in [64, 128] {
            let shape = shape(group, head_dim, None);
            if !whole_prompts {
                all.push((shape, &LENGTHS[..]));
                continue;
            }
            all.push((shape, &LENGTHS[..6]));
            all.push((AttentionShape { q_heads: group, kv_heads: 1, ..shape }, &LONG[..]));
        }
    }
    all
}

fn cat(all: impl IntoIterator<Item = Tensor>) -> Tensor {
    Tensor::cat(&all.into_iter().collect::<Vec<_>>(), 0).unwrap()
}

/// One step of sequences of all lengths, whose tokens are given: outputs of each, and what share of the keys it read.
fn step((shape, pool): (AttentionShape, &mut KvPool), sequences: &mut [Sequence], inputs: &[Input]) -> Vec<Vec<f32>> {
    let rotary = Still(shape.head_dim);
    let tokens: Vec<usize> = inputs.iter().map(|input| input.q.dims()[0]).collect();
    let spans = sequences.iter_mut().zip(&tokens).map(|(sequence, &tokens)| Span { sequence, tokens }).collect();
    let mut batch = AttentionBatch::new(shape, &rotary, pool, spans).unwrap();
    let all = |of: fn(&Input) -> &Tensor| cat(inputs.iter().map(|input| of(input).clone()));
    let out = batch.attend(0, &all(|i| &i.q), &all(|i| &i.k), &all(|i| &i.v)).unwrap();
    batch.finish().unwrap();
    let width = shape.q_heads * shape.head_dim;
    let mut out = out.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    tokens.iter().map(|tokens| out.drain(..tokens * width).collect()).collect()
}

fn spec(settings: &Value, artifacts: &Artifacts) -> Arc<AttentionSpec> {
    Arc::new(AttentionSpec::from_json(settings, "attention", artifacts).unwrap())
}

fn pool(shape: AttentionShape, blocks: usize) -> KvPool {
    let kv = KvShape { layers: 1, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
    KvPool::new(kv, DType::F32, blocks, &Device::Cpu).unwrap()
}

/// The heads that some case of a phase wants.
const ALL_HEADS: [Heads; 5] = [Heads::Random, Heads::Thin, Heads::Flat, Heads::Halves, Heads::Peaked];

/// Calls `check(heads, settings of every length, what they are)` for every case of every method of a phase.
fn for_every_case(phase: &str, lengths: &[usize], mut check: impl FnMut(Heads, Vec<Value>)) {
    for method in catalogue().iter().filter(|m| m.phase == phase) {
        let by_length: Vec<_> = lengths.iter().map(|&n| cases(method, n)).collect();
        for case in 0..by_length[0].len() {
            check(by_length[0][case].0, by_length.iter().map(|cases| cases[case].1.clone()).collect());
        }
    }
}

/// Outputs equal dense ones row by row, and a method that went its own way left something out.
fn assert_equal(
    (shape, n): (AttentionShape, usize),
    heads: Heads,
    settings: &Value,
    (out, dense): (&[f32], &[f32]),
    density: f64,
) {
    let what = format!("{settings} on {heads:?} heads, {n} tokens, {shape:?}");
    let width = shape.q_heads * shape.head_dim;
    for (row, (out, dense)) in out.chunks_exact(width).zip(dense.chunks_exact(width)).enumerate() {
        let error = relative(out, dense);
        assert!(error < 1e-5, "{what}: row {row} differs by {error}");
    }
    // A block of queries reads its own block whole, and bounds that hold for every key are wide.
    let blocks = ["bigbird", "hip", "minference", "sample_attention", "delta"].iter().any(|m| settings["method"] == *m);
    let little = if blocks || settings["tail"] == "hard" { 1000 } else { 63 };
    if heads != Heads::Random && n >= little {
        assert!(density < 1.0, "{what}: everything was read, which says nothing");
    }
}

#[test]
fn prefill_methods_at_their_limit_equal_dense_in_a_mixed_batch() {
    for (shape, lengths) in shapes(true) {
        let artifacts = artifacts(shape);
        let mut pool = pool(shape, 100);
        let mut run = |settings: &[Value], inputs: &[Input]| {
            let new = |(settings, &n): (&Value, &usize)| {
                Sequence::new(spec(&json!({ "prefill": settings }), &artifacts), 5, n)
            };
            let mut sequences: Vec<Sequence> = settings.iter().zip(lengths).map(new).collect();
            let outs = step((shape, &mut pool), &mut sequences, inputs);
            sequences.iter_mut().for_each(|sequence| pool.release(sequence.table_mut()));
            let density = sequences.iter().map(|sequence| sequence.usage().prefill.density).collect::<Vec<f64>>();
            (outs, density)
        };
        let inputs = ALL_HEADS.map(|heads| lengths.iter().map(|&n| heads.input(shape, n)).collect::<Vec<Input>>());
        let dense = vec![json!({ "method": "dense" }); lengths.len()];
        let dense = [0, 1].map(|heads| run(&dense, &inputs[heads]).0);
        for_every_case("prefill", lengths, |heads, settings| {
            let at = ALL_HEADS.iter().position(|h| *h == heads).unwrap();
            let (outs, density) = run(&settings, &inputs[at]);
            for (i, &n) in lengths.iter().enumerate() {
                assert_equal((shape, n), heads, &settings[i], (&outs[i], &dense[at][i]), density[i]);
            }
        });
    }
}

#[test]
fn decode_methods_at_their_limit_equal_dense_in_a_mixed_batch() {
    for (shape, lengths) in shapes(false) {
        let artifacts = artifacts(shape);
        let cheap = json!({ "method": "streaming_llm", "sink": 0, "window": 1 });
        // All but the last token come as a prompt whose output nobody looks at; every case goes on from a copy.
        let mut prepared = ALL_HEADS.map(|heads| {
            let mut pool = pool(shape, 200);
            let (mut prompts, mut last) = (Vec::new(), Vec::new());
            for input in lengths.iter().map(|&n| heads.input(shape, n)) {
                let before = input.k.dims()[0] - 1;
                let part = |t: &Tensor, start: usize, tokens: usize| t.narrow(0, start, tokens).unwrap();
                let cut = |start: usize, tokens: usize| Input {
                    q: part(&input.q, start, tokens),
                    k: part(&input.k, start, tokens),
                    v: part(&input.v, start, tokens),
                };
                let mut sequence = Sequence::new(spec(&json!({ "prefill": cheap }), &artifacts), 3, before);
                if before > 0 {
                    step((shape, &mut pool), std::slice::from_mut(&mut sequence), &[cut(0, before)]);
                }
                prompts.push(sequence);
                last.push(cut(before, 1));
            }
            (pool, prompts, last)
        });
        let mut run = |at: usize, settings: &[Value]| {
            let (pool, prompts, last) = &mut prepared[at];
            let next = |(prompt, settings): (&Sequence, &Value)| {
                let mut sequence = prompt.fork(pool, 3).unwrap();
                sequence.decode_by(&spec(&json!({ "decode": settings }), &artifacts));
                sequence
            };
            let mut sequences: Vec<Sequence> = prompts.iter().zip(settings).map(next).collect();
            let outs = step((shape, pool), &mut sequences, last);
            sequences.iter_mut().for_each(|sequence| pool.release(sequence.table_mut()));
            let density = sequences.iter().map(|sequence| sequence.usage().decode.density).collect::<Vec<f64>>();
            (outs, density)
        };
        let dense = vec![json!({ "method": "dense" }); lengths.len()];
        let dense: [_; ALL_HEADS.len()] = std::array::from_fn(|at| run(at, &dense).0);
        for_every_case("decode", lengths, |heads, settings| {
            let at = ALL_HEADS.iter().position(|h| *h == heads).unwrap();
            let (outs, density) = run(at, &settings);
            for (i, &n) in lengths.iter().enumerate() {
                assert_equal((shape, n), heads, &settings[i], (&outs[i], &dense[at][i]), density[i]);
            }
        });
    }
}

/// Whatever is below 1 and above 0 can be promised, by every rule.
#[test]
fn promises_next_to_their_bounds_are_taken() {
    let (least, most) = (f64::from_bits(1), 1f64.next_down());
    for (epsilon, delta) in [(most, most), (most, least), (least, most), (least, least)] {
        for rule in ["chi2", "ratio", "tight", "lemma", "denominator"] {
            let value = json!({ "method": "vattention", "epsilon": epsilon, "delta": delta, "rule": rule });
            let method = crate::methods::decode(&value, "decode", &Artifacts::default()).unwrap();
            assert_eq!(method.method.promise().is_some(), rule != "denominator", "{value}");
        }
    }
}
