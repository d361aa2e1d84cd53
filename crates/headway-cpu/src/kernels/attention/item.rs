//! One work item: attention of some new tokens of a request over some chunks of its keys, for some
//! key/value heads. Written once over the [`Level`] and the cache's [`Elem`].
//!
//! Rows are (token, query head) pairs of one key/value head, tokens outermost, so that a group of query
//! heads (GQA) reads each key once. Per chunk: for each tile of 64 keys, scores, online softmax,
//! weighted values; chunks are merged in ascending order (see `plan`). The online softmax and the
//! merge of partial results by their log-sum-exp are those of FlashAttention (Dao et al., 2022) and
//! Flash-Decoding (2023).

use super::{
    elem::Elem,
    job::{Job, Work},
    level::Level,
    merge,
    micro::{GROUP, GROUPS, TILE, Values},
    plan::CHUNK,
    shape::Form,
    tile::{self, Block, Blocks, Keys},
};

/// A worker's arrays, and the rows of this pass.
pub(super) struct Pass<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) work: Work<'a>,
    pub(super) kv_head: usize,
    /// First query head, and how many, of this pass (all of the key/value head's, but for groups of
    /// more heads than a pass has rows).
    pub(super) heads: (usize, usize),
    pub(super) rows: usize,
    pub(super) scratch: *mut f32,
}

/// Runs a work item.
///
/// # Safety
/// The machine has the level `A`; `scratch` has the floats of
/// `job.layout`, for this call alone; `job` holds what its fields say; no other thread runs the same
/// item of this job.
pub(super) unsafe fn process<A: Level, E: Elem>(job: &Job<'_>, work: Work<'_>, scratch: *mut f32) {
    let group = job.shape.group();
    let per_pass = group.min(job.shape.max_rows());
    let tokens = (work.item.q_end - work.item.q_begin) as usize;
    for kv_head in work.item.head_begin as usize..work.item.head_end as usize {
        let mut first = 0;
        while first < group {
            let count = per_pass.min(group - first);
            let heads = (kv_head * group + first, count);
            let pass = Pass { job, work, kv_head, heads, rows: tokens * count, scratch };
            // SAFETY: as the caller has promised; items hold disjoint (tokens, heads, chunks), so no
            // two passes write the same row of `out` or the same slot.
            unsafe { pass.run::<A, E>() };
            first += count;
        }
        if let Some((split, arrived)) = work.split {
            use std::sync::atomic::Ordering::{AcqRel, Relaxed};
            if arrived.fetch_add(1, AcqRel) + 1 == split.parts {
                arrived.store(0, Relaxed);
                let mut first = 0;
                while first < group {
                    let count = per_pass.min(group - first);
                    let heads = (kv_head * group + first, count);
                    let pass = Pass { job, work, kv_head, heads, rows: tokens * count, scratch };
                    // SAFETY: all other parts have left their results (acquired just now) and are done
                    // with these rows.
                    unsafe { merge::merge_split::<A>(&pass, split) };
                    first += count;
                }
            }
        }
    }
}

impl Pass<'_> {
    /// The array of the scratch at `offset`.
    pub(super) fn at(&self, offset: usize) -> *mut f32 {
        self.scratch.wrapping_add(offset)
    }

    /// Token (of the request's new ones) and query head of a row.
    pub(super) fn token_and_head(&self, row: usize) -> (usize, usize) {
        (self.work.item.q_begin as usize + row / self.heads.1, self.heads.0 + row % self.heads.1)
    }

    /// The keys that a row sees, `[low, high)`.
    ///
    /// # Safety
    /// After [`Pass::prepare`]; `row < self.rows`.
    pub(super) unsafe fn bounds(&self, row: usize) -> (usize, usize) {
        let b = self.at(self.job.layout.bounds).cast::<u32>();
        // SAFETY: two numbers a row, within the scratch.
        unsafe { (*b.add(row * 2) as usize, *b.add(row * 2 + 1) as usize) }
    }

    /// Maximum and sum of the running chunk (`which` 0) or of the merged chunks (1).
    pub(super) fn state(&self, row: usize, which: usize) -> *mut f32 {
        self.at(self.job.layout.row_state + row * 4 + which * 2)
    }

    /// # Safety
    /// As [`process`].
    unsafe fn run<A: Level, E: Elem>(&self) {
        let item = &self.work.item;
        // SAFETY: as the caller has promised; chunks are those of the item.
        unsafe {
            let (low, high) = self.prepare::<A>();
            for chunk in item.chunk_begin as usize..item.chunk_end as usize {
                let (begin, end) = (low.max(chunk * CHUNK), high.min((chunk + 1) * CHUNK));
                if begin < end {
                    self.chunk::<A, E>(begin, end);
                    merge::keep_chunk::<A>(self, chunk);
                }
            }
            if self.work.split.is_none() {
                merge::finish::<A>(self);
            }
        }
    }

    /// Scaled queries in float32, and what each row sees; returns what any row sees.
    ///
    /// # Safety
    /// As [`process`].
    pub(super) unsafe fn prepare<A: Level>(&self) -> (usize, usize) {
        let (job, size) = (self.job, self.job.shape.head_size);
        let (mut low, mut high) = (usize::MAX, 0);
        // SAFETY: `row < rows` and rows fit the scratch; tokens and heads lie in `q`.
        unsafe {
            let bounds = self.at(job.layout.bounds).cast::<u32>();
            for row in 0..self.rows {
                let (token, head) = self.token_and_head(row);
                let (a, b) = self.work.request.sees(token, job.window);
                bounds.add(row * 2).write(a as u32);
                bounds.add(row * 2 + 1).write(b as u32);
                if a < b {
                    (low, high) = (low.min(a), high.max(b));
                }
                let at =
                    (self.work.request.first_row + token) * job.q.token_stride + head * job.q.head_stride;
                let (from, to) = (job.q.base.add(at), self.at(job.layout.q + row * size));
                A::read_row(job.dtype, from, to, size, job.scale);
            }
        }
        (low.min(high), high)
    }

    /// The keys `begin..end`, all in one chunk: maximum, sum and weighted values of every row.
    ///
    /// # Safety
    /// As [`process`], after [`Pass::prepare`].
    unsafe fn chunk<A: Level, E: Elem>(&self, begin: usize, end: usize) {
        // SAFETY: rows fit the scratch; keys lie below the request's length, whose blocks are in the
        // table and in the cache.
        unsafe {
            merge::clear_chunk(self);
            let mut at = begin / TILE * TILE;
            while at < end {
                let (from, to) = (begin.max(at), end.min(at + TILE));
                let (keys, values) = self.locate::<E>(at, from, to);
                let block = Block { at, from, to };
                if self.job.shape.form == Form::Latent {
                    let (keys, values) = self.turn_latents::<A, E>(&block, &keys);
                    tile::converted::<A>(self, &block, &keys, values);
                } else if Blocks::<A, E>::DIRECT && self.rows <= E::DIRECT_ROWS {
                    let keys = Keys { groups: keys };
                    let values = Values { groups: values, stride: self.job.shape.head_size_v * E::SIZE };
                    tile::direct::<A, E>(self, &block, &keys, &values);
                } else {
                    let keys = self.convert_keys::<A, E>(&block, &keys);
                    let values = self.convert_values::<A, E>(&block, &values);
                    tile::converted::<A>(self, &block, &keys, values);
                }
                at += TILE;
            }
        }
    }

    /// Where the tile's groups of keys and values lie; groups outside `from..to` are null.
    ///
    /// # Safety
    /// As [`Pass::chunk`].
    unsafe fn locate<E: Elem>(
        &self,
        at: usize,
        from: usize,
        to: usize,
    ) -> ([*const u8; GROUPS], [*const u8; GROUPS]) {
        let (shape, cache) = (&self.job.shape, &self.job.cache);
        let (mut keys, mut values) = ([std::ptr::null(); GROUPS], [std::ptr::null(); GROUPS]);
        for g in from.saturating_sub(at) / GROUP..(to - at).div_ceil(GROUP) {
            let token = at + g * GROUP;
            let (block, offset) = (token / cache.block_size, token % cache.block_size);
            // SAFETY: the builder checked that the table has this block, and the wrapper that it is in
            // the cache.
            unsafe {
                let number = *self.work.blocks.get_unchecked(block) as usize;
                let head = cache.base.add(number * cache.block_stride + self.kv_head * cache.head_bytes);
                keys[g] = head.add(offset * shape.head_size * E::SIZE);
                values[g] = head.add(cache.values + offset * shape.head_size_v * E::SIZE);
            }
        }
        (keys, values)
    }

    /// The tile's latent rows in float32: as packed groups of keys, and their first part as panels of values.
    ///
    /// # Safety
    /// As [`Pass::chunk`]; `rows` from [`Pass::locate`].
    unsafe fn turn_latents<A: Level, E: Elem>(
        &self,
        b: &Block,
        rows: &[*const u8; GROUPS],
    ) -> (Keys, *const f32) {
        let (size, width) = (self.job.shape.head_size, self.job.shape.head_size_v);
        let values = self.at(self.job.layout.values);
        let mut groups = [std::ptr::null(); GROUPS];
        // SAFETY: a group's 16 rows lie in one block, in the cache; the scratch has room for all four groups.
        unsafe {
            for g in b.groups() {
                let to = self.at(self.job.layout.keys + g * size * GROUP);
                A::turn_latents::<E>(rows[g], (size, width), to, values.add(g * GROUP * 16));
                groups[g] = to.cast_const().cast();
            }
        }
        (Keys { groups }, values)
    }

    /// The tile's keys as float32 in the same packing; float32 stays where it is.
    ///
    /// # Safety
    /// As [`Pass::chunk`]; `keys` from [`Pass::locate`].
    unsafe fn convert_keys<A: Level, E: Elem>(&self, b: &Block, keys: &[*const u8; GROUPS]) -> Keys {
        if E::IS_F32 {
            return Keys { groups: *keys };
        }
        let n = self.job.shape.head_size * GROUP;
        let mut groups = [std::ptr::null(); GROUPS];
        // SAFETY: a group has `head_size x GROUP` elements, and the scratch room for all four.
        unsafe {
            for g in b.groups() {
                let to = self.at(self.job.layout.keys + g * n);
                A::widen::<E>(keys[g], to, n);
                groups[g] = to.cast_const().cast();
            }
        }
        Keys { groups }
    }

    /// The tile's values as float32, 16 columns at a time: `[head_size_v / 16, TILE, 16]`.
    ///
    /// # Safety
    /// As [`Pass::chunk`]; `values` from [`Pass::locate`].
    unsafe fn convert_values<A: Level, E: Elem>(
        &self,
        b: &Block,
        values: &[*const u8; GROUPS],
    ) -> *const f32 {
        let width = self.job.shape.head_size_v;
        let base = self.at(self.job.layout.values);
        // SAFETY: `from..to` are tokens of the tile; a token has `head_size_v` elements, and the
        // scratch room for whole panels of 16.
        unsafe {
            for t in b.from - b.at..b.to - b.at {
                let token = values[t / GROUP].add(t % GROUP * width * E::SIZE);
                A::widen_panels::<E>(token, base.add(t * 16), width);
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
    /// As [`process`]; `values` has `head_size_v` float32.
    pub(super) unsafe fn write_row<A: Level>(&self, row: usize, values: *const f32, factor: f32) {
        // SAFETY: the row lies in `out`, and no other item writes it.
        unsafe {
            A::write_row(self.job.dtype, values, self.out_row(row), self.job.shape.head_size_v, factor);
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
    /// As [`process`], for a job that merges.
    pub(super) unsafe fn lse(&self, row: usize) -> f32 {
        // SAFETY: `[rows, heads]`, checked by the wrapper; no other item writes this row.
        unsafe { *self.lse_at(row) }
    }

    /// Log of a row's denominator, where it was asked for.
    ///
    /// # Safety
    /// As [`process`].
    pub(super) unsafe fn write_lse(&self, row: usize, lse: impl FnOnce() -> f32) {
        if self.job.lse.is_null() {
            return;
        }
        // SAFETY: `[rows, heads]`, checked by the wrapper; no other item writes this row.
        unsafe { self.lse_at(row).write(lse()) };
    }
}
