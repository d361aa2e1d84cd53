//! The backends through the testkit's suite: every yes of a rule book runs, every no is refused, on
//! every instruction set that this machine has.
//!
//! Here every n-th cell of the grid runs, n of its own for each test so that they meet different
//! cells; `HEADWAY_SUITE_EVERY=1` runs them all.

use headway_attention::{AttentionBackend, KvBuf, Registry, Result, RuleBook, Standard};
use headway_cpu::{
    CpuAttn, CpuExec, CpuOptions, Isa,
    backends::cpu_attn::{CpuAttnBuilder, CpuAttnConfig, CpuAttnLayer},
};
use headway_tensor::{DType, Exec, Linear, LinearPart, Ops, Tensor, TensorError, Weight};
use headway_testkit::suite::{HostAccess, HostMemory, SuiteConfig, SuiteReport, run_suite_with};
use std::{any::Any, sync::Arc};

fn every(default: usize) -> usize {
    std::env::var("HEADWAY_SUITE_EVERY").ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

/// Host memory, and the CPU's linear layers.
struct Cpu;

impl HostAccess for Cpu {
    fn new_cache(&self, exec: &dyn Exec, bytes: &[u8]) -> Result<KvBuf> {
        HostMemory.new_cache(exec, bytes)
    }

    fn read_cache(&self, exec: &dyn Exec, cache: &KvBuf) -> Result<Vec<u8>> {
        HostMemory.read_cache(exec, cache)
    }

    fn load_linear(&self, exec: &dyn Exec, weight: Weight, _: DType) -> Result<Arc<dyn Linear>> {
        let cpu = (exec as &dyn Any).downcast_ref::<CpuExec>();
        let cpu = cpu.ok_or_else(|| TensorError::Unsupported("another device".into()))?;
        Ok(cpu.load_linear(vec![LinearPart { weight, bias: None }], None)?)
    }

    fn read_tensor(&self, exec: &dyn Exec, tensor: &Tensor) -> Result<Vec<u8>> {
        HostMemory.read_tensor(exec, tensor)
    }
}

/// `CPU_ATTN` under another name, for compositions; decodes are of up to two new tokens.
enum Second {}

impl AttentionBackend for Second {
    const CONTRACT: u32 = 1;
    type Exec = CpuExec;
    type Kind = Standard;
    type Config = CpuAttnConfig;
    type Builder = CpuAttnBuilder;
    type Impl = CpuAttnLayer;

    fn rules() -> RuleBook {
        RuleBook { name: "SECOND".into(), reorder_batch_threshold: Some(2), ..CpuAttn::rules() }
    }
}

fn run(options: CpuOptions, config: &SuiteConfig) -> SuiteReport {
    run_backend("CPU_ATTN", options, config)
}

fn run_backend(backend: &str, options: CpuOptions, config: &SuiteConfig) -> SuiteReport {
    let exec = CpuExec::new(options).unwrap();
    let mut registry = Registry::default();
    headway_cpu::register(&mut registry).unwrap();
    registry.register::<Second>().unwrap();
    // Encoders and cross-attention have a test of their own (`attention/encoder.rs`).
    let elsewhere = ["Encoder", "EncoderOnly", "EncoderDecoder"].map(|t| format!("attention type {t}"));
    let config = &SuiteConfig { waived: elsewhere.to_vec(), ..config.clone() };
    let report = run_suite_with(&*registry.get(backend).unwrap(), &exec, &Cpu, config);
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
fn two_as_one() {
    for (i, name) in ["CPU_ATTN+SECOND", "SECOND+CPU_ATTN"].into_iter().enumerate() {
        let config = SuiteConfig { every: every(23), seed: 50 + i as u64, ..SuiteConfig::default() };
        let report = run_backend(name, CpuOptions::default(), &config);
        assert!(report.ok(), "{report}");
        assert!(report.refused > 500, "{report}");
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

/// The default workspace, one that every context overflows, and one in between.
#[test]
fn latent_attention_with_workspaces_of_every_size() {
    for (i, tokens) in [None, Some(16), Some(48)].into_iter().enumerate() {
        let config = SuiteConfig {
            every: every(4),
            seed: 20 + i as u64,
            backend_config: tokens.map(|n| serde_json::json!({ "workspace_tokens": n })),
            ..SuiteConfig::default()
        };
        let report = run_backend("CPU_MLA", CpuOptions::default(), &config);
        assert!(report.ok(), "{tokens:?}: {report}");
        assert!(report.refused > 500, "{report}");
    }
}

#[test]
fn latent_attention_on_each_instruction_set() {
    for (i, &isa) in Isa::available().iter().enumerate() {
        let options = CpuOptions { isa: Some(isa), threads: Some(3), ..CpuOptions::default() };
        let config = SuiteConfig { every: every(7), seed: 30 + i as u64, ..SuiteConfig::default() };
        let report = run_backend("CPU_MLA", options, &config);
        assert!(report.ok(), "{isa}: {report}");
    }
}

#[test]
fn latent_batch_invariance_is_bitwise() {
    let options = CpuOptions { batch_invariant: true, ..CpuOptions::default() };
    let config = SuiteConfig { only: Some("batch-invariant".into()), seed: 40, ..SuiteConfig::default() };
    let report = run_backend("CPU_MLA", options, &config);
    assert!(report.ok(), "{report}");
    assert!(report.checks.contains_key("bit-equal alone and in the batch"), "{report}");
}
