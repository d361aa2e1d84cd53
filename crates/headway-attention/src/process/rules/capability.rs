//! Compute capabilities of NVIDIA devices, and ranges of them.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use std::{fmt, str::FromStr};

/// A compute capability, `(major, minor)`; written `9.0`, in JSON too.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ComputeCapability(pub u32, pub u32);

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

impl FromStr for ComputeCapability {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let wrong = || format!("{s:?} is no compute capability; write it as 9.0");
        let (major, minor) = s.split_once('.').ok_or_else(wrong)?;
        Ok(Self(major.parse().map_err(|_| wrong())?, minor.parse().map_err(|_| wrong())?))
    }
}

impl Serialize for ComputeCapability {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ComputeCapability {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// Compute capabilities from one to another, both included.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CapabilityRange {
    /// The lowest; `None`: no limit.
    pub from: Option<ComputeCapability>,
    /// The highest; `None`: no limit.
    pub to: Option<ComputeCapability>,
}

impl CapabilityRange {
    /// Whether the range holds this one.
    pub fn contains(self, c: ComputeCapability) -> bool {
        self.from.is_none_or(|from| c >= from) && self.to.is_none_or(|to| c <= to)
    }
}

impl fmt::Display for CapabilityRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.from, self.to) {
            (Some(from), Some(to)) if from == to => write!(f, "{from}"),
            (Some(from), Some(to)) => write!(f, "{from} to {to}"),
            (Some(from), None) => write!(f, "{from} and later"),
            (None, Some(to)) => write!(f, "up to {to}"),
            (None, None) => f.write_str("any"),
        }
    }
}
