//! What a pool of KV cache pages can hold: bytes a token, the longest request, requests of full length.

use super::report::MemoryReport;
use headway_attention::{
    AttentionError, KvCacheGroup, KvCacheSpec,
    group::{kv::page::RequestLimits, plan::KvCachePlan},
};

/// Fills in what a pool of `num_blocks` blocks, the null block among them, can hold of requests within `limits`.
///
/// # Errors
/// A cache that these limits don't go with (a window under decode context parallelism).
pub fn fill(
    memory: &mut MemoryReport,
    plan: &KvCachePlan,
    num_blocks: usize,
    limits: &RequestLimits,
) -> Result<(), AttentionError> {
    memory.kv_cache_blocks = num_blocks;
    memory.kv_bytes_per_token = per_token(plan);
    memory.state_bytes_per_request = states(plan);
    let usable = num_blocks.saturating_sub(1);
    let pages = |max_model_len: usize| -> Result<usize, AttentionError> {
        let limits = RequestLimits { max_model_len, ..*limits };
        plan.kv_cache_groups.iter().map(|g| g.spec.max_pages_per_request(&limits)).sum()
    };
    let full = pages(limits.max_model_len)?;
    memory.full_length_requests = if full == 0 { 0.0 } else { usable as f64 / full as f64 };
    memory.kv_cache_tokens = (memory.full_length_requests * limits.max_model_len as f64) as u64;
    let (mut fits, mut too_long) = (0, limits.max_model_len + 1);
    while fits + 1 < too_long {
        let middle = fits + (too_long - fits) / 2;
        if pages(middle)? <= usable { fits = middle } else { too_long = middle }
    }
    memory.max_request_tokens = fits;
    Ok(())
}

/// Bytes that one more token takes over all layers that keep it, padding included.
fn per_token(plan: &KvCachePlan) -> u64 {
    let grows = |g: &&KvCacheGroup| !matches!(g.spec, KvCacheSpec::Mamba(_) | KvCacheSpec::EncoderOnly(_));
    plan.kv_cache_groups.iter().filter(grows).map(|g| (pages(plan, g) / g.block_size.max(1)) as u64).sum()
}

/// Bytes of a request's states over all layers, padding included.
fn states(plan: &KvCachePlan) -> u64 {
    let states = plan.kv_cache_groups.iter().filter(|g| matches!(g.spec, KvCacheSpec::Mamba(_)));
    states.map(|g| pages(plan, g) as u64).sum()
}

/// Bytes of a block over the group's layers that have pages of their own.
fn pages(plan: &KvCachePlan, g: &KvCacheGroup) -> usize {
    let owns = |i: &usize| !plan.handles[g.layers[*i].0 as usize].shared;
    (0..g.layers.len()).filter(owns).map(|i| g.spec_of(i).page_size_bytes()).sum()
}
