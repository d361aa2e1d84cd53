//! Reads tables, and values in them.

use crate::Outcome;
use headway_attention::{
    AttentionSpec, KvCacheSpec, MambaSpec,
    group::kv::spec::{KvQuantMode, MambaCacheMode, StrideAlignment, TokensPerState},
    process::rules::KernelBlockSize,
};
use headway_tensor::DType;
use serde_json::Value;
use std::{fs, io::Read, path::Path};

/// A table file.
pub struct Table(Value);

impl Table {
    /// Reads `name.json` or `name.json.gz` of a directory; `None` where there is neither.
    pub fn read(dir: &Path, name: &str) -> Option<Self> {
        if let Ok(text) = fs::read(dir.join(format!("{name}.json"))) {
            return Some(Self(serde_json::from_slice(&text).expect("a table is JSON")));
        }
        let packed = fs::read(dir.join(format!("{name}.json.gz"))).ok()?;
        let mut text = vec![];
        flate2::read::GzDecoder::new(&packed[..]).read_to_end(&mut text).expect("a table unpacks");
        Some(Self(serde_json::from_slice(&text).expect("a table is JSON")))
    }

    /// The cases.
    pub fn cases(&self) -> &[Value] {
        self.0["cases"].as_array().map_or(&[], Vec::as_slice)
    }

    /// A field of the header.
    pub fn header(&self, name: &str) -> &Value {
        &self.0[name]
    }
}

/// A number; 0 where it is something else.
pub fn num(v: &Value) -> usize {
    v.as_u64().unwrap_or(0) as usize
}

/// A number, where it is one.
pub fn opt(v: &Value) -> Option<usize> {
    v.as_u64().map(|n| n as usize)
}

/// A list of numbers.
pub fn nums(v: &Value) -> Vec<usize> {
    v.as_array().map_or(vec![], |a| a.iter().map(num).collect())
}

/// A flag.
pub fn flag(v: &Value) -> bool {
    v.as_bool().unwrap_or(false)
}

/// A text.
pub fn text(v: &Value) -> &str {
    v.as_str().unwrap_or("")
}

/// Compares, and says both where they differ.
pub fn same<T: PartialEq + std::fmt::Debug>(what: &str, ours: T, theirs: T) -> Outcome {
    if ours == theirs {
        Outcome::Same
    } else {
        Outcome::Differs(format!("{what}: {ours:?}, expected {theirs:?}"))
    }
}

/// The first of several outcomes that isn't equality.
pub fn all(outcomes: impl IntoIterator<Item = Outcome>) -> Outcome {
    let mut worst = Outcome::Same;
    for o in outcomes {
        match o {
            Outcome::Same => {}
            Outcome::Deliberate(_) => worst = o,
            Outcome::Differs(_) | Outcome::NotUnderstood(_) => return o,
        }
    }
    worst
}

/// Whether both failed or neither did.
pub fn same_failure<T>(ours: &headway_attention::Result<T>, expected: &Value) -> Outcome {
    match (ours, expected.is_null()) {
        (Ok(_), false) => Outcome::Differs(format!("no error, expected {expected}")),
        (Err(e), true) => Outcome::Differs(format!("error {e}, expected none")),
        _ => Outcome::Same,
    }
}

/// A list of 32-bit numbers.
pub fn ints(v: &Value) -> Vec<i32> {
    v.as_array().map_or(vec![], |a| a.iter().map(|x| x.as_i64().unwrap_or(0) as i32).collect())
}

/// A nested list, row after row.
pub fn flat(v: &Value) -> Vec<i32> {
    match v {
        Value::Array(a) => a.iter().flat_map(flat).collect(),
        other => vec![other.as_i64().unwrap_or(0) as i32],
    }
}

/// A nested list of floats, row after row; `"inf"`, `"-inf"` and `"nan"` are words.
pub fn floats(v: &Value) -> Vec<f32> {
    match v {
        Value::Array(a) => a.iter().flat_map(floats).collect(),
        Value::String(s) => vec![match s.as_str() {
            "inf" => f32::INFINITY,
            "-inf" => f32::NEG_INFINITY,
            _ => f32::NAN,
        }],
        other => vec![other.as_f64().unwrap_or(0.0) as f32],
    }
}

/// Whether floats agree to about 1e-5; infinities and NaN must be the same.
pub fn close(what: &str, ours: &[f32], theirs: &[f32]) -> Outcome {
    let agree =
        |a: f32, b: f32| a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= 1e-5 + 2e-5 * b.abs();
    match ours.iter().zip(theirs).position(|(&a, &b)| !agree(a, b)) {
        _ if ours.len() != theirs.len() => {
            Outcome::Differs(format!("{what}: {} values, expected {}", ours.len(), theirs.len()))
        }
        Some(i) => Outcome::Differs(format!("{what}[{i}]: {}, expected {}", ours[i], theirs[i])),
        None => Outcome::Same,
    }
}

/// Prefix sum of query lengths.
pub fn starts(query_lens: &Value) -> Vec<i32> {
    let mut q = vec![0];
    for l in ints(query_lens) {
        q.push(q[q.len() - 1] + l);
    }
    q
}

/// A KV cache spec; `None` for a kind or dtype that the contract doesn't have.
pub fn spec(v: &Value) -> Option<KvCacheSpec> {
    let dtype = |v: &Value| serde_json::from_value::<DType>(v.clone()).ok();
    let block = num(&v["block_size"]);
    if text(&v["kind"]) == "MambaSpec" {
        let shapes = v["shapes"].as_array()?.iter().map(nums).collect();
        let dtypes = v["dtypes"].as_array()?.iter().map(dtype).collect::<Option<Vec<_>>>()?;
        let cache_mode = match v.get("mamba_cache_mode") {
            None => MambaCacheMode::None,
            Some(m) => serde_json::from_value(m.clone()).ok()?,
        };
        return Some(KvCacheSpec::Mamba(MambaSpec {
            page_size_padded: opt(&v["page_size_padded"]),
            num_speculative_blocks: num(&v["num_speculative_blocks"]),
            num_prefill_checkpoint_blocks: num(&v["num_prefill_checkpoint_blocks"]),
            cache_mode,
            ..MambaSpec::new(block, shapes, dtypes)
        }));
    }
    let latent = matches!(text(&v["kind"]), "MLAAttentionSpec" | "SlidingWindowMLASpec");
    let base = AttentionSpec::new(block, num(&v["num_kv_heads"]), num(&v["head_size"]), dtype(&v["dtype"])?);
    let attention = AttentionSpec {
        head_size_v: opt(&v["head_size_v"]).unwrap_or(if latent { 0 } else { base.head_size }),
        page_size_padded: opt(&v["page_size_padded"]),
        quant: v
            .get("kv_quant_mode")
            .map_or(Ok(KvQuantMode::None), |q| serde_json::from_value(q.clone()))
            .ok()?,
        num_head_slots: opt(&v["num_head_slots"]),
        state_content_bytes: opt(&v["state_content_bytes"]),
        tokens_per_state: match &v["tokens_per_state"] {
            Value::Null => TokensPerState::ONE,
            Value::Number(n) => TokensPerState { num: n.as_u64()? as usize, den: 1 },
            f => TokensPerState { num: num(&f["num"]), den: num(&f["den"]) },
        },
        alignment: opt(&v["alignment"]),
        block_stride_alignment: match &v["block_stride_alignment"] {
            Value::Null => None,
            Value::Number(n) => Some(StrideAlignment::Bytes(n.as_u64()? as usize)),
            t => Some(StrideAlignment::Tokens(num(&t["multiple_of"]))),
        },
        dcp_sharded: v.get("dcp_sharded").is_none_or(flag),
        non_causal: flag(&v["non_causal"]),
        extra_retained_tokens: num(&v["extra_retained_tokens"]),
        cache_format: v["cache_dtype_str"].as_str().map(Into::into),
        model_version: v["model_version"].as_str().map(Into::into),
        bounded_replay: flag(&v["bounded_replay"]),
        ..base
    };
    let window = num(&v["sliding_window"]);
    let masked = AttentionSpec {
        sliding_window_mask: opt(&v["sliding_window"]),
        chunk_mask: opt(&v["attention_chunk_size"]),
        ..attention.clone()
    };
    Some(match text(&v["kind"]) {
        "FullAttentionSpec" => KvCacheSpec::Full(masked),
        "MLAAttentionSpec" => KvCacheSpec::Mla(masked),
        "SlidingWindowSpec" => KvCacheSpec::SlidingWindow { attention, sliding_window: window },
        "SlidingWindowMLASpec" => KvCacheSpec::SlidingWindowMla { attention, sliding_window: window },
        "ChunkedLocalAttentionSpec" => {
            KvCacheSpec::ChunkedLocal { attention, attention_chunk_size: num(&v["attention_chunk_size"]) }
        }
        "CrossAttentionSpec" => KvCacheSpec::Cross(attention),
        "EncoderOnlyAttentionSpec" => KvCacheSpec::EncoderOnly(attention),
        "RSWASpec" => KvCacheSpec::Rswa { attention, rswa_window: num(&v["rswa_window"]) },
        _ => return None,
    })
}

/// Kernel block sizes.
pub fn block_sizes(v: &Value) -> Vec<KernelBlockSize> {
    let size = |s: &Value| match s {
        Value::Number(n) => KernelBlockSize::Exact(n.as_u64().unwrap_or(0) as usize),
        m => KernelBlockSize::MultipleOf(num(&m["multiple_of"])),
    };
    v.as_array().map_or(vec![], |a| a.iter().map(size).collect())
}
