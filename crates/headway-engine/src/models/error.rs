//! Why a model can't be planned or loaded.

use crate::loading::LoadError;
use headway_attention::AttentionError;
use headway_tensor::TensorError;

/// What can go wrong between a config file and a decoder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// An architecture without a translator.
    #[error("{file}: architecture {name} is not supported; supported: {known}")]
    UnknownArchitecture {
        /// The config or GGUF file.
        file: String,
        /// What the file says.
        name: String,
        /// What there is.
        known: String,
    },
    /// A field that the architecture needs is missing or has the wrong type.
    #[error("{file}: {field} {why}")]
    Field {
        /// The config or GGUF file.
        file: String,
        /// The field or key.
        field: String,
        /// What is wrong with it.
        why: String,
    },
    /// A feature that the architecture has and headway doesn't.
    #[error("{file}: {what} is not supported; {remedy}")]
    Unsupported {
        /// The config or GGUF file.
        file: String,
        /// The feature.
        what: String,
        /// What is, or what to do.
        remedy: String,
    },
    /// A tensor of another shape than the config says.
    #[error(
        "{file}: tensor {name} has shape {found:?}, but the config asks for {expected:?}; the files don't belong together or are damaged"
    )]
    WrongShape {
        /// The weight file or folder.
        file: String,
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// What the plan says.
        expected: Vec<usize>,
    },
    /// A number that everything after it would inherit.
    #[error("{file}: tensor {name} has {value} at {index}; the file is damaged: download it again")]
    NotFinite {
        /// The weight file or folder.
        file: String,
        /// The tensor.
        name: String,
        /// NaN or an infinity.
        value: f32,
        /// Its place.
        index: usize,
    },
    /// The files hold layers that the config doesn't count.
    #[error(
        "{file}: tensor {name} belongs to a layer that the config doesn't have ({layers} layers); the files don't belong \
         together: download config and weights of one model again"
    )]
    ExtraLayer {
        /// The weight file or folder.
        file: String,
        /// The tensor.
        name: String,
        /// Layers by the config.
        layers: usize,
    },
    /// The weight files.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A device operation.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The attention layer.
    #[error(transparent)]
    Attention(#[from] AttentionError),
}

impl ModelError {
    /// What says that memory is used up, where that is the reason.
    pub fn out_of_memory(&self) -> Option<&TensorError> {
        match self {
            Self::Tensor(e) | Self::Attention(AttentionError::Tensor(e)) => Some(e),
            _ => None,
        }
        .filter(|e| e.is_out_of_memory())
    }
}
