//! `--load-format dummy`: seeded random weights of a config's shapes, for timing a model whose weights
//! are not at hand. The answers mean nothing.

use super::{
    ModelError, ModelPlan, arch,
    plan::{
        ExpertWeights, ExpertsPlan, FeedForwardPlan, LayerNormPlan, LinearPlan, MixerPlan, MlaQueryPlan,
        NormPlan, StackedPlan, StateSpacePlan,
    },
};
use crate::loading::{self, Checkpoint, HfFiles, LoadError, ModelFiles, ModelKind};
use half::{bf16, f16};
use headway_tensor::{SharedBytes, Weight, WeightType};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use serde_json::Value;
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Opens the config at `path` (a directory or the `config.json` itself) with random weights of the
/// config's `torch_dtype` (bfloat16 where it has none).
///
/// # Errors
/// No config there; an architecture without a plan; a dtype that weights can't have.
pub fn open(path: &Path) -> Result<ModelFiles, ModelError> {
    let (mut files, file, dtype) = without_weights(path)?;
    let plan = arch::plan(&files)?;
    files.checkpoint = Arc::new(Dummy::of(file, tensors(&plan), dtype));
    Ok(files)
}

/// The config at `path` as [`open`] reads it, without a single weight.
///
/// # Errors
/// As [`open`], a plan aside.
pub fn config_alone(path: &Path) -> Result<ModelFiles, ModelError> {
    Ok(without_weights(path)?.0)
}

fn without_weights(path: &Path) -> Result<(ModelFiles, String, WeightType), ModelError> {
    let hf = config_files(path)?;
    let dtype = weight_type(&hf.config_path, &hf.config)?;
    let root = hf.config_path.parent().map(Path::to_owned).unwrap_or_default();
    let file = hf.config_path.display().to_string();
    let nothing = Arc::new(Dummy::of(file.clone(), HashMap::new(), dtype));
    let files = ModelFiles { root, kind: ModelKind::Safetensors(Box::new(hf)), checkpoint: nothing };
    Ok((files, file, dtype))
}

/// The files beside the weights that there are not.
fn config_files(path: &Path) -> Result<HfFiles, LoadError> {
    let config_path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    if config_path.extension().is_some_and(|e| e == "gguf" || e == "safetensors") {
        return Err(LoadError::NotSupported {
            path: config_path,
            what: "--load-format dummy with a weight file".into(),
            supported: "a config.json, or a directory with one; leave the option out to load the weights"
                .into(),
        });
    }
    if !config_path.exists() {
        return Err(LoadError::MissingFiles { path: path.to_owned(), missing: vec!["config.json".into()] });
    }
    loading::hf_files(config_path)
}

fn weight_type(path: &Path, config: &Value) -> Result<WeightType, LoadError> {
    let text = config.get("text_config").unwrap_or(config);
    let field = ["torch_dtype", "dtype"].into_iter().find(|f| text.get(f).is_some_and(|v| !v.is_null()));
    let Some(field) = field else { return Ok(WeightType::BF16) };
    match text[field].as_str() {
        Some("bfloat16") => Ok(WeightType::BF16),
        Some("float16") => Ok(WeightType::F16),
        Some("float32") => Ok(WeightType::F32),
        _ => {
            let what = format!("is {}; there are: bfloat16, float16, float32", text[field]);
            Err(LoadError::bad_key(path, field, what))
        }
    }
}

/// Shape of a tensor, and how its values are spread.
#[derive(Clone, Debug, PartialEq)]
enum Fill {
    /// All the same: `[n]`.
    Constant { len: usize, value: f32 },
    /// Uniform with mean 0 and variance 1 / columns: `[rows, columns]`, so that activations keep their size.
    Random { rows: usize, cols: usize },
    /// The same for a tensor of all experts, with variance 1 / `fan_in`.
    Stacked { shape: [usize; 3], fan_in: usize },
    /// Biases of all experts: `[rows, cols]`.
    Zeros { rows: usize, cols: usize },
    /// As [`Fill::Random`], of a depthwise convolution: `[channels, 1, taps]`.
    Taps { channels: usize, taps: usize },
}

/// Every tensor that a plan names, with its shape.
pub(super) fn shapes(plan: &ModelPlan) -> Vec<(String, Vec<usize>)> {
    tensors(plan).into_iter().map(|(name, fill)| (name, fill.shape())).collect()
}

/// Every tensor that a plan names.
fn tensors(plan: &ModelPlan) -> HashMap<String, Fill> {
    let mut out = HashMap::new();
    let h = plan.hidden_size;
    out.insert(plan.embedding.clone(), Fill::Random { rows: plan.vocab_size, cols: h });
    plan.lm_head.iter().for_each(|l| linear(&mut out, l));
    plan.final_norm.iter().for_each(|n| norm(&mut out, n, h));
    plan.embedding_norm.iter().for_each(|n| layer_norm(&mut out, n, h));
    let encoder = plan.encoder.as_deref();
    encoder.iter().for_each(|e| layer_norm(&mut out, &e.embedding_norm, h));
    for p in plan.positions.iter().chain(encoder.map(|e| &e.positions)) {
        out.insert(p.weight.clone(), Fill::Random { rows: p.rows, cols: h });
        if let Some((name, rows)) = &p.types {
            out.insert(name.clone(), Fill::Random { rows: *rows, cols: h });
        }
    }
    for layer in plan.layers.iter().chain(encoder.iter().flat_map(|e| &e.layers)) {
        let norms =
            [&layer.pre_mixer_norm, &layer.post_mixer_norm, &layer.pre_ffn_norm, &layer.post_ffn_norm];
        norms.into_iter().flatten().for_each(|n| norm(&mut out, n, h));
        layer.mixers.iter().for_each(|m| mixer(&mut out, m));
        layer.feed_forward.iter().for_each(|f| feed_forward(&mut out, f));
        let norms = [&layer.after_mixer_norm, &layer.after_ffn_norm];
        norms.into_iter().flatten().for_each(|n| layer_norm(&mut out, n, h));
        if let Some(p) = &layer.per_layer {
            [&p.gate, &p.projection].into_iter().for_each(|l| linear(&mut out, l));
            norm(&mut out, &p.norm, h);
        }
        if let Some(name) = &layer.scalar {
            out.insert(name.clone(), Fill::Constant { len: 1, value: 1.0 });
        }
    }
    if let Some(p) = &plan.per_layer_inputs {
        out.insert(p.table.clone(), Fill::Random { rows: plan.vocab_size, cols: p.all() });
        linear(&mut out, &p.projection);
        norm(&mut out, &p.norm, p.width);
    }
    out
}

fn mixer(out: &mut HashMap<String, Fill>, plan: &MixerPlan) {
    match plan {
        MixerPlan::Mla(a) => {
            [&a.down, &a.kv_b, &a.o].into_iter().for_each(|l| linear(out, l));
            norm(out, &a.kv_norm, a.kv_lora_rank);
            if let MlaQueryPlan::Compressed { norm: of, up } = &a.q {
                norm(out, of, up.in_features);
                linear(out, up);
            }
        }
        MixerPlan::Attention(a) => {
            linear(out, &a.qkv);
            linear(out, &a.o);
            if let Some(n) = &a.qk_norm {
                let heads = |heads| if n.per_head { a.head_size } else { heads * a.head_size };
                norm(out, &n.q, heads(a.num_heads));
                n.k.iter().for_each(|k| norm(out, k, heads(a.num_kv_heads)));
            }
            if let Some(name) = &a.sinks {
                out.insert(name.clone(), Fill::Constant { len: a.num_heads, value: 0.0 });
            }
        }
        MixerPlan::StateSpace(m) => state_space(out, m),
        MixerPlan::Cross(a) => [&a.q, &a.kv, &a.o].into_iter().for_each(|l| linear(out, l)),
    }
}

/// Decays of −1 and short steps: states neither die at once nor grow.
fn state_space(out: &mut HashMap<String, Fill>, m: &StateSpacePlan) {
    linear(out, &m.in_proj);
    linear(out, &m.out_proj);
    out.insert(m.conv_weight.clone(), Fill::Taps { channels: m.conv_dim(), taps: m.conv_kernel });
    for (name, value) in [(&m.a_log, 0.0), (&m.d, 1.0), (&m.dt_bias, -3.0)] {
        out.insert(name.clone(), Fill::Constant { len: m.num_heads, value });
    }
    if let Some(bias) = &m.conv_bias {
        out.insert(bias.clone(), Fill::Constant { len: m.conv_dim(), value: 0.0 });
    }
    m.norm.iter().for_each(|n| norm(out, &n.norm, m.inner()));
}

fn feed_forward(out: &mut HashMap<String, Fill>, plan: &FeedForwardPlan) {
    match plan {
        FeedForwardPlan::Gated { gate_up, down, .. } => {
            linear(out, gate_up);
            linear(out, down);
        }
        FeedForwardPlan::Plain { up, down, .. } => {
            linear(out, up);
            linear(out, down);
        }
        FeedForwardPlan::Experts(plan) => experts(out, plan),
    }
}

fn experts(out: &mut HashMap<String, Fill>, plan: &ExpertsPlan) {
    let n = plan.routing.experts;
    linear(out, &plan.router);
    if let Some(name) = &plan.correction {
        out.insert(name.clone(), Fill::Constant { len: n, value: 0.0 });
    }
    plan.shared.iter().for_each(|f| feed_forward(out, f));
    let mut stacked = |p: &StackedPlan| {
        let fill = Fill::Stacked { shape: p.shape(n), fan_in: p.in_features };
        out.insert(p.weight.clone(), fill);
        if let Some(bias) = &p.bias {
            out.insert(bias.clone(), Fill::Zeros { rows: n, cols: p.out_features });
        }
    };
    match &plan.weights {
        ExpertWeights::Each(all) => all.iter().flat_map(|(g, d)| [g, d]).for_each(|l| linear(out, l)),
        ExpertWeights::Stacked { gate_up, down, .. } => {
            gate_up.iter().chain([down]).for_each(&mut stacked);
        }
    }
}

fn linear(out: &mut HashMap<String, Fill>, plan: &LinearPlan) {
    for part in &plan.parts {
        out.insert(part.weight.clone(), Fill::Random { rows: part.out_features, cols: plan.in_features });
        if let Some(bias) = &part.bias {
            out.insert(bias.clone(), Fill::Constant { len: part.out_features, value: 0.0 });
        }
    }
}

fn norm(out: &mut HashMap<String, Fill>, plan: &NormPlan, width: usize) {
    out.insert(plan.weight.clone(), Fill::Constant { len: width, value: 1.0 - plan.offset });
}

fn layer_norm(out: &mut HashMap<String, Fill>, plan: &LayerNormPlan, width: usize) {
    out.insert(plan.weight.clone(), Fill::Constant { len: width, value: 1.0 });
    out.insert(plan.bias.clone(), Fill::Constant { len: width, value: 0.0 });
}

/// Random weights by name; each is made when it is asked for, and depends on its name alone.
struct Dummy {
    file: String,
    tensors: HashMap<String, Fill>,
    dtype: WeightType,
}

impl Dummy {
    fn of(file: String, tensors: HashMap<String, Fill>, dtype: WeightType) -> Self {
        Self { file, tensors, dtype }
    }
}

impl Fill {
    fn shape(&self) -> Vec<usize> {
        match *self {
            Self::Constant { len, .. } => vec![len],
            Self::Random { rows, cols } | Self::Zeros { rows, cols } => vec![rows, cols],
            Self::Stacked { shape, .. } => shape.to_vec(),
            Self::Taps { channels, taps } => vec![channels, 1, taps],
        }
    }

    fn elems(&self) -> Option<usize> {
        self.shape().into_iter().try_fold(1usize, usize::checked_mul)
    }

    fn bytes<const N: usize>(&self, name: &str, elems: usize, to: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
        match *self {
            Self::Constant { value, .. } => to(value).repeat(elems),
            Self::Zeros { .. } => to(0.0).repeat(elems),
            Self::Random { cols: fan_in, .. }
            | Self::Stacked { fan_in, .. }
            | Self::Taps { taps: fan_in, .. } => {
                let mut rng = ChaCha8Rng::seed_from_u64(seed(name));
                // Uniform on ±√3 σ has the standard deviation σ.
                let scale = (3.0 / fan_in.max(1) as f32).sqrt() / (1u32 << 31) as f32;
                let mut out = Vec::with_capacity(elems * N);
                (0..elems).for_each(|_| out.extend(to(rng.next_u32().cast_signed() as f32 * scale)));
                out
            }
        }
    }
}

/// FNV-1a: stable across runs and platforms.
fn seed(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

impl Checkpoint for Dummy {
    fn get(&self, name: &str) -> Result<Weight, LoadError> {
        let missing = || LoadError::MissingTensor {
            path: PathBuf::from(&self.file),
            name: name.to_owned(),
            nearest: vec![],
            hint: String::new(),
        };
        let fill = self.tensors.get(name).ok_or_else(missing)?;
        let elems = fill.elems().ok_or_else(missing)?;
        let bytes = match self.dtype {
            WeightType::F32 => fill.bytes(name, elems, f32::to_le_bytes),
            WeightType::F16 => fill.bytes(name, elems, |x| f16::from_f32(x).to_le_bytes()),
            _ => fill.bytes(name, elems, |x| bf16::from_f32(x).to_le_bytes()),
        };
        Weight::new(name, self.dtype, fill.shape(), SharedBytes::new(bytes)).map_err(|_| missing())
    }

    fn shape(&self, name: &str) -> Result<Option<Vec<usize>>, LoadError> {
        Ok(self.tensors.get(name).map(Fill::shape))
    }

    fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn describe(&self) -> String {
        format!("{} (random weights, {})", self.file, self.dtype.name())
    }

    fn total_bytes(&self) -> u64 {
        let bytes = |f: &Fill| f.elems().and_then(|n| self.dtype.bytes_for(n)).unwrap_or(usize::MAX) as u64;
        self.tensors.values().map(bytes).fold(0, u64::saturating_add)
    }

    fn made_bytes(&self) -> u64 {
        self.total_bytes()
    }

    fn main_dtype(&self) -> Option<WeightType> {
        Some(self.dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_depend_on_the_name_alone_and_keep_the_size_of_activations() {
        let fill = Fill::Random { rows: 64, cols: 256 };
        let values = |name: &str| -> Vec<f32> {
            let bytes = fill.bytes(name, 64 * 256, f32::to_le_bytes);
            bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        };
        let a = values("a");
        assert_eq!(a, values("a"));
        assert_ne!(a, values("b"));
        let variance = a.iter().map(|x| x * x).sum::<f32>() / a.len() as f32;
        assert!((variance * 256.0 - 1.0).abs() < 0.05, "{variance}");
        let mean = a.iter().sum::<f32>() / a.len() as f32;
        assert!(mean.abs() < 0.002, "{mean}");
    }
}
