//! What a Mamba-2 layer costs on a device: a decode step by the tokens before it and by the requests, a prefill by its
//! tokens.
//!
//! `cargo run --release -p headway-cuda --example cuda_state_space_speed -- [requests new]`; with two numbers that case alone,
//! for a profiler.
//!
//! The layer is that of Mamba-2 1.3B: 64 heads of 64, one group, a state of 128 in float32, a convolution of width 4,
//! bfloat16. Calls are recorded into a graph and timed by events around its replays; states are of as many layers as
//! make them larger than the second-level cache. Medians.

use headway_attention::{
    AttnLayer, CommonAttentionMetadata, GroupInfo, KvBuf, KvCacheLayout, KvCacheSpec, KvHandle, MambaSpec,
    MetadataBuilder, RuleBook, StateSpaceArgs, StateSpaceImpl, StepInputs,
};
use headway_cuda::{
    CudaExec, CudaOptions,
    backends::mamba2::{Mamba2Builder, Mamba2Config, Mamba2Layer},
    kernels::memory::MemoryKernels,
};
use headway_tensor::{DType, Dual, Exec, Tensor, View};
use std::{error::Error, sync::Arc};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

const HEADS: usize = 64;
const HEAD_DIM: usize = 64;
const STATE: usize = 128;
const TAPS: usize = 4;
const INNER: usize = HEADS * HEAD_DIM;
const CHANNELS: usize = INNER + 2 * STATE;
/// Bytes of states that the calls of a replay go over.
const COLD: usize = 512 << 20;
const CALLS: usize = 64;
const SAMPLES: usize = 9;

/// Median seconds of a call among as many as a replay has.
fn median(cx: &CudaExec, mut call: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    call(0)?;
    cx.synchronize()?;
    cx.begin_capture()?;
    let recorded = (0..CALLS).try_for_each(&mut call);
    let graph = cx.end_capture()?;
    recorded?;
    let (from, to) = (cx.event()?, cx.event()?);
    let mut times = vec![];
    for _ in 0..SAMPLES + 3 {
        cx.record(&from)?;
        graph.launch()?;
        cx.record(&to)?;
        times.push(f64::from(from.elapsed_ms(&to)?) * 1e-3 / CALLS as f64);
    }
    let mut times = times.split_off(3);
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// A ramp that repeats, within ±1.
fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 7919 % 2003) as f32 / 1001.0 - 1.0).collect()
}

/// `requests` of so many new tokens each, after `context` ones.
fn common(requests: usize, new: usize, context: usize) -> Result<CommonAttentionMetadata> {
    let starts = Dual::from_vec((0..=requests).map(|r| (r * new) as i32).collect());
    let lens = vec![(context + new) as i32; requests];
    let mut inputs = StepInputs::new(starts, View::from_vec(lens.clone()), lens)?;
    inputs.is_prefilling = Some(vec![new > 1; requests]);
    let table = Dual::from_vec((1..=requests as i32).collect());
    let slots = View::from_vec(vec![-1; requests * new]);
    Ok(CommonAttentionMetadata::new(Arc::new(inputs), table, 1, slots)?)
}

/// Seconds of a layer's call.
fn layer(cx: &CudaExec, requests: usize, new: usize, context: usize) -> Result<f64> {
    let shapes = vec![vec![TAPS - 1, CHANNELS], vec![HEADS, HEAD_DIM, STATE]];
    let spec =
        MambaSpec { chunk_size: Some(256), ..MambaSpec::new(1 << 20, shapes, vec![DType::BF16, DType::F32]) };
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
    let args = StateSpaceArgs {
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
        dtype: DType::BF16,
    };
    let layer = Mamba2Layer::new(&args, &config)?;
    let blocks = requests + 1;
    let layers = (COLD / (page * requests)).clamp(1, CALLS);
    let memory = cx.alloc(page * blocks * layers)?.ok_or("no device memory")?;
    cx.zero(&memory, 0, memory.bytes());
    let mut cache = KvBuf::Dev(memory);
    let handle = |layer: usize| KvHandle {
        buf: 0,
        offset: layer * page * blocks,
        block_stride: page,
        page_bytes: page,
        num_blocks: blocks,
        block_size: 1 << 20,
        dtype: DType::U8,
        layout: KvCacheLayout::LBNHC,
        shared: false,
    };
    let width = INNER + CHANNELS + HEADS;
    let tokens = requests * new;
    let numbers: Vec<half::bf16> = values(tokens * width).into_iter().map(half::bf16::from_f32).collect();
    let x = Tensor::from_slice(cx, &numbers, &[tokens, width])?;
    let mut out = Tensor::zeros(cx, DType::BF16, &[tokens, INNER])?;
    let metadata = builder.build(cx, &common(requests, new, context)?)?;
    median(cx, |i| {
        let x = x.view().cols(INNER..width)?;
        Ok(layer.forward(cx, x, &mut handle(i % layers).on(&mut cache), &metadata, out.view_mut())?)
    })
}

fn main() -> Result<()> {
    let cx = CudaExec::open(CudaOptions::default())?;
    println!("{}, driver for CUDA {}", cx.info().name, cx.info().driver);
    let numbers: Vec<usize> = std::env::args().skip(1).map(|a| a.parse()).collect::<Result<_, _>>()?;
    if let [requests, new] = numbers[..] {
        println!("{requests} of {new} tokens: {:.1} µs", layer(&cx, requests, new, 1 << 10)? * 1e6);
        return Ok(());
    }
    let memory = MemoryKernels::new(&cx)?;
    let none = "no device memory";
    let (from, to) = (cx.alloc(1 << 30)?.ok_or(none)?, cx.alloc(1 << 30)?.ok_or(none)?);
    memory.fill(&cx, &from)?;
    let copy = 2.0 * (1u64 << 30) as f64 / median(&cx, |_| Ok(memory.copy(&cx, &from, &to)?))?;
    drop((from, to));
    println!("a kernel that only copies: {:.0} GB/s, read and written", copy / 1e9);
    println!("\ndecode          µs by tokens before: 1k       32k      1M     state, GB/s   of the copy");
    let state = (HEADS * HEAD_DIM * STATE * 4 + (TAPS - 1) * CHANNELS * 2) as f64;
    for requests in [1, 8, 32, 128, 256] {
        let times = [1 << 10, 1 << 15, (1 << 20) - 1]
            .map(|context| layer(&cx, requests, 1, context))
            .into_iter()
            .collect::<Result<Vec<f64>>>()?;
        let rate = 2.0 * state * requests as f64 / times[0];
        println!(
            "{requests:4} requests            {:8.1} {:8.1} {:8.1} {:10.0} {:12.0}%",
            times[0] * 1e6,
            times[1] * 1e6,
            times[2] * 1e6,
            rate / 1e9,
            100.0 * rate / copy
        );
    }
    println!("\nprefill                   µs   tokens/s    TFLOP/s   in and out, GB/s   of the copy");
    // Products of chunks of 64: C Bᵀ, times x, C S, and the state's.
    let operations = (HEADS * 2 * (64 * STATE + 64 * HEAD_DIM + 2 * HEAD_DIM * STATE)) as f64;
    let bytes = (2 * (CHANNELS + HEADS + INNER)) as f64;
    for (requests, new) in [(1, 256), (1, 2048), (1, 8192), (8, 2048), (64, 128)] {
        let seconds = layer(&cx, requests, new, 0)?;
        let tokens = (requests * new) as f64;
        println!(
            "{requests:4} of {new:5} tokens {:9.1} {:10.0} {:10.1} {:14.0} {:15.0}%",
            seconds * 1e6,
            tokens / seconds,
            tokens * operations / seconds / 1e12,
            tokens * bytes / seconds / 1e9,
            100.0 * tokens * bytes / seconds / copy
        );
    }
    Ok(())
}
