//! Sizes of a Mamba-2 layer and of the state that a request has of it.

use super::elem::Elem;
use headway_tensor::DType;

/// Widest convolution that the kernels take.
pub const MAX_CONV_KERNEL: usize = 16;

/// The sizes that kernels and builders are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// Elements of the state for each element of a head.
    pub state: usize,
    /// Width of the causal convolution: its state holds one token less.
    pub conv_kernel: usize,
}

impl Dims {
    /// Checks what the kernels rely on.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(self) -> Result<Self, String> {
        let Self { heads, head_dim, groups, state, conv_kernel } = self;
        if [heads, head_dim, groups, state].contains(&0) {
            return Err(format!(
                "{heads} heads of {head_dim}, {groups} groups, a state of {state}: none may be 0"
            ));
        }
        if !heads.is_multiple_of(groups) {
            return Err(format!("{heads} heads in {groups} groups: the groups must divide the heads"));
        }
        if !(2..=MAX_CONV_KERNEL).contains(&conv_kernel) {
            return Err(format!(
                "a convolution of width {conv_kernel}: from 2 to {MAX_CONV_KERNEL} are supported"
            ));
        }
        Ok(self)
    }

    /// The sizes that state tensors of these shapes have: `[conv_kernel - 1, conv_dim]` of the convolution
    /// and `[heads, head_dim, state]` of the scan.
    ///
    /// # Errors
    /// Shapes of another layer, in words.
    pub fn of_shapes(shapes: &[Vec<usize>]) -> Result<Self, String> {
        let ([conv, ssm], wrong) = (
            match shapes {
                [conv, ssm] => [&conv[..], &ssm[..]],
                _ => [&[][..]; 2],
            },
            || {
                format!(
                    "state tensors of shapes {shapes:?}: [conv_kernel - 1, conv_dim], [heads, head_dim, state] are"
                )
            },
        );
        let (&[memory, conv_dim], &[heads, head_dim, state]) = (conv, ssm) else { return Err(wrong()) };
        let of_groups = conv_dim.checked_sub(heads * head_dim).ok_or_else(wrong)?;
        if state == 0 || !of_groups.is_multiple_of(2 * state) {
            return Err(wrong());
        }
        Self { heads, head_dim, groups: of_groups / (2 * state), state, conv_kernel: memory + 1 }.check()
    }

    /// Elements of a token's output.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of the convolution: x of all heads, then B and C of all groups.
    pub fn conv_dim(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    /// Heads that share B and C.
    pub fn heads_per_group(&self) -> usize {
        self.heads / self.groups
    }

    /// Tokens that the convolution looks back.
    pub(super) fn memory(&self) -> usize {
        self.conv_kernel - 1
    }
}

/// Where a request's two states lie in its page, and their element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatePage {
    pub(super) dims: Dims,
    pub(super) conv: Elem,
    pub(super) ssm: Elem,
}

impl StatePage {
    /// A page that begins with the convolution's state.
    ///
    /// # Errors
    /// Element types without a kernel, in words.
    pub fn new(dims: Dims, conv: DType, ssm: DType) -> Result<Self, String> {
        Ok(Self { dims, conv: Elem::of(conv)?, ssm: Elem::of(ssm)? })
    }

    /// The layer's sizes.
    pub fn dims(&self) -> &Dims {
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
