//! Pools whose tail lies elsewhere: one range of addresses all the same, so that no operation sees where memory ends.
//!
//! On the CPU it lies in a file. The system writes the file's pages back when it wants their memory, and reads them again when
//! they are read: a decode method that reads few rows has few pages brought back. On Linux alone. On a CUDA device it lies in
//! pinned host memory ([`HostTail`]), and rows come over the bus as they are read.

use crate::kv::{KvElement, with_kv_element};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

#[cfg(feature = "cuda")]
pub use crate::cuda::HostTail;

/// The part of a CUDA device's pool that the host's memory holds: in a build without the feature there is none.
#[cfg(not(feature = "cuda"))]
#[derive(Debug)]
pub enum HostTail {}

#[cfg(not(feature = "cuda"))]
impl HostTail {
    /// A pool with such a tail.
    ///
    /// # Errors
    /// Always.
    pub fn zeros(
        _: (usize, usize, usize, usize),
        _: candle_core::DType,
        _: usize,
        device: &candle_core::Device,
    ) -> Result<(Tensor, Self)> {
        bail!("a pool on {device:?} with a part in pinned host memory, in a build without the feature `cuda`")
    }

    /// Bytes of the host's memory that it holds.
    pub fn host_bytes(&self) -> usize {
        match *self {}
    }
}

/// The part of a pool that a file holds. It is let go, and what it held forgotten, when this is dropped.
#[derive(Debug)]
pub struct FileTail {
    pool: Tensor,
    /// Its first element of the pool.
    first: usize,
    file: Arc<File>,
    offset: u64,
}

impl FileTail {
    /// Lays all but the first `memory` blocks of a pool `[blocks, …]` of zeros (f32, f16 or bf16, in host memory) over a
    /// file, from `offset` on, where [`file_bytes`] of zeros are [reserved](reserve). Parts of pages stay in memory.
    ///
    /// # Errors
    /// The system's, a pool of another type or of fewer blocks, or a file that ends before the tail does.
    pub fn new(pool: &Tensor, memory: usize, file: Arc<File>, offset: u64) -> Result<Self> {
        let (blocks, block) = (pool.dim(0)?, pool.elem_count() / pool.dim(0)?.max(1));
        let (first, length) = (memory * block, file.metadata()?.len());
        // Beyond its end there would be no memory at all.
        let room = length.checked_sub(offset).is_some_and(|room| {
            let tail = blocks.saturating_sub(memory) * block * pool.dtype().size_in_bytes();
            file_bytes(tail) <= room
        });
        if memory > blocks || !room {
            bail!("offload: {memory} of {blocks} blocks in memory, a file of {length} bytes from {offset} on");
        }
        let tail = std::mem::ManuallyDrop::new(Self { pool: pool.clone(), first, file, offset });
        // If it fails nobody knows what is mapped there, and the memory must not be used again: it is kept for good.
        tail.act(Act::Map)?;
        Ok(std::mem::ManuallyDrop::into_inner(tail))
    }

    /// Writes what the tail holds to the file and gives its memory back, as the system does by itself for want of memory.
    ///
    /// # Errors
    /// The system's.
    pub fn page_out(&self) -> Result<()> {
        self.act(Act::PageOut)
    }

    fn act(&self, act: Act) -> Result<()> {
        let Self { first, file, offset, .. } = self;
        // The operation has the pool to itself: nobody reads the range while what is behind it changes.
        self.pool.inplace_op1(&OnTail { first: *first, file, offset: *offset, act })
    }
}

impl Drop for FileTail {
    fn drop(&mut self) {
        // Whoever frees the pool, or still has it, must find plain memory.
        if self.act(Act::Unmap).is_err() {
            std::mem::forget(self.pool.clone());
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Act {
    Map,
    Unmap,
    PageOut,
}

struct OnTail<'a> {
    first: usize,
    file: &'a File,
    offset: u64,
    act: Act,
}

impl InplaceOp1 for OnTail<'_> {
    fn name(&self) -> &'static str {
        "kv-offload"
    }

    fn cpu_fwd(&self, pool: &mut CpuStorage, layout: &Layout) -> Result<()> {
        if layout.start_offset() != 0 || !layout.is_contiguous() {
            bail!("offload: a pool that is part of another one");
        }
        with_kv_element!(pool.dtype(), T => {
            let tail = &mut T::slice_mut(pool).expect("dtype matched")[self.first..];
            let Range { start, end } = tail.as_mut_ptr_range();
            self.on_pages(start.cast(), end.cast()).map_err(candle_core::Error::wrap)
        })
    }
}

/// Bytes of a file that so many bytes of a pool's tail take.
pub fn file_bytes(tail: usize) -> u64 {
    tail.next_multiple_of(page_bytes()) as u64
}

/// Reserves room for the first bytes of an empty file, which are zeros. A file system that has less is asked for none.
///
/// # Errors
/// The system's, such as a full disk.
#[cfg(target_os = "linux")]
pub fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the descriptor is open, and the structure is only read once the call has filled it in.
    let free = match unsafe { libc::fstatvfs(file.as_raw_fd(), stat.as_mut_ptr()) } {
        0 => unsafe { stat.assume_init() },
        _ => return Err(io::Error::last_os_error()),
    };
    if free.f_bavail.saturating_mul(free.f_frsize) < bytes {
        return Err(io::Error::from_raw_os_error(libc::ENOSPC));
    }
    // SAFETY: the descriptor is open; no memory of ours is touched.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

#[cfg(target_os = "linux")]
fn page_bytes() -> usize {
    // SAFETY: asks for a constant.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

#[cfg(target_os = "linux")]
impl OnTail<'_> {
    /// Acts on the whole pages of a range that the caller has to itself.
    fn on_pages(&self, start: *mut u8, end: *mut u8) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        let page = page_bytes();
        let skipped = start.align_offset(page);
        let bytes = (end as usize - start as usize).saturating_sub(skipped) / page * page;
        if bytes == 0 {
            return Ok(());
        }
        let at: *mut libc::c_void = start.wrapping_add(skipped).cast();
        let descriptor = self.file.as_raw_fd();
        let done = |result: libc::c_int| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
        let map = |flags: libc::c_int, descriptor: libc::c_int, offset: u64| {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: whole pages of numbers of which any bits are valid, borrowed exclusively, mapped over in place.
            let mapped =
                unsafe { libc::mmap(at, bytes, rights, flags | libc::MAP_FIXED, descriptor, offset as libc::off_t) };
            if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
        };
        match self.act {
            Act::Map => {
                map(libc::MAP_SHARED, descriptor, self.offset)?;
                // Single rows are read at random places: what lies around them is not wanted.
                // SAFETY: advice on the pages just mapped, which leaves what they hold.
                done(unsafe { libc::madvise(at, bytes, libc::MADV_RANDOM) })
            }
            Act::Unmap => map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0),
            Act::PageOut => {
                // SAFETY: the pages are mapped from the file and shared, so that they keep what they hold when they are
                // dropped once it is written.
                done(unsafe { libc::msync(at, bytes, libc::MS_SYNC) })?;
                done(unsafe { libc::madvise(at, bytes, libc::MADV_DONTNEED) })?;
                let (offset, bytes) = (self.offset as libc::off_t, bytes as libc::off_t);
                // SAFETY: the descriptor is open.
                match unsafe { libc::posix_fadvise(descriptor, offset, bytes, libc::POSIX_FADV_DONTNEED) } {
                    0 => Ok(()),
                    code => Err(io::Error::from_raw_os_error(code)),
                }
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
pub fn reserve(_: &File, _: u64) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "a KV cache in a file needs Linux"))
}

#[cfg(not(target_os = "linux"))]
fn page_bytes() -> usize {
    4096
}

#[cfg(not(target_os = "linux"))]
impl OnTail<'_> {
    fn on_pages(&self, _: *mut u8, _: *mut u8) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "a KV cache in a file needs Linux"))
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::kv;
    use candle_core::{DType, Device};
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_pools_tail_lies_in_the_file_and_comes_back_from_it() {
        let (blocks, memory) = (40, 3);
        let dims = (blocks, 2, kv::BLOCK_TOKENS, 24);
        let tail = (blocks - memory) * 2 * kv::BLOCK_TOKENS * 24 * 4;
        let file = Arc::new(tempfile::tempfile().unwrap());
        let offset = file_bytes(1);
        reserve(&file, offset + file_bytes(tail)).unwrap();
        let pool = kv::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        let held = FileTail::new(&pool, memory, Arc::clone(&file), offset).unwrap();

        let slots: Vec<u32> = (0..blocks * kv::BLOCK_TOKENS).map(|slot| slot as u32).rev().collect();
        let rows = Tensor::arange(1f32, (slots.len() * 48 + 1) as f32, &Device::Cpu).unwrap();
        kv::append(&pool, &rows.reshape((slots.len(), 2, 24)).unwrap(), &slots).unwrap();
        let read = || pool.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let expected = read();
        assert!(expected.iter().all(|x| *x != 0.0), "every row is written");
        held.page_out().unwrap();
        // All of the tail but the parts of pages at its ends.
        let mut bytes = vec![0; tail - 2 * page_bytes()];
        file.read_exact_at(&mut bytes, offset + page_bytes() as u64).unwrap();
        let in_file: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert!(expected.windows(in_file.len()).any(|part| part == in_file), "the file holds the tail");
        assert_eq!(read(), expected, "what was paged out comes back");

        drop(held);
        let plain = read();
        let first = memory * 2 * kv::BLOCK_TOKENS * 24;
        assert_eq!(plain[..first], expected[..first], "memory keeps what it has");
        assert!(plain[first + 1024..plain.len() - 1024].iter().all(|x| *x == 0.0), "the file is let go");
    }

    #[test]
    fn a_file_system_is_not_asked_for_more_than_it_has() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(reserve(&file, 1 << 60).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(file.metadata().unwrap().len(), 0);
    }
}
