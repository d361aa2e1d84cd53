//! How many rows a step has, padding included.

use crate::scheduler::StepPlan;

/// The rows of a step, padding included. What is past the step's own is neutral: token 0 at position 0, no slot, requests
/// without tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// New tokens, as the layers compute them.
    pub tokens: usize,
    /// Of these, the ones that metadata knows of: where kernels run by themselves the step's own.
    pub attended: usize,
    /// Requests.
    pub reqs: usize,
    /// Rows of logits; the first token's where the step wants none.
    pub logits: usize,
    /// Block tables have a row of the longest request's blocks, whatever the step's requests have.
    pub whole_tables: bool,
    /// Keys and values are written.
    pub writes: bool,
}

impl Extent {
    /// Of a step without padding.
    pub fn of(plan: &StepPlan) -> Self {
        let (tokens, reqs, logits) = (plan.num_tokens(), plan.requests.len(), plan.num_logits());
        Self { tokens, attended: tokens, reqs, logits, whole_tables: false, writes: true }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::inputs::InputBuffers, *};
    use crate::scheduler::{RequestId, ScheduledRequest};
    use headway_attention::{AttentionSpec, CommonAttentionMetadata, KvCacheSpec};
    use headway_cpu::{CpuExec, CpuOptions};
    use headway_tensor::DType;

    /// Decodes at these positions.
    fn decodes(at: &[usize]) -> StepPlan {
        let request = |(i, &computed): (usize, &usize)| ScheduledRequest {
            num_computed_tokens: computed,
            ..super::super::graphs::decode(i, i..i + 1)
        };
        StepPlan {
            requests: at.iter().enumerate().map(request).collect(),
            token_ids: vec![7; at.len()],
            ..StepPlan::default()
        }
    }

    #[test]
    fn rows_past_a_steps_own_are_neutral_after_a_larger_step_too() {
        let cx = CpuExec::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        let spec = KvCacheSpec::Full(AttentionSpec::new(16, 1, 8, DType::F32));
        let mut inputs = InputBuffers::new(&cx, 4, 8, 4, 64, &[spec]).unwrap();
        let blocks: Vec<u32> = vec![3, 4, 5, 6];
        let table = |_: RequestId, _: usize| Some(&blocks[..]);
        let mut commons: Vec<CommonAttentionMetadata> = vec![];
        let full = decodes(&[40, 41, 42, 43]);
        inputs.write(&cx, &full, Extent::of(&full), table, &mut commons).map(drop).unwrap();
        assert_eq!(commons[0].block_table_stride, 3);
        commons.clear();
        let extent = Extent { tokens: 4, attended: 4, reqs: 4, logits: 4, whole_tables: true, writes: true };
        let tokens = inputs.write(&cx, &decodes(&[17, 2]), extent, table, &mut commons).unwrap();
        let (c, decoder) = (&commons[0], tokens.decoder());
        assert_eq!(decoder.token_ids.host(), Some(&[7, 7, 0, 0][..]));
        assert_eq!(decoder.positions.host(), Some(&[17, 2, 0, 0][..]));
        assert_eq!(decoder.logits_rows.host(), Some(&[0, 1, 0, 0][..]));
        assert_eq!(c.inputs.query_start_loc.host(), [0, 1, 2, 2, 2]);
        assert_eq!(c.inputs.seq_lens.host(), Some(&[18, 3, 0, 0][..]));
        assert_eq!((c.inputs.num_reqs, c.inputs.num_actual_tokens), (4, 4));
        // As wide as the longest request's, and the null block where there is none.
        assert_eq!(c.block_table_stride, 4);
        assert_eq!(c.block_table.host(), [3, 4, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(c.slot_mapping.host(), Some(&[4 * 16 + 1, 3 * 16 + 2, -1, -1][..]));
        drop(tokens);
        commons.clear();
        // Rows of a step in pieces are padded; what its kernels see is not.
        let pieces = Extent { attended: 2, reqs: 2, logits: 2, ..extent };
        let tokens = inputs.write(&cx, &decodes(&[17, 2]), pieces, table, &mut commons).unwrap();
        let (c, decoder) = (&commons[0], tokens.decoder());
        assert_eq!(decoder.token_ids.host(), Some(&[7, 7, 0, 0][..]));
        assert_eq!((c.inputs.num_reqs, c.inputs.num_actual_tokens), (2, 2));
        assert_eq!(c.inputs.positions.as_ref().map(|p| p.len()), Some(2));
        assert_eq!(c.slot_mapping.host(), Some(&[4 * 16 + 1, 3 * 16 + 2][..]));
        drop(tokens);
        commons.clear();
        let idle = Extent { writes: false, ..extent };
        inputs.write(&cx, &decodes(&[17, 2, 3, 4]), idle, table, &mut commons).map(drop).unwrap();
        assert_eq!(commons[0].slot_mapping.host(), Some(&[-1; 4][..]));
    }
}
