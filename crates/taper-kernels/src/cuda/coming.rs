//! Words on their way to host memory.

use super::error::Result;
use super::op::Op;
use super::tape;
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, DriverError, PinnedHostSlice, result as driver, sys,
};
use candle_core::{DType, Tensor};
use std::cell::RefCell;
use std::sync::Arc;

/// Words of pinned memory that are taken at least.
const LEAST: usize = 1024;

/// Pinned memory, and how many words it has.
type Memory = (usize, PinnedHostSlice<u32>);

thread_local! {
    /// Pinned memory that waits for the next words. To make some takes longer than a step may.
    static FREE: RefCell<Vec<Memory>> = RefCell::default();
    /// A stream beside the one that steps go to, for each context, which it holds. They stay until the process ends.
    static BESIDE: RefCell<Vec<(Arc<CudaContext>, sys::CUstream)>> = const { RefCell::new(Vec::new()) };
}

/// A stream for copies to host memory, which nothing on the other one waits for; what is queued there so far has ended before
/// what is queued here next.
fn beside(stream: &CudaStream) -> std::result::Result<sys::CUstream, DriverError> {
    let context = stream.context();
    let known = |all: &mut Vec<(Arc<CudaContext>, _)>| match all.iter().find(|(of, _)| Arc::ptr_eq(of, context)) {
        Some((_, beside)) => Ok(*beside),
        None => {
            let beside = driver::stream::create(driver::stream::StreamKind::NonBlocking)?;
            all.push((Arc::clone(context), beside));
            Ok(beside)
        }
    };
    let beside = BESIDE.with_borrow_mut(known)?;
    let so_far = stream.record_event(None)?;
    // SAFETY: both are there; an event that is let go of while it is waited for goes once it has come.
    let waits = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    unsafe { driver::stream::wait_event(beside, so_far.cu_event(), waits)? };
    Ok(beside)
}

/// Words on their way to host memory, which what is queued later does not hold up.
#[derive(Debug)]
pub(crate) struct Coming {
    /// What they are copied from, which is not let go of before.
    _words: Tensor,
    /// None once they are there.
    memory: Option<Memory>,
    count: usize,
    /// Comes behind the copy.
    event: CudaEvent,
}

impl Coming {
    /// Queues the copy of words, u32.
    pub(crate) fn new(words: &Tensor) -> Result<Self> {
        let op = Op::new("coming", "words", words)?;
        tape::leave()?;
        let count = words.elem_count();
        let at = op.at::<u32>("words", words, DType::U32, words.dims())?;
        let stream = op.cuda_stream();
        let free = |free: &mut Vec<Memory>| {
            free.iter().position(|(room, _)| *room >= count).map(|place| free.swap_remove(place))
        };
        let (room, mut memory) = match FREE.with_borrow_mut(free) {
            Some(memory) => memory,
            None => {
                let room = count.next_power_of_two().max(LEAST);
                // SAFETY: it is written before it is read.
                let memory = unsafe { stream.context().alloc_pinned_with_flags(room, 0) };
                (room, memory.map_err(candle_core::Error::wrap)?)
            }
        };
        let to = &mut memory.as_mut_slice().map_err(candle_core::Error::wrap)?[..count];
        let mut copy = || {
            let (beside, event) = (beside(stream)?, stream.context().new_event(None)?);
            // SAFETY: there are so many words at the address, and both are let go of once the event has come.
            unsafe {
                driver::memcpy_dtoh_async(to, at as u64, beside)?;
                let told = driver::event::record(event.cu_event(), beside);
                // Without the event nobody knows when the copy has ended.
                told.or_else(|failed| driver::stream::synchronize(beside).and(Err(failed)))?;
            }
            Ok(event)
        };
        let event = copy().map_err(|failed: DriverError| candle_core::Error::wrap(failed))?;
        Ok(Self { _words: words.clone(), memory: Some((room, memory)), count, event })
    }

    /// Waits for them.
    pub(crate) fn wait(mut self) -> Result<Vec<u32>> {
        self.event.synchronize().map_err(candle_core::Error::wrap)?;
        let Some((room, memory)) = self.memory.take() else { return Ok(Vec::new()) };
        let words = memory.as_slice().map_err(candle_core::Error::wrap)?[..self.count].to_vec();
        keep((room, memory));
        Ok(words)
    }
}

/// Has it wait for the next words, unless the thread is at its end.
fn keep(memory: Memory) {
    let _ = FREE.try_with(|free| free.borrow_mut().push(memory));
}

impl Drop for Coming {
    /// Nobody waits for them: the memory is free once they are there.
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take()
            && self.event.synchronize().is_ok()
        {
            keep(memory);
        }
    }
}
