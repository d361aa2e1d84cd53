//! A layer of the tests: its numbers, its group, the kernel and the reference.

use super::world::World;
use headway_attention::{
    AttentionArgs, AttentionImpl, AttnLayer, GroupInfo, KvCacheSpec, group::kv::spec::AttentionSpec,
};
use headway_cpu::backends::cpu_attn::{CpuAttnConfig, CpuAttnLayer};
use headway_tensor::{DType, View};
use headway_testkit::{Answer, PagedBatch, Params, attend_paged};

/// A layer and the cache's shape.
#[derive(Clone, Debug)]
pub struct Layer {
    pub heads: usize,
    pub kv_heads: usize,
    pub size: usize,
    pub size_v: usize,
    pub dtype: DType,
    pub cache: DType,
    pub block_size: usize,
    pub window: Option<usize>,
    pub rswa: Option<usize>,
    pub cap: Option<f32>,
    pub alibi: bool,
    pub sinks: bool,
    pub scales: (f32, f32),
}

impl Layer {
    pub fn plain(heads: usize, kv_heads: usize, size: usize) -> Self {
        Self {
            heads,
            kv_heads,
            size,
            size_v: size,
            dtype: DType::F32,
            cache: DType::F32,
            block_size: 16,
            window: None,
            rswa: None,
            cap: None,
            alibi: false,
            sinks: false,
            scales: (1.0, 1.0),
        }
    }

    pub fn slopes(&self) -> Vec<f32> {
        (0..self.heads).map(|h| 2f32.powf(-8.0 * (h + 1) as f32 / self.heads as f32)).collect()
    }

    pub fn sink_logits(&self) -> Vec<f32> {
        (0..self.heads).map(|h| (h as f32 * 0.7).sin() * 3.0).collect()
    }

    pub fn spec(&self) -> AttentionSpec {
        AttentionSpec {
            head_size_v: self.size_v,
            ..AttentionSpec::new(self.block_size, self.kv_heads, self.size, self.cache)
        }
    }

    pub fn group(&self, windowed: bool) -> GroupInfo {
        let attention = self.spec();
        let spec = match (self.window.filter(|_| windowed), self.rswa) {
            (_, Some(rswa_window)) => KvCacheSpec::Rswa { attention, rswa_window },
            (Some(sliding_window), _) => KvCacheSpec::SlidingWindow { attention, sliding_window },
            _ => KvCacheSpec::Full(attention),
        };
        GroupInfo {
            layers: vec![AttnLayer(0)],
            max_num_reqs: 64,
            max_num_tokens: 4096,
            max_model_len: 4096,
            ..GroupInfo::new(spec, self.heads)
        }
    }

    pub fn kernel(&self) -> CpuAttnLayer {
        let (slopes, sinks) = (self.slopes(), View::from_vec(self.sink_logits()));
        let args = AttentionArgs {
            layer: AttnLayer(0),
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            head_size: self.size,
            head_size_v: self.size_v,
            scale: (self.size as f32).powf(-0.5),
            sliding_window: self.window,
            logit_soft_cap: self.cap,
            alibi_slopes: self.alibi.then_some(&slopes[..]),
            sinks: self.sinks.then_some(&sinks),
            dtype: self.dtype,
            kv_cache_dtype: self.cache,
            k_scale: self.scales.0,
            v_scale: self.scales.1,
        };
        CpuAttnLayer::new(&args, &CpuAttnConfig::default()).unwrap()
    }

    pub fn reference(&self, world: &World) -> Answer {
        let (slopes, sinks) = (self.slopes(), self.sink_logits());
        let params = Params {
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            head_size: self.size,
            head_size_v: self.size_v,
            scale: f64::from((self.size as f32).powf(-0.5)),
            sliding_window: self.window,
            rswa_window: self.rswa,
            logit_soft_cap: self.cap.map(f64::from),
            alibi_slopes: self.alibi.then_some(&slopes[..]),
            sinks: self.sinks.then_some(&sinks[..]),
        };
        let q: Vec<f64> = world.q.f64();
        attend_paged(
            &params,
            &PagedBatch {
                q: &q[..world.rows() * self.heads * self.size],
                query_start_loc: &world.query_start_loc,
                seq_lens: &world.seq_lens,
                block_table: &world.table,
                block_table_stride: world.stride,
                block_size: self.block_size,
                k_by_slot: &world.k_shadow,
                v_by_slot: &world.v_shadow,
                causal: &world.causal,
                spans: &world.spans,
                prefixes: &world.prefixes,
            },
        )
    }
}
