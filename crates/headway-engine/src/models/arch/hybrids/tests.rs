//! Configs of hybrids that contradict themselves, or ask for what isn't computed.

use super::*;
use serde_json::{Value, json};

fn base() -> Value {
    json!({
        "architectures": ["X"], "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 2048,
        "hidden_act": "silu", "shared_intermediate_size": 64,
        "mamba_n_heads": 6, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_d_conv": 4,
        "num_heads": 6, "head_dim": 32, "n_groups": 2, "state_size": 32, "conv_kernel": 4,
        "mamba_num_heads": 6, "mamba_head_dim": 32, "ssm_state_size": 32,
    })
}

type Read = fn(&ConfigReader<'_>) -> Result<ModelPlan, ModelError>;

fn with(read: Read, fields: &[(&str, Value)]) -> Result<ModelPlan, String> {
    let mut config = base();
    for (field, value) in fields {
        config[*field] = value.clone();
    }
    read(&ConfigReader::new("config.json", &config)).map_err(|e| e.to_string())
}

#[track_caller]
fn refused(read: Read, fields: &[(&str, Value)], words: &[&str]) {
    let e = with(read, fields).unwrap_err();
    assert!(e.starts_with("config.json: ") && words.iter().all(|w| e.contains(w)), "{e}");
}

fn kinds(plan: &ModelPlan) -> String {
    let letter = |l: &LayerPlan| match l.mixers.first() {
        Some(MixerPlan::Attention(_)) => '*',
        Some(_) => 'M',
        None => '-',
    };
    plan.layers.iter().map(letter).collect()
}

#[test]
fn bamba_names_its_layers_by_number_or_by_type() {
    let types = json!(["mamba", "attention", "mamba", "attention"]);
    let numbers = json!([1, 3]);
    for fields in [
        vec![("attn_layer_indices", numbers.clone())],
        vec![("layer_types", types.clone())],
        vec![("layer_types", types.clone()), ("attn_layer_indices", numbers)],
    ] {
        assert_eq!(kinds(&with(bamba, &fields).unwrap()), "M*M*", "{fields:?}");
    }
    refused(
        bamba,
        &[("attn_layer_indices", json!([1, 4]))],
        &["attn_layer_indices names layer 4 of 4 layers"],
    );
    let both = [("layer_types", types), ("attn_layer_indices", json!([0]))];
    refused(bamba, &both, &["attn_layer_indices contradicts layer_types", "leave it out"]);
}

#[test]
fn nemotron_lists_its_blocks_once_or_twice_alike() {
    let list = json!(["mamba", "mlp", "attention", "mlp"]);
    let pattern = ("hybrid_override_pattern", json!("M-*-"));
    for fields in [vec![pattern.clone()], vec![("layers_block_type", list.clone())]] {
        assert_eq!(kinds(&with(nemotron_h, &fields).unwrap()), "M-*-");
    }
    assert!(with(nemotron_h, &[pattern.clone(), ("layers_block_type", list)]).is_ok());
    let other = ("layers_block_type", json!(["mamba", "mamba", "attention", "mlp"]));
    refused(
        nemotron_h,
        &[pattern.clone(), other],
        &["layers_block_type contradicts hybrid_override_pattern"],
    );
    refused(nemotron_h, &[pattern.clone(), ("layers_block_type", json!("M-*-"))], &["not a list of strings"]);
    refused(nemotron_h, &[("hybrid_override_pattern", json!(["M", "-"]))], &["a string is needed"]);
    refused(nemotron_h, &[pattern.clone(), ("mlp_hidden_act", json!(2))], &["mlp_hidden_act is 2; a string"]);
    refused(nemotron_h, &[pattern, ("mlp_hidden_act", json!("tanh"))], &["activation tanh", "relu2"]);
}

#[test]
fn mixers_compute_silu_alone() {
    let pattern = ("hybrid_override_pattern", json!("M-*-"));
    let bamba_layers = ("attn_layer_indices", json!([1]));
    let types = ("layer_types", json!(["mamba", "attention", "mamba", "mamba"]));
    for (read, field, also) in [
        (mamba2 as Read, "hidden_act", None),
        (nemotron_h, "mamba_hidden_act", Some(pattern)),
        (bamba, "hidden_act", Some(bamba_layers)),
        (granite_hybrid, "hidden_act", Some(types)),
        (falcon_h1, "hidden_act", None),
    ] {
        let fields = |act: &str| also.clone().into_iter().chain([(field, json!(act))]).collect::<Vec<_>>();
        assert!(with(read, &fields("silu")).is_ok(), "{:?}", with(read, &fields("silu")));
        refused(read, &fields("gelu"), &[field, "gelu in a Mamba-2 mixer", "supported: silu"]);
        let number: Vec<_> = also.clone().into_iter().chain([(field, json!(1))]).collect();
        refused(read, &number, &[field, "is 1; a string is needed"]);
    }
}

#[test]
fn granite_rotates_where_its_config_says_so() {
    let types = ("layer_types", json!(["mamba", "attention", "mamba", "mamba"]));
    let of = |kind: Value| with(granite_hybrid, &[types.clone(), ("position_embedding_type", kind)]);
    assert_eq!(of(json!("rope")).unwrap().ropes.len(), 1);
    assert_eq!(of(json!("nope")).unwrap().ropes.len(), 0);
    assert_eq!(of(Value::Null).unwrap().ropes.len(), 0);
    assert!(of(json!("alibi")).unwrap_err().contains("position_embedding_type alibi is not supported"));
    assert!(of(json!(1)).unwrap_err().contains("a string is needed"));
}

#[test]
fn more_layers_than_any_model_has_are_refused_at_once() {
    let many = [("num_hidden_layers", json!(2147483647))];
    for read in [mamba2 as Read, bamba, granite_hybrid, falcon_h1] {
        refused(read, &many, &["num_hidden_layers is 2147483647; at most 1024"]);
    }
}
