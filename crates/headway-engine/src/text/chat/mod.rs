//! Chat templates: messages to the text that a model was trained on.
//!
//! A [`ChatTemplate`] lives as long as the model. It renders Jinja as transformers does (Python's string methods, JSON
//! and printing, `{% generation %}` blocks, `raise_exception`, `strftime_now`), under limits on size, steps, depth and
//! output, because templates come out of model files. Not for parsing what the model answers.

mod filters;
mod fuzz;
mod limits;
mod methods;
mod python;
mod strftime;
mod syntax;

#[doc(hidden)]
pub use fuzz::fuzz_chat;
pub(super) use limits::Limits;
pub(crate) use strftime::strftime;

use super::error::TextError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value as JinjaValue};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

/// Where `strftime_now` takes the time from.
pub type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

/// One message of a chat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`; the template decides which it takes.
    pub role: String,
    /// The text; `None` for an assistant message that only calls tools.
    pub content: Option<String>,
    /// What else the template may look at: `name`, `tool_calls`, `tool_call_id`, …
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(content.into()), extra: Map::new() }
    }

    /// Instructions for the whole chat.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// What the person says.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// What the model said.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }

    /// What a tool returned.
    pub fn tool(content: impl Into<String>) -> Self {
        Self::new("tool", content)
    }
}

/// The templates that came with a model, not yet compiled: none, one, or several by name (`default`, `tool_use`, …).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TemplateSource {
    named: BTreeMap<String, String>,
}

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

impl TemplateSource {
    /// One template.
    pub fn single(text: impl Into<String>) -> Self {
        Self { named: BTreeMap::from([(DEFAULT.to_string(), text.into())]) }
    }

    /// The `chat_template` of a `tokenizer_config.json`: a string, a list of `{name, template}`, or null.
    ///
    /// # Errors
    /// Anything else.
    pub fn from_json(value: &Value) -> Result<Self, TextError> {
        let bad = || TextError::Config {
            file: "tokenizer_config.json",
            detail: "chat_template is neither a string nor a list of {name, template}".into(),
        };
        match value {
            Value::Null => Ok(Self::default()),
            Value::String(text) => Ok(Self::single(text.clone())),
            Value::Array(list) => {
                let entry = |item: &Value| {
                    let text = |key: &str| item.get(key).and_then(Value::as_str).map(str::to_string);
                    text("name").zip(text("template")).ok_or_else(bad)
                };
                Ok(Self { named: list.iter().map(entry).collect::<Result<_, _>>()? })
            }
            _ => Err(bad()),
        }
    }

    /// Whether there is no template at all.
    pub fn is_empty(&self) -> bool {
        self.named.is_empty()
    }
}

/// A compiled chat template. Cheap to clone, usable from many threads.
///
/// ```
/// use headway_engine::text::{ChatTemplate, Message, TemplateSource};
/// let source = TemplateSource::single("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}");
/// let template = ChatTemplate::new(&source, &Default::default())?;
/// assert_eq!(template.render(&[Message::user("Hi")], false, &Default::default())?, "<user>Hi");
/// # Ok::<(), headway_engine::text::TextError>(())
/// ```
#[derive(Clone)]
pub struct ChatTemplate {
    env: Arc<Environment<'static>>,
    tokens: Arc<BTreeMap<String, String>>,
    main: String,
    has_tool_use: bool,
    limits: Limits,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("main", &self.main).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a model's templates. `tokens` are the texts of `bos_token`, `eos_token` and so on, as
    /// [`Tokenizer::named_tokens`](super::Tokenizer::named_tokens) gives them.
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`] for an empty source; [`TextError::Template`] for one that does not parse, is over
    /// 1 MiB, or for several templates of which none is called `default`.
    pub fn new(source: &TemplateSource, tokens: &BTreeMap<String, String>) -> Result<Self, TextError> {
        Self::with_limits(source, tokens, Limits::default())
    }

    pub(super) fn with_limits(
        source: &TemplateSource,
        tokens: &BTreeMap<String, String>,
        limits: Limits,
    ) -> Result<Self, TextError> {
        let main = main_name(source)?;
        let texts: Vec<(String, String)> = source.named.iter().map(|(n, t)| (n.clone(), t.clone())).collect();
        let env = limits
            .on_large_stack(move || compile(texts, limits))?
            .map_err(|detail| TextError::Template { detail })?;
        Ok(Self {
            env: Arc::new(env),
            tokens: Arc::new(tokens.clone()),
            main,
            has_tool_use: source.named.contains_key(TOOL_USE),
            limits,
        })
    }

    /// The same template with another clock behind `strftime_now` (a fixed one in tests, a shifted one for a time zone).
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        let mut env = (*self.env).clone();
        add_clock(&mut env, clock);
        Self { env: Arc::new(env), ..self }
    }

    /// The prompt for `messages`; with `add_generation_prompt` it ends where the assistant is to speak.
    ///
    /// `vars` are further variables of the template (`tools`, `documents`, `enable_thinking`, `date_string`, …) and win
    /// over headway's own. `tools` and `documents` are none where not given; nothing else is invented, so that a
    /// template's own defaults stay in force. With `tools`, the template named `tool_use` is taken where there is one.
    ///
    /// # Errors
    /// [`TextError::Refused`] when the template raises an exception; [`TextError::Render`] for every other failure,
    /// limits included.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        vars: &Map<String, Value>,
    ) -> Result<String, TextError> {
        let tools = vars.get("tools").is_some_and(|t| !t.is_null());
        let name = if tools && self.has_tool_use { TOOL_USE } else { &self.main };
        self.limits
            .on_large_stack(|| {
                let context = self.context(messages, add_generation_prompt, vars);
                let template = self.env.get_template(name)?;
                let mut out = limits::Bounded::new(self.limits.output_bytes);
                template.render_captured_to(context, &mut out)?;
                Ok(out.into_string())
            })?
            .map_err(render_error)
    }

    fn context(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        vars: &Map<String, Value>,
    ) -> JinjaValue {
        let mut all: BTreeMap<&str, JinjaValue> = BTreeMap::new();
        all.insert("tools", JinjaValue::from(()));
        all.insert("documents", JinjaValue::from(()));
        all.extend(self.tokens.iter().map(|(k, v)| (k.as_str(), JinjaValue::from(v.as_str()))));
        all.extend(vars.iter().map(|(k, v)| (k.as_str(), JinjaValue::from(Serde(v)))));
        all.insert("messages", JinjaValue::from(Serde(messages)));
        all.insert("add_generation_prompt", JinjaValue::from(add_generation_prompt));
        JinjaValue::from_pairs(all)
    }
}

fn main_name(source: &TemplateSource) -> Result<String, TextError> {
    if source.named.contains_key(DEFAULT) {
        return Ok(DEFAULT.to_string());
    }
    match (source.named.len(), source.named.keys().next()) {
        (0, _) => Err(TextError::NoChatTemplate),
        (1, Some(only)) => Ok(only.clone()),
        _ => {
            let names: Vec<&str> = source.named.keys().map(String::as_str).collect();
            Err(TextError::Template {
                detail: format!("{} templates ({}), none called default", names.len(), names.join(", ")),
            })
        }
    }
}

fn compile(texts: Vec<(String, String)>, limits: Limits) -> Result<Environment<'static>, String> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.map_err(|e| one_line(&e))?);
    env.set_fuel(Some(limits.fuel));
    env.set_recursion_limit(limits.recursion);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_formatter(python::format);
    env.set_unknown_method_callback(methods::call);
    filters::add(&mut env);
    env.add_function("raise_exception", raise_exception);
    add_clock(&mut env, Arc::new(SystemTime::now));
    for (name, text) in texts {
        if text.len() > limits.template_bytes {
            return Err(format!("{} bytes are more than the limit of {}", text.len(), limits.template_bytes));
        }
        let text = syntax::without_generation_tags(&text);
        env.add_template_owned(name, text).map_err(|e| one_line(&e))?;
    }
    Ok(env)
}

fn add_clock(env: &mut Environment<'static>, clock: Clock) {
    env.add_function("strftime_now", move |format: &str| strftime::strftime(clock(), format));
}

/// What a template said with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: &JinjaValue) -> Result<JinjaValue, Error> {
    let message = message.to_string();
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn render_error(error: Error) -> TextError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(e) = cause {
        if let Some(Raised(message)) = e.downcast_ref::<Raised>() {
            return TextError::Refused { message: in_one_line(message) };
        }
        cause = e.source();
    }
    TextError::Render { detail: one_line(&error) }
}

fn one_line(error: &Error) -> String {
    let mut text = error.to_string();
    if let Some(source) = std::error::Error::source(error) {
        text = format!("{text}: {source}");
    }
    in_one_line(&text)
}

fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
