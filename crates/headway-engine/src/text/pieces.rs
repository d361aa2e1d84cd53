//! The bytes that each token id stands for, and how their concatenation becomes text.
//!
//! Every supported decoder is a byte string per id, joined, read as UTF-8 with replacement marks, and at most a rule
//! for the very start. So streamed and whole decoding are one computation. Lives with the tokenizer. Not for encoding.

use super::error::TextError;
use serde_json::Value;

/// How bytes that are not UTF-8 show in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Invalid {
    /// One U+FFFD for each maximal invalid part (byte-level vocabularies).
    PerSequence,
    /// One U+FFFD for each invalid byte (byte-fallback vocabularies).
    PerByte,
}

/// What is dropped from the start of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// Nothing.
    Keep,
    /// Up to `count` times this character.
    Strip { byte: u8, count: usize },
    /// All spaces of the first piece.
    FirstPieceSpaces,
}

/// Byte strings of all ids, in one allocation.
#[derive(Debug)]
pub(super) struct PieceTable {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    pub(super) invalid: Invalid,
    pub(super) start: Start,
}

impl PieceTable {
    /// An empty table for a decoder.
    pub(super) fn new(rule: &DecodeRule) -> Self {
        let invalid = if rule.byte_level { Invalid::PerSequence } else { Invalid::PerByte };
        Self { bytes: Vec::new(), ends: Vec::new(), invalid, start: rule.start }
    }

    /// Appends the piece of the next id; `None` is an id without a token, which shows as nothing.
    pub(super) fn push(&mut self, token: Option<&str>, rule: &DecodeRule) {
        if let Some(token) = token {
            rule.append_piece(token, &mut self.bytes);
        }
        self.ends.push(self.bytes.len() as u32);
    }

    /// The bytes of an id; empty outside the vocabulary.
    pub(super) fn get(&self, id: u32) -> &[u8] {
        let i = id as usize;
        let Some(&end) = self.ends.get(i) else { return &[] };
        let begin = if i == 0 { 0 } else { self.ends[i - 1] };
        &self.bytes[begin as usize..end as usize]
    }

    /// Entries, with holes.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }
}

/// What a decoder does to each token, and at the start.
#[derive(Debug, Clone)]
pub(super) struct DecodeRule {
    pub(super) byte_level: bool,
    pub(super) byte_fallback: bool,
    pub(super) replace: Vec<(String, String)>,
    pub(super) start: Start,
}

impl DecodeRule {
    /// The decoder of byte-level BPE.
    pub(super) fn byte_level() -> Self {
        Self { byte_level: true, byte_fallback: false, replace: Vec::new(), start: Start::Keep }
    }

    /// The decoder of SentencePiece vocabularies; `strip` drops the space that encoding put in front.
    pub(super) fn sentencepiece(strip: bool) -> Self {
        let start = if strip { Start::Strip { byte: b' ', count: 1 } } else { Start::Keep };
        let replace = vec![("\u{2581}".to_string(), " ".to_string())];
        Self { byte_level: false, byte_fallback: true, replace, start }
    }

    /// Reads the `decoder` of a `tokenizer.json`.
    ///
    /// # Errors
    /// A decoder that is not a byte string per token.
    pub(super) fn from_json(decoder: &Value) -> Result<Self, TextError> {
        let mut rule =
            Self { byte_level: false, byte_fallback: false, replace: Vec::new(), start: Start::Keep };
        let mut fused = false;
        if decoder.is_null() {
            return Err(TextError::UnsupportedDecoder { asked: "null".into() });
        }
        rule.add(decoder, &mut fused)?;
        Ok(rule)
    }

    fn add(&mut self, decoder: &Value, fused: &mut bool) -> Result<(), TextError> {
        let kind = decoder.get("type").and_then(Value::as_str).unwrap_or_default();
        let refuse = || TextError::UnsupportedDecoder { asked: shorten(&decoder.to_string()) };
        match kind {
            "Sequence" => {
                let list = decoder.get("decoders").and_then(Value::as_array).ok_or_else(refuse)?;
                for item in list {
                    if item.get("type").and_then(Value::as_str) == Some("Sequence") {
                        return Err(refuse());
                    }
                    self.add(item, fused)?;
                }
            }
            "ByteLevel" if !*fused && self.replace.is_empty() && !self.byte_fallback => {
                self.byte_level = true
            }
            "Fuse" => *fused = true,
            "ByteFallback" if !*fused && !self.byte_level => self.byte_fallback = true,
            "Replace" if !*fused && !self.byte_fallback && !self.byte_level => {
                let from =
                    decoder.pointer("/pattern/String").and_then(Value::as_str).filter(|s| !s.is_empty());
                let to = decoder.get("content").and_then(Value::as_str);
                let (Some(from), Some(to)) = (from, to) else { return Err(refuse()) };
                self.replace.push((from.to_string(), to.to_string()));
            }
            "Strip" if *fused && self.start == Start::Keep => {
                let content = decoder.get("content").and_then(Value::as_str).unwrap_or_default();
                let count = decoder.get("start").and_then(Value::as_u64).unwrap_or(0) as usize;
                let stop = decoder.get("stop").and_then(Value::as_u64).unwrap_or(0);
                let &[byte] = content.as_bytes() else { return Err(refuse()) };
                if stop != 0 || !byte.is_ascii() {
                    return Err(refuse());
                }
                self.start = Start::Strip { byte, count };
            }
            "Metaspace" if !*fused && self.replace.is_empty() && !self.byte_level => self.metaspace(decoder),
            _ => return Err(refuse()),
        }
        Ok(())
    }

    fn metaspace(&mut self, decoder: &Value) {
        let mark = decoder.get("replacement").and_then(Value::as_str).filter(|s| !s.is_empty());
        self.replace.push((mark.unwrap_or("\u{2581}").to_string(), " ".to_string()));
        // older files say add_prefix_space instead of prepend_scheme; both default to a prefix
        let never = match decoder.get("prepend_scheme").and_then(Value::as_str) {
            Some(scheme) => scheme == "never",
            None => decoder.get("add_prefix_space").and_then(Value::as_bool) == Some(false),
        };
        self.start = if never { Start::Keep } else { Start::FirstPieceSpaces };
    }

    fn append_piece(&self, token: &str, out: &mut Vec<u8>) {
        if self.byte_level {
            let begin = out.len();
            for c in token.chars() {
                let Some(byte) = byte_of_char(c) else {
                    out.truncate(begin);
                    out.extend_from_slice(token.as_bytes());
                    return;
                };
                out.push(byte);
            }
            return;
        }
        if let Some(byte) = self.byte_fallback.then(|| byte_token(token)).flatten() {
            out.push(byte);
            return;
        }
        match self.replace.as_slice() {
            [] => out.extend_from_slice(token.as_bytes()),
            rules => {
                let mut text = token.to_string();
                for (from, to) in rules {
                    text = text.replace(from.as_str(), to);
                }
                out.extend_from_slice(text.as_bytes());
            }
        }
    }
}

/// The byte of a token such as `<0x0A>`.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() != 2 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(hex, 16).ok()
}

/// The byte that a character of a byte-level vocabulary stands for: printable Latin-1 is itself, the 68 other bytes are
/// numbered from U+0100 (GPT-2).
pub(super) fn byte_of_char(c: char) -> Option<u8> {
    match c as u32 {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The character that stands for a byte in a byte-level vocabulary.
pub(super) fn char_of_byte(byte: u8) -> char {
    let code = match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u32::from(byte),
        0..=0x20 => 0x100 + u32::from(byte),
        0x7f..=0xa0 => 0x121 + u32::from(byte) - 0x7f,
        0xad => 0x143,
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

fn shorten(text: &str) -> String {
    text.chars().take(120).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_characters_are_a_bijection() {
        for byte in 0..=255u8 {
            assert_eq!(byte_of_char(char_of_byte(byte)), Some(byte));
        }
        assert_eq!(char_of_byte(b' '), 'Ġ');
        assert_eq!(char_of_byte(b'\n'), 'Ċ');
        assert_eq!(byte_of_char('▁'), None);
    }

    #[test]
    fn byte_tokens_are_exact() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        assert_eq!(byte_token("<0xff>"), Some(255));
        for no in ["<0x0>", "<0x0AA>", "<0x+1>", "<0xé>", "0x0A", "<0x0A"] {
            assert_eq!(byte_token(no), None, "{no}");
        }
    }

    #[test]
    fn decoders_that_are_not_bytes_per_token_are_refused() {
        for text in [
            "null",
            r#"{"type":"WordPiece","prefix":""}"#,
            r#"{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":1}]}"#,
            r#"{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"ByteFallback"}]}"#,
            r#"{"type":"Replace","pattern":{"Regex":"a"},"content":""}"#,
        ] {
            let value: Value = serde_json::from_str(text).unwrap();
            let error = DecodeRule::from_json(&value).unwrap_err();
            assert!(matches!(error, TextError::UnsupportedDecoder { .. }), "{text}: {error}");
        }
    }
}
