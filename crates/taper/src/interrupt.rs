//! Ctrl-C: what ends by it before the program does.

use anyhow::{Context, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::oneshot;

/// The exit status of a program that Ctrl-C ended.
const STATUS: i32 = 130;

/// Set by the first Ctrl-C; a second one ends the process at once.
///
/// # Errors
/// A thread that cannot be had.
pub fn stop() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    listen(async move {
        next().await;
        eprintln!("stopping; press Ctrl-C again to stop at once");
        seen.store(true, Ordering::SeqCst);
        next().await;
        std::process::exit(STATUS);
    })?;
    Ok(stop)
}

/// Answers of which Ctrl-C ends the one under way. Where there is none, or it was told to end already, the process ends.
#[derive(Debug, Clone, Default)]
pub struct Answers(Arc<Mutex<Option<oneshot::Sender<()>>>>);

impl Answers {
    /// Listens from now on.
    ///
    /// # Errors
    /// A thread that cannot be had.
    pub fn new() -> Result<Self> {
        let answers = Self::default();
        let seen = answers.clone();
        listen(async move {
            loop {
                next().await;
                if !seen.interrupt() {
                    std::process::exit(STATUS);
                }
            }
        })?;
        Ok(answers)
    }

    /// An answer begins; it hears from the receiver when it is to end.
    pub fn begin(&self) -> oneshot::Receiver<()> {
        let (stop, stopped) = oneshot::channel();
        self.replace(Some(stop));
        stopped
    }

    /// The answer has ended; whether it was told to.
    pub fn end(&self) -> bool {
        self.replace(None).is_none()
    }

    /// Tells the answer under way to end; false if there is none to tell.
    fn interrupt(&self) -> bool {
        // An answer that ends at this moment hears nothing, and need not.
        self.replace(None).map(|stop| stop.send(())).is_some()
    }

    fn replace(&self, stop: Option<oneshot::Sender<()>>) -> Option<oneshot::Sender<()>> {
        std::mem::replace(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner), stop)
    }
}

/// On a thread of its own, because the others may be at work or wait for a line.
fn listen(heard: impl Future<Output = ()> + Send + 'static) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().context("signals")?;
    std::thread::Builder::new().name("signals".into()).spawn(move || runtime.block_on(heard))?;
    Ok(())
}

async fn next() {
    // An error means that no signal can come: wait for none.
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_told_to_end_once_and_the_next_one_hears_nothing_of_it() {
        let answers = Answers::default();
        assert!(!answers.interrupt(), "there is none");
        let mut first = answers.begin();
        assert!(first.try_recv().is_err(), "nothing said");
        assert!(answers.interrupt());
        assert_eq!(first.try_recv(), Ok(()));
        assert!(!answers.interrupt(), "told already");
        assert!(answers.end());
        let mut second = answers.begin();
        assert!(second.try_recv().is_err(), "nothing said");
        assert!(!answers.end());
        assert!(!answers.interrupt(), "it has ended");
    }
}
