//! The project's copies of tiny checkpoints and goldens, and the directories that may stand in for
//! them: `HEADWAY_MODELS_DIR` (checkpoints by folder name, GGUF files by file name) and
//! `HEADWAY_GOLDEN_DIR` (`*.json`).
//!
//! A checkpoint is unpacked once under `target/testdata`, into a folder that carries the archive's
//! checksum; parallel test processes don't see each other's half-written files. Not for real models'
//! weights: those are fetched.

use std::{
    collections::BTreeMap,
    fs, io,
    io::Read,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Names a directory of checkpoints and GGUF files.
pub const MODELS_DIR: &str = "HEADWAY_MODELS_DIR";
/// Names a directory of goldens.
pub const GOLDEN_DIR: &str = "HEADWAY_GOLDEN_DIR";

/// Why test data can't be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TestDataError {
    /// An environment variable names something else than a directory.
    #[error("{variable} is {path}, which is not a directory; unset it or name one")]
    NotADirectory {
        /// The variable.
        variable: &'static str,
        /// Its value.
        path: PathBuf,
    },
    /// No copy of that name.
    #[error("no test data is named {name}; the project has {known} (or set {MODELS_DIR})")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// An archive that can't be read.
    #[error("{path}: {why}; pack it again with tools/pack_testdata.py")]
    Archive {
        /// The archive.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Reading or writing a file.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

type Result<T> = std::result::Result<T, TestDataError>;

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> TestDataError + '_ {
    move |source| TestDataError::Io { path: path.to_owned(), source }
}

/// The directory that a variable names; `None` where it is unset or empty.
///
/// # Errors
/// [`TestDataError::NotADirectory`].
pub fn directory(variable: &'static str) -> Result<Option<PathBuf>> {
    match std::env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from) {
        Some(path) if !path.is_dir() => Err(TestDataError::NotADirectory { variable, path }),
        other => Ok(other),
    }
}

/// The project's `testdata` folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata")
}

fn unpacked_root() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR").filter(|v| !v.is_empty()) {
        Some(target) => PathBuf::from(target).join("testdata"),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/testdata"),
    }
}

/// Names of the checkpoints that the project has copies of.
///
/// # Errors
/// The folder can't be read.
pub fn model_names() -> Result<Vec<String>> {
    let dir = root().join("models");
    let mut names = vec![];
    for entry in fs::read_dir(&dir).map_err(io_error(&dir))? {
        let path = entry.map_err(io_error(&dir))?.path();
        if path.extension().is_some_and(|e| e == "zip") {
            names.extend(path.file_stem().and_then(|s| s.to_str()).map(str::to_owned));
        }
    }
    names.sort();
    Ok(names)
}

/// The folder of a tiny checkpoint: in `HEADWAY_MODELS_DIR` where that has one of this name, else the
/// project's copy, unpacked. The folder's last component is the name.
///
/// # Errors
/// No such checkpoint; a variable that names no directory; an archive that can't be unpacked.
pub fn model_dir(name: &str) -> Result<PathBuf> {
    if let Some(given) = directory(MODELS_DIR)?.map(|d| d.join(name)).filter(|d| d.is_dir()) {
        return Ok(given);
    }
    let known = model_names()?;
    if !known.iter().any(|k| k == name) {
        return Err(TestDataError::Unknown { name: name.to_owned(), known: known.join(", ") });
    }
    unpack(&root().join("models").join(format!("{name}.zip")), name)
}

/// A file of a real model (`smollm2-135m-instruct-q4_1.gguf`, …) in `HEADWAY_MODELS_DIR`; `None`
/// where that is unset or has no such file, so that the caller fetches it.
///
/// # Errors
/// A variable that names no directory.
pub fn real_model(file_name: &str) -> Result<Option<PathBuf>> {
    Ok(directory(MODELS_DIR)?.map(|d| d.join(file_name)).filter(|p| p.is_file()))
}

/// All goldens, by file name: those of `HEADWAY_GOLDEN_DIR` alone where that is set, else the
/// project's.
///
/// # Errors
/// A file that can't be read.
pub fn goldens() -> Result<BTreeMap<String, String>> {
    let text = |path: &Path, bytes: Vec<u8>| {
        String::from_utf8(bytes)
            .map_err(|e| TestDataError::Archive { path: path.to_owned(), why: e.to_string() })
    };
    let mut files = BTreeMap::new();
    if let Some(dir) = directory(GOLDEN_DIR)? {
        for entry in fs::read_dir(&dir).map_err(io_error(&dir))? {
            let path = entry.map_err(io_error(&dir))?.path();
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("").to_owned();
            if name.ends_with(".json") {
                files.insert(name, text(&path, fs::read(&path).map_err(io_error(&path))?)?);
            }
        }
        return Ok(files);
    }
    let path = root().join("golden.zip");
    let bytes = fs::read(&path).map_err(io_error(&path))?;
    for (name, data) in entries(&path, &bytes)? {
        files.insert(name, text(&path, data)?);
    }
    Ok(files)
}

/// An archive's files, whole, with planes put together.
fn entries(path: &Path, archive: &[u8]) -> Result<BTreeMap<String, Vec<u8>>> {
    let bad = |why: String| TestDataError::Archive { path: path.to_owned(), why };
    let mut zip = zip::ZipArchive::new(io::Cursor::new(archive)).map_err(|e| bad(e.to_string()))?;
    let mut files = BTreeMap::new();
    let mut planes: BTreeMap<String, Vec<Vec<u8>>> = BTreeMap::new();
    for i in 0..zip.len() {
        let mut entry = zip.by_index(i).map_err(|e| bad(e.to_string()))?;
        let name = entry.name().to_owned();
        let mut data = vec![];
        entry.read_to_end(&mut data).map_err(|e| bad(e.to_string()))?;
        match plane(&name) {
            Some((whole, at)) if at == planes.get(whole).map_or(0, Vec::len) => {
                planes.entry(whole.to_owned()).or_default().push(data);
            }
            Some(_) => return Err(bad(format!("{name} is out of order"))),
            None => {
                files.insert(name, data);
            }
        }
    }
    for (name, p) in planes {
        files.insert(name, interleave(&p));
    }
    Ok(files)
}

/// `("model.safetensors", 1)` of `model.safetensors.plane1of2`.
fn plane(name: &str) -> Option<(&str, usize)> {
    let (whole, number) = name.rsplit_once(".plane")?;
    Some((whole, number.split_once("of")?.0.parse().ok()?))
}

/// Byte j of plane i is byte `j · planes + i` of the file.
fn interleave(planes: &[Vec<u8>]) -> Vec<u8> {
    let longest = planes.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest).flat_map(|j| planes.iter().filter_map(move |p| p.get(j).copied())).collect()
}

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// Unpacks into a folder of its own, then renames it into place: whoever is first wins, and nobody
/// sees a part.
fn unpack(archive: &Path, name: &str) -> Result<PathBuf> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let bytes = fs::read(archive).map_err(io_error(archive))?;
    let parent = unpacked_root().join(format!("{:016x}", checksum(&bytes)));
    let target = parent.join(name);
    if target.is_dir() {
        return Ok(target);
    }
    let n = COUNT.fetch_add(1, Ordering::Relaxed);
    let scratch = parent.join(format!(".{name}.{}.{n}", process::id()));
    fs::create_dir_all(&scratch).map_err(io_error(&scratch))?;
    for (file, data) in entries(archive, &bytes)? {
        let path = scratch.join(file);
        fs::write(&path, data).map_err(io_error(&path))?;
    }
    let renamed = fs::rename(&scratch, &target);
    if renamed.is_err() {
        let _ = fs::remove_dir_all(&scratch);
    }
    if target.is_dir() { Ok(target) } else { renamed.map(|()| target.clone()).map_err(io_error(&target)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_come_together() {
        assert_eq!(plane("model.safetensors.plane1of2"), Some(("model.safetensors", 1)));
        assert_eq!(plane("config.json"), None);
        assert_eq!(interleave(&[vec![1, 3, 5], vec![2, 4]]), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn an_unknown_name_lists_what_there_is() {
        let e = model_dir("tiny-nothing").unwrap_err().to_string();
        assert!(e.contains("tiny-nothing") && e.contains("tiny-llama, tiny-llama-rope-scaling"), "{e}");
    }

    #[test]
    fn copies_unpack_to_whole_checkpoints_from_many_threads() {
        let dirs: Vec<_> = std::thread::scope(|s| {
            let all: Vec<_> = (0..4).map(|_| s.spawn(|| model_dir("tiny-phi3").unwrap())).collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(dirs.windows(2).all(|w| w[0] == w[1]) && dirs[0].ends_with("tiny-phi3"));
        for name in model_names().unwrap() {
            let dir = model_dir(&name).unwrap();
            let weights = fs::read(dir.join("model.safetensors")).unwrap();
            let n = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
            let header: serde_json::Value = serde_json::from_slice(&weights[8..8 + n]).unwrap();
            let ends = header.as_object().unwrap().values().filter_map(|t| t["data_offsets"][1].as_u64());
            assert_eq!(ends.max(), Some((weights.len() - 8 - n) as u64), "{name}");
            assert!(dir.join("config.json").is_file(), "{name}");
            for file in ["config.json", "config.v5.json", "generation_config.json"] {
                let path = dir.join(file);
                assert!(
                    !path.exists() || fs::read_to_string(path).unwrap().starts_with('{'),
                    "{name}/{file}"
                );
            }
        }
    }
}
