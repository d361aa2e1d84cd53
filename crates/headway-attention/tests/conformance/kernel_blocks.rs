//! The table of kernel blocks: their sizes, block tables in kernel blocks, slot mappings.

use crate::{
    Outcome,
    catalog::{capability, catalog},
    differences::Why,
    read::{
        Table, all, block_sizes, flag, flat, ints, num, nums, opt, same, same_failure, spec, starts, text,
    },
};
use headway_attention::{
    ContextParallel, Result, RuleBook,
    group::{
        kv::{
            block_table::{
                BlockRows, block_table_width, expand_with_stride, gather_block_tables, slot_mapping,
            },
            page::RequestLimits,
        },
        plan::{
            attention_groups::AttentionGroupSize, kernel_block::group_block_size, select_kernel_block_size,
        },
    },
};
use serde_json::Value;

pub fn kernel_blocks(_: &str, i: &Value, e: &Value, _: &Table) -> Outcome {
    match text(&i["op"]) {
        "select_common_block_size" => select(i, e),
        "select_common_block_size_real" => select_real(i, e),
        "prepare_kernel_block_sizes" => prepare(i, e),
        "attention_group_builders" => builders(i, e),
        "block_table_width" => {
            let w = block_table_width(
                num(&i["max_num_blocks"]),
                num(&i["block_size"]),
                opt(&i["token_alignment"]),
            );
            all([same_failure(&w, &e["error"]), same("width", w.ok(), opt(&e["width"]))])
        }
        "map_to_kernel_block_table" => map(i, e),
        "slot_mapping" => slots(i, e),
        "gather_block_tables" => gather(i, e),
        other => Outcome::NotUnderstood(other.into()),
    }
}

fn rules(name: &str, sizes: &Value) -> RuleBook {
    RuleBook { name: name.to_owned().into(), kernel_block_sizes: block_sizes(sizes), ..RuleBook::default() }
}

/// A size or an error with the reference's text.
pub fn size_or_error(ours: &Result<usize>, size: &Value, e: &Value) -> Outcome {
    match ours {
        Ok(n) => all([same("block size", Some(*n), opt(size)), same_failure(ours, e)]),
        Err(x) => same("error", x.to_string().as_str(), text(&e["message"])),
    }
}

fn select(i: &Value, e: &Value) -> Outcome {
    let backends: Vec<RuleBook> = i["backends"]
        .as_array()
        .map_or(vec![], |a| a.iter().map(|b| rules(text(&b["name"]), &b["kernel_block_sizes"])).collect());
    let ours = select_kernel_block_size(num(&i["manager_block_size"]), &backends.iter().collect::<Vec<_>>());
    if ours.is_ok() && !e["error"].is_null() && backends.iter().any(|b| b.kernel_block_sizes.is_empty()) {
        return Outcome::Deliberate(Why::AnyBlockSize);
    }
    size_or_error(&ours, &e["block_size"], &e["error"])
}

/// Backends by name, with the rule books that the catalogue has for the device.
fn select_real(i: &Value, e: &Value) -> Outcome {
    let on = capability(&i["device_capability"]);
    let names = i["backends"].as_array().map_or(&[][..], Vec::as_slice);
    let books: Result<Vec<&RuleBook>> = names.iter().map(|n| catalog().rules(text(n), on)).collect();
    let Ok(books) = books else { return Outcome::NotUnderstood(i["backends"].to_string()) };
    let ours = select_kernel_block_size(num(&i["manager_block_size"]), &books);
    size_or_error(&ours, &e["block_size"], &e["error"])
}

fn prepare(i: &Value, e: &Value) -> Outcome {
    let empty = vec![];
    let tensors = i["tensors"].as_array().unwrap_or(&empty);
    let mut sizes = vec![];
    for g in i["groups"].as_array().unwrap_or(&empty) {
        if text(&g["kind"]) == "encoder" {
            continue;
        }
        let names = ["BACKEND_A", "BACKEND_B", "BACKEND_C", "BACKEND_D"];
        let groups = g["attention_groups"].as_array().unwrap_or(&empty);
        let books: Vec<RuleBook> =
            groups.iter().zip(names).map(|(a, n)| rules(n, &a["kernel_block_sizes"])).collect();
        let own = |t: &&Value| t["layers"].as_array().unwrap_or(&empty).contains(&g["layer_names"][0]);
        let between = tensors.iter().filter(own).any(|t| num(&t["block_stride"]) > num(&t["layer_stride"]));
        let books: Vec<&RuleBook> = books.iter().collect();
        match group_block_size(num(&g["block_size"]), text(&g["kind"]) == "mamba", between, &books) {
            Ok(n) => sizes.push(n),
            Err(x) => return same("error", x.to_string().as_str(), text(&e["error"]["message"])),
        }
    }
    all([same("sizes", sizes, nums(&e["kernel_block_sizes"])), same("error", true, e["error"].is_null())])
}

fn builders(i: &Value, e: &Value) -> Outcome {
    let Some(spec) = spec(&i["spec"]) else { return Outcome::NotUnderstood(i["spec"].to_string()) };
    let limits = RequestLimits {
        max_model_len: num(&i["max_model_len"]),
        max_in_flight_tokens: 0,
        max_encoder_tokens: 0,
        dcp_size: num(&i["decode_context_parallel_size"]),
    };
    let spec = match serde_json::from_value(i["mamba_cache_mode"].clone()) {
        Ok(mode) => spec.with_cache_mode(mode),
        Err(_) => return Outcome::NotUnderstood(i["mamba_cache_mode"].to_string()),
    };
    let book = rules("BACKEND_A", &i["backend_kernel_block_sizes"]);
    let ours = AttentionGroupSize::new(&spec, opt(&i["group_kernel_block_size"]), &book, &limits);
    let ours = match ours {
        Ok(s) => s,
        Err(x) => return same("error", x.to_string().as_str(), text(&e["error"]["message"])),
    };
    let n = num(&i["num_metadata_builders"]);
    let table = ours.kernel_table_width().map(|w| vec![n, num(&i["max_num_seqs"]), w]);
    let wide = flag(&i["requires_block_table_width"]).then_some(ours.block_table_width);
    all([
        same("error", true, e["error"].is_null()),
        same("kernel block size", ours.split_into(), opt(&e["kernel_block_size"])),
        same("builder's block size", ours.block_size, num(&e["builder_spec_block_size"])),
        same("width", wide, opt(&e["block_table_width"])),
        same(
            "kernel block table",
            table,
            e["kernel_block_table_shape"].as_array().map(|_| nums(&e["kernel_block_table_shape"])),
        ),
        same("builders", n, num(&e["num_builders"])),
    ])
}

fn map(i: &Value, e: &Value) -> Outcome {
    let factor = num(&i["block_size"]) / num(&i["kernel_block_size"]).max(1);
    let stride = match num(&i["kernel_block_stride"]) {
        0 => factor,
        s => s,
    };
    let blocks = flat(&i["block_table"]);
    let mut out = vec![0; blocks.len() * factor];
    expand_with_stride(&blocks, factor, stride, &mut out);
    same("kernel block table", out, flat(&e["kernel_block_table"]))
}

fn slots(i: &Value, e: &Value) -> Outcome {
    let cp = ContextParallel {
        size: num(&i["cp_world_size"]),
        rank: num(&i["cp_rank"]),
        interleave: num(&i["cp_interleave"]),
    };
    let mut ours = vec![];
    for g in i["groups"].as_array().unwrap_or(&vec![]) {
        let mut out = vec![-1i64; num(&i["num_tokens_padded"])];
        let blocks = flat(&g["block_table"]);
        let stride = g["block_table"][0].as_array().map_or(0, Vec::len);
        let rows = BlockRows { blocks: &blocks, stride, block_size: num(&g["block_size"]) };
        let cp = if flag(&g["dcp_sharded"]) { cp } else { ContextParallel::default() };
        if flag(&g["slot_mapping_enabled"]) {
            let done = slot_mapping(
                rows,
                &ints(&i["request_rows"]),
                &starts(&i["query_lens"]),
                &ints(&i["positions"]),
                cp,
                &mut out,
            );
            if let Err(x) = done {
                return Outcome::Differs(x.to_string());
            }
        }
        ours.extend(out.into_iter().map(|s| s as i32));
    }
    same("slots", ours, flat(&e["slot_mappings"]))
}

fn gather(i: &Value, e: &Value) -> Outcome {
    let mut ours = vec![];
    for g in i["groups"].as_array().unwrap_or(&vec![]) {
        let stride = g["block_table"][0].as_array().map_or(0, Vec::len);
        let mut out = vec![-7; stride * num(&i["num_rows_padded"])];
        let blocks = flat(&g["block_table"]);
        gather_block_tables(
            BlockRows { blocks: &blocks, stride, block_size: num(&g["block_size"]) },
            &ints(&i["request_rows"]),
            &nums(&g["num_blocks"]),
            &nums(&i["num_computed_tokens"]),
            num(&g["sliding_window_reach"]),
            &mut out,
        );
        ours.extend(out);
    }
    same("tables", ours, flat(&e["block_tables"]))
}
