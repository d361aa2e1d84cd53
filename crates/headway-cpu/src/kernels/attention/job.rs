//! Everything that a work item needs, as raw addresses: made by the safe wrapper in `mod.rs` after its
//! checks, read by `item` on every worker.

use super::{
    plan::{Item, Plan, Request, Split},
    shape::{ScratchLayout, Shape},
    sight::Span,
};
use headway_tensor::{DType, RowQuant};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Rows in memory: `[tokens, heads, size]` with strides in bytes and a contiguous last dimension.
#[derive(Clone, Copy)]
pub(super) struct Rows<P> {
    pub(super) base: P,
    pub(super) token_stride: usize,
    pub(super) head_stride: usize,
}

/// The cache of one layer. Block b begins `b * block_stride` bytes after `base`; in it, key/value head
/// h begins `h * head_bytes` later with its keys, and `values` bytes after those its values (0 for latents, whose
/// rows are both).
#[derive(Clone, Copy)]
pub(super) struct CacheMap {
    pub(super) base: *const u8,
    pub(super) block_stride: usize,
    pub(super) block_size: usize,
    pub(super) num_blocks: usize,
    pub(super) head_bytes: usize,
    pub(super) values: usize,
}

/// A block number of the table that the cache doesn't have, once one was met.
#[derive(Default)]
pub(super) struct BadBlock(AtomicU64);

impl BadBlock {
    const SEEN: u64 = 1 << 63;

    /// Notes a block of a request's row.
    #[cold]
    pub(super) fn note(&self, request: u32, block: i32) {
        self.0.store(Self::SEEN | u64::from(request & 0x7fff_ffff) << 32 | u64::from(block as u32), Relaxed);
    }

    /// The request and the block that were noted.
    pub(super) fn get(&self) -> Option<(u32, i32)> {
        let x = self.0.load(Relaxed);
        (x & Self::SEEN != 0).then_some(((x >> 32) as u32 & 0x7fff_ffff, x as u32 as i32))
    }
}

/// One call of the kernel.
pub(super) struct Job<'a> {
    pub(super) plan: &'a Plan,
    pub(super) shape: Shape,
    pub(super) layout: ScratchLayout,
    pub(super) q: Rows<*const u8>,
    pub(super) out: Rows<*mut u8>,
    /// Of `q`, and of `out` where it isn't quantised.
    pub(super) dtype: DType,
    /// `out` takes codes; the scales that the rule makes go to `[rows, heads, scales of a head]`.
    pub(super) quant: Option<(RowQuant, *mut f32)>,
    /// `[rows, heads]`, or null.
    pub(super) lse: *mut f32,
    /// `out` and `lse` hold the result over other keys, which this call's is merged with; `out` is float32.
    pub(super) merge: bool,
    pub(super) cache: CacheMap,
    pub(super) block_table: &'a [i32],
    pub(super) block_table_stride: usize,
    pub(super) bad_block: &'a BadBlock,
    /// Factor on q·k, the keys' scale included.
    pub(super) scale: f32,
    pub(super) v_scale: f32,
    pub(super) window: Option<usize>,
    pub(super) soft_cap: Option<f32>,
    pub(super) alibi_slopes: Option<&'a [f32]>,
    pub(super) sinks: Option<&'a [f32]>,
    /// `[slot_rows, slot_floats]`.
    pub(super) slots: *mut f32,
    /// How many parts of each split are done.
    pub(super) arrivals: &'a [AtomicU32],
}

// SAFETY: the addresses are of memory that outlives the call; items write disjoint parts of it (see
// `item::process`), and everything else is only read.
unsafe impl Sync for Job<'_> {}

/// A work item with what it refers to, resolved.
#[derive(Clone, Copy)]
pub(super) struct Work<'a> {
    pub(super) request: &'a Request,
    /// The request's ranges that see each other in both directions.
    pub(super) spans: &'a [Span],
    /// Tokens at the request's beginning that the window leaves visible.
    pub(super) prefix: usize,
    /// The request's row of the block table.
    pub(super) blocks: &'a [i32],
    pub(super) item: Item,
    pub(super) split: Option<(Split, &'a AtomicU32)>,
}

impl<'a> Job<'a> {
    /// Work item `i`; `None` past the last.
    pub(super) fn work(&self, i: usize) -> Option<Work<'a>> {
        let item = *self.plan.items().get(i)?;
        let (of, s) = (item.request as usize, self.block_table_stride);
        let request = self.plan.requests().get(of)?;
        Some(Work {
            request,
            spans: self.plan.spans_of(item.request),
            prefix: if self.window.is_some() { request.prefix } else { 0 },
            blocks: self.block_table.get(of * s..(of + 1) * s)?,
            item,
            split: match self.plan.splits().get(item.split as usize) {
                Some(s) => Some((*s, self.arrivals.get(item.split as usize)?)),
                None => None,
            },
        })
    }
}
