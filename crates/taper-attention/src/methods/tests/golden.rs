//! Methods against independent float64 implementations: what scripts/golden/attention wrote.

use super::*;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// One golden file.
pub(super) struct Golden {
    tensors: HashMap<String, Tensor>,
    pub header: HashMap<String, String>,
}

impl Golden {
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).unwrap();
        Self { tensors, header: metadata.metadata().clone().unwrap() }
    }

    pub fn tensor(&self, name: &str) -> Tensor {
        let of = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap();
        match self.tensors.get("spread") {
            Some(spread) if ["q", "k", "v"].contains(&name) => {
                of(&self.tensors[name]).broadcast_matmul(&of(spread)).unwrap()
            }
            _ => of(&self.tensors[name]),
        }
    }

    /// Which of so many rows the file has the outputs of.
    fn rows(&self, all: usize) -> Vec<usize> {
        match self.tensors.get("rows") {
            Some(rows) => rows.to_vec1::<u32>().unwrap().into_iter().map(|row| row as usize).collect(),
            None => (0..all).collect(),
        }
    }

    pub fn spec(&self) -> Value {
        serde_json::from_str(&self.header["attention"]).unwrap()
    }

    /// By how many KV heads each key is read, in each row of a decode file that says so.
    fn reads(&self) -> Option<Vec<Vec<u32>>> {
        let selected = self.tensors.get("selected").filter(|_| self.header["phase"] == "decode")?;
        let by_key = selected.to_dtype(DType::U32).unwrap().sum(1).unwrap();
        Some(by_key.to_vec2().unwrap())
    }

    /// The learned part that the file brings for its method.
    pub fn artifacts(&self, shape: AttentionShape) -> Artifacts {
        let spec = self.spec();
        let decode = &spec["decode"];
        let Some(method) = decode["top"]["method"].as_str().or(decode["method"].as_str()) else {
            return Artifacts::default();
        };
        let of_method =
            |(name, tensor): (&String, &Tensor)| Some((name.strip_prefix("artefact.")?.to_owned(), tensor.clone()));
        let tensors: Vec<_> = self.tensors.iter().filter_map(of_method).collect();
        if tensors.is_empty() {
            return Artifacts::default();
        }
        let name = if spec["decode"]["rope"] == true { format!("{method}-rope") } else { method.to_owned() };
        Artifacts::default().with(&format!("{name}.safetensors"), &artifact(&name, &tensors), &key(shape)).unwrap()
    }
}

pub(super) fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn methods_equal_independent_implementations() {
    let (mut seen, mut chosen) = (Vec::new(), Vec::new());
    for path in files() {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let golden = Golden::read(&path);
        let method = golden.spec()[&golden.header["phase"]]["method"].as_str().unwrap().to_owned();
        assert!(catalogue().iter().any(|m| m.name == method), "{name}: no method {method}");
        let (k, v, q) = (golden.tensor("k"), golden.tensor("v"), golden.tensor("q"));
        let ((n, kv_heads, head_dim), (rows, q_heads, _)) = (k.dims3().unwrap(), q.dims3().unwrap());
        let window = golden.header.get("window").map(|window| window.parse().unwrap());
        let shape = AttentionShape { layers: 1, q_heads, kv_heads, head_dim, window };
        let (mut spec, reads) = (golden.spec(), golden.reads());
        spec["trace"] = json!(reads.is_some());
        let spec = AttentionSpec::from_json(&spec, "attention", &golden.artifacts(shape)).unwrap();
        chosen.push((golden.header["phase"].clone(), json!(spec)[&golden.header["phase"]].clone()));
        let seed = golden.header.get("seed").map_or(1, |seed| seed.parse().unwrap());
        let decode = golden.header["phase"] == "decode";
        let mut sequence = Sequence::new(Arc::new(spec), seed, if decode { n - rows } else { n });
        let kv = KvShape { layers: 1, kv_heads, head_dim };
        let mut pool = KvPool::new(kv, DType::F32, n.div_ceil(64), &Device::Cpu).unwrap();
        let rotary = PlainRotary(head_dim);
        let mut out = Vec::new();
        while sequence.len() < n {
            let (start, tokens) = (sequence.len(), sequence.chunk(usize::MAX).max(1));
            // The prompt of a decode file has no queries: any do.
            let queries = match decode && start < n - rows {
                true => Tensor::zeros((tokens, q_heads, head_dim), DType::F32, &Device::Cpu).unwrap(),
                false => q.narrow(0, start + rows - n, tokens).unwrap(),
            };
            let spans = vec![Span { sequence: &mut sequence, tokens }];
            let mut batch = AttentionBatch::new(shape, &rotary, &mut pool, spans).unwrap();
            let part = |t: &Tensor| t.narrow(0, start, tokens).unwrap();
            let rows = batch.attend(0, &queries, &part(&k), &part(&v)).unwrap();
            batch.finish().unwrap();
            if !decode || start >= n - q.dims()[0] {
                out.extend(rows.flatten_all().unwrap().to_vec1::<f32>().unwrap());
            }
        }
        let expected = golden.tensor("out").flatten_all().unwrap().to_vec1::<f32>().unwrap();
        // The weakest misreading that the scripts tried changes some row by 5e-3.
        let width = q_heads * head_dim;
        let checked = golden.rows(out.len() / width);
        assert_eq!(expected.len(), checked.len() * width, "{name}");
        for (row, wanted) in checked.into_iter().zip(expected.chunks_exact(width)) {
            let error = relative(&out[row * width..(row + 1) * width], wanted);
            assert!(error < 1e-4, "{name}: row {row} differs by {error}");
        }
        // The very keys, where outputs alone would forgive one for another.
        if let Some(reads) = reads {
            let tokens = sequence.usage().trace.unwrap().tokens;
            assert_eq!(tokens.len(), reads.len(), "{name}");
            for (token, wanted) in tokens.iter().zip(reads) {
                let mut found = vec![0u32; n];
                for &(first, keys, heads) in token.reads.as_ref().unwrap() {
                    found[first as usize..(first + keys) as usize].iter_mut().for_each(|count| *count += heads);
                }
                let differ = (0..n).find(|&key| found[key] != wanted[key]);
                assert_eq!(differ, None, "{name}: row {}, a key that is read by other heads", token.position);
            }
        }
        seen.push((golden.header["phase"].clone(), method));
    }
    // Predictors are decode methods by the same names.
    for method in catalogue().into_iter().filter(|method| method.phase != "predictor") {
        let own = (method.phase.to_owned(), method.name.to_owned());
        assert!(seen.contains(&own), "no golden file has the {} method {}", method.phase, method.name);
        for (name, property) in method.parameters["properties"].as_object().unwrap() {
            for choice in choices(property) {
                let has = |(phase, of): &(String, Value)| {
                    *phase == method.phase && of["method"] == method.name && of[name] == choice
                };
                // What a file says is one of the others; what the paper tuned is a table of numbers.
                let elsewhere = choice == "file" || name == "tuning";
                assert!(elsewhere || chosen.iter().any(has), "no golden file has {} with {name} {choice}", method.name);
            }
        }
    }
}

/// The values that a parameter may have, where these are few words, or true and false.
fn choices(property: &Value) -> Vec<Value> {
    match property["oneOf"].as_array() {
        Some(values) => values.iter().map(|value| value["const"].clone()).collect(),
        None if property["type"] == "boolean" => vec![json!(false), json!(true)],
        None => Vec::new(),
    }
}
