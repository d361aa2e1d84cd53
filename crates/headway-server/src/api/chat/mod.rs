//! `POST /v1/chat/completions`.

mod chunks;
mod message;
mod request;

pub use request::Conversation;

use super::{
    App,
    answer::{self, Usage, Whole, refused},
    call::Call,
    stream,
    tokens::chat_entry,
};
use crate::{ApiError, driver::Model};
use axum::{
    Json,
    body::Bytes,
    extract::State,
    response::{IntoResponse, Response},
};
use chunks::ChatChunks;
use headway_engine::GenerateRequest;
use request::Request;
use serde_json::{Value, json};
use std::sync::Arc;

/// The handler.
///
/// # Errors
/// As the API has them.
pub async fn handle(State(app): State<Arc<App>>, body: Bytes) -> Result<Response, ApiError> {
    let model = app.model()?;
    let bytes = body.len();
    let (prompt_ids, mut request) = {
        let model = Arc::clone(&model);
        let ready = move |app: &App| {
            let request = Request::parse(&body, &model)?;
            app.served(request.common.model.as_deref())?;
            Ok((request.chat.ids(&model)?, request))
        };
        app.prepare(bytes, ready).await?
    };
    let name = app.served(request.common.model.as_deref())?;
    let n = request.common.n;
    app.admit(std::slice::from_ref(&prompt_ids), n, "messages", &model)?;
    let constraint = app.constraint(request.format.take(), &model).await?;
    let mut usage = Usage { prompt_tokens: prompt_ids.len(), ..Usage::default() };
    let mut call = Call::begin("chat", "chatcmpl", name, usage.prompt_tokens);
    if app.options.log_prompts {
        let text = model.tokenizer.as_ref().map(|t| t.decode(&prompt_ids, false));
        tracing::info!(id = call.id, prompt = text, "prompt");
    }
    let mut sampling = request.common.sampling;
    sampling.max_tokens = request.max_tokens;
    sampling.logprobs = request.top_logprobs;
    let one = GenerateRequest { prompt_ids, sampling, constraint, ..GenerateRequest::default() };
    let answer = app.submit(super::copies(&one, n).collect()).await.map_err(|e| refused(e, "messages"))?;
    if request.common.stream {
        let include_usage = request.common.include_usage;
        let chunks = ChatChunks { call, model, n, top_logprobs: request.top_logprobs, include_usage };
        return Ok(stream::respond(answer, chunks, n, usage, include_usage));
    }
    let answers = answer::whole(answer, n, &mut usage).await?;
    let choices = answers.iter().enumerate().map(|(i, a)| choice(i, a, &model, request.top_logprobs));
    let choices = choices.collect();
    call.usage = usage;
    Ok(Json(call.object("chat.completion", choices, Some(&usage))).into_response())
}

fn choice(index: usize, whole: &Whole, model: &Model, top: Option<usize>) -> Value {
    let logprobs = top.map(|top| {
        let entries: Vec<Value> =
            whole.tokens.iter().filter_map(|t| chat_entry(model.tokenizer.as_ref(), t, top)).collect();
        json!({"content": entries, "refusal": null})
    });
    json!({
        "index": index,
        "message": {"role": "assistant", "content": whole.text(), "refusal": null},
        "logprobs": logprobs,
        "finish_reason": whole.finished.reason.name(),
    })
}
