//! What can be wrong with compiled Triton kernels, or with making them.

use std::{
    io,
    path::{Path, PathBuf},
};

/// What to do about a file that can't be used.
const REBUILD: &str = "build it again with headway kernels build triton";

/// Text that others wrote, fit for a line of a message: control characters escaped.
pub(super) fn said(text: &str) -> String {
    let one = |c: char| -> String { if c.is_control() { c.escape_default().collect() } else { c.into() } };
    text.chars().map(one).collect()
}

/// A failure that names the file, or what is missing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TritonError {
    /// What was asked for can't be built.
    #[error("can't build {0}")]
    Asked(String),
    /// Nothing was asked for.
    #[error("name what to build: --head-size or --mla")]
    Nothing,
    /// Python or Triton is not there.
    #[error(
        "{what} was not found: {words}; pip install triton=={} (Python's own python3 is asked), or give --packages FOLDER, the site-packages that has it",
        super::TRITON
    )]
    Lacking {
        /// What.
        what: String,
        /// What was answered.
        words: String,
    },
    /// Triton is of another version, or a kernel was compiled by another.
    #[error(
        "{at}: Triton {found}; this headway launches what Triton {} compiles (pip install triton=={})",
        super::TRITON,
        super::TRITON
    )]
    Version {
        /// The file, or the package.
        at: String,
        /// Its version.
        found: String,
    },
    /// The compiler failed.
    #[error("Triton failed on {form}: {words}")]
    Compiler {
        /// The kernel.
        form: String,
        /// Its last words.
        words: String,
    },
    /// What was compiled can't be launched by headway.
    #[error("{form}: {why}: this headway launches no such kernel")]
    Launch {
        /// The kernel.
        form: String,
        /// What it needs.
        why: String,
    },
    /// A file or folder.
    #[error("{}: {why}", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// The system's words.
        why: String,
    },
    /// The manifest can't be understood.
    #[error("{}: {why}; move it away and run headway kernels build triton", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// An entry that says other things of its file than the file's name does.
    #[error("{}: the manifest's entry is of {named}; {REBUILD}", path.display())]
    Name {
        /// The file.
        path: PathBuf,
        /// The file of what the entry lists.
        named: String,
    },
    /// No such file.
    #[error("{}: the manifest lists it, but it is not there; {REBUILD}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A folder, pipe or device in a file's place.
    #[error("{}: no plain file; remove it, and {REBUILD}", path.display())]
    NotFile {
        /// Its path.
        path: PathBuf,
    },
    /// Its entry does not say what it said when it was built.
    #[error("{}: its entry in {} was changed, or is an earlier headway's; {REBUILD}", path.display(), super::TRITON_MANIFEST)]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// It was built of other sources.
    #[error("{}: built of other sources ({what}); {REBUILD}", path.display())]
    Sources {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: String,
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
    /// It is no machine code for such devices.
    #[error("{}: no compiled kernel: {why}; {REBUILD}", path.display())]
    NotCubin {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
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
    /// It takes other arguments.
    #[error("{}: {function} takes ({found}), and headway launches it with ({expected}); {REBUILD}", path.display())]
    Arguments {
        /// The file.
        path: PathBuf,
        /// The function.
        function: String,
        /// What it takes.
        found: String,
        /// What it is launched with.
        expected: String,
    },
    /// It is for other devices.
    #[error("{}: compiled for {found}, and the device is {device}; run headway kernels build triton with --arch {device}", path.display())]
    Arch {
        /// The file.
        path: PathBuf,
        /// What it is compiled for.
        found: String,
        /// The device.
        device: String,
    },
}

impl TritonError {
    pub(super) fn file(path: &Path, e: &io::Error) -> Self {
        Self::File { path: path.to_owned(), why: e.to_string() }
    }
}
