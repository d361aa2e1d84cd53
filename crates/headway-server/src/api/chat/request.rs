//! A chat completion's request, read and checked.

use super::message::{Given, messages};
use crate::{
    ApiError,
    api::{
        MAX_LOGPROBS,
        fields::Fields,
        grammar::Format,
        sampling::{Common, max_tokens},
    },
    driver::Model,
};
use headway_engine::text::{Message, TextError};
use serde_json::{Map, Value, json};

/// `POST /v1/chat/completions`.
pub struct Request {
    /// The conversation.
    pub chat: Conversation,
    /// Log-probabilities of the most likely tokens, a token; `None`: none at all.
    pub top_logprobs: Option<usize>,
    /// The most tokens of an answer; `None`: as many as there is room for.
    pub max_tokens: Option<usize>,
    /// What the answer must be.
    pub format: Option<Format>,
    /// What text completions have too.
    pub common: Common,
}

/// What becomes the prompt.
pub struct Conversation {
    messages: Vec<Message>,
    add_generation_prompt: bool,
    vars: Map<String, Value>,
}

impl Conversation {
    /// Takes messages and what else the template sees.
    ///
    /// # Errors
    /// 400 naming the parameter.
    pub fn take(f: &mut Fields) -> Result<Self, ApiError> {
        let missing = || ApiError::param("messages", "messages is missing; give it");
        Self::take_if_given(f)?.ok_or_else(missing)
    }

    /// As [`Self::take`]; `None` without messages.
    ///
    /// # Errors
    /// 400 naming the parameter.
    pub fn take_if_given(f: &mut Fields) -> Result<Option<Self>, ApiError> {
        let given: Option<Vec<Given>> = f.take("messages")?;
        let mut vars: Map<String, Value> = f.take("chat_template_kwargs")?.unwrap_or_default();
        let tools: Option<Vec<Value>> = f.take("tools")?;
        let choice: Option<Value> = f.take("tool_choice")?;
        let offered = match choice.as_ref().map(|c| c.as_str()) {
            None | Some(Some("auto")) => true,
            Some(Some("none")) => false,
            Some(_) => {
                let why = "tool_choice must be \"none\" or \"auto\": a call can't be forced; the model's own words \
                           come back as content";
                return Err(ApiError::param("tool_choice", why));
            }
        };
        if let Some(tools) = tools.filter(|t| offered && !t.is_empty()) {
            vars.insert("tools".into(), tools.into());
        }
        if let Some(effort) = f.take::<String>("reasoning_effort")? {
            vars.insert("reasoning_effort".into(), effort.into());
        }
        f.refuse("continue_final_message", &[json!(false)], "leave it out")?;
        let add_generation_prompt = f.take("add_generation_prompt")?.unwrap_or(true);
        let Some(given) = given else { return Ok(None) };
        Ok(Some(Self { messages: messages(given)?, add_generation_prompt, vars }))
    }

    /// Through the model's template.
    ///
    /// # Errors
    /// 400 where the template refuses the messages; 422 where the model has no template.
    pub fn render(&self, model: &Model) -> Result<String, ApiError> {
        let template = model.template.as_ref().map_err(|e| {
            let hint = match e {
                TextError::NoChatTemplate => "; it is probably a base model: use /v1/completions",
                _ => "",
            };
            ApiError::unprocessable("messages", format!("the model can't hold a conversation: {e}{hint}"))
        })?;
        template
            .render(&self.messages, self.add_generation_prompt, &self.vars)
            .map_err(|e| ApiError::param("messages", e.to_string()))
    }

    /// Its token ids; the template wrote the special tokens.
    ///
    /// # Errors
    /// As [`Self::render`]; 422 without a tokenizer.
    pub fn ids(&self, model: &Model) -> Result<Vec<u32>, ApiError> {
        model.encode(&self.render(model)?, false, "messages")
    }
}

impl Request {
    /// Reads a body.
    ///
    /// # Errors
    /// 400 naming the parameter.
    pub fn parse(body: &[u8], model: &Model) -> Result<Self, ApiError> {
        let mut f = Fields::parse(body)?;
        let chat = Conversation::take(&mut f)?;
        let common = Common::take(&mut f, model)?;
        let logprobs = f.take("logprobs")?.unwrap_or(false);
        let top: Option<usize> = f.take("top_logprobs")?;
        match top {
            Some(n) if n > MAX_LOGPROBS => {
                return Err(ApiError::param(
                    "top_logprobs",
                    format!("top_logprobs is at most {MAX_LOGPROBS}"),
                ));
            }
            Some(n) if n > 0 && !logprobs => {
                return Err(ApiError::param("top_logprobs", "top_logprobs needs logprobs to be true"));
            }
            _ => {}
        }
        let (new, old) = (max_tokens(&mut f, "max_completion_tokens")?, max_tokens(&mut f, "max_tokens")?);
        if let (Some(new), Some(old)) = (new, old)
            && new != old
        {
            let why = format!("max_tokens is {old} and max_completion_tokens {new}; give one of them");
            return Err(ApiError::param("max_tokens", why));
        }
        let format = Format::take(&mut f)?;
        f.refuse("modalities", &[json!(["text"])], "answers are text")?;
        for name in ["audio", "prediction", "web_search_options", "functions", "function_call", "verbosity"] {
            f.refuse(name, &[json!([])], "leave it out")?;
        }
        f.ignore(&["parallel_tool_calls"]);
        f.finish()?;
        Ok(Self {
            chat,
            top_logprobs: logprobs.then(|| top.unwrap_or(0)),
            max_tokens: new.or(old),
            format,
            common,
        })
    }
}
