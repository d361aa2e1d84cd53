//! Latent attention in the suite: its projection, and the float64 answer by its definition. Keys and values of every
//! token are expanded; nothing is absorbed.

use super::{
    batch::{Step, World},
    cell::Cell,
};
use crate::{
    reference::{Params, Request, attend, round::round_to},
    rng::Rng,
};
use headway_attention::process::rules::LatentDims;

/// `[num_heads x (qk_nope + v), kv_lora_rank]` in the activations' type, so that keys and values have a variance of 1;
/// empty for cells without latents.
pub fn projection(cell: &Cell, rng: &mut Rng) -> Vec<f32> {
    let Some(d) = cell.latent else { return vec![] };
    let spread = (d.kv_lora_rank as f64).powf(-0.5);
    let n = cell.num_heads * (d.qk_nope_head_dim + d.v_head_dim) * d.kv_lora_rank;
    (0..n).map(|_| round_to(cell.dtype, (rng.normal() * spread) as f32)).collect()
}

/// As [`World::answer`].
pub fn answer(world: &World, d: &LatentDims, s: &Step, decodes: usize) -> Vec<f64> {
    let c = &world.cell;
    let (width, rows) = (c.head_size, c.num_heads * c.q_head());
    let params = Params {
        num_heads: c.num_heads,
        num_kv_heads: c.num_heads,
        head_size: c.q_head(),
        head_size_v: d.v_head_dim,
        scale: f64::from(world.scale()),
        ..Params::default()
    };
    let mut out = vec![];
    for (i, r) in s.reqs.iter().enumerate() {
        let (from, to) = (s.query_start_loc[i] as usize, s.query_start_loc[i + 1] as usize);
        if from == to {
            continue;
        }
        let table = &s.block_table[i * world.stride..];
        let (mut k, mut v) = (vec![], vec![]);
        for token in 0..r.kv_len {
            let new = token + r.q_len >= r.kv_len && i >= decodes;
            let latent: Vec<f64> = if new {
                let row = from + token + r.q_len - r.kv_len;
                s.k[row * width..(row + 1) * width].iter().copied().map(f64::from).collect()
            } else {
                let slot = table[token / c.block_size] as usize * c.block_size + token % c.block_size;
                world.shadow[0][slot * width..(slot + 1) * width].to_vec()
            };
            let rounds = world.rounds_expanded && i >= decodes;
            expand(world, d, &latent, rounds, (&mut k, &mut v));
        }
        let q: Vec<f64> = s.q[from * rows..to * rows].iter().copied().map(f64::from).collect();
        out.extend(attend(&params, &Request { q: &q, k: &k, v: &v, causal: true, ..Request::default() }).out);
    }
    out
}

/// Appends a token's keys and values of every head.
fn expand(
    world: &World,
    d: &LatentDims,
    latent: &[f64],
    rounds: bool,
    (k, v): (&mut Vec<f64>, &mut Vec<f64>),
) {
    let (compressed, rope) = latent.split_at(d.kv_lora_rank);
    let per_head = d.qk_nope_head_dim + d.v_head_dim;
    for (i, row) in world.kv_b_proj.chunks_exact(d.kv_lora_rank).enumerate() {
        let x: f64 = row.iter().zip(compressed).map(|(w, c)| f64::from(*w) * c).sum();
        let x = if rounds { f64::from(round_to(world.cell.dtype, x as f32)) } else { x };
        if i % per_head < d.qk_nope_head_dim {
            k.push(x);
        } else {
            v.push(x);
        }
        if i % per_head + 1 == d.qk_nope_head_dim {
            k.extend_from_slice(rope);
        }
    }
}
