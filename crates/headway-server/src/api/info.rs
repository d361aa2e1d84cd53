//! What the server says of itself: models, health, version, metrics, start-up, and the OpenAPI document.

use super::App;
use crate::{ApiError, driver, metrics};
use axum::{
    Json,
    extract::{Path, State, rejection::PathRejection},
    http::header,
    response::IntoResponse,
};
use serde_json::{Value, json};
use std::sync::Arc;

/// `GET /v1/models`.
///
/// # Errors
/// 503 while there is no model.
pub async fn models(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let model = app.model()?;
    let all: Vec<_> = app.options.served_names.iter().map(|name| entry(name, &model)).collect();
    Ok(Json(json!({"object": "list", "data": all})))
}

/// `GET /v1/models/{name}`.
///
/// # Errors
/// 400 for a name that is no text, 404 for a model that isn't served, 503 while there is none.
pub async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let model = app.model()?;
    let Path(name) = name.map_err(|_| ApiError::param("model", "the model's name is not UTF-8"))?;
    Ok(Json(entry(app.served(Some(&name))?, &model)))
}

fn entry(name: &str, model: &driver::Model) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "headway",
        "max_model_len": model.max_request_tokens,
    })
}

/// `GET /health`: 200 when requests are taken.
///
/// # Errors
/// 503 else, with how far loading is.
pub async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    app.open()?;
    app.model()?;
    Ok(Json(json!({"status": "ready"})))
}

/// `GET /version`.
pub async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /metrics`.
pub async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], app.metrics.text())
}

/// `GET /v1/headway/startup`.
///
/// # Errors
/// 503 while there is no model.
pub async fn startup(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    Ok(Json(app.model()?.startup.clone()))
}

/// `GET /openapi.json`.
pub async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], include_str!("openapi.json"))
}

/// `GET /`: the status page.
pub async fn page() -> impl IntoResponse {
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                  img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, include_str!("../page/index.html"))
}
