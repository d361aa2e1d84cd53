//! A forward pass in pieces: what lies between the mixers' kernels can be recorded once, and the kernels run by
//! themselves with each step's own metadata.

use super::{Decoder, DecoderInput};
use crate::models::ModelError;
use headway_attention::{AttentionError, KvPool, StepMetadata};
use headway_tensor::{Exec, Ops, TensorMut};

/// Hears where a forward pass comes to a mixer's kernel.
pub trait Pieces {
    /// The operations of what lies between the kernels.
    fn ops(&self) -> &dyn Ops;

    /// What lies before the kernel is complete; `run` runs it.
    ///
    /// # Errors
    /// The device's own, the kernel's.
    fn kernel(
        &self,
        run: &mut dyn FnMut(&dyn Exec) -> Result<(), AttentionError>,
    ) -> Result<(), AttentionError>;
}

impl Decoder {
    /// Runs the layers, cut at their mixers' kernels. The metadata may be of fewer tokens than there are rows: kernels
    /// see those alone, and the rest of what they write is zeros.
    ///
    /// # Errors
    /// As [`Decoder::forward`]; as [`Pieces::kernel`].
    pub fn layers_in_pieces(
        &mut self,
        pieces: &dyn Pieces,
        input: &DecoderInput<'_>,
        step: &StepMetadata,
        kv: &mut KvPool,
    ) -> Result<(), ModelError> {
        self.layers(pieces.ops(), input, step, kv, Some(pieces)).map(drop)
    }

    /// The logits of the wanted rows, after [`Decoder::layers_in_pieces`].
    ///
    /// # Errors
    /// As [`Decoder::forward`].
    pub fn logits_of_pieces(
        &mut self,
        ops: &dyn Ops,
        input: &DecoderInput<'_>,
    ) -> Result<TensorMut<'_>, ModelError> {
        let rows = self.gather(ops, input, input.token_ids.len(), 0)?;
        self.logits(ops, rows)
    }
}
