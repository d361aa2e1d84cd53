//! Lifetime: the model. The order of a KV cache's axes in memory: its properties, its strides, and
//! the one layout that all backends of a model can read. A layout is a value that is passed along,
//! never guessed from a shape.

use super::spec::KvCacheSpec;
use crate::{AttentionError, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A KV cache layout over the logical axes L (layer), B (block), H (head slot), N (token in the
/// block), C (content: a head's key and value), outermost first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default, Serialize, Deserialize)]
#[expect(clippy::upper_case_acronyms, reason = "the field writes layouts as their axes")]
pub enum KvCacheLayout {
    /// Layer, block, token, head; also called NHD.
    #[default]
    LBNHC,
    /// Layer, block, head, token; also called HND.
    LBHNC,
    /// Block, layer, token, head.
    BLNHC,
    /// Block, layer, head, token.
    BLHNC,
    /// Block, head, layer, token.
    BHLNC,
    /// Layer, head, block, token.
    LHBNC,
}

const L: usize = 0;
const B: usize = 1;
const H: usize = 2;
const N: usize = 3;
const C: usize = 4;

impl KvCacheLayout {
    /// All layouts, most preferred first where a backend has no preference.
    pub const ALL: [Self; 6] = [Self::LBNHC, Self::LBHNC, Self::BLNHC, Self::BLHNC, Self::BHLNC, Self::LHBNC];

    /// The axes' letters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::LBNHC => "LBNHC",
            Self::LBHNC => "LBHNC",
            Self::BLNHC => "BLNHC",
            Self::BLHNC => "BLHNC",
            Self::BHLNC => "BHLNC",
            Self::LHBNC => "LHBNC",
        }
    }

    /// Which logical axis (0..5 for L, B, H, N, C) stands at each physical place.
    pub const fn stride_order(self) -> [usize; 5] {
        match self {
            Self::LBNHC => [L, B, N, H, C],
            Self::LBHNC => [L, B, H, N, C],
            Self::BLNHC => [B, L, N, H, C],
            Self::BLHNC => [B, L, H, N, C],
            Self::BHLNC => [B, H, L, N, C],
            Self::LHBNC => [L, H, B, N, C],
        }
    }

    /// The order of one layer's axes (0..4 for B, H, N, C).
    pub fn layer_view_order(self) -> [usize; 4] {
        let mut order = [0; 4];
        for (place, axis) in order.iter_mut().zip(self.stride_order().into_iter().filter(|&a| a != L)) {
            *place = axis - 1;
        }
        order
    }

    /// Each layer is one region of memory.
    pub fn is_layer_compact(self) -> bool {
        self.stride_order()[0] == L
    }

    /// Blocks are outermost: a block holds the pages of all layers.
    pub fn is_block_outermost(self) -> bool {
        self.stride_order()[0] == B
    }

    /// A layer's page of a block is one region of memory.
    pub fn is_block_compact(self) -> bool {
        let order = self.stride_order();
        matches!((order[0], order[1]), (L, B) | (B, L))
    }

    /// A layer's page of a block is one region in which each head is one region.
    pub fn is_block_contiguous(self) -> bool {
        self.is_block_compact() && self.stride_order()[2] == H
    }

    /// The name in the convention of kernels that know only a layer's own axes.
    pub fn nhd_or_hnd(self) -> Option<&'static str> {
        match self {
            Self::LBNHC | Self::BLNHC => Some("NHD"),
            Self::LBHNC | Self::BLHNC | Self::BHLNC => Some("HND"),
            Self::LHBNC => None,
        }
    }

    /// Byte strides of the logical axes L, B, H, N, C of a cache of `num_layers` layers and
    /// `num_blocks` blocks; `fixed` sets the distance between blocks, where other layers lie between.
    ///
    /// # Errors
    /// Padded pages in a layout whose pages are not one region.
    pub fn strides(
        self,
        spec: &KvCacheSpec,
        num_layers: usize,
        num_blocks: usize,
        fixed_block_stride: Option<usize>,
    ) -> Result<[usize; 5]> {
        let [h, n, c] = spec.page_shape();
        let shape = [num_layers, num_blocks, h, n, c];
        let order = self.stride_order();
        let padded = (spec.page_size_bytes() != spec.unpadded_page_size_bytes() || spec.is_padded())
            .then(|| spec.page_size_bytes());
        let grid_end = order.iter().rposition(|&a| a == L || a == B).map_or(0, |p| p + 1);
        if padded.is_some() {
            let grid: usize = order[..grid_end].iter().map(|&a| shape[a]).product();
            if grid != num_layers * num_blocks {
                return Err(AttentionError::KvCache(format!(
                    "Page padding requires dimensions outside the page tail to be L, B, or singleton; \
                     got {self} with shape ({num_layers}, {num_blocks}, {h}, {n}, {c})."
                )));
            }
        }
        let mut strides = [0; 5];
        let mut step = 1;
        for (place, &axis) in order.iter().enumerate().rev() {
            if let Some(page) = padded
                && place + 1 == grid_end
            {
                step = step.max(page);
            }
            strides[axis] = if axis == B { fixed_block_stride.unwrap_or(step) } else { step };
            step = strides[axis] * shape[axis];
        }
        Ok(strides)
    }
}

impl fmt::Display for KvCacheLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for KvCacheLayout {
    type Err = AttentionError;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "NHD" => Ok(Self::LBNHC),
            "HND" => Ok(Self::LBHNC),
            other => Self::ALL.into_iter().find(|l| l.name() == other).ok_or_else(|| {
                AttentionError::KvCache(format!(
                    "{other:?} is not a KV cache layout; --kv-layout takes NHD, HND, {}",
                    names(&Self::ALL).join(", ")
                ))
            }),
        }
    }
}

fn names(layouts: &[KvCacheLayout]) -> Vec<&'static str> {
    layouts.iter().map(|l| l.name()).collect()
}

/// The layouts that all backends support, in the order of the first one that has a preference. An
/// empty list of a backend means any.
///
/// # Errors
/// None in common: names each list.
pub fn common_layouts(supported: &[&[KvCacheLayout]]) -> Result<Vec<KvCacheLayout>> {
    let mut declared = supported.iter().filter(|l| !l.is_empty());
    let Some(first) = declared.next() else { return Ok(KvCacheLayout::ALL.to_vec()) };
    let common: Vec<_> =
        first.iter().copied().filter(|l| declared.clone().all(|other| other.contains(l))).collect();
    if common.is_empty() {
        let lists: Vec<_> = supported.iter().filter(|l| !l.is_empty()).map(|l| names(l)).collect();
        return Err(AttentionError::KvCache(format!(
            "No KV cache layout satisfies every supported set: {lists:?}."
        )));
    }
    Ok(common)
}

/// The layout in force: the requested one where every backend supports it, else the most preferred.
///
/// # Errors
/// No common layout, or a requested one that isn't.
pub fn resolve_layout(
    supported: &[&[KvCacheLayout]],
    requested: Option<KvCacheLayout>,
) -> Result<KvCacheLayout> {
    let common = common_layouts(supported)?;
    match requested {
        None => Ok(common[0]),
        Some(r) if common.contains(&r) => Ok(r),
        Some(r) => Err(AttentionError::KvCache(format!(
            "--kv-layout {r} does not satisfy every supported set; valid layouts: {:?}.",
            names(&common)
        ))),
    }
}
