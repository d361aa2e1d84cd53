//! CUDA: calls are recorded into a graph and timed by events around its replays, and held against what kernels of the
//! same run read, copy and multiply.

use super::{
    meter::{Ceilings, Meter, Pool},
    samples::{Sampler, Timing},
};
use headway_attention::{AttentionError, KvBuf, Result};
use headway_cuda::{CudaExec, CudaLinear, Graph, kernels::memory::MemoryKernels};
use headway_tensor::{DType, DeviceMem, Exec, LinearPart, Ops, SharedBytes, Tensor, Weight, WeightType};
use std::{any::Any, sync::Arc};

/// Samples where none are asked for.
const REPLAYS: usize = 9;
/// About the seconds of a replay: the launch of a graph is lost in it.
const REPLAY: f64 = 2e-3;
/// The most calls in a replay that cold inputs don't ask for.
const MOST_CALLS: usize = 256;
/// Seconds of replays before the first sample: the clock has risen by then.
const WARM_UP: f64 = 10e-3;
/// Cold inputs are so many times the second-level cache.
const TIMES_CACHE: usize = 5;
/// Bytes that are read, and copied, for the ceilings; an eighth of the free memory where that is less.
const BUFFER: usize = 2 << 30;
/// Rows, columns and inner dimension of the product.
const PRODUCT: usize = 8192;

/// A CUDA device, with the kernels that fill, read and copy its memory.
pub struct CudaMeter<'a> {
    cx: &'a CudaExec,
    memory: MemoryKernels,
}

/// Calls in a replay of about [`REPLAY`] seconds: all inputs the same number of times.
fn calls_of(call: f64, rotation: usize) -> usize {
    let wanted = (REPLAY / call.max(1e-9)).ceil() as usize;
    wanted.clamp(1, MOST_CALLS).next_multiple_of(rotation.max(1))
}

/// Inputs of `bytes` each that together are `cold` bytes, or `most` of them.
fn rotation_of(cold: usize, bytes: usize, most: usize) -> usize {
    cold.div_ceil(bytes.max(1)).clamp(1, most.max(1))
}

impl<'a> CudaMeter<'a> {
    /// Where this is a CUDA device.
    ///
    /// # Errors
    /// Kernels that don't compile.
    pub fn of(ops: &'a dyn Ops) -> Result<Option<Self>> {
        let any: &dyn Any = ops;
        let Some(cx) = any.downcast_ref::<CudaExec>() else { return Ok(None) };
        Ok(Some(Self { cx, memory: MemoryKernels::new(cx)? }))
    }

    fn alloc(&self, bytes: usize) -> Result<Arc<dyn DeviceMem>> {
        let none = || AttentionError::Inputs(format!("{} has no memory of its own", self.cx.device()));
        self.cx.alloc(bytes)?.ok_or_else(none)
    }

    /// Seconds of what `body` queues.
    fn seconds(&self, body: impl FnOnce() -> Result<()>) -> Result<f64> {
        let (from, to) = (self.cx.event()?, self.cx.event()?);
        self.cx.record(&from)?;
        body()?;
        self.cx.record(&to)?;
        Ok(f64::from(from.elapsed_ms(&to)?) * 1e-3)
    }

    /// Seconds a call, in replays of a graph, or queued one by one where calls can't be recorded.
    fn replays(
        &self,
        samples: usize,
        rotation: usize,
        captured: bool,
        call: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Timing> {
        // The first call loads kernels and chooses algorithms.
        call(0)?;
        self.cx.synchronize()?;
        let calls = calls_of(self.seconds(|| call(1))?, rotation);
        let mut all = || (0..calls).try_for_each(&mut *call);
        let graph: Option<Graph> = match captured {
            true => Some(self.cx.capture(&mut all)?.1),
            false => None,
        };
        let mut replay = || -> Result<f64> {
            self.seconds(|| match &graph {
                Some(graph) => Ok(graph.launch()?),
                None => all(),
            })
        };
        let mut warm = 0.0;
        while warm < WARM_UP {
            // A clock that stands still must not be waited for.
            warm += replay()?.max(1e-6);
        }
        let mut times = (0..samples).map(|_| Ok(replay()? / calls as f64)).collect::<Result<Vec<f64>>>()?;
        // Says what went wrong on the device meanwhile.
        self.cx.synchronize()?;
        times.sort_by(f64::total_cmp);
        Ok(Timing { median: times[times.len() / 2], min: times[0], max: times[times.len() - 1] })
    }

    /// The best rate, a second, of a call that does so much.
    fn rate(&self, amount: f64, call: &mut dyn FnMut(usize) -> Result<()>) -> Result<f64> {
        Ok(amount / self.replays(REPLAYS, 1, true, call)?.min)
    }

    /// Operations a second of a product of bfloat16 matrices by cuBLASLt, as linear layers are computed.
    fn product(&self) -> Result<f64> {
        let (n, cx) = (PRODUCT, self.cx);
        let zeros = SharedBytes::new(vec![0u8; n * n * 2]);
        let weight = Weight::new("product", WeightType::BF16, vec![n, n], zeros)
            .map_err(|e| AttentionError::Inputs(e.to_string()))?;
        let layer = cx.load_linear(vec![LinearPart { weight, bias: None }], None)?;
        // Zeros take less power than numbers, and so a higher clock.
        let any: &dyn Any = &*layer;
        if let Some(layer) = any.downcast_ref::<CudaLinear>() {
            self.memory.fill(cx, layer.weight())?;
        }
        let x = self.numbers(DType::BF16, &[n, n], 0)?;
        let mut out = Tensor::zeros(cx, DType::BF16, &[n, n])?;
        self.rate(2.0 * (n as f64).powi(3), &mut |_| Ok(cx.linear(&*layer, x.view(), out.view_mut())?))
    }
}

impl Meter for CudaMeter<'_> {
    fn isa(&self) -> String {
        self.cx.info().name.clone()
    }

    fn ceilings(&self) -> Result<Ceilings> {
        let (free, _) = self.cx.free_and_total_memory()?;
        let bytes = BUFFER.min((free / 8) as usize);
        let (from, to) = (self.alloc(bytes)?, self.alloc(bytes)?);
        self.memory.fill(self.cx, &from)?;
        let amount = bytes as f64;
        let read = self.rate(amount, &mut |_| Ok(self.memory.read(self.cx, &from)?))?;
        let write = self.rate(amount, &mut |_| Ok(self.memory.copy(self.cx, &from, &to)?))?;
        drop((from, to));
        let product = self.product();
        let words = format!(
            "ceilings of this run, and what is held against them:\n\
             \x20 {:6.0} GB/s     a kernel that only reads: decode\n\
             \x20 {:6.0} GB/s     a kernel that only copies, twice as much traffic: write\n\
             \x20 {}: prefill, mixed (or the first, where that is lower)",
            read / 1e9,
            write / 1e9,
            match &product {
                Ok(rate) => format!(
                    "{:6.0} TFLOP/s  cuBLASLt, bfloat16, {PRODUCT} x {PRODUCT} x {PRODUCT}",
                    rate / 1e12
                ),
                Err(e) => format!("  none           {e}"),
            }
        );
        Ok(Ceilings { read, write, compute: product.ok(), words })
    }

    /// bfloat16 numbers between -2 and 2; float16 caches read the same bytes, which are between -2 and 2 too.
    fn pool(&self, bytes: usize, cache: DType) -> Result<Pool> {
        let memory = self.alloc(bytes)?;
        match cache {
            DType::F8E4M3 => self.memory.fill_codes(self.cx, &memory)?,
            _ => self.memory.fill(self.cx, &memory)?,
        }
        self.cx.synchronize()?;
        Ok(Pool(KvBuf::Dev(memory)))
    }

    /// The numbers of [`Meter::pool`], the same for every seed: as many as a prefill has take too long on the host.
    fn numbers(&self, dtype: DType, shape: &[usize], _: u64) -> Result<Tensor> {
        let tensor = Tensor::zeros(self.cx, dtype, shape)?;
        if let Some(memory) = tensor.device_mem() {
            self.memory.fill(self.cx, memory)?;
        }
        Ok(tensor)
    }

    fn rotation(&self, bytes: usize, most: usize) -> usize {
        rotation_of(TIMES_CACHE * self.cx.info().l2_bytes as usize, bytes, most)
    }

    /// A prefill writes more than the second-level cache holds.
    fn cold_sources(&self) -> bool {
        true
    }

    /// A sample is a replay.
    fn time(
        &self,
        _: &mut Sampler,
        samples: Option<usize>,
        rotation: usize,
        captured: bool,
        call: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Timing> {
        self.replays(samples.unwrap_or(REPLAYS), rotation, captured, call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_is_long_enough_and_goes_through_all_inputs_alike() {
        assert_eq!(calls_of(10e-6, 1), 200);
        assert_eq!(calls_of(10e-6, 75), 225);
        assert_eq!((calls_of(1.0, 1), calls_of(1.0, 3)), (1, 3));
        // An event clock that shows no time.
        assert_eq!((calls_of(0.0, 1), calls_of(0.0, 4096)), (MOST_CALLS, 4096));
    }

    #[test]
    fn cold_inputs_are_more_than_the_cache_holds() {
        let cold = 300 << 20;
        assert_eq!(rotation_of(cold, 4 << 20, 4096), 75);
        assert_eq!(rotation_of(cold, 1 << 30, 4096), 1);
        assert_eq!(rotation_of(cold, 1 << 10, 4096), 4096);
        assert_eq!(rotation_of(cold, 0, 0), 1);
    }
}
