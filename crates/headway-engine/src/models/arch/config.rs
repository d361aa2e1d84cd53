//! Reads fields of a Hugging Face `config.json`, naming the file and the field in every error. Knows
//! both layouts: the hub's (`rope_theta`, `rope_scaling`, `torch_dtype`) and the one that
//! transformers 5 writes (`rope_parameters`, `dtype`).

use crate::models::{
    ModelError,
    rope::{RopePlan, RopeScaling, Yarn},
};
use headway_tensor::RopeStyle;
use serde_json::Value;

/// A config file with its name.
pub struct ConfigReader<'a> {
    file: &'a str,
    json: &'a Value,
}

impl<'a> ConfigReader<'a> {
    /// Reads `json`, which came from `file`.
    pub fn new(file: &'a str, json: &'a Value) -> Self {
        Self { file, json }
    }

    /// An error about a field.
    pub fn error(&self, field: &str, why: impl Into<String>) -> ModelError {
        ModelError::Field { file: self.file.into(), field: field.into(), why: why.into() }
    }

    /// An error about a feature.
    pub fn unsupported(&self, what: impl Into<String>, remedy: impl Into<String>) -> ModelError {
        ModelError::Unsupported { file: self.file.into(), what: what.into(), remedy: remedy.into() }
    }

    /// A field that is there and not null.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.json.get(field).filter(|v| !v.is_null())
    }

    /// Whether a field is there and null, which says more than silence does.
    pub fn is_null(&self, field: &str) -> bool {
        self.json.get(field).is_some_and(Value::is_null)
    }

    /// The first of `architectures`.
    pub fn architecture(&self) -> Result<String, ModelError> {
        if !self.json.is_object() {
            return Err(self.error("the file", "is not a JSON object"));
        }
        self.get("architectures")
            .and_then(|a| a.get(0))
            .and_then(Value::as_str)
            .map(str::to_owned)
            .ok_or_else(|| self.error("architectures", "is missing; it must list the model's class"))
    }

    /// A positive count below 2³¹, where given.
    pub fn opt_usize(&self, field: &str) -> Result<Option<usize>, ModelError> {
        let Some(v) = self.get(field) else { return Ok(None) };
        match v.as_u64() {
            Some(n) if n > 0 && n < 1 << 31 => Ok(Some(n as usize)),
            _ => {
                Err(self.error(field, format!("is {v}; a positive whole number below 2147483648 is needed")))
            }
        }
    }

    /// A positive count.
    pub fn usize(&self, field: &str) -> Result<usize, ModelError> {
        self.opt_usize(field)?.ok_or_else(|| self.error(field, "is missing"))
    }

    /// A count below 2³¹ that may be 0, where given.
    pub fn count(&self, field: &str) -> Result<Option<usize>, ModelError> {
        match self.get(field) {
            Some(v) if v.as_u64() == Some(0) => Ok(Some(0)),
            _ => self.opt_usize(field),
        }
    }

    /// A string, where given.
    pub fn text(&self, field: &str) -> Result<Option<&'a str>, ModelError> {
        let Some(v) = self.get(field) else { return Ok(None) };
        v.as_str().map(Some).ok_or_else(|| self.error(field, format!("is {v}; a string is needed")))
    }

    /// A list of layer numbers; empty where not given.
    pub fn indices(&self, field: &str) -> Result<Vec<usize>, ModelError> {
        let Some(v) = self.get(field) else { return Ok(vec![]) };
        let list: Option<Vec<usize>> = v
            .as_array()
            .and_then(|a| a.iter().map(|x| x.as_u64().and_then(|n| usize::try_from(n).ok())).collect());
        list.ok_or_else(|| self.error(field, format!("is {v}; a list of layer numbers is needed")))
    }

    /// How the weights are quantised: `quant_method` of `quantization_config`, where there is one.
    pub fn quantisation(&self) -> Option<&'a str> {
        self.get("quantization_config")?.get("quant_method")?.as_str()
    }

    /// A finite number, where given.
    pub fn opt_f64(&self, field: &str) -> Result<Option<f64>, ModelError> {
        self.get(field).map(|v| self.number(field, v)).transpose()
    }

    /// A finite number.
    pub fn f64(&self, field: &str) -> Result<f64, ModelError> {
        self.opt_f64(field)?.ok_or_else(|| self.error(field, "is missing"))
    }

    fn number(&self, field: &str, v: &Value) -> Result<f64, ModelError> {
        v.as_f64()
            .filter(|x| x.is_finite())
            .ok_or_else(|| self.error(field, format!("is {v}; a number is needed")))
    }

    /// A finite number of at least 0, where given.
    pub fn opt_non_negative(&self, field: &str) -> Result<Option<f64>, ModelError> {
        match self.opt_f64(field)? {
            Some(x) if x < 0.0 => Err(self.error(field, format!("is {x}; a number of at least 0 is needed"))),
            x => Ok(x),
        }
    }

    /// A soft cap, `cap · tanh(x / cap)`, where given.
    pub fn opt_cap(&self, field: &str) -> Result<Option<f32>, ModelError> {
        match self.opt_f64(field)? {
            // Below that the division overflows.
            Some(x) if x < 1e-3 => {
                Err(self.error(field, format!("is {x}; a number of at least 0.001 is needed, or null")))
            }
            x => Ok(x.map(|x| x as f32)),
        }
    }

    /// A flag, false where not given.
    pub fn flag(&self, field: &str) -> Result<bool, ModelError> {
        match self.get(field) {
            None => Ok(false),
            Some(v) => {
                v.as_bool().ok_or_else(|| self.error(field, format!("is {v}; true or false is needed")))
            }
        }
    }

    /// A list of strings, one a layer, where given.
    pub fn layer_types(&self, num_layers: usize) -> Result<Option<Vec<String>>, ModelError> {
        let Some(v) = self.get("layer_types") else { return Ok(None) };
        let list: Option<Vec<String>> =
            v.as_array().and_then(|a| a.iter().map(|x| x.as_str().map(str::to_owned)).collect());
        match list {
            Some(l) if l.len() == num_layers => Ok(Some(l)),
            Some(l) => {
                Err(self.error("layer_types", format!("has {} entries for {num_layers} layers", l.len())))
            }
            None => Err(self.error("layer_types", "is not a list of strings")),
        }
    }

    /// The rotary embedding of a kind of layer. `head_size` is multiplied by `partial_rotary_factor`.
    /// `default_theta` stands where the config is silent. `max_len` decides between the two factor
    /// lists of LongRoPE.
    pub fn rope(
        &self,
        layer_type: &str,
        head_size: usize,
        default_theta: f64,
    ) -> Result<RopePlan, ModelError> {
        let parameters =
            self.get("rope_parameters").map(|p| p.get(layer_type).filter(|v| v.is_object()).unwrap_or(p));
        let field = |name: &str| -> Result<Option<f64>, ModelError> {
            match parameters.and_then(|p| p.get(name)).filter(|v| !v.is_null()) {
                Some(v) => self.number(name, v).map(Some),
                None => self.opt_f64(name),
            }
        };
        let theta = field("rope_theta")?.unwrap_or(default_theta);
        let partial = field("partial_rotary_factor")?.unwrap_or(1.0);
        let kind = match parameters {
            Some(p) if p.is_object() => self.rope_type("rope_parameters", p)?,
            _ => None,
        };
        if kind == Some("proportional") {
            return self.proportional(theta, head_size, partial, field("factor")?.unwrap_or(1.0));
        }
        let rotary_dim = (head_size as f64 * partial) as usize;
        self.base("rope_theta", theta)?;
        if rotary_dim < 2 || !rotary_dim.is_multiple_of(2) || rotary_dim > head_size {
            return Err(self.bad_part(partial, rotary_dim, head_size));
        }
        let scaling = match parameters.or_else(|| self.get("rope_scaling")) {
            Some(v) if v.is_object() => self.rope_scaling(v, rotary_dim)?,
            Some(v) => return Err(self.error("rope_scaling", format!("is {v}; an object is needed"))),
            None => None,
        };
        if theta <= 1.0 && matches!(scaling, Some(RopeScaling::Yarn(_))) {
            return Err(self.error("rope_theta", format!("is {theta}; YaRN needs one above 1")));
        }
        Ok(RopePlan { theta, rotary_dim, style: RopeStyle::Halves, scaling })
    }

    /// The base of frequencies: above 0, and so far that its inverse is a number.
    pub fn base(&self, field: &str, theta: f64) -> Result<(), ModelError> {
        match theta > 0.0 && theta.recip().is_finite() {
            true => Ok(()),
            false if theta > 0.0 => {
                Err(self.error(field, format!("is {theta:e}, too near to 0; a number above 0 is needed")))
            }
            false => Err(self.error(field, format!("is {theta}; a number above 0 is needed"))),
        }
    }

    /// The kind of a scaling; `None`: none is named, and nothing that only a scaling has.
    fn rope_type<'v>(&self, field: &str, v: &'v Value) -> Result<Option<&'v str>, ModelError> {
        let name = format!("{field}.rope_type");
        match v.get("rope_type").or_else(|| v.get("type")).filter(|t| !t.is_null()) {
            Some(Value::String(kind)) => Ok(Some(kind)),
            Some(other) => Err(self.error(&name, format!("is {other}; a string is needed"))),
            None => match ["factor", "long_factor", "short_factor"].iter().find(|f| v.get(**f).is_some()) {
                Some(f) => {
                    Err(self.error(&name, format!("is missing, and {f} is given; name the kind of scaling")))
                }
                None => Ok(None),
            },
        }
    }

    fn bad_part(&self, partial: f64, rotated: usize, head_size: usize) -> ModelError {
        let why = format!(
            "is {partial}: {rotated} of {head_size} elements would be rotated; an even number of them, at least 2 and at \
             most all, is needed"
        );
        self.error("partial_rotary_factor", why)
    }

    /// A part of a head's pairs turns, at the frequencies that they would have if all did.
    pub fn proportional(
        &self,
        theta: f64,
        head_size: usize,
        partial: f64,
        factor: f64,
    ) -> Result<RopePlan, ModelError> {
        let pairs = (partial * head_size as f64 / 2.0) as usize;
        for (field, value) in [("rope_theta", theta), ("factor", factor)] {
            if value <= 0.0 {
                return Err(self.error(field, format!("is {value}; a number above 0 is needed")));
            }
        }
        if pairs == 0 || 2 * pairs > head_size || !head_size.is_multiple_of(2) {
            return Err(self.bad_part(partial, 2 * pairs, head_size));
        }
        let scaling = Some(RopeScaling::Proportional { pairs, factor });
        Ok(RopePlan { theta, rotary_dim: head_size, style: RopeStyle::Halves, scaling })
    }

    fn rope_scaling(&self, v: &Value, rotary_dim: usize) -> Result<Option<RopeScaling>, ModelError> {
        let kind = self.rope_type("rope_scaling", v)?.unwrap_or("default");
        let number = |name: &str| match v.get(name) {
            Some(x) => self.number(&format!("rope_scaling.{name}"), x),
            None => Err(self.error(&format!("rope_scaling.{name}"), format!("is missing for type {kind}"))),
        };
        let positive = |name: &str| {
            number(name).and_then(|x| {
                if x > 0.0 {
                    Ok(x)
                } else {
                    Err(self.error(&format!("rope_scaling.{name}"), "must be above 0"))
                }
            })
        };
        Ok(match kind {
            "default" => None,
            "linear" => Some(RopeScaling::Linear { factor: positive("factor")? }),
            "llama3" => Some(RopeScaling::Llama3 {
                factor: positive("factor")?,
                low_freq_factor: positive("low_freq_factor")?,
                high_freq_factor: positive("high_freq_factor")?,
                original_max_position_embeddings: positive("original_max_position_embeddings")?,
            }),
            "yarn" => Some(RopeScaling::Yarn(self.yarn(v)?)),
            "longrope" | "su" => Some(self.longrope(v, rotary_dim)?),
            other => {
                return Err(self.unsupported(
                    format!("rope scaling of type {other}"),
                    "supported: default, linear, llama3, longrope, proportional, yarn",
                ));
            }
        })
    }

    /// LongRoPE as serving engines apply it: the long factors when the model's full context is past the
    /// original one, the short ones otherwise.
    fn longrope(&self, v: &Value, rotary_dim: usize) -> Result<RopeScaling, ModelError> {
        let max = self.usize("max_position_embeddings")? as f64;
        let original = match v.get("original_max_position_embeddings") {
            Some(x) => self.number("rope_scaling.original_max_position_embeddings", x)?,
            None => self.f64("original_max_position_embeddings")?,
        };
        let name = if max > original { "long_factor" } else { "short_factor" };
        let factors: Vec<f64> = v
            .get(name)
            .and_then(Value::as_array)
            .map(|a| a.iter().filter_map(Value::as_f64).filter(|f| *f > 0.0).collect())
            .unwrap_or_default();
        if factors.len() != rotary_dim / 2 {
            let why = format!("has {} positive numbers; {} are needed", factors.len(), rotary_dim / 2);
            return Err(self.error(&format!("rope_scaling.{name}"), why));
        }
        let scale = max / original;
        let attention_factor = match v.get("attention_factor").filter(|x| !x.is_null()) {
            Some(x) => self.number("rope_scaling.attention_factor", x)?,
            None if scale <= 1.0 => 1.0,
            None => (1.0 + scale.ln() / original.ln()).sqrt(),
        };
        Ok(RopeScaling::PerFrequency { factors, attention_factor })
    }

    /// YaRN, with the defaults that Hugging Face transformers gives to what the config leaves out.
    fn yarn(&self, v: &Value) -> Result<Yarn, ModelError> {
        let name = |field: &str| format!("rope_scaling.{field}");
        let number = |field: &str| match v.get(field).filter(|x| !x.is_null()) {
            Some(x) => self.number(&name(field), x).map(Some),
            None => Ok(None),
        };
        let above = |field: &str, least: f64| match number(field)? {
            Some(x) if x <= least => {
                Err(self.error(&name(field), format!("is {x}; a number above {least} is needed")))
            }
            x => Ok(x),
        };
        let max = || self.usize("max_position_embeddings").map(|n| n as f64);
        let original = above("original_max_position_embeddings", 1.0)?;
        let factor = match (above("factor", 0.0)?, original) {
            (Some(factor), _) => factor,
            (None, Some(original)) => max()? / original,
            (None, None) => return Err(self.error(&name("factor"), "is missing for type yarn")),
        };
        let (fast, slow) =
            (above("beta_fast", 0.0)?.unwrap_or(32.0), above("beta_slow", 0.0)?.unwrap_or(1.0));
        if fast < slow {
            let why = format!("is {fast}, below beta_slow {slow}; the usual values are 32 and 1");
            return Err(self.error(&name("beta_fast"), why));
        }
        let truncate = match v.get("truncate").filter(|x| !x.is_null()) {
            None => true,
            Some(x) => x
                .as_bool()
                .ok_or_else(|| self.error(&name("truncate"), format!("is {x}; true or false is needed")))?,
        };
        let (mscale, all) = (number("mscale")?.unwrap_or(0.0), number("mscale_all_dim")?.unwrap_or(0.0));
        Ok(Yarn {
            factor,
            original_max_position_embeddings: original.map_or_else(max, Ok)?,
            beta_fast: fast,
            beta_slow: slow,
            truncate,
            attention_factor: above("attention_factor", 0.0)?
                .unwrap_or_else(|| Yarn::default_attention_factor(factor, mscale, all)),
            mscale_all_dim: all,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_base_has_an_inverse() {
        let of = |theta| ConfigReader::new("config.json", &json!({})).base("rope_local_base_freq", theta);
        assert!(of(1e4).is_ok() && of(1.0).is_ok());
        for theta in [0.0, -0.5, 1e-320] {
            assert!(of(theta).unwrap_err().to_string().contains("rope_local_base_freq is"));
        }
    }

    #[test]
    fn a_soft_cap_is_a_number_that_can_be_divided_by() {
        let of = |v: Value| {
            ConfigReader::new("config.json", &json!({"cap": v})).opt_cap("cap").map_err(|e| e.to_string())
        };
        assert_eq!((of(json!(30.0)), of(Value::Null)), (Ok(Some(30.0)), Ok(None)));
        for v in [json!(0), json!(1e-30), json!(-1)] {
            assert!(of(v).unwrap_err().contains("cap is"));
        }
    }
}
