//! Chunks of a state-space scan (Mamba-2, arXiv 2405.21060). They end at multiples of the model's chunk
//! size counted from a sequence's start, not the step's, so that a prefill in pieces makes the same
//! chunks, and hence the same sums, as in one; and they end where a sequence ends, so that no chunk
//! mixes two. A checkpoint may ask for one more end.

use super::lengths::query_lens;
use crate::{AttentionError, Result};

/// A step's chunks, sequence after sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScanChunks {
    /// `[chunks + 1]`, tokens: prefix sum of the chunks' lengths.
    pub cu_chunk_seqlen: Vec<i32>,
    /// `[chunks]`: the sequence of each chunk.
    pub seq_idx: Vec<i32>,
    /// `[sequences]`: the last chunk of each. A sequence without new tokens repeats the chunk before it.
    pub last_chunk_indices: Vec<i32>,
    /// `[sequences]`: the chunk that ends at the sequence's checkpoint, or −1.
    pub checkpoint_chunk_indices: Vec<i32>,
}

impl ScanChunks {
    /// Cuts sequences of `query_start_loc[i + 1] - query_start_loc[i]` new tokens after
    /// `num_computed_tokens[i]`. `checkpoint_offsets[i]`, in new tokens of the sequence, is where its
    /// state is wanted besides its end (0: nowhere).
    ///
    /// # Errors
    /// A chunk size of 0; lists of other lengths; a checkpoint past the sequence's new tokens.
    pub fn fill(
        &mut self,
        num_computed_tokens: impl IntoIterator<Item = i32>,
        query_start_loc: &[i32],
        chunk_size: usize,
        checkpoint_offsets: Option<&[i32]>,
    ) -> Result<()> {
        let Self { cu_chunk_seqlen, seq_idx, last_chunk_indices, checkpoint_chunk_indices } = self;
        for v in [&mut *cu_chunk_seqlen, seq_idx, last_chunk_indices, checkpoint_chunk_indices] {
            v.clear();
        }
        cu_chunk_seqlen.push(0);
        let chunk_size = i32::try_from(chunk_size).ok().filter(|&c| c > 0);
        let Some(chunk_size) = chunk_size else {
            return Err(AttentionError::Inputs("a scan needs chunks of at least one token".into()));
        };
        let mut computed = num_computed_tokens.into_iter();
        let mut tokens = 0;
        for (s, len) in query_lens(query_start_loc).enumerate() {
            let missing = || AttentionError::Inputs(format!("sequence {s} of the scan has no lengths"));
            let start = computed.next().ok_or_else(missing)?.max(0);
            let checkpoint = match checkpoint_offsets {
                Some(offsets) => *offsets.get(s).ok_or_else(missing)?,
                None => 0,
            };
            if !(0..=len).contains(&checkpoint) {
                return Err(AttentionError::Inputs(format!(
                    "a checkpoint at token {checkpoint} of a sequence with {len} new tokens"
                )));
            }
            let (mut done, mut at_checkpoint) = (0, -1);
            while done < len {
                let aligned = chunk_size - (start + done) % chunk_size;
                let stop = if done < checkpoint { checkpoint } else { len };
                let chunk = aligned.min(stop - done);
                done += chunk;
                tokens += chunk;
                if done == checkpoint {
                    at_checkpoint = seq_idx.len() as i32;
                }
                cu_chunk_seqlen.push(tokens);
                seq_idx.push(s as i32);
            }
            last_chunk_indices.push(seq_idx.len() as i32 - 1);
            checkpoint_chunk_indices.push(at_checkpoint);
        }
        Ok(())
    }

    /// Chunks in all.
    pub fn len(&self) -> usize {
        self.seq_idx.len()
    }

    /// No new token.
    pub fn is_empty(&self) -> bool {
        self.seq_idx.is_empty()
    }
}
