//! What start-up knows of a model before it reads a weight: all that it decides from, besides the options.

use super::needs::model_dtype;
use crate::{
    loading::{ModelFiles, ModelKind},
    models::{ModelError, ModelPlan, arch},
};
use headway_tensor::DType;
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
            made_bytes: files.checkpoint.made_bytes(),
            warnings: kv_cache_scales(files).into_iter().collect(),
        })
    }
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
