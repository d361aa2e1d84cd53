//! Which graphs the engine captures. The rules are the contract's; here are what of them this engine can do, the mode
//! where none is asked for, and the sizes. Start-up and `explain` both ask.

use crate::runner::limits::Limits;
use headway_attention::{
    AttentionError, BuilderPlan, GraphMode, GraphSupport, KvCachePlan, KvCacheSpec,
    group::graph::{
        CaptureOptions, GraphPlan, GraphRequest, GraphResolution, Lowering, resolve as resolve_mode,
        varlen_blocker,
    },
};

/// The largest size where none is asked for, in tokens: beyond it kernels take longer than their launches.
const MOST_TOKENS: usize = 512;

/// What bears on the mode beside the groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModeRequest<'a> {
    /// `cpu` or `cuda`.
    pub platform: &'a str,
    /// `--graph-mode`.
    pub asked: Option<GraphMode>,
    /// New tokens of a decoding request: 1 + speculative tokens.
    pub decode_query_len: usize,
    /// Most requests in a step.
    pub max_num_reqs: usize,
    /// Blocks of the pool, where they are known.
    pub num_blocks: Option<usize>,
}

/// The mode in force, with every lowering.
///
/// # Errors
/// As [`headway_attention::group::graph::resolve`].
pub(crate) fn resolve<'a>(
    cache: &KvCachePlan,
    builders: impl Iterator<Item = &'a BuilderPlan>,
    r: &ModeRequest<'_>,
) -> Result<GraphResolution, AttentionError> {
    let names = cache.attention_groups.iter().map(|g| g.backend.rules().name.as_ref());
    let (support, backend) = GraphSupport::weakest(names.zip(builders.map(|b| b.graph_support)));
    let has = |f: fn(&KvCacheSpec) -> bool| cache.kv_cache_groups.iter().any(|g| f(&g.spec));
    let default = if r.platform == "cpu" { GraphMode::None } else { GraphMode::FullDecodeOnly };
    let mut answer = resolve_mode(&GraphRequest {
        configured: Some(r.asked.unwrap_or(default)),
        support,
        backend: backend.unwrap_or_default().to_owned(),
        decode_query_len: r.decode_query_len,
        state_blocks: r.num_blocks.filter(|_| has(|s| matches!(s, KvCacheSpec::Mamba(_)))),
        max_num_reqs: Some(r.max_num_reqs),
        ..GraphRequest::default()
    })?;
    let encodes = has(|s| matches!(s, KvCacheSpec::EncoderOnly(_) | KvCacheSpec::Cross(_)));
    if encodes && answer.mode != GraphMode::None {
        lower(&mut answer, GraphMode::None, "an encoder, whose steps run without graphs");
    }
    Ok(answer)
}

fn lower(answer: &mut GraphResolution, to: GraphMode, with: &str) {
    let from = answer.mode;
    let because = format!("--graph-mode {from} is not supported with {with}");
    answer.lowerings.push(Lowering { from, to, because });
    answer.mode = to;
}

/// The shapes to capture in this mode.
pub(crate) fn shapes(
    mode: GraphMode,
    limits: &Limits,
    cache: &KvCachePlan,
    builders: &[BuilderPlan],
) -> GraphPlan {
    let q = 1 + limits.num_speculative_tokens;
    // A step has no more tokens than its requests can hold.
    let tokens = limits.max_num_tokens.min(limits.max_num_reqs.saturating_mul(limits.max_model_len));
    let most = match mode.mixed_mode() {
        GraphMode::None => tokens.min(limits.max_num_reqs.saturating_mul(q)),
        _ => tokens,
    };
    let mut sizes = sizes(most.min(MOST_TOKENS));
    // A step of all requests is the most usual decode, whatever their number.
    let widest = limits.max_num_reqs.saturating_mul(q);
    if mode.separates_decode() && sizes.last().is_some_and(|&most| widest < most) && !sizes.contains(&widest)
    {
        sizes.push(widest);
        sizes.sort_unstable();
    }
    let groups = cache.attention_groups.iter().zip(builders).map(|(g, b)| {
        let rules = g.backend.rules();
        (rules.name.as_ref(), b.graph_support, rules.varlen_graph_max_query_len)
    });
    GraphPlan::new(&CaptureOptions {
        mode,
        max_capture_size: sizes.last().copied().unwrap_or(0),
        capture_sizes: sizes,
        max_num_reqs: limits.max_num_reqs,
        decode_query_len: q,
        lora_cases: vec![0],
        varlen_decode: q > 1 && varlen_blocker(groups, q).is_none(),
        decode_query_lens: vec![],
        micro_batching: None,
        limit_mixed_to_decode_tokens: false,
    })
}

/// 1, 2, 4, multiples of 8 up to 256 and of 16 from there, and the largest itself.
fn sizes(most: usize) -> Vec<usize> {
    let fine = [1, 2, 4].into_iter().chain((8..256).step_by(8));
    let mut all: Vec<usize> = fine.chain((256..).step_by(16)).take_while(|&s| s < most).collect();
    all.extend((most > 0).then_some(most));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_end_with_the_largest() {
        assert_eq!(sizes(0), [0; 0]);
        assert_eq!(sizes(1), [1]);
        assert_eq!(sizes(3), [1, 2, 3]);
        assert_eq!(sizes(20), [1, 2, 4, 8, 16, 20]);
        let all = sizes(512);
        assert!(all.len() == 51 && all.ends_with(&[480, 496, 512]) && all.contains(&248));
    }
}
