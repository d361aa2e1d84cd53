//! Block tables and slot mappings: from a request's tokens to places in the pool. Ids and strides
//! meet in 64 bits.

/// The slot that is written to nowhere: padding, and tokens of another rank.
pub const SKIP_SLOT: i64 = -1;

/// Slot of the token at `position` of a request with these blocks: block number times block size,
/// plus the offset in the block. `None` past the table.
pub fn slot(blocks: &[i32], block_size: usize, position: usize) -> Option<i64> {
    let block = *blocks.get(position / block_size)?;
    Some(i64::from(block) * block_size as i64 + (position % block_size) as i64)
}

/// Rewrites manager blocks into kernel blocks: block b becomes `b * factor`, …, `b * factor +
/// factor - 1`. `out` is `factor` times as long as `blocks`. Negative entries stay −1.
pub fn expand_to_kernel_blocks(blocks: &[i32], factor: usize, out: &mut [i32]) {
    for (&b, kernel) in blocks.iter().zip(out.chunks_exact_mut(factor)) {
        for (i, k) in kernel.iter_mut().enumerate() {
            *k = if b < 0 { -1 } else { b * factor as i32 + i as i32 };
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
    }
}
