//! Prints how fast `CPU_ATTN` reads its cache in decode, and computes in prefill, beside what the
//! machine does at most in the same run: random 64 KiB reads of a large buffer, and float32
//! multiply-adds in registers.
//!
//! `cargo run --release -p headway-cpu --example attention_speed [FILTER]`

use headway_attention::{
    AttentionArgs, AttentionBackend, AttentionImpl, AttnLayer, CommonAttentionMetadata, GroupInfo, KvBuf,
    KvCacheSpec, KvMut, MetadataBuilder, Qkv, Result, StepInputs,
    group::kv::{layout::KvCacheLayout, spec::AttentionSpec},
};
use headway_cpu::{
    CpuAttn, CpuExec, CpuOptions,
    backends::cpu_attn::{CpuAttnBuilder, CpuAttnConfig, CpuAttnLayer},
    kernels::attention::ceiling::{multiply_add_rate, read_bandwidth},
};
use headway_tensor::{DType, Dual, HostBuf, Tensor, View};
use std::{sync::Arc, time::Instant};

/// Bytes of cache that calls rotate through, so that none finds its own in the processor's caches.
const COLD: usize = 256 << 20;
const BLOCK: usize = 16;

struct Case {
    requests: usize,
    new: usize,
    len: usize,
    heads: (usize, usize, usize),
    dtype: DType,
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let filter = std::env::args().nth(1).unwrap_or_default();
    let cx = CpuExec::new(CpuOptions::default())?;
    let mut memory = HostBuf::zeroed(COLD)?;
    memory.as_bytes_mut().fill(0x3c);
    println!("{}, {} threads", cx.isa(), cx.pool().threads());
    for heads in [(32, 8, 128), (9, 3, 64)] {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            for requests in [1, 8] {
                one(&cx, &filter, &mut memory, Case { requests, new: 1, len: 2048, heads, dtype })?;
            }
        }
        for dtype in [DType::BF16, DType::F32] {
            for len in [512, 2048] {
                one(&cx, &filter, &mut memory, Case { requests: 1, new: len, len, heads, dtype })?;
            }
        }
    }
    Ok(())
}

/// Seconds of the best of some runs, and of the median one.
fn times(mut f: impl FnMut(usize) -> Result<()>) -> Result<(f64, f64)> {
    let mut all = vec![];
    let start = Instant::now();
    while all.len() < 7 || (start.elapsed().as_secs_f64() < 0.7 && all.len() < 400) {
        let t = Instant::now();
        f(all.len())?;
        all.push(t.elapsed().as_secs_f64());
    }
    all.sort_by(f64::total_cmp);
    Ok((all[0], all[all.len() / 2]))
}

fn one(cx: &CpuExec, filter: &str, memory: &mut HostBuf, c: Case) -> Result<()> {
    let (h, hk, d) = c.heads;
    let kind = if c.new == 1 { "decode" } else { "prefill" };
    let name = format!("{kind} {}x{} {h}/{hk}/{d} {}", c.requests, c.len, c.dtype);
    if !name.contains(filter) {
        return Ok(());
    }
    let spec = AttentionSpec::new(BLOCK, hk, d, c.dtype);
    let page = spec.unpadded_page_size_bytes();
    let per_request = c.len.div_ceil(BLOCK);
    let blocks = per_request * c.requests;
    let group = GroupInfo {
        max_num_reqs: c.requests,
        max_num_tokens: c.new * c.requests,
        max_model_len: c.len,
        ..GroupInfo::new(KvCacheSpec::Full(spec), h)
    };
    let config = CpuAttnConfig::default();
    let plan = CpuAttnBuilder::plan(&group, &CpuAttn::rules(), &config);
    let mut builder = CpuAttnBuilder::new(cx, &group, &plan, &config)?;
    let layer = layer(&c, &config)?;
    let metadata = builder.build(cx, &common(&c, per_request)?)?;
    let rows = c.requests * c.new;
    let q = Tensor::zeros(cx, c.dtype, &[rows, h, d])?;
    let k = Tensor::zeros(cx, c.dtype, &[rows, hk, d])?;
    let mut out = Tensor::zeros(cx, c.dtype, &[rows, h, d])?;
    let places = (COLD / (blocks * page)).max(1);
    let mut buf = KvBuf::Host(std::mem::replace(memory, HostBuf::zeroed(0)?));
    let timed = times(|i| {
        let mut kv = KvMut {
            buf: &mut buf,
            offset: i % places * blocks * page,
            block_stride: page,
            page_bytes: page,
            num_blocks: blocks,
            block_size: BLOCK,
            dtype: c.dtype,
            layout: KvCacheLayout::LBHNC,
            shared: false,
        };
        let x = Qkv { q: q.view(), k: k.view(), v: k.view() };
        layer.forward(cx, &x, &mut kv, &metadata, out.view_mut())
    });
    if let KvBuf::Host(b) = buf {
        *memory = b;
    }
    let (best, median) = timed?;
    let plan = metadata.plan();
    let (items, splits) = (plan.num_items(), plan.num_splits());
    let (amount, unit, ceiling) = if c.new == 1 {
        let bytes = (blocks * page) as f64;
        (bytes, "GB/s", read_bandwidth(cx.pool(), cx.isa(), memory.as_bytes(), 0.3))
    } else {
        let pairs = (c.new * (c.new + 1) / 2 * c.requests) as f64;
        (pairs * (4 * d * h) as f64, "GFLOP/s", multiply_add_rate(cx.pool(), cx.isa(), 0.3))
    };
    let rate = |t: f64| amount / t / 1e9;
    println!(
        "{name:36} {:8.3} ms (best {:8.3})  {:6.1} {unit} (best {:6.1})  ceiling {:6.1}  {:3.0} %  {items} items, {splits} splits",
        median * 1e3,
        best * 1e3,
        rate(median),
        rate(best),
        ceiling / 1e9,
        100.0 * amount / median / ceiling,
    );
    Ok(())
}

fn layer(c: &Case, config: &CpuAttnConfig) -> Result<CpuAttnLayer> {
    let (num_heads, num_kv_heads, head_size) = c.heads;
    let args = AttentionArgs {
        layer: AttnLayer(0),
        num_heads,
        num_kv_heads,
        head_size,
        head_size_v: head_size,
        scale: (head_size as f32).powf(-0.5),
        sliding_window: None,
        logit_soft_cap: None,
        alibi_slopes: None,
        sinks: None,
        dtype: c.dtype,
        kv_cache_dtype: c.dtype,
        k_scale: 1.0,
        v_scale: 1.0,
    };
    CpuAttnLayer::new(&args, config)
}

/// A batch of equal requests, whose blocks are dealt out in a scattered order.
fn common(c: &Case, per_request: usize) -> Result<CommonAttentionMetadata> {
    let n = c.requests;
    let starts = (0..=n).map(|i| (i * c.new) as i32).collect();
    let lens = vec![c.len as i32; n];
    let inputs = StepInputs::new(Dual::from_vec(starts), View::from_vec(lens.clone()), lens)?;
    let blocks = n * per_request;
    let step = (0..).map(|i| blocks * 5 / 8 + 1 + i).find(|s| gcd(*s, blocks) == 1).unwrap_or(1);
    let table = (0..blocks).map(|i| (i * step % blocks) as i32).collect();
    let slots = View::from_vec(vec![-1; n * c.new]);
    CommonAttentionMetadata::new(Arc::new(inputs), Dual::from_vec(table), per_request, slots)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
