//! What is measured: a backend's layer on a device.

use super::{
    super::{
        CliError,
        cases::{Case, Heads},
        meter::{Ceilings, Meter},
    },
    tables::blocks_of,
};
use headway_attention::{
    DynBackend, LayerNeed,
    group::kv::{layout::KvCacheLayout, spec::AttentionSpec},
    process::{
        rules::{KvCacheDType, LatentDims},
        select::reasons,
    },
};
use headway_engine::runner::devices::OpenDevice;
use headway_tensor::DType;
use std::sync::Arc;

/// What is measured.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    pub backend: &'a Arc<dyn DynBackend>,
    pub device: &'a OpenDevice,
    pub meter: &'a dyn Meter,
    pub ceilings: &'a Ceilings,
    pub heads: &'a Heads,
    pub dtype: DType,
    /// `None`: the backend's preferred one.
    pub block_size: Option<usize>,
    pub layout: KvCacheLayout,
}

impl Setup<'_> {
    /// Bytes of the keys and values that a case reads, each once; for a write, that it writes.
    pub fn kv_bytes(&self, case: &Case) -> usize {
        case.kv_tokens() * self.heads.kv_width() * self.dtype.size()
    }

    /// Bytes of the pool that a call of a case touches.
    ///
    /// # Errors
    /// A backend that can't take the layer.
    pub fn pool_bytes(&self, case: &Case) -> Result<usize, CliError> {
        let size = self.checked_block_size()?;
        Ok(blocks_of(case, size) * self.spec(size).page_size_bytes())
    }

    /// The layer's cache.
    pub fn spec(&self, block_size: usize) -> AttentionSpec {
        let h = self.heads;
        let spec = AttentionSpec::new(block_size, h.num_kv_heads, h.head_size, self.dtype);
        match h.latent {
            Some(_) => AttentionSpec { head_size_v: 0, ..spec },
            None => spec,
        }
    }

    /// Dimensions of latent attention, as the contract has them.
    pub fn latent(&self) -> Option<LatentDims> {
        self.heads.latent.map(Into::into)
    }

    /// The block size and every reason against the backend for this layer.
    ///
    /// # Errors
    /// A backend that can't take it, with its reasons.
    pub fn checked_block_size(&self) -> Result<usize, CliError> {
        let rules = self.backend.rules();
        let size = self.block_size.unwrap_or_else(|| rules.preferred_block_size(16));
        let need = LayerNeed {
            kind: rules.kind,
            latent: self.latent(),
            platform: self.device.place.platform.into(),
            compute_capability: self.device.place.capability,
            head_size: self.heads.head_size,
            head_size_v: self.heads.head_size,
            num_heads: self.heads.num_heads,
            num_kv_heads: self.heads.num_kv_heads,
            dtype: self.dtype,
            kv_cache_dtype: Some(KvCacheDType(self.dtype.name().into())),
            block_size: Some(size),
            ..LayerNeed::default()
        };
        match reasons(self.backend, &need).as_slice() {
            [] => Ok(size),
            all => {
                let all: Vec<_> = all.iter().map(ToString::to_string).collect();
                let (heads, dtype) = (&self.heads.id, self.dtype);
                Err(CliError::Usage(format!(
                    "{} can't run heads {heads} in {dtype} with blocks of {size}: {}",
                    rules.name,
                    all.join(", ")
                )))
            }
        }
    }
}
