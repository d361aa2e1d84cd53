//! Loops that show what the machine can do at most: reading memory, and float32 multiply-adds. What a
//! measurement divides by; never part of a step.

use crate::Isa;

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
pub fn multiply_adds(isa: Isa, steps: usize) -> f32 {
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
            // SAFETY: an `Isa` of this level is only made where the processor has its features.
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
    let (a, b) = std::hint::black_box(([0.999f32; L], [0.001f32; L]));
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
pub fn read(isa: Isa, data: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2(data: &[u64]) -> u64 {
            combine(data)
        }
        if matches!(isa, Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx) {
            // SAFETY: an `Isa` of this level is only made where the processor has its features.
            return unsafe { avx2(data) };
        }
    }
    let _ = isa;
    combine(data)
}

#[inline(always)]
fn combine(data: &[u64]) -> u64 {
    let (chunks, rest) = data.as_chunks::<16>();
    let mut lanes = [0u64; 16];
    for c in chunks {
        for (l, v) in lanes.iter_mut().zip(c) {
            *l ^= v;
        }
    }
    lanes.iter().chain(rest).fold(0, |a, v| a ^ v)
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
            let data: Vec<u64> = (1..=1003).collect();
            assert_eq!(read(isa, &data), (1..=1003).fold(0, |a, v| a ^ v));
        }
    }
}
