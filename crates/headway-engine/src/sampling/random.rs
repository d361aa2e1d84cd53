//! Random numbers that depend on the seed and the position of a token only: not on the batch, the step, or what was
//! drawn before. A request that is preempted, batched or chunked otherwise draws the same numbers.

use std::hash::{BuildHasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// A number of `[0, 1)` with 53 random bits: the first of the ChaCha8 stream whose key is `seed` and whose stream number
/// is `position`, the place in the sequence of the token that is drawn (prompt tokens count).
pub fn uniform(seed: u64, position: u64) -> f64 {
    let mut key = [0u8; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(position);
    (rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// A seed for a request that has none, below 2^53 so that it survives JSON. The engine reports it, so that the answer
/// can be had again.
pub fn fresh_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    // The standard library keys its hashers from the system's randomness, each a different one.
    RandomState::new().hash_one(now) >> 11
}
