//! Sizes of a layer, of the states that requests have of it, and of what the kernels of `csrc/state_space/` hold.

use crate::DeviceInfo;
use headway_attention::group::arith::mamba2_dims::Mamba2Dims;
use headway_tensor::DType;

/// Widest convolution that the kernels take.
pub const MAX_CONV_KERNEL: usize = 16;
/// Largest state, in elements for each element of a head: what a block's registers hold.
pub const MAX_STATE: usize = 256;
/// Most tokens of a chunk of the scan.
pub const CHUNK: usize = 64;
/// Threads of a block of the scan that hold its state.
pub(super) const SCAN_BLOCK: usize = 128;
/// All threads of a block: one more warp loads.
pub(super) const SCAN_THREADS: usize = SCAN_BLOCK + 32;
/// Bytes of shared memory of each block that the system keeps: a block may ask for the rest of a multiprocessor's.
const SYSTEM_SHARED: usize = 1024;
/// Heads and states lie in rows of the workspace padded to this many elements.
const PADDED_TO: usize = 16;

/// Where a request's two states lie in its page, and their element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatePage {
    /// The layer's sizes.
    pub dims: Mamba2Dims,
    /// Type of the convolution's state, which begins the page.
    pub conv: DType,
    /// Type of the scan's.
    pub ssm: DType,
}

impl StatePage {
    /// A page that the kernels read.
    ///
    /// # Errors
    /// Sizes and types without a kernel, in words.
    pub fn new(dims: Mamba2Dims, conv: DType, ssm: DType) -> Result<Self, String> {
        let dims = dims.check(MAX_CONV_KERNEL)?;
        if dims.state > MAX_STATE {
            return Err(format!("a state of {}: up to {MAX_STATE} are supported", dims.state));
        }
        let known = |d| matches!(d, DType::F32 | DType::BF16 | DType::F16);
        if let Some(other) = [conv, ssm].into_iter().find(|d| !known(*d)) {
            return Err(format!("a state of {other}: float32, bfloat16 and float16 are supported"));
        }
        let page = Self { dims, conv, ssm };
        if !page.ssm_offset().is_multiple_of(ssm.size()) {
            return Err(format!(
                "a scan's state of {ssm} behind {} bytes of the convolution's: its elements would lie across their \
                 alignment",
                page.ssm_offset()
            ));
        }
        Ok(page)
    }

    /// Bytes before the scan's state.
    pub fn ssm_offset(&self) -> usize {
        self.dims.memory() * self.dims.conv_dim() * self.conv.size()
    }

    /// Bytes of a request's state.
    pub fn bytes(&self) -> usize {
        self.ssm_offset() + self.dims.inner() * self.dims.state * self.ssm.size()
    }

    pub(super) fn head_wide(&self) -> usize {
        self.dims.head_dim.next_multiple_of(PADDED_TO)
    }

    pub(super) fn state_wide(&self) -> usize {
        self.dims.state.next_multiple_of(PADDED_TO)
    }

    /// Elements of a token's row in the workspace.
    pub fn row(&self) -> usize {
        self.dims.heads * self.head_wide() + 2 * self.dims.groups * self.state_wide()
    }

    /// Elements of a head that a block of the scan takes (`TILE` in `scan.cu`).
    fn tile(&self) -> usize {
        match (self.head_wide(), self.state_wide()) {
            (..=16, _) => 16,
            (..=32, _) | (_, 129..) => 32,
            _ => 64,
        }
    }

    /// Blocks of the scan that share a head.
    pub(super) fn tiles(&self) -> usize {
        self.head_wide().div_ceil(self.tile())
    }

    /// Float32 elements of a state as the blocks' threads hold it.
    pub fn part(&self) -> usize {
        let shares = SCAN_BLOCK / 32 / (self.tile() / 16);
        let parts = (self.state_wide() / 16).div_ceil(shares);
        self.dims.heads * self.tiles() * parts * 2 * SCAN_BLOCK * 4
    }

    /// Bytes of shared memory of a block of the scan with so many chunks in it (`Shared` in `scan.cu`).
    fn bytes_with(&self, stages: usize) -> usize {
        let (state_row, tile) = (self.state_wide() + 8, self.tile());
        stages * (2 * (2 * CHUNK * state_row + CHUNK * (tile + 8)) + 3 * CHUNK * 4) + 2 * tile * state_row
    }

    /// Chunks of the scan in shared memory (`STAGES`): two, unless states are too large for that or a block has no more
    /// than `shared_per_block` bytes.
    pub(super) fn stages(&self, shared_per_block: usize) -> usize {
        if self.state_wide() <= 128 && self.bytes_with(2) <= shared_per_block { 2 } else { 1 }
    }

    /// Bytes of shared memory of a block of the scan, where it has `shared_per_block`.
    pub fn shared_bytes(&self, shared_per_block: usize) -> usize {
        self.bytes_with(self.stages(shared_per_block))
    }

    /// Segments whose blocks fill a device together, at least one.
    pub fn segments_at_once(&self, multiprocessors: usize, shared_per_multiprocessor: usize) -> usize {
        // Registers are for two blocks.
        let block =
            self.shared_bytes(shared_per_multiprocessor.saturating_sub(SYSTEM_SHARED)) + SYSTEM_SHARED;
        let each = (shared_per_multiprocessor / block).clamp(1, 2);
        (multiprocessors * each / (self.dims.heads * self.tiles())).max(1)
    }

    /// [`StatePage::segments_at_once`] of this device.
    pub fn segments_on(&self, device: &DeviceInfo) -> usize {
        self.segments_at_once(device.multiprocessors as usize, device.shared_per_multiprocessor as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(heads: usize, head_dim: usize, state: usize) -> StatePage {
        let dims = Mamba2Dims { heads, head_dim, groups: 1, state, conv_kernel: 4 };
        StatePage::new(dims, DType::BF16, DType::F32).unwrap()
    }

    #[test]
    fn a_state_is_held_by_threads_once() {
        for (heads, head_dim, state) in [(64, 64, 128), (24, 128, 256), (6, 32, 32), (4, 7, 6), (2, 80, 96)] {
            let p = page(heads, head_dim, state);
            assert!(p.part() >= heads * p.head_wide() * p.state_wide(), "{head_dim} {state}");
            assert!(p.part() <= 8 * heads * p.head_wide() * p.state_wide(), "{head_dim} {state}");
        }
        let p = page(64, 64, 128);
        assert_eq!((p.part(), p.row(), p.tiles()), (64 * 64 * 128, 64 * 64 + 256, 1));
        assert_eq!(p.segments_at_once(132, 228 << 10), 4);
    }

    #[test]
    fn every_scan_fits_a_block_of_every_generation() {
        for kib in [99, 163, 227] {
            for state in 1..=MAX_STATE {
                for head_dim in 1..=256 {
                    let p = page(8, head_dim, state);
                    assert!(p.shared_bytes(kib << 10) <= kib << 10, "{head_dim} {state} {kib} KiB");
                }
            }
        }
        let p = page(64, 64, 128);
        assert_eq!([99, 163, 227].map(|kib| p.stages(kib << 10)), [1, 2, 2]);
        assert_eq!([99, 227].map(|kib| p.shared_bytes(kib << 10)), [62_208, 107_008]);
        assert_eq!(page(64, 64, 96).stages(99 << 10), 2);
    }

    #[test]
    fn states_across_their_alignment_are_refused() {
        let dims = Mamba2Dims { heads: 3, head_dim: 7, groups: 1, state: 5, conv_kernel: 2 };
        let e = StatePage::new(dims, DType::BF16, DType::F32).unwrap_err();
        assert!(e.contains("62 bytes"), "{e}");
        assert!(StatePage::new(dims, DType::F32, DType::F32).is_ok());
        let wide = Mamba2Dims { state: 300, ..dims };
        assert!(StatePage::new(wide, DType::F32, DType::F32).unwrap_err().contains("up to 256"));
    }
}
