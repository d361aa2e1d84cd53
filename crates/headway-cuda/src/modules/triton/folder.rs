//! A folder of compiled Triton kernels: what of it serves a layer, and whether a file is what the manifest says.

use super::{Form, TRITON, TRITON_MANIFEST, TritonEntry, TritonError, TritonManifest, TritonWant, cubin};
use crate::modules::{
    default_folder,
    folder::{replace, sha256},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// The kernels of this machine, read once a process; without a folder, none.
pub fn installed_triton() -> &'static Result<TritonFolder, TritonError> {
    static INSTALLED: OnceLock<Result<TritonFolder, TritonError>> = OnceLock::new();
    INSTALLED.get_or_init(|| match default_folder() {
        Some(path) => TritonFolder::open(&path),
        None => Ok(TritonFolder { path: PathBuf::new(), manifest: TritonManifest::default() }),
    })
}

/// A folder and its manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TritonFolder {
    path: PathBuf,
    manifest: TritonManifest,
}

impl TritonFolder {
    /// Reads a folder's manifest; a folder without one has no kernels.
    ///
    /// # Errors
    /// A manifest that can't be read or understood.
    pub fn open(path: &Path) -> Result<Self, TritonError> {
        let file = path.join(TRITON_MANIFEST);
        // A pipe would never end.
        if fs::metadata(&file).is_ok_and(|m| !m.is_file()) {
            return Err(TritonError::NotFile { path: file });
        }
        let manifest = match fs::read(&file) {
            Ok(text) => TritonManifest::parse(&text, &file)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => TritonManifest::default(),
            Err(e) => return Err(TritonError::file(&file, &e)),
        };
        Ok(Self { path: path.to_owned(), manifest })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its kernels.
    pub fn kernels(&self) -> &[TritonEntry] {
        &self.manifest.kernels
    }

    /// The kernel of this form.
    pub fn find(&self, form: &Form<'_>, arch: Option<&str>) -> Option<&TritonEntry> {
        self.kernels().iter().find(|k| k.is(form, arch))
    }

    /// Whether all kernels that a layer needs are there.
    pub fn has(&self, want: &TritonWant<'_>) -> bool {
        want.kinds().iter().all(|&kind| self.find(&want.form(kind), want.arch).is_some())
    }

    /// That an entry is not what was built.
    pub(crate) fn changed(&self, entry: &TritonEntry) -> TritonError {
        TritonError::Changed { path: self.path.join(&entry.file) }
    }

    /// Whether the files that a layer needs lie there, as the file system tells without opening them, and their entries are
    /// what was built; which entries there must be is [`TritonFolder::has`]'s.
    ///
    /// # Errors
    /// The first that is missing, no plain file, of another length, or whose entry was changed.
    pub fn lies(&self, want: &TritonWant<'_>) -> Result<(), TritonError> {
        let mut entries = want.kinds().iter().filter_map(|&kind| self.find(&want.form(kind), want.arch));
        entries.try_for_each(|e| self.there(e).map(drop))
    }

    /// An entry's file: a plain one of its length, before anything opens it.
    fn there(&self, entry: &TritonEntry) -> Result<PathBuf, TritonError> {
        let path = self.path.join(&entry.file);
        if !entry.is_sealed() {
            return Err(self.changed(entry));
        }
        let at = match fs::metadata(&path) {
            Ok(at) => at,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(TritonError::Missing { path }),
            Err(e) => return Err(TritonError::file(&path, &e)),
        };
        if !at.is_file() {
            return Err(TritonError::NotFile { path });
        }
        if at.len() != entry.bytes {
            return Err(TritonError::Length { path, found: at.len(), expected: entry.bytes });
        }
        Ok(path)
    }

    /// A kernel's machine code for a device of this architecture (`None`: the one that it is for), held against its
    /// entry, and the entry against what headway launches.
    ///
    /// # Errors
    /// [`TritonError`], by what is wrong.
    pub fn code(&self, entry: &TritonEntry, arch: Option<&str>) -> Result<Vec<u8>, TritonError> {
        let path = self.path.join(&entry.file);
        if entry.triton != TRITON {
            return Err(TritonError::Version { at: path.display().to_string(), found: entry.triton.clone() });
        }
        if let Some(device) = arch.filter(|&a| a != entry.arch) {
            return Err(TritonError::Arch { path, found: entry.arch.clone(), device: device.into() });
        }
        // A kernel never asks what it is called with: what an entry says of its file is held against the file's name.
        let named = entry.form().name(&entry.arch) + ".cubin";
        if entry.file != named {
            return Err(TritonError::Name { path, named });
        }
        let expected = entry.form().arguments();
        if entry.function != entry.kind.function() || entry.arguments != expected {
            return Err(TritonError::Arguments {
                path,
                function: entry.function.clone(),
                found: entry.arguments.join(", "),
                expected: expected.join(", "),
            });
        }
        if let Some(what) = entry.other_sources() {
            return Err(TritonError::Sources { path, what });
        }
        let path = self.there(entry)?;
        let bytes = fs::read(&path).map_err(|e| TritonError::file(&path, &e))?;
        if bytes.len() as u64 != entry.bytes {
            return Err(TritonError::Length { path, found: bytes.len() as u64, expected: entry.bytes });
        }
        if let Err(why) = cubin::check(&bytes, &entry.function) {
            return Err(TritonError::NotCubin { path, why });
        }
        let found = sha256(&bytes);
        if !found.eq_ignore_ascii_case(&entry.sha256) {
            return Err(TritonError::Hash { path, found, expected: entry.sha256.clone() });
        }
        Ok(bytes)
    }

    /// Puts kernels' entries into the manifest, which is replaced as a whole. Another process's entries stay.
    ///
    /// # Errors
    /// The file system's.
    pub(super) fn put(&mut self, entries: Vec<TritonEntry>) -> Result<(), TritonError> {
        let file = self.path.join(TRITON_MANIFEST);
        let wrong = |e: io::Error| TritonError::file(&file, &e);
        // Until this is dropped: two builds may end at once.
        let lock = fs::File::create(self.path.join(".lock")).map_err(wrong)?;
        lock.lock().map_err(wrong)?;
        *self = Self::open(&self.path)?;
        entries.into_iter().for_each(|e| self.manifest.put(e));
        replace(&file, &self.manifest.write()).map_err(wrong)
    }
}
