//! A step of a layer over a cache of its own.

use super::{act::Act, layer::Layer, world::World};
use headway_attention::{
    AttentionBackend, AttentionImpl, BuilderPlan, KvBuf, KvMut, MetadataBuilder, Qkv,
    group::kv::layout::KvCacheLayout,
};
use headway_cpu::{
    CpuAttn, CpuExec, CpuOptions, Isa,
    backends::cpu_attn::{CpuAttnBuilder, CpuAttnConfig},
};
use headway_tensor::{HostBuf, View};

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

    /// A block's bytes.
    pub fn page(&self, block: usize) -> &[u8] {
        &self.bytes()[self.offset + block * self.stride..][..self.page]
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
    let plan: BuilderPlan = CpuAttnBuilder::plan(&group, &CpuAttn::rules(), &config).unwrap();
    CpuAttnBuilder::new(cx, &group, &plan, &config).unwrap()
}

/// Result of a step: output rows, padding included, and the log of the denominators.
pub struct Done {
    pub out: Act,
    pub lse: Vec<f32>,
    /// Work items, and splits.
    pub parts: (usize, usize),
}

/// A cache of `fill` bytes with the context and the new tokens.
pub fn written(cx: &CpuExec, l: &Layer, w: &World, fill: u8) -> Cache {
    let mut cache = Cache::new(l, w.num_blocks, fill);
    let kernel = l.kernel();
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
    cache
}

/// Writes the context and the new tokens, and runs the layer, over a cache of `fill` bytes.
pub fn step(cx: &CpuExec, l: &Layer, w: &World, fill: u8, windowed: bool) -> Done {
    let mut cache = written(cx, l, w, fill);
    let kernel = l.kernel();
    let mut b = builder(cx, l, windowed);
    let metadata = b.build(cx, &w.common()).unwrap();
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
