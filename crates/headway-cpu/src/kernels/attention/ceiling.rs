//! What the machine can do at most, to hold the kernel's speed against: reading memory in pieces, and
//! multiply-adds in registers. Measured with the same lanes and the same threads.
//!
//! Not for choosing anything at run time.

#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{Lanes, Portable};
use crate::{Isa, pool::Pool};
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Instant,
};

/// Bytes of the pieces that [`read_bandwidth`] reads.
pub const PIECE: usize = 64 << 10;
/// Independent chains: enough to hide the latency of two units.
const CHAINS: usize = 12;

#[inline(always)]
unsafe fn multiply_add<L: Lanes>(rounds: usize, seed: f32) -> f32 {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let (a, b) = (L::splat(0.999), L::splat(seed));
        let mut acc = [L::splat(1.0); CHAINS];
        for _ in 0..rounds {
            for c in &mut acc {
                *c = L::fma(*c, a, b);
            }
        }
        acc.iter().map(|c| c.sum()).sum()
    }
}

#[inline(always)]
unsafe fn read<L: Lanes>(p: *const u8) -> f32 {
    // SAFETY: the caller has the instruction set, and `PIECE` bytes at `p`.
    unsafe {
        let mut acc = [L::splat(0.0); 4];
        for at in (0..PIECE).step_by(4 * 4 * L::N) {
            for (i, c) in acc.iter_mut().enumerate() {
                *c = L::max(*c, L::load(p.add(at + i * 4 * L::N)));
            }
        }
        acc.iter().map(|c| c.largest()).sum()
    }
}

macro_rules! entries {
    ($name:ident, $lanes:ty, [$(#[$feature:meta])*]) => {
        mod $name {
            use super::*;
            /// # Safety
            /// The machine has the features.
            $(#[$feature])*
            pub(super) unsafe fn multiply_add(rounds: usize, seed: f32) -> f32 {
                // SAFETY: compiled for them.
                unsafe { super::multiply_add::<$lanes>(rounds, seed) }
            }
            /// # Safety
            /// The machine has the features; `PIECE` bytes at `p`.
            $(#[$feature])*
            pub(super) unsafe fn read(p: *const u8) -> f32 {
                // SAFETY: compiled for them; the rest is the caller's.
                unsafe { super::read::<$lanes>(p) }
            }
        }
    };
}
entries!(portable, Portable, []);
#[cfg(target_arch = "x86_64")]
entries!(avx2, Avx2, [#[target_feature(enable = "avx2,fma,f16c")]]);
#[cfg(target_arch = "x86_64")]
entries!(avx512, Avx512, [#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]]);

/// float32 operations a second of all threads together (a multiply-add is two), over about `seconds`.
/// 0 for a level that this machine doesn't have.
pub fn multiply_add_rate(pool: &Pool, isa: Isa, seconds: f64) -> f64 {
    if !Isa::available().contains(&isa) {
        return 0.0;
    }
    let (run, lanes): (unsafe fn(usize, f32) -> f32, usize) = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => (avx2::multiply_add, 8),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => (avx512::multiply_add, 16),
        _ => (portable::multiply_add, 8),
    };
    const ROUNDS: usize = 100_000;
    let (start, mut operations, sink) = (Instant::now(), 0usize, AtomicU64::new(0));
    while start.elapsed().as_secs_f64() < seconds {
        pool.run(pool.threads(), &|task, _| {
            // SAFETY: the level is available.
            let x = unsafe { run(ROUNDS, task as f32 * 1e-3) };
            sink.fetch_add(u64::from(x.to_bits()), Relaxed);
        });
        operations += pool.threads() * ROUNDS * CHAINS * lanes * 2;
    }
    std::hint::black_box(sink);
    operations as f64 / start.elapsed().as_secs_f64()
}

/// Bytes a second that all threads together read from `buffer` in pieces of [`PIECE`] in random order,
/// over about `seconds`. A buffer larger than the last-level cache gives the memory's rate. 0 for less
/// than a piece, or for a level that this machine doesn't have.
pub fn read_bandwidth(pool: &Pool, isa: Isa, buffer: &[u8], seconds: f64) -> f64 {
    let pieces = buffer.len() / PIECE;
    if pieces == 0 || !Isa::available().contains(&isa) {
        return 0.0;
    }
    let run: unsafe fn(*const u8) -> f32 = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::read,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => avx512::read,
        _ => portable::read,
    };
    // An odd multiplier walks through a power of two of places in a scattered order.
    let places = pieces.next_power_of_two();
    let (start, sink, mut bytes, mut turn) = (Instant::now(), AtomicU64::new(0), 0usize, 0usize);
    while start.elapsed().as_secs_f64() < seconds {
        let done = AtomicU64::new(0);
        pool.run(places.min(1024), &|task, _| {
            let place = (turn * 1024 + task).wrapping_mul(0x9e37_79b9) & (places - 1);
            if place < pieces {
                // SAFETY: the level is available, and the piece lies in the buffer.
                let x = unsafe { run(buffer[place * PIECE..(place + 1) * PIECE].as_ptr()) };
                sink.fetch_add(u64::from(x.to_bits()), Relaxed);
                done.fetch_add(PIECE as u64, Relaxed);
            }
        });
        bytes += done.into_inner() as usize;
        turn += 1;
    }
    std::hint::black_box(sink);
    bytes as f64 / start.elapsed().as_secs_f64()
}
