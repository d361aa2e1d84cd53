//! Random batches: requests by phase, blocks in random order with shared prefixes, values, and the
//! float64 answer. All on the host; `fixture` brings a batch to a backend.

use super::{
    cell::{Cell, NonCausal, Phase},
    latent,
};
use crate::{
    reference::{PagedBatch, Params, attend_paged, round::round_to, round::through_cache},
    rng::Rng,
};
use headway_attention::group::kv::block_table::slot;
use headway_tensor::DType;
use std::ops::Range;

/// A request of a step: the last `q_len` of `kv_len` tokens are new.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Req {
    /// New tokens.
    pub q_len: usize,
    /// Tokens with the new ones.
    pub kv_len: usize,
    /// No key after a row's own position.
    pub causal: bool,
}

/// Scale of stored keys in an 8-bit cache; a power of two, so that rounding is the same however a
/// backend divides.
pub const K_SCALE: f32 = 0.5;
/// Scale of stored values in an 8-bit cache.
pub const V_SCALE: f32 = 2.0;
/// New tokens of padding at the end of a step.
const PADDING_TOKENS: usize = 3;
/// Rows of padding (no new tokens, length 0) at the end of a step.
const PADDING_REQS: usize = 2;

/// The requests of a phase: lengths around the block size, exact multiples of it, one token, and some
/// at random; decodes first, then by new tokens.
pub fn requests(cell: &Cell, rng: &mut Rng) -> Vec<Req> {
    let b = cell.block_size;
    let r = |q_len, kv_len| Req { q_len, kv_len, causal: true };
    let s = cell.drafts;
    let d = |kv_len| r(1 + s, kv_len + s);
    let decodes = [d(1), d(b), d(b + 1), d(2 * b), d(2 * b + b / 2 + 1)];
    let chunks = [r(2, b + 2), r(b, 2 * b), r(3, 2 * b + 1), r(b.min(5), 3 * b)];
    let prompts = [r(1, 1), r(b, b), r(b + 1, b + 1), r(2 * b + 3, 2 * b + 3)];
    let mut reqs = match cell.phase {
        Phase::Decode => {
            let mut d = decodes.to_vec();
            d.extend((0..2).map(|_| r(1 + s, rng.between(1, 3 * b + 7) + s)));
            d
        }
        Phase::Prefill => {
            let mut p = [&chunks[..], &prompts[..]].concat();
            let n = rng.between(2, 2 * b + 9);
            p.push(r(rng.between(2, n), n));
            p
        }
        Phase::Mixed => {
            let mut m = [&decodes[1..4], &chunks[..3], &prompts[1..3]].concat();
            let n = rng.between(2, 2 * b + 9);
            m.push(r(rng.between(2, n), n));
            m
        }
    };
    reqs.sort_by_key(|r| (r.q_len != 1 || r.kv_len == 1, r.q_len));
    if cell.phase == Phase::Mixed {
        reqs.push(r(0, b + 1));
    }
    for (i, r) in reqs.iter_mut().enumerate() {
        r.causal = match cell.features.non_causal {
            NonCausal::No => true,
            NonCausal::All => false,
            NonCausal::PerRequest => i % 2 == 0,
        };
    }
    reqs
}

/// One step as a runner would hand it over, on the host.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// The requests, padding rows included.
    pub reqs: Vec<Req>,
    /// `[num_reqs + 1]`.
    pub query_start_loc: Vec<i32>,
    /// `[num_reqs]`.
    pub seq_lens: Vec<i32>,
    /// `[num_reqs, stride]`, in the manager's blocks.
    pub block_table: Vec<i32>,
    /// `[padded tokens]`.
    pub slots: Vec<i64>,
    /// `[padded tokens]`.
    pub positions: Vec<i32>,
    /// `[num_reqs]`.
    pub is_prefilling: Vec<bool>,
    /// `[num_reqs]`: ranges that see each other both ways, where the cell has such.
    pub spans: Vec<Vec<Range<usize>>>,
    /// `[num_reqs]`: tokens that R-SWA keeps visible.
    pub prefixes: Vec<usize>,
    /// `[padded tokens, num_heads, head_size]`; NaN in padding rows, as in `k` and `v`.
    pub q: Vec<f32>,
    /// `[padded tokens, num_kv_heads, head_size]`.
    pub k: Vec<f32>,
    /// `[padded tokens, num_kv_heads, head_size_v]`.
    pub v: Vec<f32>,
}

impl Step {
    /// New tokens without padding.
    pub fn live_tokens(&self) -> usize {
        self.query_start_loc.last().map_or(0, |&n| n as usize)
    }

    /// New tokens with padding.
    pub fn padded_tokens(&self) -> usize {
        self.slots.len()
    }
}

/// Everything about a batch over time: which blocks each request has, and what the cache holds.
pub struct World {
    /// The cell that this is made for.
    pub cell: Cell,
    /// The requests of the main step, without padding.
    pub reqs: Vec<Req>,
    /// Entries from one row of the block table to the next.
    pub stride: usize,
    /// Blocks in the pool; block 0 is the null block.
    pub num_blocks: usize,
    /// Blocks that belong to no request.
    pub unused_blocks: Vec<usize>,
    /// `[num_heads]`.
    pub slopes: Vec<f32>,
    /// `[num_heads]`.
    pub sinks: Vec<f32>,
    /// `[num_heads x (qk_nope + v), kv_lora_rank]`, for latent attention.
    pub kv_b_proj: Vec<f32>,
    /// Expanded keys and values of prefills are rounded to the activations' type.
    pub rounds_expanded: bool,
    /// [`HostAccess::attends_in`](super::HostAccess::attends_in).
    /// of the requests that take the decodes' path, and of the others.
    pub attends_in: [Option<DType>; 2],
    blocks: Vec<Vec<i32>>,
    shared: Vec<usize>,
    spans: Vec<Vec<Range<usize>>>,
    prefixes: Vec<usize>,
    raw: [Vec<f32>; 2],
    /// What the cache gives back, by slot: keys (or latents) and values.
    pub(super) shadow: [Vec<f64>; 2],
    rng: Rng,
}

impl World {
    /// A world of these requests; equal seeds give equal worlds.
    pub fn new(cell: &Cell, reqs: Vec<Req>, mut rng: Rng) -> Self {
        let b = cell.block_size;
        let widths: Vec<usize> = reqs.iter().map(|r| r.kv_len.div_ceil(b)).collect();
        let num_blocks = 3 + widths.iter().sum::<usize>();
        let mut free: Vec<i32> = (1..num_blocks as i32).collect();
        rng.shuffle(&mut free);
        let (blocks, shared) = place(&reqs, b, &widths, &mut free);
        let slots = num_blocks * b;
        let [k_width, v_width] = cell.kv_widths();
        let h = cell.num_heads;
        Self {
            cell: cell.clone(),
            stride: widths.iter().max().copied().unwrap_or(0) + 1,
            num_blocks,
            unused_blocks: free.into_iter().map(|b| b as usize).chain([0]).collect(),
            slopes: (0..h).map(|i| 2f32.powf(-8.0 * (i + 1) as f32 / h as f32)).collect(),
            // As checkpoints have them, and as some kernels take them whatever the activations are.
            sinks: (0..h).map(|_| round_to(DType::BF16, rng.normal() as f32)).collect(),
            kv_b_proj: latent::projection(cell, &mut rng),
            rounds_expanded: false,
            attends_in: [None; 2],
            blocks,
            shared,
            spans: reqs
                .iter()
                .map(|r| if cell.features.spans { spans(r, &mut rng) } else { vec![] })
                .collect(),
            prefixes: reqs
                .iter()
                .map(|r| if cell.features.rswa.is_some() { rng.below(r.kv_len + 4) } else { 0 })
                .collect(),
            raw: [vec![f32::NAN; slots * k_width], vec![f32::NAN; slots * v_width]],
            shadow: [vec![f64::NAN; slots * k_width], vec![f64::NAN; slots * v_width]],
            reqs,
            rng,
        }
    }

    /// The factor on q·k.
    pub fn scale(&self) -> f32 {
        if self.cell.features.huge_scores { 1.0 } else { (self.cell.q_head() as f32).powf(-0.5) }
    }

    /// One number for a query (which = None), a key (0) or a value (1). Large scores are made of powers
    /// of two, so that their sums are exact and ties stay ties.
    fn value(&mut self, which: Option<usize>) -> f32 {
        let x = match (self.cell.features.huge_scores, which) {
            (true, None) => (self.rng.below(3) as f64 - 1.0) * 16.0,
            (true, Some(0)) => (self.rng.below(3) as f64 - 1.0) * 64.0,
            (_, None) => 2.0 * self.rng.normal(),
            (_, Some(_)) => self.rng.normal(),
        };
        round_to(self.cell.dtype, x as f32)
    }

    /// Sets what the cache holds at a slot to new random values.
    fn invent(&mut self, slot: usize) {
        let kv = self.cell.kv_element().unwrap_or(DType::F32);
        for (which, width) in self.cell.kv_widths().into_iter().enumerate() {
            let scale = [K_SCALE, V_SCALE][which];
            for i in slot * width..(slot + 1) * width {
                let x = self.value(Some(which));
                self.raw[which][i] = x;
                self.shadow[which][i] = through_cache(kv, scale, x);
            }
        }
    }

    /// The step that computes every request's context, `None` where there is none. Blocks that two
    /// requests share are written by the first one alone: the second one's tokens have slot −1.
    pub fn context_step(&mut self) -> Option<Step> {
        let reqs: Vec<(usize, Req)> = self
            .reqs
            .iter()
            .enumerate()
            .map(|(i, r)| (i, r.kv_len - r.q_len, r.causal))
            .filter(|(_, context, _)| *context > 0)
            .map(|(i, n, causal)| (i, Req { q_len: n, kv_len: n, causal }))
            .collect();
        (!reqs.is_empty()).then(|| self.step(&reqs, true))
    }

    /// The main step.
    pub fn main_step(&mut self) -> Step {
        let reqs: Vec<_> = self.reqs.iter().copied().enumerate().collect();
        self.step(&reqs, true)
    }

    /// A step of one of the main step's requests alone, with the rows that it had there.
    pub fn alone(&mut self, main: &Step, request: usize) -> Step {
        let mut step = self.step(&[(request, self.reqs[request])], false);
        let from = main.query_start_loc[request] as usize;
        let width = self.cell.num_heads * self.cell.q_head();
        let n = step.live_tokens() * width;
        step.q[..n].copy_from_slice(&main.q[from * width..from * width + n]);
        step
    }

    fn step(&mut self, reqs: &[(usize, Req)], write: bool) -> Step {
        let mut s = Step { query_start_loc: vec![0], ..Step::default() };
        for &(i, r) in reqs {
            for position in r.kv_len - r.q_len..r.kv_len {
                self.token(&mut s, i, position, write);
            }
            self.row(&mut s, Some(i), r);
        }
        for _ in 0..PADDING_REQS {
            self.row(&mut s, None, Req { q_len: 0, kv_len: 0, causal: true });
        }
        let n = s.slots.len() + PADDING_TOKENS;
        let [k, v] = self.cell.kv_widths();
        s.slots.resize(n, -1);
        s.positions.resize(n, 0);
        s.q.resize(n * self.cell.num_heads * self.cell.q_head(), f32::NAN);
        s.k.resize(n * k, f32::NAN);
        s.v.resize(n * v, f32::NAN);
        s
    }

    fn row(&self, s: &mut Step, request: Option<usize>, r: Req) {
        s.query_start_loc.push(s.slots.len() as i32);
        s.seq_lens.push(r.kv_len as i32);
        s.is_prefilling.push(r.q_len > 1 + self.cell.drafts || (r.q_len > 0 && r.kv_len == r.q_len));
        let mut blocks = request.map_or(vec![], |i| self.blocks[i].clone());
        blocks.truncate(r.kv_len.div_ceil(self.cell.block_size));
        blocks.resize(self.stride, 0);
        s.block_table.extend(blocks);
        let spans = request.map_or(&[][..], |i| &self.spans[i]);
        s.spans.push(spans.iter().filter(|s| s.end <= r.kv_len).cloned().collect());
        s.prefixes.push(request.map_or(0, |i| self.prefixes[i]));
        s.reqs.push(r);
    }

    fn token(&mut self, s: &mut Step, request: usize, position: usize, write: bool) {
        let b = self.cell.block_size;
        let Some(slot) = slot(&self.blocks[request], b, position) else { return };
        let owned = position / b >= self.shared[request];
        if write && owned {
            self.invent(slot as usize);
        }
        s.slots.push(if owned { slot } else { -1 });
        s.positions.push(position as i32);
        for _ in 0..self.cell.num_heads * self.cell.q_head() {
            let q = self.value(None);
            s.q.push(q);
        }
        let [k, v] = self.cell.kv_widths();
        let slot = slot as usize;
        s.k.extend_from_slice(&self.raw[0][slot * k..(slot + 1) * k]);
        s.v.extend_from_slice(&self.raw[1][slot * v..(slot + 1) * v]);
    }

    /// The float64 answer of a step's live rows, over what the cache holds now. The first `decodes` requests took the
    /// decodes' path: in latent attention the others see their own new tokens as they were, not as the cache has them.
    pub fn answer(&self, s: &Step, decodes: usize) -> Vec<f64> {
        match self.cell.latent {
            Some(dims) => latent::answer(self, &dims, s, decodes),
            None => self.attend(s, &self.shadow[1], decodes),
        }
    }

    /// Live rows of the first `decodes` requests.
    fn decode_rows(s: &Step, decodes: usize) -> usize {
        s.query_start_loc.get(decodes).map_or(0, |&row| row as usize)
    }

    /// How far each element of an answer may be off for what [`World::attends_in`] does to probabilities: each by its
    /// largest relative error, all to the same side. Empty where nothing is rounded.
    pub fn slack(&self, s: &Step, decodes: usize) -> Vec<f64> {
        let errors = self.attends_in.map(|dtype| dtype.and_then(half_ulp).unwrap_or(0.0));
        if errors == [0.0; 2] {
            return vec![];
        }
        let sizes: Vec<f64> = self.shadow[1].iter().map(|v| v.abs()).collect();
        let of_decodes = Self::decode_rows(s, decodes) * self.cell.num_heads * self.cell.head_size_v;
        let all = self.attend(s, &sizes, decodes).into_iter().enumerate();
        all.map(|(i, x)| errors[usize::from(i >= of_decodes)] * x).collect()
    }

    /// Attention of a step's live rows to these values, by slot.
    fn attend(&self, s: &Step, values: &[f64], decodes: usize) -> Vec<f64> {
        let c = &self.cell;
        let params = Params {
            num_heads: c.num_heads,
            num_kv_heads: c.num_kv_heads,
            head_size: c.head_size,
            head_size_v: c.head_size_v,
            scale: f64::from(self.scale()),
            sliding_window: c.features.window,
            rswa_window: c.features.rswa,
            logit_soft_cap: c.features.soft_cap.map(f64::from),
            alibi_slopes: c.features.alibi.then_some(&self.slopes[..]),
            sinks: c.features.sinks.then_some(&self.sinks[..]),
        };
        let of_decodes = Self::decode_rows(s, decodes) * c.num_heads * c.q_head();
        let rounded = |i: usize, x: f32| {
            self.attends_in[usize::from(i >= of_decodes)].map_or(x, |dtype| round_to(dtype, x))
        };
        let q: Vec<f64> = s.q.iter().enumerate().map(|(i, &x)| f64::from(rounded(i, x))).collect();
        let causal: Vec<bool> = s.reqs.iter().map(|r| r.causal).collect();
        let batch = PagedBatch {
            q: &q,
            query_start_loc: &s.query_start_loc,
            seq_lens: &s.seq_lens,
            block_table: &s.block_table,
            block_table_stride: self.stride,
            block_size: c.block_size,
            k_by_slot: &self.shadow[0],
            v_by_slot: values,
            causal: &causal,
            spans: &s.spans,
            prefixes: &s.prefixes,
        };
        attend_paged(&params, &batch).out
    }
}

/// The largest relative error of rounding to a type of 8 bits, of numbers in its range.
fn half_ulp(dtype: DType) -> Option<f64> {
    match dtype {
        DType::F8E4M3 => Some(1.0 / 16.0),
        DType::F8E5M2 => Some(1.0 / 8.0),
        _ => None,
    }
}

/// Ranges of a request, none of which holds both a computed token and a new one.
fn spans(r: &Req, rng: &mut Rng) -> Vec<Range<usize>> {
    let mut spans = vec![];
    for part in [0..r.kv_len - r.q_len, r.kv_len - r.q_len..r.kv_len] {
        let mut at = part.start;
        while at < part.end && rng.chance(0.7) {
            let start = at + rng.below(part.end - at);
            let end = rng.between(start + 1, part.end);
            spans.push(start..end);
            at = end;
        }
    }
    spans
}

/// Blocks of each request, and how many at its beginning belong to an earlier request. Every second
/// request with a whole block of context shares it with the one before.
fn place(reqs: &[Req], b: usize, widths: &[usize], free: &mut Vec<i32>) -> (Vec<Vec<i32>>, Vec<usize>) {
    let mut blocks: Vec<Vec<i32>> = vec![];
    let mut shared = vec![];
    let mut lender: Option<usize> = None;
    for (i, r) in reqs.iter().enumerate() {
        let whole = (r.kv_len - r.q_len) / b;
        let lent = lender.take().map_or(0, |l| whole.min((reqs[l].kv_len - reqs[l].q_len) / b));
        let mut own: Vec<i32> = if lent > 0 { blocks[i - 1][..lent].to_vec() } else { vec![] };
        own.extend(free.drain(free.len() - (widths[i] - lent)..));
        if lent == 0 && whole > 0 {
            lender = Some(i);
        }
        blocks.push(own);
        shared.push(lent);
    }
    (blocks, shared)
}
