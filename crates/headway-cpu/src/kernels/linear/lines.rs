//! Memory for packed weights: whole cache lines, zeroed.

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

// SAFETY: 64 bytes without padding, of which every pattern is valid.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Line {}

/// Zeroed lines for `bytes` bytes.
pub(super) fn zeroed(bytes: usize) -> Vec<Line> {
    bytemuck::zeroed_vec::<Line>(bytes.div_ceil(64))
}
