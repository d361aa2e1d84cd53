//! Lifetime: process. A backend made of two, one for the decodes of a step and one for its prefills, by name: `A+B`.
//! Any two registered backends of standard attention on one platform; nothing here knows which.
//!
//! The builder cuts each step in two (`group::composed`), what it makes of it is `step::composed`, and a layer calls both
//! parts' kernels (`layer::composed`). The parts see one KV cache: one spec, one layout, one kernel block size. Its
//! elements are the named type's, divided by the layer's scales where it has 8 bits, so that what one part writes the
//! other reads; cache types of which that can't be said are left out of the rule book.

mod name;
mod rules;

pub(in crate::process) use name::{BETWEEN, parts_of};

use super::erased::ErasedConfig;
use crate::{
    AttentionError, AttentionSpec, BuilderPlan, DynBackend, DynBuilder, GraphSupport, GroupInfo, KindTag,
    KvCacheSpec, LayerArgs, LayerKernel, LayerNeed, Refusal, Result, RuleBook,
    group::composed::ComposedBuilder, layer::composed::ComposedLayer, step::micro_batch::SliceBuffers,
};
use headway_tensor::Exec;
use std::{any::TypeId, sync::Arc};

/// Where the engine's default isn't known: tokens in a block.
const USUAL_BLOCK_SIZE: usize = 16;

/// A backend made of two. [`Registry::get`](crate::Registry::get) makes it of a name.
///
/// `Copying` of [`example`](crate::example) copies the queries; beside it one that copies them too:
///
/// ```
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::{Builder, Copying, Host, Layer};
/// use headway_attention::{process::rules::KernelBlockSize, *};
/// enum Echoing {}
/// impl AttentionBackend for Echoing {
///     const CONTRACT: u32 = 1;
///     type Exec = Host;
///     type Kind = Standard;
///     type Config = ();
///     type Builder = Builder;
///     type Impl = Layer;
///     fn rules() -> RuleBook {
///         let kernel_block_sizes = vec![KernelBlockSize::Exact(32)];
///         RuleBook { name: "ECHOING".into(), kernel_block_sizes, ..Copying::rules() }
///     }
/// }
///
/// let mut registry = Registry::default();
/// registry.register::<Copying>()?;
/// registry.register::<Echoing>()?;
/// let backend = registry.get("copying+echoing")?;
/// assert_eq!(backend.rules().name, "COPYING+ECHOING");
/// assert_eq!(backend.rules().kernel_block_sizes, [KernelBlockSize::Exact(32)]);
/// assert_eq!(backend.parts().unwrap().map(|b| &*b.rules().name), ["COPYING", "ECHOING"]);
/// assert!(registry.get("COPYING+ECHOES").err().unwrap().to_string().contains("did you mean ECHOING?"));
/// # Ok::<(), AttentionError>(())
/// ```
pub struct Composed {
    parts: [Arc<dyn DynBackend>; 2],
    rules: RuleBook,
}

/// Which rows each part serves.
const ROWS: [&str; 2] = ["decode", "prefill"];

impl Composed {
    /// Of a backend for decodes and one for prefills.
    ///
    /// # Errors
    /// [`AttentionError::Composition`]: another kind of layer, two platforms, rules that leave nothing in common.
    pub fn new(decode: Arc<dyn DynBackend>, prefill: Arc<dyn DynBackend>) -> Result<Self> {
        let (d, p) = (decode.rules(), prefill.rules());
        let refuse = |why| Err(AttentionError::Composition { name: name::of(d, p), why });
        if let Some(other) = [d, p].into_iter().find(|r| r.kind != KindTag::Standard) {
            let kind = other.kind.name();
            return refuse(format!(
                "{} is for {kind}; backends of standard attention can be composed",
                other.name
            ));
        }
        if d.platform != p.platform {
            return refuse(format!(
                "{} runs on {}, {} on {}; give two of one platform",
                d.name, d.platform, p.name, p.platform
            ));
        }
        match rules::of_both(d, p) {
            Ok(rules) => Ok(Self { parts: [decode, prefill], rules }),
            Err(why) => refuse(why),
        }
    }

    /// Each part with the rows that it serves.
    fn each(&self) -> impl Iterator<Item = (&Arc<dyn DynBackend>, &'static str)> {
        self.parts.iter().zip(ROWS)
    }

    fn configs<'a>(&self, config: &'a ErasedConfig) -> Result<&'a [ErasedConfig; 2]> {
        config.parts().ok_or_else(|| AttentionError::Config {
            backend: self.rules.name.to_string(),
            why: "the configuration was parsed by another backend".into(),
        })
    }

    fn plans(&self, group: &GroupInfo, config: &ErasedConfig) -> Result<[BuilderPlan; 2]> {
        let [d, p] = self.configs(config)?;
        Ok([self.parts[0].plan(group, d)?, self.parts[1].plan(group, p)?])
    }

    /// Why the parts would not look at one cache alike: they make other caches of a layer's.
    fn other_cache(&self, need: &LayerNeed) -> Option<String> {
        let dtype = need.kv_cache_dtype.as_ref().map_or(Some(need.dtype), |kv| kv.element(need.dtype))?;
        let block = need.block_size.unwrap_or_else(|| self.rules.preferred_block_size(USUAL_BLOCK_SIZE));
        let attention = AttentionSpec {
            head_size_v: need.head_size_v,
            non_causal: need.use_non_causal,
            ..AttentionSpec::new(block, need.num_kv_heads, need.head_size, dtype)
        };
        let spec = match need.sliding_window {
            Some(sliding_window) => KvCacheSpec::SlidingWindow { attention, sliding_window },
            None => KvCacheSpec::Full(attention),
        };
        let [d, p] = [0, 1].map(|i| self.parts[i].customize_spec(spec.clone()));
        let [of_d, of_p] = [0, 1].map(|i| &self.parts[i].rules().name);
        (d != p).then(|| format!("{of_d} and {of_p} shape the KV cache of such a layer differently"))
    }
}

impl DynBackend for Composed {
    fn rules(&self) -> &RuleBook {
        &self.rules
    }

    fn refusals(&self, need: &LayerNeed) -> Vec<Refusal> {
        let by_part = |(part, rows): (&Arc<dyn DynBackend>, &'static str)| {
            let name = &part.rules().name;
            part.refusals(need)
                .into_iter()
                .map(|why| (format!("{name} ({rows}): {why}").into(), why))
                .collect::<Vec<_>>()
        };
        let (mut said, plain): (Vec<Refusal>, Vec<Refusal>) = self.each().flat_map(by_part).unzip();
        // What both take and the two together don't.
        let together = |why: &Refusal| !plain.contains(why);
        said.extend(self.rules.refusals(need).into_iter().filter(together));
        said
    }

    fn combination(&self, need: &LayerNeed) -> Option<Refusal> {
        let by_part = |(part, rows): (&Arc<dyn DynBackend>, &str)| {
            part.combination(need).map(|why| format!("{} ({rows}): {why}", part.rules().name))
        };
        let parts: Vec<String> = self.each().filter_map(by_part).collect();
        match parts.is_empty() {
            true => self.other_cache(need).map(Into::into),
            false => Some(parts.join("; ").into()),
        }
    }

    fn parts(&self) -> Option<[&Arc<dyn DynBackend>; 2]> {
        Some([&self.parts[0], &self.parts[1]])
    }

    /// As both parts make it; where they differ, [`DynBackend::combination`] has refused.
    fn customize_spec(&self, spec: KvCacheSpec) -> KvCacheSpec {
        self.parts[0].customize_spec(spec)
    }

    fn parse_config(&self, table: Option<&serde_json::Value>) -> Result<ErasedConfig> {
        let [d, p] = [0, 1].map(|i| &self.parts[i].rules().name);
        match table {
            None => {
                let [d, p] = [0, 1].map(|i| self.parts[i].parse_config(None));
                Ok(ErasedConfig::of_parts([d?, p?]))
            }
            Some(_) => Err(AttentionError::Config {
                backend: self.rules.name.to_string(),
                why: format!("it has no table of its own, each part has: [backend.{d}] and [backend.{p}]"),
            }),
        }
    }

    fn configure(&self, tables: &serde_json::Map<String, serde_json::Value>) -> Result<ErasedConfig> {
        self.parse_config(tables.get(&*self.rules.name))?;
        let [d, p] = [0, 1].map(|i| self.parts[i].configure(tables));
        Ok(ErasedConfig::of_parts([d?, p?]))
    }

    fn builder_type(&self) -> TypeId {
        TypeId::of::<ComposedBuilder>()
    }

    fn updates_block_table(&self) -> bool {
        self.parts.iter().all(|p| p.updates_block_table())
    }

    /// A graph holds decodes alone, which are the first part's; with more tokens each than that takes as decodes they
    /// are the other's.
    fn plan(&self, group: &GroupInfo, config: &ErasedConfig) -> Result<BuilderPlan> {
        let [d, p] = self.plans(group, config)?;
        let decode_len = 1 + group.num_speculative_tokens;
        let threshold = d.reorder_batch_threshold.unwrap_or(decode_len);
        let most = match threshold < decode_len {
            true => GraphSupport::UniformSingleTokenDecode,
            false => GraphSupport::UniformBatch,
        };
        let own = SliceBuffers::bytes(group.max_num_reqs) as u64;
        Ok(BuilderPlan {
            graph_support: d.graph_support.min(most),
            reorder_batch_threshold: Some(threshold),
            persistent_bytes: d.persistent_bytes + p.persistent_bytes + own,
            workspace_bytes: d.workspace_bytes + p.workspace_bytes,
        })
    }

    fn builder(
        &self,
        cx: &dyn Exec,
        group: &GroupInfo,
        plan: &BuilderPlan,
        config: &ErasedConfig,
    ) -> Result<Box<dyn DynBuilder>> {
        let (plans, [d, p]) = (self.plans(group, config)?, self.configs(config)?);
        let decode = self.parts[0].builder(cx, group, &plans[0], d)?;
        let prefill = self.parts[1].builder(cx, group, &plans[1], p)?;
        let threshold = plan.reorder_batch_threshold.unwrap_or(1);
        let rest = SliceBuffers::new(cx, group.max_num_reqs)?;
        let name = self.rules.name.to_string();
        Ok(Box::new(ComposedBuilder { name, parts: [decode, prefill], threshold, rest }))
    }

    fn layer(&self, args: &LayerArgs<'_>, config: &ErasedConfig) -> Result<LayerKernel> {
        let [d, p] = self.configs(config)?;
        match (self.parts[0].layer(args, d)?, self.parts[1].layer(args, p)?) {
            (LayerKernel::Standard(decode), LayerKernel::Standard(prefill)) => {
                let forward_writes = self.rules.forward_includes_kv_cache_update;
                Ok(LayerKernel::Standard(Box::new(ComposedLayer { decode, prefill, forward_writes })))
            }
            _ => Err(AttentionError::WrongKind {
                backend: self.rules.name.to_string(),
                offers: KindTag::Standard.name(),
                asked: args.kind().name(),
            }),
        }
    }
}
