//! Lifetime: one step. Chunked local attention as a batch of more, shorter requests: each chunk of a
//! request that has new tokens is a request of its own, with the chunk's blocks.

use crate::{AttentionError, Result};

/// A batch of virtual requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VirtualBatch {
    /// `[num_reqs + 1]`, tokens.
    pub query_start_loc: Vec<i32>,
    /// `[num_reqs]`, tokens: of the chunk so far.
    pub seq_lens: Vec<i32>,
    /// `[num_reqs, chunk / block_size]`, row-major: the chunk's blocks.
    pub block_table: Vec<i32>,
    /// Blocks of a chunk.
    pub blocks_per_chunk: usize,
}

impl VirtualBatch {
    /// Most new tokens of a virtual request.
    pub fn max_query_len(&self) -> usize {
        self.query_start_loc.windows(2).map(|w| w[1] - w[0]).max().map_or(0, |m| m.max(0) as usize)
    }

    /// Longest virtual request.
    pub fn max_seq_len(&self) -> usize {
        self.seq_lens.iter().copied().max().map_or(0, |m| m.max(0) as usize)
    }
}

/// Cuts requests at multiples of `chunk` positions. `blocks` is `[num_reqs, stride]`. Entries past a
/// row's end repeat its last block: no token of them is in the lengths.
///
/// # Errors
/// A block size that doesn't divide the chunk.
pub fn virtual_batches(
    query_start_loc: &[i32],
    seq_lens: &[i32],
    chunk: usize,
    block_size: usize,
    blocks: &[i32],
    stride: usize,
) -> Result<VirtualBatch> {
    if chunk == 0 || block_size == 0 || !chunk.is_multiple_of(block_size) {
        return Err(AttentionError::Inputs(format!(
            "attention chunks of {chunk} tokens are not divisible by blocks of {block_size}"
        )));
    }
    let blocks_per_chunk = chunk / block_size;
    let mut out = VirtualBatch { query_start_loc: vec![0], blocks_per_chunk, ..VirtualBatch::default() };
    for (r, (w, &seq)) in query_start_loc.windows(2).zip(seq_lens).enumerate() {
        let (end, new) = (usize::try_from(seq).unwrap_or(0), usize::try_from(w[1] - w[0]).unwrap_or(0));
        let mut position = end.saturating_sub(new);
        while position < end {
            let first = position / chunk * chunk;
            let until = end.min(first + chunk);
            let last = out.query_start_loc[out.query_start_loc.len() - 1];
            out.query_start_loc.push(last + (until - position) as i32);
            out.seq_lens.push((until - first) as i32);
            let row = blocks.get(r * stride..(r + 1) * stride).unwrap_or(&[]);
            let of_chunk = first / block_size..first / block_size + blocks_per_chunk;
            out.block_table
                .extend(of_chunk.map(|b| row.get(b.min(stride.saturating_sub(1))).copied().unwrap_or(0)));
            position = until;
        }
    }
    Ok(out)
}
