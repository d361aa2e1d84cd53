//! NVIDIA's run-time compiler, loaded when it is there. Toolkit headers are not needed: sources include each other only.

use super::{Arch, Sources, unknown};
use crate::device::{CudaError, Result};
use cudarc::nvrtc::{
    result::NvrtcError,
    sys::{self, nvrtcProgram},
};
use std::{
    ffi::{CString, c_char},
    ptr,
};

/// The compiler.
#[derive(Clone, Debug)]
pub struct Nvrtc {
    version: String,
}

fn failed(doing: &str, e: NvrtcError) -> CudaError {
    CudaError::Nvrtc { doing: doing.into(), words: format!("{:?}", e.0) }
}

fn c_string(what: &str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| CudaError::Argument(format!("{what} holds a zero byte")))
}

/// A program, destroyed in the end.
struct Program(nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: of `nvrtcCreateProgram`. What it might say is of no use here.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

impl Program {
    /// A text or code whose length one call gives and another writes.
    fn bytes(
        &self,
        doing: &str,
        size: unsafe fn(nvrtcProgram, *mut usize) -> sys::nvrtcResult,
        get: unsafe fn(nvrtcProgram, *mut c_char) -> sys::nvrtcResult,
    ) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program lives, the pointer is to a live integer.
        unsafe { size(self.0, &mut len) }.result().map_err(|e| failed(doing, e))?;
        let mut bytes = vec![0u8; len];
        // SAFETY: there is room for as many bytes as it said.
        unsafe { get(self.0, bytes.as_mut_ptr().cast()) }.result().map_err(|e| failed(doing, e))?;
        Ok(bytes)
    }
}

impl Nvrtc {
    /// Finds the library.
    ///
    /// # Errors
    /// It is not there.
    pub fn load() -> Result<Self> {
        // SAFETY: looks for a library by its name; its initialisers are NVIDIA's.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoLibrary {
                library: "libnvrtc",
                needed_for: "compiling kernels",
                package: "nvidia-cuda-nvrtc",
            });
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the pointers are to live integers.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }
            .result()
            .map_err(|e| failed("asking for NVRTC's version", e))?;
        Ok(Self { version: format!("{major}.{minor}") })
    }

    /// Its version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Machine code of a file for a real architecture.
    ///
    /// # Errors
    /// No such file; the compiler's words.
    pub fn compile(&self, sources: &Sources, file: &str, arch: Arch, options: &[String]) -> Result<Vec<u8>> {
        let source = c_string(file, sources.get(file).ok_or_else(|| unknown(file))?)?;
        let name = c_string(file, file)?;
        let headers: Vec<_> = sources
            .headers()
            .map(|(name, text)| Ok((c_string(name, name)?, c_string(name, text)?)))
            .collect::<Result<_>>()?;
        let texts: Vec<_> = headers.iter().map(|h| h.1.as_ptr()).collect();
        let names: Vec<_> = headers.iter().map(|h| h.0.as_ptr()).collect();
        let mut program = Program(ptr::null_mut());
        // SAFETY: as many names as texts, all alive until the program is gone.
        unsafe {
            sys::nvrtcCreateProgram(
                &mut program.0,
                source.as_ptr(),
                name.as_ptr(),
                headers.len() as i32,
                texts.as_ptr(),
                names.as_ptr(),
            )
        }
        .result()
        .map_err(|e| failed("creating a program", e))?;
        let wanted: Vec<_> = options.iter().map(|o| c_string("an option", o)).collect::<Result<_>>()?;
        let pointers: Vec<_> = wanted.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: as many pointers as said, to strings that live.
        let outcome =
            unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr()) };
        if outcome.result().is_err() {
            let log =
                program.bytes("reading the log", sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog)?;
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim_end().to_owned();
            return Err(CudaError::Compile {
                file: file.into(),
                arch: arch.to_string(),
                options: options.join(" "),
                log,
            });
        }
        program.bytes("reading machine code", sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN)
    }
}
