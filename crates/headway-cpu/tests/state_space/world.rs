//! A layer with its cache and builder, and requests that run through it step by step. What a request
//! holds at a position depends on its seed alone, so it can be put into other batches and cut otherwise.

use headway_attention::{
    AttnLayer, CommonAttentionMetadata, GroupInfo, KvBuf, KvCacheLayout, KvCacheSpec, KvHandle, MambaSpec,
    MetadataBuilder, Result, RuleBook, StateSpaceArgs, StateSpaceImpl, StepInputs,
};
use headway_cpu::{
    CpuExec, CpuOptions, Isa,
    backends::mamba2::{Mamba2Builder, Mamba2Config, Mamba2Layer, Mamba2Metadata},
};
use headway_tensor::{DType, Dual, HostBuf, Tensor, TensorMut, TensorRef, View};
use headway_testkit::{
    Rng,
    reference::state_space::{Mamba2Params, mamba2},
};
use std::sync::Arc;

/// Sizes and types of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub heads: usize,
    pub head_dim: usize,
    pub groups: usize,
    pub state: usize,
    pub conv_kernel: usize,
    pub chunk: usize,
    pub conv: DType,
    pub ssm: DType,
}

impl Shape {
    pub fn small() -> Self {
        Self {
            heads: 6,
            head_dim: 20,
            groups: 2,
            state: 24,
            conv_kernel: 4,
            chunk: 32,
            conv: DType::F32,
            ssm: DType::F32,
        }
    }

    pub fn spec(&self) -> MambaSpec {
        let conv_dim = self.heads * self.head_dim + 2 * self.groups * self.state;
        let shapes = vec![vec![self.conv_kernel - 1, conv_dim], vec![self.heads, self.head_dim, self.state]];
        MambaSpec { chunk_size: Some(self.chunk), ..MambaSpec::new(4096, shapes, vec![self.conv, self.ssm]) }
    }

    pub fn group(&self) -> GroupInfo {
        GroupInfo {
            layers: vec![AttnLayer(0)],
            max_num_reqs: 16,
            max_num_tokens: 1024,
            max_model_len: 4096,
            ..GroupInfo::new(KvCacheSpec::Mamba(self.spec()), self.heads)
        }
    }

    pub fn params(&self, seed: u64) -> Mamba2Params {
        let mut rng = Rng::new(seed);
        let conv_dim = self.heads * self.head_dim + 2 * self.groups * self.state;
        let mut many = |n: usize, f: &dyn Fn(&mut Rng) -> f64| (0..n).map(|_| f(&mut rng) as f32).collect();
        Mamba2Params {
            heads: self.heads,
            head_dim: self.head_dim,
            groups: self.groups,
            state: self.state,
            conv_weight: many(conv_dim * self.conv_kernel, &|r| 0.5 * r.normal()),
            conv_bias: many(conv_dim, &|r| 0.2 * r.normal()),
            a: many(self.heads, &|r| -(0.3 + 8.0 * r.unit())),
            d: many(self.heads, &Rng::normal),
            dt_bias: many(self.heads, &|r| -2.0 + r.normal()),
            dt_limit: (1e-3, 2.0),
        }
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

/// A layer, its cache (every byte 0xff, so NaN, at first) and its group's builder.
pub struct World {
    pub shape: Shape,
    pub params: Mamba2Params,
    pub cx: CpuExec,
    pub builder: Mamba2Builder,
    pub layer: Mamba2Layer,
    handle: KvHandle,
    cache: KvBuf,
}

pub const BLOCKS: usize = 12;

pub fn layer(p: &Mamba2Params, cx: &CpuExec) -> Result<Mamba2Layer> {
    let channels = p.conv_dim();
    let taps = p.conv_weight.len() / channels;
    let vector = |v: &[f32]| Tensor::from_slice(cx, v, &[v.len()]);
    let (conv_weight, conv_bias) =
        (Tensor::from_slice(cx, &p.conv_weight, &[channels, taps])?, vector(&p.conv_bias)?);
    let (a, d, dt_bias) = (vector(&p.a)?, vector(&p.d)?, vector(&p.dt_bias)?);
    let args = StateSpaceArgs {
        layer: AttnLayer(0),
        num_heads: p.heads,
        head_dim: p.head_dim,
        n_groups: p.groups,
        state_size: p.state,
        conv_kernel: taps,
        chunk_size: 32,
        conv_weight: &conv_weight,
        conv_bias: Some(&conv_bias),
        a: &a,
        d: &d,
        dt_bias: &dt_bias,
        time_step_limit: p.dt_limit,
        dtype: DType::F32,
    };
    Mamba2Layer::new(&args, &Mamba2Config::default())
}

pub fn builder(cx: &CpuExec, group: &GroupInfo) -> Result<Mamba2Builder> {
    let plan = Mamba2Builder::plan(group, &RuleBook::default(), &Mamba2Config::default())?;
    Mamba2Builder::new(cx, group, &plan, &Mamba2Config::default())
}

/// A step's common metadata.
pub fn common(turns: &[Turn]) -> CommonAttentionMetadata {
    let mut starts = vec![0];
    for t in turns {
        starts.push(starts[starts.len() - 1] + t.new as i32);
    }
    let lens: Vec<i32> = turns.iter().map(|t| (t.done + t.new) as i32).collect();
    let tokens = starts[turns.len()] as usize;
    let mut inputs = StepInputs::new(Dual::from_vec(starts), View::from_vec(lens.clone()), lens).unwrap();
    inputs.is_prefilling = Some(turns.iter().map(|t| t.prefilling).collect());
    let table = Dual::from_vec(turns.iter().map(|t| t.block).collect());
    CommonAttentionMetadata::new(Arc::new(inputs), table, 1, View::from_vec(vec![-1; tokens])).unwrap()
}

impl World {
    pub fn new(shape: Shape, options: CpuOptions) -> Self {
        let cx = CpuExec::new(options).unwrap();
        let params = shape.params(7);
        let page = shape.spec().state_bytes();
        // Pages that begin at odd bytes, with bytes between them that belong to nobody.
        let stride = page + 5;
        let mut cache = HostBuf::zeroed(3 + BLOCKS * stride).unwrap();
        cache.as_bytes_mut().fill(0xff);
        let handle = KvHandle {
            buf: 0,
            offset: 3,
            block_stride: stride,
            page_bytes: page,
            num_blocks: BLOCKS,
            block_size: 4096,
            dtype: DType::U8,
            layout: KvCacheLayout::LBHNC,
            shared: false,
        };
        Self {
            builder: builder(&cx, &shape.group()).unwrap(),
            layer: layer(&params, &cx).unwrap(),
            cache: KvBuf::Host(cache),
            handle,
            shape,
            params,
            cx,
        }
    }

    pub fn on(shape: Shape, isa: Isa) -> Self {
        Self::new(shape, CpuOptions { isa: Some(isa), threads: Some(3), ..CpuOptions::default() })
    }

    /// Inputs of a request's tokens.
    pub fn inputs(&self, seed: u64, tokens: std::ops::Range<usize>) -> Vec<f32> {
        let width = self.params.input_width();
        let row = |t: usize| {
            let mut rng = Rng::new(seed * 1_000_003 + t as u64);
            (0..width).map(move |_| rng.normal() as f32)
        };
        tokens.flat_map(row).collect()
    }

    /// What the reference says of a request of so many tokens.
    pub fn reference(&self, seed: u64, tokens: usize) -> Vec<f64> {
        mamba2(&self.params, &self.inputs(seed, 0..tokens))
    }

    pub fn inner(&self) -> usize {
        self.shape.heads * self.shape.head_dim
    }

    /// Runs a step; `padding` rows of NaN follow. Outputs by turn, then the padding's.
    pub fn run(&mut self, turns: &[Turn], padding: usize) -> Result<Vec<Vec<f32>>> {
        let metadata = self.builder.build(&self.cx, &common(turns))?;
        self.run_with(&metadata, turns, padding)
    }

    pub fn run_with(
        &mut self,
        metadata: &Mamba2Metadata,
        turns: &[Turn],
        padding: usize,
    ) -> Result<Vec<Vec<f32>>> {
        let width = self.params.input_width();
        // Rows that are part of wider ones, as a projection leaves them.
        let wide = width + 3;
        let mut rows: Vec<f32> = vec![];
        for t in turns {
            for row in self.inputs(t.seed, t.done..t.done + t.new).chunks_exact(width) {
                rows.extend([9.0; 3]);
                rows.extend(row);
            }
        }
        rows.resize(rows.len() + padding * wide, f32::NAN);
        let tokens = rows.len() / wide;
        let inner = self.inner();
        let mut out = vec![f32::NAN; tokens * inner];
        let x = TensorRef::from_host(&rows, &[tokens, wide])?.cols(3..wide)?;
        let y = TensorMut::from_host(&mut out, &[tokens, inner])?;
        self.layer.forward(&self.cx, x, &mut self.handle.on(&mut self.cache), metadata, y)?;
        let mut rest = &out[..];
        let mut parts = vec![];
        for n in turns.iter().map(|t| t.new).chain([padding]) {
            let (part, after) = rest.split_at(n * inner);
            parts.push(part.to_vec());
            rest = after;
        }
        self.nobody_s_bytes_are_untouched();
        Ok(parts)
    }

    fn nobody_s_bytes_are_untouched(&mut self) {
        let h = self.handle.clone();
        let bytes = self.handle.on(&mut self.cache).host_bytes().unwrap().to_vec();
        assert_eq!(bytes[..3], [0xff; 3]);
        for b in 0..BLOCKS {
            let end = h.offset + b * h.block_stride + h.page_bytes;
            assert_eq!(bytes[end..(end + 5).min(bytes.len())], [0xff; 5][..(bytes.len() - end).min(5)]);
        }
        assert!(
            bytes[h.offset..h.offset + h.page_bytes].iter().all(|b| *b == 0xff),
            "the null block was written"
        );
    }
}

/// The largest difference, as a share of the largest value.
pub fn error(found: &[f32], exact: &[f64]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let scale = exact.iter().fold(1e-3, |m: f64, x| m.max(x.abs()));
    let worst = found.iter().zip(exact).map(|(f, e)| (f64::from(*f) - e).abs());
    // NaN is the worst of all.
    worst.fold(0.0, |m: f64, d| if d <= m { m } else { d }) / scale
}
