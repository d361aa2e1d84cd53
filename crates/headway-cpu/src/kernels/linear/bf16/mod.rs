//! bfloat16 weights times activations rounded to bfloat16, summed in float32: AMX tiles, or the dot
//! products of AVX512-BF16. What the levels below [`Isa::Avx512Bf16`](crate::Isa) do with such weights is
//! in `dense`.
//!
//! # Sameness
//! Every output element is one chain over K in ascending order, whatever the number of rows, the block
//! that a row falls in, or the threads: with tiles, 32 elements of K after 32 (`kernels::amx` has the
//! order inside); with dot products, two elements after two, the odd one first. Both take and leave
//! denormals as zeros. At a level every call goes the same way, one row or a thousand: so results are
//! batch-invariant always. The two levels differ from each other in the last bits.
//!
//! A weight is [`Packed`] once, when its layer is loaded; the rest lives for one call.

mod activations;
mod dot;
mod packed;
mod tiles;

pub(super) use activations::Activations;
pub(super) use packed::Packed;

use super::Job;
use crate::Isa;
use std::ops::Range;

/// Output columns of a panel of packed weights.
const COLUMNS: usize = 16;
/// Elements of K of a tile; rows are padded with zeros to a multiple of it.
const DEPTH: usize = 32;
/// Bytes of a tile of packed weights.
const TILE: usize = crate::kernels::amx::FULL;

/// How the products are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Products {
    /// Vectors of dot products of two.
    Dots,
    /// Tiles.
    Tiles,
}

impl Products {
    /// What a level has; `None`: nothing that multiplies bfloat16.
    pub(super) fn of(isa: Isa) -> Option<Self> {
        match isa {
            Isa::Avx512Bf16 => Some(Self::Dots),
            Isa::Amx => Some(Self::Tiles),
            _ => None,
        }
    }
}

/// Weight rows `rows` with the activation rows of `job`, which `x` holds rounded. `rows` starts at a
/// multiple of [`COLUMNS`].
pub(super) fn multiply(products: Products, job: &Job<'_>, x: &Activations, w: &Packed, rows: Range<usize>) {
    // Checked here, so that the kernels' pointers stay inside.
    assert!(rows.start.is_multiple_of(COLUMNS) && job.m.end <= x.rows() && w.depth() == x.depth());
    if rows.is_empty() || job.m.is_empty() {
        return;
    }
    let _last = w.panel((rows.end - 1) / COLUMNS);
    match products {
        // SAFETY: products of a kind are only chosen where the processor has them; rows and panels exist, as
        // checked above; a task alone writes its part of the output.
        Products::Dots => unsafe { dot::multiply(job, x, w, rows) },
        // SAFETY: as above.
        Products::Tiles => unsafe { tiles::multiply(job, x, w, rows) },
    }
}
