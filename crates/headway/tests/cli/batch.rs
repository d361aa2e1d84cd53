//! `generate --batch`: input order, options a line, lines that fail.

use super::support::{file, generate, llama, without_tokenizer};
use serde_json::json;

#[test]
fn answers_come_in_input_order_with_each_lines_options() {
    let lines = [
        json!({"prompt_ids": [1, 2, 3], "max_tokens": 24, "ignore_eos": true}),
        json!({"prompt": "Hello", "max_tokens": 2, "logprobs": 2, "ignore_eos": true}),
        json!({"prompt_ids": [4], "max_tokens": 5, "temperature": 1.0, "seed": 3, "ignore_eos": true}),
        json!({"prompt": "Hello", "chat": true, "max_tokens": 1}),
    ];
    let text: String = lines.iter().map(|l| format!("{l}\n\n")).collect();
    let (_dir, path) = file("batch.jsonl", text.as_bytes());
    let path = path.to_str().unwrap();
    let r = generate(&llama(), &["--json", "--batch-invariant", "--batch", path]).fine();
    let all = r.objects();
    let lengths: Vec<_> = all.iter().map(|o| o["token_ids"].as_array().unwrap().len()).collect();
    assert_eq!(lengths, [24, 2, 5, 1]);
    assert_eq!(all[0]["prompt_token_ids"], json!([1, 2, 3]));
    assert_eq!(all[1]["logprobs"].as_array().unwrap().len(), 2);
    assert!(all[0].get("logprobs").is_none());
    assert!(all[3]["prompt_token_ids"].as_array().unwrap().len() > 5, "through the template");
    // The same request alone.
    let args = ["--json", "--batch-invariant", "--prompt-ids", "1,2,3", "--max-tokens", "24", "--ignore-eos"];
    assert_eq!(generate(&llama(), &args).fine().object()["token_ids"], all[0]["token_ids"]);
    // Plain text has a number before each answer.
    let plain = generate(&llama(), &["--batch", path]).fine().out;
    let at: Vec<_> = (1..=4).map(|i| plain.find(&format!("[{i}] ")).expect("a number")).collect();
    assert!(at.is_sorted(), "{plain}");
}

#[test]
fn lines_have_their_own_bias_and_penalties() {
    let lines = [
        json!({"prompt_ids": [1], "max_tokens": 4, "ignore_eos": true, "logit_bias": {"7": 100}}),
        json!({"prompt_ids": [1], "max_tokens": 20, "ignore_eos": true, "logit_bias": {"7": 100, "9": 100},
            "presence_penalty": 2, "frequency_penalty": 2}),
        json!({"prompt_ids": [1], "max_tokens": 4, "stop_token_ids": [9], "min_tokens": 3}),
        json!({"prompt_ids": [1], "max_tokens": 4, "min_tokens": 5}),
    ];
    let text: String = lines.iter().map(|l| format!("{l}\n")).collect();
    let (_dir, path) = file("batch.jsonl", text.as_bytes());
    let args = ["--json", "--logit-bias", "9=100", "--batch", path.to_str().unwrap()];
    let r = generate(&llama(), &args);
    assert_eq!(r.code, Some(1));
    let all = r.objects();
    assert_eq!(all[0]["token_ids"], json!([7, 7, 7, 7]), "a line's bias is instead of the command line's");
    let turns = all[1]["token_ids"].as_array().unwrap();
    assert!([7, 9].iter().all(|token| turns.iter().filter(|t| *t == token).count() >= 5), "{turns:?}");
    let held = all[2]["token_ids"].as_array().unwrap();
    assert!(held.len() == 4 && held[..3].iter().all(|t| *t != 9) && held[3] == 9, "{held:?}");
    assert!(
        all[3]["error"].as_str().is_some_and(|e| e.contains("--min-tokens must be at most --max-tokens"))
    );
}

#[test]
fn a_line_that_fails_spoils_no_other() {
    let lines = [
        json!({"prompt_ids": [1], "max_tokens": 2, "ignore_eos": true}),
        json!({"prompt_ids": [99999], "max_tokens": 2}),
        json!({"prompt": "", "max_tokens": 2}),
        json!({"prompt_ids": [1], "top_p": 7.0}),
        json!({"prompt_ids": [1], "max_tokens": 9000}),
        json!({"prompt_ids": [2], "max_tokens": 3, "ignore_eos": true}),
    ];
    let text: String = lines.iter().map(|l| format!("{l}\n")).collect();
    let (_dir, path) = file("batch.jsonl", text.as_bytes());
    let r = generate(&llama(), &["--json", "--batch", path.to_str().unwrap()]);
    assert_eq!(r.code, Some(1));
    let all = r.objects();
    assert_eq!(all.len(), 6);
    for (i, words) in
        [(1, "outside the vocabulary"), (2, "prompt is empty"), (3, "--top-p"), (4, "--max-model-len")]
    {
        assert!(all[i]["error"].as_str().is_some_and(|e| e.contains(words)), "{}", all[i]);
        assert!(r.err.contains(&format!("request {}: ", i + 1)), "{}", r.err);
    }
    assert_eq!(all[0]["token_ids"].as_array().unwrap().len(), 2);
    assert_eq!(all[5]["token_ids"].as_array().unwrap().len(), 3);
    assert_eq!(r.err.lines().count(), 4, "{}", r.err);
}

#[test]
fn files_that_can_not_be() {
    for (text, words) in [
        ("", "has no requests"),
        ("\n\n", "has no requests"),
        ("{\"prompt\": \"a\"}\n{\"prompt\": ", "line 2: EOF while parsing"),
        ("\n{\"promt\": \"a\"}\n", "line 2: unknown field `promt`"),
        ("{\"max_tokens\": 3}\n", "line 1: give either prompt or prompt_ids"),
        ("{\"prompt\": \"a\", \"prompt_ids\": [1]}\n", "line 1: give either prompt or prompt_ids"),
        ("{\"prompt_ids\": [-1]}\n", "line 1: invalid value: integer `-1`"),
        ("[1, 2]\n", "line 1 is not a JSON object"),
        (
            "{\"prompt_ids\": [1], \"bidirectional_ranges\": [[1, 2, 3]]}\n",
            "line 1: bidirectional_ranges is [[1,2,3]]; a list of pairs of prompt positions",
        ),
        (
            "{\"prompt_ids\": [1], \"bidirectional_ranges\": [[-1, 2]]}\n",
            "bidirectional_ranges is [[-1,2]]; a list",
        ),
        (
            "{\"prompt_ids\": [1], \"bidirectional_ranges\": 7}\n",
            "bidirectional_ranges is 7; a list of pairs",
        ),
    ] {
        let (_dir, path) = file("batch.jsonl", text.as_bytes());
        generate(&llama(), &["--batch", path.to_str().unwrap()]).refused(&["batch.jsonl: ", words]);
    }
    let (_dir, path) = file("batch.jsonl", b"{\"prompt\": \"caf\xe9\"}\n");
    generate(&llama(), &["--batch", path.to_str().unwrap()]).refused(&["batch.jsonl", "UTF-8"]);
    generate(&llama(), &["--batch", "/nowhere.jsonl"]).refused(&["/nowhere.jsonl: cannot be read"]);
    let (_dir, path) = file("batch.jsonl", b"{\"prompt_ids\": [1]}\n");
    generate(&llama(), &["--batch", path.to_str().unwrap(), "--top-p", "3"]).refused(&["--top-p"]);
}

#[test]
fn a_line_that_needs_a_tokenizer_says_so() {
    let (_dir, path) =
        file("batch.jsonl", b"{\"prompt\": \"a\"}\n{\"prompt_ids\": [1], \"max_tokens\": 2}\n");
    let r = generate(&without_tokenizer(), &["--batch", path.to_str().unwrap()]);
    assert_eq!(r.code, Some(1));
    assert!(r.err.contains("request 1: the model came without a tokenizer"), "{}", r.err);
    assert!(r.out.starts_with("[2] ["), "{}", r.out);
}

#[test]
fn lines_that_are_no_requests() {
    for (line, word) in [
        ("[\"hi\", null, null, 2]", "line 1 is not a JSON object"),
        ("\"hi\"", "line 1 is not a JSON object"),
        ("{\"prompt_ids\": [1], \"chat\": true}", "line 1: chat takes a prompt"),
    ] {
        let (_dir, path) = file("b.jsonl", line.as_bytes());
        generate(&llama(), &["--batch", path.to_str().unwrap()]).refused(&["b.jsonl", word]);
    }
    let marked = "\u{feff}{\"prompt_ids\": [1, 2], \"max_tokens\": 1}";
    let (_dir, path) = file("b.jsonl", marked.as_bytes());
    generate(&llama(), &["--batch", path.to_str().unwrap()]).fine();
}

#[test]
fn log_probabilities_are_shown_without_json_too() {
    let (_dir, path) = file("b.jsonl", b"{\"prompt_ids\": [1, 2], \"max_tokens\": 2}");
    let r =
        generate(&llama(), &["--batch", path.to_str().unwrap(), "--logprobs", "2", "--ignore-eos"]).fine();
    assert_eq!(r.err.matches("logprobs of token").count(), 2, "{}", r.err);
}
