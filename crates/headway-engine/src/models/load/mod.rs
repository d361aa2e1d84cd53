//! Weights by name, held against the shapes that the plan expects, in the dtype that was asked for.

mod experts;

use super::{
    ModelError, headers,
    plan::{LinearPartPlan, LinearPlan, NormPlan},
};
use crate::loading::Checkpoint;
use half::{bf16, f16};
use headway_tensor::{
    DType, Linear, LinearPart, Ops, Persistent, RowQuant, SharedBytes, Tensor, View, Weight, WeightType,
};
use std::{
    cell::{Cell, RefCell},
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

/// How weights are held: `--dtype`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WeightDType {
    /// As in the file.
    #[default]
    Auto,
    /// Dense weights in this type; block-quantised ones stay quantised, unless it is float32: that
    /// dequantises them and computes in float32. Types narrower than float32 stay as they are under
    /// float32, since widening them is exact.
    As(DType),
}

/// How a linear layer's input becomes codes, and what makes its output of their product with the weight's codes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct CodedInput {
    /// The rule.
    pub quant: RowQuant,
    /// Input scale times weight scale.
    pub factor: f32,
}

/// What the device took of the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Taken {
    /// Bytes it holds in a form of its own, beyond the mapped files.
    pub bytes: usize,
    /// How long it took to make them.
    pub time: Duration,
}

/// Loads what a plan names.
pub(super) struct Loader<'a> {
    pub checkpoint: &'a dyn Checkpoint,
    pub ops: &'a dyn Ops,
    /// Type of the activations.
    pub activations: DType,
    pub dtype: WeightDType,
    /// Names that were asked for.
    pub used: RefCell<HashSet<String>>,
    /// What the device took.
    pub taken: Cell<Taken>,
}

impl Loader<'_> {
    fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight, ModelError> {
        let w = self.checkpoint.get(name)?;
        self.used.borrow_mut().insert(name.to_owned());
        // Some files hold a vector as a matrix of one row.
        if w.shape() != shape && headers::fits(w.shape(), shape) {
            let vector = Weight::new(name, w.dtype(), shape.to_vec(), w.bytes().clone());
            return Ok(vector.map_err(|e| headway_tensor::TensorError::Unsupported(e.to_string()))?);
        }
        if w.shape() != shape {
            return Err(ModelError::WrongShape {
                file: self.checkpoint.describe(),
                name: name.into(),
                found: w.shape().to_vec(),
                expected: shape.to_vec(),
            });
        }
        Ok(w)
    }

    /// A tensor as float32, without NaN and infinities.
    fn finite(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let values = self.weight(name, shape)?.to_f32();
        match values.iter().position(|x| !x.is_finite()) {
            None => Ok(values),
            Some(index) => Err(ModelError::NotFinite {
                file: self.checkpoint.describe(),
                name: name.into(),
                value: values[index],
                index,
            }),
        }
    }

    /// A linear layer of one or more tensors, each of the width that the plan says.
    pub fn linear(&self, plan: &LinearPlan) -> Result<Arc<dyn Linear>, ModelError> {
        self.take(plan, self.compute())
    }

    /// The output projection of softmax attention, and how its input is quantised where the checkpoint has a scale for it.
    pub fn output(&self, plan: &LinearPlan) -> Result<(Arc<dyn Linear>, Option<CodedInput>), ModelError> {
        let [part] = &plan.parts[..] else { return Ok((self.linear(plan)?, None)) };
        let Some(w) = self.checkpoint.static_fp8(&part.weight)? else {
            return Ok((self.linear(plan)?, None));
        };
        let (file, name) = (self.checkpoint.describe(), part.weight.clone());
        let expected = vec![part.out_features, plan.in_features];
        if w.codes.shape() != expected {
            return Err(ModelError::WrongShape { file, name, found: w.codes.shape().to_vec(), expected });
        }
        if let Some(bias) = &part.bias {
            return Err(ModelError::Unsupported {
                file,
                what: format!("the bias '{bias}' of an output projection in fp8 with static scales"),
                remedy: "such projections without a bias are".into(),
            });
        }
        self.used.borrow_mut().insert(name);
        let start = Instant::now();
        let layer = self.ops.load_linear(vec![LinearPart { weight: w.codes, bias: None }], self.compute())?;
        self.took(layer.bytes(), start);
        let quant = RowQuant::E4m3 { scale: w.input_scale };
        Ok((layer, Some(CodedInput { quant, factor: w.input_scale * w.weight_scale })))
    }

    /// A table whose rows are looked up and never multiplied: nothing is packed.
    pub fn table(&self, plan: &LinearPlan) -> Result<Arc<dyn Linear>, ModelError> {
        self.take(plan, Some(self.activations))
    }

    fn take(&self, plan: &LinearPlan, compute: Option<DType>) -> Result<Arc<dyn Linear>, ModelError> {
        let parts = self.parts(plan)?;
        self.take_as(parts, compute)
    }

    /// A table made of others.
    pub fn take_parts(&self, parts: Vec<LinearPart>) -> Result<Arc<dyn Linear>, ModelError> {
        self.take_as(parts, Some(self.activations))
    }

    fn take_as(&self, parts: Vec<LinearPart>, compute: Option<DType>) -> Result<Arc<dyn Linear>, ModelError> {
        let start = Instant::now();
        let layer = self.ops.load_linear(parts, compute)?;
        self.took(layer.bytes(), start);
        Ok(layer)
    }

    /// A layer's tensors, dense ones in the type that was asked for.
    fn parts(&self, plan: &LinearPlan) -> Result<Vec<LinearPart>, ModelError> {
        let part = |p: &LinearPartPlan| {
            let weight = self.weight(&p.weight, &[p.out_features, plan.in_features])?;
            let bias = p.bias.as_ref().map(|b| self.weight(b, &[p.out_features])).transpose()?;
            Ok(LinearPart { weight: convert(weight, self.dtype), bias })
        };
        plan.parts.iter().map(part).collect()
    }

    /// Counts what the device took since `start`.
    fn took(&self, bytes: usize, start: Instant) {
        let taken = self.taken.get();
        self.taken.set(Taken { bytes: taken.bytes + bytes, time: taken.time + start.elapsed() });
    }

    /// How the device is to compute: a device whose activations are narrow takes weights of their type alone.
    fn compute(&self) -> Option<DType> {
        let wide = self.activations == DType::F32 && self.dtype != WeightDType::As(DType::F32);
        (!wide).then_some(self.activations)
    }

    /// A vector of the model in float32, where kernels read it.
    pub fn vector(&self, name: &str, len: usize) -> Result<View<f32>, ModelError> {
        let w = self.weight(name, &[len])?.to_f32();
        Ok(Persistent::new(self.ops, len)?.write(self.ops, len, |out| out.copy_from_slice(&w)))
    }

    /// The values of a small tensor of this shape.
    pub fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        Ok(self.weight(name, shape)?.to_f32())
    }

    /// A norm's weight in float32, with its offset added.
    pub fn norm(&self, plan: &NormPlan, width: usize) -> Result<Tensor, ModelError> {
        self.scaled_norm(plan, width, 1.0)
    }

    /// The weight of a norm that has none.
    pub fn ones(&self, width: usize) -> Result<Tensor, ModelError> {
        Ok(Tensor::from_slice(self.ops, &vec![1f32; width], &[width])?)
    }

    /// [`Loader::norm`] times a factor that the norm's output would have to be multiplied by.
    pub fn scaled_norm(&self, plan: &NormPlan, width: usize, factor: f32) -> Result<Tensor, ModelError> {
        let mut w = self.weight(&plan.weight, &[width])?.to_f32();
        w.iter_mut().for_each(|x| *x = (*x + plan.offset) * factor);
        Ok(Tensor::from_slice(self.ops, &w, &[width])?)
    }
}

/// A dense weight in the type asked for.
fn convert(w: Weight, dtype: WeightDType) -> Weight {
    let target = match (dtype, w.dtype()) {
        (WeightDType::As(DType::BF16), WeightType::F32 | WeightType::F16) => WeightType::BF16,
        (WeightDType::As(DType::F16), WeightType::F32 | WeightType::BF16) => WeightType::F16,
        _ => return w,
    };
    let values = w.to_f32();
    let bytes = match target {
        WeightType::BF16 => SharedBytes::new(to_bytes(&values, |x| bf16::from_f32(x).to_le_bytes())),
        _ => SharedBytes::new(to_bytes(&values, |x| f16::from_f32(x).to_le_bytes())),
    };
    Weight::new(w.name(), target, w.shape().to_vec(), bytes).unwrap_or(w)
}

fn to_bytes(values: &[f32], f: impl Fn(f32) -> [u8; 2]) -> Vec<u8> {
    values.iter().flat_map(|&x| f(x)).collect()
}
