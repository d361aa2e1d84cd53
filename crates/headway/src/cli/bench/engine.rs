//! `headway bench engine`: a model's speed as a user sees it. Requests of equal length, so many of them
//! at a time; the next one starts when one ends.

use super::super::CliError;
use headway_engine::{
    Engine, Event, GenerateRequest, LlmEngine,
    runner::{StepTimes, memory},
    sampling::SamplingParams,
    scheduler::RequestId,
    speculation::SpeculationSummary,
};
use serde::Serialize;
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// What is asked of the engine.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Tokens of each prompt.
    pub prompt_len: usize,
    /// Tokens of each answer.
    pub output_len: usize,
    /// Requests at a time.
    pub concurrency: usize,
    /// Requests in all.
    pub requests: usize,
}

/// Percentiles of times, in milliseconds.
#[derive(Serialize, Debug, Clone, Copy, PartialEq)]
pub struct Percentiles {
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

/// Microseconds a step, outside the model and in it.
#[derive(Serialize, Debug)]
pub struct StepCost {
    steps: u64,
    /// Replays of captured graphs among them.
    replayed: u64,
    schedule_us: f64,
    inputs_us: f64,
    metadata_us: f64,
    /// On a device: queueing the model, or launching its graph.
    forward_us: f64,
    /// On a device: waiting for the logits, and copying them.
    wait_us: f64,
    sample_us: f64,
}

/// One measurement.
#[derive(Serialize, Debug)]
pub struct Line {
    bench: &'static str,
    peer: &'static str,
    model: String,
    device: String,
    graph_mode: String,
    #[serde(flatten)]
    load: LoadLine,
    load_s: f64,
    total_s: f64,
    /// Prompt tokens a second while only prompts ran (one request at a time), else over the whole run.
    prefill_tokens_per_s: f64,
    /// Tokens after the first a second, of one request.
    decode_tokens_per_s: f64,
    /// Tokens of all answers over the whole run.
    output_tokens_per_s: f64,
    time_to_first_token_ms: Percentiles,
    inter_token_latency_ms: Percentiles,
    step: StepCost,
    /// Where tokens are drafted.
    #[serde(skip_serializing_if = "Option::is_none")]
    speculation: Option<SpeculationSummary>,
    peak_rss_bytes: Option<u64>,
}

#[derive(Serialize, Debug)]
struct LoadLine {
    prompt_len: usize,
    output_len: usize,
    concurrency: usize,
    requests: usize,
}

/// When a request was added, and when its tokens came.
struct Trace {
    added: Instant,
    tokens: Vec<Instant>,
}

/// Runs the load once, after one short request that warms everything up.
///
/// # Errors
/// A request that the model can't take; a step that failed.
pub fn run(engine: &mut LlmEngine, load: Load) -> Result<Line, CliError> {
    let vocab_size = engine.runner().vocab_size();
    let warm = Load { output_len: 2.min(load.output_len), requests: 1, concurrency: 1, ..load };
    drive(engine, warm, 0, vocab_size)?;
    let before = engine.runner().times();
    let drafted_before = engine.speculation_stats().clone();
    let start = Instant::now();
    let traces = drive(engine, load, 1, vocab_size)?;
    let total = start.elapsed().as_secs_f64();
    let times = engine.runner().times().since(&before);
    let first: Vec<f64> = traces.iter().map(|t| ms(t.tokens[0] - t.added)).collect();
    let between: Vec<f64> =
        traces.iter().flat_map(|t| t.tokens.windows(2).map(|w| ms(w[1] - w[0]))).collect();
    let decode_s: f64 = between.iter().sum::<f64>() / 1e3;
    let prefill_s = if load.concurrency == 1 { first.iter().sum::<f64>() / 1e3 } else { total };
    let rate = |n: usize, s: f64| if s > 0.0 { n as f64 / s } else { 0.0 };
    Ok(Line {
        bench: "engine",
        peer: "headway",
        model: engine.report().model.clone(),
        device: engine.report().device.clone(),
        graph_mode: engine.report().graph_mode.in_force.clone(),
        load_s: engine.load_time().as_secs_f64(),
        total_s: total,
        prefill_tokens_per_s: rate(load.prompt_len * load.requests, prefill_s),
        decode_tokens_per_s: rate(between.len(), decode_s),
        output_tokens_per_s: rate(load.output_len * load.requests, total),
        time_to_first_token_ms: percentiles(first),
        inter_token_latency_ms: percentiles(between),
        step: cost(&times),
        speculation: engine.drafts().then(|| engine.speculation_stats().since(&drafted_before).summary()),
        peak_rss_bytes: memory::peak_rss_bytes(),
        load: LoadLine {
            prompt_len: load.prompt_len,
            output_len: load.output_len,
            concurrency: load.concurrency,
            requests: load.requests,
        },
    })
}

fn drive(engine: &mut LlmEngine, load: Load, salt: usize, vocab_size: usize) -> Result<Vec<Trace>, CliError> {
    let mut running: HashMap<RequestId, Trace> = HashMap::new();
    let (mut done, mut added, mut events) = (vec![], 0, vec![]);
    while done.len() < load.requests {
        while added < load.requests && running.len() < load.concurrency {
            let request = request(load, salt * 1_000_003 + added, vocab_size);
            let trace = Trace { added: Instant::now(), tokens: Vec::with_capacity(load.output_len) };
            running.insert(engine.add(request)?, trace);
            added += 1;
        }
        engine.step(&mut events)?;
        let now = Instant::now();
        for event in events.drain(..) {
            match event {
                Event::Token(id, _) => {
                    if let Some(t) = running.get_mut(&id) {
                        t.tokens.push(now);
                    }
                }
                Event::Finished(id, _) => done.extend(running.remove(&id)),
                Event::Failed(_, e) => return Err(e.into()),
            }
        }
    }
    Ok(done)
}

/// Prompts that share no beginning, so that no prefix is cached.
fn request(load: Load, seed: usize, vocab_size: usize) -> GenerateRequest {
    let id = |t: usize| ((seed * 7919 + t * 104_729 + 17) % vocab_size.max(1)) as u32;
    GenerateRequest {
        prompt_ids: (0..load.prompt_len).map(id).collect(),
        sampling: SamplingParams {
            max_tokens: Some(load.output_len),
            ignore_eos: true,
            ..SamplingParams::greedy()
        },
        ..GenerateRequest::default()
    }
}

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

fn percentiles(mut all: Vec<f64>) -> Percentiles {
    all.sort_by(f64::total_cmp);
    let at = |p: f64| {
        let i = ((all.len() as f64 * p).ceil() as usize).clamp(1, all.len().max(1)) - 1;
        all.get(i).copied().unwrap_or(0.0)
    };
    Percentiles { p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
}

fn cost(t: &StepTimes) -> StepCost {
    let us = |d: Duration| d.as_secs_f64() * 1e6 / t.steps.max(1) as f64;
    StepCost {
        steps: t.steps,
        replayed: t.replayed,
        schedule_us: us(t.schedule),
        inputs_us: us(t.inputs),
        metadata_us: us(t.metadata),
        forward_us: us(t.forward),
        wait_us: us(t.wait),
        sample_us: us(t.sample),
    }
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let l = &self.load;
        writeln!(f, "{} on {}", self.model, self.device)?;
        writeln!(
            f,
            "{} requests of {} + {} tokens, {} at a time: {:.2} s (loaded in {:.2} s)",
            l.requests, l.prompt_len, l.output_len, l.concurrency, self.total_s, self.load_s
        )?;
        let rates = [
            ("prefill", self.prefill_tokens_per_s),
            ("decode, a request", self.decode_tokens_per_s),
            ("output, all", self.output_tokens_per_s),
        ];
        for (name, rate) in rates {
            writeln!(f, "{name:<22} {rate:>10.1} tokens/s")?;
        }
        let times = [
            ("time to first token", self.time_to_first_token_ms),
            ("inter-token latency", self.inter_token_latency_ms),
        ];
        for (name, p) in times {
            writeln!(
                f,
                "{name:<22} {:>10.2} ms p50 {:>10.2} p90 {:>10.2} p99 {:>10.2} max",
                p.p50, p.p90, p.p99, p.max
            )?;
        }
        let s = &self.step;
        write!(
            f,
            "{:<22} {:>10.0} us in the model; outside it: schedule {:.1}, inputs {:.1}, metadata {:.1}, sampling {:.1} us ({} steps)",
            "a step",
            s.forward_us + s.wait_us,
            s.schedule_us,
            s.inputs_us,
            s.metadata_us,
            s.sample_us,
            s.steps
        )?;
        if s.wait_us >= 1.0 {
            write!(
                f,
                "\n{:<22} {:>10.1} us queueing the model, then {:.1} us until its logits are here; {} of {} steps replayed \
                 graphs ({})",
                "the host's part", s.forward_us, s.wait_us, s.replayed, s.steps, self.graph_mode
            )?;
        }
        if let Some(s) = &self.speculation {
            write!(f, "\n{:<22} {s}", "speculation")?;
        }
        match self.peak_rss_bytes {
            Some(b) => write!(f, "\n{:<22} {:>10.1} MiB", "peak memory", b as f64 / f64::from(1 << 20)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_list() {
        let p = percentiles((1..=100).map(f64::from).rev().collect());
        assert_eq!(p, Percentiles { p50: 50.0, p90: 90.0, p99: 99.0, max: 100.0 });
        assert_eq!(percentiles(vec![]), Percentiles { p50: 0.0, p90: 0.0, p99: 0.0, max: 0.0 });
    }

    #[test]
    fn prompts_share_no_first_block() {
        let load = Load { prompt_len: 16, output_len: 1, concurrency: 1, requests: 2 };
        let ids = |seed| request(load, seed, 500).prompt_ids;
        assert_ne!(ids(1), ids(2));
        assert!(ids(1).iter().all(|id| *id < 500));
    }
}
