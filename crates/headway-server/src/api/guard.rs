//! What stands around every endpoint: key, bounds, origins, and a handler's panic.

use super::{App, body, ending};
use crate::ApiError;
use axum::{
    Router,
    body::Body,
    extract::{DefaultBodyLimit, Request, State},
    http::{HeaderValue, Method, StatusCode, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
};
use http_body_util::BodyExt;
use std::sync::{Arc, atomic::Ordering};
use subtle::ConstantTimeEq;
use tower_http::{
    catch_panic::CatchPanicLayer,
    cors::{AllowHeaders, AllowOrigin, Any, CorsLayer},
};

/// `answers` behind the key, `open` without; both bounded.
pub fn around(answers: Router<Arc<App>>, open: Router<Arc<App>>, app: Arc<App>) -> Router<Arc<App>> {
    let answers = answers
        // The framework's own limit, which knows nothing of the option.
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(Arc::clone(&app), body::buffer))
        .layer(from_fn_with_state(Arc::clone(&app), counted))
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
        // Clients have headers of their own, which mean nothing here.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([header::RETRY_AFTER]);
    match origins {
        [] => None,
        [any] if any == "*" => Some(layer.allow_origin(Any)),
        list => {
            let values: Vec<HeaderValue> = list.iter().filter_map(|o| o.parse().ok()).collect();
            Some(layer.allow_origin(AllowOrigin::list(values)))
        }
    }
}

/// Counts a call from its arrival until its answer is written. One that comes while the server ends is refused, and so is
/// one that has no answer when its time is over.
async fn counted(State(app): State<Arc<App>>, request: Request, next: Next) -> Result<Response, ApiError> {
    // First counted, then asked, so that who waits for none to be left misses none.
    let call = InFlight::new(&app);
    app.open()?;
    let response = tokio::select! {
        biased;
        response = next.run(request) => response,
        () = time_is_over(&app) => return Err(ending()),
    };
    let until_written = move |frame| {
        let _call = &call;
        frame
    };
    Ok(response.map(|body| Body::new(body.map_frame(until_written))))
}

async fn time_is_over(app: &App) {
    let _ = app.over.subscribe().wait_for(|over| *over).await;
}

/// A call that is counted.
struct InFlight(Arc<App>);

impl InFlight {
    fn new(app: &Arc<App>) -> Self {
        app.calls.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(app))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::SeqCst);
    }
}

/// In front of a key, in any case.
const SCHEME: &[u8] = b"Bearer ";

/// Refuses requests without the key, where there is one. Takes as long for any key of the right length.
async fn key(State(app): State<Arc<App>>, request: Request, next: Next) -> Result<Response, ApiError> {
    let Some(wanted) = &app.options.api_key else { return Ok(next.run(request).await) };
    let given = request.headers().get(header::AUTHORIZATION).map_or(&[][..], HeaderValue::as_bytes);
    let given = match given.split_at_checked(SCHEME.len()) {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case(SCHEME) => key,
        _ => &[],
    };
    match bool::from(given.ct_eq(wanted.as_bytes())) {
        true => Ok(next.run(request).await),
        false => {
            let why = "a valid key is needed; send the header Authorization: Bearer KEY";
            Err(ApiError::new(StatusCode::UNAUTHORIZED, why).with_code("invalid_api_key"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{api::blocking, driver::EngineHandle, metrics::Metrics, options::ServeOptions};
    use axum::routing::get;
    use headway_engine::LlmEngine;
    use std::{
        io::{Read, Write},
        net::TcpStream,
    };

    async fn panics() -> &'static str {
        panic!("on purpose")
    }

    #[test]
    fn a_handler_s_panic_ends_its_request_alone() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let metrics = Arc::new(Metrics::default());
        let none = |_: &mut dyn FnMut(usize, usize)| Err::<(LlmEngine, _), _>("none".to_owned());
        let engine = EngineHandle::start(none, 1, Arc::clone(&metrics)).unwrap();
        let app = Arc::new(App::new(engine, metrics, ServeOptions::default()));
        let routes = Router::new().route("/panics", get(panics)).route("/fine", get(|| async { "fine" }));
        let router = around(routes, Router::new(), Arc::clone(&app)).with_state(app);
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move { axum::serve(listener, router).await });
        let ask = |path: &str| {
            let mut stream = TcpStream::connect(address).unwrap();
            write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        };
        for _ in 0..3 {
            let text = ask("/panics");
            assert!(text.starts_with("HTTP/1.0 500") && text.contains("\"server_error\""), "{text}");
            assert!(!text.contains("on purpose"), "{text}");
            assert!(ask("/fine").ends_with("fine"));
        }
        let e = runtime.block_on(blocking::<()>(|| panic!("on purpose"))).unwrap_err();
        assert_eq!(
            (e.status, e.message.contains("the server goes on")),
            (StatusCode::INTERNAL_SERVER_ERROR, true)
        );
    }
}
