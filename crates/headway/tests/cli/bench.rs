//! `bench`: the lines that it promises, small runs of each kind, and what it refuses. Not for figures.

use super::support::{finish, headway, llama, run};
use serde_json::Value;
use std::{collections::BTreeSet, io::Write, process::Stdio};

fn keys(o: &Value) -> BTreeSet<&str> {
    o.as_object().unwrap().keys().map(String::as_str).collect()
}

fn number(o: &Value, field: &str) -> f64 {
    o[field].as_f64().unwrap_or_else(|| panic!("{field} in {o}"))
}

#[test]
fn attention_has_the_fields_that_are_promised_and_no_others() {
    let filter = "^(decode_b1_c16|decode_b1_c512_hot|write_1|write_512) 9/3/64 (f32|bf16)$";
    let args = ["bench", "attention", "--json", "--pool", "64", "--threads", "1", "--filter", filter];
    let lines = run(args).fine().objects();
    assert_eq!(lines.len(), 8);
    for o in &lines {
        let promised = [
            "bench",
            "peer",
            "backend",
            "isa",
            "case",
            "kind",
            "heads",
            "dtype",
            "kv_cache_dtype",
            "block_size",
            "threads",
            "cache",
            "median_ms",
            "min_ms",
            "max_ms",
            "gbps",
            "gflops",
            "ceiling",
            "share_of_ceiling",
        ];
        assert_eq!(keys(o), BTreeSet::from(promised));
        assert_eq!((o["bench"].as_str(), o["peer"].as_str()), (Some("attention"), Some("headway")));
        assert_eq!((o["heads"].as_str(), o["threads"].as_u64()), (Some("9/3/64"), Some(1)));
        let [median, min, max] = ["median_ms", "min_ms", "max_ms"].map(|f| number(o, f));
        assert!(0.0 < min && min <= median && median <= max, "{o}");
        // Bytes and operations follow from the case.
        let size = if o["dtype"] == "f32" { 4.0 } else { 2.0 };
        let tokens: f64 =
            o["case"].as_str().unwrap().rsplit(['c', '_']).find_map(|n| n.parse().ok()).unwrap_or(512.0);
        let bytes = tokens * 3.0 * 64.0 * 2.0 * size;
        assert!((number(o, "gbps") * median * 1e6 / bytes - 1.0).abs() < 1e-6, "{o}");
        let share = number(o, "gbps") / number(o, "ceiling");
        assert!((share / number(o, "share_of_ceiling") - 1.0).abs() < 1e-6, "{o}");
    }
}

#[test]
fn attention_measures_what_standard_input_says() {
    let args =
        ["attention", "--json", "--pool", "16", "--threads", "1", "--repetitions", "1", "--from-stdin"];
    let ask = |input: &str| {
        let mut child = headway();
        child.arg("bench").args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = child.spawn().unwrap();
        // A program that refused a name has stopped reading.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    };
    let (write, decode) = ("write_1 9/3/64 bf16\n", "decode_b1_c16 4/1/256 f32\n");
    let done = ask(&[write, write, decode, write].concat());
    let lines: Vec<Value> =
        String::from_utf8(done.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let cases: Vec<_> = lines.iter().map(|l| l["case"].as_str().unwrap()).collect();
    assert_eq!(cases, ["write_1", "write_1", "decode_b1_c16", "write_1"]);
    assert_eq!((lines[2]["heads"].as_str(), lines[2]["dtype"].as_str()), (Some("4/1/256"), Some("f32")));
    assert!(lines.iter().all(|l| number(l, "median_ms") > 0.0 && number(l, "ceiling") > 0.0));
    for (input, why) in [("write_1\n", "a line is"), ("write_3 9/3/64 bf16\n", "no such case")] {
        let refused = ask(input);
        let error = String::from_utf8(refused.stderr).unwrap();
        assert!(matches!(refused.status.code(), Some(1 | 2)) && error.contains(why), "{error}");
    }
}

#[test]
fn attention_prints_an_aligned_table() {
    let args =
        ["bench", "attention", "--pool", "16", "--threads", "1", "--filter", "decode_b1_c16 4/1/256 f32"];
    let table = run(args).fine().out;
    let rows: Vec<&str> = table.lines().skip_while(|l| !l.starts_with("case ")).collect();
    assert_eq!(rows.len(), 2, "{table}");
    assert_eq!(rows[0].len(), rows[1].len());
    for ceiling in
        ["random 64 KiB reads: decode, write", "random 4 KiB", "multiply-adds: prefill", "parallel region"]
    {
        assert!(table.contains(ceiling), "{ceiling} in {table}");
    }
}

#[test]
fn builders_run_once_a_group_or_swap_a_table() {
    let args = ["bench", "builder", "--json", "--requests", "1,8", "--groups", "1,3", "--threads", "1"];
    let lines = run(args).fine().objects();
    assert_eq!(lines.len(), 4);
    for o in &lines {
        let groups = o["kv_cache_groups"].as_u64().unwrap();
        let [builds, updates] = ["builds_per_step", "table_updates_per_step"].map(|f| o[f].as_u64().unwrap());
        assert_eq!(builds + updates, groups, "{o}");
        assert_eq!((o["layers"].as_u64(), builds), (Some(32), groups.min(2)));
        assert!(["build_us", "build_min_us", "with_inputs_us"].iter().all(|f| number(o, f) > 0.0), "{o}");
    }
}

#[test]
fn an_engine_is_measured() {
    let model = llama();
    let model = model.to_str().unwrap();
    let args = ["bench", "engine", "--json", "--model", model, "--prompt-len", "20", "--output-len", "5"];
    let with = [&args[..], &["--concurrency", "2", "--num-requests", "3"]].concat();
    let o = run(with).fine().object();
    assert_eq!((o["requests"].as_u64(), o["concurrency"].as_u64()), (Some(3), Some(2)));
    for field in ["prefill_tokens_per_s", "decode_tokens_per_s", "output_tokens_per_s", "total_s"] {
        assert!(number(&o, field) > 0.0, "{field}");
    }
    // Two together take a prefill and four decodes, the third the same again.
    assert_eq!(o["step"]["steps"].as_u64(), Some(10));
    let p = &o["inter_token_latency_ms"];
    assert!(number(p, "p50") <= number(p, "p99") && number(p, "p99") <= number(p, "max"));
    assert!(o["speculation"].is_null());
    let drafted = run([&args[..], &["--speculative-tokens", "2"]].concat()).fine().object();
    assert!(drafted["speculation"]["drafted_tokens"].is_u64());
    let plain: Vec<_> = args.iter().filter(|a| **a != "--json").collect();
    let text = run(plain).fine().out;
    assert!(text.contains("time to first token") && text.contains("outside it: schedule"), "{text}");
}

#[test]
fn what_cannot_be_measured_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cases.json");
    std::fs::write(&file, "{\"schema\": 1}").unwrap();
    let file = file.to_str().unwrap();
    let cases: [(&[&str], &str); 9] = [
        (&["attention", "--cases", "/no/such/file.json"], "/no/such/file.json"),
        (&["attention", "--cases", file], "cases.json: "),
        (&["attention", "--filter", "nothing"], "no case of CPU_ATTN"),
        (&["attention", "--filter", "("], "--filter"),
        (&["attention", "--backend", "CPU_ATN"], "did you mean CPU_ATTN"),
        (&["attention", "--pool", "1", "--filter", "prefill_1x2048 9/3/64 f32"], "--pool"),
        (&["attention", "--threads", "0"], "--threads"),
        (&["attention", "--from-stdin", "--threads", "1,2"], "--threads"),
        (&["builder", "--requests", "0"], "--requests"),
    ];
    for (args, part) in cases {
        run([&["bench"], args].concat()).refused(&[part]);
    }
    // Ids are printed.
    let all = include_str!("../../src/cli/bench/cases.json");
    std::fs::write(file, all.replacen("\"decode_b1", "\"decode\\u001bb1", 1)).unwrap();
    run(["bench", "attention", "--cases", file]).refused(&["cases.json: id ", "has control characters"]);
}

#[test]
fn attention_on_a_device_that_is_not_there() {
    let ask = |args: &[&str]| run([&["bench", "attention"], args].concat());
    // Without a driver that is said; with one there are not so many devices.
    let gone = ["--device", "cuda:4000", "--filter", "decode_b256_c32768 32/8/128", "--kv-layout", "NHD"];
    let refused = ask(&gone);
    refused.refused(&["--device cuda:4000: no "]);
    let why = &refused.err;
    assert!(
        why.contains("no NVIDIA driver") && why.contains("use --device cpu")
            || why.contains("no device cuda:4000")
    );
    assert_eq!(refused.code, Some(1));
    ask(&["--device", "cuda:4000", "--from-stdin"]).refused(&["--device cuda:4000: no "]);
    finish(headway().args(["bench", "attention"]).env("HEADWAY_DEVICE", "cuda:4000")).refused(&["cuda:4000"]);
    // Before any device is opened.
    let cases: [(&[&str], &str); 7] = [
        (
            &["--device", "toaster"],
            "--device toaster is not supported by this build; this build runs on: cpu, cuda",
        ),
        (&["--device", "cuda:x"], "--device cuda:x"),
        (&["--device", "cuda:4000", "--threads", "2"], "--threads 2: the threads are the CPU's"),
        (&["--device", "cuda:4000", "--filter", "4/1/256"], "no case of CUDA_ATTN"),
        (
            &["--device", "cuda:4000", "--kv-layout", "BHLNC"],
            "--kv-layout BHLNC: CUDA_ATTN can't read it; it reads LBHNC, LBNHC",
        ),
        (&["--device", "cuda:4000", "--kv-layout", "NDH"], "there are: NHD, HND"),
        (&["--kv-layout", "NHD", "--pool", "16"], "--kv-layout NHD: CPU_ATTN can't read it; it reads LBHNC"),
    ];
    for (args, part) in cases {
        ask(args).refused(&[part]);
    }
    // An empty variable counts as unset.
    let small = ["--pool", "16", "--threads", "1", "--json", "--filter", "decode_b1_c16 4/1/256 f32"];
    let mut child = headway();
    finish(child.args(["bench", "attention"]).args(small).env("HEADWAY_DEVICE", "")).fine();
}

#[test]
fn a_backend_of_another_device_is_refused() {
    let small = ["--pool", "16", "--threads", "1", "--filter", "decode_b1_c16 9/3/64 bf16"];
    run([&["bench", "attention", "--backend", "CUDA_ATTN"], &small[..]].concat())
        .refused(&["CUDA_ATTN can't run heads 9/3/64", "runs on cuda, not on cpu"]);
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let pool = ["attention", "--pool", "16", "--threads", "1", "--filter", "decode_b1_c16 4/1/256 f32"];
    for what in [&["builder", "--requests", "1", "--groups", "1"][..], &pool] {
        let mut child =
            headway().arg("bench").args(what).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let r = child.wait_with_output().unwrap();
        assert_eq!((r.status.code(), r.stderr.len()), (Some(0), 0), "{}", String::from_utf8_lossy(&r.stderr));
    }
}

#[test]
fn a_pool_beyond_memory_is_refused() {
    let args = ["bench", "attention", "--pool", "99999999999999", "--filter", "decode_b1_c16 4/1/256 f32"];
    run(args).refused(&["--pool 99999999999999 needs", "lower it"]);
}

#[test]
fn several_backends_come_side_by_side_and_in_a_plot() {
    let dir = tempfile::TempDir::new().unwrap();
    let (plot, marks) = (dir.path().join("a.svg"), dir.path().join("m.jsonl"));
    let (plot_arg, marks_arg) = (plot.to_str().unwrap(), marks.to_str().unwrap());
    let ask = |more: &[&str]| {
        let filter = "^(decode_b1_c16|write_1) 9/3/64 bf16$";
        let args = ["--pool", "16", "--threads", "1", "--repetitions", "1", "--filter", filter];
        finish(headway().args(["bench", "attention"]).args(args).args(more))
    };
    let lines = ask(&["--backend", "all", "--json"]).fine().out;
    std::fs::write(&marks, &lines).unwrap();
    assert_eq!(lines.lines().count(), 2, "{lines}");
    let table = ask(&["--backend", "cpu_attn,all", "--plot", plot_arg, "--marks", marks_arg]).fine().out;
    let rows: Vec<Vec<&str>> = table.lines().map(|l| l.split_whitespace().collect()).collect();
    let head = rows.iter().position(|r| r.first() == Some(&"case")).unwrap();
    assert_eq!(rows[head], ["case", "heads", "dtype", "CPU_ATTN", "share"], "{table}");
    assert_eq!([rows[head + 1][0], rows[head + 2][0]], ["decode_b1_c16", "write_1"], "{table}");
    let drawn = std::fs::read_to_string(&plot).unwrap();
    assert!(drawn.starts_with("<svg ") && drawn.ends_with("</svg>\n"), "{drawn}");
    for text in [
        ">CPU_ATTN<",
        ">decode_b1_c16<",
        ">write_1<",
        "cache write, heads 9/3/64, bf16",
        "prefers-color-scheme",
    ] {
        assert!(drawn.contains(text), "{text} in {drawn}");
    }
    // Two marks and the legend's.
    assert_eq!(drawn.matches("class=\"mark\"").count(), 3, "{drawn}");
    assert!(!table.contains("quickest"), "one column: {table}");
    // Marks of something else.
    std::fs::write(&marks, lines.replace("9/3/64", "9/3/65")).unwrap();
    let told = ask(&["--plot", plot_arg, "--marks", marks_arg]).fine().err;
    assert!(told.contains("m.jsonl: none is of a backend"), "{told}");
    let told = ask(&["--backend", "all"]).fine().err;
    assert!(told.contains("left out: CPU_MLA: no case is for its kind of layer"), "{told}");
    ask(&["--backend", "CPU_ATTN,NOBODY"]).refused(&["named NOBODY"]);
    ask(&["--backend", "all", "--kv-layout", "XYZ"]).refused(&["--kv-layout XYZ"]);
    ask(&["--plot", "/nowhere/at/all.svg"]).refused(&["/nowhere/at/all.svg", "no such folder"]);
    ask(&["--plot", dir.path().to_str().unwrap()]).refused(&["is a folder"]);
    ask(&["--marks", marks_arg]).refused(&["--plot"]);
    std::fs::write(&marks, "{\"backend\": 1}\n").unwrap();
    ask(&["--plot", plot_arg, "--marks", marks_arg]).refused(&["m.jsonl: line 1: "]);
}
