//! [`SharedMut`]: one mutable slice that the tasks of a region write disjoint parts of.
//!
//! Lives as long as the region. Not for parts that meet: that is undefined behaviour, which is why
//! taking a part is `unsafe`; [`super::Pool::run_chunks`] is the safe form for whole chunks.

use std::{marker::PhantomData, ops::Range};

/// A mutable slice that several threads may write disjoint parts of.
#[derive(Clone, Copy)]
pub struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` whose parts are handed out one by one; handing a part to another thread
// is sending `&mut [T]`, for which `T: Send` is enough.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above: sharing it gives threads nothing but parts, by an `unsafe` method whose caller
// answers for their being disjoint.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// All of `slice`.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements `range`.
    ///
    /// # Safety
    /// No other part that is alive may meet `range`.
    ///
    /// # Panics
    /// When `range` reaches past the end.
    // A `&mut` from a `&` is the purpose of this type; the caller answers for disjointness.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {} elements", self.len);
        // SAFETY: inside the slice by the assertion, which is alive for 'a; unaliased by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
