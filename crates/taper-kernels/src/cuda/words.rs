//! Words that a step finds in their places: copied within the device, or sent with a launch instead of a copy of their own,
//! which would stand between two launches.

use super::error::{Error, Result};
use super::ffi::{self, TaperWordCopy, TaperWordRun, TaperWordsParams, taper_words};
use super::op::Op;
use bytemuck::Zeroable;
use candle_core::Tensor;
use candle_core::cuda_backend::cudarc::driver::{result as driver, sys};

/// Words on their way.
pub(super) struct Words {
    stream: sys::CUstream,
    p: TaperWordsParams,
    given: usize,
    /// The status of the first launch or copy that failed.
    failed: i32,
}

impl Words {
    pub fn new(stream: sys::CUstream) -> Self {
        Self { stream, p: TaperWordsParams::zeroed(), given: 0, failed: 0 }
    }

    /// Copies so many words, a multiple of four, from one address to another, each of which is a multiple of 16.
    ///
    /// # Safety
    /// There are so many at either, which nobody else uses before all that is queued so far and the copy have ended.
    pub unsafe fn copy(&mut self, from: *const u32, to: *mut u32, count: usize) {
        if self.p.copy_count == ffi::TAPER_WORD_COPIES {
            self.queue();
        }
        self.p.copies[self.p.copy_count as usize] = TaperWordCopy { from, to, count: count as i64 };
        self.p.copy_count += 1;
    }

    /// Copies a tensor over another of its dtype and shape, in fours of words.
    pub fn copy_tensor(&mut self, op: &Op, from: &Tensor, to: &Tensor) -> Result<()> {
        let (dtype, shape) = (from.dtype(), from.dims());
        let bytes = from.elem_count() * dtype.size_in_bytes();
        op.check(bytes.is_multiple_of(16), "from", format_args!("{bytes} bytes"), "a multiple of 16")?;
        let (from, to) = (op.at::<u32>("from", from, dtype, shape)?, op.at::<u32>("to", to, dtype, shape)?);
        // SAFETY: both were checked, and are of that size.
        unsafe { self.copy(from, to, bytes / 4) };
        Ok(())
    }

    /// Writes bytes to an address.
    ///
    /// # Safety
    /// There are so many there, which nobody else uses before all that is queued so far and this have ended.
    pub unsafe fn write(&mut self, to: u64, bytes: &[u8]) {
        let count = bytes.len() / 4;
        if !bytes.len().is_multiple_of(4) || !to.is_multiple_of(4) || count > ffi::TAPER_WORDS as usize {
            // SAFETY: the caller's promise; memory that is not pinned has been read when the call returns.
            let copied = unsafe { driver::memcpy_htod_async(to, bytes, self.stream) };
            self.note(copied.map_or_else(|failed| failed.0 as i32, |()| 0));
            return;
        }
        if self.p.run_count == ffi::TAPER_WORD_RUNS || self.given + count > ffi::TAPER_WORDS as usize {
            self.queue();
        }
        let words = bytes.chunks_exact(4).map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
        self.p.words[self.given..self.given + count].iter_mut().zip(words).for_each(|(to, word)| *to = word);
        let run = TaperWordRun { to: to as *mut u32, first: self.given as i32, count: count as i32 };
        self.p.runs[self.p.run_count as usize] = run;
        self.p.run_count += 1;
        self.given += count;
    }

    fn note(&mut self, status: i32) {
        if self.failed == 0 {
            self.failed = status;
        }
    }

    /// Queues what is left: the status of what failed, or 0.
    pub fn queue(&mut self) -> i32 {
        if self.p.copy_count + self.p.run_count > 0 {
            // SAFETY: the promises of those who said what is in it.
            let status = unsafe { taper_words(&raw const self.p, self.stream.cast()) };
            self.note(status);
            (self.p, self.given) = (TaperWordsParams::zeroed(), 0);
        }
        self.failed
    }

    /// The same as a result.
    pub fn send(mut self, op: &Op) -> Result<()> {
        match self.queue() {
            0 => Ok(()),
            status => Err(Error::Launch { op: op.name, status }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    /// Five tensors copied, where a launch takes four; then 30 runs of 1 to 88 words, 1,335 in all, where one takes 16 of 768 in
    /// all; and a run longer than any launch takes, which is a copy of its own.
    #[test]
    fn what_a_launch_has_no_room_for_comes_by_the_next() {
        let device = Device::new_cuda(0).unwrap();
        let op = Op::on("words", "device", &device).unwrap();
        let of = |first: u32, count: u32| {
            Tensor::from_vec((first..first + count).collect(), count as usize, &device).unwrap()
        };
        let zeros = |count: usize| Tensor::zeros(count, DType::U32, &device).unwrap();
        let (from, to): (Vec<_>, Vec<_>) =
            (0..5).map(|i| (of(1000 * i, 4 + 300 * i), zeros(4 + 300 * i as usize))).unzip();
        let (runs, long) = (zeros(3000), zeros(800));
        device.synchronize().unwrap();

        let mut words = Words::new(op.cuda_stream().cu_stream());
        for (from, to) in from.iter().zip(&to) {
            words.copy_tensor(&op, from, to).unwrap();
        }
        let place = |of: &Tensor, at: usize| {
            let address = op.at::<u32>("to", of, DType::U32, of.dims()).unwrap();
            address as u64 + 4 * at as u64
        };
        let mut expected = vec![0u32; 3000];
        for i in 0..30 {
            let (at, count) = (100 * i, 3 * i + 1);
            let run: Vec<u32> = (0..count).map(|j| (1000 * i + j) as u32 + 1).collect();
            expected[at..at + count].copy_from_slice(&run);
            // SAFETY: the tensor has 3,000 words, which only this test uses.
            unsafe { words.write(place(&runs, at), bytemuck::cast_slice(&run)) };
        }
        let whole: Vec<u32> = (1..=800).collect();
        // SAFETY: the tensor has 800 words, which only this test uses.
        unsafe { words.write(place(&long, 0), bytemuck::cast_slice(&whole)) };
        words.send(&op).unwrap();

        let read = |tensor: &Tensor| tensor.to_vec1::<u32>().unwrap();
        for (from, to) in from.iter().zip(&to) {
            assert_eq!(read(from), read(to));
        }
        assert_eq!(read(&runs), expected);
        assert_eq!(read(&long), whole);
    }
}
