//! The form in which a layer's weights are multiplied, and the activations in the forms that those want.

#[cfg(target_arch = "x86_64")]
use super::bf16;
use super::{entry, int};
use crate::{CpuExec, kernels::elementwise::rows::Rows};
use headway_tensor::{DType, Weight, WeightType, quant::QuantFormat};
use std::cell::RefCell;

/// A weight in a form of the kernels' own, made when its layer is loaded.
pub(super) enum Packed {
    /// The file's form is computed with, in float32.
    No,
    /// For integer products, with quantised activations.
    Integers(int::Packed, QuantFormat),
    /// For products of bfloat16, with rounded activations.
    #[cfg(target_arch = "x86_64")]
    Bf16(bf16::Packed, bf16::Products),
}

impl Packed {
    /// What a layer keeps of the weight, if it may compute in the weight's own form (no `compute`).
    pub(super) fn new(cx: &CpuExec, weight: &Weight, compute: Option<DType>) -> Self {
        match weight.dtype() {
            _ if compute.is_some() => Self::No,
            WeightType::Quant(f) => Self::Integers(entry::pack(cx, weight, f), f),
            #[cfg(target_arch = "x86_64")]
            WeightType::BF16 => match bf16::Products::of(cx.isa()) {
                Some(products) => Self::Bf16(bf16::Packed::new(cx, weight), products),
                None => Self::No,
            },
            _ => Self::No,
        }
    }

    /// Bytes beside those of the file.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::No => 0,
            Self::Integers(w, _) => w.as_bytes().len(),
            #[cfg(target_arch = "x86_64")]
            Self::Bf16(w, _) => w.as_bytes().len(),
        }
    }
}

/// Activations in the forms that packed weights are multiplied with.
#[derive(Default)]
pub(super) struct Activations {
    pub(super) integers: int::Activations,
    #[cfg(target_arch = "x86_64")]
    pub(super) bf16: bf16::Activations,
}

thread_local! {
    /// Those of the call that this thread is in.
    static ACTIVATIONS: RefCell<Activations> = RefCell::default();
}

/// Calls `f` with the activations in every form that one of the weights wants.
pub(super) fn with_activations<'a>(
    cx: &CpuExec,
    weights: impl Iterator<Item = &'a Packed>,
    x: &[f32],
    xs: &Rows,
    f: impl FnOnce(&Activations),
) {
    let mut integers = false;
    #[cfg(target_arch = "x86_64")]
    let mut bf16 = false;
    for w in weights {
        match w {
            Packed::No => {}
            Packed::Integers(..) => integers = true,
            #[cfg(target_arch = "x86_64")]
            Packed::Bf16(..) => bf16 = true,
        }
    }
    ACTIVATIONS.with_borrow_mut(|a| {
        if integers {
            a.integers.fill(cx.pool(), cx.isa(), x, xs);
        }
        #[cfg(target_arch = "x86_64")]
        if bf16 {
            a.bf16.fill(cx.pool(), cx.isa(), x, xs);
        }
        f(a);
    });
}
