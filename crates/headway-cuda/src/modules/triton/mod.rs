//! Kernels of headway's own in Triton, compiled ahead of time by `headway kernels build triton`, and launched like any
//! other: no Python takes part.
//!
//! | file | what |
//! |---|---|
//! | `form.rs` | the forms that a layer needs: tile sizes, constants, arguments |
//! | `manifest.rs` | `triton.json`: what a folder holds, and what each launch needs |
//! | `folder.rs` | which of it serves a layer, whether a file is what the manifest says (`cubin.rs`: machine code with that function) |
//! | `build.rs` | the user's Python with Triton makes them of `csrc/triton/`; no GPU is needed |

mod build;
mod cubin;
mod error;
mod folder;
mod form;
mod manifest;

pub use build::{TritonBuild, TritonReport, build_triton};
pub use error::TritonError;
pub use folder::{TritonFolder, installed_triton};
pub use form::{Form, FormKind, MOST_PARTS, TritonWant, WantOf};
pub use manifest::{TRITON_MANIFEST, TritonEntry, TritonManifest};
use std::sync::OnceLock;

/// The version of Triton that kernels are compiled with: what a kernel gets after its own arguments changes between
/// minor versions. This one's get two scratch areas' addresses, null where their sizes are 0.
pub const TRITON: &str = "3.6.0";

/// What they are made of, by the names that Python imports: the kernels, and what compiles them.
const SOURCES: [(&str, &str); 3] = [
    ("attention.py", include_str!("../../../csrc/triton/attention.py")),
    ("latent.py", include_str!("../../../csrc/triton/latent.py")),
    ("compile.py", include_str!("../../../csrc/triton/compile.py")),
];

/// Names what kernels are made of: those of other sources count as not built.
pub fn recipe() -> &'static str {
    static RECIPE: OnceLock<String> = OnceLock::new();
    RECIPE.get_or_init(|| {
        let text = SOURCES.map(|(name, text)| format!("{name} {}\n{text}\n", text.len())).concat();
        let mut sum = super::folder::sha256(text.as_bytes());
        sum.truncate(16);
        sum
    })
}
