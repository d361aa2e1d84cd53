//! `POST /v1/completions`.

mod chunks;
mod request;

pub use request::MAX_LOGPROBS;

use super::{
    App,
    answer::{self, Usage, Whole, refused},
    call::Call,
    stream,
    tokens::TextLogprobs,
};
use crate::{ApiError, driver::Model};
use axum::{
    Json,
    body::Bytes,
    extract::State,
    response::{IntoResponse, Response},
};
use chunks::TextChunks;
use headway_engine::{GenerateRequest, sampling::Constraint};
use request::Request;
use serde_json::{Value, json};
use std::sync::Arc;

/// The handler.
///
/// # Errors
/// As the API has them.
pub async fn handle(State(app): State<Arc<App>>, body: Bytes) -> Result<Response, ApiError> {
    let model = app.model()?;
    let (request, ids, texts, constraint) = {
        let model = Arc::clone(&model);
        app.prepare(move |app| ready(&body, app, &model)).await?
    };
    let name = app.served(request.common.model.as_deref())?;
    let n = request.common.n;
    app.admit(&ids, n, "prompt", &model)?;
    let mut usage = Usage { prompt_tokens: ids.iter().map(Vec::len).sum(), ..Usage::default() };
    let mut call = Call::begin("completions", "cmpl", name, usage.prompt_tokens);
    if app.options.log_prompts {
        tracing::info!(id = call.id, prompts = ?texts, "prompts");
    }
    let mut requests = Vec::with_capacity(ids.len() * n);
    for prompt_ids in ids {
        let mut sampling = request.common.sampling.clone();
        sampling.max_tokens = Some(request.max_tokens(prompt_ids.len(), &model));
        sampling.logprobs = request.logprobs;
        let constraint = constraint.clone();
        let one = GenerateRequest { prompt_ids, sampling, constraint, ..GenerateRequest::default() };
        requests.extend(super::copies(&one, n));
    }
    let answer = app.submit(requests).await.map_err(|e| refused(e, "prompt"))?;
    let echo = if request.echo { texts } else { vec![] };
    if request.common.stream {
        let include_usage = request.common.include_usage;
        let chunks = TextChunks::new(call, model, echo, n, answer.len(), request.logprobs, include_usage);
        return Ok(stream::respond(answer, chunks, n, usage, include_usage));
    }
    let answers = answer::whole(answer, n, &mut usage).await?;
    let choices: Vec<Value> = answers
        .iter()
        .enumerate()
        .map(|(i, a)| choice(i, a, echo.get(i / n).map_or("", String::as_str), &model, request.logprobs))
        .collect();
    call.usage = usage;
    Ok(Json(call.object("text_completion", choices, Some(&usage))).into_response())
}

/// A request, the ids of its prompts, their texts where they are echoed or logged, and what the answers must be.
type Ready = (Request, Vec<Vec<u32>>, Vec<String>, Option<Box<dyn Constraint>>);

fn ready(body: &Bytes, app: &App, model: &Model) -> Result<Ready, ApiError> {
    let request = Request::parse(body)?;
    app.served(request.common.model.as_deref())?;
    let ids: Vec<_> = request.prompts.iter().map(|p| p.ids(model)).collect::<Result<_, _>>()?;
    let texts = match request.echo || app.options.log_prompts {
        true => request.prompts.iter().map(|p| p.text(model)).collect(),
        false => vec![],
    };
    let constraint = app.constraint(request.format.as_ref(), model)?;
    Ok((request, ids, texts, constraint))
}

fn choice(index: usize, whole: &Whole, echo: &str, model: &Model, logprobs: Option<usize>) -> Value {
    let text = format!("{echo}{}", whole.text());
    let logprobs = logprobs.map(|top| {
        let (mut lists, mut offset) = (TextLogprobs::default(), 0);
        for t in &whole.tokens {
            lists.push(model.tokenizer.as_ref(), t, top, offset);
            offset += t.text.chars().count();
        }
        lists.json()
    });
    json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": whole.finished.reason.name()})
}
