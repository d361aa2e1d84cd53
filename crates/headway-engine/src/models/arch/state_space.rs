//! The Mamba-2 mixer of a config: its sizes under the names that families give them, and its weights.

use super::{
    ConfigReader,
    hf::{Names, Sizes},
};
use crate::{
    loading::json,
    models::{
        ModelError,
        needs::DEFAULT_CHUNK,
        plan::{GatedNormPlan, LinearPlan, StateSpacePlan},
    },
};
use headway_tensor::DType;

/// The fields that a family keeps a mixer's sizes in.
pub(super) struct Fields {
    pub heads: &'static str,
    pub head_dim: &'static str,
    pub groups: &'static str,
    pub state: &'static str,
    pub conv: &'static str,
    pub chunk: &'static str,
    pub conv_bias: &'static str,
    pub proj_bias: &'static str,
    /// Elements between scan and output projection, as a multiple of the hidden size; `None`: the heads say.
    pub expand: Option<&'static str>,
    /// The same as a number, where given.
    pub inner: Option<&'static str>,
    /// The mixer's activation.
    pub activation: Option<&'static str>,
}

/// Bamba's names, which most hybrids took over.
pub(super) const BAMBA: Fields = Fields {
    heads: "mamba_n_heads",
    head_dim: "mamba_d_head",
    groups: "mamba_n_groups",
    state: "mamba_d_state",
    conv: "mamba_d_conv",
    chunk: "mamba_chunk_size",
    conv_bias: "mamba_conv_bias",
    proj_bias: "mamba_proj_bias",
    expand: Some("mamba_expand"),
    inner: None,
    activation: Some("hidden_act"),
};

/// A mixer as a config describes it.
pub(super) struct MixerSizes {
    heads: usize,
    head_dim: usize,
    groups: usize,
    state: usize,
    conv: usize,
    chunk: usize,
    conv_bias: bool,
    pub proj_bias: bool,
    state_dtype: Option<DType>,
    time_step_limit: (f32, f32),
}

impl MixerSizes {
    pub(super) fn read(c: &ConfigReader<'_>, f: &Fields, hidden: usize) -> Result<Self, ModelError> {
        if let Some(field) = f.activation {
            // What follows the convolution, and the gate.
            match c.text(field)? {
                None | Some("silu" | "swish") => {}
                Some(other) => {
                    let what = format!("{field} {other} in a Mamba-2 mixer");
                    return Err(c.unsupported(what, "supported: silu"));
                }
            }
        }
        let heads = c.usize(f.heads)?;
        let inner = inner(c, f, hidden)?;
        let head_dim = match (c.get(f.head_dim).and_then(|v| v.as_str()), &inner) {
            // Granite and Bamba may leave it to the other two.
            (Some("auto"), Some((inner, _))) => inner / heads,
            _ => c.usize(f.head_dim)?,
        };
        if let Some((inner, what)) = inner.filter(|(n, _)| *n != heads * head_dim) {
            let why = format!("{head_dim} for {heads} heads ({}) contradicts {what} = {inner}", f.heads);
            return Err(c.error(f.head_dim, why));
        }
        let groups = c.usize(f.groups)?;
        if !heads.is_multiple_of(groups) {
            return Err(
                c.error(f.groups, format!("{groups} does not divide the {heads} heads ({})", f.heads))
            );
        }
        Ok(Self {
            heads,
            head_dim,
            groups,
            state: c.usize(f.state)?,
            conv: c.usize(f.conv)?,
            chunk: c.opt_usize(f.chunk)?.unwrap_or(DEFAULT_CHUNK),
            conv_bias: flag_or(c, f.conv_bias, true)?,
            proj_bias: flag_or(c, f.proj_bias, false)?,
            state_dtype: state_dtype(c)?,
            time_step_limit: time_step_limit(c)?,
        })
    }

    /// The mixer of a layer, in `module`; `norm` without its weight's name.
    pub(super) fn plan(&self, n: &Names, module: &str, s: &Sizes, norm: Option<NormOrder>) -> StateSpacePlan {
        let name = |part: &str| n.tensor(&format!("{module}.{part}"));
        let inner = self.heads * self.head_dim;
        let projected = 2 * inner + 2 * self.groups * self.state + self.heads;
        let part = |m: &str, width| n.part(&format!("{module}.{m}"), self.proj_bias, width);
        StateSpacePlan {
            num_heads: self.heads,
            head_dim: self.head_dim,
            groups: self.groups,
            state_size: self.state,
            conv_kernel: self.conv,
            chunk_size: self.chunk,
            state_dtype: self.state_dtype,
            time_step_limit: self.time_step_limit,
            in_proj: LinearPlan::stacked([part("in_proj", projected)], s.hidden),
            in_scales: [1.0; 5],
            conv_weight: name("conv1d.weight"),
            conv_bias: self.conv_bias.then(|| name("conv1d.bias")),
            a_log: name("A_log"),
            d: name("D"),
            dt_bias: name("dt_bias"),
            norm: norm.map(|o| GatedNormPlan {
                norm: n.norm(&format!("{module}.norm"), 0.0),
                groups: self.groups,
                before_gate: o == NormOrder::BeforeGate,
            }),
            out_proj: LinearPlan::stacked([part("out_proj", s.hidden)], inner),
            output_scale: 1.0,
        }
    }
}

/// Whether the gated norm, which is over each group's elements by themselves, comes before the gate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum NormOrder {
    AfterGate,
    BeforeGate,
}

/// Elements between scan and output projection, with the field that says so.
fn inner(c: &ConfigReader<'_>, f: &Fields, hidden: usize) -> Result<Option<(usize, String)>, ModelError> {
    if let Some(name) = f.inner
        && let Some(n) = c.opt_usize(name)?
    {
        return Ok(Some((n, name.into())));
    }
    let Some(name) = f.expand else { return Ok(None) };
    Ok(c.opt_usize(name)?.map(|e| (e * hidden, format!("{name} × hidden_size"))))
}

/// A flag with a default of its own.
pub(super) fn flag_or(c: &ConfigReader<'_>, field: &str, default: bool) -> Result<bool, ModelError> {
    if c.get(field).is_none() { Ok(default) } else { c.flag(field) }
}

/// `mamba_ssm_cache_dtype`: the state's own type, where the config wants one.
fn state_dtype(c: &ConfigReader<'_>) -> Result<Option<DType>, ModelError> {
    let Some(v) = c.get("mamba_ssm_cache_dtype") else { return Ok(None) };
    match v.as_str() {
        Some("float32") => Ok(Some(DType::F32)),
        Some("bfloat16") => Ok(Some(DType::BF16)),
        Some("float16") => Ok(Some(DType::F16)),
        Some("auto") => Ok(None),
        _ => Err(c.error(
            "mamba_ssm_cache_dtype",
            format!("is {v}; one of float32, bfloat16, float16, auto is needed"),
        )),
    }
}

/// `[least, most]` of dt; `null` and `Infinity` are no limit.
fn time_step_limit(c: &ConfigReader<'_>) -> Result<(f32, f32), ModelError> {
    let field = "time_step_limit";
    let Some(v) = c.get(field) else { return Ok((0.0, f32::INFINITY)) };
    let wrong = || c.error(field, format!("is {v}; two numbers of at least 0 are needed, the smaller first"));
    let number = |v: &serde_json::Value| if v.is_null() { Some(f64::INFINITY) } else { json::float(v) };
    let (least, most) = match v.as_array().map(Vec::as_slice) {
        Some([a, b]) => number(a).zip(number(b)).ok_or_else(wrong)?,
        _ => return Err(wrong()),
    };
    if least.is_nan() || most.is_nan() || least < 0.0 || least > most {
        return Err(wrong());
    }
    Ok((least as f32, most as f32))
}
