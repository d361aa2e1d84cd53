//! Points in a stream's time.

use super::{
    CudaExec,
    error::{Doing, Result},
};
use cudarc::driver::{CudaEvent, sys::CUevent_flags};

/// A mark in the stream that can be waited for and timed.
#[derive(Debug)]
pub struct Event(CudaEvent);

impl CudaExec {
    /// A new mark, not yet placed.
    ///
    /// # Errors
    /// The driver's.
    pub fn event(&self) -> Result<Event> {
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        Ok(Event(self.context().new_event(flags).doing("creating an event")?))
    }

    /// Places the mark behind everything that was queued.
    ///
    /// # Errors
    /// The driver's; a failure kept from an earlier upload.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.check()?;
        event.0.record(self.stream()).doing("recording an event")
    }
}

impl Event {
    /// Waits until the stream has come this far.
    ///
    /// # Errors
    /// The driver's, that of work before it included.
    pub fn synchronize(&self) -> Result<()> {
        self.0.synchronize().doing("waiting for an event")
    }

    /// Milliseconds from this mark to a later one, waiting for both.
    ///
    /// # Errors
    /// A mark that was not placed; the driver's.
    pub fn elapsed_ms(&self, later: &Self) -> Result<f32> {
        self.0.elapsed_ms(&later.0).doing("timing between events")
    }
}
