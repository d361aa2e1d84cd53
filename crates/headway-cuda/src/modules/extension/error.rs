//! What can be wrong with an extension module, with the wheel that it comes from, or with a call.

use super::VLLM;
use std::path::PathBuf;

/// What to do about a file that can't be used.
const FETCH: &str = "fetch it again with headway kernels fetch flash-attn";

/// A failure that names the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExtensionError {
    /// Another machine than the wheel is for.
    #[error("the modules of vLLM {VLLM} that headway calls are for Linux on x86-64, and this is {0}")]
    Machine(String),
    /// Another version.
    #[error("{}: of vLLM {found}, and this headway calls {VLLM}; {FETCH}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: String,
    },
    /// No such file.
    #[error("{}: the manifest lists it, but it is not there; {FETCH}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// It can't be read or written.
    #[error("{}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's words.
        why: String,
    },
    /// Another length than that version's.
    #[error("{}: {found} bytes, of {expected} that vLLM {VLLM}'s has: the file is cut off or of another build; {FETCH}", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        found: u64,
        /// That version's.
        expected: u64,
    },
    /// Other contents than that version's.
    #[error("{}: its SHA-256 is {found}, that of vLLM {VLLM}'s is {expected}: the file was changed or is of another build; {FETCH}", path.display())]
    Hash {
        /// The file.
        path: PathBuf,
        /// Its sum.
        found: String,
        /// That version's.
        expected: String,
    },
    /// It is no shared library.
    #[error("{}: not a shared library of this machine: {why}; {FETCH}", path.display())]
    NotElf {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// It imports what the shim does not have.
    #[error(
        "{}: imports {} that {} lacks: {}; this version is not supported",
        path.display(),
        if symbols.len() == 1 { "a function" } else { "functions" },
        headway_ffi_shim::FILE,
        symbols.join(", ")
    )]
    Symbols {
        /// The file.
        path: PathBuf,
        /// The symbols.
        symbols: Vec<String>,
    },
    /// Torch is in the process.
    #[error(
        "{0} is loaded in this process: extension modules would call it instead of headway's functions; use a process without PyTorch"
    )]
    Torch(&'static str),
    /// The dynamic linker refuses it.
    #[error("{}: can't be opened: {why}; {remedy}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The linker's words.
        why: String,
        /// What to do.
        remedy: &'static str,
    },
    /// It registered no such function, or one with other arguments.
    #[error("{}: {function} {found}, and headway calls it with {expected} arguments; {FETCH}", path.display())]
    Function {
        /// The file.
        path: PathBuf,
        /// The function.
        function: &'static str,
        /// What it is.
        found: String,
        /// What it is called with.
        expected: usize,
    },
    /// A call failed.
    #[error("{}: {function} failed: {why}", path.display())]
    Failed {
        /// The file.
        path: PathBuf,
        /// The function.
        function: &'static str,
        /// What it threw, and what the shim said before.
        why: String,
    },
    /// The wheel could not be had.
    #[error("{command} failed: {why}; or give a wheel that is there with --wheel FILE")]
    Pip {
        /// The command.
        command: String,
        /// Its words.
        why: String,
    },
    /// The wheel is none.
    #[error("{}: not a wheel of vLLM {VLLM}: {why}", path.display())]
    Wheel {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The folder or the shim.
    #[error("{0}")]
    Folder(String),
}
