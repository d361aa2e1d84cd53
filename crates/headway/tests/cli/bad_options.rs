//! Options and prompts that can't be: one line each, naming the option.

use super::support::{Copy, file, finish, generate, headway, llama, run, without_tokenizer};
use headway_testkit::testdata;
use serde_json::json;

#[test]
fn numbers_out_of_range() {
    for (args, words) in [
        (["--max-tokens", "0"], "'--max-tokens <N>': give a whole number of at least 1"),
        (["--max-tokens", "-1"], "invalid value '-1' for '--max-tokens <N>'"),
        (["--max-tokens", "many"], "'--max-tokens <N>'"),
        (["--max-tokens", "18446744073709551615"], "--max-tokens"),
        (["--temperature", "-0.5"], "--temperature must be a finite number of at least 0"),
        (["--temperature", "nan"], "--temperature"),
        (["--temperature", "hot"], "'--temperature <T>': give a number"),
        (["--top-k", "-1"], "'--top-k <K>'"),
        (["--top-p", "0"], "--top-p must be above 0 and at most 1"),
        (["--min-p", "2"], "--min-p must be from 0 to 1"),
        (["--repetition-penalty", "0"], "--repetition-penalty must be from 0.01 to 100, got 0"),
        (["--presence-penalty", "2.5"], "--presence-penalty must be from -2 to 2, got 2.5"),
        (["--frequency-penalty", "-3"], "--frequency-penalty must be from -2 to 2, got -3"),
        (["--logit-bias", "5"], "'--logit-bias <ID=BIAS>': give token ids with what is added"),
        (["--logit-bias", "5=200"], "--logit-bias must be from -100 to 100, got 200"),
        (["--logit-bias", "5=1,512=1"], "--logit-bias: token 512 is outside the vocabulary of 512"),
        (["--min-tokens", "129"], "--min-tokens must be at most --max-tokens, got 129"),
        (["--seed", "-1"], "'--seed <N>'"),
        (["--stop", ""], "--stop must be a string that is not empty"),
        (["--logprobs", "100000"], "--logprobs must be at most 1024"),
        (["--block-size", "0"], "'--block-size <N>': give a whole number of at least 1"),
        (["--block-size", "7"], "--block-size 7: CPU_ATTN takes multiples of 16"),
        (["--block-size", "99999999984"], "--block-size 99999999984: CPU_ATTN takes multiples of 16"),
        (["--max-model-len", "0"], "'--max-model-len <N>'"),
        (["--max-model-len", "2049"], "--max-model-len 2049: the model was made for at most 2048 tokens"),
        (["--max-num-seqs", "0"], "'--max-num-seqs <N>'"),
        (["--max-num-seqs", "1000000000000"], "--max-num-seqs 1000000000000 needs"),
        (["--max-num-batched-tokens", "-3"], "'--max-num-batched-tokens <N>'"),
        (["--max-num-batched-tokens", "18446744073709551615"], "--max-num-batched-tokens"),
        (["--kv-cache-memory", "0"], "'--kv-cache-memory <SIZE>'"),
        (["--kv-cache-memory", "-1GiB"], "'--kv-cache-memory <SIZE>'"),
        (["--kv-cache-memory", "2parsecs"], "unknown unit parsecs; give bytes"),
        (["--kv-cache-memory", "1000"], "raise --kv-cache-memory or lower --block-size"),
        (["--threads", "0"], "'--threads <N>'"),
        (["--threads", "1000000"], "--threads 1000000"),
    ] {
        generate(&llama(), &[args[0], args[1], "hello"]).refused(&[words]);
    }
}

#[test]
fn a_request_that_can_never_fit() {
    // One block besides the null block: 16 tokens.
    let r =
        generate(&llama(), &["--kv-cache-memory", "48KiB", "--prompt-ids", "1,2,3,4", "--max-tokens", "30"]);
    r.refused(&["4 prompt + 30 generated", "lower --max-tokens"]);
    let r = generate(&llama(), &["--max-model-len", "8", "--prompt-ids", "1,2,3,4,5,6,7,8"]);
    r.refused(&["8 prompt + 1 generated", "--max-model-len"]);
}

#[test]
fn values_that_are_unknown_or_not_there_yet() {
    for (args, words) in [
        (["--dtype", "int3"], ["'--dtype <TYPE>'", "there are: auto, float32, bfloat16, float16"]),
        (["--kv-cache-dtype", "int3"], ["--kv-cache-dtype int3", "there are: auto, float32"]),
        (["--kv-layout", "XYZ"], ["--kv-layout XYZ", "there are: NHD, HND"]),
        (["--attention-backend", "CPU_ATT"], ["named CPU_ATT", "(did you mean CPU_ATTN?)"]),
        (["--attention-backend", "CPU_ATTN+CPU_MLS"], ["named CPU_MLS", "(did you mean CPU_MLA?)"]),
        (
            ["--attention-backend", "CPU_ATTN+CPU_MLA"],
            ["backend CPU_ATTN+CPU_MLA: CPU_MLA is for MLA", "composed"],
        ),
        (["--attention-backend", "cpu_attn+CPU_ATTN"], ["both parts are cpu_attn", "leave +CPU_ATTN out"]),
        (
            ["--attention-backend", "CPU_ATTN+CUDA_ATTN"],
            ["CPU_ATTN runs on cpu, CUDA_ATTN on cuda", "one platform"],
        ),
        (["--backend-per-kind", "full=CPU_ATTN+"], ["names 1 backends", "DECODE+PREFILL"]),
        (["--backend-per-kind", "full"], ["--backend-per-kind full", "KIND=BACKEND"]),
        (["--backend-per-kind", "fool=CPU_ATTN"], ["no kind of layer is named fool", "sliding_window"]),
        (["--backend-per-kind", "full=FLASH"], ["named FLASH", "there are: CPU_ATTN"]),
        (["--backend-per-kind", "mla=CPU_ATTN"], ["mla=CPU_ATTN", "a backend for standard attention"]),
        (["--graph-mode", "FULL"], ["--graph-mode FULL", "is not supported with"]),
        (["--graph-mode", "FILL"], ["--graph-mode FILL", "there are: NONE, PIECEWISE"]),
        (["--device", "cuda:0"], ["--threads 1: the threads are the CPU's", "cuda:0"]),
        (["--device", "cuda:x"], ["--device cuda:x", "this build runs on: cpu, cuda"]),
        (["--device", "toaster"], ["--device toaster", "this build runs on: cpu"]),
        (["--tp", "2"], ["--tp 2", "supported: 1"]),
        (["--dcp", "2"], ["--dcp 2", "supported: 1"]),
        (["--micro-batches", "513"], ["--micro-batches 513", "at most 512 tokens"]),
        (["--micro-batch-decode-tokens", "4"], ["--micro-batch-decode-tokens 4", "--micro-batches 2"]),
        (
            ["--kv-sharing-fast-prefill=true", "--json"],
            ["--kv-sharing-fast-prefill true", "LlamaForCausalLM, whose last layer has a cache"],
        ),
        (["--prompt-lookup-min", "2"], ["--prompt-lookup-min 2", "add --speculative-tokens"]),
        (["--speculative-tokens", "512"], ["--speculative-tokens 512", "lower the first to 511"]),
        (["--load-format", "pickle"], ["'--load-format <FORMAT>'", "auto, dummy"]),
        (["--batch-invariant=maybe", "--json"], ["--batch-invariant", "maybe"]),
        (["--tempature", "1"], ["'--tempature'", "'--temperature'"]),
    ] {
        generate(&llama(), &[args[0], args[1], "hello"]).refused(&words);
    }
}

#[test]
fn a_device_that_is_not_there() {
    let mut c = headway();
    c.env_remove("HEADWAY_THREADS").arg("generate").arg("--model").arg(llama());
    // Without a driver that is said; with one there are not so many devices.
    finish(c.args(["--device", "cuda:4000", "hello"])).refused(&["--device cuda:4000: no "]);
}

#[test]
fn options_that_contradict_each_other() {
    for args in [
        &["--prompt-ids", "1,2", "hello"][..],
        &["--prompt-ids", "1,2", "--chat"],
        &["--prompt-file", "x", "hello"],
        &["--batch", "x", "hello"],
        &["--batch", "x", "--prompt-ids", "1"],
    ] {
        generate(&llama(), args).refused(&["cannot be used with", "see headway generate --help"]);
    }
    generate(&llama(), &["hello", "there"]).refused(&["unexpected argument 'there'"]);
    generate(&llama(), &["--max-num-seqs", "64", "--max-num-batched-tokens", "8", "x"])
        .refused(&["--max-num-batched-tokens 8", "--max-num-seqs 64"]);
    run(["pull"]).refused(&["<NAME>", "see headway pull --help"]);
    run(["genrate"]).refused(&["'genrate'", "'generate'"]);
}

#[test]
fn prompts_that_can_not_be() {
    generate(&llama(), &[""]).refused(&["the prompt is empty"]);
    generate(&llama(), &[]).refused(&["standard input is empty"]);
    generate(&llama(), &["--prompt-ids", ""]).refused(&["'--prompt-ids <IDS>'", "as in 1,2,3"]);
    generate(&llama(), &["--prompt-ids", "-1,2"]).refused(&["'--prompt-ids <IDS>'", "at least 0"]);
    generate(&llama(), &["--prompt-ids", "1,two"]).refused(&["'two'", "'--prompt-ids <IDS>'"]);
    generate(&llama(), &["--prompt-ids", "1,512"])
        .refused(&["prompt id 512 is outside the vocabulary of 512; ids go from 0 to 511"]);
    generate(&llama(), &["--prompt-ids", "4294967296"]).refused(&["'--prompt-ids <IDS>'"]);
    generate(&llama(), &["--prompt-file", "/nowhere/prompt.txt"])
        .refused(&["/nowhere/prompt.txt: cannot be read"]);
    let (_dir, empty) = file("empty.txt", b"");
    generate(&llama(), &["--prompt-file", empty.to_str().unwrap()]).refused(&["--prompt-file is empty"]);
    let (_dir, latin) = file("latin.txt", b"caf\xe9");
    generate(&llama(), &["--prompt-file", latin.to_str().unwrap()])
        .refused(&["latin.txt: is not UTF-8 (byte 3)", "convert it"]);
}

#[cfg(unix)]
#[test]
fn bytes_that_are_not_utf_8() {
    use std::{fs::File, os::unix::ffi::OsStrExt};
    let bad = std::ffi::OsStr::from_bytes(b"caf\xe9");
    finish(headway().arg("generate").arg(bad)).refused(&["is not UTF-8", "--prompt-file"]);
    finish(headway().args(["generate", "x"]).env("HEADWAY_MODEL", bad))
        .refused(&["HEADWAY_MODEL is not UTF-8"]);
    let (_dir, latin) = file("latin.txt", b"caf\xe9");
    let input = File::open(latin).unwrap();
    finish(headway().args(["generate", "--model"]).arg(llama()).stdin(input))
        .refused(&["standard input is not UTF-8 (byte 3)"]);
}

#[test]
fn what_needs_a_tokenizer_or_a_template() {
    let bare = without_tokenizer();
    generate(&bare, &["hello"]).refused(&["without a tokenizer", "--prompt-ids"]);
    generate(&bare, &["--prompt-ids", "1", "--stop", "x"]).refused(&["--stop needs a tokenizer"]);
    generate(&bare, &["--chat", "hello"]).refused(&["no chat template", "--chat"]);
    let plain = Copy::with("tokenizer_config.json", &[("chat_template", json!(null))]);
    generate(plain.path(), &["--chat", "hello"]).refused(&["no chat template", "--chat"]);
    finish(headway().arg("chat").arg("--model").arg(plain.path())).refused(&["no chat template"]);
    let broken = Copy::with("tokenizer_config.json", &[("chat_template", json!("{% if %}"))]);
    generate(broken.path(), &["--chat", "hello"]).refused(&["chat template"]);
}

#[test]
fn the_environment_is_held_to_the_same_rules() {
    let with = |name: &str, value: &str| {
        finish(headway().env(name, value).args(["generate", "hello", "--model"]).arg(llama()))
    };
    with("HEADWAY_BLOK_SIZE", "16")
        .refused(&["HEADWAY_BLOK_SIZE is unknown (did you mean HEADWAY_BLOCK_SIZE?)"]);
    with("HEADWAY_BLOCK_SIZE", "abc").refused(&["'abc' for '--block-size <N>'", "(from HEADWAY_BLOCK_SIZE)"]);
    with("HEADWAY_CPU_ISA", "abacus").refused(&["HEADWAY_CPU_ISA=abacus", "portable"]);
    with("HEADWAY_ATTENTION_BACKEND", "FLASH").refused(&["named FLASH"]);
    with("HEADWAY_HUB_TIMEOUT", "soon").refused(&["HEADWAY_HUB_TIMEOUT", "seconds"]);
    finish(headway().env("HEADWAY_TRITON", "1").arg("backends")).refused(&["HEADWAY_TRITON is unknown"]);
}

#[test]
fn configuration_files_are_read_to_the_letter() {
    for (text, words) in [
        ("[backend.CPU_ATTN]\nspeed = 11\n", ["CPU_ATTN", "unknown field `speed`"]),
        ("[backend.cpu_attn]\nspeed = 11\n", ["CPU_ATTN", "unknown field `speed`"]),
        ("[backend.GPU_ATTN]\n", ["[backend.GPU_ATTN]", "there are: CPU_ATTN"]),
        ("[backends.CPU_ATTN]\n", ["unknown field `backends`", "line 1"]),
        (
            "[backend.CPU_MLA]\nworkspace_tokens = 8\n",
            ["CPU_MLA", "workspace_tokens = 8: the workspace holds"],
        ),
        ("[backend.CPU_MLA]\nworkspace = 64\n", ["CPU_MLA", "expected `workspace_tokens`"]),
        (
            "[backend.CPU_MLA]\nworkspace_tokens = nan\n",
            ["backend.CPU_MLA.workspace_tokens is NaN", "finite"],
        ),
        ("[backend.CPU_MLA]\nworkspace_tokens = [-inf]\n", ["workspace_tokens.0 is -inf", "finite"]),
        (
            "[backend.CPU_MLA]\nworkspace_tokens = 'x'\n",
            ["workspace_tokens = \"x\": invalid type", "CPU_MLA"],
        ),
        ("\n[backend\n", ["config.toml", "line 2"]),
        ("block_size = 16\n", ["unknown field `block_size`", "config.toml"]),
    ] {
        let (_dir, path) = file("config.toml", text.as_bytes());
        generate(&llama(), &["--config", path.to_str().unwrap(), "hello"]).refused(&words);
    }
    generate(&llama(), &["--config", "/nowhere.toml", "hello"]).refused(&["/nowhere.toml: cannot be read"]);
    let (_dir, path) = file("config.toml", b"[backend.CPU_ATTN]\n");
    let args = ["--config", path.to_str().unwrap(), "--max-tokens", "1", "hello"];
    generate(&llama(), &args).fine();
}

#[test]
fn a_backend_that_no_layer_of_a_model_of_states_takes() {
    let mamba = testdata::model_dir("tiny-mamba2").unwrap();
    for (name, words) in [("CPU_ATTN", "every layer of this model keeps a state"), ("NOPE", "NOPE")] {
        let asked = ["--attention-backend", name, "--prompt-ids", "5"];
        finish(headway().args(["generate", "--model"]).arg(&mamba).args(asked)).refused(&[words]);
        let told = finish(headway().arg("explain").arg(&mamba).args(&asked[..2]));
        assert!(told.code == Some(1) && told.err.contains(words), "{}", told.err);
    }
    let own = ["--attention-backend", "MAMBA2_ATTN", "--prompt-ids", "5", "--max-tokens", "1"];
    finish(headway().args(["generate", "--model"]).arg(&mamba).args(own)).fine();
}

#[test]
fn measurements_of_sizes_that_nothing_holds() {
    let huge = u64::MAX.to_string();
    for option in ["--prompt-len", "--output-len", "--concurrency", "--num-requests"] {
        let args = ["bench", "engine", option, &huge, "--model"];
        finish(headway().args(args).arg(llama())).refused(&[option, "a whole number from 1 to"]);
    }
    for args in [
        ["--dtype", "fp4", "give bf16, f16 or f32"],
        ["--dtype", "f32,auto", "give bf16, f16 or f32"],
        ["--block-size", &huge, "a whole number from 1 to 1048576"],
        ["--pool", &huge, "lower it"],
    ] {
        let filter = ["bench", "attention", "--filter", "decode_b8_c2048 32/8/128 bf16"];
        run([&filter[..], &args[..2]].concat()).refused(&[args[0], args[2]]);
    }
    for (what, option) in [("attention", "--dtype"), ("builder", "--groups"), ("engine", "--prompt-len")] {
        run(["bench", what, option, "x"]).refused(&[&format!("see headway bench {what} --help")]);
    }
    run(["bench", "engin"]).refused(&["see headway bench --help"]);
    for (option, n) in [("--requests", "100000000"), ("--groups", "33"), ("--requests", &*huge)] {
        run(["bench", "builder", option, n]).refused(&[option, "a whole number from 1 to"]);
    }
}
