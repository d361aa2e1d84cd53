//! What a chat template may use up. Templates come from model files, so they are untrusted programs.

use crate::text::error::TextError;
use std::io::{self, Write};

/// Bounds on one template and one rendering.
#[derive(Debug, Clone, Copy)]
pub(in crate::text) struct Limits {
    /// Steps of the template engine, and one for each 64 bytes that it makes.
    pub(super) fuel: u64,
    /// Nested calls of macros and recursive loops.
    pub(super) recursion: usize,
    /// Bytes of one template.
    pub(super) template_bytes: usize,
    /// Bytes of one rendering.
    pub(super) output_bytes: usize,
}

/// Values nest at most as deep as there are steps to nest them, and the engine walks and drops them recursively.
const STACK_BYTES: usize = 512 << 20;

impl Default for Limits {
    fn default() -> Self {
        Self { fuel: 4_000_000, recursion: 200, template_bytes: 1 << 20, output_bytes: 64 << 20 }
    }
}

impl Limits {
    /// Runs `work` on a thread whose stack (address space, touched only as used) holds whatever these limits allow.
    ///
    /// # Errors
    /// No thread, or a panic inside the template engine.
    pub(in crate::text) fn on_large_stack<T: Send>(
        self,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T, TextError> {
        let fail = |detail: String| TextError::Render { detail };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new()
                .name("chat-template".into())
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, work)
                .map_err(|e| fail(format!("no thread to run it on: {e}")))?;
            thread.join().map_err(|_| fail(PANICKED.into()))
        })
    }
}

/// Said when the template engine itself failed; the fuzz body looks for it.
pub(super) const PANICKED: &str =
    "the template engine failed on it; leave the chat template out or change it";

/// Output up to a size.
pub(super) struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
}

impl Bounded {
    pub(super) fn new(limit: usize) -> Self {
        Self { bytes: Vec::new(), limit }
    }

    pub(super) fn into_string(self) -> String {
        // the engine writes whole strings, so this never replaces anything
        String::from_utf8(self.bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
    }
}

impl Write for Bounded {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.bytes.len().saturating_add(data.len()) > self.limit {
            return Err(io::Error::other(format!("the output is longer than {} bytes", self.limit)));
        }
        self.bytes.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
