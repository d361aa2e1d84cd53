//! Step inputs: from the scheduler's plan to token ids, positions, lengths, block tables and slot mappings, in buffers that
//! live as long as the model. All but the block tables lie in one, which a device gets with one copy; where each array
//! lies follows from the step's extent, so steps of one graph find the same addresses.

mod encoder;
mod group;
mod table;

use super::extent::Extent;
use crate::models::decoder::{DecoderInput, EncoderInput, FastPrefillInput};
use crate::scheduler::{RequestId, ScheduledRequest, StepPlan};
use encoder::{EncoderParts, EncoderTokens};
use group::{GroupBuffers, StepParts};
use headway_attention::{Causal, CommonAttentionMetadata, KvCacheSpec, Result, StepInputs};
use headway_tensor::{Exec, Packed, View};
use std::sync::Arc;

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

/// Buffers of all steps.
pub(super) struct InputBuffers {
    packed: Packed,
    /// Whether decoders attend to an encoder.
    encodes: bool,
    /// Whether a group has R-SWA, which asks for the tokens of each prompt.
    rswa: bool,
    groups: Vec<GroupBuffers>,
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
        let encodes = specs.iter().any(|s| matches!(s, KvCacheSpec::Cross(_)));
        let group = |spec| GroupBuffers::new(cx, spec, max_num_reqs, max_model_len);
        let (tokens, reqs) = (Packed::room::<i32>(max_num_tokens), Packed::room::<i32>(max_num_reqs + 1));
        // Token ids and positions; prefix sum, lengths, prompts and flags.
        let shared = 2 * tokens + Packed::room::<i32>(max_num_logits) + 4 * reqs;
        let slots = specs.len() * Packed::room::<i64>(max_num_tokens);
        let encoder = if encodes { EncoderParts::room(max_num_reqs, max_num_tokens) } else { 0 };
        Ok(Self {
            packed: Packed::new(cx, shared + slots + encoder)?,
            encodes,
            rswa: specs.iter().any(|s| matches!(s, KvCacheSpec::Rswa { .. })),
            groups: specs.iter().map(group).collect::<headway_tensor::Result<_>>()?,
        })
    }

    /// How often a buffer could not be recycled because a view of an earlier step was alive.
    pub(super) fn reallocs(&self) -> usize {
        self.packed.reallocs() + self.groups.iter().map(GroupBuffers::reallocs).sum::<usize>()
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
        let p = &mut self.packed;
        p.begin()?;
        // These two first: pieces of steps are captured with them alone, whatever the requests are.
        let token_ids = p.write(extent.tokens, |o: &mut [i32]| {
            o[n..].fill(0);
            o.iter_mut().zip(&plan.token_ids).for_each(|(o, &t)| *o = t as i32);
        });
        let positions = p.write(extent.tokens, |o: &mut [i32]| {
            o[n..].fill(0);
            for r in reqs {
                let first = r.num_computed_tokens;
                o[r.token_range.clone()].iter_mut().enumerate().for_each(|(i, p)| *p = (first + i) as i32);
            }
        });
        let logits_rows = p.write(extent.logits, |o: &mut [i32]| {
            o[plan.num_logits()..].fill(0);
            let rows = plan.sampled().flat_map(|r| r.token_range.end - r.num_logits()..r.token_range.end);
            o.iter_mut().zip(rows).for_each(|(o, row)| *o = row as i32);
        });
        let query_start_loc = p.write(padded + 1, |o: &mut [i32]| {
            o.fill(n as i32);
            o[0] = 0;
            o[1..].iter_mut().zip(reqs).for_each(|(o, r)| *o = r.token_range.end as i32);
        });
        let mut of_requests = |of: fn(&ScheduledRequest) -> usize| {
            p.write(padded, |o: &mut [i32]| {
                o[reqs.len()..].fill(0);
                o.iter_mut().zip(reqs).for_each(|(o, r)| *o = of(r) as i32);
            })
        };
        let seq_lens = of_requests(ScheduledRequest::seq_len);
        let prompt_lens = self.rswa.then(|| of_requests(|r| r.num_prompt_tokens));
        let encoder = self.encodes.then(|| EncoderParts::write(p, plan));
        // A prompt is seen both ways in the one step that computes it; what follows sees what came before.
        let in_prompt = |r: &ScheduledRequest| r.num_computed_tokens < r.num_prompt_tokens;
        let non_causal = self.groups.iter().any(|g| g.non_causal) && reqs.iter().any(in_prompt);
        let causal = non_causal.then(|| {
            p.write(reqs.len(), |o: &mut [u8]| {
                o.iter_mut().zip(reqs).for_each(|(o, r)| *o = u8::from(!in_prompt(r)));
            })
        });
        for (index, group) in self.groups.iter_mut().enumerate() {
            group.write(cx, p, plan, &extent, self.encodes, |id| table(id, index))?;
        }
        p.upload(cx);
        let p = &self.packed;
        let (token_ids, positions, logits_rows) = (p.view(token_ids), p.view(positions), p.view(logits_rows));
        let bound = p.host(seq_lens).to_vec();
        let mut inputs = StepInputs::new(p.dual(query_start_loc), p.view(seq_lens), bound)?;
        inputs.num_actual_tokens = extent.attended;
        inputs.positions = Some(positions.slice(0..extent.attended));
        inputs.logits_indices = Some(logits_rows.clone());
        let mut is_prefilling: Vec<bool> = Vec::with_capacity(padded);
        is_prefilling.extend(reqs.iter().map(|r| r.is_prefilling));
        is_prefilling.resize(padded, false);
        inputs.is_prefilling = Some(is_prefilling);
        if reqs.iter().any(|r| r.bidirectional_ranges.is_some()) {
            let of = |r: &ScheduledRequest| r.bidirectional_ranges.as_deref().map_or(vec![], <[_]>::to_vec);
            inputs.mm_prefix_ranges = Some(reqs.iter().map(of).collect());
        }
        inputs.rswa_prefix_lens = prompt_lens.map(|lens| p.view(lens));
        let parts = StepParts {
            decoder: Arc::new(inputs),
            encoder: match &encoder {
                Some(e) => Some((e.own(p)?, e.seen(p, query_start_loc)?)),
                None => None,
            },
        };
        commons.clear();
        for group in &self.groups {
            let mut common = group.common(p, plan, &parts)?;
            if let Some(flags) = causal.filter(|_| group.non_causal) {
                common.causal_override = Some(Causal::PerRequest(p.view(flags)));
            }
            commons.push(common);
        }
        let encoder = encoder.and_then(|e| e.tokens(p));
        Ok(TokenInputs { token_ids, positions, logits_rows, encoder, fast: None })
    }
}
