//! Linear layers on the device: weights are one matrix of bfloat16, float16 or float32.
//!
//! A weight keeps its file's type, or takes the one that is asked for; blocks of GGUF become bfloat16 where none is, when
//! they are loaded. Input and weight must have one type.

use super::upload::{Upload, own};
use crate::{
    CudaExec,
    device::{CudaError, Result},
};
use headway_tensor::{DType, DeviceMem, Exec, Linear, LinearPart, TensorError, Weight};
use std::sync::Arc;

/// A loaded linear layer.
#[derive(Debug)]
pub struct CudaLinear {
    weight: Arc<dyn DeviceMem>,
    dtype: DType,
    n_out: usize,
    n_in: usize,
    /// The bias in the weight's type, and in float32 for outputs of that.
    bias: Option<[Arc<dyn DeviceMem>; 2]>,
}

impl Linear for CudaLinear {
    fn in_features(&self) -> usize {
        self.n_in
    }

    fn out_features(&self) -> usize {
        self.n_out
    }

    fn bytes(&self) -> usize {
        self.weight.bytes() + self.bias.iter().flatten().map(|b| b.bytes()).sum::<usize>()
    }
}

/// The type of the stacked matrix.
pub(super) fn chosen<'a>(
    parts: impl IntoIterator<Item = &'a LinearPart>,
    compute: Option<DType>,
) -> Result<DType> {
    match compute {
        Some(dtype) if dtype.is_compute_float() => Ok(dtype),
        Some(found) => {
            let supported = "bfloat16, float16, float32";
            Err(TensorError::WrongDType { what: "linear layer", found, supported }.into())
        }
        None => {
            let mut all = parts.into_iter().map(|p| own(p.weight.dtype()));
            let first = all.next().unwrap_or(DType::BF16);
            // Of several types the one that holds them all; bfloat16 and float16 are held by float32 alone.
            Ok(if all.all(|d| d == first) { first } else { DType::F32 })
        }
    }
}

impl CudaLinear {
    /// Stacks the parts along the output and takes them to the device.
    ///
    /// # Errors
    /// No parts, or with different inputs; a bias of another length; a type that can't be computed in; no memory.
    pub fn load(cx: &CudaExec, parts: Vec<LinearPart>, compute: Option<DType>) -> Result<Self> {
        let dtype = chosen(&parts, compute)?;
        let n_in = parts.first().map_or(0, |p| p.weight.cols());
        for part in &parts {
            check(part, n_in)?;
        }
        let n_out: usize = parts.iter().map(|p| p.weight.rows()).sum();
        if n_out == 0 || n_in == 0 {
            return Err(CudaError::Argument("a linear layer of no parts".into()));
        }
        let weight = alloc(cx, n_out * n_in * dtype.size())?;
        let upload = Upload::of(cx, weights(&parts))?;
        let mut at = 0;
        for part in &parts {
            upload.put(&weight, at, &part.weight, dtype)?;
            at += part.weight.elems() * dtype.size();
        }
        let bias = match parts.iter().any(|p| p.bias.is_some()) {
            true => Some([
                bias(cx, &upload, &parts, n_out, dtype)?,
                bias(cx, &upload, &parts, n_out, DType::F32)?,
            ]),
            false => None,
        };
        cx.check()?;
        Ok(Self { weight, dtype, n_out, n_in, bias })
    }

    /// Element type of the weight, and of inputs that it takes.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The matrix `[out, in]`, contiguous.
    pub fn weight(&self) -> &Arc<dyn DeviceMem> {
        &self.weight
    }

    /// The bias `[out]` in an output's type.
    pub fn bias(&self, out: DType) -> Option<&Arc<dyn DeviceMem>> {
        let [own, wide] = self.bias.as_ref()?;
        Some(if out == self.dtype { own } else { wide })
    }
}

pub(super) fn check(part: &LinearPart, n_in: usize) -> Result<()> {
    let w = &part.weight;
    if w.shape().len() != 2 || w.cols() != n_in {
        return Err(CudaError::Argument(format!(
            "'{}' of shape {:?} in a linear layer; [out, {n_in}] is expected",
            w.name(),
            w.shape()
        )));
    }
    match &part.bias {
        Some(bias) if bias.elems() != w.rows() => Err(CudaError::Argument(format!(
            "bias '{}' of shape {:?} beside '{}' of shape {:?}",
            bias.name(),
            bias.shape(),
            w.name(),
            w.shape()
        ))),
        _ => Ok(()),
    }
}

pub(super) fn alloc(cx: &CudaExec, bytes: usize) -> Result<Arc<dyn DeviceMem>> {
    cx.alloc(bytes)?.ok_or_else(|| CudaError::Argument("no device memory".into()))
}

/// Every weight of these parts, biases too.
pub(super) fn weights<'a>(
    parts: impl IntoIterator<Item = &'a LinearPart>,
) -> impl Iterator<Item = &'a Weight> {
    parts.into_iter().flat_map(|p| [&p.weight].into_iter().chain(&p.bias))
}

fn bias(
    cx: &CudaExec,
    upload: &Upload<'_>,
    parts: &[LinearPart],
    n_out: usize,
    dtype: DType,
) -> Result<Arc<dyn DeviceMem>> {
    let mem = alloc(cx, n_out * dtype.size())?;
    cx.zero(&mem, 0, mem.bytes());
    let mut at = 0;
    for part in parts {
        if let Some(bias) = &part.bias {
            upload.put(&mem, at, bias, dtype)?;
        }
        at += part.weight.rows() * dtype.size();
    }
    Ok(mem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_tensor::WeightType;

    fn part(rows: usize, cols: usize) -> LinearPart {
        let values: Vec<f32> = (0..rows * cols).map(|i| i as f32 * 0.25 - 3.0).collect();
        LinearPart { weight: Weight::from_f32("w", vec![rows, cols], &values).unwrap(), bias: None }
    }

    fn half_part() -> LinearPart {
        let bytes = headway_tensor::SharedBytes::new(vec![0u8; 8]);
        LinearPart { weight: Weight::new("h", WeightType::F16, vec![2, 2], bytes).unwrap(), bias: None }
    }

    #[test]
    fn the_type_is_the_files_or_what_is_asked_for() {
        assert_eq!(chosen(&[part(2, 2)], None).unwrap(), DType::F32);
        assert_eq!(chosen(&[half_part(), half_part()], None).unwrap(), DType::F16);
        assert_eq!(chosen(&[half_part(), part(2, 2)], None).unwrap(), DType::F32);
        assert_eq!(chosen(&[part(2, 2)], Some(DType::BF16)).unwrap(), DType::BF16);
        assert!(chosen(&[part(2, 2)], Some(DType::I8)).is_err());
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        assert!(check(&part(3, 4), 4).is_ok());
        let e = check(&part(3, 5), 4).unwrap_err().to_string();
        assert!(e.contains("'w' of shape [3, 5]") && e.contains("[out, 4]"), "{e}");
        let bias = Weight::from_f32("b", vec![2], &[1.0, 2.0]).unwrap();
        let e = check(&LinearPart { bias: Some(bias), ..part(3, 4) }, 4).unwrap_err().to_string();
        assert!(e.contains("bias 'b' of shape [2]"), "{e}");
    }
}
