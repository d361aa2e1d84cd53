//! What a plan and its buffers are sized by: heads, head sizes, and the room for split results. One
//! formula for what is allocated and what is used.

use super::{micro::TILE, plan::CHUNK};

/// Most bytes of partial results that a group keeps; beyond that fewer rows are split.
const MOST_SLOT_BYTES: usize = 32 << 20;
/// Query heads; far beyond any model's, and sizes made of it don't wrap.
const MOST_HEADS: usize = 1 << 16;
/// Widest latent row.
const MOST_LATENT: usize = 1024;
/// Rows that share a pass over latents: the heads of a large model, so that a page is read and turned once for all.
const LATENT_ROWS: usize = 128;
/// float32 to a cache line; also the rows of a tile of AMX.
pub(super) const LINE_FLOATS: usize = 16;
/// Most bfloat16 that a number is a sum of in tiles: three are all of a float32.
pub(super) const TERMS: usize = 3;

/// What a page of the cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Keys in groups of 16 tokens, then values.
    KeysAndValues,
    /// One latent row a token, token-major: all of it is the key, its first `head_size_v` elements are the value.
    Latent,
}

/// Heads of the layers of a group, and the room for split rows. Only made by functions that check, because the
/// kernels reach as far as these numbers say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// What a page holds.
    pub(crate) form: Form,
    /// Query heads.
    pub(crate) num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub(crate) num_kv_heads: usize,
    /// Elements of a query and key head, a multiple of 8.
    pub(crate) head_size: usize,
    /// Elements of a value head, a multiple of 8.
    pub(crate) head_size_v: usize,
    /// Partial rows (one row, one chunk) that the workspace holds.
    pub(crate) slot_rows: usize,
}

impl Shape {
    /// A shape with room for one decode of `max_model_len` tokens split as finely as can be (within a
    /// limit of bytes).
    ///
    /// # Errors
    /// A sentence, for head counts or sizes that the kernels don't take.
    pub fn new(
        num_heads: usize,
        num_kv_heads: usize,
        head_size: usize,
        head_size_v: usize,
        max_model_len: usize,
    ) -> Result<Self, String> {
        if num_heads > MOST_HEADS {
            return Err(format!("{num_heads} query heads (up to {MOST_HEADS} are supported)"));
        }
        if num_kv_heads == 0 || num_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            return Err(format!("{num_heads} query heads over {num_kv_heads} key/value heads"));
        }
        for n in [head_size, head_size_v] {
            if n == 0 || n > 512 || !n.is_multiple_of(8) {
                return Err(format!("a head of {n} elements (multiples of 8 up to 512 are supported)"));
            }
        }
        let form = Form::KeysAndValues;
        let shape = Self { form, num_heads, num_kv_heads, head_size, head_size_v, slot_rows: 0 };
        Ok(shape.with_slots(max_model_len))
    }

    /// All heads over one latent row a token, of `rank` elements and `rope` that only the scores read.
    ///
    /// # Errors
    /// As [`Shape::new`].
    pub fn latent(num_heads: usize, rank: usize, rope: usize, max_model_len: usize) -> Result<Self, String> {
        if num_heads == 0 || num_heads > MOST_HEADS {
            return Err(format!("latent attention of {num_heads} heads (1 to {MOST_HEADS} are supported)"));
        }
        if rank == 0
            || rank.saturating_add(rope) > MOST_LATENT
            || !rank.is_multiple_of(8)
            || !rope.is_multiple_of(8)
        {
            return Err(format!(
                "a latent of {rank} + {rope} elements (multiples of 8, together up to {MOST_LATENT}, are supported)"
            ));
        }
        let shape = Self {
            form: Form::Latent,
            num_heads,
            num_kv_heads: 1,
            head_size: rank + rope,
            head_size_v: rank,
            slot_rows: 0,
        };
        Ok(shape.with_slots(max_model_len))
    }

    fn with_slots(self, max_model_len: usize) -> Self {
        let wanted = self.num_heads.saturating_mul(max_model_len.div_ceil(CHUNK));
        Self { slot_rows: wanted.min(MOST_SLOT_BYTES / (4 * self.slot_floats())), ..self }
    }

    /// Elements that a token takes in a page.
    pub fn token_elements(&self) -> usize {
        match self.form {
            Form::KeysAndValues => self.num_kv_heads * (self.head_size + self.head_size_v),
            Form::Latent => self.head_size,
        }
    }

    /// Query heads that share a key/value head.
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Most rows (tokens x heads) that one pass over the keys serves.
    pub(super) fn max_rows(&self) -> usize {
        if self.form == Form::Latent {
            return LATENT_ROWS;
        }
        match self.head_size.max(self.head_size_v) {
            0..=128 => 96,
            129..=256 => 48,
            _ => 24,
        }
    }

    /// New tokens that one pass over the keys serves.
    pub(super) fn tile_tokens(&self) -> usize {
        (self.max_rows() / self.group()).max(1)
    }

    /// Most splits in a plan: each has at least one row in each of two chunks.
    pub(super) fn max_splits(&self) -> usize {
        self.slot_rows / 2
    }

    /// float32 in a partial row: maximum, sum, and the accumulated values from [`SLOT_VALUES`] on.
    pub(super) fn slot_floats(&self) -> usize {
        SLOT_VALUES + self.head_size_v.next_multiple_of(LINE_FLOATS)
    }

    /// Where the arrays of a worker's scratch begin.
    pub(super) fn scratch(&self) -> ScratchLayout {
        let (rows, tile_rows) = (self.max_rows(), self.max_rows().next_multiple_of(LINE_FLOATS));
        let mut end = 0;
        let mut place = |floats: usize| {
            let at = end;
            end = (at + floats).next_multiple_of(LINE_FLOATS) + GUARD;
            at
        };
        ScratchLayout {
            q: place(rows * self.head_size),
            acc: place(tile_rows * self.head_size_v),
            total: place(rows * self.head_size_v),
            scores: place(tile_rows * TILE),
            keys: place(TILE * self.head_size),
            values: place(TILE * self.head_size_v.next_multiple_of(LINE_FLOATS)),
            row_state: place(rows * 4),
            bounds: place(rows * 2),
            q_terms: place((TERMS * tile_rows * self.head_size).div_ceil(2)),
            weight_terms: place(TERMS * tile_rows * TILE / 2),
            value_pairs: place((TILE * self.head_size_v).div_ceil(2)),
            tile_rows,
            floats: end,
        }
    }

    /// Bytes of one worker's scratch.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch().floats * 4
    }

    /// Bytes of all partial rows, with the guards at their end.
    pub fn slot_bytes(&self) -> usize {
        (self.slot_rows * self.slot_floats() + GUARD) * 4
    }
}

/// Where a partial row's values begin; maximum and sum come first.
pub(super) const SLOT_VALUES: usize = LINE_FLOATS;
/// float32 after each array that nobody writes: tests look at them.
pub(super) const GUARD: usize = LINE_FLOATS;

/// Offsets of a worker's arrays, in float32.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only x86-64 has tiles"))]
pub(super) struct ScratchLayout {
    /// `[rows, head_size]`: queries, scaled.
    pub(super) q: usize,
    /// `[tile_rows, head_size_v]`: this chunk's values.
    pub(super) acc: usize,
    /// `[rows, head_size_v]`: the merged chunks' values.
    pub(super) total: usize,
    /// `[tile_rows, TILE]`: scores, then weights.
    pub(super) scores: usize,
    /// `[GROUPS, head_size, GROUP]`: keys in float32.
    pub(super) keys: usize,
    /// `[head_size_v / 16, TILE, 16]`: values in float32.
    pub(super) values: usize,
    /// `[rows, 4]`: maximum and sum of this chunk, and of the merged chunks.
    pub(super) row_state: usize,
    /// `[rows, 2]`, u32: first key that a row sees, and the one after the last.
    pub(super) bounds: usize,
    /// `[TERMS, tile_rows, head_size]`, bfloat16: queries, for tiles.
    pub(super) q_terms: usize,
    /// `[TERMS, tile_rows, TILE]`, bfloat16: weights, for tiles.
    pub(super) weight_terms: usize,
    /// `[TILE / 2, head_size_v, 2]`, bfloat16: values of a tile that don't lie in one piece, for tiles.
    pub(super) value_pairs: usize,
    /// Rows up to whole tiles.
    pub(super) tile_rows: usize,
    /// All of it.
    pub(super) floats: usize,
}

#[cfg(test)]
impl ScratchLayout {
    /// Each array's name and where its guard ends, in float32.
    pub(super) fn ends(&self) -> [(&'static str, usize); 11] {
        [
            ("q", self.acc),
            ("acc", self.total),
            ("total", self.scores),
            ("scores", self.keys),
            ("keys", self.values),
            ("values", self.row_state),
            ("row_state", self.bounds),
            ("bounds", self.q_terms),
            ("q_terms", self.weight_terms),
            ("weight_terms", self.value_pairs),
            ("value_pairs", self.floats),
        ]
    }
}

const _: () = assert!(CHUNK.is_multiple_of(TILE));
