//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: splits a step, plans its decodes once for
//! all layers, and owns the workspaces and the page list.

use super::{
    FlashInferMlaConfig,
    rows::DecodeRows,
    rules::{LATENT, NAME, want},
};
use crate::{
    CudaExec,
    backends::{
        common::refuse,
        latent::{LatentGroup, LatentSizes, MOST_SHARED, PrefillWork},
        modules::{is_built, open},
    },
    kernels::flashinfer::{
        LatentBatch, LatentInputs, LatentShape, Plan, PlanMemory, divides_tiles, plan_latent,
    },
    modules::{Kind, Module, module_dtype},
};
use headway_attention::{
    AttentionError, BuilderPlan, CommonAttentionMetadata, DecodeSplit, GroupInfo, MetadataBuilder, Result,
    RuleBook,
    group::{arith::mla::capture_decodes_only, kv::block_table::BlockRows},
};
use headway_tensor::{DType, Persistent, Tensor};
use std::sync::Arc;

/// Multiprocessors where the device is not known yet.
const USUAL_MULTIPROCESSORS: u32 = 132;

/// Builds [`FlashInferMlaMetadata`].
pub struct FlashInferMlaBuilder {
    group: LatentGroup,
    shape: LatentShape,
    module: Arc<Module>,
    rows: DecodeRows,
    memory: PlanMemory,
    floats: Arc<Tensor>,
    page_indices: Persistent<i32>,
}

/// A step's plan and passes, with the memory that its layers run in.
#[derive(Debug)]
pub struct FlashInferMlaMetadata {
    pub(super) shape: LatentShape,
    pub(super) decodes: Option<Decodes>,
    pub(super) prefills: PrefillWork,
    split: DecodeSplit,
}

/// Planned decodes.
#[derive(Debug)]
pub(super) struct Decodes {
    pub module: Arc<Module>,
    pub plan: Plan,
    pub batch: LatentBatch,
}

impl FlashInferMlaMetadata {
    /// How often the prefills' workspace is filled.
    pub fn num_passes(&self) -> usize {
        self.prefills.passes.len()
    }
}

/// The sizes of a group on a device with so much shared memory a block.
fn sizes(group: &GroupInfo, config: &FlashInferMlaConfig, shared_per_block: usize) -> Result<LatentSizes> {
    let sizes = LatentSizes::new(NAME, group, config.workspace_tokens, shared_per_block)?;
    let choose = |what: String| refuse(NAME, what, "choose another backend for these layers");
    if (sizes.dims.rank, sizes.dims.rope) != LATENT {
        return Err(choose(format!("latents of {} + {}", sizes.dims.rank, sizes.dims.rope)));
    }
    if group.batch_invariant {
        return Err(choose("batch invariance".into()));
    }
    if sizes.threshold > 1 && !divides_tiles(sizes.dims.heads) {
        return Err(choose(format!("drafts with {} heads", sizes.dims.heads)));
    }
    Ok(sizes)
}

/// Pages of the largest batch of decodes.
fn max_pages(group: &GroupInfo) -> usize {
    group.max_num_reqs * group.max_model_len.div_ceil(group.kernel_block_size.max(1))
}

impl MetadataBuilder for FlashInferMlaBuilder {
    type Exec = CudaExec;
    type Config = FlashInferMlaConfig;
    type Metadata = FlashInferMlaMetadata;

    fn plan(group: &GroupInfo, rules: &RuleBook, config: &FlashInferMlaConfig) -> Result<BuilderPlan> {
        let sizes = sizes(group, config, MOST_SHARED)?;
        let shape = LatentShape { dims: sizes.dims, page_size: group.kernel_block_size };
        let tables = LatentShape::table_bytes(USUAL_MULTIPROCESSORS);
        let lists = max_pages(group) * size_of::<i32>() + sizes.list_bytes(group);
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: Some(sizes.threshold),
            persistent_bytes: (tables + lists) as u64,
            workspace_bytes: (sizes.bytes() + shape.float_bytes(USUAL_MULTIPROCESSORS)) as u64,
        })
    }

    fn new(cx: &CudaExec, group: &GroupInfo, _: &BuilderPlan, config: &FlashInferMlaConfig) -> Result<Self> {
        let sizes = sizes(group, config, cx.info().shared_per_block as usize)?;
        let dtype = sizes.cache;
        let named = module_dtype(dtype)
            .ok_or_else(|| refuse(NAME, format!("a KV cache of {dtype}"), "use bfloat16 or float16"))?;
        let hopper = is_built(cx, want(Kind::MlaFa3, named));
        let kind = if hopper { Kind::MlaFa3 } else { Kind::MlaFa2 };
        let shape = LatentShape { dims: sizes.dims, page_size: group.kernel_block_size };
        let multiprocessors = cx.info().multiprocessors;
        let most = shape.most_tokens(multiprocessors);
        if sizes.decode_tokens > most {
            return Err(refuse(
                NAME,
                format!("steps with {} new tokens of decodes", sizes.decode_tokens),
                &format!("FlashInfer's tables hold {most}: lower --max-num-seqs"),
            ));
        }
        let floats = Tensor::zeros(cx, DType::U8, &[shape.float_bytes(multiprocessors)])?;
        Ok(Self {
            module: open(NAME, cx, want(kind, named))?,
            group: LatentGroup::new(cx, NAME, group, sizes)?,
            shape,
            rows: DecodeRows::default(),
            memory: PlanMemory::new(cx, LatentShape::table_bytes(multiprocessors))?,
            floats: Arc::new(floats),
            page_indices: Persistent::new(cx, max_pages(group).max(1))?,
        })
    }

    fn build(&mut self, cx: &CudaExec, common: &CommonAttentionMetadata) -> Result<FlashInferMlaMetadata> {
        let (split, prefills) = self.group.split(cx, common)?;
        let decodes = if split.decode_tokens > 0 { Some(self.decodes(cx, common, split)?) } else { None };
        Ok(FlashInferMlaMetadata { shape: self.shape, decodes, prefills, split })
    }

    fn build_for_capture(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
    ) -> Result<FlashInferMlaMetadata> {
        capture_decodes_only(common, self.group.sizes.threshold)?;
        self.build(cx, common)
    }

    fn split(metadata: &FlashInferMlaMetadata) -> DecodeSplit {
        metadata.split
    }

    fn frozen(m: &FlashInferMlaMetadata) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut h = DefaultHasher::new();
        if let Some(d) = &m.decodes {
            d.plan.numbers().hash(&mut h);
            (d.batch.page_indices.addr(), d.batch.rows, d.batch.causal).hash(&mut h);
        }
        let space = &m.prefills.workspace;
        [space.q_latent.addr(), space.out_latent.addr()].hash(&mut h);
        (m.split.decode_tokens, m.prefills.passes.len()).hash(&mut h);
        h.finish()
    }
}

impl FlashInferMlaBuilder {
    fn decodes(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
        split: DecodeSplit,
    ) -> Result<Decodes> {
        let (x, shape) = (&common.inputs, &self.shape);
        let table = BlockRows {
            blocks: common.block_table.host(),
            stride: common.block_table_stride,
            block_size: shape.page_size,
        };
        let starts = &x.query_start_loc.host()[..=split.decodes];
        let rows = &mut self.rows;
        rows.fill(starts, &x.seq_lens_upper_bound[..split.decodes], table, split.decode_tokens)?;
        let pages = &rows.pages.indices;
        if pages.len() > self.page_indices.capacity() {
            return Err(AttentionError::Inputs(format!(
                "{} pages of decodes, of at most {}",
                pages.len(),
                self.page_indices.capacity()
            )));
        }
        let inputs = LatentInputs {
            query_start_loc: &rows.query_start_loc,
            page_indptr: &rows.page_indptr,
            seq_lens: &rows.seq_lens,
            // One row a request sees all of its keys.
            causal: rows.several,
        };
        let plan = plan_latent(cx, &self.module, shape, &mut self.memory, &self.floats, &inputs)?;
        let batch = LatentBatch {
            page_indices: self.page_indices.write(cx, pages.len(), |to| to.copy_from_slice(pages)),
            pages_end: pages.iter().max().map_or(0, |&p| p as usize + 1),
            rows: split.decode_tokens,
            causal: rows.several,
        };
        Ok(Decodes { module: Arc::clone(&self.module), plan, batch })
    }
}
