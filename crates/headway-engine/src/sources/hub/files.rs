//! Which files of a repository a model needs.
//!
//! Names only; nothing is fetched here. Names that a repository's index gives are checked before they become paths.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

pub(super) const CONFIG: &str = "config.json";
pub(super) const TOKENIZER: &str = "tokenizer.json";
pub(super) const INDEX: &str = "model.safetensors.index.json";
pub(super) const SINGLE: &str = "model.safetensors";

/// Everything but the weights.
pub(super) const SMALL: [&str; 5] =
    [CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json", "chat_template.jinja"];

/// The small files to fetch: those listed, or all of them where the repository's list isn't known.
pub(super) fn small(listed: Option<&[String]>) -> Vec<&'static str> {
    SMALL
        .into_iter()
        .filter(|file| *file == CONFIG || listed.is_none_or(|names| names.iter().any(|name| name == file)))
        .collect()
}

/// The one weight file of a repository without an index.
pub(super) fn single(names: &[String]) -> Result<String, String> {
    let found: Vec<&String> =
        names.iter().filter(|name| name.ends_with(".safetensors") && !name.contains('/')).collect();
    match found.as_slice() {
        _ if names.iter().any(|name| name == SINGLE) => Ok(SINGLE.to_owned()),
        [one] if is_safe(one) => Ok((*one).clone()),
        [] => {
            Err("it has no *.safetensors file; headway reads safetensors repositories and local .gguf files"
                .to_owned())
        }
        _ => Err(format!(
            "it has {} *.safetensors files and no {INDEX} that says which belong together",
            found.len()
        )),
    }
}

/// The weight files that an index names.
pub(super) fn shards(index: &[u8]) -> Result<Vec<String>, String> {
    let value: Value = serde_json::from_slice(index).map_err(|e| format!("{INDEX} is not JSON: {e}"))?;
    let map =
        value.get("weight_map").and_then(Value::as_object).ok_or(format!("{INDEX} has no weight_map"))?;
    let mut names = BTreeSet::new();
    for file in map.values() {
        match file.as_str() {
            Some(name) if is_safe(name) && name.ends_with(".safetensors") => names.insert(name.to_owned()),
            _ => {
                return Err(format!(
                    "{INDEX} names a weight file that is not a plain *.safetensors name: {file}"
                ));
            }
        };
    }
    if names.is_empty() {
        return Err(format!("{INDEX} names no weight file"));
    }
    Ok(names.into_iter().collect())
}

/// The weight files that a local snapshot folder should hold; `None` if that can't be told.
pub(super) fn local_weights(folder: &Path) -> Option<Vec<String>> {
    if let Ok(index) = fs::read(folder.join(INDEX)) {
        return shards(&index).ok();
    }
    let names: Vec<String> =
        fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    single(&names).ok().map(|name| vec![name])
}

/// Whether a name from outside is a plain file name that may become a path and a part of an address.
fn is_safe(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('.')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn single_file_checkpoints() {
        assert_eq!(single(&names(&["a.bin", "model.safetensors", "other.safetensors"])).unwrap(), SINGLE);
        assert_eq!(
            single(&names(&["weights.safetensors", "sub/x.safetensors"])).unwrap(),
            "weights.safetensors"
        );
        assert!(single(&names(&["pytorch_model.bin"])).unwrap_err().contains("no *.safetensors"));
        assert!(single(&names(&["a.safetensors", "b.safetensors"])).unwrap_err().contains("2"));
    }

    #[test]
    fn indices_name_their_shards_once() {
        let index = br#"{"weight_map":{"a":"m-2.safetensors","b":"m-1.safetensors","c":"m-2.safetensors"}}"#;
        assert_eq!(shards(index).unwrap(), ["m-1.safetensors", "m-2.safetensors"]);
        for bad in [
            &br#"{"weight_map":{"a":"../m.safetensors"}}"#[..],
            br#"{"weight_map":{"a":"/m.safetensors"}}"#,
            br#"{"weight_map":{"a":7}}"#,
            br#"{"weight_map":{}}"#,
            br#"{}"#,
            b"{",
        ] {
            assert!(shards(bad).is_err());
        }
    }

    #[test]
    fn small_files_follow_the_list() {
        assert_eq!(small(None), SMALL);
        assert_eq!(small(Some(&names(&["tokenizer.json"]))), [CONFIG, TOKENIZER]);
    }
}
