//! Tokens chosen on a device against the host's sampler on the same logits: every parameter alone and with others,
//! vocabularies that are multiples of nothing, ties, masks, logits that nothing can be chosen from. The tokens are the same,
//! and rows without an answer come back without one. Then a model's answers with the device choosing for all requests, for
//! some and for none, drafts verified or not. Then how long the device takes for 32 rows, and how long the host.
//!
//! `sampling_equality cuda:0 [config.json]`. Where that device is not there, nothing is run. With a config: also what a
//! decode step of 32 requests costs with random weights of its shapes, chosen from by the device and by the host.

use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine,
    kv::RequestId,
    options::LoadFormat,
    runner::devices,
    sampling::{Row, Sampler, SamplingParams, uniform},
};
use headway_tensor::{Ops, RowChoice, RowSampler, Tensor};
use headway_testkit::testdata;
use std::{collections::BTreeMap, process::ExitCode, time::Instant};

const ROWS: usize = 64;
const VOCABULARIES: [usize; 10] = [1, 2, 31, 257, 1024, 5003, 32_000, 49_152, 128_001, 262_144];
const KINDS: usize = 7;

/// Numbers of `[0, 1)`, the same in every run.
struct Random {
    seed: u64,
    next: u64,
}

impl Random {
    fn uniform(&mut self) -> f64 {
        self.next += 1;
        uniform(self.seed, self.next)
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[(self.uniform() * of.len() as f64) as usize]
    }
}

/// Fast noise for logits: SplitMix64.
fn noise(at: u64) -> f32 {
    let z = at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32
}

/// A row of a kind: like a model's, flat, steep, in steps, all the same, mostly impossible, or broken.
fn row(kind: usize, vocab: usize, seed: u64) -> Vec<f32> {
    let bell = |i: usize| {
        let n = |j: u64| noise(seed << 40 | (i as u64) << 3 | j);
        n(0) + n(1) + n(2) + n(3) - 2.0
    };
    let mut row: Vec<f32> = match kind {
        0 => (0..vocab)
            .map(|i| bell(i) * 4.0 + if noise(seed ^ i as u64) > 0.999 { 9.0 } else { 0.0 })
            .collect(),
        1 => (0..vocab).map(|i| bell(i) * 0.01).collect(),
        2 => (0..vocab).map(|i| bell(i) * 60.0).collect(),
        3 => (0..vocab).map(|i| (bell(i) * 8.0).round() * 0.5).collect(),
        4 => vec![if seed.is_multiple_of(2) { -3.25 } else { 0.0 }; vocab],
        _ => (0..vocab)
            .map(|i| if noise(seed ^ i as u64) > 0.02 { f32::NEG_INFINITY } else { bell(i) })
            .collect(),
    };
    if kind == 3 {
        row.iter_mut().step_by(3).filter(|x| **x == 0.0).for_each(|x| *x = -0.0);
    }
    if kind == 6 {
        let broken = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][seed as usize % 3];
        match broken {
            f32::NEG_INFINITY => row.fill(broken),
            _ => row[seed as usize % vocab] = broken,
        }
    }
    row
}

fn params(random: &mut Random, vocab: usize) -> SamplingParams {
    SamplingParams {
        temperature: random.one_of(&[0.0, 0.7, 1.0, 1.0, 1.7, 1e-3, f32::MIN_POSITIVE, 30.0]),
        top_k: random.one_of(&[0, 0, 1, 2, 20, 50, 1000, 1024, 1500, vocab / 2, vocab, vocab + 9]),
        top_p: random.one_of(&[1.0, 1.0, 0.95, 0.9, 0.5, 0.3, 0.999_999, f32::MIN_POSITIVE]),
        min_p: random.one_of(&[0.0, 0.0, 0.0, 0.05, 0.5, 1.0]),
        repetition_penalty: random.one_of(&[1.0, 1.0, 1.3, 0.7, 1e-38]),
        ..SamplingParams::default()
    }
}

/// Rows with their parameters and histories, as both sides take them.
struct Batch {
    vocab: usize,
    logits: Vec<f32>,
    params: Vec<SamplingParams>,
    tokens: Vec<Vec<u32>>,
}

impl Batch {
    fn new(vocab: usize, kind: usize, round: u64) -> Self {
        let mut random = Random { seed: 5 + round + 100 * kind as u64, next: vocab as u64 * 1000 };
        let logits = (0..ROWS).flat_map(|i| row(kind, vocab, round * 1000 + i as u64)).collect();
        let params = (0..ROWS).map(|_| params(&mut random, vocab)).collect();
        let mut history =
            |i: usize| -> Vec<u32> { (0..i * 3).map(|_| (random.uniform() * vocab as f64) as u32).collect() };
        Self { vocab, logits, params, tokens: (0..ROWS).map(&mut history).collect() }
    }

    fn row(&self, i: usize) -> Row<'_> {
        let (tokens, drafted) = self.tokens[i].split_at(self.tokens[i].len() / 2);
        Row { drafted, ..Row::new(&self.params[i], tokens, 77 + i as u64) }
    }

    fn on_host(&self, sampler: &mut Sampler) -> Vec<Option<u32>> {
        let mut logits = self.logits.clone();
        let rows = logits.chunks_exact_mut(self.vocab).enumerate();
        rows.map(|(i, logits)| sampler.sample(logits, &self.row(i)).ok().map(|s| s.token)).collect()
    }

    /// The device's tokens, and microseconds that choosing took.
    fn on_device(
        &self,
        ops: &dyn Ops,
        sampler: &mut dyn RowSampler,
    ) -> Result<(Vec<Option<u32>>, f64), String> {
        let mut logits = Tensor::from_slice(ops, &self.logits, &[ROWS, self.vocab]).map_err(text)?;
        // Waits until the logits are there.
        ops.read(logits.view().rows(0..1).map_err(text)?, &mut vec![0; self.vocab * 4]).map_err(text)?;
        let start = Instant::now();
        for i in 0..self.params.len() {
            let (row, p) = (self.row(i), &self.params[i]);
            let choice = RowChoice {
                row: i,
                temperature: p.temperature,
                top_k: p.top_k,
                top_p: p.top_p,
                min_p: p.min_p,
                repetition_penalty: p.repetition_penalty,
                history: [row.tokens, row.drafted],
                uniform: uniform(row.seed, self.tokens[i].len() as u64),
            };
            if !sampler.push(&choice) {
                return Err(format!("row {i} was not taken"));
            }
        }
        let mut tokens = vec![];
        sampler.choose(ops, logits.view_mut(), &mut tokens).map_err(text)?;
        Ok((tokens, start.elapsed().as_secs_f64() * 1e6))
    }
}

fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

fn equality(ops: &dyn Ops, rounds: u64) -> Result<bool, String> {
    let mut host = Sampler::new();
    let mut all_same = true;
    for vocab in VOCABULARIES {
        let mut device = ops.row_sampler(ROWS, vocab).map_err(text)?.ok_or("the device chooses nothing")?;
        let (mut rows, mut without, mut other) = (0, 0, vec![]);
        // The larger ones take the host long.
        for round in 0..if vocab > 40_000 { 1 } else { rounds } {
            for kind in 0..KINDS {
                let batch = Batch::new(vocab, kind, round);
                let (expected, (found, _)) = (batch.on_host(&mut host), batch.on_device(ops, &mut *device)?);
                for (i, (e, f)) in expected.iter().zip(&found).enumerate() {
                    rows += 1;
                    without += usize::from(e.is_none());
                    if e != f {
                        let p = &batch.params[i];
                        other.push(format!(
                            "kind {kind} row {i}: {f:?} for {e:?} (temperature {}, top-k {}, top-p {}, min-p {}, penalty {})",
                            p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty
                        ));
                    }
                }
            }
        }
        println!("vocabulary {vocab}: {rows} rows, {without} without an answer, {} differ", other.len());
        other.iter().take(5).for_each(|o| println!("  {o}"));
        all_same &= other.is_empty();
    }
    Ok(all_same)
}

/// Answers of eighteen requests of every kind; those that `told` says ask for log-probabilities, so that the host chooses.
fn answers(
    device: &str,
    drafts: usize,
    told: impl Fn(usize) -> bool,
) -> Result<BTreeMap<RequestId, Vec<u32>>, String> {
    let options = EngineOptions {
        device: Some(device.into()),
        batch_invariant: true,
        speculative_tokens: (drafts > 0).then_some(drafts),
        kv_cache_memory: Some(64 << 20),
        max_num_seqs: Some(18),
        no_prefix_caching: true,
        ..EngineOptions::default()
    };
    let dir = testdata::model_dir("tiny-llama").map_err(text)?;
    let mut engine = LlmEngine::open(&dir, &options, &mut |_, _| ()).map_err(text)?;
    let base = SamplingParams { max_tokens: Some(40), ignore_eos: true, ..SamplingParams::default() };
    let ways = [
        SamplingParams { temperature: 0.0, ..base.clone() },
        SamplingParams { temperature: 0.9, ..base.clone() },
        SamplingParams { top_k: 20, ..base.clone() },
        SamplingParams { top_p: 0.8, repetition_penalty: 1.2, ..base.clone() },
        SamplingParams { temperature: 0.0, repetition_penalty: 1.5, ..base.clone() },
        SamplingParams { min_p: 0.1, temperature: 1.3, top_k: 60, top_p: 0.95, ..base.clone() },
        // What follows is the host's among rows of the device.
        SamplingParams { temperature: 0.0, presence_penalty: 0.7, frequency_penalty: 0.4, ..base.clone() },
        SamplingParams {
            logit_bias: [(5, -100.0), (9, 2.0)].into(),
            frequency_penalty: -0.3,
            ..base.clone()
        },
        // The host's until it may end, then the device's.
        SamplingParams { min_tokens: 25, stop_token_ids: (0..40).collect(), ..base },
    ];
    for i in 0..18 {
        let sampling = SamplingParams {
            seed: Some(i as u64 * 31 + 1),
            logprobs: told(i).then_some(0),
            ..ways[i % ways.len()].clone()
        };
        // Each says something twice, so that there is something to draft from.
        let prompt_ids = (0..20 + i).map(|t| ((t % 7) * 11 + i * 3 + 2) as u32).collect();
        engine.add(GenerateRequest { prompt_ids, sampling, ..GenerateRequest::default() }).map_err(text)?;
    }
    let (mut done, mut events) = (BTreeMap::new(), vec![]);
    while !engine.is_idle() {
        engine.step(&mut events).map_err(text)?;
        for event in events.drain(..) {
            match event {
                Event::Finished(id, f) => drop(done.insert(id, f.token_ids)),
                Event::Failed(_, e) => return Err(e.to_string()),
                Event::Token(..) => {}
            }
        }
    }
    Ok(done)
}

fn engines(device: &str) -> Result<bool, String> {
    let host = answers(device, 0, |_| true)?;
    let mut all_same = true;
    for (name, drafts, found) in [
        ("all on the device", 0, answers(device, 0, |_| false)?),
        ("every second", 0, answers(device, 0, |i| i % 2 == 1)?),
        ("all on the device", 2, answers(device, 2, |_| false)?),
        ("every third", 3, answers(device, 3, |i| i % 3 == 1)?),
    ] {
        let same = host.iter().filter(|(id, tokens)| found.get(id) == Some(tokens)).count();
        println!("{name}, {drafts} drafts: {same} of {} answers are those that the host chose", host.len());
        all_same &= same == host.len();
    }
    Ok(all_same)
}

fn figures(ops: &dyn Ops) -> Result<(), String> {
    const TIMED: usize = 32;
    let base = SamplingParams::default();
    let ways = [
        ("greedy", SamplingParams::greedy()),
        ("temperature 0.8", SamplingParams { temperature: 0.8, ..base.clone() }),
        ("top-p 0.95", SamplingParams { top_p: 0.95, ..base.clone() }),
        ("top-k 50", SamplingParams { top_k: 50, ..base.clone() }),
        ("top-k 50, top-p 0.95", SamplingParams { top_k: 50, top_p: 0.95, ..base.clone() }),
        ("top-k 2000", SamplingParams { top_k: 2000, ..base.clone() }),
        ("penalty 1.1, top-p 0.95", SamplingParams { repetition_penalty: 1.1, top_p: 0.95, ..base }),
    ];
    for vocab in [49_152, 128_256] {
        let mut device = ops.row_sampler(ROWS, vocab).map_err(text)?.ok_or("the device chooses nothing")?;
        for (name, way) in &ways {
            let mut batch = Batch::new(vocab, 0, 1);
            batch.params = vec![way.clone(); TIMED];
            let mut device_us: Vec<f64> = vec![];
            for _ in 0..9 {
                device_us.push(batch.on_device(ops, &mut *device)?.1);
            }
            device_us.sort_by(f64::total_cmp);
            batch.logits.truncate(TIMED * vocab);
            let (mut host, mut host_us) = (Sampler::new(), f64::INFINITY);
            for _ in 0..3 {
                let mut logits = batch.logits.clone();
                let start = Instant::now();
                for (i, row) in logits.chunks_exact_mut(vocab).enumerate() {
                    host.sample(row, &batch.row(i)).map_err(text)?;
                }
                host_us = host_us.min(start.elapsed().as_secs_f64() * 1e6);
            }
            println!(
                "{TIMED} rows of {vocab}, {name}: device {:.0} us (least {:.0}), host {host_us:.0} us",
                device_us[4], device_us[0]
            );
        }
    }
    Ok(())
}

/// Means of the decode steps of 32 requests, in microseconds.
fn steps(device: &str, config: &str) -> Result<(), String> {
    const REQUESTS: usize = 32;
    let options = EngineOptions {
        device: Some(device.into()),
        load_format: LoadFormat::Dummy,
        max_num_seqs: Some(REQUESTS),
        ..EngineOptions::default()
    };
    let mut engine = LlmEngine::open(config.as_ref(), &options, &mut |_, _| ()).map_err(text)?;
    let drawn = SamplingParams { top_k: 50, top_p: 0.95, ..SamplingParams::default() };
    for (name, way) in [
        ("greedy, on the device", SamplingParams::greedy()),
        ("top-k 50 and top-p 0.95, on the device", drawn.clone()),
        (
            "greedy, with log-probabilities, so on the host",
            SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() },
        ),
        ("top-k 50 and top-p 0.95, on the host", SamplingParams { logprobs: Some(0), ..drawn }),
    ] {
        for i in 0..REQUESTS {
            let sampling = SamplingParams {
                max_tokens: Some(201),
                ignore_eos: true,
                seed: Some(i as u64),
                ..way.clone()
            };
            let prompt_ids = (0..128).map(|t| ((t * 31 + i * 7) % 1000) as u32).collect();
            engine
                .add(GenerateRequest { prompt_ids, sampling, ..GenerateRequest::default() })
                .map_err(text)?;
        }
        let (mut events, mut decodes, mut took) = (vec![], None, vec![]);
        while !engine.is_idle() {
            let before = engine.runner().times();
            let start = Instant::now();
            engine.step(&mut events).map_err(text)?;
            events.clear();
            if engine.runner().times().replayed > before.replayed {
                took.push(start.elapsed().as_secs_f64() * 1e6);
                decodes.get_or_insert(before);
            }
        }
        let Some(before) = decodes else { return Err("no step was replayed".into()) };
        let t = engine.runner().times().since(&before);
        let us = |d: std::time::Duration| d.as_secs_f64() * 1e6 / t.steps as f64;
        took.sort_by(f64::total_cmp);
        println!(
            "{name}: {} steps, schedule {:.1}, inputs {:.1}, metadata {:.1}, queue {:.1}, wait {:.1}, sample {:.1}, \
             median of all {:.1} us",
            t.steps,
            us(t.schedule),
            us(t.inputs),
            us(t.metadata),
            us(t.forward),
            us(t.wait),
            us(t.sample),
            took[took.len() / 2]
        );
    }
    Ok(())
}

fn run(device: &str, config: Option<&str>) -> Result<bool, String> {
    let options = EngineOptions { device: Some(device.into()), ..EngineOptions::default() };
    let open = match devices::open(&options) {
        Ok(open) => open,
        Err(e) => {
            println!("not run: {e}");
            return Ok(true);
        }
    };
    println!("{}", open.description);
    let same = equality(&*open.ops, 8)?;
    let engines = engines(device)?;
    figures(&*open.ops)?;
    drop(open);
    if let Some(config) = config {
        steps(device, config)?;
    }
    Ok(same && engines)
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let device = args.first().map_or("cuda:0", String::as_str);
    match run(device, args.get(1).map(String::as_str)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
