//! What was measured: a record for each answer, cells over them, and the file that keeps both.

use crate::error::EvalError;
use crate::method::{Method, Phase};
use crate::tasks::Task;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;

/// Format of the file; raised when its meaning changes.
const FORMAT: u32 = 1;

/// What all answers of a file share. A file is continued only by a run with an equal header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The model's name.
    pub model: String,
    /// How it was loaded, in words: types of weights and cache.
    pub loaded: String,
    /// How the question after the context is attended: `prefill`, `dense` or `decode`.
    pub question: String,
    /// Seed of the questions and of the methods' draws.
    pub seed: u64,
    /// What tells the weights from others of the same configuration; files that were written before it was kept have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<String>,
    /// What methods had learnt: artefacts' files, and the beginnings of their SHA-256. Those that both have must be the same.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub artifacts: BTreeMap<String, String>,
}

/// Some files of a folder, and the beginnings of their SHA-256.
///
/// # Errors
/// [`EvalError::Io`].
pub fn digests(folder: &Path, files: &[&str]) -> Result<BTreeMap<String, String>, EvalError> {
    let digest = |file: &&str| {
        let path = folder.join(file);
        let bytes = fs::read(&path).map_err(|reason| EvalError::Io { path, reason })?;
        let digest: String = Sha256::digest(bytes).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Ok((file.to_string(), digest))
    };
    files.iter().map(digest).collect()
}

impl Header {
    fn fields(&self) -> [(&'static str, String); 4] {
        let text = [("model", &self.model), ("loaded", &self.loaded), ("question", &self.question)];
        let [model, loaded, question] = text.map(|(name, value)| (name, value.clone()));
        [model, loaded, question, ("seed", self.seed.to_string())]
    }
}

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The task.
    pub task: Task,
    /// Length asked for: prompt and answer, in tokens.
    pub length: usize,
    /// The question's number, from 0.
    pub sample: usize,
    /// Place of the prefill method in [`Results::prefills`].
    pub prefill: usize,
    /// Place of the decode method in [`Results::decodes`].
    pub decode: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Share of the wanted strings in the answer.
    pub score: f64,
    /// Share of (query, key) pairs read by the prompt's queries.
    pub prefill_density: f64,
    /// The same for the generated tokens' queries; absent if the first token ended the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_density: Option<f64>,
    /// Audited errors of the prefill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_error: Option<Audited>,
    /// Audited errors of the decode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_error: Option<Audited>,
    /// Wall time of the prefill, which all decode methods share, in seconds.
    pub prefill_s: f64,
    /// Wall time of the decode, in seconds.
    pub decode_s: f64,
    /// The answer.
    pub answer: String,
    /// The strings that a right answer contains.
    pub wanted: Vec<String>,
}

/// Relative errors against dense attention of audited heads.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Audited {
    /// Heads audited, per layer and token.
    pub heads: u64,
    /// Their mean relative error; `null` in a file where it is not finite.
    #[serde(deserialize_with = "finite_or_nan")]
    pub mean: f64,
}

/// JSON knows no NaN: it is written as `null`.
pub(crate) fn finite_or_nan<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

/// All answers of a model and seed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    format: u32,
    /// What all answers share.
    #[serde(flatten)]
    pub header: Header,
    /// Prefill methods, in the order that they came.
    pub prefills: Vec<Method>,
    /// Decode methods, in the order that they came.
    pub decodes: Vec<Method>,
    /// The answers.
    pub records: Vec<Record>,
    /// Means over them, for readers of the file.
    #[serde(default)]
    cells: Vec<Cell>,
}

/// What one pair of methods did on one task and length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// The task.
    pub task: Task,
    /// Length asked for, in tokens.
    pub length: usize,
    /// The prefill method's label.
    pub prefill: String,
    /// The decode method's label.
    pub decode: String,
    /// Answers.
    pub samples: usize,
    /// Mean score.
    pub accuracy: f64,
    /// Standard error of the mean score; absent for one answer.
    pub standard_error: Option<f64>,
    /// Mean density of the prefill.
    pub prefill_density: f64,
    /// Mean density of the decode.
    pub decode_density: Option<f64>,
    /// Mean relative error of the prefill's audited heads.
    pub prefill_error: Option<f64>,
    /// Mean relative error of the decode's audited heads.
    pub decode_error: Option<f64>,
    /// Mean wall time of a prefill, in seconds.
    pub prefill_s: f64,
    /// Mean wall time of a decode, in seconds.
    pub decode_s: f64,
}

impl Results {
    /// Nothing measured yet.
    pub fn new(header: Header) -> Self {
        let (prefills, decodes) = (Vec::new(), Vec::new());
        Self { format: FORMAT, header, prefills, decodes, records: Vec::new(), cells: Vec::new() }
    }

    /// Reads a file, to be continued by a run with `header`.
    ///
    /// # Errors
    /// [`EvalError::Io`]; [`EvalError::File`] for a file of another form, or whose header differs.
    pub fn load(path: &Path, header: &Header) -> Result<Self, EvalError> {
        let bad = |reason: String| EvalError::File { path: path.to_owned(), reason };
        let text = fs::read(path).map_err(|reason| EvalError::Io { path: path.to_owned(), reason })?;
        let results: Self = serde_json::from_slice(&text).map_err(|e| bad(format!("is no result file: {e}")))?;
        if results.format != FORMAT {
            return Err(bad(format!("format is {}; this program reads {FORMAT}", results.format)));
        }
        for ((name, theirs), (_, ours)) in results.header.fields().into_iter().zip(header.fields()) {
            if theirs != ours {
                return Err(bad(format!("{name} is {theirs}; this run's is {ours}")));
            }
        }
        if let (Some(theirs), Some(ours)) = (&results.header.weights, &header.weights)
            && theirs != ours
        {
            let reason =
                format!("the answers are of weights {theirs}; this run's, of the same configuration, are {ours}");
            return Err(bad(reason));
        }
        for (file, theirs) in &results.header.artifacts {
            if let Some(ours) = header.artifacts.get(file).filter(|ours| *ours != theirs) {
                return Err(bad(format!("{file} is {theirs}; this run's is {ours}")));
            }
        }
        let sound = |r: &Record| r.prefill < results.prefills.len() && r.decode < results.decodes.len();
        if let Some(at) = results.records.iter().position(|record| !sound(record)) {
            return Err(bad(format!("records[{at}]: names a method that the file does not list")));
        }
        Ok(results)
    }

    /// Takes in the answers of another run that are not here yet.
    pub fn absorb(&mut self, other: Self) {
        let place = |to: &mut Self, phase, methods: &[Method]| -> Vec<usize> {
            methods.iter().map(|method| to.place(phase, method)).collect()
        };
        self.header.artifacts.extend(other.header.artifacts);
        let prefills = place(self, Phase::Prefill, &other.prefills);
        let decodes = place(self, Phase::Decode, &other.decodes);
        for mut record in other.records {
            (record.prefill, record.decode) = (prefills[record.prefill], decodes[record.decode]);
            if !self.has(record.task, record.length, record.sample, record.prefill, record.decode) {
                self.records.push(record);
            }
        }
    }

    /// Writes the file, with cells; whoever reads it meanwhile sees the old one or the new one.
    ///
    /// # Errors
    /// [`EvalError::Io`].
    pub fn save(&mut self, path: &Path) -> Result<(), EvalError> {
        self.cells = self.cells();
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".part");
        let part = path.with_file_name(name);
        let write = || {
            let mut file = std::io::BufWriter::new(fs::File::create(&part)?);
            serde_json::to_writer(&mut file, self)?;
            file.write_all(b"\n")?;
            file.into_inner()?.sync_all()?;
            fs::rename(&part, path)
        };
        write().map_err(|reason| EvalError::Io { path: path.to_owned(), reason })
    }

    /// The place of a method, which is added if it is new.
    pub fn place(&mut self, phase: Phase, method: &Method) -> usize {
        let methods = match phase {
            Phase::Prefill => &mut self.prefills,
            Phase::Decode => &mut self.decodes,
        };
        methods.iter().position(|known| known.spec == method.spec).unwrap_or_else(|| {
            methods.push(method.clone());
            methods.len() - 1
        })
    }

    /// Whether this answer is there.
    pub fn has(&self, task: Task, length: usize, sample: usize, prefill: usize, decode: usize) -> bool {
        let key = (task, length, sample, prefill, decode);
        self.records.iter().any(|r| (r.task, r.length, r.sample, r.prefill, r.decode) == key)
    }

    /// Means over the answers: by length, prefill method, decode method, task.
    pub fn cells(&self) -> Vec<Cell> {
        let mut groups: BTreeMap<_, Vec<&Record>> = BTreeMap::new();
        for record in &self.records {
            groups.entry((record.length, record.prefill, record.decode, record.task)).or_default().push(record);
        }
        groups
            .into_iter()
            .map(|((length, prefill, decode, task), records)| {
                let of = |value: fn(&Record) -> f64| mean(records.iter().map(|r| value(r))).unwrap_or(f64::NAN);
                Cell {
                    task,
                    length,
                    prefill: self.prefills[prefill].label.clone(),
                    decode: self.decodes[decode].label.clone(),
                    samples: records.len(),
                    accuracy: of(|r| r.score),
                    standard_error: standard_error(&records),
                    prefill_density: of(|r| r.prefill_density),
                    decode_density: mean(records.iter().filter_map(|r| r.decode_density)),
                    prefill_error: pooled(records.iter().filter_map(|r| r.prefill_error)),
                    decode_error: pooled(records.iter().filter_map(|r| r.decode_error)),
                    prefill_s: of(|r| r.prefill_s),
                    decode_s: of(|r| r.decode_s),
                }
            })
            .collect()
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Of the mean score, from the scores' own spread.
fn standard_error(records: &[&Record]) -> Option<f64> {
    let count = records.len() as f64;
    let mean = mean(records.iter().map(|r| r.score))?;
    let squares: f64 = records.iter().map(|r| (r.score - mean).powi(2)).sum();
    (records.len() > 1).then(|| (squares / (count - 1.0) / count).sqrt())
}

/// Mean over all heads of all answers.
fn pooled(errors: impl Iterator<Item = Audited>) -> Option<f64> {
    let (sum, heads) = errors.fold((0.0, 0), |(sum, heads), e| (sum + e.mean * e.heads as f64, heads + e.heads));
    (heads > 0).then(|| sum / heads as f64)
}

#[cfg(test)]
mod tests;
