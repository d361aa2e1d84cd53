//! `POST /tokenize` and `POST /detokenize`.

use super::{App, chat::Conversation, fields::Fields, in_turn};
use crate::{ApiError, driver::Model};
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
    let turns = Arc::clone(&app.tokenizing);
    in_turn(&turns, move || tokenized(&app, &model, &body)).await
}

fn tokenized(app: &App, model: &Model, body: &Bytes) -> Result<Json<Value>, ApiError> {
    let mut f = Fields::parse(body)?;
    app.served(f.take::<String>("model")?.as_deref())?;
    let with_strings = f.take("return_token_strs")?.unwrap_or(false);
    let (text, special): (Option<String>, bool) =
        (f.take("prompt")?, f.take("add_special_tokens")?.unwrap_or(true));
    let chat = Conversation::take_if_given(&mut f)?;
    f.finish()?;
    let tokenizer = model.tokenizer()?;
    let encode = |text: &str, special, param| {
        tokenizer.encode(text, special).map_err(|e| ApiError::param(param, e.to_string()))
    };
    let ids = match (&text, &chat) {
        (Some(text), None) => encode(text, special, "prompt")?,
        (None, Some(chat)) => encode(&chat.render(model)?, false, "messages")?,
        (Some(_), Some(_)) => return Err(ApiError::param("messages", "give prompt or messages, not both")),
        (None, None) => return Err(ApiError::param("prompt", "prompt is missing; give it, or messages")),
    };
    let strings = with_strings.then(|| ids.iter().map(|id| tokenizer.id_to_token(*id)).collect::<Vec<_>>());
    Ok(Json(json!({
        "count": ids.len(),
        "max_model_len": model.max_request_tokens,
        "tokens": ids,
        "token_strs": strings,
    })))
}

/// The text of ids.
///
/// # Errors
/// As the API has them.
pub async fn detokenize(State(app): State<Arc<App>>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let model = app.model()?;
    let turns = Arc::clone(&app.tokenizing);
    in_turn(&turns, move || detokenized(&app, &model, &body)).await
}

fn detokenized(app: &App, model: &Model, body: &Bytes) -> Result<Json<Value>, ApiError> {
    let mut f = Fields::parse(body)?;
    app.served(f.take::<String>("model")?.as_deref())?;
    let ids: Vec<u32> = f.need("tokens")?;
    f.finish()?;
    let tokenizer = model.tokenizer()?;
    Tokenizer::check_ids(&ids, tokenizer.vocab_size())
        .map_err(|e| ApiError::param("tokens", e.to_string()))?;
    Ok(Json(json!({"prompt": tokenizer.decode(&ids, false)})))
}
