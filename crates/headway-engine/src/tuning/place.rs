//! Where profiles lie, and how they are read and written.

use super::{Machine, Profile, Shape, TuningError, key::digest};
use crate::sources::FetchOptions;
use std::{
    fs, io,
    io::Write,
    path::{Path, PathBuf},
};

/// A profile of a thousand layers with a hundred candidates each is smaller.
const LARGEST: u64 = 64 << 20;
/// Links that lead to a file, at most: as Linux has it.
const LINKS: usize = 40;

impl Profile {
    /// Reads a profile.
    ///
    /// # Errors
    /// A file that isn't there, can't be read, or is no profile.
    pub fn read(path: &Path) -> Result<Self, TuningError> {
        let file = |why: String| TuningError::File { path: path.to_owned(), why };
        match fs::metadata(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(TuningError::Missing { path: path.to_owned() });
            }
            Err(e) => return Err(file(e.to_string())),
            Ok(m) if !m.is_file() => return Err(file("is no file".into())),
            Ok(m) if m.len() > LARGEST => {
                return Err(file(format!("is {} bytes, and no profile is that large", m.len())));
            }
            Ok(_) => {}
        }
        let bytes = fs::read(path).map_err(|e| file(e.to_string()))?;
        Self::parse(&bytes).map_err(|why| TuningError::Corrupt { path: path.to_owned(), why })
    }

    /// Makes the folder of a profile's place, and tries whether a file can be written there. Nothing is replaced but a
    /// profile.
    ///
    /// # Errors
    /// The file system's; a place that is no file's; another file.
    pub fn check_place(path: &Path) -> Result<(), TuningError> {
        let file = |e: io::Error| TuningError::File { path: path.to_owned(), why: e.to_string() };
        let to = place(path)?;
        match Self::read(&to) {
            Ok(_) | Err(TuningError::Missing { .. }) => {}
            Err(TuningError::Corrupt { why, .. } | TuningError::File { why, .. }) => {
                return Err(TuningError::Foreign { path: path.to_owned(), why });
            }
            Err(e) => return Err(e),
        }
        let (folder, beside) = beside(&to);
        fs::create_dir_all(folder).map_err(file)?;
        fs::File::create(&beside).and_then(|_| fs::remove_file(&beside)).map_err(file)
    }

    /// Writes it in place of what is there, or of what a link there leads to; the folder is made.
    ///
    /// # Errors
    /// The file system's; a place that is no file's.
    pub fn write(&self, path: &Path) -> Result<(), TuningError> {
        let file = |e: io::Error| TuningError::File { path: path.to_owned(), why: e.to_string() };
        let to = place(path)?;
        let (folder, beside) = beside(&to);
        fs::create_dir_all(folder).map_err(file)?;
        let written = fs::File::create(&beside).and_then(|mut f| {
            f.write_all(self.text().as_bytes())?;
            f.sync_all()
        });
        let done = written.and_then(|()| fs::rename(&beside, &to));
        done.inspect_err(|_| drop(fs::remove_file(&beside))).map_err(file)
    }
}

/// The file that a path leads to, or will: one that is written by a rename would take a link's place, a device's or a
/// pipe's.
fn place(path: &Path) -> Result<PathBuf, TuningError> {
    let wrong = |why: &str| TuningError::File { path: path.to_owned(), why: why.into() };
    if path.is_dir() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err(wrong("is a folder; name a file"));
    }
    // What a link leads to: some, such as a pipe's in /proc, lead nowhere by name.
    if fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        return Err(wrong("is no regular file; name another"));
    }
    let mut to = path.to_owned();
    for _ in 0..LINKS {
        match fs::symlink_metadata(&to) {
            Ok(m) if m.is_symlink() => {
                let next = fs::read_link(&to).map_err(|e| wrong(&e.to_string()))?;
                to = to.parent().unwrap_or(Path::new("")).join(next);
            }
            _ => return Ok(to),
        }
    }
    Err(wrong("is a link that leads to itself"))
}

/// The folder of a file, and where it is written before it is renamed into its place: whole, or not there.
fn beside(path: &Path) -> (&Path, PathBuf) {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    (folder, path.with_extension(format!("{}.part", std::process::id())))
}

/// The folder of profiles.
fn folder() -> Result<PathBuf, TuningError> {
    let options = FetchOptions::from_env().map_err(|e| TuningError::NoFolder { why: e.to_string() })?;
    Ok(options.cache_dir.join("profiles"))
}

/// The one profile of these layers that is kept and `is_it`.
///
/// # Errors
/// None, or several; one that can't be read.
pub(super) fn kept<'a>(
    layers: impl Iterator<Item = (&'a Shape, usize)>,
    is_it: impl Fn(&Profile) -> bool,
) -> Result<PathBuf, TuningError> {
    let (folder, ending) = (folder()?, format!("-{}.json", digest(layers)));
    let names = fs::read_dir(&folder).into_iter().flatten().filter_map(|e| Some(e.ok()?.path()));
    let of_layers = names.filter(|p| p.to_str().is_some_and(|p| p.ends_with(&ending)));
    let mut found: Vec<PathBuf> = vec![];
    for path in of_layers {
        if is_it(&Profile::read(&path)?) {
            found.push(path);
        }
    }
    found.sort();
    match found.len() {
        0 => Err(TuningError::Missing { path: folder.join(format!("*{ending}")) }),
        1 => Ok(found.remove(0)),
        _ => Err(TuningError::Several { paths: found }),
    }
}

/// The file of a model's shape on a device, in `profiles` in headway's cache folder.
///
/// # Errors
/// No such folder.
pub fn default_path<'a>(
    machine: &Machine,
    layers: impl Iterator<Item = (&'a Shape, usize)>,
) -> Result<PathBuf, TuningError> {
    Ok(folder()?.join(format!("{}-{}.json", machine.slug(), digest(layers))))
}

#[cfg(test)]
mod tests {
    use super::{super::profile::tests::profile, *};

    #[test]
    fn a_file_is_replaced_as_a_whole_and_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made").join("p.json");
        assert!(matches!(Profile::read(&path), Err(TuningError::Missing { .. })));
        let mut p = profile();
        p.write(&path).unwrap();
        p.measured = "2026-12-01T00:00:00Z".into();
        p.write(&path).unwrap();
        assert_eq!(Profile::read(&path).unwrap(), p);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        assert!(matches!(Profile::read(folder.path()), Err(TuningError::File { .. })));
        assert!(matches!(p.write(&path.join("below a file")), Err(TuningError::File { .. })));
    }

    #[test]
    fn a_profile_replaces_profiles_alone() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let error = |name: &str| Profile::check_place(&at(name)).unwrap_err().to_string();
        fs::write(at("notes.txt"), "of mine").unwrap();
        fs::write(at("empty"), "").unwrap();
        for name in ["notes.txt", "empty"] {
            let e = error(name);
            assert!(e.contains("no profile of headway tune") && e.contains("--profile"), "{e}");
        }
        assert_eq!(fs::read_to_string(at("notes.txt")).unwrap(), "of mine");
        assert!(error("").contains("is a folder") && error("new/").contains("is a folder"));
        for device in ["/dev/null", "/dev/zero"] {
            let e = Profile::check_place(Path::new(device)).unwrap_err().to_string();
            assert!(e.contains("is no regular file"), "{e}");
            assert!(profile().write(Path::new(device)).is_err());
        }
        let path = at("p.json");
        Profile::check_place(&path).unwrap();
        profile().write(&path).unwrap();
        Profile::check_place(&path).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_and_its_target_is_written() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        // Of links, there and not yet there; relative to where they lie.
        symlink("one.json", at("a")).unwrap();
        symlink(at("a"), at("b")).unwrap();
        for _ in 0..2 {
            Profile::check_place(&at("b")).unwrap();
            profile().write(&at("b")).unwrap();
            assert!(fs::symlink_metadata(at("b")).unwrap().is_symlink());
            assert!(fs::symlink_metadata(at("one.json")).unwrap().is_file());
        }
        symlink("loop", at("loop")).unwrap();
        let e = Profile::check_place(&at("loop")).unwrap_err().to_string();
        assert!(e.contains("leads to itself"), "{e}");
        symlink("/dev/null", at("null")).unwrap();
        assert!(Profile::check_place(&at("null")).is_err());
    }
}
