//! [`ApiError`]: every refusal, in the OpenAI API's shape: `{"error": {"message", "type", "param", "code"}}`.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

/// A request that was refused or that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// Its HTTP status.
    pub status: StatusCode,
    /// What is wrong, and what to do.
    pub message: String,
    /// The parameter that is wrong: `messages[0].role`.
    pub param: Option<String>,
    /// For programs: `model_not_found`, `context_length_exceeded`, …
    pub code: Option<&'static str>,
    /// Seconds after which another try makes sense.
    pub retry_after: Option<u32>,
}

impl ApiError {
    /// An error of this status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// 400: a parameter that is wrong by itself.
    pub fn param(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(name.into()), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// 422: understood, but not by this model or this build.
    pub fn unprocessable(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(name.into()), ..Self::new(StatusCode::UNPROCESSABLE_ENTITY, message) }
    }

    /// 503 while the model loads or the server ends.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { retry_after: Some(1), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    /// The same with a code.
    #[must_use]
    pub fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// The same, to be tried again after so many seconds.
    #[must_use]
    pub fn retry_after(self, seconds: u32) -> Self {
        Self { retry_after: Some(seconds), ..self }
    }

    /// The body; a stream sends it as an event.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": cut(&self.message, MAX_MESSAGE),
            "type": kind(self.status),
            "param": self.param.as_deref().map(shown),
            "code": self.code,
        }})
    }
}

/// The most characters of a name or value that a refusal shows.
const SHOWN: usize = 100;
/// The most characters of a refusal's words.
const MAX_MESSAGE: usize = 1000;

/// What a client sent, short enough to be shown.
pub(crate) fn shown(text: &str) -> std::borrow::Cow<'_, str> {
    cut(text, SHOWN)
}

/// The first `most` characters.
fn cut(text: &str, most: usize) -> std::borrow::Cow<'_, str> {
    match text.char_indices().nth(most) {
        None => text.into(),
        Some((end, _)) => format!("{}…", &text[..end]).into(),
    }
}

/// The API's `type` of a status.
fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        s if s.is_server_error() => "server_error",
        _ => "invalid_request_error",
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
