//! `triton.json`: the compiled Triton kernels of a folder, and what each launch needs.

use super::{Form, FormKind, TRITON, TritonError, error::said, recipe};
use crate::modules::folder::sha256;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The manifest's file name.
pub const TRITON_MANIFEST: &str = "triton.json";
/// The form of the manifest.
const FORM: u32 = 1;

/// A compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TritonEntry {
    /// Its file, in the folder.
    pub file: String,
    /// The function.
    pub function: String,
    /// What it does.
    pub kind: FormKind,
    /// Element type: `bfloat16`, `float16`.
    pub dtype: String,
    /// Elements of a head.
    pub head_size: usize,
    /// Compiled with a cap on the scores.
    pub soft_cap: bool,
    /// The architecture (`sm_90a`).
    pub arch: String,
    /// Rows of a tile.
    pub rows: usize,
    /// Keys of a step; parts that are merged.
    pub keys: usize,
    /// Warps of a block.
    pub num_warps: u32,
    /// Stages of the pipeline.
    pub num_stages: u32,
    /// Bytes of shared memory of a block.
    pub shared: u32,
    /// Arguments in their order, as Triton writes types; two scratch areas' addresses are the last.
    pub arguments: Vec<String>,
    /// Triton's version.
    pub triton: String,
    /// [`recipe`] when it was built.
    pub recipe: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// SHA-256 of the file, in hexadecimal digits.
    pub sha256: String,
    /// SHA-256 of all of the above: the launch parameters stand nowhere else. An entry without one counts as changed.
    #[serde(default)]
    pub sum: String,
}

impl TritonEntry {
    /// What it is compiled for.
    pub fn form(&self) -> Form<'_> {
        Form { kind: self.kind, dtype: &self.dtype, head_size: self.head_size, soft_cap: self.soft_cap }
    }

    /// Whether this is what is asked for, made of this headway's sources.
    pub fn is(&self, form: &Form<'_>, arch: Option<&str>) -> bool {
        self.form() == *form
            && arch.is_none_or(|a| a == self.arch)
            && self.triton == TRITON
            && self.other_sources().is_none()
    }

    /// What tells that it was built of other sources than this headway's, or for launches that this headway makes otherwise.
    pub(super) fn other_sources(&self) -> Option<String> {
        let form = self.form();
        let (warps, stages) = form.schedule();
        // Where so many don't fit, a step has half the keys, and half of that; how many parts are merged is the launch's too.
        let merges = matches!(form.kind, FormKind::Merge | FormKind::LatentMerge);
        let fewer = |n: usize| !merges && n >= 16 && n < form.keys() && form.keys().is_multiple_of(n);
        let ours = recipe();
        [
            (self.recipe != ours, format!("recipe {}, here {ours}", said(&self.recipe))),
            (self.rows != form.rows(), format!("tiles of {} rows, here of {}", self.rows, form.rows())),
            (
                self.keys != form.keys() && !fewer(self.keys),
                format!("{} keys a step, here {}", self.keys, form.keys()),
            ),
            (self.num_warps as usize != warps, format!("{} warps a block, here {warps}", self.num_warps)),
            (
                self.num_stages as usize > stages.max(2),
                format!("{} stages, here up to {}", self.num_stages, stages.max(2)),
            ),
        ]
        .into_iter()
        .find_map(|(differs, what)| differs.then_some(what))
    }

    /// The sum of its fields, [`TritonEntry::sum`] itself left out.
    fn fields(&self) -> String {
        let without = Self { sum: String::new(), ..self.clone() };
        sha256(&serde_json::to_vec(&without).unwrap_or_default())
    }

    /// The entry with the sum of what it says.
    #[must_use]
    pub fn sealed(self) -> Self {
        Self { sum: self.fields(), ..self }
    }

    /// Whether it says what it said when it was built.
    pub fn is_sealed(&self) -> bool {
        self.sum == self.fields()
    }
}

/// A folder's kernels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TritonManifest {
    /// The form of this file.
    pub format: u32,
    /// The kernels.
    pub kernels: Vec<TritonEntry>,
}

impl Default for TritonManifest {
    fn default() -> Self {
        Self { format: FORM, kernels: vec![] }
    }
}

impl TritonManifest {
    /// Reads a manifest.
    ///
    /// # Errors
    /// Text that is none; another form; control characters; a file name that leads out of the folder, or is listed twice; a
    /// launch that no device takes.
    pub fn parse(text: &[u8], path: &Path) -> Result<Self, TritonError> {
        let wrong = |why: String| TritonError::Manifest { path: path.to_owned(), why: said(&why) };
        let value: serde_json::Value =
            serde_json::from_slice(text).map_err(|e| wrong(format!("not JSON: {e}")))?;
        match value.get("format").and_then(serde_json::Value::as_u64) {
            Some(f) if f == u64::from(FORM) => {}
            Some(f) => return Err(wrong(format!("of form {f}, and this headway reads form {FORM}"))),
            None => return Err(wrong("not a manifest of kernels: it has no number \"format\"".into())),
        }
        let manifest: Self = serde_json::from_value(value).map_err(|e| wrong(e.to_string()))?;
        let texts = |k: &TritonEntry| {
            let own = [&k.file, &k.function, &k.dtype, &k.arch, &k.triton, &k.recipe, &k.sha256, &k.sum];
            own.into_iter().chain(&k.arguments).find(|t| t.chars().any(char::is_control)).cloned()
        };
        let plain = |f: &str| !f.is_empty() && !f.starts_with('.') && !f.contains(['/', '\\', '\0']);
        for (i, k) in manifest.kernels.iter().enumerate() {
            if let Some(text) = texts(k) {
                return Err(wrong(format!("control characters in {text:?}")));
            }
            if !plain(&k.file) {
                return Err(wrong(format!("{:?} is no file name", k.file)));
            }
            if manifest.kernels[..i].iter().any(|other| other.file == k.file) {
                return Err(wrong(format!("it lists {} twice", k.file)));
            }
            if !(1..=32).contains(&k.num_warps) || k.num_stages == 0 || k.shared > 256 << 10 {
                let (warps, stages, shared) = (k.num_warps, k.num_stages, k.shared);
                return Err(wrong(format!(
                    "{}: {warps} warps in {stages} stages with {shared} bytes of shared memory",
                    k.file
                )));
            }
        }
        Ok(manifest)
    }

    /// As text.
    pub fn write(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Puts an entry in place of what was built for the same.
    pub fn put(&mut self, entry: TritonEntry) {
        self.kernels.retain(|k| k.file != entry.file);
        self.kernels.push(entry);
        self.kernels.sort_by(|a, b| a.file.cmp(&b.file));
    }
}
