//! Loading of weight files: sound ones, every kind of broken one, and real ones where they are at hand.
//!
//! Mutated headers are in `fuzz_headers`.

mod gguf;
mod gguf_split;
mod open;
mod real;
mod safetensors;

use headway_engine::loading::LoadError;

/// The message of an error, which must be one line.
fn line(error: &LoadError) -> String {
    let message = error.to_string();
    assert!(!message.contains('\n'), "{message:?}");
    message
}

/// Asserts that `result` is an error of one line that contains all `parts`.
#[track_caller]
fn refused<T>(result: Result<T, LoadError>, parts: &[&str]) {
    let Err(error) = result else { panic!("accepted; expected an error with {parts:?}") };
    let message = line(&error);
    for part in parts {
        assert!(message.contains(part), "no '{part}' in: {message}");
    }
}
