//! `generate` on one prompt: text, JSON, ids, seeds, ends.

use super::support::{Copy, file, finish, generate, headway, llama, without_tokenizer};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    io::{Read, Write},
    path::Path,
    process::Stdio,
};

/// The object of a run on ids.
fn object(model: &Path, args: &[&str]) -> Value {
    let mut all = vec!["--json", "--prompt-ids", "1,2,3"];
    all.extend(args);
    generate(model, &all).fine().object()
}

fn ids(o: &Value) -> Vec<u64> {
    o["token_ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect()
}

fn keys(o: &Value) -> BTreeSet<&str> {
    o.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn json_has_the_fields_that_are_promised_and_no_others() {
    let o = object(&llama(), &["--max-tokens", "4", "--logprobs", "3", "--ignore-eos"]);
    let expected =
        ["prompt_token_ids", "token_ids", "text", "finish_reason", "logprobs", "timings", "peak_rss_bytes"];
    assert_eq!(keys(&o), BTreeSet::from(expected));
    let timings = ["load_s", "prefill_s", "prefill_tokens", "decode_s", "decode_tokens"];
    assert_eq!(keys(&o["timings"]), BTreeSet::from(timings));
    for seconds in ["load_s", "prefill_s", "decode_s"] {
        assert!(o["timings"][seconds].as_f64().is_some_and(|s| s > 0.0 && s < 600.0), "{seconds}");
    }
    assert_eq!((&o["timings"]["prefill_tokens"], &o["timings"]["decode_tokens"]), (&json!(3), &json!(3)));
    assert_eq!(o["prompt_token_ids"], json!([1, 2, 3]), "no BOS before ids");
    assert_eq!((ids(&o).len(), o["finish_reason"].as_str()), (4, Some("length")));
    assert!(o["text"].is_string());
    if cfg!(target_os = "linux") {
        assert!(o["peak_rss_bytes"].as_u64().is_some_and(|b| b > 1 << 20));
    }
    assert!(!keys(&object(&llama(), &["--max-tokens", "1"])).contains("logprobs"));
}

#[test]
fn logprobs_are_sorted_and_begin_with_the_prompts_last_position() {
    let args = ["--max-tokens", "3", "--logprobs", "4", "--ignore-eos", "--dtype", "float32"];
    let o = object(&llama(), &args);
    let list = o["logprobs"].as_array().unwrap();
    assert_eq!(list.len(), 3, "a list a generated token");
    let mut all = vec!["--json", "--prompt-ids"];
    let longer = format!("1,2,3,{}", ids(&o)[0]);
    all.push(&longer);
    all.extend(args);
    let next = generate(&llama(), &all).fine().object();
    for (entry, token) in list.iter().zip(ids(&o)) {
        let entry = entry.as_array().unwrap();
        assert_eq!(entry.len(), 4);
        assert!(entry.iter().all(|e| keys(e) == BTreeSet::from(["token_id", "logprob"])));
        assert_eq!(entry[0]["token_id"], json!(token), "greedy takes the most likely");
        let values: Vec<f64> = entry.iter().map(|e| e["logprob"].as_f64().unwrap()).collect();
        assert!(values.windows(2).all(|w| w[0] >= w[1]) && values[0] < 0.0, "{values:?}");
        assert!(values.iter().map(|v| v.exp()).sum::<f64>() <= 1.0 + 1e-6);
    }
    for (a, b) in list[1].as_array().unwrap().iter().zip(next["logprobs"][0].as_array().unwrap()) {
        assert_eq!(a["token_id"], b["token_id"]);
        assert!((a["logprob"].as_f64().unwrap() - b["logprob"].as_f64().unwrap()).abs() < 1e-3, "{a} {b}");
    }
    // More than there are tokens.
    let o = object(&llama(), &["--max-tokens", "1", "--logprobs", "1024"]);
    assert_eq!(o["logprobs"][0].as_array().unwrap().len(), 512);
    let o = object(&llama(), &["--max-tokens", "1", "--logprobs", "0"]);
    assert_eq!(o["logprobs"], json!([[]]));
}

#[test]
fn text_is_what_json_says_with_one_newline() {
    let args = ["--prompt-ids", "1,2,3", "--max-tokens", "12", "--ignore-eos"];
    let plain = generate(&llama(), &args).fine();
    let json = object(&llama(), &args[2..]);
    assert_eq!(plain.out, format!("{}\n", json["text"].as_str().unwrap()));
    assert_eq!(plain.err, "");
}

#[test]
fn the_end_token_is_kept_in_ids_and_left_out_of_text() {
    let free = object(&llama(), &["--max-tokens", "8", "--ignore-eos"]);
    let free_ids = ids(&free);
    let at = (2..8).find(|&i| !free_ids[..i].contains(&free_ids[i])).expect("a token that is new");
    let ended = Copy::with("generation_config.json", &[("eos_token_id", json!(free_ids[at]))]);
    let o = object(ended.path(), &["--max-tokens", "8"]);
    assert_eq!(ids(&o), free_ids[..=at]);
    assert_eq!(o["finish_reason"], "stop");
    let before = object(&llama(), &["--ignore-eos", "--max-tokens", &at.to_string()]);
    assert_eq!(o["text"], before["text"]);
    let on = object(ended.path(), &["--max-tokens", "8", "--ignore-eos"]);
    assert_eq!((ids(&on), &on["finish_reason"]), (free_ids, &json!("length")));
}

#[test]
fn a_stop_string_ends_the_answer_and_is_left_out() {
    let free = object(&llama(), &["--max-tokens", "40", "--ignore-eos"]);
    let text = free["text"].as_str().unwrap();
    let ascii = |w: &str| w.chars().all(|c| c.is_ascii_alphabetic());
    let at =
        (3..text.len() - 3).find(|&i| text.get(i..i + 3).is_some_and(ascii)).expect("three letters in a row");
    let stop = &text[at..at + 3];
    let expected = &text[..text.find(stop).unwrap()];
    let o = object(&llama(), &["--max-tokens", "40", "--ignore-eos", "--stop", stop, "--stop", "never this"]);
    assert_eq!((o["text"].as_str(), o["finish_reason"].as_str()), (Some(expected), Some("stop")));
    let args = ["--prompt-ids", "1,2,3", "--max-tokens", "40", "--ignore-eos", "--stop", stop];
    assert_eq!(generate(&llama(), &args).fine().out, format!("{expected}\n"), "streamed as not streamed");
}

#[test]
fn bias_and_penalties_decide() {
    let with = |args: &[&str]| {
        let length = if args.contains(&"--max-tokens") { &[][..] } else { &["--max-tokens", "6"] };
        ids(&object(&llama(), &[&["--ignore-eos", "--dtype", "float32"], length, args].concat()))
    };
    assert_eq!(with(&["--logit-bias", "7=100"]), [7; 6]);
    // The oftener one came, the likelier the other.
    let both = ["--logit-bias", "7=100,9=100", "--presence-penalty", "2", "--frequency-penalty", "2"];
    let turns = with(&[&both[..], &["--max-tokens", "20"]].concat());
    let count = |token: u64| turns.iter().filter(|t| **t == token).count();
    assert!(count(7) + count(9) == 20 && count(7).min(count(9)) >= 5, "{turns:?}");
    assert_eq!(with(&["--logit-bias", "7=100,9=99", "--frequency-penalty", "-2"]), [7; 6]);
}

#[test]
fn an_answer_may_be_held_open() {
    let free = ids(&object(&llama(), &["--max-tokens", "8", "--ignore-eos"]));
    let ended = Copy::with("generation_config.json", &[("eos_token_id", json!(free[2]))]);
    assert!(ids(&object(ended.path(), &["--max-tokens", "8"])).len() <= 3);
    let held = ids(&object(ended.path(), &["--max-tokens", "8", "--min-tokens", "6"]));
    assert!(held.len() > 6 && !held[..6].contains(&free[2]), "{held:?}");
    let whole = ids(&object(ended.path(), &["--max-tokens", "8", "--min-tokens", "8"]));
    assert_eq!(whole.len(), 8);
}

#[test]
fn seeds_reproduce() {
    let with = |seed: &str| {
        let args = ["--max-tokens", "16", "--temperature", "1.5", "--ignore-eos", "--seed", seed];
        ids(&object(&llama(), &args))
    };
    let (a, b, c) = (with("7"), with("7"), with("8"));
    assert_eq!(a, b);
    assert_ne!(a, c);
    // Without a seed each run has its own, and -v tells it.
    let free = ["--max-tokens", "16", "--temperature", "1.5", "--ignore-eos", "-v"];
    let mut all = vec!["--json", "--prompt-ids", "1,2,3"];
    all.extend(free);
    let o = generate(&llama(), &all).fine().objects().remove(1);
    assert_eq!(with(&o["seed"].to_string()), ids(&o));
}

#[test]
fn text_comes_as_argument_file_or_input() {
    let prompt = "Hello there, über 7";
    let json = ["--json", "--max-tokens", "2"];
    let argument = generate(&llama(), &[&json[..], &[prompt]].concat()).fine().object();
    let (_dir, path) = file("prompt.txt", prompt.as_bytes());
    let from_file = generate(&llama(), &[&json[..], &["--prompt-file", path.to_str().unwrap()]].concat());
    let mut child = headway()
        .args(["generate", "--model"])
        .arg(llama())
        .args(json)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(prompt.as_bytes()).unwrap();
    let piped: Value = serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap();
    for o in [from_file.fine().object(), piped] {
        assert_eq!(o["prompt_token_ids"], argument["prompt_token_ids"]);
        assert_eq!(o["token_ids"], argument["token_ids"]);
    }
    let chat = generate(&llama(), &[&json[..], &["--chat", prompt]].concat()).fine().object();
    let (chat, plain) = (&chat["prompt_token_ids"], &argument["prompt_token_ids"]);
    assert!(chat.as_array().unwrap().len() > plain.as_array().unwrap().len(), "{chat} {plain}");
}

#[test]
fn a_short_model_length_is_filled_when_no_number_of_tokens_was_asked() {
    let o = object(&llama(), &["--max-model-len", "20", "--ignore-eos"]);
    assert_eq!((ids(&o).len(), o["finish_reason"].as_str()), (17, Some("length")));
}

#[test]
fn without_a_tokenizer_ids_are_shown() {
    let bare = without_tokenizer();
    let o = object(&bare, &["--max-tokens", "3", "--ignore-eos"]);
    assert_eq!(o["text"], "");
    let plain = generate(&bare, &["--prompt-ids", "1,2,3", "--max-tokens", "3", "--ignore-eos"]).fine();
    let shown: Vec<u64> = plain.out.split_whitespace().map(|w| w.parse().unwrap()).collect();
    assert_eq!(shown, ids(&o));
}

#[test]
fn a_reader_that_has_seen_enough_ends_the_program_quietly() {
    for args in [
        &["--max-tokens", "1500", "--ignore-eos", "--prompt-ids", "1,2,3"][..],
        &["--max-tokens", "1500", "--ignore-eos", "--prompt-ids", "1,2,3", "-v"],
    ] {
        let mut child = headway()
            .args(["generate", "--model"])
            .arg(llama())
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = child.stdout.take().unwrap();
        out.read_exact(&mut [0]).unwrap();
        drop(out);
        let ended = child.wait_with_output().unwrap();
        let err = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(0), "{err}");
        assert!(!err.contains("panicked") && !err.contains("bug") && !err.contains("pipe"), "{err}");
    }
}

#[cfg(unix)]
#[test]
fn a_closed_standard_error_takes_nothing_away() {
    let both = "exec \"$0\" \"$@\" 2>&1 >/dev/null | true";
    let args =
        ["generate", "--model", llama().to_str().unwrap(), "-v", "--max-tokens", "4", "hi"].map(String::from);
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", both, env!("CARGO_BIN_EXE_headway")]).args(args);
    assert_eq!(finish(&mut shell).code, Some(0));
    let closed = "exec \"$0\" \"$@\" 2>&-";
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", closed, env!("CARGO_BIN_EXE_headway"), "backends", "--json"]);
    assert!(finish(&mut shell).fine().out.contains("CPU_ATTN"));
}

#[test]
fn numbers_that_broke_down_leave_nothing_on_standard_output() {
    // Infinities in the final norm make every logit NaN or infinite.
    let copy = Copy::of(&llama());
    let mut bytes = copy.read("model.safetensors");
    let at = bytes.len() - 96 * 2;
    for value in bytes[at..].chunks_exact_mut(2) {
        value.copy_from_slice(&0x7f80u16.to_le_bytes());
    }
    copy.write("model.safetensors", &bytes);
    copy.generate().refused(&["logit", "--dtype float32 and check the weights"]);
}

#[test]
fn a_path_needs_no_home() {
    let mut c = headway();
    c.args(["generate", "--prompt-ids", "1,2", "--max-tokens", "1", "--model"]).arg(llama());
    for name in ["HOME", "USERPROFILE", "XDG_CACHE_HOME", "HEADWAY_CACHE_DIR", "HF_HOME"] {
        c.env_remove(name);
    }
    finish(&mut c).fine();
}

#[test]
fn drafted_tokens_change_the_account_and_not_the_answer() {
    let turns: Vec<String> = (0..40).map(|t| (t % 7 * 13).to_string()).collect();
    let turns = turns.join(",");
    let with = |extra: &[&str]| {
        let mut args = vec!["--prompt-ids", &turns, "--max-tokens", "60", "--ignore-eos", "--dtype", "f32"];
        // Below 1: the answer goes round in circles.
        args.extend(["--repetition-penalty", "0.3"]);
        args.extend(extra);
        generate(&llama(), &args).fine()
    };
    let plain = with(&["--json"]).object();
    assert!(!keys(&plain).contains("speculation"));
    let drafted = with(&["--json", "--speculative-tokens", "4", "--prompt-lookup-min=2"]).object();
    assert_eq!(ids(&drafted), ids(&plain));
    assert_eq!((&drafted["text"], &drafted["finish_reason"]), (&plain["text"], &plain["finish_reason"]));
    assert_eq!(drafted["timings"]["decode_tokens"], json!(59));
    let fields = [
        "drafts",
        "drafted_tokens",
        "accepted_tokens",
        "acceptance_rate",
        "acceptance_by_position",
        "mean_accepted_length",
    ];
    let s = &drafted["speculation"];
    assert_eq!(keys(s), BTreeSet::from(fields));
    assert!(s["accepted_tokens"].as_u64().is_some_and(|n| n > 4), "{s}");
    assert!(s["acceptance_by_position"].as_array().is_some_and(|a| a.len() <= 4));
    let said = with(&["-v", "--speculative-tokens", "4", "--prompt-lookup-min=2"]).err;
    assert!(said.contains("speculation: drafted ") && said.contains("by position"), "{said}");
}

#[test]
fn drafts_are_refused_where_a_state_can_not_be_taken_back() {
    let hybrid = headway_testkit::testdata::model_dir("tiny-bamba").unwrap();
    let args = ["--prompt-ids", "1,2", "--speculative-tokens", "2"];
    generate(&hybrid, &args).refused(&["MAMBA2_ATTN", "set --speculative-tokens 0"]);
}
