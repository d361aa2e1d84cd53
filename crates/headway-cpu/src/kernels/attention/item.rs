//! One work item: attention of some new tokens of a request over some chunks of its keys, for some
//! key/value heads. Written once over the [`Level`] and the cache's [`Elem`].
//!
//! Per chunk: for each tile of 64 keys, scores, online softmax, weighted values; chunks are merged in
//! ascending order (see `plan`). As many heads as the scratch has rows for walk the tiles together: a
//! block's heads lie side by side, and long runs of memory are read faster than short ones (the next page of
//! addresses is known, and so is the next line). The online softmax and the merge of partial results by
//! their log-sum-exp are those of FlashAttention (Dao et al., 2022) and Flash-Decoding (2023).

#[cfg(target_arch = "x86_64")]
use super::tiles;
use super::{
    elem::Elem,
    job::{Job, Work},
    level::Level,
    merge,
    micro::{TILE, Values},
    pass::Pass,
    place::{Place, groups_ahead},
    plan::CHUNK,
    shape::{Form, LINE_FLOATS},
    sight::Seen,
    tile::{self, Block, Blocks, Keys},
};
use std::{
    ops::Range,
    sync::atomic::Ordering::{AcqRel, Relaxed},
};

/// Runs a work item.
///
/// # Safety
/// The machine has the level `A`; `scratch` has the floats of
/// `job.layout`, for this call alone; `job` holds what its fields say; no other thread runs the same
/// item of this job.
pub(super) unsafe fn process<A: Level, E: Elem>(job: &Job<'_>, work: Work<'_>, scratch: *mut f32) {
    let group = job.shape.group();
    let tokens = (work.item.q_end - work.item.q_begin) as usize;
    // Query heads of a key/value head in one pass: all, but for groups of more heads than there are rows.
    let per_pass = group.min(job.shape.max_rows());
    let per_band = match (job.shape.max_rows() / (tokens * per_pass).max(1)).max(1) {
        // Tiles of rows end at multiples of 16: those after a head's last row are not another's.
        _ if E::TILES && tokens * per_pass > LINE_FLOATS => 1,
        heads => heads,
    };
    // SAFETY: a kernel with tiles runs where they may be used; they are given back when the item is done.
    #[cfg(target_arch = "x86_64")]
    let _tiles = E::TILES.then(|| unsafe { tiles::begin(tokens * per_pass) });
    let item = work.item.head_begin as usize..work.item.head_end as usize;
    let bands = || {
        let item = item.clone();
        item.clone().step_by(per_band).flat_map(move |first| {
            let kv_heads = first..item.end.min(first + per_band);
            (0..group).step_by(per_pass).map(move |q| (kv_heads.clone(), q..group.min(q + per_pass)))
        })
    };
    for (kv_heads, of_group) in bands() {
        let band = Band { job, work: &work, tokens, kv_heads, of_group, scratch };
        // SAFETY: as the caller has promised; items hold disjoint (tokens, heads, chunks), so no
        // two bands write the same row of `out` or the same slot.
        unsafe { band.run::<A, E>() };
    }
    if let Some((split, arrived)) = work.split
        && arrived.fetch_add(1, AcqRel) + 1 == split.parts
    {
        arrived.store(0, Relaxed);
        for (kv_heads, of_group) in bands() {
            let band = Band { job, work: &work, tokens, kv_heads, of_group, scratch };
            for i in 0..band.kv_heads.len() {
                // SAFETY: all other parts have left their results (acquired just now) and are done
                // with these rows.
                unsafe { merge::merge_split::<A>(&band.pass(i), split) };
            }
        }
    }
}

/// Key/value heads that walk the tiles together.
struct Band<'a> {
    job: &'a Job<'a>,
    work: &'a Work<'a>,
    /// New tokens.
    tokens: usize,
    kv_heads: Range<usize>,
    /// Which query heads of each.
    of_group: Range<usize>,
    scratch: *mut f32,
}

impl<'a> Band<'a> {
    /// The rows of the i-th key/value head.
    fn pass(&self, i: usize) -> Pass<'a> {
        let kv_head = self.kv_heads.start + i;
        let count = self.of_group.len();
        Pass {
            job: self.job,
            work: self.work,
            heads: (kv_head * self.job.shape.group() + self.of_group.start, count),
            first: i * self.tokens * count,
            rows: self.tokens * count,
            scratch: self.scratch,
        }
    }

    /// # Safety
    /// As [`process`].
    unsafe fn run<A: Level, E: Elem>(&self) {
        let (item, heads) = (&self.work.item, self.kv_heads.len());
        // SAFETY: as the caller has promised; chunks are those of the item.
        unsafe {
            let mut seen = Seen::default();
            for i in 0..heads {
                seen = self.pass(i).prepare::<A>();
                #[cfg(target_arch = "x86_64")]
                if E::TILES {
                    tiles::prepare::<A>(&self.pass(i));
                }
            }
            let walk = Walk::new(seen, item.chunk_begin as usize..item.chunk_end as usize);
            let mut coming = walk.from(walk.begin);
            let mut place = self.place::<E>(self.kv_heads.start, coming.as_ref());
            let mut chunk = usize::MAX;
            while let Some(block) = coming {
                if chunk != block.at / CHUNK {
                    if chunk != usize::MAX {
                        (0..heads).for_each(|i| merge::keep_chunk::<A>(&self.pass(i), chunk));
                    }
                    chunk = block.at / CHUNK;
                    (0..heads).for_each(|i| merge::clear_chunk(&self.pass(i)));
                }
                coming = walk.from(block.to);
                for i in 0..heads {
                    let next = self.next::<E>(i, &block, coming.as_ref(), &walk);
                    tile::<A, E>(&self.pass(i), &block, &place, &next);
                    place = next;
                }
            }
            if chunk != usize::MAX {
                (0..heads).for_each(|i| merge::keep_chunk::<A>(&self.pass(i), chunk));
            }
            if self.work.split.is_none() {
                (0..heads).for_each(|i| merge::finish::<A>(&self.pass(i)));
            }
        }
    }

    /// # Safety
    /// As [`Place::of`].
    unsafe fn place<E: Elem>(&self, kv_head: usize, block: Option<&Block>) -> Place {
        // SAFETY: as the caller has promised.
        block.map_or(Place::NONE, |b| unsafe { Place::of::<E>(self.job, self.work, kv_head, b) })
    }

    /// What is read after the i-th head's block: the next head's, this band's next, which is `coming`, or the
    /// first of the item's next band.
    ///
    /// # Safety
    /// As [`Place::of`].
    unsafe fn next<E: Elem>(&self, i: usize, block: &Block, coming: Option<&Block>, walk: &Walk) -> Place {
        let Range { start, end } = self.kv_heads;
        // SAFETY: as the caller has promised; blocks and heads are the item's.
        unsafe {
            if start + i + 1 < end {
                self.place::<E>(start + i + 1, Some(block))
            } else if coming.is_some() {
                self.place::<E>(start, coming)
            } else if end < self.work.item.head_end as usize {
                self.place::<E>(end, walk.from(walk.begin).as_ref())
            } else {
                Place::NONE
            }
        }
    }
}

/// The way of a band through its item's keys, block by block: those of the prefix, then the others that a row sees.
struct Walk {
    /// The item's first key.
    begin: usize,
    seen: Seen,
}

impl Walk {
    fn new(seen: Seen, chunks: Range<usize>) -> Self {
        let end = chunks.end * CHUNK;
        let seen = Seen { prefix: seen.prefix.min(end), high: seen.high.min(end), ..seen };
        Self { begin: chunks.start * CHUNK, seen }
    }

    /// The first block with keys from `at` on.
    #[inline]
    fn from(&self, at: usize) -> Option<Block> {
        let Seen { prefix, low, high } = self.seen;
        let in_prefix = at < prefix;
        let (from, end) = if in_prefix { (at, prefix) } else { (at.max(low), high) };
        let at = from / TILE * TILE;
        (from < end).then(|| Block { at, from, to: end.min(at + TILE), in_prefix })
    }
}

/// One tile of keys for the rows of one key/value head.
///
/// # Safety
/// As [`process`], after [`Pass::prepare`]; `place` is the tile's.
unsafe fn tile<A: Level, E: Elem>(pass: &Pass<'_>, block: &Block, place: &Place, next: &Place) {
    let shape = &pass.job.shape;
    let latent = shape.form == Form::Latent;
    let direct = !latent && Blocks::<A, E>::DIRECT && pass.rows <= E::DIRECT_ROWS;
    let distance = groups_ahead::<E>(shape.head_size.max(shape.head_size_v));
    let ahead = if direct { place.ahead(next, distance) } else { place.or_itself(next) };
    let keys = Keys { groups: place.keys, ahead: ahead.keys };
    let values =
        Values { groups: place.values, ahead: ahead.values, stride: shape.head_size_v * E::UNIT_SIZE };
    // SAFETY: rows fit the scratch; keys lie below the request's length, whose blocks are in the table;
    // each is in the cache, or block 0 stands in for it (`Place::of`).
    unsafe {
        if E::TILES {
            #[cfg(target_arch = "x86_64")]
            tiles::tile::<A>(pass, block, &keys, &values);
        } else if direct {
            tile::direct::<A, E>(pass, block, &keys, &values, distance);
        } else if latent {
            let (keys, values) = pass.turn_latents::<A, E>(block, &keys);
            tile::converted::<A>(pass, block, &keys, values);
        } else {
            let keys = pass.convert_keys::<A, E>(block, &keys);
            let values = pass.convert_values::<A, E>(block, &values);
            tile::converted::<A>(pass, block, &keys, values);
        }
    }
}
