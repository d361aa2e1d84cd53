//! `manifest.json`: what a folder of modules holds. A module's entry says what it was compiled from and for, so that
//! nothing has to be opened to choose one.

use super::{ModuleError, extension::ExtensionEntry};
use headway_tensor::DType;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, path::Path};

/// The version of FlashInfer whose functions headway calls: their arguments change between minor versions.
pub const FLASHINFER: &str = "0.7.4";
/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";
/// The form of the manifest.
const FORM: u32 = 1;
/// Counts what headway makes of the package's sources: a module of another recipe counts as not built.
pub const RECIPE: u32 = 1;

/// A family of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Paged attention after FlashAttention-2: decodes with keys in parts, and prefills.
    Fa2,
    /// Paged prefills after FlashAttention-3, on Hopper.
    Fa3,
    /// Latent attention after FlashAttention-2.
    MlaFa2,
    /// Latent attention after FlashAttention-3, on Hopper.
    MlaFa3,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Fa2, Self::Fa3, Self::MlaFa2, Self::MlaFa3];

    /// As file names and users write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fa2 => "fa2",
            Self::Fa3 => "fa3",
            Self::MlaFa2 => "mla_fa2",
            Self::MlaFa3 => "mla_fa3",
        }
    }

    /// Whether it needs Hopper's own instructions.
    pub const fn is_hopper(self) -> bool {
        matches!(self, Self::Fa3 | Self::MlaFa3)
    }

    /// Whether it is latent attention.
    pub const fn is_mla(self) -> bool {
        matches!(self, Self::MlaFa2 | Self::MlaFa3)
    }

    /// The functions that headway calls, with the number of arguments that it calls them with.
    pub const fn functions(self) -> &'static [(&'static str, usize)] {
        match self {
            Self::Fa2 => &[("plan", 21), ("paged_run", 29)],
            Self::Fa3 => &[("plan", 16), ("paged_run", 24)],
            Self::MlaFa2 | Self::MlaFa3 => &[("plan", 9), ("run", 18)],
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a row sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// All keys.
    None,
    /// No key after its own position.
    Causal,
}

/// A module of the folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its file, in the folder.
    pub file: String,
    /// Its kernels.
    pub kind: Kind,
    /// Type of queries, keys, values and outputs.
    pub dtype: String,
    /// Elements of a head; of a latent where the kernels are for those.
    pub head_size: usize,
    /// Compiled with a sliding window.
    pub sliding_window: bool,
    /// Compiled with a cap on the logits.
    pub soft_cap: bool,
    /// Compiled masks.
    pub masks: Vec<Mask>,
    /// The architecture (`sm_90a`).
    pub arch: String,
    /// FlashInfer's version.
    pub flashinfer: String,
    /// [`RECIPE`] when it was built.
    pub recipe: u32,
    /// The compiler's version.
    pub nvcc: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// SHA-256 of the file, in hexadecimal digits.
    pub sha256: String,
    /// Number of arguments of each function, as the compiled file says.
    pub functions: BTreeMap<String, usize>,
}

/// What is asked of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want<'a> {
    /// Its kernels.
    pub kind: Kind,
    /// As [`module_dtype`] writes it.
    pub dtype: &'a str,
    /// Elements of a head.
    pub head_size: usize,
    /// With a sliding window.
    pub sliding_window: bool,
    /// With a cap on the logits.
    pub soft_cap: bool,
    /// The device's architecture; `None`: any.
    pub arch: Option<&'a str>,
}

impl Want<'_> {
    /// The file name that such a module gets, without an architecture where any will do.
    pub fn file(&self) -> String {
        let mut name = format!("flashinfer-{}-{}-d{}", self.kind, self.dtype, self.head_size);
        for (on, what) in [(self.sliding_window, "-window"), (self.soft_cap, "-softcap")] {
            name += if on { what } else { "" };
        }
        if let Some(arch) = self.arch {
            name += &format!("-{arch}");
        }
        name + ".so"
    }

    /// The command that builds it.
    pub fn command(&self) -> String {
        let size =
            if self.kind.is_mla() { " --mla".into() } else { format!(" --head-size {}", self.head_size) };
        let mut text = format!(
            "headway kernels build flashinfer{size} --dtype {} --arch {}",
            self.dtype,
            self.arch.unwrap_or("sm_90a")
        );
        for (on, what) in [(self.sliding_window, " --sliding-window"), (self.soft_cap, " --soft-cap")] {
            text += if on { what } else { "" };
        }
        text
    }
}

impl Entry {
    /// What would be asked for to get this.
    pub fn want(&self) -> Want<'_> {
        Want {
            kind: self.kind,
            dtype: &self.dtype,
            head_size: self.head_size,
            sliding_window: self.sliding_window,
            soft_cap: self.soft_cap,
            arch: Some(&self.arch),
        }
    }

    /// Whether this is what is asked for.
    pub fn is(&self, want: &Want<'_>) -> bool {
        self.recipe == RECIPE
            && self.kind == want.kind
            && self.dtype == want.dtype
            && self.head_size == want.head_size
            && self.sliding_window == want.sliding_window
            && self.soft_cap == want.soft_cap
            && want.arch.is_none_or(|a| a == self.arch)
            && [Mask::None, Mask::Causal].iter().all(|m| self.masks.contains(m))
    }
}

/// An element type as modules name it; `None` for one that no module is compiled for.
pub fn module_dtype(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::BF16 => Some("bfloat16"),
        DType::F16 => Some("float16"),
        _ => None,
    }
}

/// A folder's modules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The form of this file.
    pub format: u32,
    /// The modules.
    pub modules: Vec<Entry>,
    /// Extension modules of vLLM's wheel.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extensions: Vec<ExtensionEntry>,
}

impl Default for Manifest {
    fn default() -> Self {
        Self { format: FORM, modules: vec![], extensions: vec![] }
    }
}

/// A text in it that has control characters.
fn with_controls(value: &serde_json::Value) -> Option<&str> {
    use serde_json::Value;
    match value {
        Value::String(s) => s.chars().any(char::is_control).then_some(s),
        Value::Array(all) => all.iter().find_map(with_controls),
        Value::Object(all) => {
            let key = all.keys().find(|k| k.chars().any(char::is_control)).map(String::as_str);
            key.or_else(|| all.values().find_map(with_controls))
        }
        _ => None,
    }
}

impl Manifest {
    /// Reads a manifest.
    ///
    /// # Errors
    /// Text that is none; another form; control characters, which would reach a terminal; a file name that leads out of
    /// the folder.
    pub fn parse(text: &[u8], path: &Path) -> Result<Self, ModuleError> {
        let wrong = |why: String| ModuleError::Manifest { path: path.to_owned(), why };
        let value: serde_json::Value =
            serde_json::from_slice(text).map_err(|e| wrong(format!("not JSON: {e}")))?;
        match value.get("format").and_then(serde_json::Value::as_u64) {
            Some(f) if f == u64::from(FORM) => {}
            Some(f) => return Err(wrong(format!("of form {f}, and this headway reads form {FORM}"))),
            None => return Err(wrong("not a manifest of modules: it has no number \"format\"".into())),
        }
        if let Some(text) = with_controls(&value) {
            return Err(wrong(format!("{text:?} has control characters")));
        }
        let manifest: Self = serde_json::from_value(value).map_err(|e| wrong(e.to_string()))?;
        let plain = |f: &str| !f.is_empty() && !f.starts_with('.') && !f.contains(['/', '\\', '\0']);
        let files =
            manifest.modules.iter().map(|m| &m.file).chain(manifest.extensions.iter().map(|m| &m.file));
        match files.into_iter().find(|f| !plain(f)) {
            Some(f) => Err(wrong(format!("{f:?} is no file name"))),
            None => Ok(manifest),
        }
    }

    /// As text.
    pub fn write(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Puts an entry in place of what was built for the same.
    pub fn put(&mut self, entry: Entry) {
        self.modules.retain(|m| m.file != entry.file);
        self.modules.push(entry);
        self.modules.sort_by(|a, b| a.file.cmp(&b.file));
    }

    /// Puts an extension's entry in place of the one that was there.
    pub fn put_extension(&mut self, entry: ExtensionEntry) {
        self.extensions.retain(|m| m.extension != entry.extension);
        self.extensions.push(entry);
        self.extensions.sort_by_key(|m| m.extension);
    }
}
