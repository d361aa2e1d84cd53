//! The rule book of two backends that serve one layer: what both say yes to, less what the two together can't keep.

use super::name;
use crate::{
    GraphSupport, RuleBook,
    process::rules::{AttnType, CapabilityRange, KernelBlockSize, KvCacheDType, SizeRange},
};
use headway_tensor::DType;
use std::{cmp::max, fmt::Display};

/// The rule book. Every field has a rule here: a new one does not compile without.
///
/// # Errors
/// The first rule that leaves nothing in common, with what each part takes.
pub(super) fn of_both(d: &RuleBook, p: &RuleBook) -> Result<RuleBook, String> {
    let both = |of: fn(&RuleBook) -> bool| of(d) && of(p);
    if d.is_sparse != p.is_sparse {
        let [sparse, dense] = if d.is_sparse { [d, p] } else { [p, d] };
        return Err(format!("{} is for sparse attention, {} for other", sparse.name, dense.name));
    }
    if d.forward_includes_kv_cache_update != p.forward_includes_kv_cache_update {
        let [forward, before] = if d.forward_includes_kv_cache_update { [d, p] } else { [p, d] };
        return Err(format!(
            "{} writes the KV cache in its kernel, {} before it; both must do it alike",
            forward.name, before.name
        ));
    }
    let mut book = RuleBook {
        name: name::of(d, p).into(),
        kind: d.kind,
        platform: d.platform.clone(),
        dtypes: some("activation dtype", (d, &d.dtypes), (p, &p.dtypes), equal)?,
        kv_cache_dtypes: some(
            "KV cache dtype of plain elements",
            (d, &d.kv_cache_dtypes),
            (p, &p.kv_cache_dtypes),
            plain,
        )?,
        head_sizes: any_or("head size", (d, &d.head_sizes), (p, &p.head_sizes), sizes)?,
        supports_different_v_head_size: both(|r| r.supports_different_v_head_size),
        kernel_block_sizes: any_or(
            "kernel block size",
            (d, &d.kernel_block_sizes),
            (p, &p.kernel_block_sizes),
            blocks,
        )?,
        whole_blocks_only: d.whole_blocks_only || p.whole_blocks_only,
        preferred_block_size: None,
        fallback_block_size: None,
        kv_cache_layouts: any_or(
            "KV cache layout",
            (d, &d.kv_cache_layouts),
            (p, &p.kv_cache_layouts),
            equal,
        )?,
        attn_types: attn_types(d, p)?,
        compute_capabilities: capabilities_of_both(d, p)?,
        supports_sliding_window: both(|r| r.supports_sliding_window),
        supports_sinks: both(|r| r.supports_sinks),
        supports_logit_soft_cap: both(|r| r.supports_logit_soft_cap),
        supports_alibi: both(|r| r.supports_alibi),
        supports_non_causal: both(|r| r.supports_non_causal),
        supports_mm_prefix: both(|r| r.supports_mm_prefix),
        supports_alibi_sqrt: both(|r| r.supports_alibi_sqrt),
        supports_per_head_quant_scales: both(|r| r.supports_per_head_quant_scales),
        supports_rswa: both(|r| r.supports_rswa),
        supports_chunked_local: both(|r| r.supports_chunked_local),
        is_sparse: d.is_sparse,
        // How many tokens of a prompt are left for its last step depends on the requests beside it, and with that which
        // part computes them.
        supports_batch_invariance: false,
        supports_kv_connector: both(|r| r.supports_kv_connector),
        // Ranks would have to merge results of two backends, whose sums of exponentials the contract doesn't see.
        supports_dcp: false,
        supports_non_causal_dcp: false,
        supports_pcp: false,
        // The cut is made on the host.
        supports_inexact_query_lens: false,
        supports_unset_kv_cache_dtype: both(|r| r.supports_unset_kv_cache_dtype),
        forward_includes_kv_cache_update: d.forward_includes_kv_cache_update,
        supports_kv_cache_update_bypass: both(|r| r.supports_kv_cache_update_bypass),
        output_quants: common(&d.output_quants, &p.output_quants, equal),
        graph_support: d.graph_support.min(match d.reorder_batch_threshold {
            Some(_) => GraphSupport::UniformSingleTokenDecode,
            None => GraphSupport::UniformBatch,
        }),
        varlen_graph_max_query_len: varlen(d),
        reorder_batch_threshold: Some(d.reorder_batch_threshold.unwrap_or(1)),
    };
    let taken = |of: fn(&RuleBook) -> Option<usize>| {
        [of(d), of(p)].into_iter().flatten().find(|&n| book.supports_block_size(n))
    };
    let (preferred, fallback) = (taken(|r| r.preferred_block_size), taken(|r| r.fallback_block_size));
    (book.preferred_block_size, book.fallback_block_size) = (preferred, fallback);
    Ok(book)
}

type List<'a, T> = (&'a RuleBook, &'a Vec<T>);

/// What two lists have in common, in the first's order.
fn common<T: Clone + PartialEq>(a: &[T], b: &[T], of: fn(&T, &T) -> Option<T>) -> Vec<T> {
    let mut all = vec![];
    for found in a.iter().flat_map(|x| b.iter().filter_map(move |y| of(x, y))) {
        if !all.contains(&found) {
            all.push(found);
        }
    }
    all
}

/// [`common`], which must leave something.
fn some<T: Clone + PartialEq + Display>(
    what: &str,
    a: List<'_, T>,
    b: List<'_, T>,
    of: fn(&T, &T) -> Option<T>,
) -> Result<Vec<T>, String> {
    let all = common(a.1, b.1, of);
    if !all.is_empty() {
        return Ok(all);
    }
    let list = |(r, of): List<'_, T>| {
        let of: Vec<_> = of.iter().map(ToString::to_string).collect();
        format!("{} takes {}", r.name, if of.is_empty() { "none".into() } else { of.join(", ") })
    };
    Err(format!("no {what} in common: {}; {}", list(a), list(b)))
}

/// [`some`] of lists that take anything where they are empty.
fn any_or<T: Clone + PartialEq + Display>(
    what: &str,
    a: List<'_, T>,
    b: List<'_, T>,
    of: fn(&T, &T) -> Option<T>,
) -> Result<Vec<T>, String> {
    match (a.1.is_empty(), b.1.is_empty()) {
        (true, _) => Ok(b.1.clone()),
        (_, true) => Ok(a.1.clone()),
        _ => some(what, a, b, of),
    }
}

fn equal<T: Clone + PartialEq>(a: &T, b: &T) -> Option<T> {
    (a == b).then(|| a.clone())
}

/// A cache of elements, which are what their type and the layer's scales say; what a packed format holds is its
/// backend's own.
fn plain(a: &KvCacheDType, b: &KvCacheDType) -> Option<KvCacheDType> {
    equal(a, b).filter(|kv| kv.element(DType::F16).is_some())
}

/// Requests of an encoder have no decodes, and keys that the other part would compute.
fn attn_types(d: &RuleBook, p: &RuleBook) -> Result<Vec<AttnType>, String> {
    let decodes = |a: &AttnType, b: &AttnType| equal(a, b).filter(|t| *t == AttnType::Decoder);
    let all = common(&d.attn_types, &p.attn_types, decodes);
    match all.is_empty() {
        false => Ok(all),
        true => Err(format!("{} and {} must both be for decoders", d.name, p.name)),
    }
}

fn capabilities_of_both(d: &RuleBook, p: &RuleBook) -> Result<Option<Vec<CapabilityRange>>, String> {
    match (&d.compute_capabilities, &p.compute_capabilities) {
        (Some(a), Some(b)) => some("compute capability", (d, a), (p, b), capabilities).map(Some),
        (one, other) => Ok(one.as_ref().or(other.as_ref()).cloned()),
    }
}

fn capabilities(a: &CapabilityRange, b: &CapabilityRange) -> Option<CapabilityRange> {
    let lower = match (a.to, b.to) {
        (Some(x), Some(y)) => Some(x.min(y)),
        (x, y) => x.or(y),
    };
    // Without a limit is below every limit.
    let range = CapabilityRange { from: max(a.from, b.from), to: lower };
    let empty = range.from.zip(range.to).is_some_and(|(from, to)| from > to);
    (!empty).then_some(range)
}

/// Most new tokens in a graph of decodes of mixed lengths: all of it is the decodes' part.
fn varlen(d: &RuleBook) -> Option<usize> {
    let decode = d.reorder_batch_threshold.unwrap_or(usize::MAX);
    let most =
        if d.graph_support == GraphSupport::Always { Some(decode) } else { d.varlen_graph_max_query_len };
    most.map(|m| m.min(decode))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn blocks(a: &KernelBlockSize, b: &KernelBlockSize) -> Option<KernelBlockSize> {
    use KernelBlockSize::{Exact, MultipleOf};
    match (*a, *b) {
        (Exact(n), other) | (other, Exact(n)) => other.accepts(n).then_some(Exact(n)),
        (MultipleOf(0), _) | (_, MultipleOf(0)) => None,
        (MultipleOf(x), MultipleOf(y)) => (x / gcd(x, y)).checked_mul(y).map(MultipleOf),
    }
}

/// Two ranges in steps have a range in steps in common.
fn sizes(a: &SizeRange, b: &SizeRange) -> Option<SizeRange> {
    let (step, other) = (a.step.max(1), b.step.max(1));
    let (from, to) = (max(a.first, b.first), a.last.min(b.last));
    // The members of `a` meet those of `b` in the same way again after so many.
    let round = other / gcd(step, other);
    let start = (from - a.first).div_ceil(step).checked_mul(step)?.checked_add(a.first)?;
    let first = (0..round)
        .map_while(|i| i.checked_mul(step)?.checked_add(start))
        .take_while(|&n| n <= to)
        .find(|&n| b.contains(n))?;
    let Some(step) = step.checked_mul(round) else { return Some(SizeRange::exactly(first)) };
    let last = if to == usize::MAX { to } else { to - (to - first) % step };
    Some(if last == first { SizeRange::exactly(first) } else { SizeRange { first, last, step } })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::rules::ComputeCapability;
    use proptest::prelude::*;

    fn range() -> impl Strategy<Value = SizeRange> {
        let last = prop_oneof![4 => 0usize..130, 1 => Just(usize::MAX)];
        (0usize..40, last, 0usize..14).prop_map(|(first, last, step)| SizeRange { first, last, step })
    }

    fn block() -> impl Strategy<Value = KernelBlockSize> {
        let of = [KernelBlockSize::Exact as fn(usize) -> _, KernelBlockSize::MultipleOf];
        (0usize..2, 0usize..40).prop_map(move |(which, n)| of[which](n))
    }

    fn capability() -> impl Strategy<Value = CapabilityRange> {
        let one = || proptest::option::of((7u32..11, 0u32..3).prop_map(|(a, b)| ComputeCapability(a, b)));
        (one(), one()).prop_map(|(from, to)| CapabilityRange { from, to })
    }

    proptest! {
        #[test]
        fn a_size_is_in_the_common_range_where_both_have_it(a in range(), b in range()) {
            let both = sizes(&a, &b);
            for n in (0..300).chain([usize::MAX - 1, usize::MAX]) {
                let found = both.is_some_and(|r| r.contains(n));
                prop_assert_eq!(found, a.contains(n) && b.contains(n), "{} of {:?} {:?}: {:?}", n, a, b, both);
            }
        }

        #[test]
        fn a_block_is_taken_where_both_take_it(
            a in proptest::collection::vec(block(), 1..4),
            b in proptest::collection::vec(block(), 1..4),
        ) {
            let both = common(&a, &b, blocks);
            for n in 0..200 {
                let takes = |list: &[KernelBlockSize]| list.iter().any(|k| k.accepts(n));
                prop_assert_eq!(takes(&both), takes(&a) && takes(&b), "{} of {:?} {:?}: {:?}", n, a, b, both);
            }
        }

        #[test]
        fn a_capability_is_in_range_where_both_have_it(a in capability(), b in capability()) {
            let both = capabilities(&a, &b);
            for c in (6..12).flat_map(|x| (0..4).map(move |y| ComputeCapability(x, y))) {
                prop_assert_eq!(both.is_some_and(|r| r.contains(c)), a.contains(c) && b.contains(c));
            }
        }
    }

    fn book(name: &'static str) -> RuleBook {
        RuleBook { name: name.into(), ..RuleBook::default() }
    }

    #[test]
    fn what_leaves_nothing_in_common_is_said_with_what_each_takes() {
        let says = |b: RuleBook| {
            let a = RuleBook { head_sizes: vec![SizeRange { first: 64, last: 128, step: 64 }], ..book("A") };
            let a = RuleBook { kernel_block_sizes: vec![KernelBlockSize::Exact(16)], ..a };
            of_both(&a, &b).map(|r| r.name.to_string())
        };
        assert_eq!(says(book("B")), Ok("A+B".into()));
        let other = RuleBook { head_sizes: vec![SizeRange::exactly(96)], ..book("B") };
        assert_eq!(says(other), Err("no head size in common: A takes 64-128 by 64; B takes 96".into()));
        let other = RuleBook { kernel_block_sizes: vec![KernelBlockSize::MultipleOf(64)], ..book("B") };
        assert_eq!(
            says(other),
            Err("no kernel block size in common: A takes 16; B takes MultipleOf(64)".into())
        );
        let other = RuleBook { dtypes: vec![DType::F32], ..book("B") };
        assert!(says(other).is_err_and(|e| e.starts_with("no activation dtype in common: A takes float16")));
        let other = RuleBook { kv_cache_dtypes: vec!["fp8_ds_mla".into()], ..book("B") };
        assert!(says(other).is_err_and(|e| e.starts_with("no KV cache dtype of plain elements")));
        let other = RuleBook { forward_includes_kv_cache_update: true, ..book("B") };
        assert!(
            says(other).is_err_and(|e| e.starts_with("B writes the KV cache in its kernel, A before it"))
        );
        let other = RuleBook { attn_types: vec![AttnType::EncoderOnly], ..book("B") };
        assert_eq!(says(other), Err("A and B must both be for decoders".into()));
        let other = RuleBook { is_sparse: true, ..book("B") };
        assert_eq!(says(other), Err("B is for sparse attention, A for other".into()));
    }

    #[test]
    fn graphs_hold_what_the_decodes_part_can() {
        let of = |support, threshold, varlen| {
            let d = RuleBook {
                graph_support: support,
                reorder_batch_threshold: threshold,
                varlen_graph_max_query_len: varlen,
                ..book("D")
            };
            let p = RuleBook {
                graph_support: GraphSupport::Always,
                reorder_batch_threshold: Some(9),
                ..book("P")
            };
            let r = of_both(&d, &p).unwrap();
            (r.graph_support, r.reorder_batch_threshold, r.varlen_graph_max_query_len)
        };
        use GraphSupport::*;
        assert_eq!(of(Always, None, None), (UniformBatch, Some(1), Some(usize::MAX)));
        assert_eq!(of(UniformBatch, None, Some(64)), (UniformBatch, Some(1), Some(64)));
        assert_eq!(of(UniformBatch, Some(4), Some(64)), (UniformSingleTokenDecode, Some(4), Some(4)));
        assert_eq!(of(Never, None, None), (Never, Some(1), None));
    }

    #[test]
    fn block_sizes_and_layouts_are_the_decodes_parts_where_both_take_them() {
        use crate::KvCacheLayout::{BLHNC, LBHNC, LBNHC};
        let d = RuleBook {
            preferred_block_size: Some(64),
            fallback_block_size: Some(16),
            kv_cache_layouts: vec![LBNHC, LBHNC, BLHNC],
            ..book("D")
        };
        let p = RuleBook {
            preferred_block_size: Some(32),
            kernel_block_sizes: [16, 32].map(KernelBlockSize::Exact).into(),
            whole_blocks_only: true,
            kv_cache_layouts: vec![BLHNC, LBHNC],
            ..book("P")
        };
        let r = of_both(&d, &p).unwrap();
        assert_eq!((r.preferred_block_size, r.fallback_block_size), (Some(32), Some(16)));
        assert_eq!((r.kv_cache_layouts, r.whole_blocks_only), (vec![LBHNC, BLHNC], true));
        assert!(!r.supports_batch_invariance && !r.supports_dcp && !r.supports_inexact_query_lens);
    }
}
