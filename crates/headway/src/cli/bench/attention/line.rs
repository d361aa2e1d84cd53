//! A measurement, as JSON and as a row of the table.

use super::super::super::measure::{CacheState, Kind, Measured, Prepared};
use headway_tensor::DType;
use serde::Serialize;

/// One measurement.
#[derive(Serialize, Debug)]
pub struct Line {
    bench: &'static str,
    peer: &'static str,
    backend: String,
    isa: String,
    case: String,
    kind: &'static str,
    heads: String,
    dtype: &'static str,
    block_size: usize,
    threads: usize,
    cache: &'static str,
    median_ms: f64,
    min_ms: f64,
    max_ms: f64,
    /// Cache bytes a second, each counted once however many query heads share it.
    gbps: f64,
    /// Multiply-adds of the visible pairs, two operations each.
    gflops: f64,
    /// What the device does at most: GB/s for decode and write, GFLOP/s for prefill and mixed.
    ceiling: Option<f64>,
    share_of_ceiling: Option<f64>,
}

impl Line {
    /// What a case took.
    pub fn new(prepared: &Prepared<'_>, m: Measured) -> Self {
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
        }
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
        write!(f, " {:>14}", self.backend)
    }
}
