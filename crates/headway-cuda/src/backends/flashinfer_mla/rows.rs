//! The rows of decodes as a plan takes them.

use headway_attention::{
    AttentionError, Result,
    group::{arith::pages::PageLists, kv::block_table::BlockRows},
};

/// Requests with new tokens, then padding as requests of as many without keys, so that a launch depends on the number of
/// rows alone where all requests have as many. Kept from step to step.
#[derive(Debug, Default)]
pub(super) struct DecodeRows {
    /// `[requests + 1]`, tokens.
    pub query_start_loc: Vec<i32>,
    /// `[requests + 1]`, pages.
    pub page_indptr: Vec<i32>,
    /// `[requests]`, tokens.
    pub seq_lens: Vec<i32>,
    /// The pages; its own bounds and lengths are of the step's requests.
    pub pages: PageLists,
    /// Some request has several new tokens.
    pub several: bool,
    lens: Vec<i32>,
}

impl DecodeRows {
    /// Takes a step's decodes, of which `rows` rows are to be computed.
    ///
    /// # Errors
    /// More new tokens than rows; a request longer than its row of the table; a page below 0.
    pub fn fill(&mut self, starts: &[i32], lens: &[i32], table: BlockRows<'_>, rows: usize) -> Result<()> {
        let new = |r: usize| starts[r + 1] - starts[r];
        self.lens.clear();
        // What asks nothing is not read.
        self.lens.extend(lens.iter().enumerate().map(|(r, &len)| if new(r) > 0 { len } else { 0 }));
        self.pages.fill(&self.lens, table)?;
        if self.pages.indices.iter().any(|&p| p < 0) {
            return Err(AttentionError::Inputs("a page number below 0".into()));
        }
        for v in [&mut self.query_start_loc, &mut self.page_indptr, &mut self.seq_lens] {
            v.clear();
        }
        self.query_start_loc.push(0);
        self.page_indptr.push(0);
        let (mut end, mut most) = (0, 1);
        for r in (0..lens.len()).filter(|&r| new(r) > 0) {
            end += new(r);
            most = most.max(new(r));
            self.push(end, self.pages.indptr[r + 1], lens[r]);
        }
        if end as usize > rows {
            return Err(AttentionError::Inputs(format!("{end} new tokens of decodes in {rows} rows")));
        }
        let pages = self.page_indptr.last().copied().unwrap_or(0);
        while (end as usize) < rows {
            end += most.min(rows as i32 - end);
            self.push(end, pages, 0);
        }
        self.several = most > 1;
        Ok(())
    }

    fn push(&mut self, end: i32, pages: i32, len: i32) {
        self.query_start_loc.push(end);
        self.page_indptr.push(pages);
        self.seq_lens.push(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(requests: &[(i32, i32)], rows: usize) -> Result<DecodeRows> {
        let mut starts = vec![0];
        requests.iter().for_each(|r| starts.push(starts.last().unwrap() + r.0));
        let lens: Vec<i32> = requests.iter().map(|r| r.1).collect();
        let blocks: Vec<i32> = (0..requests.len() as i32 * 4).map(|i| i + 1).collect();
        let mut of = DecodeRows::default();
        // A buffer that served another step.
        of.fill(&[0, 1], &[1], BlockRows { blocks: &[7], stride: 1, block_size: 16 }, 3)?;
        of.fill(&starts, &lens, BlockRows { blocks: &blocks, stride: 4, block_size: 16 }, rows)?;
        Ok(of)
    }

    #[test]
    fn padding_is_requests_of_as_many_tokens_without_keys() {
        let one = of(&[(1, 20), (1, 5), (0, 0)], 4).unwrap();
        assert_eq!(one.query_start_loc, [0, 1, 2, 3, 4]);
        assert_eq!((one.page_indptr, one.seq_lens), (vec![0, 2, 3, 3, 3], vec![20, 5, 0, 0]));
        assert_eq!((one.pages.indices, one.several), (vec![1, 2, 5], false));
        let three = of(&[(3, 33), (3, 16), (0, 0), (0, 0)], 11).unwrap();
        assert_eq!(three.query_start_loc, [0, 3, 6, 9, 11]);
        assert_eq!((three.page_indptr, three.seq_lens), (vec![0, 3, 4, 4, 4], vec![33, 16, 0, 0]));
        assert!(three.several);
    }

    #[test]
    fn requests_without_new_tokens_are_left_out() {
        let some = of(&[(1, 20), (0, 40), (2, 17)], 3).unwrap();
        assert_eq!(some.query_start_loc, [0, 1, 3]);
        assert_eq!((some.page_indptr, some.seq_lens), (vec![0, 2, 4], vec![20, 17]));
        assert_eq!(some.pages.indices, [1, 2, 9, 10]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(of(&[(2, 4), (1, 4)], 2).is_err());
        assert!(of(&[(1, 65)], 1).is_err());
    }
}
