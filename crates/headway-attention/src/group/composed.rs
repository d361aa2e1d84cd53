//! Lifetime: the model, one per attention group and micro-batch. The builder of a composition: cuts a step between the
//! decodes and the rest, and has each part's builder build its own.
//!
//! A step of decodes alone goes to the decodes' builder as it is, so that a captured graph finds all at the addresses that
//! it would have without the other part.

use crate::{
    AttentionError, CommonAttentionMetadata, DecodeSplit, DynBuilder, Result, StepEntry,
    process::erased::metadata,
    step::{
        composed::{ComposedStep, Cut, Part},
        micro_batch::{SliceBuffers, slice_common},
    },
};
use headway_tensor::Exec;

/// Builds [`ComposedStep`].
pub(crate) struct ComposedBuilder {
    /// The composition's name.
    pub name: String,
    /// For decodes and for prefills.
    pub parts: [Box<dyn DynBuilder>; 2],
    /// Most new tokens of a decode.
    pub threshold: usize,
    /// Where the bounds of prefills beside decodes are written.
    pub rest: SliceBuffers,
}

fn all(common: &CommonAttentionMetadata) -> DecodeSplit {
    DecodeSplit { decodes: common.inputs.num_reqs, decode_tokens: common.inputs.num_actual_tokens }
}

impl DynBuilder for ComposedBuilder {
    fn build(&mut self, cx: &dyn Exec, common: &CommonAttentionMetadata, capture: bool) -> Result<StepEntry> {
        let [d, p] = &mut self.parts;
        match Cut::of(common, self.threshold)? {
            Cut::Decodes => {
                let entry = d.build(cx, common, capture)?;
                Ok(ComposedStep::Decodes(entry).entry(all(common), common))
            }
            _ if capture => Err(AttentionError::Unsupported {
                backend: self.name.clone(),
                what: format!("a graph of requests with more than {} new tokens", self.threshold),
                remedy: "graphs of decodes are".into(),
            }),
            Cut::Prefills => {
                let entry = p.build(cx, common, false)?;
                Ok(ComposedStep::Prefills(entry).entry(DecodeSplit::default(), common))
            }
            Cut::Both(split) => {
                let decodes = Part::decodes(common, split)?.with(|c| d.build(cx, &c, false))?;
                let prefills = Part::prefills(common, split, &mut self.rest, cx)?;
                let prefills = prefills.with(|c| p.build(cx, &c, false))?;
                Ok(ComposedStep::Both { decodes, prefills }.entry(split, common))
            }
        }
    }

    fn update_block_table(
        &mut self,
        cx: &dyn Exec,
        first: &StepEntry,
        common: &CommonAttentionMetadata,
    ) -> Result<StepEntry> {
        let [d, p] = &mut self.parts;
        let split = first.split();
        let Some(step) = metadata::<ComposedStep>(first)? else {
            return Err(AttentionError::Inputs("block-table update of an entry without metadata".into()));
        };
        let update = |builder: &mut dyn DynBuilder, part: &Part<StepEntry>| {
            let common = slice_common(common, &part.slice, part.inputs.clone())?;
            let of = builder.update_block_table(cx, &part.of, &common)?;
            Ok::<_, AttentionError>(Part { slice: part.slice.clone(), inputs: part.inputs.clone(), of })
        };
        let step = match step {
            ComposedStep::Decodes(e) => ComposedStep::Decodes(d.update_block_table(cx, e, common)?),
            ComposedStep::Prefills(e) => ComposedStep::Prefills(p.update_block_table(cx, e, common)?),
            ComposedStep::Both { decodes, prefills } => ComposedStep::Both {
                decodes: update(&mut **d, decodes)?,
                prefills: update(&mut **p, prefills)?,
            },
        };
        Ok(step.entry(split, common))
    }
}
