//! The sizes of a group's memory: one formula for what is allocated, used and reported.

use super::{CudaMlaConfig, rules::NAME};
use crate::{
    DeviceInfo,
    backends::{
        common::refuse,
        latent::{LatentSizes, MOST_SHARED},
    },
    kernels::{
        attention::{Planner, Tile},
        mla::DecodeForm,
    },
};
use headway_attention::{GroupInfo, Result};

/// Waves of parts that are weighed against each other: partial results are large.
const WAVES: usize = 2;

/// What a group's builder and layers are sized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// What no decode kernel matters to.
    pub latent: LatentSizes,
    /// How decodes are divided.
    pub decode: DecodeForm,
    /// The decodes' planner, with its limits.
    pub planner: Planner,
}

impl Sizes {
    /// The sizes of a group. `info`: `None` where the device is not known yet; Hopper's numbers are taken.
    ///
    /// # Errors
    /// A group without latent dimensions, a cache that isn't one plain latent row a token, sizes that the kernels don't
    /// take.
    pub(super) fn new(group: &GroupInfo, config: &CudaMlaConfig, info: Option<&DeviceInfo>) -> Result<Self> {
        let shared = info.map_or(MOST_SHARED, |i| i.shared_per_block as usize);
        let latent = LatentSizes::new(NAME, group, config.workspace_tokens, shared)?;
        let (dims, cache) = (latent.dims, latent.cache);
        let rows = dims.heads * (1 + group.num_speculative_tokens);
        let decode = DecodeForm::choose(&dims, cache, rows, shared)
            .map_err(|why| refuse(NAME, why, "choose another backend for these layers"))?;
        let mut planner = Planner {
            group: dims.heads,
            kv_heads: 1,
            few_rows: decode.rows,
            many_rows: None,
            slots: info.map_or(132, |info| decode.slots(&dims, cache, info)),
            waves: WAVES,
            window: None,
            batch_invariant: group.batch_invariant,
            max_tiles: 0,
            max_part_rows: 0,
        };
        (planner.max_tiles, planner.max_part_rows) = planner.limits(group.max_num_reqs, latent.decode_tokens);
        Ok(Self { latent, decode, planner })
    }

    /// Bytes of the decodes' partial results, and of their sums.
    pub(super) fn part_bytes(&self) -> [usize; 2] {
        let own = self.planner.slots * self.decode.rows;
        let rank = self.latent.dims.rank;
        [(self.planner.max_part_rows + own) * rank * 4, self.planner.max_part_rows * 8]
    }

    /// Bytes of the workspace.
    pub fn bytes(&self) -> usize {
        self.latent.bytes() + self.part_bytes().iter().sum::<usize>()
    }

    /// Bytes of the decodes' lists.
    pub(super) fn list_bytes(&self) -> usize {
        2 * (self.planner.max_tiles + 1) * size_of::<Tile>()
    }
}
