//! The suite held against a backend that is right and against backends that are wrong in known ways:
//! a suite that passes everything is worth nothing.

mod plain;

use headway_attention::Registry;
use headway_testkit::suite::{SuiteConfig, SuiteReport, run_suite};
use plain::*;

fn run<const FAULT: u8>(config: &SuiteConfig) -> SuiteReport {
    let mut registry = Registry::default();
    registry.register::<Plain<FAULT>>().unwrap();
    run_suite(&*registry.get("plain").unwrap(), &Host, config)
}

#[test]
fn a_right_backend_passes() {
    let report = run::<RIGHT>(&SuiteConfig { every: 7, ..SuiteConfig::default() });
    println!("{report}");
    assert!(report.ok(), "{report}");
    assert!(report.cells() > 80 && report.refused > 400 && report.checks.len() == 12, "{report}");
    assert_eq!(report.combinations.keys().collect::<Vec<_>>(), ["sinks with ALiBi not supported"]);
}

fn caught<const FAULT: u8>(by: &str) {
    let config = SuiteConfig { max_failures: 1, every: 7, ..SuiteConfig::default() };
    let report = run::<FAULT>(&config);
    let Some(failure) = report.failures.first() else { panic!("fault {FAULT} was not caught: {report}") };
    assert!(failure.check.contains(by), "{failure}");
    let again = SuiteConfig {
        every: 1,
        only: Some(failure.cell.clone()),
        requests: failure.smallest.map(|r| vec![r]),
        ..config
    };
    assert!(!run::<FAULT>(&again).failures.is_empty(), "does not fail again: {failure}");
}

#[test]
fn wrong_numbers_are_caught() {
    caught::<WINDOW_ONE_TOO_LONG>("numbers");
    caught::<MASK_FROM_THE_TOP>("numbers");
    caught::<HEADS_IN_TURNS>("numbers");
    caught::<ONE_CAUSAL_FLAG>("numbers");
    caught::<WRONG_BLOCK_SIZE>("numbers");
    caught::<CAP_OVERFLOWS>("numbers");
    caught::<SCALES_SINKS>("numbers");
    caught::<READS_THE_TAIL>("numbers");
    caught::<IGNORES_RANGES>("numbers");
    caught::<FORGETS_THE_PROMPT>("numbers");
}

#[test]
fn broken_promises_are_caught() {
    caught::<WRITES_SKIPPED_SLOTS>("");
    caught::<LEAVES_PADDING>("padding");
    caught::<WRITES_SHARED>("shares a cache");
    caught::<ASSUMES_PAGES_SIDE_BY_SIDE>("left alone");
    caught::<DEPENDS_ON_THE_BATCH>("alone and in the batch");
    caught::<BUILDER_REMEMBERS>("fresh");
    caught::<CACHE_OVERFLOWS>("saturates");
    caught::<PANICS>("no panic");
}
