//! Element types of activations and caches, as the kernels read and write them: raw bytes to lanes.

use super::lanes::Lanes;
use headway_tensor::DType;

/// An element type of a cache. Elements lie in units: single ones, or pairs of neighbours (see the
/// layout of a page in the [parent](super)).
pub(super) trait Elem: Copy {
    /// Bytes of one element.
    const SIZE: usize;
    /// Elements of a unit: 1 or 2.
    const UNIT: usize = 1;
    /// Bytes of a unit.
    const UNIT_SIZE: usize = Self::SIZE * Self::UNIT;
    /// Whether it is multiplied in AMX tiles, by `tiles`.
    const TILES: bool = false;
    /// Whether this is float32: then a copy in float32 is no gain.
    const IS_F32: bool = false;
    /// Whether reading asks for lines ahead: not where they are in the nearest cache already.
    const AHEAD: bool = true;
    /// Most rows for which elements are converted in registers as they are read, each time they are
    /// read; with more rows, and for types whose conversion costs more, a tile is converted once.
    const DIRECT_ROWS: usize;
    /// Reads `L::N` elements side by side, as rows of latents have them.
    ///
    /// # Safety
    /// The instruction set of `L`; that many elements at `p`.
    unsafe fn load<L: Lanes>(p: *const u8) -> L;
    /// Reads `L::N` units: their first elements, and their second ones (those of single elements are
    /// the first again).
    ///
    /// # Safety
    /// The instruction set of `L`; that many units at `p`.
    unsafe fn load_units<L: Lanes>(p: *const u8) -> [L; 2];
}

macro_rules! elems {
    ($($(#[$doc:meta])* $name:ident, $size:literal, $f32:literal, $direct:literal, $load:ident;)*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name;
        impl Elem for $name {
            const SIZE: usize = $size;
            const IS_F32: bool = $f32;
            const DIRECT_ROWS: usize = $direct;
            #[inline(always)]
            unsafe fn load<L: Lanes>(p: *const u8) -> L {
                // SAFETY: as the trait demands.
                unsafe { L::$load(p) }
            }
            #[inline(always)]
            unsafe fn load_units<L: Lanes>(p: *const u8) -> [L; 2] {
                // SAFETY: as the trait demands.
                unsafe {
                    let x = L::$load(p);
                    [x, x]
                }
            }
        }
    )* };
}
elems! {
    /// float32.
    F32, 4, true, 8, load;
    /// binary16.
    F16, 2, false, 8, load_f16;
    /// 8-bit float, 4 exponent bits.
    E4m3, 1, false, 0, load_e4m3;
    /// 8-bit float, 5 exponent bits.
    E5m2, 1, false, 0, load_e5m2;
}

/// float32 of a tile that stays in the nearest cache while many rows pass.
#[derive(Clone, Copy)]
pub(super) struct Near;
impl Elem for Near {
    const SIZE: usize = 4;
    const IS_F32: bool = true;
    const AHEAD: bool = false;
    const DIRECT_ROWS: usize = 0;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L {
        // SAFETY: as the trait demands.
        unsafe { L::load(p) }
    }
    #[inline(always)]
    unsafe fn load_units<L: Lanes>(p: *const u8) -> [L; 2] {
        // SAFETY: as the trait demands.
        unsafe {
            let x = L::load(p);
            [x, x]
        }
    }
}

/// bfloat16, in pairs: a shift and a mask widen both elements of a pair.
#[derive(Clone, Copy)]
pub(super) struct Bf16;
impl Elem for Bf16 {
    const SIZE: usize = 2;
    const UNIT: usize = 2;
    const DIRECT_ROWS: usize = 8;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L {
        // SAFETY: as the trait demands.
        unsafe { L::load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn load_units<L: Lanes>(p: *const u8) -> [L; 2] {
        // SAFETY: as the trait demands.
        unsafe { L::load_bf16_pairs(p) }
    }
}

/// bfloat16 that is multiplied in tiles.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Bf16InTiles;
#[cfg(target_arch = "x86_64")]
impl Elem for Bf16InTiles {
    const SIZE: usize = Bf16::SIZE;
    const UNIT: usize = Bf16::UNIT;
    const TILES: bool = true;
    const DIRECT_ROWS: usize = 0;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L {
        // SAFETY: as the trait demands.
        unsafe { Bf16::load(p) }
    }
    #[inline(always)]
    unsafe fn load_units<L: Lanes>(p: *const u8) -> [L; 2] {
        // SAFETY: as the trait demands.
        unsafe { Bf16::load_units(p) }
    }
}

/// Elements of a unit in a cache of this type: [`Elem::UNIT`].
pub(super) const fn unit(cache: DType) -> usize {
    match cache {
        DType::BF16 => Bf16::UNIT,
        _ => 1,
    }
}

/// Loads from one of the activation dtypes (float32, binary16, bfloat16).
///
/// # Safety
/// The instruction set of `L`; `L::N` elements of `dtype` at `p`.
#[inline(always)]
pub(super) unsafe fn load_activation<L: Lanes>(dtype: DType, p: *const u8) -> L {
    // SAFETY: as the caller has promised.
    unsafe {
        match dtype {
            DType::F16 => L::load_f16(p),
            DType::BF16 => L::load_bf16(p),
            _ => L::load(p),
        }
    }
}

/// Stores as one of the activation dtypes, rounded to nearest even.
///
/// # Safety
/// The instruction set of `L`; room for `L::N` elements of `dtype` at `p`.
#[inline(always)]
pub(super) unsafe fn store_activation<L: Lanes>(dtype: DType, x: L, p: *mut u8) {
    // SAFETY: as the caller has promised.
    unsafe {
        match dtype {
            DType::F16 => x.store_f16(p),
            DType::BF16 => x.store_bf16(p),
            _ => x.store(p),
        }
    }
}
