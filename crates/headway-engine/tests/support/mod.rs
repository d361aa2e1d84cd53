//! The engine as the golden walk sees it, and where the real models are.
#![allow(dead_code, reason = "each test uses its part")]

pub mod llama;

use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine,
    kv::RequestId,
    sampling::SamplingParams,
    sources::{self, FetchOptions, ModelSpec, NoProgress},
};
use headway_testkit::{
    golden::{
        check::Compute,
        walk::{self, Generated, Generates, Prompt, Table},
    },
    testdata,
};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

/// The golden of one tiny model, alone and batched.
pub fn walk_of(model: &str, compute: Compute, way: &str, options: &EngineOptions) -> Table {
    let mut table = walk::all_tiny(compute, way, |golden, dir| {
        let ours = golden.model.name == model;
        ours.then(|| UnderTest::open(dir, options).map(|e| Box::new(e) as Box<dyn Generates>)).transpose()
    })
    .unwrap();
    table.not_run.clear();
    table
}

/// An engine that remembers the first logits of each request.
pub struct UnderTest {
    pub engine: LlmEngine,
    first_logits: Arc<Mutex<HashMap<RequestId, Vec<f32>>>>,
}

impl UnderTest {
    pub fn open(path: &Path, options: &EngineOptions) -> Result<Self, String> {
        let mut engine = LlmEngine::open(path, options, &mut |_, _| ()).map_err(|e| e.to_string())?;
        let first_logits = Arc::new(Mutex::new(HashMap::new()));
        let sink = first_logits.clone();
        engine.observe_logits(move |id, row| {
            sink.lock().unwrap().entry(id).or_insert_with(|| row.to_vec());
        });
        Ok(Self { engine, first_logits })
    }

    fn generate(&mut self, prompts: &[Prompt<'_>]) -> Result<Vec<Generated>, String> {
        let mut ids = vec![];
        for p in prompts {
            let sampling = SamplingParams {
                max_tokens: Some(p.max_new),
                ignore_eos: true,
                stop_token_ids: p.stop.to_vec(),
                ..SamplingParams::greedy()
            };
            let request = GenerateRequest {
                prompt_ids: p.ids.to_vec(),
                encoder_ids: p.encoder_ids.to_vec(),
                sampling,
                ..GenerateRequest::default()
            };
            ids.push(self.engine.add(request).map_err(|e| e.to_string())?);
        }
        let mut done: HashMap<RequestId, Vec<u32>> = HashMap::new();
        let mut events = vec![];
        while !self.engine.is_idle() {
            self.engine.step(&mut events).map_err(|e| e.to_string())?;
            for event in events.drain(..) {
                match event {
                    Event::Finished(id, f) => drop(done.insert(id, f.token_ids)),
                    Event::Failed(_, e) => return Err(e.to_string()),
                    Event::Token(..) => {}
                }
            }
        }
        let mut logits = self.first_logits.lock().map_err(|e| e.to_string())?;
        ids.iter()
            .map(|id| {
                let missing = || format!("request {id} gave nothing");
                let first_logits = logits.remove(id).ok_or_else(missing)?;
                Ok(Generated { first_logits, ids: done.remove(id).ok_or_else(missing)? })
            })
            .collect()
    }
}

impl Generates for UnderTest {
    fn run(&mut self, prompt: Prompt<'_>) -> Result<Generated, String> {
        self.generate(&[prompt])?.pop().ok_or_else(|| "no answer".into())
    }

    fn run_batch(&mut self, prompts: &[Prompt<'_>]) -> Result<Vec<Generated>, String> {
        self.generate(prompts)
    }
}

/// Options of a small cache in this dtype.
pub fn options(dtype: &str) -> EngineOptions {
    EngineOptions {
        dtype: dtype.parse().unwrap_or_default(),
        kv_cache_memory: Some(256 << 20),
        ..EngineOptions::default()
    }
}

/// Architectures that the engine runs, by what a tiny golden says.
pub fn is_known(architecture: &str) -> bool {
    headway_engine::models::arch::known().split(&[',', ';'][..]).any(|k| k.trim() == architecture)
}

/// A real model by its name and the file name in a models directory: from `HEADWAY_MODELS_DIR`, or fetched
/// once into `target/models`.
pub fn real_model(name: &str, file: &str) -> Result<PathBuf, String> {
    if let Some(path) = testdata::real_model(file).map_err(|e| e.to_string())? {
        return Ok(path);
    }
    let mut fetch = FetchOptions::from_env().map_err(|e| e.to_string())?;
    fetch.cache_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/models");
    // The goldens are those of the GGUF files, so the hub's safetensors would not do.
    fetch.hub_offline = true;
    let spec = ModelSpec::parse(name).map_err(|e| e.to_string())?;
    sources::resolve(&spec, &fetch, &NoProgress).map(|r| r.path).map_err(|e| e.to_string())
}
