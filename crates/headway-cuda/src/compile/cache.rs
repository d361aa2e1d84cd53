//! Compiled kernels in a folder. Processes share it: an entry is written beside its place and renamed into it, so that
//! it is whole or not there; an entry that is not what its checksum says counts as not there.

use sha2::{Digest, Sha256};
use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

/// First bytes of an entry: what it is, and the version of its form.
const MAGIC: &[u8; 8] = b"HWCUBIN1";
/// Bytes of a SHA-256 sum.
const SUM: usize = 32;

/// `$XDG_CACHE_HOME/headway/kernels`, or `~/.cache/headway/kernels`; `None` where neither is set.
pub fn default_folder() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let caches = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(caches.join("headway").join("kernels"))
}

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct DiskCache {
    folder: PathBuf,
}

impl DiskCache {
    /// In this folder, which is made when the first entry is put there.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.cubin"))
    }

    /// The entry, where it is there and whole.
    pub fn get(&self, key: &str) -> Option<Vec<u8>> {
        let bytes = fs::read(self.path(key)).ok()?;
        let rest = bytes.strip_prefix(MAGIC)?;
        let (sum, payload) = rest.split_at_checked(SUM)?;
        (Sha256::digest(payload).as_slice() == sum).then(|| payload.to_vec())
    }

    /// Puts an entry there, in place of what is.
    ///
    /// # Errors
    /// The file system's.
    pub fn put(&self, key: &str, payload: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
        file.write_all(MAGIC)?;
        file.write_all(&Sha256::digest(payload))?;
        file.write_all(payload)?;
        file.persist(self.path(key))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_entry_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::new(folder.path().join("made").join("when needed"));
        assert_eq!(cache.get("k"), None);
        cache.put("k", b"machine code").unwrap();
        assert_eq!(cache.get("k").as_deref(), Some(&b"machine code"[..]));
        let path = cache.path("k");
        let whole = fs::read(&path).unwrap();
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(cache.get("k"), None, "{len} bytes");
        }
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&path, bytes).unwrap();
            assert_eq!(cache.get("k"), None, "byte {at}");
        }
        cache.put("k", b"").unwrap();
        assert_eq!(cache.get("k").as_deref(), Some(&b""[..]));
        assert_eq!(fs::read_dir(cache.folder()).unwrap().count(), 1);
    }

    #[test]
    fn writers_of_one_entry_may_race_its_readers() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::new(folder.path().to_owned());
        let payload = |i: u8| vec![i; 100_000];
        std::thread::scope(|s| {
            for i in 0..4u8 {
                let cache = &cache;
                s.spawn(move || (0..25).for_each(|_| cache.put("k", &payload(i)).unwrap()));
                s.spawn(move || {
                    for _ in 0..100 {
                        let Some(found) = cache.get("k") else { continue };
                        assert!(found.len() == 100_000 && found.iter().all(|b| *b == found[0]));
                    }
                });
            }
        });
        assert_eq!(cache.get("k").map(|p| p.len()), Some(100_000));
        assert_eq!(fs::read_dir(cache.folder()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_can_not_be_made_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(DiskCache::new(file).put("k", b"x").is_err());
    }
}
