//! Everything between text and token ids: the tokenizer, streaming detokenisation, stop strings and chat templates.
//!
//! Lives for the whole program: a [`Tokenizer`] and a [`ChatTemplate`] are made once, when a model is loaded, and
//! shared. A [`StreamDecoder`] and a [`StopMatcher`] live for one request. Not for sampling or for the HTTP forms of
//! messages.

mod chat;
mod error;
mod from_files;
mod gguf;
mod header;
mod hf;
mod pieces;
mod pretokenize;
mod sentencepiece;
mod stop;
mod stream;
mod tokenizer;

pub(crate) use chat::strftime as date;
pub use chat::{ChatTemplate, Clock, Message, TemplateSource, fuzz_chat};
pub use error::TextError;
pub use gguf::{GgufTokenizer, SUPPORTED_MODELS};
pub use pretokenize::supported_pre_tokenizers;
pub use stop::StopMatcher;
pub use stream::StreamDecoder;
pub use tokenizer::Tokenizer;
