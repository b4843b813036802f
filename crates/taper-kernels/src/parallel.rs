//! Work shared out among the threads of the pool that the caller runs in.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs `unit(scratch, i)` once for each `i` in `0..units`, in order of `i` as threads become free.
///
/// Every thread makes its scratch once. Results must not depend on which thread runs what.
pub fn for_each<S>(units: usize, scratch: impl Fn() -> S + Sync, unit: impl Fn(&mut S, usize) + Sync) {
    if units <= 1 || rayon::current_num_threads() == 1 {
        if units > 0 {
            let mut own = scratch();
            (0..units).for_each(|i| unit(&mut own, i));
        }
        return;
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut own = None;
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= units {
                break;
            }
            unit(own.get_or_insert_with(&scratch), i);
        }
    };
    // A helper that comes late finds nothing left: no thread waits for another to wake up.
    rayon::scope(|scope| {
        for _ in 1..rayon::current_num_threads().min(units) {
            scope.spawn(|_| work());
        }
        work();
    });
}

/// A buffer whose disjoint parts several threads write.
#[derive(Clone, Copy)]
pub struct SharedMut<T>(*mut T, usize);

// SAFETY: the only access is `slice`, whose callers promise disjoint ranges.
unsafe impl<T: Send> Send for SharedMut<T> {}
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T> SharedMut<T> {
    /// Borrows a buffer for the time of one parallel loop.
    pub fn new(buffer: &mut [T]) -> Self {
        Self(buffer.as_mut_ptr(), buffer.len())
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// The buffer outlives the result and no two threads hold overlapping ranges.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice<'a>(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start + len <= self.1, "range {start}..{} of {}", start + len, self.1);
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
    /// Where element `start` lies; what is written through it must not overlap another thread's.
    pub fn pointer(&self, start: usize) -> *mut T {
        assert!(start < self.1, "element {start} of {}", self.1);
        self.0.wrapping_add(start)
    }
}
