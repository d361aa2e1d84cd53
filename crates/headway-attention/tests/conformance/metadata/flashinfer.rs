//! FlashInfer: the two halves, their kernels, and the arguments of their plans.

use super::{
    batch::{common, dtype_name, seq_lens, table_rows},
    fields::{Fields, rows},
};
use crate::{
    Outcome,
    read::{num, same, text},
};
use headway_attention::{
    CommonAttentionMetadata, ContextParallel, Result,
    group::arith::flashinfer::{
        DecodeKernel, FlashInferConfig, FlashInferStep, PlanCall, PlanHeads, kernels, reorder_batch_threshold,
    },
};
use headway_tensor::DType;
use serde_json::{Value, json};

fn config(i: &Value) -> Option<FlashInferConfig> {
    let (major, minor) = text(&i["device_capability"]).split_once('.')?;
    let capability = (major.parse().ok()?, minor.parse().ok()?);
    let (decode, prefill) = kernels(capability, i["use_trtllm_attention"].as_bool());
    let drafts = num(&i["config"]["num_speculative_tokens"]);
    let left = i["window_left"].as_i64()?;
    Some(FlashInferConfig {
        decode,
        prefill,
        threshold: reorder_batch_threshold(capability, decode, drafts, ContextParallel::default()),
        page_size: num(&i["common"]["block_size"]),
        heads: PlanHeads {
            num_heads: num(&i["num_q_heads"]),
            num_kv_heads: num(&i["num_kv_heads"]),
            head_size: num(&i["head_size"]),
            // The recorded run gave its layers this scale, not the inverse root of the head size.
            scale: 0.125,
            window: usize::try_from(left + 1).ok().filter(|&w| w > 0),
            logits_soft_cap: 0.0,
            q_dtype: DType::BF16,
            kv_dtype: DType::BF16,
            out_dtype: DType::BF16,
            fixed_split_size: None,
            disable_split_kv: false,
        },
    })
}

pub fn flashinfer(i: &Value, e: &Value) -> Result<Outcome> {
    let (Some(mut f), Some(config)) = (Fields::of("", e), config(i)) else {
        return Ok(Outcome::NotUnderstood("the case".into()));
    };
    let common = common(i)?;
    let mut ours = FlashInferStep::default();
    ours.fill(&common, &config)?;
    f.add(same("threshold", config.threshold, num(&i["reorder_batch_threshold"])));
    f.is("num_actual_tokens", common.inputs.num_actual_tokens);
    f.is("causal", ours.causal);
    f.is("num_decodes", ours.split.decodes);
    f.is("num_decode_tokens", ours.split.decode_tokens);
    f.is("num_prefills", ours.split.prefills);
    f.is("num_prefill_tokens", ours.split.prefill_tokens);
    f.is("q_data_type_prefill", dtype_name(config.heads.q_dtype));
    f.is("q_data_type_decode", dtype_name(config.heads.q_dtype));
    // Settled at start-up, not by a step.
    f.constant("kv_cache_layout", "LBHNC");
    let theirs = f.inner("prefill");
    f.add(prefill(theirs, &ours, &common));
    let theirs = f.inner("decode");
    f.add(decode(theirs, &ours, &common, &config));
    let plans = f.list("plans");
    f.add(all_plans(plans, &ours, &common, &config));
    Ok(f.done())
}

fn prefill(theirs: Option<Fields<'_>>, ours: &FlashInferStep, common: &CommonAttentionMetadata) -> Outcome {
    let there = ours.split.prefills > 0;
    let Some(mut f) = theirs else {
        return if there { Outcome::Differs("prefills".into()) } else { Outcome::Same };
    };
    if ours.prefill_plan.is_some() {
        f.is("class", "FIPrefill");
        return f.done();
    }
    let of = ours.split.decodes..common.inputs.num_reqs;
    f.is("class", "TRTLLMPrefill");
    f.is("block_tables", table_rows(common, of.clone()));
    f.is("seq_lens", seq_lens(common)[of].to_vec());
    f.is("cum_seq_lens_q", ours.prefill_start_loc.clone());
    f.is("cum_seq_lens_kv", ours.prefill_page_indptr.clone());
    f.is("max_q_len", ours.max_prefill_query_len);
    f.is("max_seq_len", common.inputs.max_seq_len);
    f.done()
}

fn decode(
    theirs: Option<Fields<'_>>,
    ours: &FlashInferStep,
    common: &CommonAttentionMetadata,
    config: &FlashInferConfig,
) -> Outcome {
    let decodes = ours.split.decodes;
    let Some(mut f) = theirs else {
        return if decodes > 0 { Outcome::Differs("decodes".into()) } else { Outcome::Same };
    };
    let Some(d) = &ours.decode else {
        f.is("class", "FIDecode");
        return f.done();
    };
    f.is("class", "FlashInferTrtllmAPIDecode");
    f.is("kernel", if config.decode == DecodeKernel::Xqa { "XQA" } else { "TRTLLM_GEN" });
    f.is("block_tables", table_rows(common, 0..decodes));
    f.is("seq_lens", seq_lens(common)[..decodes].to_vec());
    f.is("max_seq_len", common.inputs.max_seq_len);
    f.is("q_len_per_req", d.query_len_per_req);
    let q = &common.inputs.query_start_loc.host()[..=decodes];
    f.is("q_cu_seq_lens", if d.ragged { json!(q) } else { Value::Null });
    let mask = rows(&ours.mask, d.mask_words);
    f.is(
        "mask",
        match (d.mask_words, d.ragged) {
            (0, _) => Value::Null,
            (_, true) => json!(mask),
            (_, false) => json!(mask.chunks(d.query_len_per_req).collect::<Vec<_>>()),
        },
    );
    // There is one rank.
    f.constant("dcp_query_start_loc", Value::Null);
    f.done()
}

fn all_plans(
    theirs: &[Value],
    ours: &FlashInferStep,
    common: &CommonAttentionMetadata,
    config: &FlashInferConfig,
) -> Outcome {
    let calls: Vec<_> = ours.prefill_plan.iter().chain(&ours.decode_plan).collect();
    if calls.len() != theirs.len() {
        return Outcome::Differs(format!("{} plans, expected {}", calls.len(), theirs.len()));
    }
    crate::read::all(calls.iter().zip(theirs).map(|(call, t)| plan(t, call, ours, common, config)))
}

fn plan(
    theirs: &Value,
    call: &PlanCall,
    ours: &FlashInferStep,
    common: &CommonAttentionMetadata,
    config: &FlashInferConfig,
) -> Outcome {
    let Some(mut f) = Fields::of("plan.", theirs) else { return Outcome::NotUnderstood("a plan".into()) };
    f.is("wrapper", if call.query_len_per_req.is_some() { "decode_fast_plan" } else { "prefill" });
    f.constant("args", json!([]));
    let Some(mut k) = f.inner("kwargs") else {
        return Outcome::NotUnderstood("a plan without arguments".into());
    };
    let (h, of) = (&config.heads, call.requests.clone());
    let [bounds, pages, last, lens, size] = match call.query_len_per_req {
        None => ["paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "seq_lens", "head_dim_qk"],
        Some(_) => ["indptr_cpu", "indices", "last_page_len_cpu", "seq_lens_cpu", "head_dim"],
    };
    k.is(bounds, ours.pages.bounds(of.clone()).to_vec());
    k.is(pages, ours.pages.indices.clone());
    k.is(last, ours.pages.last_page_len[of.clone()].to_vec());
    k.is(lens, seq_lens(common)[of].to_vec());
    k.is(size, h.head_size);
    match call.query_len_per_req {
        None => {
            k.is("qo_indptr", ours.prefill_start_loc.clone());
            k.is("causal", call.causal);
        }
        Some(len) => {
            k.is("q_len_per_req", len);
            // Rotation is done before the kernel.
            k.constant("pos_encoding_mode", "NONE");
        }
    }
    k.is("num_qo_heads", h.num_heads);
    k.is("num_kv_heads", h.num_kv_heads);
    k.is("page_size", config.page_size);
    k.is("sm_scale", h.scale);
    k.is("window_left", h.window_left());
    k.is("logits_soft_cap", h.logits_soft_cap);
    k.is("q_data_type", dtype_name(h.q_dtype));
    k.is("kv_data_type", dtype_name(h.kv_dtype));
    k.is("o_data_type", dtype_name(h.out_dtype));
    k.is("fixed_split_size", h.fixed_split_size.map_or(json!(-1), |s| json!(s)));
    k.is("disable_split_kv", h.disable_split_kv);
    f.add(k.done());
    f.done()
}
