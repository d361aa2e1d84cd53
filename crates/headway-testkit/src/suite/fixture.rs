//! A backend set up for one cell: builder, layer, cache and step buffers, as an engine would have
//! them. The contract's structs are built here and nowhere else in the suite.

use super::{
    batch::{K_SCALE, Step, V_SCALE, World},
    cell::{Cell, NonCausal},
    host::HostAccess,
};
use half::{bf16, f16};
use headway_attention::{
    AttentionArgs, AttentionError, AttentionGroup, AttnLayer, CommonAttentionMetadata, DynBackend,
    ErasedConfig, GroupInfo, KvBuf, KvCacheSpec, KvHandle, LayerArgs, LayerKernel, MlaArgs, Qkv, Result,
    StepEntry, StepInputs, StepMetadata, build_step, group::kv::spec::AttentionSpec,
    process::rules::LatentDims, step::common::Causal,
};
use headway_tensor::{DType, Exec, Persistent, Tensor, View, Weight};
use std::sync::Arc;

/// What output holds before a run: large, and exact in every dtype.
pub const MARKER: f32 = 12288.0;
/// Rows after the step's own, which must keep the marker.
const GUARD_ROWS: usize = 2;

/// What a run left in its output.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// `[live tokens, num_heads, head_size_v]`.
    pub live: Vec<f64>,
    /// Rows of padding tokens.
    pub padding: Vec<f64>,
    /// Rows past the step's own.
    pub guard: Vec<f64>,
    /// Requests that took the decodes' path.
    pub decodes: usize,
}

/// The suite's tools for one backend.
#[derive(Clone, Copy)]
pub struct Tools<'a> {
    /// The backend under test.
    pub backend: &'a dyn DynBackend,
    /// What it runs on.
    pub exec: &'a dyn Exec,
    /// How bytes get to and from it.
    pub host: &'a dyn HostAccess,
    /// Its configuration.
    pub config: &'a ErasedConfig,
}

/// Step buffers that live as long as the model.
struct Buffers {
    query_start_loc: Persistent<i32>,
    seq_lens: Persistent<i32>,
    block_table: Persistent<i32>,
    slots: Persistent<i64>,
    positions: Persistent<i32>,
    causal: Persistent<u8>,
    prefixes: Persistent<i32>,
}

/// A backend set up for one cell.
pub struct Fixture<'a> {
    tools: Tools<'a>,
    cell: Cell,
    layer: LayerKernel,
    groups: Vec<AttentionGroup>,
    buffers: Buffers,
    metadata: StepMetadata,
    cache: KvBuf,
    place: Place,
    stride: usize,
}

/// Where the layer's blocks lie in the buffer, in bytes, as the kernel counts them.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Before block 0.
    pub offset: usize,
    /// From one block to the next.
    pub block_stride: usize,
    /// Of one block.
    pub page_bytes: usize,
    /// Blocks.
    pub num_blocks: usize,
}

impl Place {
    /// The pages lie between others' wherever one stride can say so: there a page of another layer
    /// stands before each one.
    fn new(cell: &Cell, spec: &AttentionSpec, manager_blocks: usize) -> Self {
        let factor = cell.block_size / cell.kernel_block_size;
        let page = spec.page_size_bytes() / factor;
        let gap = if factor == 1 { page } else { 0 };
        Self { offset: page, block_stride: page + gap, page_bytes: page, num_blocks: manager_blocks * factor }
    }

    fn bytes(&self) -> usize {
        self.offset + self.num_blocks * self.block_stride
    }

    /// Whether a byte belongs to a page of one of these blocks of the manager (`factor` kernel blocks
    /// each).
    pub fn page_of(&self, byte: usize, factor: usize) -> Option<usize> {
        let from = byte.checked_sub(self.offset)?;
        (from % self.block_stride < self.page_bytes).then_some(from / self.block_stride / factor)
    }
}

fn spec(cell: &Cell) -> Result<AttentionSpec> {
    let dtype = cell.kv_element().ok_or_else(|| {
        AttentionError::KvCache(format!("KV cache dtype {} has no element type", cell.kv_cache_dtype))
    })?;
    Ok(AttentionSpec {
        head_size_v: if cell.latent.is_some() { 0 } else { cell.head_size_v },
        ..AttentionSpec::new(cell.block_size, cell.num_kv_heads, cell.head_size, dtype)
    })
}

fn group_info(cell: &Cell, world: &World, spec: AttentionSpec) -> GroupInfo {
    // As a model's groups are: a builder may plan by the window that its layers have.
    let spec = match (cell.latent, cell.features.rswa, cell.features.window) {
        (Some(_), ..) => KvCacheSpec::Mla(spec),
        (None, Some(rswa_window), _) => KvCacheSpec::Rswa { attention: spec, rswa_window },
        (None, None, Some(sliding_window)) => KvCacheSpec::SlidingWindow { attention: spec, sliding_window },
        (None, None, None) => KvCacheSpec::Full(spec),
    };
    let reqs = 4 + 2 * world.reqs.len();
    GroupInfo {
        layout: cell.layout.unwrap_or_default(),
        kernel_block_size: cell.kernel_block_size,
        layers: vec![AttnLayer(0)],
        max_num_reqs: reqs,
        max_num_tokens: 16 + world.reqs.iter().map(|r| r.kv_len).sum::<usize>(),
        max_model_len: world.stride * cell.block_size,
        batch_invariant: cell.batch_invariant,
        latent: cell.latent,
        num_speculative_tokens: cell.drafts,
        ..GroupInfo::new(spec, cell.num_heads)
    }
}

impl<'a> Fixture<'a> {
    /// Builds group, layer and a cache full of `poison`.
    ///
    /// # Errors
    /// The backend's own; a backend of a kind that the suite doesn't run.
    pub fn new(tools: Tools<'a>, world: &World, poison: u8) -> Result<Self> {
        let cell = world.cell.clone();
        let spec = spec(&cell)?;
        let place = Place::new(&cell, &spec, world.num_blocks);
        let info = group_info(&cell, world, spec);
        let (reqs, tokens) = (info.max_num_reqs, info.max_num_tokens);
        let exec = tools.exec;
        let buffers = Buffers {
            query_start_loc: Persistent::new(exec, reqs + 1)?,
            seq_lens: Persistent::new(exec, reqs)?,
            block_table: Persistent::new(exec, reqs * world.stride)?,
            slots: Persistent::new(exec, tokens)?,
            positions: Persistent::new(exec, tokens)?,
            causal: Persistent::new(exec, reqs)?,
            prefixes: Persistent::new(exec, reqs)?,
        };
        Ok(Self {
            layer: layer(tools, world)?,
            groups: vec![AttentionGroup::new(tools.backend, exec, 0, info, tools.config, 1, None)?],
            buffers,
            metadata: StepMetadata::new(Arc::from([0u16].as_slice())),
            cache: tools.host.new_cache(exec, &vec![poison; place.bytes()])?,
            place,
            stride: world.stride,
            tools,
            cell,
        })
    }

    /// Replaces the builder by a new one.
    ///
    /// # Errors
    /// The builder's own.
    pub fn renew_builder(&mut self) -> Result<()> {
        let info = self.groups[0].info().clone();
        self.metadata.clear();
        let (t, config) = (self.tools, self.tools.config);
        self.groups = vec![AttentionGroup::new(t.backend, t.exec, 0, info, config, 1, None)?];
        Ok(())
    }

    /// Whether the layer is latent attention.
    pub fn is_latent(&self) -> bool {
        self.cell.latent.is_some()
    }

    /// Where the layer's pages lie.
    pub fn place(&self) -> Place {
        self.place
    }

    /// All bytes of the cache.
    ///
    /// # Errors
    /// The host access's own.
    pub fn cache_bytes(&self) -> Result<Vec<u8>> {
        self.tools.host.read_cache(self.tools.exec, &self.cache)
    }

    /// Replaces the cache's bytes.
    ///
    /// # Errors
    /// The host access's own.
    pub fn set_cache(&mut self, bytes: &[u8]) -> Result<()> {
        self.cache = self.tools.host.new_cache(self.tools.exec, bytes)?;
        Ok(())
    }

    /// Builds a step's metadata and runs the layer. `shared`: the layer reads another layer's cache.
    ///
    /// # Errors
    /// The backend's own.
    pub fn run(&mut self, step: &Step, shared: bool) -> Result<Output> {
        let common = self.common(step)?;
        build_step(&mut self.groups, self.tools.exec, &[common], 0, false, &mut self.metadata)?;
        let entry = self.metadata.layer(AttnLayer(0))?.clone();
        self.call(step, &entry, shared)
    }

    /// Runs a step whose metadata comes from another block table by `update_block_table`.
    ///
    /// # Errors
    /// The backend's own.
    pub fn run_with_swapped_table(&mut self, step: &Step, first_table: &[i32]) -> Result<Output> {
        let info = self.groups[0].info().clone();
        let t = self.tools;
        self.groups.push(AttentionGroup::new(t.backend, t.exec, 1, info, t.config, 1, Some(0))?);
        let own = self.common(step)?;
        let first = CommonAttentionMetadata {
            block_table: headway_tensor::Dual::from_vec(first_table.to_vec()),
            ..own.clone()
        };
        build_step(&mut self.groups, t.exec, &[first, own], 0, false, &mut self.metadata)?;
        let entry = self.metadata.entries().get(1).cloned();
        self.groups.truncate(1);
        let entry = entry.ok_or_else(|| AttentionError::Inputs("no entry for the second group".into()))?;
        self.call(step, &entry, false)
    }

    /// Runs the layer without metadata.
    ///
    /// # Errors
    /// The backend's own.
    pub fn profile_run(&mut self, step: &Step) -> Result<Output> {
        self.call(step, &StepEntry::profile_run(step.padded_tokens()), false)
    }

    fn common(&mut self, step: &Step) -> Result<CommonAttentionMetadata> {
        self.metadata.clear();
        let (exec, b) = (self.tools.exec, &mut self.buffers);
        let reqs = step.reqs.len();
        let seq_lens = b.seq_lens.write(exec, reqs, |o| o.copy_from_slice(&step.seq_lens));
        let starts =
            b.query_start_loc.write_dual(exec, reqs + 1, |o| o.copy_from_slice(&step.query_start_loc));
        let mut inputs = StepInputs::new(starts, seq_lens, step.seq_lens.clone())?;
        let n = step.padded_tokens();
        inputs.num_actual_tokens = n;
        inputs.positions = Some(b.positions.write(exec, n, |o| o.copy_from_slice(&step.positions)));
        inputs.is_prefilling = Some(step.is_prefilling.clone());
        inputs.causal = match self.cell.features.non_causal {
            NonCausal::No => Causal::All(true),
            NonCausal::All => Causal::All(false),
            NonCausal::PerRequest => Causal::PerRequest(b.causal.write(exec, reqs, |o| {
                o.iter_mut().zip(&step.reqs).for_each(|(o, r)| *o = r.causal.into());
            })),
        };
        inputs.mm_prefix_ranges = self.cell.features.spans.then(|| step.spans.clone());
        inputs.rswa_prefix_lens = self.cell.features.rswa.map(|_| {
            b.prefixes.write(exec, reqs, |o| {
                o.iter_mut().zip(&step.prefixes).for_each(|(o, p)| *o = *p as i32);
            })
        });
        let (table, slots) = (&step.block_table, &step.slots);
        let table = b.block_table.write_dual(exec, table.len(), |o| o.copy_from_slice(table));
        let slots = b.slots.write(exec, n, |o| o.copy_from_slice(slots));
        CommonAttentionMetadata::new(Arc::new(inputs), table, self.stride, slots)
    }

    fn call(&mut self, step: &Step, entry: &StepEntry, shared: bool) -> Result<Output> {
        let (c, exec) = (&self.cell, self.tools.exec);
        let n = step.padded_tokens();
        let [k, v] = c.kv_widths();
        let widths = [c.num_heads * c.q_head(), k, v];
        let fused = fuse(step, widths);
        let total: usize = widths.iter().sum();
        let qkv = tensor(exec, c.dtype, &fused, &[n, total])?;
        let mut out = tensor(
            exec,
            c.dtype,
            &vec![MARKER; (n + GUARD_ROWS) * c.num_heads * c.out_head()],
            &[n + GUARD_ROWS, c.num_heads * c.out_head()],
        )?;
        let x = qkv.view();
        let [q, k, _] = widths;
        let queries = x.cols(0..q)?.heads(c.num_heads)?;
        let mut kv = handle(c, self.place, shared)?.on(&mut self.cache);
        let rows = out.view_mut().rows(0..n)?;
        match &self.layer {
            LayerKernel::Mla(layer) => {
                layer.run(exec, queries, x.cols(q..q + k)?, &mut kv, entry, rows)?;
            }
            LayerKernel::Standard(layer) => {
                let k_v = [q..q + k, q + k..total].map(|c| x.cols(c));
                let [k, v] = k_v.map(|x| x.and_then(|x| x.heads(c.num_kv_heads)));
                let x = Qkv { q: queries, k: k?, v: v? };
                layer.run(exec, &x, &mut kv, entry, rows.heads(c.num_heads)?)?;
            }
            LayerKernel::StateSpace(_) => {
                return Err(AttentionError::Inputs("the suite has no run for state-space layers".into()));
            }
        }
        let all = numbers(&self.tools.host.read_tensor(exec, &out)?, c.dtype);
        let width = c.num_heads * c.out_head();
        let (live, n) = (step.live_tokens() * width, n * width);
        Ok(Output {
            live: all[..live].to_vec(),
            padding: all[live..n].to_vec(),
            guard: all[n..].to_vec(),
            decodes: entry.split().decodes,
        })
    }
}

fn handle(c: &Cell, place: Place, shared: bool) -> Result<KvHandle> {
    Ok(KvHandle {
        buf: 0,
        offset: place.offset,
        block_stride: place.block_stride,
        page_bytes: place.page_bytes,
        num_blocks: place.num_blocks,
        block_size: c.kernel_block_size,
        dtype: spec(c)?.dtype,
        layout: c.layout.unwrap_or_default(),
        shared,
    })
}

fn layer(tools: Tools<'_>, world: &World) -> Result<LayerKernel> {
    let c = &world.cell;
    if let Some(dims) = c.latent {
        return latent_layer(tools, world, &dims);
    }
    let kv_cache_dtype = spec(c)?.dtype;
    let quantised = matches!(kv_cache_dtype, DType::F8E4M3 | DType::F8E5M2);
    let sinks: View<f32> = Persistent::new(tools.exec, c.num_heads)?
        .write(tools.exec, c.num_heads, |o| o.copy_from_slice(&world.sinks));
    let args = AttentionArgs {
        layer: AttnLayer(0),
        num_heads: c.num_heads,
        num_kv_heads: c.num_kv_heads,
        head_size: c.head_size,
        head_size_v: c.head_size_v,
        scale: world.scale(),
        sliding_window: c.features.window,
        logit_soft_cap: c.features.soft_cap,
        alibi_slopes: c.features.alibi.then_some(&world.slopes[..]),
        sinks: c.features.sinks.then_some(&sinks),
        dtype: c.dtype,
        kv_cache_dtype,
        k_scale: if quantised { K_SCALE } else { 1.0 },
        v_scale: if quantised { V_SCALE } else { 1.0 },
    };
    tools.backend.layer(&LayerArgs::Standard(args), tools.config)
}

fn latent_layer(tools: Tools<'_>, world: &World, d: &LatentDims) -> Result<LayerKernel> {
    let c = &world.cell;
    let kv_cache_dtype = spec(c)?.dtype;
    let shape = vec![c.num_heads * (d.qk_nope_head_dim + d.v_head_dim), d.kv_lora_rank];
    let weight = Weight::from_f32("kv_b_proj", shape, &world.kv_b_proj);
    let weight = weight.map_err(|e| AttentionError::Inputs(e.to_string()))?;
    let kv_b_proj = tools.host.load_linear(tools.exec, weight, c.dtype)?;
    let args = MlaArgs {
        layer: AttnLayer(0),
        num_heads: c.num_heads,
        kv_lora_rank: d.kv_lora_rank,
        qk_nope_head_dim: d.qk_nope_head_dim,
        qk_rope_head_dim: d.qk_rope_head_dim,
        v_head_dim: d.v_head_dim,
        scale: world.scale(),
        kv_b_proj: &kv_b_proj,
        dtype: c.dtype,
        kv_cache_dtype,
        kv_scale: if matches!(kv_cache_dtype, DType::F8E4M3 | DType::F8E5M2) { K_SCALE } else { 1.0 },
    };
    tools.backend.layer(&LayerArgs::Mla(args), tools.config)
}

/// Rows of q, k and v side by side, as a fused projection leaves them.
fn fuse(step: &Step, widths: [usize; 3]) -> Vec<f32> {
    let parts = [&step.q, &step.k, &step.v];
    (0..step.padded_tokens())
        .flat_map(|t| parts.iter().zip(widths).flat_map(move |(p, w)| p[t * w..(t + 1) * w].iter().copied()))
        .collect()
}

fn tensor(exec: &dyn Exec, dtype: DType, x: &[f32], shape: &[usize]) -> Result<Tensor> {
    Ok(match dtype {
        DType::F16 => {
            Tensor::from_slice(exec, &x.iter().copied().map(f16::from_f32).collect::<Vec<_>>(), shape)?
        }
        DType::BF16 => {
            Tensor::from_slice(exec, &x.iter().copied().map(bf16::from_f32).collect::<Vec<_>>(), shape)?
        }
        DType::F32 => Tensor::from_slice(exec, x, shape)?,
        other => {
            return Err(AttentionError::Inputs(format!("the suite has no activations of dtype {other}")));
        }
    })
}

fn numbers(bytes: &[u8], dtype: DType) -> Vec<f64> {
    let half = |f: fn([u8; 2]) -> f32| bytes.as_chunks().0.iter().map(|&b| f64::from(f(b))).collect();
    match dtype {
        DType::F16 => half(|b| f16::from_le_bytes(b).to_f32()),
        DType::BF16 => half(|b| bf16::from_le_bytes(b).to_f32()),
        _ => bytes.as_chunks().0.iter().map(|&b| f64::from(f32::from_le_bytes(b))).collect(),
    }
}
