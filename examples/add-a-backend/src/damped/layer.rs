//! Lifetime: the model, per layer. Class 3 of 3: `CPU_ATTN`'s layer with another scale.

use super::DampedConfig;
use headway_attention::{AttentionArgs, AttentionError, AttentionImpl, KvMut, LayerImpl, Qkv, Result};
use headway_cpu::{
    CpuExec,
    backends::cpu_attn::{CpuAttnLayer, CpuAttnMetadata},
};
use headway_tensor::{TensorMut, View};

/// One layer.
pub struct DampedLayer(CpuAttnLayer);

impl LayerImpl for DampedLayer {
    type Exec = CpuExec;
    type Config = DampedConfig;
    type Metadata = CpuAttnMetadata;
}

impl AttentionImpl for DampedLayer {
    fn new(args: &AttentionArgs<'_>, config: &DampedConfig) -> Result<Self> {
        if !config.factor.is_finite() || config.factor <= 0.0 {
            return Err(AttentionError::Config {
                backend: "DAMPED_ATTN".into(),
                why: format!("factor {} is not a finite number above 0", config.factor),
            });
        }
        let args = AttentionArgs { scale: args.scale * config.factor, ..args.clone() };
        Ok(Self(CpuAttnLayer::new(&args, &config.cpu)?))
    }

    fn update_kv_cache(
        &self,
        cx: &CpuExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        slot_mapping: &View<i64>,
    ) -> Result<()> {
        self.0.update_kv_cache(cx, x, kv, slot_mapping)
    }

    fn forward(
        &self,
        cx: &CpuExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &CpuAttnMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        self.0.forward(cx, x, kv, metadata, out)
    }
}
