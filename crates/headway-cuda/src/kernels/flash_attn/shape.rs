//! What kernels there are, and what decides the form of a launch.

use headway_ffi_shim::torch::dtype;
use headway_tensor::DType;

/// Places of the kernels' own tensors begin at multiples of so many bytes.
const ALIGNED: usize = 256;
/// Most requests of a batch whose keys are divided.
const MOST_DIVIDED: usize = 992;
/// Most parts of a request's keys.
pub const MOST_SPLITS: usize = 32;
/// Most query heads of a layer with sinks.
pub const MOST_HEADS_WITH_SINKS: usize = 64;

/// The heads of a group, and its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlashShape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_size: usize,
    /// Tokens in a page.
    pub page_size: usize,
}

impl FlashShape {
    /// Query heads of a key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// Whether there are kernels for it, over keys and values of this type.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, cache: DType) -> std::result::Result<(), String> {
        let Self { heads, kv_heads, head_size, page_size } = *self;
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(format!("{heads} query heads for {kv_heads} of keys and values"));
        }
        let step = head_step(cache);
        if head_size == 0 || head_size > 256 || !head_size.is_multiple_of(step) {
            return Err(format!(
                "heads of {head_size} over a cache of {cache}: multiples of {step} up to 256 are supported"
            ));
        }
        if page_size == 0 || !page_size.is_multiple_of(16) {
            return Err(format!("pages of {page_size} tokens: multiples of 16 are supported"));
        }
        Ok(())
    }

    /// Bytes of partial results of so many tokens, by the number of parts, and of the sums of all rows.
    pub fn scratch_bytes(&self, tokens: usize, splits: usize) -> usize {
        let sums = (self.heads * tokens * 4).next_multiple_of(ALIGNED);
        let parts = self.heads * tokens * splits * 4;
        match splits {
            0 | 1 => sums,
            _ => sums + (parts * self.head_size).next_multiple_of(ALIGNED) + parts.next_multiple_of(ALIGNED),
        }
    }

    /// Numbers of a schedule of so many requests, at most.
    pub fn schedule_len(reqs: usize) -> usize {
        reqs.next_multiple_of(4) * 4 + 1
    }
}

/// What decides the form of a launch. Schedule and runs must have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// At least the new tokens of each request.
    pub q_bound: usize,
    /// At least the tokens of each request.
    pub k_bound: usize,
    /// Most parts of a request's keys.
    pub splits: usize,
    /// No key after a row's own position.
    pub causal: bool,
    /// Keys before a row's own that it sees; −1: all.
    pub window_left: i32,
}

/// Heads are multiples of so many elements: 16 bytes.
pub fn head_step(cache: DType) -> usize {
    16 / cache.size().max(1)
}

/// The number of a type of activations; `None` for one that no kernel takes.
pub fn element(dtype: DType) -> Option<i32> {
    match dtype {
        DType::BF16 => Some(dtype::BF16),
        DType::F16 => Some(dtype::F16),
        _ => None,
    }
}

/// The number of a type that queries, keys and values have together.
pub fn operand(dtype: DType) -> Option<i32> {
    if dtype == DType::F8E4M3 { Some(dtype::F8E4M3) } else { element(dtype) }
}

/// The output's type for such queries, keys and values.
pub fn output(operands: DType) -> DType {
    if operands == DType::F8E4M3 { DType::BF16 } else { operands }
}

/// Most parts of a request's keys in batches of so many requests.
pub fn most_splits(multiprocessors: u32, shape: &FlashShape, reqs: usize) -> usize {
    match reqs > MOST_DIVIDED {
        true => 1,
        false => (multiprocessors as usize / shape.kv_heads.max(1)).clamp(1, MOST_SPLITS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: FlashShape = FlashShape { heads: 32, kv_heads: 8, head_size: 128, page_size: 16 };

    #[test]
    fn scratch_holds_sums_and_parts() {
        assert_eq!(SHAPE.scratch_bytes(256, 1), 32 * 256 * 4);
        assert_eq!(SHAPE.scratch_bytes(256, 16), 32 * 256 * 4 * (1 + 16 + 16 * 128));
        assert_eq!((FlashShape::schedule_len(1), FlashShape::schedule_len(256)), (17, 1025));
        let splits = [1, 8, 64, 256].map(|kv_heads| most_splits(132, &FlashShape { kv_heads, ..SHAPE }, 4));
        assert_eq!(splits, [32, 16, 2, 1]);
        assert_eq!(most_splits(132, &SHAPE, 993), 1);
    }

    #[test]
    fn shapes_without_kernels_are_refused() {
        assert_eq!(SHAPE.check(DType::BF16), Ok(()));
        let odd = FlashShape { head_size: 72, ..SHAPE };
        assert_eq!((odd.check(DType::F16), odd.check(DType::F8E4M3).is_err()), (Ok(()), true));
        assert_eq!(FlashShape { head_size: 80, ..SHAPE }.check(DType::F8E4M3), Ok(()));
        for wrong in [
            FlashShape { head_size: 264, ..SHAPE },
            FlashShape { head_size: 100, ..SHAPE },
            FlashShape { page_size: 8, ..SHAPE },
            FlashShape { heads: 30, ..SHAPE },
            FlashShape { kv_heads: 0, ..SHAPE },
        ] {
            assert!(wrong.check(DType::BF16).is_err(), "{wrong:?}");
        }
    }
}
