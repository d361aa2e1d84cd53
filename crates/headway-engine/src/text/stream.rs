//! Incremental detokenisation: bytes wait until they are whole characters.
//!
//! A [`StreamDecoder`] lives for one request. The concatenation of what it emits is exactly what
//! [`Tokenizer::decode`](super::Tokenizer::decode) returns for the same ids, because that runs the same code. Not for
//! stop strings; see [`StopMatcher`](super::StopMatcher).

use super::pieces::{Invalid, Start};
use super::tokenizer::Tokenizer;

/// Turns ids into text one at a time.
///
/// ```no_run
/// # fn run(tokenizer: &headway_engine::text::Tokenizer, ids: &[u32]) {
/// use headway_engine::text::StreamDecoder;
/// let mut decoder = StreamDecoder::new(tokenizer.clone(), true);
/// let mut text = String::new();
/// for &id in ids {
///     text.push_str(&decoder.push(id));
/// }
/// text.push_str(&decoder.finish());
/// assert_eq!(text, tokenizer.decode(ids, true));
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    skip_special: bool,
    start: Start,
    pending: Vec<u8>,
}

impl StreamDecoder {
    /// A decoder for a text of its own: the space that some vocabularies put in front of every text is dropped.
    pub fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        let start = tokenizer.pieces().start;
        Self { tokenizer, skip_special, start, pending: Vec::new() }
    }

    /// A decoder for a text that goes on after another, such as a completion after its prompt: a leading space is kept.
    pub fn continuing(tokenizer: Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, start: Start::Keep, pending: Vec::new() }
    }

    /// Takes one id and returns the characters that it completes, often none. Ids outside the vocabulary show as
    /// nothing.
    pub fn push(&mut self, id: u32) -> String {
        let mut out = String::new();
        self.push_into(id, &mut out);
        out
    }

    /// As [`push`](Self::push), appending to `out`.
    pub fn push_into(&mut self, id: u32, out: &mut String) {
        if self.skip_special && self.tokenizer.is_special(id) {
            return;
        }
        let table = self.tokenizer.pieces();
        let piece = table.get(id);
        match self.start {
            Start::FirstPieceSpaces => {
                self.pending.extend(piece.iter().copied().filter(|b| *b != b' '));
                self.start = Start::Keep;
            }
            Start::Strip { byte, count } if !piece.is_empty() => {
                let cut = piece.iter().take(count).take_while(|b| **b == byte).count();
                self.pending.extend_from_slice(&piece[cut..]);
                self.start = match count - cut {
                    left if left > 0 && cut == piece.len() => Start::Strip { byte, count: left },
                    _ => Start::Keep,
                };
            }
            _ => self.pending.extend_from_slice(piece),
        }
        let invalid = table.invalid;
        self.drain(invalid, out);
    }

    /// Ends the text: what is left of an unfinished character becomes replacement marks.
    pub fn finish(&mut self) -> String {
        let marks = match (self.pending.len(), self.tokenizer.pieces().invalid) {
            (0, _) => 0,
            (_, Invalid::PerSequence) => 1,
            (n, Invalid::PerByte) => n,
        };
        self.pending.clear();
        "\u{fffd}".repeat(marks)
    }

    /// Bytes that wait for the rest of their character; at most 3.
    pub fn pending_bytes(&self) -> usize {
        self.pending.len()
    }

    fn drain(&mut self, invalid: Invalid, out: &mut String) {
        let mut begin = 0;
        loop {
            match std::str::from_utf8(&self.pending[begin..]) {
                Ok(text) => {
                    out.push_str(text);
                    begin = self.pending.len();
                    break;
                }
                Err(error) => {
                    let valid = begin + error.valid_up_to();
                    out.push_str(std::str::from_utf8(&self.pending[begin..valid]).unwrap_or_default());
                    begin = valid;
                    let Some(bad) = error.error_len() else { break };
                    let marks = if invalid == Invalid::PerByte { bad } else { 1 };
                    out.extend(std::iter::repeat_n('\u{fffd}', marks));
                    begin += bad;
                }
            }
        }
        self.pending.drain(..begin);
    }
}
