//! Sparse prefill methods: at all their limits, cut into chunks, over later tokens, bad numbers and bad parameters.

use super::golden::{Golden, files};
use super::*;
use crate::Chunk;

/// Settings under which each sparse method reads a part of some 1,000 tokens: one row or more a method; a method without
/// a row fails.
pub(super) fn sparse(name: &str) -> Vec<Value> {
    match name {
        // Reads everything, always.
        "dense" => vec![],
        "bigbird" => vec![
            json!({ "method": "bigbird" }),
            json!({ "method": "bigbird", "global": 64, "window": 100, "random": 2 }),
        ],
        "delta" => {
            let base = json!({ "method": "streaming_llm", "window": 30 });
            vec![
                json!({ "method": "delta", "gamma": 24, "base": base }),
                json!({ "method": "delta", "gamma": 200, "mode": "recompute", "base": base }),
                json!({ "method": "delta", "gamma": 24, "tail": 0, "base": base }),
                json!({ "method": "delta", "gamma": 100, "tail": 300, "base": base }),
            ]
        }
        "streaming_llm" => vec![json!({ "method": "streaming_llm", "sink": 4, "window": 100 })],
        "hip" => vec![
            json!({
                "method": "hip", "sink": 64, "window": 64, "full_at": 0, "dense_layers": 0,
                "stages": [{ "chunk": 64, "keep": 256 }, { "chunk": 8, "keep": 64 }]
            }),
            json!({
                "method": "hip", "block_q": 128, "average": 1, "sink": 0, "window": 0, "full_at": 1000, "dense_layers": 0,
                "stages": [{ "chunk": 16, "keep": 128 }]
            }),
        ],
        "minference" => vec![
            json!({ "method": "minference", "vertical": 40, "slash": 100 }),
            json!({ "method": "minference", "pattern": "a_shape", "init": 10, "local": 100 }),
            json!({ "method": "minference", "pattern": "vertical_slash", "vertical": 60, "slash": 100, "queries": 30 }),
            json!({ "method": "minference", "pattern": "block_sparse", "blocks": 3 }),
        ],
        "sample_attention" => vec![
            json!({ "method": "sample_attention", "alpha_c": 0.5, "alpha_s": 0.3, "min_tokens": 0 }),
            json!({ "method": "sample_attention", "alpha_c": 0.3, "alpha_s": 0.2, "chunks": 3, "min_tokens": 0 }),
            json!({ "method": "sample_attention", "alpha_c": 0.3, "alpha_s": 0.1, "block": 128, "min_tokens": 0 }),
        ],
        _ => panic!("no sparse row for {name}"),
    }
}

pub(super) fn every_sparse() -> Vec<Value> {
    catalogue().iter().filter(|m| m.phase == "prefill").flat_map(|m| sparse(m.name)).collect()
}

/// The same over a Delta correction.
pub(super) fn over_delta(base: &Value) -> Value {
    json!({ "method": "delta", "gamma": 24, "base": base })
}

fn prefill(settings: &Value) -> Value {
    json!({ "prefill": settings })
}

const WHOLE: usize = 4096;

#[test]
fn sparse_methods_read_a_part() {
    for settings in every_sparse() {
        for window in [None, Some(300)] {
            let shape = shape(3, 64, window);
            let (_, sequence) = run(&prefill(&settings), shape, (1000, 0), WHOLE);
            let density = sequence.usage().prefill.density;
            assert!((0.05..0.95).contains(&density), "{settings}, window {window:?}: {density}");
        }
    }
}

#[test]
fn every_pattern_at_its_limit_equals_dense() {
    for settings in [
        json!({ "method": "minference", "pattern": "a_shape", "init": 0, "local": 5000 }),
        json!({ "method": "minference", "pattern": "a_shape", "init": 5000, "local": 1 }),
        json!({ "method": "minference", "pattern": "vertical_slash", "vertical": 5000, "slash": 1 }),
        json!({ "method": "minference", "pattern": "vertical_slash", "vertical": 1, "slash": 5000 }),
        json!({ "method": "minference", "pattern": "block_sparse", "blocks": 80 }),
        json!({ "method": "sample_attention", "alpha_c": 0, "alpha_s": 1, "min_tokens": 0 }),
        json!({ "method": "sample_attention", "alpha_c": 0.1, "alpha_s": 0.1 }),
        json!({ "method": "hip", "window": 5000, "dense_layers": 0 }),
        json!({ "method": "hip", "sink": 5000, "dense_layers": 0 }),
        json!({ "method": "hip" }),
    ] {
        for n in [1, 2, 63, 64, 65, 1000, 4097] {
            for window in [None, Some(200)] {
                let shape = shape(3, 64, window);
                let (dense, _) = run(&json!({}), shape, (n, 0), 8192);
                for settings in [&settings, &over_delta(&settings)] {
                    if n == 4097 && (window.is_some() || settings["method"] == "delta") {
                        continue;
                    }
                    let (out, sequence) = run(&prefill(settings), shape, (n, 0), 8192);
                    assert!(relative(&out, &dense) < 1e-5, "{settings} at {n} tokens");
                    assert_eq!(sequence.usage().prefill.density, 1.0, "{settings} at {n} tokens");
                }
            }
        }
    }
}

#[test]
fn the_engines_chunks_do_not_show() {
    for settings in every_sparse().into_iter().chain([json!({ "method": "dense" })]) {
        for settings in [settings.clone(), over_delta(&settings)].iter().filter(|s| s["base"]["method"] != "delta") {
            for window in [None, Some(70), Some(170), Some(300)] {
                let shape = shape(3, 64, window);
                let (whole, sequence) = run(&prefill(settings), shape, (700, 0), WHOLE);
                for chunk in [100, 64, 7] {
                    let (chunked, cut) = run(&prefill(settings), shape, (700, 0), chunk);
                    let [mut cut, mut uncut] = [&cut, &sequence].map(|s| json!(s.usage()));
                    if settings["method"] == "delta" {
                        // A chunk that is all tail is dense: its base chooses nothing.
                        [&mut cut, &mut uncut].into_iter().for_each(|usage| usage["prefill"]["scored"] = json!(null));
                    }
                    assert_eq!(cut, uncut, "{settings} in chunks of {chunk}");
                    assert!(relative(&chunked, &whole) < 1e-6, "{settings} in chunks of {chunk}");
                }
            }
        }
    }
}

/// All of a prompt chunk by chunk, each in slices of about so many rows; as [`run_on`] else. With `fails`, some slices are
/// lost, and their chunk begins again.
fn in_slices(settings: &Value, shape: AttentionShape, n: usize, most: usize, fails: bool) -> (Vec<f32>, Sequence) {
    let spec = json!({ "prefill": settings, "audit": 0.2, "trace": true });
    let spec = Arc::new(AttentionSpec::from_json(&spec, "attention", &Artifacts::default()).unwrap());
    let kv = KvShape { layers: 1, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
    let mut pool = KvPool::new(kv, DType::F32, n.div_ceil(64), &Device::Cpu).unwrap();
    let mut sequence = Sequence::new(spec, 5, n);
    let Input { q, k, v } = Input::random(shape, n);
    let (mut outs, mut slices) = (Vec::new(), 0);
    while sequence.len() < n {
        let (start, tokens) = (sequence.len(), sequence.chunk(200));
        let kept = outs.len();
        while sequence.len() == start {
            let mut chunk = Chunk::new(shape, &mut pool, &mut sequence, tokens).unwrap();
            let slice = chunk.next(most).unwrap();
            if slice.ends.is_some() {
                outs.extend(chunk.attend(&slice).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap());
            }
            let rows = |t: &Tensor| t.narrow(0, start + slice.rows.start, slice.rows.len()).unwrap();
            chunk.put(&slice, slice.begins.map(|_| (rows(&q), rows(&k), rows(&v)))).unwrap();
            slices += 1;
            if fails && [5, 9, 30].contains(&slices) {
                drop(chunk);
                outs.truncate(kept);
                assert_eq!(sequence.underway(), (0, 0));
                continue;
            }
            chunk.pause();
            assert_eq!(sequence.chunk(1), tokens, "what is underway stays as it is");
            sequence.take_in(&mut pool);
        }
    }
    pool.check_integrity([sequence.table()]);
    (outs, sequence)
}

#[test]
fn slices_do_not_show() {
    for settings in every_sparse().into_iter().chain([json!({ "method": "dense" })]) {
        for settings in [settings.clone(), over_delta(&settings)].iter().filter(|s| s["base"]["method"] != "delta") {
            for window in [None, Some(170)] {
                let shape = shape(3, 64, window);
                let spec = json!({ "prefill": settings, "audit": 0.2, "trace": true });
                let (whole, one) = run(&spec, shape, (700, 0), 200);
                for (most, fails) in [(64, false), (1, false), (200, false), (64, true)] {
                    let (out, sequence) = in_slices(settings, shape, 700, most, fails);
                    assert!(out == whole, "{settings} in slices of {most}");
                    assert_eq!(json!(sequence.usage()), json!(one.usage()), "{settings} in slices of {most}");
                }
            }
        }
    }
}

#[test]
fn later_tokens_reach_earlier_rows_through_the_choice_alone() {
    // Tokens from 600 on are others. Rows before agree bit for bit, but for those whose method says that later queries
    // choose for them too; there, later keys and values alone must change nothing.
    let shape = shape(3, 64, None);
    let (n, kept) = (700, 600);
    let one = Input::random(shape, n);
    let other = |t: &Tensor, heads: usize| {
        let late = random((n - kept, heads, 64), 99);
        Tensor::cat(&[t.narrow(0, 0, kept).unwrap(), late], 0).unwrap()
    };
    let keys = Input { q: one.q.clone(), k: other(&one.k, 2), v: other(&one.v, 2) };
    let all = Input { q: other(&one.q, 6), k: other(&one.k, 2), v: other(&one.v, 2) };
    let values = Input { q: one.q.clone(), k: one.k.clone(), v: other(&one.v, 2) };
    // The same with later numbers that are none.
    let spoilt = |bad: f32, places: [bool; 3]| {
        let spoil = |t: &Tensor, heads: usize, place: usize| {
            let late = Tensor::full(bad, (n - kept, heads, 64), &Device::Cpu).unwrap();
            if places[place] { Tensor::cat(&[t.narrow(0, 0, kept).unwrap(), late], 0).unwrap() } else { t.clone() }
        };
        Input { q: spoil(&one.q, 6, 0), k: spoil(&one.k, 2, 1), v: spoil(&one.v, 2, 2) }
    };
    for settings in every_sparse().into_iter().chain([json!({ "method": "dense" })]) {
        let run = |input: &Input| run_on(&prefill(&settings), &Artifacts::default(), shape, input, 0, WHOLE).0;
        let head = |rows: usize, x: &[f32]| x[..rows * 6 * 64].to_vec();
        let before = run(&one);
        let (method, pattern) = (settings["method"].as_str().unwrap(), settings["pattern"].as_str());
        // Rows that no later query chooses for, and what of the later tokens may change without a choice changing.
        let (free, changed) = match (method, pattern) {
            ("dense" | "streaming_llm" | "delta" | "bigbird", _) | ("minference", Some("a_shape")) => (kept, &all),
            ("minference", Some("block_sparse")) => (kept / 64 * 64, &all),
            ("hip", _) => (kept / 128 * 128, &all),
            ("sample_attention", _) if settings["chunks"] == 3 => (466, &all),
            _ => (kept, &values),
        };
        assert!(head(free, &before) == head(free, &run(changed)), "{settings}");
        // Where later queries choose, values alone are changed, as above.
        let places = if std::ptr::eq(changed, &values) { [false, false, true] } else { [true; 3] };
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let after = run(&spoilt(bad, places));
            assert!(head(free, &before) == head(free, &after), "{settings}: {bad} later");
            let last = &after[(n - 1) * 6 * 64..];
            assert!(last.iter().all(|x| !x.is_finite()), "{settings}: {bad} goes through to the rows that read it");
        }
        assert!(before != run(&keys), "{settings}: or this says nothing");
    }
}

/// An output is a number, or it is none as dense attention's is none; a row whose query is none is so whatever it reads.
#[test]
fn numbers_that_are_none_spread_no_further_than_densely() {
    let shape = shape(3, 64, None);
    let (n, width) = (500, 6 * 64);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
        for place in 0..3 {
            let mut input = Input::random(shape, n);
            let which = [&mut input.q, &mut input.k, &mut input.v].into_iter().nth(place).unwrap();
            let dims = which.dims3().unwrap();
            let mut values = which.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            // A whole token in the middle, one number at the end.
            let token = dims.1 * dims.2;
            values[250 * token..251 * token].fill(bad);
            *values.last_mut().unwrap() = bad;
            *which = Tensor::from_vec(values, dims, &Device::Cpu).unwrap();
            let run = |spec: &Value| run_on(spec, &Artifacts::default(), shape, &input, 0, 128).0;
            let dense = run(&json!({}));
            assert_eq!(dense.iter().all(|x| x.is_finite()), bad == 1e30, "{bad} in {place}: or this says nothing");
            for settings in every_sparse() {
                for settings in [&settings, &over_delta(&settings)] {
                    if settings["base"]["method"] == "delta" {
                        continue;
                    }
                    let out = run(&prefill(settings));
                    assert_eq!(out.len(), n * width, "{settings}");
                    for (i, (x, dense)) in out.iter().zip(&dense).enumerate() {
                        let row = i / width;
                        // A key or value that is bad may not be read, but by its own row.
                        let fewer = place > 0 && row != 250 && x.is_finite();
                        let what = || format!("{settings}, {bad} in {}: row {row} is {x}", ["q", "k", "v"][place]);
                        assert!(fewer || x.is_finite() == dense.is_finite(), "{}", what());
                    }
                }
            }
        }
    }
}

#[test]
fn delta_over_every_method_is_dense_at_its_anchors_and_its_tail() {
    let (n, shape) = (1000, shape(2, 64, None));
    let (dense, _) = run(&json!({}), shape, (n, 0), WHOLE);
    let width = shape.q_heads * shape.head_dim;
    for base in every_sparse().iter().filter(|base| base["method"] != "delta") {
        let (sparse, _) = run(&prefill(base), shape, (n, 0), WHOLE);
        let (delta, _) = run(&prefill(&over_delta(base)), shape, (n, 0), 300);
        let row = |x: &[f32], row: usize| x[row * width..(row + 1) * width].to_vec();
        let tail = (n - 128) / 24 * 24;
        for row_at in (0..tail).step_by(24).chain(tail..n) {
            assert!(relative(&row(&delta, row_at), &row(&dense, row_at)) < 1e-5, "{base} row {row_at}");
        }
        // Between, the difference at the anchor before moves on.
        for at in [25, 431, 815] {
            let anchor = at / 24 * 24;
            let expected: Vec<f32> =
                (0..width).map(|c| row(&sparse, at)[c] + row(&dense, anchor)[c] - row(&sparse, anchor)[c]).collect();
            assert!(relative(&row(&delta, at), &expected) < 1e-5, "{base} row {at}");
        }
    }
}

#[test]
fn budgets_beyond_the_context_and_contexts_shorter_than_everything_are_dense() {
    for settings in [
        json!({ "method": "hip", "dense_layers": 0 }),
        json!({ "method": "minference" }),
        json!({ "method": "minference", "pattern": "a_shape" }),
        json!({ "method": "minference", "pattern": "vertical_slash" }),
        json!({ "method": "minference", "pattern": "block_sparse" }),
        json!({ "method": "sample_attention" }),
    ] {
        for n in [1, 2, 90, 700] {
            let (dense, _) = run(&json!({}), shape(4, 64, None), (n, 0), WHOLE);
            let (out, sequence) = run(&prefill(&settings), shape(4, 64, None), (n, 0), WHOLE);
            assert!(relative(&out, &dense) < 1e-5, "{settings} at {n} tokens");
            assert_eq!(sequence.usage().prefill.density, 1.0, "{settings} at {n} tokens");
        }
    }
}

#[test]
fn bad_parameters_are_refused_where_they_stand() {
    for (settings, path, message) in [
        (json!({ "method": "delta", "tail": -1 }), ".tail", "at least 0 and at most 1048576"),
        (json!({ "method": "delta", "tail": 0.5 }), ".tail", "whole number"),
        (json!({ "method": "bigbird", "random": -1 }), ".random", "at least 0"),
        (json!({ "method": "bigbird", "global": 1.5 }), ".global", "whole number"),
        (json!({ "method": "sample_attention", "alpha_c": 1.5 }), ".alpha_c", "at most 1"),
        (json!({ "method": "sample_attention", "alpha_s": -0.1 }), ".alpha_s", "at least 0"),
        (json!({ "method": "sample_attention", "chunks": 0 }), ".chunks", "at least 1"),
        (json!({ "method": "sample_attention", "block": 100 }), ".block", "multiple of 64"),
        (json!({ "method": "sample_attention", "tuning": "llama" }), ".tuning", "glm4-9b"),
        (json!({ "method": "minference", "pattern": "vertical-slash" }), ".pattern", "vertical_slash"),
        (json!({ "method": "minference", "pattern": "file" }), ".pattern", "minference.toml"),
        (json!({ "method": "minference", "blocks": 0 }), ".blocks", "at least 1"),
        (json!({ "method": "minference", "local": 0 }), ".local", "at least 1"),
        (json!({ "method": "minference", "queries": 0 }), ".queries", "at least 1"),
        (json!({ "method": "minference", "slahs": 9 }), ".slahs", "did you mean `slash`?"),
        (json!({ "method": "hip", "block_q": 96 }), ".block_q", "multiple of 64"),
        (json!({ "method": "hip", "stages": 4 }), ".stages", "a list of 1 to 8"),
        (json!({ "method": "hip", "stages": [] }), ".stages", "a list of 1 to 8"),
        (json!({ "method": "hip", "stages": [8] }), ".stages[0]", "an object"),
        (json!({ "method": "hip", "stages": [{ "chunk": 8 }] }), ".stages[0].keep", "missing"),
        (json!({ "method": "hip", "stages": [{ "chunk": 12, "keep": 4 }] }), ".stages[0].chunk", "power of two"),
        (json!({ "method": "hip", "stages": [{ "chunk": 8, "keep": 4, "k": 1 }] }), ".stages[0].k", "unknown field"),
        (
            json!({ "method": "hip", "stages": [{ "chunk": 8, "keep": 9 }, { "chunk": 8, "keep": 4 }] }),
            ".stages[1].chunk",
            "below the stage before's 8",
        ),
        (json!({ "method": "hip", "stages": [{ "chunk": 8, "keep": 0 }] }), ".stages[0].keep", "at least 1"),
    ] {
        let error = AttentionSpec::from_json(&prefill(&settings), "attention", &Artifacts::default()).unwrap_err();
        assert_eq!(error.path, format!("attention.prefill{path}"), "{settings}");
        assert!(error.message.contains(message), "{settings}: {error}");
    }
}

#[test]
fn a_file_gives_each_head_its_pattern() {
    let shape = shape(2, 64, None);
    let head = |head: usize, reads: &str| format!("[[heads]]\nlayer = 0\nhead = {head}\nreads = {{ {reads} }}\n");
    let top = "format = \"taper-artefact-1\"\nmethod = \"minference\"\nmodel = \"test\"\n";
    let default = "default = { pattern = \"vertical_slash\", vertical = 40, slash = 120 }\n";
    let a_shape = "pattern = \"a_shape\", init = 4, local = 100";
    let blocks = "pattern = \"block_sparse\", blocks = 3";
    let read = |text: &str| Artifacts::default().with("minference.toml", text.as_bytes(), &key(shape));
    let artifacts = read(&format!("{top}{default}{}{}", head(1, a_shape), head(2, blocks))).unwrap();
    let run = |settings: Value| run_on(&prefill(&settings), &artifacts, shape, &Input::random(shape, 900), 0, WHOLE).0;
    let mixed = run(json!({ "method": "minference", "pattern": "file" }));
    let patterns = [
        json!({ "method": "minference", "pattern": "vertical_slash", "vertical": 40, "slash": 120 }),
        json!({ "method": "minference", "pattern": "a_shape", "init": 4, "local": 100 }),
        json!({ "method": "minference", "pattern": "block_sparse", "blocks": 3 }),
    ]
    .map(run);
    for (at, own) in mixed.chunks_exact(64).enumerate() {
        let pattern = [0, 1, 2, 0][at % 4];
        assert!(own == &patterns[pattern][at * 64..(at + 1) * 64], "row {} head {}", at / 4, at % 4);
    }
    for (text, message) in [
        (format!("{top}{}", head(0, blocks)), "lacks layer 0, head 1, and a default"),
        (format!("{top}{default}{}", head(4, blocks)), "the model has 1 layers of 4 heads"),
        (format!("{top}{default}{}{}", head(0, blocks), head(0, a_shape)), "layer 0, head 0 twice"),
        (format!("{top}{default}{}", head(0, "pattern = \"block_sparse\", blocks = 0")), "at least 1"),
        (
            format!("{top}{default}{}", head(0, "pattern = \"block_sparse\", blocks = 1, init = 3")),
            "unknown field `init`",
        ),
        (format!("{top}{default}{}", head(0, "pattern = \"stripes\"")), "unknown variant `stripes`"),
        (format!("{}{default}", top.replace("test", "other")), "made for another model"),
    ] {
        let error = read(&text).unwrap_err();
        assert!(error.contains(message), "{text}: {error}");
    }
}

#[test]
fn auto_takes_the_pattern_that_keeps_most() {
    // Head 0 attends to the first four keys and to its neighbours, heads 1 and 2 to a few keys far apart, head 3 to one
    // stretch of keys.
    let (n, d) = (1000, 64);
    let shape = AttentionShape { layers: 1, q_heads: 4, kv_heads: 4, head_dim: d, window: None };
    let noise = Input::random(shape, n);
    let of = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let (mut q, mut k) = (of(&noise.q), of(&noise.k));
    for t in 0..n {
        for head in 0..4 {
            let own = (t * 4 + head) * d..(t * 4 + head + 1) * d;
            let (q, k) = (&mut q[own.clone()], &mut k[own]);
            q.iter_mut().chain(&mut *k).for_each(|x| *x *= 0.1);
            let if_so = |yes: bool, x: f32| if yes { x } else { 0.0 };
            let turn = [(t as f32 * 0.0031).cos(), (t as f32 * 0.0031).sin()];
            let (query, key) = match head {
                0 => ([turn[0] * 14.0, turn[1] * 14.0, 16.0], [turn[0] * 8.0, turn[1] * 8.0, if_so(t < 4, 8.0)]),
                1 | 2 => ([12.0, 12.0, 0.0], [if_so(t % 97 == 50, 8.0); 3]),
                _ => ([12.0, 12.0, 0.0], [if_so((256..384).contains(&t), 8.0); 3]),
            };
            q[..3].copy_from_slice(&query);
            k[..3].copy_from_slice(&key);
            if head == 0 && t < 4 {
                k[..2].fill(0.0);
            }
        }
    }
    let tensor = |x: Vec<f32>| Tensor::from_vec(x, (n, 4, d), &Device::Cpu).unwrap();
    let input = Input { q: tensor(q), k: tensor(k), v: noise.v.clone() };
    let run = |settings: Value| run_on(&prefill(&settings), &Artifacts::default(), shape, &input, 0, WHOLE);
    let (auto, sequence) = run(json!({ "method": "minference", "vertical": 40, "slash": 100, "init": 4 }));
    let same = |head: usize, other: Value| {
        let mut settings = json!({ "method": "minference" });
        settings.as_object_mut().unwrap().extend(other.as_object().unwrap().clone());
        let (other, _) = run(settings);
        let rows = auto.chunks_exact(4 * d).zip(other.chunks_exact(4 * d));
        rows.map(|(a, b)| (&a[head * d..(head + 1) * d], &b[head * d..(head + 1) * d])).all(|(a, b)| a == b)
    };
    // The last row's vertical_slash: its block of 40 keys, the two before it, and what else the columns are: the first 30
    // keys and, but for head 0, whose heaviest are near, the ten heaviest.
    let near = 40 + 2 * 64 + 30;
    assert!(same(0, json!({ "pattern": "a_shape", "init": 4, "local": near - 4 })), "the first keys and neighbours");
    for head in [1, 2] {
        let stripes = json!({ "pattern": "vertical_slash", "vertical": 40, "slash": 100 });
        assert!(same(head, stripes), "few keys far apart are columns");
    }
    let blocks = (near + 10usize).div_ceil(64);
    assert!(same(3, json!({ "pattern": "block_sparse", "blocks": blocks })), "a stretch of keys is a matter of blocks");
    let cra = sequence.usage().prefill.cra.unwrap();
    assert!(cra.mean > 0.9, "{cra:?}");
}

#[test]
fn what_choosing_scores_is_reported() {
    let (n, shape) = (1000usize, shape(3, 64, None));
    let scored = |settings: Value| {
        let (_, sequence) = run(&prefill(&settings), shape, (n, 0), WHOLE);
        sequence.usage().prefill.scored
    };
    let pairs = |rows: std::ops::Range<usize>| rows.map(|p| p + 1).sum::<usize>() as f64;
    let share = |products: f64| Some(products / pairs(0..n));
    let close = |a: Option<f64>, b: Option<f64>| (a.unwrap() - b.unwrap()).abs() < 1e-12;
    for settings in [
        json!({ "method": "dense" }),
        json!({ "method": "streaming_llm", "window": 100 }),
        json!({ "method": "delta", "gamma": 24, "base": { "method": "streaming_llm", "window": 100 } }),
        json!({ "method": "minference", "pattern": "a_shape", "local": 100 }),
        json!({ "method": "sample_attention", "min_tokens": 5000 }),
        json!({ "method": "hip" }),
    ] {
        assert_eq!(scored(settings.clone()), None, "{settings}");
    }
    let sampled = pairs(936..1000);
    let sample = json!({ "method": "sample_attention", "min_tokens": 0 });
    assert!(close(scored(sample.clone()), share(sampled)));
    assert!(close(scored(over_delta(&sample)), share(sampled)), "delta chooses by its base");
    let two = json!({ "method": "sample_attention", "min_tokens": 0, "chunks": 2 });
    assert!(close(scored(two), share(sampled + pairs(436..500))));
    let stripes = json!({ "method": "minference", "pattern": "vertical_slash", "queries": 30 });
    assert!(close(scored(stripes), share(pairs(970..1000))));
    // Query block b ranks b key blocks where it cannot have all: one product of means each.
    let blocks = json!({ "method": "minference", "pattern": "block_sparse", "blocks": 3 });
    assert!(close(scored(blocks), share((3..16).sum::<usize>() as f64)));
    // The last rows' sums, and then each pattern over these rows.
    let auto = scored(json!({ "method": "minference", "vertical": 40, "slash": 100 }));
    assert!(auto > share(sampled) && auto < share(4.0 * sampled), "{auto:?}");
    // Sixteen mean queries of a block; every chunk of 16 tokens before it takes four halvings, two looks each.
    let hip = json!({
        "method": "hip", "sink": 0, "window": 0, "full_at": 0, "dense_layers": 0, "stages": [{ "chunk": 16, "keep": 64 }]
    });
    let looks: usize = (2..16).map(|block| (if block < 15 { 16 } else { 10 }) * (block * 4) * 8).sum();
    assert!(close(scored(hip), share(looks as f64)));
}

#[test]
fn sample_attention_measures_the_mass_that_its_rows_keep() {
    let mut count = 0;
    for path in files().iter().filter(|p| p.file_stem().is_some_and(|n| n.to_string_lossy().starts_with("sample_"))) {
        let golden = Golden::read(path);
        let input = Input { q: golden.tensor("q"), k: golden.tensor("k"), v: golden.tensor("v") };
        let ((_, q_heads, head_dim), kv_heads) = (input.q.dims3().unwrap(), input.k.dims()[1]);
        let shape = AttentionShape { layers: 1, q_heads, kv_heads, head_dim, window: None };
        let (_, sequence) = run_on(&golden.spec(), &Artifacts::default(), shape, &input, 0, WHOLE);
        let exact = golden.tensor("cra").flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let cra = sequence.usage().prefill.cra.unwrap();
        let mean = exact.iter().sum::<f32>() / exact.len() as f32;
        let min = exact.iter().copied().fold(f32::INFINITY, f32::min);
        assert!((cra.mean - f64::from(mean)).abs() < 1e-5, "{path:?}: {cra:?}, exactly {mean}");
        assert!((cra.min - f64::from(min)).abs() < 1e-5, "{path:?}: {cra:?}, exactly {min}");
        count += 1;
    }
    assert_eq!(count, 3);
}
