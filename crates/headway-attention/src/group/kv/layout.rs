//! The order of a KV cache's axes in memory.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A KV cache layout over the logical axes L (layer), B (block), H (head slot), N (token in the
/// block), C (content: a head's key and value), outermost first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[allow(clippy::upper_case_acronyms)]
pub enum KvCacheLayout {
    /// Layer, block, token, head; also called NHD.
    LBNHC,
    /// Layer, block, head, token; also called HND.
    LBHNC,
    /// Block, layer, token, head.
    BLNHC,
    /// Block, layer, head, token.
    BLHNC,
    /// Block, head, layer, token.
    BHLNC,
    /// Layer, head, block, token.
    LHBNC,
}

impl KvCacheLayout {
    /// The axes' letters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::LBNHC => "LBNHC",
            Self::LBHNC => "LBHNC",
            Self::BLNHC => "BLNHC",
            Self::BLHNC => "BLHNC",
            Self::BHLNC => "BHLNC",
            Self::LHBNC => "LHBNC",
        }
    }
}

impl fmt::Display for KvCacheLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
