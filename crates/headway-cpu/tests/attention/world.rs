//! A random batch over a paged cache, with everything twice: as the backend sees it, and as a float64
//! shadow for the reference.

use half::{bf16, f16};
use headway_attention::{
    AttentionArgs, AttentionBackend, AttentionImpl, AttnLayer, BuilderPlan, CommonAttentionMetadata,
    GroupInfo, KvBuf, KvCacheSpec, KvMut, MetadataBuilder, Qkv, StepInputs,
    group::kv::{layout::KvCacheLayout, spec::AttentionSpec},
    step::common::Causal,
};
use headway_cpu::{
    CpuAttn, CpuExec, CpuOptions, Isa,
    backends::cpu_attn::{CpuAttnBuilder, CpuAttnConfig, CpuAttnLayer},
};
use headway_tensor::{DType, Dual, HostBuf, TensorMut, TensorRef, View};
use headway_testkit::{Answer, PagedBatch, Params, Rng, attend_paged, reference::round::through_cache};
use std::sync::Arc;

/// A layer and the cache's shape.
#[derive(Clone, Debug)]
pub struct Layer {
    pub heads: usize,
    pub kv_heads: usize,
    pub size: usize,
    pub size_v: usize,
    pub dtype: DType,
    pub cache: DType,
    pub block_size: usize,
    pub window: Option<usize>,
    pub cap: Option<f32>,
    pub alibi: bool,
    pub sinks: bool,
    pub scales: (f32, f32),
}

impl Layer {
    pub fn plain(heads: usize, kv_heads: usize, size: usize) -> Self {
        Self {
            heads,
            kv_heads,
            size,
            size_v: size,
            dtype: DType::F32,
            cache: DType::F32,
            block_size: 16,
            window: None,
            cap: None,
            alibi: false,
            sinks: false,
            scales: (1.0, 1.0),
        }
    }

    pub fn slopes(&self) -> Vec<f32> {
        (0..self.heads).map(|h| 2f32.powf(-8.0 * (h + 1) as f32 / self.heads as f32)).collect()
    }

    pub fn sink_logits(&self) -> Vec<f32> {
        (0..self.heads).map(|h| (h as f32 * 0.7).sin() * 3.0).collect()
    }

    fn spec(&self) -> AttentionSpec {
        AttentionSpec {
            head_size_v: self.size_v,
            ..AttentionSpec::new(self.block_size, self.kv_heads, self.size, self.cache)
        }
    }

    pub fn group(&self, windowed: bool) -> GroupInfo {
        let spec = match self.window.filter(|_| windowed) {
            Some(sliding_window) => KvCacheSpec::SlidingWindow { attention: self.spec(), sliding_window },
            None => KvCacheSpec::Full(self.spec()),
        };
        GroupInfo {
            layers: vec![AttnLayer(0)],
            max_num_reqs: 64,
            max_num_tokens: 4096,
            max_model_len: 4096,
            ..GroupInfo::new(spec, self.heads)
        }
    }

    pub fn kernel(&self) -> CpuAttnLayer {
        let (slopes, sinks) = (self.slopes(), View::from_vec(self.sink_logits()));
        let args = AttentionArgs {
            layer: AttnLayer(0),
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            head_size: self.size,
            head_size_v: self.size_v,
            scale: (self.size as f32).powf(-0.5),
            sliding_window: self.window,
            logit_soft_cap: self.cap,
            alibi_slopes: self.alibi.then_some(&slopes[..]),
            sinks: self.sinks.then_some(&sinks),
            dtype: self.dtype,
            kv_cache_dtype: self.cache,
            k_scale: self.scales.0,
            v_scale: self.scales.1,
        };
        CpuAttnLayer::new(&args, &CpuAttnConfig::default()).unwrap()
    }

    pub fn reference(&self, world: &World) -> Answer {
        let (slopes, sinks) = (self.slopes(), self.sink_logits());
        let params = Params {
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            head_size: self.size,
            head_size_v: self.size_v,
            scale: f64::from((self.size as f32).powf(-0.5)),
            sliding_window: self.window,
            logit_soft_cap: self.cap.map(f64::from),
            alibi_slopes: self.alibi.then_some(&slopes[..]),
            sinks: self.sinks.then_some(&sinks[..]),
        };
        let q: Vec<f64> = world.q.f64();
        attend_paged(
            &params,
            &PagedBatch {
                q: &q[..world.rows() * self.heads * self.size],
                query_start_loc: &world.query_start_loc,
                seq_lens: &world.seq_lens,
                block_table: &world.table,
                block_table_stride: world.stride,
                block_size: self.block_size,
                k_by_slot: &world.k_shadow,
                v_by_slot: &world.v_shadow,
                causal: &world.causal,
            },
        )
    }
}

/// Activations in one of the compute types.
#[derive(Clone, Debug)]
pub enum Act {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Act {
    pub fn of(dtype: DType, x: impl Iterator<Item = f32>) -> Self {
        match dtype {
            DType::F16 => Self::F16(x.map(f16::from_f32).collect()),
            DType::BF16 => Self::Bf16(x.map(bf16::from_f32).collect()),
            _ => Self::F32(x.collect()),
        }
    }

    pub fn normal(dtype: DType, n: usize, rng: &mut Rng) -> Self {
        Self::of(dtype, (0..n).map(|_| rng.normal() as f32))
    }

    pub fn view(&self, shape: &[usize]) -> TensorRef<'_> {
        match self {
            Self::F32(x) => TensorRef::from_host(x, shape).unwrap(),
            Self::F16(x) => TensorRef::from_host(x, shape).unwrap(),
            Self::Bf16(x) => TensorRef::from_host(x, shape).unwrap(),
        }
    }

    pub fn view_mut(&mut self, shape: &[usize]) -> TensorMut<'_> {
        match self {
            Self::F32(x) => TensorMut::from_host(x, shape).unwrap(),
            Self::F16(x) => TensorMut::from_host(x, shape).unwrap(),
            Self::Bf16(x) => TensorMut::from_host(x, shape).unwrap(),
        }
    }

    pub fn f64(&self) -> Vec<f64> {
        match self {
            Self::F32(x) => x.iter().map(|x| f64::from(*x)).collect(),
            Self::F16(x) => x.iter().map(|x| f64::from(x.to_f32())).collect(),
            Self::Bf16(x) => x.iter().map(|x| f64::from(x.to_f32())).collect(),
        }
    }

    pub fn bits(&self) -> Vec<u32> {
        match self {
            Self::F32(x) => x.iter().map(|x| x.to_bits()).collect(),
            Self::F16(x) => x.iter().map(|x| x.to_bits().into()).collect(),
            Self::Bf16(x) => x.iter().map(|x| x.to_bits().into()).collect(),
        }
    }
}

/// One request of a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Req {
    /// Tokens with the new ones.
    pub len: usize,
    /// New tokens.
    pub new: usize,
    pub causal: bool,
}

impl Req {
    pub fn new(len: usize, new: usize) -> Self {
        Self { len, new, causal: true }
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
    /// Context keys and values, with the slots that they were written to.
    context: (Act, Act, Vec<i64>),
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

impl World {
    /// Random contents for these requests. Blocks are dealt out in random order; `shared` leading
    /// blocks of every request are those of the first. `padding` rows follow the last request.
    pub fn new(l: &Layer, reqs: &[Req], shared: usize, padding: usize, rng: &mut Rng) -> Self {
        let b = l.block_size;
        let blocks: Vec<usize> = reqs.iter().map(|r| r.len.div_ceil(b)).collect();
        let stride = blocks.iter().copied().max().unwrap_or(0).max(1) + 1;
        let num_blocks = blocks.iter().sum::<usize>() + 3;
        let mut free: Vec<i32> = (1..num_blocks as i32).collect();
        rng.shuffle(&mut free);
        let mut table = vec![0; reqs.len() * stride];
        for (i, n) in blocks.iter().enumerate() {
            for j in 0..*n {
                // Only whole blocks of context are shared, so that no new token lies in one.
                let old = (reqs[i].len - reqs[i].new) / b;
                let may = i > 0 && j < shared.min(old).min(blocks[0].saturating_sub(1));
                table[i * stride + j] = if may { table[j] } else { free.pop().unwrap() };
            }
        }
        let slot = |i: usize, t: usize| i64::from(table[i * stride + t / b]) * b as i64 + (t % b) as i64;
        let mut starts = vec![0];
        let (mut slots, mut old_slots) = (vec![], vec![]);
        for (i, r) in reqs.iter().enumerate() {
            starts.push(starts[i] + r.new as i32);
            old_slots.extend((0..r.len - r.new).map(|t| slot(i, t)));
            slots.extend((r.len - r.new..r.len).map(|t| slot(i, t)));
        }
        slots.resize(slots.len() + padding, -1);
        let mut act = |n: usize, heads: usize, size: usize| Act::normal(l.dtype, n * heads * size, rng);
        let q = act(slots.len(), l.heads, l.size);
        let (k, v) = (act(slots.len(), l.kv_heads, l.size), act(slots.len(), l.kv_heads, l.size_v));
        let old = (act(old_slots.len(), l.kv_heads, l.size), act(old_slots.len(), l.kv_heads, l.size_v));
        let (wk, wv) = (l.kv_heads * l.size, l.kv_heads * l.size_v);
        let mut k_shadow = vec![f64::NAN; num_blocks * b * wk];
        let mut v_shadow = vec![f64::NAN; num_blocks * b * wv];
        for (k, v, slots) in [(&old.0, &old.1, &old_slots), (&k, &v, &slots)] {
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
            context: (old.0, old.1, old_slots),
        }
    }

    /// Rows of requests.
    pub fn rows(&self) -> usize {
        self.slots.len() - self.padding
    }

    pub fn common(&self) -> CommonAttentionMetadata {
        let lens = self.seq_lens.clone();
        let mut inputs =
            StepInputs::new(Dual::from_vec(self.query_start_loc.clone()), View::from_vec(lens.clone()), lens)
                .unwrap();
        inputs.causal = match self.causal.iter().all(|c| *c) {
            true => Causal::All(true),
            false => Causal::PerRequest(View::from_vec(self.causal.iter().map(|c| u8::from(*c)).collect())),
        };
        inputs.num_actual_tokens = self.slots.len();
        CommonAttentionMetadata::new(
            Arc::new(inputs),
            Dual::from_vec(self.table.clone()),
            self.stride,
            View::from_vec(self.slots.clone()),
        )
        .unwrap()
    }
}

/// A layer's cache with other bytes before, between and after its pages.
pub struct Cache {
    pub buf: KvBuf,
    offset: usize,
    stride: usize,
    page: usize,
    num_blocks: usize,
}

/// Bytes of others round each page.
const GAP: usize = 24;

impl Cache {
    /// Every byte `fill`.
    pub fn new(l: &Layer, num_blocks: usize, fill: u8) -> Self {
        let page = l.spec().unpadded_page_size_bytes();
        let (offset, stride) = (GAP, page + GAP);
        let mut buf = HostBuf::zeroed(offset + stride * num_blocks).unwrap();
        buf.as_bytes_mut().fill(fill);
        Self { buf: KvBuf::Host(buf), offset, stride, page, num_blocks }
    }

    pub fn view(&mut self, l: &Layer) -> KvMut<'_> {
        KvMut {
            buf: &mut self.buf,
            offset: self.offset,
            block_stride: self.stride,
            page_bytes: self.page,
            num_blocks: self.num_blocks,
            block_size: l.block_size,
            dtype: l.cache,
            layout: KvCacheLayout::LBHNC,
            shared: false,
        }
    }

    pub fn bytes(&self) -> &[u8] {
        match &self.buf {
            KvBuf::Host(b) => b.as_bytes(),
            KvBuf::Dev(_) => &[],
        }
    }

    /// Whether the bytes between pages are still `fill`.
    pub fn gaps_intact(&self, fill: u8) -> bool {
        let b = self.bytes();
        b[..self.offset].iter().all(|x| *x == fill)
            && (0..self.num_blocks).all(|n| {
                let end = self.offset + n * self.stride + self.page;
                b[end..end + GAP].iter().all(|x| *x == fill)
            })
    }
}

/// The device, in one of its forms.
pub fn exec(isa: Isa, threads: usize) -> CpuExec {
    CpuExec::new(CpuOptions { isa: Some(isa), threads: Some(threads), ..Default::default() }).unwrap()
}

/// A group's builder.
pub fn builder(cx: &CpuExec, l: &Layer, windowed: bool) -> CpuAttnBuilder {
    let group = l.group(windowed);
    let config = CpuAttnConfig::default();
    let plan: BuilderPlan = CpuAttnBuilder::plan(&group, &CpuAttn::rules(), &config);
    CpuAttnBuilder::new(cx, &group, &plan, &config).unwrap()
}

/// Result of a step: output rows, padding included, and the log of the denominators.
pub struct Done {
    pub out: Act,
    pub lse: Vec<f32>,
    /// Work items, and splits.
    pub parts: (usize, usize),
}

/// Writes the context and the new tokens, and runs the layer, over a cache of `fill` bytes.
pub fn step(cx: &CpuExec, l: &Layer, w: &World, fill: u8, windowed: bool) -> Done {
    let mut cache = Cache::new(l, w.num_blocks, fill);
    let kernel = l.kernel();
    let mut b = builder(cx, l, windowed);
    let metadata = b.build(cx, &w.common()).unwrap();
    let (old_k, old_v, old_slots) = &w.context;
    for (k, v, slots) in [(old_k, old_v, old_slots), (&w.k, &w.v, &w.slots)] {
        let n = slots.len();
        let x = Qkv {
            q: w.q.view(&[w.slots.len(), l.heads, l.size]),
            k: k.view(&[n, l.kv_heads, l.size]),
            v: v.view(&[n, l.kv_heads, l.size_v]),
        };
        kernel.update_kv_cache(cx, &x, &mut cache.view(l), &View::from_vec(slots.clone())).unwrap();
    }
    let n = w.slots.len();
    let mut out = Act::of(l.dtype, std::iter::repeat_n(f32::NAN, n * l.heads * l.size_v));
    let mut lse = vec![f32::NAN; w.rows() * l.heads];
    let x = Qkv {
        q: w.q.view(&[n, l.heads, l.size]),
        k: w.k.view(&[n, l.kv_heads, l.size]),
        v: w.v.view(&[n, l.kv_heads, l.size_v]),
    };
    let out_view = out.view_mut(&[n, l.heads, l.size_v]);
    kernel.forward_with_lse(cx, &x, &mut cache.view(l), &metadata, out_view, Some(&mut lse)).unwrap();
    assert!(cache.gaps_intact(fill), "bytes outside the pages were written");
    Done { out, lse, parts: (metadata.plan().num_items(), metadata.plan().num_splits()) }
}
