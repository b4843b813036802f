//! Work shared out among the threads of the pool that the caller runs in.

use crossbeam_utils::CachePadded;
use std::any::Any;
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};

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
    // On a line of its own: what else helpers read here stays with them.
    let next = CachePadded::new(AtomicUsize::new(0));
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
            // Also when a unit panics.
            let _back = Defer(|| PLACE.set(Some(place)));
            // SAFETY: `awake`, which this thread runs in or helps, keeps the team.
            match place {
                Place::Leading(team) => unsafe { &*team }.share(&work),
                Place::Working(team) => unsafe { &*team }.share_within(&work),
            }
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

/// Runs `unit(rows, columns)` for blocks of a grid; each pair is (all, of a block at most). Blocks of rows are multiples of
/// `step`, of a size that leaves the busiest thread the least. Those that follow one another share their rows.
pub(crate) fn for_each_block(
    (rows, step, most_rows): (usize, usize, usize),
    (columns, block_columns): (usize, usize),
    unit: impl Fn(Range<usize>, Range<usize>) + Sync,
) {
    let across = columns.div_ceil(block_columns);
    let block_rows = fair((rows, step, most_rows), across, rayon::current_num_threads());
    let block = |i: usize, size: usize, all: usize| i * size..((i + 1) * size).min(all);
    for_each(
        rows.div_ceil(block_rows) * across,
        || (),
        |(), i| unit(block(i / across, block_rows, rows), block(i % across, block_columns, columns)),
    );
}

/// The size of blocks of rows, a multiple of `step` up to `most`, by which the busiest of the threads has the fewest, where there
/// are so many blocks `across` of each; of those by which it has as many the largest. What one block holds stays one.
fn fair((rows, step, most): (usize, usize, usize), across: usize, threads: usize) -> usize {
    if rows * across <= most {
        return most;
    }
    let busiest = |&size: &usize| {
        let (whole, rest) = (rows / size * across, rows % size);
        // Behind these rounds each thread has a block more, or none: a whole one, if there are any left, or one of the rest.
        let rounds = (whole + if rest > 0 { across } else { 0 }).div_ceil(threads) - 1;
        rounds * size + if whole > rounds * threads { size } else { rest }
    };
    (1..=most / step).rev().map(|steps| steps * step).min_by_key(busiest).unwrap_or(most)
}

thread_local! {
    /// What this thread is to a team, unless it is at work on the innermost loop.
    static PLACE: Cell<Option<Place>> = const { Cell::new(None) };
    /// Whether this thread leads a step or helps in one.
    static IN_STEP: Cell<bool> = const { Cell::new(false) };
    /// The last team that called this thread while it was in another's step; none outside of one.
    static NEXT: Cell<Option<Arc<Team>>> = const { Cell::new(None) };
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
/// Units' own loops are shared out as well, a few at once, among threads that have no unit left.
/// An idle thread offers its core to whoever else wants it, but does not sleep. A step within a step is part of it.
///
/// A step begins when all threads of the pool have come, so nothing else should keep them for long, or under a lock that
/// another of them waits for. They look for the pool's other work when they have found none of the step's for a while.
pub fn awake<T: Send>(step: impl FnOnce() -> T + Send) -> T {
    if IN_STEP.get() {
        return step();
    }
    // Whoever calls from outside waits for a thread of the pool, which leads.
    rayon::scope(|_| {
        let (leader, threads) = (rayon::current_thread_index(), rayon::current_num_threads());
        let team = Arc::new(Team::new(threads, leader));
        let helpers = Arc::clone(&team);
        // A place for each thread: with places for any, one that looks for the pool's work would take the others' within its own.
        rayon::spawn_broadcast(move |thread| {
            if Some(thread.index()) == leader {
                return;
            }
            helpers.arrived.fetch_add(1, Release);
            let mut next = Some(Arc::clone(&helpers));
            // One that is in another step stays there to its end: that one may wait for what this thread is at. It may
            // have ended already, with this thread yet to find out.
            if IN_STEP.replace(true) {
                NEXT.set(next);
                return;
            }
            while let Some(team) = next {
                team.watch(&team.joined[thread.index()]);
                next = NEXT.take();
            }
            IN_STEP.set(false);
        });
        let before = (IN_STEP.replace(true), PLACE.replace(Some(Place::Leading(Arc::as_ptr(&team)))));
        // Also when the step panics.
        let _end = Defer(|| {
            IN_STEP.set(before.0);
            PLACE.set(before.1);
            // A leader goes back to its caller: to help those who called it meanwhile is not its turn.
            NEXT.set(None);
            team.ended.store(true, Release);
        });
        // The step's jobs for the pool (candle's) come when all have their places. A thread that came to its place from
        // within such a job, where it waits for a part that another has, would not go back to it before the step's end.
        let mut looks = 0;
        while team.arrived.load(Acquire) < threads - 1 {
            // Among its own are other teams' places.
            if rayon::yield_local() != Some(rayon::Yield::Executed) {
                pause(&mut looks);
            }
        }
        step()
    })
}

/// Loops of units that are shared out at once.
const WITHIN: usize = 8;

/// What a leader and its helpers share.
struct Team {
    /// What each thread of the pool has joined, or is about to.
    joined: Box<[CachePadded<Joined>]>,
    /// The leader's place among them.
    leader: usize,
    /// The step's loop at hand, apart from what units write.
    loops: CachePadded<Slot>,
    /// Those of its units.
    within: [Slot; WITHIN],
    /// Threads that know of it.
    arrived: CachePadded<AtomicUsize>,
    ended: CachePadded<AtomicBool>,
}

/// Work that any number of threads may join, and that has nothing left for anyone once it returned to one of them.
struct Job<'a>(&'a (dyn Fn() + Sync));

/// Where some thread says which job it is at; null for none. One place and not a count: threads that come and go at once
/// would wait for one another.
type Joined = AtomicPtr<Job<'static>>;

/// Looks before a waiting thread offers its core.
const IDLE_LOOKS: u32 = 2000;
/// After so many looks in vain one is for the pool's own work.
const POOL_LOOKS: u32 = 64;

impl Team {
    fn new(threads: usize, leader: Option<usize>) -> Self {
        Self {
            joined: (0..threads).map(|_| CachePadded::default()).collect(),
            leader: leader.expect("a thread of the pool leads"),
            loops: CachePadded::default(),
            within: Default::default(),
            arrived: CachePadded::default(),
            ended: CachePadded::default(),
        }
    }

    /// Shares out a loop of the step. While it waits for the last units, it helps with their own loops; never with the
    /// pool's work.
    fn share(&self, work: &(dyn Fn() + Sync)) {
        let (own, mut turns) = (&self.joined[self.leader], [0; WITHIN]);
        self.loops.share(&self.joined, &|| self.unit(work), || join_any(&self.within, own, &mut turns));
    }

    /// Shares out a loop of a unit, unless as many others' are at hand as may be.
    fn share_within(&self, work: &(dyn Fn() + Sync)) {
        let free = |slot: &&Slot| !slot.taken.load(Relaxed) && !slot.taken.swap(true, SeqCst);
        let Some(slot) = self.within.iter().find(free) else { return self.unit(work) };
        let _free = Defer(|| slot.taken.store(false, SeqCst));
        slot.share(&self.joined, &|| self.unit(work), || false);
    }

    /// Runs units, whose own loops are then shared out within the team.
    fn unit(&self, work: &(dyn Fn() + Sync)) {
        let before = PLACE.replace(Some(Place::Working(self)));
        // Also when one panics: the team does not outlive its step.
        let _back = Defer(|| PLACE.set(before));
        work();
    }

    /// A helper's life: joins the work at hand, else the pool's. `own` is its place among those that joined.
    fn watch(&self, own: &Joined) {
        let (mut looks, mut turn, mut turns) = (0, 0, [0; WITHIN]);
        while !self.ended.load(Acquire) {
            let joined = self.loops.join(own, &mut turn) | join_any(&self.within, own, &mut turns);
            let pool = || looks % POOL_LOOKS == POOL_LOOKS - 1;
            if joined || pool() && rayon::yield_now() == Some(rayon::Yield::Executed) {
                looks = 0;
            } else {
                pause(&mut looks);
            }
        }
    }
}

/// Helps with the work at hand in any of the slots; whether there was any.
fn join_any(slots: &[Slot], own: &Joined, turns: &mut [usize]) -> bool {
    slots.iter().zip(turns).fold(false, |any, (slot, turn)| any | slot.join(own, turn))
}

/// A place for one job at a time.
#[derive(Default)]
struct Slot {
    /// The work at hand, or null.
    job: AtomicPtr<Job<'static>>,
    /// How many jobs there have been.
    turn: AtomicUsize,
    /// Whether a unit has the slot.
    taken: AtomicBool,
    /// What some work panicked with on a helper, the first of them.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Slot {
    /// Does the work together with the helpers that come; returns when all are done, and panics with what some work did on any
    /// of them. While it waits it calls `meanwhile`, which says whether it did anything.
    fn share(&self, joined: &[CachePadded<Joined>], work: &(dyn Fn() + Sync), mut meanwhile: impl FnMut() -> bool) {
        let job = Job(work);
        let here = (&raw const job).cast::<Job<'static>>().cast_mut();
        let close = |meanwhile: &mut dyn FnMut() -> bool| {
            if self.job.swap(std::ptr::null_mut(), SeqCst).is_null() {
                return;
            }
            let mut looks = 0;
            for joined in joined {
                while joined.load(SeqCst) == here {
                    if !meanwhile() {
                        pause(&mut looks);
                    }
                }
            }
        };
        // Closed before `job` ends, also when some work panics.
        let _closed = Defer(|| close(&mut || false));
        *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.turn.fetch_add(1, SeqCst);
        self.job.store(here, SeqCst);
        work();
        close(&mut meanwhile);
        if let Some(panic) = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            resume_unwind(panic);
        }
    }

    /// Helps with the work at hand, unless it is that of `turn`, where this thread has been; whether there was any. `own` is
    /// where this thread says what it has joined: nothing yet.
    fn join(&self, own: &Joined, turn: &mut usize) -> bool {
        // A later job's turn than the one seen here: then the thread comes back to that job in vain, once.
        let at_hand = self.turn.load(SeqCst);
        let seen = self.job.load(Relaxed);
        if at_hand == *turn || seen.is_null() {
            return false;
        }
        debug_assert!(own.load(Relaxed).is_null(), "a thread joins one job at a time");
        own.store(seen, SeqCst);
        let _leave = Defer(|| own.store(std::ptr::null_mut(), Release));
        let job = self.job.load(SeqCst);
        if job != seen {
            return false;
        }
        // SAFETY: a job that is still at hand once this thread has said that it joins it stays until the thread has left: in
        // the one order of these operations the leader's null comes after the load here, so that its look at who joined sees
        // this thread. If another job has come to the same place meanwhile, it is that one's leader who sees it.
        let work = || unsafe { ((*job).0)() };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
        *turn = at_hand;
        true
    }
}

/// Passes a moment of waiting; a longer wait offers the core to others, who may have pushed off the one waited for.
fn pause(looks: &mut u32) {
    *looks = looks.saturating_add(1);
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
            // What stays unwritten is told in this crate's own tests: of floats these bytes are NaN.
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

/// Numbers that one thread writes at a time at most.
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
    let step = span.div_ceil(4);
    let all = |out: [SharedMut<MaybeUninit<T>>; N]| {
        for_each_block((rows, step, span), (1, 1), |rows, _| {
            for row in rows {
                // SAFETY: each row belongs to one span.
                write(row, std::array::from_fn(|i| unsafe { out[i].slice(row * widths[i], widths[i]) }));
            }
        });
    };
    // SAFETY: the caller's.
    unsafe { written(widths.map(|width| rows.checked_mul(width).expect("rows that memory holds")), all) }
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
        let inside = start.checked_add(len).is_some_and(|end| end <= self.1);
        assert!(inside, "{len} elements from {start} on, of {}", self.1);
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
    use std::time::{Duration, Instant};

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
        // SAFETY: it does not, which is what is tested: any bytes are a number.
        let [out] = unsafe { rows::<f32, 1>(3, [2], |row, [to]| _ = to[0].write(row as f32)) };
        assert!(
            out.iter().enumerate().all(|(i, x)| if i % 2 == 0 { *x == (i / 2) as f32 } else { x.is_nan() }),
            "{out:?}"
        );
    }

    #[test]
    fn blocks_are_as_large_as_leaves_the_busiest_thread_the_least() {
        // (threads, rows, across, rows of a block): by blocks of eight one of eight threads would have two of the nine.
        for (threads, rows, across, size) in
            [(1, 73, 1, 8), (4, 72, 1, 6), (8, 72, 1, 2), (16, 384, 1, 8), (2, 33, 1, 8), (3, 73, 2, 8), (4, 8, 1, 8)]
        {
            assert_eq!(fair((rows, 2, 8), across, threads), size, "{threads} {rows}");
        }
        assert_eq!((fair((0, 2, 8), 1, 3), fair((9, 4, 2), 1, 3)), (8, 2));
    }

    #[test]
    fn blocks_hold_every_place_once_whatever_the_threads() {
        for threads in [1, 2, 3, 8, 16] {
            in_pool(threads, || {
                for (rows, columns) in (0..40).flat_map(|rows| [0, 1, 5].map(|columns| (rows, columns))) {
                    for (step, most) in [(1, 1), (1, 7), (2, 8), (4, 4), (7, 28)] {
                        let places: Vec<AtomicUsize> = (0..rows * columns).map(|_| AtomicUsize::new(0)).collect();
                        for_each_block((rows, step, most), (columns, 2), |of, columns_of| {
                            assert!(of.len() <= most && of.start.is_multiple_of(step), "{of:?}");
                            for place in of.flat_map(|row| columns_of.clone().map(move |column| row * columns + column))
                            {
                                places[place].fetch_add(1, Relaxed);
                            }
                        });
                        assert!(places.iter().all(|place| place.load(Relaxed) == 1), "{threads} {rows} {step} {most}");
                    }
                }
            });
        }
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

    /// Runs a loop whose units keep their threads until each has one.
    fn together(threads: usize) {
        let (came, began) = (AtomicUsize::new(0), Instant::now());
        let waits = || began.elapsed() < Duration::from_secs(20);
        let unit = |(): &mut (), _| {
            came.fetch_add(1, SeqCst);
            while came.load(SeqCst) < threads && waits() {
                std::thread::yield_now();
            }
        };
        for_each(threads, || (), unit);
        assert!(waits(), "{threads} threads did not come");
    }

    #[test]
    fn all_threads_of_the_pool_take_part() {
        for threads in [2, 5, 9] {
            in_pool(threads, || (0..20).for_each(|_| awake(|| together(threads))));
        }
    }

    /// A thread is still in the step before when it is called to the next.
    #[test]
    fn steps_close_behind_one_another_all_have_their_helpers() {
        for threads in [2, 3] {
            in_pool(threads, || (0..10_000).for_each(|_| awake(|| together(threads))));
        }
    }

    #[test]
    fn steps_at_once_in_one_pool_end() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..300 {
                        // With the pool's own work in them, parts of which wait for one another.
                        let halves = || rayon::join(|| rayon::join(|| sum(20), || sum(9)), || sum(30));
                        assert_eq!(pool.install(|| awake(halves)), ((210, 45), 465));
                    }
                });
            }
        });
    }

    #[test]
    fn a_step_that_goes_on_behind_a_panic_still_has_its_helpers() {
        in_pool(4, || {
            awake(|| {
                let bad = || for_each(8, || (), |(), i| assert_ne!(i, 0));
                assert!(catch_unwind(AssertUnwindSafe(bad)).is_err());
                assert!(PLACE.get().is_some());
            });
        });
    }

    #[test]
    fn loops_of_several_units_are_shared_out_at_once() {
        in_pool(9, || (0..20).for_each(|_| awake(|| for_each(3, || (), |(), _| together(3)))));
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
                let panic = catch_unwind(AssertUnwindSafe(step)).unwrap_err();
                assert_eq!(panic.downcast_ref(), Some(&"on a helper"));
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
                assert!(catch_unwind(step).is_err(), "unit {bad}");
                assert_eq!(awake(|| sum(100)), 5050);
            }
        });
    }
}
