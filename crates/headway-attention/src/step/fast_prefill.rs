//! Lifetime: one step. Fast prefill: the batch of a group whose layers compute only the tokens whose logits are needed.
//!
//! The last layers of some models read an earlier layer's keys and values (KV sharing; Gemma 3n, YOCO) and write none.
//! Of a prompt nothing but the rows with logits has to pass through them. Their group's builder then gets this step's
//! batch with those rows alone: each request keeps its length, its blocks and its masks, and has as many query tokens
//! as it has logits. They are its last ones, because rows are aligned with the end of the keys.
//!
//! The rows are padded, so that shapes repeat: `num_actual_tokens` is the padded count, the prefix sum ends at the live
//! one, padding has position 0 and slot −1. No slot is written, padding or not.

use super::common::{CommonAttentionMetadata, StepInputs};
use crate::{AttentionError, Result, group::kv::block_table::SKIP_SLOT};
use headway_tensor::{Exec, Persistent};
use std::sync::Arc;

/// Buffers of such batches, as long-lived as the model.
#[derive(Debug)]
pub struct FastPrefill {
    query_start_loc: Persistent<i32>,
    positions: Persistent<i32>,
    slot_mapping: Persistent<i64>,
}

impl FastPrefill {
    /// For steps of at most so many requests, and so many padded rows.
    ///
    /// # Errors
    /// No memory.
    pub fn new(cx: &dyn Exec, max_num_reqs: usize, max_num_rows: usize) -> Result<Self> {
        Ok(Self {
            query_start_loc: Persistent::new(cx, max_num_reqs + 1)?,
            positions: Persistent::new(cx, max_num_rows)?,
            slot_mapping: Persistent::new(cx, max_num_rows)?,
        })
    }

    /// How often a buffer could not be recycled because a view of an earlier step was alive.
    pub fn reallocs(&self) -> usize {
        self.query_start_loc.reallocs() + self.positions.reallocs() + self.slot_mapping.reallocs()
    }

    /// Gives each KV cache group the batch of the tokens in [`StepInputs::logits_indices`], made once for all groups
    /// that share the step's inputs. A step that wants the logits of every token is left as it is. Whether any was
    /// made.
    ///
    /// # Errors
    /// As [`FastPrefill::batch`].
    pub fn attach(&mut self, cx: &dyn Exec, commons: &mut [CommonAttentionMetadata]) -> Result<bool> {
        let wanted = |c: &CommonAttentionMetadata| Some(c.inputs.logits_indices.as_ref()?.len());
        let Some((first, live)) = commons.iter().find_map(|c| Some((c, wanted(c)?))) else {
            return Ok(false);
        };
        if live == first.inputs.num_actual_tokens {
            return Ok(false);
        }
        let whole = first.inputs.clone();
        let batch = self.batch(cx, first, live)?;
        for c in commons.iter_mut().filter(|c| Arc::ptr_eq(&c.inputs, &whole)) {
            c.fast_prefill = Some(Arc::new(CommonAttentionMetadata {
                inputs: batch.inputs.clone(),
                slot_mapping: batch.slot_mapping.clone(),
                fast_prefill: None,
                ..c.clone()
            }));
        }
        Ok(true)
    }

    /// The batch of the tokens in [`StepInputs::logits_indices`], of which the first `live` count and the others are
    /// padding.
    ///
    /// # Errors
    /// No indices, or on a device; indices that don't ascend, are no token's, or leave out a later token of their
    /// request; more than there is room for.
    pub fn batch(
        &mut self,
        cx: &dyn Exec,
        common: &CommonAttentionMetadata,
        live: usize,
    ) -> Result<CommonAttentionMetadata> {
        let x = &*common.inputs;
        let rows = x.logits_indices.as_ref().and_then(|v| v.host()).ok_or_else(|| {
            inputs("fast prefill needs logits_indices on the host: the tokens whose logits are wanted")
        })?;
        let wanted = rows
            .get(..live)
            .ok_or_else(|| inputs(format!("{live} live tokens among {} logits_indices", rows.len())))?;
        let capacity = self.positions.capacity();
        if rows.len() > capacity || x.num_reqs >= self.query_start_loc.capacity() {
            return Err(inputs(format!(
                "{} rows of {} requests; fast prefill was set up for {capacity} rows of {}",
                rows.len(),
                x.num_reqs,
                self.query_start_loc.capacity() - 1
            )));
        }
        let (starts, most) = counts(x, wanted)?;
        let mut out = x.unpadded(x.num_reqs, x.num_actual_tokens)?;
        out.query_start_loc =
            self.query_start_loc.write_dual(cx, starts.len(), |o| o.copy_from_slice(&starts));
        out.num_actual_tokens = rows.len();
        out.max_query_len = most;
        out.positions = match &x.positions {
            None => None,
            Some(p) => {
                let all = p.host().ok_or_else(|| inputs("positions are not on the host"))?;
                Some(self.positions.write(cx, rows.len(), |o| {
                    o.fill(0);
                    o.iter_mut().zip(wanted).for_each(|(o, &row)| *o = all[row as usize]);
                }))
            }
        };
        out.logits_indices = None;
        let slots = self.slot_mapping.write(cx, rows.len(), |o| o.fill(SKIP_SLOT));
        Ok(CommonAttentionMetadata { inputs: Arc::new(out), slot_mapping: slots, ..common.clone() })
    }
}

fn inputs(what: impl Into<String>) -> AttentionError {
    AttentionError::Inputs(what.into())
}

/// The prefix sum of the wanted tokens by request, and the most of a request.
fn counts(x: &StepInputs, wanted: &[i32]) -> Result<(Vec<i32>, usize)> {
    let (mut starts, mut most, mut at) = (vec![0], 0, 0);
    for (request, w) in x.query_start_loc.host().windows(2).enumerate() {
        let own = wanted[at..].iter().take_while(|&&row| row < w[1]).count();
        let first = w[1] - own as i32;
        if first < w[0] || wanted[at..at + own].iter().zip(first..).any(|(&row, want)| row != want) {
            return Err(inputs(format!(
                "logits_indices {:?} of request {request} are not its last tokens, which end before {}: give them \
                 ascending and without a gap",
                &wanted[at..at + own],
                w[1]
            )));
        }
        at += own;
        most = most.max(own);
        starts.push(at as i32);
    }
    match wanted.get(at) {
        None => Ok((starts, most)),
        Some(row) => Err(inputs(format!("logits index {row} is no token of the step"))),
    }
}
