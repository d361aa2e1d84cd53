//! `CPU_ATTN` through the testkit's suite: every yes of its rule book runs, every no is refused, on
//! every instruction set that this machine has.
//!
//! Here every n-th cell of the grid runs, n of its own for each test so that they meet different
//! cells; `HEADWAY_SUITE_EVERY=1` runs them all.

use headway_attention::Registry;
use headway_cpu::{CpuExec, CpuOptions, Isa};
use headway_testkit::suite::{SuiteConfig, SuiteReport, run_suite};

fn every(default: usize) -> usize {
    std::env::var("HEADWAY_SUITE_EVERY").ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

fn run(options: CpuOptions, config: &SuiteConfig) -> SuiteReport {
    let exec = CpuExec::new(options).unwrap();
    let mut registry = Registry::default();
    headway_cpu::register(&mut registry).unwrap();
    let report = run_suite(&**registry.get("CPU_ATTN").unwrap(), &exec, config);
    println!("{} {report}", exec.isa());
    report
}

#[test]
fn every_yes_of_the_rule_book_has_a_run_behind_it() {
    let report = run(CpuOptions::default(), &SuiteConfig { every: every(7), ..SuiteConfig::default() });
    assert!(report.ok(), "{report}");
    assert!(report.refused > 500, "{report}");
}

#[test]
fn on_each_instruction_set() {
    for (i, &isa) in Isa::available().iter().enumerate() {
        let options = CpuOptions { isa: Some(isa), threads: Some(3), ..CpuOptions::default() };
        let config = SuiteConfig { every: every(29), seed: 2 + i as u64, ..SuiteConfig::default() };
        let report = run(options, &config);
        assert!(report.ok(), "{isa}: {report}");
    }
}

#[test]
fn batch_invariance_is_bitwise() {
    let options = CpuOptions { batch_invariant: true, ..CpuOptions::default() };
    let config = SuiteConfig {
        only: Some("batch-invariant".into()),
        every: every(2),
        seed: 9,
        ..SuiteConfig::default()
    };
    let report = run(options, &config);
    assert!(report.ok(), "{report}");
    assert!(report.checks.contains_key("bit-equal alone and in the batch"), "{report}");
}
