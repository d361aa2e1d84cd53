//! Which keys a row sees: the masks of a step, as intervals of positions.
//!
//! Row i and key j, both positions in the request:
//!
//! ```text
//! sees(i, j) = ((j <= i or not causal) and (j < prefix or j > i - window)) or (one span holds i and j)
//! ```
//!
//! - *causal* and *window* are those of any decoder.
//! - *spans* are token ranges whose tokens see each other in both directions (PrefixLM: the tokens of an image in
//!   Gemma 3, arXiv 2503.19786). A window does not cut a span.
//! - *prefix* is that of reference sliding-window attention (R-SWA, arXiv 2606.23050): the prompt, which stays
//!   visible, while of the generated tokens only the last `window` are.
//!
//! A span holds the row itself, and so do what causality and window leave of it: their union is one interval. A
//! prefix is a second one, from 0. Both ends of the first rise with the row, spans or not, which is what the tiles
//! rely on; keys between the two intervals are in no tile.

use super::plan::{Request, Tile};
use std::ops::Range;

/// What a step's rows see besides what [`Request`] says.
#[derive(Clone, Copy, Debug, Default)]
pub struct Masks<'a> {
    /// Position i sees j only where `i - window < j`.
    pub window: Option<usize>,
    /// As `window`, but the tokens of [`Request::prefix`] stay visible; in place of `window`.
    pub rswa_window: Option<usize>,
    /// By request: ranges of positions that see each other in both directions; ascending, apart, not empty.
    pub spans: Option<&'a [Vec<Range<usize>>]>,
}

impl From<Option<usize>> for Masks<'_> {
    /// A window alone, or nothing.
    fn from(window: Option<usize>) -> Self {
        Self { window, ..Self::default() }
    }
}

/// Positions of a request that see each other in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    request: u32,
    begin: u32,
    end: u32,
}

/// The part of all spans, which are in request order, that belongs to a request.
#[inline]
pub(super) fn spans_of(all: &[Span], request: u32) -> &[Span] {
    if all.is_empty() {
        return all;
    }
    let from = all.partition_point(|s| s.request < request);
    let n = all[from..].partition_point(|s| s.request == request);
    &all[from..from + n]
}

/// Takes a request's spans, without those that no new row is in.
pub(super) fn push_spans(
    all: &mut Vec<Span>,
    index: usize,
    r: &Request,
    spans: &[Range<usize>],
) -> Result<(), String> {
    let computed = r.seq_len.saturating_sub(r.q_len);
    let mut last = 0;
    for s in spans {
        if s.start >= s.end || s.start < last {
            return Err(format!(
                "bidirectional range {}..{} of request {index} is empty, descending or before the end of the one before",
                s.start, s.end
            ));
        }
        last = s.end;
        if s.end <= computed || s.start >= r.seq_len || r.q_len == 0 {
            continue;
        }
        if s.end > r.seq_len {
            return Err(format!(
                "bidirectional range {}..{} of request {index} ends after the {} tokens of the step: \
                 its tokens see each other, so compute it whole in one step",
                s.start, s.end, r.seq_len
            ));
        }
        all.push(Span { request: index as u32, begin: s.start as u32, end: s.end as u32 });
    }
    Ok(())
}

/// The keys that a row sees: those below `prefix`, and `low..high`. A row that sees none has zeros. With a prefix,
/// `low` is not below it, and a row of the prefix itself has a `low` of at least its `high`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) prefix: usize,
    pub(super) low: usize,
    pub(super) high: usize,
}

/// The eyes of a request's rows.
#[derive(Clone, Copy)]
pub(super) struct Sight<'a> {
    request: &'a Request,
    window: Option<usize>,
    spans: &'a [Span],
}

impl<'a> Sight<'a> {
    #[inline]
    pub(super) fn new(request: &'a Request, window: Option<usize>, spans: &'a [Span]) -> Self {
        Self { request, window, spans }
    }

    /// What new token `row` sees.
    #[inline]
    pub(super) fn of(&self, row: usize) -> Seen {
        let r = self.request;
        let i = r.position(row);
        let mut high = if r.causal { (i + 1).clamp(0, r.seq_len as i64) } else { r.seq_len as i64 };
        let mut low = self.window.map_or(0, |w| i.saturating_sub_unsigned(w as u64).saturating_add(1)).max(0);
        if !self.spans.is_empty() {
            let at = self.spans.partition_point(|s| i64::from(s.end) <= i);
            if let Some(s) = self.spans.get(at).filter(|s| i64::from(s.begin) <= i) {
                (low, high) = (low.min(s.begin.into()), high.max(s.end.into()));
            }
        }
        if r.prefix > 0 && self.window.is_some() && high > 0 {
            let prefix = (r.prefix as i64).min(high);
            return Seen { prefix: prefix as usize, low: low.max(prefix) as usize, high: high as usize };
        }
        if low < high { Seen { prefix: 0, low: low as usize, high: high as usize } } else { Seen::default() }
    }

    /// The new tokens in tiles of `step`.
    #[inline]
    pub(super) fn tiles(self, step: usize, group: usize) -> impl Iterator<Item = Tile> {
        let mut begin = 0;
        std::iter::from_fn(move || {
            let tokens = begin..self.request.q_len.min(begin + step);
            begin = tokens.end;
            (!tokens.is_empty()).then(|| Tile::new(&self, tokens, group))
        })
    }
}

impl Request {
    /// Position of new token `row` in the request; negative before the first key.
    #[inline]
    pub(super) fn position(&self, row: usize) -> i64 {
        self.seq_len as i64 - self.q_len as i64 + row as i64
    }
}
