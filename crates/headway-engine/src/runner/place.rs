//! What start-up decides by of a device, as data: an open device has one, and so has one that is only named.

use super::{
    StartupError,
    facts::Facts,
    limits::{UsualLimits, default_kv_memory},
};
use crate::options::{DTypeOption, EngineOptions};
use headway_attention::process::rules::ComputeCapability;
use headway_tensor::DType;

/// Where a model is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// `cpu` or `cuda`.
    pub platform: &'static str,
    /// The device's compute capability, where it has one.
    pub capability: Option<ComputeCapability>,
    /// Bytes of its memory that are free, where that is known.
    pub available: Option<u64>,
}

impl Place {
    /// The CPU, with so much memory.
    pub fn cpu(available: Option<u64>) -> Self {
        Self { platform: "cpu", capability: None, available }
    }

    /// Whether the host's memory is its memory, and activations are float32.
    pub fn is_host(&self) -> bool {
        self.platform == "cpu"
    }

    /// Limits of a step where none are asked for.
    pub fn usual_limits(&self) -> UsualLimits {
        UsualLimits::of(self.platform)
    }

    /// Type of the activations: float32 on the CPU; elsewhere as asked, or the weights' where that is float16, else
    /// bfloat16, whose range is float32's.
    ///
    /// # Errors
    /// A type that the device doesn't compute in.
    pub fn activations(&self, facts: &Facts, options: &EngineOptions) -> Result<DType, StartupError> {
        match options.dtype {
            _ if self.is_host() => Ok(DType::F32),
            DTypeOption::As(d @ (DType::BF16 | DType::F16)) => Ok(d),
            DTypeOption::As(d) => Err(StartupError::Option {
                option: "--dtype",
                value: d.to_string(),
                why: format!(
                    "{} computes in bfloat16 and float16; give one of these, or --device cpu",
                    self.platform
                ),
            }),
            DTypeOption::Auto if facts.dtype == DType::F16 && !facts.quantised => Ok(DType::F16),
            DTypeOption::Auto => Ok(DType::BF16),
        }
    }

    /// Memory for the KV cache where none was asked for: on the CPU as [`default_kv_memory`] says; on a device of its
    /// own memory four fifths of what is free, less the weights in the activations' type: the rest is a step's.
    pub fn usual_kv_memory(&self, facts: &Facts) -> u64 {
        match (self.is_host(), self.available) {
            (false, Some(free)) => (free / 10 * 8).saturating_sub(facts.narrow_bytes),
            _ => default_kv_memory(self.available, facts.weights_bytes),
        }
    }
}
