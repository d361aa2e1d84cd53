//! Lifetime: the model, per layer. Class 3 of 3, for state-space mixers (Mamba-2, arXiv
//! 2405.21060): a request has a state of fixed size instead of keys and values.

use super::{AttnLayer, ImplKind, LayerImpl};
use crate::{KindTag, KvMut, Result, StepEntry};
use headway_tensor::{DType, Exec, Tensor, TensorMut, TensorRef};

/// The kind of [`StateSpaceImpl`].
pub enum StateSpace {}

impl ImplKind for StateSpace {
    const TAG: KindTag = KindTag::StateSpace;
    type Args<'a> = StateSpaceArgs<'a>;
}

/// One Mamba-2 layer's numbers.
#[derive(Clone)]
pub struct StateSpaceArgs<'a> {
    /// Which layer.
    pub layer: AttnLayer,
    /// Heads on this rank.
    pub num_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Groups that share B and C.
    pub n_groups: usize,
    /// Size of the state a head element.
    pub state_size: usize,
    /// Width of the causal convolution.
    pub conv_kernel: usize,
    /// Tokens in a chunk of the scan.
    pub chunk_size: usize,
    /// Convolution weight `[conv_dim, conv_kernel]`.
    pub conv_weight: &'a Tensor,
    /// Convolution bias `[conv_dim]`.
    pub conv_bias: Option<&'a Tensor>,
    /// Decay of each head `[num_heads]` (negative).
    pub a: &'a Tensor,
    /// Skip weight of each head `[num_heads]`.
    pub d: &'a Tensor,
    /// Bias of dt `[num_heads]`.
    pub dt_bias: &'a Tensor,
    /// Limits of dt after softplus.
    pub time_step_limit: (f32, f32),
    /// Type of the activations.
    pub dtype: DType,
}

/// One state-space layer: convolution and scan, with the request's state read and written.
pub trait StateSpaceImpl: LayerImpl {
    /// Takes a layer's numbers.
    ///
    /// # Errors
    /// What the rule book should have refused.
    fn new(args: &StateSpaceArgs<'_>, config: &Self::Config) -> Result<Self>;

    /// x is `[num_tokens, conv_dim + num_heads]` (xBC, then dt), out `[num_tokens, num_heads x head_dim]`.
    ///
    /// # Errors
    /// Shapes, dtypes, a state outside the cache.
    fn forward(
        &self,
        cx: &Self::Exec,
        x: TensorRef<'_>,
        state: &mut KvMut<'_>,
        metadata: &Self::Metadata,
        out: TensorMut<'_>,
    ) -> Result<()>;
}

/// The object-safe twin of [`StateSpaceImpl`].
pub trait DynStateSpace: Send + Sync {
    /// Runs the layer; an entry without metadata fills `out` with zeros.
    ///
    /// # Errors
    /// The impl's own; an entry or exec of another backend.
    fn run(
        &self,
        cx: &dyn Exec,
        x: TensorRef<'_>,
        state: &mut KvMut<'_>,
        entry: &StepEntry,
        out: TensorMut<'_>,
    ) -> Result<()>;
}
