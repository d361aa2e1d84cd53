//! The one version of the wheel whose functions headway calls, and what is taken out of it.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The version of vLLM whose extension modules headway calls.
pub const VLLM: &str = "0.33.0";

/// An extension module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extensions {
    /// FlashAttention-3.
    #[serde(rename = "flash_attention_3")]
    FlashAttention3,
    /// FlashMLA.
    FlashMla,
}

/// What is known of a module's file.
#[derive(Debug, PartialEq, Eq)]
pub struct Pin {
    /// Its file name, in the folder as in the wheel.
    pub file: &'static str,
    /// Its place in the wheel.
    pub member: &'static str,
    /// Its bytes.
    pub bytes: u64,
    /// SHA-256, in hexadecimal digits.
    pub sha256: &'static str,
    /// What it registers its functions under.
    pub namespace: &'static str,
    /// The functions that headway calls: name, arguments, results.
    pub functions: &'static [(&'static str, usize, Returns)],
}

/// What a kernel leaves on its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Returns {
    /// A tensor.
    Tensor,
    /// A list of tensors.
    List,
    /// Two tensors, then two optional ones.
    TwoAndTwo,
}

impl Returns {
    /// Values on the stack.
    pub const fn values(self) -> u64 {
        match self {
            Self::Tensor | Self::List => 1,
            Self::TwoAndTwo => 4,
        }
    }
}

const FLASH_ATTENTION_3: Pin = Pin {
    file: "_vllm_fa3_C.abi3.so",
    member: "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    bytes: 172_594_888,
    sha256: "bcea1246912ed71467b008749057c798877fbf6fcee63eb056c5cc4b0beace17",
    namespace: "_vllm_fa3_C",
    functions: &[("fwd", 37, Returns::List), ("get_scheduler_metadata", 23, Returns::Tensor)],
};

const FLASH_MLA: Pin = Pin {
    file: "_flashmla_C.abi3.so",
    member: "vllm/_flashmla_C.abi3.so",
    bytes: 3_862_536,
    sha256: "25ce6b315b9b80f7979061c9addf668e7396267dd5114406fbfd11c963303dd8",
    namespace: "_flashmla_C",
    functions: &[("dense_decode_fwd", 10, Returns::TwoAndTwo)],
};

impl Extensions {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::FlashAttention3, Self::FlashMla];

    /// As tables show it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FlashAttention3 => "flash_attention_3",
            Self::FlashMla => "flash_mla",
        }
    }

    /// What is known of its file.
    pub const fn pin(self) -> &'static Pin {
        match self {
            Self::FlashAttention3 => &FLASH_ATTENTION_3,
            Self::FlashMla => &FLASH_MLA,
        }
    }
}

impl fmt::Display for Extensions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A module of the folder, as the manifest has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtensionEntry {
    /// Its file, in the folder.
    pub file: String,
    /// Which it is.
    pub extension: Extensions,
    /// vLLM's version.
    pub vllm: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// SHA-256 of the file, in hexadecimal digits.
    pub sha256: String,
}

impl ExtensionEntry {
    /// Of a file that was taken out of the wheel.
    pub fn of(extension: Extensions) -> Self {
        let pin = extension.pin();
        Self {
            file: pin.file.into(),
            extension,
            vllm: VLLM.into(),
            bytes: pin.bytes,
            sha256: pin.sha256.into(),
        }
    }
}
