//! Which block of the cache holds a request's state. A state has a fixed size, so a request needs one
//! block, and one more for each drafted token that may be rejected.

use crate::{
    AttentionError, Result,
    group::kv::{block_table::BlockRows, spec::MambaCacheMode},
};

/// Writes the blocks of the running state and of the drafted tokens behind it, request after request.
/// Returns the blocks a request.
///
/// Where the running state alone is kept, that is the whole table. Where states at block ends are kept
/// too ([`MambaCacheMode::All`], [`MambaCacheMode::Align`]), the running state is in the block of the
/// request's last token, `seq_lens[r]` tokens in; a padding row (length 0) has its first block.
///
/// # Errors
/// A table too narrow for the length.
pub fn state_blocks(
    table: BlockRows<'_>,
    seq_lens: &[i32],
    mode: MambaCacheMode,
    num_speculative_blocks: usize,
    out: &mut Vec<i32>,
) -> Result<usize> {
    out.clear();
    let width = match mode {
        MambaCacheMode::None => table.stride,
        MambaCacheMode::All | MambaCacheMode::Align => 1 + num_speculative_blocks,
    };
    for (r, &len) in seq_lens.iter().enumerate() {
        let first = match mode {
            MambaCacheMode::None => 0,
            _ => usize::try_from(len - 1).unwrap_or(0) / table.block_size.max(1),
        };
        let row = table.row(r as i32);
        out.extend_from_slice(row.get(first..first + width).ok_or_else(|| {
            AttentionError::Inputs(format!(
                "a state of {len} tokens and {num_speculative_blocks} drafted ones needs blocks {first} to {} \
                 of {} tokens; row {r} of the block table has {}",
                first + width - 1,
                table.block_size,
                row.len()
            ))
        })?);
    }
    Ok(width)
}
