//! What a command can fail with: one line each.

use headway_attention::AttentionError;
use headway_engine::{
    engine::{EmbedError, RequestError, StepError},
    explain::ExplainError,
    loading::LoadError,
    runner::StartupError,
    sources::SourceError,
    text::TextError,
};
use std::path::PathBuf;

/// An error of a command.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CliError {
    /// What was typed.
    #[error("{0}")]
    Usage(String),
    /// A file of the user's.
    #[error("{}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// An unknown environment variable.
    #[error("environment variable {name} is unknown{}; unset it (headway --help and headway generate --help list those there are)", nearest.as_ref().map(|n| format!(" (did you mean {n}?)")).unwrap_or_default())]
    Environment {
        /// Its name.
        name: String,
        /// The nearest by spelling.
        nearest: Option<String>,
    },
    /// Writing the answer.
    #[error("writing the output: {0}")]
    Output(#[from] std::io::Error),
    /// Finding or fetching the model.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// Starting the engine.
    #[error(transparent)]
    Startup(#[from] StartupError),
    /// A request.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// An input of an encoder.
    #[error(transparent)]
    Embed(#[from] EmbedError),
    /// A step.
    #[error(transparent)]
    Step(#[from] StepError),
    /// Text and templates.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A question to `explain`.
    #[error(transparent)]
    Explain(#[from] ExplainError),
    /// A model's files.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The server.
    #[error(transparent)]
    Serve(#[from] headway_server::ServeError),
    /// Backends.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// A folder of kernel modules.
    #[error(transparent)]
    Modules(#[from] headway_cuda::modules::ModuleError),
    /// An extension module of another project.
    #[error(transparent)]
    Extension(#[from] headway_cuda::modules::extension::ExtensionError),
    /// Building kernel modules.
    #[error(transparent)]
    Build(#[from] headway_cuda::modules::build::BuildError),
    /// Kernels in Triton.
    #[error(transparent)]
    Triton(#[from] headway_cuda::modules::triton::TritonError),
}

impl CliError {
    /// Whether standard output was closed by its reader, as `head` does.
    pub fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Output(e) if e.kind() == std::io::ErrorKind::BrokenPipe)
    }
}
