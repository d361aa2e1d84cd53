//! Keys and values of a pass's tokens, in the attention kernel's own page layout: `kv_b_proj` times the latents, and the
//! rotary part of each latent for every head. Blocks of 16 tokens, in float32.

use super::Dims;
use crate::{
    CpuExec,
    kernels::attention::{CacheLayout, GROUP},
};
use headway_attention::Result;
use headway_tensor::{DType, Linear, Ops, TensorMut, TensorRef};

/// Slots that are expanded at a time: enough rows for a product at the rate of multiply-adds.
const SLICE: usize = 128;

/// Pages of expanded keys and values, and the room to make them.
#[derive(Debug)]
pub struct Pages {
    dims: Dims,
    slots: usize,
    pages: Vec<f32>,
    slice: Vec<f32>,
}

impl Pages {
    /// Room for `slots` tokens, a multiple of 16.
    pub fn new(dims: &Dims, slots: usize) -> Self {
        let pages = vec![0.0; slots * Self::token(dims)];
        Self { dims: *dims, slots, pages, slice: vec![0.0; slots.min(SLICE) * dims.expanded()] }
    }

    /// Bytes that [`Pages::new`] allocates.
    pub fn bytes(dims: &Dims, slots: usize) -> usize {
        (slots * Self::token(dims) + slots.min(SLICE) * dims.expanded()) * size_of::<f32>()
    }

    /// float32 of a token's keys and values.
    pub fn token(dims: &Dims) -> usize {
        dims.heads * (dims.qk() + dims.v)
    }

    /// The pages as the attention kernel takes them.
    pub fn as_cache(&self) -> (CacheLayout, &[u8]) {
        let block = GROUP * Self::token(&self.dims) * size_of::<f32>();
        let layout = CacheLayout {
            offset: 0,
            block_stride: block,
            num_blocks: self.slots / GROUP,
            block_size: GROUP,
            dtype: DType::F32,
        };
        (layout, bytemuck::cast_slice(&self.pages))
    }
}

/// Fills the pages of the first `slots` slots (a multiple of 16) from latents `[slots, rank + rope]`.
///
/// # Errors
/// More slots than there is room for; a `kv_b_proj` of another shape.
pub fn expand(
    cx: &CpuExec,
    kv_b_proj: &dyn Linear,
    latents: &[f32],
    slots: usize,
    to: &mut Pages,
) -> Result<()> {
    let d = to.dims;
    let (width, token) = (d.latent(), Pages::token(&d));
    let latents = TensorRef::from_host(latents, &[slots, width])?;
    for first in (0..slots).step_by(SLICE) {
        let count = SLICE.min(slots - first);
        let rows = latents.rows(first..first + count)?;
        let slice = TensorMut::from_host(&mut to.slice, &[count, d.expanded()])?;
        cx.linear(kv_b_proj, rows.cols(0..d.rank)?, slice)?;
        let rows = rows.into_host::<f32>()?;
        let pages = &mut to.pages[first * token..(first + count) * token];
        cx.pool().run_chunks(pages, GROUP * token, &|block, page, _| {
            let at = block * GROUP;
            let (rows, slice) = (&rows[at * width..], &to.slice[at * d.expanded()..]);
            fill(&d, rows, slice, page);
        });
    }
    Ok(())
}

/// One block: head after head, keys `[qk, 16]`, then values `[16, v]`.
fn fill(d: &Dims, latents: &[f32], expanded: &[f32], page: &mut [f32]) {
    for (head, page) in page.chunks_exact_mut(GROUP * (d.qk() + d.v)).enumerate() {
        let (keys, values) = page.split_at_mut(GROUP * d.qk());
        for t in 0..GROUP {
            let own = &expanded[t * d.expanded() + head * (d.nope + d.v)..][..d.nope + d.v];
            let rope = &latents[t * d.latent() + d.rank..][..d.rope];
            for (x, k) in own[..d.nope].iter().chain(rope).zip(keys.chunks_exact_mut(GROUP)) {
                k[t] = *x;
            }
            values[t * d.v..(t + 1) * d.v].copy_from_slice(&own[d.nope..]);
        }
    }
}
