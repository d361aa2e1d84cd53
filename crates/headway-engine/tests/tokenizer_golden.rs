//! Every tokenizer and chat-template case of the goldens, exactly: ids, decodings, renderings.
//!
//! The two tiny tokenizers run from the project's data, or from `HEADWAY_GOLDEN_DIR` and `HEADWAY_MODELS_DIR`. The real
//! models run when both are set and hold their files; what is absent is printed.

use headway_engine::loading::GgufFile;
use headway_engine::text::{ChatTemplate, Message, StreamDecoder, TemplateSource, Tokenizer};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::time::Instant;

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn dir(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
        .unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn cases<'a>(golden: &'a Value, key: &str) -> &'a [Value] {
    golden[key].as_array().map_or(&[], Vec::as_slice)
}

fn messages(case: &Value) -> Vec<Message> {
    serde_json::from_value(case["messages"].clone()).unwrap()
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip: bool) -> String {
    let mut decoder = StreamDecoder::new(tokenizer.clone(), skip);
    let mut text: String = ids.iter().map(|id| decoder.push(*id)).collect();
    text.push_str(&decoder.finish());
    text
}

/// Texts to ids and back. Returns the number of cases.
fn check_texts(name: &str, tokenizer: &Tokenizer, golden: &Value) -> usize {
    let cases = cases(golden, "cases");
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{name}: ids of {text:?}");
        for (key, skip) in [("decoded", false), ("decoded_skip_special", true)] {
            let shown = case[key].as_str().unwrap();
            assert_eq!(tokenizer.decode(&expected, skip), shown, "{name}: {key} of {text:?}");
            assert_eq!(streamed(tokenizer, &expected, skip), shown, "{name}: streamed {key} of {text:?}");
            assert_eq!(
                tokenizer.decode_reference(&expected, skip).unwrap(),
                shown,
                "{name}: {key} by the crate"
            );
        }
        let same = tokenizer.decode(&expected, false) == text;
        assert_eq!(same, case["round_trip"].as_bool().unwrap(), "{name}: round trip of {text:?}");
        check_bos(name, tokenizer, text, &expected);
    }
    cases.len()
}

/// BOS exactly where the model says so, and never twice.
fn check_bos(name: &str, tokenizer: &Tokenizer, text: &str, bare: &[u32]) {
    let with = tokenizer.encode(text, true).unwrap();
    let bos = tokenizer.bos_id().filter(|_| tokenizer.adds_bos());
    let expected = match bos {
        Some(bos) if bare.first() != Some(&bos) => [&[bos], bare].concat(),
        _ => bare.to_vec(),
    };
    assert_eq!(with, expected, "{name}: with BOS, {text:?}");
}

/// Renderings and their ids. Returns the number of cases.
fn check_chats(
    name: &str,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    list: &[Value],
    key: &str,
) -> usize {
    let chats: Vec<&Value> = list.iter().filter(|c| c.get("messages").is_some()).collect();
    for case in &chats {
        let what = format!("{name}: {}", case["name"]);
        let generation = case["add_generation_prompt"].as_bool().unwrap();
        let rendered = template.render(&messages(case), generation, &Map::new()).unwrap();
        assert_eq!(rendered, case["rendered"].as_str().unwrap(), "{what}");
        assert_eq!(tokenizer.encode(&rendered, false).unwrap(), ids(&case[key]), "{what}");
    }
    chats.len()
}

fn check_metadata(name: &str, tokenizer: &Tokenizer, golden: &Value) {
    let meta = &golden["tokenizer"];
    assert_eq!(tokenizer.bos_id().map(u64::from), meta["bos_id"].as_u64(), "{name}: bos_id");
    assert_eq!(tokenizer.eos_ids(), ids(&meta["eos_ids"]), "{name}: eos_ids");
    assert_eq!(
        Some(tokenizer.adds_bos()),
        meta["prepend_bos_to_plain_prompts"].as_bool(),
        "{name}: adds_bos"
    );
}

fn run_tiny(name: &str) {
    let golden_dir = dir("HEADWAY_GOLDEN_DIR").unwrap_or_else(data);
    let models = dir("HEADWAY_MODELS_DIR").filter(|d| d.join(name).is_dir()).unwrap_or_else(data);
    let golden = json(&golden_dir.join(format!("{name}.tokenizer.json")));
    let tokenizer = Tokenizer::from_dir(&models.join(name)).unwrap();
    check_metadata(name, &tokenizer, &golden);
    let texts = check_texts(name, &tokenizer, &golden);
    let template = tokenizer.chat_template().unwrap();
    let chats = check_chats(name, &tokenizer, &template, cases(&golden, "chat"), "ids");
    assert!(texts > 0 && chats > 0);
    println!("{name}: {texts} texts and {chats} chats exact");
}

#[test]
fn tiny_llama() {
    run_tiny("tiny-llama");
}

#[test]
fn tiny_mistral() {
    run_tiny("tiny-mistral");
}

/// CPU time of this thread where the system tells it, else 0: on a busy machine the wall clock says little.
fn cpu_ms() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    stat.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0) / 1_000_000
}

fn run_real(name: &str, file: &str) {
    let (Some(models), Some(goldens)) = (dir("HEADWAY_MODELS_DIR"), dir("HEADWAY_GOLDEN_DIR")) else {
        println!("{name}: absent (HEADWAY_MODELS_DIR and HEADWAY_GOLDEN_DIR are not both set)");
        return;
    };
    let model = models.join(file);
    let (texts, runs) =
        (goldens.join(format!("{name}.tokenizer.json")), goldens.join(format!("{name}.json")));
    if let Some(missing) = [&model, &texts, &runs].into_iter().find(|p| !p.is_file()) {
        println!("{name}: absent ({} does not exist)", missing.display());
        return;
    }
    let header = GgufFile::open(&model).unwrap();
    let (begin, cpu) = (Instant::now(), cpu_ms());
    let tokenizer = Tokenizer::from_gguf_file(&header).unwrap();
    let (rebuilt, cpu) = (begin.elapsed(), cpu_ms() - cpu);
    let golden = json(&texts);
    check_metadata(name, &tokenizer, &golden);
    let texts = check_texts(name, &tokenizer, &golden);
    let runs = json(&runs);
    let (plain, chats) = check_runs(name, &tokenizer, &runs);
    println!(
        "{name}: rebuilt in {rebuilt:.0?} ({cpu} ms of CPU); {texts} texts, {plain} prompts and {chats} chats exact"
    );
}

/// Prompts of the golden runs, their chats, and the text of what was generated.
fn check_runs(name: &str, tokenizer: &Tokenizer, runs: &Value) -> (usize, usize) {
    let list = cases(runs, "cases");
    let mut plain = 0;
    for case in list {
        let generated = ids(&case["greedy_ids"]);
        let text = case["greedy_text"].as_str().unwrap();
        assert_eq!(tokenizer.decode(&generated, false), text, "{name}: {}", case["name"]);
        assert_eq!(streamed(tokenizer, &generated, false), text, "{name}: {}", case["name"]);
        if case["kind"] == "plain" {
            let prompt = tokenizer.encode(case["text"].as_str().unwrap(), true).unwrap();
            assert_eq!(prompt, ids(&case["prompt_ids"]), "{name}: {}", case["name"]);
            plain += 1;
        }
    }
    let text = runs["tokenizer"]["chat_template"].as_str().unwrap();
    let template = ChatTemplate::new(&TemplateSource::single(text), tokenizer.named_tokens()).unwrap();
    let chats = check_chats(name, tokenizer, &template, list, "prompt_ids");
    if tokenizer.has_chat_template() {
        check_chats(name, tokenizer, &tokenizer.chat_template().unwrap(), list, "prompt_ids");
    } else {
        let error = tokenizer.chat_template().unwrap_err().to_string();
        assert!(error.contains("no chat template") && error.contains("--chat"), "{error}");
    }
    // a rendered chat that begins with BOS gets no second one
    for case in list.iter().filter(|c| c["bos_added"] == "in the rendered text") {
        let again = tokenizer.encode(case["rendered"].as_str().unwrap(), true).unwrap();
        assert_eq!(again, ids(&case["prompt_ids"]), "{name}: {}", case["name"]);
    }
    assert!(plain > 0 && chats > 0);
    (plain, chats)
}

#[test]
fn smollm2_from_gguf() {
    run_real("smollm2-135m-instruct-q4_1", "smollm2-135m-instruct-q4_1.gguf");
}

#[test]
fn gemma3_from_gguf() {
    run_real("gemma3-270m-q4_k_m", "gemma-3-270m-q4_k_m.gguf");
}

#[test]
fn qwen25_from_gguf() {
    run_real("qwen2.5-coder-0.5b-instruct-q4_k_m", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf");
}
