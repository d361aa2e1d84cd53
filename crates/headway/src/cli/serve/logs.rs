//! The log: structured lines on standard error.

use super::args::{LogFormat, LogLevel};
use std::io::IsTerminal;
use tracing::Level;

/// From now on lines are written; a panic is one of them.
pub fn start(format: LogFormat, level: LogLevel) {
    let level = match level {
        LogLevel::Error => Level::ERROR,
        LogLevel::Warn => Level::WARN,
        LogLevel::Info => Level::INFO,
        LogLevel::Debug => Level::DEBUG,
    };
    let lines =
        tracing_subscriber::fmt().with_max_level(level).with_target(false).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
    if std::env::var_os("RUST_BACKTRACE").is_none() {
        std::panic::set_hook(Box::new(|info| {
            let text = info.to_string();
            let what = text.split_whitespace().collect::<Vec<_>>().join(" ");
            tracing::error!(what, "a panic: this is a bug, please report it (RUST_BACKTRACE=1 tells more)");
        }));
    }
}
