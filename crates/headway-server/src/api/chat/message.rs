//! Messages as clients send them, made into what chat templates take.

use crate::{ApiError, error::shown};
use headway_engine::text::Message;
use serde::Deserialize;
use serde_json::{Map, Value};

/// A message of the API.
#[derive(Deserialize)]
pub struct Given {
    role: String,
    #[serde(default)]
    content: Option<Content>,
    #[serde(flatten)]
    extra: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a string or a list of parts is needed")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

/// The template's messages.
///
/// # Errors
/// 400 naming the message: an unknown role, parts that are no text, no content where it is needed.
pub fn messages(given: Vec<Given>) -> Result<Vec<Message>, ApiError> {
    if given.is_empty() {
        return Err(ApiError::param("messages", "messages is empty; give at least one"));
    }
    given.into_iter().enumerate().map(|(i, m)| message(i, m)).collect()
}

fn message(i: usize, Given { role, content, mut extra }: Given) -> Result<Message, ApiError> {
    let role = match role.as_str() {
        // What newer models of the API's maker call it; templates know the older name.
        "developer" => "system".to_owned(),
        "system" | "user" | "assistant" | "tool" => role,
        other => {
            let param = format!("messages[{i}].role");
            let other = shown(other);
            let why = format!("{param} is {other:?}; system, developer, user, assistant or tool is needed");
            return Err(ApiError::param(param, why));
        }
    };
    let content = match content {
        None => None,
        Some(Content::Text(text)) => Some(text),
        Some(Content::Parts(parts)) => Some(joined(i, parts)?),
    };
    match extra.get_mut("tool_calls") {
        Some(Value::Array(calls)) => {
            calls.iter_mut().enumerate().try_for_each(|(j, call)| arguments(i, j, call))?;
        }
        None | Some(Value::Null) => {}
        Some(_) => {
            let param = format!("messages[{i}].tool_calls");
            return Err(ApiError::param(param.clone(), format!("{param} must be a list of calls")));
        }
    }
    let calls = extra.get("tool_calls").is_some_and(|c| !c.is_null());
    if content.is_none() && !(role == "assistant" && calls) {
        let param = format!("messages[{i}].content");
        let why = format!("{param} is missing; only an assistant's message with tool_calls goes without");
        return Err(ApiError::param(param, why));
    }
    Ok(Message { role, content, extra })
}

/// The API has a call's arguments as JSON text; templates write JSON themselves and take what it says.
fn arguments(i: usize, j: usize, call: &mut Value) -> Result<(), ApiError> {
    let Some(given) = call.pointer_mut("/function/arguments") else { return Ok(()) };
    let Value::String(text) = given else { return Ok(()) };
    let parsed = if text.trim().is_empty() { Ok(Map::new().into()) } else { serde_json::from_str(text) };
    *given = parsed.map_err(|e| {
        let param = format!("messages[{i}].tool_calls[{j}].function.arguments");
        ApiError::param(param.clone(), format!("{param} is not JSON: {e}"))
    })?;
    Ok(())
}

/// The text of parts.
fn joined(i: usize, parts: Vec<Part>) -> Result<String, ApiError> {
    let mut out = String::new();
    for (j, part) in parts.into_iter().enumerate() {
        match (part.kind.as_str(), part.text) {
            ("text", Some(text)) => out.push_str(&text),
            ("text", None) => {
                let param = format!("messages[{i}].content[{j}].text");
                return Err(ApiError::param(param.clone(), format!("{param} is missing")));
            }
            (kind, _) => {
                let param = format!("messages[{i}].content[{j}].type");
                let kind = shown(kind);
                let why = format!("{param} is {kind:?}; this model reads text parts only");
                return Err(ApiError::param(param, why));
            }
        }
    }
    Ok(out)
}
