//! Steps replayed from graphs against the same steps run without: requests join and leave between steps, batch sizes lie
//! at and between the captured ones. With `--batch-invariant` every logit is the same bit for bit; without it the same
//! tokens are chosen up to the first close choice.
//!
//! `graph_equality cuda:0 [MODEL]…`: tiny models of the project by name, others by path; without names some of the tiny ones.
//! `HEADWAY_LOAD_FORMAT=dummy` gives a path's configuration random weights. Where that device is not there the cases are listed as not run.
//! `HEADWAY_ATTENTION_BACKEND` names the backend, as it does for `headway`; the cases that it refuses are listed as refused.

#[path = "../tests/support/mod.rs"]
mod support;

use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine, kv::RequestId, options::LoadFormat,
    sampling::SamplingParams,
};
use headway_testkit::testdata;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::ExitCode,
    sync::{Arc, Mutex},
};

/// The last two capture decodes alone: of latent attention those with as many tokens each, which drafts rarely leave; the
/// Mamba-2 layers of a hybrid take no drafts.
const MODELS: [&str; 4] = ["tiny-llama", "tiny-gemma3", "tiny-deepseek-v2-yarn", "tiny-bamba"];
const WITHOUT_DRAFTS: [&str; 2] = ["tiny-deepseek", "tiny-bamba"];
/// Two logits this close may change places where sums are added in another order.
const CLOSE: f32 = 0.05;
/// Requests: the step before which each joins, tokens of its prompt, tokens of its answer. Up to nine at once.
const COMPANY: [(usize, usize, usize); 16] = [
    (0, 5, 30),
    (2, 9, 12),
    (3, 3, 4),
    (5, 17, 20),
    (5, 1, 9),
    (6, 30, 25),
    (7, 12, 3),
    (8, 2, 14),
    (8, 40, 8),
    (9, 7, 6),
    (9, 4, 18),
    (10, 21, 5),
    (14, 6, 7),
    (15, 11, 11),
    (22, 8, 10),
    (40, 3, 6),
];

/// A way to run, by its name.
struct Way {
    mode: &'static str,
    batch_invariant: bool,
    drafts: usize,
}

/// Each request's tokens, and the logits that they were chosen from.
type Answers = BTreeMap<RequestId, (Vec<u32>, Vec<Vec<f32>>)>;

struct Run {
    answers: Answers,
    replayed: u64,
    steps: u64,
    captured: [Vec<usize>; 2],
    in_force: String,
    lowered: Vec<String>,
    sizes: BTreeSet<usize>,
}

fn run(device: &str, dir: &Path, mode: &str, way: &Way) -> Result<Run, String> {
    let options = EngineOptions {
        device: Some(device.into()),
        attention_backend: std::env::var("HEADWAY_ATTENTION_BACKEND").ok(),
        graph_mode: Some(mode.into()),
        load_format: match std::env::var("HEADWAY_LOAD_FORMAT").as_deref() {
            Ok("dummy") => LoadFormat::Dummy,
            Ok(other) => return Err(format!("HEADWAY_LOAD_FORMAT={other}: dummy, or nothing")),
            Err(_) => LoadFormat::Auto,
        },
        batch_invariant: way.batch_invariant,
        max_num_batched_tokens: Some(64),
        max_num_seqs: Some(9),
        speculative_tokens: (way.drafts > 0).then_some(way.drafts),
        kv_cache_memory: Some(64 << 20),
        no_prefix_caching: true,
        ..EngineOptions::default()
    };
    let mut engine = LlmEngine::open(dir, &options, &mut |_, _| ()).map_err(|e| e.to_string())?;
    let seen: Arc<Mutex<Answers>> = Arc::default();
    let sink = seen.clone();
    engine.observe_logits(move |id, row| {
        if let Ok(mut all) = sink.lock() {
            all.entry(id).or_default().1.push(row.to_vec());
        }
    });
    let vocab = engine.runner().vocab_size();
    let (mut step, mut added, mut events, mut sizes) = (0, 0, vec![], BTreeSet::new());
    let mut done = vec![];
    while added < COMPANY.len() || !engine.is_idle() {
        for (i, &(_, prompt, answer)) in COMPANY.iter().enumerate().filter(|(_, c)| c.0 == step) {
            let sampling =
                SamplingParams { max_tokens: Some(answer), ignore_eos: true, ..SamplingParams::greedy() };
            let prompt_ids = (0..prompt).map(|t| ((i * 31 + t * 7 + 3) % vocab) as u32).collect();
            let request = GenerateRequest { prompt_ids, sampling, ..GenerateRequest::default() };
            engine.add(request).map_err(|e| e.to_string())?;
            added += 1;
        }
        engine.step(&mut events).map_err(|e| e.to_string())?;
        let mut tokens = BTreeSet::new();
        for event in events.drain(..) {
            match event {
                Event::Token(id, _) => drop(tokens.insert(id)),
                Event::Finished(id, f) => done.push((id, f.token_ids)),
                Event::Failed(_, e) => return Err(e.to_string()),
            }
        }
        sizes.insert(tokens.len());
        step += 1;
    }
    let mut answers = std::mem::take(&mut *seen.lock().map_err(|e| e.to_string())?);
    for (id, tokens) in done {
        answers.entry(id).or_default().0 = tokens;
    }
    let times = engine.runner().times();
    let graphs = &engine.report().graph_mode;
    Ok(Run {
        answers,
        replayed: times.replayed,
        steps: times.steps,
        captured: match &graphs.captured {
            Some(c) => [c.sizes.clone(), c.piecewise_sizes.clone()],
            None => Default::default(),
        },
        in_force: graphs.in_force.clone(),
        lowered: graphs.lowerings.iter().map(|l| l.because.clone()).collect(),
        sizes,
    })
}

/// How far two rows are apart, at most.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max)
}

/// How far the largest logit is from the next.
fn margin(row: &[f32]) -> f32 {
    let mut top = [f32::NEG_INFINITY; 2];
    for &x in row {
        if x > top[0] {
            top = [x, top[0]];
        } else if x > top[1] {
            top[1] = x;
        }
    }
    top[0] - top[1]
}

/// Rows that were compared, and the largest difference.
fn compare(plain: &Answers, graphs: &Answers, way: &Way) -> Result<(usize, f32), String> {
    let (mut rows, mut most) = (0, 0f32);
    if plain.len() != graphs.len() {
        return Err(format!("{} requests against {}", plain.len(), graphs.len()));
    }
    for (id, (tokens, logits)) in plain {
        let Some((other_tokens, other_logits)) = graphs.get(id) else {
            return Err(format!("request {id} gave nothing"));
        };
        if way.batch_invariant {
            let bits = |rows: &[Vec<f32>]| rows.concat().into_iter().map(f32::to_bits).collect::<Vec<_>>();
            if tokens != other_tokens || bits(logits) != bits(other_logits) {
                return Err(format!("request {id}: other bits"));
            }
            rows += logits.len();
            continue;
        }
        // Rows of drafts that were wrong are among the logits, so that with drafts tokens alone are compared.
        if way.drafts > 0 {
            let same = tokens.iter().zip(other_tokens).take_while(|(a, b)| a == b).count();
            rows += same;
            continue;
        }
        for (i, (a, b)) in logits.iter().zip(other_logits).enumerate() {
            most = most.max(apart(a, b));
            rows += 1;
            if tokens.get(i) != other_tokens.get(i) {
                if margin(a) > CLOSE {
                    return Err(format!(
                        "request {id}, token {i}: another token by a margin of {}",
                        margin(a)
                    ));
                }
                break;
            }
        }
    }
    Ok((rows, most))
}

fn case(device: &str, dir: &Path, way: &Way) -> Result<String, String> {
    let plain = run(device, dir, "NONE", way)?;
    let graphs = run(device, dir, way.mode, way)?;
    if plain.replayed > 0 || graphs.replayed == 0 {
        return Err(format!("{} of {} steps were replayed", graphs.replayed, graphs.steps));
    }
    let (rows, most) = compare(&plain.answers, &graphs.answers, way)?;
    Ok(format!(
        "{} in force{}, captured {:?} whole and {:?} in pieces, {} of {} steps replayed, tokens came of {:?} requests at once, {rows} rows the same{}",
        graphs.in_force,
        graphs.lowered.iter().map(|l| format!(" ({l})")).collect::<String>(),
        graphs.captured[0],
        graphs.captured[1],
        graphs.replayed,
        graphs.steps,
        graphs.sizes,
        if way.batch_invariant { " bit for bit".into() } else { format!(", logits apart by {most} at most") }
    ))
}

fn main() -> ExitCode {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cuda:0".into());
    let named: Vec<String> = std::env::args().skip(2).collect();
    let models = if named.is_empty() { MODELS.map(String::from).to_vec() } else { named };
    let mut failed = false;
    for model in &models {
        for mode in ["FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE"] {
            for (batch_invariant, drafts) in [(true, 0), (false, 0), (true, 2)] {
                if drafts > 0 && WITHOUT_DRAFTS.iter().any(|m| model.starts_with(m)) {
                    continue;
                }
                let way = Way { mode, batch_invariant, drafts };
                let name = format!("{model} {mode} batch-invariant {batch_invariant} drafts {drafts}");
                let there = headway_engine::runner::devices::open(&EngineOptions {
                    device: Some(device.clone()),
                    ..EngineOptions::default()
                });
                if let Err(e) = there {
                    println!("not run  {name}: {e}");
                    continue;
                }
                let dir = match Path::new(model) {
                    path if path.exists() => Ok(path.to_owned()),
                    _ => testdata::model_dir(model).map_err(|e| e.to_string()),
                };
                match dir.and_then(|d| case(&device, &d, &way)) {
                    Ok(text) => println!("passed   {name}: {text}"),
                    Err(e) if e.starts_with("Selected backend") => println!("refused  {name}: {e}"),
                    Err(e) => {
                        failed = true;
                        println!("FAILED   {name}: {e}");
                    }
                }
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
