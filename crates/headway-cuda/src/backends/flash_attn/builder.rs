//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: decides the form of a step's launch and has
//! its schedule made, once for all layers; owns the schedule's memory and the scratch memory that layers share.

use super::{
    FlashAttnConfig,
    form::Room,
    rows::{uniform_len, with_padding},
    rules::NAME,
};
use crate::{
    CudaExec,
    backends::{
        common::{StepLimits, refuse},
        extensions::{open, pages_end},
    },
    kernels::flash_attn::{FlashBatch, FlashShape, Form, Schedule, operand, schedule},
    modules::extension::{Extension, Extensions},
};
use headway_attention::{
    AttentionError, BuilderPlan, Causal, CommonAttentionMetadata, GroupInfo, KvCacheSpec, MetadataBuilder,
    Result, RuleBook,
    group::kv::spec::{KvQuantMode, TokensPerState},
};
use headway_tensor::{DType, DeviceMem, Exec, Persistent, Tensor, View};
use std::{ops::Range, sync::Arc};

/// Multiprocessors where the device is not known yet.
const USUAL_MULTIPROCESSORS: u32 = 132;

/// Builds [`FlashAttnMetadata`].
pub struct FlashAttnBuilder {
    module: Arc<Extension>,
    shape: FlashShape,
    dtype: DType,
    window: Option<usize>,
    limits: StepLimits,
    room: Room,
    /// By new tokens of a request, bounds of batches in which all have so many.
    uniform: Vec<(usize, View<i32>)>,
    /// Bounds of steps that graphs serve.
    starts: Persistent<i32>,
    memory: Arc<Tensor>,
    scratch: Arc<Tensor>,
    /// Room for a step's queries in 8 bits, where the cache is.
    codes: Option<Arc<dyn DeviceMem>>,
}

/// A step's launch: its form, schedule and batch.
#[derive(Clone, Debug)]
pub struct FlashAttnMetadata {
    pub(super) shape: FlashShape,
    pub(super) form: Form,
    pub(super) batch: FlashBatch,
    /// `None`: each run makes its own.
    pub(super) schedule: Option<Schedule>,
    pub(super) scratch: Arc<Tensor>,
    /// Where a layer's queries go in 8 bits.
    pub(super) codes: Option<Arc<dyn DeviceMem>>,
    /// Rows that no request has, or may have: zeroed before the launch.
    pub(super) padding: Range<usize>,
}

/// Shape, element type and window of a group.
fn shape_of(group: &GroupInfo) -> Result<(FlashShape, DType)> {
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
    let plain = matches!(attention.quant, KvQuantMode::None | KvQuantMode::Fp8PerTensor)
        && attention.tokens_per_state == TokensPerState::ONE
        && attention.num_head_slots.is_none_or(|n| n == attention.num_kv_heads)
        && attention.state_content_bytes.is_none()
        && attention.chunk_mask.is_none()
        && attention.cache_format.is_none()
        && attention.head_size == attention.head_size_v;
    if !plain {
        return Err(refuse(
            NAME,
            "a packed, compressed or chunked KV cache, one with scales of its own, or values of another size than keys",
            "keys and values of one token each, of 16 bits or in fp8, are",
        ));
    }
    let shape = FlashShape {
        heads: group.num_heads,
        kv_heads: attention.num_kv_heads,
        head_size: attention.head_size,
        page_size: group.kernel_block_size,
    };
    shape
        .check(attention.dtype)
        .map_err(|why| refuse(NAME, why, "choose another backend for these layers"))?;
    Ok((shape, attention.dtype))
}

/// Bytes of a step's queries in 8 bits; none where the cache is not.
fn code_bytes(group: &GroupInfo, shape: &FlashShape, dtype: DType) -> usize {
    if dtype == DType::F8E4M3 { group.max_num_tokens * shape.heads * shape.head_size } else { 0 }
}

impl FlashAttnBuilder {
    fn check(&self, common: &CommonAttentionMetadata) -> Result<()> {
        self.limits.check(NAME, common)?;
        if common.inputs.mm_prefix_ranges.as_ref().is_some_and(|r| r.iter().any(|r| !r.is_empty())) {
            return Err(refuse(NAME, "bidirectional multimodal prefixes", "choose another backend"));
        }
        match common.causal() {
            Causal::All(true) => Ok(()),
            _ => Err(refuse(NAME, "requests that see keys after their own", "choose another backend")),
        }
    }

    /// The batch on the device, and the rows that no request has.
    fn batch(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
    ) -> Result<(FlashBatch, Range<usize>)> {
        let x = &common.inputs;
        let (tokens, reqs) = (x.num_actual_tokens, x.num_reqs);
        let live = x.query_start_loc.host().last().map_or(0, |&t| t as usize);
        let uniform = uniform_len(x).and_then(|n| self.uniform.iter().find(|u| u.0 == n));
        let (starts, rows, taken) = match uniform {
            // A launch for all batches of so many rows.
            _ if self.room.is_mixed_graph(tokens, reqs) && live > 0 => {
                let bounds = with_padding(x);
                let starts = self.starts.update(cx, bounds.len(), |to, changes| {
                    for (i, (to, bound)) in to.iter_mut().zip(&bounds).enumerate() {
                        if to != bound {
                            *to = *bound;
                            changes.add(i..i + 1);
                        }
                    }
                });
                let taken = bounds.last().map_or(0, |&t| t as usize);
                (starts.dev().clone(), tokens, taken)
            }
            // Rows of padding are requests without keys, and come out as zeros.
            Some((_, starts)) if starts.len() > reqs => (starts.slice(0..reqs + 1), tokens, tokens),
            _ => (x.query_start_loc.dev().clone(), live, live),
        };
        let batch = FlashBatch {
            query_start_loc: starts,
            seq_lens: x.seq_lens.clone(),
            block_table: common.block_table.dev().clone(),
            table_stride: common.block_table_stride,
            pages_end: pages_end(common, reqs, self.shape.page_size)?,
            rows,
        };
        Ok((batch, taken..tokens.max(taken)))
    }
}

impl MetadataBuilder for FlashAttnBuilder {
    type Exec = CudaExec;
    type Config = FlashAttnConfig;
    type Metadata = FlashAttnMetadata;
    const UPDATES_BLOCK_TABLE: bool = true;

    fn plan(group: &GroupInfo, rules: &RuleBook, _: &FlashAttnConfig) -> Result<BuilderPlan> {
        let (shape, dtype) = shape_of(group)?;
        let numbers = FlashShape::schedule_len(group.max_num_reqs) + 3 * (group.max_num_reqs + 1);
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: rules.reorder_batch_threshold,
            persistent_bytes: (numbers * size_of::<i32>()) as u64,
            workspace_bytes: (Room::of(group, shape, USUAL_MULTIPROCESSORS).scratch_bytes()
                + code_bytes(group, &shape, dtype)) as u64,
        })
    }

    fn new(cx: &CudaExec, group: &GroupInfo, _: &BuilderPlan, _: &FlashAttnConfig) -> Result<Self> {
        let (shape, dtype) = shape_of(group)?;
        if operand(dtype).is_none() {
            return Err(refuse(
                NAME,
                format!("a KV cache of {dtype}"),
                "use bfloat16, float16 or fp8 (e4m3)",
            ));
        }
        let module = open(NAME, Extensions::FlashAttention3)?;
        let room = Room::of(group, shape, cx.info().multiprocessors);
        let mut uniform = vec![];
        for n in [1, 1 + group.num_speculative_tokens] {
            if uniform.iter().any(|u: &(usize, View<i32>)| u.0 == n) {
                continue;
            }
            let reqs = group.max_num_reqs.max(group.max_num_tokens / n);
            let starts = Persistent::new(cx, reqs + 1)?.write(cx, reqs + 1, |to| {
                to.iter_mut().enumerate().for_each(|(i, t)| *t = (i * n) as i32);
            });
            uniform.push((n, starts));
        }
        let codes = match code_bytes(group, &shape, dtype) {
            0 => None,
            n => cx.alloc(n)?,
        };
        let zeros = |dtype, len: usize| Ok::<_, AttentionError>(Arc::new(Tensor::zeros(cx, dtype, &[len])?));
        Ok(Self {
            module,
            shape,
            dtype,
            window: group.spec.sliding_window(),
            limits: StepLimits::of(group),
            room,
            uniform,
            starts: Persistent::new(cx, group.max_num_reqs + 1)?,
            memory: zeros(DType::I32, FlashShape::schedule_len(group.max_num_reqs))?,
            scratch: zeros(DType::U8, room.scratch_bytes())?,
            codes,
        })
    }

    fn build(&mut self, cx: &CudaExec, common: &CommonAttentionMetadata) -> Result<FlashAttnMetadata> {
        self.check(common)?;
        let (batch, padding) = self.batch(cx, common)?;
        let x = &common.inputs;
        let lens = x.query_start_loc.host().windows(2).map(|w| (w[1] - w[0]) as usize);
        let (q_bound, splits) = self.room.form(lens, batch.rows, x.num_reqs);
        let form = Form {
            q_bound,
            k_bound: batch.table_stride * self.shape.page_size,
            splits,
            causal: true,
            window_left: window_left(self.window),
        };
        let none = batch.rows == 0;
        let make = || schedule(cx, &self.module, &self.shape, self.dtype, form, &batch, &self.memory);
        let schedule = (!none).then(make).transpose()?;
        Ok(FlashAttnMetadata {
            shape: self.shape,
            form,
            batch,
            schedule,
            scratch: Arc::clone(&self.scratch),
            codes: self.codes.clone(),
            padding,
        })
    }

    fn build_for_capture(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
    ) -> Result<FlashAttnMetadata> {
        let mut metadata = self.build(cx, common)?;
        // Of more rows than requests, nobody may be left to take the padding of a step that is replayed.
        let (rows, reqs) = (metadata.batch.rows, metadata.batch.seq_lens.len());
        if rows > reqs && self.room.is_mixed_graph(rows, reqs) {
            metadata.padding = 0..rows;
        }
        Ok(metadata)
    }

    fn update_block_table(
        &mut self,
        cx: &CudaExec,
        first: &FlashAttnMetadata,
        common: &CommonAttentionMetadata,
    ) -> Result<FlashAttnMetadata> {
        self.check(common)?;
        let (batch, padding) = self.batch(cx, common)?;
        // A schedule knows lengths and no pages, but tables of another width are another form.
        let same = (first.shape, first.form.window_left, first.batch.table_stride, first.batch.rows);
        if same != (self.shape, window_left(self.window), batch.table_stride, batch.rows) {
            return Err(AttentionError::Inputs(
                "block-table update from a group of other heads or windows, or of another batch".into(),
            ));
        }
        let (scratch, codes) = (Arc::clone(&self.scratch), self.codes.clone());
        Ok(FlashAttnMetadata { batch, padding, scratch, codes, ..first.clone() })
    }

    fn frozen(m: &FlashAttnMetadata) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut h = DefaultHasher::new();
        let b = &m.batch;
        [b.query_start_loc.addr(), b.seq_lens.addr(), b.block_table.addr()].hash(&mut h);
        // Not the padding: a graph zeros all rows that can be some.
        (b.table_stride, b.rows, b.seq_lens.len()).hash(&mut h);
        (m.form, m.schedule.as_ref().map(Schedule::frozen), m.scratch.view().device_addr()).hash(&mut h);
        m.codes.as_ref().map(|c| c.addr()).hash(&mut h);
        h.finish()
    }
}

/// Keys before a row's own that it sees; −1: all.
pub(super) fn window_left(window: Option<usize>) -> i32 {
    window.map_or(-1, |w| i32::try_from(w.saturating_sub(1)).unwrap_or(-1))
}

#[cfg(test)]
mod tests {
    use super::window_left;

    #[test]
    fn windows_count_keys_before_the_own() {
        assert_eq!([None, Some(1), Some(128)].map(window_left), [-1, 0, 127]);
    }
}
