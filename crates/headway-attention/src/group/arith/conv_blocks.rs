//! Programs of a causal convolution over prefills: each takes a block of one request's new tokens. The
//! grid is as long as the blocks, so two tables say which request and which of its blocks a program has.

use super::lengths::query_lens;
use crate::{AttentionError, Result};

/// The request of a program that has nothing to do.
pub const NO_REQUEST: i32 = -1;

/// Tokens in a block of the convolution.
pub const CONV_BLOCK: usize = 8;

/// Blocks of a batch's prefills, request after request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConvBlocks {
    /// `[requests]`: blocks of each request.
    pub per_request: Vec<i32>,
    /// `[blocks]`: the request of each block.
    pub request: Vec<i32>,
    /// `[blocks]`: its number in the request.
    pub block: Vec<i32>,
}

impl ConvBlocks {
    /// Cuts each request's new tokens into blocks of `block` tokens, the last one shorter. A block of 0
    /// tokens cuts nothing.
    pub fn fill(&mut self, query_start_loc: &[i32], block: usize) {
        let Self { per_request, request, block: number } = self;
        for v in [&mut *per_request, request, number] {
            v.clear();
        }
        if block == 0 {
            return;
        }
        for (r, len) in query_lens(query_start_loc).enumerate() {
            let blocks = (len as usize).div_ceil(block) as i32;
            per_request.push(blocks);
            number.extend(0..blocks);
            request.resize(number.len(), r as i32);
        }
    }

    /// Blocks in all: the programs that have work.
    pub fn len(&self) -> usize {
        self.request.len()
    }

    /// No prefill.
    pub fn is_empty(&self) -> bool {
        self.request.is_empty()
    }

    /// Entries of the two persistent tables: twice the programs, and room for 2048 from the start, so
    /// that a grid of another length rarely needs new ones.
    pub fn table_len(&self) -> usize {
        2 * self.len().max(1024)
    }

    /// Writes the two tables; programs past the last block get [`NO_REQUEST`] in both.
    ///
    /// # Errors
    /// A table shorter than the blocks.
    pub fn write(&self, request: &mut [i32], block: &mut [i32]) -> Result<()> {
        for (table, values) in [(request, &self.request), (block, &self.block)] {
            let (room, n) = (table.len(), values.len());
            let Some((used, rest)) = table.split_at_mut_checked(n) else {
                return Err(AttentionError::Inputs(format!(
                    "{n} blocks of the convolution don't fit a table of {room}; size it with table_len"
                )));
            };
            used.copy_from_slice(values);
            rest.fill(NO_REQUEST);
        }
        Ok(())
    }
}
