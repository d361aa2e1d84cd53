//! Fetches from a hub that behaves: what is asked, what is stored, what is resumed, what is asked only once.

use std::fs;

use super::fake_hub::{COMMIT, FakeHub, Faults, sha256};
use super::{Recorder, options};
use crate::sources::{AccessToken, HubId, ModelSpec, Source, pull, resolve};

const REPO: &str = "org/tiny";

fn spec() -> ModelSpec {
    ModelSpec::Hub(HubId { repo: REPO.to_owned(), revision: "main".to_owned() })
}

fn weights() -> Vec<u8> {
    (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn hub(faults: Faults) -> FakeHub {
    let weights = weights();
    let files: [(&str, &[u8]); 6] = [
        ("config.json", b"{\"model_type\":\"llama\"}"),
        ("tokenizer.json", b"{\"tokenizer\":1}"),
        ("tokenizer_config.json", b"{}"),
        ("model.safetensors", &weights),
        ("README.md", b"unneeded"),
        ("onnx/model.onnx", b"unneeded"),
    ];
    FakeHub::start(REPO, &files, faults)
}

#[test]
fn fetches_what_is_needed_once() {
    let (home, hub) = (tempfile::tempdir().unwrap(), hub(Faults::default()));
    let opts = options(home.path(), &hub.endpoint());
    let recorder = Recorder::default();
    let got = resolve(&spec(), &opts, &recorder).unwrap();
    assert_eq!(got.source, Source::Hub);
    assert_eq!(got.path, opts.hub_cache_dir.join("models--org--tiny/snapshots").join(COMMIT));
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
    assert_eq!(fs::read(got.path.join("tokenizer_config.json")).unwrap(), b"{}");
    assert!(hub.seen("GET", "README").is_empty() && hub.seen("GET", "onnx").is_empty());
    assert_eq!(got.bytes(), 300_000 + 22 + 15 + 2);
    assert!(recorder.transfers().contains(&("model.safetensors".to_owned(), Some(300_000), 300_000)));

    let asked = hub.seen("GET", "").len();
    let again = resolve(&spec(), &opts, &recorder).unwrap();
    assert_eq!((again.source, &again.path, &again.files), (Source::Cache, &got.path, &got.files));
    assert_eq!(hub.seen("GET", "").len(), asked);
}

#[test]
fn pull_knows_every_digest() {
    let (home, hub) = (tempfile::tempdir().unwrap(), hub(Faults::default()));
    let got = pull(&spec(), &options(home.path(), &hub.endpoint()), &Recorder::default()).unwrap();
    let weight_file = got.files.iter().find(|f| f.path.ends_with("model.safetensors")).unwrap();
    assert_eq!(weight_file.sha256, Some(sha256(&weights())));
    let config = got.files.iter().find(|f| f.path.ends_with("config.json")).unwrap();
    assert_eq!(config.sha256, Some(sha256(b"{\"model_type\":\"llama\"}")));
}

#[test]
fn follows_redirects_without_the_token() {
    let (home, hub) = (tempfile::tempdir().unwrap(), hub(Faults { redirects: true, ..Faults::default() }));
    let mut opts = options(home.path(), &hub.endpoint());
    opts.hub_token = Some(AccessToken("secret".to_owned()));
    let got = resolve(&spec(), &opts, &Recorder::default()).unwrap();
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
    for request in hub.seen("GET", "/resolve/") {
        assert_eq!(request.headers.get("authorization").map(String::as_str), Some("Bearer secret"));
    }
    let storage = hub.seen("GET", "/storage/");
    assert!(!storage.is_empty() && storage.iter().all(|r| !r.headers.contains_key("authorization")));
}

#[test]
fn follows_redirects_of_every_kind() {
    for (hides_size, renamed) in [(true, false), (false, true), (true, true)] {
        let faults = Faults { redirects: true, hides_size, renamed, ..Faults::default() };
        let (home, hub) = (tempfile::tempdir().unwrap(), hub(faults));
        let got = resolve(&spec(), &options(home.path(), &hub.endpoint()), &Recorder::default()).unwrap();
        assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
    }
}

#[test]
fn resumes_after_cuts_in_one_run() {
    let faults = Faults { cuts: vec![100_000, 50_000], ..Faults::default() };
    let (home, hub) = (tempfile::tempdir().unwrap(), hub(faults));
    let recorder = Recorder::default();
    let got = resolve(&spec(), &options(home.path(), &hub.endpoint()), &recorder).unwrap();
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
    let ranges: Vec<_> = hub
        .seen("GET", "resolve/main/model.safetensors")
        .iter()
        .map(|r| r.headers.get("range").cloned().unwrap_or_default())
        .collect();
    assert_eq!(ranges, ["", "bytes=100000-", "bytes=150000-"]);
    assert!(recorder.transfers().contains(&("model.safetensors".to_owned(), Some(300_000), 300_000)));
}

#[test]
fn resumes_what_an_earlier_run_left() {
    let (home, hub) = (tempfile::tempdir().unwrap(), hub(Faults::default()));
    let opts = options(home.path(), &hub.endpoint());
    let blobs = opts.hub_cache_dir.join("models--org--tiny/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(format!("{}.part", sha256(&weights())));
    // Cut in the middle, complete, and longer than the file can be.
    for (have, asked) in [(70_000, Some("bytes=70000-")), (300_000, None), (300_001, Some(""))] {
        let left: Vec<u8> = weights().into_iter().chain([0]).take(have).collect();
        fs::write(&part, left).unwrap();
        let _ = fs::remove_file(blobs.join(sha256(&weights())));
        let before = hub.seen("GET", "model.safetensors").len();
        let recorder = Recorder::default();
        let got = resolve(&spec(), &opts, &recorder).unwrap();
        assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
        let requests = hub.seen("GET", "model.safetensors");
        let range = requests.get(before).map(|r| r.headers.get("range").cloned().unwrap_or_default());
        assert_eq!(range.as_deref(), asked, "{have} bytes left");
        assert!(!part.exists());
    }
}

#[test]
fn starts_over_where_ranges_are_ignored() {
    let faults = Faults { cuts: vec![1_000], ignores_ranges: true, ..Faults::default() };
    let (home, hub) = (tempfile::tempdir().unwrap(), hub(faults));
    let got = resolve(&spec(), &options(home.path(), &hub.endpoint()), &Recorder::default()).unwrap();
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn works_without_list_and_without_head() {
    let faults = Faults { no_list: true, no_head: true, ..Faults::default() };
    let (home, hub) = (tempfile::tempdir().unwrap(), hub(faults));
    let got = resolve(&spec(), &options(home.path(), &hub.endpoint()), &Recorder::default()).unwrap();
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
    assert_eq!(got.files.len(), 4);
}

#[test]
fn fetches_every_shard_and_nothing_else() {
    let index =
        br#"{"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors","c":"model-1.safetensors"}}"#;
    let files: [(&str, &[u8]); 6] = [
        ("config.json", b"{}"),
        ("tokenizer.json", b"{}"),
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", b"first"),
        ("model-2.safetensors", b"second"),
        ("consolidated.safetensors", b"unneeded"),
    ];
    let hub = FakeHub::start(REPO, &files, Faults::default());
    let home = tempfile::tempdir().unwrap();
    let opts = options(home.path(), &hub.endpoint());
    let got = resolve(&spec(), &opts, &Recorder::default()).unwrap();
    assert_eq!(fs::read(got.path.join("model-2.safetensors")).unwrap(), b"second");
    assert!(hub.seen("GET", "consolidated").is_empty());
    assert_eq!(got.files.len(), 5);
    // A snapshot that lost a shard is no longer taken from the cache.
    fs::remove_file(got.path.join("model-1.safetensors")).unwrap();
    assert_eq!(resolve(&spec(), &opts, &Recorder::default()).unwrap().source, Source::Hub);
}

#[test]
fn two_at_once_transfer_once() {
    let faults = Faults { slow: std::time::Duration::from_millis(300), ..Faults::default() };
    let (home, hub) = (tempfile::tempdir().unwrap(), hub(faults));
    let mut opts = options(home.path(), &hub.endpoint());
    opts.hub_timeout = std::time::Duration::from_secs(5);
    std::thread::scope(|scope| {
        let run = || resolve(&spec(), &opts, &Recorder::default()).unwrap();
        let (one, two) = (scope.spawn(run), scope.spawn(run));
        assert_eq!(one.join().unwrap().path, two.join().unwrap().path);
    });
    assert_eq!(hub.seen("GET", "model.safetensors").len(), 1);
}
