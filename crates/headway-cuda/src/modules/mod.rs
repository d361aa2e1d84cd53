//! Kernel modules of other projects: shared libraries in a folder with a manifest, opened at run time. FlashInfer's are
//! compiled from its sources and called through TVM-FFI's C ABI; vLLM's extension modules are taken out of its wheel and
//! called through torch's. No Python takes part.
//!
//! | file | what |
//! |---|---|
//! | `manifest.rs` | what a folder holds, as its `manifest.json` says |
//! | `folder.rs` | the folder: where it is, what of it serves a layer, whether a file is what the manifest says (`elf.rs`: a whole library) |
//! | `library.rs` | the dynamic linker |
//! | `shim.rs` | the library that has the functions which modules import; opened before any module |
//! | `call.rs` | one call: arguments, result, the error that was raised |
//! | `module.rs` | an opened module: symbols and numbers of arguments are checked once |
//! | `extension/` | modules of vLLM's wheel: fetched by hash, called through torch's stable C ABI |
//! | `triton/` | headway's own kernels in Triton, compiled ahead of time: a manifest of their own, no shim |
//! | `build/` | `headway kernels build`: from FlashInfer's package to a folder |

pub mod build;
#[expect(unsafe_code, reason = "modules are called by addresses and give out objects")]
mod call;
mod elf;
mod error;
pub mod extension;
mod folder;
#[expect(unsafe_code, reason = "the dynamic linker hands out addresses")]
mod library;
mod manifest;
#[expect(unsafe_code, reason = "symbols become functions")]
mod module;
#[expect(unsafe_code, reason = "the shim's functions are C's")]
mod shim;
pub mod triton;

pub(crate) use call::{Arg, Returned, TensorArg};
pub use error::ModuleError;
pub(crate) use folder::sha256;
pub use folder::{FOLDER_VARIABLE, ModuleFolder, default_folder, installed};
pub use manifest::{Entry, FLASHINFER, Kind, MANIFEST, Manifest, Mask, RECIPE, Want, module_dtype};
pub(crate) use module::Module;
pub use shim::load_shim;
pub(crate) use shim::shim;
