//! How the suite gets bytes to and from a backend's memory: the one seam between it and a device.

use super::cell::Cell;
use headway_attention::{AttentionError, KvBuf, Result};
use headway_tensor::{DType, Exec, HostBuf, Linear, Tensor, TensorError, Weight};
use std::sync::Arc;

/// Moves bytes between the host and where a backend's kernels read and write. [`HostMemory`] is for
/// backends of the CPU; a device crate brings its own.
///
/// What it gives the suite is what it took:
///
/// ```
/// use headway_tensor::{Device, DeviceMem, Exec, Tensor};
/// use headway_testkit::suite::{HostAccess, HostMemory};
/// /// In a real test `headway_cpu::CpuExec`, or the device's own.
/// struct Host;
/// impl Exec for Host {
///     fn device(&self) -> Device {
///         Device::CPU
///     }
///     fn alloc(&self, _: usize) -> headway_tensor::Result<Option<std::sync::Arc<dyn DeviceMem>>> {
///         Ok(None)
///     }
///     fn upload(&self, _: &std::sync::Arc<dyn DeviceMem>, _: usize, _: &[u8]) {}
/// }
///
/// let cache = HostMemory.new_cache(&Host, &[1, 2, 3])?;
/// assert_eq!(HostMemory.read_cache(&Host, &cache)?, [1, 2, 3]);
/// let tensor = Tensor::from_slice(&Host, &[1f32], &[1])?;
/// assert_eq!(HostMemory.read_tensor(&Host, &tensor)?, 1f32.to_ne_bytes());
/// # Ok::<(), headway_attention::AttentionError>(())
/// ```
pub trait HostAccess {
    /// A KV cache buffer with these bytes.
    ///
    /// # Errors
    /// No memory.
    fn new_cache(&self, exec: &dyn Exec, bytes: &[u8]) -> Result<KvBuf>;

    /// All bytes of a KV cache buffer, after everything that was queued on `exec`.
    ///
    /// # Errors
    /// A buffer that isn't this device's.
    fn read_cache(&self, exec: &dyn Exec, cache: &KvBuf) -> Result<Vec<u8>>;

    /// A linear layer of this weight in the device's form, for activations of this type: latent attention needs one.
    ///
    /// # Errors
    /// By default that there is no such thing here.
    fn load_linear(&self, exec: &dyn Exec, weight: Weight, activations: DType) -> Result<Arc<dyn Linear>> {
        let _ = activations;
        Err(AttentionError::Inputs(format!(
            "no linear layer for '{}' on {}: latent attention needs a HostAccess with load_linear",
            weight.name(),
            exec.device()
        )))
    }

    /// Whether keys and values that a prefill of latent attention expands are kept in the activations' type: what the
    /// reference then does too, as it does with what is kept in the cache.
    fn rounds_expanded(&self) -> bool {
        false
    }

    /// The type that a backend's kernels round a cell's queries and probabilities to, where it has fewer bits than the
    /// activations': e4m3, for kernels that multiply 8-bit queries with 8-bit keys. The reference then has the queries
    /// that the kernels have, and probabilities may be off by what that type's rounding does to them.
    /// Asked of each part of a backend made of two, whose rows are its own.
    fn attends_in(&self, backend: &str, cell: &Cell) -> Option<DType> {
        let _ = (backend, cell);
        None
    }

    /// All bytes of a tensor, after everything that was queued on `exec`.
    ///
    /// # Errors
    /// A tensor that isn't this device's.
    fn read_tensor(&self, exec: &dyn Exec, tensor: &Tensor) -> Result<Vec<u8>>;
}

/// Memory that is the host's own.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostMemory;

fn elsewhere(device: headway_tensor::Device) -> headway_attention::AttentionError {
    TensorError::WrongDevice {
        what: "the suite's host access",
        found: device,
        expected: headway_tensor::Device::CPU,
    }
    .into()
}

impl HostAccess for HostMemory {
    fn new_cache(&self, exec: &dyn Exec, bytes: &[u8]) -> Result<KvBuf> {
        match exec.alloc(0)? {
            None => Ok(KvBuf::Host(HostBuf::copy_of(bytes)?)),
            Some(_) => Err(elsewhere(exec.device())),
        }
    }

    fn read_cache(&self, _: &dyn Exec, cache: &KvBuf) -> Result<Vec<u8>> {
        match cache {
            KvBuf::Host(b) => Ok(b.as_bytes().to_vec()),
            KvBuf::Dev(d) => Err(elsewhere(d.device())),
        }
    }

    fn read_tensor(&self, _: &dyn Exec, tensor: &Tensor) -> Result<Vec<u8>> {
        let bytes = match tensor.dtype() {
            DType::F32 => bytemuck::cast_slice(tensor.host::<f32>()?).to_vec(),
            DType::F16 => bytemuck::cast_slice(tensor.host::<half::f16>()?).to_vec(),
            DType::BF16 => bytemuck::cast_slice(tensor.host::<half::bf16>()?).to_vec(),
            other => {
                return Err(TensorError::WrongDType {
                    what: "the suite's host access",
                    found: other,
                    supported: "float32, float16, bfloat16",
                }
                .into());
            }
        };
        Ok(bytes)
    }
}
