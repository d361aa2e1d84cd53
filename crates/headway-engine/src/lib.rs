//! headway's inference engine: models, loading, tokenizer, scheduler, KV cache manager and model runner.

pub mod sources;
