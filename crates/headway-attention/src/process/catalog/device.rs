//! GPUs by name: which compute capability a product has. Source: NVIDIA's list of CUDA GPUs.

use crate::{
    AttentionError, Result,
    process::{registry::nearest, rules::ComputeCapability},
};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Product {
    name: String,
    capability: ComputeCapability,
}

fn products() -> Result<Vec<Product>> {
    serde_json::from_str(include_str!("data/devices.json"))
        .map_err(|e| AttentionError::Catalog(format!("the list of devices: {e}")))
}

/// The products that [`device_capability`] knows, oldest first.
///
/// # Errors
/// [`AttentionError::Catalog`] for a list that doesn't parse.
pub fn device_names() -> Result<Vec<String>> {
    Ok(products()?.into_iter().map(|p| p.name).collect())
}

/// The compute capability of a device: `sm90`, `sm_103`, or a product (`h100`, `RTX 4090`; case, spaces, dashes and
/// a leading `NVIDIA` count for nothing).
///
/// # Errors
/// [`AttentionError::Device`], with the products and the nearest by spelling.
pub fn device_capability(name: &str) -> Result<ComputeCapability> {
    let plain: String = name.to_ascii_lowercase().chars().filter(|c| !" -_".contains(*c)).collect();
    let plain = plain.trim_start_matches("nvidia");
    // The last digit is the minor version.
    if let Some((major, minor)) =
        plain.strip_prefix("sm").filter(|d| d.len() >= 2 && d.is_ascii()).map(|d| d.split_at(d.len() - 1))
        && let (Ok(major), Ok(minor)) = (major.parse(), minor.parse())
    {
        return Ok(ComputeCapability(major, minor));
    }
    let products = products()?;
    products.iter().find(|p| p.name == plain).map(|p| p.capability).ok_or_else(|| {
        let names: Vec<_> = products.iter().map(|p| p.name.as_str()).collect();
        AttentionError::Device {
            name: name.to_owned(),
            nearest: nearest(plain, names.iter().copied()),
            known: names.join(", "),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_by_name() {
        for (name, expected) in [
            ("sm90", (9, 0)),
            ("sm_121", (12, 1)),
            ("SM75", (7, 5)),
            ("h200", (9, 0)),
            ("NVIDIA RTX 4090", (8, 9)),
            ("gb300", (10, 3)),
        ] {
            assert_eq!(device_capability(name).unwrap(), ComputeCapability(expected.0, expected.1), "{name}");
        }
        for name in ["sm", "sm9", "smart", "9.0", ""] {
            assert!(device_capability(name).is_err(), "{name}");
        }
        let e = device_capability("h1000").unwrap_err().to_string();
        assert!(e.contains("did you mean h100?") && e.contains("rtx4090") && e.contains("sm90"), "{e}");
    }

    #[test]
    fn every_product_once() {
        let names = device_names().unwrap();
        assert!(names.iter().enumerate().all(|(i, n)| !names[..i].contains(n)));
    }
}
