//! What stands for all forms in which the sources are compiled: each file in the forms that differ in more than a size.
//! Tests compile these for every generation.

use super::{attention, cache, memory, mla, ops, state_space};
use crate::{KernelSpec, device::Result};
use headway_tensor::DType::{self, BF16, F8E4M3, F8E5M2, F16};

/// Activations and cache.
const TYPES: [(DType, DType); 4] = [(BF16, BF16), (F16, F16), (BF16, F8E4M3), (F16, F8E5M2)];

/// A set of forms that holds every file.
///
/// # Errors
/// A type that no kernel reads.
pub fn specs() -> Result<Vec<KernelSpec>> {
    let writes = [64, 128].into_iter().flat_map(|size| TYPES.map(|(a, c)| cache::write_spec(size, a, c)));
    // With the shared memory of the generations that have most and of those that have least.
    let (most, least) = (227 << 10, 99 << 10);
    let attention = [
        (64, BF16, BF16, true, most),
        (128, BF16, BF16, true, most),
        (128, BF16, BF16, true, least),
        (72, F16, F16, false, least),
        (256, F16, F16, false, most),
        (40, F16, F8E5M2, false, most),
        (128, BF16, F8E4M3, false, most),
    ]
    .map(|(head_size, dtype, cache, plain, shared)| {
        let shape = attention::Shape { heads: 8, kv_heads: 2, head_size };
        attention::spec(&shape, dtype, cache, plain, shared)
    });
    let mut all = writes.chain(attention).collect::<Result<Vec<_>>>()?;
    all.extend(memory::specs());
    all.extend(mla::specs()?);
    all.extend(ops::specs()?);
    all.extend(state_space::specs()?);
    Ok(all)
}
