//! What every decode method must prove, whatever it does: a row of [`typical`] settings each.

use super::*;

/// Settings at which a decode method leaves much out at some hundred tokens: one row a method.
fn typical(name: &str) -> Option<Value> {
    Some(match name {
        "dense" => json!({ "method": name }),
        "streaming_llm" => json!({ "method": name, "sink": 2, "window": 20 }),
        "oracle_top_k" | "quantized_keys" | "quest" | "double_sparsity" | "hash_attention" => {
            json!({ "method": name, "k": 40, "sink": 2, "window": 20, "dense_layers": 0 })
        }
        "oracle_top_p" => json!({ "method": name, "p": 0.5, "sink": 2, "window": 20 }),
        "random_sample" => json!({ "method": name, "rate": 50, "sink": 2, "window": 20 }),
        "saap" | "kmeans" => json!({ "method": name, "probes": 2, "sink": 2, "window": 20, "dense_layers": 0 }),
        "santa" => json!({ "method": name, "samples": 16 }),
        "vattention" => json!({
            "method": name, "epsilon": 0.9, "delta": 0.4, "sink": 2, "window": 20, "pilot_tokens": 16, "dense_share": 1,
            "top": { "method": "quest" }
        }),
        _ => return None,
    })
}

/// The settings of every decode method, and vAttention over every predictor.
pub(super) fn all_typical() -> Vec<Value> {
    let decode = catalogue().into_iter().filter(|m| m.phase == "decode");
    let mut all: Vec<Value> =
        decode.map(|m| typical(m.name).unwrap_or_else(|| panic!("no typical row for {}", m.name))).collect();
    let vattention = typical("vattention").unwrap();
    for predictor in catalogue().into_iter().filter(|m| m.phase == "predictor") {
        let mut over = vattention.clone();
        over["top"] = json!({ "method": predictor.name });
        all.push(over);
    }
    let mut hard = vattention.clone();
    hard["tail"] = json!("hard");
    let mut shares = vattention.clone();
    (shares["sink"], shares["window"]) = (json!(0.02), json!(0.05));
    // Rows on either side of it.
    let mut below = typical("quest").unwrap();
    below["dense_below"] = json!(300);
    all.extend([hard, shares, below]);
    for ahead in [typical("quest").unwrap(), all[all.len() - 1].clone()] {
        all.push(ahead);
        all.last_mut().unwrap()["ahead"] = json!(true);
    }
    for (top_k, tail) in [(json!("auto"), "clt"), (json!(0.1), "clt"), (json!("auto"), "hard")] {
        let mut over = vattention.clone();
        (over["top_k"], over["tail"]) = (top_k, json!(tail));
        over["top"] = json!({ "method": "quest", "ahead": true });
        all.push(over);
    }
    let mut probes = vattention.clone();
    probes["top"] = json!({ "method": "saap", "probes": 2 });
    all.push(probes);
    all.push(json!({ "method": "kmeans", "rope": true, "probes": 2, "window": 20, "dense_layers": 0 }));
    all.push(json!({ "method": "santa", "samples": 16, "within": typical("oracle_top_k") }));
    all.push(json!({ "method": "santa", "samples": 16, "scores": "bernoulli", "mean_query": true }));
    all
}

/// Whether settings choose by the query of the token before.
fn ahead(decode: &Value) -> bool {
    [&decode["ahead"], &decode["top"]["ahead"]].contains(&&json!(true))
}

/// A pool and a sequence that grow step by step over fixed random inputs.
struct Growing {
    shape: AttentionShape,
    pool: KvPool,
    sequence: Sequence,
    inputs: [Tensor; 3],
}

impl Growing {
    fn new(decode: &Value, shape: AttentionShape, prompt: usize) -> Self {
        let spec = json!({ "prefill": { "method": "streaming_llm", "window": 8 }, "decode": decode });
        let spec = AttentionSpec::from_json(&spec, "attention", &random_artifacts(shape)).unwrap();
        let kv = KvShape { layers: 1, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
        let tokens = 448;
        Self {
            shape,
            pool: KvPool::new(kv, DType::F32, tokens / 64 + 1, &Device::Cpu).unwrap(),
            sequence: Sequence::new(Arc::new(spec), 5, prompt),
            inputs: [shape.q_heads, shape.kv_heads, shape.kv_heads]
                .map(|heads| random((tokens, heads, shape.head_dim), heads as u64 + 11)),
        }
    }

    /// Goes on to `n` tokens in steps of at most `step` after the prompt; returns the outputs of those.
    fn to(&mut self, n: usize, step: usize) -> Vec<f32> {
        let mut outs = Vec::new();
        while self.sequence.len() < n {
            let (start, prompt) = (self.sequence.len(), self.sequence.chunk(usize::MAX));
            let tokens = if prompt > 0 { prompt } else { step.min(n - start) };
            let [q, k, v] = [0, 1, 2].map(|i| self.inputs[i].narrow(0, start, tokens).unwrap());
            let rotary = PlainRotary(self.shape.head_dim);
            let spans = vec![Span { sequence: &mut self.sequence, tokens }];
            let mut batch = AttentionBatch::new(self.shape, &rotary, &mut self.pool, spans).unwrap();
            let out = batch.attend(0, &q, &k, &v).unwrap();
            batch.finish().unwrap();
            if prompt == 0 {
                outs.extend(out.flatten_all().unwrap().to_vec1::<f32>().unwrap());
            }
        }
        outs
    }
}

/// What was decoded after a prompt equals what an index built at once would give, and so does a step of several rows.
#[test]
fn growth_equals_building_anew() {
    let shape = shape(3, 64, None);
    for decode in all_typical() {
        let width = shape.q_heads * shape.head_dim;
        let grown = Growing::new(&decode, shape, 300).to(370, 1);
        let together = Growing::new(&decode, shape, 300).to(370, 35);
        assert_eq!(grown, together, "{decode}: rows together");
        let late = Growing::new(&decode, shape, 369).to(370, 1);
        assert_eq!(grown[69 * width..], late, "{decode}: the index built at once");
    }
}

#[test]
fn truncating_equals_never_having_appended() {
    let shape = shape(3, 64, None);
    for decode in all_typical() {
        let expected = Growing::new(&decode, shape, 300).to(345, 1);
        let mut growing = Growing::new(&decode, shape, 300);
        let first = growing.to(325, 1);
        // Other tokens that are taken back: across a block's end, and within it.
        for beyond in [410, 330] {
            let inputs = growing.inputs.clone();
            growing.inputs = inputs.clone().map(|t| (t * -2.0).unwrap());
            growing.to(beyond, 1);
            growing.sequence.truncate(&mut growing.pool, 325).unwrap();
            growing.inputs = inputs;
        }
        let rest = growing.to(345, 1);
        // Of tokens long gone no query is known any more.
        let from = (25 + usize::from(ahead(&decode))) * shape.q_heads * shape.head_dim;
        let all = [first, rest].concat();
        assert_eq!((all.len(), &all[from..]), (expected.len(), &expected[from..]), "{decode}");
        growing.pool.check_integrity([growing.sequence.table()]);
    }
}

/// A fork's tokens must not touch what it shares with the original, in the cache or in an index.
#[test]
fn forks_do_not_disturb_each_other() {
    let shape = shape(3, 64, None);
    for decode in all_typical() {
        let expected = Growing::new(&decode, shape, 300).to(345, 1);
        let mut growing = Growing::new(&decode, shape, 300);
        let first = growing.to(325, 1);
        let fork = growing.sequence.fork(&mut growing.pool, 5).unwrap();
        let original = std::mem::replace(&mut growing.sequence, fork);
        let inputs = growing.inputs.clone();
        growing.inputs = inputs.clone().map(|t| (t * -2.0).unwrap());
        growing.to(400, 1);
        (growing.sequence, growing.inputs) = (original, inputs);
        assert_eq!([first, growing.to(345, 1)].concat(), expected, "{decode}");
    }
}

/// Outputs of six steps after 200 tokens, of which some numbers of one of q, k and v, of the first head's, are bad.
fn spoilt(decode: &Value, shape: AttentionShape, which: usize, token: usize, bad: f32) -> Vec<f32> {
    let mut growing = Growing::new(decode, shape, 200);
    let dims = growing.inputs[which].dims().to_vec();
    let mut values = growing.inputs[which].flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let at = token * dims[1] * dims[2];
    values[at..at + 3].fill(bad);
    growing.inputs[which] = Tensor::from_vec(values, dims.as_slice(), &Device::Cpu).unwrap();
    growing.to(206, 1)
}

/// A sample that no missed key breaks, where it leaves keys out: bounds of keys and norms of values, that it rests on, grow, are
/// truncated and forked as every index is. Among random keys it reads everything, so that the tests above say nothing of it.
#[test]
fn the_hard_tails_bounds_grow_and_shrink_with_the_sequence() {
    let shape = shape(3, 64, None);
    let mut hard = typical("vattention").unwrap();
    (hard["tail"], hard["top_k"]) = (json!("hard"), json!(4));
    // Keys that weigh alike, and values that lean one way, those of every third token further.
    let new = |prompt| {
        let mut growing = Growing::new(&hard, shape, prompt);
        let values = growing.inputs[2].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let width = shape.kv_heads * shape.head_dim;
        let lean = |(i, x): (usize, f32)| 1.0 + 0.02 * x + if (i / width).is_multiple_of(3) { 0.2 } else { 0.0 };
        let values: Vec<f32> = values.into_iter().enumerate().map(lean).collect();
        growing.inputs[2] = Tensor::from_vec(values, growing.inputs[2].dims(), &Device::Cpu).unwrap();
        growing.inputs[1] = growing.inputs[1].zeros_like().unwrap();
        growing
    };
    let mut growing = new(300);
    let expected = growing.to(370, 1);
    let density = growing.sequence.usage().decode.density;
    assert!(density < 0.9, "{density}: nearly everything was read, which says nothing");
    assert_eq!(new(300).to(370, 35), expected, "rows together");
    let width = shape.q_heads * shape.head_dim;
    assert_eq!(new(369).to(370, 1), expected[69 * width..], "the index built at once");
    // Other tokens, with longer keys and values, that are taken back or belong to a fork.
    let mut growing = new(300);
    let first = growing.to(325, 1);
    let inputs = growing.inputs.clone();
    let fork = growing.sequence.fork(&mut growing.pool, 5).unwrap();
    let original = std::mem::replace(&mut growing.sequence, fork);
    growing.inputs = Growing::new(&hard, shape, 300).inputs.map(|t| (t * 9.0).unwrap());
    growing.to(400, 1);
    growing.pool.release(growing.sequence.table_mut());
    growing.sequence = original;
    growing.to(410, 1);
    growing.sequence.truncate(&mut growing.pool, 325).unwrap();
    growing.inputs = inputs;
    assert_eq!([first, growing.to(370, 1)].concat(), expected);
}

/// An output is a number, or it is none as dense attention's is none: what has no part in a row and KV head is untouched
/// bit for bit, and what every method must read shows as it does densely.
#[test]
fn numbers_that_are_none_spread_no_further_than_densely() {
    let shape = shape(3, 64, None);
    let (width, group) = (shape.q_heads * shape.head_dim, 3 * shape.head_dim);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        // A token of the prompt that a method may read or not, and one that is decoded.
        for (which, token) in [(0, 203), (1, 150), (1, 203), (2, 150), (2, 203)] {
            let dense = spoilt(&json!({ "method": "dense" }), shape, which, token, bad);
            for decode in all_typical() {
                let clean = Growing::new(&decode, shape, 200).to(206, 1);
                let out = spoilt(&decode, shape, which, token, bad);
                let what = format!("{decode}: {bad} in {} of token {token}", ["q", "k", "v"][which]);
                assert_eq!(out.len(), clean.len(), "{what}");
                // Every method reads the query, and every one but santa the last tokens whole.
                let must = which == 0 || token == 203 && (which == 1 || decode["method"] != "santa");
                for (i, ((x, clean), dense)) in out.iter().zip(&clean).zip(&dense).enumerate() {
                    let (row, place) = (200 + i / width, i % width);
                    // By the query of a token the next one's keys may be chosen.
                    let chosen = row == token || ahead(&decode) && row == token + 1;
                    if row < token || place >= group || which == 0 && !chosen {
                        assert_eq!(x, clean, "{what}: row {row}, number {place}");
                    }
                    assert!(x.is_finite() || !dense.is_finite(), "{what}: row {row}, number {place}");
                    assert!(!must || x.is_finite() == dense.is_finite(), "{what}: row {row}, number {place} is {x}");
                }
            }
        }
    }
}

/// Numbers beyond what the schema says are refused by a message that names the field and the range; the bounds are taken.
#[test]
fn every_number_is_held_to_its_range() {
    let artifacts = random_artifacts(shape(1, 64, None));
    let mut checked = [0; 3];
    for method in catalogue() {
        let parse = |name: &str, value: Value| {
            let object = json!({ "method": method.name, name: value });
            let spec = match method.phase {
                "predictor" => json!({ "decode": { "method": "vattention", "top": object } }),
                phase => json!({ phase: object }),
            };
            AttentionSpec::from_json(&spec, "attention", &artifacts).map(|_| ())
        };
        let refused = |field: &str, found: Result<(), crate::SpecError>| {
            let error = found.unwrap_err();
            assert!(error.path.ends_with(&format!(".{field}")), "{}: {error:?}", method.name);
            assert!(error.message.contains("must be") && error.message.contains("got"), "{error}");
        };
        for (name, property) in method.parameters["properties"].as_object().unwrap() {
            for (beyond, bound) in beyond(property) {
                refused(name, parse(name, json!(beyond)));
                bound
                    .into_iter()
                    .for_each(|x| parse(name, json!(x)).unwrap_or_else(|e| panic!("{}: {e}", method.name)));
                checked[0] += 1;
            }
            if !property["x-amount"].is_null() {
                let auto = parse(name, json!("auto"));
                if property["x-amount"] == "auto" {
                    auto.unwrap()
                } else {
                    refused(name, auto)
                }
                refused(name, parse(name, json!("Auto")));
                // 1.0 may be meant for all, and a count of one has no point.
                for x in [-1.0, -0.001, 1.0, 1.5, 1_048_577.0, 1e300] {
                    refused(name, parse(name, json!(x)));
                }
                for x in [json!(0.001), json!(0.999), json!(1), json!(2.0), json!(1_048_576.0)] {
                    parse(name, x).unwrap_or_else(|e| panic!("{}: {e}", method.name));
                }
                let zero = parse(name, json!(0));
                if property["exclusiveMinimum"] == 0 {
                    refused(name, zero)
                } else {
                    zero.unwrap()
                }
                checked[1] += 1;
            }
            // The fields of a list's items.
            for (field, inner) in property["items"]["properties"].as_object().into_iter().flatten() {
                let with = |x: f64| {
                    let mut item = property["default"][0].clone();
                    item[field] = json!(x);
                    parse(name, json!([item]))
                };
                for (beyond, bound) in beyond(inner) {
                    refused(&format!("{name}[0].{field}"), with(beyond));
                    bound.into_iter().for_each(|x| with(x).unwrap_or_else(|e| panic!("{}: {e}", method.name)));
                    checked[2] += 1;
                }
            }
        }
    }
    // Bounds of plain numbers, amounts (a method's or predictor's), bounds within lists.
    assert!(checked[0] > 40 && checked[1] >= 8 && checked[2] >= 4, "{checked:?}");
}

/// Numbers just beyond what a property's schema allows, each with the bound where that is allowed.
fn beyond(property: &Value) -> Vec<(f64, Option<f64>)> {
    let all = [
        ("minimum", -1.0, true),
        ("maximum", 1.0, true),
        ("exclusiveMinimum", 0.0, false),
        ("exclusiveMaximum", 0.0, false),
    ];
    // A list of what is valid goes before any range, and so do amounts, whose bounds are two.
    let plain = property["enum"].is_null();
    let of = |(key, step, within): (&str, f64, bool)| {
        let bound = property[key].as_f64().filter(|_| plain)?;
        Some((bound + step, within.then_some(bound)))
    };
    all.into_iter().filter_map(of).collect()
}

/// A question is attended by the decode method row by row, as if its tokens had come one by one.
#[test]
fn a_question_by_the_decode_method_equals_tokens_one_by_one() {
    let shape = shape(3, 64, None);
    for decode in all_typical() {
        let mut asked = Growing::new(&decode, shape, 300);
        let spec =
            json!({ "prefill": { "method": "streaming_llm", "window": 8 }, "decode": decode, "question": "decode" });
        let spec = AttentionSpec::from_json(&spec, "attention", &random_artifacts(shape)).unwrap();
        asked.sequence = Sequence::new(Arc::new(spec), 5, 340).with_question(40);
        assert_eq!((asked.sequence.chunk(1000), asked.sequence.chunk(70)), (300, 70));
        asked.to(300, 1);
        assert_eq!([1000, 160, 4].map(|max| asked.sequence.chunk(max)), [16, 10, 1]);
        let [q, k, v] = [0, 1, 2].map(|i| asked.inputs[i].narrow(0, 300, 40).unwrap());
        let rotary = PlainRotary(shape.head_dim);
        let spans = vec![Span { sequence: &mut asked.sequence, tokens: 40 }];
        let mut batch = AttentionBatch::new(shape, &rotary, &mut asked.pool, spans).unwrap();
        let out = batch.attend(0, &q, &k, &v).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        batch.finish().unwrap();
        assert_eq!(out, Growing::new(&decode, shape, 300).to(340, 1), "{decode}");
    }
}

/// Shares of a context are rounded up, and hold for every row of a step by its own context.
#[test]
fn sinks_and_window_of_vattention_may_be_shares_of_the_context() {
    let shape = shape(3, 64, None);
    let settings = |sink: Value, window: Value| {
        json!({
            "method": "vattention", "epsilon": 0.9, "delta": 0.4, "sink": sink, "window": window, "pilot_tokens": 16,
            "dense_share": 1, "top": { "method": "oracle" }, "top_k": 8
        })
    };
    // At 340 to 349 tokens a twentieth is 17 or 18, a hundredth 4.
    let shares = settings(json!(0.01), json!(0.05));
    let together = Growing::new(&shares, shape, 339).to(349, 10);
    let width = shape.q_heads * shape.head_dim;
    for (row, n) in (340..350).enumerate() {
        let counts = settings(json!(4), json!(if n <= 340 { 17 } else { 18 }));
        let counted = Growing::new(&counts, shape, n - 1).to(n, 1);
        assert_eq!(together[row * width..(row + 1) * width], counted, "{n} tokens");
        let one_more = Growing::new(&settings(json!(4), json!(19)), shape, n - 1).to(n, 1);
        assert!(one_more != counted, "or this says nothing");
    }
    let artifacts = Artifacts::default();
    let parse = |sink: Value, window: Value| {
        AttentionSpec::from_json(&json!({ "decode": settings(sink, window) }), "attention", &artifacts)
            .map(|spec| json!(spec))
    };
    let spec = parse(json!(0.01), json!(200)).unwrap();
    assert_eq!((&spec["decode"]["sink"], &spec["decode"]["window"]), (&json!(0.01), &json!(200)));
    for (sink, window, path, message) in [
        (
            json!(1.5),
            json!(1),
            "attention.decode.sink",
            "must be a whole number of tokens up to 1048576, or a share of the context below 1; got 1.5",
        ),
        (
            json!(-1),
            json!(1),
            "attention.decode.sink",
            "must be a whole number of tokens up to 1048576, or a share of the context below 1; got -1",
        ),
        (
            json!(0),
            json!(2.5),
            "attention.decode.window",
            "must be a whole number of tokens up to 1048576, or a share of the context below 1; got 2.5",
        ),
        (json!(0), json!(0), "attention.decode.window", "must be a number greater than 0; got 0"),
    ] {
        let error = parse(sink, window).unwrap_err();
        assert_eq!((error.path.as_str(), error.message.as_str()), (path, message));
    }
    assert!(parse(json!(0), json!(0.5)).is_ok());
}

/// One step after `n - 1` tokens: its output, and the keys that it read, of one KV head.
fn one_step(decode: &Value, n: usize) -> (Vec<f32>, u64) {
    let shape = AttentionShape { layers: 1, q_heads: 3, kv_heads: 1, head_dim: 64, window: None };
    let mut growing = Growing::new(decode, shape, n - 1);
    let out = growing.to(n, 1);
    (out, growing.sequence.usage().decode.budget_max)
}

/// A cap takes the clusters that come last by preference away, whole, until what is left is within it.
#[test]
fn a_cap_on_selectivity_takes_whole_clusters_away() {
    for name in ["saap", "kmeans"] {
        let settings = |probes: usize, cap: f64| {
            json!({
                "method": name, "probes": probes, "sink": 2, "window": 20, "max_selectivity": cap, "dense_layers": 0
            })
        };
        for n in [300, 347] {
            // By the number of clusters read; the eighth makes it dense.
            let uncapped: Vec<(Vec<f32>, u64)> = (0..=8).map(|probes| one_step(&settings(probes, 1.0), n)).collect();
            assert!(uncapped.is_sorted_by(|a, b| a.1 <= b.1) && (uncapped[0].1, uncapped[8].1) == (22, n as u64));
            let mut seen = std::collections::BTreeSet::new();
            for percent in (0..=100).step_by(5) {
                let cap = f64::from(percent) / 100.0;
                let most = (cap * n as f64) as u64;
                let probes = (0..=8).take_while(|&probes| uncapped[probes].1 - 22 <= most).last().unwrap();
                for wanted in [3, 8] {
                    let expected = &uncapped[probes.min(wanted)];
                    assert_eq!(one_step(&settings(wanted, cap), n), *expected, "{name}: {wanted} clusters, cap {cap}");
                }
                seen.insert(probes);
            }
            assert!(seen.len() > 4, "{name}: caps leave {seen:?} clusters");
        }
        // Rows of one step have caps of their own: a tenth of 299 tokens is less than one of 300.
        let shape = AttentionShape { layers: 1, q_heads: 3, kv_heads: 1, head_dim: 64, window: None };
        let capped = settings(8, 0.1);
        let apart = Growing::new(&capped, shape, 290).to(310, 1);
        assert_eq!(Growing::new(&capped, shape, 290).to(310, 20), apart, "{name}");
    }
}

/// What choosing scores is reported, whoever scores it and by whichever query.
#[test]
fn keys_that_are_scored_are_reported() {
    let n = 300;
    let scored = |settings: &Value| {
        let mut growing = Growing::new(settings, shape(3, 64, None), n - 1);
        growing.to(n, 1);
        growing.sequence.usage().decode.scored.map(|share| (share * n as f64).round())
    };
    // Pages of 16, labels, quantised keys, codes, 8 clusters, keys; nothing by what looks at none.
    for (name, expected) in [
        ("quest", Some(19.0)),
        ("double_sparsity", Some(300.0)),
        ("quantized_keys", Some(300.0)),
        ("hash_attention", Some(300.0)),
        ("saap", Some(8.0)),
        ("kmeans", Some(8.0)),
        ("oracle_top_k", Some(300.0)),
        ("random_sample", None),
        ("streaming_llm", None),
    ] {
        assert_eq!(scored(&typical(name).unwrap()), expected, "{name}");
    }
    let share = |settings: Value| {
        let mut all = json!({ "method": "santa", "samples": 16 });
        all.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        scored(&all)
    };
    let bernoulli = |within: Value| share(json!({ "scores": "bernoulli", "within": within }));
    let few = json!({ "method": "oracle_top_k", "k": 40, "sink": 2, "window": 20 });
    let near = json!({ "method": "streaming_llm", "sink": 2, "window": 20 });
    assert_eq!(share(json!({})), Some(300.0));
    assert_eq!(bernoulli(json!({ "method": "dense" })), Some(300.0));
    assert_eq!((share(json!({ "within": few })), bernoulli(few)), (Some(300.0), Some(300.0 + 62.0)));
    assert_eq!((share(json!({ "within": near })), bernoulli(near)), (Some(22.0), Some(22.0)));
    // Nothing is drawn where there is no more than the samples.
    let fewer = json!({ "method": "streaming_llm", "sink": 2, "window": 14 });
    assert_eq!((share(json!({ "within": fewer })), bernoulli(fewer)), (None, None));
    assert_eq!(share(json!({ "samples": 300, "scores": "bernoulli" })), None);
}

/// What a parameter's description says is ignored changes nothing.
#[test]
fn parameters_without_a_say_are_documented_and_have_none() {
    let shape = shape(3, 64, None);
    let hard = typical("vattention").map(|mut all| (all["tail"] = json!("hard"), all).1).unwrap();
    let probes =
        typical("vattention").map(|mut all| (all["top"] = json!({ "method": "kmeans", "probes": 2 }), all).1).unwrap();
    for (mut settings, knob, other, says) in [
        (json!({ "method": "santa", "samples": 16, "kernel": "flash" }), "variant", json!("iid"), "ignored under"),
        (json!({ "method": "santa", "samples": 16, "kernel": "prop_lr" }), "variant", json!("iid"), "ignored under"),
        (json!({ "method": "santa", "samples": 16 }), "tile", json!(32), "ignored under `prop`"),
        (json!({ "method": "santa", "samples": 16 }), "draws", json!(9), "ignored under `exact`"),
        (json!({ "method": "santa", "samples": 16 }), "mean_query", json!(true), "ignored under `exact`"),
        (hard.clone(), "rule", json!("lemma"), "ignored where not"),
        (hard, "pilot_share", json!(0.5), "ignored where not"),
        (probes, "top_k", json!(0.3), "Ignored where `top` has `probes`"),
    ] {
        let without = Growing::new(&settings, shape, 300).to(303, 1);
        settings[knob] = other;
        assert_eq!(Growing::new(&settings, shape, 300).to(303, 1), without, "{settings}");
        let method = catalogue().into_iter().find(|m| m.phase == "decode" && settings["method"] == m.name).unwrap();
        let description = method.parameters["properties"][knob]["description"].as_str().unwrap();
        assert!(description.contains(says), "{}.{knob}: {description}", method.name);
    }
}
