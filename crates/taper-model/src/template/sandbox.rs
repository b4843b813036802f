//! A thread for what a template does: its stack holds whatever a template can nest, and work that does not end is left behind.

use crate::error::ModelError;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Rendering takes some milliseconds.
const TIME_MAX: Duration = Duration::from_secs(10);

/// Lists within lists, as deep as a template can make them in all its steps, and terms within terms, as many as a text
/// holds, are walked through and let go of by recursion. No more of this is taken than is used.
const STACK: usize = 512 << 20;

/// Runs what a template asks for; one that once took too long waits until that work has ended.
#[derive(Debug, Default)]
pub(super) struct Sandbox {
    /// Work that was left behind, each there for as long as it runs.
    lost: Mutex<Vec<Weak<()>>>,
}

impl Sandbox {
    /// Runs work, and lets it be when it takes too long.
    ///
    /// # Errors
    /// Those of the work, and [`ModelError::TemplateBusy`] for work that does not end.
    pub fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ModelError> + Send + 'static,
    ) -> Result<T, ModelError> {
        self.run_for(TIME_MAX, work)
    }

    fn run_for<T: Send + 'static>(
        &self,
        time_max: Duration,
        work: impl FnOnce() -> Result<T, ModelError> + Send + 'static,
    ) -> Result<T, ModelError> {
        if self.still_runs() {
            return Err(ModelError::TemplateBusy(
                "is still at an earlier conversation, which takes it too long".into(),
            ));
        }
        let (running, (sender, ended)) = (Arc::new(()), channel());
        let lost = Arc::downgrade(&running);
        let work = move || {
            let _running = running;
            // Nobody may wait any more.
            let _ = sender.send(work());
        };
        let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(STACK);
        thread.spawn(work).map_err(|e| ModelError::TemplateBusy(format!("has no thread: {e}")))?;
        match ended.recv_timeout(time_max) {
            Ok(result) => result,
            Err(RecvTimeoutError::Disconnected) => {
                Err(ModelError::template("failed while it ran, by a defect of Taper"))
            }
            Err(RecvTimeoutError::Timeout) => {
                self.lost.lock().unwrap_or_else(PoisonError::into_inner).push(lost);
                let reason = format!("takes longer than {} s for one conversation", time_max.as_secs());
                Err(ModelError::TemplateBusy(reason))
            }
        }
    }

    fn still_runs(&self) -> bool {
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        lost.retain(|work| work.strong_count() > 0);
        !lost.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_takes_too_long_is_an_error_and_so_is_other_work_until_it_has_ended() {
        let sandbox = Sandbox::default();
        assert_eq!(sandbox.run(|| Ok(1)).unwrap(), 1);
        assert!(sandbox.run(|| Err::<(), _>(ModelError::template("no"))).unwrap_err().to_string().contains("no"));
        // Whether it ends as it should or by a defect.
        for defect in [false, true] {
            let (go, wait) = channel::<()>();
            let work = move || {
                let ended = wait.recv().is_ok();
                assert!(!defect, "a defect");
                Ok(ended)
            };
            let busy = [sandbox.run_for(Duration::ZERO, work).map(usize::from), sandbox.run(|| Ok(1))];
            for (busy, says) in busy.into_iter().zip(["takes longer", "still at an earlier"]) {
                let Err(ModelError::TemplateBusy(reason)) = busy else { panic!("{busy:?}") };
                assert!(reason.contains(says), "{reason}");
            }
            go.send(()).unwrap();
            while sandbox.still_runs() {
                std::thread::yield_now();
            }
            assert_eq!(sandbox.run(|| Ok(2)).unwrap(), 2);
        }
        assert!(sandbox.run(|| -> Result<(), _> { panic!("a defect") }).unwrap_err().to_string().contains("defect"));
    }
}
