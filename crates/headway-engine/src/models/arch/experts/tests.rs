//! Families' mixtures out of configs, and configs that can't be.

use super::*;
use serde_json::{Value, json};

fn deepseek() -> Value {
    json!({
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "vocab_size": 256, "max_position_embeddings": 512, "hidden_act": "silu", "moe_intermediate_size": 32,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
    })
}

fn with(base: Value, fields: &[(&str, Value)]) -> Value {
    let mut config = base;
    for (field, value) in fields {
        config[*field] = value.clone();
    }
    config
}

fn layer(config: &Value, i: usize, v3: bool) -> Result<FeedForwardPlan, ModelError> {
    let c = ConfigReader::new("config.json", config);
    let experts = if v3 { DeepSeekExperts::v3(&c)? } else { DeepSeekExperts::v2(&c)? };
    Ok(experts.layer(i, &Names::layer(i), &Sizes::read(&c, 1e-6)?))
}

fn mixture(plan: FeedForwardPlan) -> ExpertsPlan {
    match plan {
        FeedForwardPlan::Experts(e) => e,
        other => panic!("dense: {other:?}"),
    }
}

#[test]
fn deepseek_v3() {
    assert!(matches!(layer(&deepseek(), 0, true).unwrap(), FeedForwardPlan::Gated { .. }));
    let plan = mixture(layer(&deepseek(), 1, true).unwrap());
    let rule = Routing {
        groups: Some(ExpertGroups { count: 4, chosen: 2, score: GroupScore::SumOfTwoBest }),
        renormalize: true,
        scale: 2.5,
        ..Routing::top_k(16, 4, RouterScores::Sigmoid)
    };
    assert_eq!(plan.routing, rule);
    assert_eq!(plan.correction.as_deref(), Some("model.layers.1.mlp.gate.e_score_correction_bias"));
    assert_eq!(plan.router.parts[0].weight, "model.layers.1.mlp.gate.weight");
    let ExpertWeights::Each(each) = &plan.weights else { panic!("{:?}", plan.weights) };
    assert_eq!((each.len(), each[7].0.out_features, each[7].1.in_features), (16, 64, 32));
    assert_eq!(each[7].0.parts[1].weight, "model.layers.1.mlp.experts.7.up_proj.weight");
    let Some(FeedForwardPlan::Gated { gate_up, down, .. }) = plan.shared.as_deref() else { panic!() };
    assert_eq!((gate_up.out_features, down.in_features), (128, 64));
    assert_eq!(down.parts[0].weight, "model.layers.1.mlp.shared_experts.down_proj.weight");
    let one_group = with(deepseek(), &[("n_group", json!(1)), ("topk_group", json!(1))]);
    assert_eq!(mixture(layer(&one_group, 3, true).unwrap()).routing.groups, None);
}

#[test]
fn what_deepseek_v3_leaves_out_is_as_its_config_class_has_it() {
    let mut config = with(deepseek(), &[("n_routed_experts", json!(64))]);
    for field in ["n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob"] {
        config.as_object_mut().unwrap().remove(field);
    }
    let rule = Routing {
        groups: Some(ExpertGroups { count: 8, chosen: 4, score: GroupScore::SumOfTwoBest }),
        renormalize: true,
        scale: 2.5,
        ..Routing::top_k(64, 4, RouterScores::Sigmoid)
    };
    assert_eq!(mixture(layer(&config, 2, true).unwrap()).routing, rule);
    let v2 = Routing::top_k(64, 4, RouterScores::Softmax);
    assert_eq!(mixture(layer(&config, 2, false).unwrap()).routing, v2);
    let no_groups = with(config, &[("n_group", Value::Null)]);
    assert_eq!(mixture(layer(&no_groups, 2, true).unwrap()).routing.groups, None);
}

#[test]
fn deepseek_v2_in_both_ways() {
    let greedy = with(deepseek(), &[("n_group", Value::Null), ("norm_topk_prob", json!(false))]);
    let plan = mixture(layer(&greedy, 2, false).unwrap());
    assert_eq!(plan.routing, Routing { scale: 2.5, ..Routing::top_k(16, 4, RouterScores::Softmax) });
    assert_eq!(plan.correction, None);
    let grouped = with(deepseek(), &[("topk_method", json!("group_limited_greedy"))]);
    let groups = mixture(layer(&grouped, 2, false).unwrap()).routing.groups;
    assert_eq!(groups, Some(ExpertGroups { count: 4, chosen: 2, score: GroupScore::Best }));
    let none = with(deepseek(), &[("n_routed_experts", Value::Null)]);
    assert!(matches!(layer(&none, 3, false).unwrap(), FeedForwardPlan::Gated { .. }));
    let alternate = with(deepseek(), &[("moe_layer_freq", json!(2)), ("n_shared_experts", Value::Null)]);
    assert!(matches!(layer(&alternate, 1, false).unwrap(), FeedForwardPlan::Gated { .. }));
    assert_eq!(mixture(layer(&alternate, 2, false).unwrap()).shared, None);
}

#[test]
fn configs_that_can_not_be_say_which_field_to_change() {
    for (v3, field, value, words) in [
        (true, "num_experts_per_tok", json!(17), "num_experts_per_tok is 17, but n_routed_experts is 16"),
        (
            true,
            "n_routed_experts",
            json!(1 << 30),
            "n_routed_experts is 1073741824; at most 16384 are expected",
        ),
        (true, "num_experts_per_tok", Value::Null, "num_experts_per_tok is missing"),
        (true, "num_experts_per_tok", json!(0), "num_experts_per_tok is 0"),
        (true, "moe_intermediate_size", Value::Null, "moe_intermediate_size is missing"),
        (true, "n_group", json!(3), "n_group is 3; it must divide the 16 experts"),
        (true, "n_group", json!(16), "at least two experts"),
        (true, "topk_group", json!(5), "topk_group is 5"),
        (true, "topk_group", Value::Null, "topk_group is missing"),
        (
            true,
            "topk_method",
            json!("greedy"),
            "topk_method greedy in DeepSeek V3 is not supported; supported: noaux_tc",
        ),
        (false, "topk_method", json!("noaux_tc"), "topk_method noaux_tc in DeepSeek V2 is not supported"),
        (
            false,
            "scoring_func",
            json!("sigmoid"),
            "scoring_func sigmoid is not supported; supported here: softmax",
        ),
        (true, "scoring_func", json!(5), "scoring_func is 5; a string is needed"),
        (true, "first_k_dense_replace", json!(-1), "first_k_dense_replace is -1"),
        (true, "norm_topk_prob", json!("yes"), "true or false is needed"),
    ] {
        let e = layer(&with(deepseek(), &[(field, value)]), 2, v3).unwrap_err().to_string();
        assert!(e.starts_with("config.json: ") && e.contains(words), "{e}");
    }
    let few = with(deepseek(), &[("topk_group", json!(1)), ("num_experts_per_tok", json!(5))]);
    let e = layer(&few, 2, true).unwrap_err().to_string();
    assert!(
        e.contains("topk_group is 1; 5 experts a token must fit in that many of the 4 groups of 4"),
        "{e}"
    );
}

#[test]
fn granite_with_and_without_experts() {
    let base = with(
        deepseek(),
        &[
            ("num_local_experts", json!(8)),
            ("num_experts_per_tok", json!(2)),
            ("shared_intermediate_size", json!(96)),
        ],
    );
    let of = |config: &Value| {
        let c = ConfigReader::new("config.json", config);
        Ok::<_, ModelError>(GraniteExperts::read(&c)?.layer(&Names::layer(3), &Sizes::read(&c, 1e-6)?))
    };
    let plan = mixture(of(&base).unwrap());
    assert_eq!(plan.routing, Routing::top_k(8, 2, RouterScores::SoftmaxOfChosen));
    let ExpertWeights::Stacked { gate_up, interleaved: false, down } = &plan.weights else { panic!() };
    assert_eq!(gate_up[0].weight, "model.layers.3.block_sparse_moe.input_linear.weight");
    assert_eq!((gate_up[0].shape(8), down.shape(8)), ([8, 256, 64], [8, 64, 128]));
    let dense = of(&with(base.clone(), &[("num_local_experts", json!(0))])).unwrap();
    let FeedForwardPlan::Gated { gate_up, .. } = dense else { panic!() };
    assert_eq!(
        (gate_up.parts[0].weight.as_str(), gate_up.out_features),
        ("model.layers.3.shared_mlp.input_linear.weight", 192)
    );
    let neither = with(base, &[("num_local_experts", json!(0)), ("shared_intermediate_size", json!(0))]);
    assert!(of(&neither).unwrap_err().to_string().contains("shared_intermediate_size is missing or 0"));
}

#[test]
fn gpt_oss_by_its_quantisation() {
    let base = with(deepseek(), &[("num_local_experts", json!(8)), ("num_experts_per_tok", json!(2))]);
    let of = |config: &Value| {
        let c = ConfigReader::new("config.json", config);
        let plan =
            GptOssExperts::read(&c).map(|e| e.layer(&Names::layer(0), &Sizes::read(&c, 1e-6).unwrap()));
        plan.map(mixture)
    };
    let plan = of(&base).unwrap();
    assert_eq!(plan.activation, Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 });
    let ExpertWeights::Stacked { gate_up, interleaved: true, down } = &plan.weights else { panic!() };
    assert_eq!((gate_up[0].shape(8), down.shape(8)), ([8, 64, 256], [8, 128, 64]));
    assert_eq!(gate_up[0].bias.as_deref(), Some("model.layers.0.mlp.experts.gate_up_proj_bias"));
    let plan = of(&with(base.clone(), &[("quantization_config", json!({"quant_method": "mxfp4"}))])).unwrap();
    let ExpertWeights::Stacked { gate_up, .. } = &plan.weights else { panic!() };
    assert_eq!(gate_up[0].weight, "model.layers.0.mlp.experts.gate_up_proj_blocks");
    assert_eq!(gate_up[0].shape(8), [8, 256, 64]);
    let e = of(&with(base, &[("swiglu_limit", json!(0))])).unwrap_err().to_string();
    assert!(e.contains("swiglu_limit is 0"), "{e}");
}

#[test]
fn qwen3_names_its_dense_layers() {
    let config = with(
        deepseek(),
        &[("num_experts", json!(8)), ("mlp_only_layers", json!([3])), ("decoder_sparse_step", json!(2))],
    );
    let c = ConfigReader::new("config.json", &config);
    let (experts, sizes) = (QwenExperts::read(&c).unwrap(), Sizes::read(&c, 1e-6).unwrap());
    let sparse = |i| matches!(experts.layer(i, &Names::layer(i), &sizes), FeedForwardPlan::Experts(_));
    assert_eq!([0, 1, 2, 3].map(sparse), [false, true, false, false]);
    for (field, value, words) in [
        ("mlp_only_layers", json!([-1]), "mlp_only_layers is [-1]; a list of layer numbers"),
        ("num_experts_per_tok", json!(9), "num_experts_per_tok is 9, but num_experts is 8"),
        (
            "shared_expert_intermediate_size",
            json!(64),
            "a shared expert behind a gate of its own is not supported",
        ),
    ] {
        let config = with(config.clone(), &[(field, value)]);
        let e = QwenExperts::read(&ConfigReader::new("config.json", &config)).err().unwrap().to_string();
        assert!(e.contains(words), "{e}");
    }
}
