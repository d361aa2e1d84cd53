//! A request's body, whole: within its size, within its time.

use super::App;
use crate::ApiError;
use axum::{
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::Next,
    response::Response,
};
use std::sync::Arc;

/// Reads the body before the handler sees the request.
///
/// # Errors
/// 413 for one that is too large, 408 for one that doesn't come, 415 for another type than JSON, 400 for one that
/// breaks off.
pub async fn buffer(State(app): State<Arc<App>>, request: Request, next: Next) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    if !is_json(&parts) && parts.method == axum::http::Method::POST {
        let why = "the body must be JSON; send the header Content-Type: application/json";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
    }
    let (most, time) = (app.options.max_body_bytes, app.options.body_timeout);
    let too_large = || {
        let why = format!("the body has more than {most} bytes; send less, or raise --max-body-size");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, why)
    };
    let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|n| n > most as u64) {
        return Err(too_large());
    }
    let read = tokio::time::timeout(time, to_bytes(body, most)).await.map_err(|_| {
        let why = format!("the body did not come within {} s", time.as_secs_f64());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, why)
    })?;
    let bytes: Bytes = read.map_err(|e| match is_length(&e) {
        true => too_large(),
        false => ApiError::new(StatusCode::BAD_REQUEST, format!("the body broke off: {e}")),
    })?;
    Ok(next.run(Request::from_parts(parts, Body::from(bytes))).await)
}

/// JSON, or not said.
fn is_json(parts: &axum::http::request::Parts) -> bool {
    let Some(value) = parts.headers.get(header::CONTENT_TYPE) else { return true };
    let text = value.to_str().unwrap_or("").to_ascii_lowercase();
    let kind = text.split(';').next().unwrap_or("").trim();
    kind == "application/json" || kind.ends_with("+json") || kind.is_empty()
}

fn is_length(e: &axum::Error) -> bool {
    use std::error::Error;
    let mut source: Option<&(dyn Error + 'static)> = Some(e);
    while let Some(e) = source {
        if e.is::<http_body_util::LengthLimitError>() {
            return true;
        }
        source = e.source();
    }
    false
}
