//! What the machine does at most, measured in the run that it is held against.

use headway_attention::Result;
use headway_cpu::{
    CpuExec,
    kernels::ceiling::{empty_region, joined_region, multiply_add_rate, random_read_rate},
};
use headway_tensor::{HostBuf, Ops};
use std::{any::Any, fmt};

/// A device's ceilings with so many threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    /// Bytes a second in random reads of 64 KiB.
    pub read: f64,
    /// Bytes a second in random reads of 4 KiB: blocks of small heads are no larger.
    pub read_small: f64,
    /// float32 operations a second of multiply-adds in registers, at the instruction set in use.
    pub compute: f64,
    /// Seconds of a parallel region without work.
    pub region: f64,
    /// Seconds of one in which every thread takes part.
    pub joined_region: f64,
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
        let read = |piece| random_read_rate(cx.pool(), cx.isa(), buffer.as_bytes(), piece, SECONDS);
        Ok(Some(Self {
            read: read(64 << 10),
            read_small: read(4 << 10),
            compute: multiply_add_rate(cx.pool(), cx.isa(), SECONDS),
            region: empty_region(cx.pool()),
            joined_region: joined_region(cx.pool()),
        }))
    }

    /// The least seconds that so much reading (in random pieces of 64 KiB) and computing can take.
    pub fn least_seconds(&self, bytes: f64, flops: f64) -> f64 {
        (bytes / self.read).max(flops / self.compute)
    }
}

impl fmt::Display for Ceilings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "ceilings of this run, and what is held against them:")?;
        writeln!(f, "  {:6.1} GB/s     random 64 KiB reads: decode, write", self.read / 1e9)?;
        writeln!(f, "  {:6.1} GB/s     random 4 KiB reads", self.read_small / 1e9)?;
        writeln!(
            f,
            "  {:6.1} GFLOP/s  float32 multiply-adds: prefill, mixed (or the first, where that is lower)",
            self.compute / 1e9
        )?;
        write!(
            f,
            "empty parallel region: {:.2} us; with every thread in it: {:.2} us",
            self.region * 1e6,
            self.joined_region * 1e6
        )
    }
}

/// The instruction set that a device's kernels use.
pub fn isa(ops: &dyn Ops) -> String {
    let any: &dyn Any = ops;
    any.downcast_ref::<CpuExec>().map_or_else(|| ops.device().to_string(), |cx| cx.isa().to_string())
}
