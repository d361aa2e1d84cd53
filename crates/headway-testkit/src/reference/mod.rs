//! Attention in float64, in straight loops: the answer that every kernel is held against.
//!
//! No blocking, no online softmax, no sharing between rows. [`attend`] works on one request with its
//! keys and values in token order; [`attend_paged`] walks a paged batch by its block table, over a
//! shadow of the cache that is indexed by slot. Not for speed.

use std::ops::Range;

pub mod experts;
pub mod round;
pub mod state_space;

/// One layer's numbers, as in `headway_attention::AttentionArgs`.
#[derive(Clone, Debug, Default)]
pub struct Params<'a> {
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; query head h reads key/value head `h / (num_heads / num_kv_heads)`.
    pub num_kv_heads: usize,
    /// Elements of a query and key head.
    pub head_size: usize,
    /// Elements of a value head.
    pub head_size_v: usize,
    /// Factor on q·k.
    pub scale: f64,
    /// Position i sees j only where `i - window < j <= i` (without causality: `i - window < j`).
    pub sliding_window: Option<usize>,
    /// As `sliding_window`, but a request's prefix stays visible (R-SWA).
    pub rswa_window: Option<usize>,
    /// `cap · tanh(score / cap)`, after the scale and before ALiBi.
    pub logit_soft_cap: Option<f64>,
    /// `slope · (j - i)` is added to the score, per query head.
    pub alibi_slopes: Option<&'a [f32]>,
    /// A logit per query head that joins the denominator and has no value. It is neither scaled nor
    /// capped.
    pub sinks: Option<&'a [f32]>,
}

/// One request: the last `q_len` of its `kv_len` tokens ask.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request<'a> {
    /// `[q_len, num_heads, head_size]`.
    pub q: &'a [f64],
    /// `[kv_len, num_kv_heads, head_size]`, in token order, as read back from the cache.
    pub k: &'a [f64],
    /// `[kv_len, num_kv_heads, head_size_v]`.
    pub v: &'a [f64],
    /// A row sees no key after its own position.
    pub causal: bool,
    /// Positions that see each other both ways, range by range (PrefixLM), whatever causality and window say.
    pub spans: &'a [Range<usize>],
    /// Tokens that an R-SWA window leaves visible.
    pub prefix: usize,
}

/// What attention gives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// `[q_len, num_heads, head_size_v]`; 0 where a row sees no key.
    pub out: Vec<f64>,
    /// `[q_len, num_heads]`: natural logarithm of the softmax's denominator, a sink included; minus
    /// infinity where there is neither a key nor a sink.
    pub lse: Vec<f64>,
}

/// Whether the row at position `i` sees the key at position `j`. `i` is negative for rows before the
/// first key, where a request asks with more rows than it has keys.
pub fn sees(i: i64, j: i64, causal: bool, window: Option<usize>) -> bool {
    (!causal || j <= i) && window.is_none_or(|w| j > i - w as i64)
}

/// As [`sees`], with a request's prefix and spans: the whole mask.
pub fn sees_masked(p: &Params<'_>, r: &Request<'_>, i: i64, j: i64) -> bool {
    let near = sees(i, j, r.causal, p.sliding_window) && sees(i, j, r.causal, p.rswa_window);
    let kept = p.rswa_window.is_some() && j < r.prefix as i64 && (!r.causal || j <= i);
    let both = |s: &Range<usize>| {
        let s = s.start as i64..s.end as i64;
        s.contains(&i) && s.contains(&j)
    };
    near || kept || r.spans.iter().any(both)
}

/// The score of one row and one key, after scale, soft cap and ALiBi.
fn score(p: &Params<'_>, q: &[f64], k: &[f64], head: usize, distance: i64) -> f64 {
    let mut s = p.scale * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>();
    if let Some(cap) = p.logit_soft_cap {
        s = cap * (s / cap).tanh();
    }
    if let Some(slopes) = p.alibi_slopes {
        s += f64::from(slopes[head]) * distance as f64;
    }
    s
}

/// Attention of one request. Rows are aligned with the end of the keys (bottom right): row r stands
/// at position `kv_len - q_len + r`.
///
/// # Panics
/// When the slices don't have the lengths that their shapes say.
pub fn attend(p: &Params<'_>, r: &Request<'_>) -> Answer {
    let (d, dv, heads, kv_heads) = (p.head_size, p.head_size_v, p.num_heads, p.num_kv_heads);
    let (q_len, kv_len) = (r.q.len() / (heads * d), r.k.len() / (kv_heads * d));
    assert_eq!((r.q.len(), r.k.len()), (q_len * heads * d, kv_len * kv_heads * d), "q and k");
    assert_eq!(r.v.len(), kv_len * kv_heads * dv, "v");
    let mut answer =
        Answer { out: vec![0.0; q_len * heads * dv], lse: vec![f64::NEG_INFINITY; q_len * heads] };
    for row in 0..q_len {
        let i = kv_len as i64 - q_len as i64 + row as i64;
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let at = row * heads + head;
            let q = &r.q[at * d..][..d];
            let seen: Vec<usize> = (0..kv_len).filter(|&j| sees_masked(p, r, i, j as i64)).collect();
            let scores: Vec<f64> = seen
                .iter()
                .map(|&j| score(p, q, &r.k[(j * kv_heads + kv_head) * d..][..d], head, j as i64 - i))
                .collect();
            let out = &mut answer.out[at * dv..][..dv];
            let sink = p.sinks.map(|s| f64::from(s[head]));
            answer.lse[at] =
                softmax_into(&scores, sink, out, |n| &r.v[(seen[n] * kv_heads + kv_head) * dv..][..dv]);
        }
    }
    answer
}

/// The values weighted by the softmax of the scores, into `out`; returns the log of the denominator.
fn softmax_into<'v>(
    scores: &[f64],
    sink: Option<f64>,
    out: &mut [f64],
    value: impl Fn(usize) -> &'v [f64],
) -> f64 {
    let top = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    if top == f64::NEG_INFINITY {
        return top;
    }
    let denominator: f64 = scores.iter().copied().chain(sink).map(|s| (s - top).exp()).sum();
    for (n, s) in scores.iter().enumerate() {
        let weight = (s - top).exp() / denominator;
        for (o, v) in out.iter_mut().zip(value(n)) {
            *o += weight * v;
        }
    }
    top + denominator.ln()
}

/// A batch over a paged cache. The cache is a shadow: one row a slot, in float64, whatever the
/// kernel's own layout and element type are.
#[derive(Clone, Copy, Debug, Default)]
pub struct PagedBatch<'a> {
    /// `[num_tokens, num_heads, head_size]`: the new rows of all requests, one after another.
    pub q: &'a [f64],
    /// `[num_reqs + 1]`: where each request's rows begin.
    pub query_start_loc: &'a [i32],
    /// `[num_reqs]`: tokens with the new ones.
    pub seq_lens: &'a [i32],
    /// `[num_reqs, block_table_stride]`.
    pub block_table: &'a [i32],
    /// Entries from one row of the block table to the next.
    pub block_table_stride: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// `[num_slots, num_kv_heads, head_size]`.
    pub k_by_slot: &'a [f64],
    /// `[num_slots, num_kv_heads, head_size_v]`.
    pub v_by_slot: &'a [f64],
    /// `[num_reqs]`.
    pub causal: &'a [bool],
    /// `[num_reqs]`: [`Request::spans`]; past its end, none.
    pub spans: &'a [Vec<Range<usize>>],
    /// `[num_reqs]`: [`Request::prefix`]; past its end, 0.
    pub prefixes: &'a [usize],
}

impl PagedBatch<'_> {
    /// A request's rows of `by_slot`, in token order; `width` elements a slot.
    fn gather(&self, request: usize, by_slot: &[f64], width: usize) -> Vec<f64> {
        let blocks = &self.block_table[request * self.block_table_stride..];
        (0..self.seq_lens[request] as usize)
            .flat_map(|t| {
                let slot = blocks[t / self.block_size] as usize * self.block_size + t % self.block_size;
                by_slot[slot * width..][..width].iter().copied()
            })
            .collect()
    }
}

/// Attention of a paged batch: `out` is `[num_tokens, num_heads, head_size_v]` over all requests' rows.
///
/// # Panics
/// When the slices don't have the lengths that their shapes say, or a slot lies outside the shadow.
pub fn attend_paged(p: &Params<'_>, b: &PagedBatch<'_>) -> Answer {
    let mut all = Answer::default();
    for (request, rows) in b.query_start_loc.windows(2).enumerate() {
        if rows[0] == rows[1] {
            continue;
        }
        let width = p.num_heads * p.head_size;
        let k = b.gather(request, b.k_by_slot, p.num_kv_heads * p.head_size);
        let v = b.gather(request, b.v_by_slot, p.num_kv_heads * p.head_size_v);
        let q = &b.q[rows[0] as usize * width..rows[1] as usize * width];
        let spans = b.spans.get(request).map_or(&[][..], Vec::as_slice);
        let prefix = b.prefixes.get(request).copied().unwrap_or(0);
        let one = attend(p, &Request { q, k: &k, v: &v, causal: b.causal[request], spans, prefix });
        all.out.extend(one.out);
        all.lse.extend(one.lse);
    }
    all
}

#[cfg(test)]
mod tests;
