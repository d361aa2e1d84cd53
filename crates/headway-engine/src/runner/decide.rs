//! What start-up decides from needs and options alone, before weights or a device: used by
//! [`startup`](super::startup) to start, and by [`explain`](crate::explain) to tell.

use super::StartupError;
use crate::models::needs::{LayerNeeds, MixerNeeds, Reach, StateDims};
use headway_attention::{
    AttnLayer, KindTag, KvCacheSpec, LayerCache, LayerNeed, RuleBook,
    group::kv::{
        layout::KvCacheLayout,
        spec::{AttentionSpec, MambaSpec},
    },
    process::{
        rules::{AttnType, ComputeCapability, KernelBlockSize, KvCacheDType, LatentDims, StateSpaceMixer},
        select::Selection,
    },
};
use headway_tensor::DType;

/// Tokens in a block where neither the user nor a backend says.
pub const DEFAULT_BLOCK_SIZE: usize = 16;
/// Tokens in a block, at most.
const LARGEST_BLOCK: usize = 1 << 20;
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

/// The manager's block size: as asked (selection has checked it), or what the backends prefer.
///
/// # Errors
/// A size that a backend doesn't take.
pub fn block_size<'a>(
    rules: impl Iterator<Item = &'a RuleBook> + Clone,
    asked: Option<usize>,
) -> Result<usize, StartupError> {
    match asked {
        Some(b) if b == 0 || b > LARGEST_BLOCK || !rules.clone().all(|r| r.supports_block_size(b)) => {
            Err(block_size_error(b, rules))
        }
        Some(b) => Ok(b),
        None => {
            let preferred = rules.clone().map(|r| r.preferred_block_size(DEFAULT_BLOCK_SIZE)).max();
            let preferred = preferred.unwrap_or(DEFAULT_BLOCK_SIZE);
            // Backends that prefer different sizes: the first multiple that all take.
            let multiple =
                (1..=64).map(|n| n * preferred).find(|b| rules.clone().all(|r| r.supports_block_size(*b)));
            Ok(multiple.unwrap_or(preferred))
        }
    }
}

/// The error of a block size that isn't taken.
pub fn block_size_error<'a>(asked: usize, rules: impl Iterator<Item = &'a RuleBook> + Clone) -> StartupError {
    StartupError::Option {
        option: "--block-size",
        value: asked.to_string(),
        why: format!("{} takes {}; give such a number, or leave it out", names(rules.clone()), sizes(rules)),
    }
}

fn names<'a>(rules: impl Iterator<Item = &'a RuleBook>) -> String {
    let mut names: Vec<_> = rules.map(|r| r.name.to_string()).collect();
    names.dedup();
    names.join(", ")
}

fn sizes<'a>(rules: impl Iterator<Item = &'a RuleBook>) -> String {
    let mut sizes: Vec<usize> = rules.flat_map(|r| r.kernel_block_sizes.iter().map(smallest)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let least = sizes.clone();
    sizes.retain(|n| !least.iter().any(|m| m < n && n.is_multiple_of(*m)));
    let sizes: Vec<_> = sizes.iter().map(ToString::to_string).collect();
    format!("multiples of {} up to {LARGEST_BLOCK}", sizes.join(" or "))
}

fn smallest(k: &KernelBlockSize) -> usize {
    match *k {
        KernelBlockSize::Exact(n) | KernelBlockSize::MultipleOf(n) => n,
    }
}

/// The block size that makes an attention page at least as large as a page of state: all pages of a pool have
/// one size, and an attention page that is padded up to a state's would waste what it is padded with. The smallest
/// multiple of what the kernels take; `at_least` where that is large enough.
pub fn block_size_beside_states<'a>(
    at_least: usize,
    bytes_per_token: usize,
    state_bytes: usize,
    rules: impl Iterator<Item = &'a RuleBook>,
) -> usize {
    if bytes_per_token == 0 || at_least * bytes_per_token >= state_bytes {
        return at_least;
    }
    let step = rules
        .map(|r| r.kernel_block_sizes.iter().map(smallest).min().unwrap_or(1).max(1))
        .fold(DEFAULT_BLOCK_SIZE, |a, b| a / gcd(a, b) * b);
    state_bytes.div_ceil(bytes_per_token).next_multiple_of(step)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
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
    fn attention_pages_grow_to_a_state() {
        let sixteen =
            RuleBook { kernel_block_sizes: vec![KernelBlockSize::MultipleOf(16)], ..RuleBook::default() };
        let of = |at_least, token, state| {
            block_size_beside_states(at_least, token, state, std::iter::once(&sixteen))
        };
        // 8 heads of 128 in bfloat16 beside a state of 5,316,608 bytes.
        assert_eq!(of(16, 4096, 5_316_608), 1312);
        assert_eq!(of(16, 1024, 1_594_368), 1568);
        assert_eq!(of(2048, 4096, 5_316_608), 2048);
        assert_eq!(of(16, 4096, 0), 16);
    }

    #[test]
    fn layouts_by_name() {
        assert_eq!(layout(Some("nhd")).unwrap(), Some(KvCacheLayout::LBNHC));
        let e = layout(Some("NDH")).unwrap_err().to_string();
        assert!(e.contains("there are: NHD, HND, LBNHC") && e.contains("did you mean"), "{e}");
    }
}
