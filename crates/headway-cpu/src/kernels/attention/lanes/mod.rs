//! Vectors of float32 lanes: what the attention kernels are written over. One type an instruction
//! set; [`Portable`] is the reference for the others.
//!
//! Every method is `unsafe` for one reason: it must run inside a function that was compiled for the
//! type's instruction set (`#[target_feature]`, see `entry`), on a machine that has it. Methods that
//! take a pointer need in addition that many elements behind it; no alignment is needed. Each is
//! `#[inline(always)]`, so that a kernel becomes one function of its entry.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::Neon;
pub(super) use portable::Portable;

/// Lanes of float32 in one register (or an array).
pub(super) trait Lanes: Copy {
    /// Number of lanes: 8 or 16.
    const N: usize;
    /// Eight lanes of the same instruction set, for what is not a multiple of [`Lanes::N`].
    type Narrow: Lanes + Turn;

    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self;
    /// 0, 1, 2, …
    unsafe fn iota() -> Self;
    /// Reads N float32.
    unsafe fn load(p: *const u8) -> Self;
    /// Reads N binary16.
    unsafe fn load_f16(p: *const u8) -> Self;
    /// Reads N bfloat16.
    unsafe fn load_bf16(p: *const u8) -> Self;
    /// Reads N pairs of bfloat16: the first of each pair, and the second.
    unsafe fn load_bf16_pairs(p: *const u8) -> [Self; 2];
    /// Reads N e4m3.
    unsafe fn load_e4m3(p: *const u8) -> Self;
    /// Reads N e5m2.
    unsafe fn load_e5m2(p: *const u8) -> Self;
    /// Writes N float32.
    unsafe fn store(self, p: *mut u8);
    /// Writes N binary16, rounded to nearest even; NaN stays NaN.
    unsafe fn store_f16(self, p: *mut u8);
    /// Writes N bfloat16, rounded to nearest even; NaN stays NaN.
    unsafe fn store_bf16(self, p: *mut u8);
    /// a + b.
    unsafe fn add(a: Self, b: Self) -> Self;
    /// a − b.
    unsafe fn sub(a: Self, b: Self) -> Self;
    /// a · b.
    unsafe fn mul(a: Self, b: Self) -> Self;
    /// a / b.
    unsafe fn div(a: Self, b: Self) -> Self;
    /// a · b + c, with one rounding where the instruction set has it.
    unsafe fn fma(a: Self, b: Self, c: Self) -> Self;
    /// a > b ? a : b, so b where one of them is NaN.
    unsafe fn max(a: Self, b: Self) -> Self;
    /// a < b ? x : y, so y where one of a and b is NaN.
    unsafe fn select_lt(a: Self, b: Self, x: Self, y: Self) -> Self;
    /// To the nearest integer, ties to even; |a| < 2^22.
    unsafe fn round(a: Self) -> Self;
    /// 2^a for integers −126 ≤ a ≤ 127; any finite number for a NaN.
    unsafe fn pow2(a: Self) -> Self;
    /// Sum of the lanes, in an order that is the type's own and always the same.
    unsafe fn sum(self) -> f32;
    /// Largest lane, by [`Lanes::max`] over halves.
    unsafe fn largest(self) -> f32;
    /// Lane 0.
    unsafe fn first(self) -> f32;
}

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// Asks for the cache line at `p`, any address of this process, ahead of its use.
#[inline(always)]
pub(super) fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, and it reads nothing that the program sees.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: every AArch64 processor has the instruction, and it reads nothing that the program sees.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// Eight lanes that can be turned.
pub(super) trait Turn: Lanes {
    /// Eight rows of eight as eight columns: element j of result i is element i of argument j.
    unsafe fn turn(x: [Self; 8]) -> [Self; 8];
}

/// Methods of a [`Lanes`] type, each one expression that needs the instruction set.
macro_rules! lane_ops {
    ($( fn $name:ident($($args:tt)*) $(-> $r:ty)? { $($e:tt)* } )*) => { $(
        #[inline(always)]
        unsafe fn $name($($args)*) $(-> $r)? {
            // SAFETY: the caller runs this where the instruction set is there, with as many elements
            // behind a pointer as the trait says.
            unsafe { $($e)* }
        }
    )* };
}
use lane_ops;

#[cfg(test)]
mod tests;
