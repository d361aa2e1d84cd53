//! The sizes of a group's memory: one formula for what is allocated, used and reported.

use super::{
    CpuMlaConfig,
    rules::{NAME, refuse},
};
use crate::kernels::{
    attention::{GROUP, Shape, Workspace},
    mla::{Dims, Pages},
};
use headway_attention::{
    AttentionError, GroupInfo, KvCacheSpec, Result,
    group::kv::spec::{KvQuantMode, TokensPerState},
    process::rules::LatentDims,
};

/// Bytes of expanded keys and values, and of queries in the latent space, unless a setting says otherwise.
const WORKSPACE_BYTES: usize = 64 << 20;
/// Fewest tokens of the workspace by default, where 64 MiB hold fewer.
const LEAST_TOKENS: usize = 64;

/// What a group's builder and layers are sized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The layers' dimensions.
    pub dims: Dims,
    /// Attention of decodes: all heads over one latent row a token.
    pub decode: Shape,
    /// Attention of prefills: each head over its own keys and values.
    pub prefill: Shape,
    /// Tokens whose keys and values are expanded at a time, a multiple of 16.
    pub workspace_tokens: usize,
    /// Decode rows that go through the latent space at a time.
    pub slab_rows: usize,
    /// Most new tokens of a request that counts as a decode.
    pub threshold: usize,
    /// Most new tokens of a step's prefills.
    pub prefill_rows: usize,
}

/// The dimensions of a layer.
pub(super) fn dims(heads: usize, l: &LatentDims) -> Dims {
    Dims { heads, nope: l.qk_nope_head_dim, rope: l.qk_rope_head_dim, rank: l.kv_lora_rank, v: l.v_head_dim }
}

/// The shapes of both halves.
///
/// # Errors
/// Sizes that the kernels don't take.
pub(super) fn shapes(d: &Dims, max_model_len: usize, workspace_tokens: usize) -> Result<(Shape, Shape)> {
    let choose = |why: String| refuse(why, "choose another backend for these layers");
    let decode = Shape::latent(d.heads, d.rank, d.rope, max_model_len).map_err(choose)?;
    let prefill = Shape::new(d.heads, d.heads, d.qk(), d.v, workspace_tokens).map_err(choose)?;
    Ok((decode, prefill))
}

impl Sizes {
    /// The sizes of a group.
    ///
    /// # Errors
    /// A group without latent dimensions, a cache that isn't one plain latent row a token, sizes that the kernels don't
    /// take.
    pub fn new(group: &GroupInfo, config: &CpuMlaConfig) -> Result<Self> {
        let latent = group.latent.as_ref().ok_or_else(|| {
            AttentionError::Inputs(format!("{NAME} needs the latent dimensions of its group's layers"))
        })?;
        let dims = dims(group.num_heads, latent);
        check_spec(&group.spec, &dims)?;
        if group.context_parallel.size > 1 {
            return Err(refuse("decode context parallelism", "run without it on the CPU"));
        }
        let most = group.max_model_len.max(group.max_num_tokens).max(1).next_multiple_of(GROUP);
        let fits = WORKSPACE_BYTES / (Pages::token(&dims).max(1) * size_of::<f32>());
        let by_rule = (fits / GROUP * GROUP).max(LEAST_TOKENS).min(most);
        let workspace_tokens = config.workspace_tokens.unwrap_or(by_rule);
        let (decode, prefill) = shapes(&dims, group.max_model_len, workspace_tokens)?;
        // Invariance: a row's bits must not depend on where a prompt was cut, so there is one way to compute it.
        let threshold = if group.batch_invariant {
            group.max_num_tokens.max(1)
        } else {
            use headway_attention::group::arith::mla::DecodeQueries;
            DecodeQueries::Varlen.reorder_batch_threshold(
                1,
                group.num_speculative_tokens,
                group.context_parallel,
                false,
            )
        };
        let rows = group.max_num_tokens.max(1);
        let decode_rows = rows.min(group.max_num_reqs.saturating_mul(threshold)).max(1);
        let slab = WORKSPACE_BYTES / (dims.heads * dims.latent() * size_of::<f32>());
        Ok(Self {
            dims,
            decode,
            prefill,
            workspace_tokens,
            slab_rows: slab.max(1).min(decode_rows),
            threshold,
            prefill_rows: if group.batch_invariant { 0 } else { rows },
        })
    }

    /// float32 of a slab's queries, weighted latents and values.
    pub(super) fn slab_floats(&self) -> [usize; 3] {
        let d = &self.dims;
        [d.latent(), d.rank, d.v].map(|width| self.slab_rows * d.heads * width)
    }

    /// Slots of the expanded pages: none where no row is a prefill's.
    pub(super) fn slots(&self) -> usize {
        if self.prefill_rows == 0 { 0 } else { self.workspace_tokens }
    }

    /// Bytes of the workspace with so many threads.
    pub fn bytes(&self, threads: usize) -> usize {
        let slots = self.slots();
        let floats = self.slab_floats().iter().sum::<usize>()
            + slots * self.dims.latent()
            + self.prefill_rows * self.dims.heads;
        let prefill = if slots == 0 { 0 } else { Workspace::bytes(&self.prefill, threads) };
        floats * size_of::<f32>()
            + Pages::bytes(&self.dims, slots)
            + Workspace::bytes(&self.decode, threads)
            + prefill
    }
}

fn check_spec(spec: &KvCacheSpec, dims: &Dims) -> Result<()> {
    let KvCacheSpec::Mla(a) = spec else {
        return Err(refuse(format!("a KV cache of {spec:?}"), "caches of one latent row a token are"));
    };
    let plain = matches!(a.quant, KvQuantMode::None | KvQuantMode::Fp8PerTensor)
        && a.tokens_per_state == TokensPerState::ONE
        && a.num_head_slots.is_none_or(|n| n == 1)
        && a.state_content_bytes.is_none()
        && a.cache_format.is_none();
    if !plain || a.num_kv_heads != 1 || a.head_size_v != 0 {
        return Err(refuse(
            "a packed or compressed latent cache",
            "one latent row a token, unquantised or as 8-bit floats with one scale, is; choose --kv-cache-dtype auto \
             or fp8",
        ));
    }
    if a.head_size != dims.latent() {
        return Err(refuse(
            format!("a latent cache of {} elements a token", a.head_size),
            "rows of kv_lora_rank + qk_rope_head_dim elements are",
        ));
    }
    Ok(())
}
