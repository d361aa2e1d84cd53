//! What a Mamba-2 layer costs: a decode step by the tokens before it, beside attention's; a prefill by the
//! tokens in it, in chunks and token by token.
//!
//! `cargo run --release -p headway-cpu --example state_space_speed -- [threads]`
//!
//! The layer is that of a 9-billion-parameter hybrid: 128 heads of 64, one group, a state of 128, a
//! convolution of width 4; its attention layers have 32/8 heads of 128. Medians.

use headway_attention::{
    AttentionArgs, AttentionImpl, AttentionSpec, AttnLayer, CommonAttentionMetadata, GroupInfo, KvBuf,
    KvCacheLayout, KvCacheSpec, KvHandle, MambaSpec, MetadataBuilder, Qkv, RuleBook, StateSpaceArgs,
    StateSpaceImpl, StepInputs,
};
use headway_cpu::{
    CpuExec, CpuOptions,
    backends::{
        cpu_attn::{CpuAttnBuilder, CpuAttnConfig, CpuAttnLayer},
        mamba2::{Mamba2Builder, Mamba2Config, Mamba2Layer},
    },
};
use headway_tensor::{DType, Dual, HostBuf, Tensor, View};
use std::{error::Error, sync::Arc, time::Instant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const HEADS: usize = 128;
const HEAD_DIM: usize = 64;
const STATE: usize = 128;
const TAPS: usize = 4;
const INNER: usize = HEADS * HEAD_DIM;
const CHANNELS: usize = INNER + 2 * STATE;

/// Median seconds of a call, over at least 0.3 s.
fn median(mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let (mut times, start) = (vec![], Instant::now());
    call()?;
    while times.len() < 5 || start.elapsed().as_secs_f64() < 0.3 {
        let before = Instant::now();
        call()?;
        times.push(before.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// A ramp that repeats, within ±1.
fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 7919 % 2003) as f32 / 1001.0 - 1.0).collect()
}

/// `requests` of so many new tokens each, after `context` ones; request r has the blocks
/// `1 + r * blocks ..`.
fn common(requests: usize, new: usize, context: usize, blocks: usize) -> Result<CommonAttentionMetadata> {
    let starts = Dual::from_vec((0..=requests).map(|r| (r * new) as i32).collect());
    let lens = vec![(context + new) as i32; requests];
    let mut inputs = StepInputs::new(starts, View::from_vec(lens.clone()), lens)?;
    inputs.is_prefilling = Some(vec![new > 1; requests]);
    let table = Dual::from_vec((1..=(requests * blocks) as i32).collect());
    let slots = View::from_vec(vec![-1; requests * new]);
    Ok(CommonAttentionMetadata::new(Arc::new(inputs), table, blocks, slots)?)
}

fn handle(page: usize, num_blocks: usize, block_size: usize, dtype: DType) -> KvHandle {
    let layout = KvCacheLayout::LBHNC;
    KvHandle {
        buf: 0,
        offset: 0,
        block_stride: page,
        page_bytes: page,
        num_blocks,
        block_size,
        dtype,
        layout,
        // For attention: the keys and values are there.
        shared: true,
    }
}

/// Seconds of a layer's call on a state of `ssm`.
fn state_space(cx: &CpuExec, ssm: DType, requests: usize, new: usize, context: usize) -> Result<f64> {
    let spec = MambaSpec {
        chunk_size: Some(256),
        ..MambaSpec::new(
            1 << 20,
            vec![vec![TAPS - 1, CHANNELS], vec![HEADS, HEAD_DIM, STATE]],
            vec![DType::F32, ssm],
        )
    };
    let page = spec.state_bytes();
    let info = GroupInfo {
        max_num_reqs: requests,
        max_num_tokens: requests * new,
        max_model_len: 1 << 20,
        ..GroupInfo::new(KvCacheSpec::Mamba(spec), HEADS)
    };
    let config = Mamba2Config::default();
    let plan = Mamba2Builder::plan(&info, &RuleBook::default(), &config)?;
    let mut builder = Mamba2Builder::new(cx, &info, &plan, &config)?;
    let vector = |v: Vec<f32>| Tensor::from_slice(cx, &v, &[v.len()]);
    let conv_weight = Tensor::from_slice(cx, &values(CHANNELS * TAPS), &[CHANNELS, TAPS])?;
    let (a, d, dt_bias) = (vector(vec![-1.0; HEADS])?, vector(values(HEADS))?, vector(vec![-2.0; HEADS])?);
    let layer = Mamba2Layer::new(
        &StateSpaceArgs {
            layer: AttnLayer(0),
            num_heads: HEADS,
            head_dim: HEAD_DIM,
            n_groups: 1,
            state_size: STATE,
            conv_kernel: TAPS,
            chunk_size: 256,
            conv_weight: &conv_weight,
            conv_bias: None,
            a: &a,
            d: &d,
            dt_bias: &dt_bias,
            time_step_limit: (0.0, f32::INFINITY),
            dtype: DType::F32,
        },
        &config,
    )?;
    let rows = requests * new;
    let x = Tensor::from_slice(cx, &values(rows * (CHANNELS + HEADS)), &[rows, CHANNELS + HEADS])?;
    let mut out = Tensor::zeros(cx, DType::F32, &[rows, INNER])?;
    let mut cache = KvBuf::Host(HostBuf::zeroed((requests + 1) * page)?);
    let handle = handle(page, requests + 1, 1 << 20, DType::U8);
    let metadata = builder.build(cx, &common(requests, new, context, 1)?)?;
    median(|| Ok(layer.forward(cx, x.view(), &mut handle.on(&mut cache), &metadata, out.view_mut())?))
}

/// Seconds of a decode step of attention over so many tokens, in bfloat16.
fn attention(cx: &CpuExec, requests: usize, context: usize) -> Result<f64> {
    let (heads, kv_heads, size, block) = (32, 8, 128, 16);
    let spec = AttentionSpec::new(block, kv_heads, size, DType::BF16);
    let page = spec.page_size_bytes();
    let info = GroupInfo {
        max_num_reqs: requests,
        max_num_tokens: requests,
        max_model_len: context + 1,
        ..GroupInfo::new(KvCacheSpec::Full(spec), heads)
    };
    let config = CpuAttnConfig::default();
    let plan = CpuAttnBuilder::plan(&info, &RuleBook::default(), &config)?;
    let mut builder = CpuAttnBuilder::new(cx, &info, &plan, &config)?;
    let layer = CpuAttnLayer::new(
        &AttentionArgs {
            layer: AttnLayer(0),
            num_heads: heads,
            num_kv_heads: kv_heads,
            head_size: size,
            head_size_v: size,
            scale: 0.1,
            sliding_window: None,
            logit_soft_cap: None,
            alibi_slopes: None,
            sinks: None,
            dtype: DType::F32,
            kv_cache_dtype: DType::BF16,
            k_scale: 1.0,
            v_scale: 1.0,
        },
        &config,
    )?;
    let blocks = (context + 1).div_ceil(block);
    let rows = |n: usize| Tensor::from_slice(cx, &values(requests * n * size), &[requests, n, size]);
    let (q, k, v) = (rows(heads)?, rows(kv_heads)?, rows(kv_heads)?);
    let mut out = Tensor::zeros(cx, DType::F32, &[requests, heads, size])?;
    let mut cache = HostBuf::zeroed((requests * blocks + 1) * page)?;
    // Touched, so that every page is memory of its own.
    cache.as_bytes_mut().iter_mut().step_by(64).for_each(|b| *b = 1);
    let (mut cache, handle) = (KvBuf::Host(cache), handle(page, requests * blocks + 1, block, DType::BF16));
    let metadata = builder.build(cx, &common(requests, 1, context, blocks)?)?;
    median(|| {
        let x = Qkv { q: q.view(), k: k.view(), v: v.view() };
        Ok(layer.forward(cx, &x, &mut handle.on(&mut cache), &metadata, out.view_mut())?)
    })
}

fn main() -> Result<()> {
    let threads = std::env::args().nth(1).map(|n| n.parse()).transpose()?;
    let cx = CpuExec::new(CpuOptions { threads, ..CpuOptions::default() })?;
    let state = (HEADS * HEAD_DIM * STATE * 4) as f64;
    println!("{} threads, {}", cx.pool().threads(), cx.isa());
    println!("decode, one layer         f32 state                bf16 state   attention bf16");
    println!("requests   context        us     GB/s of state       us            us");
    for requests in [1, 8] {
        for context in [16, 256, 4096, 16_384, 262_144] {
            let exact = state_space(&cx, DType::F32, requests, 1, context)?;
            let half = state_space(&cx, DType::BF16, requests, 1, context)?;
            // Attention over a quarter of a million tokens of eight requests is 8 GiB.
            let beside = match context <= 16_384 {
                true => format!("{:>14.1}", attention(&cx, requests, context)? * 1e6),
                false => format!("{:>14}", "-"),
            };
            let rate = 2.0 * requests as f64 * state / exact / 1e9;
            println!(
                "{requests:>8} {context:>9} {:>11.1} {rate:>12.2} {:>15.1} {beside}",
                exact * 1e6,
                half * 1e6
            );
        }
    }
    let stepwise = CpuExec::new(CpuOptions { threads, batch_invariant: true, ..CpuOptions::default() })?;
    println!("prefill of one request    in chunks     token by token (--batch-invariant)");
    println!("  tokens                  us a token    us a token");
    for new in [16, 64, 256, 512] {
        let per_token = |s: f64| s * 1e6 / new as f64;
        let (chunks, steps) =
            (state_space(&cx, DType::F32, 1, new, 0)?, state_space(&stepwise, DType::F32, 1, new, 0)?);
        println!("{new:>8} {:>27.2} {:>13.2}", per_token(chunks), per_token(steps));
    }
    Ok(())
}
