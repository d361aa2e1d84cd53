//! Graphs of decodes of latent attention: recorded once, replayed on other lengths, fewer requests and padding, held
//! against the same steps run without; and the backends' answers against each other.

use super::{
    Outcome,
    attention::{CudaMemory, backends, without_modules, without_triton},
    ensure, flash_attn, text,
};
use headway_attention::{
    AttentionError, AttentionGroup, AttnLayer, CommonAttentionMetadata, DynBackend, GroupInfo, KvBuf,
    KvCacheSpec, KvHandle, LayerArgs, LayerKernel, MlaArgs, Result, StepEntry, StepInputs, StepMetadata,
    build_step, group::kv::layout::KvCacheLayout, group::kv::spec::AttentionSpec, process::rules::LatentDims,
};
use headway_cuda::CudaExec;
use headway_tensor::{DType, Exec, Persistent, Tensor, Weight, WeightType};
use headway_testkit::{rng::Rng, suite::HostAccess};
use std::sync::Arc;

const DIMS: LatentDims = LatentDims {
    qk_nope_head_dim: 16,
    qk_rope_head_dim: 64,
    kv_lora_rank: 512,
    v_head_dim: 16,
    index_topk: None,
};
const WIDTH: usize = 576;
// All that `FLASHMLA` takes.
const PAGE: usize = 64;
/// Requests of a recorded step.
const REQS: usize = 8;
/// Blocks of the longest request.
const STRIDE: usize = 24;
/// Lengths of the steps that are replayed: short, long, divided, alone, and short again.
const STEPS: [&[i32]; 5] =
    [&[5, 16, 17], &[1500, 3, 800, 64, 65, 1, 1033, 257], &[1531], &[700, 701], &[9; 8]];

pub fn run(cx: &CudaExec) -> Outcome {
    let mut said = vec![];
    for (heads, new) in [(16, 1), (128, 1), (16, 3), (64, 2), (128, 3)] {
        let mut answers: Vec<(String, Vec<Vec<f32>>)> = vec![];
        for backend in backends().map_err(text)?.iter().filter(|b| b.rules().name.ends_with("MLA")) {
            let name = backend.rules().name.to_string();
            if name == "FLASHMLA"
                && let Some(why) =
                    (new > 1).then(|| "no drafts".into()).or_else(|| flash_attn::missing(&name))
            {
                said.push(format!("{name}: {why}"));
                continue;
            }
            if name == "FLASHINFER_MLA"
                && let Some(why) = without_modules(&name)?
            {
                said.push(why);
                continue;
            }
            if name == "TRITON_MLA"
                && let Some(why) = without_triton(&name)?
            {
                said.push(why);
                continue;
            }
            let of = format!("{name}, {heads} heads, {new} new tokens");
            answers.push((name, replays(cx, &**backend, heads, new).map_err(|e| format!("{of}: {e}"))?));
        }
        let mut most = 0f32;
        for pair in answers.windows(2) {
            for (a, b) in pair[0].1.iter().zip(&pair[1].1) {
                most = most.max(apart(a, b)?);
            }
        }
        ensure(most < 0.1, || format!("{heads} heads, {new} new tokens: answers are {most} apart"))?;
        let names: Vec<&str> = answers.iter().map(|a| a.0.as_str()).collect();
        said.push(format!("{heads} heads, {new} new tokens: {}, apart by {most:.4}", names.join(" and ")));
    }
    Ok(said.join("; "))
}

/// The largest difference over the root mean square.
fn apart(a: &[f32], b: &[f32]) -> std::result::Result<f32, String> {
    ensure(a.len() == b.len() && !a.is_empty(), || format!("{} numbers against {}", a.len(), b.len()))?;
    let mean = (a.iter().map(|x| x * x).sum::<f32>() / a.len() as f32).sqrt();
    ensure(mean > 1e-3, || "answers are zeros".into())?;
    let worst = a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
    Ok(worst / mean)
}

fn bf16(n: usize, seed: u64, spread: f64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    (0..n).flat_map(|_| half::bf16::from_f64(rng.normal() * spread).to_le_bytes()).collect()
}

/// A layer, its builder, and the buffers of steps.
struct Bed<'a> {
    cx: &'a CudaExec,
    groups: Vec<AttentionGroup>,
    layer: LayerKernel,
    handle: KvHandle,
    cache: KvBuf,
    q: Tensor,
    latent: Tensor,
    out: Tensor,
    starts: Persistent<i32>,
    lens: Persistent<i32>,
    table: Persistent<i32>,
    slots: Persistent<i64>,
    step: StepMetadata,
    new: usize,
}

fn uploaded(cx: &CudaExec, shape: &[usize], seed: u64) -> Result<Tensor> {
    let tensor = Tensor::zeros(cx, DType::BF16, shape)?;
    if let Some(memory) = tensor.device_mem() {
        cx.upload(memory, 0, &bf16(shape.iter().product(), seed, 1.0));
    }
    Ok(tensor)
}

impl<'a> Bed<'a> {
    fn new(cx: &'a CudaExec, backend: &dyn DynBackend, heads: usize, new: usize) -> Result<Self> {
        let spec = AttentionSpec { head_size_v: 0, ..AttentionSpec::new(PAGE, 1, WIDTH, DType::BF16) };
        let (page, rows, num_blocks) = (spec.page_size_bytes(), REQS * new, 1 + REQS * STRIDE);
        let layout = KvCacheLayout::LBNHC;
        let info = GroupInfo {
            latent: Some(DIMS),
            layers: vec![AttnLayer(0)],
            layout,
            max_num_reqs: REQS,
            max_num_tokens: rows,
            max_model_len: STRIDE * PAGE,
            num_speculative_tokens: new - 1,
            ..GroupInfo::new(KvCacheSpec::Mla(spec), heads)
        };
        let config = backend.parse_config(None)?;
        let shape = vec![heads * (DIMS.qk_nope_head_dim + DIMS.v_head_dim), DIMS.kv_lora_rank];
        let bytes = bf16(shape.iter().product(), 3, (DIMS.kv_lora_rank as f64).powf(-0.5));
        let weight =
            Weight::new("kv_b_proj", WeightType::BF16, shape, headway_tensor::SharedBytes::new(bytes))
                .map_err(|e| AttentionError::Inputs(e.to_string()))?;
        let kv_b_proj = CudaMemory.load_linear(cx, weight, DType::BF16)?;
        let args = MlaArgs {
            layer: AttnLayer(0),
            num_heads: heads,
            kv_lora_rank: DIMS.kv_lora_rank,
            qk_nope_head_dim: DIMS.qk_nope_head_dim,
            qk_rope_head_dim: DIMS.qk_rope_head_dim,
            v_head_dim: DIMS.v_head_dim,
            scale: 0.1,
            kv_b_proj: &kv_b_proj,
            dtype: DType::BF16,
            kv_cache_dtype: DType::BF16,
            kv_scale: 1.0,
        };
        Ok(Self {
            cx,
            groups: vec![AttentionGroup::new(backend, cx, 0, info, &config, 1, None)?],
            layer: backend.layer(&LayerArgs::Mla(args), &config)?,
            handle: KvHandle {
                buf: 0,
                offset: 0,
                block_stride: page,
                page_bytes: page,
                num_blocks,
                block_size: PAGE,
                dtype: DType::BF16,
                layout,
                // What is new lies in the cache already.
                shared: true,
            },
            cache: CudaMemory.new_cache(cx, &bf16(num_blocks * PAGE * WIDTH, 4, 0.5))?,
            q: uploaded(cx, &[rows, heads, DIMS.qk_nope_head_dim + DIMS.qk_rope_head_dim], 5)?,
            latent: uploaded(cx, &[rows, WIDTH], 6)?,
            out: Tensor::zeros(cx, DType::BF16, &[rows, heads * DIMS.v_head_dim])?,
            starts: Persistent::new(cx, REQS + 1)?,
            lens: Persistent::new(cx, REQS)?,
            table: Persistent::new(cx, REQS * STRIDE)?,
            slots: Persistent::new(cx, rows)?,
            step: StepMetadata::new(Arc::from([0u16].as_slice())),
            new,
        })
    }

    /// Metadata of requests of these lengths, padded to the recorded step.
    fn build(&mut self, lens: &[i32], capture: bool) -> Result<StepEntry> {
        let (cx, new) = (self.cx, self.new as i32);
        self.step.clear();
        let start = |r: usize| new * r.min(lens.len()) as i32;
        let starts = self.starts.write_dual(cx, REQS + 1, |to| {
            to.iter_mut().enumerate().for_each(|(r, to)| *to = start(r));
        });
        let mut all = vec![0; REQS];
        all[..lens.len()].copy_from_slice(lens);
        let mut inputs =
            StepInputs::new(starts, self.lens.write(cx, REQS, |to| to.copy_from_slice(&all)), all.clone())?;
        inputs.num_actual_tokens = REQS * self.new;
        let table = self.table.write_dual(cx, REQS * STRIDE, |to| {
            to.fill(0);
            for (r, &len) in lens.iter().enumerate() {
                let pages = (len as usize).div_ceil(PAGE);
                // Scattered: 5 has no factor in common with the number of blocks.
                let block = |i: usize| 1 + ((r * STRIDE + i) * 5 % (REQS * STRIDE)) as i32;
                to[r * STRIDE..][..pages].iter_mut().enumerate().for_each(|(i, to)| *to = block(i));
            }
        });
        let slots = self.slots.write(cx, REQS * self.new, |to| to.fill(-1));
        let common = CommonAttentionMetadata::new(Arc::new(inputs), table, STRIDE, slots)?;
        build_step(&mut self.groups, cx, &[common], 0, capture, &mut self.step)?;
        Ok(self.step.layer(AttnLayer(0))?.clone())
    }

    fn call(&mut self, entry: &StepEntry) -> Result<()> {
        let LayerKernel::Mla(layer) = &self.layer else {
            return Err(AttentionError::Inputs("no layer of latent attention".into()));
        };
        let cache = &mut self.handle.on(&mut self.cache);
        layer.run(self.cx, self.q.view(), self.latent.view(), cache, entry, self.out.view_mut())
    }

    /// The output, and the same with a number in every place that a later call must overwrite.
    fn take(&mut self) -> Result<Vec<f32>> {
        let bytes = self.cx.read_tensor(self.out.view())?;
        let out = bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32());
        let out = out.collect();
        if let Some(memory) = self.out.device_mem() {
            self.cx.upload(memory, 0, &half::bf16::from_f32(7.0).to_le_bytes().repeat(bytes.len() / 2));
        }
        Ok(out)
    }
}

/// Answers of every step, the same replayed as without a graph.
fn replays(
    cx: &CudaExec,
    backend: &dyn DynBackend,
    heads: usize,
    new: usize,
) -> std::result::Result<Vec<Vec<f32>>, String> {
    let mut bed = Bed::new(cx, backend, heads, new).map_err(text)?;
    let idle = bed.build(&[new as i32; REQS], true).map_err(text)?;
    bed.call(&idle).map_err(text)?;
    let ((), graph) = cx
        .capture(|| bed.call(&idle).map_err(|e| headway_cuda::CudaError::Argument(e.to_string())))
        .map_err(text)?;
    let frozen = idle.frozen();
    drop(idle);
    let mut answers = vec![];
    for lens in STEPS {
        // At least as many keys as new tokens.
        let lens: Vec<i32> = lens.iter().map(|&len| len.max(new as i32)).collect();
        let entry = bed.build(&lens, false).map_err(text)?;
        ensure(entry.frozen() == frozen, || format!("lengths {lens:?}: a graph can't hold this step"))?;
        bed.take().map_err(text)?;
        graph.launch().map_err(text)?;
        let replayed = bed.take().map_err(text)?;
        bed.call(&entry).map_err(text)?;
        let plain = bed.take().map_err(text)?;
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        ensure(bits(&replayed) == bits(&plain), || format!("lengths {lens:?}: a replay gives other bits"))?;
        let live = lens.len() * new * heads * DIMS.v_head_dim;
        ensure(plain[live..].iter().all(|x| *x == 0.0), || format!("lengths {lens:?}: padding is not zero"))?;
        answers.push(plain[..live].to_vec());
    }
    Ok(answers)
}
