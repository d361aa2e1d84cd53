//! Lifetime: the model's arithmetic, used each step. Block tables and slot mappings: from a request's
//! tokens to places in the pool. Ids and strides meet in 64 bits; −1 is a slot that is written to
//! nowhere, never an index.

use super::page::gcd;
use crate::{AttentionError, ContextParallel, Result};

/// The slot that is written to nowhere: padding, and tokens of another rank.
pub const SKIP_SLOT: i64 = -1;

/// Slot of the token at `position` of a request with these blocks: block number times block size,
/// plus the offset in the block. `None` past the table.
pub fn slot(blocks: &[i32], block_size: usize, position: usize) -> Option<i64> {
    let block = *blocks.get(position / block_size)?;
    Some(i64::from(block) * block_size as i64 + (position % block_size) as i64)
}

/// Slot of a token under decode context parallelism: a block of the table holds `size` ranks' blocks of
/// tokens, dealt out in turns. −1 for another rank's token; `None` past the table.
pub fn local_slot(blocks: &[i32], block_size: usize, position: usize, cp: ContextParallel) -> Option<i64> {
    let (size, turn) = (cp.size.max(1), cp.interleave.max(1));
    let (block, offset) = (position / (block_size * size), position % (block_size * size));
    let block = *blocks.get(block)?;
    if (offset / turn) % size != cp.rank {
        return Some(SKIP_SLOT);
    }
    let local = offset / (turn * size) * turn + offset % turn;
    Some(i64::from(block) * block_size as i64 + local as i64)
}

/// Block tables of a KV cache group, one row a request state.
#[derive(Clone, Copy, Debug)]
pub struct BlockRows<'a> {
    /// `[rows, stride]`: block numbers.
    pub blocks: &'a [i32],
    /// Entries from one row to the next.
    pub stride: usize,
    /// Tokens in a block.
    pub block_size: usize,
}

impl<'a> BlockRows<'a> {
    /// A row; empty for an index without one.
    pub fn row(&self, row: i32) -> &'a [i32] {
        let at = usize::try_from(row).ok().and_then(|r| r.checked_mul(self.stride));
        at.and_then(|a| self.blocks.get(a..a + self.stride)).unwrap_or(&[])
    }
}

/// Writes the slot of each new token. Request i has the row `request_rows[i]` (−1: none) and the tokens
/// `query_start_loc[i]..query_start_loc[i + 1]` at `positions`. Everything past the last request's tokens
/// is −1. `cp` is none for groups that aren't spread over ranks.
///
/// # Errors
/// A position past its request's row.
pub fn slot_mapping(
    rows: BlockRows<'_>,
    request_rows: &[i32],
    query_start_loc: &[i32],
    positions: &[i32],
    cp: ContextParallel,
    out: &mut [i64],
) -> Result<()> {
    out.fill(SKIP_SLOT);
    for (w, &row) in query_start_loc.windows(2).zip(request_rows) {
        if row < 0 {
            continue;
        }
        let blocks = rows.row(row);
        for t in w[0].max(0) as usize..w[1].max(0) as usize {
            let (Some(&position), Some(slot)) = (positions.get(t), out.get_mut(t)) else { break };
            let position = usize::try_from(position).unwrap_or(0);
            *slot = local_slot(blocks, rows.block_size, position, cp).ok_or_else(|| {
                AttentionError::Inputs(format!(
                    "position {position} lies past the {} blocks of {} tokens of block table row {row}",
                    blocks.len(),
                    rows.block_size
                ))
            })?;
        }
    }
    Ok(())
}

/// Copies request rows into batch order. Of row r only the first `num_blocks[r]` entries count; those
/// wholly before the window's reach (`reach` tokens back from `num_computed_tokens[r]`; 0: no window) are
/// the null block 0, and so is everything else, so that no former owner's block stays.
pub fn gather_block_tables(
    rows: BlockRows<'_>,
    request_rows: &[i32],
    num_blocks: &[usize],
    num_computed_tokens: &[usize],
    reach: usize,
    out: &mut [i32],
) {
    out.fill(0);
    for (&row, to) in request_rows.iter().zip(out.chunks_exact_mut(rows.stride.max(1))) {
        let Ok(r) = usize::try_from(row) else { continue };
        let blocks = rows.row(row);
        let n = num_blocks.get(r).copied().unwrap_or(0).min(blocks.len());
        let computed = num_computed_tokens.get(r).copied().unwrap_or(0);
        let first = if reach == 0 { 0 } else { computed.saturating_sub(reach) / rows.block_size };
        if first < n {
            to[first..n].copy_from_slice(&blocks[first..n]);
        }
    }
}

/// Entries of a block table's row: at least `max_num_blocks`, rounded up so that the row reaches a
/// multiple of `token_alignment` tokens.
///
/// # Errors
/// An alignment of 0.
pub fn block_table_width(
    max_num_blocks: usize,
    block_size: usize,
    token_alignment: Option<usize>,
) -> Result<usize> {
    match token_alignment {
        None => Ok(max_num_blocks),
        Some(0) => Err(AttentionError::KvCache("token_alignment must be positive".into())),
        Some(a) => {
            let blocks = a / gcd(a, block_size.max(1));
            Ok(max_num_blocks.next_multiple_of(blocks))
        }
    }
}

/// Rewrites manager blocks into kernel blocks: block b becomes `b * factor`, …, `b * factor +
/// factor - 1`. `out` is `factor` times as long as `blocks`. Negative entries stay −1.
pub fn expand_to_kernel_blocks(blocks: &[i32], factor: usize, out: &mut [i32]) {
    expand_with_stride(blocks, factor, factor, out);
}

/// As [`expand_to_kernel_blocks`], where the next manager block begins `stride` kernel blocks on: pages
/// with padding or with other layers' pages between them.
pub fn expand_with_stride(blocks: &[i32], factor: usize, stride: usize, out: &mut [i32]) {
    for (&b, kernel) in blocks.iter().zip(out.chunks_exact_mut(factor)) {
        for (i, k) in kernel.iter_mut().enumerate() {
            *k = if b < 0 { -1 } else { b * stride as i32 + i as i32 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_go_through_the_table() {
        let blocks = [3, 11, 4];
        assert_eq!(slot(&blocks, 4, 7), Some(47));
        assert_eq!((8..11).map(|p| slot(&blocks, 4, p)).collect::<Vec<_>>(), [Some(16), Some(17), Some(18)]);
        assert_eq!(slot(&blocks, 4, 12), None);
        assert_eq!(slot(&[i32::MAX], 128, 0), Some(i64::from(i32::MAX) * 128));
    }

    #[test]
    fn kernel_blocks() {
        let mut out = [0; 6];
        expand_to_kernel_blocks(&[5, -1], 3, &mut out);
        assert_eq!(out, [15, 16, 17, -1, -1, -1]);
        let mut of_64 = [0; 8];
        expand_to_kernel_blocks(&[3, 8], 4, &mut of_64);
        assert_eq!(of_64, [12, 13, 14, 15, 32, 33, 34, 35]);
    }

    #[test]
    fn chunks_that_cross_blocks() -> Result<()> {
        let rows = BlockRows { blocks: &[7, 2, 9, 4, 5], stride: 5, block_size: 16 };
        let mut computed = 24;
        for scheduled in [40, 1, 15] {
            let positions: Vec<i32> = (computed..computed + scheduled).collect();
            let mut out = vec![0; scheduled as usize + 2];
            slot_mapping(rows, &[0], &[0, scheduled], &positions, ContextParallel::default(), &mut out)?;
            for (&p, &s) in positions.iter().zip(&out) {
                assert_eq!(s, i64::from(rows.blocks[p as usize / 16]) * 16 + i64::from(p) % 16);
            }
            assert_eq!(&out[scheduled as usize..], [SKIP_SLOT; 2]);
            computed += scheduled;
        }
        let past = slot_mapping(rows, &[0], &[0, 1], &[80], ContextParallel::default(), &mut [0]);
        assert!(past.is_err());
        Ok(())
    }
}
