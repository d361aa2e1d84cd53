//! Where the time of decode steps goes, by graph mode: what the host spends on choosing requests, inputs, metadata and
//! queueing the model, and how long it then waits. Random weights, greedy answers; steps with prefills are not counted.
//!
//! `host_time DEVICE FOLDER [REQUESTS…]`, with a `config.json` in the folder; 32 requests unless given.
//! `HEADWAY_ATTENTION_BACKEND` names the backend, as it does for `headway`, and `HEADWAY_GRAPH_MODE` the only mode to run.

use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine, options::LoadFormat, runner::StepTimes,
    sampling::SamplingParams,
};
use std::{path::Path, process::ExitCode, time::Duration};

const PROMPT: usize = 128;
const ANSWER: usize = 400;
const MODES: [&str; 5] = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE"];

fn measure(device: &str, model: &Path, mode: &str, requests: usize) -> Result<String, String> {
    let options = EngineOptions {
        device: Some(device.into()),
        attention_backend: std::env::var("HEADWAY_ATTENTION_BACKEND").ok(),
        graph_mode: (device != "cpu").then(|| mode.into()),
        load_format: LoadFormat::Dummy,
        max_num_seqs: Some(requests),
        max_model_len: Some(8192),
        no_prefix_caching: true,
        ..EngineOptions::default()
    };
    let mut engine = LlmEngine::open(model, &options, &mut |_, _| ()).map_err(|e| e.to_string())?;
    let vocab = engine.runner().vocab_size();
    for i in 0..requests {
        let sampling =
            SamplingParams { max_tokens: Some(ANSWER), ignore_eos: true, ..SamplingParams::greedy() };
        let prompt_ids = (0..PROMPT).map(|t| ((i * 7919 + t * 104_729 + 17) % vocab) as u32).collect();
        let request = GenerateRequest { prompt_ids, sampling, ..GenerateRequest::default() };
        engine.add(request).map_err(|e| e.to_string())?;
    }
    let (mut events, mut begun, mut first) = (vec![], 0, None);
    let mut done = StepTimes::default();
    while !engine.is_idle() {
        engine.step(&mut events).map_err(|e| e.to_string())?;
        let mut ended = false;
        for event in events.drain(..) {
            match event {
                Event::Token(..) => begun += 1,
                Event::Finished(..) => ended = true,
                Event::Failed(_, e) => return Err(e.to_string()),
            }
        }
        let now = engine.runner().times();
        // All decode from here on; the first such steps warm up.
        if begun >= 10 * requests {
            let from: &StepTimes = first.get_or_insert(now);
            if !ended {
                done = now.since(from);
            }
        }
    }
    let us = |d: Duration| d.as_secs_f64() * 1e6 / done.steps.max(1) as f64;
    let outside = [done.schedule, done.inputs, done.metadata, done.forward];
    let graphs = &engine.report().graph_mode;
    let captured = graphs.captured.as_ref().map_or(String::new(), |c| {
        format!(
            "; captured {} whole ({} nodes) and {} in pieces ({} nodes) in {:.2} s, {} KiB",
            c.sizes.len(),
            c.nodes,
            c.piecewise_sizes.len(),
            c.piecewise_nodes,
            c.seconds,
            c.bytes >> 10
        )
    });
    Ok(format!(
        "{requests} requests, {} in force, {} of {} steps replayed: schedule {:.1} us, inputs {:.1}, metadata {:.1}, queue {:.1}, \
         together {:.1}; wait {:.1}, sample {:.1}{captured}",
        graphs.in_force,
        done.replayed,
        done.steps,
        us(done.schedule),
        us(done.inputs),
        us(done.metadata),
        us(done.forward),
        us(outside.iter().sum()),
        us(done.wait),
        us(done.sample)
    ))
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [device, model, counts @ ..] = &args[..] else {
        eprintln!("host_time DEVICE FOLDER [REQUESTS…]");
        return ExitCode::FAILURE;
    };
    let counts: Vec<usize> = counts.iter().filter_map(|c| c.parse().ok()).collect();
    let counts = if counts.is_empty() { vec![32] } else { counts };
    let only = std::env::var("HEADWAY_GRAPH_MODE").ok();
    let modes = match (device.as_str(), &only) {
        ("cpu", _) => MODES[..1].to_vec(),
        (_, Some(mode)) => vec![mode.as_str()],
        _ => MODES.to_vec(),
    };
    for &requests in &counts {
        for mode in &modes {
            match measure(device, Path::new(model), mode, requests) {
                Ok(text) => println!("{text}"),
                Err(e) => {
                    eprintln!("{mode}, {requests} requests: {e}");
                    return ExitCode::FAILURE;
                }
            }
        }
    }
    ExitCode::SUCCESS
}
