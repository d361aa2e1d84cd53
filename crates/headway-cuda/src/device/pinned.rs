//! Page-locked host memory that foreign code fills, and copies to the device by itself or has copied: two halves in turn,
//! so that one is filled while the other's copy may still be under way.

use super::{
    CudaExec,
    error::{CudaError, Doing, Result},
};
use cudarc::driver::{CudaEvent, CudaStream, result};
use std::{ffi::c_void, sync::Arc};

/// Two halves of page-locked memory, each with the fence of its last copy.
pub(crate) struct Pinned {
    stream: Arc<CudaStream>,
    memory: *mut u8,
    /// Bytes of a half.
    half: usize,
    fences: [CudaEvent; 2],
    turn: usize,
}

// SAFETY: the memory is this value's own, and events may be used from any thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Two halves of `half` bytes.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(cx: &CudaExec, half: usize) -> Result<Self> {
        cx.not_recording("page-locking memory")?;
        let context = cx.context();
        let fence = || context.new_event(None).doing("creating a fence");
        let fences = [fence()?, fence()?];
        context.bind_to_thread().doing("binding the context")?;
        // SAFETY: the context is bound; the memory is freed in `drop`.
        let memory = unsafe { result::malloc_host(2 * half.max(1), 0) }.doing("page-locking memory")?;
        Ok(Self { stream: Arc::clone(cx.stream()), memory: memory.cast(), half, fences, turn: 0 })
    }

    /// Bytes of a half.
    pub fn len(&self) -> usize {
        self.half
    }

    /// The half that no copy reads any more, to fill; [`Pinned::copied`] or [`Pinned::copy`] follows.
    ///
    /// # Errors
    /// The driver's, that of work before the copy included.
    pub fn next(&mut self) -> Result<*mut u8> {
        self.turn ^= 1;
        // Never recorded in the first round: then there is nothing to wait for.
        self.fences[self.turn].synchronize().doing("waiting for a copy of page-locked memory")?;
        // SAFETY: inside the allocation.
        Ok(unsafe { self.memory.add(self.turn * self.half) })
    }

    /// Queues a copy of the current half's first `bytes` to a device address that has room for them.
    ///
    /// # Errors
    /// More bytes than a half has; the driver's.
    ///
    /// # Safety
    /// `to` is memory of the stream's device that lives until the copy is done, with room for `bytes`.
    pub unsafe fn copy(&mut self, to: u64, bytes: usize) -> Result<()> {
        if bytes > self.half {
            return Err(CudaError::Argument(format!("{bytes} bytes staged in {}", self.half)));
        }
        // SAFETY: inside the allocation, which outlives the copy: the fence is waited for before it is filled again, the
        // stream before it is freed. The rest is the caller's word.
        unsafe {
            let staged = std::slice::from_raw_parts(self.memory.add(self.turn * self.half), bytes);
            result::memcpy_htod_async(to, staged, self.stream.cu_stream()).doing("uploading a plan")?;
        }
        self.copied()
    }

    /// What copies of the current half there are were queued.
    ///
    /// # Errors
    /// The driver's.
    pub fn copied(&mut self) -> Result<()> {
        self.fences[self.turn].record(&self.stream).doing("fencing page-locked memory")
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let context = self.stream.context();
        context.record_err(context.bind_to_thread());
        context.record_err(self.stream.synchronize());
        // SAFETY: of `malloc_host`, and no copy reads it any more.
        context.record_err(unsafe { result::free_host(self.memory.cast::<c_void>()) });
    }
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pinned(2 x {} bytes)", self.half)
    }
}
