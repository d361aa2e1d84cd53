//! A config with its nesting undone: the text model's fields wherever a multimodal config keeps them,
//! under all names that they go by, with the defaults of `transformers` for those that may be absent.

use super::defaults;
use crate::models::{ModelError, arch::ConfigReader};
use headway_tensor::DType;
use serde_json::Value;

/// Where a multimodal config keeps its text model.
const NESTED: [&str; 5] = ["text_config", "llm_config", "language_config", "thinker_config", "decoder"];

/// The text model's config.
pub(super) struct Config<'a> {
    reader: ConfigReader<'a>,
    outer: ConfigReader<'a>,
    /// `model_type` of the text model.
    pub model_type: String,
    /// The outer `model_type`.
    pub outer_type: String,
    /// The model's class.
    pub architecture: String,
    /// The text model was nested.
    pub multimodal: bool,
}

impl<'a> Config<'a> {
    pub fn new(file: &'a str, json: &'a Value) -> Result<Self, ModelError> {
        let outer = ConfigReader::new(file, json);
        if !json.is_object() {
            return Err(outer.error("the file", "is not a JSON object"));
        }
        let mut text = json;
        while let Some(inner) = NESTED.iter().find_map(|n| text.get(*n).filter(|v| v.is_object())) {
            text = inner;
        }
        let kind = |j: &Value| j.get("model_type").and_then(Value::as_str).unwrap_or("").to_owned();
        let (outer_type, model_type) = (kind(json), kind(text));
        let named = |j: &Value| Some(j.get("architectures")?.get(0)?.as_str()?.to_owned());
        let architecture = match named(json).or_else(|| named(text)) {
            Some(a) => a,
            None if outer_type.is_empty() => outer.architecture()?,
            None => outer_type.clone(),
        };
        Ok(Self {
            reader: ConfigReader::new(file, text),
            outer,
            model_type,
            outer_type,
            architecture,
            multimodal: !std::ptr::eq(text, json),
        })
    }

    /// A field of the text model, else of the outer config.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.reader.get(field).or_else(|| self.outer.get(field))
    }

    pub fn error(&self, field: &str, why: impl Into<String>) -> ModelError {
        self.reader.error(field, why)
    }

    pub fn unsupported(&self, what: impl Into<String>, remedy: &str) -> ModelError {
        self.reader.unsupported(what, remedy)
    }

    /// The first of these names that is there, as a count of at least 1.
    pub fn opt_count(&self, names: &[&str]) -> Result<Option<usize>, ModelError> {
        for name in names {
            if let Some(n) = self.reader.opt_usize(name)? {
                return Ok(Some(n));
            }
        }
        for name in names {
            if let Some(n) = self.outer.opt_usize(name)? {
                return Ok(Some(n));
            }
        }
        Ok(names.iter().find_map(|n| defaults::count(&self.model_type, n)))
    }

    /// As [`Config::opt_count`]; an error that names the first.
    pub fn count(&self, names: &[&str]) -> Result<usize, ModelError> {
        self.opt_count(names)?.ok_or_else(|| self.error(names[0], "is missing"))
    }

    /// A flag; false where it is absent.
    pub fn flag(&self, name: &str) -> Result<bool, ModelError> {
        self.reader.flag(name)
    }

    /// A text.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        self.get(name)?.as_str()
    }

    /// A list of layer indices.
    pub fn indices(&self, name: &str) -> Result<Option<Vec<usize>>, ModelError> {
        let Some(v) = self.get(name) else { return Ok(None) };
        let list: Option<Vec<usize>> =
            v.as_array().and_then(|a| a.iter().map(|x| x.as_u64().map(|n| n as usize)).collect());
        list.map(Some).ok_or_else(|| self.error(name, "is not a list of layer indices"))
    }

    /// A list with an entry a layer.
    pub fn per_layer<T>(
        &self,
        name: &str,
        layers: usize,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelError> {
        let Some(v) = self.get(name).filter(|v| v.is_array()) else { return Ok(None) };
        let list: Option<Vec<T>> = v.as_array().and_then(|a| a.iter().map(read).collect());
        match list {
            Some(l) if l.len() == layers => Ok(Some(l)),
            Some(l) => Err(self.error(name, format!("has {} entries for {layers} layers", l.len()))),
            None => Err(self.error(name, "has an entry of the wrong kind")),
        }
    }

    /// The element type of the weights.
    pub fn dtype(&self) -> Result<Option<DType>, ModelError> {
        let Some(v) = self.get("dtype").or_else(|| self.get("torch_dtype")) else { return Ok(None) };
        match v.as_str().map(|s| s.trim_start_matches("torch.")) {
            Some("bfloat16") => Ok(Some(DType::BF16)),
            Some("float16" | "half") => Ok(Some(DType::F16)),
            Some("float32" | "float") => Ok(Some(DType::F32)),
            _ => Err(self.error("torch_dtype", format!("is {v}; supported: bfloat16, float16, float32"))),
        }
    }

    /// Experts that a token goes to, and experts there are, by whatever name; `None` where a config names none, or
    /// numbers that make no sense (attention does not depend on them).
    pub fn experts(&self) -> Option<(usize, usize)> {
        let number = |names: &[&str]| {
            names.iter().find_map(|n| self.get(n)?.as_u64()).and_then(|n| usize::try_from(n).ok())
        };
        let chosen = number(&[
            "num_experts_per_tok",
            "num_experts_per_token",
            "experts_per_token",
            "top_k_experts",
            "moe_topk",
            "moe_top_k",
        ])?;
        let all = number(&["n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"])?;
        (chosen > 0 && chosen <= all).then_some((chosen, all))
    }

    /// How weights are quantised, and the KV cache dtype that the checkpoint brings scales for.
    pub fn quantisation(&self) -> (Option<String>, Option<String>) {
        let Some(q) = self.get("quantization_config") else { return (None, None) };
        let text = |n: &str| q.get(n).and_then(Value::as_str).map(str::to_owned);
        let method = text("quant_method").map(|m| match text("fmt").or_else(|| text("quant_algo")) {
            Some(kind) => format!("{m} ({kind})"),
            None => m,
        });
        let scheme = q.get("kv_cache_scheme").filter(|s| s.is_object());
        let eight_bit_float = scheme.is_some_and(|s| {
            s.get("num_bits").and_then(Value::as_u64) == Some(8)
                && s.get("type").and_then(Value::as_str) == Some("float")
        });
        let cache = text("kv_cache_quant_algo").map(|a| a.to_ascii_lowercase());
        (method, cache.or_else(|| eight_bit_float.then(|| "fp8".to_owned())))
    }

    /// Most tokens of a request.
    pub fn max_model_len(&self) -> Result<Option<usize>, ModelError> {
        self.opt_count(&[
            "max_position_embeddings",
            "model_max_length",
            "n_positions",
            "max_seq_len",
            "seq_length",
            "max_target_positions",
            "n_ctx",
        ])
    }
}
