//! What stands around the layers of models that add positions to the embedding and norm the stream itself,
//! and beside them: an encoder.

use super::{LayerPlan, LinearPlan};

/// A norm to mean 0 and variance 1 (arXiv 1607.06450).
#[derive(Clone, Debug, PartialEq)]
pub struct LayerNormPlan {
    /// Name of the factor, `[width]`.
    pub weight: String,
    /// Name of what is added, `[width]`.
    pub bias: String,
}

/// A vector for each position, added to the embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct PositionsPlan {
    /// Name of the table `[rows, hidden_size]`.
    pub weight: String,
    /// Rows of the table.
    pub rows: usize,
    /// Row of position 0.
    pub first: usize,
    /// A table whose first row is added to every position, with its rows: BERT's token types, which are all 0 for
    /// one text.
    pub types: Option<(String, usize)>,
}

/// The stack of layers that reads an input of its own, whole, for the decoder to attend to. It has the decoder's
/// embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderPlan {
    /// Added to the embedding.
    pub positions: PositionsPlan,
    /// On the embedding, positions included.
    pub embedding_norm: LayerNormPlan,
    /// Most tokens of an input.
    pub max_tokens: usize,
    /// The layers.
    pub layers: Vec<LayerPlan>,
}

/// Attention of a decoder to its encoder's output.
#[derive(Clone, Debug, PartialEq)]
pub struct CrossPlan {
    /// Heads, of queries and of keys and values.
    pub num_heads: usize,
    /// Elements of a head.
    pub head_size: usize,
    /// Factor on q·k.
    pub scale: f32,
    /// Queries, from the decoder's stream.
    pub q: LinearPlan,
    /// Keys, then values, from the encoder's output.
    pub kv: LinearPlan,
    /// Output projection.
    pub o: LinearPlan,
}

/// How the hidden states of an input become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Pooling {
    /// The mean over all tokens.
    #[default]
    Mean,
    /// The first token's.
    First,
    /// The last token's.
    Last,
}
