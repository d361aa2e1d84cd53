//! A step's requests, chunks and segments as the kernels read them (`csrc/state_space/params.cuh`). Pure arithmetic on
//! host lengths, once a step for all layers.

use super::shape::CHUNK;
use bytemuck::{Pod, Zeroable};
use std::ops::Range;

/// The least chunks of a segment: a segment more is a state to write, to read and to add.
const LEAST_CHUNKS: usize = 2;

/// A request's new tokens, and where its state is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Request {
    /// First token.
    pub row: i32,
    /// Tokens.
    pub len: i32,
    /// Block of its state; 0: none, so that its rows become zeros and nothing is kept.
    pub block: i32,
    /// 1: nothing of it was computed before.
    pub fresh: i32,
}

/// Tokens of one request that are scanned together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Chunk {
    /// Its request.
    pub request: i32,
    /// First token.
    pub row: i32,
    /// Tokens.
    pub len: i32,
    /// Tokens of the request in this step before it.
    pub first: i32,
}

/// Chunks of one request that a block scans one after another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Segment {
    /// Its request.
    pub request: i32,
    /// First chunk.
    pub chunk: i32,
    /// Chunks.
    pub chunks: i32,
    /// Slot of the request's first segment among the parts.
    pub slot: i32,
    /// Which of the request's segments this is.
    pub index: i32,
    /// Segments of the request.
    pub count: i32,
}

/// What bounds the lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Segments whose blocks fill the device together.
    pub segments_at_once: usize,
    /// Most requests in a step.
    pub max_num_reqs: usize,
    /// Most new tokens in a step.
    pub max_num_tokens: usize,
    /// Tokens of a whole chunk.
    pub chunk: usize,
}

impl Bounds {
    /// Most chunks of a step: each request may begin and end in the midst of one.
    pub fn chunks(&self) -> usize {
        (self.max_num_tokens / self.chunk + 2 * self.max_num_reqs).min(self.max_num_tokens)
    }

    /// Most segments of a step.
    pub fn segments(&self) -> usize {
        self.max_num_reqs + self.segments_at_once
    }

    /// Most slots that segments of one step take: those of fewer requests than segments that fill the device.
    pub fn slots(&self) -> usize {
        2 * self.segments_at_once
    }
}

/// A step. Rows of different requests don't meet, no two of them have one block: the kernels' blocks rely on it, and
/// [`Lists::fill`] and [`Lists::place`] are the only writers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lists {
    requests: Vec<Request>,
    chunks: Vec<Chunk>,
    segments: Vec<Segment>,
    decodes: usize,
    covered: usize,
    segmented: bool,
    used: Vec<i32>,
}

impl Lists {
    /// Fills the lists but for blocks. `starts` is the prefix sum of the requests' tokens, the first `decodes` of them
    /// decode; `fresh` says of a request that nothing of it was computed before; `cuts` is the prefix sum of the chunks'
    /// tokens from the first prefill's on. Rows of the `tokens` past the requests' are dealt to decodes without tokens.
    ///
    /// # Errors
    /// A decode of several tokens; chunks that are not the prefills'; more chunks than the bounds have.
    pub fn fill(
        &mut self,
        bounds: &Bounds,
        starts: &[i32],
        decodes: usize,
        fresh: impl Fn(usize) -> bool,
        cuts: &[i32],
        tokens: usize,
    ) -> Result<(), String> {
        let Self { requests, chunks, segments, .. } = self;
        requests.clear();
        chunks.clear();
        segments.clear();
        self.decodes = decodes.min(starts.len().saturating_sub(1));
        let end = starts.last().copied().unwrap_or(0);
        let mut idle = end;
        for (r, w) in starts.windows(2).enumerate() {
            let (row, len) = (w[0], w[1] - w[0]);
            if r < self.decodes && len > 1 {
                return Err(format!("request {r} decodes {len} tokens: one at a time is supported"));
            }
            let mut request = Request { row, len, block: 0, fresh: i32::from(fresh(r)) };
            if r < self.decodes && len == 0 && (idle as usize) < tokens {
                (request.row, request.len) = (idle, 1);
                idle += 1;
            }
            requests.push(request);
        }
        self.covered = idle as usize;
        let prefills = self.decodes..requests.len();
        let first_row = starts.get(self.decodes).copied().unwrap_or(end);
        let mut request = prefills.start;
        for w in cuts.windows(2) {
            let (row, len) = (first_row + w[0], w[1] - w[0]);
            while request < prefills.end && requests[request].row + requests[request].len <= row {
                request += 1;
            }
            let within = requests.get(request).filter(|r| r.row <= row && row + len <= r.row + r.len);
            let Some(r) = within.filter(|_| (1..=CHUNK as i32).contains(&len)) else {
                return Err(format!("a chunk of {len} tokens from row {row} on is no part of a prefill"));
            };
            chunks.push(Chunk { request: request as i32, row, len, first: row - r.row });
        }
        let (found, expected) = (cuts.last().copied().unwrap_or(0), end - first_row);
        if found != expected || chunks.len() > bounds.chunks() {
            return Err(format!("{} chunks of {found} tokens for prefills of {expected}", chunks.len()));
        }
        self.cut(bounds);
        Ok(())
    }

    /// Cuts the prefills into segments: none but the whole, unless they leave most of the device idle.
    fn cut(&mut self, bounds: &Bounds) {
        let mut whole: Vec<Range<usize>> = vec![];
        for (i, c) in self.chunks.iter().enumerate() {
            match whole.last_mut().filter(|w| self.chunks[w.start].request == c.request) {
                Some(w) => w.end = i + 1,
                None => whole.push(i..i + 1),
            }
        }
        let each = match whole.len() < bounds.segments_at_once {
            true => self.chunks.len().div_ceil(bounds.segments_at_once).max(LEAST_CHUNKS),
            false => usize::MAX,
        };
        let mut slot = 0;
        for w in whole {
            let count = w.len().div_ceil(each);
            for index in 0..count {
                // Even ones: the longest is what the others wait for.
                let [begin, end] = [index, index + 1].map(|i| w.start + w.len() * i / count);
                self.segments.push(Segment {
                    request: self.chunks[w.start].request,
                    chunk: begin as i32,
                    chunks: (end - begin) as i32,
                    slot: slot as i32,
                    index: index as i32,
                    count: count as i32,
                });
            }
            slot += if count > 1 { count } else { 0 };
        }
        self.segmented = slot > 0;
    }

    /// Blocks by request; of requests without tokens they are not looked at. `idle`: requests without a block are
    /// allowed, and none gets one.
    ///
    /// # Errors
    /// As many blocks as there are requests; the null block; a block that two requests have.
    pub fn place(
        &mut self,
        blocks: impl ExactSizeIterator<Item = i32>,
        live: &[i32],
        idle: bool,
    ) -> Result<(), String> {
        if blocks.len() != self.requests.len() || live.len() != self.requests.len() + 1 {
            return Err(format!("{} states for {} requests", blocks.len(), self.requests.len()));
        }
        self.used.clear();
        for ((r, block), w) in self.requests.iter_mut().zip(blocks).zip(live.windows(2)) {
            r.block = if w[0] < w[1] && !idle { block } else { 0 };
            if w[0] < w[1] && !idle {
                self.used.push(block);
            }
        }
        self.used.sort_unstable();
        if self.used.first().is_some_and(|b| *b <= 0) {
            return Err("a request has no block for its state".into());
        }
        match self.used.windows(2).find(|w| w[0] == w[1]) {
            Some(w) => Err(format!("two requests have block {} for their states", w[0])),
            None => Ok(()),
        }
    }

    /// `[requests]`, decodes first.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Of prefills, in their order.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Of prefills, in their order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Requests that decode.
    pub fn decodes(&self) -> usize {
        self.decodes
    }

    /// Rows that kernels write.
    pub fn covered(&self) -> usize {
        self.covered
    }

    /// Some prefill is of several segments.
    pub fn segmented(&self) -> bool {
        self.segmented
    }

    /// The largest block of a request.
    pub fn largest_block(&self) -> usize {
        self.used.last().map_or(0, |b| *b as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { segments_at_once: 6, max_num_reqs: 8, max_num_tokens: 4096, chunk: 64 };

    fn filled(starts: &[i32], decodes: usize, cuts: &[i32], tokens: usize) -> Result<Lists, String> {
        let mut lists = Lists::default();
        lists.fill(&BOUNDS, starts, decodes, |r| r % 2 == 1, cuts, tokens)?;
        Ok(lists)
    }

    #[test]
    fn a_mixed_step() {
        // Two decodes, then prefills of 100 tokens of which the first chunk ends after 30, and of 3.
        let l = filled(&[0, 1, 2, 102, 105], 2, &[0, 30, 94, 100, 103], 107).unwrap();
        let r = |row, len, fresh| Request { row, len, block: 0, fresh };
        assert_eq!(l.requests(), [r(0, 1, 0), r(1, 1, 1), r(2, 100, 0), r(102, 3, 1)]);
        let c = |request, row, len, first| Chunk { request, row, len, first };
        assert_eq!(l.chunks(), [c(2, 2, 30, 0), c(2, 32, 64, 30), c(2, 96, 6, 94), c(3, 102, 3, 0)]);
        assert_eq!((l.covered(), l.decodes()), (105, 2));
        let s: Vec<_> =
            l.segments().iter().map(|s| (s.request, s.chunk, s.chunks, s.index, s.count)).collect();
        assert_eq!(s, [(2, 0, 1, 0, 2), (2, 1, 2, 1, 2), (3, 3, 1, 0, 1)]);
        assert!(l.segmented());
    }

    #[test]
    fn rows_past_the_requests_are_dealt_to_idle_decodes() {
        let l = filled(&[0, 1, 2, 2, 2], 4, &[], 4).unwrap();
        let rows: Vec<_> = l.requests().iter().map(|r| (r.row, r.len)).collect();
        assert_eq!(rows, [(0, 1), (1, 1), (2, 1), (3, 1)]);
        assert_eq!(l.covered(), 4);
        let l = filled(&[0, 1, 1], 2, &[], 1).unwrap();
        assert_eq!((l.requests()[1].len, l.covered()), (0, 1));
    }

    #[test]
    fn segments_are_whole_where_requests_fill_the_device() {
        let starts: Vec<i32> = (0..=7).map(|i| i * 256).collect();
        let cuts: Vec<i32> = (0..=28).map(|i| i * 64).collect();
        let l = filled(&starts, 0, &cuts, 1792).unwrap();
        assert!(!l.segmented() && l.segments().iter().all(|s| (s.chunks, s.count) == (4, 1)));
        let cuts: Vec<i32> = (0..=64).map(|i| i * 64).collect();
        let one = filled(&[0, 4096], 0, &cuts, 4096).unwrap();
        assert_eq!(one.segments().len(), 6);
        assert_eq!(one.segments().iter().map(|s| s.chunks).sum::<i32>(), 64);
        assert!(one.segments().iter().all(|s| s.slot == 0 && (10..=11).contains(&s.chunks)));
        // Five requests of which one is long: slots stay within their bound.
        let starts = [0, 64, 128, 192, 256, 3904];
        let cuts: Vec<i32> = (0..=61).map(|i| i * 64).collect();
        let l = filled(&starts, 0, &cuts, 3904).unwrap();
        let slots = l.segments().iter().filter(|s| s.count > 1).map(|s| s.slot + s.count).max().unwrap();
        assert!(l.segments().len() <= BOUNDS.segments() && slots as usize <= BOUNDS.slots());
    }

    #[test]
    fn contradictions_are_refused() {
        let says = |r: Result<Lists, String>, words: &str| {
            let e = r.unwrap_err();
            assert!(e.contains(words), "{e}");
        };
        says(filled(&[0, 2], 1, &[], 2), "decodes 2 tokens");
        says(filled(&[0, 100], 0, &[0, 64], 100), "chunks of 64 tokens for prefills of 100");
        says(filled(&[0, 40, 80], 0, &[0, 50, 80], 80), "no part of a prefill");
        says(filled(&[0, 100], 0, &[0, 100], 100), "a chunk of 100 tokens");
    }

    #[test]
    fn blocks_belong_to_one_request_each() {
        let starts = [0, 1, 1, 9];
        let mut l = filled(&starts, 2, &[0, 8], 9).unwrap();
        l.place([5, 0, 7].into_iter(), &starts, false).unwrap();
        assert_eq!(l.requests().iter().map(|r| r.block).collect::<Vec<_>>(), [5, 0, 7]);
        assert_eq!(l.largest_block(), 7);
        assert!(
            l.place([5, 0, 5].into_iter(), &starts, false).unwrap_err().contains("two requests have block 5")
        );
        assert!(l.place([0, 0, 5].into_iter(), &starts, false).unwrap_err().contains("no block"));
        l.place([0, 0, 0].into_iter(), &starts, true).unwrap();
        assert_eq!(l.largest_block(), 0);
    }
}
