//! The form of a step's launch: how long requests may be, and how many parts keys are divided into.

use crate::kernels::flash_attn::{FlashShape, most_splits};
use headway_attention::GroupInfo;

/// Most rows of queries and heads of a group that the smaller tiles take.
const FEW_ROWS: usize = 64;
/// Rows of queries and heads of the larger tiles, about.
const TILE_ROWS: usize = 128;
/// Tokens of a step for which there is room for as many parts as are useful.
const DIVIDED_TOKENS: usize = 512;
/// A bound on new tokens that every batch is under: with it all launches have one form.
const ANY_QUERY: usize = 1 << 20;

/// How far keys may be divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    multiprocessors: u32,
    shape: FlashShape,
    /// Tokens with room for all parts that are useful.
    tokens: usize,
    max_num_tokens: usize,
    max_num_reqs: usize,
    /// New tokens of a decode, drafts included.
    decode_len: usize,
    batch_invariant: bool,
}

impl Room {
    pub fn of(group: &GroupInfo, shape: FlashShape, multiprocessors: u32) -> Self {
        Self {
            multiprocessors,
            shape,
            tokens: group.max_num_tokens.min(DIVIDED_TOKENS),
            max_num_tokens: group.max_num_tokens,
            max_num_reqs: group.max_num_reqs,
            decode_len: 1 + group.num_speculative_tokens,
            batch_invariant: group.batch_invariant,
        }
    }

    /// Most parts for so many rows, in batches of so many requests.
    pub fn splits(&self, rows: usize, reqs: usize) -> usize {
        if self.batch_invariant {
            return 1;
        }
        let most = most_splits(self.multiprocessors, &self.shape, reqs);
        (most * self.tokens / rows.max(1)).clamp(1, most)
    }

    /// Bytes of scratch memory for every step.
    pub fn scratch_bytes(&self) -> usize {
        let most = self.splits(1, 1);
        let parts = self.shape.scratch_bytes(self.tokens, most);
        let own = FlashShape::schedule_len(self.max_num_reqs) * size_of::<i32>();
        parts + self.shape.scratch_bytes(self.max_num_tokens, 1) + own.next_multiple_of(256)
    }

    /// Whether a step may be a graph's of decodes of several lengths: those have as many requests as there can be of so
    /// many tokens.
    pub fn is_mixed_graph(&self, tokens: usize, reqs: usize) -> bool {
        reqs == tokens.min(self.max_num_reqs)
    }

    /// The form of a launch: bounds of new tokens, and parts. It depends on rows and requests alone where requests have
    /// as few new tokens as decodes, as a graph needs.
    pub fn form(
        &self,
        query_lens: impl Iterator<Item = usize> + Clone,
        rows: usize,
        reqs: usize,
    ) -> (usize, usize) {
        if self.batch_invariant {
            return (ANY_QUERY, 1);
        }
        let group = self.shape.group();
        // A bound of 1 would be taken for a batch without a mask. No request may be longer than the bound: its rows are
        // merged up to there.
        let few = (FEW_ROWS / group).max(self.decode_len).max(2);
        let longest = query_lens.clone().max().unwrap_or(0);
        if longest <= few {
            return (few, self.splits(rows, reqs));
        }
        let tiles: usize = query_lens.map(|n| (n * group).div_ceil(TILE_ROWS)).sum();
        // Where tiles fill the device, parts would only be work.
        let full = 10 * tiles * self.shape.kv_heads >= 8 * self.multiprocessors as usize;
        (longest, if full { 1 } else { self.splits(rows, reqs) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: FlashShape = FlashShape { heads: 32, kv_heads: 8, head_size: 128, page_size: 16 };

    fn room() -> Room {
        Room {
            multiprocessors: 132,
            shape: SHAPE,
            tokens: 512,
            max_num_tokens: 8192,
            max_num_reqs: 256,
            decode_len: 1,
            batch_invariant: false,
        }
    }

    fn form(room: Room, lens: &[usize]) -> (usize, usize) {
        room.form(lens.iter().copied(), lens.iter().sum(), lens.len())
    }

    #[test]
    fn launches_of_few_new_tokens_have_one_form() {
        let form = |lens: &[usize]| form(room(), lens);
        // 16 query rows of 4 heads fill the smaller tile.
        assert_eq!(form(&[1; 7]), (16, 16));
        assert_eq!(form(&[1, 1, 1, 0, 0, 2, 2]), form(&[1; 7]));
        assert_eq!(form(&[16]), (16, 16));
        // Longer ones say how long they are; tiles that fill the device are not divided further.
        assert_eq!(form(&[17]), (17, 16));
        assert_eq!(form(&[2048]), (2048, 1));
        assert_eq!(form(&[1, 512]), (512, 1));
        assert_eq!(form(&[1, 100]), (100, 16));
    }

    #[test]
    fn decodes_with_drafts_have_one_form_however_many_they_bring() {
        let many = Room { shape: FlashShape { kv_heads: 1, ..SHAPE }, decode_len: 5, ..room() };
        let of = |lens: &[usize]| many.form(lens.iter().copied(), 40, 8);
        assert_eq!(of(&[1; 8]), (5, 32));
        assert_eq!(of(&[5, 1, 3, 0, 0, 0, 0, 0]), (5, 32));
        assert!(many.is_mixed_graph(8, 8) && many.is_mixed_graph(900, 256) && !many.is_mixed_graph(40, 8));
    }

    #[test]
    fn parts_fit_the_scratch_memory() {
        let room = room();
        for rows in [1, 16, 256, 512, 513, 1000, 5000, 8192] {
            let parts = SHAPE.scratch_bytes(rows, room.splits(rows, rows.min(256)));
            assert!(parts <= room.scratch_bytes(), "{rows} rows");
        }
        assert_eq!(room.splits(513, 9), 15);
        let invariant = Room { batch_invariant: true, ..room };
        assert_eq!([form(invariant, &[1]), form(invariant, &[3000])], [(ANY_QUERY, 1); 2]);
        assert!(invariant.scratch_bytes() < 3 << 20);
    }
}
