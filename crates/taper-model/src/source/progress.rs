//! How far a download or a model's weights are: a bar where standard error is a terminal.

use crate::memory::size;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use std::time::{Duration, Instant};

/// Whether what takes a while draws a progress bar on standard error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Progress {
    /// It does not.
    #[default]
    Hidden,
    /// It does, where standard error is a terminal.
    Shown,
}

impl Progress {
    /// A bar of bytes.
    pub(super) fn bar(self, bytes: u64, message: &'static str) -> ProgressBar {
        let target = match self {
            Self::Hidden => ProgressDrawTarget::hidden(),
            Self::Shown => ProgressDrawTarget::stderr(),
        };
        let bar = ProgressBar::with_draw_target(Some(bytes), target).with_message(message);
        match ProgressStyle::with_template("{msg} [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec} ({eta})") {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        }
    }
}

/// How often the log says how far the weights are, where there is no bar.
const LOG_EVERY: Duration = Duration::from_secs(5);

/// How far a model's weights are: a bar, or lines of the log where standard error is no terminal.
#[derive(Debug)]
pub(crate) struct Loading {
    bar: ProgressBar,
    total: u64,
    done: u64,
    began: Instant,
    /// When the log is due to say it; none where it says nothing.
    due: Option<Instant>,
}

impl Loading {
    /// Of weights that take so many bytes.
    pub(crate) fn new(progress: Progress, total: u64) -> Self {
        // It goes with this, also where loading ends by an error.
        let bar = progress.bar(total, "loading weights").with_finish(ProgressFinish::AndClear);
        let logs = progress == Progress::Shown && bar.is_hidden();
        let began = Instant::now();
        Self { bar, total, done: 0, began, due: logs.then(|| began + LOG_EVERY) }
    }

    /// So many bytes more are there.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.bar.inc(bytes);
        if let Some(line) = self.line(bytes, Instant::now()) {
            tracing::info!("{line}");
        }
    }

    /// What the log says of them, if it is time to.
    fn line(&mut self, bytes: u64, now: Instant) -> Option<String> {
        self.done += bytes;
        let due = self.due.filter(|due| now >= *due)?;
        self.due = Some(due.max(now) + LOG_EVERY);
        let seconds = now.duration_since(self.began).as_secs();
        Some(format!("weights: {} of {} loaded in {seconds} s", size(self.done), size(self.total)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_says_now_and_then_how_far_the_weights_are() {
        let mut loading = Loading::new(Progress::Hidden, 40 << 20);
        let began = loading.began;
        assert_eq!(loading.line(1 << 20, began + 2 * LOG_EVERY), None, "nobody asked");
        loading.due = Some(began + LOG_EVERY);
        let lines: Vec<_> = (2..16).map(|s| loading.line(1 << 20, began + Duration::from_secs(s))).collect();
        let said: Vec<_> = lines.into_iter().flatten().collect();
        assert_eq!(
            said,
            [
                "weights: 5.0 MiB of 40.0 MiB loaded in 5 s",
                "weights: 10.0 MiB of 40.0 MiB loaded in 10 s",
                "weights: 15.0 MiB of 40.0 MiB loaded in 15 s"
            ]
        );
    }
}
