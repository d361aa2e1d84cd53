//! The boundary of the instruction sets: the parts of the kernel that work on lanes, each compiled once
//! for every level. What lies above (`item`, `tile`, `merge`) is plain control flow, generic over
//! [`Level`], and calls across the boundary once per block of work.
//!
//! One function a part, and not one big inlined kernel, keeps the crate's compile time in bounds.

#[cfg(target_arch = "aarch64")]
use super::lanes::Neon;
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::{
    convert,
    elem::Elem,
    lanes::{Lanes, Portable},
    merge::{self, Partial},
    micro::{self, Values},
    pack::{self, Tokens},
    soften::{self, Scores},
};
use headway_tensor::{DType, RowQuant};

/// The parts of the kernel at one level. Each is `unsafe` because it must run on a machine that has the
/// level, and for the reasons of the function that it compiles.
pub(super) trait Level: Copy {
    /// Lanes in a vector.
    const N: usize;
    /// Most rows of a block: as many as the registers hold sums for. 2 or 6.
    const ROWS: usize;
    /// [`micro::scores`].
    unsafe fn scores<E: Elem, const M: usize, const G: usize>(
        q: *const f32,
        k: *const *const u8,
        ahead: *const *const u8,
        head_size: usize,
        s: *mut f32,
    );
    /// [`micro::weigh`] over full vectors.
    unsafe fn weigh<E: Elem, const M: usize, const V: usize>(
        p: *const f32,
        v: &Values,
        tokens: (usize, usize),
        acc: *mut f32,
        stride: usize,
    );
    /// [`micro::weigh`] of one row over eight columns.
    unsafe fn weigh_narrow<E: Elem>(p: *const f32, v: &Values, tokens: (usize, usize), acc: *mut f32);
    /// [`soften::soften`].
    unsafe fn soften(s: &Scores, state: *mut f32, acc: *mut f32, width: usize);
    /// [`merge::merge`].
    unsafe fn merge(part: Partial, total: Partial, width: usize);
    /// [`merge::sink`].
    unsafe fn sink(state: *mut f32, sink: f32) -> f32;
    /// [`convert::read_row`].
    unsafe fn read_row(dtype: DType, from: *const u8, to: *mut f32, width: usize, factor: f32);
    /// [`convert::write_row`].
    unsafe fn write_row(dtype: DType, from: *const f32, to: *mut u8, width: usize, factor: f32);
    /// [`convert::quantise_row`].
    unsafe fn quantise_row(
        quant: &RowQuant,
        from: *const f32,
        codes: *mut u8,
        scales: *mut f32,
        width: usize,
        factor: f32,
    );
    /// [`convert::widen_keys`].
    unsafe fn widen_keys<E: Elem>(from: *const u8, ahead: *const u8, to: *mut f32, head_size: usize);
    /// [`convert::widen_panels`].
    unsafe fn widen_panels<E: Elem>(from: *const u8, ahead: *const u8, to: *mut f32, width: usize);
    /// [`convert::turn_latents`].
    unsafe fn turn_latents<E: Elem>(
        rows: *const u8,
        widths: (usize, usize),
        keys: *mut f32,
        values: *mut f32,
    );
    /// [`pack::keys_of_four`].
    unsafe fn keys_of_four(x: Tokens, units: usize, to: *mut u8);
    /// [`pack::pairs`].
    unsafe fn pairs(x: Tokens, odd: bool, width: usize, to: *mut u8);
}

macro_rules! level {
    ($(#[$doc:meta])* $name:ident, $lanes:ty, $rows:literal, [$(#[$feature:meta])*]) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        // SAFETY (of every block): compiled for the lanes' instruction set, which the caller's machine
        // has; the rest is what the caller promised of the function that is compiled.
        impl Level for $name {
            const N: usize = <$lanes>::N;
            const ROWS: usize = $rows;
            $(#[$feature])*
            unsafe fn scores<E: Elem, const M: usize, const G: usize>(
                q: *const f32,
                k: *const *const u8,
                ahead: *const *const u8,
                head_size: usize,
                s: *mut f32,
            ) {
                // SAFETY: see above.
                unsafe { micro::scores::<$lanes, E, M, G>(q, k, ahead, head_size, s) }
            }
            $(#[$feature])*
            unsafe fn weigh<E: Elem, const M: usize, const V: usize>(
                p: *const f32,
                v: &Values,
                tokens: (usize, usize),
                acc: *mut f32,
                stride: usize,
            ) {
                // SAFETY: see above.
                unsafe { micro::weigh::<$lanes, E, M, V>(p, v, tokens, acc, stride) }
            }
            $(#[$feature])*
            unsafe fn weigh_narrow<E: Elem>(p: *const f32, v: &Values, tokens: (usize, usize), acc: *mut f32) {
                // SAFETY: see above.
                unsafe { micro::weigh::<<$lanes as Lanes>::Narrow, E, 1, 1>(p, v, tokens, acc, 0) }
            }
            $(#[$feature])*
            unsafe fn soften(s: &Scores, state: *mut f32, acc: *mut f32, width: usize) {
                // SAFETY: see above.
                unsafe { soften::soften::<$lanes>(s, state, acc, width) }
            }
            $(#[$feature])*
            unsafe fn merge(part: Partial, total: Partial, width: usize) {
                // SAFETY: see above.
                unsafe { merge::merge::<$lanes>(part, total, width) }
            }
            $(#[$feature])*
            unsafe fn sink(state: *mut f32, sink: f32) -> f32 {
                // SAFETY: see above.
                unsafe { merge::sink::<$lanes>(state, sink) }
            }
            $(#[$feature])*
            unsafe fn read_row(dtype: DType, from: *const u8, to: *mut f32, width: usize, factor: f32) {
                // SAFETY: see above.
                unsafe { convert::read_row::<$lanes>(dtype, from, to, width, factor) }
            }
            $(#[$feature])*
            unsafe fn write_row(dtype: DType, from: *const f32, to: *mut u8, width: usize, factor: f32) {
                // SAFETY: see above.
                unsafe { convert::write_row::<$lanes>(dtype, from, to, width, factor) }
            }
            $(#[$feature])*
            unsafe fn quantise_row(
                quant: &RowQuant,
                from: *const f32,
                codes: *mut u8,
                scales: *mut f32,
                width: usize,
                factor: f32,
            ) {
                // SAFETY: see above.
                unsafe { convert::quantise_row(quant, from, codes, scales, width, factor) }
            }
            $(#[$feature])*
            unsafe fn widen_keys<E: Elem>(from: *const u8, ahead: *const u8, to: *mut f32, head_size: usize) {
                // SAFETY: see above.
                unsafe { convert::widen_keys::<$lanes, E>(from, ahead, to, head_size) }
            }
            $(#[$feature])*
            unsafe fn widen_panels<E: Elem>(from: *const u8, ahead: *const u8, to: *mut f32, width: usize) {
                // SAFETY: see above.
                unsafe { convert::widen_panels::<$lanes, E>(from, ahead, to, width) }
            }
            $(#[$feature])*
            unsafe fn keys_of_four(x: Tokens, units: usize, to: *mut u8) {
                // SAFETY: see above.
                unsafe { pack::keys_of_four::<$lanes>(x, units, to) }
            }
            $(#[$feature])*
            unsafe fn pairs(x: Tokens, odd: bool, width: usize, to: *mut u8) {
                // SAFETY: see above.
                unsafe { pack::pairs(x, odd, width, to) }
            }
            $(#[$feature])*
            unsafe fn turn_latents<E: Elem>(
                rows: *const u8,
                widths: (usize, usize),
                keys: *mut f32,
                values: *mut f32,
            ) {
                // SAFETY: see above.
                unsafe { convert::turn_latents::<$lanes, E>(rows, widths, keys, values) }
            }
        }
    };
}
level!(
    /// Plain Rust.
    PortableLevel, Portable, 2, []
);
#[cfg(target_arch = "aarch64")]
level!(
    /// Advanced SIMD.
    NeonLevel, Neon, 6, [#[target_feature(enable = "neon")]]
);
#[cfg(target_arch = "x86_64")]
level!(
    /// AVX2 with FMA and F16C.
    Avx2Level, Avx2, 6, [#[target_feature(enable = "avx2,fma,f16c")]]
);
#[cfg(target_arch = "x86_64")]
level!(
    /// AVX-512 F, BW, DQ and VL.
    Avx512Level, Avx512, 6, [#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]]
);
