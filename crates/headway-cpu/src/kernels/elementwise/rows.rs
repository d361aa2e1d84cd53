//! Rows of a strided tensor, handed to threads: the one place where element-wise operations split
//! mutable memory. Safe outside: a layout whose rows meet is refused when it is made.
//!
//! Lives for one call. Not for kernels that split within a row.

use crate::pool::{Pool, SharedMut};
use headway_tensor::{Result, TensorError};
use std::ops::Range;

/// Elements under which a second thread costs more than it saves.
const INLINE_BELOW: usize = 16 * 1024;

/// What is done to a pair of rows: index, row of the first, row of the second.
type PairFn<'a> = dyn Fn(usize, &mut [f32], &mut [f32]) + Sync + 'a;

/// `[rows, width]` or `[tokens, heads, width]` over a slice; rows are numbered heads first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rows {
    outer: usize,
    outer_stride: usize,
    inner: usize,
    inner_stride: usize,
    width: usize,
}

impl Rows {
    /// The rows of a tensor with this shape and these strides.
    ///
    /// # Errors
    /// Another rank, a last dimension with gaps, rows that overlap.
    pub(crate) fn new(what: &str, shape: &[usize], strides: &[usize]) -> Result<Self> {
        let rows = match (shape, strides) {
            (&[n, width], &[s, 1]) => {
                Self { outer: n, outer_stride: s, inner: 1, inner_stride: width, width }
            }
            (&[n, h, width], &[s, t, 1]) => {
                Self { outer: n, outer_stride: s, inner: h, inner_stride: t, width }
            }
            _ => return Err(wrong(what, shape)),
        };
        let span = rows.inner.saturating_sub(1) * rows.inner_stride + rows.width;
        let apart = (rows.inner <= 1 || rows.inner_stride >= rows.width)
            && (rows.outer <= 1 || rows.outer_stride >= span);
        if apart { Ok(rows) } else { Err(wrong(what, shape)) }
    }

    /// Number of rows.
    pub(crate) fn count(&self) -> usize {
        self.outer * self.inner
    }

    /// Elements of a row.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Rows of one token.
    pub(crate) fn heads(&self) -> usize {
        self.inner
    }

    /// Where row `i` lies.
    pub(crate) fn range(&self, i: usize) -> Range<usize> {
        let start = i / self.inner * self.outer_stride + i % self.inner * self.inner_stride;
        start..start + self.width
    }

    /// The rows of the tokens `tokens`, of data that begins with the first of them.
    pub(crate) fn slice(&self, tokens: Range<usize>) -> Self {
        Self { outer: tokens.len(), ..*self }
    }

    /// Row `i` of `data`, empty where the data ends before it.
    pub(crate) fn of<'a>(&self, data: &'a [f32], i: usize) -> &'a [f32] {
        data.get(self.range(i)).unwrap_or(&[])
    }

    /// How many rows one task takes, and how many tasks that makes.
    fn split(&self, pool: &Pool) -> (usize, usize) {
        let (count, elements) = (self.count(), self.count() * self.width);
        let tasks = if elements < INLINE_BELOW { 1 } else { (pool.threads() * 4).min(elements / 4096) };
        let rows = count.div_ceil(tasks.max(1)).max(1);
        (rows, count.div_ceil(rows))
    }

    /// Calls `f(i, row i of data)` for every row, in parallel where it pays.
    pub(crate) fn for_each(&self, pool: &Pool, data: &mut [f32], f: &(dyn Fn(usize, &mut [f32]) + Sync)) {
        let data = SharedMut::new(data);
        let (step, tasks) = self.split(pool);
        pool.run(tasks, &|task, _| {
            for i in task * step..self.count().min((task + 1) * step) {
                // SAFETY: rows do not meet (checked in `new`), and each is visited by one task.
                f(i, unsafe { data.slice_mut(self.range(i)) });
            }
        });
    }

    /// Calls `f(i, row i of a, row i of b)` for every row; `b` has the rows `other`, as many.
    pub(crate) fn for_each_pair(
        &self,
        pool: &Pool,
        a: &mut [f32],
        other: &Rows,
        b: &mut [f32],
        f: &PairFn<'_>,
    ) {
        let (a, b) = (SharedMut::new(a), SharedMut::new(b));
        let (step, tasks) = self.split(pool);
        let count = self.count().min(other.count());
        pool.run(tasks, &|task, _| {
            for i in task * step..count.min((task + 1) * step) {
                // SAFETY: rows of one layout do not meet (checked in `new`), `a` and `b` are two mutable
                // slices and so do not meet, and each row is visited by one task.
                let (a, b) = unsafe { (a.slice_mut(self.range(i)), b.slice_mut(other.range(i))) };
                f(i, a, b);
            }
        });
    }
}

fn wrong(what: &str, shape: &[usize]) -> TensorError {
    TensorError::WrongShape {
        what: what.to_owned(),
        found: shape.to_vec(),
        expected: "[tokens, width] or [tokens, heads, width], rows contiguous and apart".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_rows_are_visited_once_and_gaps_left_alone() {
        let pool = Pool::new(Some(3)).unwrap();
        let rows = Rows::new("t", &[700, 3, 10], &[37, 11, 1]).unwrap();
        let mut data = vec![0f32; 700 * 37];
        rows.for_each(&pool, &mut data, &|i, row| row.iter_mut().for_each(|x| *x += 1.0 + i as f32));
        let mut expected = vec![0f32; 700 * 37];
        for i in 0..rows.count() {
            expected[rows.range(i)].fill(1.0 + i as f32);
        }
        assert_eq!(data, expected);
    }

    #[test]
    fn rows_that_meet_are_refused() {
        assert!(Rows::new("t", &[2, 8], &[7, 1]).is_err());
        assert!(Rows::new("t", &[2, 3, 8], &[16, 8, 1]).is_err());
        assert!(Rows::new("t", &[2, 3, 8], &[24, 7, 1]).is_err());
        assert!(Rows::new("t", &[2, 8], &[8, 2]).is_err());
        assert!(Rows::new("t", &[8], &[1]).is_err());
        assert!(Rows::new("t", &[2, 3, 8], &[8, 16, 1]).is_err());
        assert!(Rows::new("t", &[0, 8], &[8, 1]).is_ok());
    }
}
