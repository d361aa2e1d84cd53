//! Translators: a config into a plan. One file a family; a new architecture is one function and its
//! line in a table here.

mod bart;
mod bert;
mod config;
mod deepseek;
mod experts;
mod families;
mod gemma4;
mod gguf;
mod hf;
mod hybrids;
mod state_space;

pub use config::ConfigReader;

use super::{
    ModelError, ModelPlan,
    plan::{CausalLayers, MaskPlan, MixerPlan},
};
use crate::loading::{ModelFiles, ModelKind};
use serde_json::Value;

type Translate = fn(&ConfigReader<'_>) -> Result<ModelPlan, ModelError>;

/// Architectures by the name in `config.json`'s `architectures`.
const HUGGING_FACE: &[(&str, Translate)] = &[
    ("LlamaForCausalLM", families::llama),
    ("MistralForCausalLM", families::mistral),
    ("Qwen2ForCausalLM", families::qwen2),
    ("Qwen3ForCausalLM", families::qwen3),
    ("Gemma2ForCausalLM", families::gemma2),
    ("Gemma3ForCausalLM", families::gemma3),
    ("Gemma4ForCausalLM", gemma4::gemma4),
    ("Phi3ForCausalLM", families::phi3),
    ("Olmo2ForCausalLM", families::olmo2),
    ("DeepseekV2ForCausalLM", deepseek::v2),
    ("DeepseekV3ForCausalLM", deepseek::v3),
    ("Qwen3MoeForCausalLM", families::qwen3_moe),
    ("GptOssForCausalLM", families::gpt_oss),
    ("Mamba2ForCausalLM", hybrids::mamba2),
    ("BambaForCausalLM", hybrids::bamba),
    ("GraniteMoeHybridForCausalLM", hybrids::granite_hybrid),
    ("NemotronHForCausalLM", hybrids::nemotron_h),
    ("FalconH1ForCausalLM", hybrids::falcon_h1),
    ("BartForConditionalGeneration", bart::bart),
    ("BertModel", bert::bert),
    ("RobertaModel", bert::roberta),
    ("XLMRobertaModel", bert::roberta),
];

/// The plan of a model's files.
///
/// # Errors
/// An architecture without a translator, with the list of those there are; a missing field, by name.
pub fn plan(files: &ModelFiles) -> Result<ModelPlan, ModelError> {
    match &files.kind {
        ModelKind::Safetensors(hf) => of_config(&hf.config_path.display().to_string(), &hf.config),
        ModelKind::Gguf(g) => gguf::plan(g),
    }
}

/// What any config may say of its attention's masks.
fn with_masks(c: &ConfigReader<'_>, mut plan: ModelPlan) -> Result<ModelPlan, ModelError> {
    let causal = CausalLayers::read(|f| c.get(f)).map_err(|(field, why)| c.error(field, why))?;
    let sees_on = |m: &MixerPlan| matches!(m, MixerPlan::Attention(a) if !causal.holds(a.sliding_window));
    let causal = if plan.mixers().any(|(_, m)| sees_on(m)) { causal } else { CausalLayers::All };
    plan.masks =
        MaskPlan { mm_prefix: c.flag("is_mm_prefix_lm")?, rswa_window: c.opt_usize("rswa_window")?, causal };
    match plan.masks.refused(&plan) {
        Some((what, remedy)) => Err(c.unsupported(what, remedy)),
        None => Ok(plan),
    }
}

/// The plan of a `config.json`.
fn of_config(file: &str, json: &Value) -> Result<ModelPlan, ModelError> {
    let reader = ConfigReader::new(file, json);
    with_masks(&reader, translator(&reader, file)?(&reader)?)
}

/// Refuses files of an architecture that has no plan, before a tokenizer or weights are looked at.
///
/// # Errors
/// [`ModelError::UnknownArchitecture`], with the list of those there are.
pub fn refuse_unknown(files: &ModelFiles) -> Result<(), ModelError> {
    match &files.kind {
        ModelKind::Safetensors(hf) => {
            let file = hf.config_path.display().to_string();
            translator(&ConfigReader::new(&file, &hf.config), &file).map(|_| ())
        }
        ModelKind::Gguf(g) => gguf::refuse_unknown(g),
    }
}

fn translator(reader: &ConfigReader<'_>, file: &str) -> Result<Translate, ModelError> {
    let name = reader.architecture()?;
    let found = HUGGING_FACE.iter().find(|(n, _)| *n == name);
    found.map(|(_, translate)| *translate).ok_or_else(|| ModelError::UnknownArchitecture {
        file: file.to_owned(),
        name,
        known: known(),
    })
}

/// All architectures, as users would look for them.
pub fn known() -> String {
    let hf: Vec<_> = HUGGING_FACE.iter().map(|(n, _)| *n).collect();
    format!("{}; GGUF: {}", hf.join(", "), gguf::KNOWN.join(", "))
}
