//! `embed`: vectors as JSON lines, and what is refused.

use super::support::{Copy, file, finish, headway, llama};
use headway_testkit::testdata;
use std::path::Path;

fn embed(model: &Path, args: &[&str]) -> super::support::Run {
    finish(headway().arg("embed").arg("--model").arg(model).args(args))
}

#[test]
fn a_vector_of_length_one_or_as_it_comes() {
    let bert = testdata::model_dir("tiny-bert").unwrap();
    let vector = |args: &[&str]| -> Vec<f64> {
        let o = embed(&bert, &[&["--prompt-ids", "5,6,7"], args].concat()).fine().object();
        assert_eq!((&o["index"], &o["tokens"]), (&0.into(), &3.into()));
        o["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let length = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
    let (unit, raw) = (vector(&[]), vector(&["--no-normalize"]));
    assert_eq!(unit.len(), 32);
    assert!((length(&unit) - 1.0).abs() < 1e-5 && (length(&raw) - 1.0).abs() > 1e-2);
    assert!(unit.iter().zip(&raw).all(|(u, r)| (u * length(&raw) - r).abs() < 1e-5));
    assert_ne!(vector(&["--pooling", "first"]), unit);
}

#[test]
fn numbers_that_broke_down_are_no_vector() {
    let copy = Copy::of(&testdata::model_dir("tiny-bert").unwrap());
    let mut bytes = copy.read("model.safetensors");
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header..].fill(0xff);
    copy.write("model.safetensors", &bytes);
    for more in [&[][..], &["--no-normalize"]] {
        let args = [&["--prompt-ids", "5,6"], more].concat();
        embed(copy.path(), &args).refused(&["input 0", "NaN", "check the weights"]);
    }
}

#[test]
fn refusals_say_what_to_do() {
    let bert = testdata::model_dir("tiny-bert").unwrap();
    embed(&bert, &[]).refused(&["no input", "--file", "--prompt-ids"]);
    embed(&bert, &["a text"]).refused(&["without a tokenizer", "token ids"]);
    embed(&bert, &["--prompt-ids", "5,500"]).refused(&["token id 500", "128"]);
    embed(&llama(), &["--prompt-ids", "5"]).refused(&["LlamaForCausalLM", "headway generate"]);
    finish(headway().args(["generate", "--prompt-ids", "1", "--model"]).arg(&bert))
        .refused(&["headway embed"]);
    embed(&bert, &["--file", "no-such-file"]).refused(&["no-such-file", "a text a line"]);
    let (_folder, path) = file("lines.txt", b"\xff\n");
    embed(&bert, &["--file", path.to_str().unwrap()]).refused(&["UTF-8"]);
}
