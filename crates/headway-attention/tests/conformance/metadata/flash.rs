//! FlashAttention and Triton.

use super::{
    batch::{common, dtype_name, max_graph_tokens, ranks, seq_lens},
    fields::{Fields, omitted},
};
use crate::{
    Outcome,
    read::{flag, num, opt},
};
use headway_attention::{
    Result,
    group::arith::{
        flash_attn::{FlashAttnConfig, FlashAttnStep, ScheduleCall, local_context_lens, schedule_len},
        triton::{SOFTMAX_SEGMENTS, SegmentConfig, SoftmaxSegments},
    },
};
use headway_tensor::DType;
use serde_json::{Value, json};

/// Compares a scheduler's call. Fields that only some calls have are asked for where they are.
pub fn schedule(
    mut f: Fields<'_>,
    ours: &ScheduleCall,
    key_lens: &[i32],
    query_start_loc: &[i32],
) -> Outcome {
    f.is("batch_size", ours.batch_size);
    f.is("max_seqlen_q", ours.max_query_len);
    f.is("max_seqlen_k", ours.max_key_len);
    f.is("num_heads_q", ours.num_heads);
    f.is("num_heads_kv", ours.num_kv_heads);
    f.is("headdim", ours.head_size);
    if let Some(v) = ours.head_size_v {
        f.is("headdim_v", v);
    } else {
        f.is("window_size", json!(ours.window));
    }
    f.is("cache_seqlens", key_lens.to_vec());
    f.is("cu_seqlens_q", query_start_loc.to_vec());
    f.is("qkv_dtype", dtype_name(ours.dtype));
    f.is("page_size", ours.page_size);
    f.is("causal", ours.causal);
    f.is("num_splits", ours.num_splits);
    f.done()
}

pub fn flash_attn(i: &Value, e: &Value) -> Result<Outcome> {
    let Some(mut f) = Fields::of("", e) else { return Ok(Outcome::NotUnderstood("the case".into())) };
    let mut common = common(i)?;
    common.hints.fast_build = flag(&i["fast_build"]);
    let cp = ranks(i);
    let config = FlashAttnConfig {
        ahead_of_time: num(&i["fa_version"]) >= 3,
        max_graph_tokens: max_graph_tokens(i),
        num_heads: num(&i["num_q_heads"]),
        num_kv_heads: num(&i["num_kv_heads"]),
        head_size: num(&i["head_size"]),
        dtype: DType::BF16,
        page_size: num(&i["common"]["block_size"]),
        window: None,
        context_parallel: cp,
        batch_invariant: false,
    };
    let mut ours = FlashAttnStep::default();
    ours.fill(&common, &config)?;
    let inputs = &common.inputs;
    f.is("num_actual_tokens", inputs.num_actual_tokens);
    f.is("max_query_len", inputs.max_query_len);
    f.is("max_seq_len", inputs.max_seq_len);
    f.is("causal", common.causal().of(0));
    f.is("max_num_splits", ours.max_num_splits);
    let mut local = vec![];
    local_context_lens(inputs.query_start_loc.host(), seq_lens(&common), cp, &mut local);
    f.is("dcp_context_kv_lens", if cp.size > 1 { json!(local) } else { Value::Null });
    f.is("max_dcp_context_kv_len", ours.max_local_context_len);
    let s = &ours.context_split;
    f.is("num_decode_reqs", s.decodes);
    f.is("num_prefill_reqs", s.extends);
    f.is("num_decode_tokens", s.decode_tokens);
    f.is("num_prefill_tokens", s.extend_tokens);
    match (&ours.schedule, f.inner("scheduler_call")) {
        (Some(call), Some(theirs)) => {
            let key_lens = if cp.size > 1 { &local } else { seq_lens(&common) };
            f.add(schedule(theirs, call, key_lens, inputs.query_start_loc.host()));
        }
        (None, None) => {}
        (ours, _) => f.add(Outcome::Differs(format!("scheduler call {ours:?}"))),
    }
    f.is("scheduler_metadata_len", json!(ours.schedule.map(|c| schedule_len(c.batch_size))));
    // Metadata holds views of what the step has already.
    let passed = ["block_table", "slot_mapping", "query_start_loc", "seq_lens"];
    f.constant(
        "passes_through",
        json!(passed.map(|n| (n, true)).into_iter().collect::<std::collections::BTreeMap<_, _>>()),
    );
    // The batches have neither bidirectional prefixes nor ring windows.
    for name in ["mm_prefix_query_range_tensor", "rswa_prefix_lens", "rswa_window", "rswa_window_tensor"] {
        f.constant(name, Value::Null);
    }
    Ok(f.done())
}

/// The captured sizes of the recorded runs: 1, 2, 4, and multiples of 8 up to the largest.
fn capture_sizes(most: usize) -> Vec<usize> {
    [1, 2, 4].into_iter().chain((8..).step_by(8)).take_while(|&s| s <= most).collect()
}

pub fn triton(i: &Value, e: &Value) -> Result<Outcome> {
    let Some(mut f) = Fields::of("", e) else { return Ok(Outcome::NotUnderstood("the case".into())) };
    let common = common(i)?;
    let sizes = max_graph_tokens(i).map(capture_sizes);
    let ours = SoftmaxSegments::new(&SegmentConfig {
        num_heads: num(&i["num_q_heads"]),
        num_kv_heads: num(&i["num_kv_heads"]),
        head_size: num(&i["head_size"]),
        compute_units: 132,
        max_num_reqs: opt(&i["config"]["max_num_seqs"]).unwrap_or(0),
        capture_sizes: sizes.as_deref(),
    });
    f.is("num_actual_tokens", common.inputs.num_actual_tokens);
    f.is("max_query_len", common.inputs.max_query_len);
    f.is("max_seq_len", common.inputs.max_seq_len);
    f.is("causal", common.causal().of(0));
    f.is("seq_threshold_3D", ours.threshold);
    f.is("num_par_softmax_segments", SOFTMAX_SEGMENTS);
    f.is("softmax_segm_output", omitted(&ours.output_shape(), "float32"));
    f.is("softmax_segm_max", omitted(&ours.scalar_shape(), "float32"));
    f.is("softmax_segm_expsum", omitted(&ours.scalar_shape(), "float32"));
    // The batches have neither bidirectional prefixes nor ring windows; the kernel has no scheduler.
    for name in
        ["scheduler_metadata", "mm_prefix_range", "mm_prefix_range_tensor", "rswa_prefix_lens", "rswa_window"]
    {
        f.constant(name, Value::Null);
    }
    Ok(f.done())
}
