//! Fast prefill: where the last layers read earlier layers' caches, the rows whose logits are wanted are gathered once,
//! before the first of them, and the others end there.

use super::{buffers::Buffers, step::Step};
use crate::models::ModelError;
use headway_tensor::{Tensor, View};

/// A step whose last layers compute the rows of `logits_rows` alone. Their metadata is of those rows.
#[derive(Clone, Copy)]
pub struct FastPrefillInput<'a> {
    /// The first such layer.
    pub first_layer: usize,
    /// `[logits_rows]`.
    pub positions: &'a View<i32>,
}

/// Rows that layers computed, over all steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerRows {
    /// The first layer: every new token.
    pub first_layer: u64,
    /// The last layer.
    pub last_layer: u64,
}

impl FastPrefillInput<'_> {
    /// The rest of the step, with `rows` in place of all: the stream, the stream as the next block reads it, and the
    /// layers' own inputs. Between layers nothing else of a buffer is read.
    pub(super) fn narrow<'s>(
        &self,
        s: Step<'s>,
        b: &mut Buffers,
        rows: &View<i32>,
    ) -> Result<Step<'s>, ModelError>
    where
        Self: 's,
    {
        let gather = |from: &mut Tensor, through: &mut Tensor| {
            let width = from.shape()[1];
            let (all, out) = (from.view_as(&[s.n, width])?, through.view_mut_as(&[rows.len(), width])?);
            s.ops.gather_rows(all, rows, out)?;
            std::mem::swap(from, through);
            Ok::<_, ModelError>(())
        };
        gather(&mut b.hidden, &mut b.mixed)?;
        gather(&mut b.normed, &mut b.mixed)?;
        if b.per_layer.shape()[1] > 0 {
            gather(&mut b.per_layer, &mut b.per_token)?;
        }
        Ok(Step { n: rows.len(), positions: self.positions, ..s })
    }
}
