//! Sizes of a Mamba-2 layer and of the state that a request has of it.

use super::elem::Elem;
use headway_attention::group::arith::mamba2_dims::Mamba2Dims;
use headway_tensor::DType;

/// Widest convolution that the kernels take.
pub const MAX_CONV_KERNEL: usize = 16;

/// Where a request's two states lie in its page, and their element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatePage {
    pub(super) dims: Mamba2Dims,
    pub(super) conv: Elem,
    pub(super) ssm: Elem,
}

impl StatePage {
    /// A page that begins with the convolution's state.
    ///
    /// # Errors
    /// Element types without a kernel, in words.
    pub fn new(dims: Mamba2Dims, conv: DType, ssm: DType) -> Result<Self, String> {
        Ok(Self { dims, conv: Elem::of(conv)?, ssm: Elem::of(ssm)? })
    }

    /// The layer's sizes.
    pub fn dims(&self) -> &Mamba2Dims {
        &self.dims
    }

    /// Element types of the convolution's state and of the scan's.
    pub fn dtypes(&self) -> (DType, DType) {
        (self.conv.dtype(), self.ssm.dtype())
    }

    pub(super) fn conv_bytes(&self) -> usize {
        self.dims.memory() * self.dims.conv_dim() * self.conv.size()
    }

    /// Bytes of one head's state.
    pub(super) fn head_bytes(&self) -> usize {
        self.dims.head_dim * self.dims.state * self.ssm.size()
    }

    /// Bytes of a request's state.
    pub fn bytes(&self) -> usize {
        self.conv_bytes() + self.dims.heads * self.head_bytes()
    }
}
