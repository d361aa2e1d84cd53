//! The tokenizer's keys of a GGUF header, as the plain struct that [`super::gguf`] checks.

use super::GgufTokenizer;
use crate::loading::{LoadError, gguf::Metadata};

impl TryFrom<&Metadata> for GgufTokenizer {
    type Error = LoadError;

    /// Reads the keys; those that are absent stay `None`.
    ///
    /// # Errors
    /// A key whose value is of another kind.
    fn try_from(m: &Metadata) -> Result<Self, LoadError> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let strings = |name: &str| Ok::<_, LoadError>(m.opt_strings(&key(name))?.map(|s| s.to_vec()));
        let charsmap = m.opt_i32s(&key("precompiled_charsmap"))?;
        Ok(Self {
            model: m.text(&key("model"))?.to_owned(),
            pre: m.opt_text(&key("pre"))?.map(str::to_owned),
            tokens: strings("tokens")?.unwrap_or_default(),
            scores: m.opt_f32s(&key("scores"))?,
            token_types: m.opt_i32s(&key("token_type"))?,
            merges: strings("merges")?,
            bos_id: m.opt_u32(&key("bos_token_id"))?,
            eos_id: m.opt_u32(&key("eos_token_id"))?,
            eot_id: m.opt_u32(&key("eot_token_id"))?,
            unk_id: m.opt_u32(&key("unknown_token_id"))?,
            pad_id: m.opt_u32(&key("padding_token_id"))?,
            add_bos: m.opt_bool(&key("add_bos_token"))?,
            add_eos: m.opt_bool(&key("add_eos_token"))?,
            add_space_prefix: m.opt_bool(&key("add_space_prefix"))?,
            precompiled_charsmap: charsmap.map(|v| v.into_iter().map(|b| b as u8).collect()),
            chat_template: m.opt_text("tokenizer.chat_template")?.map(str::to_owned),
        })
    }
}
