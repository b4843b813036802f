//! Indices that lack what their rows read whatever they choose.

use super::properties::all_typical;
use super::*;
use crate::method::{Choice, DecodeMethod, DecodeStep, KeyIndex};
use taper_kernels::decode::{DecodeRow, Selection};

/// A method whose indices lack nothing.
#[derive(Debug)]
struct UpToDate(Arc<dyn DecodeMethod>);

impl DecodeMethod for UpToDate {
    fn select(&self, step: &DecodeStep) -> candle_core::Result<Choice> {
        self.0.select(step)
    }

    fn promise(&self) -> Option<(f64, f64)> {
        self.0.promise()
    }

    fn reads_all(&self, keys: usize) -> bool {
        self.0.reads_all(keys)
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        self.0.indices()
    }

    fn ahead(&self) -> bool {
        self.0.ahead()
    }

    fn dense_layers(&self) -> usize {
        self.0.dense_layers()
    }

    fn indexed_from(&self) -> usize {
        self.0.indexed_from()
    }

    fn plain(&self, rows: &[DecodeRow], kv_heads: usize) -> Option<Selection> {
        self.0.plain(rows, kv_heads)
    }
}

const SHAPE: AttentionShape = AttentionShape { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 64, window: None };
const PROMPT: usize = 300;

/// Outputs of all layers and reports of two sequences, the second of which goes on from the first: single rows, some let go
/// again, several at once, both together. And the most that an index lacked after a step.
fn attended(
    shape: AttentionShape,
    decode: &Value,
    input: &Input,
    up_to_date: bool,
) -> (Vec<Vec<f32>>, [Value; 2], usize) {
    let spec = json!({ "decode": decode, "audit": 0.1 });
    let spec = Arc::new(AttentionSpec::from_json(&spec, "attention", &random_artifacts(SHAPE)).unwrap());
    let kv = KvShape { layers: SHAPE.layers, kv_heads: SHAPE.kv_heads, head_dim: SHAPE.head_dim };
    let mut pool = KvPool::new(kv, DType::F32, 30, &Device::Cpu).unwrap();
    let rotary = PlainRotary(SHAPE.head_dim);
    let mut first = Sequence::new(spec.clone(), 3, PROMPT);
    if up_to_date {
        first.decode_around(|method| Arc::new(UpToDate(method)));
    }
    let (mut outs, mut lacked) = (Vec::new(), 0);
    let mut step = |pool: &mut KvPool, sequences: &mut [&mut Sequence], tokens: usize| {
        let starts: Vec<usize> = sequences.iter().map(|sequence| sequence.len()).collect();
        let spans = sequences.iter_mut().map(|sequence| Span { sequence, tokens }).collect();
        let mut batch = AttentionBatch::new(shape, &rotary, pool, spans).unwrap();
        let part = |t: &Tensor| {
            let rows: Vec<Tensor> = starts.iter().map(|&start| t.narrow(0, start, tokens).unwrap()).collect();
            Tensor::cat(&rows, 0).unwrap()
        };
        for layer in 0..SHAPE.layers {
            let out = batch.attend(layer, &part(&input.q), &part(&input.k), &part(&input.v)).unwrap();
            outs.push(out.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        }
        batch.finish().unwrap();
        for sequence in sequences.iter().filter(|sequence| sequence.len() > PROMPT) {
            for index in spec.decode.method.indices() {
                let lacks = pool.index_lacks(&index.name(), SHAPE.layers - 1, (sequence.table(), sequence.len()));
                lacked = lacked.max(lacks);
            }
        }
    };
    step(&mut pool, &mut [&mut first], PROMPT);
    for _ in 0..50 {
        step(&mut pool, &mut [&mut first], 1);
    }
    first.truncate(&mut pool, PROMPT + 40).unwrap();
    step(&mut pool, &mut [&mut first], 5);
    let mut second = first.fork(&mut pool, 4).unwrap();
    for _ in 0..30 {
        step(&mut pool, &mut [&mut second], 1);
    }
    for _ in 0..50 {
        step(&mut pool, &mut [&mut first, &mut second], 1);
    }
    let reports = [&first, &second].map(|sequence| json!(sequence.usage()));
    (outs, reports, lacked)
}

#[test]
fn rows_choose_alike_without_what_their_indices_may_lack() {
    let input = Input::random(SHAPE, 500);
    let mut decodes = all_typical();
    // Keys that are indexed as soon as they come, before they leave the window, and when many have come.
    for window in [1, 2, 17, 128] {
        decodes.push(json!({ "method": "hash_attention", "window": window, "sink": 3 }));
        decodes.push(json!({ "method": "vattention", "top": { "method": "hash_attention" }, "window": window }));
    }
    decodes.push(json!({ "method": "vattention", "top": { "method": "hash_attention" }, "window": 0.05 }));
    decodes.push(json!({ "method": "santa", "within": { "method": "hash_attention", "window": 40 } }));
    decodes.push(json!({ "method": "hash_attention", "window": 40, "dense_below": 330 }));
    let mut all: Vec<_> = decodes.into_iter().map(|decode| (SHAPE, decode)).collect();
    // A share of a window is one of what a row sees.
    let windowed = AttentionShape { window: Some(200), ..SHAPE };
    let over = |window: Value| json!({ "method": "vattention", "top": { "method": "hash_attention" }, "sink": 4, "window": window });
    all.extend([over(json!(0.02)), over(json!(17))].map(|decode| (windowed, decode)));
    for (shape, decode) in all {
        let (outs, reports, lacked) = attended(shape, &decode, &input, false);
        let (own, told, lacks) = attended(shape, &decode, &input, true);
        let first = outs.iter().zip(&own).position(|(a, b)| a != b);
        assert_eq!(first, None, "{decode}: a layer's output is another");
        assert_eq!(reports, told, "{decode}");
        let of = [&decode["top"], &decode["within"], &decode].map(|of| of["method"] == "hash_attention");
        let most = match decode["window"].as_f64().or(decode["within"]["window"].as_f64()) {
            _ if !of.contains(&true) || decode["tail"] == "hard" => 0,
            Some(share) if share < 1.0 => (share * shape.window.unwrap_or(410) as f64) as usize,
            window => (window.unwrap_or(128.0) as usize).min(31),
        };
        // Below its least length nothing is asked of an index.
        if decode["dense_below"].is_null() {
            assert_eq!(lacks, 0, "{decode}");
            assert!(lacked <= most && (lacked > 0 || most == 0), "{decode}: {lacked} of {most}");
        }
    }
}
