//! What a KV cache group keeps of a request: the block size and how far its layers look back. Pure arithmetic.
//!
//! Lifetime: the model. Not for page sizes in bytes or layouts, which the KV cache spec of the contract crate has.

use super::KvError;

/// How far back the layers of a KV cache group read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvGroupKind {
    /// Every position reads every earlier one.
    Full,
    /// Position `i` reads `j` with `i - window < j <= i`; `window` in tokens, at least 1.
    SlidingWindow {
        /// The window in tokens, the position itself included.
        window: usize,
    },
    /// Position `i` reads `j <= i` of its own chunk of `chunk` tokens (chunked local attention).
    ChunkedLocal {
        /// The chunk in tokens, at least 1.
        chunk: usize,
    },
    /// Position `i` reads the prompt, and of what follows it `j` with `i - window < j <= i` (R-SWA). Every page is kept,
    /// also of tokens between the two.
    Rswa,
    /// A state of fixed size instead of keys and values: one page a request, whatever its length. A later
    /// request with the same beginning can't use it, so prefixes aren't cached beside such a group.
    State,
    /// Keys and values of an encoder's tokens, for cross-attention: pages for all of them from admission on, however
    /// long the request becomes. Another request's encoder read something else, so prefixes aren't cached beside
    /// such a group.
    Encoded,
    /// Nothing: layers without a cache.
    Nothing,
}

/// The rules by which the pages of one KV cache group are handed out, shared and given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGroupPolicy {
    /// Tokens in one page of this group, at least 1; a page of a state stands for any number.
    pub block_size: usize,
    /// How far back the group's layers read.
    pub kind: KvGroupKind,
}

impl KvGroupPolicy {
    /// A group that keeps everything.
    pub const fn full(block_size: usize) -> Self {
        Self { block_size, kind: KvGroupKind::Full }
    }

    /// A group that keeps everything, though layers don't see all of it.
    pub const fn rswa(block_size: usize) -> Self {
        Self { block_size, kind: KvGroupKind::Rswa }
    }

    /// A group whose layers see `window` tokens, the current one included.
    pub const fn sliding_window(block_size: usize, window: usize) -> Self {
        Self { block_size, kind: KvGroupKind::SlidingWindow { window } }
    }

    /// A group whose layers see their own chunk of `chunk` tokens.
    pub const fn chunked_local(block_size: usize, chunk: usize) -> Self {
        Self { block_size, kind: KvGroupKind::ChunkedLocal { chunk } }
    }

    /// A group whose layers keep one state a request.
    pub const fn state() -> Self {
        Self { block_size: usize::MAX, kind: KvGroupKind::State }
    }

    /// A group whose layers keep an encoder's tokens.
    pub const fn encoded(block_size: usize) -> Self {
        Self { block_size, kind: KvGroupKind::Encoded }
    }

    /// A group whose layers keep nothing.
    pub const fn nothing() -> Self {
        Self { block_size: usize::MAX, kind: KvGroupKind::Nothing }
    }

    /// Pages that a request of so many tokens, with an encoder's input of so many, has in all.
    pub(super) const fn pages(&self, num_tokens: usize, encoder_tokens: usize) -> usize {
        match self.kind {
            KvGroupKind::Encoded => encoder_tokens.div_ceil(self.block_size),
            _ => self.blocks_for(num_tokens),
        }
    }

    /// Whether pages go with the request's own tokens.
    pub(super) const fn grows(&self) -> bool {
        !matches!(self.kind, KvGroupKind::Encoded | KvGroupKind::Nothing)
    }

    /// The first position that a query at `position` reads. It never decreases with `position`.
    pub const fn first_readable(&self, position: usize) -> usize {
        match self.kind {
            KvGroupKind::Full
            | KvGroupKind::Rswa
            | KvGroupKind::State
            | KvGroupKind::Encoded
            | KvGroupKind::Nothing => 0,
            KvGroupKind::SlidingWindow { window } => (position + 1).saturating_sub(window),
            KvGroupKind::ChunkedLocal { chunk } => position / chunk * chunk,
        }
    }

    /// Blocks that hold `num_tokens` tokens.
    pub const fn blocks_for(&self, num_tokens: usize) -> usize {
        if !self.grows() {
            return 0;
        }
        num_tokens.div_ceil(self.block_size)
    }

    /// The most pages that this group ever holds at once for a request of `num_tokens` tokens that is computed at most
    /// `max_chunk` tokens a step.
    pub fn peak_pages(&self, num_tokens: usize, max_chunk: usize) -> usize {
        let all = self.blocks_for(num_tokens);
        let lookback = match self.kind {
            KvGroupKind::Full
            | KvGroupKind::Rswa
            | KvGroupKind::State
            | KvGroupKind::Encoded
            | KvGroupKind::Nothing => {
                return all;
            }
            KvGroupKind::SlidingWindow { window } => window - 1,
            KvGroupKind::ChunkedLocal { chunk } => chunk - 1,
        };
        let span = lookback.saturating_add(max_chunk.max(1));
        // An interval of `span` tokens that starts anywhere touches at most this many blocks.
        all.min((span - 1).div_ceil(self.block_size) + 1)
    }

    pub(super) fn check(&self, group: usize) -> Result<(), KvError> {
        let zero = |what| Err(KvError::ZeroPolicy { group, what });
        match self.kind {
            _ if self.block_size == 0 => zero("block_size"),
            KvGroupKind::SlidingWindow { window: 0 } => zero("window"),
            KvGroupKind::ChunkedLocal { chunk: 0 } => zero("chunk"),
            _ => Ok(()),
        }
    }
}
