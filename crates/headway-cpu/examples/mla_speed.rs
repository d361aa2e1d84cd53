//! How fast latent attention decodes, as a share of the machine's rate of multiply-adds, beside the plain way: expand
//! keys and values of the whole context, then attend.
//!
//! ```text
//! cargo run --release -p headway-cpu --example mla_speed -- [heads] [context] [requests] [seconds] [threads]
//! ```
//!
//! The sizes of a head are DeepSeek-V3's (latents of 512 + 64, heads of 128 + 64 and 128); weights and cache are
//! bfloat16. Operations are those of the way that is measured: two a multiply-add, in the latent space for the decode, in
//! `kv_b_proj` and in the heads for the plain way. Times are the best of those within the time given, and so is the
//! ceiling: on a machine that others use too, what they take away must not show. With one thread, on Linux, time is that
//! thread's processor time.

use headway_attention::{
    AttentionBackend, AttnLayer, CommonAttentionMetadata, GroupInfo, KvBuf, KvCacheSpec, KvHandle,
    MetadataBuilder, MlaArgs, MlaImpl, StepInputs,
    group::kv::{layout::KvCacheLayout, spec::AttentionSpec},
    process::rules::LatentDims,
};
use headway_cpu::{
    CpuExec, CpuMla, CpuOptions,
    backends::cpu_mla::{CpuMlaBuilder, CpuMlaConfig, CpuMlaLayer, Sizes},
    kernels::{
        attention::{Batch, CacheLayout, GROUP, LayerNumbers, Lse, Plan, Request, Workspace, attend},
        ceiling::multiply_add_rate,
        mla::{Pages, Run, Source, expand, gather},
    },
};
use headway_tensor::{
    DType, Dual, HostBuf, Linear, LinearPart, Ops, SharedBytes, TensorMut, TensorRef, View, Weight,
    WeightType,
};
use std::{
    error::Error,
    sync::Arc,
    time::{Duration, Instant},
};

const DIMS: LatentDims = LatentDims {
    qk_nope_head_dim: 128,
    qk_rope_head_dim: 64,
    kv_lora_rank: 512,
    v_head_dim: 128,
    index_topk: None,
};
const WIDTH: usize = 576;
const BLOCK: usize = 64;

/// Numbers that neither repeat soon nor grow.
fn noise(n: usize) -> impl Iterator<Item = f32> {
    (0..n).map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / (1u32 << 24) as f32 - 0.5)
}

fn bf16(x: f32) -> [u8; 2] {
    half::bf16::from_f32(x).to_ne_bytes()
}

/// A clock: this thread's processor time where the work is its alone and the system says so, else the wall's.
struct Clock {
    start: Instant,
    processor: Option<u64>,
}

impl Clock {
    fn start(threads: usize) -> Self {
        Self { processor: (threads == 1).then(processor_nanos).flatten(), start: Instant::now() }
    }

    fn seconds(&self) -> f64 {
        match (self.processor, processor_nanos()) {
            (Some(before), Some(after)) => (after - before) as f64 * 1e-9,
            _ => self.start.elapsed().as_secs_f64(),
        }
    }
}

fn processor_nanos() -> Option<u64> {
    std::fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse().ok()
}

/// The best time of `f`, over about `seconds`.
fn best(
    threads: usize,
    seconds: f64,
    mut f: impl FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<f64, Box<dyn Error>> {
    f()?;
    let (begin, mut times) = (Instant::now(), vec![]);
    while times.len() < 3 || begin.elapsed() < Duration::from_secs_f64(seconds) {
        let clock = Clock::start(threads);
        f()?;
        times.push(clock.seconds());
    }
    Ok(times.into_iter().fold(f64::INFINITY, f64::min))
}

struct Bench {
    cx: CpuExec,
    heads: usize,
    context: usize,
    requests: usize,
    kv_b_proj: Arc<dyn Linear>,
    handle: KvHandle,
    cache: KvBuf,
    group: GroupInfo,
    table: Vec<i32>,
    q: Vec<f32>,
}

impl Bench {
    fn new(
        heads: usize,
        context: usize,
        requests: usize,
        threads: Option<usize>,
    ) -> Result<Self, Box<dyn Error>> {
        let cx = CpuExec::new(CpuOptions { threads, ..CpuOptions::default() })?;
        let rows = heads * (DIMS.qk_nope_head_dim + DIMS.v_head_dim);
        let bytes: Vec<u8> = noise(rows * DIMS.kv_lora_rank).flat_map(|x| bf16(x * 0.1)).collect();
        let shape = vec![rows, DIMS.kv_lora_rank];
        let weight = Weight::new("kv_b_proj", WeightType::BF16, shape, SharedBytes::from(bytes))?;
        let kv_b_proj = cx.load_linear(vec![LinearPart { weight, bias: None }], None)?;
        let blocks = context.div_ceil(BLOCK);
        let (num_blocks, page) = (1 + requests * blocks, BLOCK * WIDTH * 2);
        let values: Vec<u8> = noise(num_blocks * BLOCK * WIDTH).flat_map(bf16).collect();
        let handle = KvHandle {
            buf: 0,
            offset: 0,
            block_stride: page,
            page_bytes: page,
            num_blocks,
            block_size: BLOCK,
            dtype: DType::BF16,
            layout: KvCacheLayout::LBNHC,
            shared: false,
        };
        let spec = AttentionSpec { head_size_v: 0, ..AttentionSpec::new(BLOCK, 1, WIDTH, DType::BF16) };
        let group = GroupInfo {
            latent: Some(DIMS),
            max_num_reqs: requests,
            max_num_tokens: requests,
            max_model_len: context,
            ..GroupInfo::new(KvCacheSpec::Mla(spec), heads)
        };
        Ok(Self {
            kv_b_proj,
            handle,
            cache: KvBuf::Host(HostBuf::copy_of(&values)?),
            group,
            table: (1..num_blocks as i32).collect(),
            q: noise(requests * heads * 192).collect(),
            heads,
            context,
            requests,
            cx,
        })
    }

    /// Seconds and operations of a decode step of the backend.
    fn absorbed(&mut self, seconds: f64) -> Result<(f64, f64), Box<dyn Error>> {
        let config = CpuMlaConfig::default();
        let layer = CpuMlaLayer::new(
            &MlaArgs {
                layer: AttnLayer(0),
                num_heads: self.heads,
                kv_lora_rank: DIMS.kv_lora_rank,
                qk_nope_head_dim: DIMS.qk_nope_head_dim,
                qk_rope_head_dim: DIMS.qk_rope_head_dim,
                v_head_dim: DIMS.v_head_dim,
                scale: 0.07,
                kv_b_proj: &self.kv_b_proj,
                dtype: DType::F32,
                kv_cache_dtype: DType::BF16,
                kv_scale: 1.0,
            },
            &config,
        )?;
        let plan = CpuMlaBuilder::plan(&self.group, &CpuMla::rules(), &config)?;
        let mut builder = CpuMlaBuilder::new(&self.cx, &self.group, &plan, &config)?;
        let starts = Dual::from_vec((0..=self.requests as i32).collect());
        let lengths = vec![self.context as i32; self.requests];
        let inputs = StepInputs::new(starts, View::from_vec(lengths.clone()), lengths)?;
        let stride = self.context.div_ceil(BLOCK);
        let slots = View::from_vec(vec![-1; self.requests]);
        let table = Dual::from_vec(self.table.clone());
        let common = CommonAttentionMetadata::new(inputs.into(), table, stride, slots)?;
        let metadata = builder.build(&self.cx, &common)?;
        let mut out = vec![0.0; self.requests * self.heads * DIMS.v_head_dim];
        let time = best(self.cx.pool().threads(), seconds, || {
            let q = TensorRef::from_host(&self.q, &[self.requests, self.heads, 192])?;
            let y = TensorMut::from_host(&mut out, &[self.requests, self.heads * DIMS.v_head_dim])?;
            Ok(layer.forward_mqa(&self.cx, q, &mut self.handle.on(&mut self.cache), &metadata, y)?)
        })?;
        let per_head = self.context * (WIDTH + DIMS.kv_lora_rank) + 256 * DIMS.kv_lora_rank;
        Ok((time, 2.0 * (self.requests * self.heads * per_head) as f64))
    }

    /// The same for the plain way: every request's keys and values expanded, then attended to.
    fn plain(&mut self, seconds: f64) -> Result<(f64, f64), Box<dyn Error>> {
        let sizes = Sizes::new(&self.group, &CpuMlaConfig::default())?;
        let slots = self.context.next_multiple_of(GROUP).min(4096);
        let mut pages = Pages::new(&sizes.dims, slots);
        let mut latents = vec![0.0; slots * WIDTH];
        let threads = self.cx.pool().threads();
        let workspace = Workspace::new(&sizes.prefill, threads)?;
        let mut out = vec![0.0; self.heads * DIMS.v_head_dim];
        let mut lse = vec![0.0; self.heads];
        let stride = self.context.div_ceil(BLOCK);
        let numbers = LayerNumbers {
            scale: 0.07,
            window: None,
            soft_cap: None,
            alibi_slopes: None,
            sinks: None,
            k_scale: 1.0,
            v_scale: 1.0,
        };
        let time = best(self.cx.pool().threads(), seconds, || {
            for request in 0..self.requests {
                out.fill(0.0);
                lse.fill(f32::NEG_INFINITY);
                for start in (0..self.context).step_by(slots) {
                    let len = slots.min(self.context - start);
                    let run = Run { source: Source::Cached { request, start }, len, slot: 0 };
                    let h = &self.handle;
                    let layout = CacheLayout {
                        offset: h.offset,
                        block_stride: h.block_stride,
                        num_blocks: h.num_blocks,
                        block_size: h.block_size,
                        dtype: h.dtype,
                    };
                    let KvBuf::Host(bytes) = &self.cache else {
                        return Err("the cache is on the host".into());
                    };
                    let read = (&layout, bytes.as_bytes(), 1.0);
                    let none = TensorRef::from_host(&[0f32; 0], &[0, WIDTH])?;
                    let table = (&self.table[..], stride);
                    let end = (run.slot + run.len).next_multiple_of(GROUP);
                    gather(self.cx.pool(), &[run], WIDTH, read, table, none, &mut latents)?;
                    expand(&self.cx, &*self.kv_b_proj, &latents, end, &mut pages)?;
                    let mut plan = Plan::default();
                    let ask = Request { first_row: 0, q_len: 1, seq_len: len, causal: false, prefix: 0 };
                    plan.build(&sizes.prefill, threads, None, std::iter::once(ask))?;
                    let blocks = View::from_vec((0..(end / GROUP) as i32).collect());
                    let batch = Batch::new(Arc::new(plan), blocks, end / GROUP, GROUP)?;
                    let row = self.heads * 192;
                    let q = TensorRef::from_host(&self.q[request * row..][..row], &[1, self.heads, 192])?;
                    let y = TensorMut::from_host(&mut out, &[1, self.heads, DIMS.v_head_dim])?;
                    let (layout, bytes) = pages.as_cache();
                    let on = (self.cx.pool(), self.cx.isa());
                    attend(on, &batch, &workspace, &numbers, q, (&layout, bytes), y, Lse::Merge(&mut lse))?;
                }
            }
            Ok(())
        })?;
        let per_token = self.heads * (256 * DIMS.kv_lora_rank + 192 + DIMS.v_head_dim);
        Ok((time, 2.0 * (self.requests * self.context * per_token) as f64))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let asked: Vec<f64> = std::env::args().skip(1).map(|a| a.parse()).collect::<Result<_, _>>()?;
    let number = |i: usize, otherwise: usize| asked.get(i).map_or(otherwise, |n| *n as usize).max(1);
    let (heads, context, requests) = (number(0, 128), number(1, 2048), number(2, 4));
    let seconds = asked.get(3).copied().unwrap_or(3.0);
    let threads = asked.get(4).map(|n| *n as usize);
    let mut bench = Bench::new(heads, context, requests, threads)?;
    let rate = || multiply_add_rate(bench.cx.pool(), bench.cx.isa(), 0.02);
    let ceiling = (0..50).map(|_| rate()).fold(0.0, f64::max);
    println!(
        "{heads} heads, {requests} requests of {context} tokens, {} on {} threads; ceiling {:.1} GFLOP/s (float32 \
         multiply-adds, same run)",
        bench.cx.isa(),
        bench.cx.pool().threads(),
        ceiling / 1e9
    );
    println!("{:24} {:>10} {:>10} {:>8} {:>12}", "", "ms a step", "GFLOP/s", "share", "tokens/s");
    let decode = bench.absorbed(seconds)?;
    let plain = bench.plain(seconds)?;
    for (name, (time, operations)) in [("absorbed decode", decode), ("expand, then attend", plain)] {
        println!(
            "{name:24} {:>10.2} {:>10.1} {:>7.0}% {:>12.1}",
            time * 1e3,
            operations / time / 1e9,
            100.0 * operations / time / ceiling,
            requests as f64 / time
        );
    }
    println!("the absorbed decode is {:.1} times as fast", plain.0 / decode.0);
    Ok(())
}
