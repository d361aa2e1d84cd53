//! The table of decode context parallelism: local lengths, and the merges of partial answers.

use crate::{
    Outcome,
    read::{Table, all, close, floats, ints, num, opt, same, text},
};
use headway_attention::{
    ContextParallel,
    step::context_parallel::{
        LogBase, combined_lse, correct_rank_output, local_seq_lens, mask_empty_shards, merge_rows,
    },
};
use serde_json::Value;

pub fn dcp(_: &str, i: &Value, e: &Value, _: &Table) -> Outcome {
    match text(&i["op"]) {
        "local_seq_lens" => lengths(i, e),
        "lse_combine" => combine(i, e),
        "merge_attn_states" => merge(i, e),
        "mask_empty_shards" => {
            let heads = i["lse"][0].as_array().map_or(0, Vec::len);
            let mut lse = floats(&i["lse"]);
            mask_empty_shards(&mut lse, heads, &ints(&i["local_seq_lens"]), &ints(&i["query_start_loc"]));
            close("lse", &lse, &floats(&e["lse"]))
        }
        other => Outcome::NotUnderstood(other.into()),
    }
}

fn lengths(i: &Value, e: &Value) -> Outcome {
    let lens = ints(&i["seq_lens"]);
    let cp = |rank| ContextParallel { size: num(&i["dcp_size"]), rank, interleave: num(&i["interleave"]) };
    let Some(rank) = opt(&i["dcp_rank"]) else {
        let by_rank: Vec<Vec<i32>> = (0..num(&i["dcp_size"])).map(|r| local_seq_lens(&lens, cp(r))).collect();
        let ours: Vec<Vec<i32>> = (0..lens.len()).map(|q| by_rank.iter().map(|r| r[q]).collect()).collect();
        let theirs: Vec<Vec<i32>> =
            e["local_seq_lens"].as_array().map_or(vec![], |a| a.iter().map(ints).collect());
        return same("lengths", ours, theirs);
    };
    let ours = local_seq_lens(&lens, cp(rank));
    let mut padded = ours.clone();
    padded.extend([0, 0]);
    let buffer = &e["runner_buffer_padded_by_2"];
    all([
        same("lengths", ours, ints(&e["local_seq_lens"])),
        if buffer.is_null() { Outcome::Same } else { same("buffer", padded, ints(buffer)) },
    ])
}

fn combine(i: &Value, e: &Value) -> Outcome {
    let base = match text(&i["lse_base"]) {
        "e" => LogBase::E,
        "2" => LogBase::Two,
        other => return Outcome::NotUnderstood(other.into()),
    };
    let outs: Vec<Vec<f32>> =
        i["partial_outputs"].as_array().map_or(vec![], |a| a.iter().map(floats).collect());
    let lses: Vec<Vec<f32>> = i["partial_lses"].as_array().map_or(vec![], |a| a.iter().map(floats).collect());
    let rows = lses.first().map_or(0, Vec::len);
    let width = outs.first().map_or(0, Vec::len) / rows.max(1);
    let lse: Vec<f32> = (0..rows).map(|r| combined_lse(lses.iter().map(move |l| l[r]), base)).collect();
    let mut total = vec![0.0; rows * width];
    let mut outcomes = vec![close("lse", &lse, &floats(&e["lse"]))];
    for (rank, (out, partial)) in outs.iter().zip(&lses).enumerate() {
        let mut share = out.clone();
        correct_rank_output(&mut share, width, partial, &lse, base);
        let theirs = &e["per_rank_corrected"][rank];
        outcomes.push(close(&format!("share of rank {rank}"), &share, &floats(&theirs["out"])));
        outcomes.push(close("its lse", &lse, &floats(&theirs["lse"])));
        total.iter_mut().zip(&share).for_each(|(t, s)| *t += s);
    }
    outcomes.push(close("combined", &total, &floats(&e["combined"])));
    all(outcomes)
}

fn merge(i: &Value, e: &Value) -> Outcome {
    let [prefix, suffix] = ["prefix_output", "suffix_output"].map(|k| floats(&i[k]));
    let [prefix_lse, suffix_lse] = ["prefix_lse", "suffix_lse"].map(|k| floats(&i[k]));
    let tokens = i["prefix_output"].as_array().map_or(0, Vec::len);
    let heads = i["prefix_lse"].as_array().map_or(0, Vec::len);
    let width = prefix.len() / (tokens * heads).max(1);
    let with_context = opt(&i["prefill_tokens_with_context"]).unwrap_or(tokens);
    let (mut out, mut lse) = (vec![0.0; prefix.len()], vec![0.0; tokens * heads]);
    for (t, h) in (0..tokens).flat_map(|t| (0..heads).map(move |h| (t, h))) {
        let (row, at) = ((t * heads + h) * width..(t * heads + h + 1) * width, h * tokens + t);
        if t < with_context {
            let (p, s) = (&prefix[row.clone()], &suffix[row.clone()]);
            lse[at] = merge_rows(p, prefix_lse[at], s, suffix_lse[at], &mut out[row]);
        } else {
            out[row.clone()].copy_from_slice(&suffix[row]);
            lse[at] = suffix_lse[at];
        }
    }
    all([
        close("output", &out, &floats(&e["output"])),
        if e["output_lse"].is_null() { Outcome::Same } else { close("lse", &lse, &floats(&e["output_lse"])) },
    ])
}
