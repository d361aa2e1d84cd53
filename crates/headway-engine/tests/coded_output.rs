//! Output projections in fp8 with static scales: attention writes their input as codes in its kernel, bit for bit what
//! quantising its output afterwards gives; the report says which layers do; and what is refused.

mod support;

use half::bf16;
use headway_attention::{AttentionBackend, LayerNeed, Refusal, Registry, RuleBook, Standard};
use headway_cpu::{
    CpuAttn, CpuExec,
    backends::cpu_attn::{CpuAttnBuilder, CpuAttnConfig, CpuAttnLayer},
};
use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine, kv::RequestId, sampling::SamplingParams,
};
use headway_tensor::fp8::{E4M3_MAX, e4m3_to_f32, f32_to_e4m3};
use headway_testkit::testdata;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    fs,
    path::Path,
    sync::{Arc, Mutex},
};
use support::options;

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

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        CpuAttn::combination(need)
    }
}

/// Copies a checkpoint with the matrices that `coded` names as e4m3 codes with a scale (the largest magnitude over 448)
/// and an input scale. `twin`: as float32 of the codes' values instead, without any scale.
fn write(model: &str, to: &Path, coded: &dyn Fn(&str) -> bool, input_scale: f32, twin: bool) {
    let from = testdata::model_dir(model).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = vec![];
    for (name, t) in all.tensors() {
        if !coded(&name) {
            tensors.push((name, t.dtype(), t.shape().to_vec(), t.data().to_vec()));
            continue;
        }
        let values: Vec<f32> = match t.dtype() {
            Dtype::BF16 => {
                t.data().as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
            }
            Dtype::F32 => t.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            other => panic!("{name} is {other:?}"),
        };
        let scale = values.iter().fold(0f32, |m, x| m.max(x.abs())) / E4M3_MAX;
        let codes: Vec<u8> = values.iter().map(|x| f32_to_e4m3(x / scale)).collect();
        let shape = t.shape().to_vec();
        if twin {
            let floats = codes.iter().flat_map(|c| (e4m3_to_f32(*c) * scale).to_le_bytes()).collect();
            tensors.push((name, Dtype::F32, shape, floats));
            continue;
        }
        let module = name.strip_suffix("weight").unwrap().to_owned();
        tensors.push((name, Dtype::F8_E4M3, shape, codes));
        for (what, s) in [("weight_scale", scale), ("input_scale", input_scale)] {
            tensors.push((format!("{module}{what}"), Dtype::F32, vec![1], s.to_le_bytes().to_vec()));
        }
    }
    let views = tensors.iter().map(|(n, d, s, b)| (n.as_str(), TensorView::new(*d, s.clone(), b).unwrap()));
    fs::create_dir_all(to).unwrap();
    fs::write(to.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    let text = fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    if !twin {
        config["quantization_config"] = json!({
            "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["everything but o_proj"],
        });
    }
    fs::write(to.join("config.json"), config.to_string()).unwrap();
}

fn is_output(name: &str) -> bool {
    name.ends_with("self_attn.o_proj.weight")
}

/// Tokens and the logits of each.
type Answer = (Vec<u32>, Vec<f32>);

struct Run {
    answers: Vec<Answer>,
    coded: Vec<(Vec<usize>, String, bool)>,
}

fn run(dir: &Path, registry: Registry, chunk: usize) -> Run {
    let options = EngineOptions {
        registry: Some(registry),
        max_num_batched_tokens: Some(chunk),
        max_num_seqs: Some(chunk.min(4)),
        ..options("auto")
    };
    let mut engine = LlmEngine::open(dir, &options, &mut |_, _| ()).unwrap();
    let rows: Arc<Mutex<HashMap<RequestId, Vec<f32>>>> = Arc::default();
    let sink = rows.clone();
    engine.observe_logits(move |id, row| sink.lock().unwrap().entry(id).or_default().extend(row));
    let ids: Vec<RequestId> = [3, 40, 90]
        .into_iter()
        .map(|n: u32| {
            let sampling =
                SamplingParams { max_tokens: Some(8), ignore_eos: true, ..SamplingParams::greedy() };
            let prompt_ids = (0..n).map(|t| 3 + (t * 17 + n) % 240).collect();
            engine.add(GenerateRequest { prompt_ids, sampling, ..GenerateRequest::default() }).unwrap()
        })
        .collect();
    let (mut events, mut said) = (vec![], HashMap::new());
    while !engine.is_idle() {
        engine.step(&mut events).unwrap();
        for e in events.drain(..) {
            match e {
                Event::Finished(id, f) => drop(said.insert(id, f.token_ids)),
                Event::Failed(_, e) => panic!("{e}"),
                Event::Token(..) => {}
            }
        }
    }
    let coded = engine.report().coded_outputs.iter();
    let coded = coded.map(|c| (c.layers.clone(), c.output.clone(), c.fused)).collect();
    let mut rows = rows.lock().unwrap();
    let answers = ids.iter().map(|id| (said.remove(id).unwrap(), rows.remove(id).unwrap())).collect();
    Run { answers, coded }
}

fn fused() -> Registry {
    headway_engine::runner::devices::registry().unwrap()
}

fn unfused() -> Registry {
    let mut registry = Registry::default();
    registry.register::<Unfused>().unwrap();
    registry
}

/// The largest difference between the logits of first tokens: later ones may follow other tokens.
fn worst(a: &Run, b: &Run) -> f32 {
    let rows = a.answers.iter().zip(&b.answers);
    let first = |(a, b): (&Answer, &Answer)| {
        let n = a.1.len() / a.0.len();
        a.1[..n].iter().zip(&b.1[..n]).fold(0f32, |m, (a, b)| m.max((a - b).abs()))
    };
    rows.map(first).fold(0f32, f32::max)
}

fn same_either_way(name: &str, at: &Path, chunk: usize) {
    let (one, two) = (run(at, fused(), chunk), run(at, unfused(), chunk));
    for (a, b) in one.answers.iter().zip(&two.answers) {
        assert_eq!(a.0, b.0, "{name}, chunk {chunk}");
        assert!(a.1.iter().zip(&b.1).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}: bit for bit");
    }
    let layers: Vec<usize> = one.coded.iter().flat_map(|c| c.0.clone()).collect();
    assert!(layers.len() > 1 && one.coded.len() == 1 && one.coded[0].2, "{:?}", one.coded);
    assert_eq!(two.coded, [(layers, "fp8 with one scale".to_owned(), false)]);
}

#[test]
fn the_small_checkpoint_runs_fused_and_not_to_the_same_bits() {
    let at = testdata::model_dir("tiny-fp8-output").unwrap();
    for chunk in [512, 16] {
        same_either_way("tiny-fp8-output", &at, chunk);
    }
}

#[test]
fn codes_written_by_the_kernel_are_those_made_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    for model in ["tiny-llama", "tiny-gemma3"] {
        // The second scale is so small that most of the output saturates.
        for input_scale in [0.01, 1e-4] {
            let at = dir.path().join(format!("{model}-{input_scale}"));
            write(model, &at, &is_output, input_scale, false);
            for chunk in [512, 16] {
                same_either_way(model, &at, chunk);
            }
        }
        // The same weights with an input that isn't rounded: near with a scale that fits, far with one that saturates.
        let twin = dir.path().join(format!("{model}-twin"));
        write(model, &twin, &is_output, 1.0, true);
        let plain = run(&twin, fused(), 512);
        assert!(plain.coded.is_empty());
        let at = |scale: f32| run(&dir.path().join(format!("{model}-{scale}")), fused(), 512);
        let (near, far) = (worst(&at(0.01), &plain), worst(&at(1e-4), &plain));
        println!("{model}: logits differ by {near} with a scale that fits, by {far} with one that saturates");
        assert!(near > 0.0 && near < far, "{model}: {near} {far}");
    }
}

#[test]
fn other_layers_and_broken_scales_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = |name: &str, model: &str, coded: &dyn Fn(&str) -> bool, scale: f32| {
        let at = dir.path().join(name);
        write(model, &at, coded, scale, false);
        LlmEngine::open(&at, &options("auto"), &mut |_, _| ()).err().unwrap().to_string()
    };
    let says = |e: String, words: &[&str]| assert!(words.iter().all(|w| e.contains(w)), "{e}");
    let down = |n: &str| n.ends_with("mlp.down_proj.weight");
    says(
        error("down", "tiny-llama", &down, 0.1),
        &["mlp.down_proj.weight", "static input scale", "output projection of softmax attention"],
    );
    says(
        error("mla", "tiny-deepseek-v2-yarn", &is_output, 0.1),
        &["o_proj.weight", "static input scale", "output projection of softmax attention"],
    );
    says(error("zero", "tiny-llama", &is_output, 0.0), &["input_scale", "not one positive number"]);
    says(error("nan", "tiny-llama", &is_output, f32::NAN), &["input_scale", "not one positive number"]);
}
