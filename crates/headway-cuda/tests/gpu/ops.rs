//! The operations against float64 on the host: random rows of odd and even widths, strided views, poisoned outputs.

mod dequantise;
mod elementwise;
mod experts;
mod linear;
mod norm;
mod rows;
mod sample;

use crate::Test;

pub const TESTS: &[Test] = &[
    ("ops::rms_norm", norm::rms_norm),
    ("ops::rms_norm_of_heads_in_place", norm::heads_in_place),
    ("ops::add_rms_norm", norm::add_rms_norm),
    ("ops::layer_norm", norm::layer_norm),
    ("ops::gated_norm", norm::gated_norm),
    ("ops::add_and_multiply", elementwise::add_and_multiply),
    ("ops::gated", elementwise::gated),
    ("ops::activate", elementwise::activate),
    ("ops::scale_and_cap", elementwise::scale_and_cap),
    ("ops::quantise_rows", elementwise::quantise_rows),
    ("ops::rope", rows::rope),
    ("ops::gather_rows", rows::gather_rows),
    ("ops::embed", rows::embed),
    ("ops::argmax", rows::argmax),
    ("ops::sample_greedy", sample::greedy),
    ("ops::sample_broken_rows", sample::broken),
    ("ops::sample_cuts", sample::cuts),
    ("ops::sample_refusals", sample::refusals),
    ("ops::indices_out_of_range", rows::out_of_range),
    ("ops::refusals", rows::refusals),
    ("ops::linear", linear::shapes),
    ("ops::linear_of_parts_with_biases", linear::parts),
    ("ops::linear_of_blocks", linear::blocks),
    ("ops::dequantise", dequantise::formats),
    ("ops::dequantise_parts", dequantise::parts),
    ("ops::dequantise_in_pieces", dequantise::pieces),
    ("ops::linear_captured", linear::captured),
    ("ops::linear_batch_invariant", linear::batch_invariant),
    ("ops::experts", experts::rules_and_activations),
    ("ops::experts_of_odd_shapes", experts::shapes),
    ("ops::experts_that_all_rows_choose", experts::skewed),
    ("ops::experts_batch_invariant", experts::a_row_is_its_own),
    ("ops::experts_in_columns", experts::accumulated_in_columns),
    ("ops::experts_captured", experts::captured),
    ("ops::experts_refusals", experts::refusals),
];
