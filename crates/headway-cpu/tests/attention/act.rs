//! Activations in one of the compute types, as tensors and as float64.

use half::{bf16, f16};
use headway_tensor::{DType, TensorMut, TensorRef};

/// Activations in one of the compute types.
#[derive(Clone, Debug)]
pub enum Act {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Act {
    pub fn of(dtype: DType, x: impl Iterator<Item = f32>) -> Self {
        match dtype {
            DType::F16 => Self::F16(x.map(f16::from_f32).collect()),
            DType::BF16 => Self::Bf16(x.map(bf16::from_f32).collect()),
            _ => Self::F32(x.collect()),
        }
    }

    pub fn view(&self, shape: &[usize]) -> TensorRef<'_> {
        match self {
            Self::F32(x) => TensorRef::from_host(x, shape).unwrap(),
            Self::F16(x) => TensorRef::from_host(x, shape).unwrap(),
            Self::Bf16(x) => TensorRef::from_host(x, shape).unwrap(),
        }
    }

    pub fn view_mut(&mut self, shape: &[usize]) -> TensorMut<'_> {
        match self {
            Self::F32(x) => TensorMut::from_host(x, shape).unwrap(),
            Self::F16(x) => TensorMut::from_host(x, shape).unwrap(),
            Self::Bf16(x) => TensorMut::from_host(x, shape).unwrap(),
        }
    }

    pub fn f64(&self) -> Vec<f64> {
        match self {
            Self::F32(x) => x.iter().map(|x| f64::from(*x)).collect(),
            Self::F16(x) => x.iter().map(|x| f64::from(x.to_f32())).collect(),
            Self::Bf16(x) => x.iter().map(|x| f64::from(x.to_f32())).collect(),
        }
    }

    pub fn bits(&self) -> Vec<u32> {
        match self {
            Self::F32(x) => x.iter().map(|x| x.to_bits()).collect(),
            Self::F16(x) => x.iter().map(|x| x.to_bits().into()).collect(),
            Self::Bf16(x) => x.iter().map(|x| x.to_bits().into()).collect(),
        }
    }
}
