//! Lifetime: one step. What a composition's builder makes of a step: one entry where it holds decodes or prefills alone,
//! one for each part where it holds both.

use crate::step::{
    batch::SplitOptions,
    micro_batch::{MicroBatchSlice, SliceBuffers, slice_common, slice_inputs},
};
use crate::{CommonAttentionMetadata, DecodeSplit, Result, StepEntry, StepInputs};
use headway_tensor::Exec;
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

/// Metadata of a composition's step.
pub(crate) enum ComposedStep {
    /// All of it is the decodes' part.
    Decodes(StepEntry),
    /// All of it is the prefills' part.
    Prefills(StepEntry),
    /// The first rows are decodes.
    Both {
        /// The first rows.
        decodes: Part<StepEntry>,
        /// The others, padding included.
        prefills: Part<StepEntry>,
    },
}

/// Some of a step's requests, with their tokens.
pub(crate) struct Part<M> {
    pub slice: MicroBatchSlice,
    /// The step's inputs of these requests.
    pub inputs: Arc<StepInputs>,
    /// What a builder gets for them, or made of it.
    pub of: M,
}

/// Whose a step is.
pub(crate) enum Cut {
    /// The decodes' part; without requests too.
    Decodes,
    /// The prefills' part.
    Prefills,
    /// Both parts'.
    Both(DecodeSplit),
}

impl Cut {
    /// Decodes are the first requests with at most `threshold` new tokens.
    pub fn of(common: &CommonAttentionMetadata, threshold: usize) -> Result<Self> {
        let split = common.split(&SplitOptions { threshold, ..SplitOptions::default() })?;
        Ok(match (split.decode_tokens, split.prefills) {
            (_, 0) => Self::Decodes,
            (0, _) => Self::Prefills,
            _ => Self::Both(split.into()),
        })
    }
}

impl Part<CommonAttentionMetadata> {
    /// The decodes of a step: its first requests, in the same memory.
    pub fn decodes(common: &CommonAttentionMetadata, split: DecodeSplit) -> Result<Self> {
        let slice = MicroBatchSlice { requests: 0..split.decodes, tokens: 0..split.decode_tokens };
        let inputs = common.inputs.unpadded(split.decodes, split.decode_tokens)?;
        Self::new(common, slice, inputs)
    }

    /// The rest of a step; its tokens are counted from 0, in memory of their own.
    pub fn prefills(
        common: &CommonAttentionMetadata,
        split: DecodeSplit,
        buffers: &mut SliceBuffers,
        cx: &dyn Exec,
    ) -> Result<Self> {
        let x = &common.inputs;
        let slice = MicroBatchSlice {
            requests: split.decodes..x.num_reqs,
            tokens: split.decode_tokens..x.num_actual_tokens,
        };
        let inputs = slice_inputs(x, &slice, buffers, cx)?;
        Self::new(common, slice, inputs)
    }

    fn new(common: &CommonAttentionMetadata, slice: MicroBatchSlice, mut inputs: StepInputs) -> Result<Self> {
        // What the whole step has at most may be the other part's.
        let lens = inputs.query_start_loc.host().windows(2).map(|w| w[1] - w[0]);
        inputs.max_query_len = lens.max().map_or(0, |n| n.max(0) as usize);
        let longest = inputs.seq_lens_upper_bound.iter().max();
        inputs.max_seq_len = longest.map_or(0, |&n| n.max(0) as usize);
        let inputs = Arc::new(inputs);
        let of = slice_common(common, &slice, inputs.clone())?;
        Ok(Self { slice, inputs, of })
    }
}

impl<M> Part<M> {
    /// The same requests with something else.
    pub fn with<N>(self, of: impl FnOnce(M) -> Result<N>) -> Result<Part<N>> {
        Ok(Part { slice: self.slice, inputs: self.inputs, of: of(self.of)? })
    }
}

impl ComposedStep {
    /// The entry of the whole step.
    pub fn entry(self, split: DecodeSplit, common: &CommonAttentionMetadata) -> StepEntry {
        let frozen = self.frozen();
        StepEntry::new(split, frozen, common, Arc::new(self))
    }

    /// Whose kernels run, over which rows, and what they have frozen.
    fn frozen(&self) -> u64 {
        let mut h = DefaultHasher::new();
        match self {
            Self::Decodes(e) => (0, e.frozen()).hash(&mut h),
            Self::Prefills(e) => (1, e.frozen()).hash(&mut h),
            Self::Both { decodes: d, prefills: p } => {
                (2, d.of.frozen(), p.of.frozen(), &d.slice.tokens, &p.slice.tokens).hash(&mut h);
            }
        }
        h.finish()
    }
}
