//! Which blocks and slots a case's calls touch.

use super::case::{Case, Kind};
use headway_attention::{CommonAttentionMetadata, Result, StepInputs};
use headway_tensor::{Dual, Exec, Persistent, Pod, View};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use std::sync::Arc;

/// Blocks that one call touches.
pub fn blocks_of(case: &Case, block_size: usize) -> usize {
    match case.kind {
        // Few tokens go to one block each, many to whole blocks.
        Kind::Write if case.tokens < FEW => case.tokens,
        Kind::Write => case.tokens.div_ceil(block_size),
        _ => case.seqs.iter().map(|s| s[1].div_ceil(block_size)).sum(),
    }
}

/// Tokens of a write from which on whole blocks are written.
const FEW: usize = 512;

/// The slots that a write's tokens go to.
pub fn write_slots(tokens: usize, blocks: &[i32], block_size: usize) -> Vec<i64> {
    let slot = |block: i32, offset: usize| i64::from(block) * block_size as i64 + offset as i64;
    if tokens < FEW {
        // Offsets walk through the block by an odd step.
        blocks.iter().enumerate().map(|(i, &b)| slot(b, (i * 7 + b as usize) % block_size)).collect()
    } else {
        (0..tokens).map(|t| slot(blocks[t / block_size], t % block_size)).collect()
    }
}

/// A view of values, where the device reads them.
///
/// # Errors
/// No memory.
pub fn view<T: Pod>(cx: &dyn Exec, values: &[T]) -> Result<View<T>> {
    Ok(Persistent::new(cx, values.len())?.write(cx, values.len(), |to| to.copy_from_slice(values)))
}

/// A view of values that builders read too.
fn dual<T: Pod>(cx: &dyn Exec, values: &[T]) -> Result<Dual<T>> {
    Ok(Persistent::new(cx, values.len())?.write_dual(cx, values.len(), |to| to.copy_from_slice(values)))
}

/// The batch of a case, whose requests take the next blocks of `table`.
///
/// # Errors
/// No memory.
pub fn common(
    cx: &dyn Exec,
    case: &Case,
    table: &[i32],
    block_size: usize,
) -> Result<CommonAttentionMetadata> {
    let mut starts = vec![0];
    starts.extend(case.seqs.iter().scan(0, |at, s| {
        *at += s[0] as i32;
        Some(*at)
    }));
    let lens: Vec<i32> = case.seqs.iter().map(|s| s[1] as i32).collect();
    let stride = case.seqs.iter().map(|s| s[1].div_ceil(block_size)).max().unwrap_or(0);
    let mut rows = vec![0; stride * case.seqs.len()];
    let mut next = table.iter();
    for (row, s) in rows.chunks_exact_mut(stride.max(1)).zip(&case.seqs) {
        row.iter_mut().zip(next.by_ref().take(s[1].div_ceil(block_size))).for_each(|(r, b)| *r = *b);
    }
    let inputs = StepInputs::new(dual(cx, &starts)?, view(cx, &lens)?, lens)?;
    let slots = view(cx, &vec![-1; case.new_tokens()])?;
    CommonAttentionMetadata::new(Arc::new(inputs), dual(cx, &rows)?, stride, slots)
}

/// Fisher-Yates with a fixed seed.
pub fn shuffle(order: &mut [i32]) {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    for i in (1..order.len()).rev() {
        order.swap(i, (rng.next_u64() % (i as u64 + 1)) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_distinct_and_inside_their_blocks() {
        for (tokens, blocks) in [(1, 1), (32, 32), (512, 32), (2048, 128)] {
            let mut order: Vec<i32> = (0..200).collect();
            shuffle(&mut order);
            let mut slots = write_slots(tokens, &order[..blocks], 16);
            assert_eq!(slots.len(), tokens);
            assert!(slots.iter().all(|s| order[..blocks].contains(&((s / 16) as i32))));
            slots.sort_unstable();
            slots.dedup();
            assert_eq!(slots.len(), tokens);
        }
    }

    #[test]
    fn a_shuffle_is_a_permutation_and_always_the_same() {
        let mut a: Vec<i32> = (0..1000).collect();
        let mut b = a.clone();
        shuffle(&mut a);
        shuffle(&mut b);
        assert_eq!(a, b);
        assert!(a.windows(2).filter(|w| w[1] == w[0] + 1).count() < 10);
        a.sort_unstable();
        assert!(a.iter().copied().eq(0..1000));
    }
}
