//! `POST /v1/completions`.

mod chunks;
mod request;

pub use request::MAX_LOGPROBS;

use super::{
    App, SMALL,
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
    let mut request = app
        .prepare(bytes, {
            let model = Arc::clone(&model);
            move |app| parsed(&body, app, &model)
        })
        .await?;
    let (ids, texts) = tokenized(&app, &model, &mut request, bytes).await?;
    let name = app.served(request.common.model.as_deref())?;
    let n = request.common.n;
    app.admit(&ids, n, "prompt", &model)?;
    let constraint = app.constraint(request.format.take(), &model).await?;
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

fn parsed(body: &Bytes, app: &App, model: &Model) -> Result<Request, ApiError> {
    let request = Request::parse(body, model)?;
    app.served(request.common.model.as_deref())?;
    Ok(request)
}

/// The ids of its prompts, and their texts where they are echoed or logged. Many prompts take many turns.
async fn tokenized(
    app: &Arc<App>,
    model: &Arc<Model>,
    request: &mut Request,
    bytes: usize,
) -> Result<(Vec<Vec<u32>>, Vec<String>), ApiError> {
    let with_texts = request.echo || app.options.log_prompts;
    let (mut all, mut texts) = (vec![], vec![]);
    let mut left = std::mem::take(&mut request.prompts).into_iter().peekable();
    while left.peek().is_some() {
        let (mut group, mut size) = (vec![], 0);
        while let Some(prompt) = left.next_if(|p| size == 0 || size + p.size() <= SMALL) {
            size += prompt.size();
            group.push(prompt);
        }
        let model = Arc::clone(model);
        let work = move |_: &App| {
            let ids = group.iter().map(|p| p.ids(&model)).collect::<Result<Vec<_>, _>>()?;
            let texts: Vec<_> = group.iter().filter(|_| with_texts).map(|p| p.text(&model)).collect();
            Ok((ids, texts))
        };
        let (ids, more) = app.prepare(bytes, work).await?;
        all.extend(ids);
        texts.extend(more);
    }
    Ok((all, texts))
}

fn choice(index: usize, whole: &Whole, echo: &str, model: &Model, logprobs: Option<usize>) -> Value {
    let text = format!("{echo}{}", whole.text());
    let logprobs = logprobs.map(|top| {
        let mut lists = TextLogprobs::default();
        whole.tokens.iter().for_each(|t| lists.push(model.tokenizer.as_ref(), t, top));
        lists.json()
    });
    json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": whole.finished.reason.name()})
}
