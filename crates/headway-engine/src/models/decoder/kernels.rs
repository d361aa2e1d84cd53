//! Where a mixer gets its impl from: the backend that selection chose for its layer.

use crate::models::ModelError;
use headway_attention::{AttnLayer, LayerArgs, LayerKernel};
use headway_tensor::{DType, RowQuant};

/// Makes impls.
pub struct Kernels<'a> {
    /// Type of the activations that impls read and write.
    pub activations: DType,
    /// Element type of the KV cache.
    pub kv_cache_dtype: DType,
    /// Whether a layer's backend writes outputs of heads of so many elements as codes itself.
    pub fuses: &'a dyn Fn(AttnLayer, &RowQuant, usize) -> bool,
    /// The impl of a layer, for its numbers.
    pub make: &'a mut dyn FnMut(AttnLayer, &LayerArgs<'_>) -> Result<LayerKernel, ModelError>,
}

/// A backend made an impl of another kind than the numbers were for.
pub(super) fn wrong_kind(file: String, layer: AttnLayer, kind: &str) -> ModelError {
    ModelError::Unsupported {
        file,
        what: format!("a backend of another kind for mixer {}, which is {kind}", layer.0),
        remedy: format!("choose a backend for {kind}"),
    }
}
