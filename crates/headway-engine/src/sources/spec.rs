//! What a user may write after `--model`: a path, a known name, or a hub id.
//!
//! Parsing only looks at the text and asks whether a path exists; it fetches nothing.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::error::SourceError;
use super::known::{KnownModel, known_model, known_models};

/// The model that is used when none is named.
pub const DEFAULT_MODEL: &str = "smollm2-135m-instruct";

/// A repository on the Hugging Face hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubId {
    /// `org/name`.
    pub repo: String,
    /// Branch, tag or commit; `main` unless given as `org/name@revision`.
    pub revision: String,
}

impl fmt::Display for HubId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.revision == "main" {
            f.write_str(&self.repo)
        } else {
            write!(f, "{}@{}", self.repo, self.revision)
        }
    }
}

/// A model as a user names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSpec {
    /// A file or folder that exists.
    Path(PathBuf),
    /// One of [`known_models`].
    Known(&'static KnownModel),
    /// A repository on the Hugging Face hub.
    Hub(HubId),
}

impl ModelSpec {
    /// Reads `PATH|NAME|HUB-ID`. An existing path wins over a name, a name over a hub id.
    ///
    /// # Errors
    /// [`SourceError::PathNotFound`] for what can only be a path, [`SourceError::UnknownName`] with the nearest
    /// names, or [`SourceError::BadHubId`].
    pub fn parse(text: &str) -> Result<Self, SourceError> {
        let path = PathBuf::from(text);
        if !text.is_empty() && path.exists() {
            return Ok(ModelSpec::Path(path));
        }
        if let Some(model) = known_model(text) {
            return Ok(ModelSpec::Known(model));
        }
        if looks_like_path(text) {
            return Err(SourceError::PathNotFound { path });
        }
        if text.contains('/') { hub_id(text).map(ModelSpec::Hub) } else { Err(unknown(text)) }
    }
}

impl FromStr for ModelSpec {
    type Err = SourceError;

    fn from_str(text: &str) -> Result<Self, SourceError> {
        Self::parse(text)
    }
}

impl fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelSpec::Path(path) => write!(f, "{}", path.display()),
            ModelSpec::Known(model) => f.write_str(model.name),
            ModelSpec::Hub(id) => id.fmt(f),
        }
    }
}

fn looks_like_path(text: &str) -> bool {
    let repo = text.split('@').next().unwrap_or(text);
    text.starts_with(['/', '.', '~', '\\'])
        || text.ends_with('/')
        || text.contains('\\')
        || repo.matches('/').count() > 1
        || text.ends_with(".gguf")
        || text.ends_with(".safetensors")
}

fn hub_id(text: &str) -> Result<HubId, SourceError> {
    let (repo, revision) = text.split_once('@').unwrap_or((text, "main"));
    let bad = |because: &'static str| SourceError::BadHubId { asked: text.to_owned(), because };
    let Some((org, name)) = repo.split_once('/') else {
        return Err(bad("the part before @ must be org/name"));
    };
    if !is_hub_word(org) || !is_hub_word(name) {
        return Err(bad(
            "organisation and name are letters, digits, '-', '_' and '.', and don't start with a dot",
        ));
    }
    if !is_revision(revision) {
        return Err(bad("a revision is a branch, tag or commit of letters, digits, '-', '_', '.' and '/'"));
    }
    Ok(HubId { repo: repo.to_owned(), revision: revision.to_owned() })
}

fn is_hub_word(word: &str) -> bool {
    !word.is_empty()
        && word.len() <= 96
        && !word.starts_with('.')
        && !word.contains("..")
        && word.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

fn is_revision(revision: &str) -> bool {
    !revision.is_empty() && revision.len() <= 200 && revision.split('/').all(is_hub_word)
}

fn unknown(text: &str) -> SourceError {
    let asked = text.to_ascii_lowercase();
    let mut ranked: Vec<(usize, &'static str)> = known_models()
        .iter()
        .map(|model| {
            let spellings = std::iter::once(&model.name).chain(model.aliases);
            (spellings.map(|s| strsim::levenshtein(&asked, s)).min().unwrap_or(usize::MAX), model.name)
        })
        .collect();
    ranked.sort();
    let nearest = ranked.into_iter().map(|(_, name)| name.to_owned()).collect();
    SourceError::UnknownName { asked: text.to_owned(), nearest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_aliases_are_known() {
        for text in ["smollm2", "SmolLM2-135M-Instruct", DEFAULT_MODEL] {
            assert!(
                matches!(ModelSpec::parse(text), Ok(ModelSpec::Known(m)) if m.name == DEFAULT_MODEL),
                "{text}"
            );
        }
        assert_eq!(ModelSpec::parse("gemma-3-270m").unwrap().to_string(), "gemma3-270m");
    }

    #[test]
    fn hub_ids_are_split() {
        let Ok(ModelSpec::Hub(id)) = ModelSpec::parse("org/some-model_1.5@refs/pr/3") else { panic!() };
        assert_eq!((id.repo.as_str(), id.revision.as_str()), ("org/some-model_1.5", "refs/pr/3"));
        assert_eq!(ModelSpec::parse("org/model").unwrap().to_string(), "org/model");
        for bad in ["org/", "org/a b", "org/m@", "org/m@../x", "org/..", "-/é"] {
            assert!(ModelSpec::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn missing_paths_are_named() {
        for text in
            ["./nothing", "/no/such/model.gguf", "nothing.gguf", "a/b/c", "~/x", "..", "a/model.safetensors"]
        {
            let spec = ModelSpec::parse(text);
            if text == ".." {
                assert!(matches!(spec, Ok(ModelSpec::Path(_))));
            } else {
                let message = spec.unwrap_err().to_string();
                assert!(message.contains(text), "{message}");
            }
        }
    }

    #[test]
    fn unknown_names_get_the_nearest_first() {
        let Err(SourceError::UnknownName { nearest, .. }) = ModelSpec::parse("gemma3-270") else { panic!() };
        assert_eq!(nearest[0], "gemma3-270m");
        let message = ModelSpec::parse("smolm2").unwrap_err().to_string();
        assert!(message.contains("smollm2-135m-instruct"), "{message}");
        assert!(ModelSpec::parse("").is_err());
    }
}
