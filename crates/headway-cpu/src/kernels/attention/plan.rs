//! The division of a step's attention into work items: made once a step from the lengths alone, then
//! used by every layer of the group.
//!
//! The keys of a row are reduced in *chunks* of [`CHUNK`] tokens that begin at multiples of it in the
//! request: each chunk has its own online softmax, and chunks are merged in ascending order. That holds
//! whether one item walks all chunks or several items take some each, so the plan, the batch, the
//! number of threads and the chunking of a prompt never show in a bit of the result.
//!
//! Plain arithmetic; what the kernel relies on (`// SAFETY` in `item`) is that the fields are private
//! and [`Plan::build`] is the only writer.

use super::{
    shape::Shape,
    sight::{Masks, Sight, Span, push_spans, spans_of},
};
use std::ops::Range;

/// Tokens in a chunk: the unit in which the keys of a row are split.
pub const CHUNK: usize = 256;
/// Items a thread should find, so that the last to finish is not far behind.
const ITEMS_PER_THREAD: u64 = 4;
/// No item is cut below this cost (rows x keys): some microseconds.
const LEAST_COST: u64 = 1024;
/// An item of this part of the cost that items should have at most is short: it matters little when it is done.
const SHORT: u64 = 32;

/// One request of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Row of its first new token.
    pub first_row: usize,
    /// New tokens.
    pub q_len: usize,
    /// Tokens with them.
    pub seq_len: usize,
    /// Whether a row sees no key after its own position.
    pub causal: bool,
    /// Tokens at its beginning that a window never hides (R-SWA); 0: none.
    pub prefix: usize,
}

/// Work for one thread: some new tokens of a request, some key/value heads, some chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) request: u32,
    pub(super) q_begin: u32,
    pub(super) q_end: u32,
    pub(super) head_begin: u32,
    pub(super) head_end: u32,
    pub(super) chunk_begin: u32,
    pub(super) chunk_end: u32,
    /// Index of the split that this item is a part of, or [`WHOLE`].
    pub(super) split: u32,
    cost: u64,
}

impl Item {
    /// All heads of a tile, over all that it sees.
    #[inline]
    fn whole(request: usize, tile: Tile, shape: &Shape) -> Self {
        Self {
            request: request as u32,
            q_begin: tile.q_begin,
            q_end: tile.q_end,
            head_begin: 0,
            head_end: shape.num_kv_heads as u32,
            chunk_begin: tile.chunk_begin,
            chunk_end: tile.chunk_end,
            split: WHOLE,
            cost: tile.cost * shape.num_kv_heads as u64,
        }
    }
}

/// [`Item::split`] of an item that does all chunks itself.
pub(super) const WHOLE: u32 = u32::MAX;

/// Items that share rows, with all heads: each leaves its chunks' partial results, the last merges them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    pub(super) first_slot: usize,
    /// Tokens x query heads.
    pub(super) rows: usize,
    pub(super) chunk_begin: u32,
    pub(super) chunk_end: u32,
    pub(super) parts: u32,
}

/// A step's work. Buffers are kept between steps.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Plan {
    requests: Vec<Request>,
    spans: Vec<Span>,
    items: Vec<Item>,
    splits: Vec<Split>,
    slots: usize,
    rows: usize,
    /// Tokens of the longest request that has rows.
    most_keys: usize,
    window: Option<usize>,
    rswa_window: Option<usize>,
    shape: Option<Shape>,
}

impl Plan {
    /// Room for the largest step, so that none allocates.
    pub fn with_capacity(shape: &Shape, max_num_reqs: usize, max_num_tokens: usize) -> Self {
        let splits = shape.max_splits();
        let tiles = max_num_tokens.div_ceil(shape.tile_tokens()) + max_num_reqs;
        Self {
            requests: Vec::with_capacity(max_num_reqs),
            items: Vec::with_capacity(tiles * shape.num_kv_heads + shape.slot_rows),
            splits: Vec::with_capacity(splits),
            ..Self::default()
        }
    }

    /// Bytes that [`Plan::with_capacity`] takes.
    pub fn bytes(shape: &Shape, max_num_reqs: usize, max_num_tokens: usize) -> usize {
        let tiles = max_num_tokens.div_ceil(shape.tile_tokens()) + max_num_reqs;
        let items = tiles * shape.num_kv_heads + shape.slot_rows;
        max_num_reqs * size_of::<Request>()
            + items * size_of::<Item>()
            + shape.max_splits() * size_of::<Split>()
    }

    /// The requests.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Rows that belong to requests; later rows of the output are padding.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The window that it was planned for.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Tokens of the longest request that has rows.
    pub(super) fn most_keys(&self) -> usize {
        self.most_keys
    }

    /// The shape that the plan was made for; `None` before the first step.
    pub fn shape(&self) -> Option<&Shape> {
        self.shape.as_ref()
    }

    /// Number of work items.
    pub fn num_items(&self) -> usize {
        self.items.len()
    }

    /// Number of tiles of rows whose keys are split over several items.
    pub fn num_splits(&self) -> usize {
        self.splits.len()
    }

    #[cfg(test)]
    pub(super) fn capacities(&self) -> [usize; 3] {
        [self.requests.capacity(), self.items.capacity(), self.splits.capacity()]
    }

    pub(super) fn items(&self) -> &[Item] {
        &self.items
    }

    pub(super) fn splits(&self) -> &[Split] {
        &self.splits
    }

    /// The spans of a request.
    pub(super) fn spans_of(&self, request: u32) -> &[Span] {
        spans_of(&self.spans, request)
    }

    /// The window beside prefixes, where the step was planned with one.
    pub(super) fn rswa_window(&self) -> Option<usize> {
        self.rswa_window
    }

    /// Plans a step: `requests` in row order, each beginning where the last ended. A window lets
    /// chunks that no row sees be left out; layers may then have that window or a smaller one. With
    /// one thread nothing is split.
    ///
    /// # Errors
    /// A sentence, where requests overlap or leave rows out, or their spans are not as [`Masks`] says.
    pub fn build<'a>(
        &mut self,
        shape: &Shape,
        threads: usize,
        masks: impl Into<Masks<'a>>,
        requests: impl Iterator<Item = Request>,
    ) -> Result<(), String> {
        let masks: Masks<'_> = masks.into();
        let window = masks.rswa_window.or(masks.window);
        self.requests.clear();
        self.spans.clear();
        self.items.clear();
        self.splits.clear();
        (self.slots, self.rows, self.most_keys) = (0, 0, 0);
        (self.window, self.rswa_window, self.shape) = (masks.window, masks.rswa_window, Some(*shape));
        if window == Some(0) {
            return Err("a window of 0 tokens; it holds the query's own".into());
        }
        let (step, group, heads) = (shape.tile_tokens(), shape.group(), shape.num_kv_heads as u64);
        // Many short requests are the usual step: one pass plans them, unless an item comes out too long.
        let (mut total, mut largest, mut in_one_pass) = (0, 0, true);
        let plain = masks.rswa_window.is_none() && masks.spans.is_none();
        for mut r in requests {
            if r.first_row != self.rows || r.q_len >= u32::MAX as usize || r.seq_len >= u32::MAX as usize {
                return Err(format!("request {} begins at row {}", self.requests.len(), r.first_row));
            }
            if masks.rswa_window.is_none() {
                r.prefix = 0;
            }
            if plain && in_one_pass && r.q_len == 1 {
                let tile = Tile::of_decode(&r, group, window);
                total += tile.cost;
                largest = largest.max(tile.cost);
                self.items.push(Item::whole(self.requests.len(), tile, shape));
                self.rows += 1;
                self.most_keys = self.most_keys.max(r.seq_len);
                self.requests.push(r);
                continue;
            }
            if let Some(spans) = masks.spans {
                let of = spans.get(self.requests.len()).map_or(&[][..], Vec::as_slice);
                push_spans(&mut self.spans, self.requests.len(), &r, of)?;
            }
            let sight = Sight::new(&r, window, spans_of(&self.spans, self.requests.len() as u32));
            in_one_pass &= r.q_len <= step;
            if in_one_pass && r.q_len > 0 {
                let tile = Tile::new(&sight, 0..r.q_len, group);
                total += tile.cost;
                largest = largest.max(tile.cost);
                self.items.push(Item::whole(self.requests.len(), tile, shape));
            } else {
                total += sight.tiles(step, group).map(|t| t.cost).sum::<u64>();
            }
            self.rows += r.q_len;
            self.most_keys = self.most_keys.max(if r.q_len > 0 { r.seq_len } else { 0 });
            self.requests.push(r);
        }
        let target = (total * heads / (threads as u64 * ITEMS_PER_THREAD)).max(LEAST_COST);
        if !in_one_pass || largest * heads > target {
            self.items.clear();
            let spans = std::mem::take(&mut self.spans);
            for i in 0..self.requests.len() {
                let r = self.requests[i];
                for tile in Sight::new(&r, window, spans_of(&spans, i as u32)).tiles(step, group) {
                    self.push(shape, i, tile, target, threads > 1, group);
                }
            }
            self.spans = spans;
        }
        self.longest_first(target / SHORT);
        Ok(())
    }

    /// Sorts the items that cost more than `short` to the front, so that the others fill the gaps at the end.
    fn longest_first(&mut self, short: u64) {
        let mut long = 0;
        for i in 0..self.items.len() {
            if self.items[i].cost > short {
                self.items.swap(long, i);
                long += 1;
            }
        }
        self.items[..long].sort_unstable_by_key(|i| {
            (std::cmp::Reverse(i.cost), i.request, i.q_begin, i.head_begin, i.chunk_begin)
        });
    }

    #[inline]
    fn push(
        &mut self,
        shape: &Shape,
        request: usize,
        tile: Tile,
        target: u64,
        may_split: bool,
        group: usize,
    ) {
        let item = Item::whole(request, tile, shape);
        if item.cost <= target {
            return self.items.push(item);
        }
        let chunks = (tile.chunk_end - tile.chunk_begin) as usize;
        let rows = (tile.q_end - tile.q_begin) as usize * group * shape.num_kv_heads;
        let fits = self.slots + rows * chunks <= shape.slot_rows && self.splits.len() < shape.max_splits();
        // Heads that walk the keys together read whole blocks (see `item`); others are divided first.
        let together = rows <= shape.max_rows();
        if may_split && chunks > 1 && (together || tile.cost >= 2 * target) && fits {
            let per_part = ((target * chunks as u64 / item.cost) as usize).clamp(1, chunks);
            return self.push_split(item, rows, chunks, per_part);
        }
        let heads = (target / tile.cost.max(1)).clamp(1, shape.num_kv_heads as u64) as u32;
        let mut head = 0;
        while head < item.head_end {
            let end = item.head_end.min(head + heads);
            let cost = tile.cost * u64::from(end - head);
            self.items.push(Item { head_begin: head, head_end: end, cost, ..item });
            head = end;
        }
    }

    fn push_split(&mut self, item: Item, rows: usize, chunks: usize, per_part: usize) {
        let parts = chunks.div_ceil(per_part) as u32;
        let split = self.splits.len() as u32;
        self.splits.push(Split {
            first_slot: self.slots,
            rows,
            chunk_begin: item.chunk_begin,
            chunk_end: item.chunk_end,
            parts,
        });
        self.slots += rows * chunks;
        for part in 0..parts {
            let chunk_begin = item.chunk_begin + part * per_part as u32;
            let chunk_end = item.chunk_end.min(chunk_begin + per_part as u32);
            let cost = item.cost / u64::from(parts);
            self.items.push(Item { chunk_begin, chunk_end, split, cost, ..item });
        }
    }
}

/// New tokens of a request that share a pass over the keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tile {
    q_begin: u32,
    q_end: u32,
    chunk_begin: u32,
    chunk_end: u32,
    /// Rows x keys of one key/value head.
    cost: u64,
}

impl Tile {
    #[inline]
    pub(super) fn new(s: &Sight<'_>, tokens: Range<usize>, group: usize) -> Self {
        let (first, last) = (s.of(tokens.start), s.of(tokens.end - 1));
        Self::over(tokens, last.prefix, first.low.min(last.high)..last.high, group)
    }

    /// [`Tile::new`] of the one new token of a request without spans and prefix: the last, so that it sees all in the
    /// window.
    #[inline]
    fn of_decode(r: &Request, group: usize, window: Option<usize>) -> Self {
        let low = window.map_or(0, |w| r.seq_len.saturating_sub(w));
        Self::over(0..1, 0, low..r.seq_len, group)
    }

    #[inline]
    fn over(
        tokens: Range<usize>,
        prefix: usize,
        Range { start: low, end: high }: Range<usize>,
        group: usize,
    ) -> Self {
        let keys = (prefix + high.saturating_sub(low.max(prefix))) as u64;
        let first_chunk = if prefix > 0 { 0 } else { low / CHUNK };
        Self {
            q_begin: tokens.start as u32,
            q_end: tokens.end as u32,
            chunk_begin: first_chunk as u32,
            chunk_end: high.div_ceil(CHUNK).max(first_chunk) as u32,
            // A few rows cost as much as one: the keys have to be read.
            cost: keys * (tokens.len() * group).max(4) as u64 + 64,
        }
    }
}
