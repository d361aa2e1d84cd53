//! A step's prefills of latent attention as passes through a bounded workspace: which tokens are expanded to keys and
//! values, and which rows attend to them; results are merged by log-sum-exp.
//!
//! Cached context goes by the [chunk plan](super::context_chunks); a chunk whose runs don't fit beside each other (each
//! begins at a multiple of an alignment) makes several passes. New tokens come last: those of many requests in one pass,
//! or those of a long one in several, where rows after a piece see all of it.

use super::context_chunks::ContextChunks;
use std::ops::Range;

/// Where a run of latents lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Tokens from `start` on of the request in row `request` of the block table.
    Cached {
        /// Row of the block table.
        request: usize,
        /// First token.
        start: usize,
    },
    /// New rows from this one on.
    New {
        /// First row.
        row: usize,
    },
}

/// Tokens of one request that a pass works on. They get slots side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where they are.
    pub source: Source,
    /// How many.
    pub len: usize,
    /// Slot of the first, a multiple of the workspace's alignment.
    pub slot: usize,
}

/// Rows of a request that attend to a run. No two of a pass have a row in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attends {
    /// The rows, counted from the pass's first.
    pub rows: Range<usize>,
    /// Which run.
    pub run: usize,
    /// Row n sees the run's tokens up to n, as many as there are rows; else all rows see all of it.
    pub causal: bool,
}

/// One filling of the workspace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// The prefills' rows that attend, counted from the first prefill.
    pub rows: Range<usize>,
    /// The tokens that are expanded.
    pub runs: Vec<Run>,
    /// Who attends to which run.
    pub attends: Vec<Attends>,
    /// Slots in use: a multiple of the workspace's alignment.
    pub slots: usize,
}

/// The workspace that passes go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassWorkspace {
    /// Its slots, a multiple of `alignment`.
    pub slots: usize,
    /// Where runs begin.
    pub alignment: usize,
}

/// The passes of a step. `query_start_loc` is the prefills' own, from 0; `first_request` is their row of the block
/// table.
///
/// ```
/// use headway_attention::{ContextParallel, group::arith::{context_chunks::*, prefill_passes::*}};
/// // Three new tokens after twenty cached ones.
/// let starts = [0, 3];
/// let mut context = ContextChunks::default();
/// let chunks = ChunkWorkspace { tokens: 32, alignment: 16, context_parallel: ContextParallel::default() };
/// context.fill([20], &starts, &chunks)?;
/// let all = passes(&context, &starts, 0, PassWorkspace { slots: 32, alignment: 16 });
/// assert_eq!(all[0].runs, [Run { source: Source::Cached { request: 0, start: 0 }, len: 20, slot: 0 }]);
/// assert_eq!(all[1].runs, [Run { source: Source::New { row: 0 }, len: 3, slot: 0 }]);
/// assert_eq!(all[1].attends, [Attends { rows: 0..3, run: 0, causal: true }]);
/// # Ok::<(), headway_attention::AttentionError>(())
/// ```
pub fn passes(
    context: &ContextChunks,
    query_start_loc: &[i32],
    first_request: usize,
    workspace: PassWorkspace,
) -> Vec<Pass> {
    let PassWorkspace { slots, alignment } = workspace;
    let mut out = vec![];
    for chunk in &context.chunks {
        let mut pass = Pass::default();
        let (starts, lens) = (context.starts(chunk), context.lens(chunk));
        for (i, request) in chunk.requests.clone().enumerate() {
            let len = lens[i] as usize;
            let rows = query_start_loc[request] as usize..query_start_loc[request + 1] as usize;
            let source = Source::Cached { request: first_request + request, start: starts[i] as usize };
            close_if_full(&mut pass, len, slots, &mut out);
            let run = pass.add(source, len, rows.start, alignment);
            pass.attend(run, rows, false);
        }
        close(&mut pass, &mut out);
    }
    let mut pass = Pass::default();
    for w in query_start_loc.windows(2) {
        let (mut from, end) = (w[0] as usize, w[1] as usize);
        while from < end {
            close_if_full(&mut pass, 1, slots, &mut out);
            let piece = (end - from).min(slots - pass.slots);
            let run = pass.add(Source::New { row: from }, piece, from, alignment);
            pass.attend(run, from..from + piece, true);
            if from + piece < end {
                // Later rows of this request see all of the piece; no other request's rows may come between.
                pass.attend(run, from + piece..end, false);
                close(&mut pass, &mut out);
            }
            from += piece;
        }
    }
    close(&mut pass, &mut out);
    out
}

fn close(pass: &mut Pass, out: &mut Vec<Pass>) {
    let done = std::mem::take(pass);
    if !done.attends.is_empty() {
        out.push(done);
    }
}

fn close_if_full(pass: &mut Pass, len: usize, slots: usize, out: &mut Vec<Pass>) {
    if pass.slots + len > slots {
        close(pass, out);
    }
}

impl Pass {
    fn add(&mut self, source: Source, len: usize, first_row: usize, alignment: usize) -> usize {
        if self.runs.is_empty() {
            self.rows = first_row..first_row;
        }
        self.runs.push(Run { source, len, slot: self.slots });
        self.slots = (self.slots + len).next_multiple_of(alignment.max(1));
        self.runs.len() - 1
    }

    fn attend(&mut self, run: usize, rows: Range<usize>, causal: bool) {
        self.rows.end = rows.end;
        let first = self.rows.start;
        self.attends.push(Attends { rows: rows.start - first..rows.end - first, run, causal });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ContextParallel, group::arith::context_chunks::ChunkWorkspace};
    use proptest::prelude::*;

    const GROUP: usize = 16;

    fn of(lens: &[(usize, usize)], slots: usize) -> Vec<Pass> {
        let mut starts = vec![0];
        lens.iter().for_each(|&(q, _)| starts.push(starts[starts.len() - 1] + q as i32));
        let mut context = ContextChunks::default();
        let workspace =
            ChunkWorkspace { tokens: slots, alignment: GROUP, context_parallel: ContextParallel::default() };
        context.fill(lens.iter().map(|&(_, c)| c as i32), &starts, &workspace).unwrap();
        passes(&context, &starts, 5, PassWorkspace { slots, alignment: GROUP })
    }

    proptest! {
        /// Every new row meets every key that it sees once: each context token, and the new ones up to itself.
        #[test]
        fn every_row_meets_each_of_its_keys_once(
            lens in prop::collection::vec((0usize..70, 0usize..120), 1..7),
            slots in prop::sample::select(vec![16usize, 32, 48, 112, 1024]),
        ) {
            let passes = of(&lens, slots);
            let first: Vec<usize> =
                (0..lens.len()).map(|i| lens[..i].iter().map(|l| l.0).sum()).collect();
            let rows: usize = lens.iter().map(|l| l.0).sum();
            let mut met: Vec<Vec<usize>> = vec![vec![]; rows];
            for p in &passes {
                prop_assert!(p.slots <= slots);
                let mut next = 0;
                for a in &p.attends {
                    prop_assert_eq!(a.rows.start, next);
                    next = a.rows.end;
                    let run = p.runs[a.run];
                    prop_assert!(run.slot.is_multiple_of(GROUP) && run.slot + run.len <= p.slots);
                    for row in 0..a.rows.len() {
                        let keys = if a.causal { row + 1 } else { run.len };
                        let request = match run.source {
                            Source::Cached { request, .. } => request - 5,
                            Source::New { row } => first.iter().rposition(|&f| f <= row).unwrap(),
                        };
                        let from = match run.source {
                            Source::Cached { start, .. } => start,
                            Source::New { row } => lens[request].1 + row - first[request],
                        };
                        met[p.rows.start + a.rows.start + row].extend(from..from + keys);
                    }
                }
                prop_assert_eq!(p.rows.len(), next);
            }
            for (i, &(q, context)) in lens.iter().enumerate() {
                for row in 0..q {
                    let mut keys = met[first[i] + row].clone();
                    keys.sort_unstable();
                    prop_assert_eq!(keys, (0..context + row + 1).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn many_short_contexts_take_whole_groups_of_slots() {
        let passes = of(&[(1, 1), (1, 1), (1, 1)], 32);
        assert_eq!(passes.len(), 4, "two passes of context, two of new tokens: {passes:?}");
        assert!(passes.iter().all(|p| p.slots <= 32));
    }
}
