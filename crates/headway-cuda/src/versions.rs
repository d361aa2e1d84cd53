//! What the speed of this crate's backends depends on besides the device: for figures that are kept.

use crate::{
    compile::Sources,
    modules::{
        self, ModuleFolder,
        triton::{TritonFolder, installed_triton},
    },
};
use std::collections::BTreeMap;

/// By what it is of: headway's own kernels, and the modules and Triton kernels of the folder, each by a hash (`none` where there are none).
pub fn versions() -> BTreeMap<String, String> {
    let unreadable = || "unreadable".to_owned();
    let modules = modules::installed().as_ref().map_or_else(|_| unreadable(), of_modules);
    let triton = installed_triton().as_ref().map_or_else(|_| unreadable(), of_triton);
    let kernels = short(&Sources::embedded().hash());
    let all = [("CUDA kernels", kernels), ("kernel modules", modules), ("Triton kernels", triton)];
    all.map(|(name, version)| (name.to_owned(), version)).into()
}

/// Enough of a hash to tell two apart.
fn short(hash: &str) -> String {
    hash.chars().take(12).collect()
}

fn of_modules(folder: &ModuleFolder) -> String {
    let modules = folder.modules().iter().map(|m| format!("{} {}", m.file, m.sha256));
    let extensions = folder.extensions().iter().map(|m| format!("{} {}", m.file, m.sha256));
    of_files(&modules.chain(extensions).collect::<Vec<_>>())
}

fn of_triton(folder: &TritonFolder) -> String {
    of_files(&folder.kernels().iter().map(|k| format!("{} {}", k.file, k.sha256)).collect::<Vec<_>>())
}

/// Files, each with its hash.
fn of_files(all: &[String]) -> String {
    match all.is_empty() {
        true => "none".into(),
        false => short(&modules::sha256(all.join("\n").as_bytes())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_count_by_file_and_hash() {
        let empty = tempfile::tempdir().unwrap();
        let folder = |entries: &str| {
            let text = format!(r#"{{"format": 1, "modules": [], "extensions": [{entries}]}}"#);
            std::fs::write(empty.path().join("manifest.json"), text).unwrap();
            of_modules(&ModuleFolder::open(empty.path()).unwrap())
        };
        let entry = |hash: &str| {
            format!(
                r#"{{"file": "a.so", "extension": "flash_mla", "vllm": "0", "bytes": 1, "sha256": "{hash}"}}"#
            )
        };
        let (one, other) = (folder(&entry("00")), folder(&entry("01")));
        assert_eq!((folder("").as_str(), one.len()), ("none", 12));
        assert_ne!(one, other);
        assert_eq!(versions()["CUDA kernels"].len(), 12);
    }
}
