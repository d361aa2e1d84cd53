//! A prefill's cached context through a bounded workspace. Prefills expand their context's latents into
//! keys and values; that would be far larger than the cache, so it goes in chunks. A chunk is a run of
//! requests whose contexts fit the workspace together; the last may be there in part, and then goes on as
//! the first of the next chunk. So only a chunk's first request is merged (by log-sum-exp) with what came
//! before, and no chunk holds a request without context: there is never an empty set of keys.

use super::lengths::{max_query_len, push_prefix_sum};
use crate::{
    AttentionError, ContextParallel, Result, group::kv::page::gcd, step::context_parallel::local_seq_len,
};
use std::ops::Range;

/// The workspace that chunks go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkWorkspace {
    /// Tokens of context in a chunk. Under decode context parallelism a rank gathers its share, and the
    /// ranks' shares make up so many.
    pub tokens: usize,
    /// A request is cut only at multiples of so many tokens: the page size for gathers that begin at a page.
    pub alignment: usize,
    /// Ranks that share a request's tokens.
    pub context_parallel: ContextParallel,
}

impl ChunkWorkspace {
    /// Tokens that a rank gathers at most for a chunk.
    pub fn local_tokens(&self) -> usize {
        self.tokens / self.context_parallel.size.max(1)
    }

    /// What a rank gathers of so many tokens of a context: as much as the rank with the most holds, whole
    /// turns of `interleave`.
    fn local(&self, tokens: usize) -> usize {
        let ContextParallel { size, interleave, .. } = self.context_parallel;
        if size <= 1 { tokens } else { tokens.div_ceil(size * interleave.max(1)) * interleave.max(1) }
    }

    /// Where a request may be cut: also so that every rank's share begins with a whole turn.
    fn cut(&self) -> usize {
        let ContextParallel { size, interleave, .. } = self.context_parallel;
        let align = self.alignment.max(1);
        let turn = size * interleave.max(1);
        if size <= 1 { align } else { align / gcd(align, turn) * turn }
    }
}

/// A chunk. Requests and tokens are counted from the first prefill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextChunk {
    /// Its requests.
    pub requests: Range<usize>,
    /// Their new tokens.
    pub tokens: Range<usize>,
    /// The end of the first request's new tokens: up to it results are merged in a continuation.
    pub first_request_end: usize,
    /// The first request's context goes on from the chunk before.
    pub is_continuation: bool,
    /// Most new tokens of its requests.
    pub max_query_len: usize,
    /// Most context tokens of a request in the chunk.
    pub max_context_len: usize,
    /// Context tokens in the chunk.
    pub context_tokens: usize,
    /// Of these, what a rank gathers; the same without decode context parallelism.
    pub local_context_tokens: usize,
    entries: Range<usize>,
    bounds: Range<usize>,
}

/// All chunks of a step's prefills. Lists of all chunks lie one after another, so that each goes to a
/// device in one copy; the methods give a chunk's part.
///
/// ```
/// use headway_attention::{ContextParallel, group::arith::context_chunks::{ChunkWorkspace, ContextChunks}};
/// // Three prefills with 300, 0 and 500 tokens of context; pages of 64; a workspace of 512 tokens.
/// let workspace =
///     ChunkWorkspace { tokens: 512, alignment: 64, context_parallel: ContextParallel::default() };
/// let mut plan = ContextChunks::default();
/// plan.fill([300, 0, 500], &[0, 8, 16, 24], &workspace)?;
/// // A chunk ends before a prefill without context.
/// assert_eq!(plan.without_context, [8..16]);
/// assert_eq!(plan.chunks[0].requests, 0..1);
/// assert_eq!((plan.starts(&plan.chunks[1]), plan.lens(&plan.chunks[1])), (&[0][..], &[500][..]));
///
/// // Without it the second request is cut at a page, and goes on as the first of the next chunk.
/// plan.fill([300, 500], &[0, 8, 16], &workspace)?;
/// let [first, second] = &plan.chunks[..] else { panic!() };
/// assert_eq!((plan.starts(first), plan.lens(first)), (&[0, 0][..], &[300, 192][..]));
/// assert_eq!((plan.starts(second), plan.lens(second)), (&[192][..], &[308][..]));
/// assert!(second.is_continuation);
/// # Ok::<(), headway_attention::AttentionError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ContextChunks {
    /// The chunks, in the order of requests. Empty where no prefill has context.
    pub chunks: Vec<ContextChunk>,
    /// `[prefills]`, tokens.
    pub context_lens: Vec<i32>,
    /// New tokens of prefills without context: no chunk has them, so their part of the result is 0 with a
    /// log-sum-exp of minus infinity.
    pub without_context: Vec<Range<usize>>,
    starts: Vec<i32>,
    lens: Vec<i32>,
    cu_lens: Vec<i32>,
    query_start_loc: Vec<i32>,
    local_starts: Vec<i32>,
    local_lens: Vec<i32>,
    local_cu_lens: Vec<i32>,
}

impl ContextChunks {
    /// Plans the chunks of prefills with these contexts. `query_start_loc` is theirs alone, from 0.
    ///
    /// # Errors
    /// A workspace in which not even one cut fits; a prefix sum that isn't as long as the contexts.
    pub fn fill(
        &mut self,
        context_lens: impl IntoIterator<Item = i32>,
        query_start_loc: &[i32],
        workspace: &ChunkWorkspace,
    ) -> Result<()> {
        self.clear();
        self.context_lens.extend(context_lens);
        let n = self.context_lens.len();
        if query_start_loc.len() != n + 1 && n > 0 {
            return Err(AttentionError::Inputs(format!(
                "{n} prefills with a prefix sum of {} entries",
                query_start_loc.len()
            )));
        }
        if self.context_lens.iter().all(|&c| c <= 0) {
            return Ok(());
        }
        let cut = workspace.cut();
        if workspace.tokens < cut {
            return Err(AttentionError::Inputs(format!(
                "a prefill workspace of {} tokens holds no piece of {cut}; it needs at least one page of every \
                 rank: raise it, or lower --block-size",
                workspace.tokens
            )));
        }
        let at = |r: usize| query_start_loc[r] as usize;
        for r in (0..n).filter(|&r| self.context_lens[r] <= 0) {
            self.without_context.push(at(r)..at(r + 1));
        }
        let (mut request, mut start) = (0, 0);
        while request < n {
            if self.context_lens[request] <= 0 {
                request += 1;
                continue;
            }
            let first = request;
            let entries = self.starts.len();
            (request, start) = self.gather(request, start, cut, workspace);
            self.close(first, entries, query_start_loc, workspace);
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.chunks.clear();
        self.without_context.clear();
        let Self { context_lens, starts, lens, cu_lens, query_start_loc, .. } = self;
        for v in [context_lens, starts, lens, cu_lens, query_start_loc] {
            v.clear();
        }
        for v in [&mut self.local_starts, &mut self.local_lens, &mut self.local_cu_lens] {
            v.clear();
        }
    }

    /// Takes what fits a chunk, from `start` of `request` on. Returns where the next one begins.
    fn gather(
        &mut self,
        mut request: usize,
        mut start: usize,
        cut: usize,
        workspace: &ChunkWorkspace,
    ) -> (usize, usize) {
        let mut room = workspace.local_tokens();
        let size = workspace.context_parallel.size.max(1);
        while let Some(context) =
            self.context_lens.get(request).map(|&c| c.max(0) as usize).filter(|&c| c > 0)
        {
            let left = context - start;
            let local = workspace.local(context) - workspace.local(start);
            if local > room {
                // A cut is a multiple of whole turns on every rank: its share is exact.
                let piece = ((left - 1) / cut * cut).min(room * size / cut * cut);
                if piece > 0 {
                    self.starts.push(start as i32);
                    self.lens.push(piece as i32);
                }
                return (request, start + piece);
            }
            room -= local;
            self.starts.push(start as i32);
            self.lens.push(left as i32);
            (request, start) = (request + 1, 0);
        }
        (request, 0)
    }

    /// Makes a chunk of the entries from `entries` on.
    fn close(&mut self, first: usize, entries: usize, query_start_loc: &[i32], workspace: &ChunkWorkspace) {
        let entries = entries..self.starts.len();
        let requests = first..first + entries.len();
        let q = &query_start_loc[requests.start..=requests.end];
        let bounds = self.cu_lens.len()..self.cu_lens.len() + entries.len() + 1;
        self.query_start_loc.extend(q.iter().map(|x| x - q[0]));
        let lens = &self.lens[entries.clone()];
        let context_tokens = push_prefix_sum(lens.iter().copied(), &mut self.cu_lens) as usize;
        for (&start, &len) in self.starts[entries.clone()].iter().zip(lens) {
            let [start, end] = [start, start + len].map(|x| workspace.local(x as usize) as i32);
            self.local_starts.push(start);
            self.local_lens.push(end - start);
        }
        let local = self.local_lens[entries.clone()].iter().copied();
        let local_context_tokens = push_prefix_sum(local, &mut self.local_cu_lens) as usize;
        self.chunks.push(ContextChunk {
            tokens: q[0] as usize..q[q.len() - 1] as usize,
            first_request_end: q[1] as usize,
            is_continuation: self.starts[entries.start] > 0,
            max_query_len: max_query_len(q),
            max_context_len: lens.iter().copied().max().map_or(0, |m| m as usize),
            context_tokens,
            local_context_tokens,
            requests,
            entries,
            bounds,
        });
    }

    /// `[requests]`, tokens: where in its context each request begins.
    pub fn starts(&self, chunk: &ContextChunk) -> &[i32] {
        &self.starts[chunk.entries.clone()]
    }

    /// `[requests]`, tokens: of context in the chunk.
    pub fn lens(&self, chunk: &ContextChunk) -> &[i32] {
        &self.lens[chunk.entries.clone()]
    }

    /// `[requests + 1]`: prefix sum of [`ContextChunks::lens`].
    pub fn cu_lens(&self, chunk: &ContextChunk) -> &[i32] {
        &self.cu_lens[chunk.bounds.clone()]
    }

    /// `[requests + 1]`, new tokens, from 0.
    pub fn query_start_loc(&self, chunk: &ContextChunk) -> &[i32] {
        &self.query_start_loc[chunk.bounds.clone()]
    }

    /// `[requests]`, tokens: where a rank's share begins.
    pub fn local_starts(&self, chunk: &ContextChunk) -> &[i32] {
        &self.local_starts[chunk.entries.clone()]
    }

    /// `[requests]`, tokens: what a rank gathers of each request, padding included.
    pub fn local_lens(&self, chunk: &ContextChunk) -> &[i32] {
        &self.local_lens[chunk.entries.clone()]
    }

    /// `[requests + 1]`: prefix sum of [`ContextChunks::local_lens`].
    pub fn local_cu_lens(&self, chunk: &ContextChunk) -> &[i32] {
        &self.local_cu_lens[chunk.bounds.clone()]
    }

    /// What each rank holds of the whole context of each of the chunk's requests, rank by rank.
    pub fn rank_context_lens(
        &self,
        chunk: &ContextChunk,
        cp: ContextParallel,
    ) -> impl Iterator<Item = impl Iterator<Item = i32>> {
        self.context_lens[chunk.requests.clone()]
            .iter()
            .map(move |&c| (0..cp.size).map(move |rank| local_seq_len(c, ContextParallel { rank, ..cp })))
    }
}

/// `[sum of lens]`: the number of the request of each context token. For gathers with a program a token.
pub fn request_of_token(lens: &[i32]) -> impl Iterator<Item = i32> + '_ {
    lens.iter().enumerate().flat_map(|(r, &len)| (0..len).map(move |_| r as i32))
}
