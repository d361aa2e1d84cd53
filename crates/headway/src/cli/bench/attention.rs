//! `headway bench attention`: one layer's calls, case by case, held against the machine's ceilings.
//!
//! A layer is set up through the contract, as an engine does it: any registered backend can be
//! measured. Metadata is built beforehand; the calls alone are timed.

use super::{
    super::CliError,
    cases::{CacheState, Case, Heads, Kind},
    ceilings::{Ceilings, isa},
    samples::{Sampler, Timing},
};
use headway_attention::{
    AttentionArgs, AttentionError, AttentionGroup, AttnLayer, CommonAttentionMetadata, DynAttention,
    DynBackend, GroupInfo, KvBuf, KvCacheSpec, KvHandle, LayerArgs, LayerKernel, LayerNeed, Qkv, Result,
    StepEntry, StepInputs, StepMetadata, build_step,
    group::kv::spec::AttentionSpec,
    process::{rules::KvCacheDType, select::reasons},
};
use headway_tensor::{DType, Dual, HostBuf, Ops, Tensor, View};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use serde::Serialize;
use std::sync::Arc;

/// Block tables that cold calls rotate through, at most: each has its metadata ready.
const MOST_TABLES: usize = 4096;

/// One measurement.
#[derive(Serialize, Debug)]
pub struct Line {
    bench: &'static str,
    peer: &'static str,
    backend: String,
    isa: String,
    case: String,
    kind: &'static str,
    heads: String,
    dtype: &'static str,
    block_size: usize,
    threads: usize,
    cache: &'static str,
    median_ms: f64,
    min_ms: f64,
    max_ms: f64,
    /// Cache bytes a second, each counted once however many query heads share it.
    gbps: f64,
    /// Multiply-adds of the visible pairs, two operations each.
    gflops: f64,
    /// What the machine does at most: GB/s for decode and write, GFLOP/s for prefill and mixed.
    ceiling: Option<f64>,
    share_of_ceiling: Option<f64>,
}

/// What is measured.
pub struct Setup<'a> {
    pub backend: &'a Arc<dyn DynBackend>,
    pub ops: &'a dyn Ops,
    pub threads: usize,
    pub ceilings: Option<Ceilings>,
    pub heads: &'a Heads,
    pub dtype: DType,
    /// `None`: the backend's preferred one.
    pub block_size: Option<usize>,
}

/// The memory that all cases' caches lie in.
pub struct Pool(KvBuf);

impl Pool {
    /// `bytes` of normally distributed bfloat16 values; float32 caches read the same bytes.
    ///
    /// # Errors
    /// No memory.
    pub fn new(bytes: usize) -> Result<Self> {
        let mut buf = HostBuf::zeroed(bytes)?;
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        // An odd number of values, so that repetitions don't line up with blocks.
        let pattern: Vec<u8> = (0..(4 << 20) + 1).flat_map(|_| normal(&mut rng).to_le_bytes()).collect();
        for chunk in buf.as_bytes_mut().chunks_mut(pattern.len()) {
            chunk.copy_from_slice(&pattern[..chunk.len()]);
        }
        Ok(Self(KvBuf::Host(buf)))
    }

    fn bytes(&self) -> usize {
        match &self.0 {
            KvBuf::Host(b) => b.as_bytes().len(),
            KvBuf::Dev(_) => 0,
        }
    }
}

/// About N(0, 1): a sum of uniform values.
fn normal(rng: &mut ChaCha8Rng) -> half::bf16 {
    let sum: f32 = (0..6).map(|_| rng.next_u32() as f32 / u32::MAX as f32).sum();
    half::bf16::from_f32((sum - 3.0) * std::f32::consts::SQRT_2)
}

/// The block size and every reason against the backend for this layer.
///
/// # Errors
/// A backend that can't take it, with its reasons.
fn block_size(s: &Setup<'_>) -> std::result::Result<usize, CliError> {
    let rules = s.backend.rules();
    let size = s.block_size.unwrap_or_else(|| rules.preferred_block_size(16));
    let need = LayerNeed {
        platform: rules.platform.clone(),
        head_size: s.heads.head_size,
        head_size_v: s.heads.head_size,
        num_heads: s.heads.num_heads,
        num_kv_heads: s.heads.num_kv_heads,
        dtype: s.dtype,
        kv_cache_dtype: Some(KvCacheDType(s.dtype.name().into())),
        block_size: Some(size),
        ..LayerNeed::default()
    };
    match reasons(s.backend, &need).as_slice() {
        [] => Ok(size),
        all => {
            let all: Vec<_> = all.iter().map(ToString::to_string).collect();
            let (heads, dtype) = (&s.heads.id, s.dtype);
            Err(CliError::Usage(format!(
                "{} can't run heads {heads} in {dtype} with blocks of {size}: {}",
                rules.name,
                all.join(", ")
            )))
        }
    }
}

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
        let block_size = block_size(&setup)?;
        let fixture = Fixture::new(&setup, case, block_size, pool)?;
        Ok(Self { setup, case, block_size, fixture, sampler: Sampler::default() })
    }

    /// Takes so many samples, or as many as the case's length asks for.
    ///
    /// # Errors
    /// The backend's own.
    pub fn measure(&mut self, samples: Option<usize>, pool: &mut Pool) -> Result<Line> {
        let timing = self.fixture.time(&mut self.sampler, samples, &self.setup, self.case, pool)?;
        Ok(line(&self.setup, self.case, self.block_size, timing))
    }
}

fn line(s: &Setup<'_>, case: &Case, block_size: usize, t: Timing) -> Line {
    let h = s.heads;
    let bytes = (case.kv_tokens() * h.num_kv_heads * h.head_size * 2 * s.dtype.size()) as f64;
    let flops = (4 * h.head_size * h.num_heads * case.visible_pairs()) as f64;
    let by_bytes = matches!(case.kind, Kind::Decode | Kind::Write);
    let least = s.ceilings.map(|c| c.least_seconds(bytes, if by_bytes { 0.0 } else { flops }));
    Line {
        bench: "attention",
        peer: "headway",
        backend: s.backend.rules().name.to_string(),
        isa: isa(s.ops),
        case: case.id.clone(),
        kind: match case.kind {
            Kind::Decode => "decode",
            Kind::Prefill => "prefill",
            Kind::Mixed => "mixed",
            Kind::Write => "write",
        },
        heads: h.id.clone(),
        dtype: short(s.dtype),
        block_size,
        threads: s.threads,
        cache: if case.cache == CacheState::Hot { "hot" } else { "cold" },
        median_ms: t.median * 1e3,
        min_ms: t.min * 1e3,
        max_ms: t.max * 1e3,
        gbps: bytes / t.median / 1e9,
        gflops: flops / t.median / 1e9,
        ceiling: least.map(|least| (if by_bytes { bytes } else { flops }) / least / 1e9),
        share_of_ceiling: least.map(|least| least / t.median),
    }
}

/// As the case files write it.
pub fn short(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::F32 => "f32",
        other => other.name(),
    }
}

/// A layer with its cache, and metadata for each table that the calls rotate through.
struct Fixture {
    layer: Box<dyn DynAttention>,
    handle: KvHandle,
    entries: Vec<StepEntry>,
    slots: Vec<View<i64>>,
    q: Tensor,
    kv: [Tensor; 2],
    out: Tensor,
}

impl Fixture {
    fn new(
        s: &Setup<'_>,
        case: &Case,
        block_size: usize,
        pool: &Pool,
    ) -> std::result::Result<Self, CliError> {
        let h = s.heads;
        let spec = AttentionSpec::new(block_size, h.num_kv_heads, h.head_size, s.dtype);
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
        let tables = match case.cache {
            CacheState::Hot => 1,
            CacheState::Cold => (num_blocks / needed).clamp(1, MOST_TABLES),
        };
        let layout = s.backend.rules().kv_cache_layouts.first().copied().unwrap_or_default();
        let info = GroupInfo {
            layers: vec![AttnLayer(0)],
            layout,
            max_num_reqs: case.seqs.len().max(1),
            max_num_tokens: case.new_tokens(),
            max_model_len: case.seqs.iter().map(|q| q[1]).max().unwrap_or(1),
            ..GroupInfo::new(KvCacheSpec::Full(spec.clone()), h.num_heads)
        };
        let handle = KvHandle {
            buf: 0,
            offset: 0,
            block_stride: page,
            page_bytes: page,
            num_blocks,
            block_size,
            dtype: s.dtype,
            layout,
            // Otherwise keys and values of the new tokens lie in the cache already.
            shared: case.kind != Kind::Write,
        };
        let config = s.backend.parse_config(None)?;
        let mut groups = vec![AttentionGroup::new(&**s.backend, s.ops, 0, info, &config, 1, None)?];
        let (mut entries, mut slots) = (vec![], vec![]);
        for table in order.chunks_exact(needed).take(tables) {
            if case.kind == Kind::Write {
                slots.push(View::from_vec(write_slots(case.tokens, table, block_size)));
            } else {
                let mut step = StepMetadata::new(Arc::from([0u16].as_slice()));
                build_step(&mut groups, s.ops, &[common(case, table, block_size)?], 0, false, &mut step)?;
                entries.push(step.layer(AttnLayer(0))?.clone());
            }
        }
        let rows = case.new_tokens();
        let random = |heads: usize, seed: u64| tensor(s, &[rows, heads, h.head_size], seed);
        Ok(Self {
            layer: layer(s)?,
            handle,
            entries,
            slots,
            q: random(h.num_heads, 1)?,
            kv: [random(h.num_kv_heads, 2)?, random(h.num_kv_heads, 3)?],
            out: Tensor::zeros(s.ops, s.dtype, &[rows, h.num_heads, h.head_size])
                .map_err(AttentionError::from)?,
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
        let x = Qkv { q: self.q.view(), k: self.kv[0].view(), v: self.kv[1].view() };
        let (layer, handle, out) = (&self.layer, &self.handle, &mut self.out);
        let exec = s.ops;
        match case.kind {
            Kind::Write => sampler.measure(samples, |i| {
                let slots = &self.slots[i % self.slots.len()];
                layer.write_kv_cache(exec, &x, &mut handle.on(&mut pool.0), slots)
            }),
            _ => sampler.measure(samples, |i| {
                let entry = &self.entries[i % self.entries.len()];
                layer.run(exec, &x, &mut handle.on(&mut pool.0), entry, out.view_mut())
            }),
        }
    }
}

fn layer(s: &Setup<'_>) -> Result<Box<dyn DynAttention>> {
    let args = AttentionArgs {
        layer: AttnLayer(0),
        num_heads: s.heads.num_heads,
        num_kv_heads: s.heads.num_kv_heads,
        head_size: s.heads.head_size,
        head_size_v: s.heads.head_size,
        scale: (s.heads.head_size as f32).powf(-0.5),
        sliding_window: None,
        logit_soft_cap: None,
        alibi_slopes: None,
        sinks: None,
        dtype: s.dtype,
        kv_cache_dtype: s.dtype,
        k_scale: 1.0,
        v_scale: 1.0,
    };
    match s.backend.layer(&LayerArgs::Standard(args), &s.backend.parse_config(None)?)? {
        LayerKernel::Standard(layer) => Ok(layer),
        _ => Err(AttentionError::WrongKind {
            backend: s.backend.rules().name.to_string(),
            offers: s.backend.rules().kind.name(),
            asked: "standard attention",
        }),
    }
}

fn tensor(s: &Setup<'_>, shape: &[usize], seed: u64) -> Result<Tensor> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<half::bf16> = (0..shape.iter().product()).map(|_| normal(&mut rng)).collect();
    Ok(match s.dtype {
        DType::F32 => {
            Tensor::from_slice(s.ops, &values.iter().map(|x| x.to_f32()).collect::<Vec<_>>(), shape)?
        }
        DType::F16 => {
            let values: Vec<_> = values.iter().map(|x| half::f16::from_f32(x.to_f32())).collect();
            Tensor::from_slice(s.ops, &values, shape)?
        }
        _ => Tensor::from_slice(s.ops, &values, shape)?,
    })
}

/// Blocks that one call touches.
fn blocks_of(case: &Case, block_size: usize) -> usize {
    match case.kind {
        // Few tokens go to one block each, many to whole blocks.
        Kind::Write if case.tokens < FEW => case.tokens,
        Kind::Write => case.tokens.div_ceil(block_size),
        _ => case.seqs.iter().map(|s| s[1].div_ceil(block_size)).sum(),
    }
}

/// Tokens of a write from which on whole blocks are written.
const FEW: usize = 512;

fn write_slots(tokens: usize, blocks: &[i32], block_size: usize) -> Vec<i64> {
    let slot = |block: i32, offset: usize| i64::from(block) * block_size as i64 + offset as i64;
    if tokens < FEW {
        // Offsets walk through the block by an odd step.
        blocks.iter().enumerate().map(|(i, &b)| slot(b, (i * 7 + b as usize) % block_size)).collect()
    } else {
        (0..tokens).map(|t| slot(blocks[t / block_size], t % block_size)).collect()
    }
}

/// The batch of a case, whose requests take the next blocks of `table`.
fn common(case: &Case, table: &[i32], block_size: usize) -> Result<CommonAttentionMetadata> {
    let mut starts = vec![0];
    starts.extend(case.seqs.iter().scan(0, |at, s| {
        *at += s[0] as i32;
        Some(*at)
    }));
    let lens: Vec<i32> = case.seqs.iter().map(|s| s[1] as i32).collect();
    let stride = case.seqs.iter().map(|s| s[1].div_ceil(block_size)).max().unwrap_or(0);
    let mut rows = vec![0; stride * case.seqs.len()];
    let mut next = table.iter();
    for (row, s) in rows.chunks_exact_mut(stride.max(1)).zip(&case.seqs) {
        row.iter_mut().zip(next.by_ref().take(s[1].div_ceil(block_size))).for_each(|(r, b)| *r = *b);
    }
    let inputs = StepInputs::new(Dual::from_vec(starts), View::from_vec(lens.clone()), lens)?;
    let slots = View::from_vec(vec![-1; case.new_tokens()]);
    CommonAttentionMetadata::new(Arc::new(inputs), Dual::from_vec(rows), stride, slots)
}

/// Fisher-Yates with a fixed seed.
fn shuffle(order: &mut [i32]) {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    for i in (1..order.len()).rev() {
        order.swap(i, (rng.next_u64() % (i as u64 + 1)) as usize);
    }
}

/// The table's first line.
pub fn head() -> String {
    format!(
        "{:<22} {:>9} {:>5} {:>5} {:>3} {:>10} {:>10} {:>10} {:>8} {:>8} {:>8} {:>6}",
        "case",
        "heads",
        "dtype",
        "block",
        "thr",
        "median ms",
        "min",
        "max",
        "GB/s",
        "GFLOP/s",
        "ceiling",
        "share"
    )
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:<22} {:>9} {:>5} {:>5} {:>3} {:>10.4} {:>10.4} {:>10.4} {:>8.2} {:>8.1}",
            self.case,
            self.heads,
            self.dtype,
            self.block_size,
            self.threads,
            self.median_ms,
            self.min_ms,
            self.max_ms,
            self.gbps,
            self.gflops
        )?;
        match (self.ceiling, self.share_of_ceiling) {
            (Some(c), Some(s)) => write!(f, " {c:>8.1} {:>5.0}%", s * 100.0),
            _ => write!(f, " {:>8} {:>6}", "-", "-"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_distinct_and_inside_their_blocks() {
        for (tokens, blocks) in [(1, 1), (32, 32), (512, 32), (2048, 128)] {
            let mut order: Vec<i32> = (0..200).collect();
            shuffle(&mut order);
            let mut slots = write_slots(tokens, &order[..blocks], 16);
            assert_eq!(slots.len(), tokens);
            assert!(slots.iter().all(|s| order[..blocks].contains(&((s / 16) as i32))));
            slots.sort_unstable();
            slots.dedup();
            assert_eq!(slots.len(), tokens);
        }
    }

    #[test]
    fn a_shuffle_is_a_permutation_and_always_the_same() {
        let mut a: Vec<i32> = (0..1000).collect();
        let mut b = a.clone();
        shuffle(&mut a);
        shuffle(&mut b);
        assert_eq!(a, b);
        assert!(a.windows(2).filter(|w| w[1] == w[0] + 1).count() < 10);
        a.sort_unstable();
        assert!(a.iter().copied().eq(0..1000));
    }
}
