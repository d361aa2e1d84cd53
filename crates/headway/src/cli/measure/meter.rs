//! What a measurement asks of a device: memory for its inputs, a clock, and what the device does at most. The answers
//! are in a file a device: [`super::cpu`], [`super::cuda`].

use super::{
    case::Kind,
    cpu::CpuMeter,
    cuda::CudaMeter,
    samples::{Sampler, Timing},
};
use headway_attention::{AttentionError, KvBuf, Result};
use headway_tensor::{DType, Ops, Tensor};

/// A device, as measurements see it.
pub trait Meter {
    /// What its kernels are made for: the instruction set, or the product's name.
    fn isa(&self) -> String;

    /// Measures what it does at most.
    ///
    /// # Errors
    /// No memory for the buffers; the device's own.
    fn ceilings(&self) -> Result<Ceilings>;

    /// The memory that all cases' caches lie in: `bytes` of numbers about as large as normalised activations, of 16 bits;
    /// on a CUDA device e4m3 for caches of that type.
    ///
    /// # Errors
    /// No memory.
    fn pool(&self, bytes: usize, cache: DType) -> Result<Pool>;

    /// A tensor of such numbers.
    ///
    /// # Errors
    /// No memory.
    fn numbers(&self, dtype: DType, shape: &[usize], seed: u64) -> Result<Tensor>;

    /// How many inputs cold calls should rotate through, at most `most`, where a call goes through so many bytes.
    fn rotation(&self, bytes: usize, most: usize) -> usize;

    /// Whether the new tokens of cold writes come from memory too, not from a cache.
    fn cold_sources(&self) -> bool;

    /// Times a call, which is given a counter of calls; it rotates through `rotation` inputs. `samples`: how many;
    /// `None` for the device's usual number. `captured`: whether calls may be recorded into a graph.
    ///
    /// # Errors
    /// The call's; the device's own.
    fn time(
        &self,
        sampler: &mut Sampler,
        samples: Option<usize>,
        rotation: usize,
        captured: bool,
        call: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Timing>;
}

/// The meter of an open device.
///
/// # Errors
/// A device without one; kernels that don't compile.
pub fn of(ops: &dyn Ops) -> Result<Box<dyn Meter + '_>> {
    if let Some(cpu) = CpuMeter::of(ops) {
        return Ok(Box::new(cpu));
    }
    match CudaMeter::of(ops)? {
        Some(cuda) => Ok(Box::new(cuda)),
        None => Err(AttentionError::Inputs(format!("calls on {} can't be timed", ops.device()))),
    }
}

/// What a device does at most.
#[derive(Clone, Debug, PartialEq)]
pub struct Ceilings {
    /// Bytes of cache that it reads a second.
    pub read: f64,
    /// Bytes of cache that it writes a second, from new tokens that it reads.
    pub write: f64,
    /// Operations that it does a second; `None` where it could not be measured.
    pub compute: Option<f64>,
    /// All of it in words, for people.
    pub words: String,
}

impl Ceilings {
    /// The least seconds that a call of so many bytes of cache and so many operations can take: decodes and writes
    /// are held against memory alone.
    pub fn least_seconds(&self, kind: Kind, bytes: f64, flops: f64) -> Option<f64> {
        match kind {
            Kind::Decode => Some(bytes / self.read),
            Kind::Write => Some(bytes / self.write),
            Kind::Prefill | Kind::Mixed => self.compute.map(|rate| (bytes / self.read).max(flops / rate)),
        }
    }
}

/// The memory that all cases' caches lie in.
pub struct Pool(pub KvBuf);

impl Pool {
    /// Its length.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            KvBuf::Host(b) => b.len(),
            KvBuf::Dev(m) => m.bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_held_against_what_bounds_it() {
        let c = Ceilings { read: 10.0, write: 5.0, compute: Some(100.0), words: String::new() };
        assert_eq!(c.least_seconds(Kind::Decode, 20.0, 1000.0), Some(2.0));
        assert_eq!(c.least_seconds(Kind::Write, 20.0, 0.0), Some(4.0));
        assert_eq!(c.least_seconds(Kind::Prefill, 20.0, 1000.0), Some(10.0));
        assert_eq!(c.least_seconds(Kind::Mixed, 200.0, 1000.0), Some(20.0));
        let unknown = Ceilings { compute: None, ..c };
        assert_eq!(unknown.least_seconds(Kind::Mixed, 200.0, 1000.0), None);
    }
}
