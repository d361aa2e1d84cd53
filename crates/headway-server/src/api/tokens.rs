//! Tokens as the API shows them: their text, their bytes, their log-probabilities.

use headway_engine::{engine::NewToken, sampling::TokenLogprob, text::Tokenizer};
use serde_json::{Map, Value, json};

/// A token's own text: whole characters, or replacement marks where it is part of one.
pub fn text(tokenizer: Option<&Tokenizer>, id: u32) -> String {
    match tokenizer {
        None => id.to_string(),
        Some(t) if t.is_special(id) => t.id_to_token(id).unwrap_or_default(),
        Some(t) => String::from_utf8_lossy(t.token_bytes(id)).into_owned(),
    }
}

/// An entry of a chat completion's `logprobs.content`, with its `top` most likely tokens.
pub fn chat_entry(tokenizer: Option<&Tokenizer>, token: &NewToken, top: usize) -> Option<Value> {
    let (own, all) = token.logprob.zip(token.logprobs.as_ref())?;
    let mut entry = one(tokenizer, &TokenLogprob { token_id: token.token_id, logprob: own });
    entry["top_logprobs"] = all.top.iter().take(top).map(|t| one(tokenizer, t)).collect();
    Some(entry)
}

fn one(tokenizer: Option<&Tokenizer>, t: &TokenLogprob) -> Value {
    let text = text(tokenizer, t.token_id);
    let bytes = match tokenizer {
        Some(tok) if !tok.is_special(t.token_id) => tok.token_bytes(t.token_id).to_vec(),
        _ => text.clone().into_bytes(),
    };
    json!({"token": text, "logprob": t.logprob, "bytes": bytes})
}

/// `logprobs` of a text completion: lists over its tokens.
#[derive(Default)]
pub struct TextLogprobs {
    tokens: Vec<String>,
    own: Vec<Value>,
    top: Vec<Value>,
    offsets: Vec<usize>,
}

impl TextLogprobs {
    /// Appends a token.
    pub fn push(&mut self, tokenizer: Option<&Tokenizer>, token: &NewToken, top: usize) {
        let own = token.logprob.unwrap_or(f32::NEG_INFINITY);
        self.tokens.push(text(tokenizer, token.token_id));
        self.own.push(json!(own));
        let mut map = Map::new();
        for t in token.logprobs.iter().flat_map(|l| l.top.iter().take(top)) {
            map.entry(text(tokenizer, t.token_id)).or_insert(json!(t.logprob));
        }
        map.entry(text(tokenizer, token.token_id)).or_insert(json!(own));
        self.top.push(Value::Object(map));
        self.offsets.push(token.text_offset);
    }

    /// As the API has it.
    pub fn json(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.own,
            "top_logprobs": self.top,
            "text_offset": self.offsets,
        })
    }
}
