//! [`Tokenizer`]: text to ids and back, whatever file it came from.
//!
//! Lives as long as the model and is shared by all requests. Not for streaming (see [`StreamDecoder`]).

use super::chat::{ChatTemplate, TemplateSource};
use super::error::TextError;
use super::pieces::{DecodeRule, PieceTable};
use super::stream::StreamDecoder;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Text to token ids and back. Cheap to clone; every method takes `&self` and may run on many threads at once.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    core: tokenizers::Tokenizer,
    pieces: PieceTable,
    special: Vec<bool>,
    parts: Parts,
    missing_bytes: Vec<u8>,
}

/// What a file says beside the vocabulary.
#[derive(Debug, Default)]
pub(super) struct Parts {
    pub(super) bos_id: Option<u32>,
    pub(super) eos_ids: Vec<u32>,
    /// Ids put before and after a plain prompt.
    pub(super) prefix: Vec<u32>,
    pub(super) suffix: Vec<u32>,
    /// `bos_token` and so on: what the chat template sees.
    pub(super) names: BTreeMap<String, String>,
    pub(super) template: TemplateSource,
    /// One more than the highest id.
    pub(super) ids: usize,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("bos_id", &self.bos_id())
            .field("eos_ids", &self.eos_ids())
            .field("adds_bos", &self.adds_bos())
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Puts the parts together; `token` spells an id.
    pub(super) fn assemble<'a>(
        core: tokenizers::Tokenizer,
        rule: &DecodeRule,
        parts: Parts,
        token: impl Fn(u32) -> Option<&'a str>,
    ) -> Self {
        let added = core.get_added_tokens_decoder();
        let size = parts.ids;
        let mut pieces = PieceTable::new(rule);
        let mut special = vec![false; size];
        for id in 0..size as u32 {
            pieces.push(token(id), rule);
            if added.get(&id).is_some_and(|t| t.special) {
                special[id as usize] = true;
            }
        }
        let missing_bytes = if rule.byte_level { missing_bytes(&core) } else { Vec::new() };
        Self { inner: Arc::new(Inner { core, pieces, special, parts, missing_bytes }) }
    }

    pub(super) fn pieces(&self) -> &PieceTable {
        &self.inner.pieces
    }

    /// The ids of `text`. Special tokens written in the text are recognised as such.
    ///
    /// With `add_bos` the ids that the model's own metadata puts around a plain prompt are added: BOS where
    /// [`adds_bos`](Self::adds_bos), and EOS for the rare models that ask for it. BOS is not added again to a text that
    /// already begins with it, as the output of many chat templates does.
    ///
    /// # Errors
    /// A character that the vocabulary cannot express; nothing is ever dropped silently.
    pub fn encode(&self, text: &str, add_bos: bool) -> Result<Vec<u32>, TextError> {
        let core = &self.inner.core;
        let encoding = catch_unwind(AssertUnwindSafe(|| core.encode_fast(text, false)))
            .map_err(|_| TextError::Encode { detail: "the tokenizer failed on it".into() })?
            .map_err(|e| TextError::Encode { detail: e.to_string() })?;
        let mut ids = encoding.get_ids().to_vec();
        self.check_lossless(text, &ids)?;
        if add_bos {
            let parts = &self.inner.parts;
            if !parts.prefix.is_empty() && !ids.starts_with(&parts.prefix) {
                ids.splice(0..0, parts.prefix.iter().copied());
            }
            ids.extend_from_slice(&parts.suffix);
        }
        Ok(ids)
    }

    /// The text of `ids`, a text of its own: a leading space that the vocabulary adds to every text is dropped.
    ///
    /// Bytes that are not UTF-8 become U+FFFD. Ids outside the vocabulary show as nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        run(StreamDecoder::new(self.clone(), skip_special), ids)
    }

    /// The text of `ids` as it goes on after a prompt: a leading space is kept.
    pub fn decode_continuation(&self, ids: &[u32], skip_special: bool) -> String {
        run(StreamDecoder::continuing(self.clone(), skip_special), ids)
    }

    /// The vocabulary's own spelling of an id (`Ġthe`, `▁the`, `<0x0A>`); `None` outside the vocabulary.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.core.id_to_token(id)
    }

    /// The bytes that an id stands for in a text: whole characters, or a part of one. Empty outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.inner.pieces.get(id)
    }

    /// The id of a token in the vocabulary's own spelling.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.core.token_to_id(token)
    }

    /// All ids that end a generation, the model's main one first: by its generation config, EOS, and the markers that
    /// end a turn.
    pub fn eos_ids(&self) -> &[u32] {
        &self.inner.parts.eos_ids
    }

    /// The id that begins a text, where the model names one; see [`adds_bos`](Self::adds_bos) for whether it is used.
    pub fn bos_id(&self) -> Option<u32> {
        self.inner.parts.bos_id
    }

    /// Whether plain prompts begin with BOS, by the model's own metadata.
    pub fn adds_bos(&self) -> bool {
        let parts = &self.inner.parts;
        parts.bos_id.is_some() && parts.prefix.first() == parts.bos_id.as_ref()
    }

    /// Ids that have a token, counted from 0 to the highest: embedding rows may be more.
    pub fn vocab_size(&self) -> usize {
        self.inner.pieces.len()
    }

    /// Whether an id is a special (control) token, which `skip_special` leaves out of the text.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Checks ids that a user gave.
    ///
    /// # Errors
    /// [`TextError::TokenId`] for the first id outside `0..vocab_size`, where `vocab_size` is the model's.
    pub fn check_ids(ids: &[u32], vocab_size: usize) -> Result<(), TextError> {
        match ids.iter().find(|id| **id as usize >= vocab_size) {
            Some(&id) => Err(TextError::TokenId { id, vocab_size }),
            None => Ok(()),
        }
    }

    /// The text of the special tokens by the name that chat templates use (`bos_token`, `eos_token`, …).
    pub fn named_tokens(&self) -> &BTreeMap<String, String> {
        &self.inner.parts.names
    }

    /// The chat template that came with the tokenizer, compiled.
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`] where there is none, [`TextError::Template`] where it does not parse.
    pub fn chat_template(&self) -> Result<ChatTemplate, TextError> {
        ChatTemplate::new(&self.inner.parts.template, self.named_tokens())
    }

    /// Whether a chat template came with the tokenizer.
    pub fn has_chat_template(&self) -> bool {
        !self.inner.parts.template.is_empty()
    }

    /// The whole decoding of the `tokenizers` crate, as a second opinion in tests.
    #[doc(hidden)]
    pub fn decode_reference(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        self.inner.core.decode(ids, skip_special).map_err(|e| TextError::Encode { detail: e.to_string() })
    }

    /// Refuses a loss: only vocabularies without all 256 bytes, and texts with such a byte, pay for the check.
    fn check_lossless(&self, text: &str, ids: &[u32]) -> Result<(), TextError> {
        let missing = &self.inner.missing_bytes;
        if missing.is_empty() || !text.bytes().any(|b| missing.contains(&b)) {
            return Ok(());
        }
        // the vocabulary may still hold the character inside a special token
        let kept: usize =
            ids.iter().flat_map(|id| self.inner.pieces.get(*id)).filter(|b| missing.contains(b)).count();
        let asked = text.bytes().filter(|b| missing.contains(b)).count();
        if kept >= asked {
            return Ok(());
        }
        let lost = text.chars().find(|c| c.to_string().bytes().any(|b| missing.contains(&b)));
        let lost = lost.unwrap_or(char::REPLACEMENT_CHARACTER);
        Err(TextError::Encode {
            detail: format!(
                "the vocabulary has no token for a byte of {lost:?} (U+{:04X}); leave that character out",
                lost as u32
            ),
        })
    }
}

fn run(mut decoder: StreamDecoder, ids: &[u32]) -> String {
    let mut text = String::new();
    for &id in ids {
        decoder.push_into(id, &mut text);
    }
    text.push_str(&decoder.finish());
    text
}

/// Bytes that occur in UTF-8 but have no token.
fn missing_bytes(core: &tokenizers::Tokenizer) -> Vec<u8> {
    let in_utf8 = |b: &u8| !matches!(b, 0xc0 | 0xc1 | 0xf5..=0xff);
    let absent = |b: &u8| core.token_to_id(&super::pieces::char_of_byte(*b).to_string()).is_none();
    (0..=255u8).filter(in_utf8).filter(absent).collect()
}

/// Markers that end a turn or a text, by the names that published models give them. They count only where the
/// vocabulary holds them as control tokens.
pub(super) const END_MARKERS: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|return|>",
    "<|call|>",
    "<|eot|>",
    "<EOT>",
    "<end_of_utterance>",
];
