//! `generate -v --json`: the start-up report, field by field; options and their environment twins.

use super::support::{finish, generate, headway, llama};
use serde_json::{Value, json};
use std::collections::BTreeSet;

fn report(args: &[&str], env: &[(&str, &str)]) -> Value {
    let mut c = headway();
    c.arg("generate").arg("--model").arg(llama());
    c.args(["-v", "--json", "--prompt-ids", "1", "--max-tokens", "1"]).args(args);
    c.env_remove("HEADWAY_THREADS").envs(env.iter().copied());
    let r = finish(&mut c).fine();
    let mut all = r.objects();
    assert_eq!(all.len(), 2, "the report, then the answer");
    assert_eq!(all[0].as_object().unwrap().keys().collect::<Vec<_>>(), ["startup"]);
    assert!(all[1]["token_ids"].is_array());
    all[0]["startup"].take()
}

fn has(o: &Value, fields: &[&str]) {
    let keys: BTreeSet<&str> = o.as_object().unwrap().keys().map(String::as_str).collect();
    let missing: Vec<_> = fields.iter().filter(|f| !keys.contains(*f)).collect();
    assert!(missing.is_empty(), "{missing:?} missing in {keys:?}");
}

#[test]
fn the_report_has_every_field() {
    let r = report(&[], &[]);
    has(&r, &["groups", "kv_cache_layout", "graph_mode", "options", "memory", "suggestions", "unknowns"]);
    assert!(r["suggestions"].is_array() && r["unknowns"].is_array() && r["kv_cache_layout"].is_string());
    let groups = r["groups"].as_array().unwrap();
    assert_eq!(groups.len(), 1);
    let g = &groups[0];
    let fields = [
        "layers",
        "kind",
        "kv_cache_group",
        "backend",
        "refused",
        "kv_cache_spec",
        "block_size",
        "kernel_block_size",
        "page_size_bytes",
        "graph_support",
        "reorder_batch_threshold",
        "workspace_bytes",
    ];
    assert_eq!(
        g.as_object().unwrap().keys().map(String::as_str).collect::<BTreeSet<_>>(),
        BTreeSet::from(fields)
    );
    assert_eq!((&g["layers"], &g["backend"]), (&json!([0, 1, 2]), &json!("CPU_ATTN")));
    // 16 tokens, 2 heads of 64, keys and values in bfloat16.
    assert_eq!((&g["block_size"], &g["page_size_bytes"]), (&json!(16), &json!(16 * 2 * 64 * 2 * 2)));
    has(&r["graph_mode"], &["requested", "in_force", "lowerings"]);
    assert_eq!(r["graph_mode"]["in_force"], "NONE");
    assert_eq!(r["memory"]["kv_bytes_per_token"], json!(3 * 2 * 64 * 2 * 2));
}

/// Options with a value that differs from the default where one can.
const OPTIONS: [(&str, &str, &str); 22] = [
    ("device", "cpu", "cpu"),
    ("dtype", "f32", "float32"),
    ("kv_cache_dtype", "float16", "float16"),
    ("block_size", "32", "32"),
    ("kv_layout", "NHD", "LBNHC"),
    ("attention_backend", "cpu_attn", ""),
    ("backend_per_kind", "full=CPU_ATTN", "full=CPU_ATTN"),
    ("graph_mode", "none", "NONE"),
    ("batch_invariant", "true", "true"),
    ("micro_batches", "2", "2"),
    ("micro_batch_decode_tokens", "3", "3"),
    ("micro_batch_prefill_tokens", "16", "16"),
    ("speculative_tokens", "2", "2"),
    ("prompt_lookup_min", "2", "2"),
    ("prompt_lookup_max", "5", "5"),
    ("max_model_len", "64", "64"),
    ("max_num_seqs", "4", "4"),
    ("max_num_batched_tokens", "32", "32"),
    ("kv_cache_memory", "1048576", ""),
    ("threads", "2", "2"),
    ("tp", "1", "1"),
    ("dcp", "1", "1"),
];

#[test]
fn every_option_is_reported_from_the_command_line_and_from_the_environment() {
    let arg = |name: &str, value: &str| format!("--{}={value}", name.replace('_', "-"));
    let supported = OPTIONS.iter().filter(|(name, ..)| *name != "kv_layout");
    let args: Vec<String> = supported.clone().map(|(n, v, _)| arg(n, v)).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let names: Vec<String> = OPTIONS.iter().map(|(n, ..)| format!("HEADWAY_{}", n.to_uppercase())).collect();
    let env: Vec<(&str, &str)> = names
        .iter()
        .zip(OPTIONS)
        .filter(|(n, _)| *n != "HEADWAY_KV_LAYOUT")
        .map(|(n, (_, v, _))| (n.as_str(), v))
        .collect();
    for r in [report(&args, &[]), report(&[], &env)] {
        for (name, _, in_force) in supported.clone() {
            let o = &r["options"][name];
            has(o, &["requested", "in_force", "because"]);
            assert!(o["requested"].is_string(), "{name}: {o}");
            assert!(in_force.is_empty() || o["in_force"] == json!(in_force), "{name}: {o}");
        }
    }
    let quiet = report(&[], &[]);
    for (name, ..) in OPTIONS {
        assert!(quiet["options"][name]["in_force"].is_string(), "{name}");
    }
    assert_eq!(quiet["options"]["block_size"]["requested"], Value::Null);
    assert!(quiet["options"]["threads"]["because"].is_string());
}

#[test]
fn the_command_line_wins_and_nothing_is_unset() {
    let r = report(&["--block-size", "64"], &[("HEADWAY_BLOCK_SIZE", "32"), ("HEADWAY_DTYPE", "")]);
    assert_eq!(r["options"]["block_size"]["in_force"], "64");
    assert_eq!(r["options"]["dtype"]["requested"], Value::Null);
    let r = report(&[], &[("HEADWAY_BATCH_INVARIANT", "1"), ("HEADWAY_NO_PREFIX_CACHING", "yes")]);
    assert_eq!(r["options"]["batch_invariant"]["in_force"], "true");
    assert_eq!(r["options"]["prefix_caching"]["in_force"], "false");
}

#[test]
fn people_get_it_on_standard_error() {
    let r = generate(&llama(), &["-v", "--prompt-ids", "1,2", "--max-tokens", "2", "--logprobs", "1"]).fine();
    for word in ["CPU_ATTN", "KV cache", "layers 0-2", "prefill 2 tokens", "logprobs of token 0"] {
        assert!(r.err.contains(word) && !r.out.contains(word), "{word}: {}", r.err);
    }
}

#[test]
fn nothing_is_reported_of_a_request_that_is_refused() {
    generate(&llama(), &["-v", "--json", "--prompt-ids", "1,9999"]).refused(&["9999"]);
}

#[test]
fn what_was_asked_is_said_to_be_asked() {
    let asked = ["--kv-cache-dtype", "fp8", "--kv-layout", "HND", "--attention-backend", "cpu_attn"];
    let o = report(&asked, &[])["options"].take();
    assert_eq!(
        (&o["kv_cache_dtype"]["in_force"], &o["kv_cache_dtype"]["because"]),
        (&json!("fp8_e4m3"), &json!("fp8 is e4m3"))
    );
    assert_eq!(o["kv_layout"]["because"], json!("the same layout by its axes"));
    assert_eq!(
        (&o["attention_backend"]["in_force"], &o["attention_backend"]["because"]),
        (&json!("CPU_ATTN"), &Value::Null)
    );
    for option in ["batch_invariant", "prefix_caching"] {
        assert_eq!((&o[option]["requested"], &o[option]["because"]), (&Value::Null, &json!("the default")));
    }
}
