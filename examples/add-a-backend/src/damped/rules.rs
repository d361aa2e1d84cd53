//! Lifetime: process. Class 1 of 3: the rule book, and the configuration table.

use super::DampedLayer;
use headway_attention::{AttentionBackend, RuleBook, Standard};
use headway_cpu::{
    CpuAttn, CpuExec,
    backends::cpu_attn::{CpuAttnBuilder, CpuAttnConfig},
};
use serde::Deserialize;
use std::borrow::Borrow;

/// The backend. No value of it exists.
pub enum Damped {}

/// The `[backend.DAMPED_ATTN]` table.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DampedConfig {
    /// Factor on every score before the softmax.
    pub factor: f32,
    /// What the builder, which is `CPU_ATTN`'s, reads.
    pub cpu: CpuAttnConfig,
}

impl Default for DampedConfig {
    fn default() -> Self {
        Self { factor: 1.0, cpu: CpuAttnConfig::default() }
    }
}

/// Lends the builder its part.
impl Borrow<CpuAttnConfig> for DampedConfig {
    fn borrow(&self) -> &CpuAttnConfig {
        &self.cpu
    }
}

impl AttentionBackend for Damped {
    const CONTRACT: u32 = 1;
    type Exec = CpuExec;
    type Kind = Standard;
    type Config = DampedConfig;
    type Builder = CpuAttnBuilder;
    type Impl = DampedLayer;

    fn rules() -> RuleBook {
        RuleBook { name: "DAMPED_ATTN".into(), ..CpuAttn::rules() }
    }
}
