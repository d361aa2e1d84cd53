//! The errors of the contract: each says what was asked, what is supported, and what to do.

use headway_tensor::TensorError;

/// Result of a call of the contract.
pub type Result<T, E = AttentionError> = std::result::Result<T, E>;

/// What can go wrong between start-up and a layer's call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// A backend's configuration table doesn't parse.
    #[error("configuration of backend {backend}: {why}; correct its [backend.{backend}] table")]
    Config {
        /// The backend.
        backend: String,
        /// What is wrong.
        why: String,
    },
    /// Two backends register one name.
    #[error("a backend named {0} is registered already; names are the identity, so choose another")]
    Duplicate(String),
    /// No backend of that name.
    #[error("no attention backend is named {name}; there are: {known}{}", nearest.as_ref().map(|n| format!(" (did you mean {n}?)")).unwrap_or_default())]
    Unknown {
        /// What was asked for.
        name: String,
        /// All names.
        known: String,
        /// The nearest by spelling.
        nearest: Option<String>,
    },
    /// Two backends that can't serve as one, or a name that doesn't say which two.
    #[error("backend {name}: {why}")]
    Composition {
        /// The name.
        name: String,
        /// Why not, and what to do.
        why: String,
    },
    /// No device of that name.
    #[error("no device is named {name}; write a compute capability (sm90) or one of: {known}{}", nearest.as_ref().map(|n| format!(" (did you mean {n}?)")).unwrap_or_default())]
    Device {
        /// What was asked for.
        name: String,
        /// All names.
        known: String,
        /// The nearest by spelling.
        nearest: Option<String>,
    },
    /// The catalogue has no such version.
    #[error("the catalogue has no version {asked}; it has: {known}{}", nearest.as_ref().map(|n| format!(" (the nearest is {n})")).unwrap_or_default())]
    CatalogVersion {
        /// What was asked for.
        asked: String,
        /// All versions.
        known: String,
        /// The nearest.
        nearest: Option<String>,
    },
    /// A data file of the catalogue doesn't parse.
    #[error("{0}")]
    Catalog(String),
    /// A backend was built against another version of the contract.
    #[error(
        "backend {backend} was built for version {built} of the attention contract; this program speaks version {ours}: rebuild it",
        ours = crate::CONTRACT_VERSION
    )]
    Contract {
        /// The backend.
        backend: String,
        /// Its version.
        built: u32,
    },
    /// A backend of one device was called with another device's `Exec`.
    #[error("the backend runs on {expected}, but was called with the exec of {found}")]
    WrongExec {
        /// The `Exec` type that the backend needs.
        expected: &'static str,
        /// The device that was given.
        found: String,
    },
    /// The layer is of another kind than the backend's.
    #[error("backend {backend} implements {offers} layers; the layer is {asked}")]
    WrongKind {
        /// The backend.
        backend: String,
        /// The kind that it implements.
        offers: &'static str,
        /// The kind of the layer.
        asked: &'static str,
    },
    /// No backend, or not the one asked for, fits a layer.
    #[error("{0}")]
    Selection(String),
    /// Something that this backend or builder doesn't do.
    #[error("{backend}: {what} is not supported; {remedy}")]
    Unsupported {
        /// Who refuses.
        backend: String,
        /// What was asked.
        what: String,
        /// What is supported, or what to do.
        remedy: String,
    },
    /// Inputs of a step contradict each other.
    #[error("inconsistent step inputs: {0}")]
    Inputs(String),
    /// Start-up can't arrange the KV cache as asked.
    #[error("{0}")]
    KvCache(String),
    /// The graph mode that was asked for can't be had, or a batch fits no captured graph's claim.
    #[error("{0}")]
    Graph(String),
    /// A tensor's device, dtype or shape.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}
