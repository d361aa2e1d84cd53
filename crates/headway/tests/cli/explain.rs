//! `headway explain`: every config on several devices, the schema, exit codes, bad input, and suggestions that keep
//! what they promise.

use super::support::{Copy, Run, finish, headway, llama, run};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

fn configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/configs")
}

fn config(name: &str) -> PathBuf {
    configs().join(format!("{name}.json"))
}

/// `headway explain CONFIG --engine vllm ARGS`.
fn vllm(name: &str, args: &[&str]) -> Run {
    finish(
        headway()
            .env_remove("HEADWAY_THREADS")
            .arg("explain")
            .arg(config(name))
            .args(["--engine", "vllm"])
            .args(args),
    )
}

/// The report of `--json`.
fn report(name: &str, args: &[&str]) -> Value {
    vllm(name, &[args, &["--json"]].concat()).fine().object()
}

/// The report where start-up fails with this exit code.
fn failing(name: &str, args: &[&str], code: i32) -> Value {
    let r = vllm(name, &[args, &["--json"]].concat());
    assert_eq!(r.code, Some(code), "{name} {args:?}: {}", r.err);
    r.object()
}

fn backends(r: &Value) -> BTreeSet<String> {
    let groups = r["groups"].as_array().unwrap();
    groups.iter().filter_map(|g| g["backend"].as_str().map(str::to_owned)).collect()
}

const DEVICES: [&str; 6] = ["t4", "a100", "l40s", "h100", "b200", "sm120"];

#[test]
fn every_config_is_answered_on_every_device() {
    let mut names: Vec<String> = std::fs::read_dir(configs())
        .unwrap()
        .filter_map(|e| e.unwrap().file_name().to_str()?.strip_suffix(".json").map(str::to_owned))
        .collect();
    names.sort();
    assert!(names.len() >= 50, "{names:?}");
    for name in &names {
        for device in DEVICES {
            // Memory for any of them, so that no limit is in the way.
            let r = vllm(name, &["--device", device, "--kv-cache-memory", "200GiB", "--json"]);
            assert!(matches!(r.code, Some(0 | 3)), "{name} on {device}: {:?} {}", r.code, r.err);
            let o = r.object();
            let groups = o["groups"].as_array().unwrap();
            assert!(!groups.is_empty(), "{name} on {device}");
            let none = groups.iter().filter(|g| g["backend"].is_null());
            for g in none.clone() {
                // None is valid: every refused one says why.
                let refused = g["refused"].as_array().unwrap();
                assert!(!refused.is_empty(), "{name} on {device}: {g}");
                assert!(refused.iter().all(|r| !r["reasons"].as_array().unwrap().is_empty()));
            }
            assert_eq!(r.code == Some(3), none.count() > 0, "{name} on {device}: {}", r.err);
            if r.code == Some(0) {
                let m = &o["memory"];
                let grows = m["kv_bytes_per_token"].as_u64().unwrap() > 0;
                let keeps = m["state_bytes_per_request"].as_u64().unwrap() > 0;
                assert!(
                    grows || keeps || groups.iter().all(|g| g["kv_cache_spec"]["kind"] == "encoder_only"),
                    "{name}: {m}"
                );
            }
        }
        let on_cpu = finish(headway().arg("explain").arg(config(name)).arg("--json"));
        assert!(matches!(on_cpu.code, Some(0 | 1 | 3)), "{name}: {}", on_cpu.err);
        // What headway can't run fails as start-up would.
        let warnings = on_cpu.object()["warnings"].to_string();
        assert_eq!(
            on_cpu.code == Some(0),
            !warnings.contains("headway can't run this") && on_cpu.code != Some(3)
        );
    }
}

#[test]
fn every_layer_is_in_a_group() {
    for (name, layers) in
        [("llama-3.1-70b", 80), ("gemma-3-12b", 48), ("jamba-v0.1", 32), ("gemma-3n", 35), ("kimi-k3", 93)]
    {
        let r = report(name, &["--device", "h100", "--kv-cache-memory", "200GiB"]);
        let all: BTreeSet<u64> = r["groups"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|g| g["layers"].as_array().unwrap().iter().map(|l| l.as_u64().unwrap()))
            .collect();
        assert_eq!(all, (0..layers).collect(), "{name}");
    }
}

#[test]
fn latent_attention_on_the_cpu_shows_its_backend_and_scratch() {
    // As published: the file here lacks the blocks' size.
    let dir = tempfile::tempdir().unwrap();
    let published = dir.path().join("config.json");
    let mut json: Value =
        serde_json::from_str(&std::fs::read_to_string(config("deepseek-v3")).unwrap()).unwrap();
    json["quantization_config"]["weight_block_size"] = json!([128, 128]);
    std::fs::write(&published, json.to_string()).unwrap();
    let scratch = |extra: &[&str]| {
        let args = [&["--kv-cache-memory", "200GiB", "--json"], extra].concat();
        let r = finish(headway().arg("explain").arg(&published).args(args)).fine().object();
        let g = &r["groups"][0];
        assert_eq!((&g["backend"], &g["kind"]), (&Value::from("CPU_MLA"), &Value::from("MLA")));
        assert_eq!(g["page_size_bytes"], 16 * 576 * 2, "no padding");
        g["workspace_bytes"].as_u64().unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    std::fs::write(&path, "[backend.CPU_MLA]\nworkspace_tokens = 4096\n").unwrap();
    let (by_rule, asked) = (scratch(&[]), scratch(&["--config", path.to_str().unwrap()]));
    // 128 heads of 192 + 128 float32 a token, beside 400 tokens by the rule.
    assert!(by_rule > 64 << 20 && asked - by_rule > 3600 * 128 * 320 * 4, "{by_rule} {asked}");
    let text = finish(headway().arg("explain").arg(config("deepseek-v3")));
    assert!(
        text.out.contains("scratch  ") && text.out.contains("for all layers of the group"),
        "{}",
        text.out
    );
}

#[test]
fn the_schema_is_that_of_the_start_up_report() {
    let r = report("gpt-oss-20b", &["--device", "h100"]);
    let keys = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    for field in ["groups", "kv_cache_layout", "graph_mode", "options", "memory", "suggestions", "unknowns"] {
        assert!(keys(&r).contains(field), "{field}");
    }
    let started = finish(headway().args(["generate", "--model"]).arg(llama()).args([
        "-v",
        "--json",
        "--prompt-ids",
        "1",
        "--max-tokens",
        "1",
    ]));
    let started = started.fine().objects()[0]["startup"].clone();
    assert_eq!(keys(&r["groups"][0]), keys(&started["groups"][0]));
    assert_eq!(keys(&r["graph_mode"]), keys(&started["graph_mode"]));
    assert_eq!(keys(&r["memory"]), keys(&started["memory"]));
    assert_eq!(keys(&r["options"]["dtype"]), keys(&started["options"]["dtype"]));
    assert!(r["unknowns"].as_array().unwrap().iter().any(|u| u.as_str().unwrap().contains("packages")));
}

#[test]
fn the_engine_starts_as_explain_tells() {
    for model in ["tiny-llama", "tiny-gemma3", "tiny-mistral", "tiny-qwen3"] {
        let Ok(dir) = headway_testkit::testdata::model_dir(model) else { panic!("{model}: test data") };
        let options = ["--json", "--kv-cache-memory", "8MiB", "--block-size", "32"];
        let told = finish(headway().arg("explain").arg(&dir).args(options)).fine().object();
        let started = finish(
            headway()
                .args(["generate", "--prompt-ids", "1", "--max-tokens", "1", "-v", "--model"])
                .arg(&dir)
                .args(options),
        );
        let started = started.fine().objects()[0]["startup"].clone();
        assert_eq!(told["groups"], started["groups"], "{model}");
        assert_eq!(told["kv_cache_layout"], started["kv_cache_layout"]);
        assert_eq!(told["memory"]["kv_bytes_per_token"], started["memory"]["kv_bytes_per_token"]);
        assert_eq!(told["memory"]["weights_bytes"].as_u64().map(|b| b > 0), Some(true));
    }
}

#[test]
fn numbers_that_can_be_checked_by_hand() {
    // 32 layers, 8 heads of 128, keys and values, bfloat16; half of it in fp8.
    let r = report("llama-3.1-8b", &["--device", "h100", "--kv-cache-memory", "16GiB"]);
    assert_eq!(r["memory"]["kv_bytes_per_token"], json!(32 * 8 * 128 * 2 * 2));
    // 8192 blocks of 16 tokens, one of them the null block, and 131072 tokens in a request.
    assert_eq!(r["memory"]["kv_cache_blocks"], json!(8192));
    assert_eq!(r["memory"]["max_request_tokens"], json!(8191 * 16));
    let half = report("llama-3.1-8b", &["--device", "h100", "--kv-cache-dtype", "fp8"]);
    assert_eq!(half["memory"]["kv_bytes_per_token"], json!(32 * 8 * 128 * 2));
    let ranks = report("llama-3.1-8b", &["--device", "h100", "--tp", "4"]);
    assert_eq!(ranks["memory"]["kv_bytes_per_token"], json!(32 * 2 * 128 * 2 * 2));
    // 61 latent rows of 512 + 64, not divided by ranks.
    let mla = report("deepseek-v3", &["--device", "h100", "--tp", "8"]);
    assert_eq!(mla["memory"]["kv_bytes_per_token"], json!(61 * 576 * 2));
    // Fifteen of 35 layers read another layer's cache.
    let shared = report("gemma-3n", &["--device", "h100"]);
    assert_eq!(shared["memory"]["kv_bytes_per_token"], json!(20 * 2 * 256 * 2 * 2));
}

#[test]
fn pages_of_attention_grow_to_a_state() {
    let r = report("nemotron-h-56b", &["--device", "h100", "--tp", "2", "--kv-cache-memory", "100GiB"]);
    let pages: BTreeSet<u64> =
        r["groups"].as_array().unwrap().iter().map(|g| g["page_size_bytes"].as_u64().unwrap()).collect();
    assert_eq!(pages.len(), 1, "{pages:?}");
    let why = r["options"]["block_size"]["because"].as_str().unwrap();
    assert!(why.contains("raised from 16"), "{why}");
    assert!(r["unknowns"].to_string().contains("round it further up"));
}

/// What start-up of this build would do with a hybrid: the backend of each kind of layer, the raised block
/// size, and states that share one builder's work.
#[test]
fn a_hybrid_on_the_cpu() {
    let own =
        finish(headway().arg("explain").arg(config("bamba-9b")).args(["--json", "--max-model-len", "4096"]));
    let r = own.fine().object();
    assert_eq!(backends(&r), BTreeSet::from(["CPU_ATTN".into(), "MAMBA2_ATTN".into()]));
    let groups = r["groups"].as_array().unwrap();
    let pages: BTreeSet<u64> = groups.iter().map(|g| g["page_size_bytes"].as_u64().unwrap()).collect();
    assert_eq!(pages.len(), 1, "{pages:?}");
    let attention = groups.iter().find(|g| g["backend"] == json!("CPU_ATTN")).unwrap();
    let block = attention["block_size"].as_u64().unwrap();
    assert_eq!(r["options"]["block_size"]["in_force"], json!(block.to_string()));
    assert!(block > 16 && block.is_multiple_of(attention["kernel_block_size"].as_u64().unwrap()));
    let why = r["options"]["block_size"]["because"].as_str().unwrap();
    assert!(why.contains("raised from 16"), "{why}");
    let text = finish(headway().arg("explain").arg(config("bamba-9b"))).fine().out;
    assert!(text.contains("MAMBA2_ATTN") && text.contains("Mamba-2 state"), "{text}");
    let drafts = finish(headway().arg("explain").arg(config("bamba-9b")).args(["--speculative-tokens", "2"]));
    assert_ne!(drafts.code, Some(0));
    assert!(drafts.out.contains("set --speculative-tokens 0"), "{} {}", drafts.out, drafts.err);
}

#[test]
fn drafts_of_the_own_engine_raise_the_threshold_and_say_how_they_are_made() {
    let own = |name: &str| {
        let args = ["--json", "--speculative-tokens", "3"];
        finish(headway().arg("explain").arg(config(name)).args(args)).fine().object()
    };
    let mla = own("deepseek-v2");
    assert_eq!(mla["groups"][0]["reorder_batch_threshold"], json!(4));
    assert_eq!(mla["options"]["speculative_tokens"]["in_force"], json!("3"));
    assert_eq!(mla["options"]["prompt_lookup_max"]["in_force"], json!("8"));
    let attention = own("llama-3.1-8b");
    assert_eq!(attention["groups"][0]["reorder_batch_threshold"], Value::Null, "takes any number of rows");
    let other = ["--engine", "vllm", "--device", "h100", "--prompt-lookup-max", "3"];
    let refused = finish(headway().arg("explain").arg(config("llama-3.1-8b")).args(other));
    assert!(refused.err.contains("--prompt-lookup-max 3: is for --engine headway"), "{}", refused.err);
}

#[test]
fn a_config_that_start_up_would_refuse_is_refused_in_its_words() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let read = std::fs::read_to_string(config("deepseek-v3"))
        .unwrap()
        .replace("\"fmt\": \"e4m3\"", "\"weight_block_size\": [128, 128]");
    for (field, value, words) in [
        ("num_experts_per_tok", serde_json::json!(1000), "can't go to more experts"),
        ("topk_method", serde_json::json!("greedy"), "supported: noaux_tc"),
        (
            "architectures",
            serde_json::json!(["NewForCausalLM"]),
            "architecture NewForCausalLM is not supported",
        ),
        ("quantization_config", serde_json::json!({"quant_method": "awq"}), "format awq"),
        ("hidden_act", serde_json::json!(7), "hidden_act is 7"),
    ] {
        let mut json: Value = serde_json::from_str(&read).unwrap();
        json[field] = value;
        std::fs::write(&path, json.to_string()).unwrap();
        let r = finish(headway().arg("explain").arg(&path).args(["--kv-cache-memory", "200GiB", "--json"]));
        let o = r.object();
        assert_eq!(r.code, Some(1), "{field}: {}", r.err);
        assert!(o["error"].as_str().unwrap().contains(words), "{field}: {}", o["error"]);
        assert!(!o["groups"].as_array().unwrap().is_empty());
        // Another engine may well run it.
        let args = ["--engine", "vllm", "--device", "h200", "--tp", "8"];
        assert_eq!(finish(headway().arg("explain").arg(&path).args(args)).code, Some(0), "{field}");
    }
    for layers in [2_147_483_647u64, 5000] {
        let mut json: Value = serde_json::from_str(&read).unwrap();
        json["num_hidden_layers"] = layers.into();
        std::fs::write(&path, json.to_string()).unwrap();
        let r = finish(headway().arg("explain").arg(&path));
        assert!(r.code == Some(1) && r.err.contains("at most 1024 are expected"), "{}", r.err);
    }
}

#[test]
fn exit_code_3_where_no_backend_is_valid() {
    let r = failing("deepseek-v3.2", &["--device", "a100"], 3);
    assert!(r["groups"][0]["backend"].is_null());
    assert!(r["error"].as_str().unwrap().contains("No valid attention backend found"));
    let named = failing(
        "llama-3.1-8b",
        &["--device", "h100", "--attention-backend", "flex_attention", "--kv-cache-dtype", "fp8"],
        3,
    );
    assert!(named["error"].as_str().unwrap().contains("Selected backend FLEX_ATTENTION is not valid"));
    let own = finish(headway().arg("explain").arg(config("jamba-v0.1")).arg("--json"));
    assert_eq!(own.code, Some(3));
    assert!(own.object()["warnings"].to_string().contains("headway can't run this JambaForCausalLM"));
    let own = finish(headway().arg("explain").arg(config("llama-3.1-8b")).args(["--device", "sm70"]));
    assert_eq!(own.code, Some(3));
    assert!(own.out.contains("runs on cpu, not on cuda"), "{}", own.out);
    assert!(own.out.contains("compute capability not supported"), "{}", own.out);
}

#[test]
fn two_backends_as_one_are_asked_as_one_and_refuse_by_part() {
    let own = |args: &[&str]| {
        let base = ["--device", "h200", "--attention-backend"];
        finish(headway().arg("explain").arg(config("llama-3.1-8b")).args(base).args(args))
    };
    let r = own(&["cuda_attn+flash_attn", "--json"]);
    assert_eq!(r.code, Some(3), "{}", r.err);
    let report = r.object();
    assert!(report["error"].as_str().unwrap().contains("Selected backend CUDA_ATTN+FLASH_ATTN is not valid"));
    let said = reasons(&report, "CUDA_ATTN+FLASH_ATTN", "h200");
    assert!(
        said.contains("FLASH_ATTN (prefill): not fetched: run headway kernels fetch flash-attn"),
        "{said}"
    );
    assert!(!said.contains("(decode)"), "{said}");
    let r = own(&["CUDA_ATTN+FLASHINFER", "--kv-cache-dtype", "fp8", "--json"]);
    let said = reasons(&r.object(), "CUDA_ATTN+FLASHINFER", "h200");
    assert!(said.contains("FLASHINFER (prefill): kv_cache_dtype not supported"), "{said}");
    own(&["CUDA_ATTN+FLASH_ATN"]).refused(&["named FLASH_ATN", "(did you mean FLASH_ATTN?)"]);
    own(&["CUDA_ATTN+CUDA_MLA"]).refused(&["CUDA_MLA is for MLA"]);
}

/// Reasons against a backend for the first group of layers.
fn reasons(r: &Value, backend: &str, device: &str) -> String {
    let refused = r["groups"][0]["refused"].as_array().unwrap();
    let all = refused.iter().filter(|x| x["backend"] == backend).map(|x| x["reasons"].to_string());
    all.collect::<Vec<_>>().join(&format!(" {device} "))
}

#[test]
fn heads_that_a_devices_shared_memory_does_not_hold_are_refused_with_the_sizes() {
    let own = |name: &str, device: &str| {
        finish(headway().arg("explain").arg(config(name)).args(["--device", device, "--json"])).object()
    };
    for device in ["rtx4090", "l40s", "sm86", "sm120"] {
        assert_eq!(own("llama-3.1-8b", device)["groups"][0]["backend"], "CUDA_ATTN", "{device}");
        // Heads of 256.
        let r = own("gemma-2", device);
        assert!(r["groups"][0]["backend"].is_null(), "{device}: {r}");
        let why = reasons(&r, "CUDA_ATTN", device);
        assert!(why.contains("163840 bytes of shared memory") && why.contains("101376"), "{device}: {why}");
    }
    for device in ["a100", "h100", "b200"] {
        assert_eq!(own("gemma-2", device)["groups"][0]["backend"], "CUDA_ATTN", "{device}");
    }
}

#[test]
fn layers_that_see_their_chunk_are_refused_by_that_name() {
    for device in ["h100", "cpu"] {
        let r = finish(
            headway().arg("explain").arg(config("llama-4-scout")).args(["--device", device, "--json"]),
        );
        assert_eq!(r.code, Some(3), "{device}: {}", r.err);
        let r = r.object();
        let name = if device == "cpu" { "CPU_ATTN" } else { "CUDA_ATTN" };
        assert_eq!(reasons(&r, name, device), "[\"chunked local attention not supported\"]", "{r}");
    }
    // vLLM cuts such layers' batches into chunks, whatever the backend.
    assert!(
        !backends(&report("llama-4-scout", &["--device", "h100", "--kv-cache-memory", "200GiB"])).is_empty()
    );
}

/// The option and value of a suggestion, as arguments.
fn applied(args: &[&str], s: &Value) -> Vec<String> {
    let option = s["option"].as_str().unwrap();
    let mut out: Vec<String> = vec![];
    let mut skip = false;
    for a in args {
        if std::mem::take(&mut skip) {
            continue;
        }
        match *a == option {
            true => skip = s["from"] != json!("true"),
            false => out.push((*a).to_owned()),
        }
    }
    if let Some(to) = s["to"].as_str() {
        out.extend([option.to_owned(), to.to_owned()]);
    }
    out
}

#[test]
fn suggestions_keep_what_they_promise() {
    let cases: [(&str, &[&str], i32); 7] = [
        ("llama-3.1-70b", &["--device", "a100", "--tp", "4", "--kv-cache-dtype", "fp8"], 0),
        ("deepseek-v3", &["--device", "h100", "--tp", "8", "--kv-cache-dtype", "fp8"], 0),
        ("gpt-oss-120b", &["--device", "h100", "--block-size", "24"], 3),
        ("qwen3-8b", &["--device", "b200", "--tp", "8", "--dcp", "2", "--speculative-tokens", "3"], 0),
        ("llama-3.1-8b", &["--device", "h100", "--compilation", "off"], 0),
        (
            "llama-3.1-8b",
            &["--device", "h100", "--attention-backend", "FLEX_ATTENTION", "--kv-cache-dtype", "fp8"],
            3,
        ),
        ("mamba2", &["--device", "t4"], 1),
    ];
    for (name, args, code) in cases {
        let now = failing(name, args, code);
        let all = now["suggestions"].as_array().unwrap();
        assert!(!all.is_empty(), "{name} {args:?}");
        for s in all {
            let args = applied(args, s);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let then = report(name, &args);
            let gain = s["gain"].as_str().unwrap();
            let mode = then["graph_mode"]["in_force"].as_str().unwrap();
            let promised = if gain.contains("it starts, on ") {
                backends(&then).iter().all(|b| gain.contains(b))
            } else if gain.contains("the graph mode is ") {
                gain.contains(&format!("the graph mode is {mode} instead of"))
            } else {
                backends(&then).iter().any(|b| gain.ends_with(&format!("{b} is valid")))
            };
            assert!(promised, "{name} {args:?}: {gain}\n{:?} {mode}", backends(&then));
        }
    }
}

#[test]
fn nothing_to_change_where_the_best_is_chosen() {
    let r = report("llama-3.1-8b", &["--device", "h100"]);
    assert_eq!(r["suggestions"], json!([]));
    assert_eq!(backends(&r), BTreeSet::from(["FLASH_ATTN".to_owned()]));
}

#[test]
fn lowerings_are_told_in_order() {
    let r = report("qwen3-8b", &["--device", "b200", "--tp", "8", "--dcp", "2", "--speculative-tokens", "3"]);
    let l = &r["graph_mode"]["lowerings"][0];
    assert_eq!((&l["from"], &l["to"]), (&json!("FULL_AND_PIECEWISE"), &json!("PIECEWISE")));
    assert!(l["because"].as_str().unwrap().contains("is not supported with speculative decoding"));
    assert_eq!(r["graph_mode"]["in_force"], "PIECEWISE");
}

/// Asked about by what it is, so it has to be there.
#[test]
fn a_device_of_this_machine_is_opened() {
    let mut c = headway();
    c.arg("explain").arg(config("llama-3.1-8b")).args(["--device", "cuda:99"]);
    finish(&mut c).refused(&["cuda:99"]);
}

#[test]
fn own_engine_captures_whole_steps_and_pieces() {
    let own = |args: &[&str]| {
        let mut c = headway();
        finish(c.arg("explain").arg(config("llama-3.1-8b")).args(["--device", "h100", "--json"]).args(args))
            .fine()
            .object()
    };
    assert_eq!(own(&[])["graph_mode"]["in_force"], "FULL_DECODE_ONLY");
    for mode in ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"] {
        let r = own(&["--graph-mode", mode]);
        assert_eq!((&r["graph_mode"]["in_force"], &r["graph_mode"]["lowerings"]), (&json!(mode), &json!([])));
        let warnings = r["warnings"].as_array().unwrap();
        assert!(!warnings.iter().any(|w| w.as_str().unwrap().contains("graph mode")), "{warnings:?}");
    }
}

#[test]
fn people_read_runs_of_layers() {
    let r = vllm("gemma-3-12b", &["--device", "h100"]).fine();
    for text in [
        "layers 0–4, 6–10, 12–16",
        ": sliding window 1024",
        "layers 5, 11, 17",
        "layout ",
        "graphs ",
        "memory ",
        "unknown ",
    ] {
        assert!(r.out.contains(text), "{text}: {}", r.out);
    }
}

#[test]
fn two_answers_side_by_side() {
    let r = vllm("llama-3.1-8b", &["--compare", "h100,b200"]).fine();
    assert!(r.out.contains("FLASH_ATTN") && r.out.contains("FLASHINFER"), "{}", r.out);
    let r = vllm(
        "llama-3.1-8b",
        &["--device", "a100", "--compare", "block-size=16,block-size=64+kv-cache-dtype=fp8", "--json"],
    );
    let both = r.fine().object()["compare"].clone();
    assert_eq!(both[0]["startup"]["groups"][0]["block_size"], 16);
    assert_eq!(both[1]["startup"]["options"]["kv_cache_dtype"]["in_force"], "fp8");
    vllm("llama-3.1-8b", &["--compare", "h100"]).refused(&["--compare h100", "a comma between them"]);
    vllm("llama-3.1-8b", &["--compare", "h100,h201"])
        .refused(&["no device is named h201", "did you mean h20"]);
    vllm("llama-3.1-8b", &["--compare", "blok-size=1,h100"]).refused(&["(did you mean block-size?)"]);
    vllm("llama-3.1-8b", &["--device", "a100", "--compare", "h100,b200"])
        .refused(&["contradicts --device a100"]);
}

#[test]
fn unknown_names_are_refused_with_the_nearest() {
    for (args, words) in [
        (&["--device", "h1000"][..], &["no device is named h1000", "rtx4090", "(did you mean h100?)"][..]),
        (&["--device", "cuda"], &["a device of this machine", "say which: cpu, sm70"]),
        (&["--engine", "vlm"], &["--engine vlm", "(did you mean vllm?)"]),
        (&["--engine", "vllm:0.32.0"], &["no version 0.32.0", "0.33.0"]),
        (&["--dtype", "flot16"], &["there are: auto, float32", "(did you mean float16?)"]),
        (&["--kv-cache-dtype", "fp8_e4m4"], &["--kv-cache-dtype fp8_e4m4", "(did you mean fp8_e4m3?)"]),
        (&["--kv-cache-dtype", "nvfp4"], &["how many bytes"]),
        (
            &["--attention-backend", "FLSH_ATTN"],
            &["named FLSH_ATTN", "TRITON_ATTN", "(did you mean FLASH_ATTN?)"],
        ),
        (&["--backend-per-kind", "full=FLASHINFR"], &["(did you mean FLASHINFER?)"]),
        (
            &["--backend-per-kind", "fool=FLASHINFER"],
            &["no kind of layer is named fool", "(did you mean full?)"],
        ),
        (&["--kv-layout", "LBNHX"], &["--kv-layout LBNHX", "there are: NHD, HND", "(did you mean LBNHC?)"]),
        (&["--graph-mode", "FULL_DECODE"], &["FULL_AND_PIECEWISE"]),
    ] {
        let mut all = vec!["explain".to_owned(), config("llama-3.1-8b").display().to_string()];
        if args[0] != "--engine" {
            all.extend(["--engine".to_owned(), "vllm".to_owned()]);
        }
        all.extend(args.iter().map(|a| (*a).to_owned()));
        finish(headway().args(all)).refused(words);
    }
}

#[test]
fn contradictions_name_both_options() {
    for (args, words) in [
        (&["--dcp", "2"][..], ["--dcp 2 and --tp 1", "must be a multiple"]),
        (&["--tp", "3"], ["--tp 3", "must divide the model's 32 heads"]),
        (&["--device", "cpu", "--graph-mode", "FULL"], ["--graph-mode FULL and --device cpu", "no graphs"]),
        (
            &["--compilation", "off", "--graph-mode", "PIECEWISE"],
            ["--graph-mode PIECEWISE and --compilation off", "pieces"],
        ),
        (
            &["--memory", "1GiB", "--kv-cache-memory", "1GiB"],
            ["--memory 1073741824 and --kv-cache-memory", "give one"],
        ),
        (
            &["--max-num-seqs", "64", "--max-num-batched-tokens", "8"],
            ["--max-num-batched-tokens 8 and --max-num-seqs 64", ""],
        ),
        (&["--micro-batches", "2"], ["--micro-batches 2", "--engine headway"]),
        (&["--max-model-len", "999999999"], ["--max-model-len 999999999", "at most 131072"]),
    ] {
        vllm("llama-3.1-8b", args).refused(&words);
    }
    let own = |args: &[&str]| finish(headway().arg("explain").arg(config("llama-3.1-8b")).args(args));
    own(&["--compilation", "off"]).refused(&["--compilation off", "--engine vllm"]);
    own(&["--pcp", "2"]).refused(&["--pcp 2", "supported: 1"]);
    own(&["--tp", "2"]).refused(&["--tp 2", "supported: 1"]);
    own(&["--graph-mode", "FULL"]).refused(&["--graph-mode FULL", "is not supported with"]);
}

#[test]
fn a_window_does_not_go_with_context_parallelism() {
    let r = failing(
        "gpt-oss-20b",
        &["--device", "h100", "--tp", "8", "--dcp", "2", "--attention-backend", "FLASH_ATTN"],
        1,
    );
    assert!(r["error"].as_str().unwrap().contains("DCP not support sliding window"), "{r}");
}

#[test]
fn configs_without_what_is_needed() {
    let missing = |field: &str| {
        let copy = Copy::with("config.json", &[(field, json!(null))]);
        finish(headway().arg("explain").arg(copy.file("config.json")))
    };
    for field in ["num_hidden_layers", "num_attention_heads", "hidden_size"] {
        let r = missing(field);
        // A head size of its own makes the hidden size unnecessary, but for running the model.
        if field == "hidden_size" {
            assert!(r.code == Some(1) && r.err.contains("config.json: hidden_size is missing"), "{}", r.err);
            assert!(r.out.contains("CPU_ATTN"), "{}", r.out);
            continue;
        }
        r.refused(&["config.json", field, "is missing"]);
    }
    run(["explain", "/nowhere/config.json"]).refused(&["/nowhere/config.json"]);
    run(["explain", "someone/something"]).refused(&["someone/something", "headway pull"]);
    let (_dir, broken) = super::support::file("config.json", b"{");
    run(["explain", broken.to_str().unwrap()]).refused(&["config.json"]);
    let (_dir, list) = super::support::file("config.json", b"[]");
    run(["explain", list.to_str().unwrap()]).refused(&["not a JSON object"]);
}

#[test]
fn fast_prefill_of_layers_that_share_caches() {
    let option = |r: &Value| r["options"]["kv_sharing_fast_prefill"].clone();
    let fast = |r: &Value| -> Vec<u64> {
        let groups = r["groups"].as_array().unwrap().iter().filter(|g| g["fast_prefill"] == true);
        let mut all: Vec<_> =
            groups.flat_map(|g| g["layers"].as_array().unwrap()).map(|l| l.as_u64().unwrap()).collect();
        all.sort_unstable();
        all
    };
    let args = ["--kv-cache-memory", "200GiB"];
    let off = report("gemma-3n", &args);
    assert_eq!((&option(&off)["requested"], &option(&off)["in_force"]), (&Value::Null, &json!("false")));
    assert!(option(&off)["because"].as_str().unwrap().contains("layers 20-34 read earlier layers' caches"));
    assert!(fast(&off).is_empty());
    let on = [&args[..], &["--kv-sharing-fast-prefill"]].concat();
    let r = report("gemma-3n", &on);
    assert_eq!((&option(&r)["requested"], &option(&r)["in_force"]), (&json!("true"), &json!("true")));
    assert_eq!(fast(&r), (20..35).collect::<Vec<_>>());
    assert_eq!(r["memory"]["kv_bytes_per_token"], off["memory"]["kv_bytes_per_token"]);
    let text = vllm("gemma-3n", &on).fine().out;
    assert!(text.contains("rows     those with logits alone"), "{text}");
    let e = failing("llama-3.1-8b", &on, 1)["error"].to_string();
    assert!(e.contains("--kv-sharing-fast-prefill true") && e.contains("leave it out"), "{e}");
}
