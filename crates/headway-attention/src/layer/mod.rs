//! Lifetime: the model, per layer. Class 3 of 3: one layer's numbers. Three kinds of layer, each
//! with its own impl trait; what they share stands here.

pub mod attention;
pub(crate) mod composed;
pub mod mla;
pub mod state_space;

use crate::{
    AttentionArgs, DynAttention, DynMla, DynStateSpace, KindTag, Mla, MlaArgs, Standard, StateSpace,
    StateSpaceArgs,
};
use headway_tensor::Exec;

/// Index among the layers that hold an attention impl; not the decoder layer's index (one decoder
/// layer can hold two).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct AttnLayer(pub u32);

/// A kind of layer: what its impl's constructor gets.
///
/// ```
/// use headway_attention::{ImplKind, KindTag, Mla, MlaArgs, Standard};
/// /// Heads on this rank, as the constructor of an MLA layer gets them.
/// fn heads(args: &<Mla as ImplKind>::Args<'_>) -> usize {
///     let args: &MlaArgs<'_> = args;
///     args.num_heads
/// }
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// # let projection = example::projection();
/// # let args = example::mla_args(&projection);
/// assert_eq!(heads(&args), 1); // `args`: a layer of one head
/// assert_eq!((Standard::TAG, Mla::TAG), (KindTag::Standard, KindTag::Mla));
/// ```
pub trait ImplKind: 'static {
    /// The kind as a value.
    const TAG: KindTag;
    /// The constructor's arguments.
    type Args<'a>;
}

/// What every impl, of every kind, names. `Host` is the one of [`example`](crate::example).
///
/// ```
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::Host;
/// use headway_attention::{AttentionError, LayerImpl};
/// use headway_tensor::TensorMut;
/// struct Layer;
/// impl LayerImpl for Layer {
///     type Exec = Host;
///     type Config = ();
///     type Metadata = Vec<i32>; // what the backend's builder makes
/// }
///
/// let mut out = [1f32; 4];
/// Layer.fill_zero(&Host, &mut TensorMut::from_host(&mut out, &[2, 2])?)?;
/// assert_eq!(out, [0.0; 4]);
/// # Ok::<(), AttentionError>(())
/// ```
pub trait LayerImpl: Sized + Send + Sync + 'static {
    /// What calls run on.
    type Exec: Exec;
    /// The backend's configuration table.
    type Config;
    /// The metadata of the backend's builder.
    type Metadata: Send + Sync + 'static;

    /// Fills a layer's output with zeros: what every layer does in the profile run, which has no
    /// metadata. The erasing layer calls it, so no backend can forget. The default writes host
    /// memory; device crates override it.
    ///
    /// # Errors
    /// Device memory without an override.
    fn fill_zero(&self, cx: &Self::Exec, out: &mut headway_tensor::TensorMut<'_>) -> crate::Result<()> {
        let _ = cx;
        Ok(out.zero_host()?)
    }
}

/// A layer's impl with its types erased, by kind.
pub enum LayerKernel {
    /// Softmax attention over keys and values.
    Standard(Box<dyn DynAttention>),
    /// Multi-head latent attention.
    Mla(Box<dyn DynMla>),
    /// A state-space mixer.
    StateSpace(Box<dyn DynStateSpace>),
}

/// Constructor arguments in the kind that the model's layer is.
pub enum LayerArgs<'a> {
    /// For [`LayerKernel::Standard`].
    Standard(AttentionArgs<'a>),
    /// For [`LayerKernel::Mla`].
    Mla(MlaArgs<'a>),
    /// For [`LayerKernel::StateSpace`].
    StateSpace(StateSpaceArgs<'a>),
}

impl LayerArgs<'_> {
    /// The kind of layer that these are for.
    pub fn kind(&self) -> KindTag {
        match self {
            Self::Standard(_) => KindTag::Standard,
            Self::Mla(_) => KindTag::Mla,
            Self::StateSpace(_) => KindTag::StateSpace,
        }
    }
}

/// Picks a kind's arguments out of [`LayerArgs`]; `None` for another kind. `args` of a layer with four heads is
/// in [`example`](crate::example).
///
/// ```
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::args;
/// use headway_attention::{LayerArgs, Mla, PickArgs, Standard};
/// let args = LayerArgs::Standard(args());
/// assert_eq!(Standard::pick(&args).map(|a| a.num_heads), Some(4));
/// assert!(Mla::pick(&args).is_none());
/// ```
pub trait PickArgs: ImplKind {
    /// The arguments, where they are of this kind.
    fn pick<'r, 'a>(args: &'r LayerArgs<'a>) -> Option<&'r Self::Args<'a>>;
}

macro_rules! pick {
    ($($kind:ident),*) => { $(
        impl PickArgs for $kind {
            fn pick<'r, 'a>(args: &'r LayerArgs<'a>) -> Option<&'r Self::Args<'a>> {
                match args {
                    LayerArgs::$kind(x) => Some(x),
                    _ => None,
                }
            }
        }
    )* };
}
pick!(Standard, Mla, StateSpace);
