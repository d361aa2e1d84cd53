//! Step inputs: [`View`] (read-only, cheap to clone) and [`Dual`] (host slice to plan from, and the view kernels read).
//! Who writes them: [`crate::Persistent`] one array, [`crate::Packed`] many at once. Not for activations or caches: see
//! [`crate::Tensor`].

use crate::{DeviceMem, HostBuf, Pod};
use std::{ops::Range, sync::Arc};

#[derive(Clone, Debug)]
pub(crate) enum Mem<T> {
    Host(Arc<Vec<T>>),
    /// Elements in bytes that arrays of other types share.
    Shared(Arc<HostBuf>),
    Dev(Arc<dyn DeviceMem>),
}

/// Read-only elements on the host or a device: cheap to clone, `'static`.
#[derive(Clone, Debug)]
pub struct View<T> {
    pub(crate) mem: Mem<T>,
    /// In elements.
    pub(crate) off: usize,
    pub(crate) len: usize,
}

impl<T: Pod> View<T> {
    /// A host view that owns its elements.
    pub fn from_vec(v: Vec<T>) -> Self {
        let len = v.len();
        Self { mem: Mem::Host(Arc::new(v)), off: 0, len }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, where they lie on the host.
    pub fn host(&self) -> Option<&[T]> {
        match &self.mem {
            Mem::Host(v) => v.get(self.off..self.off + self.len),
            Mem::Shared(b) => {
                let size = size_of::<T>();
                let bytes = b.as_bytes().get(self.off * size..(self.off + self.len) * size)?;
                bytemuck::try_cast_slice(bytes).ok()
            }
            Mem::Dev(_) => None,
        }
    }

    /// The allocation, where it lies on a device.
    pub fn device_mem(&self) -> Option<&Arc<dyn DeviceMem>> {
        match &self.mem {
            Mem::Dev(d) => Some(d),
            Mem::Host(_) | Mem::Shared(_) => None,
        }
    }

    /// Address of the first element, on whichever side it lies.
    pub fn addr(&self) -> u64 {
        match &self.mem {
            Mem::Host(v) => v.as_ptr() as u64 + (self.off * size_of::<T>()) as u64,
            Mem::Shared(b) => b.as_bytes().as_ptr() as u64 + (self.off * size_of::<T>()) as u64,
            Mem::Dev(d) => d.addr() + (self.off * size_of::<T>()) as u64,
        }
    }

    /// Elements `r` of this view.
    ///
    /// # Panics
    /// When `r` reaches past the end: callers slice by counts they made the view with.
    pub fn slice(&self, r: Range<usize>) -> Self {
        assert!(r.start <= r.end && r.end <= self.len, "slice {r:?} of a view of {}", self.len);
        Self { mem: self.mem.clone(), off: self.off + r.start, len: r.len() }
    }
}

/// A host slice that builders plan from, and the view that kernels read. On a CPU: one memory.
#[derive(Clone, Debug)]
pub struct Dual<T> {
    pub(crate) host: View<T>,
    pub(crate) dev: View<T>,
}

impl<T: Pod> Dual<T> {
    /// Both sides in one host memory.
    pub fn from_vec(v: Vec<T>) -> Self {
        let dev = View::from_vec(v);
        Self { host: dev.clone(), dev }
    }

    /// A host copy beside a device view of the same elements; `None` where the lengths differ.
    pub fn split(host: Vec<T>, dev: View<T>) -> Option<Self> {
        (host.len() == dev.len()).then(|| Self { host: View::from_vec(host), dev })
    }

    /// The host side.
    pub fn host(&self) -> &[T] {
        self.host.host().unwrap_or(&[])
    }

    /// The side that kernels read.
    pub fn dev(&self) -> &View<T> {
        &self.dev
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.dev.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.dev.is_empty()
    }

    /// Elements `r` of both sides.
    ///
    /// # Panics
    /// As [`View::slice`].
    pub fn slice(&self, r: Range<usize>) -> Self {
        Self { host: self.host.slice(r.clone()), dev: self.dev.slice(r) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_share_memory() {
        let v = View::from_vec(vec![1i32, 2, 3, 4]);
        let s = v.slice(1..3);
        assert_eq!(s.host(), Some(&[2, 3][..]));
        assert_eq!(s.addr(), v.addr() + 4);
    }
}
