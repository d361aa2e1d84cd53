//! Published checkpoints of quantised weights that no kernel multiplies as they are: made bfloat16 when they are
//! asked for, so that the rest of the engine sees dense tensors.
//!
//! Read are gpt-oss's MXFP4 (`quant_method` mxfp4) and DeepSeek-V3's float8 in blocks (`quant_method` fp8 with a
//! `weight_block_size`). fp8 with static scales (`activation_scheme` static) is read where a layer quantises its input:
//! [`Checkpoint::static_fp8`]. Every other format is refused by name. Not for GGUF's block formats, which are computed with.

mod fp8;
mod mxfp4;

use super::{
    Checkpoint, LoadError, SafetensorsCheckpoint, StaticFp8, error::one_line, names::missing_tensor,
    safetensors::RawTensor,
};
use headway_tensor::{SharedBytes, Weight, WeightType};
use safetensors::Dtype;
use serde_json::Value;
use std::path::Path;

/// What other formats are told.
const SUPPORTED: &str = "BF16, F16 and F32 safetensors, MXFP4 as gpt-oss is published, fp8 in blocks as DeepSeek-V3 is \
                         published, fp8 with static scales (activation_scheme static) in output projections of softmax \
                         attention, and GGUF for quantised weights";
/// Modules that a config says are not quantised, under the names that the field goes by.
const NOT_QUANTISED: [&str; 2] = ["ignored_layers", "modules_to_not_convert"];

/// A format that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Experts as 4-bit floats in blocks of 32 with a power of two each: `*_blocks`, `*_scales`.
    Mxfp4,
    /// e4m3 matrices with a scale for every block of `[rows, columns]`: `*.weight`, `*.weight_scale_inv`.
    BlockFp8 { rows: usize, cols: usize },
    /// e4m3 matrices with one scale, whose inputs have one too: `*.weight`, `*.weight_scale`, `*.input_scale`.
    StaticFp8,
}

impl Format {
    /// The format that a config's `quantization_config` names; `None` without one.
    ///
    /// # Errors
    /// Another format, by name.
    pub(super) fn of(path: &Path, config: &Value) -> Result<Option<Self>, LoadError> {
        let Some(q) = config.get("quantization_config").filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let text = |field: &str| q.get(field).and_then(Value::as_str);
        not_quantised(path, config)?;
        let refused = |what: String| {
            let what = format!("quantised checkpoint format {}", one_line(&what));
            Err(LoadError::NotSupported { path: path.to_owned(), what, supported: SUPPORTED.into() })
        };
        match text("quant_method") {
            Some("mxfp4") => Ok(Some(Self::Mxfp4)),
            Some("fp8") => {
                if let Some(other) = text("fmt").filter(|f| *f != "e4m3") {
                    return refused(format!("fp8 of type {other}"));
                }
                let block = q.get("weight_block_size").and_then(Value::as_array).map(Vec::as_slice);
                let size = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
                match block {
                    Some([r, c]) => match (size(r), size(c)) {
                        (Some(rows), Some(cols)) => Ok(Some(Self::BlockFp8 { rows, cols })),
                        _ => {
                            let what = format!("is [{r}, {c}]; two positive whole numbers are needed");
                            Err(LoadError::bad_key(path, "quantization_config.weight_block_size", what))
                        }
                    },
                    None if text("activation_scheme") == Some("static") => Ok(Some(Self::StaticFp8)),
                    _ => refused("fp8 without weight_block_size (one scale a tensor)".into()),
                }
            }
            other => refused(other.unwrap_or("of an unnamed method").into()),
        }
    }

    /// Types of the files that this format brings.
    pub(super) fn packed_types(self) -> &'static [&'static str] {
        match self {
            Self::Mxfp4 => &["U8"],
            Self::BlockFp8 { .. } | Self::StaticFp8 => &["F8_E4M3"],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Mxfp4 => "MXFP4",
            Self::BlockFp8 { .. } => "fp8 in blocks",
            Self::StaticFp8 => "fp8 with static scales",
        }
    }

    /// The name of the scales of a quantised tensor.
    fn scales_of(self, name: &str) -> Option<String> {
        match self {
            Self::Mxfp4 => name.strip_suffix("_blocks").map(|n| format!("{n}_scales")),
            Self::BlockFp8 { .. } => Some(format!("{name}_scale_inv")),
            Self::StaticFp8 => Some(format!("{name}_scale")),
        }
    }

    /// The name of the tensor whose scales these are.
    fn scaled_by(self, name: &str) -> Option<String> {
        match self {
            Self::Mxfp4 => name.strip_suffix("_scales").map(|n| format!("{n}_blocks")),
            Self::BlockFp8 { .. } => name.strip_suffix("_scale_inv").map(str::to_owned),
            Self::StaticFp8 => match name.strip_suffix("input_scale") {
                Some(module) => Some(format!("{module}weight")),
                None => name.strip_suffix("_scale").map(str::to_owned),
            },
        }
    }

    fn is_quantised(self, dtype: Dtype) -> bool {
        match self {
            Self::Mxfp4 => dtype == Dtype::U8,
            Self::BlockFp8 { .. } | Self::StaticFp8 => dtype == Dtype::F8_E4M3,
        }
    }

    /// Elements of a quantised tensor of so many bytes.
    fn elems(self, bytes: usize) -> u64 {
        bytes as u64 * if self == Self::Mxfp4 { 2 } else { 1 }
    }
}

/// The modules that a `quantization_config` says are left as they were, with the field that says so.
///
/// # Errors
/// A field that is no list of names.
fn not_quantised(path: &Path, config: &Value) -> Result<Vec<(&'static str, String)>, LoadError> {
    let mut all = vec![];
    for field in NOT_QUANTISED {
        let Some(v) = config["quantization_config"].get(field).filter(|v| !v.is_null()) else { continue };
        let names: Option<Vec<&str>> = v.as_array().and_then(|a| a.iter().map(Value::as_str).collect());
        let names = names.ok_or_else(|| {
            let what = format!("is {v}; a list of the names of modules is needed");
            LoadError::bad_key(path, &format!("quantization_config.{field}"), what)
        })?;
        all.extend(names.into_iter().map(|n| (field, n.to_owned())));
    }
    Ok(all)
}

/// A checkpoint whose quantised tensors come as bfloat16. MXFP4 ones keep their name (`*_blocks`) and have the
/// shape `[experts, out, in]`.
pub(super) struct Dequantised {
    inner: SafetensorsCheckpoint,
    format: Format,
}

impl Dequantised {
    /// The weights of a `config.json` (at `path`) of that format.
    ///
    /// # Errors
    /// A module that the config says is not quantised, and that is.
    pub(super) fn new(
        inner: SafetensorsCheckpoint,
        format: Format,
        path: &Path,
        config: &Value,
    ) -> Result<Self, LoadError> {
        let this = Self { inner, format };
        let of = |name: &str, module: &str| {
            let after = |rest: &str| rest.is_empty() || rest.starts_with('.');
            name.strip_prefix(module).is_some_and(after)
                || name.rsplit_once('.').is_some_and(|(n, _)| n.ends_with(&format!(".{module}")))
        };
        for (field, module) in not_quantised(path, config)? {
            if let Some((tensor, _)) = this.quantised_tensors().find(|(name, _)| of(name, &module)) {
                let what = format!(
                    "lists {module}, but the tensor '{tensor}' is {}; the files don't belong together: download config \
                     and weights of one model again",
                    format.name()
                );
                return Err(LoadError::bad_key(path, &format!("quantization_config.{field}"), what));
            }
        }
        Ok(this)
    }

    /// A tensor that is stored quantised.
    fn quantised(&self, name: &str) -> Option<RawTensor<'_>> {
        self.inner.raw(name).filter(|raw| self.format.is_quantised(raw.dtype))
    }

    fn is_scale(&self, name: &str) -> bool {
        self.format.scaled_by(name).is_some_and(|of| self.quantised(&of).is_some())
    }

    fn dequantise(&self, name: &str, raw: &RawTensor<'_>) -> Result<Weight, LoadError> {
        let all = self.inner.names();
        let scales = self.format.scales_of(name).ok_or_else(|| {
            let what = format!("tensor '{name}' is packed, but its name does not end in _blocks");
            LoadError::damaged(raw.path, "MXFP4 checkpoint", what)
        })?;
        let scales_raw = self.inner.raw(&scales);
        let scales_raw = scales_raw.ok_or_else(|| missing_tensor(raw.path, &scales, all.iter().copied()))?;
        let made = match self.format {
            Format::Mxfp4 => mxfp4::dequantise(raw, &scales_raw),
            Format::BlockFp8 { rows, cols } => {
                let scales = self.inner.get(&scales)?;
                fp8::dequantise(raw, scales.shape(), &scales.to_f32(), [rows, cols])
            }
            Format::StaticFp8 => fp8::codes(raw),
        };
        let (shape, bytes) = made.map_err(|what| {
            let what = format!(
                "tensor '{name}' of shape {:?} with scales of {:?}: {what}",
                raw.shape, scales_raw.shape
            );
            LoadError::damaged(raw.path, self.format.name(), what)
        })?;
        // Every byte was read once and is not read again.
        raw.bytes.not_needed_now(0..raw.bytes.len());
        Weight::new(name, WeightType::BF16, shape, SharedBytes::new(bytes))
            .map_err(|source| LoadError::Weight { path: raw.path.to_owned(), source })
    }

    fn quantised_tensors(&self) -> impl Iterator<Item = (&str, RawTensor<'_>)> {
        self.inner.names().into_iter().filter_map(|n| self.quantised(n).map(|raw| (n, raw)))
    }
}

impl Checkpoint for Dequantised {
    fn get(&self, name: &str) -> Result<Weight, LoadError> {
        match self.quantised(name) {
            Some(raw) if self.format == Format::StaticFp8 => Err(LoadError::NotSupported {
                path: raw.path.to_owned(),
                what: format!("tensor '{name}' in fp8 with a static input scale"),
                supported: "the output projection of softmax attention in that form, all other layers in BF16, F16 or \
                            F32 (ignored_layers)"
                    .into(),
            }),
            Some(raw) if !self.is_scale(name) => self.dequantise(name, &raw),
            _ => self.inner.get(name),
        }
    }

    fn shape(&self, name: &str) -> Result<Option<Vec<usize>>, LoadError> {
        match self.quantised(name) {
            Some(_) if self.format == Format::Mxfp4 => Ok(None),
            Some(raw) => Ok(Some(raw.shape.to_vec())),
            None => self.inner.shape(name),
        }
    }

    fn static_fp8(&self, name: &str) -> Result<Option<StaticFp8>, LoadError> {
        let Some(raw) = self.quantised(name).filter(|_| self.format == Format::StaticFp8) else {
            return Ok(None);
        };
        let scale = |of: String| {
            let all = self.inner.names();
            let there = self.inner.contains(&of);
            let found = if there {
                self.inner.get(&of)?
            } else {
                return Err(missing_tensor(raw.path, &of, all.into_iter()));
            };
            match found.to_f32()[..] {
                [s] if s.is_finite() && s > 0.0 => Ok(s),
                _ => {
                    let what =
                        format!("tensor '{of}' of shape {:?} is not one positive number", found.shape());
                    Err(LoadError::damaged(raw.path, self.format.name(), what))
                }
            }
        };
        let module = name.strip_suffix("weight").unwrap_or(name);
        Ok(Some(StaticFp8 {
            weight_scale: scale(format!("{name}_scale"))?,
            input_scale: scale(format!("{module}input_scale"))?,
            codes: self.dequantise(name, &raw)?,
        }))
    }

    fn contains(&self, name: &str) -> bool {
        self.inner.contains(name)
    }

    fn names(&self) -> Vec<&str> {
        self.inner.names().into_iter().filter(|n| !self.is_scale(n)).collect()
    }

    fn describe(&self) -> String {
        format!("{}; {} made BF16", self.inner.describe(), self.format.name())
    }

    fn total_bytes(&self) -> u64 {
        let dense = |n: &&str| self.quantised(n).is_none() && !self.is_scale(n);
        let dense = self.inner.names().into_iter().filter(dense);
        let dense: u64 = dense.filter_map(|n| self.inner.raw(n)).map(|r| r.bytes.len() as u64).sum();
        dense + self.made_bytes()
    }

    fn made_bytes(&self) -> u64 {
        let of = |(name, raw): (&str, RawTensor<'_>)| {
            if self.is_scale(name) { 0 } else { 2 * self.format.elems(raw.bytes.len()) }
        };
        self.quantised_tensors().map(of).sum()
    }

    fn main_dtype(&self) -> Option<WeightType> {
        Some(WeightType::BF16)
    }
}

/// Fills `out`, rows of `row` bytes, on all processors: `f(index of a row, the row)`.
fn in_parallel(out: &mut [u8], row: usize, f: &(dyn Fn(usize, &mut [u8]) + Sync)) {
    /// Bytes under which a thread is not worth its start.
    const PART: usize = 4 << 20;
    let rows = out.len() / row.max(1);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(out.len() / PART + 1);
    let step = rows.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (part, out) in out.chunks_mut(step * row.max(1)).enumerate() {
            scope.spawn(move || {
                for (i, out) in out.chunks_exact_mut(row).enumerate() {
                    f(part * step + i, out);
                }
            });
        }
    });
}
