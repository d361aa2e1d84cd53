//! What an encoder reads in a step, and what a decoder's cross-attention sees of it.

use crate::scheduler::StepPlan;
use headway_attention::{Result, StepInputs};
use headway_tensor::{Packed, Part, View};
use std::{ops::Range, sync::Arc};

/// Tokens of the encoder's inputs, and the position of each in its input.
pub(in crate::runner) struct EncoderTokens {
    pub(super) token_ids: View<i32>,
    pub(super) positions: View<i32>,
}

/// A step's part of them in the packed buffer.
pub(super) struct EncoderParts {
    token_ids: Part<i32>,
    positions: Part<i32>,
    starts: Part<i32>,
    lens: Part<i32>,
    /// Of every request of the step.
    all_lens: Part<i32>,
}

/// The lengths of the inputs that begin in this step.
fn begin(plan: &StepPlan) -> impl Iterator<Item = &Range<usize>> + Clone {
    plan.requests.iter().map(|r| &r.encoder_range).filter(|r| !r.is_empty())
}

impl EncoderParts {
    /// Bytes for steps of so many requests and tokens.
    pub fn room(max_num_reqs: usize, max_num_tokens: usize) -> usize {
        2 * Packed::room::<i32>(max_num_tokens) + 3 * Packed::room::<i32>(max_num_reqs + 1)
    }

    pub fn write(packed: &mut Packed, plan: &StepPlan) -> Self {
        let (n, inputs) = (plan.encoder_ids.len(), begin(plan).count());
        Self {
            token_ids: packed.write(n, |o: &mut [i32]| {
                o.iter_mut().zip(&plan.encoder_ids).for_each(|(o, &t)| *o = t as i32);
            }),
            positions: packed.write(n, |o: &mut [i32]| {
                o.fill(0);
                for r in begin(plan) {
                    o[r.clone()].iter_mut().enumerate().for_each(|(i, p)| *p = i as i32);
                }
            }),
            starts: packed.write(inputs + 1, |o: &mut [i32]| {
                o[0] = 0;
                o[1..].iter_mut().zip(begin(plan)).for_each(|(o, r)| *o = r.end as i32);
            }),
            lens: packed.write(inputs, |o: &mut [i32]| {
                o.iter_mut().zip(begin(plan)).for_each(|(o, r)| *o = r.len() as i32);
            }),
            all_lens: packed.write(plan.requests.len(), |o: &mut [i32]| {
                o.iter_mut().zip(&plan.requests).for_each(|(o, r)| *o = r.encoder_len as i32);
            }),
        }
    }

    pub fn tokens(&self, packed: &Packed) -> Option<EncoderTokens> {
        let token_ids = packed.view(self.token_ids);
        (!token_ids.is_empty()).then(|| EncoderTokens { token_ids, positions: packed.view(self.positions) })
    }

    /// The encoder's own batch.
    ///
    /// # Errors
    /// As [`StepInputs::new`].
    pub fn own(&self, packed: &Packed) -> Result<Arc<StepInputs>> {
        let lens = packed.host(self.lens).to_vec();
        Ok(Arc::new(StepInputs::new(packed.dual(self.starts), packed.view(self.lens), lens)?))
    }

    /// The decoder's batch over its encoder's tokens.
    ///
    /// # Errors
    /// As [`StepInputs::new`].
    pub fn seen(&self, packed: &Packed, query_start_loc: Part<i32>) -> Result<Arc<StepInputs>> {
        let lens = packed.host(self.all_lens).to_vec();
        let starts = packed.dual(query_start_loc);
        Ok(Arc::new(StepInputs::new(starts, packed.view(self.all_lens), lens)?))
    }
}
