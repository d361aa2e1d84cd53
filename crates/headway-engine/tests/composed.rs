//! A backend made of two in the engine: the goldens, in chunks, batches, micro-batches, with drafts and shared caches, and
//! what is reported and refused. The second part is `CPU_ATTN` under another name.

mod support;

use headway_attention::{AttentionBackend, Registry, RuleBook, Standard, process::rules::KernelBlockSize};
use headway_cpu::{
    CpuAttn, CpuExec,
    backends::cpu_attn::{CpuAttnBuilder, CpuAttnConfig, CpuAttnLayer},
};
use headway_engine::{EngineOptions, LlmEngine};
use headway_testkit::{
    golden::{
        check::Compute,
        walk::{Generates, Prompt, Table},
    },
    testdata,
};
use support::{UnderTest, options};

/// `CPU_ATTN` in blocks of 32, with decodes of at most `MOST` new tokens; 0: of any number.
enum Second<const MOST: usize> {}

impl<const MOST: usize> AttentionBackend for Second<MOST> {
    const CONTRACT: u32 = 1;
    type Exec = CpuExec;
    type Kind = Standard;
    type Config = CpuAttnConfig;
    type Builder = CpuAttnBuilder;
    type Impl = CpuAttnLayer;

    fn rules() -> RuleBook {
        RuleBook {
            name: if MOST == 0 { "SECOND".into() } else { format!("SECOND_{MOST}").into() },
            kernel_block_sizes: vec![KernelBlockSize::Exact(32)],
            preferred_block_size: None,
            reorder_batch_threshold: (MOST > 0).then_some(MOST),
            ..CpuAttn::rules()
        }
    }
}

/// `CPU_ATTN` without its last step.
enum Unfused {}

impl AttentionBackend for Unfused {
    const CONTRACT: u32 = 1;
    type Exec = CpuExec;
    type Kind = Standard;
    type Config = CpuAttnConfig;
    type Builder = CpuAttnBuilder;
    type Impl = CpuAttnLayer;

    fn rules() -> RuleBook {
        RuleBook { name: "UNFUSED".into(), output_quants: vec![], ..CpuAttn::rules() }
    }
}

fn composed(name: &str, o: EngineOptions) -> EngineOptions {
    let mut registry = Registry::default();
    headway_cpu::register(&mut registry).unwrap();
    registry.register::<Second<0>>().unwrap();
    registry.register::<Second<1>>().unwrap();
    registry.register::<Unfused>().unwrap();
    EngineOptions { registry: Some(registry), attention_backend: Some(name.into()), ..o }
}

fn open(model: &str, options: &EngineOptions) -> Result<LlmEngine, String> {
    LlmEngine::open(&testdata::model_dir(model).unwrap(), options, &mut |_, _| ()).map_err(|e| e.to_string())
}

/// One group; windows beside full attention; layers that share caches; experts; states beside attention.
const MODELS: [&str; 5] = ["tiny-llama", "tiny-gemma3", "tiny-gemma4", "tiny-qwen3-moe", "tiny-bamba"];

#[test]
fn the_goldens_alone_batched_and_in_chunks() {
    let mut table = Table::default();
    for model in MODELS {
        for (name, chunk, parts) in [
            ("CPU_ATTN+SECOND", 512, 1),
            ("SECOND+CPU_ATTN", 5, 1),
            ("CPU_ATTN+SECOND_1", 64, 1),
            ("SECOND_1+CPU_ATTN", 64, 2),
        ] {
            let o = EngineOptions {
                max_num_batched_tokens: Some(chunk),
                max_num_seqs: Some(chunk.min(16)),
                micro_batches: (parts > 1).then_some(parts),
                micro_batch_decode_tokens: (parts > 1).then_some(2),
                micro_batch_prefill_tokens: (parts > 1).then_some(2),
                ..composed(name, options("float32"))
            };
            let way = format!("{name} chunk {chunk} parts {parts}");
            table.extend(support::walk_of(model, Compute::Float32, &way, &o));
        }
    }
    println!("{table}");
    assert!(table.ok(), "\n{table}");
}

#[test]
fn drafts_are_decodes_and_rows_with_logits_alone_are_too() {
    let mut table = Table::default();
    for (model, fast) in [("tiny-llama", false), ("tiny-gemma4", true)] {
        let o = EngineOptions {
            speculative_tokens: Some(3),
            kv_sharing_fast_prefill: fast,
            max_num_batched_tokens: Some(64),
            max_num_seqs: Some(8),
            ..composed("CPU_ATTN+SECOND", options("float32"))
        };
        table.extend(support::walk_of(model, Compute::Float32, "drafts", &o));
    }
    println!("{table}");
    assert!(table.ok(), "\n{table}");
    // A part that takes one token of a decode is refused by the pair's name.
    let o =
        EngineOptions { speculative_tokens: Some(3), ..composed("SECOND_1+CPU_ATTN", options("float32")) };
    let e = open("tiny-llama", &o).err().unwrap();
    assert!(e.contains("backend SECOND_1+CPU_ATTN, which takes 1 query token"), "{e}");
}

/// Codes written by both parts' kernels, and by neither: the same bits.
#[test]
fn outputs_are_quantised_in_the_kernels_where_both_can() {
    let path = testdata::model_dir("tiny-fp8-output").unwrap();
    let answers = |name: &str, fused: bool| {
        let o = EngineOptions {
            max_num_batched_tokens: Some(16),
            max_num_seqs: Some(4),
            block_size: Some(32),
            ..composed(name, options("auto"))
        };
        let mut engine = UnderTest::open(&path, &o).unwrap();
        let coded = &engine.engine.report().coded_outputs;
        assert!(!coded.is_empty() && coded.iter().all(|c| c.fused == fused), "{name}");
        let ids = [3u32, 40, 90].map(|n| (0..n).map(|t| 3 + (t * 17 + n) % 240).collect::<Vec<u32>>());
        let prompts: Vec<_> =
            ids.iter().map(|ids| Prompt { ids, encoder_ids: &[], max_new: 8, stop: &[] }).collect();
        let answers = engine.run_batch(&prompts).unwrap();
        answers
            .into_iter()
            .map(|a| (a.ids, a.first_logits.into_iter().map(f32::to_bits).collect::<Vec<_>>()))
            .collect::<Vec<_>>()
    };
    assert_eq!(answers("CPU_ATTN+SECOND", true), answers("CPU_ATTN+UNFUSED", false));
}

#[test]
fn both_parts_are_reported_and_each_says_why_not() {
    let engine = open("tiny-llama", &composed("cpu_attn+second", options("auto"))).unwrap();
    let report = serde_json::to_value(engine.report()).unwrap();
    let group = &report["groups"][0];
    assert_eq!(group["backend"], "CPU_ATTN+SECOND");
    assert_eq!(group["parts"], serde_json::json!({ "decodes": "CPU_ATTN", "prefills": "SECOND" }));
    // The one block size that both kernels take.
    assert_eq!((&group["block_size"], &group["kernel_block_size"]), (&32.into(), &32.into()));
    assert_eq!(group["reorder_batch_threshold"], 1);
    let single = open("tiny-llama", &composed("CPU_ATTN", options("auto"))).unwrap();
    assert!(serde_json::to_value(single.report()).unwrap()["groups"][0].get("parts").is_none());

    let refused = |model: &str, o: EngineOptions| open(model, &o).err().unwrap();
    let o = EngineOptions { batch_invariant: true, ..composed("CPU_ATTN+SECOND", options("auto")) };
    let e = refused("tiny-llama", o);
    assert!(
        e.contains("CPU_ATTN+SECOND is not valid") && e.contains("batch invariance not supported"),
        "{e}"
    );
    let o = EngineOptions { block_size: Some(16), ..composed("CPU_ATTN+SECOND", options("auto")) };
    let e = refused("tiny-llama", o);
    assert!(e.contains("--block-size 16"), "{e}");
    let e = refused("tiny-deepseek-v2-yarn", composed("CPU_ATTN+SECOND", options("auto")));
    assert!(e.contains("CPU_ATTN (decode): MLA not supported"), "{e}");
    let e = refused("tiny-llama", composed("CPU_ATTN+CPU_MLA", options("auto")));
    assert!(e.contains("CPU_MLA is for MLA"), "{e}");
    let per_kind = EngineOptions {
        backend_per_kind: vec![("mla".into(), "CPU_ATTN+SECOND".into())],
        attention_backend: None,
        ..composed("", options("auto"))
    };
    assert!(refused("tiny-llama", per_kind).contains("a backend for standard attention"));
    let mut tables = serde_json::Map::new();
    tables.insert("SECOND".into(), serde_json::json!({ "rows": 3 }));
    let o = EngineOptions { backend_config: tables, ..composed("CPU_ATTN+SECOND", options("auto")) };
    let e = refused("tiny-llama", o);
    assert!(e.contains("[backend.SECOND] table") && e.contains("rows"), "{e}");
}
