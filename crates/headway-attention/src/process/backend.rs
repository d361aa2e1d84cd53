//! Lifetime: process. Class 1 of 3: the backend names its builder and its impl, and answers what it
//! supports. It has no state; the type is usually an empty enum.

use crate::{EraseAs, ImplKind, LayerImpl, LayerNeed, MetadataBuilder, Refusal, RuleBook};
use headway_tensor::Exec;
use serde::de::DeserializeOwned;
use std::borrow::Borrow;

/// An attention backend: the rule book, and the two classes that it names.
///
/// The associated types tie the three together: `Impl` reads the metadata that `Builder` makes, on
/// the `Exec` that both run on. Handing a layer another backend's metadata does not compile.
///
/// `examples/add-a-backend` is a complete backend outside the workspace.
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

    /// Refuses a combination that no field of the rule book can say. Its reason comes last.
    fn combination(need: &LayerNeed) -> Option<Refusal> {
        let _ = need;
        None
    }
}
