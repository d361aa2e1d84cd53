//! How long the catalogue takes for a whole model: every layer asked by itself, every candidate with its reasons.
//!
//! `cargo run --release -p headway-attention --example selection_time`

use headway_attention::{
    AttentionError, BackendRequest, KindTag, LayerNeed,
    catalog::{Catalog, device_capability},
    process::rules::{LatentDims, StateSpaceMixer},
};
use std::{
    hint::black_box,
    time::{Duration, Instant},
};

const LAYERS: usize = 100;
const RUNS: usize = 101;

/// Median and the longest of some runs.
fn timed(
    mut run: impl FnMut() -> Result<(), AttentionError>,
) -> Result<(Duration, Duration), AttentionError> {
    let mut times = vec![];
    for _ in 0..RUNS {
        let start = Instant::now();
        run()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok((times[RUNS / 2], times[RUNS - 1]))
}

fn main() -> Result<(), AttentionError> {
    let (median, longest) = timed(|| Catalog::latest().map(|c| drop(black_box(c))))?;
    println!("load the catalogue: {median:.1?} (longest of {RUNS}: {longest:.1?})");
    let catalog = Catalog::latest()?;
    let plain =
        LayerNeed { platform: "cuda".into(), block_size: Some(48), num_heads: 32, ..LayerNeed::default() };
    let window =
        |i: usize| LayerNeed { sliding_window: i.is_multiple_of(2).then_some(4096), ..plain.clone() };
    let latent = |_| LayerNeed {
        kind: KindTag::Mla,
        head_size: 576,
        head_size_v: 576,
        model_head_size: Some(576),
        latent: Some(LatentDims {
            qk_nope_head_dim: 128,
            qk_rope_head_dim: 64,
            kv_lora_rank: 512,
            v_head_dim: 128,
            index_topk: None,
        }),
        ..plain.clone()
    };
    let hybrid = |i: usize| match i % 8 {
        7 => plain.clone(),
        _ => LayerNeed {
            kind: KindTag::StateSpace,
            state_space: Some(StateSpaceMixer::Mamba2),
            block_size: None,
            ..plain.clone()
        },
    };
    let models: [(&str, &dyn Fn(usize) -> LayerNeed); 3] =
        [("sliding-window hybrid", &window), ("MLA", &latent), ("Mamba hybrid", &hybrid)];
    for (model, need) in models {
        for device in ["h100", "b200"] {
            let capability = Some(device_capability(device)?);
            let needs: Vec<_> =
                (0..LAYERS).map(|i| LayerNeed { compute_capability: capability, ..need(i) }).collect();
            let (median, longest) = timed(|| {
                for (i, need) in needs.iter().enumerate() {
                    black_box(catalog.select(&format!("layer {i}"), need, &BackendRequest::default())?);
                }
                Ok(())
            })?;
            let mut chosen = vec![];
            for need in &needs {
                let name = &catalog.select("a layer", need, &BackendRequest::default())?.backend.name;
                if !chosen.contains(name) {
                    chosen.push(name.clone());
                }
            }
            println!(
                "{LAYERS} layers, {model} on {device} ({}): {median:.1?} (longest of {RUNS}: {longest:.1?})",
                chosen.join(", ")
            );
        }
    }
    Ok(())
}
