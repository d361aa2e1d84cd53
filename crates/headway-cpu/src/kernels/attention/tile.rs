//! One tile of 64 keys: scores of all rows, the online softmax step, weighted values.

use super::{
    elem::{Elem, Near},
    level::Level,
    micro::{GROUP, GROUPS, TILE, Values},
    pass::Pass,
    soften::Scores,
};
use std::{marker::PhantomData, ops::Range};

/// The keys of a tile that any row sees: positions `from..to` of the tile that begins at `at`. A tile with the end
/// of a prefix is two blocks.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) at: usize,
    pub(super) from: usize,
    pub(super) to: usize,
    /// In the request's prefix: rows see it up to their `high`, whatever their `low`.
    pub(super) in_prefix: bool,
}

impl Block {
    /// Groups with such keys.
    pub(super) fn groups(&self) -> Range<usize> {
        (self.from - self.at) / GROUP..(self.to - self.at).div_ceil(GROUP)
    }
}

/// Packed groups of keys, and what to ask for while each is read (itself again, where nothing is).
#[derive(Clone, Copy)]
pub(super) struct Keys {
    pub(super) groups: [*const u8; GROUPS],
    pub(super) ahead: [*const u8; GROUPS],
}

impl Keys {
    /// For the n-th block of rows: only the first has to ask for what comes next.
    fn for_block(&self, n: usize) -> Self {
        Self { ahead: if n == 0 { self.ahead } else { self.groups }, ..*self }
    }
}

/// How rows are blocked at a level, for an element type. As constants, so that code for blocks that
/// never come is not compiled.
pub(super) struct Blocks<A, E>(PhantomData<(A, E)>);

impl<A: Level, E: Elem> Blocks<A, E> {
    /// Whether this type is ever read directly.
    pub(super) const DIRECT: bool = E::DIRECT_ROWS > 0;
    /// Most rows of a block. Four are enough where memory is slower, and conversion needs registers too.
    const MOST: usize = if !E::AHEAD || A::ROWS < 4 { A::ROWS } else { 4 };
    const UP_TO_4: bool = Self::MOST >= 4;
    /// Whether three rows are few enough for wide blocks of groups or columns: a pair takes more registers.
    const WIDE_3: bool = E::UNIT == 1;
    /// And one row for the widest ones.
    const WIDEST_1: bool = E::UNIT == 1;
    const UP_TO_6: bool = Self::MOST >= 6;

    /// Rows in equal blocks: `(first, count)` of each.
    fn of(rows: usize) -> impl Iterator<Item = (usize, usize)> {
        let step = rows.div_ceil(rows.div_ceil(Self::MOST).max(1)).max(1);
        (0..rows).step_by(step).map(move |first| (first, step.min(rows - first)))
    }
}

/// Calls a method of `$a` with the number of rows as a constant.
macro_rules! with_rows {
    ($m:expr, $a:ident::$f:ident::<$e:ty, _, $n:literal>($($x:expr),*)) => {
        if $m == 1 {
            $a::$f::<$e, 1, $n>($($x),*)
        } else if $m == 2 {
            $a::$f::<$e, 2, $n>($($x),*)
        } else if Blocks::<$a, $e>::UP_TO_4 {
            if $m == 3 {
                $a::$f::<$e, 3, $n>($($x),*)
            } else if $m == 4 {
                $a::$f::<$e, 4, $n>($($x),*)
            } else if Blocks::<$a, $e>::UP_TO_6 {
                if $m == 5 {
                    $a::$f::<$e, 5, $n>($($x),*)
                } else {
                    $a::$f::<$e, 6, $n>($($x),*)
                }
            }
        }
    };
}

/// Few rows: keys and values are read in the cache's type, each by every block of rows, at most `at_once`
/// groups side by side.
///
/// # Safety
/// As [`Pass`]'s methods; keys and values are those of the tile.
pub(super) unsafe fn direct<A: Level, E: Elem>(
    p: &Pass<'_>,
    b: &Block,
    keys: &Keys,
    values: &Values,
    at_once: usize,
) {
    // SAFETY: as the caller has promised.
    unsafe {
        for (n, (first, rows)) in Blocks::<A, E>::of(p.rows).enumerate() {
            block_scores::<A, E>(p, first, rows, b.groups(), &keys.for_block(n), at_once);
        }
        for row in 0..p.rows {
            soften_row::<A>(p, b, row);
        }
        for start in (0..TILE).step_by(at_once * GROUP) {
            for (n, (first, rows)) in Blocks::<A, E>::of(p.rows).enumerate() {
                let values = Values { ahead: if n == 0 { values.ahead } else { values.groups }, ..*values };
                for_common_and_ragged(p, b, first, rows, |first, rows, (from, to)| {
                    let tokens = (from.max(start), to.min(start + at_once * GROUP));
                    if tokens.0 < tokens.1 {
                        weigh_all::<A, E>(p, first, rows, &values, tokens);
                    }
                });
            }
        }
    }
}

/// Many rows: a group of keys, and a panel of values, stays in the nearest cache while all rows pass.
///
/// # Safety
/// As [`Pass`]'s methods; keys and values are those of the tile, in float32, values by panels.
pub(super) unsafe fn converted<A: Level>(p: &Pass<'_>, b: &Block, keys: &Keys, values: *const f32) {
    // SAFETY: as the caller has promised.
    unsafe {
        for g in b.groups() {
            for (first, rows) in Blocks::<A, Near>::of(p.rows) {
                if sees_any(p, b, first, rows, g) {
                    block_scores::<A, Near>(p, first, rows, g..g + 1, keys, 1);
                }
            }
        }
        for row in 0..p.rows {
            soften_row::<A>(p, b, row);
        }
        for c in (0..p.job.shape.head_size_v).step_by(16) {
            let panel = values.add(c * TILE);
            let groups = std::array::from_fn(|g| panel.wrapping_add(g * GROUP * 16).cast());
            let panel = Values { groups, ahead: groups, stride: 64 };
            for (first, rows) in Blocks::<A, Near>::of(p.rows) {
                for_common_and_ragged(p, b, first, rows, |first, rows, tokens| {
                    weigh_panel::<A>(p, first, rows, &panel, c, tokens);
                });
            }
        }
    }
}

/// Whether one of these rows may see a key of group `g` of the tile.
///
/// # Safety
/// As [`Pass::bounds`].
pub(super) unsafe fn sees_any(p: &Pass<'_>, b: &Block, first: usize, rows: usize, g: usize) -> bool {
    // SAFETY: rows of the pass. Bounds rise with the row, but for rows that see nothing, which come
    // first and have (0, 0).
    let ((low, _), (_, high)) = unsafe { (p.bounds(first), p.bounds(first + rows - 1)) };
    let at = b.at + g * GROUP;
    (low < at + GROUP || b.in_prefix) && high > at
}

/// Scores of a block of rows over some groups, at most `at_once` side by side.
///
/// # Safety
/// As [`direct`]; one block.
unsafe fn block_scores<A: Level, E: Elem>(
    p: &Pass<'_>,
    first: usize,
    rows: usize,
    groups: Range<usize>,
    keys: &Keys,
    at_once: usize,
) {
    let size = p.job.shape.head_size;
    let (q, s) = (p.q(first).cast_const(), p.scores(first));
    let (k, ahead) = (keys.groups.as_ptr(), keys.ahead.as_ptr());
    let mut g = groups.start;
    // SAFETY: the rows and groups are those of the pass and the tile.
    unsafe {
        if Blocks::<A, E>::UP_TO_4 {
            if rows == 1 && groups.len() == GROUPS && at_once == GROUPS {
                return A::scores::<E, 1, GROUPS>(q, k, ahead, size, s);
            }
            while rows <= 2 && at_once >= 2 && g + 2 <= groups.end {
                let (k, ahead, s) = (k.add(g), ahead.add(g), s.add(g * GROUP));
                match rows {
                    1 => A::scores::<E, 1, 2>(q, k, ahead, size, s),
                    _ => A::scores::<E, 2, 2>(q, k, ahead, size, s),
                }
                g += 2;
            }
            if Blocks::<A, E>::WIDE_3 {
                while rows == 3 && at_once >= 2 && g + 2 <= groups.end {
                    A::scores::<E, 3, 2>(q, k.add(g), ahead.add(g), size, s.add(g * GROUP));
                    g += 2;
                }
            }
        }
        while g < groups.end {
            let (k, ahead, s) = (k.add(g), ahead.add(g), s.add(g * GROUP));
            with_rows!(rows, A::scores::<E, _, 1>(q, k, ahead, size, s));
            g += 1;
        }
    }
}

/// The step of the online softmax for one row, where it sees a key of the tile.
///
/// # Safety
/// As [`direct`]; the row's scores are there.
pub(super) unsafe fn soften_row<A: Level>(p: &Pass<'_>, b: &Block, row: usize) {
    // SAFETY: the row's arrays lie in the scratch; heads are those of the layer.
    unsafe {
        let seen = seen(p, b, row);
        if seen.0 >= seen.1 {
            return;
        }
        let (token, head) = p.token_and_head(row);
        let scores = Scores {
            s: p.scores(row),
            seen,
            soft_cap: p.job.soft_cap,
            alibi: p.job.alibi_slopes.map(|slopes| {
                let distance = b.at as i64 - p.work.request.position(token);
                (*slopes.get_unchecked(head), distance as f32)
            }),
        };
        A::soften(&scores, p.state(row, 0), p.acc(row), p.job.shape.head_size_v);
    }
}

/// What a row sees of the tile, in tokens of the tile.
///
/// # Safety
/// As [`Pass::bounds`].
pub(super) unsafe fn seen(p: &Pass<'_>, b: &Block, row: usize) -> (usize, usize) {
    // SAFETY: a row of the pass.
    let (low, high) = unsafe { p.bounds(row) };
    let from = if b.in_prefix { b.from } else { low.max(b.from) };
    let to = high.min(b.to);
    if from < to { (from - b.at, to - b.at) } else { (0, 0) }
}

/// Divides what a block of rows sees of the tile into calls of `f(first, rows, tokens)`: the tokens that
/// all rows see, and what single rows see before and after; tokens ascend for each row. A key that a
/// row does not see is not touched for it, so nothing there (not even NaN) can reach the result.
///
/// # Safety
/// As [`Pass::bounds`].
unsafe fn for_common_and_ragged(
    p: &Pass<'_>,
    b: &Block,
    first: usize,
    rows: usize,
    f: impl Fn(usize, usize, (usize, usize)),
) {
    // SAFETY: rows of the pass. Bounds rise with the row, so the first and the last one have all.
    unsafe {
        let (head, tail) = (seen(p, b, first), seen(p, b, first + rows - 1));
        let (from, to) = (head.0.max(tail.0), head.1.min(tail.1));
        if head == tail {
            if from < to {
                f(first, rows, (from, to));
            }
            return;
        }
        for row in first..first + rows {
            let (low, high) = seen(p, b, row);
            let end = if from < to { from } else { high };
            if low < end {
                f(row, 1, (low, end));
            }
        }
        if from < to {
            f(first, rows, (from, to));
            for row in first..first + rows {
                let (_, high) = seen(p, b, row);
                if to < high {
                    f(row, 1, (to, high));
                }
            }
        }
    }
}

/// One panel of 16 columns from column `c` on, for a block of rows that all see `tokens`.
///
/// # Safety
/// As [`converted`]; one block.
unsafe fn weigh_panel<A: Level>(
    p: &Pass<'_>,
    first: usize,
    rows: usize,
    panel: &Values,
    c: usize,
    tokens: (usize, usize),
) {
    let width = p.job.shape.head_size_v;
    let w = p.scores(first).cast_const();
    let acc = p.acc(first).wrapping_add(c);
    // SAFETY: as the caller has promised; a last panel of 8 columns takes narrow lanes.
    unsafe {
        if c + 16 > width {
            for row in 0..rows {
                A::weigh_narrow::<Near>(w.add(row * TILE), panel, tokens, acc.add(row * width));
            }
        } else if A::N == 16 {
            with_rows!(rows, A::weigh::<Near, _, 1>(w, panel, tokens, acc, width));
        } else {
            with_rows!(rows, A::weigh::<Near, _, 2>(w, panel, tokens, acc, width));
        }
    }
}

/// All columns for a block of rows that all see `tokens`: wide blocks of columns for few rows.
///
/// # Safety
/// As [`direct`]; one block.
unsafe fn weigh_all<A: Level, E: Elem>(
    p: &Pass<'_>,
    first: usize,
    rows: usize,
    v: &Values,
    tokens: (usize, usize),
) {
    let width = p.job.shape.head_size_v;
    let w = p.scores(first).cast_const();
    let acc = p.acc(first);
    let columns = |c: usize| {
        let at = |groups: [*const u8; GROUPS]| groups.map(|g| g.wrapping_add(c * E::UNIT_SIZE));
        Values { groups: at(v.groups), ahead: at(v.ahead), ..*v }
    };
    let mut c = 0;
    // SAFETY: as the caller has promised; columns up to `width`.
    unsafe {
        if Blocks::<A, E>::WIDEST_1 {
            while Blocks::<A, E>::UP_TO_4 && rows == 1 && c + 8 * A::N <= width {
                A::weigh::<E, 1, 8>(w, &columns(c), tokens, acc.add(c), width);
                c += 8 * A::N;
            }
        }
        while Blocks::<A, E>::UP_TO_4 && rows <= 2 && c + 4 * A::N <= width {
            let (v, acc) = (columns(c), acc.add(c));
            match rows {
                1 => A::weigh::<E, 1, 4>(w, &v, tokens, acc, width),
                _ => A::weigh::<E, 2, 4>(w, &v, tokens, acc, width),
            }
            c += 4 * A::N;
        }
        while Blocks::<A, E>::UP_TO_4 && Blocks::<A, E>::WIDE_3 && rows == 3 && c + 4 * A::N <= width {
            A::weigh::<E, 3, 4>(w, &columns(c), tokens, acc.add(c), width);
            c += 4 * A::N;
        }
        while c + 2 * A::N <= width {
            with_rows!(rows, A::weigh::<E, _, 2>(w, &columns(c), tokens, acc.add(c), width));
            c += 2 * A::N;
        }
        while c + 8 <= width {
            for row in 0..rows {
                A::weigh_narrow::<E>(w.add(row * TILE), &columns(c), tokens, acc.add(row * width + c));
            }
            c += 8;
        }
    }
}
