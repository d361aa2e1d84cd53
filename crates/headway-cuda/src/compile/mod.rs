//! Kernels from source to machine code: the sources are part of the program, NVRTC compiles them for the device at
//! hand when they are first needed, and a folder keeps the result.
//!
//! Needs no device and no driver. Loading and launching is in `kernels`.

mod arch;
mod cache;
#[expect(unsafe_code, reason = "NVRTC is a C library")]
mod nvrtc;
mod sources;

pub use arch::Arch;
pub use cache::{DiskCache, default_folder};
pub use nvrtc::Nvrtc;
pub use sources::Sources;

use crate::device::{CudaError, Progress, Result};
use sha2::{Digest, Sha256};
use std::path::PathBuf;

/// Names and values of preprocessor definitions.
pub type Defines = Vec<(&'static str, String)>;

/// A kernel: a function of a source file, compiled with definitions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelSpec {
    /// The file under `csrc`.
    pub file: &'static str,
    /// The function, `extern "C"`.
    pub entry: &'static str,
    /// What the file is compiled with.
    pub defines: Defines,
}

/// Compiles for one architecture.
pub struct Compiler {
    sources: Sources,
    nvrtc: Nvrtc,
    arch: Arch,
    cache: Option<DiskCache>,
    progress: Option<Progress>,
}

impl Compiler {
    /// For headway's own sources; `folder` as in [`CudaOptions`](crate::CudaOptions).
    ///
    /// # Errors
    /// No NVRTC.
    pub fn new(arch: Arch, folder: Option<PathBuf>, progress: Option<Progress>) -> Result<Self> {
        let folder = folder.or_else(default_folder);
        Ok(Self::with(Sources::embedded(), Nvrtc::load()?, arch, folder.map(DiskCache::new), progress))
    }

    /// For any sources.
    pub fn with(
        sources: Sources,
        nvrtc: Nvrtc,
        arch: Arch,
        cache: Option<DiskCache>,
        progress: Option<Progress>,
    ) -> Self {
        Self { sources, nvrtc, arch, cache, progress }
    }

    /// The machine code of a file: out of the folder, or compiled and put there.
    ///
    /// # Errors
    /// No such file; the compiler's words.
    pub fn cubin(&self, file: &str, defines: &[(&str, String)]) -> Result<Vec<u8>> {
        let options = self.options(defines);
        let key = self.key(file, &options)?;
        if let Some(code) = self.cache.as_ref().and_then(|c| c.get(&key)) {
            return Ok(code);
        }
        let shown: Vec<_> = defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        self.say(&format!("compiling {file} for {} ({})", self.arch, shown.join(" ")));
        let code = self.nvrtc.compile(&self.sources, file, self.arch, &options)?;
        // A folder that can't be written costs the next start time, nothing else.
        if let Some(Err(e)) = self.cache.as_ref().map(|c| c.put(&key, &code)) {
            self.say(&format!("the compiled kernel is not kept: {e}"));
        }
        Ok(code)
    }

    fn say(&self, what: &str) {
        if let Some(progress) = &self.progress {
            progress(what);
        }
    }

    fn options(&self, defines: &[(&str, String)]) -> Vec<String> {
        let fixed = ["--std=c++17", "-default-device"].map(str::to_owned);
        let defines = defines.iter().map(|(name, value)| format!("-D{name}={value}"));
        std::iter::once(format!("-arch={}", self.arch)).chain(fixed).chain(defines).collect()
    }

    /// What the code depends on: the file, every header, the options (with the architecture), the compiler.
    fn key(&self, file: &str, options: &[String]) -> Result<String> {
        let source = self.sources.get(file).ok_or_else(|| unknown(file))?;
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        add(self.nvrtc.version());
        add(file);
        add(source);
        self.sources.headers().for_each(|(name, text)| [name, text].into_iter().for_each(&mut add));
        options.iter().for_each(|o| add(o));
        Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
    }
}

fn unknown(file: &str) -> CudaError {
    CudaError::Argument(format!("no kernel source is named {file}"))
}
