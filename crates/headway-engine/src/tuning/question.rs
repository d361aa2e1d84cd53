//! What there is to measure of a model on a device: its layers by shape, as start-up would ask for them.

use super::key::{Here, Shape, words};
use crate::{
    loading,
    models::{dummy, needs::LayerNeeds},
    options::{EngineOptions, LoadFormat},
    runner::{
        StartupError,
        devices::OpenDevice,
        facts::Facts,
        limits::{self, Limits},
        needs, startup,
    },
};
use headway_attention::{
    KvCacheSpec, LayerNeed, Registry,
    process::rules::{AttnType, KindTag},
};
use std::path::{Path, PathBuf};

/// A model on a device.
pub struct Question {
    /// Where and with what.
    pub here: Here,
    /// The backends that there are.
    pub registry: Registry,
    /// One entry a shape, in the model's order.
    pub layers: Vec<LayerQuestion>,
    /// Most tokens of a request.
    pub max_model_len: usize,
    /// Architecture and layers.
    pub model: String,
    /// The layout of the cache that is asked for.
    pub kv_layout: Option<String>,
}

/// Layers of one shape.
pub struct LayerQuestion {
    /// What selection would be asked.
    pub need: LayerNeed,
    /// What a layer's cache holds, with blocks of one token.
    pub cache: KvCacheSpec,
    /// Layers that have the shape.
    pub layers: usize,
    /// The shape.
    pub shape: Shape,
    /// The shape in words.
    pub what: String,
}

impl Question {
    /// Of the model at `path` on an open device; of a `config.json`, whose weights don't matter here, as if they were
    /// there.
    ///
    /// # Errors
    /// As start-up's, as far as it decides before selection.
    pub fn of(path: &Path, options: &EngineOptions, device: &OpenDevice) -> Result<Self, StartupError> {
        limits::refuse_what_is_not_there(options)?;
        let config_alone = path.extension().is_some_and(|e| e == "json");
        let files = match options.load_format {
            LoadFormat::Auto if !config_alone => loading::open(path)?,
            _ => dummy::open(path)?,
        };
        let facts = Facts::of(&files)?;
        let plan = &facts.plan;
        let place = &device.place;
        let limits = Limits::resolve(options, plan.max_position_embeddings, place.usual_limits())?;
        let (activations, kv_dtype) = needs::dtypes(&facts, options, place)?;
        let setting = needs::setting(options, place, activations, kv_dtype);
        let registry = startup::registry(options)?;
        let mut layers: Vec<LayerQuestion> = vec![];
        for l in &LayerNeeds::of_plan(plan) {
            let need = LayerNeed { block_size: None, ..setting.need(l) };
            let shape = Shape::of(&need);
            match layers.iter_mut().find(|q| q.shape == shape) {
                Some(q) => q.layers += 1,
                None => layers.push(LayerQuestion {
                    cache: setting.cache_spec(l, 1, limits.max_model_len),
                    layers: 1,
                    what: words(&need),
                    need,
                    shape,
                }),
            }
        }
        Ok(Self {
            here: device.here(&registry),
            model: format!("{}, {} layers", plan.architecture, plan.num_layers()),
            max_model_len: limits.max_model_len,
            kv_layout: super::tuned::layout(options)?,
            registry,
            layers,
        })
    }

    /// Where its profile lies: as asked, or [`super::default_path`].
    ///
    /// # Errors
    /// No cache folder.
    pub fn path(&self, options: &EngineOptions) -> Result<PathBuf, StartupError> {
        let shapes = self.layers.iter().map(|l| (&l.shape, l.layers));
        Ok(super::tuned::path(options, &self.here.machine, shapes)?)
    }
}

/// A kind of layer that isn't measured, in words.
pub fn unmeasured(need: &LayerNeed) -> Option<&'static str> {
    match need.kind {
        KindTag::StateSpace => Some("states"),
        _ if !need.has_cache => Some("layers without a cache"),
        _ if need.attn_type == AttnType::EncoderDecoder => Some("cross-attention layers"),
        _ if need.use_rswa => Some("R-SWA layers"),
        _ if need.use_chunked_local => Some("chunked layers"),
        _ if need.use_non_causal => Some("non-causal layers"),
        _ => None,
    }
}
