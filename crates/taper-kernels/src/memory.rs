//! Memory for what is large: on pages of 2 MiB where the system has them.
//!
//! A key at a random place costs a walk through the page tables besides, and what a processor fetches ahead of a stream ends
//! with its page: on pages of 4 KiB weights come half as fast.

use bytemuck::Zeroable;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Zeros that the system hands out untouched.
pub(crate) fn zeros<T: Zeroable>(len: usize) -> Vec<T> {
    let zeros = bytemuck::zeroed_vec::<T>(len);
    prefer_large_pages(&zeros);
    zeros
}

/// Linux alone is asked. That it may not oblige is no error.
#[cfg(target_os = "linux")]
fn prefer_large_pages<T>(memory: &[T]) {
    let bytes = memory.as_ptr_range();
    let (start, end) =
        ((bytes.start as usize).next_multiple_of(LARGE_PAGE), bytes.end as usize / LARGE_PAGE * LARGE_PAGE);
    if start < end {
        // SAFETY: whole pages within the slice, whose content the advice does not change.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn prefer_large_pages<T>(_: &[T]) {}

/// Bytes of a large page.
const LARGE_PAGE: usize = 2 << 20;
/// Bytes of a chunk that several share. What nobody has of it takes no memory.
const CHUNK: usize = 16 * LARGE_PAGE;

/// A slice that is written once and kept, such as a weight: one behind the other, since many are smaller than a large page.
/// It begins with a line of the cache; copies are the same slice.
#[derive(Debug, Clone)]
pub(crate) struct Large<T> {
    chunk: Arc<Chunk>,
    /// The first line, and how many elements there are from there on.
    line: usize,
    len: usize,
    of: PhantomData<T>,
}

/// A line of the cache.
#[derive(Debug, Clone, Copy, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Lines, of which each is one slice's.
#[derive(Debug)]
struct Chunk {
    /// On a large page's boundary.
    first: *mut Line,
    /// What frees them; read and written through the pointer alone.
    _bytes: Vec<u8>,
}

// SAFETY: whoever takes some lines is the only one to write them, once, before others can see them.
unsafe impl Send for Chunk {}
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Of zeros.
    fn new(lines: usize) -> Self {
        // Bytes: of what begins with a line, Rust clears the system's zeros itself, on small pages.
        let mut all = zeros::<u8>(lines * size_of::<Line>() + LARGE_PAGE);
        let first = all.as_mut_ptr();
        let first = first.wrapping_add(first.addr().next_multiple_of(LARGE_PAGE) - first.addr());
        Self { first: first.cast(), _bytes: all }
    }
}

/// The chunk with room left, for as long as anybody has a part of it, and its first line that nobody has.
static OPEN: Mutex<(Weak<Chunk>, usize)> = Mutex::new((Weak::new(), 0));

impl<T: Zeroable + Copy> Large<T> {
    /// So many elements, which `write` gets as zeros.
    pub fn new(len: usize, write: impl FnOnce(&mut [T])) -> Self {
        const { assert!(align_of::<T>() <= align_of::<Line>()) };
        let lines = len.checked_mul(size_of::<T>()).expect("elements that memory holds").div_ceil(size_of::<Line>());
        let (chunk, line) = take(lines);
        // SAFETY: these lines are nobody else's, zeros, as are as many elements, and stay as long as the chunk.
        write(unsafe { std::slice::from_raw_parts_mut(chunk.first.add(line).cast::<T>(), len) });
        Self { chunk, line, len, of: PhantomData }
    }
}

/// So many lines of a chunk: which, and the first of them.
fn take(lines: usize) -> (Arc<Chunk>, usize) {
    const ROOM: usize = CHUNK / size_of::<Line>();
    if lines > ROOM {
        return (Arc::new(Chunk::new(lines)), 0);
    }
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let (chunk, taken) = match open.0.upgrade() {
        Some(chunk) if open.1 + lines <= ROOM => (chunk, open.1),
        _ => (Arc::new(Chunk::new(ROOM)), 0),
    };
    *open = (Arc::downgrade(&chunk), taken + lines);
    (chunk, taken)
}

impl<T> Deref for Large<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: as many elements, written before there was this, stay as long as the chunk.
        unsafe { std::slice::from_raw_parts(self.chunk.first.add(self.line).cast::<T>(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_of_any_length_are_zero() {
        for len in [0, 1, 1000, (5 << 20) + 3] {
            let zeros = super::zeros::<u16>(len);
            assert!(zeros.len() == len && zeros.iter().all(|x| *x == 0));
        }
    }

    /// Else they lie on small pages already when large ones are asked for.
    #[test]
    #[cfg(target_os = "linux")]
    fn nobody_touches_a_chunk_before_what_it_is_for() {
        let chunk = Chunk::new(CHUNK / size_of::<Line>());
        let mut pages = vec![0u8; CHUNK / 4096];
        let resident = |pages: &mut [u8]| {
            // SAFETY: a place for each of the chunk's pages, or for more where pages are larger.
            assert_eq!(unsafe { libc::mincore(chunk.first.cast(), CHUNK, pages.as_mut_ptr()) }, 0);
            pages.iter().filter(|&page| page & 1 == 1).count()
        };
        assert_eq!(resident(&mut pages.clone()), 0);
        // SAFETY: nobody else has the chunk.
        unsafe { chunk.first.cast::<u8>().add(CHUNK / 2).write(1) };
        assert!(resident(&mut pages) > 0);
    }

    #[test]
    fn large_slices_are_apart_and_keep_what_was_written() {
        let write = |i: usize| {
            // Some that share a chunk, some that begin one, one that has its own.
            let len = [0, 1, 63, 5 << 20, 20 << 20, 3 * CHUNK / 2][i % 6];
            Large::<u16>::new(len / 2, |all| {
                assert!(all.iter().all(|x| *x == 0));
                all.fill(i as u16 + 1);
            })
        };
        let check = |i: usize, large: &Large<u16>| {
            assert!(large.iter().all(|x| *x == i as u16 + 1) && large.as_ptr().addr().is_multiple_of(64), "{i}");
        };
        // Several threads take theirs at once, and what is let go takes nothing with it.
        let all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..4).map(|t| scope.spawn(move || (6 * t..6 * t + 6).map(write).collect::<Vec<_>>())).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let kept: Vec<_> = all.iter().cloned().enumerate().filter(|(i, _)| i % 2 == 0).collect();
        all.iter().enumerate().for_each(|(i, large)| check(i, large));
        drop(all);
        kept.iter().for_each(|(i, large)| check(*i, large));
    }
}
