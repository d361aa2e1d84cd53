//! Memory of a group's kernels: a scratch for each worker, and the slots of split rows. Allocated once
//! by the builder; a call locks it for as long as it runs.

use super::shape::Shape;
use headway_tensor::{HostBuf, Result};
use std::sync::{Mutex, atomic::AtomicU32};

/// Scratch and slots for one call at a time.
#[derive(Debug)]
pub struct Workspace {
    shape: Shape,
    pub(super) inner: Mutex<Inner>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) workers: Vec<Mutex<HostBuf>>,
    pub(super) slots: HostBuf,
    pub(super) arrivals: Vec<AtomicU32>,
}

impl Workspace {
    /// Memory for `workers` threads.
    ///
    /// # Errors
    /// No memory.
    pub fn new(shape: &Shape, workers: usize) -> Result<Self> {
        let inner = Inner {
            workers: (0..workers)
                .map(|_| HostBuf::zeroed(shape.scratch_bytes()).map(Mutex::new))
                .collect::<Result<_>>()?,
            slots: HostBuf::zeroed(shape.slot_bytes())?,
            arrivals: (0..shape.max_splits()).map(|_| AtomicU32::new(0)).collect(),
        };
        Ok(Self { shape: *shape, inner: Mutex::new(inner) })
    }

    /// Bytes that [`Workspace::new`] allocates.
    pub fn bytes(shape: &Shape, workers: usize) -> usize {
        workers * shape.scratch_bytes() + shape.slot_bytes() + shape.max_splits() * size_of::<AtomicU32>()
    }

    /// What it was made for.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }
}
