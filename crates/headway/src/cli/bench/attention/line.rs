//! A measurement, as JSON and as a row of the table.

use super::super::super::measure::{CacheState, Kind, Measured, Prepared};
use headway_tensor::DType;
use serde::Serialize;

/// One measurement.
#[derive(Serialize, Debug)]
pub struct Line {
    bench: &'static str,
    peer: &'static str,
    pub(super) backend: String,
    pub(super) isa: String,
    pub(super) case: String,
    kind: &'static str,
    pub(super) heads: String,
    pub(super) dtype: &'static str,
    /// Element type of the cache.
    pub(super) kv_cache_dtype: String,
    block_size: usize,
    pub(super) threads: usize,
    cache: &'static str,
    pub(super) median_ms: f64,
    min_ms: f64,
    max_ms: f64,
    /// Cache bytes a second, each counted once however many query heads share it.
    gbps: f64,
    /// Multiply-adds of the visible pairs, two operations each.
    gflops: f64,
    /// What the device does at most: GB/s for decode and write, GFLOP/s for prefill and mixed.
    ceiling: Option<f64>,
    pub(super) share_of_ceiling: Option<f64>,
    /// As asked for; each backend may prefer another.
    #[serde(skip)]
    pub(super) asked_block_size: Option<usize>,
    #[serde(skip)]
    pub(super) class: Class,
}

/// What is shown together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    Decode,
    Prefill,
    Mixed,
    Write,
    LatentDecode,
    LatentPrefill,
    LatentMixed,
}

impl Class {
    pub fn of(kind: Kind, latent: bool) -> Self {
        match (kind, latent) {
            (Kind::Write, _) => Self::Write,
            (Kind::Decode, false) => Self::Decode,
            (Kind::Prefill, false) => Self::Prefill,
            (Kind::Mixed, false) => Self::Mixed,
            (Kind::Decode, true) => Self::LatentDecode,
            (Kind::Prefill, true) => Self::LatentPrefill,
            (Kind::Mixed, true) => Self::LatentMixed,
        }
    }

    /// Of latent attention, which other backends compute.
    pub fn is_latent(self) -> bool {
        self >= Self::LatentDecode
    }

    /// As a heading.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Mixed => "mixed",
            Self::Write => "cache write",
            Self::LatentDecode => "MLA decode",
            Self::LatentPrefill => "MLA prefill",
            Self::LatentMixed => "MLA mixed",
        }
    }
}

impl Line {
    /// What a case took.
    pub fn new(prepared: &Prepared<'_>, m: Measured, asked_block_size: Option<usize>) -> Self {
        let (s, case, t) = (prepared.setup(), prepared.case(), m.timing);
        let by_bytes = matches!(case.kind, Kind::Decode | Kind::Write);
        Self {
            bench: "attention",
            peer: "headway",
            backend: s.backend.rules().name.to_string(),
            isa: s.meter.isa(),
            case: case.id.clone(),
            kind: case.kind.name(),
            heads: s.layer.name.clone(),
            dtype: short(s.layer.need.dtype),
            kv_cache_dtype: s
                .layer
                .need
                .kv_cache_dtype
                .as_ref()
                .map_or_else(String::new, ToString::to_string),
            block_size: m.block_size,
            threads: s.device.threads,
            cache: if case.cache == CacheState::Hot { "hot" } else { "cold" },
            median_ms: t.median * 1e3,
            min_ms: t.min * 1e3,
            max_ms: t.max * 1e3,
            gbps: m.bytes / t.median / 1e9,
            gflops: m.flops / t.median / 1e9,
            ceiling: m.least.map(|least| (if by_bytes { m.bytes } else { m.flops }) / least / 1e9),
            share_of_ceiling: m.least.map(|least| least / t.median),
            asked_block_size,
            class: Class::of(case.kind, s.layer.need.latent.is_some()),
        }
    }
}

impl Line {
    /// The cache's type, where it is of eight bits.
    pub fn coded_cache(&self) -> Option<&str> {
        Some(self.kv_cache_dtype.as_str()).filter(|t| t.starts_with("fp8"))
    }
}

/// As the case files write it.
pub fn short(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::F32 => "f32",
        other => other.name(),
    }
}

/// The table's first line.
pub fn head() -> String {
    format!(
        "{:<22} {:>9} {:>5} {:>5} {:>3} {:>10} {:>10} {:>10} {:>8} {:>8} {:>8} {:>6} {:>14}",
        "case",
        "heads",
        "dtype",
        "block",
        "thr",
        "median ms",
        "min",
        "max",
        "GB/s",
        "GFLOP/s",
        "ceiling",
        "share",
        "backend"
    )
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:<22} {:>9} {:>5} {:>5} {:>3} {:>10.4} {:>10.4} {:>10.4} {:>8.2} {:>8.1}",
            self.case,
            self.heads,
            self.dtype,
            self.block_size,
            self.threads,
            self.median_ms,
            self.min_ms,
            self.max_ms,
            self.gbps,
            self.gflops
        )?;
        match (self.ceiling, self.share_of_ceiling) {
            (Some(c), Some(s)) => write!(f, " {c:>8.1} {:>5.0}%", s * 100.0)?,
            _ => write!(f, " {:>8} {:>6}", "-", "-")?,
        }
        write!(f, " {:>14}", self.backend)?;
        match self.coded_cache() {
            Some(cache) => write!(f, ", {cache} cache"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A line of little.
    pub fn line(backend: &str, case: &str, class: Class, median_ms: f64, share: Option<f64>) -> Line {
        Line {
            bench: "attention",
            peer: "headway",
            backend: backend.into(),
            isa: "a device".into(),
            case: case.into(),
            kind: "decode",
            heads: "1/1/8".into(),
            dtype: "bf16",
            kv_cache_dtype: "bfloat16".into(),
            block_size: 16,
            threads: 1,
            cache: "cold",
            median_ms,
            min_ms: median_ms,
            max_ms: median_ms,
            gbps: 1.0,
            gflops: 1.0,
            ceiling: share,
            share_of_ceiling: share,
            asked_block_size: None,
            class,
        }
    }
}
