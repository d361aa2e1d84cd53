//! Near misses of tensor names, for messages about a missing one.
//!
//! Not for resolving names: a near miss is shown, never used.

use super::LoadError;
use std::path::Path;

/// Names longer than this are not compared: no real one is, and the comparison is quadratic.
const LONGEST: usize = 200;

/// The error for a tensor that is not in the file.
pub(crate) fn missing_tensor<'a>(
    path: &Path,
    name: &str,
    in_file: impl Iterator<Item = &'a str> + Clone,
) -> LoadError {
    LoadError::MissingTensor {
        path: path.to_owned(),
        name: super::error::one_line(name),
        nearest: nearest(name, in_file.clone()),
        hint: hint(name, in_file),
    }
}

/// Up to three names that are closest by edit distance; one that only differs by a prefix comes first.
pub(crate) fn nearest<'a>(name: &str, in_file: impl Iterator<Item = &'a str>) -> Vec<String> {
    if name.len() > LONGEST {
        return Vec::new();
    }
    let prefixed = |other: &str| {
        let (short, long) = if other.len() < name.len() { (other, name) } else { (name, other) };
        long.strip_suffix(short).is_some_and(|prefix| prefix.ends_with('.'))
    };
    let mut scored: Vec<(usize, &str)> = in_file
        .filter(|other| other.len() <= LONGEST)
        .map(|other| (if prefixed(other) { 0 } else { strsim::levenshtein(name, other) }, other))
        .collect();
    scored.sort_unstable();
    scored.into_iter().take(3).map(|(_, other)| other.to_owned()).collect()
}

/// What the naming scheme of the file says about who wrote it.
fn hint<'a>(name: &str, mut in_file: impl Iterator<Item = &'a str>) -> String {
    let ggml_name = name.starts_with("blk.") || name.starts_with("token_embd") || name.starts_with("output");
    if ggml_name && in_file.any(|n| n.contains("model.layers.") || n.contains("embed_tokens")) {
        "; the file has Hugging Face names inside a GGUF container: write it with llama.cpp's convert_hf_to_gguf.py"
            .to_owned()
    } else {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_and_typo_are_found() {
        let names = ["language_model.model.norm.weight", "model.norm.weights", "lm_head.weight", "x"];
        let found = nearest("model.norm.weight", names.iter().copied());
        assert_eq!(found[..2], ["language_model.model.norm.weight", "model.norm.weights"]);
        assert!(nearest(&"a".repeat(1000), names.iter().copied()).is_empty());
    }

    #[test]
    fn hugging_face_names_in_gguf_are_recognised() {
        let names = ["model.layers.0.self_attn.q_proj.weight"];
        let error = missing_tensor(Path::new("m.gguf"), "blk.0.attn_q.weight", names.iter().copied());
        assert!(error.to_string().contains("convert_hf_to_gguf.py"), "{error}");
        let error = missing_tensor(Path::new("m"), "model.layers.1.x", names.iter().copied());
        assert!(error.to_string().ends_with("'model.layers.0.self_attn.q_proj.weight'"), "{error}");
    }
}
