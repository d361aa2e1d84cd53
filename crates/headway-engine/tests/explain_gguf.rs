//! What a GGUF file's blocks take where they are multiplied as they are, and on a device that dequantises them.

use headway_engine::{
    EngineOptions,
    explain::{Contenders, ExplainOptions, Subject, explain},
    loading::gguf::write::GgufWriter,
    options::LoadFormat,
    runner::devices,
};
use headway_tensor::{
    Weight, WeightType,
    quant::{QuantFormat, quantize},
};

const WIDTH: usize = 64;

fn blocks(name: &str, rows: usize) -> Weight {
    let values: Vec<f32> = (0..rows * WIDTH).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect();
    let bytes = quantize(QuantFormat::Q8_0, &values).unwrap();
    Weight::new(name, WeightType::Quant(QuantFormat::Q8_0), vec![rows, WIDTH], bytes.into()).unwrap()
}

/// A llama of one layer: 28,672 weights in blocks of Q8_0, 192 in float32.
fn file() -> Vec<u8> {
    let sizes = [
        ("embedding_length", 64),
        ("feed_forward_length", 64),
        ("block_count", 1),
        ("context_length", 128),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
    ];
    let mut writer = GgufWriter::new("llama").f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
    for (key, value) in sizes {
        writer = writer.u32(&format!("llama.{key}"), value);
    }
    writer = writer.tensor(&blocks("token_embd.weight", 64));
    for (name, rows) in [
        ("attn_q", 64),
        ("attn_k", 32),
        ("attn_v", 32),
        ("attn_output", 64),
        ("ffn_gate", 64),
        ("ffn_up", 64),
        ("ffn_down", 64),
    ] {
        writer = writer.tensor(&blocks(&format!("blk.0.{name}.weight"), rows));
    }
    for name in ["blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"] {
        let norm = Weight::from_f32(format!("{name}.weight"), vec![WIDTH], &[1.0; WIDTH]);
        writer = writer.tensor(&norm.unwrap());
    }
    writer.finish()
}

#[test]
fn blocks_take_16_bits_a_weight_on_a_device_that_dequantises_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, file()).unwrap();
    let subject = Subject::read(&path, LoadFormat::Auto).unwrap();
    let own = Contenders::parse("headway", devices::registry().unwrap()).unwrap();
    let memory = |device: &str| {
        let engine = EngineOptions { device: Some(device.into()), ..EngineOptions::default() };
        let options = ExplainOptions { engine, memory: Some(1 << 30), ..ExplainOptions::default() };
        let report = explain(&subject, &options, &own).unwrap().report;
        (report.memory.weights_bytes, report.memory.packed_weights_bytes)
    };
    let in_file = 28_672 / 32 * 34 + 192 * 4;
    assert_eq!(memory("h200"), (in_file, (28_672 + 192) * 2));
    assert_eq!(memory("cpu"), (in_file, 0), "what the CPU packs is known after loading");
}
