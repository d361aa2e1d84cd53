//! What requests and configs ask of attention's masks: ranges that see each other both ways (PrefixLM), R-SWA, and
//! prompts that aren't causal, in all layers or in those without a window, through the engine against the whole model in
//! float64; in chunks, batches and with cached prefixes bit by bit; and what is refused.

#![expect(clippy::single_range_in_vec_init, reason = "a list of one range of a prompt is meant")]

mod support;

use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine, kv::RequestId, sampling::SamplingParams,
};
use headway_testkit::testdata;
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    fs,
    ops::Range,
    path::Path,
    sync::{Arc, Mutex},
};
use support::{llama::Llama, options};

/// A tiny checkpoint with more in its config.
fn with(model: &str, more: &[(&str, Value)]) -> tempfile::TempDir {
    let (source, dir) = (testdata::model_dir(model).unwrap(), tempfile::tempdir().unwrap());
    for file in fs::read_dir(&source).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    more.iter().for_each(|(field, value)| config[*field] = value.clone());
    fs::write(&path, config.to_string()).unwrap();
    dir
}

fn prompt(seed: usize, n: usize) -> Vec<u32> {
    (0..n).map(|t| ((t * (7 + seed) + seed * 31 + t * t) % 500 + 3) as u32).collect()
}

fn request(prompt_ids: Vec<u32>, max_tokens: usize, ranges: &[Range<usize>]) -> GenerateRequest {
    let sampling =
        SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::greedy() };
    GenerateRequest {
        prompt_ids,
        sampling,
        bidirectional_ranges: ranges.to_vec(),
        ..GenerateRequest::default()
    }
}

/// Generated tokens, every row of logits, and the tokens that were found in the cache.
type Answer = (Vec<u32>, Vec<Vec<f32>>, usize);

struct Run {
    engine: LlmEngine,
    rows: Arc<Mutex<HashMap<RequestId, Vec<Vec<f32>>>>>,
}

impl Run {
    fn open(dir: &Path, options: &EngineOptions) -> Self {
        let mut engine = LlmEngine::open(dir, options, &mut |_, _| ()).unwrap();
        let rows = Arc::new(Mutex::new(HashMap::<RequestId, Vec<Vec<f32>>>::new()));
        let sink = rows.clone();
        engine.observe_logits(move |id, row| sink.lock().unwrap().entry(id).or_default().push(row.to_vec()));
        Self { engine, rows }
    }

    /// Runs the requests together.
    fn all(&mut self, requests: &[GenerateRequest]) -> Vec<Answer> {
        let ids: Vec<_> = requests.iter().map(|r| self.engine.add(r.clone()).unwrap()).collect();
        let (mut done, mut events) = (HashMap::new(), vec![]);
        while !self.engine.is_idle() {
            self.engine.step(&mut events).unwrap();
            for event in events.drain(..) {
                match event {
                    Event::Finished(id, f) => drop(done.insert(id, f)),
                    Event::Failed(_, e) => panic!("{e}"),
                    Event::Token(..) => {}
                }
            }
        }
        let mut rows = self.rows.lock().unwrap();
        ids.iter()
            .map(|id| (done[id].token_ids.clone(), rows.remove(id).unwrap(), done[id].cached_tokens))
            .collect()
    }
}

fn exactly(chunk: usize, no_prefix_caching: bool) -> EngineOptions {
    EngineOptions {
        batch_invariant: true,
        max_num_batched_tokens: Some(chunk),
        max_num_seqs: Some(8),
        no_prefix_caching,
        ..options("float32")
    }
}

#[track_caller]
fn same_bits(got: &[Answer], want: &[Answer], what: &str) {
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert_eq!(g.0, w.0, "{what}: tokens of request {i}");
        let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&g.1) == bits(&w.1), "{what}: logits of request {i}");
    }
}

/// Holds every row of logits against the model in float64.
#[track_caller]
fn as_in_float64(model: &Llama, requests: &[GenerateRequest], answers: &[Answer], rswa: Option<usize>) {
    for (r, (tokens, rows, _)) in requests.iter().zip(answers) {
        let (n, mut all) = (r.prompt_ids.len(), r.prompt_ids.clone());
        for (token, row) in tokens.iter().zip(rows) {
            let want = model.logits(&all, &r.bidirectional_ranges, rswa.map(|w| (w, n)));
            let off = row.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            assert!(
                off < 2e-3,
                "{off} off at {} of a prompt of {n}, {:?}",
                all.len(),
                r.bidirectional_ranges
            );
            all.push(*token);
        }
    }
}

/// Ranges at the beginning, side by side, over blocks and a window of 24, at the end; none.
fn image_requests() -> Vec<GenerateRequest> {
    vec![
        request(prompt(1, 70), 6, &[0..10, 10..45, 60..70]),
        request(prompt(2, 50), 6, &[]),
        request(prompt(3, 33), 6, &[1..33]),
        request(prompt(4, 90), 6, &[30..64, 70..71]),
    ]
}

#[test]
fn ranges_see_both_ways_in_any_chunks() {
    // Every layer sees all; every layer has a window of 24, which a range is longer than.
    for name in ["tiny-llama", "tiny-mistral"] {
        let dir = with(name, &[("is_mm_prefix_lm", json!(true))]);
        let (model, requests) = (Llama::open(dir.path()), image_requests());
        let want = Run::open(dir.path(), &exactly(512, true)).all(&requests);
        as_in_float64(&model, &requests, &want, None);
        for chunk in [35, 40, 64] {
            let got = Run::open(dir.path(), &exactly(chunk, true)).all(&requests);
            same_bits(&got, &want, &format!("{name}, chunks of {chunk}"));
        }
        // The second time the prompts' beginnings are in the cache: up to a range, never into one.
        let mut run = Run::open(dir.path(), &exactly(512, false));
        run.all(&requests);
        let again = run.all(&requests);
        same_bits(&again, &want, &format!("{name}, cached"));
        assert_eq!(again.iter().map(|a| a.2).collect::<Vec<_>>(), [48, 48, 0, 80], "{name}");
    }
}

#[test]
fn equal_tokens_with_other_ranges_are_another_prefix() {
    let dir = with("tiny-llama", &[("is_mm_prefix_lm", json!(true))]);
    let tokens = prompt(5, 80);
    let mut other_tail = tokens.clone();
    other_tail[40] = 7;
    // The same first block in all; in the last two it sees another end of its range.
    let requests = [
        request(tokens.clone(), 3, &[]),
        request(tokens.clone(), 3, &[8..48]),
        request(tokens, 3, &[8..47]),
        request(other_tail, 3, &[8..48]),
    ];
    let mut shared = Run::open(dir.path(), &exactly(512, false));
    for round in 0..2 {
        for r in &requests {
            let fresh = Run::open(dir.path(), &exactly(512, true)).all(std::slice::from_ref(r));
            let got = shared.all(std::slice::from_ref(r));
            assert_eq!(got[0].2 > 0, round > 0, "a hit in the second round alone");
            same_bits(&got, &fresh, &format!("{:?}", r.bidirectional_ranges));
        }
    }
}

#[test]
fn r_swa_keeps_the_prompt_and_a_window_of_the_answer() {
    let dir = with("tiny-llama", &[("rswa_window", json!(16))]);
    let model = Llama::open(dir.path());
    let requests =
        [request(prompt(6, 50), 40, &[]), request(prompt(7, 3), 30, &[]), request(prompt(8, 64), 20, &[])];
    let want = Run::open(dir.path(), &exactly(512, true)).all(&requests);
    as_in_float64(&model, &requests, &want, Some(16));
    assert!(Run::open(dir.path(), &exactly(512, true)).engine.report().groups[0].kind.contains("R-SWA"));
    for chunk in [8, 30] {
        same_bits(
            &Run::open(dir.path(), &exactly(chunk, true)).all(&requests),
            &want,
            &format!("chunks of {chunk}"),
        );
    }
    // The answer as part of the next prompt: its tokens now see more, so its pages don't serve; the prompt's do.
    let mut run = Run::open(dir.path(), &exactly(512, false));
    let first = run.all(&requests[..1]).remove(0);
    let next = [request([requests[0].prompt_ids.clone(), first.0, prompt(9, 5)].concat(), 6, &[])];
    let got = run.all(&next);
    assert_eq!(got[0].2, 48);
    same_bits(&got, &Run::open(dir.path(), &exactly(512, true)).all(&next), "the next turn");
}

#[test]
fn a_prompt_that_is_not_causal_sees_itself_and_answers_in_order() {
    let dir = with("tiny-llama", &[("is_causal", json!(false))]);
    let model = Llama::open(dir.path());
    // Prompts that fill their pages: every answer needs another one.
    let requests =
        [request(prompt(1, 48), 8, &[]), request(prompt(2, 32), 8, &[]), request(prompt(3, 16), 8, &[])];
    let want = Run::open(dir.path(), &exactly(512, true)).all(&requests);
    let as_ranges: Vec<_> = requests
        .iter()
        .map(|r| request(r.prompt_ids.clone(), 8, std::slice::from_ref(&(0..r.prompt_ids.len()))))
        .collect();
    as_in_float64(&model, &as_ranges, &want, None);
    // Together there is no room for the prompts in one step, and a pool that is too small computes some twice.
    same_bits(&Run::open(dir.path(), &exactly(50, false)).all(&requests), &want, "in steps of 50");
    let page = 3 * 2 * 2 * 16 * 64 * 4;
    let small = EngineOptions { kv_cache_memory: Some(8 * page), ..exactly(50, true) };
    let mut run = Run::open(dir.path(), &small);
    same_bits(&run.all(&requests), &want, "preempted");
    assert!(run.engine.scheduler_stats().preemptions > 0);
}

/// A drafter's config (DFlash): two layers with a window, which are causal, and between them one that sees all, whose
/// prompt's tokens see each other both ways: a group each, in one step.
#[test]
fn layers_with_windows_are_causal_beside_full_ones_that_are_not() {
    let types = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    let windows =
        [("layer_types", types), ("sliding_window", json!(20)), ("use_sliding_window", json!(true))];
    let drafter = |more: &[(&str, Value)]| with("tiny-qwen3", &[&windows[..], more].concat());
    let dir = drafter(&[("dflash_config", json!({"mask_token_id": 500}))]);
    let model = Llama::open(dir.path());
    let requests =
        [request(prompt(1, 48), 8, &[]), request(prompt(2, 70), 8, &[]), request(prompt(3, 5), 8, &[])];
    let want: Vec<Answer> = requests
        .iter()
        .flat_map(|r| Run::open(dir.path(), &exactly(512, true)).all(std::slice::from_ref(r)))
        .collect();
    let mut apart = 0.0;
    for (r, (tokens, rows, _)) in requests.iter().zip(&want) {
        let (whole, mut all) = (0..r.prompt_ids.len(), r.prompt_ids.clone());
        let both_ways = |layer| match model.window(layer) {
            Some(_) => &[][..],
            None => std::slice::from_ref(&whole),
        };
        for (token, row) in tokens.iter().zip(rows) {
            let off = |want: &[f64]| {
                row.iter().zip(want).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
            };
            let mixed = off(&model.logits_with(&all, both_ways, None));
            assert!(mixed < 2e-3, "{mixed} off at {} of {whole:?}", all.len());
            // Neither of the masks alone would do.
            let one = off(&model.logits(&all, &[], None)).min(off(&model.logits(
                &all,
                std::slice::from_ref(&whole),
                None,
            )));
            apart = f64::max(apart, one);
            all.push(*token);
        }
    }
    println!("logits of all layers causal or none are {apart:.3} off");
    assert!(apart > 0.05, "{apart}: the masks are told apart by nothing");
    // Together, in steps with room for one prompt after another, cached, in two parts, with drafts.
    let parts = EngineOptions {
        micro_batches: Some(2),
        micro_batch_decode_tokens: Some(2),
        micro_batch_prefill_tokens: Some(2),
        ..exactly(80, true)
    };
    let drafts = EngineOptions { speculative_tokens: Some(3), ..exactly(80, true) };
    for (o, what) in [
        (exactly(512, true), "together"),
        (exactly(75, true), "in steps of 75"),
        (parts, "in parts"),
        (drafts, "drafts"),
    ] {
        same_bits(&Run::open(dir.path(), &o).all(&requests), &want, what);
    }
    let mut cached = Run::open(dir.path(), &exactly(512, false));
    cached.all(&requests);
    same_bits(&cached.all(&requests), &want, "cached");
    // The report says which group sees how.
    let kinds = |dir: &Path| -> Vec<String> {
        let mut all: Vec<_> = (Run::open(dir, &exactly(64, false)).engine.report().groups.iter())
            .map(|g| g.kind.clone())
            .collect();
        all.sort();
        all.dedup();
        all
    };
    assert_eq!(kinds(dir.path()), ["full attention, both ways in a prompt", "sliding window 20"]);
    // A layer that sees a whole prompt can't have it in chunks.
    let e =
        Run::open(dir.path(), &exactly(40, false)).engine.add(requests[0].clone()).unwrap_err().to_string();
    assert!(e.contains("raise --max-num-batched-tokens to 48"), "{e}");
    // Causal in every layer: chunks again.
    let causal = drafter(&[("dflash_config", json!({"causal": true}))]);
    assert_eq!(kinds(causal.path()), ["full attention", "sliding window 20"]);
    let plain = drafter(&[]);
    let answers = |dir: &Path, chunk| Run::open(dir, &exactly(chunk, true)).all(&requests);
    same_bits(&answers(causal.path(), 40), &answers(plain.path(), 512), "causal");
    for (more, words) in [
        (json!({"use_swa": true}), "dflash_config.use_swa is not supported"),
        (json!({"causal": "no"}), "dflash_config.causal is \"no\""),
        (json!(7), "dflash_config is 7"),
    ] {
        let dir = drafter(&[("dflash_config", more)]);
        let e = LlmEngine::open(dir.path(), &exactly(40, false), &mut |_, _| ()).err().unwrap().to_string();
        assert!(e.contains(words), "{e}");
    }
}

#[test]
fn what_can_not_be_is_refused() {
    let dir = with("tiny-llama", &[("is_mm_prefix_lm", json!(true))]);
    let mut run = Run::open(dir.path(), &exactly(40, false));
    let mut refused = |n: usize, ranges: &[Range<usize>]| {
        run.engine.add(request(prompt(1, n), 2, ranges)).unwrap_err().to_string()
    };
    assert!(refused(20, &[3..9, 8..12]).contains("8..12 begins before 3..9 ends"));
    assert!(refused(20, std::slice::from_ref(&(3..21))).contains("ends after the prompt of 20 tokens"));
    assert!(refused(20, std::slice::from_ref(&(3..3))).contains("empty or descending"));
    let long = refused(90, std::slice::from_ref(&(3..50)));
    assert!(long.contains("3..50") && long.contains("raise --max-num-batched-tokens to 47"), "{long}");
    let mut plain = Run::open(&testdata::model_dir("tiny-llama").unwrap(), &exactly(40, false));
    let e =
        plain.engine.add(request(prompt(1, 20), 2, std::slice::from_ref(&(3..9)))).unwrap_err().to_string();
    assert!(e.contains("LlamaForCausalLM") && e.contains("is_mm_prefix_lm"), "{e}");
    let non_causal = with("tiny-llama", &[("is_causal", json!(false))]);
    let e = Run::open(non_causal.path(), &exactly(40, false))
        .engine
        .add(request(prompt(1, 41), 2, &[]))
        .unwrap_err();
    assert!(e.to_string().contains("raise --max-num-batched-tokens to 41"), "{e}");
    for (name, fields) in [
        ("tiny-bamba", vec![("is_mm_prefix_lm", json!(true))]),
        ("tiny-deepseek-v2-yarn", vec![("rswa_window", json!(8))]),
        ("tiny-llama", vec![("rswa_window", json!(8)), ("is_causal", json!(false))]),
        ("tiny-llama", vec![("dflash_config", json!({})), ("rswa_window", json!(8))]),
        ("tiny-llama", vec![("rswa_window", json!(0))]),
        ("tiny-llama", vec![("is_mm_prefix_lm", json!("yes"))]),
    ] {
        let dir = with(name, &fields);
        let e = LlmEngine::open(dir.path(), &exactly(40, false), &mut |_, _| ()).err().unwrap().to_string();
        assert!(e.contains(fields[0].0), "{e}");
    }
}
