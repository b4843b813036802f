//! The network: a decoder of Llama's or Mistral's shape, over a flat batch of tokens.
//!
//! The batch has no sequence axis. Tokens of all requests lie side by side, and attention, which the caller brings,
//! is the only part that knows which of them belong together.

use crate::config::{LoadOptions, ModelConfig};
use crate::error::ModelError;
use crate::memory::most_memory;
use crate::rope::RopeTable;
use crate::source::{Loading, Progress, ResolvedModel};
use crate::weights::{self, Embedding, Random, Role, Sizes, Weights};
use candle_core::{DType, Device, IndexOp, Result, Tensor};
use candle_nn::rotary_emb::rope_thd;
use taper_attention::{AttentionShape, Chunk, LayerAttention, Rotary, Slice};
use taper_kernels::linear::Linear;
use taper_kernels::swiglu::swiglu;
use taper_kernels::{norm, rotary};

/// A loaded model. Shapes below: T tokens of a batch, R rows of it.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    device: Device,
    embedding: Embedding,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Tensor,
    head: Linear,
    /// What activations are turned into before a projection; the residual stream and the norms stay f32.
    activation: DType,
    /// What the weights take in memory.
    bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention_norm: Tensor,
    /// Query, key and value: one joint projection, or three.
    pub(crate) qkv: Vec<Linear>,
    pub(crate) output: Linear,
    pub(crate) feed_forward_norm: Tensor,
    /// Gate and up: one joint projection, or two.
    pub(crate) gate_up: Vec<Linear>,
    pub(crate) down: Linear,
}

impl Model {
    /// Loads a resolved checkpoint onto a device.
    ///
    /// # Errors
    /// [`ModelError`] naming the file and the field or tensor that is missing, malformed, of the wrong shape or not
    /// supported, or what the weights take and there is no room for. A hostile file is an error, not a panic.
    pub fn load(
        model: &ResolvedModel,
        options: &LoadOptions,
        device: &Device,
    ) -> std::result::Result<Self, ModelError> {
        let mut config = ModelConfig::read(model)?;
        config.limit_context(options.context_limit)?;
        let weights = weights::open(model, &config, options, device)?;
        Self::of(&config, &*weights, device, options.progress)
    }

    /// A model of random weights of a dtype, f32, f16 or bf16, made on the device: for measurements of speed.
    ///
    /// # Errors
    /// A device without the memory.
    pub fn random(config: &ModelConfig, dtype: DType, device: &Device) -> std::result::Result<Self, ModelError> {
        Self::of(config, &Random { config, dtype, device }, device, Progress::Hidden)
    }

    fn of(
        config: &ModelConfig,
        weights: &dyn Weights,
        device: &Device,
        progress: Progress,
    ) -> std::result::Result<Self, ModelError> {
        #[cfg(feature = "cuda")]
        taper_kernels::cuda::prepare(device)?;
        let sizes = Sizes::of(config, weights, device)?;
        if let Some(room) = most_memory(device) {
            sizes.fit(room, device)?;
        }
        let mut loading = Loading::new(progress, sizes.total);
        let mut layers = Vec::with_capacity(config.layers);
        for index in 0..config.layers {
            layers.push(Layer::load(weights, index)?);
            loading.add(weights::layer_bytes(weights, index)?);
        }
        let (embedding, norm) = (weights.embedding()?, weights.norm(Role::FinalNorm, 0)?);
        let (head, activation) = (weights.head()?, weights.activation_dtype());
        let (config, device, bytes) = (config.clone(), device.clone(), sizes.total);
        Ok(Self { config, device, embedding, layers, norm, head, activation, bytes })
    }

    /// Bytes that the weights take in memory, without what stays in the file.
    pub fn weight_bytes(&self) -> u64 {
        self.bytes
    }

    /// The checkpoint's hyperparameters.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The dtype of activations: on the CPU f32, on a device that of float weights.
    pub fn activation(&self) -> DType {
        self.activation
    }

    /// What attention needs to know.
    pub fn attention_shape(&self) -> AttentionShape {
        self.config.attention_shape()
    }

    /// The rotary embedding.
    pub fn rotary(&self) -> &dyn Rotary {
        &self.config.rope
    }

    /// The device that holds the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Runs all layers over a flat batch and returns the hidden states before the final norm, as [`logits`](Self::logits) and
    /// [`embeddings`](Self::embeddings) take them. On a device they last until the next step.
    ///
    /// # Shapes
    /// - `tokens` `[T]`, ids below the vocabulary's size
    /// - `positions` `[T]`, each token's place in its own sequence, from 0
    /// - returns `[T, hidden]`, f32
    ///
    /// # Errors
    /// An empty batch, lengths that differ, a token outside the vocabulary, a position past the context, and whatever
    /// `attention` or the device says.
    pub fn forward(&self, tokens: &[u32], positions: &[u32], attention: &mut dyn LayerAttention) -> Result<Tensor> {
        self.check(tokens.len(), positions)?;
        self.through(self.embedding.lookup(tokens)?, positions, attention)
    }

    /// The same of tokens that are where the model is, `[T]`, u32; none where embeddings are not there.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), but on a device a token outside the vocabulary is the caller's to prevent, and
    /// `u32::MAX` stands for no token.
    pub fn forward_there(
        &self,
        tokens: &Tensor,
        positions: &[u32],
        attention: &mut dyn LayerAttention,
    ) -> Result<Option<Tensor>> {
        self.check(tokens.dim(0)?, positions)?;
        let x = self.embedding.lookup_there(tokens)?;
        x.map(|x| self.through(x, positions, attention)).transpose()
    }

    /// All layers over embeddings `[T, hidden]`, f32.
    fn through(&self, mut x: Tensor, positions: &[u32], attention: &mut dyn LayerAttention) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if self.device.is_cuda() {
            let angles = self.config.rope.angles(positions, |token| attention.length(token), &self.device)?;
            if let Some(x) = crate::joint::replay(self, &x, &angles, attention)? {
                return Ok(x);
            }
            if crate::joint::run(self, &x, &angles, attention)? {
                return Ok(x);
            }
        }
        let table = self.config.rope.turns(positions, |token| attention.length(token)).table(&self.device)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let (q, k, v) = self.begin(layer, &x, &table)?;
            x = self.end(layer, &x, &attention.attend(index, &q, &k, &v)?)?;
        }
        Ok(x)
    }

    /// Takes a chunk of a prompt, its `tokens` from the first one on, further through the layers: by as much work as
    /// `effort` tokens through all of them, give or take a block of rows in a layer. Every layer gives a row what it gives
    /// it in [`forward`](Self::forward). Returns the hidden states of the last `rows` tokens, at least 1, before the final norm, `[rows, hidden]`, f32,
    /// once the chunk is through.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); then the chunk must be dropped.
    pub fn advance(&self, tokens: &[u32], chunk: &mut Chunk, effort: usize, rows: usize) -> Result<Option<Tensor>> {
        self.check(tokens.len(), &chunk.positions(&(0..tokens.len())))?;
        let mut left = chunk.work(effort);
        while left > 0 {
            let Some(slice) = chunk.next(left) else { break };
            left = left.saturating_sub(slice.work);
            match slice.ends {
                None => chunk.set_hidden(&slice.rows, &self.embedding.lookup(&tokens[slice.rows.clone()])?)?,
                Some(index) => {
                    let (layer, x, attended) = (&self.layers[index], chunk.hidden(&slice.rows)?, chunk.attend(&slice)?);
                    if !self.end_in_place(layer, &x, &attended)? {
                        chunk.set_hidden(&slice.rows, &self.end(layer, &x, &attended)?)?;
                    }
                }
            }
            match slice.begins {
                None => chunk.put(&slice, None)?,
                Some(index) => self.begin_slice(&self.layers[index], chunk, &slice)?,
            }
        }
        if !chunk.is_through() {
            return Ok(None);
        }
        chunk.hidden(&(tokens.len() - rows.clamp(1, tokens.len())..tokens.len())).map(Some)
    }

    /// Puts zeros through what a layer does beside attention, for each of these numbers of rows. A device may have kernels for a
    /// number that it takes for no other, and loads them when they are first used.
    ///
    /// # Errors
    /// The device's.
    pub fn try_rows(&self, counts: impl IntoIterator<Item = usize>) -> Result<()> {
        let Some(layer) = self.layers.first() else { return Ok(()) };
        let &ModelConfig { hidden_size, q_heads, head_dim, .. } = &self.config;
        for rows in counts {
            let x = Tensor::zeros((rows, hidden_size), DType::F32, &self.device)?;
            let attended = Tensor::zeros((rows, q_heads, head_dim), self.activation, &self.device)?;
            #[cfg(feature = "cuda")]
            if crate::joint::begin(self, layer, &x)?.is_some() && crate::joint::end(self, layer, &x, &attended)? {
                continue;
            }
            self.qkv(layer, &self.normed(&x, &layer.attention_norm)?)?;
            self.end(layer, &x, &attended)?;
        }
        Ok(())
    }

    /// Whether so many tokens can stand at positions.
    fn check(&self, tokens: usize, positions: &[u32]) -> Result<()> {
        if tokens == 0 || tokens != positions.len() {
            candle_core::bail!("a step takes one position a token: got {tokens} tokens, {} positions", positions.len());
        }
        if let Some(position) = positions.iter().find(|p| **p as usize >= self.config.context_length) {
            candle_core::bail!("position {position} is past the context of {} tokens", self.config.context_length);
        }
        Ok(())
    }

    /// The scores of every token of the vocabulary, by the final norm and the head.
    ///
    /// # Shapes
    /// - `hidden` `[R, hidden]`, f32, rows of what [`Model::forward`] returned
    /// - returns `[R, vocab]`, f32
    ///
    /// # Errors
    /// candle's shape and device errors.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(head) = crate::joint::matrix(&self.head) {
            return crate::joint::logits(self, head, &hidden.contiguous()?);
        }
        self.project(&self.head, &self.embeddings(hidden)?.to_dtype(self.activation)?)
    }

    /// The hidden states after the final norm.
    ///
    /// # Shapes
    /// - `hidden` `[R, hidden]`, f32, rows of what [`Model::forward`] returned
    /// - returns `[R, hidden]`, f32
    ///
    /// # Errors
    /// candle's shape and device errors.
    pub fn embeddings(&self, hidden: &Tensor) -> Result<Tensor> {
        self.normed(&hidden.contiguous()?, &self.norm)
    }

    /// What a layer does before attention: queries, keys and values as [`LayerAttention::attend`] takes them.
    fn begin(&self, layer: &Layer, x: &Tensor, table: &RopeTable) -> Result<(Tensor, Tensor, Tensor)> {
        let normed = self.normed(x, &layer.attention_norm)?;
        if let (true, [joint]) = (self.device.is_cpu(), &layer.qkv[..]) {
            let heads = (self.config.q_heads, self.config.kv_heads);
            return rotary::split(&joint.forward(&normed)?, heads, (&table.cos, &table.sin));
        }
        let (q, k, v) = self.qkv(layer, &normed)?;
        Ok((self.rotate(&q, table)?, self.rotate(&k, table)?, v))
    }

    /// What it does after: from the residual stream before it and what was attended to the residual stream after it.
    fn end(&self, layer: &Layer, x: &Tensor, attended: &Tensor) -> Result<Tensor> {
        let attended = attended.flatten_from(1)?.to_dtype(self.activation)?;
        let x = &layer.output.forward_onto(&attended, x)?;

        let normed = self.normed(x, &layer.feed_forward_norm)?.to_dtype(self.activation)?;
        let gate_up = match &layer.gate_up[..] {
            [joint] => joint.forward(&normed)?,
            parts => {
                let parts = parts.iter().map(|part| part.forward(&normed)).collect::<Result<Vec<_>>>()?;
                Tensor::cat(&parts, 1)?
            }
        };
        let gated = if self.device.is_cpu() { swiglu(&gate_up)? } else { candle_nn::ops::swiglu(&gate_up)? };
        layer.down.forward_onto(&gated, x)
    }

    /// [`begin`](Self::begin) for a chunk's slice, whose residual stream is there.
    fn begin_slice(&self, layer: &Layer, chunk: &mut Chunk, slice: &Slice) -> Result<()> {
        let x = chunk.hidden(&slice.rows)?;
        #[cfg(feature = "cuda")]
        if let Some(qkv) = crate::joint::begin(self, layer, &x)? {
            let angles = match chunk.angles(slice)? {
                Some(angles) => angles,
                None => {
                    let (positions, length) = (chunk.positions(&slice.rows), chunk.prompt() as u32);
                    let angles = self.config.rope.angles(&positions, |_| length, &self.device)?;
                    chunk.set_angles(slice, &angles)?;
                    angles
                }
            };
            if chunk.put_joint(slice, &qkv, &angles)? {
                return Ok(());
            }
        }
        let turns = self.config.rope.turns(&chunk.positions(&slice.rows), |_| chunk.prompt() as u32);
        let qkv = self.begin(layer, &x, &turns.table(&self.device)?)?;
        chunk.put(slice, Some(qkv))
    }

    /// [`end`](Self::end) in the residual stream's own place; false, and nothing is done, where weights or device are not
    /// made for it.
    fn end_in_place(&self, _layer: &Layer, _x: &Tensor, _attended: &Tensor) -> Result<bool> {
        #[cfg(feature = "cuda")]
        return crate::joint::end(self, _layer, _x, _attended);
        #[cfg(not(feature = "cuda"))]
        Ok(false)
    }

    /// Queries `[T, q_heads, head_dim]`, keys and values `[T, kv_heads, head_dim]`; f32, contiguous.
    fn qkv(&self, layer: &Layer, normed: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let normed = normed.to_dtype(self.activation)?;
        let config = &self.config;
        let heads = [config.q_heads, config.kv_heads, config.kv_heads];
        let rows = normed.dim(0)?;
        let shaped = |x: &Tensor, heads: usize| {
            // One token's slice of a joint projection is contiguous already: decoding copies nothing here.
            x.contiguous()?.reshape((rows, heads, config.head_dim))
        };
        if let [joint] = &layer.qkv[..] {
            let x = self.project(joint, &normed)?;
            let (q, kv) = (heads[0] * config.head_dim, heads[1] * config.head_dim);
            let part = |start, width, heads| shaped(&x.i((.., start..start + width))?, heads);
            return Ok((part(0, q, heads[0])?, part(q, kv, heads[1])?, part(q + kv, kv, heads[2])?));
        }
        let part = |i: usize| shaped(&self.project(&layer.qkv[i], &normed)?, heads[i]);
        Ok((part(0)?, part(1)?, part(2)?))
    }

    /// Turns `x` `[T, heads, head_dim]` by its tokens' positions.
    fn rotate(&self, x: &Tensor, table: &RopeTable) -> Result<Tensor> {
        rope_thd(&x.unsqueeze(0)?, &table.cos, &table.sin)?.squeeze(0)
    }

    fn normed(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let eps = self.config.rms_norm_eps as f32;
        if self.device.is_cpu() { norm::rms_norm(x, weight, eps) } else { candle_nn::ops::rms_norm(x, weight, eps) }
    }

    /// A projection whose output goes back to f32.
    fn project(&self, linear: &Linear, x: &Tensor) -> Result<Tensor> {
        linear.forward(x)?.to_dtype(DType::F32)
    }
}

impl Layer {
    fn load(weights: &dyn Weights, index: usize) -> std::result::Result<Self, ModelError> {
        let one = |role| {
            let mut linears = weights.projections(&[role], index)?;
            Ok::<Linear, ModelError>(linears.remove(0))
        };
        Ok(Self {
            attention_norm: weights.norm(Role::AttentionNorm, index)?,
            qkv: weights.projections(&[Role::Query, Role::Key, Role::Value], index)?,
            output: one(Role::Output)?,
            feed_forward_norm: weights.norm(Role::FeedForwardNorm, index)?,
            gate_up: weights.projections(&[Role::Gate, Role::Up], index)?,
            down: one(Role::Down)?,
        })
    }
}
