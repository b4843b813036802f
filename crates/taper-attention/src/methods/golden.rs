//! Golden vectors: inputs and outputs that independent NumPy implementations of the papers wrote
//! (`scripts/golden/attention`), and a sequence run on them.

use super::tests::{Input, run_on};
use crate::{Artifacts, AttentionShape, Sequence};
use candle_core::{DType, Device, Tensor};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

/// One file of `tests/golden`.
pub(crate) struct Golden {
    bytes: Vec<u8>,
    metadata: HashMap<String, String>,
}

impl Golden {
    pub fn load(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let bytes = std::fs::read(folder.join(format!("{name}.safetensors"))).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        Self { metadata: metadata.metadata().clone().unwrap(), bytes }
    }

    /// A field of the header.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.metadata.get(name).map(String::as_str)
    }

    /// The request's `attention` object.
    pub fn attention(&self) -> Value {
        serde_json::from_str(self.field("attention").unwrap()).unwrap()
    }

    /// A tensor as f32; masks become 0 and 1.
    pub fn tensor(&self, name: &str) -> Tensor {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = file.tensor(name).unwrap_or_else(|_| panic!("no tensor {name}"));
        let dtype = match tensor.dtype() {
            Dtype::F16 => DType::F16,
            Dtype::F32 => DType::F32,
            Dtype::U8 => DType::U8,
            Dtype::I64 => DType::I64,
            Dtype::U32 => DType::U32,
            other => panic!("{name} is {other:?}"),
        };
        let stored = Tensor::from_raw_buffer(tensor.data(), dtype, tensor.shape(), &Device::Cpu).unwrap();
        stored.to_dtype(DType::F32).unwrap()
    }

    /// All numbers of a tensor.
    pub fn numbers(&self, name: &str) -> Vec<f32> {
        self.tensor(name).flatten_all().unwrap().to_vec1().unwrap()
    }

    /// The heads of its tensors.
    pub fn shape(&self) -> AttentionShape {
        let (_, q_heads, head_dim) = self.tensor("q").dims3().unwrap();
        let kv_heads = self.tensor("k").dims()[1];
        AttentionShape { layers: 1, q_heads, kv_heads, head_dim, window: None }
    }

    /// Runs the request over an f32 cache, the last `decoded` rows one by one.
    pub fn run(&self, artifacts: &Artifacts, decoded: usize, chunk: usize) -> (Vec<f32>, Sequence) {
        let input = Input { q: self.tensor("q"), k: self.tensor("k"), v: self.tensor("v") };
        run_on(&self.attention(), artifacts, self.shape(), &input, decoded, chunk)
    }

    /// Fails unless every row and head of `out` `[rows, q_heads, d]` is the file's.
    pub fn check(&self, name: &str, out: &[f32], tolerance: f32) {
        let (expected, shape) = (self.numbers("out"), self.shape());
        assert_eq!(out.len(), expected.len(), "{name}");
        let heads = out.chunks_exact(shape.head_dim).zip(expected.chunks_exact(shape.head_dim));
        for (at, (own, expected)) in heads.enumerate() {
            let error = super::tests::relative(own, expected);
            assert!(error < tolerance, "{name}: row {} head {}: {error}", at / shape.q_heads, at % shape.q_heads);
        }
    }
}

#[test]
fn prefill_methods_give_the_golden_outputs() {
    for name in
        ["delta-delta", "delta-recompute", "sample_attention", "sample_attention-one-chunk", "streaming_llm-prefill"]
    {
        let golden = Golden::load(name);
        for chunk in [4096, 100] {
            let (out, _) = golden.run(&Artifacts::default(), 0, chunk);
            golden.check(name, &out, 2e-5);
        }
    }
}

#[test]
fn sample_attention_measures_the_mass_that_its_rows_keep() {
    for name in ["sample_attention", "sample_attention-one-chunk"] {
        let golden = Golden::load(name);
        let (_, sequence) = golden.run(&Artifacts::default(), 0, 4096);
        let exact = golden.numbers("cra");
        let cra = sequence.usage().prefill.cra.unwrap();
        let mean = exact.iter().sum::<f32>() / exact.len() as f32;
        let min = exact.iter().copied().fold(f32::INFINITY, f32::min);
        assert!(
            (cra.mean - f64::from(mean)).abs() < 1e-5 && (cra.min - f64::from(min)).abs() < 1e-5,
            "{name}: {cra:?}"
        );
    }
}
