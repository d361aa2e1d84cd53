//! `backends`, `pull`, help.

use super::support::{Copy, finish, headway, llama, run};
use std::{fs, process::Stdio};

#[test]
fn backends_are_a_table_or_an_object_a_line() {
    let all = run(["backends", "--json"]).fine().objects();
    assert!(all.iter().any(|b| b["name"] == "CPU_ATTN" && b["supports_sliding_window"] == true), "{all:?}");
    let table = run(["backends", "-v"]).fine().out;
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].contains("NAME") && lines[0].contains("HEAD SIZES"));
    assert_eq!(lines[0].find("DEVICE"), lines[1].find("cpu"), "aligned:\n{table}");
    assert!(table.contains("sliding window") && table.contains("cpu kernels use"), "{table}");
    assert!(!table.contains('\u{1b}'), "no colours where there is no terminal");
}

#[test]
fn pull_of_a_cached_model_says_where_it_lies() {
    let home = tempfile::TempDir::new().unwrap();
    let repo = home.path().join("hub/models--HuggingFaceTB--SmolLM2-135M-Instruct");
    let (refs, snapshot) = (repo.join("refs"), repo.join("snapshots/abc"));
    fs::create_dir_all(&refs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(refs.join("main"), "abc").unwrap();
    let copy = Copy::of(&llama());
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        fs::copy(copy.file(file), snapshot.join(file)).unwrap();
    }
    let pull = |args: &[&str]| {
        finish(headway().env("HF_HOME", home.path()).args(["pull", "smollm2-135m-instruct"]).args(args))
            .fine()
    };
    let o = pull(&["--json"]).object();
    assert_eq!((&o["name"], &o["source"]), (&"smollm2-135m-instruct".into(), &"local cache".into()));
    assert_eq!(o["path"].as_str(), snapshot.to_str());
    let files = o["files"].as_array().unwrap();
    assert_eq!(files.len(), 4);
    assert!(files.iter().all(|f| f["sha256"].as_str().is_some_and(|s| s.len() == 64)));
    assert_eq!(o["bytes"].as_u64(), files.iter().map(|f| f["bytes"].as_u64()).sum());
    let plain = pull(&[]).out;
    assert!(plain.contains("local cache") && plain.lines().count() == 5, "{plain}");
}

#[test]
fn help_has_examples_and_says_nothing_of_this_machine() {
    for command in ["", "generate", "embed", "chat", "backends", "pull"] {
        let args: Vec<&str> = [command, "--help"].into_iter().filter(|a| !a.is_empty()).collect();
        let r = finish(headway().env("HEADWAY_MODEL", "secret-model").args(args)).fine();
        assert!(r.out.contains("Examples:") && r.err.is_empty(), "{command}: {}", r.out);
        assert!(!r.out.contains("secret-model") && !r.out.contains('\u{1b}'), "{}", r.out);
    }
    let r = run::<&str>([]);
    assert_eq!((r.code, r.out.as_str()), (Some(2), ""));
    assert!(r.err.contains("Usage: headway <COMMAND>"), "{}", r.err);
    assert!(run(["--version"]).fine().out.starts_with("headway 0."));
}

#[test]
fn a_reader_that_is_gone_is_no_failure() {
    for args in [&["backends"][..], &["backends", "--json"], &["--help"]] {
        let mut child = headway().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let ended = child.wait_with_output().unwrap();
        assert_eq!((ended.status.code(), ended.stderr.len()), (Some(0), 0), "{args:?}");
    }
}
