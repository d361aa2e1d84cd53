//! What a device is: asked once, when it is opened.

use super::error::{Doing, Result};
use crate::compile::Arch;
use cudarc::driver::{CudaContext, sys::CUdevice_attribute as Attribute};
use serde::Serialize;

/// Bytes of shared memory that a block may ask for on devices of a compute capability, where that is known: table "Technical
/// Specifications per Compute Capability" of NVIDIA's CUDA programming guide.
pub const fn shared_per_block(capability: (u32, u32)) -> Option<usize> {
    match capability {
        (8, 0 | 7) => Some(163 << 10),
        (8, _) | (12, _) => Some(99 << 10),
        (9..=11, _) => Some(227 << 10),
        _ => None,
    }
}

/// A device's name and sizes.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceInfo {
    /// The product's name.
    pub name: String,
    /// CUDA version of the driver.
    pub driver: String,
    /// Compute capability: major, minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a block may ask for.
    pub shared_per_block: u32,
    /// Bytes of shared memory of a multiprocessor.
    pub shared_per_multiprocessor: u32,
    /// Bytes of the second-level cache.
    pub l2_bytes: u32,
    /// Bytes of memory.
    pub memory_bytes: u64,
}

impl DeviceInfo {
    pub(super) fn ask(context: &CudaContext, driver: String) -> Result<Self> {
        let ask = |attribute| context.attribute(attribute).doing("asking for a device's attribute");
        let count = |attribute| -> Result<u32> { Ok(ask(attribute)?.max(0) as u32) };
        Ok(Self {
            name: context.name().doing("asking for a device's name")?,
            driver,
            capability: (
                count(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                count(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: count(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_per_block: count(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_per_multiprocessor: count(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
            l2_bytes: count(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            memory_bytes: context.total_mem().doing("asking for a device's memory")? as u64,
        })
    }

    /// As if a block had no more than so many bytes of shared memory, and a multiprocessor what one such block takes.
    pub(super) fn limited(mut self, shared: Option<u32>) -> Self {
        if let Some(most) = shared {
            self.shared_per_block = self.shared_per_block.min(most);
            // The system keeps 1 KiB a block.
            self.shared_per_multiprocessor = self.shared_per_multiprocessor.min(most.saturating_add(1024));
        }
        self
    }

    /// What kernels are compiled for.
    pub fn arch(&self) -> Arch {
        Arch::of(self.capability)
    }
}
