//! What the suite's short requests don't reach of `FLASH_ATTN`: keys in parts, prefills of several tiles, the sums of the
//! softmax, a layer whose window is not its group's.

use super::{
    Outcome, Test,
    attention::{CudaMemory, backends},
    ensure, text,
};
use half::bf16;
use headway_attention::{
    AttentionArgs, AttentionImpl, AttentionSpec, AttnLayer, CommonAttentionMetadata, GroupInfo, KvBuf,
    KvCacheSpec, KvMut, LayerImpl, MetadataBuilder, Qkv, RuleBook, StepInputs,
    group::kv::layout::KvCacheLayout,
};
use headway_cuda::{
    CudaExec,
    backends::flash_attn::{FlashAttnBuilder, FlashAttnConfig, FlashAttnLayer},
    modules::{extension::Extensions, installed},
};
use headway_tensor::{DType, Dual, Exec, Persistent, Tensor};
use headway_testkit::suite::{SuiteConfig, run_suite_with};

pub const TESTS: &[Test] = &[
    ("flash_attn: keys in parts, prefills of several tiles", long),
    ("flash_attn: sums of the softmax, and a window that is not the group's", sums),
];

/// New tokens and all tokens of requests, decodes first.
pub const LONG: [(usize, usize); 6] = [(1, 2500), (1, 64), (1, 513), (40, 300), (5, 1530), (350, 350)];

/// Why a backend of an extension module is not run; `None` if its module is there.
pub fn missing(name: &str) -> Option<String> {
    let which = if name == "FLASHMLA" { Extensions::FlashMla } else { Extensions::FlashAttention3 };
    let there = installed().as_ref().is_ok_and(|f| f.extension(which).is_some());
    (!there)
        .then(|| "not run: not fetched; set HEADWAY_KERNELS_DIR to a folder that it was fetched to".into())
}

fn long(cx: &CudaExec) -> Outcome {
    if let Some(why) = missing("FLASH_ATTN") {
        return Ok(why);
    }
    let backends = backends().map_err(text)?;
    let backend = backends.iter().find(|b| b.rules().name == "FLASH_ATTN");
    let backend = backend.ok_or_else(|| "FLASH_ATTN is not registered".to_owned())?;
    let config = SuiteConfig { requests: Some(LONG.to_vec()), every: 37, ..SuiteConfig::default() };
    let report = run_suite_with(&**backend, cx, &CudaMemory, &config);
    ensure(report.ok(), || report.to_string())?;
    Ok(report.to_string())
}

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const SIZE: usize = 128;
const PAGE: usize = 16;

/// Numbers between −1 and 1, rounded to bfloat16.
fn numbers(seed: u32, n: usize) -> Vec<bf16> {
    let mut x = seed;
    let mut next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((x >> 8) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..n).map(|_| next()).collect()
}

/// A row's softmax over some keys: outputs, and the log of the denominator.
fn attend(q: &[bf16], k: &[&[bf16]], v: &[&[bf16]], scale: f64) -> (Vec<f64>, f64) {
    let dot = |k: &&[bf16]| q.iter().zip(*k).map(|(a, b)| a.to_f64() * b.to_f64()).sum::<f64>() * scale;
    let scores: Vec<f64> = k.iter().map(dot).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
    let mut out = vec![0.0; SIZE];
    for (s, v) in scores.iter().zip(v) {
        let p = (s - most).exp() / sum;
        out.iter_mut().zip(*v).for_each(|(o, v)| *o += p * v.to_f64());
    }
    (out, most + sum.ln())
}

/// Two decodes of other lengths and a row of padding, by a layer with no window and by one with.
fn sums(cx: &CudaExec) -> Outcome {
    if let Some(why) = missing("FLASH_ATTN") {
        return Ok(why);
    }
    let lens = [3000usize, 77];
    let (reqs, stride) = (3, 3008 / PAGE);
    let spec = AttentionSpec::new(PAGE, KV_HEADS, SIZE, DType::BF16);
    let group = GroupInfo {
        max_num_reqs: reqs,
        max_num_tokens: 16,
        max_model_len: 3008,
        ..GroupInfo::new(KvCacheSpec::Full(spec), HEADS)
    };
    let plan = FlashAttnBuilder::plan(&group, &RuleBook::default(), &FlashAttnConfig {}).map_err(text)?;
    let mut builder = FlashAttnBuilder::new(cx, &group, &plan, &FlashAttnConfig {}).map_err(text)?;
    // Pages of the cache in the order that they come in; page 0 is nobody's.
    let pages: usize = 1 + lens.iter().map(|n| n.div_ceil(PAGE)).sum::<usize>();
    let width = PAGE * KV_HEADS * 2 * SIZE;
    let cache = numbers(3, pages * width);
    let memory = cx.alloc(pages * width * 2).map_err(text)?.ok_or("no device memory")?;
    cx.upload(&memory, 0, bytemuck::cast_slice(&cache));
    let mut buf = KvBuf::Dev(memory);
    let mut table = vec![0i32; reqs * stride];
    let mut next = 1;
    for (row, len) in table.chunks_mut(stride).zip(lens) {
        for p in &mut row[..len.div_ceil(PAGE)] {
            *p = next;
            next += 1;
        }
    }
    let ints = |x: &[i32]| {
        Persistent::new(cx, x.len()).map(|mut p| p.write_dual(cx, x.len(), |o| o.copy_from_slice(x)))
    };
    let starts: Dual<i32> = ints(&[0, 1, 2, 2]).map_err(text)?;
    let all = [lens[0] as i32, lens[1] as i32, 0];
    let held = ints(&all).map_err(text)?;
    let mut inputs = StepInputs::new(starts, held.dev().clone(), all.to_vec()).map_err(text)?;
    inputs.num_actual_tokens = reqs;
    let slots = Persistent::<i64>::new(cx, reqs).map_err(text)?.write(cx, reqs, |o| o.fill(-1));
    let table_on = ints(&table).map_err(text)?;
    let common = CommonAttentionMetadata::new(inputs.into(), table_on, stride, slots).map_err(text)?;
    let metadata = builder.build(cx, &common).map_err(text)?;
    let queries = numbers(9, reqs * HEADS * SIZE);
    let q = Tensor::from_slice(cx, &queries, &[reqs, HEADS, SIZE]).map_err(text)?;
    let none = Tensor::zeros(cx, DType::BF16, &[0, KV_HEADS, SIZE]).map_err(text)?;
    let mut worst = [0f64; 2];
    for window in [None, Some(100)] {
        let args = AttentionArgs {
            layer: AttnLayer(0),
            num_heads: HEADS,
            num_kv_heads: KV_HEADS,
            head_size: SIZE,
            head_size_v: SIZE,
            scale: 0.25,
            sliding_window: window,
            logit_soft_cap: None,
            alibi_slopes: None,
            sinks: None,
            dtype: DType::BF16,
            kv_cache_dtype: DType::BF16,
            k_scale: 1.0,
            v_scale: 1.0,
        };
        let layer = FlashAttnLayer::new(&args, &FlashAttnConfig {}).map_err(text)?;
        let mut out =
            Tensor::from_slice(cx, &numbers(1, reqs * HEADS * SIZE), &[reqs, HEADS, SIZE]).map_err(text)?;
        let mut lse = Tensor::zeros(cx, DType::F32, &[HEADS, reqs]).map_err(text)?;
        layer.fill_zero(cx, &mut out.view_mut()).map_err(text)?;
        let mut kv = KvMut {
            buf: &mut buf,
            offset: 0,
            block_stride: width * 2,
            page_bytes: width * 2,
            num_blocks: pages,
            block_size: PAGE,
            dtype: DType::BF16,
            layout: KvCacheLayout::LBNHC,
            shared: false,
        };
        let x = Qkv { q: q.view(), k: none.view(), v: none.view() };
        let to = Some(lse.view_mut());
        layer.forward_with_lse(cx, &x, &mut kv, &metadata, out.view_mut(), to).map_err(text)?;
        let found = cx.read_tensor(out.view()).map_err(text)?;
        let found: &[bf16] = bytemuck::cast_slice(&found);
        let sums = cx.read_tensor(lse.view()).map_err(text)?;
        let sums: Vec<f32> = bytemuck::pod_collect_to_vec(&sums);
        for (r, &len) in lens.iter().enumerate() {
            for h in 0..HEADS {
                let first = len - window.unwrap_or(len).min(len);
                let cell = |t: usize| {
                    let page = table[r * stride + t / PAGE] as usize;
                    let at = page * width + ((t % PAGE) * KV_HEADS + h * KV_HEADS / HEADS) * 2 * SIZE;
                    &cache[at..at + 2 * SIZE]
                };
                let k: Vec<_> = (first..len).map(|t| &cell(t)[..SIZE]).collect();
                let v: Vec<_> = (first..len).map(|t| &cell(t)[SIZE..]).collect();
                let row = (r * HEADS + h) * SIZE;
                let (wanted, sum) = attend(&queries[row..row + SIZE], &k, &v, 0.25);
                let apart = wanted.iter().zip(&found[row..]).map(|(w, f)| (w - f.to_f64()).abs());
                worst[0] = worst[0].max(apart.fold(0.0, f64::max));
                worst[1] = worst[1].max((sum - f64::from(sums[h * reqs + r])).abs());
            }
        }
        let padding = &found[2 * HEADS * SIZE..];
        ensure(padding.iter().all(|x| x.to_f32() == 0.0), || "padding that is not zeros".into())?;
    }
    ensure(worst[0] < 0.01 && worst[1] < 1e-3, || {
        format!("outputs {:e} and sums {:e} off", worst[0], worst[1])
    })?;
    Ok(format!("outputs within {:.1e}, sums within {:.1e}", worst[0], worst[1]))
}
