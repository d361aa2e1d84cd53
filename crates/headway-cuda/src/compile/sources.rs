//! The kernels' sources, as part of the program: every file under `csrc`.

use sha2::{Digest, Sha256};
use std::borrow::Cow;

macro_rules! sources {
    ($($path:literal,)*) => {
        &[$(($path, include_str!(concat!("../../csrc/", $path)))),*]
    };
}

const EMBEDDED: &[(&str, &str)] = sources![
    "attention/attention.cu",
    "attention/pages.cuh",
    "attention/params.cuh",
    "attention/rows.cuh",
    "attention/tile.cuh",
    "attention/tile_io.cuh",
    "bench/memory.cu",
    "cache/params.cuh",
    "cache/put.cuh",
    "cache/write.cu",
    "cache/write_latent.cu",
    "common/mma.cuh",
    "common/softmax.cuh",
    "common/tiles.cuh",
    "common/types.cuh",
    "mla/decode.cu",
    "mla/decode_params.cuh",
    "mla/gather.cu",
    "mla/merge.cu",
    "mla/prefill.cu",
    "ops/activation.cuh",
    "ops/argmax.cu",
    "ops/codes.cu",
    "ops/dequantise.cu",
    "ops/elementwise.cu",
    "ops/experts/combine.cu",
    "ops/experts/gemm.cu",
    "ops/experts/route.cu",
    "ops/experts/sort.cu",
    "ops/gated.cu",
    "ops/gather.cu",
    "ops/norm.cu",
    "ops/rope.cu",
    "ops/rows.cuh",
    "ops/sample.cu",
    "state_space/conv.cu",
    "state_space/params.cuh",
    "state_space/scan.cu",
    "state_space/step.cu",
];

/// Source files by their path; those that end in `.cuh` are headers.
#[derive(Clone, Debug)]
pub struct Sources(Cow<'static, [(&'static str, &'static str)]>);

impl Sources {
    /// headway's own.
    pub const fn embedded() -> Self {
        Self(Cow::Borrowed(EMBEDDED))
    }

    /// Any, as (path, text).
    pub fn of(files: Vec<(&'static str, &'static str)>) -> Self {
        Self(Cow::Owned(files))
    }

    /// SHA-256 of all paths and texts, in hexadecimal digits.
    pub fn hash(&self) -> String {
        let mut hash = Sha256::new();
        for text in self.0.iter().flat_map(|(path, text)| [path, text]) {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }

    /// The text of a file.
    pub fn get(&self, path: &str) -> Option<&'static str> {
        self.0.iter().find(|f| f.0 == path).map(|f| f.1)
    }

    /// The headers: path and text.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.0.iter().copied().filter(|f| f.0.ends_with(".cuh"))
    }

    /// The files with kernels in them.
    pub fn kernels(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|f| f.0).filter(|f| f.ends_with(".cu"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeSet, fs, path::Path};

    #[test]
    fn every_file_on_disk_is_embedded() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("csrc");
        let (mut found, mut folders) = (BTreeSet::new(), vec![root.clone()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
                if entry.is_dir() {
                    folders.push(entry);
                } else if entry.extension().is_some_and(|e| e != "py") {
                    // Python is `modules::triton`'s.
                    found.insert(entry.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/"));
                }
            }
        }
        let embedded: BTreeSet<_> = EMBEDDED.iter().map(|f| f.0.to_owned()).collect();
        assert_eq!(embedded, found);
    }

    #[test]
    fn a_hash_is_of_paths_and_texts() {
        let of = |files: &[(&'static str, &'static str)]| Sources::of(files.to_vec()).hash();
        let all = [of(&[("a", "bc")]), of(&[("ab", "c")]), of(&[("a", "bd")]), of(&[]), of(&[("", "")])];
        let distinct: BTreeSet<_> = all.iter().collect();
        assert_eq!((distinct.len(), all[0].len()), (all.len(), 64));
        assert_eq!(Sources::embedded().hash(), Sources::embedded().hash());
    }

    #[test]
    fn no_source_needs_the_toolkits_headers() {
        for (path, text) in EMBEDDED {
            for line in text.lines().filter(|l| l.trim_start().starts_with("#include")) {
                let name = line.split('"').nth(1);
                assert!(name.is_some_and(|n| Sources::embedded().get(n).is_some()), "{path}: {line}");
            }
        }
    }
}
