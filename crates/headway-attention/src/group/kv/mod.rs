//! What the KV cache looks like: specs and page sizes, layouts, the pool of pages, block tables.

pub mod block_table;
pub mod layout;
pub mod merge;
pub mod page;
pub mod pool;
pub mod spec;
