//! What start-up decides from needs and options alone, before weights or a device: used by
//! `startup` to start, and by [`explain`](crate::explain) to tell.

use super::StartupError;
use crate::models::needs::{LayerNeeds, MixerNeeds, Reach, StateDims};
use headway_attention::{
    AttnLayer, KindTag, KvCacheSpec, LayerCache, LayerNeed,
    group::kv::{
        layout::KvCacheLayout,
        spec::{AttentionSpec, MambaSpec},
    },
    process::{
        rules::{AttnType, ComputeCapability, KvCacheDType, LatentDims, StateSpaceMixer},
        select::Selection,
    },
};
use headway_tensor::DType;

/// Bytes of a row of 512 latent and 64 rotated elements in the packed format `fp8_ds_mla`: the latent in 8 bits,
/// four scales in 32, the rotated part in 16.
const DS_MLA_ROW: (usize, usize) = (576, 656);

/// What bears on every layer besides the layer itself.
#[derive(Clone, Debug)]
pub struct Setting {
    /// `cpu` or `cuda`.
    pub platform: &'static str,
    /// The device's compute capability, where it has one.
    pub capability: Option<ComputeCapability>,
    /// Activations.
    pub dtype: DType,
    /// The KV cache's dtype, as rule books name it.
    pub kv_cache_dtype: KvCacheDType,
    /// Its element type.
    pub kv_element: DType,
    /// `--block-size`.
    pub block_size: Option<usize>,
    /// `--batch-invariant`.
    pub batch_invariant: bool,
    /// `--kv-connector`.
    pub kv_connector: bool,
    /// Tensor-parallel ranks.
    pub tp: usize,
    /// Decode context-parallel ranks.
    pub dcp: usize,
    /// Prefill context-parallel ranks.
    pub pcp: usize,
    /// Tokens drafted a step.
    pub speculative_tokens: usize,
    /// The head size that the model's config names.
    pub model_head_size: Option<usize>,
}

impl Setting {
    /// One rank of a CPU, with nothing asked.
    pub fn cpu(dtype: DType, kv_cache_dtype: KvCacheDType, kv_element: DType) -> Self {
        Self {
            platform: "cpu",
            capability: None,
            dtype,
            kv_cache_dtype,
            kv_element,
            block_size: None,
            batch_invariant: false,
            kv_connector: false,
            tp: 1,
            dcp: 1,
            pcp: 1,
            speculative_tokens: 0,
            model_head_size: None,
        }
    }

    /// The question that selection puts for this layer.
    pub fn need(&self, layer: &LayerNeeds) -> LayerNeed {
        let base = LayerNeed {
            platform: self.platform.into(),
            compute_capability: self.capability,
            model_head_size: self.model_head_size,
            dtype: self.dtype,
            kv_cache_dtype: Some(self.kv_cache_dtype.clone()),
            block_size: self.block_size,
            use_batch_invariant: self.batch_invariant,
            use_kv_connector: self.kv_connector,
            use_dcp: self.dcp > 1,
            use_pcp: self.pcp > 1,
            num_speculative_tokens: self.speculative_tokens,
            ..LayerNeed::default()
        };
        match &layer.mixer {
            MixerNeeds::Attention(a) => LayerNeed {
                head_size: a.head_size,
                head_size_v: a.head_size_v,
                num_heads: self.share(a.num_heads),
                num_kv_heads: self.share(a.num_kv_heads),
                attn_type: a.attn_type,
                has_cache: !matches!(a.attn_type, AttnType::Encoder | AttnType::EncoderOnly),
                sliding_window: match a.reach {
                    Reach::Window(w) => Some(w),
                    _ => None,
                },
                has_sinks: a.sinks,
                has_logit_soft_cap: a.logit_soft_cap,
                has_alibi: a.alibi,
                use_mm_prefix: a.mm_prefix,
                use_rswa: matches!(a.reach, Reach::Rswa(_)),
                use_chunked_local: matches!(a.reach, Reach::Chunk(_)),
                use_non_causal: !a.causal,
                ..base
            },
            MixerNeeds::Mla(m) => LayerNeed {
                kind: KindTag::Mla,
                head_size: m.head_size(),
                head_size_v: m.head_size(),
                num_heads: self.share(m.num_heads),
                num_kv_heads: 1,
                latent: Some(LatentDims {
                    qk_nope_head_dim: m.qk_nope_head_dim,
                    qk_rope_head_dim: m.qk_rope_head_dim,
                    kv_lora_rank: m.kv_lora_rank,
                    v_head_dim: m.v_head_dim,
                    index_topk: m.index_topk,
                }),
                use_sparse: m.index_topk.is_some(),
                ..base
            },
            // A state is no KV cache: what is asked of the cache isn't asked of it.
            MixerNeeds::State(d) => LayerNeed {
                kind: KindTag::StateSpace,
                head_size: d.head_size(),
                head_size_v: d.head_size(),
                num_heads: self.share(d.divided()),
                state_space: Some(mixer(*d)),
                kv_cache_dtype: None,
                block_size: None,
                use_batch_invariant: false,
                use_kv_connector: false,
                use_dcp: false,
                use_pcp: false,
                ..base
            },
        }
    }

    /// Heads on a rank; those that are fewer than the ranks are on all of them.
    fn share(&self, heads: usize) -> usize {
        (heads / self.tp).max(1)
    }

    /// What a layer's cache holds on a rank.
    pub fn cache_spec(&self, layer: &LayerNeeds, block_size: usize, max_model_len: usize) -> KvCacheSpec {
        match &layer.mixer {
            MixerNeeds::Attention(a) => {
                let attention = AttentionSpec {
                    head_size_v: a.head_size_v,
                    non_causal: !a.causal,
                    ..AttentionSpec::new(block_size, self.share(a.num_kv_heads), a.head_size, self.kv_element)
                };
                match (a.attn_type, a.reach) {
                    (AttnType::Encoder | AttnType::EncoderOnly, _) => KvCacheSpec::EncoderOnly(attention),
                    (AttnType::EncoderDecoder, _) => KvCacheSpec::Cross(attention),
                    (_, Reach::Window(sliding_window)) => {
                        KvCacheSpec::SlidingWindow { attention, sliding_window }
                    }
                    (_, Reach::Chunk(attention_chunk_size)) => {
                        KvCacheSpec::ChunkedLocal { attention, attention_chunk_size }
                    }
                    (_, Reach::Rswa(rswa_window)) => KvCacheSpec::Rswa { attention, rswa_window },
                    (_, Reach::All) => KvCacheSpec::Full(attention),
                }
            }
            MixerNeeds::Mla(m) => {
                let packed = self.kv_cache_dtype.0 == "fp8_ds_mla" && m.head_size() == DS_MLA_ROW.0;
                KvCacheSpec::Mla(AttentionSpec {
                    head_size_v: 0,
                    state_content_bytes: packed.then_some(DS_MLA_ROW.1),
                    cache_format: packed.then(|| self.kv_cache_dtype.to_string()),
                    ..AttentionSpec::new(block_size, 1, m.head_size(), self.kv_element)
                })
            }
            MixerNeeds::State(d) => {
                let (shapes, dtypes) = d.tensors(self.tp, self.speculative_tokens, self.dtype);
                KvCacheSpec::Mamba(MambaSpec {
                    num_speculative_blocks: self.speculative_tokens,
                    chunk_size: d.chunk(),
                    ..MambaSpec::new(max_model_len, shapes, dtypes)
                })
            }
        }
    }

    /// The layers as the cache's plan sees them, with the block size in force.
    pub fn caches(
        &self,
        layers: &[LayerNeeds],
        selections: &[Selection],
        block_size: usize,
        max_model_len: usize,
    ) -> Vec<LayerCache> {
        let zipped = layers.iter().zip(selections).enumerate();
        zipped
            .map(|(i, (l, s))| LayerCache {
                layer: AttnLayer(i as u32),
                spec: self.cache_spec(l, block_size, max_model_len),
                backend: s.backend.clone(),
                num_heads: self.need(l).num_heads,
                latent: self.need(l).latent,
                shares_cache_of: l.shares_cache_of.map(|o| AttnLayer(o as u32)),
            })
            .collect()
    }
}

fn mixer(d: StateDims) -> StateSpaceMixer {
    match d {
        StateDims::Mamba1 { .. } => StateSpaceMixer::Mamba1,
        StateDims::Mamba2 { .. } => StateSpaceMixer::Mamba2,
        StateDims::GatedDelta { .. } | StateDims::KimiDelta { .. } => StateSpaceMixer::Gdn,
        StateDims::Linear { .. } => StateSpaceMixer::Linear,
        StateDims::ShortConv { .. } => StateSpaceMixer::ShortConv,
    }
}

/// `--kv-layout` by name.
///
/// # Errors
/// An unknown one, with those there are and the nearest by spelling.
pub fn layout(asked: Option<&str>) -> Result<Option<KvCacheLayout>, StartupError> {
    let Some(asked) = asked else { return Ok(None) };
    asked.to_ascii_uppercase().parse().map(Some).map_err(|_| {
        let known = ["NHD", "HND"].into_iter().chain(KvCacheLayout::ALL.iter().map(|l| l.name()));
        let near = headway_attention::process::registry::nearest(asked, known.clone());
        StartupError::Option {
            option: "--kv-layout",
            value: asked.into(),
            why: format!(
                "unknown; there are: {}{}",
                known.collect::<Vec<_>>().join(", "),
                near.map(|n| format!(" (did you mean {n}?)")).unwrap_or_default()
            ),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_by_name() {
        assert_eq!(layout(Some("nhd")).unwrap(), Some(KvCacheLayout::LBNHC));
        let e = layout(Some("NDH")).unwrap_err().to_string();
        assert!(e.contains("there are: NHD, HND, LBNHC") && e.contains("did you mean"), "{e}");
    }
}
