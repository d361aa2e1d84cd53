//! Devices by name: compute capability (the catalogue's list) and memory.

use super::ExplainError;
use crate::{options::EngineOptions, runner::devices};
use headway_attention::{
    AttentionError,
    catalog::{device_capability, device_names},
    process::{registry::nearest, rules::ComputeCapability},
};

const GIB: u64 = 1 << 30;

/// Memory of products as their makers state it, in GiB; where one is sold with several sizes, the commonest.
const MEMORY_GIB: &[(&str, u64)] = &[
    ("v100", 32),
    ("t4", 16),
    ("rtx2080ti", 11),
    ("a100", 80),
    ("a800", 80),
    ("a30", 24),
    ("a2", 16),
    ("a10", 24),
    ("a10g", 24),
    ("a16", 16),
    ("a40", 48),
    ("a5000", 24),
    ("a6000", 48),
    ("rtxa6000", 48),
    ("rtx3060", 12),
    ("rtx3080", 10),
    ("rtx3090", 24),
    ("l4", 24),
    ("l40", 48),
    ("l40s", 48),
    ("rtx6000ada", 48),
    ("rtx4070", 12),
    ("rtx4080", 16),
    ("rtx4090", 24),
    ("h20", 96),
    ("h100", 80),
    ("h800", 80),
    ("h200", 141),
    ("gh200", 96),
    ("b200", 180),
    ("gb200", 186),
    ("b300", 279),
    ("gb300", 279),
    ("rtx5070", 12),
    ("rtx5080", 16),
    ("rtx5090", 32),
    ("rtxpro6000", 96),
    ("gb10", 128),
    ("dgxspark", 128),
];

/// The capabilities that `smNN` is offered for.
const CAPABILITIES: [&str; 11] =
    ["sm70", "sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121"];

/// What a model would run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// As it was named.
    pub name: String,
    /// `cpu` or `cuda`.
    pub platform: &'static str,
    /// Its compute capability.
    pub capability: Option<ComputeCapability>,
    /// Its memory in bytes, where the name says.
    pub memory: Option<u64>,
}

/// Every device that can be named.
pub fn known_devices() -> Vec<String> {
    let names = device_names().unwrap_or_default();
    ["cpu"].into_iter().chain(CAPABILITIES).map(str::to_owned).chain(names).collect()
}

/// What `--device cuda:N` names on this machine: its product where that is a name, else its compute capability; `None`
/// for any other `--device`.
///
/// # Errors
/// No driver, no such device.
pub(super) fn of_this_machine(options: &EngineOptions) -> Result<Option<String>, ExplainError> {
    let asked = options.device.as_deref().unwrap_or_default().trim().to_ascii_lowercase();
    if asked != "cuda" && !asked.starts_with("cuda:") {
        return Ok(None);
    }
    let open = devices::open(options)?;
    Ok(named(&open.machine.device, open.place.capability))
}

/// A product of this capability by name, or the capability.
fn named(product: &str, capability: Option<ComputeCapability>) -> Option<String> {
    let capability = capability?;
    let known = Target::parse(product).is_ok_and(|t| t.capability == Some(capability));
    Some(if known { product.into() } else { format!("sm{}{}", capability.0, capability.1) })
}

impl Target {
    /// A device by name.
    ///
    /// # Errors
    /// An unknown one, with those there are and the nearest by spelling.
    pub fn parse(name: &str) -> Result<Self, ExplainError> {
        let plain = name.trim().to_ascii_lowercase();
        if plain == "cpu" {
            return Ok(Self { name: "cpu".into(), platform: "cpu", capability: None, memory: None });
        }
        let unknown = || {
            let known = known_devices();
            let nearest = nearest(&plain, known.iter().map(String::as_str));
            ExplainError::Attention(AttentionError::Device {
                name: name.into(),
                known: known.join(", "),
                nearest,
            })
        };
        if plain == "cuda" || plain.starts_with("cuda:") {
            return Err(ExplainError::Option {
                option: "--device",
                value: name.into(),
                why: format!(
                    "a device of this machine, which only --engine headway can ask; say which: {}",
                    known_devices().join(", ")
                ),
            });
        }
        let squeezed: String = plain.chars().filter(|c| !" -_".contains(*c)).collect();
        if squeezed.starts_with("sm") && !CAPABILITIES.contains(&squeezed.as_str()) {
            return Err(unknown());
        }
        let capability = device_capability(&plain).map_err(|_| unknown())?;
        let product = squeezed.trim_start_matches("nvidia");
        let memory = MEMORY_GIB.iter().find(|(n, _)| *n == product).map(|(_, gib)| gib * GIB);
        Ok(Self { name: plain, platform: "cuda", capability: Some(capability), memory })
    }

    /// The device in words.
    pub fn describe(&self) -> String {
        match self.capability {
            Some(c) => format!("{}, compute capability {c}", self.name),
            None => self.name.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_a_capability_and_memory() {
        for (name, capability, gib) in
            [("h100", (9, 0), Some(80)), ("sm121", (12, 1), None), ("NVIDIA L40S", (8, 9), Some(48))]
        {
            let t = Target::parse(name).unwrap();
            assert_eq!(t.capability, Some(ComputeCapability(capability.0, capability.1)), "{name}");
            assert_eq!(t.memory, gib.map(|g: u64| g * GIB), "{name}");
        }
        for (name, near) in [("h1000", "h100"), ("sm91", "sm90"), ("toaster", ""), ("cpus", "cpu")] {
            let e = Target::parse(name).unwrap_err().to_string();
            assert!(
                e.contains("rtx4090") && (near.is_empty() || e.contains(&format!("did you mean {near}?"))),
                "{e}"
            );
        }
        let named = |product, c| named(product, Some(c)).unwrap();
        assert_eq!(named("NVIDIA H200", ComputeCapability(9, 0)), "NVIDIA H200");
        assert_eq!(named("NVIDIA H200", ComputeCapability(8, 9)), "sm89");
        assert_eq!(named("NVIDIA Thing", ComputeCapability(12, 0)), "sm120");
        assert!(Target::parse("cuda:0").unwrap_err().to_string().contains("say which"));
        assert!(MEMORY_GIB.iter().all(|(n, _)| device_capability(n).is_ok()));
    }
}
