//! The rows of one key/value head in a work item, with their arrays.
//!
//! Rows are (token, query head) pairs, tokens outermost, so that a group of query heads (GQA) reads each
//! key once.

use super::{
    elem::Elem,
    job::{Job, Work},
    lanes::{LINE, prefetch},
    level::Level,
    micro::{GROUP, GROUPS, TILE, Values},
    sight::{Seen, Sight},
    tile::{Block, Keys},
};

/// Rows of a worker's arrays that share keys.
pub(super) struct Pass<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) work: &'a Work<'a>,
    /// First query head, and how many.
    pub(super) heads: (usize, usize),
    /// Place of the first row in the arrays.
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) scratch: *mut f32,
}

impl Pass<'_> {
    /// The array of the scratch at `offset`.
    fn at(&self, offset: usize) -> *mut f32 {
        self.scratch.wrapping_add(offset)
    }

    /// A row's query, scaled: `head_size` float32, rows side by side.
    pub(super) fn q(&self, row: usize) -> *mut f32 {
        self.at(self.job.layout.q + (self.first + row) * self.job.shape.head_size)
    }

    /// A row's scores of a tile, then its weights: rows of `TILE`.
    pub(super) fn scores(&self, row: usize) -> *mut f32 {
        self.at(self.job.layout.scores + (self.first + row) * TILE)
    }

    /// A row's values in the running chunk: rows of `head_size_v`.
    pub(super) fn acc(&self, row: usize) -> *mut f32 {
        self.at(self.job.layout.acc + (self.first + row) * self.job.shape.head_size_v)
    }

    /// A row's values in the merged chunks.
    pub(super) fn total(&self, row: usize) -> *mut f32 {
        self.at(self.job.layout.total + (self.first + row) * self.job.shape.head_size_v)
    }

    /// Maximum and sum of the running chunk (`which` 0) or of the merged chunks (1).
    pub(super) fn state(&self, row: usize, which: usize) -> *mut f32 {
        self.at(self.job.layout.row_state + (self.first + row) * 4 + which * 2)
    }

    /// A row's query as terms of bfloat16, rows of `head_size`; the terms are as far apart as their rows are long
    /// in all ([`Pass::tile_rows`]).
    #[cfg(target_arch = "x86_64")]
    pub(super) fn q_terms(&self, row: usize) -> *mut u16 {
        let q = self.at(self.job.layout.q_terms).cast::<u16>();
        q.wrapping_add((self.first + row) * self.job.shape.head_size)
    }

    /// A row's weights as terms of bfloat16, rows of `TILE`.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn weight_terms(&self, row: usize) -> *mut u16 {
        self.at(self.job.layout.weight_terms).cast::<u16>().wrapping_add((self.first + row) * TILE)
    }

    /// Room for a tile's values in pairs of tokens.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn value_pairs(&self) -> *mut u8 {
        self.at(self.job.layout.value_pairs).cast()
    }

    /// Rows of each term.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn tile_rows(&self) -> usize {
        self.job.layout.tile_rows
    }

    /// Where a row's query lies.
    pub(super) fn query(&self, row: usize) -> *const u8 {
        let (q, (token, head)) = (&self.job.q, self.token_and_head(row));
        let at = (self.work.request.first_row + token) * q.token_stride + head * q.head_stride;
        q.base.wrapping_add(at)
    }

    /// Token (of the request's new ones) and query head of a row.
    pub(super) fn token_and_head(&self, row: usize) -> (usize, usize) {
        (self.work.item.q_begin as usize + row / self.heads.1, self.heads.0 + row % self.heads.1)
    }

    /// The keys that a row sees, `[low, high)`; with a prefix, those besides. Zeros for a row that sees none.
    ///
    /// # Safety
    /// After [`Pass::prepare`]; `row < self.rows`.
    pub(super) unsafe fn bounds(&self, row: usize) -> (usize, usize) {
        let b = self.at(self.job.layout.bounds).cast::<u32>().wrapping_add((self.first + row) * 2);
        // SAFETY: two numbers a row, within the scratch.
        unsafe { (*b as usize, *b.add(1) as usize) }
    }

    /// Scaled queries in float32, and what each row sees; returns what any row sees.
    ///
    /// # Safety
    /// As [`process`](super::item::process).
    pub(super) unsafe fn prepare<A: Level>(&self) -> Seen {
        let (job, size) = (self.job, self.job.shape.head_size);
        let sight = Sight::new(self.work.request, job.window, self.work.spans);
        let mut any = Seen { prefix: 0, low: usize::MAX, high: 0 };
        // SAFETY: `row < rows` and rows fit the scratch; tokens and heads lie in `q`.
        unsafe {
            let bounds = self.at(job.layout.bounds).cast::<u32>().add(self.first * 2);
            for row in 0..self.rows {
                let (token, _) = self.token_and_head(row);
                let seen = sight.of(token);
                bounds.add(row * 2).write(seen.low as u32);
                bounds.add(row * 2 + 1).write(seen.high as u32);
                if seen.low < seen.high {
                    (any.low, any.high) = (any.low.min(seen.low), any.high.max(seen.high));
                }
                any.prefix = any.prefix.max(seen.prefix);
                A::read_row(job.dtype, self.query(row), self.q(row), size, job.scale);
            }
        }
        any
    }

    /// The tile's latent rows in float32: as packed groups of keys, and their first part as panels of values.
    ///
    /// # Safety
    /// As [`process`](super::item::process); rows of the tile.
    pub(super) unsafe fn turn_latents<A: Level, E: Elem>(
        &self,
        b: &Block,
        rows: &Keys,
    ) -> (Keys, *const f32) {
        let (size, width) = (self.job.shape.head_size, self.job.shape.head_size_v);
        let values = self.at(self.job.layout.values);
        let mut groups = [std::ptr::null(); GROUPS];
        // SAFETY: a group's 16 rows lie in one block, in the cache; the scratch has room for all four groups.
        unsafe {
            for g in b.groups() {
                let to = self.at(self.job.layout.keys + g * size * GROUP);
                fetch(rows.ahead[g], GROUP * size * E::SIZE);
                A::turn_latents::<E>(rows.groups[g], (size, width), to, values.add(g * GROUP * 16));
                groups[g] = to.cast_const().cast();
            }
        }
        (Keys { groups, ahead: groups }, values)
    }

    /// The tile's keys as float32 in the same packing; float32 stays where it is.
    ///
    /// # Safety
    /// As [`process`](super::item::process); keys of the tile.
    pub(super) unsafe fn convert_keys<A: Level, E: Elem>(&self, b: &Block, keys: &Keys) -> Keys {
        let size = self.job.shape.head_size;
        let mut groups = [std::ptr::null(); GROUPS];
        if E::IS_F32 {
            for g in b.groups() {
                fetch(keys.ahead[g], GROUP * size * E::SIZE);
            }
            return *keys;
        }
        // SAFETY: a group has `head_size x GROUP` elements, and the scratch room for all four.
        unsafe {
            for g in b.groups() {
                let to = self.at(self.job.layout.keys + g * size * GROUP);
                A::widen_keys::<E>(keys.groups[g], keys.ahead[g], to, size);
                groups[g] = to.cast_const().cast();
            }
        }
        Keys { groups, ahead: groups }
    }

    /// The tile's values as float32, 16 columns at a time: `[head_size_v / 16, TILE, 16]`.
    ///
    /// # Safety
    /// As [`process`](super::item::process); values of the tile.
    pub(super) unsafe fn convert_values<A: Level, E: Elem>(&self, b: &Block, values: &Values) -> *const f32 {
        let width = self.job.shape.head_size_v;
        let base = self.at(self.job.layout.values);
        // SAFETY: `from..to` are tokens of the tile, and units lie whole in its groups; a token has
        // `head_size_v` elements, and the scratch room for whole panels of 16.
        unsafe {
            let first = (b.from - b.at) / E::UNIT * E::UNIT;
            for t in (first..b.to - b.at).step_by(E::UNIT) {
                let (g, at) = (t / GROUP, t % GROUP / E::UNIT * values.stride);
                let (unit, ahead) = (values.groups[g].add(at), values.ahead[g].wrapping_add(at));
                A::widen_panels::<E>(unit, ahead, base.add(t * 16), width);
            }
        }
        base
    }

    /// Where a row of `out` lies.
    pub(super) fn out_row(&self, row: usize) -> *mut u8 {
        let (out, (token, head)) = (&self.job.out, self.token_and_head(row));
        let at = (self.work.request.first_row + token) * out.token_stride + head * out.head_stride;
        out.base.wrapping_add(at)
    }

    /// Writes a finished row: `values · factor` to `out`.
    ///
    /// # Safety
    /// As [`process`](super::item::process); `values` has `head_size_v` float32.
    pub(super) unsafe fn write_row<A: Level>(&self, row: usize, values: *const f32, factor: f32) {
        let (to, width) = (self.out_row(row), self.job.shape.head_size_v);
        // SAFETY: the row and its scales lie in what the wrapper checked, and no other item writes them.
        unsafe {
            match &self.job.quant {
                None => A::write_row(self.job.dtype, values, to, width, factor),
                Some((quant, scales)) => {
                    let (token, head) = self.token_and_head(row);
                    let at = (self.work.request.first_row + token) * self.job.shape.num_heads + head;
                    let scales = scales.wrapping_add(at * quant.scales_of(width));
                    A::quantise_row(quant, values, to, scales, width, factor);
                }
            }
        }
    }

    /// Where a row's log-sum-exp lies.
    fn lse_at(&self, row: usize) -> *mut f32 {
        let (token, head) = self.token_and_head(row);
        self.job.lse.wrapping_add((self.work.request.first_row + token) * self.job.shape.num_heads + head)
    }

    /// The log-sum-exp of a row's earlier result.
    ///
    /// # Safety
    /// As [`process`](super::item::process), for a job that merges.
    pub(super) unsafe fn lse(&self, row: usize) -> f32 {
        // SAFETY: `[rows, heads]`, checked by the wrapper; no other item writes this row.
        unsafe { *self.lse_at(row) }
    }

    /// Log of a row's denominator, where it was asked for.
    ///
    /// # Safety
    /// As [`process`](super::item::process).
    pub(super) unsafe fn write_lse(&self, row: usize, lse: impl FnOnce() -> f32) {
        if self.job.lse.is_null() {
            return;
        }
        // SAFETY: `[rows, heads]`, checked by the wrapper; no other item writes this row.
        unsafe { self.lse_at(row).write(lse()) };
    }
}

/// Asks for all lines of `bytes` bytes at `p`.
fn fetch(p: *const u8, bytes: usize) {
    (0..bytes).step_by(LINE).for_each(|line| prefetch(p.wrapping_add(line)));
}
