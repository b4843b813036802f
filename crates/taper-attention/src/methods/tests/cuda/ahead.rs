//! Pages that are chosen in all layers at once, by the queries of the tokens before.

use super::*;

const LAYERS: usize = 4;
const DEEP: AttentionShape = AttentionShape { layers: LAYERS, ..SHAPE };

/// The same rows from one further on for each layer, so that layers differ.
fn of_layer(t: &Tensor, layer: usize) -> Tensor {
    let n = t.dim(0).unwrap();
    Tensor::cat(&[t.narrow(0, layer, n - layer).unwrap(), t.narrow(0, 0, layer).unwrap()], 0).unwrap()
}

/// Of sequences of so many tokens of a prompt, each layer's outputs of the rows of some steps, and what was reported.
fn attended(decode: &Value, prompts: &[usize], device: &Device, joint: bool) -> (Vec<Vec<f32>>, Vec<Value>) {
    let spec =
        Arc::new(AttentionSpec::from_json(&json!({ "decode": decode }), "attention", &artifacts(device)).unwrap());
    let plain = input();
    let layers: Vec<Input> = (0..LAYERS)
        .map(|layer| {
            let [q, k, v] = [&plain.q, &plain.k, &plain.v].map(|t| of_layer(t, layer));
            let own = Input { q, k, v };
            if joint { own } else { turned(&own) }
        })
        .collect();
    let kv = KvShape { layers: LAYERS, kv_heads: SHAPE.kv_heads, head_dim: SHAPE.head_dim };
    let mut pool = KvPool::new(kv, DType::BF16, 13 * prompts.len(), device).unwrap();
    let mut sequences: Vec<Sequence> =
        prompts.iter().enumerate().map(|(i, &n)| Sequence::new(spec.clone(), i as u64, n)).collect();
    let rotary = PlainRotary(SHAPE.head_dim);
    let mut outs = vec![Vec::new(); LAYERS];
    let mut step = |sequences: &mut [Sequence], tokens: &dyn Fn(&Sequence) -> usize, keep: bool| {
        let spans: Vec<_> = sequences.iter().map(|sequence| (sequence.len(), tokens(sequence))).collect();
        let part = |t: &Tensor| {
            let parts: Vec<_> = spans.iter().map(|&(start, tokens)| t.narrow(0, start, tokens).unwrap()).collect();
            Tensor::cat(&parts, 0).unwrap().to_device(device).unwrap()
        };
        let turns: Vec<f32> =
            spans.iter().flat_map(|&(start, n)| start..start + n).flat_map(|at| angles(at).concat()).collect();
        let rows = turns.len() / SHAPE.head_dim;
        let of = sequences.iter_mut().zip(&spans).map(|(sequence, (_, tokens))| Span { sequence, tokens: *tokens });
        let mut batch = AttentionBatch::new(DEEP, &rotary, &mut pool, of.collect()).unwrap();
        for (layer, (input, outs)) in layers.iter().zip(&mut outs).enumerate() {
            let [q, k, v] = [&input.q, &input.k, &input.v].map(part);
            let out = if joint {
                let qkv = [&q, &k, &v].map(|x| x.flatten_from(1).unwrap().to_dtype(DType::BF16).unwrap());
                let angles = Tensor::from_vec(turns.clone(), (rows, SHAPE.head_dim), device).unwrap();
                batch.attend_joint(layer, &Tensor::cat(&qkv, 1).unwrap(), &angles).unwrap().unwrap()
            } else {
                batch.attend(layer, &q, &k, &v).unwrap()
            };
            if keep {
                outs.extend(out.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap());
            }
        }
        batch.finish().unwrap();
    };
    for sequence in &mut sequences {
        step(std::slice::from_mut(sequence), &|sequence| sequence.prompt, false);
    }
    for _ in 0..70 {
        step(&mut sequences, &|_| 1, true);
    }
    let usage = sequences.iter().map(|sequence| json!(sequence.usage())["decode"].clone()).collect();
    (outs, usage)
}

#[test]
fn pages_of_all_layers_are_chosen_at_once_as_they_are_on_the_cpu() {
    let device = Device::new_cuda_with_stream(0).expect("the feature `cuda` needs a CUDA device");
    let pages = |page: usize, dense_layers: usize| {
        json!({
            "method": "quest", "k": 96, "sink": 2, "window": 20, "page": page, "dense_layers": dense_layers, "ahead": true
        })
    };
    let over = |top_k: Value| {
        json!({
            "method": "vattention", "epsilon": 0.9, "delta": 0.4, "sink": 2, "window": 20, "pilot_tokens": 16,
            "dense_share": 1, "top_k": top_k, "top": { "method": "quest", "page": 16, "ahead": true }
        })
    };
    // The second is shorter than the first page of all is long, and then longer.
    for prompts in [&[600][..], &[600, 10, 333]] {
        for decode in [pages(16, 0), pages(64, 1), pages(4, 2), over(json!(0.1)), over(json!("auto"))] {
            let (out, usage) = attended(&decode, prompts, &Device::Cpu, false);
            for joint in [false, true] {
                let (cuda, on_cuda) = attended(&decode, prompts, &device, joint);
                let most = if decode["method"] == "vattention" { 0.3 } else { 0.05 };
                for (layer, (a, b)) in out.iter().zip(&cuda).enumerate() {
                    let error = relative(b, a);
                    assert!(error < most, "{decode}, {prompts:?}, joint {joint}: layer {layer} differs by {error}");
                }
                for (a, b) in usage.iter().zip(&on_cuda) {
                    for (name, part) in [("density", 0.05), ("scored", 1e-9), ("budget_max", 0.25)] {
                        let [a, b] = [a, b].map(|usage| usage[name].as_f64().unwrap_or(0.0));
                        assert!(
                            (a - b).abs() <= part * a.max(b),
                            "{decode}, {prompts:?}, joint {joint}: {name} {a}, {b}"
                        );
                    }
                }
            }
        }
    }
}
