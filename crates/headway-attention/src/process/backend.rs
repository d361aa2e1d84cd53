//! Lifetime: process. Class 1 of 3: the backend names its builder and its impl, and answers what it
//! supports. It has no state; the type is usually an empty enum.

use crate::{EraseAs, ImplKind, KvCacheSpec, LayerImpl, LayerNeed, MetadataBuilder, Refusal, RuleBook};
use headway_tensor::Exec;
use serde::de::DeserializeOwned;
use std::borrow::Borrow;

/// An attention backend: the rule book, and the two classes that it names.
///
/// The associated types tie the three together: `Impl` reads the metadata that `Builder` makes, on
/// the `Exec` that both run on. Handing a layer another backend's metadata does not compile.
///
/// `headway-cpu/src/backends/cpu_attn` is a complete one. `Host`, `Builder` and `Layer` of this example are
/// written out in [`example`](crate::example).
///
/// ```
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::{Builder, Host, Layer};
/// use headway_attention::{process::rules::KernelBlockSize, *};
/// /// Names the three classes; no value of it exists.
/// enum Copying {}
///
/// impl AttentionBackend for Copying {
///     const CONTRACT: u32 = 1;
///     type Exec = Host;
///     type Kind = Standard;
///     type Config = ();
///     type Builder = Builder;
///     type Impl = Layer;
///     fn rules() -> RuleBook {
///         RuleBook {
///             name: "COPYING".into(),
///             kernel_block_sizes: vec![KernelBlockSize::MultipleOf(16)],
///             supports_sliding_window: false,
///             ..RuleBook::default()
///         }
///     }
/// }
///
/// let mut registry = Registry::default();
/// registry.register::<Copying>()?;
/// let windowed = LayerNeed { sliding_window: Some(512), ..LayerNeed::default() };
/// let refused = select(&registry, "layer 0", &windowed, &BackendRequest::default()).err().unwrap();
/// assert!(refused.to_string().contains("sliding window not supported"));
/// # Ok::<(), AttentionError>(())
/// ```
///
/// A builder of another backend does not fit, whatever its name:
///
/// ```compile_fail,E0271
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// # use {example::{Builder, Host, Layer, Metadata}, headway_attention::*};
/// struct Other;
/// impl MetadataBuilder for Other {
///     type Exec = Host;
///     type Config = ();
///     type Metadata = u32;
///     fn new(_: &Host, _: &GroupInfo, _: &BuilderPlan, _: &()) -> Result<Self> {
///         Ok(Self)
///     }
///     fn build(&mut self, _: &Host, _: &CommonAttentionMetadata) -> Result<u32> {
///         Ok(7)
///     }
/// }
/// enum Mixed {}
/// impl AttentionBackend for Mixed {
///     const CONTRACT: u32 = 1;
///     type Exec = Host;
///     type Kind = Standard;
///     type Config = ();
///     type Builder = Other; // its metadata are u32; Layer reads Metadata
///     type Impl = Layer;
///     fn rules() -> RuleBook {
///         RuleBook::default()
///     }
/// }
/// ```
pub trait AttentionBackend: 'static {
    /// The contract version that this was written for. Write the number, not
    /// [`crate::CONTRACT_VERSION`]: the constant would always agree.
    const CONTRACT: u32;
    /// What calls run on: the device crate's stream or thread pool.
    type Exec: Exec;
    /// [`crate::Standard`], [`crate::Mla`] or [`crate::StateSpace`].
    type Kind: ImplKind;
    /// The backend's own configuration table, parsed once at start-up; give it
    /// `#[serde(default, deny_unknown_fields)]`. A backend that reuses another's builder lends it
    /// that builder's configuration through `Borrow`.
    type Config: DeserializeOwned
        + Default
        + Send
        + Sync
        + 'static
        + Borrow<<Self::Builder as MetadataBuilder>::Config>;
    /// Class 2.
    type Builder: MetadataBuilder<Exec = Self::Exec>;
    /// Class 3.
    type Impl: EraseAs<Self::Kind>
        + LayerImpl<
            Exec = Self::Exec,
            Config = Self::Config,
            Metadata = <Self::Builder as MetadataBuilder>::Metadata,
        >;

    /// The rule book, as data.
    fn rules() -> RuleBook;

    /// What the backend makes of a layer's cache: other head slots, a packed content, an alignment. The
    /// default keeps it.
    fn customize_spec(spec: KvCacheSpec) -> KvCacheSpec {
        spec
    }

    /// Refuses a combination that no field of the rule book can say. Its reason comes last.
    fn combination(need: &LayerNeed) -> Option<Refusal> {
        let _ = need;
        None
    }

    /// Why it stands back for other backends that fit, though it fits: it is slower as things are here (a better
    /// kernel is not built). It is chosen where it is asked for by name or nothing else fits.
    fn stands_back(need: &LayerNeed) -> Option<Refusal> {
        let _ = need;
        None
    }
}
