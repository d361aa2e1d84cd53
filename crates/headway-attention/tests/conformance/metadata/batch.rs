//! A case's batch as a builder gets it.

use crate::read::{flag, flat, ints, num, text};
use headway_attention::{
    AttentionError, Causal, CommonAttentionMetadata, ContextParallel, Result, StepInputs,
};
use headway_tensor::{DType, Dual, View};
use serde_json::Value;

/// The common metadata of a case.
pub fn common(i: &Value) -> Result<CommonAttentionMetadata> {
    let c = &i["common"];
    let lens = ints(&c["seq_lens"]);
    let q = ints(&c["query_start_loc"]);
    let mut inputs = StepInputs::new(Dual::from_vec(q), View::from_vec(lens.clone()), lens)?;
    if inputs.num_reqs != num(&c["num_reqs"]) {
        return Err(AttentionError::Inputs("another number of requests".into()));
    }
    inputs.num_actual_tokens = num(&c["num_actual_tokens"]);
    inputs.max_query_len = num(&c["max_query_len"]);
    inputs.max_seq_len = num(&c["max_seq_len"]);
    inputs.causal = Causal::All(flag(&c["causal"]));
    inputs.is_prefilling = c["is_prefilling"].as_array().map(|a| a.iter().map(flag).collect());
    let (table, stride) = table(c, &inputs);
    let mut slots: Vec<i64> = flat(&c["slot_mapping"]).into_iter().map(i64::from).collect();
    slots.resize(inputs.num_actual_tokens, -1);
    CommonAttentionMetadata::new(inputs.into(), Dual::from_vec(table), stride, View::from_vec(slots))
}

/// The block table. Where it was left out for its length, the blocks of the new tokens, by their slots.
fn table(c: &Value, inputs: &StepInputs) -> (Vec<i32>, usize) {
    let table = &c["block_table"];
    if table.is_array() {
        return (flat(table), table[0].as_array().map_or(0, Vec::len));
    }
    let (stride, block) = (num(&table["shape"][1]), num(&c["block_size"]));
    let mut blocks = vec![0; inputs.num_reqs * stride];
    let slots = flat(&c["slot_mapping"]);
    for (r, w) in inputs.query_start_loc.host().windows(2).enumerate() {
        let first = inputs.num_computed_tokens()[r];
        for t in w[0]..w[1] {
            let position = (first + t - w[0]) as usize;
            blocks[r * stride + position / block] = slots[t as usize] / block as i32;
        }
    }
    (blocks, stride)
}

/// The ranks of a case.
pub fn ranks(i: &Value) -> ContextParallel {
    ContextParallel {
        size: num(&i["dcp_world_size"]),
        rank: num(&i["dcp_rank"]),
        interleave: num(&i["cp_interleave"]),
    }
}

/// Most tokens of a full graph, where the case's mode has one.
pub fn max_graph_tokens(i: &Value) -> Option<usize> {
    let config = &i["config"];
    let mode: headway_attention::GraphMode = text(&config["cudagraph_mode"]).parse().ok()?;
    mode.has_full().then(|| num(&config["max_cudagraph_capture_size"]))
}

/// Rows of the block table.
pub fn table_rows(common: &CommonAttentionMetadata, requests: std::ops::Range<usize>) -> Vec<Vec<i32>> {
    requests.map(|r| common.blocks_of(r).to_vec()).collect()
}

/// Lengths on the host.
pub fn seq_lens(common: &CommonAttentionMetadata) -> &[i32] {
    common.inputs.seq_lens.host().unwrap_or(&[])
}

/// What the tables call the type of their models.
pub fn dtype_name(dtype: DType) -> Value {
    serde_json::to_value(dtype).unwrap_or(Value::Null)
}
