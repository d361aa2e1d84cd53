//! A step that memory doesn't suffice for ends the request that asked most of it; the others get the answers that they
//! get alone.

mod support;

use headway_attention::{
    AttentionBackend, BuilderPlan, CommonAttentionMetadata, GroupInfo, LayerNeed, MetadataBuilder, Refusal,
    Registry, Result, RuleBook, Standard,
};
use headway_cpu::{
    CpuAttn, CpuExec,
    backends::cpu_attn::{CpuAttnBuilder, CpuAttnConfig, CpuAttnLayer},
};
use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine, engine::RequestError, kv::RequestId,
    sampling::SamplingParams,
};
use headway_tensor::TensorError;
use headway_testkit::testdata;
use std::collections::BTreeMap;
use support::options;

/// `CPU_ATTN` with memory for steps of so many new tokens.
enum Scarce {}

const ENOUGH: usize = 40;

struct ScarceBuilder(CpuAttnBuilder);

impl AttentionBackend for Scarce {
    const CONTRACT: u32 = 1;
    type Exec = CpuExec;
    type Kind = Standard;
    type Config = CpuAttnConfig;
    type Builder = ScarceBuilder;
    type Impl = CpuAttnLayer;

    fn rules() -> RuleBook {
        RuleBook { name: "SCARCE".into(), ..CpuAttn::rules() }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        CpuAttn::combination(need)
    }
}

impl MetadataBuilder for ScarceBuilder {
    type Exec = CpuExec;
    type Config = CpuAttnConfig;
    type Metadata = <CpuAttnBuilder as MetadataBuilder>::Metadata;

    fn plan(group: &GroupInfo, rules: &RuleBook, config: &CpuAttnConfig) -> Result<BuilderPlan> {
        CpuAttnBuilder::plan(group, rules, config)
    }

    fn new(cx: &CpuExec, group: &GroupInfo, plan: &BuilderPlan, config: &CpuAttnConfig) -> Result<Self> {
        Ok(Self(CpuAttnBuilder::new(cx, group, plan, config)?))
    }

    fn build(&mut self, cx: &CpuExec, common: &CommonAttentionMetadata) -> Result<Self::Metadata> {
        let tokens = common.inputs.num_actual_tokens;
        if tokens > ENOUGH {
            let what = "cpu (1 of 2 bytes are free)".into();
            return Err(TensorError::OutOfMemory { what, bytes: tokens as u64 }.into());
        }
        self.0.build(cx, common)
    }
}

/// Each request's tokens, or why it failed.
type Answers = BTreeMap<RequestId, std::result::Result<Vec<u32>, String>>;

fn run(prompts: &[usize]) -> (Vec<RequestId>, Answers) {
    let mut registry = Registry::default();
    registry.register::<Scarce>().unwrap();
    let options = EngineOptions {
        registry: Some(registry),
        max_num_batched_tokens: Some(256),
        max_num_seqs: Some(8),
        ..options("auto")
    };
    let dir = testdata::model_dir("tiny-llama").unwrap();
    let mut engine = LlmEngine::open(&dir, &options, &mut |_, _| ()).unwrap();
    let (mut ids, mut answers, mut events) = (vec![], Answers::new(), vec![]);
    let mut next = prompts.iter();
    // One joins every two steps, so that prompts meet requests that decode.
    for step in 0.. {
        if step % 2 == 0
            && let Some(&n) = next.next()
        {
            let sampling =
                SamplingParams { max_tokens: Some(12), ignore_eos: true, ..SamplingParams::greedy() };
            let prompt_ids = (0..n as u32).map(|t| 3 + (t * 17 + n as u32) % 240).collect();
            let request = GenerateRequest { prompt_ids, sampling, ..GenerateRequest::default() };
            ids.push(engine.add(request).unwrap());
        }
        if engine.is_idle() && next.len() == 0 {
            break;
        }
        engine.step(&mut events).unwrap();
        for e in events.drain(..) {
            match e {
                Event::Token(..) => {}
                Event::Finished(id, f) => drop(answers.insert(id, Ok(f.token_ids))),
                Event::Failed(id, e) => {
                    assert!(matches!(e, RequestError::OutOfMemory(_)));
                    answers.insert(id, Err(e.to_string()));
                }
            }
        }
    }
    // Every page was given back.
    assert_eq!(engine.scheduler().kv().usage().used_pages, 0);
    (ids, answers)
}

#[test]
fn the_request_that_asks_too_much_ends_and_the_others_go_on() {
    let (ids, answers) = run(&[5, 9, 60, 20, 70, 3]);
    for (id, prompt) in ids.iter().zip([5, 9, 60, 20, 70, 3]) {
        let answer = &answers[id];
        if prompt > ENOUGH {
            let e = answer.as_ref().unwrap_err();
            let words = [
                "out of memory: ",
                "bytes for cpu (1 of 2 bytes are free)",
                "lower --max-num-batched-tokens",
            ];
            assert!(words.iter().all(|w| e.contains(w)), "{e}");
            continue;
        }
        let (alone, lone) = run(&[prompt]);
        assert_eq!(answer, &lone[&alone[0]], "a prompt of {prompt}");
        assert_eq!(answer.as_ref().map(Vec::len), Ok(12));
    }
}
