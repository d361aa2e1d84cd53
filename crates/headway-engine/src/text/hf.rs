//! A [`Tokenizer`] from `tokenizer.json` and the files beside it. Not for GGUF.

use super::chat::TemplateSource;
use super::error::TextError;
use super::pieces::DecodeRule;
use super::tokenizer::{END_MARKERS, Parts, Tokenizer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

const CONFIG: &str = "tokenizer_config.json";
const GENERATION: &str = "generation_config.json";

impl Tokenizer {
    /// Reads `tokenizer.json` and, where they exist, `tokenizer_config.json`, `generation_config.json` and
    /// `chat_template.jinja` in a model's directory. A `chat_template.jinja` wins over the template in the config.
    ///
    /// # Errors
    /// A missing or broken file, by name.
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        let file = dir.join("tokenizer.json");
        let json = std::fs::read(&file).map_err(|e| TextError::File { path: file, detail: e.to_string() })?;
        let config = read_optional_json(&dir.join(CONFIG))?;
        let generation = read_optional_json(&dir.join(GENERATION))?;
        let jinja = dir.join("chat_template.jinja");
        let template = match std::fs::read_to_string(&jinja) {
            Ok(text) => Some(text),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(TextError::File { path: jinja, detail: e.to_string() }),
        };
        Self::from_json(&json, config.as_ref(), generation.as_ref(), template)
    }

    /// Builds from the bytes of `tokenizer.json`, the parsed `tokenizer_config.json` and `generation_config.json`, and
    /// a template of its own, where there is one.
    ///
    /// Whether BOS is added: `add_bos_token` of the config where it is set, else what the file's post-processor does.
    ///
    /// # Errors
    /// A file that does not parse, a decoder that cannot be streamed, ids outside the vocabulary.
    pub fn from_json(
        json: &[u8],
        config: Option<&Value>,
        generation: Option<&Value>,
        chat_template: Option<String>,
    ) -> Result<Self, TextError> {
        // first, because it checks the syntax, on which parts of the crate below panic
        let rule = DecodeRule::from_json(&decoder_value(json)?)?;
        Self::with_rule(json, rule, config, generation, chat_template)
    }

    /// The tokenizer of an encoder in a directory, as [`Tokenizer::from_dir`]. Nothing is decoded, so a decoder that
    /// can't be streamed (WordPiece) is no error.
    ///
    /// # Errors
    /// As [`Tokenizer::from_dir`].
    pub fn for_encoder(dir: &Path) -> Result<Self, TextError> {
        let file = dir.join("tokenizer.json");
        let json = std::fs::read(&file).map_err(|e| TextError::File { path: file, detail: e.to_string() })?;
        let config = read_optional_json(&dir.join(CONFIG))?;
        let rule = match DecodeRule::from_json(&decoder_value(&json)?) {
            Ok(rule) => rule,
            // Pieces as they are.
            Err(_) => DecodeRule::from_json(&serde_json::json!({"type": "Fuse"}))?,
        };
        Self::with_rule(&json, rule, config.as_ref(), None, None)
    }

    fn with_rule(
        json: &[u8],
        rule: DecodeRule,
        config: Option<&Value>,
        generation: Option<&Value>,
        chat_template: Option<String>,
    ) -> Result<Self, TextError> {
        let bad = |detail: String| TextError::TokenizerJson { detail };
        let mut core = catch_unwind(AssertUnwindSafe(|| tokenizers::Tokenizer::from_bytes(json)))
            .map_err(|_| bad("its parts contradict each other".into()))?
            .map_err(|e| bad(e.to_string()))?;
        // padding and truncation are for batches of a trainer; a prompt is never cut silently
        core.with_padding(None);
        core.with_truncation(None).map_err(|e| bad(e.to_string()))?;
        core.set_encode_special_tokens(false);
        if core.get_vocab_size(true) == 0 {
            return Err(bad("the vocabulary is empty".into()));
        }
        let ids = id_range(&core)?;
        let names = named_tokens(config);
        let template = template_source(config, chat_template)?;
        let mut parts = Parts { names, template, ids, ..Parts::default() };
        parts.bos_id = bos_id(&core, &parts.names, generation);
        (parts.prefix, parts.suffix) = around(&core)?;
        if let Some(add) = config.and_then(|c| c.get("add_bos_token")).and_then(Value::as_bool) {
            explicit_bos(&mut parts, add)?;
        }
        parts.eos_ids = eos_ids(&core, &parts.names, generation)?;
        let by_id: Vec<Option<String>> = (0..ids as u32).map(|id| core.id_to_token(id)).collect();
        Ok(Self::assemble(core, &rule, parts, |id| by_id.get(id as usize)?.as_deref()))
    }
}

fn read_optional_json(path: &Path) -> Result<Option<Value>, TextError> {
    let fail = |detail: String| TextError::File { path: path.to_path_buf(), detail };
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| fail(format!("not JSON: {e}"))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(fail(e.to_string())),
    }
}

/// Only the decoder, so that a large vocabulary is not parsed into a tree a second time.
fn decoder_value(json: &[u8]) -> Result<Value, TextError> {
    #[derive(serde::Deserialize)]
    struct Only {
        decoder: Option<Value>,
    }
    let only: Only =
        serde_json::from_slice(json).map_err(|e| TextError::TokenizerJson { detail: e.to_string() })?;
    Ok(only.decoder.unwrap_or(Value::Null))
}

/// One more than the highest id. Tables over ids are built from it: an absurd id must not decide their size.
fn id_range(core: &tokenizers::Tokenizer) -> Result<usize, TextError> {
    let vocab = core.get_vocab(true);
    let highest = vocab.iter().max_by_key(|(_, id)| **id);
    let (token, id) = highest.map_or(("", 0), |(token, id)| (token.as_str(), *id as usize));
    if id >= (vocab.len() * 2).max(1 << 20) {
        return Err(TextError::TokenizerJson {
            detail: format!("token {token:?} has the id {id}, far beyond a vocabulary of {}", vocab.len()),
        });
    }
    Ok(id + 1)
}

/// `bos_token` and the like; each a string or an object with `content`.
fn named_tokens(config: Option<&Value>) -> BTreeMap<String, String> {
    let Some(map) = config.and_then(Value::as_object) else { return BTreeMap::new() };
    let text = |v: &Value| v.as_str().or_else(|| v.get("content")?.as_str()).map(str::to_string);
    map.iter()
        .filter(|(k, _)| k.ends_with("_token") && !k.starts_with("add_"))
        .filter_map(|(k, v)| Some((k.clone(), text(v)?)))
        .collect()
}

fn template_source(config: Option<&Value>, own: Option<String>) -> Result<TemplateSource, TextError> {
    if let Some(text) = own {
        return Ok(TemplateSource::single(text));
    }
    match config.and_then(|c| c.get("chat_template")) {
        Some(value) => TemplateSource::from_json(value),
        None => Ok(TemplateSource::default()),
    }
}

fn bos_id(
    core: &tokenizers::Tokenizer,
    names: &BTreeMap<String, String>,
    generation: Option<&Value>,
) -> Option<u32> {
    let named = names.get("bos_token").and_then(|t| core.token_to_id(t));
    named.or_else(|| {
        let id = generation?.get("bos_token_id")?.as_u64()?;
        u32::try_from(id).ok().filter(|id| core.id_to_token(*id).is_some())
    })
}

/// The ids that the post-processor puts before and after a text.
fn around(core: &tokenizers::Tokenizer) -> Result<(Vec<u32>, Vec<u32>), TextError> {
    let bad = |detail: String| TextError::TokenizerJson { detail };
    let ids = |special: bool| {
        let encoded = catch_unwind(AssertUnwindSafe(|| core.encode_fast("a", special)));
        let encoded = encoded.map_err(|_| bad("the post-processor fails".into()))?;
        encoded.map(|e| e.get_ids().to_vec()).map_err(|e| bad(format!("the post-processor fails: {e}")))
    };
    let (bare, full) = (ids(false)?, ids(true)?);
    if bare.is_empty() {
        return Ok((full, Vec::new()));
    }
    let at = full.windows(bare.len()).position(|w| w == bare.as_slice());
    let at = at.ok_or_else(|| bad("the post-processor changes the ids of the text itself".into()))?;
    Ok((full[..at].to_vec(), full[at + bare.len()..].to_vec()))
}

fn explicit_bos(parts: &mut Parts, add: bool) -> Result<(), TextError> {
    match (add, parts.bos_id) {
        (true, Some(bos)) if parts.prefix.first() != Some(&bos) => parts.prefix.insert(0, bos),
        (true, Some(_)) => {}
        (true, None) => {
            return Err(TextError::Config {
                file: CONFIG,
                detail: "add_bos_token is true but bos_token is not in the vocabulary; name it".into(),
            });
        }
        (false, Some(bos)) => parts.prefix.retain(|id| *id != bos),
        (false, None) => {}
    }
    Ok(())
}

/// EOS of the tokenizer config and all of the generation config; without the latter, the markers that end a turn.
fn eos_ids(
    core: &tokenizers::Tokenizer,
    names: &BTreeMap<String, String>,
    generation: Option<&Value>,
) -> Result<Vec<u32>, TextError> {
    let mut ids = Vec::new();
    let listed = generation.and_then(|g| g.get("eos_token_id")).filter(|v| !v.is_null());
    if let Some(listed) = listed {
        let one = std::slice::from_ref(listed);
        for value in listed.as_array().map_or(one, Vec::as_slice) {
            let id =
                value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| TextError::Config {
                    file: GENERATION,
                    detail: format!("eos_token_id {value} is not a token id"),
                })?;
            ids.push(id);
        }
    }
    ids.extend(names.get("eos_token").and_then(|t| core.token_to_id(t)));
    if listed.is_none() {
        let added = core.get_added_tokens_decoder();
        let unk = names.get("unk_token").and_then(|t| core.token_to_id(t));
        let control = |id: &u32| Some(*id) != unk && added.get(id).is_some_and(|t| t.special);
        ids.extend(END_MARKERS.iter().filter_map(|m| core.token_to_id(m)).filter(control));
    }
    let mut seen = std::collections::BTreeSet::new();
    ids.retain(|id| seen.insert(*id));
    Ok(ids)
}
