//! What can be wrong with a folder of modules, a module, or a call of one.

use std::path::PathBuf;

/// What to do about a module that can't be used.
const REBUILD: &str = "build it again with headway kernels build flashinfer";

/// A failure that names the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModuleError {
    /// No such file.
    #[error("{}: the manifest lists it, but it is not there; {REBUILD}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// It can't be read.
    #[error("{}: {why}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's words.
        why: String,
    },
    /// It is shorter or longer than it was.
    #[error("{}: {found} bytes, of {expected} that the manifest lists: the file is cut off or was replaced; {REBUILD}", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        found: u64,
        /// The manifest's.
        expected: u64,
    },
    /// Its entry in the manifest is another module's.
    #[error("{}: the manifest describes it as what {named} would be: one of them was changed; {REBUILD}", path.display())]
    Name {
        /// The file.
        path: PathBuf,
        /// The name that a module of the entry's kind, type, sizes and architecture has.
        named: String,
    },
    /// It is no shared library.
    #[error("{}: not a shared library of this machine: {why}; {REBUILD}", path.display())]
    NotElf {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Its contents are others.
    #[error("{}: its SHA-256 is {found}, the manifest's is {expected}: the file was changed; {REBUILD}", path.display())]
    Hash {
        /// The file.
        path: PathBuf,
        /// Its sum.
        found: String,
        /// The manifest's.
        expected: String,
    },
    /// The dynamic linker refuses it.
    #[error("{}: can't be opened: {why}; {remedy}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The linker's words.
        why: String,
        /// What to do.
        remedy: String,
    },
    /// It lacks a function.
    #[error("{}: has no function {symbol}: it was not built from FlashInfer {}; {REBUILD}", path.display(), super::FLASHINFER)]
    NoSymbol {
        /// The file.
        path: PathBuf,
        /// The symbol.
        symbol: String,
    },
    /// A function takes another number of arguments.
    #[error("{}: {function} takes {found} arguments{}, and headway calls it with {expected}, those of FlashInfer {}; {REBUILD}", path.display(), if *listed { " by the manifest" } else { "" }, super::FLASHINFER)]
    Arguments {
        /// The file.
        path: PathBuf,
        /// The function.
        function: String,
        /// What it takes; `?` where it does not say.
        found: String,
        /// What it is called with.
        expected: usize,
        /// The manifest says so, the file was not asked.
        listed: bool,
    },
    /// It is for other devices.
    #[error("{}: compiled for {found}, and the device is {device}; run headway kernels build flashinfer with --arch {device}", path.display())]
    Arch {
        /// The file.
        path: PathBuf,
        /// What it is compiled for.
        found: String,
        /// The device.
        device: String,
    },
    /// The manifest can't be understood.
    #[error("{}: {why}; move the folder away and run headway kernels build flashinfer", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A module is of another version.
    #[error("{}: built from FlashInfer {found}, and this headway calls {calls}; build it again with that version (pip install flashinfer-python=={calls})", path.display(), calls = super::FLASHINFER)]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: String,
    },
    /// The shim is not there.
    #[error(
        "the library {} was not found{}; it belongs beside the headway program (cargo build -p headway-ffi-shim makes it)",
        headway_ffi_shim::FILE,
        tried.iter().map(|p| format!(" at {}", p.display())).collect::<Vec<_>>().join(",")
    )]
    NoShim {
        /// Where it was looked for.
        tried: Vec<PathBuf>,
    },
    /// Another library in the process has the shim's functions, and came before it.
    #[error(
        "{}: modules would call {symbol}{} of {} instead, which is in this process too and came first; start headway without it (a library of LD_PRELOAD, or one that the program opened for all)",
        path.display(),
        match others { 0 => String::new(), n => format!(" and {n} more") },
        by.display()
    )]
    Shadowed {
        /// The shim.
        path: PathBuf,
        /// The first such function.
        symbol: String,
        /// How many more there are.
        others: usize,
        /// Whose it is.
        by: PathBuf,
    },
    /// A call failed.
    #[error("{}: {function} failed: {kind}: {message}", path.display())]
    Raised {
        /// The file.
        path: PathBuf,
        /// The function.
        function: String,
        /// The error's kind.
        kind: String,
        /// Its words.
        message: String,
    },
    /// A call gave something else than it should.
    #[error("{}: {function} returned {found}, not {expected}; {REBUILD}", path.display())]
    Result {
        /// The file.
        path: PathBuf,
        /// The function.
        function: String,
        /// What came.
        found: String,
        /// What should come.
        expected: String,
    },
}
