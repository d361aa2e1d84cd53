//! State-space builders, and their helpers alone.

use super::{
    batch::{common, seq_lens},
    fields::{Fields, omitted, rows},
};
use crate::{
    Outcome,
    read::{flat, ints, num, starts},
};
use headway_attention::{
    Result,
    group::{
        arith::{
            conv_blocks::{CONV_BLOCK, ConvBlocks, NO_REQUEST},
            mamba_states::state_blocks,
            mamba2::{Mamba2Config, Mamba2Step},
            scan_chunks::ScanChunks,
        },
        kv::{block_table::BlockRows, spec::MambaCacheMode},
    },
};
use serde_json::{Value, json};

fn mode(i: &Value) -> Option<MambaCacheMode> {
    serde_json::from_value(i["mamba_cache_mode"].clone()).ok()
}

pub fn mamba2(i: &Value, e: &Value) -> Result<Outcome> {
    let (Some(mut f), Some(cache_mode)) = (Fields::of("", e), mode(i)) else {
        return Ok(Outcome::NotUnderstood("the case".into()));
    };
    let common = common(i)?;
    let drafts = num(&i["num_speculative_blocks"]);
    let config = Mamba2Config {
        chunk_size: num(&i["chunk_size"]),
        block_size: num(&i["common"]["block_size"]),
        cache_mode,
        num_speculative_tokens: drafts,
    };
    let mut ours = Mamba2Step::default();
    ours.fill(&common, &config)?;
    ours.states(&common, seq_lens(&common), &config)?;
    let some = ours.split.prefills > 0;
    let list = |v: &[i32], there: bool| if there { json!(v) } else { Value::Null };

    f.is("num_prefills", ours.split.prefills);
    f.is("num_prefill_tokens", ours.split.prefill_tokens);
    f.is("num_decodes", ours.split.decodes);
    f.is("num_decode_tokens", ours.split.decode_tokens);
    f.is("num_reqs", common.inputs.num_reqs);
    f.is("seq_lens", seq_lens(&common).to_vec());
    f.is("has_initial_states_p", if some { json!(ours.has_initial_state) } else { Value::Null });
    f.is("prep_initial_states", ours.any_initial_state());
    f.is("query_start_loc_p", list(&ours.prefill_start_loc, some));
    f.is("state_indices_tensor_p", ours.prefill_states.clone());
    f.is("state_indices_tensor_d", rows(&ours.decode_states, 1 + drafts));
    f.is("query_start_loc_d", list(&ours.decode_start_loc, !ours.decode_start_loc.is_empty()));
    // Only decodes read it: a batch without any passes it through as it came.
    let accepted = ints(&i["num_accepted_tokens"]);
    let of_decodes = if ours.split.decodes == 0 { accepted.len() } else { ours.split.decodes };
    f.is("num_accepted_tokens", list(accepted.get(..of_decodes).unwrap_or(&[]), drafts > 0));
    f.is("chunk_size", config.chunk_size);
    f.is("cu_chunk_seqlen_p", list(&ours.chunks.cu_chunk_seqlen, some));
    f.is("seq_idx_p", list(&ours.chunks.seq_idx, some));
    f.is("last_chunk_indices_p", list(&ours.chunks.last_chunk_indices, some));
    // No checkpoint is asked for in these cases, and none made.
    f.constant("checkpoint_chunk_idx", Value::Null);
    f.constant("checkpoint_meta", Value::Null);
    let conv = json!({CONV_BLOCK.to_string(): {
        "nums": ours.conv.per_request, "tot": ours.conv.len(), "mlist": ours.conv.request,
        "mlist_len": ours.conv.len(), "offsetlist": ours.conv.block,
    }});
    f.is("nums_dict", if some { conv } else { Value::Null });
    let table = omitted(&[ours.conv.table_len()], "int32");
    f.is("batch_ptr", if some { table.clone() } else { Value::Null });
    f.is("token_chunk_offset_ptr", if some { table } else { Value::Null });
    // Buffers of a replay mode that none of the cases turns on.
    for name in
        ["write_pos_d", "is_flush_d", "bc_pre_scratch", "replayssm_scratch", "replayssm_state_indices_d"]
    {
        f.constant(name, Value::Null);
    }
    Ok(f.done())
}

pub fn chunks(i: &Value, e: &Value) -> Result<Outcome> {
    let Some(mut f) = Fields::of("", e) else { return Ok(Outcome::NotUnderstood("the case".into())) };
    let offsets = i["checkpoint_offsets"].is_array().then(|| ints(&i["checkpoint_offsets"]));
    let mut ours = ScanChunks::default();
    ours.fill(
        ints(&i["num_computed_tokens"]),
        &starts(&i["query_lens"]),
        num(&i["chunk_size"]),
        offsets.as_deref(),
    )?;
    f.is("cu_chunk_seqlen", ours.cu_chunk_seqlen);
    f.is("seq_idx", ours.seq_idx);
    f.is("last_chunk_indices", ours.last_chunk_indices);
    f.is("checkpoint_chunk_indices", ours.checkpoint_chunk_indices);
    Ok(f.done())
}

pub fn block_table(i: &Value, e: &Value) -> Result<Outcome> {
    let (Some(mut f), Some(mode)) = (Fields::of("", e), mode(i)) else {
        return Ok(Outcome::NotUnderstood("the case".into()));
    };
    let blocks = flat(&i["block_table"]);
    let stride = i["block_table"][0].as_array().map_or(0, Vec::len);
    let table = BlockRows { blocks: &blocks, stride, block_size: num(&i["block_size"]) };
    let mut ours = vec![];
    let width =
        state_blocks(table, &ints(&i["seq_lens"]), mode, num(&i["num_speculative_blocks"]), &mut ours)?;
    f.is("block_table", rows(&ours, width));
    Ok(f.done())
}

pub fn conv(i: &Value, e: &Value) -> Result<Outcome> {
    let Some(mut f) = Fields::of("", e) else { return Ok(Outcome::NotUnderstood("the case".into())) };
    let mut ours = ConvBlocks::default();
    ours.fill(&starts(&i["query_lens"]), CONV_BLOCK);
    let mut tables = [vec![0; ours.table_len()], vec![0; ours.table_len()]];
    let [request, block] = &mut tables;
    ours.write(request, block)?;
    let n = ours.len();
    f.is("block_m", CONV_BLOCK);
    f.is("nums", ours.per_request.clone());
    f.is("tot", n);
    f.is("mlist_len", n);
    f.is("batch_ptr", tables[0][..n].to_vec());
    f.is("token_chunk_offset_ptr", tables[1][..n].to_vec());
    f.is("buffer_len", tables[0].len());
    f.is("rest_is_pad", tables.iter().all(|t| t[n..].iter().all(|&x| x == NO_REQUEST)));
    Ok(f.done())
}
