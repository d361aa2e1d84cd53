//! Fetches from a hub that refuses, lies, stalls or is not there.

use std::fs;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use super::fake_hub::{FakeHub, Faults, sha256};
use super::{Recorder, attempts, options};
use crate::sources::{AttemptError, CacheError, FetchOptions, HubError, HubId, ModelSpec, Source, resolve};

const REPO: &str = "org/tiny";
const WEIGHTS: &[u8] = &[7; 100_000];

fn spec() -> ModelSpec {
    ModelSpec::Hub(HubId { repo: REPO.to_owned(), revision: "main".to_owned() })
}

fn hub(faults: Faults) -> FakeHub {
    let files: [(&str, &[u8]); 3] =
        [("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", WEIGHTS)];
    FakeHub::start(REPO, &files, faults)
}

/// The hub's error of a fetch that must fail, after checking that the cache was tried first.
fn failure(opts: &FetchOptions) -> HubError {
    let mut tried = attempts(resolve(&spec(), opts, &Recorder::default()).unwrap_err());
    assert!(matches!(tried[0].error, AttemptError::Cache(CacheError::Absent { .. })));
    match tried.remove(1).error {
        AttemptError::Hub(error) => error,
        other => panic!("another error: {other}"),
    }
}

fn failure_with(faults: Faults) -> HubError {
    let (home, hub) = (tempfile::tempdir().unwrap(), hub(faults));
    failure(&options(home.path(), &hub.endpoint()))
}

#[test]
fn missing_repositories_and_revisions_are_named() {
    let faults = |code| Faults { status: Some((404, code)), ..Faults::default() };
    let text = failure_with(faults("RepoNotFound")).to_string();
    assert_eq!(text, "not found (404): repository org/tiny");
    let text = failure_with(faults("RevisionNotFound")).to_string();
    assert_eq!(text, "not found (404): revision 'main' of org/tiny");
    // A server that only says 404.
    let text = failure_with(faults("")).to_string();
    assert!(text.contains("404"), "{text}");
}

#[test]
fn missing_weights_are_explained() {
    let home = tempfile::tempdir().unwrap();
    let hub = FakeHub::start(REPO, &[("config.json", b"{}"), ("pytorch_model.bin", b"x")], Faults::default());
    let error = failure(&options(home.path(), &hub.endpoint()));
    assert!(
        matches!(&error, HubError::Unusable { because, .. } if because.contains("safetensors")),
        "{error}"
    );
    let index = br#"{"weight_map":{"a":"gone.safetensors"}}"#;
    let files: [(&str, &[u8]); 2] = [("config.json", b"{}"), ("model.safetensors.index.json", index)];
    let hub = FakeHub::start(REPO, &files, Faults::default());
    let error = failure(&options(home.path(), &hub.endpoint()));
    assert!(matches!(&error, HubError::NotFound { what } if what.ends_with("gone.safetensors")), "{error}");
}

#[test]
fn gated_repositories_ask_for_a_token() {
    for status in [401, 403] {
        let text =
            failure_with(Faults { status: Some((status, "GatedRepo")), ..Faults::default() }).to_string();
        assert!(
            text.contains("HF_TOKEN") && text.contains("licence") && text.contains("/org/tiny"),
            "{text}"
        );
    }
}

#[test]
fn server_errors_are_told() {
    let error = failure_with(Faults { status: Some((503, "")), ..Faults::default() });
    assert!(matches!(error, HubError::Status { status: 503, .. }), "{error}");
}

#[test]
fn wrong_bytes_are_deleted_and_fetched_anew() {
    let (home, hub) = (tempfile::tempdir().unwrap(), hub(Faults { corrupt: true, ..Faults::default() }));
    let opts = options(home.path(), &hub.endpoint());
    let error = failure(&opts);
    assert!(
        matches!(&error, HubError::Damaged { what: "sha256", announced, .. } if *announced == sha256(WEIGHTS)),
        "{error}"
    );
    let blob = opts.hub_cache_dir.join("models--org--tiny/blobs").join(sha256(WEIGHTS));
    assert!(!blob.exists() && !blob.with_extension("part").exists());
    assert!(!opts.hub_cache_dir.join("models--org--tiny/refs/main").exists());

    hub.set(Faults::default());
    assert_eq!(resolve(&spec(), &opts, &Recorder::default()).unwrap().source, Source::Hub);
    assert_eq!(fs::read(blob).unwrap(), WEIGHTS);
}

#[test]
fn wrong_bytes_of_an_earlier_run_are_not_kept() {
    let (home, hub) = (tempfile::tempdir().unwrap(), hub(Faults::default()));
    let opts = options(home.path(), &hub.endpoint());
    let blobs = opts.hub_cache_dir.join("models--org--tiny/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join(format!("{}.part", sha256(WEIGHTS))), [8; 50_000]).unwrap();
    let got = resolve(&spec(), &opts, &Recorder::default()).unwrap();
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), WEIGHTS);
    assert_eq!(hub.seen("GET", "model.safetensors").len(), 2);
}

#[test]
fn silence_is_bounded() {
    let begun = Instant::now();
    let error = failure_with(Faults { silent: true, ..Faults::default() });
    assert!(matches!(error, HubError::TimedOut { phase: "waiting for the answer", .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn a_stalled_transfer_is_kept_and_resumed() {
    let (home, hub) =
        (tempfile::tempdir().unwrap(), hub(Faults { stall_after: Some(0), ..Faults::default() }));
    let opts = options(home.path(), &hub.endpoint());
    assert!(matches!(failure(&opts), HubError::TimedOut { .. }));
    hub.set(Faults { cuts: vec![40_000, 0, 0, 0, 0, 0], ..Faults::default() });
    let error = failure(&opts);
    assert!(matches!(error, HubError::Interrupted { have: 40_000, total: 100_000, .. }), "{error}");
    hub.set(Faults::default());
    let recorder = Recorder::default();
    resolve(&spec(), &opts, &recorder).unwrap();
    assert!(
        recorder.text().contains("resuming model.safetensors at 40000 of 100000 bytes"),
        "{}",
        recorder.text()
    );
}

#[test]
fn a_refused_connection_is_no_network() {
    let home = tempfile::tempdir().unwrap();
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = failure(&options(home.path(), &format!("http://{address}")));
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
}

#[test]
fn an_unknown_host_is_no_network() {
    let home = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let error = failure(&options(home.path(), "http://no-such-host.invalid"));
    assert!(matches!(error, HubError::Unreachable { .. } | HubError::TimedOut { .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn offline_asks_nobody() {
    let (home, hub) = (tempfile::tempdir().unwrap(), hub(Faults::default()));
    let mut opts = options(home.path(), &hub.endpoint());
    opts.hub_offline = true;
    assert!(matches!(failure(&opts), HubError::Offline));
    assert!(hub.seen("GET", "").is_empty());
}

#[test]
fn a_server_that_is_no_hub_is_told() {
    let home = tempfile::tempdir().unwrap();
    // A web server answers 200 to anything, without the hub's headers.
    let hub = FakeHub::start("other/repo", &[], Faults { status: Some((200, "")), ..Faults::default() });
    let error = failure(&options(home.path(), &hub.endpoint()));
    assert!(matches!(error, HubError::Protocol { .. }), "{error}");
}
