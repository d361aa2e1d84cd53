//! A [`Tokenizer`] out of what [`loading`](crate::loading) opened. Not for parsing: the parts are read elsewhere.

use super::error::TextError;
use super::gguf::GgufTokenizer;
use super::tokenizer::Tokenizer;
use crate::loading::gguf::{Array, Metadata, Value};
use crate::loading::{GgufFile, HfFiles, LoadError, ModelFiles, ModelKind};

impl Tokenizer {
    /// The tokenizer of an opened model, whichever format it has.
    ///
    /// # Errors
    /// A model without a tokenizer, and everything that the two formats' constructors refuse.
    pub fn from_model_files(files: &ModelFiles) -> Result<Self, TextError> {
        match &files.kind {
            ModelKind::Safetensors(hf) => Self::from_hf_files(hf, files),
            ModelKind::Gguf(file) => Self::from_gguf_file(file),
        }
    }

    /// The tokenizer inside a GGUF file.
    ///
    /// # Errors
    /// As [`from_gguf`](Self::from_gguf), and keys of the wrong kind.
    pub fn from_gguf_file(file: &GgufFile) -> Result<Self, TextError> {
        Self::from_gguf(GgufTokenizer::from_metadata(file.metadata())?)
    }

    fn from_hf_files(hf: &HfFiles, files: &ModelFiles) -> Result<Self, TextError> {
        let Some(path) = &hf.tokenizer_json else {
            return Err(TextError::File {
                path: files.root.clone(),
                detail: "there is no tokenizer.json; download it from the model's page, or give --prompt-ids"
                    .into(),
            });
        };
        let json =
            std::fs::read(path).map_err(|e| TextError::File { path: path.clone(), detail: e.to_string() })?;
        Self::from_json(
            &json,
            hf.tokenizer_config.as_ref(),
            hf.generation_config.as_ref(),
            hf.chat_template.clone(),
        )
    }
}

impl GgufTokenizer {
    /// The tokenizer's keys out of a file's metadata, unchecked beyond their kinds.
    ///
    /// # Errors
    /// A missing `tokenizer.ggml.model` or `tokenizer.ggml.tokens`, and keys of the wrong kind.
    pub fn from_metadata(m: &Metadata) -> Result<Self, TextError> {
        Self::read(m).map_err(|e| TextError::Load { detail: e.to_string() })
    }

    fn read(m: &Metadata) -> Result<Self, LoadError> {
        let text = |key: &str| m.opt_text(key).map(|t| t.map(str::to_string));
        let list = |key: &str| m.opt_strings(key).map(|l| l.map(|l| l.to_vec()));
        Ok(Self {
            model: m.text("tokenizer.ggml.model")?.to_string(),
            pre: text("tokenizer.ggml.pre")?,
            tokens: m.strings("tokenizer.ggml.tokens")?.to_vec(),
            scores: m.opt_f32s("tokenizer.ggml.scores")?,
            token_types: m.opt_i32s("tokenizer.ggml.token_type")?,
            merges: list("tokenizer.ggml.merges")?,
            bos_id: m.opt_u32("tokenizer.ggml.bos_token_id")?,
            eos_id: m.opt_u32("tokenizer.ggml.eos_token_id")?,
            eot_id: m.opt_u32("tokenizer.ggml.eot_token_id")?,
            unk_id: m.opt_u32("tokenizer.ggml.unknown_token_id")?,
            pad_id: m.opt_u32("tokenizer.ggml.padding_token_id")?,
            add_bos: m.opt_bool("tokenizer.ggml.add_bos_token")?,
            add_eos: m.opt_bool("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: m.opt_bool("tokenizer.ggml.add_space_prefix")?,
            precompiled_charsmap: bytes(m, "tokenizer.ggml.precompiled_charsmap")?,
            chat_template: text("tokenizer.chat_template")?,
        })
    }
}

/// An array of bytes, which files write as signed or unsigned.
fn bytes(m: &Metadata, key: &str) -> Result<Option<Vec<u8>>, LoadError> {
    let Some(value) = m.get(key) else { return Ok(None) };
    let Value::Array(Array::Numbers(numbers)) = value else {
        return Err(m.bad(key, format!("must be an array of bytes, is {}", value.kind())));
    };
    let byte = |v| match v {
        Value::Uint(v) => u8::try_from(v).ok(),
        Value::Int(v) => i8::try_from(v).ok().map(i8::cast_unsigned),
        _ => None,
    };
    let bytes: Option<Vec<u8>> = numbers.iter().map(byte).collect();
    bytes.map(Some).ok_or_else(|| m.bad(key, "must be an array of bytes"))
}
