//! The sizes of a group's memory: one formula for what is allocated, used and reported.

use super::{
    CudaMlaConfig,
    rules::{ALIGNMENT, NAME, dims},
};
use crate::{
    DeviceInfo,
    backends::common::refuse,
    kernels::{
        attention::{Planner, Tile},
        mla::{DecodeForm, Dims, PrefillForm},
    },
};
use headway_attention::{
    AttentionError, GroupInfo, KvCacheSpec, Result,
    group::{
        arith::mla::DecodeQueries,
        kv::spec::{AttentionSpec, KvQuantMode, TokensPerState},
    },
};

/// Bytes of gathered latents, expanded keys and values, unless a setting says otherwise: each pass more is a merge that
/// rounds.
const WORKSPACE_BYTES: usize = 1 << 30;
/// Fewest tokens of the workspace by default.
const LEAST_TOKENS: usize = 64;
/// Bytes of an activation: both types that there are have two.
const ACTIVATION: usize = 2;
/// Waves of parts that are weighed against each other: partial results are large.
const WAVES: usize = 2;

/// What forms are chosen by, of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chip<'a> {
    pub shared_per_block: usize,
    /// `None`: not known yet; Hopper's multiprocessors are taken.
    pub info: Option<&'a DeviceInfo>,
}

impl Chip<'static> {
    /// Where the device is not known yet.
    pub const USUAL: Self = Self { shared_per_block: 227 << 10, info: None };
}

impl<'a> Chip<'a> {
    pub fn of(info: &'a DeviceInfo) -> Self {
        Self { shared_per_block: info.shared_per_block as usize, info: Some(info) }
    }
}

/// What a group's builder and layers are sized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The layers' dimensions.
    pub dims: Dims,
    /// How decodes are divided.
    pub decode: DecodeForm,
    /// How prefills are.
    pub prefill: PrefillForm,
    /// The decodes' planner, with its limits.
    pub planner: Planner,
    /// Tokens whose keys and values are expanded at a time, a multiple of 16.
    pub workspace_tokens: usize,
    /// Most new tokens of a request that counts as a decode.
    pub threshold: usize,
    /// Most new tokens of a step's decodes.
    pub decode_tokens: usize,
    /// Most new tokens of a step's prefills.
    pub prefill_tokens: usize,
}

impl Sizes {
    /// The sizes of a group.
    ///
    /// # Errors
    /// A group without latent dimensions, a cache that isn't one plain latent row a token, sizes that the kernels don't
    /// take.
    pub(super) fn new(group: &GroupInfo, config: &CudaMlaConfig, chip: Chip<'_>) -> Result<Self> {
        let latent = group.latent.as_ref().ok_or_else(|| {
            AttentionError::Inputs(format!("{NAME} needs the latent dimensions of its group's layers"))
        })?;
        let dims = dims(group.num_heads, latent);
        let choose = |why: String| refuse(NAME, why, "choose another backend for these layers");
        if let Some(what) = dims.refusal() {
            return Err(choose(what));
        }
        let cache = check_spec(&group.spec, &dims)?.dtype;
        if group.context_parallel.size > 1 {
            return Err(refuse(NAME, "decode context parallelism", "run without it"));
        }
        let tokens = group.max_num_tokens.max(1);
        // Invariance: a row's bits must not depend on where a prompt was cut, so there is one way to compute it.
        let drafts = group.num_speculative_tokens;
        let threshold = match group.batch_invariant {
            true => tokens,
            false => DecodeQueries::Varlen.reorder_batch_threshold(1, drafts, group.context_parallel, false),
        };
        let decode_tokens = tokens.min(group.max_num_reqs.saturating_mul(threshold)).max(1);
        let rows = dims.heads * (1 + drafts);
        let decode = DecodeForm::choose(&dims, cache, rows, chip.shared_per_block).map_err(choose)?;
        let prefill = PrefillForm::choose(&dims, chip.shared_per_block).map_err(choose)?;
        let mut planner = Planner {
            group: dims.heads,
            kv_heads: 1,
            few_rows: decode.rows,
            many_rows: None,
            slots: chip.info.map_or(132, |info| decode.slots(&dims, cache, info)),
            waves: WAVES,
            window: None,
            batch_invariant: group.batch_invariant,
            max_tiles: 0,
            max_part_rows: 0,
        };
        (planner.max_tiles, planner.max_part_rows) = planner.limits(group.max_num_reqs, decode_tokens);
        let most = group.max_model_len.max(tokens).next_multiple_of(ALIGNMENT);
        let by_rule =
            (WORKSPACE_BYTES / token_bytes(&dims) / ALIGNMENT * ALIGNMENT).max(LEAST_TOKENS).min(most);
        Ok(Self {
            dims,
            decode,
            prefill,
            planner,
            workspace_tokens: config.workspace_tokens.unwrap_or(by_rule),
            threshold,
            decode_tokens,
            prefill_tokens: if group.batch_invariant { 0 } else { tokens },
        })
    }

    /// Slots of the prefills' workspace: none where no row is a prefill's.
    fn slots(&self) -> usize {
        if self.prefill_tokens == 0 { 0 } else { self.workspace_tokens }
    }

    /// Bytes of queries in the latent space, and of weighted latents.
    pub(super) fn latent_bytes(&self) -> usize {
        self.decode_tokens * self.dims.heads * self.dims.rank * ACTIVATION
    }

    /// Bytes of the decodes' partial results, and of their sums.
    pub(super) fn part_bytes(&self) -> [usize; 2] {
        let own = self.planner.slots * self.decode.rows;
        [(self.planner.max_part_rows + own) * self.dims.rank * 4, self.planner.max_part_rows * 8]
    }

    /// Bytes of the prefills' latents, of their keys and values, and of their log-sum-exps.
    pub(super) fn prefill_bytes(&self) -> [usize; 3] {
        let (d, slots) = (&self.dims, self.slots());
        [
            slots * d.latent() * ACTIVATION,
            slots * d.heads * d.expanded() * ACTIVATION,
            self.prefill_tokens * d.heads * 4,
        ]
    }

    /// Bytes of the workspace.
    pub fn bytes(&self) -> usize {
        2 * self.latent_bytes()
            + self.part_bytes().iter().sum::<usize>()
            + self.prefill_bytes().iter().sum::<usize>()
    }

    /// Bytes of the decodes' lists.
    pub(super) fn list_bytes(&self) -> usize {
        2 * (self.planner.max_tiles + 1) * size_of::<Tile>()
    }
}

/// Bytes that a token takes in the prefills' workspace.
fn token_bytes(d: &Dims) -> usize {
    (d.latent() + d.heads * d.expanded()) * ACTIVATION
}

fn check_spec<'a>(spec: &'a KvCacheSpec, dims: &Dims) -> Result<&'a AttentionSpec> {
    let KvCacheSpec::Mla(a) = spec else {
        return Err(refuse(NAME, format!("a KV cache of {spec:?}"), "caches of one latent row a token are"));
    };
    let plain = matches!(a.quant, KvQuantMode::None | KvQuantMode::Fp8PerTensor)
        && a.tokens_per_state == TokensPerState::ONE
        && a.num_head_slots.is_none_or(|n| n == 1)
        && a.state_content_bytes.is_none()
        && a.cache_format.is_none();
    if !plain || a.num_kv_heads != 1 || a.head_size_v != 0 {
        return Err(refuse(
            NAME,
            "a packed or compressed latent cache",
            "one latent row a token, unquantised or as 8-bit floats with one scale, is; choose --kv-cache-dtype auto \
             or fp8",
        ));
    }
    if a.head_size != dims.latent() {
        return Err(refuse(
            NAME,
            format!("a latent cache of {} elements a token", a.head_size),
            "rows of kv_lora_rank + qk_rope_head_dim elements are",
        ));
    }
    Ok(a)
}
