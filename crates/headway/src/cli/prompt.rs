//! Where a prompt comes from, and its token ids.

use super::{CliError, args::GenerateArgs};
use headway_engine::{
    Engine, LlmEngine,
    text::{Message, TextError, Tokenizer},
};
use std::io::{IsTerminal, Read};

/// A prompt before the model is open.
pub enum Prompt {
    /// Token ids, as they go in.
    Ids(Vec<u32>),
    /// Text.
    Text(String),
}

impl Prompt {
    /// The prompt of a command line: an argument, ids, a file, or standard input.
    pub fn from_args(a: &GenerateArgs) -> Result<Self, CliError> {
        let empty =
            |what: &str| CliError::Usage(format!("{what} is empty; give at least one character or id"));
        if let Some(ids) = &a.prompt_ids {
            return if ids.is_empty() { Err(empty("--prompt-ids")) } else { Ok(Self::Ids(ids.clone())) };
        }
        let (text, what) = match (&a.prompt, &a.prompt_file) {
            (Some(p), _) => (p.clone(), "the prompt"),
            (None, Some(file)) => {
                let bytes = std::fs::read(file).map_err(|e| CliError::File {
                    path: file.clone(),
                    why: format!("cannot be read: {e}; --prompt-file takes a UTF-8 file"),
                })?;
                let text = String::from_utf8(bytes).map_err(|e| CliError::File {
                    path: file.clone(),
                    why: format!("is not UTF-8 (byte {}); convert it first", e.utf8_error().valid_up_to()),
                })?;
                (text, "the file of --prompt-file")
            }
            (None, None) => (from_stdin()?, "standard input"),
        };
        if text.is_empty() { Err(empty(what)) } else { Ok(Self::Text(text)) }
    }

    /// Token ids: with the model's BOS where it asks for one, or through its chat template.
    pub fn ids(self, engine: &LlmEngine, chat: bool) -> Result<Vec<u32>, CliError> {
        match self {
            Self::Ids(ids) => Ok(ids),
            Self::Text(text) if chat => chat_ids(engine, &[Message::user(text)]),
            Self::Text(text) => Ok(tokenizer(engine)?.encode(&text, true)?),
        }
    }
}

fn from_stdin() -> Result<String, CliError> {
    let mut stdin = std::io::stdin();
    if stdin.is_terminal() {
        return Err(CliError::Usage(
            "no prompt; give one, as in: headway generate \"The capital of France is\"".into(),
        ));
    }
    let mut bytes = vec![];
    stdin.read_to_end(&mut bytes).map_err(|e| CliError::Usage(format!("standard input: {e}")))?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        CliError::Usage(format!("standard input is not UTF-8 (byte {at}); convert it first"))
    })
}

fn tokenizer(engine: &LlmEngine) -> Result<&Tokenizer, CliError> {
    engine.tokenizer().ok_or_else(|| {
        CliError::Usage("the model came without a tokenizer; give token ids with --prompt-ids".into())
    })
}

/// A conversation through the model's template; what it writes already has the special tokens.
pub fn chat_ids(engine: &LlmEngine, messages: &[Message]) -> Result<Vec<u32>, CliError> {
    let template = engine.chat_template()?;
    let rendered = template.render(messages, true, &Default::default())?;
    let ids: Result<_, TextError> = tokenizer(engine)?.encode(&rendered, false);
    Ok(ids?)
}
