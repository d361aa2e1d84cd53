//! The CPU: calls are timed by the clock, and held against what its threads read and multiply in the same run.

use super::{
    meter::{Ceilings, Meter, Pool},
    samples::{Sampler, Timing},
};
use headway_attention::{KvBuf, Result};
use headway_cpu::{
    CpuExec,
    kernels::ceiling::{empty_region, joined_region, multiply_add_rate, random_read_rate},
};
use headway_tensor::{DType, HostBuf, Ops, Tensor};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use std::{any::Any, fmt::Write};

/// Larger than the last-level caches we know of are for two cores.
const BUFFER: usize = 1 << 30;
/// Seconds for each ceiling.
const SECONDS: f64 = 0.5;

/// The CPU with its threads.
pub struct CpuMeter<'a>(&'a CpuExec);

impl<'a> CpuMeter<'a> {
    /// Where this is a CPU.
    pub fn of(ops: &'a dyn Ops) -> Option<Self> {
        let any: &dyn Any = ops;
        any.downcast_ref().map(Self)
    }
}

/// About N(0, 1): a sum of uniform values.
fn normal(rng: &mut ChaCha8Rng) -> half::bf16 {
    let sum: f32 = (0..6).map(|_| rng.next_u32() as f32 / u32::MAX as f32).sum();
    half::bf16::from_f32((sum - 3.0) * std::f32::consts::SQRT_2)
}

/// [`Meter::pool`], before any device is open.
///
/// # Errors
/// No memory.
pub fn pool(bytes: usize) -> Result<Pool> {
    let mut buf = HostBuf::zeroed(bytes)?;
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    // An odd number of values, so that repetitions don't line up with blocks.
    let pattern: Vec<u8> = (0..(4 << 20) + 1).flat_map(|_| normal(&mut rng).to_le_bytes()).collect();
    for chunk in buf.as_bytes_mut().chunks_mut(pattern.len()) {
        chunk.copy_from_slice(&pattern[..chunk.len()]);
    }
    Ok(Pool(KvBuf::Host(buf)))
}

impl Meter for CpuMeter<'_> {
    fn isa(&self) -> String {
        self.0.isa().to_string()
    }

    /// Reads are random, of 64 KiB; writes are held against them.
    fn ceilings(&self) -> Result<Ceilings> {
        let cx = self.0;
        let mut buffer = HostBuf::zeroed(BUFFER)?;
        buffer.as_bytes_mut().fill(0x3c);
        let rate = |piece| random_read_rate(cx.pool(), cx.isa(), buffer.as_bytes(), piece, SECONDS);
        let (read, read_small) = (rate(64 << 10), rate(4 << 10));
        let compute = multiply_add_rate(cx.pool(), cx.isa(), SECONDS);
        let (region, joined) = (empty_region(cx.pool()), joined_region(cx.pool()));
        let mut words = String::from("ceilings of this run, and what is held against them:\n");
        // Writing into a string can't fail.
        let _ = write!(
            words,
            "  {:6.1} GB/s     random 64 KiB reads: decode, write\n  \
               {:6.1} GB/s     random 4 KiB reads\n  \
               {:6.1} GFLOP/s  float32 multiply-adds: prefill, mixed (or the first, where that is lower)\n\
             empty parallel region: {:.2} us; with every thread in it: {:.2} us",
            read / 1e9,
            read_small / 1e9,
            compute / 1e9,
            region * 1e6,
            joined * 1e6
        );
        Ok(Ceilings { read, write: read, compute: Some(compute), words })
    }

    /// Normally distributed bfloat16 values; float32 caches read the same bytes.
    fn pool(&self, bytes: usize, _: DType) -> Result<Pool> {
        pool(bytes)
    }

    fn numbers(&self, dtype: DType, shape: &[usize], seed: u64) -> Result<Tensor> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let values: Vec<half::bf16> = (0..shape.iter().product()).map(|_| normal(&mut rng)).collect();
        Ok(match dtype {
            DType::F32 => {
                Tensor::from_slice(self.0, &values.iter().map(|x| x.to_f32()).collect::<Vec<_>>(), shape)?
            }
            DType::F16 => {
                let values: Vec<_> = values.iter().map(|x| half::f16::from_f32(x.to_f32())).collect();
                Tensor::from_slice(self.0, &values, shape)?
            }
            _ => Tensor::from_slice(self.0, &values, shape)?,
        })
    }

    /// All of the pool: it is larger than the last-level cache.
    fn rotation(&self, _: usize, most: usize) -> usize {
        most
    }

    /// They come out of the projection before, and few enough are written at a time to be in the cache still.
    fn cold_sources(&self) -> bool {
        false
    }

    fn time(
        &self,
        sampler: &mut Sampler,
        samples: Option<usize>,
        _: usize,
        _: bool,
        call: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Timing> {
        sampler.measure(samples, call)
    }
}
