//! Answers as JSON, one object a request.

use headway_engine::{LlmEngine, engine::Finished, runner::memory, sampling::Logprobs};
use serde_json::{Value, json};

/// A request's answer in the making.
#[derive(Default)]
pub struct Answer {
    pub prompt_ids: Vec<u32>,
    pub text: String,
    pub logprobs: Vec<Logprobs>,
}

impl Answer {
    /// The object of a finished request. `verbose` adds the seed and the prompt tokens found in the cache.
    pub fn json(&self, engine: &LlmEngine, f: &Finished, with_logprobs: bool, verbose: bool) -> Value {
        let mut o = json!({
            "prompt_token_ids": self.prompt_ids,
            "token_ids": f.token_ids,
            "text": self.text,
            "finish_reason": f.reason.name(),
        });
        if with_logprobs {
            o["logprobs"] = self.logprobs.iter().map(top).collect();
        }
        let t = &f.timings;
        o["timings"] = json!({
            "load_s": engine.load_time().as_secs_f64(),
            "prefill_s": t.prefill_s,
            "prefill_tokens": t.prefill_tokens,
            "decode_s": t.decode_s,
            "decode_tokens": t.decode_tokens,
        });
        if engine.drafts() {
            o["speculation"] = json!(f.speculation.summary());
        }
        o["peak_rss_bytes"] = json!(memory::peak_rss_bytes());
        if verbose {
            o["cached_tokens"] = json!(f.cached_tokens);
            o["seed"] = json!(f.seed);
        }
        o
    }
}

fn top(l: &Logprobs) -> Value {
    l.top.iter().map(|t| json!({"token_id": t.token_id, "logprob": t.logprob})).collect()
}
