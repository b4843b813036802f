//! Trains what some attention methods learn offline, into the files that `--artifacts` reads.
//!
//! The model runs densely over text; queries and keys of its layers are captured, as many layers at a time as memory
//! allows, and each layer is learned from and written before the next. Every eighth sequence is held out, and what was
//! learned is measured on it: the share of far attention mass in the keys that a decode method would read, or what the
//! rows of prompts keep by a prefill method and for how many keys.
//!
//! All that is captured is f32, so that the memory for a layer of T tokens and R rows of queries is
//! 4·head_dim·(T·kv_heads + R·q_heads) bytes.

mod artefact;
pub(crate) mod capture;
mod clustering;
mod corpus;
mod defaults;
mod double_sparsity;
mod error;
mod hash_attention;
mod head;
mod kept;
mod minference;
mod net;
mod plan;
mod prefill;
mod prompt;
mod recall;
mod saap;
mod sample_attention;

pub use corpus::{Corpus, CorpusSize};
pub use defaults::default_of;
pub use error::TrainError;
pub use kept::Kept;
pub use plan::{Method, Network, Plan};
pub use recall::{LayerReport, Recall, SHARES, mean, table};

use artefact::{Artefact, Named, Origin, Values};
use capture::{Capture, Captured, Wanted};
use clustering::cluster;
use double_sparsity::Channels;
use hash_attention::Maps;
use head::Head;
use net::{Course, Linear};
use plan::Checked;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use saap::{Chooser, Classifier, Samples, Way};
use std::path::{Path, PathBuf};
use taper_attention::AttentionShape;
use taper_kernels::index::clusters::Centroids;
use taper_model::Model;

/// Who follows a run.
pub trait Progress {
    /// Asked all the time: whether to end now. What is unfinished of a layer is dropped.
    fn stopped(&self) -> bool;

    /// A part of `steps` steps begins.
    fn begins(&mut self, part: &str, steps: usize);

    /// One more step is done.
    fn advance(&mut self);
}

/// Nobody follows.
impl Progress for () {
    fn stopped(&self) -> bool {
        false
    }

    fn begins(&mut self, _: &str, _: usize) {}

    fn advance(&mut self) {}
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Trained {
    /// The file.
    pub file: PathBuf,
    /// What was measured on held-out text, layer by layer.
    pub reports: Vec<LayerReport>,
    /// Layers that were in the file before.
    pub kept: usize,
}

/// Trains an artefact of `model` on a corpus and writes it to a folder.
///
/// # Errors
/// An option that does not fit the model or the corpus, a file that is in the way, a step that failed, or
/// [`TrainError::Stopped`]; layers finished by then are in the file, and [`Plan::resume`] keeps them.
pub fn train(
    model: &Model,
    corpus: &Corpus,
    plan: &Plan,
    folder: &Path,
    progress: &mut dyn Progress,
) -> Result<Trained, TrainError> {
    corpus.check_fits(model)?;
    let checked = plan.check(&model.attention_shape(), corpus)?;
    let origin = Origin {
        method: checked.name,
        model: &model.config().key(),
        text: corpus.describe(),
        tokens: corpus.tokens(),
        seed: plan.seed,
        options: checked.options.clone(),
    };
    let file = Artefact::open(folder, &origin, plan.resume)?;
    let mut trainer = Trainer { model, shape: model.attention_shape(), corpus, plan, checked, file, progress };
    let kept = match plan.method {
        Method::DoubleSparsity { .. } => trainer.channels()?,
        Method::MInference { .. } => trainer.patterns()?,
        Method::SampleAttention { .. } => trainer.thresholds()?,
        _ => trainer.layers()?,
    };
    Ok(Trained { file: trainer.file.path().to_owned(), reports: trainer.file.reports(), kept })
}

struct Trainer<'a> {
    model: &'a Model,
    shape: AttentionShape,
    corpus: &'a Corpus,
    plan: &'a Plan,
    checked: Checked,
    file: Artefact,
    progress: &'a mut dyn Progress,
}

/// One layer of all sequences.
struct Layer<'a> {
    index: usize,
    training: Vec<&'a Captured>,
    held_out: Vec<&'a Captured>,
}

impl Layer<'_> {
    fn heads<'a>(of: &[&'a Captured], kv_head: usize) -> Vec<Head<'a>> {
        of.iter().map(|captured| Head::new(captured, kv_head)).collect()
    }
}

impl Trainer<'_> {
    /// Layers one by one; returns how many were there already.
    fn layers(&mut self) -> Result<usize, TrainError> {
        let left: Vec<usize> = self.checked.layers.iter().copied().filter(|&layer| !self.file.has(layer)).collect();
        let kept = self.checked.layers.len() - left.len();
        let queries = !matches!(self.plan.method, Method::KMeans { .. });
        for group in self.groups(&left, queries) {
            let captured = self.capture(&group, |held_out| held_out || queries, |_| true)?;
            for (place, &index) in group.iter().enumerate() {
                let of = |held_out: bool| {
                    let sequences = captured.iter().enumerate().filter(|(i, _)| self.corpus.held_out(*i) == held_out);
                    sequences.map(|(_, layers)| &layers[place]).collect()
                };
                let layer = Layer { index, training: of(false), held_out: of(true) };
                let (tensors, recalls) = match &self.plan.method {
                    Method::HashAttention { .. } => self.hash_attention(&layer)?,
                    Method::KMeans { rope, .. } => self.kmeans(&layer, *rope)?,
                    _ => self.saap(&layer)?,
                };
                self.file.add(tensors, [LayerReport { layer: index, recalls, ..LayerReport::default() }]);
                self.file.save()?;
            }
        }
        Ok(kept)
    }

    /// Layers that fit the memory together.
    fn groups(&self, layers: &[usize], queries: bool) -> Vec<Vec<usize>> {
        let sequences = self.corpus.sequences().iter().enumerate();
        let bytes: u64 = sequences
            .map(|(i, s)| self.wanted(i, queries || self.corpus.held_out(i)).bytes(s.len(), &self.shape))
            .sum();
        let most = (self.plan.memory_bytes / bytes.max(1)).max(1) as usize;
        layers.chunks(most).map(<[usize]>::to_vec).collect()
    }

    fn wanted(&self, sequence: usize, queries: bool) -> Wanted {
        if self.plan.method.is_prefill() {
            return self.wanted_of_prompt(sequence);
        }
        let tokens = self.corpus.sequences()[sequence].len();
        let seed = self.plan.seed.wrapping_add(sequence as u64);
        Wanted::sample(tokens, &self.checked.far, if queries { self.plan.queries } else { 0 }, seed)
    }

    /// Captures layers, ascending, of the sequences `of(held out)` `[sequences][layers]`.
    fn capture(
        &mut self,
        layers: &[usize],
        queries: impl Fn(bool) -> bool,
        of: impl Fn(bool) -> bool,
    ) -> Result<Vec<Vec<Captured>>, TrainError> {
        let name = format!("capturing {}", described(layers));
        let sequences: Vec<usize> =
            (0..self.corpus.sequences().len()).filter(|&i| of(self.corpus.held_out(i))).collect();
        self.progress.begins(&name, sequences.len());
        let mut capture = Capture::new(self.model, self.corpus.length())?;
        let mut all = Vec::with_capacity(sequences.len());
        for i in sequences {
            let wanted = self.wanted(i, queries(self.corpus.held_out(i)));
            let progress = &*self.progress;
            all.push(capture.keep(&self.corpus.sequences()[i], layers, &wanted, &|| progress.stopped())?);
            self.progress.advance();
        }
        Ok(all)
    }

    /// Draws of one layer and KV head.
    fn rng(&self, layer: usize, kv_head: usize) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.plan.seed);
        rng.set_stream((1 + layer * self.shape.kv_heads + kv_head) as u64);
        rng
    }

    /// The centroids `[clusters, head_dim]` of one KV head.
    fn centroids(&self, layer: &Layer, kv_head: usize, rotated: bool) -> Result<Vec<f32>, TrainError> {
        let keys: Vec<f32> =
            Layer::heads(&layer.training, kv_head).iter().flat_map(|head| head.keys(rotated)).collect();
        let mut rng = self.rng(layer.index, kv_head);
        let found = cluster(keys, self.shape.head_dim, self.checked.count, &mut rng);
        Ok(found.map_err(TrainError::compute(layer.index))?.centroids)
    }

    fn kmeans(&mut self, layer: &Layer, rope: bool) -> Result<(Vec<Named>, Vec<Recall>), TrainError> {
        let failed = TrainError::compute(layer.index);
        let (mut all, mut recalls) = (Vec::new(), Vec::new());
        self.progress.begins(&format!("layer {}: clusters", layer.index), self.shape.kv_heads);
        for kv_head in 0..self.shape.kv_heads {
            let rows = self.centroids(layer, kv_head, rope)?;
            let centroids = &Centroids::new(&rows, self.shape.head_dim).map_err(&failed)?;
            let name = if rope { "centroids, rotated" } else { "centroids" };
            let way = Way { name, rotated: rope, centroids, chooser: Chooser::Centroids };
            let heads = Layer::heads(&layer.held_out, kv_head);
            merge(&mut recalls, saap::recalls(&heads, &self.checked.far, &[way]).map_err(&failed)?);
            all.extend(rows);
            self.advance()?;
        }
        Ok((vec![self.centroids_tensor(layer.index, all)], recalls))
    }

    fn centroids_tensor(&self, layer: usize, rows: Vec<f32>) -> Named {
        let shape = vec![self.shape.kv_heads, self.checked.count, self.shape.head_dim];
        (format!("layers.{layer}.centroids"), shape, Values::F32(rows))
    }

    fn saap(&mut self, layer: &Layer) -> Result<(Vec<Named>, Vec<Recall>), TrainError> {
        let failed = TrainError::compute(layer.index);
        let (d, far) = (self.shape.head_dim, self.checked.far);
        let (mut all, mut maps, mut recalls) = (Vec::new(), Vec::new(), Vec::new());
        for kv_head in 0..self.shape.kv_heads {
            self.progress.begins(&format!("layer {} KV head {kv_head}: clusters", layer.index), 2);
            let rows = self.centroids(layer, kv_head, false)?;
            self.advance()?;
            let turned = self.centroids(layer, kv_head, true)?;
            self.advance()?;
            let centroids = &Centroids::new(&rows, d).map_err(&failed)?;
            let turned = &Centroids::new(&turned, d).map_err(&failed)?;
            let samples = Samples::of(&Layer::heads(&layer.training, kv_head), &far, centroids).map_err(&failed)?;
            let classifier = self
                .taught(layer.index, kv_head, "classifier", |course| Classifier::train(&samples, &rows, d, course))?;
            let mlp = classifier.mlp().map_err(&failed)?;
            let ways = [
                Way { name: "classifier", rotated: false, centroids, chooser: Chooser::Classifier(&mlp) },
                Way { name: "centroids", rotated: false, centroids, chooser: Chooser::Centroids },
                Way { name: "centroids, rotated", rotated: true, centroids: turned, chooser: Chooser::Centroids },
            ];
            let heads = Layer::heads(&layer.held_out, kv_head);
            merge(&mut recalls, saap::recalls(&heads, &far, &ways).map_err(&failed)?);
            all.extend(rows);
            maps.push(classifier.layers);
        }
        let mut tensors = vec![self.centroids_tensor(layer.index, all)];
        tensors.extend(linear_tensors(&format!("layers.{}.classifier", layer.index), &maps));
        Ok((tensors, recalls))
    }

    fn hash_attention(&mut self, layer: &Layer) -> Result<(Vec<Named>, Vec<Recall>), TrainError> {
        let failed = TrainError::compute(layer.index);
        let far = self.checked.far;
        let (mut queries, mut keys, mut recalls) = (Vec::new(), Vec::new(), Vec::new());
        for kv_head in 0..self.shape.kv_heads {
            let heads = Layer::heads(&layer.training, kv_head);
            let maps = self.taught(layer.index, kv_head, "codes", |course| Maps::train(&heads, &far, course))?;
            let heads: Vec<_> = Layer::heads(&layer.held_out, kv_head).into_iter().map(|head| (head, &maps)).collect();
            merge(&mut recalls, hash_attention::recalls(&heads, &far).map_err(&failed)?);
            queries.extend(maps.query);
            keys.push(maps.key);
        }
        let mut tensors = linear_tensors(&format!("layers.{}.query", layer.index), &queries);
        tensors.extend(linear_tensors(&format!("layers.{}.key", layer.index), &keys));
        Ok((tensors, recalls))
    }

    /// A network of one KV head, on the model's device.
    fn taught<T>(
        &mut self,
        layer: usize,
        kv_head: usize,
        what: &str,
        train: impl FnOnce(&mut Course) -> candle_core::Result<Option<T>>,
    ) -> Result<T, TrainError> {
        let mut rng = self.rng(layer, kv_head);
        let Checked { hidden, schedule, .. } = self.checked;
        let (progress, device) = (&mut *self.progress, self.model.device());
        progress.begins(&format!("layer {layer} KV head {kv_head}: {what}"), schedule.iterations);
        let mut step = || {
            progress.advance();
            !progress.stopped()
        };
        let mut course = Course { hidden, schedule, device, rng: &mut rng, step: &mut step };
        train(&mut course).map_err(TrainError::compute(layer))?.ok_or(TrainError::Stopped)
    }

    /// Double Sparsity's channels: sums over the training text in one pass for all layers, then held-out text.
    fn channels(&mut self) -> Result<usize, TrainError> {
        if !self.file.is_empty() {
            return Ok(self.shape.layers);
        }
        let mut sums = vec![Channels::default(); self.shape.layers];
        let sequences = self.corpus.sequences();
        let training: Vec<usize> = (0..sequences.len()).filter(|&i| !self.corpus.held_out(i)).collect();
        self.progress.begins("summing products", training.len());
        let mut capture = Capture::new(self.model, self.corpus.length())?;
        for i in training {
            let mut see = |layer: usize, _: usize, q: &[f32], k: &[f32]| sums[layer].add(&self.shape, q, k);
            let progress = &*self.progress;
            capture
                .run(&sequences[i], &(0..self.shape.layers).collect::<Vec<_>>(), &mut see, &|| progress.stopped())?;
            self.progress.advance();
        }
        drop(capture);
        let best: Vec<Vec<Vec<u32>>> = sums.iter().map(|sums| sums.best(&self.shape, self.checked.count)).collect();
        for group in self.groups(&self.checked.layers, false) {
            let captured = self.capture(&group, |_| true, |held_out| held_out)?;
            for (place, &layer) in group.iter().enumerate() {
                let mut recalls = Vec::new();
                for (kv_head, channels) in best[layer].iter().enumerate() {
                    let heads = captured.iter().map(|layers| Head::new(&layers[place], kv_head));
                    let heads: Vec<_> = heads.map(|head| (head, channels.as_slice())).collect();
                    let found = double_sparsity::recalls(&heads, &self.checked.far);
                    merge(&mut recalls, found.map_err(TrainError::compute(layer))?);
                }
                self.file.add(Vec::new(), [LayerReport { layer, recalls, ..LayerReport::default() }]);
            }
        }
        let shape = vec![self.shape.layers, self.shape.kv_heads, self.checked.count];
        self.file.add(vec![("channels".into(), shape, Values::U32(best.concat().concat()))], []);
        self.file.save()?;
        Ok(0)
    }

    fn advance(&mut self) -> Result<(), TrainError> {
        self.progress.advance();
        if self.progress.stopped() { Err(TrainError::Stopped) } else { Ok(()) }
    }
}

/// `layer 3`, or `layers 3 to 9`.
fn described(layers: &[usize]) -> String {
    match layers {
        [only] => format!("layer {only}"),
        [first, .., last] => format!("layers {first} to {last}"),
        [] => "no layer".to_owned(),
    }
}

/// Adds one KV head's recalls to those of the layer.
fn merge(all: &mut Vec<Recall>, more: Vec<Recall>) {
    let report = |recalls| LayerReport { recalls, ..LayerReport::default() };
    *all = mean(&[report(std::mem::take(all)), report(more)]);
}

/// `<prefix>.<depth>.weight` `[maps, outputs, inputs]` and `.bias` `[maps, outputs]` of equal networks.
fn linear_tensors<const DEPTH: usize>(prefix: &str, maps: &[[Linear; DEPTH]]) -> Vec<Named> {
    let tensors = (0..DEPTH).flat_map(|depth| {
        let outputs = maps[0][depth].1.len();
        let inputs = maps[0][depth].0.len() / outputs;
        let weight = maps.iter().flat_map(|map| map[depth].0.iter().copied()).collect();
        let bias = maps.iter().flat_map(|map| map[depth].1.iter().copied()).collect();
        [
            (format!("{prefix}.{depth}.weight"), vec![maps.len(), outputs, inputs], Values::F32(weight)),
            (format!("{prefix}.{depth}.bias"), vec![maps.len(), outputs], Values::F32(bias)),
        ]
    });
    tensors.collect()
}

#[cfg(test)]
mod tests;
