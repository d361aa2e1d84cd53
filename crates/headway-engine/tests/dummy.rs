//! `--load-format dummy`: a config alone is enough to run a model's shapes.

use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine, loading, models::dummy, options::LoadFormat,
    sampling::SamplingParams,
};
use headway_testkit::testdata;
use std::collections::BTreeSet;

const MODELS: [&str; 17] = [
    "tiny-llama",
    "tiny-llama-rope-scaling",
    "tiny-mistral",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-gemma2",
    "tiny-gemma3",
    "tiny-phi3",
    "tiny-olmo2",
    "tiny-qwen3-moe",
    "tiny-gpt-oss",
    "tiny-deepseek-v2-yarn",
    "tiny-mamba2",
    "tiny-bamba",
    "tiny-nemotron-h",
    "tiny-falcon-h1",
    "tiny-granitemoehybrid",
];

#[test]
fn every_tensor_of_a_checkpoint_in_its_shape() {
    for model in MODELS {
        let dir = testdata::model_dir(model).unwrap();
        let real = loading::open(&dir).unwrap().checkpoint;
        let random = dummy::open(&dir.join("config.json")).unwrap().checkpoint;
        let names = |c: &dyn loading::Checkpoint| -> BTreeSet<String> {
            let all = c.names().into_iter().filter(|n| !n.ends_with("inv_freq"));
            all.map(str::to_owned).collect()
        };
        assert_eq!(names(&*real), names(&*random), "{model}");
        let mut bytes = 0;
        for name in random.names() {
            let weight = random.get(name).unwrap();
            assert_eq!(weight.shape(), real.get(name).unwrap().shape(), "{model}: {name}");
            bytes += weight.bytes().len() as u64;
        }
        assert_eq!(bytes, random.total_bytes(), "{model}");
    }
}

#[test]
fn a_config_alone_runs() {
    let dir = tempfile::tempdir().unwrap();
    let from = testdata::model_dir("tiny-gemma3").unwrap().join("config.json");
    std::fs::copy(from, dir.path().join("config.json")).unwrap();
    let options = EngineOptions { load_format: LoadFormat::Dummy, ..EngineOptions::default() };
    let answer = || {
        let mut engine = LlmEngine::open(dir.path(), &options, &mut |_, _| ()).unwrap();
        assert!(engine.report().warnings.iter().any(|w| w.contains("weights are random")));
        let sampling = SamplingParams { max_tokens: Some(8), ignore_eos: true, ..SamplingParams::greedy() };
        let request = GenerateRequest { prompt_ids: vec![1, 2, 3], sampling, ..GenerateRequest::default() };
        engine.add(request).unwrap();
        let mut events = vec![];
        while !engine.is_idle() {
            engine.step(&mut events).unwrap();
        }
        let finished = events.iter().find_map(|e| match e {
            Event::Finished(_, f) => Some(f.token_ids.clone()),
            _ => None,
        });
        finished.unwrap()
    };
    let first = answer();
    assert_eq!(first.len(), 8);
    assert_eq!(first, answer());
}

#[test]
fn what_has_no_config_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let message = |path: &std::path::Path| dummy::open(path).err().map(|e| e.to_string()).unwrap();
    assert!(message(dir.path()).contains("config.json"));
    let gguf = dir.path().join("model.gguf");
    std::fs::write(&gguf, b"GGUF").unwrap();
    assert!(message(&gguf).contains("leave the option out"));
    let config = dir.path().join("config.json");
    std::fs::write(&config, r#"{"architectures": ["LlamaForCausalLM"], "torch_dtype": "int4"}"#).unwrap();
    assert!(message(&config).contains("bfloat16, float16, float32"));
}
