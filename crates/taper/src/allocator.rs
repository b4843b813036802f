//! The program's allocator.

use mimalloc::MiMalloc;
use std::alloc::{GlobalAlloc, Layout, System};

/// Bytes from which zeros are the system's.
const LARGE: usize = 2 << 20;

/// mimalloc: a layer's scores are megabytes that come and go with every token, which the system's allocator would give back and
/// clear anew each time.
///
/// But large zeros are the system's, which maps pages that are cleared when they are first touched. Of pages that it has had
/// before, mimalloc clears every byte at once: of an index of all KV memory that is half a second for everybody, when the
/// first request asks for it.
pub(crate) struct Allocator;

/// Whether the system has what lies there, with this layout.
fn is_systems(p: *mut u8, layout: Layout) -> bool {
    // SAFETY: whatever the pointer, it is looked for in mimalloc's own map.
    layout.size() >= LARGE && !unsafe { libmimalloc_sys::mi_is_in_heap_region(p.cast()) }
}

// SAFETY: each piece of memory goes back to who gave it out, since a piece of the system's stays large.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGE {
            return unsafe { System.alloc_zeroed(layout) };
        }
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        if is_systems(p, layout) {
            return unsafe { System.dealloc(p, layout) };
        }
        unsafe { MiMalloc.dealloc(p, layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !is_systems(p, layout) {
            return unsafe { MiMalloc.realloc(p, layout, size) };
        }
        if size >= LARGE {
            return unsafe { System.realloc(p, layout, size) };
        }
        unsafe {
            let small = MiMalloc.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !small.is_null() {
                std::ptr::copy_nonoverlapping(p, small, size);
                System.dealloc(p, layout);
            }
            small
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
            for align in [1, 64, 4096] {
                let layout = Layout::from_size_align(size, align).unwrap();
                for zeros in [true, false] {
                    // SAFETY: of this layout, and given back.
                    unsafe {
                        let p = if zeros { Allocator.alloc_zeroed(layout) } else { Allocator.alloc(layout) };
                        assert!(!p.is_null() && p.addr().is_multiple_of(align));
                        assert_eq!(is_systems(p, layout), zeros && size >= LARGE, "{size} {align}");
                        Allocator.dealloc(p, layout);
                    }
                }
            }
        }
    }
}
