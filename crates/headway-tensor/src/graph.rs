//! Graphs of a device: work that is recorded from its stream once and replayed with one call. What records them is in
//! `headway-engine`; what a builder's metadata allows of them is the contract's.

use crate::Result;

/// A device that can record what is queued on it.
///
/// A recording holds addresses and launch arguments as they were. Between [`Graphs::begin_capture`] and
/// [`Graphs::end_capture`] nothing runs, and uploads, allocations and reads are refused: whatever is compiled, allocated or
/// chosen at first use must have been used before.
pub trait Graphs {
    /// Begins to record what is queued, instead of running it.
    ///
    /// # Errors
    /// A recording under way; the device's own.
    fn begin_capture(&self) -> Result<()>;

    /// Ends the recording: what was recorded, ready to be launched. Also called after a failure inside of it, which it
    /// then ends.
    ///
    /// # Errors
    /// No recording under way, or one that held nothing; something that can't be recorded; the device's own.
    fn end_capture(&self) -> Result<Box<dyn Graph>>;

    /// Bytes of the device's memory that are free.
    ///
    /// # Errors
    /// The device's own.
    fn free_bytes(&self) -> Result<u64>;
}

/// A recording. Memory that was allocated before its end stays mapped as long as it lives.
pub trait Graph {
    /// Queues the recorded work, behind everything queued before.
    ///
    /// # Errors
    /// The device's own.
    fn launch(&self) -> Result<()>;

    /// Nodes: kernels, copies and fills.
    ///
    /// # Errors
    /// The device's own.
    fn nodes(&self) -> Result<usize>;
}

/// Records what `body` queues. A failure in it ends the recording.
///
/// # Errors
/// `body`'s own; as [`Graphs::begin_capture`] and [`Graphs::end_capture`].
pub fn capture<E: From<crate::TensorError>>(
    graphs: &dyn Graphs,
    body: impl FnOnce() -> std::result::Result<(), E>,
) -> std::result::Result<Box<dyn Graph>, E> {
    graphs.begin_capture()?;
    let outcome = body();
    let graph = graphs.end_capture();
    outcome?;
    Ok(graph?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorError;
    use std::cell::Cell;

    struct Nothing;
    impl Graph for Nothing {
        fn launch(&self) -> Result<()> {
            Ok(())
        }
        fn nodes(&self) -> Result<usize> {
            Ok(0)
        }
    }

    struct Recorder(Cell<bool>);
    impl Graphs for Recorder {
        fn begin_capture(&self) -> Result<()> {
            self.0.set(true);
            Ok(())
        }
        fn end_capture(&self) -> Result<Box<dyn Graph>> {
            self.0.set(false);
            Ok(Box::new(Nothing))
        }
        fn free_bytes(&self) -> Result<u64> {
            Ok(0)
        }
    }

    #[test]
    fn a_failure_ends_the_recording() {
        let r = Recorder(Cell::new(false));
        let failed = capture(&r, || {
            assert!(r.0.get());
            Err(TensorError::Unsupported("no".into()))
        });
        assert!(failed.is_err_and(|e| e.to_string() == "no") && !r.0.get());
        assert!(capture::<TensorError>(&r, || Ok(())).is_ok() && !r.0.get());
    }
}
