//! The plugin under headway's suite, its configuration table, and what its factor does.

use add_a_backend::register;
use headway_attention::Registry;
use headway_cpu::{CpuExec, CpuOptions};
use headway_testkit::suite::{SuiteConfig, run_suite};
use serde_json::json;

fn registry() -> Registry {
    let mut r = Registry::default();
    headway_cpu::register(&mut r).expect("headway's own backends register");
    register(&mut r).expect("the plugin registers beside them");
    r
}

#[test]
fn every_yes_has_a_run_behind_it() {
    let exec = CpuExec::new(CpuOptions::default()).expect("a CPU");
    let backend = registry().get("DAMPED_ATTN").expect("registered");
    // The suite runs decoders; encoders and cross-attention, which CPU_ATTN's rule book has too, it does not.
    let waived = ["Encoder", "EncoderOnly", "EncoderDecoder"].map(|t| format!("attention type {t}")).to_vec();
    // Every eighth cell of the grid takes some seconds; `every: 1` runs them all.
    let report = run_suite(&*backend, &exec, &SuiteConfig { every: 8, waived, ..SuiteConfig::default() });
    assert!(report.ok(), "{report}");
}

#[test]
fn it_is_one_of_two() {
    let exec = CpuExec::new(CpuOptions::default()).expect("a CPU");
    for name in ["CPU_ATTN+DAMPED_ATTN", "DAMPED_ATTN+CPU_ATTN"] {
        let backend = registry().get(name).expect("two of one platform");
        let report = run_suite(&*backend, &exec, &SuiteConfig { every: 31, ..SuiteConfig::default() });
        assert!(report.ok(), "{report}");
    }
}

#[test]
fn a_factor_changes_the_answers() {
    let exec = CpuExec::new(CpuOptions::default()).expect("a CPU");
    let backend = registry().get("DAMPED_ATTN").expect("registered");
    let damped = SuiteConfig {
        every: 50,
        backend_config: Some(json!({"factor": 0.25})),
        max_failures: 1,
        ..SuiteConfig::default()
    };
    assert!(!run_suite(&*backend, &exec, &damped).ok(), "scores of another scale are not CPU_ATTN's");
}

#[test]
fn its_table_is_checked() {
    let backend = registry().get("DAMPED_ATTN").expect("registered");
    let e = backend.parse_config(Some(&json!({"faktor": 2.0}))).err().expect("an unknown field").to_string();
    assert!(e.contains("faktor") && e.contains("[backend.DAMPED_ATTN]"), "{e}");
    let mut again = registry();
    assert!(register(&mut again).is_err(), "a name is registered once");
}
