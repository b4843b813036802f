//! The program's allocator.

use mimalloc::MiMalloc;
use std::alloc::{GlobalAlloc, Layout};

/// Bytes from which zeros are the system's.
const LARGE: usize = 2 << 20;
/// What the beginning of any mapping is a multiple of, wherever pages are larger too.
const PAGE: usize = 4096;

/// mimalloc: a layer's scores are megabytes that come and go with every token, which the system's allocator would give back and
/// clear anew each time.
///
/// But large zeros are mapped, and each page cleared when it is first touched. Of pages that it has had before, mimalloc clears
/// every byte at once: of an index of all KV memory that is half a second for everybody, when the first request asks for it.
/// So does the C library where it takes them from memory that it has, and Rust of what it aligns: pages of 2 MiB, asked for
/// behind that, do not come, and weights are read at half the rate.
pub(crate) struct Allocator;

/// Whether the system has what lies there, with this layout.
fn is_systems(p: *mut u8, layout: Layout) -> bool {
    // SAFETY: whatever the pointer, it is looked for in mimalloc's own map.
    layout.size() >= LARGE && !unsafe { libmimalloc_sys::mi_is_in_heap_region(p.cast()) }
}

/// Zeros of the system's; null where it has none.
fn map(size: usize) -> *mut u8 {
    // SAFETY: a mapping of its own, wherever there is room.
    let p = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANON,
            -1,
            0,
        )
    };
    if p == libc::MAP_FAILED { std::ptr::null_mut() } else { p.cast() }
}

// SAFETY: each piece of memory goes back to who gave it out, since a piece of the system's keeps its size.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGE && layout.align() <= PAGE {
            return map(layout.size());
        }
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        if is_systems(p, layout) {
            // SAFETY: a mapping of this size.
            unsafe { libc::munmap(p.cast(), layout.size()) };
            return;
        }
        unsafe { MiMalloc.dealloc(p, layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !is_systems(p, layout) {
            return unsafe { MiMalloc.realloc(p, layout, size) };
        }
        unsafe {
            let other = MiMalloc.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !other.is_null() {
                std::ptr::copy_nonoverlapping(p, other, size.min(layout.size()));
                self.dealloc(p, layout);
            }
            other
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_keeps_what_it_holds_whoever_gave_it_out() {
        for size in [1, LARGE / 8 - 1, LARGE / 8, LARGE / 8 + 1, LARGE] {
            for to in [1, LARGE / 8 - 1, LARGE / 8, LARGE / 4, 2 * LARGE] {
                let mut zeros = vec![0u64; size];
                assert!(zeros.iter().all(|&x| x == 0));
                zeros.iter_mut().zip(0..).for_each(|(x, i)| *x = i);
                zeros.resize(to, 7);
                zeros.shrink_to_fit();
                let kept = size.min(to);
                assert!(zeros[..kept].iter().copied().eq(0..kept as u64) && zeros[kept..].iter().all(|&x| x == 7));
            }
        }
    }

    #[test]
    fn large_zeros_are_the_systems_and_what_is_not_zero_is_not() {
        for size in [LARGE - 1, LARGE, 9 * LARGE] {
            for align in [1, 64, PAGE, 2 * PAGE] {
                let layout = Layout::from_size_align(size, align).unwrap();
                for zeros in [true, false] {
                    // SAFETY: of this layout, and given back.
                    unsafe {
                        let p = if zeros { Allocator.alloc_zeroed(layout) } else { Allocator.alloc(layout) };
                        assert!(!p.is_null() && p.addr().is_multiple_of(align));
                        let systems = zeros && size >= LARGE && align <= PAGE;
                        assert_eq!(is_systems(p, layout), systems, "{size} {align}");
                        let mut pages = vec![0u8; size.div_ceil(PAGE)];
                        if cfg!(target_os = "linux") && systems {
                            assert_eq!(libc::mincore(p.cast(), size, pages.as_mut_ptr().cast()), 0);
                            assert!(pages.iter().all(|page| page & 1 == 0), "touched: {size} {align}");
                        }
                        Allocator.dealloc(p, layout);
                    }
                }
            }
        }
    }
}
