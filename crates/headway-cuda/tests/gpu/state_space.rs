//! `MAMBA2_ATTN` against the float64 mixer: requests on their way in random steps, poisoned outputs, states and gaps.

mod against_reference;
mod sameness;
mod world;

use super::Test;
use headway_cuda::{DeviceInfo, KernelSpec, kernels::state_space::specs as stand_ins};

pub const TESTS: &[Test] = &[
    ("state_space::random_batches", against_reference::random_batches),
    ("state_space::shapes", against_reference::shapes),
    ("state_space::types_of_states", against_reference::types_of_states),
    ("state_space::segments", against_reference::segments),
    ("state_space::a_long_request", against_reference::a_long_request),
    ("state_space::used_blocks", sameness::used_blocks),
    ("state_space::rows_of_others", sameness::rows_of_others),
    ("state_space::batch_invariant", sameness::batch_invariant),
    ("state_space::swapped_block_tables", sameness::swapped_block_tables),
    ("state_space::captured", sameness::captured),
    ("state_space::refusals", sameness::refusals),
];

/// Kernels to compile beforehand.
pub fn specs(info: &DeviceInfo) -> Result<Vec<KernelSpec>, String> {
    let mut all = stand_ins().map_err(super::text)?;
    for shape in against_reference::all_shapes() {
        all.extend(shape.specs(info)?);
    }
    Ok(all)
}
