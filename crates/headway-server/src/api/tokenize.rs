//! `POST /tokenize` and `POST /detokenize`.

use super::{App, chat::Conversation, fields::Fields};
use crate::ApiError;
use axum::{Json, body::Bytes, extract::State};
use headway_engine::text::Tokenizer;
use serde_json::{Value, json};
use std::sync::Arc;

/// A text's ids, or those of a conversation.
///
/// # Errors
/// As the API has them.
pub async fn tokenize(State(app): State<Arc<App>>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let model = app.model()?;
    let mut f = Fields::parse(&body)?;
    drop(body);
    app.served(f.take::<String>("model")?.as_deref())?;
    let with_strings = f.take("return_token_strs")?.unwrap_or(false);
    let (text, special): (Option<String>, bool) =
        (f.take("prompt")?, f.take("add_special_tokens")?.unwrap_or(true));
    let chat = Conversation::take_if_given(&mut f)?;
    f.finish()?;
    super::blocking(move || {
        let tokenizer = model.tokenizer()?;
        let ids = match (&text, &chat) {
            (Some(text), None) => {
                tokenizer.encode(text, special).map_err(|e| ApiError::param("prompt", e.to_string()))?
            }
            (None, Some(chat)) => chat.ids(&model)?,
            (Some(_), Some(_)) => {
                return Err(ApiError::param("messages", "give prompt or messages, not both"));
            }
            (None, None) => return Err(ApiError::param("prompt", "prompt is missing; give it, or messages")),
        };
        let strings =
            with_strings.then(|| ids.iter().map(|id| tokenizer.id_to_token(*id)).collect::<Vec<_>>());
        Ok(Json(json!({
            "count": ids.len(),
            "max_model_len": model.max_request_tokens,
            "tokens": ids,
            "token_strs": strings,
        })))
    })
    .await
}

/// The text of ids.
///
/// # Errors
/// As the API has them.
pub async fn detokenize(State(app): State<Arc<App>>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let model = app.model()?;
    let mut f = Fields::parse(&body)?;
    app.served(f.take::<String>("model")?.as_deref())?;
    let ids: Vec<u32> = f.need("tokens")?;
    f.finish()?;
    let tokenizer = model.tokenizer()?;
    Tokenizer::check_ids(&ids, tokenizer.vocab_size())
        .map_err(|e| ApiError::param("tokens", e.to_string()))?;
    Ok(Json(json!({"prompt": tokenizer.decode(&ids, false)})))
}
