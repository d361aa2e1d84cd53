//! Lifetime: process. The one place where types are erased: the object-safe twins of the three
//! classes, and every downcast of the contract. Nothing outside this file downcasts metadata.
//!
//! Three blanket erasures on one trait would conflict, so each kind of layer erases through its own
//! marker: [`EraseAs<Standard>`](EraseAs), `EraseAs<Mla>`, `EraseAs<StateSpace>`.

use crate::{
    AttentionBackend, AttentionError, AttentionImpl, BuilderPlan, CommonAttentionMetadata, GroupInfo,
    ImplKind, KindTag, KvCacheSpec, KvMut, LayerArgs, LayerImpl, LayerKernel, LayerNeed, MetadataBuilder,
    Mla, MlaArgs, MlaImpl, PickArgs, Qkv, Refusal, Result, RuleBook, Standard, StateSpace, StateSpaceArgs,
    StateSpaceImpl, StepEntry,
    layer::{
        attention::{AttentionArgs, DynAttention, QuantisedOut},
        mla::DynMla,
        state_space::DynStateSpace,
    },
};
use headway_tensor::{Exec, TensorMut, TensorRef, View};
use std::{
    any::{Any, TypeId},
    borrow::Borrow,
    marker::PhantomData,
    sync::Arc,
};

/// Metadata of any backend; its own layers know the type.
pub type ErasedMetadata = Arc<dyn Any + Send + Sync>;

/// A backend's configuration, parsed once at start-up.
#[derive(Clone)]
pub struct ErasedConfig(Arc<dyn Any + Send + Sync>);

impl ErasedConfig {
    /// The configuration of a backend that has none.
    pub fn none() -> Self {
        Self(Arc::new(()))
    }

    /// The configurations of a composition's parts, that of decodes first.
    pub(super) fn of_parts(parts: [Self; 2]) -> Self {
        Self(Arc::new(parts))
    }

    /// What [`ErasedConfig::of_parts`] was made of.
    pub(super) fn parts(&self) -> Option<&[Self; 2]> {
        self.0.downcast_ref()
    }
}

/// Turns an impl of one kind into a [`LayerKernel`]. Implemented for every impl; nothing to write.
///
/// `Layer` and `args` are those of [`example`](crate::example), an [`AttentionImpl`] and its arguments:
///
/// ```
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::{Layer, args};
/// use headway_attention::*;
/// let kernel = <Layer as EraseAs<Standard>>::erase(&args(), &())?;
/// assert!(matches!(kernel, LayerKernel::Standard(_)));
/// # Ok::<(), AttentionError>(())
/// ```
pub trait EraseAs<K: ImplKind>: LayerImpl {
    /// Constructs the impl and erases it.
    ///
    /// # Errors
    /// The impl's own.
    fn erase(args: &K::Args<'_>, config: &Self::Config) -> Result<LayerKernel>;
}

impl<I: AttentionImpl> EraseAs<Standard> for I {
    fn erase(args: &AttentionArgs<'_>, config: &I::Config) -> Result<LayerKernel> {
        Ok(LayerKernel::Standard(Box::new(Shim(I::new(args, config)?))))
    }
}
impl<I: MlaImpl> EraseAs<Mla> for I {
    fn erase(args: &MlaArgs<'_>, config: &I::Config) -> Result<LayerKernel> {
        Ok(LayerKernel::Mla(Box::new(Shim(I::new(args, config)?))))
    }
}
impl<I: StateSpaceImpl> EraseAs<StateSpace> for I {
    fn erase(args: &StateSpaceArgs<'_>, config: &I::Config) -> Result<LayerKernel> {
        Ok(LayerKernel::StateSpace(Box::new(Shim(I::new(args, config)?))))
    }
}

struct Shim<I>(I);

fn exec<E: Exec>(cx: &dyn Exec) -> Result<&E> {
    (cx as &dyn Any).downcast_ref().ok_or_else(|| AttentionError::WrongExec {
        expected: std::any::type_name::<E>(),
        found: cx.device().to_string(),
    })
}

/// A group's metadata of one step; `None` in the profile run.
///
/// # Errors
/// Metadata of another type.
pub(crate) fn metadata<M: 'static>(entry: &StepEntry) -> Result<Option<&M>> {
    match entry.erased() {
        None => Ok(None),
        Some(m) => m.downcast_ref().map(Some).ok_or_else(|| {
            AttentionError::Inputs("a layer was given the step entry of another backend's group".into())
        }),
    }
}

impl<I: AttentionImpl> DynAttention for Shim<I> {
    fn run(
        &self,
        cx: &dyn Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        entry: &StepEntry,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        let cx = exec::<I::Exec>(cx)?;
        let Some(m) = metadata(entry)? else { return self.0.fill_zero(cx, &mut out) };
        // An encoder's layers have no cache to write.
        if !kv.shared && kv.num_blocks > 0 && !I::FORWARD_WRITES_KV_CACHE {
            self.0.update_kv_cache(cx, x, kv, entry.slot_mapping())?;
        }
        self.0.forward(cx, x, kv, m, out)
    }

    fn run_quantised(
        &self,
        cx: &dyn Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        entry: &StepEntry,
        mut out: QuantisedOut<'_>,
    ) -> Result<()> {
        let cx = exec::<I::Exec>(cx)?;
        let Some(m) = metadata(entry)? else {
            self.0.fill_zero(cx, &mut out.codes)?;
            return self.0.fill_zero(cx, &mut out.scales);
        };
        if !kv.shared && !I::FORWARD_WRITES_KV_CACHE {
            self.0.update_kv_cache(cx, x, kv, entry.slot_mapping())?;
        }
        self.0.forward_quantised(cx, x, kv, m, out)
    }

    fn write_kv_cache(
        &self,
        cx: &dyn Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        slot_mapping: &View<i64>,
    ) -> Result<()> {
        if I::FORWARD_WRITES_KV_CACHE {
            let what = "the cache is written by forward, not by a call of its own";
            return Err(AttentionError::Inputs(what.into()));
        }
        self.0.update_kv_cache(exec::<I::Exec>(cx)?, x, kv, slot_mapping)
    }
}

impl<I: MlaImpl> DynMla for Shim<I> {
    fn run(
        &self,
        cx: &dyn Exec,
        q: TensorRef<'_>,
        latent: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        entry: &StepEntry,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        let cx = exec::<I::Exec>(cx)?;
        let Some(m) = metadata(entry)? else { return self.0.fill_zero(cx, &mut out) };
        let (d, n) = (entry.split().decode_tokens, entry.num_tokens());
        if !kv.shared {
            self.0.update_kv_cache(cx, latent.rows(0..n)?, kv, entry.slot_mapping())?;
        }
        if d > 0 {
            self.0.forward_mqa(cx, q.rows(0..d)?, kv, m, out.reborrow().rows(0..d)?)?;
        }
        if d < n {
            self.0.forward_mha(cx, q.rows(d..n)?, latent.rows(d..n)?, kv, m, out.rows(d..n)?)?;
        }
        Ok(())
    }
}

impl<I: StateSpaceImpl> DynStateSpace for Shim<I> {
    fn run(
        &self,
        cx: &dyn Exec,
        x: TensorRef<'_>,
        state: &mut KvMut<'_>,
        entry: &StepEntry,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        let cx = exec::<I::Exec>(cx)?;
        let Some(m) = metadata(entry)? else { return self.0.fill_zero(cx, &mut out) };
        self.0.forward(cx, x, state, m, out)
    }
}

/// The object-safe twin of [`MetadataBuilder`]: [`DynBackend::builder`] makes it, [`crate::build_step`]
/// calls it.
///
/// `builder` and `step` are those of [`example`](crate::example); the step is a decode and a prefill of three
/// tokens.
///
/// ```
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::{Host, builder, step};
/// use headway_attention::*;
/// let mut builder = builder()?;
/// let entry = builder.build(&Host, &step()?, false)?;
/// assert_eq!((entry.num_tokens(), entry.split().decode_tokens), (4, 1));
/// assert_eq!(entry.slot_mapping().host(), Some(&[24, 32, 33, 34][..]));
/// // This builder can't swap a block table, and says so.
/// assert!(builder.update_block_table(&Host, &entry, &step()?).is_err());
/// # Ok::<(), AttentionError>(())
/// ```
pub trait DynBuilder: Send {
    /// Builds this step's metadata; `capture` asks for [`MetadataBuilder::build_for_capture`].
    ///
    /// # Errors
    /// The builder's own, or another device's `cx`.
    fn build(&mut self, cx: &dyn Exec, common: &CommonAttentionMetadata, capture: bool) -> Result<StepEntry>;

    /// Reuses the metadata of an earlier group and swaps the block table.
    ///
    /// # Errors
    /// As [`DynBuilder::build`]; a builder without this refuses.
    fn update_block_table(
        &mut self,
        cx: &dyn Exec,
        first: &StepEntry,
        common: &CommonAttentionMetadata,
    ) -> Result<StepEntry>;
}

fn entry<B: MetadataBuilder>(m: B::Metadata, common: &CommonAttentionMetadata) -> StepEntry {
    StepEntry::new(B::split(&m), B::frozen(&m), common, Arc::new(m))
}

impl<B: MetadataBuilder> DynBuilder for Shim<B> {
    fn build(&mut self, cx: &dyn Exec, common: &CommonAttentionMetadata, capture: bool) -> Result<StepEntry> {
        let cx = exec(cx)?;
        let m = if capture { self.0.build_for_capture(cx, common)? } else { self.0.build(cx, common)? };
        Ok(entry::<B>(m, common))
    }

    fn update_block_table(
        &mut self,
        cx: &dyn Exec,
        first: &StepEntry,
        common: &CommonAttentionMetadata,
    ) -> Result<StepEntry> {
        let Some(first) = metadata(first)? else {
            return Err(AttentionError::Inputs("block-table update of an entry without metadata".into()));
        };
        Ok(entry::<B>(self.0.update_block_table(exec(cx)?, first, common)?, common))
    }
}

/// The object-safe twin of [`AttentionBackend`]. The registry makes it; what start-up does with it
/// (`Copying` and `Host` are those of [`example`](crate::example)):
///
/// ```
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::{Copying, Host};
/// use headway_attention::*;
/// use headway_tensor::DType;
/// let mut registry = Registry::default();
/// registry.register::<Copying>()?;
/// let backend = registry.get("copying")?;
/// let config = backend.parse_config(None)?;
/// let layer = LayerCache {
///     layer: AttnLayer(0),
///     spec: KvCacheSpec::Full(AttentionSpec::new(16, 2, 64, DType::F32)),
///     backend: backend.clone(),
///     num_heads: 4,
///     latent: None,
///     shares_cache_of: None,
/// };
/// let plan = plan_kv_cache(&[layer], &CacheLimits::new(8, 64, 1024), 1 << 20)?;
/// let group = AttentionGroup::from_plan(&plan.attention_groups[0], &Host, &config, 1)?;
/// assert_eq!((group.backend(), plan.num_blocks), ("COPYING", 64));
/// # Ok::<(), AttentionError>(())
/// ```
pub trait DynBackend: Send + Sync {
    /// The rule book.
    fn rules(&self) -> &RuleBook;
    /// [`AttentionBackend::combination`].
    fn combination(&self, need: &LayerNeed) -> Option<Refusal>;
    /// Every reason against it by the rule book's fields; there are some exactly where [`RuleBook::refusals`] has some.
    fn refusals(&self, need: &LayerNeed) -> Vec<Refusal> {
        self.rules().refusals(need)
    }
    /// [`AttentionBackend::stands_back`].
    fn stands_back(&self, need: &LayerNeed) -> Option<Refusal> {
        let _ = need;
        None
    }
    /// Of a backend made of two ([`Composed`](super::composed::Composed)) the one that serves decodes and the one that
    /// serves prefills.
    fn parts(&self) -> Option<[&Arc<dyn DynBackend>; 2]> {
        None
    }
    /// [`AttentionBackend::customize_spec`].
    fn customize_spec(&self, spec: KvCacheSpec) -> KvCacheSpec;
    /// Parses the backend's configuration table; `None` is the default.
    ///
    /// # Errors
    /// [`AttentionError::Config`].
    fn parse_config(&self, table: Option<&serde_json::Value>) -> Result<ErasedConfig>;
    /// Parses its own among the tables of all backends, by name.
    ///
    /// # Errors
    /// As [`DynBackend::parse_config`].
    fn configure(&self, tables: &serde_json::Map<String, serde_json::Value>) -> Result<ErasedConfig> {
        self.parse_config(tables.get(&*self.rules().name))
    }
    /// Identity of the builder class: groups of equal builders may share metadata.
    fn builder_type(&self) -> TypeId;
    /// Whether the builder can swap a block table in finished metadata.
    fn updates_block_table(&self) -> bool;
    /// [`MetadataBuilder::plan`].
    ///
    /// # Errors
    /// The builder's own.
    fn plan(&self, group: &GroupInfo, config: &ErasedConfig) -> Result<BuilderPlan>;
    /// Constructs a builder.
    ///
    /// # Errors
    /// The builder's own.
    fn builder(
        &self,
        cx: &dyn Exec,
        group: &GroupInfo,
        plan: &BuilderPlan,
        config: &ErasedConfig,
    ) -> Result<Box<dyn DynBuilder>>;
    /// Constructs a layer's impl.
    ///
    /// # Errors
    /// [`AttentionError::WrongKind`] for arguments of another kind of layer; the impl's own.
    fn layer(&self, args: &LayerArgs<'_>, config: &ErasedConfig) -> Result<LayerKernel>;
}

pub(super) struct Erased<B> {
    rules: RuleBook,
    backend: PhantomData<fn() -> B>,
}

impl<B: AttentionBackend> Erased<B> {
    pub(super) fn new() -> Self {
        Self { rules: B::rules(), backend: PhantomData }
    }

    fn config<'a>(&self, c: &'a ErasedConfig) -> Result<&'a B::Config> {
        c.0.downcast_ref().ok_or_else(|| AttentionError::Config {
            backend: self.rules.name.to_string(),
            why: "the configuration was parsed by another backend".into(),
        })
    }
}

impl<B: AttentionBackend<Kind: PickArgs>> DynBackend for Erased<B> {
    fn rules(&self) -> &RuleBook {
        &self.rules
    }

    fn combination(&self, need: &LayerNeed) -> Option<Refusal> {
        B::combination(need)
    }

    fn stands_back(&self, need: &LayerNeed) -> Option<Refusal> {
        B::stands_back(need)
    }

    fn customize_spec(&self, spec: KvCacheSpec) -> KvCacheSpec {
        B::customize_spec(spec)
    }

    fn parse_config(&self, table: Option<&serde_json::Value>) -> Result<ErasedConfig> {
        use serde::Deserialize;
        let c = match table {
            None => B::Config::default(),
            Some(v) => B::Config::deserialize(v).map_err(|e| {
                // What the parser says of a value doesn't name its key.
                let alone = |(k, v): &(&String, &serde_json::Value)| {
                    let one = serde_json::Map::from_iter([((*k).clone(), (*v).clone())]);
                    B::Config::deserialize(&serde_json::Value::Object(one)).is_err()
                };
                let why = match v.as_object().and_then(|o| o.iter().find(alone)) {
                    Some((k, v)) if !e.to_string().contains(k.as_str()) => format!("{k} = {v}: {e}"),
                    _ => e.to_string(),
                };
                AttentionError::Config { backend: self.rules.name.to_string(), why }
            })?,
        };
        Ok(ErasedConfig(Arc::new(c)))
    }

    fn builder_type(&self) -> TypeId {
        TypeId::of::<B::Builder>()
    }

    fn updates_block_table(&self) -> bool {
        B::Builder::UPDATES_BLOCK_TABLE
    }

    fn plan(&self, group: &GroupInfo, config: &ErasedConfig) -> Result<BuilderPlan> {
        B::Builder::plan(group, &self.rules, self.config(config)?.borrow())
    }

    fn builder(
        &self,
        cx: &dyn Exec,
        group: &GroupInfo,
        plan: &BuilderPlan,
        config: &ErasedConfig,
    ) -> Result<Box<dyn DynBuilder>> {
        Ok(Box::new(Shim(B::Builder::new(exec(cx)?, group, plan, self.config(config)?.borrow())?)))
    }

    fn layer(&self, args: &LayerArgs<'_>, config: &ErasedConfig) -> Result<LayerKernel> {
        let args_of_kind = B::Kind::pick(args).ok_or_else(|| AttentionError::WrongKind {
            backend: self.rules.name.to_string(),
            offers: KindTag::name(B::Kind::TAG),
            asked: KindTag::name(args.kind()),
        })?;
        B::Impl::erase(args_of_kind, self.config(config)?)
    }
}
