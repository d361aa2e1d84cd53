//! `tune` and what `--attention-backend tuned` makes of its profile. Not for figures.

use super::support::{Copy, Run, file, finish, generate, headway, llama, run, without_tokenizer};
use headway_testkit::testdata;
use serde_json::{Value, json};
use std::{fs, path::Path, sync::OnceLock};
use tempfile::TempDir;

/// The smallest run that has a choice.
const SMALL: [&str; 14] = [
    "--batches",
    "1,2",
    "--contexts",
    "48",
    "--prompts",
    "24",
    "--repetitions",
    "1",
    "--block-sizes",
    "16,32",
    "--instruction-sets",
    "portable",
    "--weights",
    "decode=1,mixed=1",
];

fn tune(model: &Path, more: &[&str]) -> Run {
    finish(headway().arg("tune").arg("--model").arg(model).args(SMALL).args(more))
}

/// The profile of the Llama checkpoint: measured once.
fn profile() -> &'static Value {
    static PROFILE: OnceLock<Value> = OnceLock::new();
    PROFILE.get_or_init(|| {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("a folder").join("p.json");
        let answer = tune(&llama(), &["--json", "--profile", path.to_str().unwrap()]).fine().object();
        let kept: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(answer["file"], path.to_str().unwrap());
        assert_eq!(answer["profile"], kept);
        assert_eq!(answer["within_spread"], json!([[]]));
        kept
    })
}

/// A change of the profile.
type Change<'a> = &'a dyn Fn(&mut Value);

/// Starts the Llama checkpoint with the profile, changed.
fn start_with(change: Change<'_>, args: &[&str]) -> Run {
    let mut p = profile().clone();
    change(&mut p);
    let (_dir, path) = file("p.json", p.to_string().as_bytes());
    start(&llama(), &path, args)
}

fn start(model: &Path, profile: &Path, args: &[&str]) -> Run {
    let tuned = ["--attention-backend", "tuned", "--profile", profile.to_str().unwrap()];
    generate(model, &[&["--prompt-ids", "1,2,3", "--max-tokens", "4"][..], &tuned[..], args].concat())
}

#[test]
fn every_figure_is_kept_and_one_candidate_is_chosen() {
    let p = profile();
    assert_eq!((&p["format"], &p["machine"]["platform"]), (&json!(1), &json!("cpu")));
    assert_eq!(p["machine"]["threads"], 1);
    assert!(p["measured"].as_str().unwrap().starts_with("20"), "{p}");
    let layers = p["layers"].as_array().unwrap();
    assert_eq!((layers.len(), &layers[0]["layers"]), (1, &json!(3)));
    let all = layers[0]["candidates"].as_array().unwrap();
    assert_eq!(all.iter().map(|c| c["block_size"].as_u64().unwrap()).collect::<Vec<_>>(), [16, 32]);
    for c in all {
        let figures = c["figures"].as_array().unwrap();
        let regimes: Vec<_> = figures.iter().map(|f| f["regime"].as_str().unwrap()).collect();
        assert_eq!(regimes, ["decode_b1_c48", "decode_b2_c48", "prefill_1x24", "mixed_1p24_2d48"]);
        for f in figures {
            let [median, min, max] = ["median_us", "min_us", "max_us"].map(|n| f[n].as_f64().unwrap());
            assert!(0.0 < min && min <= median && median <= max, "{f}");
            assert!(f["share_of_ceiling"].as_f64().unwrap() > 0.0, "{f}");
        }
        assert!(c["score"].as_f64().unwrap() >= 1.0, "{c}");
    }
    // The first stays unless the other is better by more than the margin.
    let score = |i: usize| all[i]["score"].as_f64().unwrap();
    let chosen = if score(1) * 1.02 < score(0) { 32 } else { 16 };
    assert_eq!(p["setting"], json!({"instruction_set": "portable", "block_size": chosen}));
    assert_eq!(layers[0]["backend"], "CPU_ATTN");
}

#[test]
fn start_up_and_explain_give_the_figures_as_the_reason() {
    let told = start_with(&|_| (), &["-v"]).fine().err;
    let size = profile()["setting"]["block_size"].as_u64().unwrap();
    for text in [
        "measured 20",
        " with blocks of ",
        ": decode ",
        " us, mixed ",
        &format!("option     block_size: {size} (not asked): measured: the quickest"),
        "option     attention_backend: CPU_ATTN (tuned): measured 20",
    ] {
        assert!(told.contains(text), "{text:?} is missing\n{told}");
    }
    // On a machine that has more.
    assert!(told.contains("attention in portable") || told.contains("cpu, portable,"), "{told}");
    // What the user says goes first.
    let told = start_with(&|_| (), &["-v", "--block-size", "64"]).fine().err;
    assert!(told.contains("CPU_ATTN, blocks of 64"), "{told}");
    let (_dir, path) = file("p.json", profile().to_string().as_bytes());
    let explain = |more: &[&str]| {
        let tuned = ["--attention-backend", "tuned", "--profile", path.to_str().unwrap()];
        finish(headway().arg("explain").arg(llama()).args(tuned).args(more))
    };
    let report = explain(&["--json"]).fine().object();
    assert!(report["groups"][0]["measured"].as_str().unwrap().starts_with("measured 20"), "{report}");
    assert_eq!(report["groups"][0]["block_size"], size);
    let told = explain(&[]).fine().out;
    assert!(told.contains("  because  measured 20") && told.contains("tuned      measured 20"), "{told}");
    explain(&["--engine", "vllm"]).refused(&["--attention-backend tuned", "--engine headway"]);
    let h200 = explain(&["--device", "h200"]);
    h200.refused(&["platform: cpu in the profile, cuda here", "run headway tune"]);
}

#[test]
fn a_profile_of_elsewhere_is_refused_by_what_differs() {
    let cases: [(Change<'_>, &[&str], &str); 11] = [
        (&|p| p["machine"]["device"] = "Z80".into(), &[], "device: Z80 in the profile, "),
        (&|p| p["machine"]["instruction_set"] = "mmx".into(), &[], "instruction set: mmx in the profile, "),
        (&|p| p["machine"]["driver"] = "13.0".into(), &[], "driver: 13.0 in the profile, none here"),
        (&|p| p["versions"]["headway"] = "0.0.1".into(), &[], "headway: 0.0.1 in the profile, "),
        (&|p| p["versions"]["backends"] = "MINE".into(), &[], "backends: MINE in the profile, CPU_ATTN "),
        (&|p| p["layers"][0]["layers"] = 7.into(), &[], "layers: 7 in the profile, 3 here"),
        (&|_| (), &["--threads", "2"], "threads: 1 in the profile, 2 here"),
        (&|_| (), &["--kv-cache-dtype", "float32"], "kv_cache_dtype: bfloat16 in the profile, float32 here"),
        (&|_| (), &["--speculative-tokens", "2"], "num_speculative_tokens: none in the profile, 2 here"),
        (&|_| (), &["--kv-layout", "NHD"], "--kv-layout: none in the profile, LBNHC here"),
        (&|p| p["kv_layout"] = "LBHNC".into(), &[], "--kv-layout: LBHNC in the profile, none here"),
    ];
    for (change, args, what) in cases {
        start_with(change, args).refused(&[
            "p.json was measured under other conditions: ",
            what,
            "run headway tune",
        ]);
    }
    let (_dir, path) = file("p.json", profile().to_string().as_bytes());
    start(&without_tokenizer(), &path, &[]).refused(&["under other conditions", "in the profile"]);
}

#[test]
fn a_backend_that_this_program_lacks_is_named() {
    // As a program with a plugin would have written it.
    let plugin: Change<'_> = &|p| {
        p["layers"][0]["backend"] = "MINE".into();
        for c in p["layers"][0]["candidates"].as_array_mut().unwrap() {
            c["backend"] = "MINE".into();
        }
    };
    start_with(plugin, &[]).refused(&["backend MINE: chosen in the profile", "none of that name"]);
    // Names that are there, and can't be one.
    let twice: Change<'_> = &|p| {
        p["layers"][0]["backend"] = "CPU_ATTN+CPU_ATTN".into();
        for c in p["layers"][0]["candidates"].as_array_mut().unwrap() {
            c["backend"] = "CPU_ATTN+CPU_ATTN".into();
        }
    };
    let r = start_with(twice, &[]);
    r.refused(&["p.json", "backend CPU_ATTN+CPU_ATTN: chosen in the profile, and "]);
    assert!(!r.err.contains("none of that name"), "{}", r.err);
}

#[test]
fn what_is_no_profile_is_refused_by_its_file() {
    let corrupt = ["not a profile of headway tune: ", "run headway tune"];
    let figure = |x: Value| {
        move |p: &mut Value| p["layers"][0]["candidates"][0]["figures"][0]["median_us"] = x.clone()
    };
    let cases: [(Change<'_>, &str); 11] = [
        (&|p| p["layers"][0]["what"] = "\u{1b}[2J".into(), "layers[0].what has control characters"),
        (&|p| p["measured"] = "today".into(), "measured \"today\" is no time"),
        (&|p| p["layers"][0]["candidates"][0]["score"] = 0.5.into(), "CPU_ATTN has a score below 1"),
        (&|p| *p = json!({}), "it has no number \"format\""),
        (&|p| p["format"] = 99.into(), "of form 99"),
        (&|p| p["also"] = 1.into(), "unknown field `also`"),
        (&|p| drop(p.as_object_mut().unwrap().remove("machine")), "missing field `machine`"),
        (&figure((-1).into()), "decode_b1_c48 has a time that is none"),
        (&figure("quick".into()), "invalid type"),
        (&|p| p["layers"][0]["backend"] = "OTHER".into(), "OTHER was chosen, and there are no figures of it"),
        (&|p| p["setting"]["block_size"] = 0.into(), "no block has"),
    ];
    for (change, what) in cases {
        start_with(change, &[]).refused(&["p.json: ", corrupt[0], what, corrupt[1]]);
    }
    for text in [&b""[..], b"{", b"\xff\xfe", b"[1, 2]", b"\"tuned\""] {
        let (_dir, path) = file("cut.json", text);
        start(&llama(), &path, &[]).refused(&["cut.json: ", corrupt[0]]);
    }
    let dir = TempDir::new().unwrap();
    start(&llama(), dir.path(), &[]).refused(&["is no file"]);
    start(&llama(), &dir.path().join("none.json"), &[])
        .refused(&["none.json is not there", "run headway tune"]);
    // A setting that another machine has, in a profile that says it is this one's.
    start_with(
        &|p| {
            p["setting"]["instruction_set"] = "mmx".into();
            for c in p["layers"][0]["candidates"].as_array_mut().unwrap() {
                c["setting"]["instruction_set"] = "mmx".into();
            }
        },
        &[],
    )
    .refused(&[
        "p.json: instruction set mmx is not one of this machine's: ",
        "portable",
        "run headway tune",
    ]);
    // Nor does a backend take each number of tokens.
    start_with(
        &|p| {
            p["setting"]["block_size"] = 17.into();
            for c in p["layers"][0]["candidates"].as_array_mut().unwrap() {
                c["setting"]["block_size"] = 17.into();
            }
        },
        &[],
    )
    .refused(&["p.json: ", "CPU_ATTN", "block_size not supported", "run headway tune"]);
}

#[test]
fn without_a_file_a_profile_lies_by_device_and_layers() {
    let dir = TempDir::new().unwrap();
    let here = |c: &mut std::process::Command| finish(c.env("XDG_CACHE_HOME", dir.path()));
    let ask = || {
        let args = ["--prompt-ids", "1,2,3", "--max-tokens", "2", "--attention-backend", "Tuned"];
        let mut c = headway();
        c.arg("generate").arg("--model").arg(llama()).args(args);
        here(&mut c)
    };
    ask().refused(&["headway/profiles/", ".json is not there", "run headway tune"]);
    let mut c = headway();
    c.arg("tune").arg("--model").arg(llama()).args(SMALL);
    let table = here(&mut c).fine().out;
    let kept: Vec<_> = fs::read_dir(dir.path().join("headway").join("profiles")).unwrap().collect();
    assert_eq!(kept.len(), 1, "{table}");
    let name = kept[0].as_ref().unwrap().file_name().into_string().unwrap();
    assert!(table.contains(&name) && table.contains("3 layers of 6/2 heads of 64"), "{table}");
    let rows: Vec<&str> = table.lines().skip_while(|l| !l.contains("backend   in")).take(3).collect();
    assert_eq!(rows.len(), 3, "{table}");
    assert!(rows.iter().all(|r| r.len() == rows[0].len()), "{table}");
    // A single sample has no spread.
    assert!(!table.contains("within the spread"), "{table}");
    assert_eq!(rows.iter().filter(|r| r.starts_with(" *")).count(), 1, "{table}");
    ask().fine();
}

#[test]
fn what_cannot_be_tuned_or_asked() {
    let model = llama();
    let one = |args: &[&str]| finish(headway().arg("tune").arg("--model").arg(&model).args(args));
    one(&["--instruction-sets", "mmx"]).refused(&["--instruction-sets mmx", "portable"]);
    one(&["--weights", "speed=1"]).refused(&["--weights", "decode, prefill, mixed"]);
    one(&["--weights", "decode=0"]).refused(&["--weights", "one is not 0"]);
    one(&["--weights", "decode=1,decode=2"]).refused(&["--weights", "decode is named twice"]);
    one(&["--repetitions", "1001"]).refused(&["--repetitions", "1 to 1000"]);
    one(&["--block-sizes", "16,8,32"]).refused(&["--block-sizes 8: CPU_ATTN takes multiples of"]);
    let per_kind = ["--backend-per-kind", "full=CPU_ATTN"];
    one(&per_kind).refused(&["--backend-per-kind full=CPU_ATTN", "tune measures all that fit"]);
    let per_kind = ["--prompt-ids", "1", "--backend-per-kind", "full=Tuned"];
    generate(&model, &per_kind).refused(&["--backend-per-kind full=Tuned", "--attention-backend tuned"]);
    finish(headway().arg("explain").arg(&model).args(&per_kind[2..]))
        .refused(&["--backend-per-kind full=Tuned", "--attention-backend tuned"]);
    one(&["--batches", "0"]).refused(&["--batches", "1 to 65536"]);
    one(&["--block-sizes", "16", "--block-size", "16"]).refused(&["cannot be used with"]);
    one(&["--attention-backend", "CPU_ATTN"]).refused(&["--attention-backend CPU_ATTN", "leave it out"]);
    one(&["--block-size", "17"]).refused(&["No valid attention backend", "block_size not supported"]);
    let states = testdata::model_dir("tiny-mamba2").unwrap();
    tune(&states, &[]).refused(&["none of its layers is measured", "mamba2 state"]);
    generate(&model, &["--prompt-ids", "1", "--profile", "p.json"]).refused(&["--profile p.json", "tuned"]);
    // Of these no run of tune would help.
    let tuned = ["--prompt-ids", "1", "--attention-backend", "tuned"];
    let r = generate(&states, &tuned);
    r.refused(&["tune measures none of this model's layers", "mamba2 state", "leave it out"]);
    let h200 = ["--device", "h200", "--attention-backend", "tuned"];
    finish(headway().env("HEADWAY_CACHE_DIR", "/nowhere").arg("explain").arg(&model).args(h200))
        .refused(&["is not there; run headway tune on a machine with such a card", "9.0"]);
    // Known before anything is measured.
    let (_dir, notes) = file("notes.txt", b"of mine");
    one(&["--profile", notes.to_str().unwrap()])
        .refused(&["notes.txt: is there and no profile of headway tune", "name another file with --profile"]);
    assert_eq!(fs::read(&notes).unwrap(), b"of mine");
    one(&["--profile", "/dev/null"]).refused(&["/dev/null: is no regular file"]);
    let dir = TempDir::new().unwrap();
    one(&["--profile", dir.path().to_str().unwrap()]).refused(&["is a folder; name a file"]);
    let (_dir, under) = file("file", b"");
    one(&["--profile", under.join("p.json").to_str().unwrap()]).refused(&["file/p.json"]);
    let (_dir, config) = file("c.toml", b"[backend.CPU_ATTN]\n");
    start_with(&|_| (), &["--config", config.to_str().unwrap()])
        .refused(&["--config [backend.CPU_ATTN]", "measured without tables"]);
    // Standing in the environment a profile asks for nothing.
    let mut c = headway();
    let args = ["--prompt-ids", "1", "--max-tokens", "1"];
    finish(c.env("HEADWAY_PROFILE", "none.json").arg("generate").arg("--model").arg(&model).args(args))
        .fine();
    let mut c = headway();
    let tuned = ["--attention-backend", "tuned"];
    finish(
        c.env("HEADWAY_PROFILE", "none.json")
            .arg("generate")
            .arg("--model")
            .arg(&model)
            .args(args)
            .args(tuned),
    )
    .refused(&["none.json is not there"]);
    run(["tune", "--model", "/nowhere/at/all"]).refused(&["/nowhere/at/all"]);
    let broken = Copy::with("config.json", &[("num_attention_heads", json!(0))]);
    tune(broken.path(), &[]).refused(&["num_attention_heads"]);
}

/// Decodes of as many tokens as a step would have of them.
#[test]
fn drafts_are_measured_as_they_will_run() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("p.json");
    let drafts = ["--speculative-tokens", "2"];
    let small = &SMALL[..8];
    let mut c = headway();
    c.arg("tune")
        .arg("--model")
        .arg(llama())
        .args(small)
        .args(["--json", "--block-sizes", "16,32,16"])
        .args(drafts);
    let told = finish(c.args(["--instruction-sets", "portable", "--profile"]).arg(&path)).fine().object();
    let all = told["profile"]["layers"][0]["candidates"].as_array().unwrap();
    assert_eq!(all.len(), 2, "each block size once: {told}");
    start(&llama(), &path, &drafts).fine();
}

/// Windows, sinks, latents, and states beside attention.
#[test]
fn layers_of_every_kind_are_measured_or_said_not_to_be() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("p.json");
    for (model, kinds, unmeasured) in
        [("tiny-gpt-oss", 2, 0), ("tiny-deepseek-v2-yarn", 1, 0), ("tiny-bamba", 2, 1)]
    {
        let model = testdata::model_dir(model).unwrap();
        let more = ["--json", "--block-sizes", "16", "--profile", path.to_str().unwrap()];
        let small = &SMALL[..8];
        let told =
            finish(headway().arg("tune").arg("--model").arg(&model).args(small).args(more)).fine().object();
        let layers = told["profile"]["layers"].as_array().unwrap();
        let not: Vec<_> = layers.iter().filter(|l| l.get("not_measured").is_some()).collect();
        assert_eq!((layers.len(), not.len()), (kinds, unmeasured), "{told}");
        let chosen = told["profile"]["setting"]["instruction_set"].as_str().unwrap().to_owned();
        for l in layers.iter().filter(|l| l.get("not_measured").is_none()) {
            let all = l["candidates"].as_array().unwrap();
            // Weaker instruction sets may be given up; the chosen one is whole.
            assert!(all.iter().all(|c| c["score"].is_f64() || c["left"].is_string()), "{l}");
            assert!(
                all.iter().any(|c| c["setting"]["instruction_set"] == *chosen && c["score"].is_f64()),
                "{l}"
            );
        }
        start(&model, &path, &[]).fine();
    }
}
