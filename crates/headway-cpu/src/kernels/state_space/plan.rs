//! What a step holds for a state-space group: its requests with their chunks, and where their states are.
//! Made once a step; every layer of the group reads it.

use std::ops::Range;

/// One request of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its new tokens, as rows of the step.
    pub rows: Range<usize>,
    /// It has no state yet: whatever its block holds is of somebody else.
    pub fresh: bool,
    /// Its chunks in those of the plan; empty for a decode, which is a step and no scan.
    pub chunks: Range<usize>,
}

/// A step's requests, decodes first. Rows of different requests don't meet: the kernels' tasks rely on it, so
/// [`Plan::fill`] is the only writer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    requests: Vec<Request>,
    live: Vec<usize>,
    chunks: Vec<usize>,
    rows: usize,
    longest_chunk: usize,
}

impl Plan {
    /// A step's requests in row order, and the tokens of each chunk. Requests without new tokens are padding.
    ///
    /// # Errors
    /// Rows that go back, or chunks of a request that are not its rows.
    pub fn fill(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        chunks: impl IntoIterator<Item = usize>,
    ) -> Result<(), String> {
        self.requests.clear();
        self.live.clear();
        self.chunks.clear();
        self.rows = 0;
        self.chunks.extend(chunks);
        self.longest_chunk = self.chunks.iter().copied().max().unwrap_or(0);
        for request in requests {
            let (i, Request { rows, chunks, .. }) = (self.requests.len(), &request);
            if rows.start < self.rows || rows.end < rows.start {
                return Err(format!("request {i} has rows {rows:?}, but {} rows came before", self.rows));
            }
            let tokens = self.chunks.get(chunks.clone()).map(|c| c.iter().sum::<usize>());
            if tokens.is_none_or(|n| !chunks.is_empty() && n != rows.len()) {
                return Err(format!(
                    "request {i} has {} tokens, and other numbers in its chunks",
                    rows.len()
                ));
            }
            if !rows.is_empty() {
                self.live.push(i);
            }
            self.rows = rows.end;
            self.requests.push(request);
        }
        Ok(())
    }

    /// `[requests]`.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Requests with new tokens.
    pub fn live(&self) -> &[usize] {
        &self.live
    }

    /// Tokens of each chunk.
    pub fn chunks(&self) -> &[usize] {
        &self.chunks
    }

    /// Rows of all requests.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn longest_chunk(&self) -> usize {
        self.longest_chunk
    }
}

/// The blocks of a step's states.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct States {
    blocks: Vec<usize>,
    /// The requests of the plan that it was filled for: no two of them have one block.
    live: Vec<usize>,
    used: Vec<usize>,
}

impl States {
    /// Blocks by request; of requests without new tokens they are not looked at.
    ///
    /// # Errors
    /// The null block, or a block that two requests have.
    pub fn fill(&mut self, plan: &Plan, blocks: impl IntoIterator<Item = i32>) -> Result<(), String> {
        self.blocks.clear();
        self.blocks.extend(blocks.into_iter().map(|b| usize::try_from(b).unwrap_or(0)));
        if self.blocks.len() != plan.requests.len() {
            return Err(format!("{} states for {} requests", self.blocks.len(), plan.requests.len()));
        }
        self.live.clone_from(&plan.live);
        self.used.clear();
        self.used.extend(plan.live.iter().map(|r| self.blocks[*r]));
        self.used.sort_unstable();
        if self.used.first() == Some(&0) {
            return Err("a request has no block for its state".into());
        }
        if let Some(w) = self.used.windows(2).find(|w| w[0] == w[1]) {
            return Err(format!("two requests have block {} for their states", w[0]));
        }
        Ok(())
    }

    pub(super) fn of(&self, request: usize) -> usize {
        self.blocks[request]
    }

    pub(super) fn largest(&self) -> usize {
        self.used.last().copied().unwrap_or(0)
    }

    /// Whether it was filled for these requests with new tokens.
    pub(super) fn is_of(&self, plan: &Plan) -> bool {
        self.live == plan.live
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(rows: Range<usize>, chunks: Range<usize>) -> Request {
        Request { rows, fresh: true, chunks }
    }

    #[test]
    fn requests_that_share_rows_or_contradict_their_chunks_are_refused() {
        let mut plan = Plan::default();
        plan.fill([request(0..1, 0..0), request(1..1, 0..0), request(1..6, 0..2)], [4, 1]).unwrap();
        assert_eq!((plan.rows(), plan.live(), plan.longest_chunk()), (6, &[0, 2][..], 4));
        let refused = |requests: Vec<Request>, words: &str| {
            let e = Plan::default().fill(requests, [4, 1]).unwrap_err();
            assert!(e.contains(words), "{e}");
        };
        refused(vec![request(0..2, 0..0), request(1..3, 0..0)], "rows 1..3, but 2 rows came before");
        #[expect(clippy::reversed_empty_ranges, reason = "what is to be refused")]
        refused(vec![request(3..2, 0..0)], "rows 3..2");
        refused(vec![request(0..4, 0..2)], "4 tokens, and other numbers");
        refused(vec![request(0..5, 1..3)], "5 tokens, and other numbers");
    }

    #[test]
    fn states_belong_to_their_plan() {
        let (mut plan, mut other, mut states) = (Plan::default(), Plan::default(), States::default());
        plan.fill([request(0..1, 0..0), request(1..1, 0..0)], []).unwrap();
        other.fill([request(0..0, 0..0), request(0..1, 0..0)], []).unwrap();
        states.fill(&plan, [3, 3]).unwrap();
        assert!(states.is_of(&plan) && !states.is_of(&other));
    }
}
