//! Rotary position embedding: the frequencies of each scaling rule, and the cosines and sines of one step's positions.
//!
//! The tables are made once a step and shared by all layers. There is no table over the whole context: a step needs
//! only its own positions, and one of the rules (dynamic) changes its frequencies with the sequence's length.

use candle_core::{Device, Result, Tensor};

/// How a model stretches its rotary embedding past the length that it was trained on.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Positions divided by `factor`.
    Linear {
        /// The stretch.
        factor: f64,
    },
    /// NTK-aware: the base grows with the sequence, once it is longer than `original_context`.
    Dynamic {
        /// The stretch.
        factor: f64,
        /// The context length of training.
        original_context: usize,
    },
    /// Llama 3.1: low frequencies stretched, high ones kept, a ramp between.
    Llama3 {
        /// The stretch of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are stretched in full.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context length of training.
        original_context: usize,
    },
    /// YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp over dimensions, and a temperature on attention.
    Yarn {
        /// The stretch.
        factor: f64,
        /// The context length of training.
        original_context: usize,
        /// Rotations over the training context above which a dimension is kept.
        beta_fast: f64,
        /// Rotations over the training context below which a dimension is stretched in full.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded outwards to whole dimensions.
        truncate: bool,
        /// Multiplies cosines and sines.
        attention_factor: f64,
    },
    /// Divisors of the frequencies, as a GGUF's `rope_freqs.weight` gives them; `head_dim / 2` of them.
    Divisors(Vec<f32>),
}

/// A model's rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// The base of the geometric series of wavelengths.
    pub theta: f64,
    /// Width of a head; all of it is rotated.
    pub head_dim: usize,
    /// The stretch.
    pub scaling: RopeScaling,
}

/// Cosines and sines of one step's positions, `[T, head_dim / 2]` each, f32.
#[derive(Debug, Clone)]
pub(crate) struct RopeTable {
    /// Cosines, times the attention factor.
    pub(crate) cos: Tensor,
    /// Sines, times the attention factor.
    pub(crate) sin: Tensor,
}

/// The same in host memory.
#[derive(Debug)]
pub(crate) struct Turns {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl Turns {
    /// On a device, cosines and sines apart.
    ///
    /// # Errors
    /// A device error.
    pub(crate) fn table(self, device: &Device) -> Result<RopeTable> {
        let shape = (self.cos.len() / self.half, self.half);
        Ok(RopeTable {
            cos: Tensor::from_vec(self.cos, shape, device)?,
            sin: Tensor::from_vec(self.sin, shape, device)?,
        })
    }
}

impl Rope {
    /// The rule of scaling and by how much it stretches, to a thousandth; none if it does not. A folder and a GGUF file of one
    /// model say the same, though one has a rule where the other has divisors.
    pub(crate) fn stretch(&self) -> Option<(&'static str, f64)> {
        let (rule, factor) = match &self.scaling {
            RopeScaling::Default => return None,
            RopeScaling::Linear { factor } => ("linear", *factor),
            RopeScaling::Dynamic { factor, .. } => ("dynamic", *factor),
            RopeScaling::Yarn { factor, .. } => ("yarn", *factor),
            RopeScaling::Llama3 { .. } => {
                let ratios = self.geometric(self.theta).into_iter().zip(self.frequencies(1));
                ("divisors", ratios.map(|(plain, scaled)| f64::from(plain / scaled)).fold(1.0, f64::max))
            }
            RopeScaling::Divisors(divisors) => ("divisors", divisors.iter().map(|d| f64::from(*d)).fold(1.0, f64::max)),
        };
        let factor = (factor * 1000.0).round() / 1000.0;
        (factor != 1.0).then_some((rule, factor))
    }

    /// The angle per position of each pair of dimensions, `head_dim / 2` of them, for a sequence of `length` tokens.
    ///
    /// Only the dynamic rule heeds `length`.
    pub fn frequencies(&self, length: usize) -> Vec<f32> {
        match &self.scaling {
            RopeScaling::Default => self.geometric(self.theta),
            RopeScaling::Linear { factor } => {
                self.geometric(self.theta).into_iter().map(|f| f / *factor as f32).collect()
            }
            RopeScaling::Dynamic { factor, original_context } => {
                let original = *original_context as f64;
                let stretch = factor * (length as f64).max(original) / original - (factor - 1.0);
                let dim = self.head_dim as f64;
                self.geometric(self.theta * stretch.powf(dim / (dim - 2.0)))
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let original = *original_context as f64;
                let blend = |frequency: f32| {
                    let wavelength = std::f64::consts::TAU / f64::from(frequency);
                    let rotations = original / wavelength;
                    // 1 keeps the frequency, 0 divides it by the whole factor.
                    let keep = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let keep = keep.clamp(0.0, 1.0);
                    let frequency = f64::from(frequency);
                    ((1.0 - keep) * frequency / factor + keep * frequency) as f32
                };
                self.geometric(self.theta).into_iter().map(blend).collect()
            }
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
                let (low, high) = self.yarn_ramp(*original_context, *beta_fast, *beta_slow, *truncate);
                let frequencies = self.geometric(self.theta).into_iter().enumerate();
                frequencies
                    .map(|(i, frequency)| {
                        let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        let frequency = f64::from(frequency);
                        (stretched * frequency / factor + (1.0 - stretched) * frequency) as f32
                    })
                    .collect()
            }
            RopeScaling::Divisors(divisors) => {
                self.geometric(self.theta).into_iter().zip(divisors).map(|(f, d)| f / d).collect()
            }
        }
    }

    /// What cosines and sines are multiplied by: 1 except under YaRN.
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }

    /// Cosines and sines for a flat batch's `positions` `[T]`; `length` says how long a token's
    /// sequence is.
    ///
    /// Under the dynamic rule a token is rotated by the frequencies of its sequence's length, as in transformers, where a
    /// whole prompt is one step.
    pub(crate) fn turns(&self, positions: &[u32], length: impl Fn(usize) -> u32) -> Turns {
        let half = self.head_dim / 2;
        let scale = self.attention_factor() as f32;
        let mut cos = Vec::with_capacity(positions.len() * half);
        let mut sin = Vec::with_capacity(positions.len() * half);
        let dynamic = matches!(self.scaling, RopeScaling::Dynamic { .. });
        let (mut frequencies, mut known) = (Vec::new(), None);
        for (token, &position) in positions.iter().enumerate() {
            let of = if dynamic { length(token) } else { 0 };
            if known != Some(of) {
                frequencies = self.frequencies(of as usize);
                known = Some(of);
            }
            for frequency in &frequencies {
                let (s, c) = (position as f32 * frequency).sin_cos();
                cos.push(c * scale);
                sin.push(s * scale);
            }
        }
        Turns { cos, sin, half }
    }

    /// The same, made on a CUDA device: each token's cosines and then its sines, `[T, head_dim]`, f32.
    ///
    /// # Errors
    /// No positions, or a device error.
    #[cfg(feature = "cuda")]
    pub(crate) fn angles(&self, positions: &[u32], length: impl Fn(usize) -> u32, device: &Device) -> Result<Tensor> {
        let factor = self.attention_factor() as f32;
        let made = |positions: &[u32], of: u32| {
            Ok(taper_kernels::cuda::angles(positions, &self.frequencies(of as usize), factor, device)?)
        };
        if !matches!(self.scaling, RopeScaling::Dynamic { .. }) {
            return made(positions, 0);
        }
        let lengths: Vec<u32> = (0..positions.len()).map(length).collect();
        let mut start = 0;
        let mut parts = Vec::new();
        for run in lengths.chunk_by(|a, b| a == b) {
            parts.push(made(&positions[start..start + run.len()], run[0])?);
            start += run.len();
        }
        Tensor::cat(&parts, 0)
    }

    fn geometric(&self, theta: f64) -> Vec<f32> {
        let dim = self.head_dim as f64;
        (0..self.head_dim / 2).map(|i| (1.0 / theta.powf(2.0 * i as f64 / dim)) as f32).collect()
    }

    /// The dimensions between which YaRN passes from keeping a frequency to stretching it.
    fn yarn_ramp(&self, original_context: usize, beta_fast: f64, beta_slow: f64, truncate: bool) -> (f64, f64) {
        let dim = self.head_dim as f64;
        let dimension_of = |rotations: f64| {
            dim * (original_context as f64 / (rotations * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
        };
        let (mut low, mut high) = (dimension_of(beta_fast), dimension_of(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        // A ramp of no width would divide by zero.
        if low == high { (low, high + 0.001) } else { (low, high) }
    }
}

impl taper_attention::Rotary for Rope {
    fn frequencies(&self, length: usize) -> Vec<f32> {
        self.frequencies(length)
    }

    fn factor(&self) -> f32 {
        self.attention_factor() as f32
    }

    fn heeds_length(&self) -> bool {
        matches!(self.scaling, RopeScaling::Dynamic { .. })
    }
}
