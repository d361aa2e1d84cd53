//! One layer, set up through the contract as an engine does it: any registered backend can be measured. Metadata is
//! built beforehand; the calls alone are timed.

use super::{
    super::CliError,
    case::{CacheState, Case, Kind},
    meter::Pool,
    samples::{Sampler, Timing},
    setup::{Replayed, Setup},
    tables::{blocks_of, common, shuffle, view, write_slots},
};
use headway_attention::{
    AttentionArgs, AttentionError, AttentionGroup, AttnLayer, BuilderPlan, GraphSupport, GroupInfo, KvHandle,
    LayerArgs, LayerKernel, MlaArgs, Qkv, Result, StepEntry, StepMetadata, build_step,
};
use headway_tensor::{Linear, LinearPart, SharedBytes, Tensor, View, Weight, WeightType};
use std::sync::Arc;

/// Block tables that cold calls rotate through, at most: each has its metadata ready.
const MOST_TABLES: usize = 4096;

/// A case set up for measurements of it, which may be some time apart.
pub struct Prepared<'a> {
    setup: Setup<'a>,
    case: &'a Case,
    block_size: usize,
    fixture: Fixture,
    sampler: Sampler,
}

impl<'a> Prepared<'a> {
    /// Sets up the layer, its tables and their metadata.
    ///
    /// # Errors
    /// What the backend refuses; a pool smaller than the case.
    pub fn new(setup: Setup<'a>, case: &'a Case, pool: &Pool) -> std::result::Result<Self, CliError> {
        let block_size = setup.checked_block_size()?;
        let fixture = Fixture::new(&setup, case, block_size, pool)?;
        Ok(Self { setup, case, block_size, fixture, sampler: Sampler::default() })
    }

    /// What a device with graphs does otherwise than usual for this case.
    pub fn note(&self) -> Option<String> {
        let unusual = !self.fixture.captured && self.setup.device.place.capability.is_some();
        let (name, case) = (&self.setup.backend.rules().name, &self.case.id);
        unusual.then(|| format!("{name} can't be captured for {case}: its calls are queued, not replayed"))
    }

    /// Most new tokens of a decode, as the builder plans; `None`: any.
    pub fn longest_decode(&self) -> Option<usize> {
        self.fixture.builders[0].plan().reorder_batch_threshold
    }

    /// Takes so many samples, or as many as the case's length asks for.
    ///
    /// # Errors
    /// The backend's own.
    pub fn measure(&mut self, samples: Option<usize>, pool: &mut Pool) -> Result<Measured> {
        let timing = self.fixture.time(&mut self.sampler, samples, &self.setup, self.case, pool)?;
        let (layer, case) = (self.setup.layer, self.case);
        let (bytes, flops) = (layer.kv_bytes(case) as f64, layer.flops(case));
        let least = self.setup.ceilings.least_seconds(case.kind, bytes, flops);
        Ok(Measured { timing, block_size: self.block_size, bytes, flops, least })
    }

    /// What is set up.
    pub fn setup(&self) -> &Setup<'a> {
        &self.setup
    }

    /// The case.
    pub fn case(&self) -> &'a Case {
        self.case
    }
}

/// What a case took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Seconds a call.
    pub timing: Timing,
    /// Tokens in a block.
    pub block_size: usize,
    /// Of the cache, each counted once however many query heads share it.
    pub bytes: f64,
    /// Operations.
    pub flops: f64,
    /// The least seconds that the device could take, where that is known.
    pub least: Option<f64>,
}

/// A layer with its cache, and metadata for each table that the calls rotate through.
struct Fixture {
    /// A builder's buffers may hold a step's pages, so that each table has a builder of its own. Prefills of latent
    /// attention share one: their workspaces are large, and what they gather by is the table itself.
    builders: Vec<AttentionGroup>,
    layer: LayerKernel,
    handle: KvHandle,
    entries: Vec<StepEntry>,
    slots: Vec<View<i64>>,
    q: Tensor,
    /// The new tokens' keys and values, those of each source below those of the one before.
    kv: [Tensor; 2],
    sources: usize,
    out: Tensor,
    /// Whether calls can be recorded into a graph.
    captured: bool,
}

impl Fixture {
    fn new(
        s: &Setup<'_>,
        case: &Case,
        block_size: usize,
        pool: &Pool,
    ) -> std::result::Result<Self, CliError> {
        let (layer, need, ops) = (s.layer, &s.layer.need, &*s.device.ops);
        let (latent, dtype) = (need.latent, need.dtype);
        let spec = s.spec(block_size);
        let page = spec.page_size_bytes();
        let num_blocks = pool.bytes() / page;
        let needed = blocks_of(case, block_size);
        if needed > num_blocks {
            return Err(CliError::Usage(format!(
                "case {} needs {needed} blocks of {block_size} tokens, {page} bytes each; the pool holds {num_blocks}: give a \
                 larger --pool or a smaller --block-size",
                case.id
            )));
        }
        let mut order: Vec<i32> = (0..num_blocks as i32).collect();
        shuffle(&mut order);
        let write = case.kind == Kind::Write;
        let cold_sources = write && case.cache == CacheState::Cold && s.meter.cold_sources();
        let tables = match case.cache {
            CacheState::Hot => 1,
            CacheState::Cold => {
                let bytes = layer.kv_bytes(case) * if cold_sources { 2 } else { 1 };
                s.meter.rotation(bytes, (num_blocks / needed).clamp(1, MOST_TABLES))
            }
        };
        let info = GroupInfo {
            latent,
            layers: vec![AttnLayer(0)],
            layout: s.layout,
            max_num_reqs: case.seqs.len().max(1),
            max_num_tokens: case.new_tokens(),
            max_model_len: case.seqs.iter().map(|q| q[1]).max().unwrap_or(1),
            num_speculative_tokens: need.num_speculative_tokens,
            batch_invariant: need.use_batch_invariant,
            ..GroupInfo::new(spec, need.num_heads)
        };
        let handle = KvHandle {
            buf: 0,
            offset: 0,
            block_stride: page,
            page_bytes: page,
            num_blocks,
            block_size,
            dtype: layer.cache.dtype(),
            layout: s.layout,
            // Otherwise keys and values of the new tokens lie in the cache already.
            shared: !write,
        };
        let decodes = latent.is_some() && case.kind == Kind::Decode;
        let config = match decodes {
            // As many workspaces as tables, and no prefill: the smallest, where the backend has the setting.
            true => s.backend.parse_config(Some(&serde_json::json!({ "workspace_tokens": 16 }))),
            false => s.backend.parse_config(None),
        };
        let config = config.or_else(|_| s.backend.parse_config(None))?;
        let builder = || AttentionGroup::new(&**s.backend, ops, 0, info.clone(), &config, 1, None);
        let mut builders = vec![builder()?];
        let plan = builders[0].plan();
        let captured = match s.replayed {
            Replayed::All => true,
            Replayed::Decodes if matches!(case.kind, Kind::Prefill | Kind::Mixed) => false,
            Replayed::Decodes | Replayed::AsInTheEngine => can_be_captured(plan.graph_support, case.kind),
        };
        let own_builders = !write && (latent.is_none() || decodes);
        let tables = match own_builders {
            true => tables.min(builders_in(s.device.place.available, plan)),
            false => tables,
        };
        let (mut entries, mut slots) = (vec![], vec![]);
        for table in order.chunks_exact(needed).take(tables) {
            if write {
                slots.push(view(ops, &write_slots(case.tokens, table, block_size))?);
            } else {
                if builders.len() == entries.len() && own_builders {
                    builders.push(builder()?);
                }
                let last = builders.len() - 1;
                let own = &mut builders[last..];
                let mut step = StepMetadata::new(Arc::from([0u16].as_slice()));
                build_step(own, ops, &[common(ops, case, table, block_size)?], 0, false, &mut step)?;
                entries.push(step.layer(AttnLayer(0))?.clone());
            }
        }
        let (rows, sources) = (case.new_tokens(), if cold_sources { slots.len() } else { 1 });
        let numbers = |rows: usize, heads: usize, width: usize, seed: u64| {
            s.meter.numbers(dtype, &[rows, heads, width], seed)
        };
        let (kv_heads, k_width, v_width) = (need.num_kv_heads, need.head_size, need.head_size_v);
        Ok(Self {
            builders,
            layer: kernel(s)?,
            handle,
            entries,
            slots,
            q: numbers(rows, need.num_heads, layer.q_head(), 1)?,
            // Of latent attention the first are the rows of the cache.
            kv: [
                numbers(rows * sources, kv_heads, k_width, 2)?,
                numbers(rows * sources, kv_heads, v_width, 3)?,
            ],
            sources,
            out: Tensor::zeros(ops, dtype, &[rows, need.num_heads * layer.out_head()])
                .map_err(AttentionError::from)?,
            captured,
        })
    }

    fn time(
        &mut self,
        sampler: &mut Sampler,
        samples: Option<usize>,
        s: &Setup<'_>,
        case: &Case,
        pool: &mut Pool,
    ) -> Result<Timing> {
        let Self { layer, handle, entries, slots, q, kv, sources, out, captured, .. } = self;
        let (ops, rows) = (&*s.device.ops, case.new_tokens());
        let [k, v] = [kv[0].view(), kv[1].view()];
        let mut call = |i: usize| -> Result<()> {
            let cache = &mut handle.on(&mut pool.0);
            match &*layer {
                LayerKernel::Standard(layer) if case.kind == Kind::Write => {
                    let from = i % *sources * rows;
                    let x = Qkv { q: q.view(), k: k.rows(from..from + rows)?, v: v.rows(from..from + rows)? };
                    layer.write_kv_cache(ops, &x, cache, &slots[i % slots.len()])
                }
                LayerKernel::Standard(layer) => {
                    let out = out.view_mut().heads(s.layer.need.num_heads)?;
                    layer.run(ops, &Qkv { q: q.view(), k, v }, cache, &entries[i % entries.len()], out)
                }
                LayerKernel::Mla(layer) => {
                    let latent = kv[0].view_as(&[rows, s.layer.need.head_size])?;
                    layer.run(ops, q.view(), latent, cache, &entries[i % entries.len()], out.view_mut())
                }
                LayerKernel::StateSpace(_) => Err(wrong_kind(s)),
            }
        };
        let rotation = if case.kind == Kind::Write { slots.len() } else { entries.len() };
        s.meter.time(sampler, samples, rotation, *captured, &mut call)
    }
}

/// How many builders an eighth of the free memory holds, at least one.
fn builders_in(free: Option<u64>, plan: &BuilderPlan) -> usize {
    let each = plan.persistent_bytes.saturating_add(plan.workspace_bytes).max(1);
    free.map_or(usize::MAX, |free| usize::try_from(free / 8 / each).unwrap_or(usize::MAX).max(1))
}

/// Whether a graph may hold the kernels of such a batch; cache writes depend on no plan.
fn can_be_captured(support: GraphSupport, kind: Kind) -> bool {
    match kind {
        Kind::Write => true,
        Kind::Decode => support >= GraphSupport::UniformSingleTokenDecode,
        Kind::Prefill | Kind::Mixed => support == GraphSupport::Always,
    }
}

/// What softmax caps its logits at, where it does: the time doesn't depend on it.
const SOFT_CAP: f32 = 50.0;

fn kernel(s: &Setup<'_>) -> Result<LayerKernel> {
    let need = &s.layer.need;
    let (heads, dtype) = (need.num_heads, need.dtype);
    let kv_cache_dtype = s.layer.cache.dtype();
    let scale = (s.layer.q_head() as f32).powf(-0.5);
    let config = s.backend.parse_config(None)?;
    if let Some(l) = need.latent {
        let kv_b_proj = projection(s, heads * (l.qk_nope_head_dim + l.v_head_dim), l.kv_lora_rank)?;
        let args = MlaArgs {
            layer: AttnLayer(0),
            num_heads: heads,
            kv_lora_rank: l.kv_lora_rank,
            qk_nope_head_dim: l.qk_nope_head_dim,
            qk_rope_head_dim: l.qk_rope_head_dim,
            v_head_dim: l.v_head_dim,
            scale,
            kv_b_proj: &kv_b_proj,
            dtype,
            kv_cache_dtype,
            kv_scale: 1.0,
        };
        return s.backend.layer(&LayerArgs::Mla(args), &config);
    }
    let slopes: Vec<f32> = (1..=heads).map(|h| -(h as f32) / heads as f32).collect();
    let sinks = match need.has_sinks {
        true => Some(view(&*s.device.ops, &vec![0.0f32; heads])?),
        false => None,
    };
    let args = AttentionArgs {
        layer: AttnLayer(0),
        num_heads: heads,
        num_kv_heads: need.num_kv_heads,
        head_size: need.head_size,
        head_size_v: need.head_size_v,
        scale,
        sliding_window: need.sliding_window,
        logit_soft_cap: need.has_logit_soft_cap.then_some(SOFT_CAP),
        alibi_slopes: need.has_alibi.then_some(&slopes),
        sinks: sinks.as_ref(),
        dtype,
        kv_cache_dtype,
        k_scale: 1.0,
        v_scale: 1.0,
    };
    s.backend.layer(&LayerArgs::Standard(args), &config)
}

/// A weight of numbers that keep the variance of what they are multiplied with.
fn projection(s: &Setup<'_>, rows: usize, cols: usize) -> Result<Arc<dyn Linear>> {
    let spread = (3.0 / cols as f32).sqrt();
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        half::bf16::from_f32(((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * spread)
    };
    let bytes: Vec<u8> = (0..rows * cols).flat_map(|_| next().to_le_bytes()).collect();
    let weight = Weight::new("kv_b_proj", WeightType::BF16, vec![rows, cols], SharedBytes::new(bytes))
        .map_err(|e| AttentionError::Inputs(e.to_string()))?;
    Ok(s.device.ops.load_linear(vec![LinearPart { weight, bias: None }], Some(s.layer.need.dtype))?)
}

fn wrong_kind(s: &Setup<'_>) -> AttentionError {
    AttentionError::WrongKind {
        backend: s.backend.rules().name.to_string(),
        offers: s.backend.rules().kind.name(),
        asked: "standard or latent attention",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builders_leave_most_of_the_memory() {
        let plan = |persistent_bytes, workspace_bytes| BuilderPlan {
            graph_support: GraphSupport::Never,
            reorder_batch_threshold: None,
            persistent_bytes,
            workspace_bytes,
        };
        assert_eq!(builders_in(Some(8 << 30), &plan(1 << 20, 3 << 20)), 256);
        assert_eq!(builders_in(Some(8 << 30), &plan(0, 0)), 1 << 30);
        assert_eq!(builders_in(Some(1 << 20), &plan(u64::MAX, 1)), 1);
        assert_eq!(builders_in(None, &plan(1, 1)), usize::MAX);
    }

    #[test]
    fn what_can_be_captured() {
        let decode_only = GraphSupport::UniformSingleTokenDecode;
        assert!(can_be_captured(decode_only, Kind::Decode) && !can_be_captured(decode_only, Kind::Mixed));
        assert!(can_be_captured(GraphSupport::Always, Kind::Prefill));
        assert!(!can_be_captured(GraphSupport::Never, Kind::Decode));
        assert!(can_be_captured(GraphSupport::Never, Kind::Write));
    }
}
