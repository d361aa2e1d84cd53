//! A plan held against the headers of the weight files, before a tensor is read: what is missing, of another shape, or
//! of a layer too many.

use super::{ModelError, ModelPlan, dummy, unused};
use crate::loading::Checkpoint;

/// Whether a tensor of this shape is what the plan expects; some files hold a vector as a matrix of one row.
pub(super) fn fits(found: &[usize], expected: &[usize]) -> bool {
    found == expected || matches!((found, expected), ([1, n], [width]) if n == width)
}

/// Finds the first tensor, the embedding and then by name, that a plan can't be loaded with.
///
/// # Errors
/// A tensor that is missing or of another shape; one of a layer that the plan doesn't have.
pub(crate) fn check(plan: &ModelPlan, checkpoint: &dyn Checkpoint) -> Result<(), ModelError> {
    let mut all = dummy::shapes(plan);
    all.sort_by_cached_key(|(name, _)| (*name != plan.embedding, name.clone()));
    for (name, expected) in &all {
        let Some(found) = checkpoint.shape(name)? else { continue };
        if !fits(&found, expected) {
            let (file, name) = (checkpoint.describe(), name.clone());
            return Err(ModelError::WrongShape { file, name, found, expected: expected.clone() });
        }
    }
    let used = all.into_iter().map(|(name, _)| name).collect();
    unused::beyond(plan, checkpoint, &used).map(drop)
}
