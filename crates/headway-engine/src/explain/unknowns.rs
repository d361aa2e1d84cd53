//! What can't be known from a config and options: said, not guessed.

use super::{Contenders, Query};
use crate::{
    models::{ModelNeeds, needs::MixerNeeds},
    runner::StartupReport,
};

/// What isn't known of this model with these options.
pub(super) fn of_model(r: &mut StartupReport, model: &ModelNeeds, q: &Query, contenders: &Contenders) {
    let mut say = |text: String| r.unknowns.push(text);
    if model.dtype.is_none() && q.asked.engine.dtype == crate::options::DTypeOption::Auto {
        say(format!("the config names no dtype; {} is taken, --dtype says otherwise", q.setting.dtype));
    }
    if model.max_model_len.is_none() && q.asked.engine.max_model_len.is_none() {
        say(format!(
            "the config names no longest sequence; {} tokens are taken, --max-model-len says otherwise",
            q.max_model_len
        ));
    }
    if q.weights_bytes.is_none() && q.asked.engine.kv_cache_memory.is_none() {
        say("a config doesn't say how many bytes the weights take, so nothing is taken off for them: what fits is an upper \
             bound; --kv-cache-memory says what there really is"
            .into());
    }
    model.left_out.iter().for_each(|t| say(t.clone()));
    let has = |f: &dyn Fn(&MixerNeeds) -> bool| model.mixers.iter().any(|l| f(&l.mixer));
    if has(&|m| matches!(m, MixerNeeds::State(_))) {
        say("states are kept for running requests alone; prefix caching over state-space layers keeps more"
            .into());
    }
    let Contenders::Catalog(catalog) = contenders else { return };
    say("whether the packages that kernels come from are installed: all count as there".into());
    say("environment variables of the engine, such as VLLM_KV_CACHE_LAYOUT: none counts as set".into());
    say("bytes of the builders' buffers and of activations".into());
    if q.asked.engine.max_num_seqs.is_none() || q.asked.engine.max_num_batched_tokens.is_none() {
        say(format!(
            "the engine's defaults of --max-num-seqs and --max-num-batched-tokens depend on the device; {} and {} are taken",
            q.max_num_seqs, q.max_num_batched_tokens
        ));
    }
    if let Some(c) = q.setting.capability.filter(|c| !catalog.capabilities().contains(c)) {
        say(format!(
            "the catalogue's facts were not asked for capability {c}; they follow their neighbours' ranges"
        ));
    }
    if has(&|m| matches!(m, MixerNeeds::Attention(a) if a.head_size != a.head_size_v)) {
        say("keys and values of different size: the engine's model may choose a backend for that itself, past the priorities".into());
    }
    let packed = q.setting.kv_cache_dtype.0.starts_with("fp8") && q.setting.kv_cache_dtype.0 != "fp8_ds_mla";
    if packed && has(&|m| matches!(m, MixerNeeds::Mla(l) if l.index_topk.is_some())) {
        say(
            "a sparse latent cache in fp8 may be stored as fp8_ds_mla, with 656 bytes a token instead of 576"
                .into(),
        );
    }
}
