//! The bounded queue in front of the engine's thread. A request in it is never lost: it is run, refused aloud, told of the
//! engine's end, or its client is gone.

use crate::engine::{Counts, Load, Steps};
use crate::request::SubmitError;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// So many waiting jobs are looked at when one is to start.
const LOOKS: usize = 32;

/// Waiting jobs and whether more are taken.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    limit: usize,
    /// Jobs with less of it go before those with more.
    priority: fn(&T) -> i64,
    state: Mutex<State<T>>,
    changed: Condvar,
}

/// What may start next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next<T> {
    /// This, which counts as running from now on.
    Job(T),
    /// One that there is no room for yet.
    Waits,
    /// Nothing.
    None,
}

#[derive(Debug)]
struct State<T> {
    /// By priority, then by arrival.
    waiting: VecDeque<T>,
    /// Jobs that were popped and have not ended, and how many of them wait again.
    running: usize,
    preempted: usize,
    /// Requests of which more will come: while there are any, the queue is not at its end.
    unfinished: usize,
    /// Between ends of jobs while some run, of late.
    gap_seconds: f64,
    /// When the last one ended, or the first began where none ran.
    since: Instant,
    counts: Counts,
    steps: Steps,
    free_blocks: usize,
    offloaded_blocks: usize,
    /// When the turn began that the engine is at.
    turn: Option<Instant>,
    draining: bool,
    dead: bool,
}

impl<T> State<T> {
    /// Whether anything new is taken.
    fn open(&self) -> Result<(), SubmitError> {
        match (self.draining, self.dead) {
            (true, _) => Err(SubmitError::Draining),
            (_, true) => Err(SubmitError::Dead),
            _ => Ok(()),
        }
    }

    fn take(&mut self, place: usize) -> Option<T> {
        let job = self.waiting.remove(place)?;
        if self.running == 0 {
            self.since = Instant::now();
        }
        self.running += 1;
        Some(job)
    }
}

impl<T> Queue<T> {
    pub(crate) fn new(limit: usize) -> Self {
        let (waiting, since) = (VecDeque::new(), Instant::now());
        let (counts, steps, free_blocks, offloaded_blocks, turn, draining, dead) = Default::default();
        let state = State {
            waiting,
            running: 0,
            preempted: 0,
            unfinished: 0,
            gap_seconds: 1.0,
            since,
            counts,
            steps,
            free_blocks,
            offloaded_blocks,
            turn,
            draining,
            dead,
        };
        Self { limit, priority: |_| 0, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The same, with jobs that go before others.
    pub(crate) fn by(self, priority: fn(&T) -> i64) -> Self {
        Self { priority, ..self }
    }

    // What can panic under the lock, such as `fits`, runs before the state changes, so it is sound even if poisoned.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Jobs that may wait.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Adds jobs, all of them or none. A queue that lacks room first drops the jobs that `gone` says nobody waits for.
    pub(crate) fn push(&self, jobs: Vec<T>, gone: impl Fn(&T) -> bool) -> Result<(), SubmitError> {
        let mut state = self.lock();
        state.open()?;
        if state.waiting.len() + jobs.len() > self.limit {
            state.waiting.retain(|job| !gone(job));
        }
        if state.waiting.len() + jobs.len() > self.limit {
            return Err(SubmitError::Busy {
                queued: state.waiting.len(),
                retry_seconds: state.gap_seconds.ceil().max(1.0) as u64,
            });
        }
        self.insert(state, jobs);
        Ok(())
    }

    /// From now on more of a request that is taken may come, until [`Queue::complete`].
    pub(crate) fn begin(&self) -> Result<(), SubmitError> {
        let mut state = self.lock();
        state.open()?;
        state.unfinished += 1;
        Ok(())
    }

    /// Adds jobs of a request that was taken, for whom there is always room.
    pub(crate) fn push_more(&self, jobs: Vec<T>) -> Result<(), SubmitError> {
        let state = self.lock();
        if state.dead {
            return Err(SubmitError::Dead);
        }
        self.insert(state, jobs);
        Ok(())
    }

    /// No more comes of one that [began](Self::begin).
    pub(crate) fn complete(&self) {
        self.lock().unfinished -= 1;
        self.changed.notify_all();
    }

    /// Whether nothing waits or runs, nor will.
    pub(crate) fn idle(&self) -> bool {
        let state = self.lock();
        state.dead || state.waiting.len() + state.running + state.unfinished == 0
    }

    fn insert(&self, mut state: MutexGuard<'_, State<T>>, jobs: Vec<T>) {
        for job in jobs {
            let priority = (self.priority)(&job);
            let place = state.waiting.partition_point(|waiting| (self.priority)(waiting) <= priority);
            state.waiting.insert(place, job);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The next job, waiting for one; `None` once the queue drains and is empty. The job counts as running until
    /// [`Queue::finished`].
    pub(crate) fn pop(&self) -> Option<T> {
        let mut state = self.lock();
        while state.waiting.is_empty() && !(state.draining && state.unfinished == 0) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.take(0)
    }

    /// Whether none waits to be popped.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().waiting.is_empty()
    }

    /// The jobs that are looked at when one is to start.
    pub(crate) fn first(&self) -> Vec<T>
    where
        T: Clone,
    {
        self.lock().waiting.iter().take(LOOKS).cloned().collect()
    }

    /// The first job that is not held back, if `fits` says so. Of many that are, a few are looked past.
    pub(crate) fn pop_if(&self, held: impl Fn(&T) -> bool, fits: impl FnOnce(&T) -> bool) -> Next<T> {
        let mut state = self.lock();
        let Some(place) = state.waiting.iter().take(LOOKS).position(|job| !held(job)) else { return Next::None };
        if !fits(&state.waiting[place]) {
            return Next::Waits;
        }
        state.take(place).map_or(Next::None, Next::Job)
    }

    /// Takes out the waiting jobs that `ended` picks; most often there are none.
    pub(crate) fn remove(&self, ended: impl Fn(&T) -> bool) -> Vec<T> {
        let mut state = self.lock();
        if !state.waiting.iter().any(&ended) {
            return Vec::new();
        }
        let (out, stay): (VecDeque<T>, VecDeque<T>) = state.waiting.drain(..).partition(ended);
        state.waiting = stay;
        out.into()
    }

    /// A popped job has ended.
    pub(crate) fn finished(&self) {
        let mut state = self.lock();
        state.running -= 1;
        let now = Instant::now();
        let gap = now.duration_since(state.since).as_secs_f64();
        state.gap_seconds += (gap - state.gap_seconds) / 8.0;
        state.since = now;
    }

    /// So much was done.
    pub(crate) fn count(&self, done: Counts) {
        self.lock().counts.add(done);
    }

    /// So many tokens went through a step.
    pub(crate) fn count_step(&self, tokens: usize) {
        self.lock().steps.add(tokens);
    }

    /// So many blocks of the cache are free by now, and so many of those outside its memory held.
    pub(crate) fn set_blocks(&self, free: usize, offloaded: usize) {
        let mut state = self.lock();
        (state.free_blocks, state.offloaded_blocks) = (free, offloaded);
    }

    /// So many of the popped jobs wait again.
    pub(crate) fn set_preempted(&self, jobs: usize) {
        self.lock().preempted = jobs;
    }

    /// A turn of the engine begins, or is over.
    pub(crate) fn turn(&self, begins: bool) {
        self.lock().turn = begins.then(Instant::now);
    }

    /// From now on nothing is taken; what waits is still run.
    pub(crate) fn drain(&self) {
        self.lock().draining = true;
        self.changed.notify_all();
    }

    /// Nothing runs any more, nor will what waits, which is given back.
    pub(crate) fn die(&self) -> VecDeque<T> {
        let mut state = self.lock();
        state.dead = true;
        state.turn = None;
        (state.running, state.preempted) = (0, 0);
        std::mem::take(&mut state.waiting)
    }

    /// How all of it stands; blocks as they were after the latest step.
    pub(crate) fn load(&self) -> Load {
        let state = self.lock();
        let &State { preempted, counts, steps, free_blocks, offloaded_blocks, turn, draining, dead, .. } = &*state;
        let (waiting, running) = (state.waiting.len() + preempted, state.running.saturating_sub(preempted));
        let turn = turn.map(|since| since.elapsed());
        Load { waiting, running, counts, steps, free_blocks, offloaded_blocks, turn, draining, dead }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Jobs waiting, jobs running, draining, dead.
    fn load(queue: &Queue<i32>) -> (usize, usize, bool, bool) {
        let Load { waiting, running, draining, dead, .. } = queue.load();
        (waiting, running, draining, dead)
    }

    #[test]
    fn who_was_preempted_waits() {
        let queue = Queue::new(4);
        queue.push(vec![1, 2, 3], |_| false).unwrap();
        assert!([queue.pop(), queue.pop(), queue.pop()].iter().all(Option::is_some));
        queue.set_preempted(2);
        assert_eq!(load(&queue), (2, 1, false, false));
        queue.set_preempted(0);
        assert_eq!(load(&queue), (0, 3, false, false));
    }

    #[test]
    fn a_full_queue_refuses_unless_someone_left() {
        let queue = Queue::new(2);
        queue.push(vec![1], |_| false).unwrap();
        queue.push(vec![2], |_| false).unwrap();
        assert_eq!(queue.push(vec![3], |_| false), Err(SubmitError::Busy { queued: 2, retry_seconds: 1 }));
        queue.push(vec![3], |&job| job == 1).unwrap();
        assert_eq!((queue.pop(), queue.pop()), (Some(2), Some(3)));
        assert_eq!(load(&queue), (0, 2, false, false));
    }

    #[test]
    fn several_find_room_together_or_not_at_all() {
        let queue = Queue::new(3);
        queue.push(vec![1], |_| false).unwrap();
        assert_eq!(queue.push(vec![2, 3, 4], |_| false), Err(SubmitError::Busy { queued: 1, retry_seconds: 1 }));
        queue.push(vec![2, 3], |_| false).unwrap();
        queue.push(vec![4, 5], |&job| job < 3).unwrap();
        assert_eq!([queue.pop(), queue.pop(), queue.pop()], [Some(3), Some(4), Some(5)]);
    }

    #[test]
    fn those_that_end_leave_and_the_others_keep_their_order() {
        let queue = Queue::new(9);
        (1..=5).for_each(|job| queue.push(vec![job], |_| false).unwrap());
        assert!(queue.remove(|job| *job > 5).is_empty());
        assert_eq!(queue.remove(|job| job % 2 == 0), [2, 4]);
        assert_eq!([queue.pop(), queue.pop(), queue.pop()], [Some(1), Some(3), Some(5)]);
    }

    #[test]
    fn a_refused_one_hears_when_a_place_may_be_free() {
        let queue = Queue::new(1);
        let busy = || queue.push(vec![3], |_| false).unwrap_err();
        queue.push(vec![1], |_| false).unwrap();
        assert_eq!(busy(), SubmitError::Busy { queued: 1, retry_seconds: 1 });
        // As if jobs took twenty seconds each, one after the other.
        for _ in 0..40 {
            queue.pop();
            queue.lock().since -= Duration::from_secs(20);
            queue.finished();
            queue.push(vec![1], |_| false).unwrap();
        }
        let SubmitError::Busy { retry_seconds: seconds, .. } = busy() else { panic!("a place is free") };
        assert!((19..=21).contains(&seconds), "{seconds}");
    }

    #[test]
    fn those_held_back_are_passed_by_and_keep_their_order() {
        let queue = Queue::new(90);
        (1..=5).for_each(|job| queue.push(vec![job], |_| false).unwrap());
        assert_eq!(queue.pop_if(|job| *job < 3, |_| false), Next::Waits);
        assert_eq!(queue.pop_if(|job| *job < 3, |job| *job == 3), Next::Job(3));
        assert_eq!(queue.pop_if(|_| true, |_| true), Next::None);
        assert_eq!([1, 2, 4, 5].map(|_| queue.pop_if(|_| false, |_| true)), [1, 2, 4, 5].map(Next::Job));
        // Not all of a long queue is looked at.
        (0..=LOOKS).for_each(|job| queue.push(vec![job], |_| false).unwrap());
        assert_eq!(queue.pop_if(|job| *job < LOOKS, |_| true), Next::None);
    }

    #[test]
    fn the_urgent_go_first_and_equals_in_their_order() {
        let queue = Queue::new(9).by(|job: &i32| i64::from(*job / 10));
        [31, 11, 32, 1, 12, 33, 2].into_iter().for_each(|job| queue.push(vec![job], |_| false).unwrap());
        queue.push(vec![13, 3], |_| false).unwrap();
        assert_eq!([(); 9].map(|()| queue.pop().unwrap()), [1, 2, 3, 11, 12, 13, 31, 32, 33]);
    }

    #[test]
    fn a_request_that_comes_in_parts_is_waited_for() {
        let queue = Queue::new(1);
        queue.begin().unwrap();
        queue.push(vec![1], |_| false).unwrap();
        assert!(matches!(queue.push(vec![2], |_| false), Err(SubmitError::Busy { .. })));
        queue.drain();
        assert!(matches!(queue.begin(), Err(SubmitError::Draining)));
        assert_eq!(queue.pop(), Some(1));
        queue.finished();
        assert!(!queue.idle(), "more may come");
        std::thread::scope(|scope| {
            let next = scope.spawn(|| (queue.pop(), queue.pop()));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!next.is_finished(), "it is waited for");
            queue.push_more(vec![2]).unwrap();
            while queue.load().running == 0 {
                std::thread::yield_now();
            }
            queue.complete();
            assert_eq!(next.join().unwrap(), (Some(2), None));
        });
        queue.finished();
        assert!(queue.idle());
        queue.die();
        assert!(matches!(queue.push_more(vec![3]), Err(SubmitError::Dead)));
    }

    #[test]
    fn draining_runs_what_waits_and_takes_no_more() {
        let queue = Queue::new(2);
        queue.push(vec![1], |_| false).unwrap();
        queue.drain();
        assert_eq!(queue.push(vec![2], |_| false), Err(SubmitError::Draining));
        assert_eq!((queue.pop(), queue.pop()), (Some(1), None));
    }

    #[test]
    fn a_dead_queue_gives_back_what_waits() {
        let queue = Queue::new(2);
        queue.push(vec![1], |_| false).unwrap();
        assert_eq!(queue.die(), [1]);
        assert_eq!(queue.push(vec![2], |_| false), Err(SubmitError::Dead));
        assert_eq!(load(&queue), (0, 0, false, true));
    }
}
