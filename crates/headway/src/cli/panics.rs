//! A panic is a fault of the program, and told as such in one line. Panics that the engine catches
//! itself (a tokenizer file that its parser breaks on) print nothing: their error does.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    sync::{Mutex, PoisonError},
};

static LAST: Mutex<String> = Mutex::new(String::new());

/// Runs `f`; if it panics, says so in one line. With `RUST_BACKTRACE` set the usual report comes first.
pub fn in_one_line(f: impl FnOnce() -> ExitCode) -> ExitCode {
    if std::env::var_os("RUST_BACKTRACE").is_none() {
        std::panic::set_hook(Box::new(|info| {
            let text = info.to_string();
            *LAST.lock().unwrap_or_else(PoisonError::into_inner) =
                text.split_whitespace().collect::<Vec<_>>().join(" ");
        }));
    }
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|_| {
        let what = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        note!("headway: this is a bug, please report it: {what} (RUST_BACKTRACE=1 tells more)");
        ExitCode::from(101)
    })
}
