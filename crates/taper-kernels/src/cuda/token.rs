//! The choice of tokens, and their way to host memory: see [`crate::token`].

use super::error::Result;
use super::ffi::{TaperTokenParams, TaperTokenRow, taper_tokens};
use super::op::Op;
use crate::token::Draw;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, PinnedHostSlice, result as driver};
use candle_core::{DType, Tensor};
use std::cell::RefCell;

/// Tokens of rows of logits, by draws that the caller has checked.
///
/// # Errors
/// Another shape or dtype.
pub(crate) fn tokens(logits: &Tensor, draws: &[Draw]) -> Result<Tensor> {
    let op = Op::new("tokens", "logits", logits)?;
    let (rows, vocab) = logits.dims2()?;
    let how = match draws.iter().all(|draw| draw.temperature == 0.0) {
        true => None,
        false => Some(op.upload(&draws.iter().flat_map(words).collect::<Vec<u32>>(), [rows, WORDS])?),
    };
    let out = op.empty(rows, DType::U32)?;
    let p = TaperTokenParams {
        logits: op.at("logits", logits, DType::F32, [rows, vocab])?,
        how: op.maybe::<TaperTokenRow>("draws", how.as_ref(), DType::U32, [rows, WORDS])?,
        tokens: op.at("tokens", &out, DType::U32, [rows])?,
        rows: op.int("logits", rows)?,
        vocab: op.int("logits", vocab)?,
        overlap: 1,
        reserved: 0,
    };
    // SAFETY: every address was checked against the shapes given beside it, and draws are within their ranges.
    op.launched(unsafe { taper_tokens(&p, op.stream()) })?;
    Ok(out)
}

/// Words of the interface's structure.
const WORDS: usize = size_of::<TaperTokenRow>() / 4;

fn words(draw: &Draw) -> [u32; WORDS] {
    let Draw { temperature, top_k, top_p, min_p, uniform } = *draw;
    let uniform = uniform.to_bits();
    // What keeps more than there can be keeps all.
    let top_k = i32::try_from(top_k).unwrap_or(0) as u32;
    [temperature.to_bits(), top_p.to_bits(), min_p.to_bits(), top_k, uniform as u32, (uniform >> 32) as u32]
}

/// Most tokens that come at a time.
const COMING: usize = 1024;

thread_local! {
    /// Pinned memory that waits for the next tokens. To make some takes longer than a step may.
    static FREE: RefCell<Vec<PinnedHostSlice<u32>>> = RefCell::default();
}

/// Tokens on their way to host memory, which what is queued later does not hold up.
#[derive(Debug)]
pub(crate) struct Coming {
    /// None once they are there.
    memory: Option<PinnedHostSlice<u32>>,
    count: usize,
    /// Comes behind the copy.
    event: CudaEvent,
}

impl Coming {
    /// Queues the copy of so many tokens; none of more than come at a time.
    pub(crate) fn new(tokens: &Tensor) -> Result<Option<Self>> {
        let op = Op::new("tokens", "tokens", tokens)?;
        let count = tokens.elem_count();
        if count > COMING {
            return Ok(None);
        }
        let at = op.at::<u32>("tokens", tokens, DType::U32, [count])?;
        let stream = op.cuda_stream();
        let mut memory = match FREE.with_borrow_mut(Vec::pop) {
            Some(memory) => memory,
            // SAFETY: it is written before it is read.
            None => unsafe { stream.context().alloc_pinned_with_flags(COMING, 0) }.map_err(candle_core::Error::wrap)?,
        };
        let words = &mut memory.as_mut_slice().map_err(candle_core::Error::wrap)?[..count];
        // SAFETY: there are so many words at the address, and the memory is let go of once the event has come.
        let copied = unsafe { driver::memcpy_dtoh_async(words, at as u64, stream.cu_stream()) };
        let event = copied.and_then(|()| stream.record_event(None)).map_err(candle_core::Error::wrap)?;
        Ok(Some(Self { memory: Some(memory), count, event }))
    }

    /// Waits for them.
    pub(crate) fn wait(mut self) -> Result<Vec<u32>> {
        self.event.synchronize().map_err(candle_core::Error::wrap)?;
        let Some(memory) = self.memory.take() else { return Ok(Vec::new()) };
        let words = memory.as_slice().map_err(candle_core::Error::wrap)?[..self.count].to_vec();
        FREE.with_borrow_mut(|free| free.push(memory));
        Ok(words)
    }
}

impl Drop for Coming {
    /// Nobody waits for them: the memory is free once they are there.
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take()
            && self.event.synchronize().is_ok()
        {
            FREE.with_borrow_mut(|free| free.push(memory));
        }
    }
}
