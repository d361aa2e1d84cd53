//! A folder of modules: where it is, what of it serves a layer, and whether a file is what the manifest says.

use super::{
    Entry, FLASHINFER, MANIFEST, Manifest, ModuleError, Want, elf,
    extension::{ExtensionEntry, Extensions},
};
use sha2::{Digest, Sha256};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// The environment variable that names the folder.
pub const FOLDER_VARIABLE: &str = "HEADWAY_KERNELS_DIR";

/// [`FOLDER_VARIABLE`]; else `$XDG_CACHE_HOME/headway/modules`, or `~/.cache/headway/modules`; `None` where none of
/// them is set.
pub fn default_folder() -> Option<PathBuf> {
    let named = std::env::var_os(FOLDER_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from);
    named.or_else(|| crate::compile::default_folder().map(|kernels| kernels.with_file_name("modules")))
}

/// The modules of this machine, read once a process; without a folder, none.
pub fn installed() -> &'static Result<ModuleFolder, ModuleError> {
    static INSTALLED: OnceLock<Result<ModuleFolder, ModuleError>> = OnceLock::new();
    INSTALLED.get_or_init(|| match default_folder() {
        Some(path) => ModuleFolder::open(&path),
        None => Ok(ModuleFolder { path: PathBuf::new(), manifest: Manifest::default() }),
    })
}

/// A folder and its manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFolder {
    path: PathBuf,
    manifest: Manifest,
}

impl ModuleFolder {
    /// Reads a folder's manifest; a folder without one has no modules.
    ///
    /// # Errors
    /// A manifest that can't be read or understood.
    pub fn open(path: &Path) -> Result<Self, ModuleError> {
        let file = path.join(MANIFEST);
        let manifest = match fs::read(&file) {
            Ok(text) => Manifest::parse(&text, &file)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Manifest::default(),
            Err(e) => return Err(ModuleError::Unreadable { path: file, why: e.to_string() }),
        };
        Ok(Self { path: path.to_owned(), manifest })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its modules.
    pub fn modules(&self) -> &[Entry] {
        &self.manifest.modules
    }

    /// Its extension modules.
    pub fn extensions(&self) -> &[ExtensionEntry] {
        &self.manifest.extensions
    }

    /// An extension module, where it was fetched.
    pub fn extension(&self, which: Extensions) -> Option<&ExtensionEntry> {
        self.extensions().iter().find(|e| e.extension == which)
    }

    /// Where a module lies.
    pub fn file(&self, entry: &Entry) -> PathBuf {
        self.path.join(&entry.file)
    }

    /// The module that was built for this.
    pub fn find(&self, want: &Want<'_>) -> Option<&Entry> {
        self.modules().iter().find(|m| m.is(want))
    }

    /// Holds a module's file against its entry, and the entry against what headway calls.
    ///
    /// # Errors
    /// [`ModuleError`], by what is wrong.
    pub fn check(&self, entry: &Entry) -> Result<(), ModuleError> {
        let path = self.file(entry);
        if entry.flashinfer != FLASHINFER {
            return Err(ModuleError::Version { path, found: entry.flashinfer.clone() });
        }
        // A kernel never asks what sizes it is called with: what an entry says of its file is held against the file's name.
        let named = entry.want().file();
        if entry.file != named {
            return Err(ModuleError::Name { path, named });
        }
        for &(function, expected) in entry.kind.functions() {
            match entry.functions.get(function) {
                Some(&n) if n == expected => {}
                found => {
                    return Err(ModuleError::Arguments {
                        path,
                        function: function.into(),
                        found: found.map_or("no known number of".into(), usize::to_string),
                        expected,
                        listed: true,
                    });
                }
            }
        }
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(ModuleError::Missing { path }),
            Err(e) => return Err(ModuleError::Unreadable { path, why: e.to_string() }),
        };
        if bytes.starts_with(elf::MAGIC) && bytes.len() as u64 != entry.bytes {
            return Err(ModuleError::Length { path, found: bytes.len() as u64, expected: entry.bytes });
        }
        if let Err(why) = elf::check(&bytes) {
            return Err(ModuleError::NotElf { path, why });
        }
        let found = sha256(&bytes);
        if !found.eq_ignore_ascii_case(&entry.sha256) {
            return Err(ModuleError::Hash { path, found, expected: entry.sha256.clone() });
        }
        Ok(())
    }

    /// Whether a module could be used on a device of this architecture (`None`: on the one that it is for): opens it.
    ///
    /// # Errors
    /// As [`ModuleFolder::check`]; a module that can't be opened, lacks a function, or whose functions take other
    /// arguments; no shim.
    pub fn try_module(&self, entry: &Entry, arch: Option<&str>) -> Result<(), ModuleError> {
        super::Module::open(self, entry, arch).map(drop)
    }

    /// Puts a module's entry into the manifest, which is replaced as a whole. Another process's entries stay.
    ///
    /// # Errors
    /// The file system's.
    pub fn put(&mut self, entry: Entry) -> Result<(), ModuleError> {
        self.change(|manifest| manifest.put(entry))
    }

    /// [`ModuleFolder::put`] for an extension module.
    ///
    /// # Errors
    /// The file system's.
    pub fn put_extension(&mut self, entry: ExtensionEntry) -> Result<(), ModuleError> {
        self.change(|manifest| manifest.put_extension(entry))
    }

    fn change(&mut self, f: impl FnOnce(&mut Manifest)) -> Result<(), ModuleError> {
        let file = self.path.join(MANIFEST);
        let wrong = |e: io::Error| ModuleError::Unreadable { path: file.clone(), why: e.to_string() };
        // Until this is dropped: two builds may end at once.
        let lock = fs::File::create(self.path.join(".lock")).map_err(wrong)?;
        lock.lock().map_err(wrong)?;
        *self = Self::open(&self.path)?;
        f(&mut self.manifest);
        replace(&file, &self.manifest.write()).map_err(wrong)
    }
}

/// Puts a text in a file's place as a whole, with the mode that any new file gets: a folder may serve several users.
pub(crate) fn replace(file: &Path, text: &str) -> io::Result<()> {
    let mut beside = tempfile::Builder::new();
    // The umask takes its part of it.
    #[cfg(unix)]
    beside.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut beside = beside.tempfile_in(file.parent().unwrap_or(Path::new(".")))?;
    io::Write::write_all(&mut beside, text.as_bytes())?;
    beside.persist(file).map_err(|e| e.error)?;
    Ok(())
}

/// In hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}
