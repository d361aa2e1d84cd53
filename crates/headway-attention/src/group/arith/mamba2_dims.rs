//! Sizes of a Mamba-2 layer (arXiv 2405.21060), from its own numbers or from the shapes of its state tensors.

/// The sizes that kernels and builders are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mamba2Dims {
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

impl Mamba2Dims {
    /// Checks what kernels rely on, whose widest convolution is `max_conv_kernel`.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(self, max_conv_kernel: usize) -> Result<Self, String> {
        let Self { heads, head_dim, groups, state, conv_kernel } = self;
        if [heads, head_dim, groups, state].contains(&0) {
            return Err(format!(
                "{heads} heads of {head_dim}, {groups} groups, a state of {state}: none may be 0"
            ));
        }
        if !heads.is_multiple_of(groups) {
            return Err(format!("{heads} heads in {groups} groups: the groups must divide the heads"));
        }
        if !(2..=max_conv_kernel).contains(&conv_kernel) {
            return Err(format!(
                "a convolution of width {conv_kernel}: from 2 to {max_conv_kernel} are supported"
            ));
        }
        Ok(self)
    }

    /// The sizes that state tensors of these shapes have: `[conv_kernel - 1, conv_dim]` of the convolution
    /// and `[heads, head_dim, state]` of the scan. Checked as [`Mamba2Dims::check`] does.
    ///
    /// # Errors
    /// Shapes of another layer, in words.
    pub fn of_shapes(shapes: &[Vec<usize>], max_conv_kernel: usize) -> Result<Self, String> {
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
        Self { heads, head_dim, groups: of_groups / (2 * state), state, conv_kernel: memory + 1 }
            .check(max_conv_kernel)
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
    pub fn memory(&self) -> usize {
        self.conv_kernel - 1
    }
}
