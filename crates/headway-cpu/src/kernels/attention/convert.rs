//! Rows and tiles to float32 and back.

use super::{
    elem::{Elem, load_activation, store_activation},
    lanes::{LINE, Lanes, Turn, prefetch},
    micro::{GROUP, TILE},
};
use headway_tensor::{DType, RowQuant};

/// A row of activations times a factor, as float32.
///
/// # Safety
/// The instruction set of `L`; `width` elements, a multiple of 8, on both sides.
#[inline(always)]
pub(super) unsafe fn read_row<L: Lanes>(
    dtype: DType,
    from: *const u8,
    to: *mut f32,
    width: usize,
    factor: f32,
) {
    // SAFETY: as the caller has promised.
    unsafe {
        let factor = L::Narrow::splat(factor);
        for d in (0..width).step_by(8) {
            let x: L::Narrow = load_activation(dtype, from.add(d * dtype.size()));
            L::Narrow::mul(x, factor).store(to.add(d).cast());
        }
    }
}

/// A row of float32 times a factor, as activations, rounded to nearest even.
///
/// # Safety
/// As [`read_row`].
#[inline(always)]
pub(super) unsafe fn write_row<L: Lanes>(
    dtype: DType,
    from: *const f32,
    to: *mut u8,
    width: usize,
    factor: f32,
) {
    // SAFETY: as the caller has promised.
    unsafe {
        let factor = L::Narrow::splat(factor);
        for c in (0..width).step_by(8) {
            let x = L::Narrow::mul(L::Narrow::load(from.add(c).cast()), factor);
            store_activation(dtype, x, to.add(c * dtype.size()));
        }
    }
}

/// A row of float32 times a factor, as codes; the scales that the rule makes go to `scales`.
///
/// # Safety
/// The instruction set that this is compiled for; `width` float32 at `from`, as many codes at `codes`, and the rule's
/// scales of so many at `scales`.
#[inline(always)]
pub(super) unsafe fn quantise_row(
    quant: &RowQuant,
    from: *const f32,
    codes: *mut u8,
    scales: *mut f32,
    width: usize,
    factor: f32,
) {
    // SAFETY: as the caller has promised; a rule without scales has no memory for them.
    unsafe {
        let row = std::slice::from_raw_parts(from, width);
        let codes = std::slice::from_raw_parts_mut(codes, width);
        let scales = match quant.scales_of(width) {
            0 => &mut [],
            n => std::slice::from_raw_parts_mut(scales, n),
        };
        quant.quantise(row, factor, codes, scales);
    }
}

/// A group of keys as float32, `[head_size, GROUP]`; the group at `ahead` will be needed next.
///
/// # Safety
/// The instruction set of `L`; a group of keys at `from`, room for as many float32 at `to`.
#[inline(always)]
pub(super) unsafe fn widen_keys<L: Lanes, E: Elem>(
    from: *const u8,
    ahead: *const u8,
    to: *mut f32,
    head_size: usize,
) {
    // SAFETY: as the caller has promised.
    unsafe {
        for d in (0..head_size).step_by(E::UNIT) {
            let at = d * GROUP * E::SIZE;
            if at.is_multiple_of(LINE) {
                prefetch(ahead.wrapping_add(at));
            }
            for j in (0..GROUP).step_by(L::N) {
                let keys = E::load_units::<L>(from.add(at + j * E::UNIT_SIZE));
                for u in 0..E::UNIT {
                    keys[u].store(to.add((d + u) * GROUP + j).cast());
                }
            }
        }
    }
}

/// The values of a unit of tokens, `width` columns (a multiple of 8), as float32 into panels of 16
/// columns: 16 columns of a tile's tokens lie together. The unit at `ahead` will be needed next.
///
/// # Safety
/// The instruction set of `L`; `width` columns at `from`; panels of [`TILE`] tokens at `to`, which is
/// the first token's place in the first.
#[inline(always)]
pub(super) unsafe fn widen_panels<L: Lanes, E: Elem>(
    from: *const u8,
    ahead: *const u8,
    to: *mut f32,
    width: usize,
) {
    // SAFETY: as the caller has promised.
    unsafe {
        for line in (0..width * E::UNIT_SIZE).step_by(LINE) {
            prefetch(ahead.wrapping_add(line));
        }
        let mut c = 0;
        while c + 16 <= width {
            for j in (0..16).step_by(L::N) {
                let values = E::load_units::<L>(from.add((c + j) * E::UNIT_SIZE));
                for u in 0..E::UNIT {
                    values[u].store(to.add(c * TILE + u * 16 + j).cast());
                }
            }
            c += 16;
        }
        if c < width {
            let values = E::load_units::<L::Narrow>(from.add(c * E::UNIT_SIZE));
            for u in 0..E::UNIT {
                values[u].store(to.add(c * TILE + u * 16).cast());
            }
        }
    }
}

/// [`GROUP`] latent rows of `size` elements as float32, in both forms that the products read: as a packed group of
/// keys `[size, 16]`, and their first `width` elements as panels of values. Eight elements of eight rows are read,
/// stored as values, turned, and stored as keys.
///
/// # Safety
/// The instruction set of `L`; `GROUP` rows of `size` elements at `rows`, both widths multiples of 8; room for the group
/// at `keys`, and for panels of [`TILE`] tokens at `values`, which is the group's place in the first.
#[inline(always)]
pub(super) unsafe fn turn_latents<L: Lanes, E: Elem>(
    rows: *const u8,
    (size, width): (usize, usize),
    keys: *mut f32,
    values: *mut f32,
) {
    // SAFETY: as the caller has promised.
    unsafe {
        for d in (0..size).step_by(8) {
            for first in (0..GROUP).step_by(8) {
                let mut x = [L::Narrow::splat(0.0); 8];
                for (t, x) in x.iter_mut().enumerate() {
                    *x = E::load(rows.add(((first + t) * size + d) * E::SIZE));
                }
                if d < width {
                    let panel = values.add(d / 16 * 16 * TILE + d % 16);
                    for (t, x) in x.iter().enumerate() {
                        x.store(panel.add((first + t) * 16).cast());
                    }
                }
                for (i, x) in L::Narrow::turn(x).iter().enumerate() {
                    x.store(keys.add((d + i) * GROUP + first).cast());
                }
            }
        }
    }
}
