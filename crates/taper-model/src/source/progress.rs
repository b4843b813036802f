//! How far a download or a model's weights are: a bar where standard error is a terminal, else lines of the log.

use crate::memory::size;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use std::borrow::Cow;
use std::path::Path;
use std::time::{Duration, Instant};

/// Whether what takes a while draws a progress bar on standard error, or says how far it is in the log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Progress {
    /// It does neither.
    #[default]
    Hidden,
    /// A bar where standard error is a terminal, else lines of the log.
    Shown,
}

impl Progress {
    /// A bar of bytes, which goes with what holds it, also where that ends by an error.
    fn bar(self, bytes: u64, message: impl Into<Cow<'static, str>>) -> ProgressBar {
        let target = match self {
            Self::Hidden => ProgressDrawTarget::hidden(),
            Self::Shown => ProgressDrawTarget::stderr(),
        };
        let bar = ProgressBar::with_draw_target(Some(bytes), target).with_message(message);
        let bar = bar.with_finish(ProgressFinish::AndClear);
        match ProgressStyle::with_template("{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} ({eta})") {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        }
    }
}

/// When the log says how far something is, where there is no bar: once so much time has gone by and so many bytes have come.
#[derive(Debug, Clone, Copy)]
struct Pace {
    time: Duration,
    bytes: u64,
}

impl Pace {
    const WEIGHTS: Self = Self { time: Duration::from_secs(5), bytes: 0 };

    /// Of a file: ten lines at most, however large it is and however slow it comes.
    fn of_file(bytes: u64) -> Self {
        Self { time: Duration::from_secs(30), bytes: bytes.div_ceil(10) }
    }
}

/// Files of fewer bytes are fetched without a word of the log.
const SMALL: u64 = 1 << 20;

/// How far a model's weights, or a file that is fetched, are: a bar, or lines of the log where standard error is no terminal.
#[derive(Debug)]
pub(crate) struct Loading {
    bar: ProgressBar,
    what: String,
    verb: &'static str,
    total: u64,
    done: u64,
    began: Instant,
    pace: Pace,
    /// From when, and from how many bytes on, the log is due to say it; none where it says nothing.
    due: Option<(Instant, u64)>,
}

impl Loading {
    /// Of weights that take so many bytes.
    pub(crate) fn new(progress: Progress, total: u64) -> Self {
        let bar = progress.bar(total, "loading weights");
        Self::of(bar, progress, "weights", "loaded", total, Pace::WEIGHTS)
    }

    /// Of a file of so many bytes, and where it comes from and goes to.
    pub(super) fn fetching(progress: Progress, file: &str, total: u64, from: &str, to: &Path) -> Self {
        let bar = progress.bar(total, file.to_owned());
        let mut fetching = Self::of(bar, progress, file, "fetched", total, Pace::of_file(total));
        fetching.due.take_if(|_| total < SMALL);
        if fetching.due.is_some() {
            tracing::info!("fetching {file}: {} from {from} to {}", size(total), to.display());
        }
        fetching
    }

    fn of(bar: ProgressBar, progress: Progress, what: &str, verb: &'static str, total: u64, pace: Pace) -> Self {
        let logs = progress == Progress::Shown && bar.is_hidden();
        let began = Instant::now();
        let due = logs.then(|| (began + pace.time, pace.bytes));
        Self { bar, what: what.to_owned(), verb, total, done: 0, began, pace, due }
    }

    /// So many bytes more are there.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.reach(self.done + bytes);
    }

    /// So many bytes are there in all.
    pub(super) fn reach(&mut self, bytes: u64) {
        self.bar.set_position(bytes);
        if let Some(line) = self.line(bytes, Instant::now()) {
            tracing::info!("{line}");
        }
    }

    /// All is there.
    pub(super) fn end(self) {
        if self.due.is_some() {
            tracing::info!("{} {} in {} s", self.what, self.verb, self.began.elapsed().as_secs());
        }
    }

    /// What the log says of them, if it is time to.
    fn line(&mut self, bytes: u64, now: Instant) -> Option<String> {
        self.done = bytes;
        let (time, least) = self.due?;
        if now < time || bytes < least {
            return None;
        }
        self.due = Some((now + self.pace.time, bytes + self.pace.bytes));
        let Self { what, verb, .. } = self;
        let seconds = now.duration_since(self.began).as_secs();
        Some(format!("{what}: {} of {} {verb} in {seconds} s", size(bytes), size(self.total)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said where a MiB more is there at each of these seconds.
    fn said(loading: &mut Loading, seconds: impl Iterator<Item = u64>) -> Vec<String> {
        let began = loading.began;
        let lines = seconds.map(|s| loading.line(loading.done + (1 << 20), began + Duration::from_secs(s)));
        lines.flatten().collect()
    }

    #[test]
    fn the_log_says_now_and_then_how_far_the_weights_are() {
        let mut loading = Loading::new(Progress::Hidden, 40 << 20);
        assert_eq!(said(&mut loading, 10..11), [""; 0], "nobody asked");
        loading.due = Some((loading.began + loading.pace.time, 0));
        assert_eq!(
            said(&mut loading, 2..16),
            [
                "weights: 5.0 MiB of 40.0 MiB loaded in 5 s",
                "weights: 10.0 MiB of 40.0 MiB loaded in 10 s",
                "weights: 15.0 MiB of 40.0 MiB loaded in 15 s"
            ]
        );
    }

    #[test]
    fn the_log_has_no_more_than_ten_lines_of_a_file_and_two_a_minute() {
        let fetching = |mib: u64| {
            let mut fetching = Loading::fetching(Progress::Hidden, "f", mib << 20, "there", Path::new("here"));
            fetching.due = Some((fetching.began + fetching.pace.time, fetching.pace.bytes));
            fetching
        };
        let slow = said(&mut fetching(100), (1..=100).map(|n| 10 * n));
        assert_eq!((slow.len(), slow[0].as_str()), (10, "f: 10.0 MiB of 100.0 MiB fetched in 100 s"));
        let fast = said(&mut fetching(100), 1..=100);
        assert_eq!((fast.len(), fast[0].as_str()), (3, "f: 30.0 MiB of 100.0 MiB fetched in 30 s"));
    }
}
