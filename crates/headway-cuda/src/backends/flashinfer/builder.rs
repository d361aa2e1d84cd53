//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: plans a step's decodes and prefills once
//! for all layers, and owns the workspaces and page lists.

use super::{FlashInferConfig, rules::NAME};
use crate::{
    CudaExec,
    backends::{common::refuse, modules::open},
    kernels::flashinfer::{PagedBatch, PagedShape, Plan, PlanInputs, PlanMemory, plan},
    modules::{Kind, Module, ModuleFolder, Want, installed, module_dtype},
};
use headway_attention::{
    AttentionError, BuilderPlan, CommonAttentionMetadata, DecodeSplit, GroupInfo, KvCacheSpec,
    MetadataBuilder, Result, RuleBook,
    group::{
        arith::flashinfer::{
            DecodeKernel, FlashInferConfig as StepConfig, FlashInferStep, PlanHeads, PrefillKernel,
        },
        kv::spec::{KvQuantMode, TokensPerState},
    },
};
use headway_tensor::{DType, Persistent, Tensor, View};
use std::{ops::Range, sync::Arc};

/// Multiprocessors where the device is not known yet.
const USUAL_MULTIPROCESSORS: u32 = 132;

/// Builds [`FlashInferMetadata`].
pub struct FlashInferBuilder {
    shape: PagedShape,
    config: StepConfig,
    max_num_reqs: usize,
    max_num_tokens: usize,
    step: FlashInferStep,
    starts: Vec<i32>,
    decodes: Half,
    /// fa3's where it is built, and fa2's where some form of layer has no other.
    prefills: Vec<Half>,
    rows: DecodeRows,
    page_indices: Persistent<i32>,
    floats: Arc<Tensor>,
}

/// One half of a batch: its module, the memory of its plan, its requests' lists.
struct Half {
    module: Arc<Module>,
    memory: PlanMemory,
    query_start_loc: Persistent<i32>,
    page_indptr: Persistent<i32>,
    last_page_len: Persistent<i32>,
}

/// A step's plans, with the batch that they are of.
#[derive(Debug)]
pub struct FlashInferMetadata {
    pub(super) shape: PagedShape,
    pub(super) decodes: Option<Part>,
    /// The same rows by each kind of kernels, the better first: a layer runs the first that it has a module of.
    pub(super) prefills: Vec<Part>,
    /// Keys before a row's own that it sees, by all plans; −1: all.
    pub(super) window_left: i32,
    /// New tokens that no plan is for: padding.
    pub(super) padding: Range<usize>,
    split: DecodeSplit,
}

/// A planned half.
#[derive(Debug)]
pub(super) struct Part {
    /// Kernels of the plan.
    pub kind: Kind,
    pub plan: Plan,
    pub batch: PagedBatch,
    pub rows: Range<usize>,
    pub causal: bool,
}

/// Shape, element type and window of a group.
fn shape_of(group: &GroupInfo) -> Result<(PagedShape, DType)> {
    let attention = match &group.spec {
        KvCacheSpec::Full(a) | KvCacheSpec::SlidingWindow { attention: a, .. } => a,
        other => {
            return Err(refuse(
                NAME,
                format!("a KV cache of {other:?}"),
                "full and sliding-window caches of keys and values are",
            ));
        }
    };
    if let Some(window) = attention.sliding_window_mask {
        // Layers of one plan must have one window: their kernels find by it where a plan's partial results lie.
        return Err(refuse(
            NAME,
            format!("layers of windows of {window} and others in one cache"),
            "--attention-backend CUDA_ATTN takes them",
        ));
    }
    let plain = attention.quant == KvQuantMode::None
        && attention.tokens_per_state == TokensPerState::ONE
        && attention.num_head_slots.is_none_or(|n| n == attention.num_kv_heads)
        && attention.state_content_bytes.is_none()
        && attention.chunk_mask.is_none()
        && attention.cache_format.is_none()
        && attention.head_size == attention.head_size_v
        && attention.num_kv_heads > 0
        && group.num_heads.is_multiple_of(attention.num_kv_heads);
    if !plain {
        return Err(refuse(
            NAME,
            "a packed, compressed, quantised or chunked KV cache, or values of another size than keys",
            "unquantised keys and values of one token each are",
        ));
    }
    let shape = PagedShape {
        heads: group.num_heads,
        kv_heads: attention.num_kv_heads,
        head_size: attention.head_size,
        page_size: group.kernel_block_size,
    };
    Ok((shape, attention.dtype))
}

/// The modules that plan decodes and prefills: a plan is the same with a soft cap and without, so whichever of the two is
/// there. Layers of one group may differ in the cap, so that fa2 plans prefills too where some form has no fa3.
fn modules<'a>(
    folder: &ModuleFolder,
    want: Want<'a>,
) -> std::result::Result<(Want<'a>, Vec<Want<'a>>), Want<'a>> {
    let forms = [false, true].map(|soft_cap| Want { soft_cap, ..want });
    let there = |w: &Want<'_>| folder.find(w).is_some();
    let fa2: Vec<Want<'_>> = forms.into_iter().filter(there).collect();
    let fa3: Vec<Want<'_>> = fa2.iter().map(|w| Want { kind: Kind::Fa3, ..*w }).filter(there).collect();
    let first = fa2.first().copied().ok_or(want)?;
    let mut prefills: Vec<_> = fa3.first().copied().into_iter().collect();
    if fa3.len() < fa2.len() {
        prefills.push(first);
    }
    Ok((first, prefills))
}

impl Half {
    fn new(
        cx: &CudaExec,
        module: Arc<Module>,
        shape: &PagedShape,
        reqs: usize,
        tokens: usize,
    ) -> Result<Self> {
        let bytes = shape.table_bytes(module.entry().kind, cx.info().multiprocessors, reqs, tokens);
        Ok(Self {
            module,
            memory: PlanMemory::new(cx, bytes)?,
            query_start_loc: Persistent::new(cx, reqs + 1)?,
            page_indptr: Persistent::new(cx, reqs + 1)?,
            last_page_len: Persistent::new(cx, reqs)?,
        })
    }
}

/// Fills a persistent buffer.
fn put(cx: &CudaExec, to: &mut Persistent<i32>, from: &[i32]) -> View<i32> {
    to.write(cx, from.len(), |to| to.copy_from_slice(from))
}

/// A half's requests on the host.
struct Requests<'a> {
    query_start_loc: &'a [i32],
    page_indptr: &'a [i32],
    last_page_len: &'a [i32],
    seq_lens: &'a [i32],
    rows: Range<usize>,
    causal: bool,
    decode_graph: bool,
}

impl FlashInferBuilder {
    fn check(&self, common: &CommonAttentionMetadata) -> Result<()> {
        let x = &common.inputs;
        if x.dcp_local_seq_lens.is_some() {
            return Err(refuse(NAME, "decode context parallelism", "run without it"));
        }
        if x.mm_prefix_ranges.as_ref().is_some_and(|r| r.iter().any(|r| !r.is_empty())) {
            return Err(refuse(NAME, "bidirectional multimodal prefixes", "choose another backend"));
        }
        if x.num_reqs > self.max_num_reqs || x.num_actual_tokens > self.max_num_tokens {
            return Err(AttentionError::Inputs(format!(
                "{} requests with {} new tokens; the group was built for {} with {}",
                x.num_reqs, x.num_actual_tokens, self.max_num_reqs, self.max_num_tokens
            )));
        }
        Ok(())
    }
}

/// What the plans of a step have in common.
struct Planner<'a> {
    cx: &'a CudaExec,
    shape: &'a PagedShape,
    floats: &'a Arc<Tensor>,
    page_indices: View<i32>,
    pages_end: usize,
    window_left: i32,
}

impl Planner<'_> {
    /// Plans a half of the batch; without rows there is nothing to plan.
    fn part(&self, half: &mut Half, x: &Requests<'_>) -> Result<Option<Part>> {
        if x.rows.is_empty() {
            return Ok(None);
        }
        let inputs = PlanInputs {
            query_start_loc: x.query_start_loc,
            page_indptr: x.page_indptr,
            seq_lens: x.seq_lens,
            causal: x.causal,
            window_left: self.window_left,
            decode_graph: x.decode_graph,
        };
        let cx = self.cx;
        let plan = plan(cx, &half.module, self.shape, &mut half.memory, self.floats, &inputs)?;
        let batch = PagedBatch {
            query_start_loc: put(cx, &mut half.query_start_loc, x.query_start_loc),
            page_indptr: put(cx, &mut half.page_indptr, x.page_indptr),
            page_indices: self.page_indices.clone(),
            last_page_len: put(cx, &mut half.last_page_len, x.last_page_len),
            pages_end: self.pages_end,
            rows: x.rows.len(),
        };
        Ok(Some(Part { kind: half.module.entry().kind, plan, batch, rows: x.rows.clone(), causal: x.causal }))
    }
}

/// The rows of decodes: requests of one new token, then padding of none, as rows of one token without keys. A launch
/// depends on the number of rows alone. Kept from step to step.
#[derive(Debug, Default)]
struct DecodeRows {
    page_indptr: Vec<i32>,
    last_page_len: Vec<i32>,
    seq_lens: Vec<i32>,
}

impl DecodeRows {
    fn with_capacity(rows: usize) -> Self {
        let [page_indptr, last_page_len, seq_lens] = [rows + 1, rows, rows].map(Vec::with_capacity);
        Self { page_indptr, last_page_len, seq_lens }
    }

    fn fill(
        &mut self,
        step: &FlashInferStep,
        query_start_loc: &[i32],
        seq_lens: &[i32],
        rows: usize,
    ) -> Result<()> {
        let decodes = step.split.decodes;
        let lens = query_start_loc[..=decodes].windows(2).map(|w| w[1] - w[0]);
        let live = lens.clone().take_while(|&l| l == 1).count();
        if lens.skip(live).any(|l| l != 0) || live > rows {
            return Err(AttentionError::Inputs(
                "decodes that do not come first, one new token each, with rows without tokens behind them"
                    .into(),
            ));
        }
        let pages = &step.pages;
        let put = |to: &mut Vec<i32>, from: &[i32], len: usize, rest: i32| {
            to.clear();
            to.extend_from_slice(from);
            to.resize(len, rest);
        };
        put(&mut self.page_indptr, &pages.indptr[..=live], rows + 1, pages.indptr[live]);
        put(&mut self.last_page_len, &pages.last_page_len[..live], rows, 0);
        put(&mut self.seq_lens, &seq_lens[..live], rows, 0);
        Ok(())
    }
}

impl MetadataBuilder for FlashInferBuilder {
    type Exec = CudaExec;
    type Config = FlashInferConfig;
    type Metadata = FlashInferMetadata;

    fn plan(group: &GroupInfo, rules: &RuleBook, _: &FlashInferConfig) -> Result<BuilderPlan> {
        let (shape, _) = shape_of(group)?;
        if group.fast_prefill {
            // A chunk that doesn't end its prompt leaves a request without rows in front of others' last rows, which
            // a plan of decodes has no place for.
            return Err(refuse(
                NAME,
                "--kv-sharing-fast-prefill",
                "leave it out, or choose another backend with --attention-backend (CUDA_ATTN takes it)",
            ));
        }
        let (reqs, tokens) = (group.max_num_reqs, group.max_num_tokens);
        let table = |kind, tokens| shape.table_bytes(kind, USUAL_MULTIPROCESSORS, reqs, tokens);
        // Which kinds prefills are planned by depends on what is built: both at most.
        let tables = table(Kind::Fa2, reqs) + table(Kind::Fa3, tokens) + table(Kind::Fa2, tokens);
        let lists = 3 * (3 * reqs + 2) + max_pages(group, &shape);
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: rules.reorder_batch_threshold,
            persistent_bytes: (tables + lists * size_of::<i32>()) as u64,
            workspace_bytes: shape.float_bytes(USUAL_MULTIPROCESSORS) as u64,
        })
    }

    fn new(cx: &CudaExec, group: &GroupInfo, _: &BuilderPlan, _: &FlashInferConfig) -> Result<Self> {
        let (shape, dtype) = shape_of(group)?;
        let named = module_dtype(dtype)
            .ok_or_else(|| refuse(NAME, format!("a KV cache of {dtype}"), "use bfloat16 or float16"))?;
        let arch = cx.info().arch().to_string();
        let window = group.spec.sliding_window();
        let want = Want {
            kind: Kind::Fa2,
            dtype: named,
            head_size: shape.head_size,
            sliding_window: window.is_some(),
            soft_cap: false,
            arch: Some(&arch),
        };
        let folder =
            installed().as_ref().map_err(|e| refuse(NAME, e.to_string(), "mend or remove that folder"))?;
        let (fa2, by) = modules(folder, want)
            .map_err(|w| refuse(NAME, format!("{} is not built", w.file()), &w.command()))?;
        let fa2 = open(NAME, cx, fa2)?;
        let (reqs, tokens) = (group.max_num_reqs, group.max_num_tokens);
        let prefills = by.into_iter().map(|w| Half::new(cx, open(NAME, cx, w)?, &shape, reqs, tokens));
        let heads = PlanHeads {
            num_heads: shape.heads,
            num_kv_heads: shape.kv_heads,
            head_size: shape.head_size,
            scale: 1.0,
            window,
            logits_soft_cap: 0.0,
            q_dtype: dtype,
            kv_dtype: dtype,
            out_dtype: dtype,
            fixed_split_size: None,
            disable_split_kv: false,
        };
        let floats = Tensor::zeros(cx, DType::U8, &[shape.float_bytes(cx.info().multiprocessors)])?;
        Ok(Self {
            shape,
            config: StepConfig {
                decode: DecodeKernel::Planned,
                prefill: PrefillKernel::Planned,
                threshold: 1,
                page_size: shape.page_size,
                heads,
            },
            max_num_reqs: reqs,
            max_num_tokens: tokens,
            step: FlashInferStep::default(),
            starts: (0..=reqs as i32).collect(),
            // fa2's plan, a new token a request.
            decodes: Half::new(cx, fa2, &shape, reqs, reqs)?,
            prefills: prefills.collect::<Result<_>>()?,
            rows: DecodeRows::with_capacity(reqs),
            page_indices: Persistent::new(cx, max_pages(group, &shape))?,
            floats: Arc::new(floats),
        })
    }

    fn build(&mut self, cx: &CudaExec, common: &CommonAttentionMetadata) -> Result<FlashInferMetadata> {
        self.check(common)?;
        self.step.fill(common, &self.config)?;
        let (x, step, shape) = (&common.inputs, &self.step, self.shape);
        let (starts, lens) = (x.query_start_loc.host(), &x.seq_lens_upper_bound);
        let pages = &step.pages;
        let highest = pages.indices.iter().copied().max().unwrap_or(-1);
        if pages.indices.len() > self.page_indices.capacity() || pages.indices.iter().any(|&p| p < 0) {
            return Err(AttentionError::Inputs(format!(
                "{} pages, up to number {highest}, of at most {}",
                pages.indices.len(),
                self.page_indices.capacity()
            )));
        }
        let planner = Planner {
            cx,
            shape: &shape,
            floats: &self.floats,
            page_indices: put(cx, &mut self.page_indices, &pages.indices),
            pages_end: (highest + 1) as usize,
            window_left: self.config.heads.window_left(),
        };
        let mut decodes = None;
        if step.decode_plan.is_some() {
            // A batch of decodes alone may be a graph's: its padding is planned too, as far as there can be requests.
            let alone = step.prefill_plan.is_none();
            let padded = x.num_actual_tokens.min(self.max_num_reqs);
            let rows = if alone { padded } else { step.split.decode_tokens };
            let of = &mut self.rows;
            of.fill(step, starts, lens, rows)?;
            let requests = Requests {
                query_start_loc: &self.starts[..=rows],
                page_indptr: &of.page_indptr,
                last_page_len: &of.last_page_len,
                seq_lens: &of.seq_lens,
                rows: 0..rows,
                // One row a request sees all of its keys.
                causal: false,
                decode_graph: alone,
            };
            decodes = planner.part(&mut self.decodes, &requests)?;
        }
        let first = decodes.as_ref().map_or(0, |d| d.rows.end);
        let mut prefills = vec![];
        if let Some(call) = &step.prefill_plan {
            let tokens = step.prefill_start_loc.last().map_or(0, |&t| t as usize);
            let requests = Requests {
                query_start_loc: &step.prefill_start_loc,
                page_indptr: pages.bounds(call.requests.clone()),
                last_page_len: &pages.last_page_len[call.requests.clone()],
                seq_lens: &lens[call.requests.clone()],
                rows: first..first + tokens,
                causal: call.causal,
                decode_graph: false,
            };
            for half in &mut self.prefills {
                prefills.extend(planner.part(half, &requests)?);
            }
        }
        let planned = prefills.first().map_or(first, |p| p.rows.end);
        Ok(FlashInferMetadata {
            shape,
            decodes,
            prefills,
            window_left: self.config.heads.window_left(),
            padding: planned..x.num_actual_tokens.max(planned),
            split: step.split.into(),
        })
    }

    fn split(metadata: &FlashInferMetadata) -> DecodeSplit {
        metadata.split
    }

    fn frozen(m: &FlashInferMetadata) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut h = DefaultHasher::new();
        for part in m.decodes.iter().chain(&m.prefills) {
            let b = &part.batch;
            part.plan.numbers().hash(&mut h);
            [&b.query_start_loc, &b.page_indptr, &b.page_indices, &b.last_page_len]
                .map(|v| v.addr())
                .hash(&mut h);
            (part.rows.clone(), part.kind, part.causal).hash(&mut h);
        }
        (m.prefills.len(), m.padding.clone()).hash(&mut h);
        h.finish()
    }
}

/// Pages of the largest batch.
fn max_pages(group: &GroupInfo, shape: &PagedShape) -> usize {
    group.max_num_reqs * group.max_model_len.div_ceil(shape.page_size.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::{Entry, FLASHINFER, MANIFEST, Manifest, Mask, RECIPE};
    use headway_attention::{StepInputs, step::batch::BatchSplit};
    use headway_tensor::Dual;

    fn config(page_size: usize) -> StepConfig {
        let heads = PlanHeads {
            num_heads: 4,
            num_kv_heads: 2,
            head_size: 64,
            scale: 1.0,
            window: None,
            logits_soft_cap: 0.0,
            q_dtype: DType::BF16,
            kv_dtype: DType::BF16,
            out_dtype: DType::BF16,
            fixed_split_size: None,
            disable_split_kv: false,
        };
        let (decode, prefill) = (DecodeKernel::Planned, PrefillKernel::Planned);
        StepConfig { decode, prefill, threshold: 1, page_size, heads }
    }

    /// A step of requests with so many new tokens and tokens in all, pages of 16.
    fn step(requests: &[(i32, i32)]) -> (FlashInferStep, Vec<i32>, Vec<i32>) {
        let mut starts = vec![0];
        requests.iter().for_each(|r| starts.push(starts.last().unwrap() + r.0));
        let lens: Vec<i32> = requests.iter().map(|r| r.1).collect();
        let (rows, stride) = (requests.len(), 4);
        let inputs =
            StepInputs::new(Dual::from_vec(starts.clone()), View::from_vec(lens.clone()), lens.clone());
        let table = (0..(rows * stride) as i32).map(|i| i + 1).collect();
        let slots = View::from_vec(vec![-1; *starts.last().unwrap() as usize]);
        let common =
            CommonAttentionMetadata::new(Arc::new(inputs.unwrap()), Dual::from_vec(table), stride, slots);
        let mut step = FlashInferStep::default();
        step.fill(&common.unwrap(), &config(16)).unwrap();
        (step, starts, lens)
    }

    #[test]
    fn padding_of_a_batch_of_decodes_is_rows_without_keys() {
        let (step, starts, lens) = step(&[(1, 20), (1, 5), (0, 0), (0, 0)]);
        let mut of = DecodeRows::with_capacity(5);
        // What an earlier step left.
        of.fill(&step, &starts, &lens, 3).unwrap();
        of.fill(&step, &starts, &lens, 5).unwrap();
        assert_eq!(of.page_indptr, [0, 2, 3, 3, 3, 3]);
        assert_eq!((of.last_page_len, of.seq_lens), (vec![4, 5, 0, 0, 0], vec![20, 5, 0, 0, 0]));
        assert_eq!(step.pages.indices, [1, 2, 5]);
    }

    #[test]
    fn decodes_in_a_mixed_batch_are_their_rows_alone() {
        let (step, starts, lens) = step(&[(1, 17), (1, 16), (3, 30)]);
        assert_eq!(step.split, BatchSplit { decodes: 2, prefills: 1, decode_tokens: 2, prefill_tokens: 3 });
        let mut of = DecodeRows::default();
        of.fill(&step, &starts, &lens, 2).unwrap();
        assert_eq!((of.page_indptr, of.last_page_len), (vec![0, 2, 3], vec![1, 16]));
        assert_eq!(step.pages.bounds(2..3), [3, 5]);
    }

    #[test]
    fn a_row_without_a_token_before_a_decode_is_refused() {
        let (step, starts, lens) = step(&[(1, 4), (0, 0), (1, 4)]);
        for rows in [3, 0] {
            assert!(DecodeRows::default().fill(&step, &starts, &lens, rows).is_err());
        }
    }

    #[test]
    fn layers_of_several_windows_and_chunks_have_no_plan() {
        use headway_attention::group::kv::spec::AttentionSpec;
        let attention = AttentionSpec::new(16, 2, 64, DType::BF16);
        let said = |spec: KvCacheSpec| {
            let group = GroupInfo::new(spec, 8);
            FlashInferBuilder::plan(&group, &RuleBook::default(), &FlashInferConfig::default())
                .map_err(|e| e.to_string())
        };
        let promoted = AttentionSpec { sliding_window_mask: Some(64), ..attention.clone() };
        let e = said(KvCacheSpec::Full(promoted)).unwrap_err();
        assert!(e.contains("windows of 64 and others in one cache") && e.contains("CUDA_ATTN"), "{e}");
        let chunked = KvCacheSpec::ChunkedLocal { attention: attention.clone(), attention_chunk_size: 64 };
        assert!(said(chunked).unwrap_err().contains("ChunkedLocal"));
        let windowed = KvCacheSpec::SlidingWindow { attention: attention.clone(), sliding_window: 64 };
        assert!(said(windowed).is_ok() && said(KvCacheSpec::Full(attention.clone())).is_ok());
        let fast = GroupInfo { fast_prefill: true, ..GroupInfo::new(KvCacheSpec::Full(attention), 8) };
        let e = FlashInferBuilder::plan(&fast, &RuleBook::default(), &FlashInferConfig::default());
        let e = e.unwrap_err().to_string();
        assert!(e.contains("--kv-sharing-fast-prefill") && e.contains("CUDA_ATTN takes it"), "{e}");
    }

    #[test]
    fn tables_of_decodes_are_of_as_many_requests_as_there_are() {
        use headway_attention::group::kv::spec::AttentionSpec;
        let spec = KvCacheSpec::Full(AttentionSpec::new(16, 8, 128, DType::BF16));
        let bytes = |max_num_tokens| {
            let group = GroupInfo {
                max_num_reqs: 256,
                max_num_tokens,
                max_model_len: 4096,
                ..GroupInfo::new(spec.clone(), 32)
            };
            FlashInferBuilder::plan(&group, &RuleBook::default(), &FlashInferConfig::default())
                .unwrap()
                .persistent_bytes
        };
        let shape = PagedShape { heads: 32, kv_heads: 8, head_size: 128, page_size: 16 };
        let prefills = |tokens| {
            shape.table_bytes(Kind::Fa2, 132, 256, tokens) + shape.table_bytes(Kind::Fa3, 132, 256, tokens)
        };
        // What more tokens cost is the prefills' alone.
        assert_eq!(bytes(16384) - bytes(1024), (prefills(16384) - prefills(1024)) as u64);
    }

    #[test]
    fn prefills_are_planned_for_every_form_of_layer() {
        let entry = |kind: Kind, soft_cap| Entry {
            file: format!("{kind}-{soft_cap}.so"),
            kind,
            dtype: "bfloat16".into(),
            head_size: 64,
            sliding_window: false,
            soft_cap,
            masks: vec![Mask::None, Mask::Causal],
            arch: "sm_90a".into(),
            flashinfer: FLASHINFER.into(),
            recipe: RECIPE,
            nvcc: "13.0.88".into(),
            bytes: 1,
            sha256: String::new(),
            functions: Default::default(),
        };
        let chosen = |all: Vec<Entry>| {
            let dir = tempfile::tempdir().unwrap();
            let manifest = Manifest { modules: all, ..Manifest::default() };
            std::fs::write(dir.path().join(MANIFEST), manifest.write()).unwrap();
            let want = Want {
                kind: Kind::Fa2,
                dtype: "bfloat16",
                head_size: 64,
                sliding_window: false,
                soft_cap: false,
                arch: Some("sm_90a"),
            };
            let folder = ModuleFolder::open(dir.path()).unwrap();
            let kinds = |by: Vec<Want<'_>>| by.iter().map(|w| (w.kind, w.soft_cap)).collect::<Vec<_>>();
            modules(&folder, want).map(|(fa2, by)| (fa2.soft_cap, kinds(by))).map_err(|w| w.file())
        };
        let (fa2, fa3) = (|cap| entry(Kind::Fa2, cap), |cap| entry(Kind::Fa3, cap));
        assert_eq!(chosen(vec![fa2(false)]), Ok((false, vec![(Kind::Fa2, false)])));
        assert_eq!(chosen(vec![fa2(true)]), Ok((true, vec![(Kind::Fa2, true)])));
        assert_eq!(chosen(vec![fa2(false), fa3(false)]), Ok((false, vec![(Kind::Fa3, false)])));
        // A layer with a cap would find no module for fa3's plan.
        assert_eq!(
            chosen(vec![fa2(false), fa2(true), fa3(false)]),
            Ok((false, vec![(Kind::Fa3, false), (Kind::Fa2, false)]))
        );
        assert_eq!(chosen(vec![fa3(false)]), Err("flashinfer-fa2-bfloat16-d64-sm_90a.so".into()));
    }
}
