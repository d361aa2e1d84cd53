//! What the machine can do at most: reading memory, float32 multiply-adds, and a parallel region without
//! work. What a measurement is held against; never part of a step.

use crate::{Isa, pool::Pool};
use std::{
    hint::black_box,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Instant,
};

/// Floating-point operations of one step of [`multiply_adds`].
pub const fn flops_of_step(isa: Isa) -> usize {
    2 * CHAINS * lanes(isa)
}

/// Independent chains: latency times multiply-adds a cycle on every processor we know.
const CHAINS: usize = 12;

const fn lanes(isa: Isa) -> usize {
    match isa {
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => 16,
        Isa::Avx2 => 8,
        _ => 4,
    }
}

/// `steps` multiply-adds on each of several register-wide chains; the sum keeps them from being left out.
/// The portable level multiplies and adds in two operations, as its kernels do.
///
/// # Panics
/// A level that the machine doesn't have.
pub fn multiply_adds(isa: Isa, steps: usize) -> f32 {
    assert!(isa.is_available(), "this machine has no {isa}");
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn avx2(steps: usize) -> f32 {
            chains::<8>(steps, f32::mul_add)
        }
        // In vectors by name: left to itself, the compiler makes gathers of arrays of sixteen.
        #[target_feature(enable = "avx512f")]
        fn avx512(steps: usize) -> f32 {
            use std::arch::x86_64::*;
            let (a, b) = std::hint::black_box((_mm512_set1_ps(0.999), _mm512_set1_ps(0.001)));
            let mut acc = [_mm512_set1_ps(1.0); CHAINS];
            for _ in 0..steps {
                for acc in &mut acc {
                    *acc = _mm512_fmadd_ps(*acc, a, b);
                }
            }
            acc.into_iter().map(|acc| _mm512_reduce_add_ps(acc)).sum()
        }
        match isa {
            // SAFETY: asserted above.
            Isa::Avx2 => return unsafe { avx2(steps) },
            // SAFETY: as above.
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => return unsafe { avx512(steps) },
            _ => {}
        }
    }
    let _ = isa;
    chains::<4>(steps, |a, b, c| a * b + c)
}

#[inline(always)]
fn chains<const L: usize>(steps: usize, f: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let (a, b) = black_box(([0.999f32; L], [0.001f32; L]));
    let mut acc = [[1f32; L]; CHAINS];
    for _ in 0..steps {
        for acc in &mut acc {
            for i in 0..L {
                acc[i] = f(acc[i], a[i], b[i]);
            }
        }
    }
    acc.iter().flatten().sum()
}

/// Reads all of `data`, and returns its words combined.
///
/// # Panics
/// A level that the machine doesn't have.
pub fn read(isa: Isa, data: &[u8]) -> u64 {
    assert!(isa.is_available(), "this machine has no {isa}");
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2(data: &[u8]) -> u64 {
            combine(data)
        }
        if matches!(isa, Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx) {
            // SAFETY: asserted above.
            return unsafe { avx2(data) };
        }
    }
    let _ = isa;
    combine(data)
}

#[inline(always)]
fn combine(data: &[u8]) -> u64 {
    let (words, rest) = data.as_chunks::<8>();
    let (lines, words) = words.as_chunks::<16>();
    let mut lanes = [0u64; 16];
    for line in lines {
        for (l, v) in lanes.iter_mut().zip(line) {
            *l ^= u64::from_ne_bytes(*v);
        }
    }
    let words = words.iter().map(|w| u64::from_ne_bytes(*w));
    lanes.into_iter().chain(words).chain(rest.iter().map(|b| u64::from(*b))).fold(0, |a, v| a ^ v)
}

/// float32 operations a second of all threads together (a multiply-add is two), over about `seconds`.
pub fn multiply_add_rate(pool: &Pool, isa: Isa, seconds: f64) -> f64 {
    const STEPS: usize = 100_000;
    let (start, mut steps) = (Instant::now(), 0);
    while start.elapsed().as_secs_f64() < seconds {
        pool.run(pool.threads(), &|_, _| _ = black_box(multiply_adds(isa, STEPS)));
        steps += pool.threads() * STEPS;
    }
    (steps * flops_of_step(isa)) as f64 / start.elapsed().as_secs_f64()
}

/// Bytes a second that all threads together read from `buffer` in pieces of `piece` bytes in a scattered
/// order, over about `seconds`; 0 for less than a piece. A buffer larger than the last-level cache gives the
/// memory's rate. Nothing is asked for ahead of its use, as in the loop that `docs/performance.md` compares
/// machines by: a reader that does can be quicker.
pub fn random_read_rate(pool: &Pool, isa: Isa, buffer: &[u8], piece: usize, seconds: f64) -> f64 {
    /// Bytes of a parallel region.
    const REGION: usize = 64 << 20;
    let pieces = buffer.len().checked_div(piece).unwrap_or(0);
    if pieces == 0 {
        return 0.0;
    }
    // An odd multiplier walks through a power of two of places in a scattered order.
    let (places, tasks) = (pieces.next_power_of_two(), (REGION / piece).max(1));
    let (start, mut bytes, mut turn) = (Instant::now(), 0, 0usize);
    while start.elapsed().as_secs_f64() < seconds {
        let done = AtomicUsize::new(0);
        // Tasks of several pieces, so that handing them out costs nothing beside them.
        let per_task = (REGION / 64 / piece).max(1);
        pool.run(tasks.div_ceil(per_task), &|task, _| {
            for i in task * per_task..(task + 1) * per_task {
                let place = (turn * tasks + i).wrapping_mul(0x9e37_79b9) & (places - 1);
                if place < pieces {
                    black_box(read(isa, &buffer[place * piece..(place + 1) * piece]));
                    done.fetch_add(piece, Relaxed);
                }
            }
        });
        bytes += done.into_inner();
        turn += 1;
    }
    bytes as f64 / start.elapsed().as_secs_f64()
}

/// Seconds of a parallel region with one task for each thread that does nothing, regions following one
/// another at once: the median of 100 times 100.
pub fn empty_region(pool: &Pool) -> f64 {
    median_region(|| pool.run(pool.threads(), &|task, _| _ = black_box(task)))
}

/// As [`empty_region`], but each thread takes part: no task ends before all have begun.
pub fn joined_region(pool: &Pool) -> f64 {
    median_region(|| {
        let begun = AtomicUsize::new(0);
        pool.run(pool.threads(), &|_, _| {
            begun.fetch_add(1, Relaxed);
            // Yields in between: another thread may need this processor to begin at all.
            for turn in 1u32.. {
                match begun.load(Relaxed) == pool.threads() {
                    true => break,
                    false if turn.is_multiple_of(1000) => std::thread::yield_now(),
                    false => std::hint::spin_loop(),
                }
            }
        });
    })
}

fn median_region(region: impl Fn()) -> f64 {
    let mut times = [0.0; 100];
    for time in &mut times {
        let start = Instant::now();
        (0..100).for_each(|_| region());
        *time = start.elapsed().as_secs_f64() / 100.0;
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loops_do_their_work() {
        for &isa in Isa::available() {
            // The chain tends to b / (1 - a) = 1, where it starts.
            let lanes = flops_of_step(isa) / 2;
            assert!((multiply_adds(isa, 1000) - lanes as f32).abs() < 0.01 * lanes as f32, "{isa}");
            let data: Vec<u8> = (1..=1003u64).flat_map(u64::to_ne_bytes).chain([7]).collect();
            assert_eq!(read(isa, &data), (1..=1003).fold(7, |a, v| a ^ v));
        }
    }

    #[test]
    fn rates_are_finite_and_a_buffer_below_a_piece_has_none() {
        let pool = Pool::new(Some(2)).unwrap();
        let rate = |buffer: &[u8]| random_read_rate(&pool, Isa::Portable, buffer, 4096, 1e-3);
        assert!(rate(&[1; 5 * 4096]) > 0.0 && rate(&[1; 4095]) == 0.0);
        assert!(multiply_add_rate(&pool, Isa::Portable, 1e-3) > 0.0 && empty_region(&pool) > 0.0);
        assert!(joined_region(&pool) > 0.0);
    }
}
