//! A chat completion's events.

use crate::{
    api::{answer::Usage, call::Call, stream::Chunks, tokens::chat_entry},
    driver::Model,
};
use headway_engine::engine::{Finished, NewToken};
use serde_json::{Value, json};
use std::sync::Arc;

/// `chat.completion.chunk` objects.
pub struct ChatChunks {
    pub call: Call,
    pub model: Arc<Model>,
    pub n: usize,
    pub top_logprobs: Option<usize>,
    pub include_usage: bool,
}

const OBJECT: &str = "chat.completion.chunk";

impl ChatChunks {
    fn chunk(&self, index: usize, delta: &Value, logprobs: Option<Value>, reason: Option<&str>) -> Value {
        let choice = json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason});
        self.call.chunk(OBJECT, vec![choice], self.include_usage.then_some(Value::Null))
    }
}

impl Chunks for ChatChunks {
    fn open(&mut self) -> Vec<Value> {
        let delta = json!({"role": "assistant", "content": "", "refusal": null});
        (0..self.n).map(|i| self.chunk(i, &delta, None, None)).collect()
    }

    fn token(&mut self, index: usize, token: NewToken) -> Option<Value> {
        self.call.usage.token();
        let logprobs = self.top_logprobs.map(|top| {
            let entry = chat_entry(self.model.tokenizer.as_ref(), &token, top);
            json!({"content": entry.into_iter().collect::<Vec<_>>(), "refusal": null})
        });
        let nothing = token.text.is_empty() && logprobs.is_none();
        (!nothing).then(|| self.chunk(index, &json!({"content": token.text}), logprobs, None))
    }

    fn finished(&mut self, index: usize, finished: &Finished) -> Value {
        self.chunk(index, &json!({}), None, Some(finished.reason.name()))
    }

    fn usage(&mut self, usage: &Usage) -> Value {
        self.call.usage = *usage;
        self.call.chunk(OBJECT, vec![], Some(usage.json()))
    }
}
