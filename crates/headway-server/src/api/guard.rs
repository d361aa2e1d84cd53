//! What stands around every endpoint: key, bounds, origins, and a handler's panic.

use super::{App, body};
use crate::ApiError;
use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderValue, Method, StatusCode, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
};
use std::sync::Arc;
use subtle::ConstantTimeEq;
use tower_http::{
    catch_panic::CatchPanicLayer,
    cors::{AllowOrigin, Any, CorsLayer},
};

/// `answers` behind the key, `open` without; both bounded.
pub fn around(answers: Router<Arc<App>>, open: Router<Arc<App>>, app: Arc<App>) -> Router<Arc<App>> {
    let answers = answers
        .layer(from_fn_with_state(Arc::clone(&app), body::buffer))
        .layer(from_fn_with_state(Arc::clone(&app), key));
    let all = answers
        .merge(open)
        .fallback(|request: Request| async move {
            ApiError::new(
                StatusCode::NOT_FOUND,
                format!("there is no {}; see /openapi.json", request.uri().path()),
            )
        })
        .method_not_allowed_fallback(|request: Request| async move {
            let why = format!("{} is not for {}; see /openapi.json", request.uri().path(), request.method());
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, why)
        })
        .layer(CatchPanicLayer::custom(|_| panicked()));
    match cors(&app.options.cors_origins) {
        None => all,
        Some(layer) => all.layer(layer),
    }
}

/// The message went to the log by the panic hook.
fn panicked() -> Response {
    let why = "the request's handling failed; the server goes on";
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why).into_response()
}

fn cors(origins: &[String]) -> Option<CorsLayer> {
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::POST])
        .allow_headers([header::CONTENT_TYPE, header::AUTHORIZATION]);
    match origins {
        [] => None,
        [any] if any == "*" => Some(layer.allow_origin(Any)),
        list => {
            let values: Vec<HeaderValue> = list.iter().filter_map(|o| o.parse().ok()).collect();
            Some(layer.allow_origin(AllowOrigin::list(values)))
        }
    }
}

/// Refuses requests without the key, where there is one. Takes as long for any key of the right length.
async fn key(State(app): State<Arc<App>>, request: Request, next: Next) -> Result<Response, ApiError> {
    let Some(wanted) = &app.options.api_key else { return Ok(next.run(request).await) };
    let given = request.headers().get(header::AUTHORIZATION).map_or(&[][..], HeaderValue::as_bytes);
    let given = given.strip_prefix(b"Bearer ").or_else(|| given.strip_prefix(b"bearer ")).unwrap_or(&[]);
    match bool::from(given.ct_eq(wanted.as_bytes())) {
        true => Ok(next.run(request).await),
        false => {
            let why = "a valid key is needed; send the header Authorization: Bearer KEY";
            Err(ApiError::new(StatusCode::UNAUTHORIZED, why).with_code("invalid_api_key"))
        }
    }
}
