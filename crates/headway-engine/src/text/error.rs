//! What can go wrong between text and token ids. Not for errors of loading weights.

use std::path::PathBuf;

/// An error of the tokenizer, the stop strings or the chat template; every message names the key, file or option and
/// says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file could not be read or is not what its name says.
    #[error("{}: {detail}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// The model's files do not give up a key that the tokenizer needs.
    #[error("{detail}")]
    Load {
        /// The loader's own words, which name the file and the key.
        detail: String,
    },
    /// A `tokenizer.json` that cannot be used.
    #[error("tokenizer.json: {detail}; download the file again")]
    TokenizerJson {
        /// What is wrong.
        detail: String,
    },
    /// A JSON file beside `tokenizer.json` holds a value that cannot be used.
    #[error("{file}: {detail}")]
    Config {
        /// Which file.
        file: &'static str,
        /// What is wrong.
        detail: String,
    },
    /// The decoder in `tokenizer.json` is of a kind that cannot be streamed.
    #[error(
        "tokenizer.json: decoder {asked} is not supported; supported are ByteLevel, Metaspace and sequences of \
         Replace, ByteFallback, Fuse and a leading Strip. Use a model of the Llama, Qwen, Gemma, Mistral or Phi kind"
    )]
    UnsupportedDecoder {
        /// The decoder, as the file names it.
        asked: String,
    },
    /// A GGUF metadata key is missing, contradicts another or holds a value that cannot be used.
    #[error("GGUF key {key}: {detail}")]
    GgufKey {
        /// The full name of the key.
        key: &'static str,
        /// What is wrong.
        detail: String,
    },
    /// The GGUF names a tokenizer kind that is not known.
    #[error(
        "GGUF key tokenizer.ggml.model: {asked:?} is not supported; supported are {supported}. Put the model's \
         tokenizer.json beside the file, or convert the model again"
    )]
    UnsupportedTokenizer {
        /// The kind that the file names.
        asked: String,
        /// The supported kinds.
        supported: String,
    },
    /// The GGUF names a pre-tokenizer that is not known.
    #[error(
        "GGUF key tokenizer.ggml.pre: {asked:?} is not supported; supported are {supported}. Another split would \
         give other token ids, so none is guessed: use the model's safetensors form with its tokenizer.json"
    )]
    UnsupportedPreTokenizer {
        /// The pre-tokenizer that the file names.
        asked: String,
        /// The supported names.
        supported: String,
    },
    /// The text could not be turned into ids.
    #[error("the text cannot be tokenized: {detail}")]
    Encode {
        /// Why.
        detail: String,
    },
    /// An id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab_size}; ids go from 0 to {}", vocab_size.saturating_sub(1))]
    TokenId {
        /// The id.
        id: u32,
        /// Entries in the vocabulary.
        vocab_size: usize,
    },
    /// An empty stop string, which would stop before the first character.
    #[error("stop string {index} is empty; leave it out or give at least one character")]
    EmptyStop {
        /// Its position in the list, from 0.
        index: usize,
    },
    /// A chat was asked of a model that has no chat template.
    #[error(
        "this model has no chat template (it is probably a base model), so messages cannot be turned into a prompt; \
         leave --chat out and give a plain prompt, or use an instruction-tuned model"
    )]
    NoChatTemplate,
    /// The chat template does not parse, or is too large.
    #[error("chat template: {detail}")]
    Template {
        /// What is wrong and where.
        detail: String,
    },
    /// The chat template failed on these messages.
    #[error("chat template: {detail}")]
    Render {
        /// What failed and where.
        detail: String,
    },
    /// The template refused the messages itself, with `raise_exception`.
    #[error("the chat template refuses these messages: {message}")]
    Refused {
        /// The template's own words.
        message: String,
    },
}
