//! Decode, prefill, mixed batches and cache writes of `CUDA_ATTN` as shares of what the device gives, all in one run.
//!
//! ```text
//! cargo run --release -p headway-cuda --example attention_speed [FILTER]
//! ```
//!
//! Times are medians over graph replays. A replay goes through several block tables, so that the second-level cache
//! does not help; blocks of 16 tokens are scattered over the pool. Metadata is built before. One JSON object a line on standard
//! output.

use headway_attention::{
    AttentionArgs, AttentionBackend, AttentionError, AttentionImpl, AttnLayer, CommonAttentionMetadata,
    GroupInfo, KvBuf, KvCacheLayout, KvCacheSpec, KvHandle, MetadataBuilder, Qkv, StepInputs,
    group::kv::spec::AttentionSpec,
};
use headway_cuda::{
    CudaExec, CudaOptions,
    backends::cuda_attn::{CudaAttn, CudaAttnBuilder, CudaAttnConfig, CudaAttnLayer, CudaAttnMetadata},
    kernels::memory::MemoryKernels,
};
use headway_tensor::{DType, DeviceMem, Dual, Exec, Persistent, Pod, Tensor, View};
use serde_json::json;
use std::sync::Arc;

type Failure = Box<dyn std::error::Error>;

const BLOCK: usize = 16;
/// Bytes that a replay goes through at least: several times the second-level cache.
const COLD_BYTES: usize = 300 << 20;
const REPLAYS: usize = 9;

struct Case {
    name: String,
    /// New tokens and tokens in all.
    seqs: Vec<(usize, usize)>,
}

fn cases() -> Vec<Case> {
    let mut all = vec![];
    for (batch, context) in [
        (1, 1024),
        (8, 1024),
        (32, 1024),
        (128, 1024),
        (256, 1024),
        (1, 8192),
        (8, 8192),
        (32, 8192),
        (128, 8192),
        (256, 8192),
        (1, 32768),
        (8, 32768),
        (32, 32768),
        (128, 32768),
        (256, 32768),
    ] {
        all.push(Case {
            name: format!("decode {batch}x{}k", context / 1024),
            seqs: vec![(1, context); batch],
        });
    }
    for (batch, len) in [
        (1, 1024),
        (1, 2048),
        (1, 4096),
        (1, 8192),
        (1, 16384),
        (1, 32768),
        (4, 4096),
        (8, 1024),
        (8, 2048),
        (8, 8192),
    ] {
        all.push(Case { name: format!("prefill {batch}x{}k", len / 1024), seqs: vec![(len, len); batch] });
    }
    all.push(Case {
        name: "mixed 64x4k+4x2k".into(),
        seqs: [vec![(1, 4096); 64], vec![(2048, 2048); 4]].concat(),
    });
    all.push(Case { name: "chunk 1x512 of 32k".into(), seqs: vec![(512, 32768)] });
    all
}

struct Bench {
    cx: CudaExec,
    pool: Arc<dyn DeviceMem>,
    heads: (usize, usize, usize),
    read_ceiling: f64,
    copy_ceiling: f64,
}

fn device_view<T: Pod>(cx: &CudaExec, x: &[T]) -> Result<View<T>, Failure> {
    Ok(Persistent::new(cx, x.len())?.write(cx, x.len(), |to| to.copy_from_slice(x)))
}

fn dual(cx: &CudaExec, x: Vec<i32>) -> Result<Dual<i32>, Failure> {
    let dev = device_view(cx, &x)?;
    Dual::split(x, dev).ok_or_else(|| "lengths differ".into())
}

/// Microseconds of what `body` queues, over `calls` calls: the median of the replays, the least, the most.
fn time(
    cx: &CudaExec,
    calls: usize,
    mut body: impl FnMut(usize) -> Result<(), AttentionError>,
) -> Result<[f64; 3], Failure> {
    body(0)?;
    cx.synchronize()?;
    cx.begin_capture()?;
    for i in 0..calls {
        body(i)?;
    }
    let graph = cx.end_capture()?;
    graph.launch()?;
    cx.synchronize()?;
    let (from, to) = (cx.event()?, cx.event()?);
    let mut us = vec![];
    for _ in 0..REPLAYS {
        cx.record(&from)?;
        graph.launch()?;
        cx.record(&to)?;
        us.push(f64::from(from.elapsed_ms(&to)?) * 1e3 / calls as f64);
    }
    us.sort_by(f64::total_cmp);
    Ok([us[us.len() / 2], us[0], us[us.len() - 1]])
}

fn common(
    cx: &CudaExec,
    seqs: &[(usize, usize)],
    table: Dual<i32>,
    stride: usize,
    slots: View<i64>,
) -> Result<CommonAttentionMetadata, Failure> {
    let mut starts = vec![0];
    seqs.iter().for_each(|s| starts.push(starts[starts.len() - 1] + s.0 as i32));
    let lens: Vec<i32> = seqs.iter().map(|s| s.1 as i32).collect();
    let inputs = StepInputs::new(dual(cx, starts)?, device_view(cx, &lens)?, lens)?;
    Ok(CommonAttentionMetadata::new(Arc::new(inputs), table, stride, slots)?)
}

impl Bench {
    fn run(&self, case: &Case, layout: KvCacheLayout) -> Result<(), Failure> {
        let cx = &self.cx;
        let (h, hk, d) = self.heads;
        let tokens: usize = case.seqs.iter().map(|s| s.0).sum();
        let page = 2 * BLOCK * hk * d * 2;
        let blocks: Vec<usize> = case.seqs.iter().map(|s| s.1.div_ceil(BLOCK)).collect();
        let needed: usize = blocks.iter().sum();
        let num_blocks = (self.pool.bytes() / page).min(1 << 24);
        if needed > num_blocks {
            println!(
                "{}",
                json!({"case": case.name, "skipped": format!("{needed} blocks of {page} bytes, {num_blocks} there")})
            );
            return Ok(());
        }
        let kv_bytes = case.seqs.iter().map(|s| s.1).sum::<usize>() * hk * d * 4;
        let stride = *blocks.iter().max().unwrap_or(&1);
        let tables = (COLD_BYTES.div_ceil(kv_bytes)).clamp(1, 64).min(num_blocks / needed).max(1);
        let spec = AttentionSpec::new(BLOCK, hk, d, DType::BF16);
        let info = GroupInfo {
            layout,
            layers: vec![AttnLayer(0)],
            max_num_reqs: case.seqs.len(),
            max_num_tokens: tokens,
            max_model_len: stride * BLOCK,
            ..GroupInfo::new(KvCacheSpec::Full(spec), h)
        };
        let (rules, config) = (CudaAttn::rules(), CudaAttnConfig::default());
        let plan = CudaAttnBuilder::plan(&info, &rules, &config);
        let mut builder = CudaAttnBuilder::new(cx, &info, &plan, &config)?;
        let args = AttentionArgs {
            layer: AttnLayer(0),
            num_heads: h,
            num_kv_heads: hk,
            head_size: d,
            head_size_v: d,
            scale: 1.0 / (d as f32).sqrt(),
            sliding_window: None,
            logit_soft_cap: None,
            alibi_slopes: None,
            sinks: None,
            dtype: DType::BF16,
            kv_cache_dtype: DType::BF16,
            k_scale: 1.0,
            v_scale: 1.0,
        };
        let layer = CudaAttnLayer::new(&args, &config)?;
        // Blocks in an order without pattern: the next one is a prime number of blocks away.
        let prime = 1_000_003;
        let mut next = 0usize;
        let slots = device_view(cx, &vec![-1i64; tokens])?;
        let mut steps: Vec<(CommonAttentionMetadata, CudaAttnMetadata)> = vec![];
        for _ in 0..tables {
            let mut table = vec![0i32; case.seqs.len() * stride];
            for (row, &n) in table.chunks_exact_mut(stride).zip(&blocks) {
                for b in &mut row[..n] {
                    *b = ((next * prime) % num_blocks) as i32;
                    next += 1;
                }
            }
            let common = common(cx, &case.seqs, dual(cx, table)?, stride, slots.clone())?;
            let metadata = builder.build(cx, &common)?;
            steps.push((common, metadata));
        }
        let memory = MemoryKernels::new(cx)?;
        let random =
            |shape: [usize; 3]| -> Result<Tensor, Failure> { Ok(Tensor::zeros(cx, DType::BF16, &shape)?) };
        let q = random([tokens, h, d])?;
        let (k, v) = (random([tokens, hk, d])?, random([tokens, hk, d])?);
        let mut out = Tensor::zeros(cx, DType::BF16, &[tokens, h, d])?;
        for x in [&q, &k, &v] {
            if let Some(m) = x.device_mem() {
                memory.fill(cx, m)?;
            }
        }
        let handle = KvHandle {
            buf: 0,
            offset: 0,
            block_stride: page,
            page_bytes: page,
            num_blocks,
            block_size: BLOCK,
            dtype: DType::BF16,
            layout,
            shared: false,
        };
        let mut cache = KvBuf::Dev(Arc::clone(&self.pool));
        let x = Qkv { q: q.view(), k: k.view(), v: v.view() };
        let calls = tables.max((2000 / (kv_bytes >> 22).max(1)).clamp(1, 20)).next_multiple_of(tables);
        let [us, least, most] = time(cx, calls, |i| {
            layer.forward(cx, &x, &mut handle.on(&mut cache), &steps[i % tables].1, out.view_mut())
        })?;
        let seen: usize = case.seqs.iter().map(|&(q, n)| (n - q + 1..=n).sum::<usize>()).sum();
        let tflops = 4.0 * (h * d) as f64 * seen as f64 / us / 1e6;
        let gbps = kv_bytes as f64 / us / 1e3;
        println!(
            "{}",
            json!({"bench": "attention", "peer": "headway", "backend": "CUDA_ATTN", "device": cx.info().name,
                "case": case.name, "heads": format!("{h}/{hk}/{d}"), "dtype": "bf16", "block_size": BLOCK,
                "layout": layout.name(), "tables": tables, "calls": calls, "median_us": round(us), "min_us": round(least),
                "max_us": round(most), "gbps": round(gbps), "tflops": round(tflops), "read_ceiling_gbps": round(self.read_ceiling),
                "share_of_read_ceiling": (gbps / self.read_ceiling * 1000.0).round() / 1000.0})
        );
        Ok(())
    }

    /// Every token to a slot of its own, blocks scattered.
    fn write(&self, tokens: usize, layout: KvCacheLayout) -> Result<(), Failure> {
        let cx = &self.cx;
        let (h, hk, d) = self.heads;
        let page = 2 * BLOCK * hk * d * 2;
        let num_blocks = (self.pool.bytes() / page).min(1 << 24);
        let bytes = tokens * hk * d * 4;
        let sets = COLD_BYTES.div_ceil(2 * bytes).clamp(1, 32);
        let memory = MemoryKernels::new(cx)?;
        let mut sources = vec![];
        for set in 0..sets {
            let of = |t: usize| {
                let n = set * tokens + t;
                (((n / BLOCK * 1_000_003) % num_blocks) * BLOCK + n % BLOCK) as i64
            };
            let slots: Vec<i64> = (0..tokens).map(of).collect();
            let (k, v) = (
                Tensor::zeros(cx, DType::BF16, &[tokens, hk, d])?,
                Tensor::zeros(cx, DType::BF16, &[tokens, hk, d])?,
            );
            for x in [&k, &v] {
                if let Some(m) = x.device_mem() {
                    memory.fill(cx, m)?;
                }
            }
            sources.push((k, v, device_view(cx, &slots)?));
        }
        let args = AttentionArgs {
            layer: AttnLayer(0),
            num_heads: h,
            num_kv_heads: hk,
            head_size: d,
            head_size_v: d,
            scale: 1.0,
            sliding_window: None,
            logit_soft_cap: None,
            alibi_slopes: None,
            sinks: None,
            dtype: DType::BF16,
            kv_cache_dtype: DType::BF16,
            k_scale: 1.0,
            v_scale: 1.0,
        };
        let layer = CudaAttnLayer::new(&args, &CudaAttnConfig::default())?;
        let handle = KvHandle {
            buf: 0,
            offset: 0,
            block_stride: page,
            page_bytes: page,
            num_blocks,
            block_size: BLOCK,
            dtype: DType::BF16,
            layout,
            shared: false,
        };
        let mut cache = KvBuf::Dev(Arc::clone(&self.pool));
        let [us, least, most] = time(cx, sets * 4, |i| {
            let (k, v, slots) = &sources[i % sets];
            let x = Qkv { q: k.view(), k: k.view(), v: v.view() };
            layer.update_kv_cache(cx, &x, &mut handle.on(&mut cache), slots)
        })?;
        let gbps = 2.0 * bytes as f64 / us / 1e3;
        println!(
            "{}",
            json!({"bench": "attention", "peer": "headway", "backend": "CUDA_ATTN", "case": format!("write {tokens}"),
                "heads": format!("{h}/{hk}/{d}"), "dtype": "bf16", "layout": layout.name(), "median_us": round(us),
                "min_us": round(least), "max_us": round(most), "gbps": round(gbps), "copy_ceiling_gbps": round(self.copy_ceiling),
                "share_of_copy_ceiling": (gbps / self.copy_ceiling * 1000.0).round() / 1000.0})
        );
        Ok(())
    }
}

fn round(x: f64) -> f64 {
    (x * 10.0).round() / 10.0
}

fn main() -> Result<(), Failure> {
    let filter = std::env::args().nth(1).unwrap_or_default();
    let cx = CudaExec::open(CudaOptions::default())?;
    let free = cx.free_and_total_memory()?.0 as usize;
    let alloc = |bytes: usize| cx.alloc(bytes)?.ok_or(AttentionError::Inputs("no device memory".into()));
    let memory = MemoryKernels::new(&cx)?;
    let (a, b) = (alloc(2 << 30)?, alloc(2 << 30)?);
    memory.fill(&cx, &a)?;
    let gb = (2u64 << 30) as f64;
    let read = gb / time(&cx, 4, |_| Ok(memory.read(&cx, &a)?))?[1] / 1e3;
    let copy = 2.0 * gb / time(&cx, 4, |_| Ok(memory.copy(&cx, &a, &b)?))?[1] / 1e3;
    println!(
        "{}",
        json!({"device": cx.info(), "read_ceiling_gbps": round(read), "copy_ceiling_gbps": round(copy)})
    );
    drop((a, b));
    let pool = alloc((40usize << 30).min(free / 10 * 8))?;
    memory.fill(&cx, &pool)?;
    cx.synchronize()?;
    let mut bench = Bench { cx, pool, heads: (32, 8, 128), read_ceiling: read, copy_ceiling: copy };
    for heads in [(32, 8, 128), (9, 3, 64)] {
        bench.heads = heads;
        let id = format!("{}/{}/{} ", heads.0, heads.1, heads.2);
        for layout in [KvCacheLayout::LBHNC, KvCacheLayout::LBNHC] {
            for case in
                cases().iter().filter(|c| format!("{id}{} {}", layout.name(), c.name).contains(&filter))
            {
                bench.run(case, layout)?;
            }
            for tokens in [256, 8192, 65536, 262_144] {
                if format!("{id}{} write {tokens}", layout.name()).contains(&filter) {
                    bench.write(tokens, layout)?;
                }
            }
        }
    }
    Ok(())
}
