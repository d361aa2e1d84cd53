//! Uploads without waiting: host bytes go through a ring of page-locked memory, from which the copy engine takes them
//! in the stream's order.

use super::{
    error::{Doing, Result},
    ring::Cursor,
};
use cudarc::driver::{CudaEvent, CudaStream, result};
use std::{ffi::c_void, sync::Arc};

/// Bytes of a segment: a copy that is long enough for the bus's full speed.
const SEGMENT: usize = 4 << 20;
/// Segments: one is filled while others are copied.
const SEGMENTS: usize = 8;
/// Bytes of the ring.
pub const RING_BYTES: usize = SEGMENT * SEGMENTS;

/// The ring of one stream.
pub(super) struct Staging {
    stream: Arc<CudaStream>,
    memory: *mut u8,
    cursor: Cursor,
    fences: Vec<CudaEvent>,
}

impl Staging {
    pub fn new(stream: Arc<CudaStream>) -> Result<Self> {
        let context = stream.context();
        let fence = |_| context.new_event(None).doing("creating a fence of the staging ring");
        let fences = (0..SEGMENTS).map(fence).collect::<Result<_>>()?;
        // SAFETY: the context is bound by the creation of events; the memory is freed in `drop`.
        let memory = unsafe { result::malloc_host(RING_BYTES, 0) }.doing("page-locking the staging ring")?;
        Ok(Self { memory: memory.cast(), cursor: Cursor::new(SEGMENT, SEGMENTS), fences, stream })
    }

    /// Copies `src` to the device address `to`, in the stream's order. The caller has checked that it fits there.
    pub fn upload(&mut self, mut to: u64, mut src: &[u8]) -> Result<()> {
        self.stream.context().bind_to_thread().doing("binding the context")?;
        while !src.is_empty() {
            let piece = self.cursor.take(src.len());
            if let Some(segment) = piece.entered {
                // Never recorded in the first round: then there is nothing to wait for.
                self.fences[segment].synchronize().doing("waiting for the staging ring")?;
            }
            let (now, rest) = src.split_at(piece.len);
            // SAFETY: the piece lies inside the ring, and no copy from it is under way, as the fence says; the
            // source of the asynchronous copy is the ring, which outlives it.
            unsafe {
                let staged = self.memory.add(piece.at);
                staged.copy_from_nonoverlapping(now.as_ptr(), piece.len);
                let staged = std::slice::from_raw_parts(staged, piece.len);
                result::memcpy_htod_async(to, staged, self.stream.cu_stream()).doing("uploading")?;
            }
            if let Some(segment) = piece.left {
                self.fences[segment].record(&self.stream).doing("fencing the staging ring")?;
            }
            to += piece.len as u64;
            src = rest;
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let context = self.stream.context();
        context.record_err(self.stream.synchronize());
        // SAFETY: of `malloc_host`, and no copy reads it any more.
        context.record_err(unsafe { result::free_host(self.memory.cast::<c_void>()) });
    }
}
