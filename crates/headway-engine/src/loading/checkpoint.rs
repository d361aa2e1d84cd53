//! The one view of weight files that model code sees: tensors by name.
//!
//! Not for names: an architecture file knows what its tensors are called in each format.

use super::LoadError;
use headway_tensor::{Weight, WeightType};

/// A matrix of e4m3 codes with one scale, for inputs that are quantised with a scale of their own.
pub struct StaticFp8 {
    /// The codes' values as bfloat16, which holds each exactly; not yet scaled.
    pub codes: Weight,
    /// A weight is its code's value times this.
    pub weight_scale: f32,
    /// An input is divided by this and rounded to e4m3.
    pub input_scale: f32,
}

/// A set of named tensors, whatever the files behind it. Lives as long as the model is being loaded; the
/// weights it hands out keep their bytes alive themselves.
///
/// ```
/// use headway_engine::loading;
/// let folder = headway_testkit::testdata::model_dir("tiny-llama")?; // or any model's
/// let weights = loading::open(&folder)?.checkpoint;
/// let norm = weights.get("model.norm.weight")?;
/// assert_eq!((norm.name(), norm.elems()), ("model.norm.weight", norm.to_f32().len()));
/// let missing = weights.get("model.norm.wieght").unwrap_err().to_string();
/// assert!(missing.contains("model.norm.weight"), "an error names the nearest: {missing}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Checkpoint: Send + Sync {
    /// The tensor called `name`, without a copy.
    ///
    /// # Errors
    /// [`LoadError::MissingTensor`] with the nearest names; [`LoadError::UnsupportedTensor`] for a type
    /// that is tolerated in a file as long as nobody asks for the tensor.
    fn get(&self, name: &str) -> Result<Weight, LoadError>;

    /// The shape of the tensor called `name`; `None` where only making it tells.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    fn shape(&self, name: &str) -> Result<Option<Vec<usize>>, LoadError> {
        Ok(Some(self.get(name)?.shape().to_vec()))
    }

    /// The tensor called `name`, where its input is to be quantised with a static scale.
    ///
    /// # Errors
    /// As [`get`](Self::get); scales that are missing or aren't one number each.
    fn static_fp8(&self, _name: &str) -> Result<Option<StaticFp8>, LoadError> {
        Ok(None)
    }

    /// Whether there is a tensor called `name`.
    fn contains(&self, name: &str) -> bool;

    /// All names, in the order of the files.
    fn names(&self) -> Vec<&str>;

    /// The files and the format in use, in one line.
    fn describe(&self) -> String;

    /// Bytes of all tensors together.
    fn total_bytes(&self) -> u64;

    /// Bytes of [`total_bytes`](Self::total_bytes) that take memory of their own, because they are made when a
    /// tensor is asked for; the rest is mapped.
    fn made_bytes(&self) -> u64 {
        0
    }

    /// The type of the largest tensor; `None` where there is none.
    fn main_dtype(&self) -> Option<WeightType> {
        let names = self.names();
        let largest = names.iter().filter_map(|n| self.get(n).ok()).max_by_key(Weight::elems);
        largest.map(|w| w.dtype())
    }
}

/// `210 Q4_1, 61 F32`: how many tensors there are of each type, the most frequent first.
pub(crate) fn count_types(types: impl Iterator<Item = WeightType>) -> String {
    let mut counts: Vec<(usize, &'static str)> = Vec::new();
    for dtype in types {
        match counts.iter_mut().find(|(_, name)| *name == dtype.name()) {
            Some((count, _)) => *count += 1,
            None => counts.push((1, dtype.name())),
        }
    }
    counts.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(b.1)));
    counts.iter().map(|(count, name)| format!("{count} {name}")).collect::<Vec<_>>().join(", ")
}
