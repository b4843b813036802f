//! Work shared out among the threads of the pool that the caller runs in.

use std::cell::Cell;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize};

/// Runs `unit(scratch, i)` once for each `i` in `0..units`, in order of `i` as threads become free.
///
/// Every thread makes its scratch once. Results must not depend on which thread runs what. Inside [`awake`] the threads
/// are at hand; elsewhere they have to be woken first.
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
            let i = next.fetch_add(1, Relaxed);
            if i >= units {
                break;
            }
            unit(own.get_or_insert_with(&scratch), i);
        }
    };
    // A helper that comes late finds nothing left: no thread waits for another to wake up.
    match TEAM.take() {
        Some(team) => {
            // SAFETY: `awake`, which this thread runs in, keeps the team.
            unsafe { &*team }.share(&work);
            TEAM.set(Some(team));
        }
        None => rayon::scope(|scope| {
            for _ in 1..rayon::current_num_threads().min(units) {
                scope.spawn(|_| work());
            }
            work();
        }),
    }
}

thread_local! {
    /// The team that this thread leads, unless it is at work already.
    static TEAM: Cell<Option<*const Team>> = const { Cell::new(None) };
}

/// Runs `step` in the pool with the pool's other threads awake: until it returns they look for work, so that loops of a
/// few microseconds are shared out too. A thread that has to be woken comes 50 µs late.
///
/// An idle thread offers its core to whoever else wants it, but does not sleep.
pub fn awake<T: Send>(step: impl FnOnce() -> T + Send) -> T {
    let team = Team::default();
    rayon::scope(|scope| {
        for _ in 1..rayon::current_num_threads() {
            scope.spawn(|_| team.watch());
        }
        let before = TEAM.replace(Some(&raw const team));
        // Also when the step panics.
        let _end = Defer(|| {
            TEAM.set(before);
            team.ended.store(true, Release);
        });
        step()
    })
}

/// What a leader and its helpers share.
#[derive(Default)]
struct Team {
    /// The work at hand, or null.
    job: AtomicPtr<Job<'static>>,
    /// Helpers that may be at it.
    helpers: AtomicUsize,
    ended: AtomicBool,
}

/// Work that any number of threads may join.
struct Job<'a>(&'a (dyn Fn() + Sync));

/// Looks before a waiting thread offers its core.
const IDLE_LOOKS: u32 = 2000;
/// Every so many looks one is for the pool's own work.
const POOL_LOOKS: u32 = 16;

impl Team {
    /// Does the work together with the helpers that come; returns when all are done.
    fn share(&self, work: &(dyn Fn() + Sync)) {
        let job = Job(work);
        // Closed before `job` ends, also when the work panics.
        let _close = Defer(|| {
            self.job.store(std::ptr::null_mut(), SeqCst);
            let mut looks = 0;
            // A helper may share out a unit's own loop.
            while self.helpers.load(SeqCst) > 0 {
                if rayon::yield_now() != Some(rayon::Yield::Executed) {
                    pause(&mut looks);
                }
            }
        });
        self.job.store((&raw const job).cast::<Job<'static>>().cast_mut(), SeqCst);
        work();
    }

    /// A helper's life: joins the work at hand, else the pool's.
    fn watch(&self) {
        let mut looks = 0;
        while !self.ended.load(Acquire) {
            if !self.job.load(Relaxed).is_null() {
                self.join();
                // What is left of it may share out its own loops.
                rayon::yield_now();
                looks = 0;
            } else if looks % POOL_LOOKS == 0 && rayon::yield_now() == Some(rayon::Yield::Executed) {
                looks = 0;
            } else {
                pause(&mut looks);
            }
        }
    }

    fn join(&self) {
        self.helpers.fetch_add(1, SeqCst);
        let _leave = Defer(|| _ = self.helpers.fetch_sub(1, SeqCst));
        let job = self.job.load(SeqCst);
        if !job.is_null() {
            // SAFETY: a job seen after the helper was counted stays until the helper has left: in the one order of these
            // operations, the leader's null comes after the load here, so its look at the count sees this helper.
            unsafe { ((*job).0)() };
        }
    }
}

/// Passes a moment of waiting; a longer wait offers the core to others, who may have pushed off the one waited for.
fn pause(looks: &mut u32) {
    *looks += 1;
    if *looks < IDLE_LOOKS {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

/// Runs its function at the end of the scope.
struct Defer<F: FnMut()>(F);

impl<F: FnMut()> Drop for Defer<F> {
    fn drop(&mut self) {
        (self.0)();
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn in_pool(threads: usize, run: impl FnOnce() + Send) {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run);
    }

    /// Adds up what every unit saw.
    fn sum(units: usize) -> usize {
        let total = AtomicUsize::new(0);
        for_each(units, || (), |(), i| _ = total.fetch_add(i + 1, Relaxed));
        total.into_inner()
    }

    #[test]
    fn every_unit_runs_once_awake_or_not_and_within_another() {
        for threads in [1, 2, 5] {
            in_pool(threads, || {
                let check = || {
                    for units in 0..200 {
                        assert_eq!(sum(units), units * (units + 1) / 2);
                    }
                    for_each(7, || (), |(), _| assert_eq!(sum(30), 465));
                };
                check();
                awake(check);
                awake(|| awake(check));
            });
        }
    }

    #[test]
    fn the_pools_own_work_is_done_while_awake() {
        in_pool(3, || {
            let (a, b) = awake(|| rayon::join(|| sum(50), || sum(60)));
            assert_eq!((a, b), (1275, 1830));
        });
    }

    #[test]
    fn a_panic_in_a_unit_reaches_the_caller_and_leaves_the_pool_usable() {
        in_pool(3, || {
            for bad in [0, 17, 99] {
                let step = || awake(|| for_each(100, || (), |(), i| assert_ne!(i, bad)));
                assert!(std::panic::catch_unwind(step).is_err(), "unit {bad}");
                assert_eq!(awake(|| sum(100)), 5050);
            }
        });
    }
}
