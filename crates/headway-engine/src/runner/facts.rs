//! What start-up knows of a model before it reads a weight: all that it decides from, besides the options.

use super::needs::model_dtype;
use crate::{
    loading::{ModelFiles, ModelKind},
    models::{ModelError, ModelPlan, arch},
};
use headway_tensor::{DType, Weight, WeightType};
use std::sync::Arc;

/// A model as its config and the headers of its weight files tell it.
#[derive(Clone)]
pub struct Facts {
    /// The plan.
    pub plan: Arc<ModelPlan>,
    /// The type that most of the weights have.
    pub dtype: DType,
    /// The files in use, in a line.
    pub files: String,
    /// Bytes of all weights.
    pub weights_bytes: u64,
    /// Whether most of them are block-quantised.
    pub quantised: bool,
    /// Bytes of all of them in 16 bits an element, about.
    pub narrow_bytes: u64,
    /// Those of them that take memory of their own.
    pub made_bytes: u64,
    /// What the files say and nothing here heeds.
    pub warnings: Vec<String>,
}

impl Facts {
    /// Reads them.
    ///
    /// # Errors
    /// A config or header without a plan.
    pub fn of(files: &ModelFiles) -> Result<Self, ModelError> {
        Ok(Self {
            plan: Arc::new(arch::plan(files)?),
            dtype: model_dtype(files),
            files: files.checkpoint.describe(),
            weights_bytes: files.checkpoint.total_bytes(),
            quantised: quantised(files),
            narrow_bytes: narrow_bytes(files),
            made_bytes: files.checkpoint.made_bytes(),
            warnings: kv_cache_scales(files).into_iter().collect(),
        })
    }
}

fn quantised(files: &ModelFiles) -> bool {
    matches!(files.checkpoint.main_dtype(), Some(WeightType::Quant(_)))
}

/// Block-quantised weights are dequantised for a device that takes no other.
fn narrow_bytes(files: &ModelFiles) -> u64 {
    let c = &*files.checkpoint;
    if !quantised(files) {
        return c.total_bytes().max(c.made_bytes());
    }
    let elements = |name: &&str| c.get(name).as_ref().map_or(0, Weight::elems) as u64;
    c.names().iter().map(elements).sum::<u64>() * 2
}

/// A checkpoint may bring scales for its cache.
fn kv_cache_scales(files: &ModelFiles) -> Option<String> {
    let ModelKind::Safetensors(hf) = &files.kind else { return None };
    hf.config.get("quantization_config")?.get("kv_cache_scheme").filter(|v| !v.is_null())?;
    Some(format!(
        "{}: quantization_config.kv_cache_scheme is not heeded: scales of the KV cache are not read, and its type is what \
         --kv-cache-dtype says",
        hf.config_path.display()
    ))
}
