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

/// One state-space layer: convolution and scan, with the request's state read and written. `Host` is the one
/// of [`example`](crate::example).
///
/// ```
/// use headway_attention::*;
/// use headway_tensor::{TensorMut, TensorRef};
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::Host;
/// /// A state that is a running sum: block b of the cache holds the sum of the request whose block it is.
/// struct Sum;
/// struct States(Vec<usize>);
/// impl LayerImpl for Sum {
///     type Exec = Host;
///     type Config = ();
///     type Metadata = States;
/// }
/// impl StateSpaceImpl for Sum {
///     fn new(_: &StateSpaceArgs<'_>, _: &()) -> Result<Self> {
///         Ok(Self)
///     }
///     fn forward(
///         &self, _: &Host, x: TensorRef<'_>, state: &mut KvMut<'_>, blocks: &States, out: TensorMut<'_>,
///     ) -> Result<()> {
///         let (offset, stride) = (state.offset, state.block_stride);
///         let cache = state.host_bytes()?;
///         for ((x, y), b) in x.into_host::<u8>()?.iter().zip(out.into_host::<u8>()?).zip(&blocks.0) {
///             cache[offset + b * stride] += x;
///             *y = cache[offset + b * stride];
///         }
///         Ok(())
///     }
/// }
///
/// let handle = KvHandle {
///     buf: 0, offset: 0, block_stride: 1, page_bytes: 1, num_blocks: 4, block_size: 16,
///     dtype: headway_tensor::DType::U8, layout: KvCacheLayout::LBNHC, shared: false,
/// };
/// let mut cache = KvBuf::Host(headway_tensor::HostBuf::zeroed(4)?);
/// let (x, mut y) = ([3u8, 5], [0u8; 2]);
/// for _ in 0..2 {
///     let (x, y) = (TensorRef::from_host(&x, &[2, 1])?, TensorMut::from_host(&mut y, &[2, 1])?);
///     Sum.forward(&Host, x, &mut handle.on(&mut cache), &States(vec![1, 3]), y)?;
/// }
/// assert_eq!(y, [6, 10]);
/// # Ok::<(), AttentionError>(())
/// ```
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
///
/// `Mixer`, which hands its input on, and what it is called with are those of [`example`](crate::example).
///
/// ```
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::{Host, Mixer, builder, cache, state_space_args, step};
/// use headway_attention::*;
/// use headway_tensor::{Tensor, TensorMut, TensorRef};
/// let weight = Tensor::from_slice(&Host, &[1f32], &[1])?;
/// let kernel = <Mixer as EraseAs<StateSpace>>::erase(&state_space_args(&weight), &())?;
/// let LayerKernel::StateSpace(layer) = kernel else { unreachable!() };
/// let (handle, mut cache) = cache()?;
/// let (rows, mut out) = ([1f32, 2.0, 3.0, 4.0], [9f32; 4]);
/// let entry = builder()?.build(&Host, &step()?, false)?;
/// let (x, view) = (TensorRef::from_host(&rows, &[4, 1])?, TensorMut::from_host(&mut out, &[4, 1])?);
/// layer.run(&Host, x, &mut handle.on(&mut cache), &entry, view)?;
/// assert_eq!(out, rows);
/// # Ok::<(), AttentionError>(())
/// ```
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
