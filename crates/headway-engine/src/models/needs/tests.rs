use super::*;
use crate::loading::gguf::write::GgufWriter;
use serde_json::json;

fn read(json: &Value) -> Result<ModelNeeds, String> {
    ModelNeeds::from_config("config.json", json).map_err(|e| e.to_string())
}

fn fixture(name: &str) -> ModelNeeds {
    let path = format!("{}/../../testdata/configs/{name}.json", env!("CARGO_MANIFEST_DIR"));
    read(&crate::loading::json::read(path.as_ref()).unwrap()).unwrap()
}

fn reaches(n: &ModelNeeds) -> Vec<Reach> {
    n.mixers
        .iter()
        .filter_map(|m| if let MixerNeeds::Attention(a) = &m.mixer { Some(a.reach) } else { None })
        .collect()
}

fn layers_with_state(n: &ModelNeeds) -> Vec<usize> {
    n.mixers.iter().filter(|m| matches!(m.mixer, MixerNeeds::State(_))).map(|m| m.layer).collect()
}

#[test]
fn windows_in_every_spelling() {
    let five_of_six = fixture("gemma-3-12b");
    assert_eq!(five_of_six.mixers.len(), 48);
    assert_eq!(reaches(&five_of_six)[4..7], [Reach::Window(1024), Reach::All, Reach::Window(1024)]);
    assert!(five_of_six.multimodal);
    assert_eq!(reaches(&fixture("gpt-oss-20b"))[..2], [Reach::Window(128), Reach::All]);
    assert_eq!(reaches(&fixture("exaone-4.0-32b"))[2..4], [Reach::Window(4096), Reach::All]);
    assert!(reaches(&fixture("mistral-7b-v0.1")).iter().all(|r| *r == Reach::Window(4096)));
    assert!(reaches(&fixture("qwen2.5-7b")).iter().all(|r| *r == Reach::All));
    assert_eq!(reaches(&fixture("llama-4-scout"))[2..4], [Reach::Chunk(8192), Reach::All]);
    // No list of layers: the period, or what the model type means.
    let base = json!({"architectures": ["X"], "model_type": "gemma3_text", "num_hidden_layers": 12, "hidden_size": 64});
    assert_eq!(reaches(&read(&base).unwrap())[4..6], [Reach::Window(4096), Reach::All]);
}

#[test]
fn states_in_every_spelling() {
    let h = fixture("nemotron-h-56b");
    assert_eq!((h.num_layers, layers_with_state(&h).len(), reaches(&h).len()), (118, 54, 10));
    assert_eq!(reaches(&fixture("jamba-v0.1")).len(), 4);
    assert_eq!(reaches(&fixture("bamba-9b")).len(), 3);
    let granite = fixture("granite-4.0-h-350m");
    assert!([10, 13, 17, 27].iter().all(|l| !layers_with_state(&granite).contains(l)));
    let both = fixture("falcon-h1");
    assert_eq!((both.mixers.len(), both.num_layers), (64, 32));
    assert!(reaches(&fixture("mamba2")).is_empty());
    // Counted from 1: the fourth layer is layer 3.
    let kimi = fixture("kimi-k3");
    assert!(matches!(kimi.mixers[3].mixer, MixerNeeds::Mla(_)));
    assert!(matches!(kimi.mixers[2].mixer, MixerNeeds::State(StateDims::KimiDelta { heads: 96, .. })));
    assert!(matches!(
        fixture("qwen3.5-27b").mixers[0].mixer,
        MixerNeeds::State(StateDims::GatedDelta { value_heads: 48, .. })
    ));
}

#[test]
fn bytes_of_states() {
    // As engines report them: 1,594,368 bytes in bfloat16; 5,316,608 with the state in float32.
    let bytes = |d: StateDims| -> usize {
        let (shapes, types) = d.tensors(1, 0, DType::BF16);
        shapes.iter().zip(types).map(|(s, t)| s.iter().product::<usize>() * t.size()).sum()
    };
    let falcon = StateDims::Mamba2 {
        heads: 48,
        head_dim: 64,
        groups: 1,
        state: 256,
        conv: 4,
        chunk: 256,
        dtype: None,
    };
    assert_eq!(bytes(falcon), 1_594_368);
    let nemotron = StateDims::Mamba2 {
        heads: 128,
        head_dim: 80,
        groups: 8,
        state: 128,
        conv: 4,
        chunk: 128,
        dtype: Some(DType::F32),
    };
    assert_eq!(bytes(nemotron), 5_316_608);
    // One group on two ranks is there twice.
    assert_eq!(falcon.tensors(2, 0, DType::BF16).0[0], [3, (3072 + 2 * 2 * 256) / 2]);
}

#[test]
fn latents() {
    let v3 = fixture("deepseek-v3");
    let MixerNeeds::Mla(m) = v3.mixers[0].mixer else { panic!("not latent") };
    assert_eq!((m.num_heads, m.head_size(), m.v_head_dim, m.index_topk), (128, 576, 128, None));
    assert_eq!(v3.quantisation.as_deref(), Some("fp8 (e4m3)"));
    let MixerNeeds::Mla(m) = fixture("deepseek-v3.2").mixers[0].mixer else { panic!("not latent") };
    assert_eq!(m.index_topk, Some(2048));
    assert_eq!(fixture("longcat-flash").mixers.len(), 56);
}

#[test]
fn heads_of_their_own() {
    let MixerNeeds::Attention(a) = &fixture("mimo-v2-flash").mixers[1].mixer else { panic!() };
    assert_eq!((a.num_kv_heads, a.head_size, a.head_size_v, a.sinks), (8, 192, 128, true));
    let MixerNeeds::Attention(a) = &fixture("gemma-4-26b-a4b").mixers[5].mixer else { panic!() };
    assert_eq!((a.num_kv_heads, a.head_size, a.mm_prefix), (2, 512, true));
    let nas = fixture("nemotron-super-49b");
    assert!(nas.mixers.len() < nas.num_layers);
    let shared = fixture("gemma-3n");
    assert_eq!(shared.mixers[34].shares_cache_of, Some(19));
    assert_eq!(shared.mixers[33].shares_cache_of, Some(18));
}

#[test]
fn masks_as_the_plan_has_them() {
    let base = json!({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2,
        "hidden_size": 64, "num_attention_heads": 4, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"]});
    let masks = |more: Value| -> Vec<(Reach, bool, bool)> {
        let mut config = base.clone();
        more.as_object().unwrap().iter().for_each(|(k, v)| config[k] = v.clone());
        let of = |l: &LayerNeeds| match &l.mixer {
            MixerNeeds::Attention(a) => (a.reach, a.causal, a.mm_prefix),
            _ => panic!("not softmax attention"),
        };
        read(&config).unwrap().mixers.iter().map(of).collect()
    };
    let (window, all) = (Reach::Window(8), Reach::All);
    assert_eq!(masks(json!({})), [(window, true, false), (all, true, false)]);
    assert_eq!(masks(json!({"is_causal": false})), [(window, false, false), (all, false, false)]);
    assert_eq!(masks(json!({"dflash_config": {}})), [(window, true, false), (all, false, false)]);
    assert_eq!(masks(json!({"is_mm_prefix_lm": true})), [(window, true, true), (all, true, true)]);
    assert_eq!(masks(json!({"rswa_window": 4})), [(window, true, false), (Reach::Rswa(4), true, false)]);
}

#[test]
fn experts_by_their_many_names() {
    for (name, experts) in [
        ("gpt-oss-120b", Some((4, 128))),
        ("deepseek-v3", Some((8, 256))),
        ("kimi-k3", Some((16, 896))),
        ("longcat-flash", Some((12, 512))),
        ("gemma-4-26b-a4b", Some((8, 128))),
        ("granite-4.0-h-350m", None),
        ("qwen3-8b", None),
    ] {
        assert_eq!(fixture(name).experts, experts, "{name}");
    }
}

#[test]
fn encoders() {
    let w = fixture("whisper-tiny");
    assert_eq!((w.mixers.len(), w.max_encoder_tokens, w.max_model_len), (4 + 8, 1500, Some(448)));
    assert_eq!(fixture("bert-base").mixers.len(), 12);
}

/// A header of an architecture, with one tensor.
fn gguf(arch: &str, fields: &[(&str, u32)]) -> Result<ModelNeeds, String> {
    let weight = headway_tensor::Weight::from_f32("w", vec![2], &[1.0, 2.0]).unwrap();
    let named = fields.iter().map(|(k, v)| (format!("{arch}.{k}"), *v));
    let writer = named.fold(GgufWriter::new(arch), |w, (k, v)| w.u32(&k, v));
    let bytes = headway_tensor::SharedBytes::new(writer.tensor(&weight).finish());
    let file = GgufFile::from_bytes("m.gguf".as_ref(), bytes).map_err(|e| e.to_string())?;
    ModelNeeds::from_gguf(&file).map_err(|e| e.to_string())
}

#[test]
fn gguf_headers() {
    let heads = [("embedding_length", 64), ("attention.head_count", 4), ("attention.head_count_kv", 2)];
    let with = |more: &[(&'static str, u32)]| [&heads, more].concat();
    let gemma = gguf("gemma3", &with(&[("block_count", 6), ("attention.sliding_window", 512)])).unwrap();
    assert_eq!(reaches(&gemma), [[Reach::Window(512); 5].as_slice(), &[Reach::All]].concat());
    assert_eq!((gemma.head_size, gemma.dtype), (Some(16), Some(DType::F32)));
    let latent = with(&[
        ("block_count", 1),
        ("attention.kv_lora_rank", 512),
        ("rope.dimension_count", 64),
        ("attention.key_length_mla", 192),
        ("attention.value_length_mla", 128),
    ]);
    let MixerNeeds::Mla(m) = gguf("deepseek2", &latent).unwrap().mixers[0].mixer else {
        panic!("not latent")
    };
    assert_eq!((m.head_size(), m.qk_nope_head_dim, m.v_head_dim), (576, 128, 128));
    let states =
        [("block_count", 2), ("ssm.state_size", 16), ("ssm.inner_size", 128), ("ssm.conv_kernel", 4)];
    assert_eq!(layers_with_state(&gguf("mamba", &states).unwrap()), [0, 1]);
    assert!(gguf("llama", &heads).unwrap_err().contains("llama.block_count"));
}

#[test]
fn what_is_missing_is_named() {
    let base = json!({"architectures": ["X"], "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64});
    assert!(read(&base).is_ok());
    for field in ["num_hidden_layers", "num_attention_heads", "hidden_size"] {
        let mut j = base.clone();
        j.as_object_mut().unwrap().remove(field);
        let e = read(&j).unwrap_err();
        assert!(e.starts_with("config.json: ") && e.contains(field) && e.contains("is missing"), "{e}");
    }
    for (field, value, words) in [
        ("num_key_value_heads", json!(3), "must divide the 4 attention heads"),
        ("layer_types", json!(["full_attention"]), "has 1 entries for 2 layers"),
        (
            "layer_types",
            json!(["full_attention", "telepathy"]),
            "layer_types with telepathy is not supported",
        ),
        ("layer_types", json!(["sliding_attention", "full_attention"]), "sliding_window is missing"),
        ("torch_dtype", json!("int3"), "supported: bfloat16"),
        ("hidden_size", json!("big"), "a positive whole number"),
        ("hybrid_override_pattern", json!("MX"), "has the letter X"),
        ("kv_lora_rank", json!(512), "qk_nope_head_dim is missing"),
    ] {
        let mut j = base.clone();
        j[field] = value;
        let e = read(&j).unwrap_err();
        assert!(e.contains(words), "{e}");
    }
    assert!(read(&json!([])).unwrap_err().contains("not a JSON object"));
}
