//! A layer with its cache and builder, and requests that run through it step by step. What a request holds at a
//! position depends on its seed alone, so that it can be put into other batches and cut otherwise.

use crate::{
    reference::{poisoned, read, rounded},
    text,
};
use headway_attention::{
    AttnLayer, CommonAttentionMetadata, GroupInfo, KvBuf, KvCacheLayout, KvCacheSpec, KvHandle, MambaSpec,
    MetadataBuilder, RuleBook, StateSpaceArgs, StateSpaceImpl, StepInputs,
    group::arith::mamba2_dims::Mamba2Dims,
};
use headway_cuda::{
    CudaExec, DeviceInfo, KernelSpec,
    backends::mamba2::{Mamba2Builder, Mamba2Config, Mamba2Layer, Mamba2Metadata},
    kernels::state_space::{StatePage, layer_specs},
};
use headway_tensor::{DType, Dual, Exec, Tensor, TensorRef, View};
use headway_testkit::{
    Rng,
    reference::state_space::{Mamba2Params, mamba2},
};
use std::sync::Arc;

/// Sizes and types of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    pub heads: usize,
    pub head_dim: usize,
    pub groups: usize,
    pub state: usize,
    pub conv_kernel: usize,
    pub chunk: usize,
    pub act: DType,
    pub conv: DType,
    pub ssm: DType,
    /// Elements before a row of the input, and after it: where they are multiples of 8, rows are aligned.
    pub gap: [usize; 2],
    pub batch_invariant: bool,
}

pub const SMALL: Shape = Shape {
    heads: 6,
    head_dim: 24,
    groups: 2,
    state: 40,
    conv_kernel: 4,
    chunk: 32,
    act: DType::F16,
    conv: DType::F16,
    ssm: DType::F32,
    gap: [3, 0],
    batch_invariant: false,
};

/// Blocks of the cache; the first is the null block.
pub const BLOCKS: usize = 12;

impl Shape {
    pub fn channels(&self) -> usize {
        self.heads * self.head_dim + 2 * self.groups * self.state
    }

    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    pub fn spec(&self) -> MambaSpec {
        let shapes =
            vec![vec![self.conv_kernel - 1, self.channels()], vec![self.heads, self.head_dim, self.state]];
        MambaSpec { chunk_size: Some(self.chunk), ..MambaSpec::new(4096, shapes, vec![self.conv, self.ssm]) }
    }

    pub fn group(&self) -> GroupInfo {
        GroupInfo {
            layers: vec![AttnLayer(0)],
            max_num_reqs: 16,
            max_num_tokens: 4096,
            max_model_len: 4096,
            batch_invariant: self.batch_invariant,
            ..GroupInfo::new(KvCacheSpec::Mamba(self.spec()), self.heads)
        }
    }

    pub fn params(&self, seed: u64) -> Mamba2Params {
        let mut rng = Rng::new(seed);
        let mut many = |n: usize, f: &dyn Fn(&mut Rng) -> f64| (0..n).map(|_| f(&mut rng) as f32).collect();
        Mamba2Params {
            heads: self.heads,
            head_dim: self.head_dim,
            groups: self.groups,
            state: self.state,
            conv_weight: many(self.channels() * self.conv_kernel, &|r| 0.5 * r.normal()),
            conv_bias: many(self.channels(), &|r| 0.2 * r.normal()),
            a: many(self.heads, &|r| -(0.3 + 8.0 * r.unit())),
            d: many(self.heads, &Rng::normal),
            dt_bias: many(self.heads, &|r| -2.0 + r.normal()),
            dt_limit: (1e-3, 2.0),
        }
    }

    pub fn specs(&self, info: &DeviceInfo) -> Result<Vec<KernelSpec>, String> {
        let dims = Mamba2Dims {
            heads: self.heads,
            head_dim: self.head_dim,
            groups: self.groups,
            state: self.state,
            conv_kernel: self.conv_kernel,
        };
        layer_specs(&StatePage::new(dims, self.conv, self.ssm)?, self.act, info.shared_per_block as usize)
            .map_err(text)
    }
}

/// One request of a step.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Seed of its contents.
    pub seed: u64,
    /// Tokens before this step.
    pub done: usize,
    /// New tokens.
    pub new: usize,
    /// Where its state is.
    pub block: i32,
    /// Whether it still prefills; a decode has one token.
    pub prefilling: bool,
}

pub fn prefill(seed: u64, done: usize, new: usize, block: i32) -> Turn {
    Turn { seed, done, new, block, prefilling: true }
}

pub fn decode(seed: u64, done: usize, block: i32) -> Turn {
    Turn { seed, done, new: 1, block, prefilling: false }
}

/// A layer, its cache (every byte 0xff, so NaN, at first) and its group's builder.
pub struct World<'a> {
    pub cx: &'a CudaExec,
    pub shape: Shape,
    pub params: Mamba2Params,
    pub builder: Mamba2Builder,
    pub layer: Mamba2Layer,
    pub handle: KvHandle,
    pub cache: KvBuf,
}

pub fn builder(cx: &CudaExec, group: &GroupInfo) -> Result<Mamba2Builder, String> {
    let plan = Mamba2Builder::plan(group, &RuleBook::default(), &Mamba2Config::default()).map_err(text)?;
    Mamba2Builder::new(cx, group, &plan, &Mamba2Config::default()).map_err(text)
}

pub fn layer(cx: &CudaExec, p: &Mamba2Params, shape: &Shape) -> Result<Mamba2Layer, String> {
    let taps = p.conv_weight.len() / p.conv_dim();
    let tensor = |v: &[f32], shape: &[usize]| Tensor::from_slice(cx, v, shape).map_err(text);
    let vector = |v: &[f32]| tensor(v, &[v.len()]);
    let conv_weight = tensor(&p.conv_weight, &[p.conv_dim(), taps])?;
    let (conv_bias, a, d, dt_bias) =
        (vector(&p.conv_bias)?, vector(&p.a)?, vector(&p.d)?, vector(&p.dt_bias)?);
    let args = StateSpaceArgs {
        layer: AttnLayer(0),
        num_heads: p.heads,
        head_dim: p.head_dim,
        n_groups: p.groups,
        state_size: p.state,
        conv_kernel: taps,
        chunk_size: shape.chunk,
        conv_weight: &conv_weight,
        conv_bias: Some(&conv_bias),
        a: &a,
        d: &d,
        dt_bias: &dt_bias,
        time_step_limit: p.dt_limit,
        dtype: shape.act,
    };
    Mamba2Layer::new(&args, &Mamba2Config::default()).map_err(text)
}

/// A step's common metadata; `padding` requests without tokens follow, and as many rows.
pub fn common(turns: &[Turn], padding: usize) -> Result<CommonAttentionMetadata, String> {
    let mut starts = vec![0];
    for t in turns {
        starts.push(starts[starts.len() - 1] + t.new as i32);
    }
    let mut lens: Vec<i32> = turns.iter().map(|t| (t.done + t.new) as i32).collect();
    let tokens = starts[turns.len()] as usize;
    starts.resize(starts.len() + padding, tokens as i32);
    lens.resize(lens.len() + padding, 0);
    let mut inputs =
        StepInputs::new(Dual::from_vec(starts), View::from_vec(lens.clone()), lens).map_err(text)?;
    let mut prefilling: Vec<bool> = turns.iter().map(|t| t.prefilling).collect();
    prefilling.resize(prefilling.len() + padding, false);
    inputs.is_prefilling = Some(prefilling);
    inputs.num_actual_tokens += padding;
    let mut blocks: Vec<i32> = turns.iter().map(|t| t.block).collect();
    blocks.resize(blocks.len() + padding, 0);
    let slots = View::from_vec(vec![-1; tokens + padding]);
    CommonAttentionMetadata::new(Arc::new(inputs), Dual::from_vec(blocks), 1, slots).map_err(text)
}

impl<'a> World<'a> {
    pub fn new(cx: &'a CudaExec, shape: Shape) -> Result<Self, String> {
        let params = shape.params(7);
        let page = shape.spec().state_bytes();
        // Bytes between pages belong to nobody. Aligned rows come with aligned pages.
        let aligned = shape.gap.iter().all(|g| g.is_multiple_of(8));
        let (offset, stride) = match aligned {
            true => (16, page.next_multiple_of(16) + 16),
            false => (4, page.next_multiple_of(4) + 4),
        };
        let bytes = vec![0xff; offset + BLOCKS * stride];
        let memory = cx.alloc(bytes.len()).map_err(text)?.ok_or("no device memory")?;
        cx.upload(&memory, 0, &bytes);
        let handle = KvHandle {
            buf: 0,
            offset,
            block_stride: stride,
            page_bytes: page,
            num_blocks: BLOCKS,
            block_size: 4096,
            dtype: DType::U8,
            layout: KvCacheLayout::LBNHC,
            shared: false,
        };
        Ok(Self {
            cx,
            builder: builder(cx, &shape.group())?,
            layer: layer(cx, &params, &shape)?,
            cache: KvBuf::Dev(memory),
            handle,
            params,
            shape,
        })
    }

    /// Inputs of a request's tokens, as the activations' type holds them.
    pub fn inputs(&self, seed: u64, tokens: std::ops::Range<usize>) -> Vec<f32> {
        let width = self.params.input_width();
        let row = |t: usize| {
            let mut rng = Rng::new(seed * 1_000_003 + t as u64);
            (0..width).map(move |_| rounded(rng.normal() as f32, self.shape.act))
        };
        tokens.flat_map(row).collect()
    }

    /// What the reference says of a request of so many tokens.
    pub fn reference(&self, seed: u64, tokens: usize) -> Vec<f64> {
        mamba2(&self.params, &self.inputs(seed, 0..tokens))
    }

    pub fn cache_bytes(&self) -> Result<Vec<u8>, String> {
        let KvBuf::Dev(memory) = &self.cache else { return Err("the cache is on the host".into()) };
        let mut bytes = vec![0; memory.bytes()];
        self.cx.read(memory, 0, &mut bytes).map_err(text)?;
        Ok(bytes)
    }

    /// Runs a step; `padding` rows of NaN follow. Outputs by turn, then the padding's.
    pub fn run(&mut self, turns: &[Turn], padding: usize) -> Result<Vec<Vec<f32>>, String> {
        let metadata = self.builder.build(self.cx, &common(turns, 0)?).map_err(text)?;
        self.run_with(&metadata, turns, padding)
    }

    /// The step's input: rows that are part of wider ones, as a projection leaves them.
    pub fn rows(&self, turns: &[Turn], padding: usize) -> Result<Tensor, String> {
        let width = self.params.input_width();
        let [before, after] = self.shape.gap;
        let wide = before + width + after;
        let mut rows: Vec<f32> = vec![];
        for t in turns {
            for row in self.inputs(t.seed, t.done..t.done + t.new).chunks_exact(width) {
                rows.extend(vec![9.0; before]);
                rows.extend(row);
                rows.extend(vec![9.0; after]);
            }
        }
        rows.resize(rows.len() + padding * wide, f32::NAN);
        Ok(crate::reference::tensor(self.cx, self.shape.act, &rows, &[rows.len() / wide, wide])?.0)
    }

    pub fn view<'t>(&self, rows: &'t Tensor) -> Result<TensorRef<'t>, String> {
        let first = self.shape.gap[0];
        rows.view().cols(first..first + self.params.input_width()).map_err(text)
    }

    pub fn run_with(
        &mut self,
        metadata: &Mamba2Metadata,
        turns: &[Turn],
        padding: usize,
    ) -> Result<Vec<Vec<f32>>, String> {
        let before = self.cache_bytes()?;
        let rows = self.rows(turns, padding)?;
        let inner = self.shape.inner();
        let mut out = poisoned(self.cx, self.shape.act, &[rows.shape()[0], inner])?;
        let x = self.view(&rows)?;
        let state = &mut self.handle.on(&mut self.cache);
        self.layer.forward(self.cx, x, state, metadata, out.view_mut()).map_err(text)?;
        let out = read(self.cx, &out)?;
        let mut rest = &out[..];
        let mut parts = vec![];
        for n in turns.iter().map(|t| t.new).chain([padding]) {
            let (part, after) = rest.split_at(n * inner);
            parts.push(part.to_vec());
            rest = after;
        }
        let blocks: Vec<usize> = turns.iter().map(|t| t.block as usize).collect();
        self.others_are_untouched(&before, &blocks)?;
        Ok(parts)
    }

    /// Every byte is as before but for the pages of these blocks.
    pub fn others_are_untouched(&self, before: &[u8], blocks: &[usize]) -> Result<(), String> {
        let h = &self.handle;
        let mut now = self.cache_bytes()?;
        for b in blocks {
            let page = h.offset + b * h.block_stride..h.offset + b * h.block_stride + h.page_bytes;
            now[page.clone()].copy_from_slice(&before[page]);
        }
        match now.iter().zip(before).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => Err(format!("byte {at} of the cache is nobody's in this step and was written")),
        }
    }
}

/// Differences: the largest, as a share of its value and the values' root mean square together; and their root mean
/// square as a share of the values'.
pub fn error(found: &[f32], exact: &[f64]) -> Result<(f64, f64), String> {
    if found.len() != exact.len() {
        return Err(format!("{} values, {} expected", found.len(), exact.len()));
    }
    let mean = |sum: f64| (sum / exact.len().max(1) as f64).sqrt();
    let scale = mean(exact.iter().map(|x| x * x).sum()).max(1e-6);
    let off = || found.iter().zip(exact).map(|(f, e)| f64::from(*f) - e);
    if found.iter().any(|f| !f.is_finite()) {
        return Ok((f64::INFINITY, f64::INFINITY));
    }
    let each = off().zip(exact).map(|(d, e)| d.abs() / (scale + e.abs()));
    Ok((each.fold(0.0, f64::max), mean(off().map(|d| d * d).sum()) / scale))
}
