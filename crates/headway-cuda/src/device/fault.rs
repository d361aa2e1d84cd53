//! What kernels found wrong with values that only they see: an index that is out of range. A word in page-locked
//! memory, which the host reads without asking the device.

use super::error::{CudaError, Doing, Result};
use cudarc::driver::{CudaContext, result};
use std::sync::Arc;

/// What an index is of. The number is what kernels write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Indexed {
    TokenId = 1,
    Row = 2,
    Position = 3,
}

/// Mirrored in `csrc/ops/rows.cuh`.
#[repr(C)]
struct Words {
    what: i32,
    value: i32,
}

/// The word of one device.
pub(super) struct Fault {
    context: Arc<CudaContext>,
    words: *mut Words,
}

impl Fault {
    pub fn new(context: Arc<CudaContext>) -> Result<Self> {
        context.bind_to_thread().doing("binding the context")?;
        // SAFETY: the context is bound; the memory is freed in `drop`.
        let memory = unsafe { result::malloc_host(size_of::<Words>(), 0) }.doing("page-locking memory")?;
        let words = memory.cast::<Words>();
        // SAFETY: as long as asked for; page-locked memory is aligned to pages.
        unsafe { words.write(Words { what: 0, value: 0 }) };
        Ok(Self { context, words })
    }

    /// Where kernels write: page-locked memory has the same address on both sides.
    pub fn addr(&self) -> u64 {
        self.words as u64
    }

    /// A fault since the last call.
    pub fn take(&self) -> Result<()> {
        // SAFETY: alive until `drop`; volatile because a device writes there.
        let what = unsafe { (&raw const (*self.words).what).read_volatile() };
        if what == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        let value = unsafe {
            (&raw mut (*self.words).what).write_volatile(0);
            (&raw const (*self.words).value).read_volatile()
        };
        Err(CudaError::Argument(named(what, value)))
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        self.context.record_err(self.context.synchronize());
        // SAFETY: of `malloc_host`, and no kernel writes there any more.
        self.context.record_err(unsafe { result::free_host(self.words.cast()) });
    }
}

fn named(what: i32, value: i32) -> String {
    let (what, of) = match what {
        w if w == Indexed::TokenId as i32 => ("embed: token id", "the table"),
        w if w == Indexed::Row as i32 => ("gather_rows: row", "the tensor"),
        w if w == Indexed::Position as i32 => ("rope: position", "the table"),
        _ => ("an index", "what it is of"),
    };
    format!("{what} {value} is outside of {of}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_named() {
        assert_eq!(named(Indexed::Position as i32, -4), "rope: position -4 is outside of the table");
        assert_eq!(named(Indexed::TokenId as i32, 9), "embed: token id 9 is outside of the table");
        assert_eq!(named(Indexed::Row as i32, 7), "gather_rows: row 7 is outside of the tensor");
    }
}
