//! Lifetime: the model. The order of a KV cache's axes in memory: its properties, its strides, and
//! the one layout that all backends of a model can read. A layout is a value that is passed along,
//! never guessed from a shape.

use super::spec::KvCacheSpec;
use crate::{AttentionError, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A KV cache layout over the logical axes L (layer), B (block), H (head slot), N (token in the
/// block), C (content), outermost first.
///
/// # Content
/// C is a run of bytes of one token in one head slot: [`AttentionSpec::state_content_size_bytes`] of them.
///
/// | cache | C holds, in this order |
/// |---|---|
/// | attention | the head's key (`head_size` elements), then its value (`head_size_v` elements) |
/// | MLA (one head slot) | the latent (`kv_lora_rank`), then the rotary part of the key (`qk_rope_head_dim`); a packed [`AttentionSpec::cache_format`] has an order of its own |
/// | state space (one head slot, one token) | the state tensors, in the order of [`MambaSpec::shapes`] |
///
/// So in a page laid out as N, H, C the element `i` of the value of head `h` at token `n` is element
/// `(n * num_kv_heads + h) * (head_size + head_size_v) + head_size + i`.
///
/// # What binds a kernel
/// Nobody but the backend's own layers reads inside a page. What others rely on is where pages begin and how
/// long they are, and, where the layout is [block-contiguous](Self::is_block_contiguous), where in a page each
/// head's region begins. Inside the smallest of these regions a kernel may store keys and values in any order of
/// the same size. `CPU_ATTN` does: in the region of a block and head all keys come first, 16 tokens side by side
/// (`[block_size / 16, head_size, 16]`), then all values (`[block_size, head_size_v]`); in bfloat16 pairs of
/// channels, and for values pairs of tokens, lie innermost.
///
/// [`AttentionSpec::state_content_size_bytes`]: crate::AttentionSpec::state_content_size_bytes
/// [`AttentionSpec::cache_format`]: crate::AttentionSpec::cache_format
/// [`MambaSpec::shapes`]: crate::MambaSpec::shapes
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default, Serialize, Deserialize)]
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
        let padded = spec.is_padded().then(|| spec.page_size_bytes());
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

/// The order among layouts that nobody prefers.
const TIE_ORDER: [KvCacheLayout; 6] = {
    use KvCacheLayout::{BHLNC, BLHNC, BLNHC, LBHNC, LBNHC, LHBNC};
    [LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC]
};

/// The layouts that all backends support, most preferred first: by how many backends name it first. An
/// empty list of a backend means any. A single list keeps its order.
///
/// # Errors
/// None in common: names each list.
pub fn common_layouts(supported: &[&[KvCacheLayout]]) -> Result<Vec<KvCacheLayout>> {
    let declared: Vec<_> = supported.iter().filter(|l| !l.is_empty()).collect();
    let Some(first) = declared.first() else { return Ok(KvCacheLayout::ALL.to_vec()) };
    if declared.iter().all(|l| l == first) {
        return Ok(first.to_vec());
    }
    let mut common: Vec<_> =
        TIE_ORDER.into_iter().filter(|l| declared.iter().all(|other| other.contains(l))).collect();
    let votes = |l: &KvCacheLayout| declared.iter().filter(|d| d.first() == Some(l)).count();
    common.sort_by_key(|l| usize::MAX - votes(l));
    if common.is_empty() {
        let lists: Vec<_> = declared.iter().map(|l| names(l)).collect();
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

/// What bears on the choice of a layout besides what backends support.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayoutRequest {
    /// `--kv-layout`, as written.
    pub requested: Option<String>,
    /// What a KV connector would like; a hint.
    pub connector: Option<KvCacheLayout>,
    /// What is in force already.
    pub already: Option<KvCacheLayout>,
}

/// The one layout of all workers, with warnings. Each worker brings the layouts that its backends have
/// in common; they must agree.
///
/// # Errors
/// No worker, or workers that disagree; a requested layout that isn't one or isn't supported; specs whose
/// pages differ in shape and no supported layout that holds them.
pub fn resolve_for_workers(
    workers: &[Vec<KvCacheLayout>],
    request: &LayoutRequest,
    specs: Option<&[KvCacheSpec]>,
) -> Result<(KvCacheLayout, Vec<String>)> {
    if let Some(layout) = request.already {
        return Ok((layout, vec![]));
    }
    let Some(first) = workers.first() else {
        return Err(AttentionError::KvCache("No worker reported supported KV cache layouts.".into()));
    };
    if workers.iter().any(|w| w != first) {
        return Err(AttentionError::KvCache(format!(
            "Workers disagree on supported KV cache layouts: {workers:?}."
        )));
    }
    let fits = expressible(specs.unwrap_or(&[]), first)?;
    if let Some(text) = &request.requested {
        return Ok((resolve_layout(&[&fits], Some(text.parse()?))?, vec![]));
    }
    match request.connector {
        Some(c) if fits.contains(&c) => Ok((c, vec![])),
        Some(c) => {
            let warning = format!(
                "KV connector cache layout {c} does not satisfy every supported set; valid layouts: {:?}. Using {} \
                 instead.",
                names(&fits),
                fits[0]
            );
            Ok((fits[0], vec![warning]))
        }
        None => Ok((fits[0], vec![])),
    }
}

/// The layouts that can hold these specs, in order of preference: pages of different shapes must each be
/// one region, and beside a replicated cache of another page size the blocks must be outermost.
fn expressible(specs: &[KvCacheSpec], supported: &[KvCacheLayout]) -> Result<Vec<KvCacheLayout>> {
    let differ = |f: fn(&KvCacheSpec) -> usize| specs.windows(2).any(|w| f(&w[0]) != f(&w[1]));
    let mixed = specs.windows(2).any(|w| w[0].page_shape() != w[1].page_shape());
    let replicated = specs.iter().any(|s| s.attention().is_some_and(|a| !a.dcp_sharded));
    let outermost = replicated && differ(KvCacheSpec::page_size_bytes);
    let fits: Vec<_> = supported
        .iter()
        .copied()
        .filter(|l| (!mixed || l.is_block_compact()) && (!outermost || l.is_block_outermost()))
        .collect();
    let none = |why: &str| Err(AttentionError::KvCache(format!("{why}: {:?}.", names(supported))));
    match fits.is_empty() {
        false => Ok(fits),
        true if outermost => none(
            "DCP with a replicated draft and mixed KV page sizes requires a block-outer KV cache layout; supported",
        ),
        true => none(
            "Specs with mixed HNC shapes need a block-compact layout, but none is in every supported set",
        ),
    }
}
