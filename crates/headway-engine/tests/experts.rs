//! Experts out of every form that files have them in: the same numbers stacked in a GGUF file, in MXFP4, in fp8
//! blocks, and plainly; and mixtures under chunking, batching and preemption.

mod support;

use half::bf16;
use headway_engine::{
    EngineOptions,
    loading::{self, Checkpoint, gguf::write::GgufWriter},
};
use headway_tensor::{
    SharedBytes, Weight, WeightType,
    fp8::{E4M3_MAX, e4m3_to_f32, f32_to_e4m3},
    quant::{self, QuantFormat},
};
use headway_testkit::{
    golden::{
        self, TinyGolden,
        check::Compute,
        walk::{self, Generates, Prompt, Table},
    },
    testdata,
};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, path::Path, sync::Arc};
use support::{UnderTest, options};

fn golden_of(name: &str) -> TinyGolden {
    golden::tiny().unwrap().into_iter().find(|g| g.model.name == name).expect("a golden")
}

fn checkpoint(name: &str) -> Arc<dyn Checkpoint> {
    loading::open(&testdata::model_dir(name).unwrap()).unwrap().checkpoint
}

/// Tensors to be written: type, shape, bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn to_bf16(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect()
}

/// All tensors of a tiny checkpoint, as they are.
fn tensors(name: &str) -> Tensors {
    let c = checkpoint(name);
    let one = |n: &str| {
        let w = c.get(n).unwrap();
        assert_eq!(w.dtype(), WeightType::BF16);
        (n.to_owned(), (Dtype::BF16, w.shape().to_vec(), w.bytes().as_slice().to_vec()))
    };
    c.names().into_iter().map(one).collect()
}

/// A checkpoint folder with the config of `name`, and `quantisation` in it.
fn write(name: &str, tensors: &Tensors, quantisation: Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let source = testdata::model_dir(name).unwrap();
    let text = fs::read_to_string(source.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["quantization_config"] = quantisation;
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|(n, (t, s, b))| (n, TensorView::new(*t, s.clone(), b).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    dir
}

/// What both folders answer to a prompt of the golden, bit by bit.
#[track_caller]
fn same_answers(golden: &TinyGolden, packed: &Path, plain: &Path) {
    let run = |path: &Path| {
        let mut engine = UnderTest::open(path, &options("auto")).unwrap();
        assert_eq!(engine.engine.report().warnings, Vec::<String>::new(), "every tensor is used");
        let case = golden.cases.iter().find(|c| c.prompt_ids.len() == 33).unwrap();
        engine.run(Prompt { ids: &case.prompt_ids, encoder_ids: &[], max_new: 8, stop: &[] }).unwrap()
    };
    let (packed, plain) = (run(packed), run(plain));
    assert_eq!(packed.ids, plain.ids);
    assert!(packed.first_logits.iter().zip(&plain.first_logits).all(|(a, b)| a.to_bits() == b.to_bits()));
}

const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Blocks of 32 by the OCP specification (version 1.0, section 6.3): the scale is the power of two of the largest
/// magnitude, less the 2 of e2m1's own largest; elements go to the nearest code. Bytes, scales, and the values.
fn mxfp4(values: &[f32]) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let (mut bytes, mut scales, mut back) = (vec![], vec![], vec![]);
    for block in values.chunks_exact(32) {
        let largest = block.iter().fold(0f32, |m, x| m.max(x.abs()));
        let exponent = largest.log2().floor() as i32 - 2;
        let scale = 2f32.powi(exponent);
        let code = |x: &f32| {
            let far = |i: &usize| (E2M1[*i] - (x / scale).abs()).abs();
            let nearest = (0..8).min_by(|a, b| far(a).total_cmp(&far(b))).unwrap();
            nearest as u8 | if *x < 0.0 { 8 } else { 0 }
        };
        let codes: Vec<u8> = block.iter().map(code).collect();
        bytes.extend(codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4));
        scales.push((exponent + 127) as u8);
        let value = |c: &u8| E2M1[usize::from(c & 7)] * scale * if c & 8 == 0 { 1.0 } else { -1.0 };
        back.extend(codes.iter().map(value));
    }
    (bytes, scales, back)
}

/// `[experts, rows, cols]` with rows and columns exchanged.
fn transposed(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let one = |m: &[f32]| (0..rows * cols).map(|i| m[i % rows * cols + i / rows]).collect::<Vec<_>>();
    values.chunks_exact(rows * cols).flat_map(one).collect()
}

#[test]
fn a_score_correction_that_is_no_number_is_refused_by_name() {
    // The tensors of a V2, with what V3 has beside them.
    let name = "tiny-deepseek-v2-yarn";
    let experts = checkpoint(name).get("model.layers.1.mlp.gate.weight").unwrap().shape()[0];
    let bias = |i: usize| format!("model.layers.{i}.mlp.gate.e_score_correction_bias");
    let open = |correction: f32| {
        let mut all = tensors(name);
        let layers: Vec<usize> =
            (0..8).filter(|i| all.contains_key(&format!("model.layers.{i}.mlp.gate.weight"))).collect();
        for i in &layers {
            let mut values = vec![0.0f32; experts];
            values[experts - 1] = if i == layers.last().unwrap() { correction } else { 0.0 };
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            all.insert(bias(*i), (Dtype::F32, vec![experts], bytes));
        }
        let dir = write(name, &all, Value::Null);
        let config = dir.path().join("config.json");
        let mut json: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
        json["architectures"] = json!(["DeepseekV3ForCausalLM"]);
        for field in ["topk_method", "scoring_func", "n_group"] {
            json[field] = Value::Null;
        }
        fs::write(config, json.to_string()).unwrap();
        let opened = UnderTest::open(dir.path(), &options("auto")).map(|_| ());
        (opened.map_err(|e| e.to_string()), bias(*layers.last().unwrap()))
    };
    assert_eq!(open(0.5).0, Ok(()));
    for wrong in [f32::NAN, f32::INFINITY] {
        let (e, name) = open(wrong);
        let e = e.unwrap_err();
        assert!(e.contains(&format!("{name} has {wrong} at {}", experts - 1)), "{e}");
    }
}

#[test]
fn gpt_oss_in_mxfp4_is_its_dequantised_twin() {
    let (mut packed, mut plain) = (tensors("tiny-gpt-oss"), tensors("tiny-gpt-oss"));
    let c = checkpoint("tiny-gpt-oss");
    for name in c.names().into_iter().filter(|n| n.ends_with("_proj") && n.contains("experts")) {
        let w = c.get(name).unwrap();
        let &[experts, inner, out] = w.shape() else { panic!("{:?}", w.shape()) };
        let (blocks, scales, back) = mxfp4(&transposed(&w.to_f32(), inner, out));
        packed.remove(name);
        packed.insert(format!("{name}_blocks"), (Dtype::U8, vec![experts, out, inner / 32, 16], blocks));
        packed.insert(format!("{name}_scales"), (Dtype::U8, vec![experts, out, inner / 32], scales));
        let back = to_bf16(&transposed(&back, out, inner));
        plain.insert(name.to_owned(), (Dtype::BF16, vec![experts, inner, out], back));
    }
    let quantisation = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]});
    let packed_dir = write("tiny-gpt-oss", &packed, quantisation.clone());
    let plain_dir = write("tiny-gpt-oss", &plain, Value::Null);
    same_answers(&golden_of("tiny-gpt-oss"), packed_dir.path(), plain_dir.path());
    let files = loading::open(packed_dir.path()).unwrap();
    let dense = loading::open(plain_dir.path()).unwrap();
    assert_eq!(files.checkpoint.total_bytes(), dense.checkpoint.total_bytes(), "counted as it is held");
    assert!(files.checkpoint.made_bytes() > 0 && dense.checkpoint.made_bytes() == 0);
    assert!(files.checkpoint.describe().ends_with("; MXFP4 made BF16"), "{}", files.checkpoint.describe());
    // A tensor without its scales, and scales of another shape.
    let first = "model.layers.0.mlp.experts.down_proj_scales";
    let error = |tensors: &Tensors| {
        let dir = write("tiny-gpt-oss", tensors, quantisation.clone());
        UnderTest::open(dir.path(), &options("auto")).err().expect("refused")
    };
    let mut wrong = packed.clone();
    wrong.get_mut(first).unwrap().1 = vec![4, 2, 96];
    assert!(error(&wrong).contains("a byte of scale for every block is needed"));
    wrong.remove(first);
    assert!(error(&wrong).contains(&format!("no tensor '{first}'")));
}

/// A matrix in e4m3 with a scale for every block, by DeepSeek-V3's rule: the block's largest magnitude is the
/// format's. Codes, scales, and the values in bfloat16.
fn block_fp8(w: &Weight, [rows, cols]: [usize; 2]) -> (Vec<u8>, Vec<f32>, Vec<u8>) {
    let (n, k, values) = (w.rows(), w.cols(), w.to_f32());
    let across = k.div_ceil(cols);
    let mut scales = vec![0f32; n.div_ceil(rows) * across];
    let at = |i: usize| i / k / rows * across + i % k / cols;
    for (i, x) in values.iter().enumerate() {
        scales[at(i)] = scales[at(i)].max(x.abs() / E4M3_MAX);
    }
    let codes: Vec<u8> = values.iter().enumerate().map(|(i, x)| f32_to_e4m3(x / scales[at(i)])).collect();
    let back: Vec<f32> = codes.iter().enumerate().map(|(i, c)| e4m3_to_f32(*c) * scales[at(i)]).collect();
    let far = back.iter().zip(&values).map(|(b, v)| (b - v).abs() / v.abs().max(1e-3)).fold(0f32, f32::max);
    assert!(far <= 0.0626, "three bits of mantissa: {far}");
    (codes, scales, to_bf16(&back))
}

#[test]
fn fp8_in_blocks_is_its_dequantised_twin() {
    let name = "tiny-qwen3-moe";
    for block in [[32, 64], [128, 128]] {
        let (mut packed, mut plain) = (tensors(name), tensors(name));
        let c = checkpoint(name);
        for n in c.names().into_iter().filter(|n| n.ends_with("_proj.weight")) {
            let w = c.get(n).unwrap();
            let (codes, scales, back) = block_fp8(&w, block);
            packed.insert(n.to_owned(), (Dtype::F8_E4M3, w.shape().to_vec(), codes));
            let shape = vec![w.rows().div_ceil(block[0]), w.cols().div_ceil(block[1])];
            let bytes = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
            packed.insert(format!("{n}_scale_inv"), (Dtype::F32, shape, bytes));
            plain.insert(n.to_owned(), (Dtype::BF16, w.shape().to_vec(), back));
        }
        let quantisation = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block});
        let packed_dir = write(name, &packed, quantisation.clone());
        same_answers(&golden_of(name), packed_dir.path(), write(name, &plain, Value::Null).path());
        let q_proj = "model.layers.0.self_attn.q_proj.weight_scale_inv";
        packed.get_mut(q_proj).unwrap().1.reverse();
        packed.get_mut(q_proj).unwrap().1.push(1);
        let e = UnderTest::open(write(name, &packed, quantisation).path(), &options("auto")).err().unwrap();
        assert!(e.contains("a scale for every block of"), "{e}");
    }
}

#[test]
fn other_quantised_checkpoints_are_refused_by_name() {
    for (quantisation, words) in [
        (json!({"quant_method": "gptq", "bits": 4}), "quantised checkpoint format gptq"),
        (json!({"quant_method": "awq"}), "quantised checkpoint format awq"),
        (json!({"quant_method": "compressed-tensors"}), "compressed-tensors"),
        (json!({}), "of an unnamed method"),
        (json!({"quant_method": "fp8"}), "fp8 without weight_block_size"),
        (json!({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}), "fp8 of type e5m2"),
        (json!({"quant_method": "fp8", "weight_block_size": [0, 128]}), "two positive whole numbers"),
    ] {
        let dir = write("tiny-qwen3-moe", &Tensors::new(), quantisation);
        let e = loading::open(dir.path()).expect_err("refused").to_string();
        assert!(e.contains("config.json") && e.contains(words), "{e}");
    }
    // Float8 that no config speaks of.
    let one = [("w".to_owned(), (Dtype::F8_E4M3, vec![2, 2], vec![0; 4]))];
    let dir = write("tiny-qwen3-moe", &Tensors::from(one), Value::Null);
    let e = loading::open(dir.path()).expect_err("refused").to_string();
    assert!(e.contains("'w' has type F8_E4M3"), "{e}");
}

/// tiny-qwen3-moe as llama.cpp would write it; gate and up of the experts in `experts`' type.
fn gguf(path: &Path, experts: Option<QuantFormat>, used: u32) {
    let c = checkpoint("tiny-qwen3-moe");
    let mut w = GgufWriter::new("qwen3moe");
    for (key, value) in [
        ("block_count", 3),
        ("context_length", 2048),
        ("embedding_length", 96),
        ("feed_forward_length", 192),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("expert_count", 8),
        ("expert_used_count", used),
        ("expert_feed_forward_length", 48),
    ] {
        w = w.u32(&format!("qwen3moe.{key}"), value);
    }
    w = w.f32("qwen3moe.rope.freq_base", 1e6).f32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6);
    // The goldens are ids; any vocabulary of the right size will do.
    let tokens: Vec<String> =
        ["a", "b", "ab"].map(str::to_owned).into_iter().chain((3..512).map(|i| format!("t{i}"))).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    w = w.text("tokenizer.ggml.model", "gpt2");
    w = w.strings("tokenizer.ggml.tokens", &tokens).strings("tokenizer.ggml.merges", &["a b"]);
    let widened = |name: &str, to: &str| {
        let t = c.get(name).unwrap();
        Weight::from_f32(to, t.shape().to_vec(), &t.to_f32()).unwrap()
    };
    w = w.tensor(&c.get("model.embed_tokens.weight").unwrap().renamed("token_embd.weight"));
    w = w.tensor(&c.get("lm_head.weight").unwrap().renamed("output.weight"));
    w = w.tensor(&widened("model.norm.weight", "output_norm.weight"));
    for layer in 0..3 {
        let (from, to) = (format!("model.layers.{layer}"), format!("blk.{layer}"));
        for (theirs, ours) in [
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("mlp.gate", "ffn_gate_inp"),
        ] {
            let name = format!("{from}.{theirs}.weight");
            if c.contains(&name) {
                w = w.tensor(&widened(&name, &format!("{to}.{ours}.weight")));
            }
        }
        for (theirs, ours) in [
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        ] {
            let name = format!("{from}.{theirs}.weight");
            if c.contains(&name) {
                w = w.tensor(&c.get(&name).unwrap().renamed(format!("{to}.{ours}.weight")));
            }
        }
        for n in ["gate", "up", "down"] {
            let of = |e: usize| c.get(&format!("{from}.mlp.experts.{e}.{n}_proj.weight"));
            let Ok(first) = of(0) else { continue };
            let values: Vec<f32> = (0..8).flat_map(|e| of(e).unwrap().to_f32()).collect();
            let (dtype, bytes) = match experts.filter(|_| n != "down") {
                Some(format) => (WeightType::Quant(format), quant::quantize(format, &values).unwrap()),
                None => (WeightType::BF16, to_bf16(&values)),
            };
            let shape = vec![8, first.rows(), first.cols()];
            w = w.tensor(
                &Weight::new(format!("{to}.ffn_{n}_exps.weight"), dtype, shape, SharedBytes::new(bytes))
                    .unwrap(),
            );
        }
    }
    fs::write(path, w.finish()).unwrap();
}

#[test]
fn a_gguf_twin_with_stacked_experts() {
    let (dir, golden) = (tempfile::tempdir().unwrap(), golden_of("tiny-qwen3-moe"));
    let path = dir.path().join("twin.gguf");
    gguf(&path, None, 3);
    let mut table = Table::default();
    let mut engine = UnderTest::open(&path, &options("float32")).unwrap();
    assert!(engine.engine.report().model.ends_with("3 layers, 3 of 8 experts a token in 2 of them"));
    walk::tiny(&mut table, &golden, Compute::Float32, "GGUF", &mut engine);
    println!("{table}");
    assert!(table.ok(), "{table}");
    // Quantised experts are views of the stacked blocks: near, and not the same.
    gguf(&path, Some(QuantFormat::Q8_0), 3);
    let case = golden.cases.iter().find(|c| c.prompt_ids.len() == 7).unwrap();
    for dtype in ["float32", "auto"] {
        let mut engine = UnderTest::open(&path, &options(dtype)).unwrap();
        let got =
            engine.run(Prompt { ids: &case.prompt_ids, encoder_ids: &[], max_new: 1, stop: &[] }).unwrap();
        let far = got
            .first_logits
            .iter()
            .zip(&case.logits)
            .map(|(a, b)| (f64::from(*a) - b).abs())
            .fold(0.0, f64::max);
        assert!(far > 1e-4 && far < 0.3, "{dtype}: {far}");
    }
    gguf(&path, None, 9);
    let e = UnderTest::open(&path, &options("auto")).err().unwrap();
    assert!(e.contains("qwen3moe.expert_used_count") && e.contains("from 1 to qwen3moe.expert_count"), "{e}");
}

/// Chunks of every size, caching, a pass of few tokens: the golden holds in all.
#[test]
fn mixtures_in_chunks() {
    let mut table = Table::default();
    for name in ["tiny-qwen3-moe", "tiny-gpt-oss"] {
        let golden = golden_of(name);
        for chunk in [5, 64] {
            let options = EngineOptions {
                max_num_batched_tokens: Some(chunk),
                max_num_seqs: Some(chunk.min(16)),
                ..options("float32")
            };
            let mut engine = UnderTest::open(&testdata::model_dir(name).unwrap(), &options).unwrap();
            walk::tiny(&mut table, &golden, Compute::Float32, &format!("chunk {chunk}"), &mut engine);
        }
    }
    println!("{table}");
    assert!(table.ok(), "{table}");
}
