//! Products in tiles: up to 32 activation rows times 32 output columns at a time, in four tiles of sums,
//! so that each tile that is loaded is used twice.

use super::{super::Job, Activations, COLUMNS, Packed, TILE};
use crate::kernels::amx::{Config, ROW, SIDE, Tiles};
use std::ops::Range;

/// Tiles of sums (two by two), of activations, of weights.
const A: usize = 4;
const B: usize = 6;

/// 16 rows of 16 sums.
#[repr(align(64))]
struct Sums([[f32; SIDE]; SIDE]);

/// Weight rows `rows` with the activation rows of `job`.
///
/// # Safety
/// The process may use tiles (`amx::ready`), and this thread holds none; the rest as `dot::multiply`'s.
pub(super) unsafe fn multiply(job: &Job<'_>, x: &Activations, w: &Packed, rows: Range<usize>) {
    let mut tiles: Option<Tiles> = None;
    let panels = rows.start / COLUMNS..rows.end.div_ceil(COLUMNS);
    for m in job.m.clone().step_by(2 * SIDE) {
        let first = SIDE.min(job.m.end - m);
        let second = SIDE.min(job.m.end - m - first);
        let config = config(first, second);
        match &mut tiles {
            // SAFETY: the caller's; there is none yet.
            none @ None => *none = Some(unsafe { Tiles::new(&config) }),
            Some(_) if first + second == 2 * SIDE => {}
            Some(tiles) => tiles.configure(&config),
        }
        let Some(tiles) = &mut tiles else { return };
        for panel in panels.clone().step_by(2) {
            // SAFETY: the caller's; the tiles are configured for these rows.
            unsafe {
                match (second > 0, panel + 1 < panels.end) {
                    (true, true) => block::<2, 2>(tiles, job, x, w, m, panel, rows.end),
                    (true, false) => block::<2, 1>(tiles, job, x, w, m, panel, rows.end),
                    (false, true) => block::<1, 2>(tiles, job, x, w, m, panel, rows.end),
                    (false, false) => block::<1, 1>(tiles, job, x, w, m, panel, rows.end),
                }
            }
        }
    }
}

/// Tiles for `first` rows, and `second` rows after them.
fn config(first: usize, second: usize) -> Config {
    let rows = |n: usize| (n, if n == 0 { 0 } else { ROW });
    let (one, two, weights) = (rows(first), rows(second), (SIDE, ROW));
    Config::new([one, one, two, two, one, two, weights, weights])
}

/// M times 16 activation rows from `m` (fewer where the tiles have fewer) with N panels from `panel`; weight
/// rows from `end` on are not there.
///
/// # Safety
/// As [`multiply`]'s; the tiles are configured for the rows.
#[inline(always)]
unsafe fn block<const M: usize, const N: usize>(
    tiles: &mut Tiles,
    job: &Job<'_>,
    x: &Activations,
    w: &Packed,
    m: usize,
    panel: usize,
    end: usize,
) {
    let (stride, lines) = (x.stride(), [w.panel(panel), w.panel(panel + N - 1)]);
    let a = x.rows_from(m).as_ptr();
    tiles.zero::<0>();
    if N == 2 {
        tiles.zero::<1>();
    }
    if M == 2 {
        tiles.zero::<2>();
    }
    if M == 2 && N == 2 {
        tiles.zero::<3>();
    }
    for t in 0..w.depth() {
        // SAFETY: a row has 64 bytes and a panel a tile for every t; the rows of the tiles are there.
        unsafe {
            tiles.load::<B>(lines[0].as_ptr().add(t * TILE), ROW);
            tiles.load::<A>(a.add(t * ROW), stride);
            tiles.dot::<0, A, B>();
            if N == 2 {
                tiles.load::<{ B + 1 }>(lines[1].as_ptr().add(t * TILE), ROW);
                tiles.dot::<1, A, { B + 1 }>();
            }
            if M == 2 {
                tiles.load::<{ A + 1 }>(a.add(SIDE * stride + t * ROW), stride);
                tiles.dot::<2, { A + 1 }, B>();
            }
            if M == 2 && N == 2 {
                tiles.dot::<3, { A + 1 }, { B + 1 }>();
            }
        }
    }
    let mut sums = Sums([[0.0; SIDE]; SIDE]);
    let to = (&raw mut sums).cast::<u8>();
    for mi in 0..M {
        for ni in 0..N {
            // SAFETY: 16 rows of 64 bytes, as many as a tile has at most; what is put is this task's.
            unsafe {
                match 2 * mi + ni {
                    0 => tiles.store::<0>(to, ROW),
                    1 => tiles.store::<1>(to, ROW),
                    2 => tiles.store::<2>(to, ROW),
                    _ => tiles.store::<3>(to, ROW),
                }
                let (row, column) = (m + mi * SIDE, (panel + ni) * COLUMNS);
                let columns = COLUMNS.min(end - column);
                for (i, sums) in (&*to.cast::<Sums>()).0.iter().take(job.m.end - row).enumerate() {
                    job.put(row + i, column, &sums[..columns], true, true);
                }
            }
        }
    }
}
