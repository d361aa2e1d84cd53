//! Backends for tests of the contract: they plan and build like real ones, and compute nothing that
//! a test doesn't look at.
#![allow(dead_code, reason = "each test file uses its part")]

use headway_attention::{
    group::kv::layout::KvCacheLayout,
    process::rules::{AttnType, KernelBlockSize},
    *,
};
use headway_tensor::{Device, DeviceMem, Dual, Exec, TensorMut, View};
use std::sync::Arc;

/// The host, without threads.
pub struct HostExec;

impl Exec for HostExec {
    fn device(&self) -> Device {
        Device { kind: "cpu", index: 0 }
    }
    fn alloc(&self, _: usize) -> headway_tensor::Result<Option<Arc<dyn DeviceMem>>> {
        Ok(None)
    }
    fn upload(&self, _: &Arc<dyn DeviceMem>, _: usize, _: &[u8]) {}
}

/// Metadata that carries what it was built from.
#[derive(Clone, Debug)]
pub struct HostMeta {
    pub block_table: Dual<i32>,
    pub stride: usize,
    pub seq_lens: View<i32>,
    pub slots: View<i64>,
    pub split: DecodeSplit,
    pub rows: i32,
}

#[derive(serde::Deserialize, Default, Debug, Clone)]
#[serde(default, deny_unknown_fields)]
pub struct HostConfig {
    pub rows: i32,
}

pub struct HostBuilder {
    threshold: usize,
    rows: i32,
}

impl MetadataBuilder for HostBuilder {
    type Exec = HostExec;
    type Config = HostConfig;
    type Metadata = HostMeta;
    const UPDATES_BLOCK_TABLE: bool = true;

    fn new(_: &HostExec, _: &GroupInfo, plan: &BuilderPlan, config: &HostConfig) -> Result<Self> {
        Ok(Self { threshold: plan.reorder_batch_threshold.unwrap_or(1), rows: config.rows })
    }

    fn build(&mut self, _: &HostExec, common: &CommonAttentionMetadata) -> Result<HostMeta> {
        let inputs = &common.inputs;
        let decodes = (0..inputs.num_reqs).take_while(|&r| inputs.query_len(r) <= self.threshold).count();
        let decode_tokens = inputs.query_start_loc.host()[decodes] as usize;
        Ok(HostMeta {
            block_table: common.block_table.clone(),
            stride: common.block_table_stride,
            seq_lens: inputs.seq_lens.clone(),
            slots: common.slot_mapping.clone(),
            split: DecodeSplit { decodes, decode_tokens },
            rows: self.rows,
        })
    }

    fn update_block_table(
        &mut self,
        _: &HostExec,
        first: &HostMeta,
        common: &CommonAttentionMetadata,
    ) -> Result<HostMeta> {
        Ok(HostMeta {
            block_table: common.block_table.clone(),
            stride: common.block_table_stride,
            slots: common.slot_mapping.clone(),
            ..first.clone()
        })
    }

    fn split(m: &HostMeta) -> DecodeSplit {
        m.split
    }
}

/// Copies q to the output, and keeps what it was given.
pub struct HostLayer;

impl LayerImpl for HostLayer {
    type Exec = HostExec;
    type Config = HostConfig;
    type Metadata = HostMeta;
}

impl AttentionImpl for HostLayer {
    fn new(_: &AttentionArgs<'_>, _: &HostConfig) -> Result<Self> {
        Ok(Self)
    }
    fn update_kv_cache(
        &self,
        _: &HostExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        slots: &View<i64>,
    ) -> Result<()> {
        let k = x.k.into_host::<f32>()?;
        let width = k.len() / slots.len().max(1);
        let (page, block, offset, stride) = (kv.page_bytes, kv.block_size, kv.offset, kv.block_stride);
        let bytes = kv.host_bytes()?;
        for (t, &slot) in slots.host().unwrap_or(&[]).iter().enumerate() {
            if slot < 0 {
                continue;
            }
            let (b, n) = (slot as usize / block, slot as usize % block);
            let at = offset + b * stride + n * (page / block);
            for (i, v) in k[t * width..(t + 1) * width].iter().enumerate() {
                bytes[at + 4 * i..at + 4 * i + 4].copy_from_slice(&v.to_ne_bytes());
            }
        }
        Ok(())
    }
    fn forward(
        &self,
        _: &HostExec,
        x: &Qkv<'_>,
        _: &mut KvMut<'_>,
        m: &HostMeta,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let q = x.q.into_host::<f32>()?;
        for (o, q) in out.into_host::<f32>()?.iter_mut().zip(q) {
            *o = q + m.rows as f32;
        }
        Ok(())
    }
}

macro_rules! host_backend {
    ($type:ident, $name:literal, $blocks:expr, $rules:expr) => {
        pub enum $type {}
        impl AttentionBackend for $type {
            const CONTRACT: u32 = 1;
            type Exec = HostExec;
            type Kind = Standard;
            type Config = HostConfig;
            type Builder = HostBuilder;
            type Impl = HostLayer;
            fn rules() -> RuleBook {
                let base = RuleBook {
                    name: $name.into(),
                    dtypes: vec![headway_tensor::DType::F32, headway_tensor::DType::BF16],
                    kernel_block_sizes: $blocks,
                    attn_types: vec![AttnType::Decoder, AttnType::EncoderOnly],
                    forward_includes_kv_cache_update: false,
                    reorder_batch_threshold: Some(1),
                    ..RuleBook::default()
                };
                ($rules)(base)
            }
        }
    };
}

host_backend!(HostAttn, "HOST_ATTN", vec![KernelBlockSize::MultipleOf(1)], |r| r);
host_backend!(
    SmallBlocks,
    "SMALL_BLOCKS",
    vec![KernelBlockSize::Exact(16), KernelBlockSize::Exact(32)],
    |r: RuleBook| RuleBook { kv_cache_layouts: vec![KvCacheLayout::LBHNC, KvCacheLayout::LBNHC], ..r }
);
host_backend!(NoWindow, "NO_WINDOW", vec![KernelBlockSize::MultipleOf(64)], |r: RuleBook| RuleBook {
    supports_sliding_window: false,
    ..r
});

host_backend!(Invariant, "INVARIANT", vec![], |r: RuleBook| RuleBook {
    supports_batch_invariance: true,
    ..r
});

/// Built for another contract.
pub enum OldContract {}

impl AttentionBackend for OldContract {
    const CONTRACT: u32 = 0;
    type Exec = HostExec;
    type Kind = Standard;
    type Config = HostConfig;
    type Builder = HostBuilder;
    type Impl = HostLayer;
    fn rules() -> RuleBook {
        RuleBook { name: "OLD_CONTRACT".into(), ..RuleBook::default() }
    }
}

/// A plugin's own table, which lends the host builder its part.
#[derive(serde::Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub struct PluginConfig {
    pub verbose: bool,
    pub host: HostConfig,
}

impl std::borrow::Borrow<HostConfig> for PluginConfig {
    fn borrow(&self) -> &HostConfig {
        &self.host
    }
}

/// A plugin's layer over the host backend's metadata.
pub struct PluginLayer;

impl LayerImpl for PluginLayer {
    type Exec = HostExec;
    type Config = PluginConfig;
    type Metadata = HostMeta;
}

impl AttentionImpl for PluginLayer {
    fn new(_: &AttentionArgs<'_>, _: &PluginConfig) -> Result<Self> {
        Ok(Self)
    }
    fn update_kv_cache(&self, _: &HostExec, _: &Qkv<'_>, _: &mut KvMut<'_>, _: &View<i64>) -> Result<()> {
        Ok(())
    }
    fn forward(
        &self,
        _: &HostExec,
        _: &Qkv<'_>,
        _: &mut KvMut<'_>,
        m: &HostMeta,
        out: TensorMut<'_>,
    ) -> Result<()> {
        out.into_host::<f32>()?.fill(m.rows as f32);
        Ok(())
    }
}

/// A plugin that reuses another backend's builder.
pub enum Plugin {}

impl AttentionBackend for Plugin {
    const CONTRACT: u32 = 1;
    type Exec = HostExec;
    type Kind = Standard;
    type Config = PluginConfig;
    type Builder = HostBuilder;
    type Impl = PluginLayer;
    fn rules() -> RuleBook {
        RuleBook { name: "PLUGIN".into(), ..RuleBook::default() }
    }
}

/// A registry of the host backends, most preferred first.
pub fn registry() -> Registry {
    let mut r = Registry::default();
    r.register::<NoWindow>().unwrap();
    r.register::<SmallBlocks>().unwrap();
    r.register::<HostAttn>().unwrap();
    r
}

/// A step's inputs by query and sequence lengths.
pub fn inputs(query_lens: &[i32], seq_lens: &[i32]) -> StepInputs {
    let mut q = vec![0];
    for l in query_lens {
        q.push(q[q.len() - 1] + l);
    }
    StepInputs::new(Dual::from_vec(q), View::from_vec(seq_lens.to_vec()), seq_lens.to_vec()).unwrap()
}
