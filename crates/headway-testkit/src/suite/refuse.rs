//! The other side of a rule book: every no must be a refusal with a reason, and every yes that the
//! suite has no run for is named.

use headway_attention::{
    DynBackend, LayerNeed, RuleBook,
    process::rules::{AttnType, KindTag, KvCacheDType},
};
use headway_tensor::DType;

/// A need that the rule book says no to, and what is asked for.
pub struct Asked {
    /// In words.
    pub what: String,
    /// The need, otherwise one that the rule book takes.
    pub need: LayerNeed,
}

const DTYPES: [DType; 9] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::F8E4M3,
    DType::F8E5M2,
    DType::I32,
    DType::I64,
    DType::U8,
    DType::I8,
];

const KV_CACHE_DTYPES: [&str; 10] = [
    "auto",
    "float32",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "int8",
    "not-a-dtype",
];

/// Every need that the rule book says no to, one change away from `taken`.
pub fn asked(rules: &RuleBook, taken: &LayerNeed) -> Vec<Asked> {
    let mut asked = vec![];
    let mut ask = |no: bool, what: String, change: Change<'_>| {
        if no {
            let mut need = taken.clone();
            change(&mut need);
            asked.push(Asked { what, need });
        }
    };
    for d in DTYPES {
        ask(!rules.dtypes.contains(&d), format!("dtype {d}"), &|n| n.dtype = d);
    }
    for name in KV_CACHE_DTYPES {
        let kv = KvCacheDType::from(name);
        ask(!rules.kv_cache_dtypes.contains(&kv), format!("KV cache dtype {kv}"), &|n| {
            n.kv_cache_dtype = Some(kv.clone());
        });
    }
    for h in (0..=520).filter(|&h| !rules.supports_head_size(h)) {
        ask(true, format!("head size {h}"), &|n| (n.head_size, n.head_size_v) = (h, h));
    }
    for b in (0..=64).filter(|&b| !rules.supports_block_size(b)) {
        ask(true, format!("block size {b}"), &|n| n.block_size = Some(b));
    }
    for t in [AttnType::Decoder, AttnType::Encoder, AttnType::EncoderOnly, AttnType::EncoderDecoder] {
        ask(!rules.attn_types.contains(&t), format!("attention type {t:?}"), &|n| n.attn_type = t);
    }
    for k in [KindTag::Standard, KindTag::Mla, KindTag::StateSpace] {
        ask(k != rules.kind, format!("{} layers", k.name()), &|n| n.kind = k);
    }
    ask(true, "another platform".into(), &|n| n.platform = format!("not-{}", rules.platform).into());
    ask(!rules.supports_different_v_head_size, "another value head size".into(), &|n| n.head_size_v += 1);
    flags(rules, &mut ask);
    asked
}

type Change<'a> = &'a dyn Fn(&mut LayerNeed);

fn flags(rules: &RuleBook, ask: &mut dyn FnMut(bool, String, Change<'_>)) {
    ask(!rules.supports_sliding_window, "a sliding window".into(), &|n| n.sliding_window = Some(8));
    ask(!rules.supports_sinks, "sinks".into(), &|n| n.has_sinks = true);
    ask(!rules.supports_logit_soft_cap, "a soft cap".into(), &|n| n.has_logit_soft_cap = true);
    ask(!rules.supports_alibi, "ALiBi".into(), &|n| n.has_alibi = true);
    ask(!rules.supports_non_causal, "non-causal attention".into(), &|n| n.use_non_causal = true);
    ask(!rules.supports_mm_prefix, "bidirectional ranges".into(), &|n| n.use_mm_prefix = true);
    ask(!rules.supports_rswa, "R-SWA".into(), &|n| n.use_rswa = true);
    ask(!rules.supports_chunked_local, "chunked local attention".into(), &|n| n.use_chunked_local = true);
    ask(!rules.is_sparse, "sparse attention".into(), &|n| n.use_sparse = true);
    ask(!rules.supports_batch_invariance, "batch invariance".into(), &|n| n.use_batch_invariant = true);
    ask(!rules.supports_dcp, "decode context parallelism".into(), &|n| n.use_dcp = true);
    ask(!rules.supports_pcp, "prefill context parallelism".into(), &|n| n.use_pcp = true);
}

/// Every reason against a need, the rule book's and the combination's.
pub fn reasons(backend: &dyn DynBackend, need: &LayerNeed) -> Vec<String> {
    let by_rules = backend.rules().refusals(need);
    by_rules.into_iter().chain(backend.combination(need)).map(|r| r.to_string()).collect()
}

/// The yeses that this suite has no run for. Transfer by a KV connector isn't among them: it moves
/// pages and no kernel takes part.
pub fn without_a_run(rules: &RuleBook) -> Vec<String> {
    let mut left = vec![];
    let mut say = |yes: bool, what: &str| {
        if yes {
            left.push(what.to_owned());
        }
    };
    say(rules.attn_types.contains(&AttnType::Encoder), "attention type Encoder");
    say(rules.attn_types.contains(&AttnType::EncoderOnly), "attention type EncoderOnly");
    say(rules.attn_types.contains(&AttnType::EncoderDecoder), "attention type EncoderDecoder");
    say(rules.supports_chunked_local, "supports_chunked_local");
    say(rules.supports_alibi_sqrt, "supports_alibi_sqrt");
    say(rules.supports_per_head_quant_scales, "supports_per_head_quant_scales");
    say(rules.is_sparse, "is_sparse");
    say(rules.supports_dcp, "supports_dcp");
    say(rules.supports_pcp, "supports_pcp");
    say(rules.supports_kv_cache_update_bypass, "supports_kv_cache_update_bypass");
    for layout in rules.kv_cache_layouts.iter().filter(|l| !l.is_block_compact()) {
        say(true, &format!("layout {layout}"));
    }
    for kv in &rules.kv_cache_dtypes {
        say(kv.element(DType::F32).is_none(), &format!("KV cache dtype {kv}"));
    }
    left
}
