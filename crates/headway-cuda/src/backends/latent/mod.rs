//! What the backends of latent attention (MLA) have in common, whoever decodes: the layouts and sizes that they take, the
//! division of a step, the cache write, and prefills, which gather latents, expand them to keys and values through a
//! bounded workspace and attend to those.
//!
//! A decode is the backend's own: between queries in the latent space and weighted latents, both in
//! [`LatentWorkspace`], stands its kernel.

mod group;
mod layer;
mod rules;
mod sizes;
mod work;

pub(super) use group::LatentGroup;
pub(super) use layer::LatentLayer;
pub(super) use rules::{LAYOUTS, deepseek_refusal, deepseek_rules, refusal, workspace_tokens};
pub use sizes::LatentSizes;
pub(super) use sizes::MOST_SHARED;
pub use work::LatentWorkspace;
pub(super) use work::{PrefillWork, alloc};
