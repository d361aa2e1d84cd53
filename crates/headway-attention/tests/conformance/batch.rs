//! The table of batch splits: decodes and prefills, reordering, micro-batches, chunks.

use crate::{
    Outcome,
    read::{Table, all, flag, flat, ints, num, nums, opt, same, same_failure, starts, text},
};
use headway_attention::{
    CommonAttentionMetadata, StepInputs,
    step::{
        batch::{self, SplitOptions},
        local_attention::virtual_batches,
        micro_batch::{self, MicroBatchSlice, SliceBuffers},
    },
};
use headway_tensor::{Device, DeviceMem, Dual, Exec, View};
use serde_json::Value;
use std::{ops::Range, sync::Arc};

pub struct Host;

impl Exec for Host {
    fn device(&self) -> Device {
        Device { kind: "cpu", index: 0 }
    }
    fn alloc(&self, _: usize) -> headway_tensor::Result<Option<Arc<dyn DeviceMem>>> {
        Ok(None)
    }
    fn upload(&self, _: &Arc<dyn DeviceMem>, _: usize, _: &[u8]) {}
}

pub fn split(_: &str, i: &Value, e: &Value, _: &Table) -> Outcome {
    match text(&i["op"]) {
        "split_decodes_and_prefills" => decodes_and_prefills(i, e),
        "split_decodes_prefills_and_extends" => three_way(i, e),
        "split_prefill_chunks" => {
            let chunks = batch::split_prefill_chunks(
                &ints(&i["seq_lens"]),
                num(&i["workspace_size"]),
                num(&i["request_offset"]),
            );
            all([
                same_failure(&chunks, &e["error"]),
                same("chunks", chunks.unwrap_or_default(), ranges(&e["chunks"])),
            ])
        }
        "reorder_batch" => reorder(i, e),
        "uniform_decode_token_count" => uniform(i, e),
        "create_ubatch_slices" => slices(i, e),
        "create_ubatch_slices_v2" => slices_v2(i, e),
        "last_ubatch_empty" => same(
            "empty",
            micro_batch::last_is_empty(
                num(&i["num_tokens"]),
                num(&i["num_tokens_padded"]),
                num(&i["num_ubatches"]),
            ),
            flag(&e["empty"]),
        ),
        "ubatch_threshold" => {
            let [d, p] = ["decode_token_threshold", "prefill_token_threshold"].map(|k| num(&i[k]));
            let split = flag(&i["use_ubatching"])
                && micro_batch::exceeds_threshold(flag(&i["uniform_decode"]), num(&i["num_tokens"]), d, p);
            same("split", split, flag(&e["split"]))
        }
        "slice_query_start_locs" => {
            let r = nums(&i["request_slice"]);
            let q = micro_batch::slice_query_start_loc(&ints(&i["query_start_loc"]), r[0]..r[1]);
            same("query_start_loc", q, ints(&e["query_start_loc"]))
        }
        "split_attn_metadata" => metadata(i, e),
        "local_attention_virtual_batches" => local(i, e),
        other => Outcome::NotUnderstood(other.into()),
    }
}

fn range(v: &Value) -> Range<usize> {
    num(&v[0])..num(&v[1])
}

fn ranges(v: &Value) -> Vec<Range<usize>> {
    v.as_array().map_or(vec![], |a| a.iter().map(range).collect())
}

fn bools(v: &Value) -> Option<Vec<bool>> {
    v.as_array().map(|a| a.iter().map(flag).collect())
}

fn decodes_and_prefills(i: &Value, e: &Value) -> Outcome {
    let options = SplitOptions {
        threshold: num(&i["decode_threshold"]),
        require_uniform: flag(&i["require_uniform"]),
        short_extends_as_decodes: flag(&i["treat_short_extends_as_decodes"]),
    };
    let q = starts(&i["query_lens"]);
    let prefilling = bools(&i["is_prefilling"]);
    let s = batch::split_decodes_and_prefills(
        &q,
        num(&i["num_tokens"]),
        num(&i["max_query_len"]),
        prefilling.as_deref(),
        &options,
    );
    let Ok(s) = &s else { return same_failure(&s, &e["error"]) };
    let theirs =
        ["num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens"].map(|k| num(&e[k]));
    same("split", [s.decodes, s.prefills, s.decode_tokens, s.prefill_tokens], theirs)
}

fn three_way(i: &Value, e: &Value) -> Outcome {
    let s = batch::split_decodes_prefills_and_extends(
        &starts(&i["query_lens"]),
        &ints(&i["seq_lens"]),
        num(&i["num_tokens"]),
        num(&i["max_query_len"]),
        num(&i["decode_threshold"]),
    );
    let keys = [
        "num_decodes",
        "num_extends",
        "num_prefills",
        "num_decode_tokens",
        "num_extend_tokens",
        "num_prefill_tokens",
    ];
    same(
        "split",
        [s.decodes, s.extends, s.prefills, s.decode_tokens, s.extend_tokens, s.prefill_tokens],
        keys.map(|k| num(&e[k])),
    )
}

fn reorder(i: &Value, e: &Value) -> Outcome {
    let [s, c, p] = ["num_scheduled_tokens", "num_computed_tokens", "num_prompt_tokens"].map(|k| nums(&i[k]));
    let swaps = batch::reorder_batch(&s, &c, &p, num(&i["decode_threshold"]));
    let mut order: Vec<usize> = (0..s.len()).collect();
    for &(a, b) in &swaps {
        order.swap(a, b);
    }
    let pair = |v: &Value| (num(&v[0]), num(&v[1]));
    let theirs: Vec<_> = e["swaps"].as_array().map_or(vec![], |a| a.iter().map(pair).collect());
    all([
        same("order", order, nums(&e["order"])),
        same("modified", !swaps.is_empty(), flag(&e["modified"])),
        same("swaps", swaps, theirs),
    ])
}

fn uniform(i: &Value, e: &Value) -> Outcome {
    let [reqs, tokens, len] = ["num_reqs", "num_tokens", "max_query_len"].map(|k| num(&i[k]));
    let count = batch::uniform_decode_token_count(reqs, tokens, len);
    all([
        same("is uniform", count.is_some(), flag(&e["is_uniform_query_len"])),
        same("count", count.filter(|_| flag(&i["decode_graph_eligible"])), opt(&e["uniform_token_count"])),
    ])
}

fn slice(v: &Value) -> MicroBatchSlice {
    MicroBatchSlice { requests: range(&v["requests"]), tokens: range(&v["tokens"]) }
}

fn slice_list(v: &Value) -> Option<Vec<MicroBatchSlice>> {
    v.as_array().map(|a| a.iter().map(slice).collect())
}

fn slices(i: &Value, e: &Value) -> Outcome {
    if !flag(&i["should_ubatch"]) {
        return same("slices", None, slice_list(&e["slices"]));
    }
    let (padded, n) = (num(&i["num_tokens_padded"]), num(&i["num_ubatches"]));
    let points = match &i["split_point"] {
        Value::Null => micro_batch::equal_points(padded, n),
        Value::Array(_) => nums(&i["split_point"]),
        one => (1..n).map(|k| k * num(one)).collect(),
    };
    let ours = micro_batch::slices(&nums(&i["num_scheduled_tokens"]), &points, n);
    let Ok(ours) = ours else { return same_failure(&ours, &e["error"]) };
    let wide = micro_batch::pad_last(ours.clone(), padded, num(&i["num_reqs_padded"]));
    all([
        same("slices", Some(ours), slice_list(&e["slices"])),
        same("padded slices", Some(wide), slice_list(&e["padded_slices"])),
    ])
}

fn slices_v2(i: &Value, e: &Value) -> Outcome {
    let (padded, n) = (num(&i["num_tokens_padded"]), num(&i["num_ubatches"]));
    let ours = micro_batch::slices_of_padded(&nums(&i["query_lens"]), padded, num(&i["num_reqs_padded"]), n);
    same("slices", Some(ours), slice_list(&e["slices"]))
}

/// The inputs of a batch in the tables' form.
pub fn inputs(query_lens: &Value, seq_lens: &Value) -> Option<StepInputs> {
    let lens = ints(seq_lens);
    StepInputs::new(Dual::from_vec(starts(query_lens)), View::from_vec(lens.clone()), lens).ok()
}

fn slots(v: &Value) -> View<i64> {
    View::from_vec(flat(v).into_iter().map(i64::from).collect())
}

fn metadata(i: &Value, e: &Value) -> Outcome {
    let Some(mut inputs) = inputs(&i["query_lens"], &i["seq_lens"]) else {
        return Outcome::NotUnderstood("the batch".into());
    };
    inputs.num_actual_tokens = num(&i["num_tokens"]);
    inputs.max_query_len = num(&i["max_query_len"]);
    inputs.max_seq_len = num(&i["max_seq_len"]);
    inputs.positions = Some(View::from_vec(flat(&i["positions"])));
    let stride = i["block_table"][0].as_array().map_or(0, Vec::len);
    let table = Dual::from_vec(flat(&i["block_table"]));
    let inputs = Arc::new(inputs);
    let common = match CommonAttentionMetadata::new(inputs.clone(), table, stride, slots(&i["slot_mapping"]))
    {
        Ok(c) => c,
        Err(e) => return Outcome::Differs(e.to_string()),
    };
    let mut outcomes = vec![];
    let parts = e["parts"].as_array().cloned().unwrap_or_default();
    for (s, p) in slice_list(&i["slices"]).unwrap_or_default().iter().zip(&parts) {
        let mut buffers = SliceBuffers::new(&Host, 64).unwrap();
        let part = micro_batch::slice_inputs(&inputs, s, &mut buffers, &Host)
            .and_then(|inner| micro_batch::slice_common(&common, s, Arc::new(inner)));
        let part = match part {
            Ok(p) => p,
            Err(e) => return Outcome::Differs(e.to_string()),
        };
        let n = &part.inputs;
        outcomes.extend([
            same("num_reqs", n.num_reqs, num(&p["num_reqs"])),
            same("num_actual_tokens", n.num_actual_tokens, num(&p["num_actual_tokens"])),
            same("max_query_len", n.max_query_len, num(&p["max_query_len"])),
            same("max_seq_len", n.max_seq_len, num(&p["max_seq_len"])),
            same("query_start_loc", n.query_start_loc.host().to_vec(), ints(&p["query_start_loc"])),
            same("seq_lens", n.seq_lens.host().map(<[i32]>::to_vec), Some(ints(&p["seq_lens"]))),
            same("upper bound", n.seq_lens_upper_bound.clone(), ints(&p["seq_lens_cpu_upper_bound"])),
            same("block_table", part.block_table.host().to_vec(), flat(&p["block_table"])),
            same(
                "slots",
                part.slot_mapping.host().map(<[i64]>::to_vec),
                slots(&p["slot_mapping"]).host().map(<[i64]>::to_vec),
            ),
            same(
                "positions",
                n.positions.as_ref().and_then(|v| v.host().map(<[i32]>::to_vec)),
                Some(flat(&p["positions"])),
            ),
        ]);
    }
    outcomes.push(same("parts", outcomes.len() / 10, parts.len()));
    all(outcomes)
}

fn local(i: &Value, e: &Value) -> Outcome {
    let stride = i["block_table"][0].as_array().map_or(0, Vec::len);
    let v = virtual_batches(
        &starts(&i["query_lens"]),
        &ints(&i["seq_lens"]),
        num(&i["attn_chunk_size"]),
        num(&i["block_size"]),
        &flat(&i["block_table"]),
        stride,
    );
    let Ok(v) = v else { return same_failure(&v, &e["error"]) };
    all([
        same("num_reqs", v.seq_lens.len(), num(&e["num_reqs"])),
        same("query_start_loc", v.query_start_loc.clone(), ints(&e["query_start_loc"])),
        same("seq_lens", v.seq_lens.clone(), ints(&e["seq_lens"])),
        same("max_query_len", v.max_query_len(), num(&e["max_query_len"])),
        same("max_seq_len", v.max_seq_len(), num(&e["max_seq_len"])),
        same("block_table", v.block_table.clone(), flat(&e["block_table"])),
        same("tokens", v.query_start_loc.last().copied().unwrap_or(0) as usize, num(&e["num_actual_tokens"])),
    ])
}
