//! Progress bars for downloads.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Whether a download draws a progress bar on standard error.
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
