//! Page lists: a block table without its holes. The pages of all requests one after another, where each
//! request's begin, and how full its last one is.

use crate::{AttentionError, Result, group::kv::block_table::BlockRows};
use std::ops::Range;

/// Tokens in the last of the pages that hold `seq_len` tokens: 0 only where there is no page.
pub fn last_page_len(seq_len: i32, page_size: usize) -> i32 {
    let (len, page) = (seq_len.max(0), page_size.max(1) as i32);
    if len == 0 { 0 } else { (len - 1) % page + 1 }
}

/// A batch's page lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageLists {
    /// `[num_reqs + 1]`: prefix sum of the requests' pages.
    pub indptr: Vec<i32>,
    /// `[pages]`: block numbers.
    pub indices: Vec<i32>,
    /// `[num_reqs]`, tokens: in each request's last page.
    pub last_page_len: Vec<i32>,
}

impl PageLists {
    /// Lists the pages of requests of these lengths. `table.block_size` is the page size.
    ///
    /// # Errors
    /// A request longer than its row of the table; a page size of 0.
    pub fn fill(&mut self, seq_lens: &[i32], table: BlockRows<'_>) -> Result<()> {
        let Self { indptr, indices, last_page_len: last } = self;
        for v in [&mut *indptr, indices, last] {
            v.clear();
        }
        indptr.push(0);
        if table.block_size == 0 {
            return Err(AttentionError::Inputs("a page must hold at least one token".into()));
        }
        for (r, &len) in seq_lens.iter().enumerate() {
            let pages = usize::try_from(len).unwrap_or(0).div_ceil(table.block_size);
            let row = table.row(r as i32);
            indices.extend_from_slice(row.get(..pages).ok_or_else(|| {
                AttentionError::Inputs(format!(
                    "request {r} of {len} tokens needs {pages} pages of {}; its row of the block table has {}",
                    table.block_size,
                    row.len()
                ))
            })?);
            indptr.push(indices.len() as i32);
            last.push(last_page_len(len, table.block_size));
        }
        Ok(())
    }

    /// The pages of a request.
    pub fn of(&self, request: usize) -> &[i32] {
        let bound = |i: usize| self.indptr.get(i).map_or(0, |&p| p as usize);
        self.indices.get(bound(request)..bound(request + 1)).unwrap_or(&[])
    }

    /// `[requests + 1]` of a part of the batch: where its pages begin in the whole list.
    pub fn bounds(&self, requests: Range<usize>) -> &[i32] {
        self.indptr.get(requests.start..=requests.end).unwrap_or(&[])
    }
}
