//! A completion's events.

use crate::{
    api::{answer::Usage, call::Call, stream::Chunks, tokens::TextLogprobs},
    driver::Model,
};
use headway_engine::engine::{Finished, NewToken};
use serde_json::{Value, json};
use std::sync::Arc;

/// `text_completion` objects.
pub struct TextChunks {
    call: Call,
    model: Arc<Model>,
    echo: Vec<String>,
    n: usize,
    logprobs: Option<usize>,
    include_usage: bool,
    answers: usize,
}

impl TextChunks {
    pub fn new(
        call: Call,
        model: Arc<Model>,
        echo: Vec<String>,
        n: usize,
        answers: usize,
        logprobs: Option<usize>,
        include_usage: bool,
    ) -> Self {
        Self { call, model, echo, n, logprobs, include_usage, answers }
    }

    fn chunk(&self, index: usize, text: &str, logprobs: Option<Value>, reason: Option<&str>) -> Value {
        let choice = json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason});
        self.call.chunk("text_completion", vec![choice], self.include_usage.then_some(Value::Null))
    }
}

impl Chunks for TextChunks {
    fn open(&mut self) -> Vec<Value> {
        let echoed = |i: usize| self.echo.get(i / self.n).map(|t| self.chunk(i, t, None, None));
        (0..self.answers).filter_map(echoed).collect()
    }

    fn token(&mut self, index: usize, token: NewToken) -> Option<Value> {
        self.call.usage.token();
        let logprobs = self.logprobs.map(|top| {
            let mut lists = TextLogprobs::default();
            lists.push(self.model.tokenizer.as_ref(), &token, top);
            lists.json()
        });
        let nothing = token.text.is_empty() && logprobs.is_none();
        (!nothing).then(|| self.chunk(index, &token.text, logprobs, None))
    }

    fn finished(&mut self, index: usize, finished: &Finished) -> Value {
        self.chunk(index, "", None, Some(finished.reason.name()))
    }

    fn usage(&mut self, usage: &Usage) -> Value {
        self.call.usage = *usage;
        self.call.chunk("text_completion", vec![], Some(usage.json()))
    }
}
