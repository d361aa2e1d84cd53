//! Lifetime: the model. How the specs of several layers combine: into one spec for all of them, into
//! a group whose layers need the same number of blocks, or into full attention where windows are not
//! to be told apart.

use super::spec::{AttentionSpec, KvCacheSpec};
use crate::{AttentionError, Result};
use std::mem::discriminant;

/// Everything of two specs that a cache's bytes depend on.
fn same_cache(a: &AttentionSpec, b: &AttentionSpec) -> bool {
    let bare = |s: &AttentionSpec| AttentionSpec {
        sliding_window_mask: None,
        chunk_mask: None,
        non_causal: false,
        alignment: None,
        model_version: None,
        ..s.clone()
    };
    bare(a) == bare(b)
}

/// The one value among those that are set; `Err` for two.
fn one_of<T: PartialEq>(mut values: impl Iterator<Item = T>) -> Result<Option<T>, ()> {
    let first = values.next();
    match &first {
        Some(f) if values.any(|v| v != *f) => Err(()),
        _ => Ok(first),
    }
}

fn merge_masks(first: &AttentionSpec, all: &[&AttentionSpec]) -> Option<AttentionSpec> {
    if !all.iter().all(|a| same_cache(a, first)) {
        return None;
    }
    let window = one_of(all.iter().filter_map(|a| a.sliding_window_mask)).ok()?;
    let chunk = one_of(all.iter().filter_map(|a| a.chunk_mask)).ok()?;
    if window.is_some() && chunk.is_some() {
        return None;
    }
    Some(AttentionSpec {
        sliding_window_mask: window,
        chunk_mask: chunk,
        non_causal: all.iter().any(|a| a.non_causal),
        ..first.clone()
    })
}

fn keeps_all_tokens(s: &KvCacheSpec) -> bool {
    matches!(s, KvCacheSpec::Full(_) | KvCacheSpec::Sink { .. } | KvCacheSpec::Rswa { .. })
}

/// One spec for layers that can share a block table and the size of their pages; `None` where they
/// can't. The first one's kind decides what the others may be.
pub fn merge(specs: &[&KvCacheSpec]) -> Option<KvCacheSpec> {
    let (&first, rest) = specs.split_first()?;
    let same_kind = || rest.iter().all(|s| discriminant(*s) == discriminant(first));
    let attention = || specs.iter().map(|s| s.attention()).collect::<Option<Vec<_>>>();
    match first {
        KvCacheSpec::Full(a) => {
            specs.iter().all(|s| keeps_all_tokens(s)).then_some(())?;
            merge_masks(a, &attention()?).map(KvCacheSpec::Full)
        }
        KvCacheSpec::Sink { attention: a, sink_len } => {
            specs.iter().all(|s| keeps_all_tokens(s)).then_some(())?;
            merge_masks(a, &attention()?)
                .map(|attention| KvCacheSpec::Sink { attention, sink_len: *sink_len })
        }
        KvCacheSpec::Rswa { attention: a, rswa_window } => {
            let same = rest
                .iter()
                .all(|s| matches!(s, KvCacheSpec::Rswa { rswa_window: w, .. } if w == rswa_window));
            same.then_some(())?;
            merge_masks(a, &attention()?)
                .map(|attention| KvCacheSpec::Rswa { attention, rswa_window: *rswa_window })
        }
        KvCacheSpec::Mla(a) => {
            same_kind().then_some(())?;
            let all = attention()?;
            let agree = all.iter().all(|b| same_cache(a, b) && a.model_version == b.model_version);
            agree.then(|| {
                KvCacheSpec::Mla(AttentionSpec { sliding_window_mask: None, chunk_mask: None, ..a.clone() })
            })
        }
        _ => rest.iter().all(|s| *s == first).then(|| first.clone()),
    }
}

/// Whether layers need the same number of blocks for a request, though their pages may differ in
/// size: they can share a block table.
pub fn is_uniform_type(specs: &[&KvCacheSpec]) -> bool {
    let Some((&first, rest)) = specs.split_first() else { return false };
    let alike = |s: &KvCacheSpec| match (first, s) {
        (KvCacheSpec::Mamba(a), KvCacheSpec::Mamba(b)) => {
            a.num_speculative_blocks == b.num_speculative_blocks
                && a.num_prefill_checkpoint_blocks == b.num_prefill_checkpoint_blocks
                && first.page_size_bytes() == s.page_size_bytes()
        }
        (
            KvCacheSpec::SlidingWindow { sliding_window: a, .. },
            KvCacheSpec::SlidingWindow { sliding_window: b, .. }
            | KvCacheSpec::SlidingWindowMla { sliding_window: b, .. },
        )
        | (
            KvCacheSpec::SlidingWindowMla { sliding_window: a, .. },
            KvCacheSpec::SlidingWindowMla { sliding_window: b, .. },
        ) => a == b,
        (
            KvCacheSpec::ChunkedLocal { attention_chunk_size: a, .. },
            KvCacheSpec::ChunkedLocal { attention_chunk_size: b, .. },
        ) => a == b,
        _ if first.is_full_attention() => s.is_full_attention(),
        _ => discriminant(first) == discriminant(s),
    };
    rest.iter().all(|s| s.block_size() == first.block_size() && alike(s))
}

/// Windows and chunks as full attention, for a cache that keeps all tokens of all layers: the layers
/// still look only as far as they do.
///
/// # Errors
/// Layers that can't become one type so.
pub fn promote_to_full(specs: &[KvCacheSpec]) -> Result<Vec<KvCacheSpec>> {
    let uniform = |specs: &[KvCacheSpec]| {
        let refs: Vec<_> = specs.iter().collect();
        merge(&refs).is_some() || is_uniform_type(&refs)
    };
    if uniform(specs) {
        return Ok(specs.to_vec());
    }
    let full = || specs.iter().filter(|s| s.is_full_attention());
    let mut promoted = specs.to_vec();
    if full().count() > 0 {
        let block = one_of(full().map(KvCacheSpec::block_size)).ok().flatten();
        for s in &mut promoted {
            *s = promoted_spec(s, block);
        }
    }
    if uniform(&promoted) {
        return Ok(promoted);
    }
    Err(AttentionError::KvCache("Failed to promote local KV cache specs to one unified type.".into()))
}

fn promoted_spec(spec: &KvCacheSpec, block_size: Option<usize>) -> KvCacheSpec {
    let base = |a: &AttentionSpec| {
        let block_size = block_size.unwrap_or(a.block_size);
        let mut b = AttentionSpec { block_size, extra_retained_tokens: 0, ..a.clone() };
        b.page_size_padded = a
            .page_size_padded
            .map(|p| p.max(a.unpadded_page_size_bytes() * block_size / a.block_size.max(1)));
        b
    };
    match spec {
        KvCacheSpec::SlidingWindow { attention, sliding_window } => {
            KvCacheSpec::Full(AttentionSpec { sliding_window_mask: Some(*sliding_window), ..base(attention) })
        }
        KvCacheSpec::SlidingWindowMla { attention, sliding_window } => {
            KvCacheSpec::Mla(AttentionSpec { sliding_window_mask: Some(*sliding_window), ..base(attention) })
        }
        KvCacheSpec::ChunkedLocal { attention, attention_chunk_size } => {
            KvCacheSpec::Full(AttentionSpec { chunk_mask: Some(*attention_chunk_size), ..base(attention) })
        }
        other => other.clone(),
    }
}
