//! The splits that GGUF files name in `tokenizer.ggml.pre`: how a text is cut before byte-level BPE merges.
//!
//! The names are llama.cpp's; the patterns are those published with the models. Not for `tokenizer.json`, which brings
//! its own.

use super::error::TextError;
use tokenizers::normalizers::{NormalizerWrapper, unicode::NFC};
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::pre_tokenizers::{
    PreTokenizerWrapper, byte_level::ByteLevel, digits::Digits, sequence::Sequence, split::Split,
};
use tokenizers::tokenizer::SplitDelimiterBehavior;

/// One way to split, with everything that hangs on its name.
pub(super) struct Pre {
    pub(super) normalizer: Option<NormalizerWrapper>,
    pub(super) pre_tokenizer: PreTokenizerWrapper,
    /// A word that is in the vocabulary is taken whole, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// Whether BOS is added where the file does not say.
    pub(super) adds_bos: bool,
}

enum Cut {
    /// The pattern of GPT-2, as the `ByteLevel` pre-tokenizer has it.
    Gpt2,
    /// Every digit alone, then the pattern of GPT-2.
    DigitsGpt2,
    /// One pattern after the other, on what the one before left.
    Patterns(&'static [&'static str]),
}

struct Entry {
    names: &'static [&'static str],
    cut: Cut,
    nfc: bool,
    ignore_merges: bool,
    adds_bos: bool,
}

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const TABLE: &[Entry] = &[
    Entry {
        names: &["default"],
        cut: Cut::Patterns(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]),
        nfc: false,
        ignore_merges: false,
        adds_bos: false,
    },
    Entry {
        names: &["gpt-2", "phi-2", "olmo", "mpt"],
        cut: Cut::Gpt2,
        nfc: false,
        ignore_merges: false,
        adds_bos: false,
    },
    Entry {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell"],
        cut: Cut::DigitsGpt2,
        nfc: false,
        ignore_merges: false,
        adds_bos: false,
    },
    Entry {
        names: &["llama-bpe", "llama3", "llama-v3"],
        cut: Cut::Patterns(&[LLAMA3]),
        nfc: false,
        ignore_merges: true,
        adds_bos: true,
    },
    Entry {
        names: &["dbrx"],
        cut: Cut::Patterns(&[LLAMA3]),
        nfc: false,
        ignore_merges: false,
        adds_bos: false,
    },
    Entry {
        names: &["qwen2", "deepseek-r1-qwen"],
        cut: Cut::Patterns(&[QWEN2]),
        nfc: true,
        ignore_merges: false,
        adds_bos: false,
    },
];

/// Names of `tokenizer.ggml.pre` that are known, for byte-level BPE files.
pub fn supported_pre_tokenizers() -> Vec<&'static str> {
    TABLE.iter().flat_map(|e| e.names).copied().collect()
}

/// The split of a name.
///
/// # Errors
/// An unknown name: another split would give other ids without any sign of it.
pub(super) fn pre_tokenizer(name: &str) -> Result<Pre, TextError> {
    let Some(entry) = TABLE.iter().find(|e| e.names.contains(&name)) else {
        return Err(TextError::UnsupportedPreTokenizer {
            asked: name.to_string(),
            supported: supported_pre_tokenizers().join(", "),
        });
    };
    let bytes = |use_regex| PreTokenizerWrapper::from(ByteLevel::new(false, true, use_regex));
    let list = match entry.cut {
        Cut::Gpt2 => vec![bytes(true)],
        Cut::DigitsGpt2 => vec![Digits::new(true).into(), bytes(true)],
        Cut::Patterns(patterns) => {
            let mut list = Vec::with_capacity(patterns.len() + 1);
            for pattern in patterns {
                list.push(split(pattern)?);
            }
            list.push(bytes(false));
            list
        }
    };
    Ok(Pre {
        normalizer: entry.nfc.then(|| NFC.into()),
        pre_tokenizer: Sequence::new(list).into(),
        ignore_merges: entry.ignore_merges,
        adds_bos: entry.adds_bos,
    })
}

fn split(pattern: &str) -> Result<PreTokenizerWrapper, TextError> {
    let pattern = SplitPattern::Regex(pattern.to_string());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
    let split =
        split.map_err(|e| TextError::Encode { detail: format!("a pattern does not compile: {e}") })?;
    Ok(split.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_builds_and_unknown_names_are_refused_with_the_list() {
        for name in supported_pre_tokenizers() {
            assert!(pre_tokenizer(name).is_ok(), "{name}");
        }
        let Err(error) = pre_tokenizer("no-such-split") else { panic!("accepted") };
        let text = error.to_string();
        assert!(
            text.contains("no-such-split") && text.contains("smollm") && text.contains("llama-bpe"),
            "{text}"
        );
    }
}
