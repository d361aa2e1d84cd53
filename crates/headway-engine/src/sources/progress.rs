//! How a fetch tells what it is doing: one small trait, a terminal implementation and a silent one.
//!
//! Not for logging: messages are whole lines meant for the person who waits.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressStyle};

/// Listens to a fetch. At most one transfer is under way at a time.
///
/// ```
/// use headway_engine::sources::Progress;
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// /// Counts what arrives.
/// #[derive(Default)]
/// struct Counter(AtomicU64);
///
/// impl Progress for Counter {
///     fn message(&self, line: &str) {
///         println!("{line}");
///     }
///     fn start(&self, _label: &str, _total: Option<u64>) {}
///     fn advance(&self, bytes: u64) {
///         self.0.fetch_add(bytes, Ordering::Relaxed);
///     }
///     fn finish(&self) {}
/// }
///
/// let counter = Counter::default();
/// counter.start("model.safetensors", Some(10));
/// counter.advance(10);
/// counter.finish();
/// assert_eq!(counter.0.into_inner(), 10);
/// ```
pub trait Progress: Send + Sync {
    /// One line of text without a newline.
    fn message(&self, line: &str);
    /// A transfer of `label` begins; `total` is its size in bytes where it is known.
    fn start(&self, label: &str, total: Option<u64>);
    /// `bytes` more have arrived (also the bytes that an earlier, interrupted run had fetched).
    fn advance(&self, bytes: u64);
    /// The transfer is over, well or not.
    fn finish(&self);
}

/// Says nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn message(&self, _line: &str) {}
    fn start(&self, _label: &str, _total: Option<u64>) {}
    fn advance(&self, _bytes: u64) {}
    fn finish(&self) {}
}

/// A line on standard error; where that is closed, nothing.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Lines and a progress bar on standard error; plain lines only where that is no terminal.
#[derive(Debug)]
pub struct TerminalProgress {
    terminal: bool,
    bar: Mutex<Option<ProgressBar>>,
}

impl TerminalProgress {
    /// For this process's standard error.
    pub fn new() -> Self {
        Self { terminal: std::io::stderr().is_terminal(), bar: Mutex::new(None) }
    }

    fn with_bar(&self, act: impl FnOnce(&mut Option<ProgressBar>)) {
        act(&mut self.bar.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Default for TerminalProgress {
    fn default() -> Self {
        Self::new()
    }
}

impl Progress for TerminalProgress {
    fn message(&self, line: &str) {
        self.with_bar(|bar| match bar {
            Some(bar) => bar.suspend(|| say(line)),
            None => say(line),
        });
    }

    fn start(&self, label: &str, total: Option<u64>) {
        if !self.terminal {
            match total {
                Some(total) => say(&format!("fetching {label} ({})", indicatif::HumanBytes(total))),
                None => say(&format!("fetching {label}")),
            }
            return;
        }
        let (bar, template) = match total {
            Some(total) => {
                (ProgressBar::new(total), "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} ({eta})")
            }
            None => (ProgressBar::new_spinner(), "{msg} {spinner} {bytes} {bytes_per_sec}"),
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(label.to_owned());
        self.with_bar(|slot| *slot = Some(bar));
    }

    fn advance(&self, bytes: u64) {
        self.with_bar(|bar| {
            if let Some(bar) = bar {
                bar.inc(bytes);
            }
        });
    }

    fn finish(&self) {
        self.with_bar(|bar| {
            if let Some(bar) = bar.take() {
                bar.finish_and_clear();
            }
        });
    }
}
