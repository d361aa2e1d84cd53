//! A random batch over a paged cache, with everything twice: as the backend sees it, and as a float64
//! shadow for the reference.
//!
//! What a request holds at a position depends on the request's seed alone, so the same request can be
//! put into other batches, at other lengths and in other chunks.

use super::{act::Act, layer::Layer};
use headway_attention::{CommonAttentionMetadata, StepInputs, step::common::Causal};
use headway_tensor::{DType, Dual, View};
use headway_testkit::{Rng, reference::round::through_cache};
use std::{ops::Range, sync::Arc};

/// One request of a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Req {
    /// Tokens with the new ones.
    pub len: usize,
    /// New tokens.
    pub new: usize,
    pub causal: bool,
    /// Seed of its contents.
    pub seed: u64,
}

impl Req {
    /// Up to three others, most of them decodes.
    pub fn company(rng: &mut Rng) -> Vec<Self> {
        let one = |rng: &mut Rng| {
            let n = rng.between(1, 600);
            Self::new(n, if rng.chance(0.7) { 1 } else { n })
        };
        (0..rng.below(4)).map(|_| one(rng)).collect()
    }

    pub fn new(len: usize, new: usize) -> Self {
        Self { len, new, causal: true, seed: (len * 4099 + new) as u64 }
    }
}

/// The batch.
#[derive(Clone, Debug)]
pub struct World {
    pub q: Act,
    pub k: Act,
    pub v: Act,
    pub padding: usize,
    pub query_start_loc: Vec<i32>,
    pub seq_lens: Vec<i32>,
    pub causal: Vec<bool>,
    pub table: Vec<i32>,
    pub stride: usize,
    pub slots: Vec<i64>,
    pub num_blocks: usize,
    pub k_shadow: Vec<f64>,
    pub v_shadow: Vec<f64>,
    /// By request, or empty.
    pub spans: Vec<Vec<Range<usize>>>,
    /// By request, or empty.
    pub prefixes: Vec<usize>,
    /// Context keys and values, with the slots that they were written to.
    pub context: (Act, Act, Vec<i64>),
}

/// Keys and values of `slots`, rounded as the cache does, into the shadow.
fn shadow(to: &mut [f64], rows: &Act, slots: &[i64], width: usize, dtype: DType, scale: f32) {
    for (row, &slot) in rows.f64().chunks_exact(width).zip(slots) {
        if slot >= 0 {
            for (t, x) in to[slot as usize * width..][..width].iter_mut().zip(row) {
                *t = through_cache(dtype, scale, *x as f32);
            }
        }
    }
}

/// Rows of queries, keys and values.
#[derive(Default)]
struct Rows([Vec<f32>; 3]);

impl Rows {
    fn push(&mut self, l: &Layer, rng: &mut Rng) {
        let widths = [l.heads * l.size, l.kv_heads * l.size, l.kv_heads * l.size_v];
        for (rows, n) in self.0.iter_mut().zip(widths) {
            rows.extend((0..n).map(|_| rng.normal() as f32));
        }
    }
}

/// Block numbers of each request, dealt out in random order; whole blocks of context among the first
/// `shared` are those of the first request.
fn deal(l: &Layer, reqs: &[Req], shared: usize, rng: &mut Rng) -> (Vec<i32>, usize, usize) {
    let b = l.block_size;
    let blocks: Vec<usize> = reqs.iter().map(|r| r.len.div_ceil(b)).collect();
    let stride = blocks.iter().copied().max().unwrap_or(0).max(1) + 1;
    let num_blocks = blocks.iter().sum::<usize>() + 3;
    let mut free: Vec<i32> = (1..num_blocks as i32).collect();
    rng.shuffle(&mut free);
    let mut table = vec![0; reqs.len() * stride];
    let old = |r: &Req| (r.len - r.new) / b;
    for (i, n) in blocks.iter().enumerate() {
        for j in 0..*n {
            let may = i > 0 && j < shared.min(old(&reqs[i])).min(old(&reqs[0]));
            table[i * stride + j] = if may { table[j] } else { free.pop().unwrap() };
        }
    }
    (table, stride, num_blocks)
}

impl World {
    /// Contents and places for these requests; `padding` rows follow the last one.
    pub fn new(l: &Layer, reqs: &[Req], shared: usize, padding: usize, rng: &mut Rng) -> Self {
        let (table, stride, num_blocks) = deal(l, reqs, shared, rng);
        let slot = |i: usize, t: usize| {
            i64::from(table[i * stride + t / l.block_size]) * l.block_size as i64 + (t % l.block_size) as i64
        };
        let mut starts = vec![0];
        let (mut new, mut old) = (Rows::default(), Rows::default());
        let (mut slots, mut old_slots) = (vec![], vec![]);
        for (i, r) in reqs.iter().enumerate() {
            starts.push(starts[i] + r.new as i32);
            let mut contents = Rng::new(r.seed);
            for t in 0..r.len {
                let is_new = t >= r.len - r.new;
                let (rows, slots) = if is_new { (&mut new, &mut slots) } else { (&mut old, &mut old_slots) };
                rows.push(l, &mut contents);
                slots.push(slot(i, t));
            }
        }
        for _ in 0..padding {
            new.push(l, rng);
            slots.push(-1);
        }
        let act = |x: &[f32]| Act::of(l.dtype, x.iter().copied());
        let [q, k, v] = new.0.each_ref().map(|x| act(x));
        let [_, old_k, old_v] = old.0.each_ref().map(|x| act(x));
        let (wk, wv) = (l.kv_heads * l.size, l.kv_heads * l.size_v);
        let mut k_shadow = vec![f64::NAN; num_blocks * l.block_size * wk];
        let mut v_shadow = vec![f64::NAN; num_blocks * l.block_size * wv];
        for (k, v, slots) in [(&old_k, &old_v, &old_slots), (&k, &v, &slots)] {
            shadow(&mut k_shadow, k, slots, wk, l.cache, l.scales.0);
            shadow(&mut v_shadow, v, slots, wv, l.cache, l.scales.1);
        }
        Self {
            q,
            k,
            v,
            padding,
            query_start_loc: starts,
            seq_lens: reqs.iter().map(|r| r.len as i32).collect(),
            causal: reqs.iter().map(|r| r.causal).collect(),
            table,
            stride,
            slots,
            num_blocks,
            k_shadow,
            v_shadow,
            spans: vec![],
            prefixes: vec![],
            context: (old_k, old_v, old_slots),
        }
    }

    /// Rows of requests.
    pub fn rows(&self) -> usize {
        self.slots.len() - self.padding
    }

    pub fn common(&self) -> CommonAttentionMetadata {
        let lens = self.seq_lens.clone();
        let starts = Dual::from_vec(self.query_start_loc.clone());
        let mut inputs = StepInputs::new(starts, View::from_vec(lens.clone()), lens).unwrap();
        inputs.causal = match self.causal.iter().all(|c| *c) {
            true => Causal::All(true),
            false => Causal::PerRequest(View::from_vec(self.causal.iter().map(|c| u8::from(*c)).collect())),
        };
        inputs.num_actual_tokens = self.slots.len();
        inputs.mm_prefix_ranges = (!self.spans.is_empty()).then(|| self.spans.clone());
        inputs.rswa_prefix_lens = (!self.prefixes.is_empty())
            .then(|| View::from_vec(self.prefixes.iter().map(|&p| p as i32).collect()));
        let table = Dual::from_vec(self.table.clone());
        let slots = View::from_vec(self.slots.clone());
        CommonAttentionMetadata::new(Arc::new(inputs), table, self.stride, slots).unwrap()
    }
}
