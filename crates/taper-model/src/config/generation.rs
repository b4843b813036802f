//! How a model's authors would have it sampled: `generation_config.json` of a Hugging Face folder.

use crate::error::ModelError;
use crate::source::{ModelFiles, ResolvedModel};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use std::path::Path;

/// What a request that says nothing of it is sampled by; what is `None` is not said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
pub struct GenerationConfig {
    /// What logits are divided by; 0 is greedy.
    pub temperature: Option<f64>,
    /// Only so many of the most probable tokens; below 1 it is all of them.
    #[serde(default, deserialize_with = "whole")]
    pub top_k: Option<i64>,
    /// The fewest most probable tokens whose probabilities reach this sum.
    pub top_p: Option<f64>,
    /// Tokens at least this times as probable as the most probable one.
    pub min_p: Option<f64>,
    /// Divides positive and multiplies negative logits of tokens in prompt or answer.
    pub repetition_penalty: Option<f64>,
    /// Most tokens of an answer.
    #[serde(default, deserialize_with = "whole")]
    pub max_new_tokens: Option<i64>,
}

/// A whole number, which some files write as 50.0.
fn whole<'de, D: Deserializer<'de>>(from: D) -> Result<Option<i64>, D::Error> {
    let Some(number) = Option::<f64>::deserialize(from)? else { return Ok(None) };
    // Up to where floats have no gaps.
    if number.fract() != 0.0 || number.abs() > 9e15 {
        return Err(D::Error::custom(format!("{number} is not a whole number")));
    }
    Ok(Some(number as i64))
}

impl GenerationConfig {
    /// Reads it; a folder without the file says nothing, nor does a GGUF file.
    ///
    /// # Errors
    /// [`ModelError`] naming the field whose value no request may have.
    pub fn read(model: &ResolvedModel) -> Result<Self, ModelError> {
        let ModelFiles::Folder(folder) = &model.files else { return Ok(Self::default()) };
        let path = folder.join("generation_config.json");
        if !path.exists() {
            return Ok(Self::default());
        }
        let mut of: Self = crate::json::read(&path)?;
        of.check(&path)?;
        // Some files write a number that is none for no limit.
        of.max_new_tokens = of.max_new_tokens.filter(|&tokens| tokens > 0);
        Ok(of)
    }

    fn check(&self, path: &Path) -> Result<(), ModelError> {
        let check = |name: &str, value: Option<f64>, range: &str, valid: fn(f64) -> bool| match value {
            Some(value) if !valid(value) => Err(ModelError::invalid(path, name, format!("{value} is not {range}"))),
            _ => Ok(()),
        };
        check("temperature", self.temperature, "between 0 and 2", |x| (0.0..=2.0).contains(&x))?;
        check("top_p", self.top_p, "above 0 and at most 1", |x| x > 0.0 && x <= 1.0)?;
        check("min_p", self.min_p, "between 0 and 1", |x| (0.0..=1.0).contains(&x))?;
        check("repetition_penalty", self.repetition_penalty, "between 0.01 and 10", |x| (0.01..=10.0).contains(&x))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::fs;

    fn read(file: Option<Value>) -> Result<GenerationConfig, String> {
        let folder = tempfile::tempdir().unwrap();
        if let Some(file) = file {
            fs::write(folder.path().join("generation_config.json"), file.to_string()).unwrap();
        }
        let model = ResolvedModel { name: "m".into(), files: ModelFiles::Folder(folder.path().into()) };
        GenerationConfig::read(&model).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_said_is_read_and_what_no_request_may_say_is_refused() {
        let llama = json!({"do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]});
        let expected = GenerationConfig { temperature: Some(0.6), top_p: Some(0.9), ..Default::default() };
        assert_eq!(read(Some(llama)), Ok(expected));
        let all = json!({"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "temperature": null});
        let expected = GenerationConfig {
            top_k: Some(20),
            min_p: Some(0.1),
            repetition_penalty: Some(1.05),
            ..Default::default()
        };
        assert_eq!(read(Some(all)), Ok(expected));
        let points = json!({"top_k": 50.0, "max_new_tokens": 2048.0});
        let expected = GenerationConfig { top_k: Some(50), max_new_tokens: Some(2048), ..Default::default() };
        assert_eq!(read(Some(points)), Ok(expected));
        assert_eq!(read(Some(json!({"top_k": -1}))).unwrap().top_k, Some(-1));
        assert_eq!([0, -1].map(|n| read(Some(json!({"max_new_tokens": n}))).unwrap().max_new_tokens), [None, None]);
        for wrong in [json!(0.5), json!("50"), json!(1e300)] {
            let error = read(Some(json!({"top_k": wrong}))).unwrap_err();
            assert!(error.contains("generation_config.json: top_k: "), "{error}");
        }
        assert_eq!(read(None), Ok(GenerationConfig::default()));
        for (name, value) in [("temperature", 2.5), ("top_p", 0.0), ("min_p", -0.1), ("repetition_penalty", 0.0)] {
            let error = read(Some(json!({ name: value }))).unwrap_err();
            assert!(error.contains("generation_config.json") && error.contains(name), "{error}");
        }
    }
}
