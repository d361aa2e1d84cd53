//! A [`Tokenizer`] rebuilt from GGUF metadata.
//!
//! Takes a plain struct, so that it knows nothing of the file format. Everything in it is untrusted and checked before
//! it is used. Not for reading the file itself.

use super::chat::TemplateSource;
use super::error::TextError;
use super::pieces::{DecodeRule, byte_token};
use super::pretokenize::pre_tokenizer;
use super::sentencepiece::derive_merges;
use super::tokenizer::{END_MARKERS, Parts, Tokenizer};
use tokenizers::decoders::{self, DecoderWrapper, byte_fallback::ByteFallback, fuse::Fuse, strip::Strip};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::{NormalizerWrapper, Precompiled, Prepend, Replace, Sequence};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{AddedToken, ModelWrapper};

/// Values of `tokenizer.ggml.model` that are known: byte-level BPE, SentencePiece BPE, unigram.
pub const SUPPORTED_MODELS: &[&str] = &["gpt2", "llama", "t5"];

const TOKENS: &str = "tokenizer.ggml.tokens";
const SCORES: &str = "tokenizer.ggml.scores";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SPACE: &str = "\u{2581}";

/// Token types of `tokenizer.ggml.token_type`.
mod kind {
    pub const UNKNOWN: i32 = 2;
    pub const CONTROL: i32 = 3;
    pub const USER_DEFINED: i32 = 4;
    pub const BYTE: i32 = 6;
    pub const ALL: std::ops::RangeInclusive<i32> = 0..=6;
}

/// The tokenizer's part of a GGUF header, unchecked; a field is `None` where the key is absent.
#[derive(Debug, Clone, Default)]
pub struct GgufTokenizer {
    /// `tokenizer.ggml.model`
    pub model: String,
    /// `tokenizer.ggml.pre`
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`, one a token
    pub scores: Option<Vec<f32>>,
    /// `tokenizer.ggml.token_type`, one a token
    pub token_types: Option<Vec<i32>>,
    /// `tokenizer.ggml.merges`, each two pieces with a space between
    pub merges: Option<Vec<String>>,
    /// `tokenizer.ggml.bos_token_id`
    pub bos_id: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`
    pub eos_id: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`
    pub eot_id: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`
    pub unk_id: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`
    pub pad_id: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.precompiled_charsmap`
    pub precompiled_charsmap: Option<Vec<u8>>,
    /// `tokenizer.chat_template`
    pub chat_template: Option<String>,
}

fn key_error(key: &'static str, detail: impl Into<String>) -> TextError {
    TextError::GgufKey { key, detail: detail.into() }
}

/// A model, what surrounds it and how it decodes.
struct Rebuilt {
    core: tokenizers::Tokenizer,
    rule: DecodeRule,
    adds_bos: bool,
    adds_eos: bool,
}

impl Tokenizer {
    /// Rebuilds a tokenizer from GGUF metadata.
    ///
    /// Whether BOS is added: `add_bos_token` where the file has it, else the custom of the kind (SentencePiece and
    /// Llama 3 vocabularies add it, other byte-level ones and unigram do not).
    ///
    /// # Errors
    /// An unknown kind or pre-tokenizer, and every contradiction in the metadata, by the name of its key.
    pub fn from_gguf(gguf: GgufTokenizer) -> Result<Self, TextError> {
        check(&gguf)?;
        let rebuilt = match gguf.model.as_str() {
            "gpt2" => byte_level_bpe(&gguf)?,
            "llama" => sentencepiece_bpe(&gguf)?,
            "t5" => unigram(&gguf)?,
            other => {
                return Err(TextError::UnsupportedTokenizer {
                    asked: other.to_string(),
                    supported: SUPPORTED_MODELS.join(", "),
                });
            }
        };
        let Rebuilt { mut core, rule, adds_bos, adds_eos } = rebuilt;
        register_added(&mut core, &gguf);
        let parts = parts(&gguf, adds_bos, adds_eos)?;
        Ok(Self::assemble(core, &rule, parts, |id| gguf.tokens.get(id as usize).map(String::as_str)))
    }
}

/// Lengths, ranges, duplicates.
fn check(gguf: &GgufTokenizer) -> Result<(), TextError> {
    let n = gguf.tokens.len();
    if n == 0 {
        return Err(key_error(TOKENS, "the vocabulary is empty; convert the model again"));
    }
    if u32::try_from(n).is_err() {
        return Err(key_error(TOKENS, format!("{n} tokens are more than ids can number")));
    }
    let lengths =
        [(SCORES, gguf.scores.as_ref().map(Vec::len)), (TYPES, gguf.token_types.as_ref().map(Vec::len))];
    for (key, len) in lengths {
        if let Some(len) = len.filter(|len| *len != n) {
            return Err(key_error(key, format!("{len} entries for {n} tokens; convert the model again")));
        }
    }
    if let Some(i) = gguf.scores.iter().flatten().position(|s| s.is_nan()) {
        return Err(key_error(SCORES, format!("the score of token {i} is not a number")));
    }
    if let Some((i, t)) = gguf.token_types.iter().flatten().enumerate().find(|(_, t)| !kind::ALL.contains(*t))
    {
        return Err(key_error(TYPES, format!("token {i} has the unknown type {t}")));
    }
    for (key, id) in named_ids(gguf) {
        if let Some(id) = id.filter(|id| *id as usize >= n) {
            return Err(key_error(key, format!("id {id} is outside the vocabulary of {n} tokens")));
        }
    }
    Ok(())
}

fn named_ids(gguf: &GgufTokenizer) -> [(&'static str, Option<u32>); 5] {
    [
        ("tokenizer.ggml.bos_token_id", gguf.bos_id),
        ("tokenizer.ggml.eos_token_id", gguf.eos_id),
        ("tokenizer.ggml.eot_token_id", gguf.eot_id),
        ("tokenizer.ggml.unknown_token_id", gguf.unk_id),
        ("tokenizer.ggml.padding_token_id", gguf.pad_id),
    ]
}

fn type_of(gguf: &GgufTokenizer, id: usize) -> i32 {
    gguf.token_types.as_ref().and_then(|t| t.get(id)).copied().unwrap_or(1)
}

/// Token to id.
///
/// # Errors
/// A token that occurs twice: one of its ids could never be written.
fn vocab(gguf: &GgufTokenizer) -> Result<Vocab, TextError> {
    let mut vocab = Vocab::with_capacity(gguf.tokens.len());
    for (id, token) in (0u32..).zip(&gguf.tokens) {
        if let Some(first) = vocab.insert(token.clone(), id) {
            return Err(key_error(TOKENS, format!("token {token:?} occurs twice, as {first} and {id}")));
        }
    }
    Ok(vocab)
}

/// Merges as the file lists them.
fn listed_merges(merges: &[String]) -> Result<Vec<(String, String)>, TextError> {
    let parse = |(i, merge): (usize, &String)| {
        // a piece may itself begin with a space, so the separator is the first space after the first character
        let skip = merge.chars().next().map_or(0, char::len_utf8);
        let at = merge.get(skip..).and_then(|rest| rest.find(' ')).map(|at| at + skip);
        let (left, right) = at.map(|at| (&merge[..at], &merge[at + 1..])).unwrap_or_default();
        if left.is_empty() || right.is_empty() {
            let shown: String = merge.chars().take(40).collect();
            return Err(key_error(MERGES, format!("entry {i} ({shown:?}) is not two pieces and a space")));
        }
        Ok((left.to_string(), right.to_string()))
    };
    merges.iter().enumerate().map(parse).collect()
}

fn byte_level_bpe(gguf: &GgufTokenizer) -> Result<Rebuilt, TextError> {
    let pre = pre_tokenizer(gguf.pre.as_deref().unwrap_or("default"))?;
    let merges = gguf.merges.as_deref().filter(|m| !m.is_empty());
    let merges = merges.ok_or_else(|| key_error(MERGES, "missing, and byte-level BPE needs merges"))?;
    let model = BPE::builder()
        .vocab_and_merges(vocab(gguf)?, listed_merges(merges)?)
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(|e| key_error(MERGES, e.to_string()))?;
    let mut core = tokenizers::Tokenizer::new(ModelWrapper::BPE(model));
    core.with_normalizer(pre.normalizer);
    core.with_pre_tokenizer(Some(pre.pre_tokenizer));
    core.with_decoder(Some(ByteLevel::default()));
    Ok(Rebuilt { core, rule: DecodeRule::byte_level(), adds_bos: pre.adds_bos, adds_eos: false })
}

fn sentencepiece_bpe(gguf: &GgufTokenizer) -> Result<Rebuilt, TextError> {
    let takes_part =
        |id: u32| !matches!(type_of(gguf, id as usize), kind::UNKNOWN | kind::CONTROL | kind::BYTE);
    let vocab = vocab(gguf)?;
    let merges = match (gguf.merges.as_deref().filter(|m| !m.is_empty()), gguf.scores.as_deref()) {
        (Some(merges), _) => listed_merges(merges)?,
        (None, Some(scores)) => derive_merges(&gguf.tokens, &vocab, scores, takes_part),
        (None, None) => {
            return Err(key_error(
                SCORES,
                "missing, and so are merges: a SentencePiece vocabulary needs one of them",
            ));
        }
    };
    let unk = unknown_token(gguf);
    let bytes = byte_tokens(gguf);
    if bytes < 256 && unk.is_none() {
        return Err(key_error(
            TOKENS,
            format!(
                "{bytes} of 256 byte tokens and no unknown token: some characters could not be expressed"
            ),
        ));
    }
    let mut builder =
        BPE::builder().vocab_and_merges(vocab, merges).fuse_unk(true).byte_fallback(bytes == 256);
    if let Some(unk) = unk {
        builder = builder.unk_token(unk);
    }
    let model = builder.build().map_err(|e| key_error(MERGES, e.to_string()))?;
    let mut core = tokenizers::Tokenizer::new(ModelWrapper::BPE(model));
    let prefix = gguf.add_space_prefix.unwrap_or(true);
    core.with_normalizer(Some(space_normalizer(prefix)?));
    core.with_decoder(Some(space_decoder(prefix)?));
    Ok(Rebuilt { core, rule: DecodeRule::sentencepiece(prefix), adds_bos: true, adds_eos: false })
}

fn unigram(gguf: &GgufTokenizer) -> Result<Rebuilt, TextError> {
    let scores = gguf.scores.as_deref();
    let scores = scores.ok_or_else(|| key_error(SCORES, "missing, and a unigram vocabulary needs scores"))?;
    vocab(gguf)?;
    let pairs = gguf.tokens.iter().cloned().zip(scores.iter().map(|s| f64::from(*s))).collect();
    let unk = unknown_token(gguf).and_then(|t| gguf.tokens.iter().position(|x| *x == t));
    if unk.is_none() {
        return Err(key_error(
            "tokenizer.ggml.unknown_token_id",
            "missing, and a unigram vocabulary needs it",
        ));
    }
    let model = Unigram::from(pairs, unk, byte_tokens(gguf) == 256);
    let model = model.map_err(|e| key_error(TOKENS, e.to_string()))?;
    let mut core = tokenizers::Tokenizer::new(ModelWrapper::Unigram(model));
    if let Some(map) = gguf.precompiled_charsmap.as_deref().filter(|m| !m.is_empty()) {
        let key = "tokenizer.ggml.precompiled_charsmap";
        let map = std::panic::catch_unwind(|| Precompiled::from(map));
        let map = map.map_err(|_| key_error(key, "broken"))?.map_err(|e| key_error(key, e.to_string()))?;
        core.with_normalizer(Some(map));
    }
    let prefix = gguf.add_space_prefix.unwrap_or(true);
    let scheme = if prefix { PrependScheme::Always } else { PrependScheme::Never };
    core.with_pre_tokenizer(Some(Metaspace::new('\u{2581}', scheme, true)));
    core.with_decoder(Some(space_decoder(prefix)?));
    Ok(Rebuilt { core, rule: DecodeRule::sentencepiece(prefix), adds_bos: false, adds_eos: true })
}

fn space_normalizer(prefix: bool) -> Result<NormalizerWrapper, TextError> {
    let replace = Replace::new(" ", SPACE).map_err(|e| TextError::Encode { detail: e.to_string() })?;
    if !prefix {
        return Ok(replace.into());
    }
    Ok(Sequence::new(vec![Prepend::new(SPACE.to_string()).into(), replace.into()]).into())
}

/// As [`DecodeRule::sentencepiece`], for the crate's own decoding.
fn space_decoder(prefix: bool) -> Result<DecoderWrapper, TextError> {
    let replace = Replace::new(SPACE, " ").map_err(|e| TextError::Encode { detail: e.to_string() })?;
    let mut list: Vec<DecoderWrapper> = vec![replace.into(), ByteFallback::new().into(), Fuse::new().into()];
    if prefix {
        list.push(Strip::new(' ', 1, 0).into());
    }
    Ok(decoders::sequence::Sequence::new(list).into())
}

/// The unknown token: the one that the file names, else the one of that type.
fn unknown_token(gguf: &GgufTokenizer) -> Option<String> {
    let by_type = || gguf.token_types.as_ref()?.iter().position(|t| *t == kind::UNKNOWN);
    let id = gguf.unk_id.map(|id| id as usize).or_else(by_type)?;
    gguf.tokens.get(id).cloned()
}

fn byte_tokens(gguf: &GgufTokenizer) -> usize {
    let mut seen = [false; 256];
    for token in &gguf.tokens {
        if let Some(byte) = byte_token(token) {
            seen[byte as usize] = true;
        }
    }
    seen.iter().filter(|s| **s).count()
}

/// Control tokens, and those that the header names, are special; user-defined ones are matched first but shown.
fn register_added(core: &mut tokenizers::Tokenizer, gguf: &GgufTokenizer) {
    let named: Vec<u32> = named_ids(gguf).iter().filter_map(|(_, id)| *id).collect();
    let mut added = Vec::new();
    for (i, token) in gguf.tokens.iter().enumerate() {
        let special = match type_of(gguf, i) {
            kind::CONTROL | kind::UNKNOWN => true,
            kind::USER_DEFINED => false,
            _ if named.contains(&(i as u32)) => true,
            _ => continue,
        };
        if !token.is_empty() {
            added.push(AddedToken::from(token.clone(), special).normalized(false));
        }
    }
    core.add_tokens(&added);
}

fn parts(gguf: &GgufTokenizer, adds_bos: bool, adds_eos: bool) -> Result<Parts, TextError> {
    let ids = gguf.tokens.len();
    let mut parts = Parts { bos_id: gguf.bos_id, eos_ids: eos_ids(gguf), ids, ..Parts::default() };
    match (gguf.add_bos, gguf.bos_id) {
        (Some(true), None) => {
            return Err(key_error("tokenizer.ggml.add_bos_token", "true, but bos_token_id is missing"));
        }
        (asked, Some(bos)) if asked.unwrap_or(adds_bos) => parts.prefix.push(bos),
        _ => {}
    }
    match (gguf.add_eos, gguf.eos_id) {
        (Some(true), None) => {
            return Err(key_error("tokenizer.ggml.add_eos_token", "true, but eos_token_id is missing"));
        }
        (asked, Some(eos)) if asked.unwrap_or(adds_eos) => parts.suffix.push(eos),
        _ => {}
    }
    let names = [
        ("bos_token", gguf.bos_id),
        ("eos_token", gguf.eos_id),
        ("unk_token", gguf.unk_id),
        ("pad_token", gguf.pad_id),
    ];
    for (name, id) in names {
        if let Some(token) = id.and_then(|id| gguf.tokens.get(id as usize)) {
            parts.names.insert(name.to_string(), token.clone());
        }
    }
    if let Some(template) = &gguf.chat_template {
        parts.template = TemplateSource::single(template.as_str());
    }
    Ok(parts)
}

/// EOS and EOT of the header, then the markers that end a turn or a text and are control tokens here. A marker that
/// serves as the unknown token is none.
fn eos_ids(gguf: &GgufTokenizer) -> Vec<u32> {
    let mut ids: Vec<u32> = [gguf.eos_id, gguf.eot_id].into_iter().flatten().collect();
    for marker in END_MARKERS {
        let Some(id) = gguf.tokens.iter().position(|t| t == marker) else { continue };
        if type_of(gguf, id) == kind::CONTROL && gguf.unk_id != Some(id as u32) {
            ids.push(id as u32);
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    ids.retain(|id| seen.insert(*id));
    ids
}
