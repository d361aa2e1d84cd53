//! What stands around the layers of models that add positions to the embedding and norm the stream itself.

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
