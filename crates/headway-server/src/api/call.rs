//! [`Call`]: one call's name and account; says in the log how it went, when it ends.

use super::answer::Usage;
use headway_engine::sampling::fresh_seed;
use serde_json::{Value, json};
use std::time::{Instant, UNIX_EPOCH};

/// A call that was accepted.
pub struct Call {
    /// Its name.
    pub id: String,
    /// Its tokens so far.
    pub usage: Usage,
    endpoint: &'static str,
    model: String,
    created: u64,
    began: Instant,
}

impl Call {
    /// A call that begins now.
    pub fn begin(endpoint: &'static str, prefix: &str, model: &str, prompt_tokens: usize) -> Self {
        Self {
            id: format!("{prefix}-{:016x}", fresh_seed()),
            usage: Usage { prompt_tokens, ..Usage::default() },
            endpoint,
            model: model.into(),
            created: UNIX_EPOCH.elapsed().map_or(0, |t| t.as_secs()),
            began: Instant::now(),
        }
    }

    /// The whole answer.
    pub fn object(&self, object: &str, choices: Vec<Value>, usage: Option<&Usage>) -> Value {
        self.chunk(object, choices, usage.map(Usage::json))
    }

    /// An event.
    pub fn chunk(&self, object: &str, choices: Vec<Value>, usage: Option<Value>) -> Value {
        let mut out = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        });
        if let Some(usage) = usage {
            out["usage"] = usage;
        }
        out
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        tracing::info!(
            id = self.id,
            endpoint = self.endpoint,
            prompt_tokens = self.usage.prompt_tokens,
            completion_tokens = self.usage.completion_tokens,
            seconds = self.began.elapsed().as_secs_f64(),
            "call ended"
        );
    }
}
