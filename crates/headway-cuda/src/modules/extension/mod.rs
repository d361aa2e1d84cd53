//! Extension modules of the vLLM wheel: FlashAttention-3 and FlashMLA as vLLM builds them, called through torch's stable C
//! ABI without torch. They are taken out of one version of the wheel, by hash, and opened at run time.
//!
//! | file | what |
//! |---|---|
//! | `pins.rs` | the version, its files, their hashes, the functions that headway calls |
//! | `fetch.rs` | `headway kernels fetch`: from the wheel to a folder |
//! | `check.rs` | whether a file is that file, and imports nothing that the shim lacks |
//! | `stub.rs` | empty libraries with the names of torch's, which modules need to be opened |
//! | `torch.rs` | the shim's functions for callers |
//! | `catch.rs` | a call that ends where a C++ exception would leave it: an error in its words |
//! | `frame.rs` | the frame of assembly that such an exception ends in; `no_frame.rs` on other systems |
//! | `module.rs` | an open module, and a call of one of its kernels |

#[expect(unsafe_code, reason = "a frame of assembly catches what C++ throws")]
mod catch;
mod check;
mod error;
mod fetch;
#[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), path = "no_frame.rs")]
#[expect(unsafe_code, reason = "assembly, and what the unwinder asks of it")]
mod frame;
#[expect(unsafe_code, reason = "kernels are called by addresses")]
mod module;
mod pins;
mod stub;
#[expect(unsafe_code, reason = "the shim's functions are C's")]
mod torch;

pub use check::{check, try_extension};
pub use error::ExtensionError;
pub use fetch::{FetchOptions, FetchReport, fetch};
pub use module::Extension;
pub(crate) use module::Place;
pub use pins::{ExtensionEntry, Extensions, Pin, Returns, VLLM};
