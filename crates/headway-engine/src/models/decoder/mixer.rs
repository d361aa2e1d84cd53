//! What mixes tokens in a layer: one variant a kind of mixer, each in its own file.

use super::{
    attention::Attention, buffers::Buffers, cross::Cross, kernels::Kernels, mla::Mla,
    state_space::StateSpace, step::Step,
};
use crate::models::{ModelError, ModelPlan, load::Loader, plan::MixerPlan};
use headway_attention::{AttnLayer, KvPool};
use headway_tensor::RowQuant;

pub(super) enum Mixer {
    Attention(Attention),
    Mla(Mla),
    StateSpace(StateSpace),
    Cross(Cross),
}

impl Mixer {
    pub fn load(
        loader: &Loader<'_>,
        model: &ModelPlan,
        plan: &MixerPlan,
        layer: AttnLayer,
        kernels: &mut Kernels<'_>,
    ) -> Result<Self, ModelError> {
        Ok(match plan {
            MixerPlan::Attention(a) => Self::Attention(Attention::load(loader, model, a, layer, kernels)?),
            MixerPlan::Mla(a) => Self::Mla(Mla::load(loader, model, a, layer, kernels)?),
            MixerPlan::Cross(a) => Self::Cross(Cross::load(loader, a, layer, kernels)?),
            MixerPlan::StateSpace(m) => Self::StateSpace(StateSpace::load(loader, m, layer, kernels)?),
        })
    }

    /// How its output projection's input is quantised, and whether the kernel does it.
    pub fn coded_output(&self) -> Option<(RowQuant, bool)> {
        match self {
            Self::Attention(a) => a.coded_output(),
            Self::Mla(_) | Self::StateSpace(_) | Self::Cross(_) => None,
        }
    }

    /// From the layer's input (`normed` says which) to `mixed`.
    pub fn run(
        &self,
        s: &Step<'_>,
        b: &mut Buffers,
        normed: bool,
        kv: &mut KvPool,
    ) -> Result<(), ModelError> {
        match self {
            Self::Attention(a) => a.run(s, b, normed, kv),
            Self::Mla(a) => a.run(s, b, normed, kv),
            Self::StateSpace(m) => m.run(s, b, normed, kv),
            Self::Cross(a) => a.run(s, b, normed, kv),
        }
    }
}
