//! Work shared out among the threads of the pool that the caller runs in.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::Range;
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
    match PLACE.take() {
        Some(place) => {
            // SAFETY: `awake`, which this thread runs in or helps, keeps the team.
            match place {
                Place::Leading(team) => unsafe { &*team }.share(&work),
                Place::Working(team) => unsafe { &*team }.share_within(&work),
            }
            PLACE.set(Some(place));
        }
        None => rayon::scope(|scope| {
            for _ in 1..rayon::current_num_threads().min(units) {
                scope.spawn(|_| work());
            }
            work();
        }),
    }
}

/// What `unit(i)` gives for each `i` in `0..units`, in order of `i`; shared out as in [`for_each`].
pub(crate) fn map<T: Send>(units: usize, unit: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let mut all: Vec<Option<T>> = (0..units).map(|_| None).collect();
    let shared = SharedMut::new(&mut all);
    for_each(
        units,
        || (),
        |(), i| {
            let one = unit(i);
            // SAFETY: one element each.
            unsafe { shared.slice(i, 1)[0] = Some(one) };
        },
    );
    all.into_iter().map(|one| one.expect("every unit ran")).collect()
}

/// Runs `unit(rows, columns)` for blocks of at most so many rows and columns of a grid; each pair is (all, of a block).
/// Blocks that follow one another share their rows.
pub(crate) fn for_each_block(
    (rows, block_rows): (usize, usize),
    (columns, block_columns): (usize, usize),
    unit: impl Fn(Range<usize>, Range<usize>) + Sync,
) {
    let across = columns.div_ceil(block_columns);
    let block = |i: usize, size: usize, all: usize| i * size..((i + 1) * size).min(all);
    for_each(
        rows.div_ceil(block_rows) * across,
        || (),
        |(), i| unit(block(i / across, block_rows, rows), block(i % across, block_columns, columns)),
    );
}

thread_local! {
    /// What this thread is to a team, unless it is at work on the innermost loop.
    static PLACE: Cell<Option<Place>> = const { Cell::new(None) };
}

/// What a thread is to a team.
#[derive(Clone, Copy)]
enum Place {
    /// It runs the step.
    Leading(*const Team),
    /// It runs a unit of one of the step's loops.
    Working(*const Team),
}

/// Runs `step` in the pool with the pool's other threads awake: until it returns they look for work, so that loops of a
/// few microseconds are shared out too. A thread that has to be woken comes 50 µs late.
///
/// A unit's own loop is shared out as well, one such at a time, among threads that have no unit left.
/// An idle thread offers its core to whoever else wants it, but does not sleep.
pub fn awake<T: Send>(step: impl FnOnce() -> T + Send) -> T {
    let team = Team::default();
    rayon::scope(|scope| {
        for _ in 1..rayon::current_num_threads() {
            scope.spawn(|_| team.watch());
        }
        let before = PLACE.replace(Some(Place::Leading(&raw const team)));
        // Also when the step panics.
        let _end = Defer(|| {
            PLACE.set(before);
            team.ended.store(true, Release);
        });
        step()
    })
}

/// What a leader and its helpers share.
#[derive(Default)]
struct Team {
    /// The step's loop at hand.
    loops: Slot,
    /// The loop at hand of one of its units.
    within: Slot,
    /// Whether `within` is in use.
    taken: AtomicBool,
    ended: AtomicBool,
}

/// Work that any number of threads may join.
struct Job<'a>(&'a (dyn Fn() + Sync));

/// Looks before a waiting thread offers its core.
const IDLE_LOOKS: u32 = 2000;
/// Every so many looks one is for the pool's own work.
const POOL_LOOKS: u32 = 16;

impl Team {
    /// Shares out a loop of the step. While it waits for the last units, it helps with their own loops; never with the
    /// pool's work, among which are helpers' lives, which end with the step alone.
    fn share(&self, work: &(dyn Fn() + Sync)) {
        self.loops.share(&|| self.unit(work), || self.within.join());
    }

    /// Shares out a loop of a unit, unless another unit's is at hand.
    fn share_within(&self, work: &(dyn Fn() + Sync)) {
        if self.taken.swap(true, SeqCst) {
            return self.unit(work);
        }
        let _free = Defer(|| self.taken.store(false, SeqCst));
        self.within.share(&|| self.unit(work), || false);
    }

    /// Runs units, whose own loops are then shared out within the team.
    fn unit(&self, work: &(dyn Fn() + Sync)) {
        let before = PLACE.replace(Some(Place::Working(self)));
        // Also when one panics: the team does not outlive its step.
        let _back = Defer(|| PLACE.set(before));
        work();
    }

    /// A helper's life: joins the work at hand, else the pool's.
    fn watch(&self) {
        let mut looks = 0;
        while !self.ended.load(Acquire) {
            // A loop that has no unit left is joined in vain until its last unit is done.
            let joined = [self.loops.join(), self.within.join()];
            if joined.contains(&true) || looks % POOL_LOOKS == 0 && rayon::yield_now() == Some(rayon::Yield::Executed) {
                looks = 0;
            } else {
                pause(&mut looks);
            }
        }
    }
}

/// A place for one job at a time.
#[derive(Default)]
struct Slot {
    /// The work at hand, or null.
    job: AtomicPtr<Job<'static>>,
    /// Helpers that may be at it.
    helpers: AtomicUsize,
    /// Whether some work panicked on a helper.
    panicked: AtomicBool,
}

impl Slot {
    /// Does the work together with the helpers that come; returns when all are done, and panics if some work did on any of
    /// them. While it waits it calls `meanwhile`, which says whether it did anything.
    fn share(&self, work: &(dyn Fn() + Sync), meanwhile: impl Fn() -> bool) {
        let job = Job(work);
        let close = |meanwhile: &dyn Fn() -> bool| {
            self.job.store(std::ptr::null_mut(), SeqCst);
            let mut looks = 0;
            while self.helpers.load(SeqCst) > 0 {
                if !meanwhile() {
                    pause(&mut looks);
                }
            }
        };
        // Closed before `job` ends, also when some work panics.
        let _closed = Defer(|| close(&|| false));
        self.panicked.store(false, SeqCst);
        self.job.store((&raw const job).cast::<Job<'static>>().cast_mut(), SeqCst);
        work();
        close(&meanwhile);
        // A helper's own panic is known to the pool alone, until the whole step has ended.
        assert!(!self.panicked.load(SeqCst), "a unit of a loop panicked on another thread");
    }

    /// Helps with the work at hand; whether there was any.
    fn join(&self) -> bool {
        if self.job.load(Relaxed).is_null() {
            return false;
        }
        self.helpers.fetch_add(1, SeqCst);
        let _leave = Defer(|| {
            if std::thread::panicking() {
                self.panicked.store(true, SeqCst);
            }
            self.helpers.fetch_sub(1, SeqCst);
        });
        let job = self.job.load(SeqCst);
        if job.is_null() {
            return false;
        }
        // SAFETY: a job seen after the helper was counted stays until the helper has left: in the one order of these
        // operations, the leader's null comes after the load here, so its look at the count sees this helper.
        unsafe { ((*job).0)() };
        true
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

/// Buffers of so many elements that `write` writes, every one: nobody clears them first.
///
/// # Safety
/// It does.
pub(crate) unsafe fn written<T, const N: usize>(
    lengths: [usize; N],
    write: impl FnOnce([SharedMut<MaybeUninit<T>>; N]),
) -> [Vec<T>; N] {
    let mut all = lengths.map(Vec::with_capacity);
    let mut places = all.iter_mut().zip(lengths).map(|(buffer, len)| {
        if cfg!(test) {
            // What stays unwritten is told: of floats these bytes are NaN.
            // SAFETY: any byte may stand where nothing does yet.
            unsafe { std::ptr::write_bytes::<T>(buffer.as_mut_ptr(), 0xFF, len) };
        }
        SharedMut::new(&mut buffer.spare_capacity_mut()[..len])
    });
    write(std::array::from_fn(|_| places.next().expect("one for each buffer")));
    for (buffer, len) in all.iter_mut().zip(lengths) {
        // SAFETY: there is room for as many, and the caller says that they are there.
        unsafe { buffer.set_len(len) };
    }
    all
}

/// Numbers that one thread writes at a time: fewer are not worth another thread.
const ROW_SPAN: usize = 16 << 10;

/// Buffers of rows of so many numbers each, of which `write` writes each row's, every one; rows are shared out.
///
/// # Safety
/// It does.
pub(crate) unsafe fn rows<T: Send, const N: usize>(
    rows: usize,
    widths: [usize; N],
    write: impl Fn(usize, [&mut [MaybeUninit<T>]; N]) + Sync,
) -> [Vec<T>; N] {
    let span = (ROW_SPAN / widths.iter().sum::<usize>().max(1)).max(1);
    let all = |out: [SharedMut<MaybeUninit<T>>; N]| {
        for_each_block((rows, span), (1, 1), |rows, _| {
            for row in rows {
                // SAFETY: each row belongs to one span.
                write(row, std::array::from_fn(|i| unsafe { out[i].slice(row * widths[i], widths[i]) }));
            }
        });
    };
    // SAFETY: the caller's.
    unsafe { written(widths.map(|width| rows * width), all) }
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
    fn what_stays_unwritten_is_told() {
        // SAFETY: numbers of any bytes.
        let [out] = unsafe { rows::<f32, 1>(3, [2], |row, [to]| _ = to[0].write(row as f32)) };
        assert!(out.iter().enumerate().all(|(i, x)| if i % 2 == 0 { *x == (i / 2) as f32 } else { x.is_nan() }), "{out:?}");
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
    fn loops_within_uneven_units_end_whoever_helps() {
        for threads in [2, 3, 8] {
            in_pool(threads, || {
                for round in 0..300 {
                    let total = AtomicUsize::new(0);
                    awake(|| {
                        for units in [2, threads, 3 * threads] {
                            for_each(
                                units,
                                || (),
                                |(), i| {
                                    // One unit outlasts the others, so that the rest of the team waits for it.
                                    for _ in 0..if i == round % units { 40 } else { 1 } {
                                        total.fetch_add(sum(9), Relaxed);
                                    }
                                    for_each(4, || (), |(), _| _ = total.fetch_add(sum(3), Relaxed));
                                },
                            );
                        }
                    });
                    let units = 2 + 4 * threads;
                    assert_eq!(total.into_inner(), 45 * (units + 3 * 39) + 4 * 6 * units);
                }
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
    fn a_panic_on_another_thread_ends_the_step_at_the_loop_it_was_in() {
        in_pool(2, || {
            for within in [false, true] {
                let (came, after) = (AtomicBool::new(false), AtomicBool::new(false));
                let leader = std::thread::current().id();
                let bad = || {
                    let unit = |(): &mut (), _| {
                        if std::thread::current().id() != leader {
                            came.store(true, SeqCst);
                            panic!("on a helper");
                        }
                        // The leader stays in its unit until the other thread has come.
                        while !came.load(SeqCst) {
                            std::thread::yield_now();
                        }
                    };
                    for_each(2, || (), unit);
                };
                let step = || {
                    awake(|| {
                        // One unit has the leader alone, so that its own loop is shared out.
                        if within {
                            for_each(1, || (), |(), _| bad())
                        } else {
                            bad()
                        }
                        after.store(true, SeqCst);
                    });
                };
                assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(step)).is_err());
                assert!(!after.load(SeqCst), "the step went on behind the loop, within: {within}");
                assert_eq!(awake(|| sum(100)), 5050);
            }
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
