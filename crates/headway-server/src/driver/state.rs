//! [`State`]: whether there is an engine to ask; [`Model`]: what handlers need of it besides answers.

use headway_engine::{
    Engine, LlmEngine,
    text::{ChatTemplate, TextError, Tokenizer},
};
use serde_json::Value;
use std::sync::Arc;

/// Where the engine is in its life.
#[derive(Clone, Debug)]
pub enum State {
    /// It loads: so many of so many layers.
    Loading {
        /// Layers loaded.
        done: usize,
        /// Layers in all; 0 before that is known.
        total: usize,
    },
    /// It runs.
    Ready(Arc<Model>),
    /// It ended as asked.
    Ended,
    /// It could not start, or died.
    Broken(String),
}

/// What is fixed of a model once it is open.
#[derive(Clone, Debug)]
pub struct Model {
    /// Text to ids and back; `None`: ids alone.
    pub tokenizer: Option<Tokenizer>,
    /// Messages to text; or why not.
    pub template: Result<ChatTemplate, TextError>,
    /// The most tokens of a request, prompt and answer.
    pub max_request_tokens: usize,
    /// The report of start-up, as `explain --json` has it.
    pub startup: Value,
    /// Seconds since 1970 when it was opened.
    pub created: u64,
}

impl Model {
    /// Of an open engine.
    pub fn of(engine: &LlmEngine) -> Self {
        Self {
            tokenizer: engine.tokenizer().cloned(),
            template: engine.chat_template(),
            max_request_tokens: engine.max_request_tokens(),
            startup: serde_json::to_value(engine.report()).unwrap_or_default(),
            created: std::time::UNIX_EPOCH.elapsed().map_or(0, |t| t.as_secs()),
        }
    }
}
