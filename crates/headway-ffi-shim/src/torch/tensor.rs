//! A tensor: a place, sizes and strides. Handles are boxes of these; each is freed by whoever holds it last.

use super::abi::{CUDA, dtype};

/// Most dimensions of a tensor.
pub const MOST_DIMENSIONS: usize = 8;

/// A tensor, without memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Tensor {
    /// Address of the first element.
    pub data: u64,
    /// Dimensions; −1: undefined.
    pub rank: i32,
    /// Its element type's number.
    pub dtype: i32,
    /// Its device's type.
    pub device_type: i32,
    /// Its device's number.
    pub device_index: i32,
    /// Elements along each dimension.
    pub sizes: [i64; MOST_DIMENSIONS],
    /// Elements from one to the next along each dimension.
    pub strides: [i64; MOST_DIMENSIONS],
}

impl Tensor {
    /// One that is not there.
    pub const UNDEFINED: Self = Self {
        data: 0,
        rank: -1,
        dtype: dtype::U8,
        device_type: 0,
        device_index: -1,
        sizes: [0; MOST_DIMENSIONS],
        strides: [0; MOST_DIMENSIONS],
    };

    /// On a CUDA device, without gaps; `None` for too many dimensions or a size below 0.
    pub fn contiguous(data: u64, dtype: i32, device: i32, sizes: &[i64]) -> Option<Self> {
        let mut t = Self { data, dtype, device_type: CUDA, device_index: device, ..Self::UNDEFINED };
        t.rank = i32::try_from(sizes.len()).ok()?;
        t.sizes.get_mut(..sizes.len())?.copy_from_slice(sizes);
        let mut run = 1i64;
        for (size, stride) in sizes.iter().zip(&mut t.strides).rev() {
            *stride = run;
            run = run.checked_mul((*size).max(1))?;
        }
        sizes.iter().all(|&n| n >= 0).then_some(t)
    }

    /// The same elements with other sizes and strides.
    fn shaped(&self, sizes: &[i64], strides: &[i64]) -> Option<Self> {
        let mut t = Self { rank: i32::try_from(sizes.len()).ok()?, ..*self };
        t.sizes.get_mut(..sizes.len())?.copy_from_slice(sizes);
        t.strides.get_mut(..strides.len())?.copy_from_slice(strides);
        Some(t)
    }

    /// Dimensions; none where it is undefined.
    fn dimensions(&self) -> usize {
        usize::try_from(self.rank).map_or(0, |n| n.min(MOST_DIMENSIONS))
    }

    /// Elements along each dimension.
    pub fn sizes(&self) -> &[i64] {
        &self.sizes[..self.dimensions()]
    }

    /// Elements from one to the next along each dimension.
    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.dimensions()]
    }

    /// A dimension by its number, which counts from the end where it is below 0.
    pub fn dimension(&self, d: i64) -> Option<usize> {
        let n = self.dimensions() as i64;
        usize::try_from(if d < 0 { d + n } else { d }).ok().filter(|&d| (d as i64) < n)
    }

    /// Elements; `None` where they can't be counted.
    pub fn elements(&self) -> Option<i64> {
        self.sizes().iter().try_fold(1i64, |n, &s| n.checked_mul(s))
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> Option<i64> {
        self.elements()?.checked_mul(dtype::size(self.dtype)?)
    }

    /// Whether there are no gaps, the last dimension innermost. Strides of single elements do not count.
    pub fn is_contiguous(&self) -> bool {
        let mut run = 1;
        let of = |(&n, &s): (&i64, &i64)| {
            let right = n == 1 || s == run;
            run *= n.max(1);
            right
        };
        self.sizes().contains(&0) || self.sizes().iter().zip(self.strides()).rev().all(of)
    }

    /// Part of a dimension.
    pub fn narrow(&self, d: i64, start: i64, len: i64) -> Option<Self> {
        let d = self.dimension(d)?;
        let start = if start < 0 { start + self.sizes[d] } else { start };
        let inside = start >= 0 && len >= 0 && start.checked_add(len)? <= self.sizes[d];
        let offset = start.checked_mul(self.strides[d])?.checked_mul(dtype::size(self.dtype)?)?;
        let mut t = Self { data: self.data.checked_add_signed(offset)?, ..*self };
        t.sizes[d] = len;
        inside.then_some(t)
    }

    /// Two dimensions in each other's place.
    pub fn transpose(&self, a: i64, b: i64) -> Option<Self> {
        let (a, b) = (self.dimension(a)?, self.dimension(b)?);
        let mut t = *self;
        t.sizes.swap(a, b);
        t.strides.swap(a, b);
        Some(t)
    }

    /// Without a dimension of one element; as it is where that has others.
    pub fn squeeze(&self, d: i64) -> Option<Self> {
        let d = self.dimension(d)?;
        if self.sizes[d] != 1 {
            return Some(*self);
        }
        let without = |x: &[i64]| [&x[..d], &x[d + 1..]].concat();
        self.shaped(&without(self.sizes()), &without(self.strides()))
    }

    /// Other sizes over the same elements in the same order; one size may be −1. `None` where strides can't say it, or the
    /// elements do not come out.
    pub fn view(&self, sizes: &[i64]) -> Option<Self> {
        let elements = self.elements()?;
        let mut sizes = sizes.to_vec();
        if let Some(open) = sizes.iter().position(|&n| n == -1) {
            let rest = sizes
                .iter()
                .enumerate()
                .filter(|x| x.0 != open)
                .try_fold(1i64, |n, x| n.checked_mul(*x.1))?;
            sizes[open] = elements.checked_div(rest).filter(|n| n * rest == elements)?;
        }
        let count = sizes.iter().try_fold(1i64, |n, &s| n.checked_mul(s))?;
        if count != elements || sizes.iter().any(|&n| n < 0) {
            return None;
        }
        if elements == 0 {
            return Self::contiguous(self.data, self.dtype, self.device_index, &sizes);
        }
        let strides = view_strides(self.sizes(), self.strides(), &sizes)?;
        self.shaped(&sizes, &strides)
    }
}

/// Strides of a view: dimensions that lie without gaps in one another are one run, and new dimensions fill up runs from
/// the inside. Dimensions of one element have no say.
fn view_strides(old: &[i64], strides: &[i64], new: &[i64]) -> Option<Vec<i64>> {
    let mut runs: Vec<(i64, i64)> = vec![];
    for (&n, &s) in old.iter().zip(strides).rev().filter(|x| *x.0 != 1) {
        match runs.last_mut() {
            Some((len, stride)) if s == *len * *stride => *len *= n,
            _ => runs.push((n, s)),
        }
    }
    let mut runs = runs.into_iter();
    let (mut left, mut stride) = (1, 1);
    let mut out = vec![0; new.len()];
    for (to, &n) in out.iter_mut().zip(new).rev() {
        if n != 1 && left == 1 {
            (left, stride) = runs.next()?;
        }
        *to = stride;
        if n != 1 {
            if left % n != 0 {
                return None;
            }
            left /= n;
            stride *= n;
        }
    }
    (left == 1 && runs.next().is_none()).then_some(out)
}
