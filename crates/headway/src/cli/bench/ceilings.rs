//! What the machine does at most, measured in the run that it is held against.

use headway_attention::Result;
use headway_cpu::{
    CpuExec,
    kernels::attention::ceiling::{multiply_add_rate, read_bandwidth},
};
use headway_tensor::{HostBuf, Ops};
use std::any::Any;

/// A device's ceilings with so many threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    /// Bytes a second in random reads of 64 KiB.
    pub read: f64,
    /// float32 operations a second of multiply-adds in registers, at the instruction set in use.
    pub compute: f64,
}

/// Larger than the last-level caches we know of are for two cores.
const BUFFER: usize = 1 << 30;
/// Seconds for each.
const SECONDS: f64 = 0.5;

impl Ceilings {
    /// Measures them; `None` on a device that has no such measurement.
    ///
    /// # Errors
    /// No memory for the buffer.
    pub fn measure(ops: &dyn Ops) -> Result<Option<Self>> {
        let any: &dyn Any = ops;
        let Some(cx) = any.downcast_ref::<CpuExec>() else { return Ok(None) };
        let mut buffer = HostBuf::zeroed(BUFFER)?;
        buffer.as_bytes_mut().fill(0x3c);
        Ok(Some(Self {
            read: read_bandwidth(cx.pool(), cx.isa(), buffer.as_bytes(), SECONDS),
            compute: multiply_add_rate(cx.pool(), cx.isa(), SECONDS),
        }))
    }

    /// The least seconds that so much reading and computing can take.
    pub fn least_seconds(&self, bytes: f64, flops: f64) -> f64 {
        (bytes / self.read).max(flops / self.compute)
    }
}

/// The instruction set that a device's kernels use.
pub fn isa(ops: &dyn Ops) -> String {
    let any: &dyn Any = ops;
    any.downcast_ref::<CpuExec>().map_or_else(|| ops.device().to_string(), |cx| cx.isa().to_string())
}
