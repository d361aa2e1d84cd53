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
    /// Its chunks in [`Plan::chunks`]; empty for a decode, which is a step and no scan.
    pub chunks: Range<usize>,
}

/// A step's requests, decodes first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// `[requests]`; those without new tokens are padding.
    pub requests: Vec<Request>,
    /// Decodes among them.
    pub decodes: usize,
    /// Rows of the decodes.
    pub decode_rows: usize,
    /// Tokens of each chunk.
    pub chunks: Vec<usize>,
}

/// The blocks of a step's states.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct States {
    blocks: Vec<usize>,
    largest: usize,
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
        let live = self.blocks.iter().zip(&plan.requests).filter(|(_, r)| !r.rows.is_empty());
        let mut used: Vec<usize> = live.map(|(b, _)| *b).collect();
        used.sort_unstable();
        if used.first() == Some(&0) {
            return Err("a request has no block for its state".into());
        }
        if let Some(w) = used.windows(2).find(|w| w[0] == w[1]) {
            return Err(format!("two requests have block {} for their states", w[0]));
        }
        self.largest = used.last().copied().unwrap_or(0);
        Ok(())
    }

    pub(super) fn of(&self, request: usize) -> usize {
        self.blocks[request]
    }

    pub(super) fn largest(&self) -> usize {
        self.largest
    }
}
