//! Inputs that every layer gets of its own from the tokens (Gemma 3n's and 4's per-layer embeddings).

use super::{LinearPlan, NormPlan};
use headway_tensor::Activation;

/// What is made once a step for all layers: of each token `layers × width` elements,
/// `(norm(projection(x) · projection_scale) + table[token] · table_scale) · scale`, with x what enters layer 0.
#[derive(Clone, Debug, PartialEq)]
pub struct PerLayerInputsPlan {
    /// Layers.
    pub layers: usize,
    /// Elements of a layer's input.
    pub width: usize,
    /// Name of the embedding table `[vocabulary, layers × width]`.
    pub table: String,
    /// Factor on its rows.
    pub table_scale: f32,
    /// From what enters layer 0.
    pub projection: LinearPlan,
    /// Factor on its output.
    pub projection_scale: f32,
    /// Over each layer's part.
    pub norm: NormPlan,
    /// Factor on the sum.
    pub scale: f32,
}

impl PerLayerInputsPlan {
    /// Elements of a token over all layers.
    pub fn all(&self) -> usize {
        self.layers * self.width
    }
}

/// What a layer does with its input, after its feed-forward: the stream becomes
/// `x + norm(projection(activation(gate(x)) · input))`.
#[derive(Clone, Debug, PartialEq)]
pub struct PerLayerBlockPlan {
    /// From the stream to the input's width.
    pub gate: LinearPlan,
    /// On the gate.
    pub activation: Activation,
    /// Back to the stream's width.
    pub projection: LinearPlan,
    /// On what joins the stream.
    pub norm: NormPlan,
}
