//! headway's inference engine: models, loading, tokenizer, scheduler, KV cache manager and model runner.

pub mod kv;
pub mod loading;
pub mod sampling;
pub mod scheduler;
pub mod sources;
pub mod text;
