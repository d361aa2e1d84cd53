//! The sizes of a group: one formula for what is allocated, used and reported.

use super::rules::{ALIGNMENT, dims};
use crate::{
    backends::common::refuse,
    kernels::mla::{Dims, PrefillForm, PrefillTile, Run},
};
use headway_attention::{
    AttentionError, ContextParallel, GroupInfo, KvCacheSpec, Result,
    group::{
        arith::{
            context_chunks::ChunkWorkspace,
            mla::{DecodeQueries, MlaConfig},
        },
        kv::spec::{AttentionSpec, KvQuantMode, TokensPerState},
    },
};
use headway_tensor::DType;

/// Bytes of gathered latents, expanded keys and values, unless a setting says otherwise: each pass more is a merge that
/// rounds.
const WORKSPACE_BYTES: usize = 1 << 30;
/// Fewest tokens of the workspace by default.
const LEAST_TOKENS: usize = 64;
/// Bytes of an activation: both types that there are have two.
const ACTIVATION: usize = 2;
/// Shared memory of a block where the device is not known yet: Hopper's.
pub(in crate::backends) const MOST_SHARED: usize = 227 << 10;

/// What a group's builder and layers are sized by, whoever decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentSizes {
    /// The layers' dimensions.
    pub dims: Dims,
    /// Element type of the cache.
    pub cache: DType,
    /// How prefills are divided.
    pub prefill: PrefillForm,
    /// Tokens whose keys and values are expanded at a time, a multiple of 16.
    pub workspace_tokens: usize,
    /// Most new tokens of a request that counts as a decode.
    pub threshold: usize,
    /// Most new tokens of a step's decodes.
    pub decode_tokens: usize,
    /// Most new tokens of a step's prefills.
    pub prefill_tokens: usize,
}

impl LatentSizes {
    /// The sizes of a group, on a device with so much shared memory a block.
    ///
    /// # Errors
    /// A group without latent dimensions, a cache that isn't one plain latent row a token, sizes that the kernels don't
    /// take, in the backend's name.
    pub(in crate::backends) fn new(
        backend: &str,
        group: &GroupInfo,
        workspace_tokens: Option<usize>,
        shared_per_block: usize,
    ) -> Result<Self> {
        let latent = group.latent.as_ref().ok_or_else(|| {
            AttentionError::Inputs(format!("{backend} needs the latent dimensions of its group's layers"))
        })?;
        let dims = dims(group.num_heads, latent);
        let choose = |why: String| refuse(backend, why, "choose another backend for these layers");
        if let Some(what) = dims.refusal() {
            return Err(choose(what));
        }
        let cache = check_spec(backend, &group.spec, &dims)?.dtype;
        if group.context_parallel.size > 1 {
            return Err(refuse(backend, "decode context parallelism", "run without it"));
        }
        let tokens = group.max_num_tokens.max(1);
        // Invariance: a row's bits must not depend on where a prompt was cut, so there is one way to compute it.
        let drafts = group.num_speculative_tokens;
        let threshold = match group.batch_invariant {
            true => tokens,
            false => DecodeQueries::Varlen.reorder_batch_threshold(1, drafts, group.context_parallel, false),
        };
        let most = group.max_model_len.max(tokens).next_multiple_of(ALIGNMENT);
        let by_rule =
            (WORKSPACE_BYTES / token_bytes(&dims) / ALIGNMENT * ALIGNMENT).max(LEAST_TOKENS).min(most);
        Ok(Self {
            dims,
            cache,
            prefill: PrefillForm::choose(&dims, shared_per_block).map_err(choose)?,
            workspace_tokens: workspace_tokens.unwrap_or(by_rule),
            threshold,
            decode_tokens: tokens.min(group.max_num_reqs.saturating_mul(threshold)).max(1),
            prefill_tokens: if group.batch_invariant { 0 } else { tokens },
        })
    }

    /// How steps are computed.
    pub(super) fn config(&self) -> MlaConfig {
        MlaConfig {
            threshold: self.threshold,
            queries: DecodeQueries::Varlen,
            short_extends_as_decodes: true,
            workspace: ChunkWorkspace {
                tokens: self.workspace_tokens,
                alignment: ALIGNMENT,
                context_parallel: ContextParallel::default(),
            },
        }
    }

    /// Bytes of queries in the latent space, and of weighted latents.
    pub(super) fn latent_bytes(&self) -> usize {
        self.decode_tokens * self.dims.heads * self.dims.rank * ACTIVATION
    }

    /// Bytes of the prefills' latents, of their keys and values, and of their log-sum-exps; none where no row is a
    /// prefill's.
    pub(super) fn prefill_bytes(&self) -> [usize; 3] {
        let d = &self.dims;
        let slots = if self.prefill_tokens == 0 { 0 } else { self.workspace_tokens };
        [
            slots * d.latent() * ACTIVATION,
            slots * d.heads * d.expanded() * ACTIVATION,
            self.prefill_tokens * d.heads * 4,
        ]
    }

    /// Most runs and most tiles of a step's prefills.
    ///
    /// A request's context is divided where the workspace is full. One piece is the last; at most one lies behind other
    /// requests' in a workspace; every other fills one. The same goes for its new tokens. All of its rows attend to each
    /// piece, in tiles; those of a piece of new tokens and those behind it in tiles of their own.
    pub(super) fn most_runs_and_tiles(&self, group: &GroupInfo) -> (usize, usize) {
        if self.prefill_tokens == 0 {
            return (1, 1);
        }
        let reqs = group.max_num_reqs.min(self.prefill_tokens);
        let longest = group.max_model_len.max(self.prefill_tokens);
        let pieces = 4 + longest / self.workspace_tokens.max(1);
        let tiles = self.prefill_tokens / self.prefill.rows() + 2 * reqs;
        (pieces.saturating_mul(reqs).max(1), pieces.saturating_mul(tiles).max(1))
    }

    /// Bytes of the lists of a step's prefills.
    pub(in crate::backends) fn list_bytes(&self, group: &GroupInfo) -> usize {
        let (runs, tiles) = self.most_runs_and_tiles(group);
        runs * size_of::<Run>() + tiles * size_of::<PrefillTile>()
    }

    /// Bytes of the workspace around a decode and of prefills.
    pub fn bytes(&self) -> usize {
        2 * self.latent_bytes() + self.prefill_bytes().iter().sum::<usize>()
    }
}

/// Bytes that a token takes in the prefills' workspace.
fn token_bytes(d: &Dims) -> usize {
    (d.latent() + d.heads * d.expanded()) * ACTIVATION
}

fn check_spec<'a>(backend: &str, spec: &'a KvCacheSpec, dims: &Dims) -> Result<&'a AttentionSpec> {
    let KvCacheSpec::Mla(a) = spec else {
        return Err(refuse(
            backend,
            format!("a KV cache of {spec:?}"),
            "caches of one latent row a token are",
        ));
    };
    let plain = matches!(a.quant, KvQuantMode::None | KvQuantMode::Fp8PerTensor)
        && a.tokens_per_state == TokensPerState::ONE
        && a.num_head_slots.is_none_or(|n| n == 1)
        && a.state_content_bytes.is_none()
        && a.cache_format.is_none();
    if !plain || a.num_kv_heads != 1 || a.head_size_v != 0 {
        return Err(refuse(
            backend,
            "a packed or compressed latent cache",
            "one latent row a token, unquantised or as 8-bit floats with one scale, is; choose --kv-cache-dtype auto \
             or fp8",
        ));
    }
    if a.head_size != dims.latent() {
        return Err(refuse(
            backend,
            format!("a latent cache of {} elements a token", a.head_size),
            "rows of kv_lora_rank + qk_rope_head_dim elements are",
        ));
    }
    Ok(a)
}
