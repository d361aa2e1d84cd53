//! A backend of the catalogue in the place of one that runs: the cache's plan and the graph mode are asked of it as
//! of any other. It has no kernels, and says so where it is asked for them.

use headway_attention::{
    AttentionError, BuilderPlan, DynBackend, DynBuilder, ErasedConfig, GroupInfo, KvCacheSpec, LayerArgs,
    LayerKernel, LayerNeed, Refusal, Result, RuleBook, catalog::Catalog,
};
use headway_tensor::Exec;
use std::{any::TypeId, sync::Arc};

/// A backend of the catalogue as it is for one layer.
pub struct Described {
    catalog: Arc<Catalog>,
    name: String,
    need: LayerNeed,
    rules: RuleBook,
}

impl Described {
    /// The backend of that name, as it is for a layer of this need.
    pub fn new(catalog: Arc<Catalog>, name: &str, need: &LayerNeed) -> Result<Self> {
        let rules = catalog.backend(name)?.rules(need).clone();
        Ok(Self { catalog, name: name.to_owned(), need: need.clone(), rules })
    }

    fn only_described<T>(&self) -> Result<T> {
        Err(AttentionError::Unsupported {
            backend: self.name.clone(),
            what: "running".into(),
            remedy: "the catalogue only describes it".into(),
        })
    }
}

impl DynBackend for Described {
    fn rules(&self) -> &RuleBook {
        &self.rules
    }

    fn combination(&self, need: &LayerNeed) -> Option<Refusal> {
        self.catalog.backend(&self.name).ok()?.combination(need)
    }

    fn customize_spec(&self, spec: KvCacheSpec) -> KvCacheSpec {
        match self.catalog.backend(&self.name) {
            Ok(b) => b.customize_spec(spec),
            Err(_) => spec,
        }
    }

    fn parse_config(&self, _: Option<&serde_json::Value>) -> Result<ErasedConfig> {
        Ok(ErasedConfig::none())
    }

    fn builder_type(&self) -> TypeId {
        TypeId::of::<Self>()
    }

    fn updates_block_table(&self) -> bool {
        self.catalog.backend(&self.name).is_ok_and(|b| b.builder(&self.need).supports_update_block_table)
    }

    fn plan(&self, _: &GroupInfo, _: &ErasedConfig) -> Result<BuilderPlan> {
        Ok(self.catalog.backend(&self.name)?.plan(&self.need))
    }

    fn builder(
        &self,
        _: &dyn Exec,
        _: &GroupInfo,
        _: &BuilderPlan,
        _: &ErasedConfig,
    ) -> Result<Box<dyn DynBuilder>> {
        self.only_described()
    }

    fn layer(&self, _: &LayerArgs<'_>, _: &ErasedConfig) -> Result<LayerKernel> {
        self.only_described()
    }
}
