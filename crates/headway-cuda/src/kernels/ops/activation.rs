//! Activations as kernels get them (`csrc/ops/activation.cuh`).

use super::super::kernel_params;
use headway_tensor::Activation;

kernel_params! {
    pub(super) struct ActivationArg { kind: i32, alpha: f32, limit: f32 }
}

impl ActivationArg {
    /// None: what a kernel gets that uses none.
    pub const NONE: Self = Self { kind: 0, alpha: 0.0, limit: 0.0 };

    pub fn of(activation: Activation) -> Self {
        let plain = |kind| Self { kind, alpha: 0.0, limit: 0.0 };
        match activation {
            Activation::Silu => plain(0),
            Activation::GeluTanh => plain(1),
            Activation::Gelu => plain(2),
            Activation::ClampedSwiglu { alpha, limit } => Self { kind: 3, alpha, limit },
            Activation::Relu2 => plain(4),
        }
    }
}
