//! A step's prefills as passes through the bounded workspace: which tokens are expanded, and which rows attend to them.
//! Plain arithmetic.
//!
//! Cached context goes by the contract's chunk plan; a chunk whose runs don't fit beside each other (each begins at a
//! multiple of 16 slots) makes several passes. New tokens come last: those of many requests in one pass, or those of a
//! long one in several, where rows after a piece see all of it.

use crate::kernels::{
    attention::{GROUP, Request},
    mla::{Run, Source},
};
use headway_attention::group::arith::context_chunks::ContextChunks;
use std::ops::Range;

/// One filling of the workspace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pass {
    /// The prefills' rows that attend, counted from the first prefill.
    pub(super) rows: Range<usize>,
    /// The tokens that are expanded.
    pub(super) runs: Vec<Run>,
    /// Who attends to which run; rows are counted from `rows.start`.
    pub(super) requests: Vec<(Request, usize)>,
}

impl Pass {
    /// Slots in use.
    pub(super) fn slots(&self) -> usize {
        self.runs.last().map_or(0, Run::end)
    }
}

/// The passes of a step. `query_start_loc` is the prefills' own, from 0; `first_request` is their row of the block
/// table; `slots` is the workspace, a multiple of 16.
pub(super) fn passes(
    context: &ContextChunks,
    query_start_loc: &[i32],
    first_request: usize,
    slots: usize,
) -> Vec<Pass> {
    let mut out = vec![];
    for chunk in &context.chunks {
        let mut pass = Pass::default();
        let (starts, lens) = (context.starts(chunk), context.lens(chunk));
        for (i, request) in chunk.requests.clone().enumerate() {
            let len = lens[i] as usize;
            let rows = query_start_loc[request] as usize..query_start_loc[request + 1] as usize;
            let source = Source::Cached { request: first_request + request, start: starts[i] as usize };
            close_if_full(&mut pass, len, slots, &mut out);
            let run = add(&mut pass, source, len, rows.start);
            attend(&mut pass, run, rows, false);
        }
        close(&mut pass, &mut out);
    }
    let mut pass = Pass::default();
    for w in query_start_loc.windows(2) {
        let (mut from, end) = (w[0] as usize, w[1] as usize);
        while from < end {
            close_if_full(&mut pass, 1, slots, &mut out);
            let piece = (end - from).min(slots - pass.slots());
            let run = add(&mut pass, Source::New { row: from }, piece, from);
            attend(&mut pass, run, from..from + piece, true);
            if from + piece < end {
                // Later rows of this request see all of the piece; no other request's rows may come between.
                attend(&mut pass, run, from + piece..end, false);
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
    if !done.requests.is_empty() {
        out.push(done);
    }
}

fn close_if_full(pass: &mut Pass, len: usize, slots: usize, out: &mut Vec<Pass>) {
    if pass.slots() + len > slots {
        close(pass, out);
    }
}

fn add(pass: &mut Pass, source: Source, len: usize, first_row: usize) -> usize {
    if pass.runs.is_empty() {
        pass.rows = first_row..first_row;
    }
    let slot = pass.slots();
    debug_assert!(slot.is_multiple_of(GROUP));
    pass.runs.push(Run { source, len, slot });
    pass.runs.len() - 1
}

fn attend(pass: &mut Pass, run: usize, rows: Range<usize>, causal: bool) {
    let request = Request {
        first_row: rows.start - pass.rows.start,
        q_len: rows.len(),
        seq_len: pass.runs[run].len,
        causal,
        prefix: 0,
    };
    pass.rows.end = rows.end;
    pass.requests.push((request, run));
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_attention::{ContextParallel, group::arith::context_chunks::ChunkWorkspace};
    use proptest::prelude::*;

    fn of(lens: &[(usize, usize)], slots: usize) -> Vec<Pass> {
        let mut starts = vec![0];
        lens.iter().for_each(|&(q, _)| starts.push(starts[starts.len() - 1] + q as i32));
        let mut context = ContextChunks::default();
        let workspace =
            ChunkWorkspace { tokens: slots, alignment: GROUP, context_parallel: ContextParallel::default() };
        context.fill(lens.iter().map(|&(_, c)| c as i32), &starts, &workspace).unwrap();
        passes(&context, &starts, 5, slots)
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
                prop_assert!(p.slots() <= slots);
                let mut next = 0;
                for (r, run) in &p.requests {
                    prop_assert_eq!(r.first_row, next);
                    next += r.q_len;
                    let run = p.runs[*run];
                    for row in 0..r.q_len {
                        let keys = if r.causal { row + 1 + r.seq_len - r.q_len } else { r.seq_len };
                        let request = match run.source {
                            Source::Cached { request, .. } => request - 5,
                            Source::New { row } => first.iter().rposition(|&f| f <= row).unwrap(),
                        };
                        let from = match run.source {
                            Source::Cached { start, .. } => start,
                            Source::New { row } => lens[request].1 + row - first[request],
                        };
                        met[p.rows.start + r.first_row + row].extend(from..from + keys);
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
        assert!(passes.iter().all(|p| p.slots() <= 32));
    }
}
