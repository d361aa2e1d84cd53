//! The body of the chat-template fuzz target. Not for use outside tests.

use super::limits::{Limits, PANICKED};
use super::{ChatTemplate, Message, TemplateSource};
use crate::text::error::TextError;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

/// Renders what the bytes say: a template up to the first zero byte, then messages, one a zero byte, each a role, a new
/// line and a text. Returns whether it rendered.
///
/// # Panics
/// When the template engine panicked: that is what the target looks for.
#[doc(hidden)]
pub fn fuzz_chat(data: &[u8]) -> bool {
    let mut fields = data.split(|b| *b == 0).map(String::from_utf8_lossy);
    let template = fields.next().unwrap_or_default().into_owned();
    let message = |text: std::borrow::Cow<'_, str>| match text.split_once('\n') {
        Some((role, content)) => Message::new(role, content),
        None => Message { role: text.into_owned(), content: None, extra: Map::new() },
    };
    let messages: Vec<Message> = fields.take(8).map(message).collect();
    let limits = Limits { fuel: 5_000, output_bytes: 1 << 20, ..Limits::default() };
    let tokens = BTreeMap::from([("bos_token".into(), "<s>".into()), ("eos_token".into(), "</s>".into())]);
    let tool = serde_json::json!([{"name": "add", "parameters": {"x": 1.5, "y": [null, true]}}]);
    let vars =
        Map::from_iter([("tools".to_string(), tool), ("enable_thinking".to_string(), Value::Bool(true))]);
    let result =
        ChatTemplate::with_limits(&TemplateSource::single(template), &tokens, limits).and_then(|template| {
            let clock = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
            template.with_clock(std::sync::Arc::new(move || clock)).render(&messages, true, &vars)
        });
    if let Err(TextError::Render { detail }) = &result {
        assert!(detail != PANICKED, "the template engine panicked");
    }
    result.is_ok()
}
