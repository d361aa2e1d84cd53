//! What a run of the suite found: counts by feature and phase, refusals, failures that say how to run
//! them again.

use super::cell::{Cell, Phase};
use std::{collections::BTreeMap, fmt};

/// A cell that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The cell's name: `SuiteConfig { only: Some(name), .. }` runs it alone.
    pub cell: String,
    /// The seed of its batch.
    pub seed: u64,
    /// The promise that was broken.
    pub check: &'static str,
    /// What happened.
    pub what: String,
    /// The smallest batch that fails too, as `(new tokens, tokens)`; `None`: only the whole batch does.
    pub smallest: Option<(usize, usize)>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "FAILED {}: {}", self.cell, self.check)?;
        writeln!(f, "  {}", self.what)?;
        write!(f, "  again: SuiteConfig {{ seed: {}, only: Some({:?}.into())", self.seed, self.cell)?;
        if let Some((q, kv)) = self.smallest {
            write!(f, ", requests: Some(vec![({q}, {kv})])")?;
        }
        write!(f, ", ..Default::default() }}")
    }
}

/// The outcome of a run.
#[derive(Clone, Debug, Default)]
pub struct SuiteReport {
    /// The backend.
    pub backend: String,
    /// Cells that ran and passed, by feature and phase.
    pub passed: BTreeMap<(String, Phase), usize>,
    /// Values of the other axes that ran (`dtype float32`, `head size 64`, …), with their cells.
    pub values: BTreeMap<String, usize>,
    /// Checks that ran, by name.
    pub checks: BTreeMap<&'static str, usize>,
    /// Nos of the rule book that were asked for and refused with a reason.
    pub refused: usize,
    /// Cells that the backend's combination rule refused, by reason.
    pub combinations: BTreeMap<String, usize>,
    /// What went wrong.
    pub failures: Vec<Failure>,
    /// Nos that were not refused, yeses that no need may ask for, and other faults of the rule book.
    pub faults: Vec<String>,
    /// Yeses that the suite has no run for and that weren't waived.
    pub without_a_run: Vec<String>,
    /// Yeses that the suite has no run for and that its caller takes over.
    pub waived: Vec<String>,
}

impl SuiteReport {
    /// Whether something ran, everything that ran passed, and every yes had a run.
    pub fn ok(&self) -> bool {
        self.cells() > 0
            && self.failures.is_empty()
            && self.faults.is_empty()
            && self.without_a_run.is_empty()
    }

    /// Cells that ran and passed.
    pub fn cells(&self) -> usize {
        self.passed.values().sum()
    }

    pub(super) fn count(&mut self, cell: &Cell, checks: Vec<&'static str>) {
        *self.passed.entry((cell.features.name(), cell.phase)).or_default() += 1;
        for check in checks {
            *self.checks.entry(check).or_default() += 1;
        }
        let layout = cell.layout.map_or("layout any".into(), |l| format!("layout {l}"));
        for value in [
            format!("dtype {}", cell.dtype),
            format!("KV cache dtype {}", cell.kv_cache_dtype),
            format!("head size {}/{}", cell.head_size, cell.head_size_v),
            format!("heads {}/{}", cell.num_heads, cell.num_kv_heads),
            format!("new tokens of a decode {}", 1 + cell.drafts),
            format!("block size {} in kernel blocks of {}", cell.block_size, cell.kernel_block_size),
            layout,
        ] {
            *self.values.entry(value).or_default() += 1;
        }
    }
}

impl fmt::Display for SuiteReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} cells passed, {} failed", self.backend, self.cells(), self.failures.len())?;
        writeln!(f, "{:32} {:>8} {:>8} {:>8}", "feature", "prefill", "decode", "mixed")?;
        let mut features: Vec<&String> = self.passed.keys().map(|(f, _)| f).collect();
        features.dedup();
        for feature in features {
            let n = |p| self.passed.get(&(feature.clone(), p)).copied().unwrap_or(0);
            let [p, d, m] = Phase::ALL.map(n);
            writeln!(f, "{feature:32} {p:>8} {d:>8} {m:>8}")?;
        }
        for (value, n) in &self.values {
            writeln!(f, "  {value}: {n}")?;
        }
        for (check, n) in &self.checks {
            writeln!(f, "  checked {n} times: {check}")?;
        }
        writeln!(f, "nos of the rule book refused: {}", self.refused)?;
        for (reason, n) in &self.combinations {
            writeln!(f, "cells refused as a combination: {n}: {reason}")?;
        }
        for what in &self.waived {
            writeln!(f, "not run by this suite, waived: {what}")?;
        }
        for what in &self.without_a_run {
            writeln!(f, "a yes without a run: {what}")?;
        }
        for fault in &self.faults {
            writeln!(f, "fault of the rule book: {fault}")?;
        }
        for failure in &self.failures {
            writeln!(f, "{failure}")?;
        }
        Ok(())
    }
}
