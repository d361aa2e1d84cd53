//! Step inputs: from the scheduler's plan to token ids, positions, lengths, block tables and slot
//! mappings, in buffers that live as long as the model.

use super::extent::Extent;
use crate::models::decoder::{DecoderInput, EncoderInput, FastPrefillInput};
use crate::scheduler::{RequestId, ScheduledRequest, StepPlan};
use headway_attention::{
    AttentionError, Causal, CommonAttentionMetadata, KvCacheSpec, Result, StepInputs,
    group::kv::block_table::{SKIP_SLOT, slot},
};
use headway_tensor::{Dual, Exec, Persistent, View};
use std::{ops::Range, sync::Arc};

/// What a step's forward pass reads besides metadata.
pub(super) struct TokenInputs {
    pub token_ids: View<i32>,
    pub positions: View<i32>,
    pub logits_rows: View<i32>,
    /// What the encoder reads in this step.
    pub encoder: Option<EncoderTokens>,
    /// Where the last layers compute the rows of `logits_rows` alone.
    pub fast: Option<FastTokens>,
}

/// From which layer on, and the positions of those rows.
pub(super) struct FastTokens {
    pub first_layer: usize,
    pub positions: View<i32>,
}

/// Tokens of the encoder's inputs, and the position of each in its input.
pub(super) struct EncoderTokens {
    token_ids: View<i32>,
    positions: View<i32>,
}

impl TokenInputs {
    /// As the decoder takes them.
    pub fn decoder(&self) -> DecoderInput<'_> {
        DecoderInput {
            token_ids: &self.token_ids,
            positions: &self.positions,
            logits_rows: &self.logits_rows,
            encoder: self
                .encoder
                .as_ref()
                .map(|e| EncoderInput { token_ids: &e.token_ids, positions: &e.positions }),
            fast_prefill: self
                .fast
                .as_ref()
                .map(|f| FastPrefillInput { first_layer: f.first_layer, positions: &f.positions }),
        }
    }
}

/// Persistent buffers of all steps.
pub(super) struct InputBuffers {
    token_ids: Persistent<i32>,
    positions: Persistent<i32>,
    logits_rows: Persistent<i32>,
    query_start_loc: Persistent<i32>,
    seq_lens: Persistent<i32>,
    /// Where decoders attend to an encoder.
    encoder: Option<EncoderBuffers>,
    /// Tokens of each prompt, where a group has R-SWA.
    prompt_lens: Option<Persistent<i32>>,
    /// Whether each request sees causally, for groups that don't see a prompt so.
    causal: Persistent<u8>,
    groups: Vec<GroupBuffers>,
}

/// Inputs of the encoder, and what cross-attention sees of them.
struct EncoderBuffers {
    token_ids: Persistent<i32>,
    positions: Persistent<i32>,
    query_start_loc: Persistent<i32>,
    seq_lens: Persistent<i32>,
    /// Of every request of the step.
    all_seq_lens: Persistent<i32>,
}

/// A step's inputs by what groups attend to.
struct StepParts {
    decoder: Arc<StepInputs>,
    /// The encoder's own batch, and the decoder's over the encoder's tokens.
    encoder: Option<(Arc<StepInputs>, Arc<StepInputs>)>,
}

/// What the layers of a KV cache group keep.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keeps {
    /// Keys and values of the request's tokens.
    Tokens,
    /// Of its encoder's tokens.
    Encoded,
    /// Nothing: an encoder's layers, which see both ways.
    Nothing,
}

struct GroupBuffers {
    block_size: usize,
    keeps: Keeps,
    non_causal: bool,
    /// Of the longest request.
    max_blocks: usize,
    block_table: Persistent<i32>,
    slot_mapping: Persistent<i64>,
}

impl InputBuffers {
    /// Sized for the largest step; `specs` are the KV cache groups'.
    ///
    /// # Errors
    /// No memory.
    pub(super) fn new(
        cx: &dyn Exec,
        max_num_reqs: usize,
        max_num_tokens: usize,
        max_num_logits: usize,
        max_model_len: usize,
        specs: &[KvCacheSpec],
    ) -> headway_tensor::Result<Self> {
        let rswa = specs.iter().any(|s| matches!(s, KvCacheSpec::Rswa { .. }));
        let groups = specs
            .iter()
            .map(|spec| (spec, spec.block_size()))
            .map(|(spec, block_size)| {
                Ok(GroupBuffers {
                    block_size,
                    keeps: match spec {
                        KvCacheSpec::EncoderOnly(_) => Keeps::Nothing,
                        KvCacheSpec::Cross(_) => Keeps::Encoded,
                        _ => Keeps::Tokens,
                    },
                    non_causal: spec.attention().is_some_and(|a| a.non_causal),
                    max_blocks: max_model_len.div_ceil(block_size),
                    block_table: Persistent::new(cx, max_num_reqs * max_model_len.div_ceil(block_size))?,
                    slot_mapping: Persistent::new(cx, max_num_tokens)?,
                })
            })
            .collect::<headway_tensor::Result<_>>()?;
        let encoder = || -> headway_tensor::Result<_> {
            Ok(EncoderBuffers {
                token_ids: Persistent::new(cx, max_num_tokens)?,
                positions: Persistent::new(cx, max_num_tokens)?,
                query_start_loc: Persistent::new(cx, max_num_reqs + 1)?,
                seq_lens: Persistent::new(cx, max_num_reqs)?,
                all_seq_lens: Persistent::new(cx, max_num_reqs)?,
            })
        };
        Ok(Self {
            token_ids: Persistent::new(cx, max_num_tokens)?,
            positions: Persistent::new(cx, max_num_tokens)?,
            logits_rows: Persistent::new(cx, max_num_logits)?,
            query_start_loc: Persistent::new(cx, max_num_reqs + 1)?,
            seq_lens: Persistent::new(cx, max_num_reqs)?,
            encoder: specs.iter().any(|s| matches!(s, KvCacheSpec::Cross(_))).then(encoder).transpose()?,
            prompt_lens: rswa.then(|| Persistent::new(cx, max_num_reqs)).transpose()?,
            causal: Persistent::new(cx, max_num_reqs)?,
            groups,
        })
    }

    /// How often a buffer could not be recycled because a view of an earlier step was alive.
    pub(super) fn reallocs(&self) -> usize {
        let own =
            [&self.token_ids, &self.positions, &self.logits_rows, &self.query_start_loc, &self.seq_lens];
        let groups = self.groups.iter().map(|g| g.block_table.reallocs() + g.slot_mapping.reallocs());
        let masks = self.prompt_lens.as_ref().map_or(0, Persistent::reallocs) + self.causal.reallocs();
        own.iter().map(|p| p.reallocs()).sum::<usize>() + groups.sum::<usize>() + masks
    }

    /// Writes this step's inputs, padded to `extent`; the common metadata goes into `commons`, one a KV cache group.
    pub(super) fn write<'t>(
        &mut self,
        cx: &dyn Exec,
        plan: &StepPlan,
        extent: Extent,
        table: impl Fn(RequestId, usize) -> Option<&'t [u32]>,
        commons: &mut Vec<CommonAttentionMetadata>,
    ) -> Result<TokenInputs> {
        let (n, padded) = (plan.num_tokens(), extent.reqs);
        let reqs = &plan.requests;
        let token_ids = self.token_ids.write(cx, extent.tokens, |o| {
            o[n..].fill(0);
            o.iter_mut().zip(&plan.token_ids).for_each(|(o, &t)| *o = t as i32);
        });
        let positions = self.positions.write(cx, extent.tokens, |o| {
            o[n..].fill(0);
            for r in reqs {
                let first = r.num_computed_tokens;
                o[r.token_range.clone()].iter_mut().enumerate().for_each(|(i, p)| *p = (first + i) as i32);
            }
        });
        let logits_rows = self.logits_rows.write(cx, extent.logits, |o| {
            o[plan.num_logits()..].fill(0);
            let rows = plan.sampled().flat_map(|r| r.token_range.end - r.num_logits()..r.token_range.end);
            o.iter_mut().zip(rows).for_each(|(o, row)| *o = row as i32);
        });
        let query_start_loc = self.query_start_loc.write_dual(cx, padded + 1, |o| {
            o.fill(n as i32);
            o[0] = 0;
            o[1..].iter_mut().zip(reqs).for_each(|(o, r)| *o = r.token_range.end as i32);
        });
        let seq_lens = self.seq_lens.write(cx, padded, |o| {
            o[reqs.len()..].fill(0);
            o.iter_mut().zip(reqs).for_each(|(o, r)| *o = r.seq_len() as i32);
        });
        let mut bound: Vec<i32> = reqs.iter().map(|r| r.seq_len() as i32).collect();
        bound.resize(padded, 0);
        let (encoder, encoded) = match &mut self.encoder {
            None => (None, None),
            Some(e) => {
                let (tokens, own) = e.write(cx, plan)?;
                (tokens, Some((own, e.seen(cx, plan, query_start_loc.clone())?)))
            }
        };
        let mut inputs = StepInputs::new(query_start_loc, seq_lens, bound)?;
        inputs.num_actual_tokens = extent.tokens;
        inputs.positions = Some(positions.clone());
        inputs.logits_indices = Some(logits_rows.clone());
        let mut is_prefilling: Vec<bool> = reqs.iter().map(|r| r.is_prefilling).collect();
        is_prefilling.resize(padded, false);
        inputs.is_prefilling = Some(is_prefilling);
        if reqs.iter().any(|r| r.bidirectional_ranges.is_some()) {
            let of = |r: &ScheduledRequest| r.bidirectional_ranges.as_deref().map_or(vec![], <[_]>::to_vec);
            inputs.mm_prefix_ranges = Some(reqs.iter().map(of).collect());
        }
        inputs.rswa_prefix_lens = self.prompt_lens.as_mut().map(|lens| {
            lens.write(cx, padded, |o| {
                o[reqs.len()..].fill(0);
                o.iter_mut().zip(reqs).for_each(|(o, r)| *o = r.num_prompt_tokens as i32);
            })
        });
        let parts = StepParts { decoder: Arc::new(inputs), encoder: encoded };
        // A prompt is seen both ways in the one step that computes it; what follows sees what came before.
        let in_prompt = |r: &ScheduledRequest| r.num_computed_tokens < r.num_prompt_tokens;
        let non_causal = self.groups.iter().any(|g| g.non_causal) && reqs.iter().any(in_prompt);
        let causal = non_causal.then(|| {
            Causal::PerRequest(self.causal.write(cx, reqs.len(), |o| {
                o.iter_mut().zip(reqs).for_each(|(o, r)| *o = u8::from(!in_prompt(r)));
            }))
        });
        commons.clear();
        for (index, group) in self.groups.iter_mut().enumerate() {
            let mut common = group.write(cx, plan, &parts, &extent, |id| table(id, index))?;
            if group.non_causal && causal.is_some() {
                common.causal_override.clone_from(&causal);
            }
            commons.push(common);
        }
        Ok(TokenInputs { token_ids, positions, logits_rows, encoder, fast: None })
    }
}

impl EncoderBuffers {
    /// The inputs that begin in this step, and the encoder's batch of them.
    fn write(&mut self, cx: &dyn Exec, plan: &StepPlan) -> Result<(Option<EncoderTokens>, Arc<StepInputs>)> {
        let begin: Vec<&Range<usize>> =
            plan.requests.iter().map(|r| &r.encoder_range).filter(|r| !r.is_empty()).collect();
        let (n, lens) = (plan.encoder_ids.len(), begin.iter().map(|r| r.len() as i32));
        let token_ids = self.token_ids.write(cx, n, |o| {
            o.iter_mut().zip(&plan.encoder_ids).for_each(|(o, &t)| *o = t as i32);
        });
        let positions = self.positions.write(cx, n, |o| {
            for r in &begin {
                o[(*r).clone()].iter_mut().enumerate().for_each(|(i, p)| *p = i as i32);
            }
        });
        let starts = self.query_start_loc.write_dual(cx, begin.len() + 1, |o| {
            o[0] = 0;
            o[1..].iter_mut().zip(&begin).for_each(|(o, r)| *o = r.end as i32);
        });
        let seq_lens = self.seq_lens.write(cx, begin.len(), |o| {
            o.iter_mut().zip(lens.clone()).for_each(|(o, n)| *o = n);
        });
        let inputs = StepInputs::new(starts, seq_lens, lens.collect())?;
        Ok(((n > 0).then_some(EncoderTokens { token_ids, positions }), Arc::new(inputs)))
    }

    /// The decoder's batch over its encoder's tokens.
    fn seen(
        &mut self,
        cx: &dyn Exec,
        plan: &StepPlan,
        query_start_loc: Dual<i32>,
    ) -> Result<Arc<StepInputs>> {
        let lens = || plan.requests.iter().map(|r| r.encoder_len as i32);
        let seq_lens = self.all_seq_lens.write(cx, plan.requests.len(), |o| {
            o.iter_mut().zip(lens()).for_each(|(o, n)| *o = n);
        });
        Ok(Arc::new(StepInputs::new(query_start_loc, seq_lens, lens().collect())?))
    }
}

impl GroupBuffers {
    fn write<'t>(
        &mut self,
        cx: &dyn Exec,
        plan: &StepPlan,
        parts: &StepParts,
        extent: &Extent,
        table: impl Fn(RequestId) -> Option<&'t [u32]>,
    ) -> Result<CommonAttentionMetadata> {
        let keeps = self.keeps;
        let inputs = match (keeps, &parts.encoder) {
            (Keeps::Nothing, Some((own, _))) => own,
            (Keeps::Encoded, Some((_, seen))) => seen,
            _ => &parts.decoder,
        };
        if keeps == Keeps::Nothing {
            let table = self.block_table.write_dual(cx, 0, |_| ());
            let slots = self.slot_mapping.write(cx, inputs.num_actual_tokens, |o| o.fill(SKIP_SLOT));
            let mut common = CommonAttentionMetadata::new(inputs.clone(), table, 0, slots)?;
            common.causal_override = Some(Causal::All(false));
            return Ok(common);
        }
        let size = self.block_size;
        let missing = |id: RequestId| AttentionError::Inputs(format!("request {id} has no block table"));
        // Rows as wide as this step needs, or as a graph was captured with; entries past a request's blocks are the
        // null block.
        let stride = if extent.whole_tables { self.max_blocks } else { inputs.max_seq_len.div_ceil(size) };
        let mut error = None;
        let block_table = self.block_table.write_dual(cx, inputs.num_reqs * stride, |o| {
            o[plan.requests.len() * stride..].fill(0);
            for (row, r) in o.chunks_exact_mut(stride.max(1)).zip(&plan.requests) {
                let kept = if keeps == Keeps::Encoded { r.encoder_len } else { r.seq_len() };
                let used = kept.div_ceil(size);
                match table(r.id).and_then(|t| t.get(..used)) {
                    Some(blocks) => {
                        row.iter_mut().zip(blocks).for_each(|(o, &b)| *o = b as i32);
                        row[used..].fill(0);
                    }
                    None => error = Some(missing(r.id)),
                }
            }
        });
        if let Some(e) = error {
            return Err(e);
        }
        let blocks = block_table.host();
        let row = |i: usize| &blocks[i * stride..(i + 1) * stride];
        if keeps == Keeps::Encoded {
            let encoded = plan.encoder_ids.len();
            let slots = self.slot_mapping.write(cx, encoded.max(inputs.num_actual_tokens), |o| {
                o.fill(SKIP_SLOT);
                for (i, r) in plan.requests.iter().enumerate() {
                    for (t, o) in o[r.encoder_range.clone()].iter_mut().enumerate() {
                        *o = slot(row(i), size, t).unwrap_or(SKIP_SLOT);
                    }
                }
            });
            let mut common =
                CommonAttentionMetadata::new(inputs.clone(), block_table.clone(), stride, slots.clone())?;
            // Keys and values come from the encoder's tokens of this step, not from the decoder's.
            common.slot_mapping = slots.slice(0..encoded);
            common.causal_override = Some(Causal::All(false));
            return Ok(common);
        }
        let slot_mapping = self.slot_mapping.write(cx, extent.tokens, |o| {
            o[plan.num_tokens()..].fill(SKIP_SLOT);
            if !extent.writes {
                return o.fill(SKIP_SLOT);
            }
            for (i, r) in plan.requests.iter().enumerate() {
                for (t, o) in o[r.token_range.clone()].iter_mut().enumerate() {
                    *o = slot(row(i), size, r.num_computed_tokens + t).unwrap_or(SKIP_SLOT);
                }
            }
        });
        CommonAttentionMetadata::new(inputs.clone(), block_table, stride, slot_mapping)
    }
}
