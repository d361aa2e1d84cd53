//! What figures hold for. Two keys that differ say in what, with both values.

use headway_attention::{LayerNeed, process::rules::AttnType};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// A device and what of it is in use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// `cpu` or `cuda`.
    pub platform: String,
    /// The processor's model; the card's name.
    pub device: String,
    /// The CPU's instruction set in force.
    pub instruction_set: Option<String>,
    /// Worker threads of the CPU.
    pub threads: Option<usize>,
    /// The card's compute capability.
    pub compute_capability: Option<String>,
    /// CUDA version of the card's driver.
    pub driver: Option<String>,
}

impl Machine {
    fn fields(&self) -> BTreeMap<String, String> {
        let text = |v: &Option<String>| v.clone().unwrap_or_else(|| "none".into());
        let threads = self.threads.map_or("none".into(), |n| n.to_string());
        [
            ("platform", self.platform.clone()),
            ("device", self.device.clone()),
            ("instruction set", text(&self.instruction_set)),
            ("threads", threads),
            ("compute capability", text(&self.compute_capability)),
            ("driver", text(&self.driver)),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }

    /// In a line, for people.
    pub fn describe(&self) -> String {
        let threads = self.threads.map(|n| format!("{n} threads"));
        let driver = self.driver.as_ref().map(|d| format!("driver for CUDA {d}"));
        let parts = [Some(self.device.clone()), self.instruction_set.clone(), threads, driver];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// The device's name as part of a file's.
    pub(super) fn slug(&self) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { ' ' };
        let words: String = self.device.chars().map(plain).collect();
        words.split_whitespace().collect::<Vec<_>>().join("-")
    }
}

/// Where and with what a program runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Here {
    /// The device.
    pub machine: Machine,
    /// headway's version, the backends of the program, and what the device's crate says of its kernels.
    pub versions: BTreeMap<String, String>,
}

/// A layer's shape: what it needs of a backend, without what the machine and the measured settings say. Fields at
/// their defaults are left out, so that a shape says what is special.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shape(Map<String, Value>);

/// Of a need, the machine's and the measured settings'.
const NOT_OF_THE_SHAPE: [&str; 5] =
    ["platform", "compute_capability", "model_head_size", "block_size", "cpu_has_amx"];
/// What every shape says.
const ALWAYS: [&str; 7] =
    ["kind", "num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_cache_dtype"];

impl Shape {
    /// Of a need.
    pub fn of(need: &LayerNeed) -> Self {
        let object = |need: &LayerNeed| match serde_json::to_value(need) {
            Ok(Value::Object(fields)) => fields,
            _ => Map::new(),
        };
        let usual = object(&LayerNeed::default());
        let mut fields = object(need);
        let says = |name: &str, value: &Value| {
            !NOT_OF_THE_SHAPE.contains(&name) && (ALWAYS.contains(&name) || usual.get(name) != Some(value))
        };
        fields.retain(|name, value| says(name, value));
        Self(fields)
    }

    /// Its fields by name, in words.
    fn fields(&self) -> BTreeMap<String, String> {
        let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
        self.0.iter().map(|(name, value)| (name.clone(), text(value))).collect()
    }
}

/// A layer's shape for people.
pub(super) fn words(need: &LayerNeed) -> String {
    let heads = match need.latent {
        Some(l) => format!("MLA, {} heads over {}+{}", need.num_heads, l.kv_lora_rank, l.qk_rope_head_dim),
        None => format!("{}/{} heads of {}", need.num_heads, need.num_kv_heads, need.head_size),
    };
    let mut text = format!("{heads}, {}", need.dtype);
    if let Some(kv) = &need.kv_cache_dtype {
        text += &format!(", KV cache {kv}");
    }
    if let Some(mixer) = need.state_space {
        text = format!("{} state, {}", mixer.name(), need.dtype);
    }
    if let Some(w) = need.sliding_window {
        text += &format!(", window {w}");
    }
    let special = [
        (need.attn_type != AttnType::Decoder, need.attn_type.name()),
        (need.has_sinks, "sinks"),
        (need.has_logit_soft_cap, "soft cap"),
        (need.has_alibi, "ALiBi"),
        (need.use_rswa, "R-SWA"),
        (need.use_chunked_local, "chunked"),
        (need.use_non_causal, "non-causal"),
        (need.use_batch_invariant, "batch-invariant"),
    ];
    for (_, word) in special.into_iter().filter(|(on, _)| *on) {
        text += &format!(", {word}");
    }
    text
}

/// What names a model's shape in a file's name.
pub(super) fn digest<'a>(layers: impl Iterator<Item = (&'a Shape, usize)>) -> String {
    let mut all: Vec<String> =
        layers.map(|(shape, layers)| format!("{layers} {:?}", shape.fields())).collect();
    all.sort();
    let hash = Sha256::digest(all.join("\n"));
    hash.iter().take(6).map(|b| format!("{b:02x}")).collect()
}

/// `what: A in the profile, B here` for each field that isn't the same in both; `missing` stands for one that isn't there.
fn unequal(
    profile: &BTreeMap<String, String>,
    here: &BTreeMap<String, String>,
    missing: &str,
) -> Vec<String> {
    let names: std::collections::BTreeSet<_> = profile.keys().chain(here.keys()).collect();
    let value = |of: &BTreeMap<String, String>, name: &String| of.get(name).cloned();
    let both = names.into_iter().map(|name| (name, value(profile, name), value(here, name)));
    let none = || missing.to_owned();
    both.filter(|(_, a, b)| a != b)
        .map(|(name, a, b)| {
            format!("{name}: {} in the profile, {} here", a.unwrap_or_else(none), b.unwrap_or_else(none))
        })
        .collect()
}

/// What differs between where figures were taken and here.
pub fn differences(profile: &Here, here: &Here) -> Vec<String> {
    let mut all = unequal(&profile.machine.fields(), &here.machine.fields(), "none");
    // "none" may be a version: of kernel modules, where there are none.
    all.extend(unequal(&profile.versions, &here.versions, "absent"));
    all
}

/// What differs between the layers that were measured and a model's.
pub(super) fn other_layers(profile: &[(&Shape, usize)], here: &[(&Shape, usize)]) -> Vec<String> {
    let mut out = vec![];
    let missing: Vec<_> = here.iter().filter(|l| !profile.contains(l)).collect();
    let over: Vec<_> = profile.iter().filter(|l| !here.contains(l)).collect();
    for (i, (shape, layers)) in missing.iter().enumerate() {
        match over.get(i) {
            Some((other, n)) => {
                out.extend(unequal(&other.fields(), &shape.fields(), "none"));
                if n != layers {
                    out.push(format!("layers: {n} in the profile, {layers} here"));
                }
            }
            None => {
                out.push(format!("kinds of layers: {} in the profile, {} here", profile.len(), here.len()))
            }
        }
    }
    if missing.len() < over.len() {
        out.push(format!("kinds of layers: {} in the profile, {} here", profile.len(), here.len()));
    }
    out.dedup();
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_tensor::DType;

    fn need() -> LayerNeed {
        LayerNeed {
            num_heads: 32,
            num_kv_heads: 8,
            kv_cache_dtype: Some("bf16".into()),
            ..LayerNeed::default()
        }
    }

    #[test]
    fn a_shape_is_of_the_layer_and_not_of_the_machine() {
        let shape = Shape::of(&need());
        let elsewhere = LayerNeed { platform: "cuda".into(), block_size: Some(64), ..need() };
        assert_eq!(Shape::of(&elsewhere), shape);
        assert_eq!(shape.0.keys().collect::<Vec<_>>().len(), ALWAYS.len());
        let others = [
            LayerNeed { num_heads: 16, ..need() },
            LayerNeed { sliding_window: Some(512), ..need() },
            LayerNeed { has_sinks: true, ..need() },
            LayerNeed { dtype: DType::F16, ..need() },
            LayerNeed { num_speculative_tokens: 3, ..need() },
        ];
        assert!(others.iter().all(|n| Shape::of(n) != shape));
        let text = serde_json::to_string(&shape).unwrap();
        assert_eq!(serde_json::from_str::<Shape>(&text).unwrap(), shape);
        assert!(words(&others[1]).ends_with("window 512") && words(&others[2]).ends_with("sinks"));
    }

    #[test]
    fn a_digest_heeds_shapes_and_counts_and_no_order() {
        let (a, b) = (Shape::of(&need()), Shape::of(&LayerNeed { sliding_window: Some(1), ..need() }));
        let of = |l: &[(&Shape, usize)]| digest(l.iter().copied());
        assert_eq!(of(&[(&a, 1), (&b, 5)]), of(&[(&b, 5), (&a, 1)]));
        assert_ne!(of(&[(&a, 1), (&b, 5)]), of(&[(&a, 5), (&b, 1)]));
        assert_eq!(of(&[(&a, 1)]).len(), 12);
    }

    #[test]
    fn what_differs_is_named_with_both_values() {
        let machine = Machine { platform: "cuda".into(), device: "NVIDIA H200".into(), ..Machine::default() };
        let here = Here { machine, versions: BTreeMap::from([("headway".into(), "1".into())]) };
        assert_eq!(differences(&here, &here), Vec::<String>::new());
        let mut other = here.clone();
        other.machine.driver = Some("13.0".into());
        other.versions.insert("headway".into(), "2".into());
        let d = differences(&here, &other);
        assert_eq!(d, ["driver: none in the profile, 13.0 here", "headway: 1 in the profile, 2 here"]);
        other = here.clone();
        other.versions.insert("kernel modules".into(), "none".into());
        assert_eq!(differences(&here, &other), ["kernel modules: absent in the profile, none here"]);
        assert_eq!(here.machine.slug(), "nvidia-h200");
        let (a, b) = (Shape::of(&need()), Shape::of(&LayerNeed { num_heads: 16, ..need() }));
        assert_eq!(other_layers(&[(&a, 2)], &[(&b, 2)]), ["num_heads: 32 in the profile, 16 here"]);
        assert_eq!(other_layers(&[(&a, 2)], &[(&a, 3)]), ["layers: 2 in the profile, 3 here"]);
        assert_eq!(
            other_layers(&[(&a, 2)], &[(&a, 2), (&b, 1)]),
            ["kinds of layers: 1 in the profile, 2 here"]
        );
        assert_eq!(
            other_layers(&[(&a, 2), (&b, 1)], &[(&a, 2)]),
            ["kinds of layers: 2 in the profile, 1 here"]
        );
        assert!(other_layers(&[(&a, 2), (&b, 1)], &[(&b, 1), (&a, 2)]).is_empty());
    }
}
