//! A [`Tokenizer`] out of what [`loading`](crate::loading) opened. Not for parsing: the parts are read elsewhere.

use super::error::TextError;
use super::gguf::GgufTokenizer;
use super::tokenizer::Tokenizer;
use crate::loading::gguf::Metadata;
use crate::loading::{GgufFile, HfFiles, ModelFiles, ModelKind};

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
    /// A missing `tokenizer.ggml.model`, and keys of the wrong kind.
    pub fn from_metadata(m: &Metadata) -> Result<Self, TextError> {
        Self::try_from(m).map_err(|e| TextError::Load { detail: e.to_string() })
    }
}
