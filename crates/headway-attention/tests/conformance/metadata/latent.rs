//! Latent attention: the two halves, and the chunks of the prefills' context.

use super::{
    batch::{common, max_graph_tokens, ranks, seq_lens, table_rows},
    fields::Fields,
    flash::schedule,
};
use crate::{
    Outcome,
    read::{ints, num, same, text},
};
use headway_attention::{
    AttentionSpec, CommonAttentionMetadata, ContextParallel, GroupInfo, KvCacheSpec, Result,
    group::arith::{
        context_chunks::{ChunkWorkspace, ContextChunk, ContextChunks, request_of_token},
        flash_attn::{max_num_splits, schedule_len},
        lengths::query_lens,
        mla::{
            DecodeQueries, LatentHeads, MAX_WORKSPACE_TOKENS, MlaConfig, MlaStep, decode_key_lens,
            workspace_tokens,
        },
    },
};
use headway_tensor::DType;
use serde_json::{Value, json};
use std::ops::Range;

const ROPE: usize = 64;
const LATENT: usize = 512;

/// Most new tokens that a builder's kernel takes as a decode anyway, and whether it takes several where
/// ranks share a request's tokens.
fn kernel(builder: &str) -> (usize, bool) {
    match builder {
        "FLASHMLA" => (128, false),
        "FLASH_ATTN_MLA" => (512, true),
        _ => (1, false),
    }
}

fn config(builder: &str, i: &Value) -> Option<MlaConfig> {
    let queries = match text(&i["query_len_support"]) {
        "SINGLE_ONLY" => DecodeQueries::Single,
        "UNIFORM" => DecodeQueries::Uniform,
        "VARLEN" => DecodeQueries::Varlen,
        _ => return None,
    };
    let ((most, over_ranks), cp) = (kernel(builder), ranks(i));
    let drafts = num(&i["config"]["num_speculative_tokens"]);
    Some(MlaConfig {
        threshold: queries.reorder_batch_threshold(most, drafts, cp, over_ranks),
        queries,
        short_extends_as_decodes: true,
        workspace: ChunkWorkspace {
            tokens: num(&i["chunked_prefill_workspace_size"]),
            alignment: num(&i["common"]["block_size"]),
            context_parallel: cp,
        },
    })
}

/// What start-up would choose. The recorded runs set other sizes by hand.
fn chosen_workspace(i: &Value) -> usize {
    let spec = AttentionSpec::new(num(&i["common"]["block_size"]), 1, LATENT + ROPE, DType::BF16);
    let spec = KvCacheSpec::Mla(AttentionSpec { head_size_v: 0, ..spec });
    workspace_tokens(&GroupInfo {
        max_num_reqs: num(&i["config"]["max_num_seqs"]),
        max_model_len: num(&i["config"]["max_model_len"]),
        context_parallel: ranks(i),
        ..GroupInfo::new(spec, num(&i["num_heads"]))
    })
}

pub fn mla(builder: &str, i: &Value, e: &Value) -> Result<Outcome> {
    let (Some(mut f), Some(config)) = (Fields::of("", e), config(builder, i)) else {
        return Ok(Outcome::NotUnderstood("the case".into()));
    };
    let common = common(i)?;
    let mut ours = MlaStep::default();
    ours.fill(&common, &config)?;
    f.add(same("threshold", config.threshold, num(&i["reorder_batch_threshold"])));
    f.add(same("workspace", chosen_workspace(i), MAX_WORKSPACE_TOKENS));
    f.is("num_reqs", common.inputs.num_reqs);
    f.is("max_query_len", common.inputs.max_query_len);
    f.is("max_seq_len", ours.max_key_len);
    f.is("num_actual_tokens", common.inputs.num_actual_tokens);
    f.is("num_decodes", ours.split.decodes);
    f.is("num_decode_tokens", ours.split.decode_tokens);
    f.is("num_prefills", ours.split.prefills);
    f.is("causal", common.causal().of(0));
    f.is("head_dim", LATENT + ROPE);
    let theirs = f.inner("prefill");
    f.add(prefill(theirs, &ours, &common, &config));
    let decode_part = f.inner("decode");
    let call = if builder == "FLASH_ATTN_MLA" { f.inner("scheduler_call") } else { None };
    f.add(decode(builder, decode_part, call, &ours, &common, &config, i));
    Ok(f.done())
}

fn slice(r: &Range<usize>) -> Value {
    json!({"start": r.start, "stop": r.end})
}

fn prefill(
    theirs: Option<Fields<'_>>,
    ours: &MlaStep,
    common: &CommonAttentionMetadata,
    config: &MlaConfig,
) -> Outcome {
    let Some(mut f) = theirs else {
        return if ours.split.prefills > 0 { Outcome::Differs("prefills".into()) } else { Outcome::Same };
    };
    f.is("block_table", table_rows(common, ours.split.decodes..common.inputs.num_reqs));
    f.is("query_start_loc", ours.prefill_start_loc.clone());
    f.is("max_query_len", common.inputs.max_query_len);
    f.is("query_lens_cpu", query_lens(&ours.prefill_start_loc).collect::<Vec<_>>());
    // The types of queries and results are the model's; the rest is of sparse builders.
    f.constant("q_data_type", "bfloat16");
    f.constant("output_dtype", "bfloat16");
    f.constant("use_dense_mha", false);
    f.constant("topk_mask_workspace", Value::Null);
    let context = &ours.context;
    match f.inner("chunked_context") {
        None if context.chunks.is_empty() => {}
        None => f.add(Outcome::Differs(format!("{} chunks, expected none", context.chunks.len()))),
        Some(mut c) => {
            c.is("context_lens", context.context_lens.clone());
            c.is("context_lens_list", context.context_lens.clone());
            c.is("empty_token_slices", context.without_context.iter().map(slice).collect::<Vec<_>>());
            // Collectives are the device's.
            c.constant("dcp_manager", Value::Null);
            let theirs = c.list("chunks");
            if theirs.len() != context.chunks.len() {
                let n = context.chunks.len();
                c.add(Outcome::Differs(format!("{n} chunks, expected {}", theirs.len())));
            }
            for (k, (chunk, t)) in context.chunks.iter().zip(theirs).enumerate() {
                c.add(one_chunk(k, t, chunk, context, config.workspace.context_parallel));
            }
            f.add(c.done());
        }
    }
    f.done()
}

fn one_chunk(
    k: usize,
    theirs: &Value,
    chunk: &ContextChunk,
    all: &ContextChunks,
    cp: ContextParallel,
) -> Outcome {
    let Some(mut f) = Fields::of(&format!("chunk {k}."), theirs) else {
        return Outcome::NotUnderstood("a chunk".into());
    };
    f.is("index", k);
    f.is("request_slice", slice(&chunk.requests));
    f.is("token_slice", slice(&chunk.tokens));
    f.is("continuation_token_end", chunk.first_request_end);
    f.is("is_continuation", chunk.is_continuation);
    f.is("num_context_tokens", chunk.context_tokens);
    f.is("query_start_loc", all.query_start_loc(chunk).to_vec());
    f.is("max_query_len", chunk.max_query_len);
    f.is("cu_seq_lens", all.cu_lens(chunk).to_vec());
    f.is("max_seq_len", chunk.max_context_len);
    f.is("seq_lens", all.lens(chunk).to_vec());
    f.is_list("token_to_seq", request_of_token(all.lens(chunk)).collect());
    f.is("all_rows_active", all.lens(chunk).iter().all(|&l| l > 0));
    f.is("num_local_context_tokens", chunk.local_context_tokens);
    let shared = cp.size > 1;
    f.is("starts", if shared { all.local_starts(chunk) } else { all.starts(chunk) }.to_vec());
    let list = |v: &[i32]| if shared { json!(v) } else { Value::Null };
    f.is("padded_local_seq_lens", list(all.local_lens(chunk)));
    f.is("padded_local_cu_seq_lens", list(all.local_cu_lens(chunk)));
    f.is("local_starts", list(all.local_starts(chunk)));
    if shared {
        f.is_list("padded_local_token_to_seq", request_of_token(all.local_lens(chunk)).collect());
        let ranks = all.rank_context_lens(chunk, cp).map(|r| r.collect::<Vec<_>>());
        f.is("local_context_lens_allranks", ranks.collect::<Vec<_>>());
    } else {
        f.is("padded_local_token_to_seq", Value::Null);
        f.is("local_context_lens_allranks", Value::Null);
    }
    f.done()
}

fn decode(
    builder: &str,
    theirs: Option<Fields<'_>>,
    call: Option<Fields<'_>>,
    ours: &MlaStep,
    common: &CommonAttentionMetadata,
    config: &MlaConfig,
    i: &Value,
) -> Outcome {
    let decodes = ours.split.decodes;
    let Some(mut f) = theirs else {
        return if decodes > 0 || call.is_some() {
            Outcome::Differs("decodes".into())
        } else {
            Outcome::Same
        };
    };
    let cp = config.workspace.context_parallel;
    let whole = &seq_lens(common)[..decodes];
    let keys: Vec<i32> = decode_key_lens(whole, cp).collect();
    if cp.size > 1 && ints(&i["common"]["dcp_local_seq_lens"])[..decodes] != keys[..] {
        f.add(Outcome::Differs("local lengths are not the batch's".into()));
    }
    f.is("block_table", table_rows(common, 0..decodes));
    f.is("seq_lens", keys.clone());
    f.is("dcp_tot_seq_lens", if cp.size > 1 { json!(whole) } else { Value::Null });
    let q = &common.inputs.query_start_loc.host()[..=decodes];
    match builder {
        "FLASHINFER_MLA" => {
            f.is("query_start_loc", q.to_vec());
            // The kernel's grid is made for the longest decode there can be, so that graphs fit.
            f.is("max_query_len", config.threshold);
            // Rows of a drafter without causality, which these batches aren't.
            for name in ["flattened_block_table", "flattened_seq_lens", "flattened_row_req"] {
                f.constant(name, Value::Null);
            }
            f.constant("query_len", 0);
        }
        "FLASH_ATTN_MLA" => {
            let splits = max_num_splits(ours.split.decode_tokens, max_graph_tokens(i), false);
            f.is("query_start_loc", q.to_vec());
            f.is("max_query_len", ours.max_decode_query_len);
            f.is("max_seq_len", ours.max_key_len);
            f.is("max_num_splits", splits);
            f.is("scheduler_metadata", json!({"len": schedule_len(decodes)}));
            let heads = LatentHeads {
                num_heads: num(&i["num_heads"]),
                qk_rope_head_dim: ROPE,
                kv_lora_rank: LATENT,
                dtype: DType::BF16,
                page_size: num(&i["common"]["block_size"]),
            };
            let ours = ours.decode_schedule(&heads, cp, splits);
            f.add(match call {
                Some(theirs) => schedule(theirs, &ours, &keys, q),
                None => Outcome::Differs(format!("scheduler call {ours:?}, expected none")),
            });
        }
        _ => {}
    }
    f.done()
}
