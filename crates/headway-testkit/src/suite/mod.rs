//! The suite that any backend, ours or a plugin, is run through: every yes in the rule book has a run
//! behind it, in prefill, decode and mixed batches, and every no is refused.
//!
//! Each cell of the grid gets a random batch (blocks in random order, shared prefixes, lengths at and
//! around the block size, padding), goes through the backend's own builder and layer as an engine would
//! call them, and is compared with the float64 reference; then the contract's other promises are
//! checked on the same batch. Works on the erased contract alone, so it knows no backend. Standard and latent attention
//! have runs; for the latter the [`HostAccess`] must load a linear layer.
//!
//! ```
//! use headway_attention::Registry;
//! use headway_testkit::suite::{SuiteConfig, run_suite};
//! # fn plugin_test<B: headway_attention::AttentionBackend<Kind: headway_attention::PickArgs>>(
//! #     exec: &dyn headway_tensor::Exec,
//! # ) -> headway_attention::Result<()> {
//! let mut registry = Registry::default();
//! registry.register::<B>()?;
//! for backend in registry.iter() {
//!     let report = run_suite(&**backend, exec, &SuiteConfig::default());
//!     assert!(report.ok(), "{report}");
//! }
//! # Ok(())
//! # }
//! ```

mod batch;
mod cell;
mod checks;
mod fixture;
mod grid;
mod host;
mod latent;
mod refuse;
mod report;

pub use batch::Req;
pub use cell::{Cell, Features, NonCausal, Phase};
pub use checks::Broken;
pub use grid::cells;
pub use host::{HostAccess, HostMemory};
pub use report::{Failure, SuiteReport};

use fixture::Tools;
use headway_attention::{DynBackend, KindTag, LayerNeed, RuleBook, process::rules::ComputeCapability};
use headway_tensor::Exec;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// How to run the suite.
#[derive(Clone, Debug)]
pub struct SuiteConfig {
    /// Seed of all batches.
    pub seed: u64,
    /// Only cells whose name contains this.
    pub only: Option<String>,
    /// These requests, as `(new tokens, tokens)`, in place of the cell's own batch.
    pub requests: Option<Vec<(usize, usize)>>,
    /// Every n-th cell alone; 1 runs all.
    pub every: usize,
    /// The backend's configuration table.
    pub backend_config: Option<serde_json::Value>,
    /// Yeses that this suite has no run for and that the caller tests elsewhere, by the report's names.
    pub waived: Vec<String>,
    /// Stop after so many failures.
    pub max_failures: usize,
    /// The device's compute capability; `None`: the least that the rule book takes.
    pub compute_capability: Option<ComputeCapability>,
}

impl SuiteConfig {
    /// What selection would put for a cell's layer, on the device of this run.
    fn need(&self, cell: &Cell, rules: &RuleBook) -> LayerNeed {
        let need = cell.need(rules);
        LayerNeed { compute_capability: self.compute_capability.or(need.compute_capability), ..need }
    }
}

impl Default for SuiteConfig {
    fn default() -> Self {
        Self {
            seed: 1,
            only: None,
            requests: None,
            every: 1,
            backend_config: None,
            waived: vec![],
            max_failures: 8,
            compute_capability: None,
        }
    }
}

/// Runs a backend of the host through the suite.
pub fn run_suite(backend: &dyn DynBackend, exec: &dyn Exec, config: &SuiteConfig) -> SuiteReport {
    run_suite_with(backend, exec, &HostMemory, config)
}

/// As [`run_suite`], for memory that `host` reaches.
pub fn run_suite_with(
    backend: &dyn DynBackend,
    exec: &dyn Exec,
    host: &dyn HostAccess,
    config: &SuiteConfig,
) -> SuiteReport {
    let rules = backend.rules();
    let mut report = SuiteReport { backend: rules.name.to_string(), ..SuiteReport::default() };
    if rules.kind == KindTag::StateSpace {
        report.faults.push("this suite runs no state-space layers".into());
        return report;
    }
    let parsed = match backend.parse_config(config.backend_config.as_ref()) {
        Ok(c) => c,
        Err(e) => {
            report.faults.push(e.to_string());
            return report;
        }
    };
    let tools = Tools { backend, exec, host, config: &parsed };
    let (waived, left) =
        refuse::without_a_run(rules).into_iter().partition(|what| config.waived.contains(what));
    (report.waived, report.without_a_run) = (waived, left);
    let cells = cells(rules);
    refusals(backend, &cells, config, &mut report);
    for (i, cell) in cells.iter().enumerate() {
        let name = cell.to_string();
        if i % config.every.max(1) != 0 || config.only.as_ref().is_some_and(|o| !name.contains(o)) {
            continue;
        }
        one(tools, cell, name, config, &mut report);
        if report.failures.len() >= config.max_failures {
            break;
        }
    }
    report
}

/// Every no must be refused, and no yes may be.
fn refusals(backend: &dyn DynBackend, cells: &[Cell], config: &SuiteConfig, report: &mut SuiteReport) {
    let rules = backend.rules();
    let mut needs = cells.iter().map(|c| config.need(c, rules));
    let Some(taken) = needs.find(|need| refuse::reasons(backend, need).is_empty()) else {
        report.faults.push("no combination of the rule book's own values is taken".into());
        return;
    };
    for asked in refuse::asked(rules, &taken) {
        if refuse::reasons(backend, &asked.need).is_empty() {
            report.faults.push(format!("{} is a no, but was not refused", asked.what));
        } else {
            report.refused += 1;
        }
    }
}

fn one(tools: Tools<'_>, cell: &Cell, name: String, config: &SuiteConfig, report: &mut SuiteReport) {
    let need = config.need(cell, tools.backend.rules());
    let by_rules = tools.backend.rules().refusals(&need);
    if !by_rules.is_empty() {
        report.faults.push(format!("{name} is a yes, but was refused: {by_rules:?}"));
        return;
    }
    if let Some(reason) = tools.backend.combination(&need) {
        *report.combinations.entry(reason.to_string()).or_default() += 1;
        return;
    }
    if cell.kv_element().is_none() {
        return;
    }
    let requests: Option<Vec<Req>> = config.requests.as_ref().map(|r| {
        let of = |&(q_len, kv_len)| Req { q_len, kv_len, causal: cell.features.non_causal == NonCausal::No };
        r.iter().map(of).collect()
    });
    match guarded(tools, cell, config.seed, requests.as_deref()) {
        Ok(checks) => report.count(cell, checks),
        Err(Broken { check, what }) => report.failures.push(Failure {
            smallest: smallest(tools, cell, config.seed),
            cell: name,
            seed: config.seed,
            check,
            what,
        }),
    }
}

/// A panic in a kernel is a failure of its cell, not of the run.
fn guarded(
    tools: Tools<'_>,
    cell: &Cell,
    seed: u64,
    only: Option<&[Req]>,
) -> Result<Vec<&'static str>, Broken> {
    catch_unwind(AssertUnwindSafe(|| checks::run(tools, cell, seed, only))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        Err(Broken { check: "no panic", what: text.unwrap_or_else(|| "a panic without a message".into()) })
    })
}

/// The first request that fails by itself.
fn smallest(tools: Tools<'_>, cell: &Cell, seed: u64) -> Option<(usize, usize)> {
    let mut reqs = checks::world(cell, seed, None).reqs;
    reqs.retain(|r| r.q_len > 0);
    reqs.sort_by_key(|r| (r.q_len, r.kv_len));
    let fails = |r: &&Req| guarded(tools, cell, seed, Some(&[**r])).is_err();
    reqs.iter().find(fails).map(|r| (r.q_len, r.kv_len))
}
