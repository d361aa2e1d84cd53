//! What the backends of this crate refuse alike, each in its own name.

use headway_attention::{AttentionError, Result};

/// Refuses in a backend's name.
pub(super) fn refuse(backend: &str, what: impl Into<String>, remedy: &str) -> AttentionError {
    AttentionError::Unsupported { backend: backend.to_owned(), what: what.into(), remedy: remedy.into() }
}

/// A finite number above 0; `what` ends in "of".
pub(super) fn positive(backend: &str, what: &str, x: f32) -> Result<()> {
    if x.is_finite() && x > 0.0 {
        return Ok(());
    }
    Err(refuse(backend, format!("{what} {x}"), "it must be a finite number above 0"))
}
