//! Rows of keys and values into the order of a page: a run of up to 16 consecutive tokens at a time, so
//! that whole cache lines are written where whole groups are. Bits are moved, never changed.

use super::{
    lanes::{Lanes, Turn},
    micro::GROUP,
};

/// Rows of consecutive tokens: the first one's address, bytes from one to the next, how many.
#[derive(Clone, Copy)]
pub(super) struct Tokens {
    pub(super) from: *const u8,
    pub(super) stride: usize,
    pub(super) count: usize,
}

impl Tokens {
    /// The row of token `t`.
    fn row<T>(&self, t: usize) -> *const T {
        self.from.wrapping_add(t * self.stride).cast()
    }
}

/// Keys in units of four bytes (a float32, a pair of bfloat16): unit i of token t goes to
/// `to[i][t]`, rows of [`GROUP`] units. Eight by eight in registers.
///
/// # Safety
/// The instruction set of `L`; rows of `units` units; a group at `to`, of which the tokens' columns
/// begin there.
#[inline(always)]
pub(super) unsafe fn keys_of_four<L: Lanes>(x: Tokens, units: usize, to: *mut u8) {
    // SAFETY: as the caller has promised.
    unsafe {
        let mut i = 0;
        while i + 8 <= units && x.count >= 8 {
            let mut t = 0;
            while t + 8 <= x.count {
                let mut rows = [L::Narrow::splat(0.0); 8];
                for (r, row) in rows.iter_mut().enumerate() {
                    *row = L::Narrow::load(x.row::<u32>(t + r).add(i).cast());
                }
                let rows = L::Narrow::turn(rows);
                for (r, row) in rows.into_iter().enumerate() {
                    row.store(to.add(((i + r) * GROUP + t) * 4));
                }
                t += 8;
            }
            columns::<u32>(x, t, i..i + 8, to);
            i += 8;
        }
        columns::<u32>(x, 0, i..units, to);
    }
}

/// Keys in units of `T`, one by one: the tokens from `first` on.
///
/// # Safety
/// As [`keys_of_four`], with units of `T`.
#[inline(always)]
pub(super) unsafe fn columns<T: Copy>(x: Tokens, first: usize, units: std::ops::Range<usize>, to: *mut u8) {
    // SAFETY: as the caller has promised.
    unsafe {
        for t in first..x.count {
            let (row, to) = (x.row::<T>(t), to.cast::<T>().add(t));
            for i in units.clone() {
                to.add(i * GROUP).write_unaligned(row.add(i).read_unaligned());
            }
        }
    }
}

/// Values in pairs of tokens: columns of two-byte elements, the two tokens' side by side. The first
/// token is the second of its pair where `odd`; the other one of a pair stays as it is.
///
/// # Safety
/// Rows of `width` elements; at `to` the pair of the first token and those after it, which no other
/// thread writes.
#[inline(always)]
pub(super) unsafe fn pairs(x: Tokens, odd: bool, width: usize, mut to: *mut u8) {
    // SAFETY: as the caller has promised.
    unsafe {
        let mut t = 0;
        if odd && x.count > 0 {
            one_of_pairs(x.row(0), 16, width, to.cast());
            to = to.add(width * 4);
            t = 1;
        }
        while t + 2 <= x.count {
            let (a, b, pairs) = (x.row::<u16>(t), x.row::<u16>(t + 1), to.cast::<u32>());
            for c in 0..width {
                let (a, b) = (a.add(c).read_unaligned(), b.add(c).read_unaligned());
                pairs.add(c).write_unaligned(u32::from(a) | u32::from(b) << 16);
            }
            to = to.add(width * 4);
            t += 2;
        }
        if t < x.count {
            one_of_pairs(x.row(t), 0, width, to.cast());
        }
    }
}

/// # Safety
/// As [`pairs`].
#[inline(always)]
unsafe fn one_of_pairs(row: *const u16, shift: u32, width: usize, to: *mut u32) {
    // SAFETY: as the caller has promised.
    unsafe {
        for c in 0..width {
            let other = to.add(c).read_unaligned() & !(0xffff << shift);
            to.add(c).write_unaligned(other | u32::from(row.add(c).read_unaligned()) << shift);
        }
    }
}
