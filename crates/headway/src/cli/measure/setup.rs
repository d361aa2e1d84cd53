//! What is measured: a backend's layer on a device.

use super::{
    super::CliError,
    case::Case,
    layer::Layer,
    meter::{Ceilings, Meter},
    tables::blocks_of,
};
use headway_attention::{
    DynBackend, KvCacheSpec, LayerNeed, group::kv::layout::KvCacheLayout, process::select::reasons,
};
use headway_engine::runner::devices::OpenDevice;
use std::sync::Arc;

/// What is measured.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    pub backend: &'a Arc<dyn DynBackend>,
    pub device: &'a OpenDevice,
    pub meter: &'a dyn Meter,
    pub ceilings: &'a Ceilings,
    pub layer: &'a Layer,
    /// `None`: the backend's preferred one.
    pub block_size: Option<usize>,
    pub layout: KvCacheLayout,
    /// Which calls are replayed from a graph.
    pub replayed: Replayed,
}

/// Which cases' calls are recorded into a graph and replayed, on a device with graphs; the others are queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replayed {
    /// Those that an engine with this backend may replay.
    AsInTheEngine,
    /// Of those decodes (and cache writes) alone: backends are held against one another.
    Decodes,
    /// All.
    All,
}

impl Setup<'_> {
    /// Bytes of the pool that a call of a case touches.
    ///
    /// # Errors
    /// A backend that can't take the layer.
    pub fn pool_bytes(&self, case: &Case) -> Result<usize, CliError> {
        let size = self.checked_block_size()?;
        Ok(blocks_of(case, size) * self.spec(size).page_size_bytes())
    }

    /// The layer's cache, as the backend has it.
    pub fn spec(&self, block_size: usize) -> KvCacheSpec {
        self.backend.customize_spec(self.layer.cache.clone().with_block_size(block_size))
    }

    /// The block size, held with every other rule of the backend against the layer.
    ///
    /// # Errors
    /// A backend that can't take it, with its reasons.
    pub fn checked_block_size(&self) -> Result<usize, CliError> {
        let rules = self.backend.rules();
        let size = self.block_size.unwrap_or_else(|| rules.preferred_block_size(16));
        let need = LayerNeed {
            compute_capability: self.device.place.capability,
            block_size: Some(size),
            ..self.layer.need.clone()
        };
        match reasons(self.backend, &need).as_slice() {
            [] => Ok(size),
            all => {
                let all: Vec<_> = all.iter().map(ToString::to_string).collect();
                let (heads, dtype) = (&self.layer.name, need.dtype);
                Err(CliError::Usage(format!(
                    "{} can't run heads {heads} in {dtype} with blocks of {size}: {}",
                    rules.name,
                    all.join(", ")
                )))
            }
        }
    }
}
