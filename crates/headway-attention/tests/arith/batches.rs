//! Random batches: decodes first, then prefills, then padding rows. And what steps are computed by.

use headway_attention::{
    Causal, CommonAttentionMetadata, ContextParallel, StepInputs,
    group::arith::{
        context_chunks::ChunkWorkspace,
        flash_attn::FlashAttnConfig,
        flashinfer::{DecodeKernel, FlashInferConfig, PlanHeads, PrefillKernel},
        mla::{DecodeQueries, MlaConfig},
    },
};
use headway_tensor::{DType, Dual, View};
use proptest::prelude::*;

/// Tokens in a page, where a test doesn't say.
pub const PAGE: usize = 16;

/// New tokens and earlier tokens of each request.
pub type Lens = Vec<(i32, i32)>;

/// Prefix sum of the new tokens.
pub fn starts(lens: &[(i32, i32)]) -> Vec<i32> {
    let mut q = vec![0];
    q.extend(lens.iter().scan(0, |sum, &(new, _)| {
        *sum += new;
        Some(*sum)
    }));
    q
}

/// Up to 4 decodes of at most `threshold` tokens, up to 5 prefills, up to 2 padding rows.
pub fn batch(threshold: i32) -> impl Strategy<Value = (Lens, Vec<bool>)> {
    let decodes = prop::collection::vec((1..=threshold, 1..700), 0..5);
    let prefills = prop::collection::vec((1..300, prop_oneof![Just(0), 1..700]), 0..6);
    (decodes, prefills, 0..3usize).prop_map(|(d, p, padding)| {
        let prefilling = d.iter().map(|_| false).chain(p.iter().map(|_| true));
        let prefilling = prefilling.chain((0..padding).map(|_| false)).collect();
        (d.into_iter().chain(p).chain((0..padding).map(|_| (0, 0))).collect(), prefilling)
    })
}

/// A batch's common metadata, with pages of `page` tokens. Row r of the table has the blocks r + 1,
/// r + 1 + n, …: no block twice.
pub fn common(lens: &[(i32, i32)], prefilling: Vec<bool>, page: usize) -> CommonAttentionMetadata {
    let (n, stride) = (lens.len(), 1000usize.div_ceil(page) + 4);
    let seq_lens: Vec<i32> = lens.iter().map(|(new, old)| new + old).collect();
    let q = starts(lens);
    let tokens = q[n] as usize;
    let mut inputs =
        StepInputs::new(Dual::from_vec(q), View::from_vec(seq_lens.clone()), seq_lens).expect("a batch");
    inputs.is_prefilling = Some(prefilling);
    let block = |r: usize, c: usize| (1 + r + c * n) as i32;
    let table = (0..n).flat_map(|r| (0..stride).map(move |c| block(r, c))).collect();
    CommonAttentionMetadata::new(
        inputs.into(),
        Dual::from_vec(table),
        stride,
        View::from_vec(vec![-1; tokens]),
    )
    .expect("a batch")
}

/// A group of a kernel with a schedule made ahead of time.
pub fn flash(cp: ContextParallel) -> FlashAttnConfig {
    FlashAttnConfig {
        ahead_of_time: true,
        max_graph_tokens: Some(64),
        num_heads: 8,
        num_kv_heads: 2,
        head_size: 128,
        dtype: DType::BF16,
        page_size: PAGE,
        window: Some(100),
        context_parallel: cp,
        batch_invariant: false,
    }
}

/// A group of these kernels.
pub fn infer(decode: DecodeKernel, prefill: PrefillKernel, threshold: usize) -> FlashInferConfig {
    let heads = PlanHeads {
        num_heads: 8,
        num_kv_heads: 2,
        head_size: 128,
        scale: 0.125,
        window: Some(100),
        logits_soft_cap: 0.0,
        q_dtype: DType::BF16,
        kv_dtype: DType::BF16,
        out_dtype: DType::BF16,
        fixed_split_size: None,
        disable_split_kv: false,
    };
    FlashInferConfig { decode, prefill, threshold, page_size: PAGE, heads }
}

/// A group of latent attention with a workspace of so many tokens.
pub fn mla(cp: ContextParallel, tokens: usize) -> MlaConfig {
    MlaConfig {
        threshold: 3,
        queries: DecodeQueries::Varlen,
        short_extends_as_decodes: false,
        workspace: ChunkWorkspace { tokens, alignment: PAGE, context_parallel: cp },
    }
}

/// The same batch with another causality.
pub fn not_causal(common: &CommonAttentionMetadata) -> CommonAttentionMetadata {
    CommonAttentionMetadata { causal_override: Some(Causal::All(false)), ..common.clone() }
}

/// The lengths.
pub fn seq_lens(common: &CommonAttentionMetadata) -> &[i32] {
    common.inputs.seq_lens.host().unwrap_or(&[])
}
