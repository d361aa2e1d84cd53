//! Step inputs: [`View`] (read-only, cheap to clone), [`Persistent`] (the one writer of a buffer
//! that lives as long as the model), [`Dual`] (host slice to plan from, and the view kernels read).
//! Not for activations or caches: see [`crate::Tensor`].

use crate::{DeviceMem, Exec, Pod, Result};
use std::{ops::Range, sync::Arc};

#[derive(Clone, Debug)]
enum Mem<T> {
    Host(Arc<Vec<T>>),
    Dev(Arc<dyn DeviceMem>),
}

/// Read-only elements on the host or a device: cheap to clone, `'static`.
#[derive(Clone, Debug)]
pub struct View<T> {
    mem: Mem<T>,
    off: usize,
    len: usize,
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
            Mem::Dev(_) => None,
        }
    }

    /// The allocation, where it lies on a device.
    pub fn device_mem(&self) -> Option<&Arc<dyn DeviceMem>> {
        match &self.mem {
            Mem::Dev(d) => Some(d),
            Mem::Host(_) => None,
        }
    }

    /// Address of the first element, on whichever side it lies.
    pub fn addr(&self) -> u64 {
        match &self.mem {
            Mem::Host(v) => v.as_ptr() as u64 + (self.off * size_of::<T>()) as u64,
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

/// The one writer of a buffer that views are handed out of. Not `Clone`.
///
/// On the host the buffer is recycled when no view of it is left; a view that is still alive costs a
/// fresh allocation (counted in [`Persistent::reallocs`]), never a torn read. On a device it is
/// written in place, stream-ordered, at an address that stays the same for life.
#[derive(Debug)]
pub struct Persistent<T> {
    mem: Mem<T>,
    staging: Vec<T>,
    cap: usize,
    reallocs: usize,
}

impl<T: Pod> Persistent<T> {
    /// Room for `cap` elements on `cx`'s device.
    ///
    /// # Errors
    /// [`crate::TensorError::OutOfMemory`], the device's own.
    pub fn new(cx: &dyn Exec, cap: usize) -> Result<Self> {
        Ok(match cx.alloc(cap * size_of::<T>())? {
            Some(d) => Self { mem: Mem::Dev(d), staging: vec![T::default(); cap], cap, reallocs: 0 },
            None => Self::host(cap),
        })
    }

    /// Room for `cap` elements on the host.
    pub fn host(cap: usize) -> Self {
        Self { mem: Mem::Host(Arc::new(vec![T::default(); cap])), staging: Vec::new(), cap, reallocs: 0 }
    }

    /// Elements that fit.
    pub fn capacity(&self) -> usize {
        self.cap
    }

    /// How often a view that was still alive forced a fresh host allocation.
    pub fn reallocs(&self) -> usize {
        self.reallocs
    }

    /// Writes the first `n` elements with `fill` (which sees what the buffer held before, or
    /// defaults) and returns a view of them.
    ///
    /// # Panics
    /// When `n` is over the capacity: capacities come from the model's limits at start-up.
    pub fn write(&mut self, cx: &dyn Exec, n: usize, fill: impl FnOnce(&mut [T])) -> View<T> {
        assert!(n <= self.cap, "{n} elements into a persistent buffer of {}", self.cap);
        match &mut self.mem {
            Mem::Host(v) => {
                if Arc::get_mut(v).is_none() {
                    self.reallocs += 1;
                    *v = Arc::new(vec![T::default(); self.cap]);
                }
                if let Some(v) = Arc::get_mut(v) {
                    fill(&mut v[..n]);
                }
            }
            Mem::Dev(d) => {
                fill(&mut self.staging[..n]);
                cx.upload(d, 0, bytemuck::cast_slice(&self.staging[..n]));
            }
        }
        View { mem: self.mem.clone(), off: 0, len: n }
    }

    /// As [`Persistent::write`], with the host copy that builders plan from: on a CPU both are one
    /// memory.
    pub fn write_dual(&mut self, cx: &dyn Exec, n: usize, fill: impl FnOnce(&mut [T])) -> Dual<T> {
        let dev = self.write(cx, n, fill);
        match &self.mem {
            Mem::Host(_) => Dual { host: dev.clone(), dev },
            Mem::Dev(_) => Dual { host: View::from_vec(self.staging[..n].to_vec()), dev },
        }
    }
}

/// A host slice that builders plan from, and the view that kernels read. On a CPU: one memory.
#[derive(Clone, Debug)]
pub struct Dual<T> {
    host: View<T>,
    dev: View<T>,
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
    use crate::memory::Device;

    struct Cpu;
    impl Exec for Cpu {
        fn device(&self) -> Device {
            Device::CPU
        }
        fn alloc(&self, _: usize) -> Result<Option<Arc<dyn DeviceMem>>> {
            Ok(None)
        }
        fn upload(&self, _: &Arc<dyn DeviceMem>, _: usize, _: &[u8]) {}
    }

    #[test]
    fn a_dropped_view_lets_the_buffer_be_recycled() {
        let mut p = Persistent::<i32>::new(&Cpu, 4).unwrap();
        for step in 0..3 {
            let v = p.write(&Cpu, 2, |o| o.fill(step));
            assert_eq!(v.host(), Some(&[step, step][..]));
        }
        assert_eq!(p.reallocs(), 0);
    }

    #[test]
    fn a_living_view_keeps_its_elements() {
        let mut p = Persistent::<i32>::new(&Cpu, 4).unwrap();
        let old = p.write(&Cpu, 3, |o| o.fill(7));
        let new = p.write(&Cpu, 3, |o| o.fill(8));
        assert_eq!((old.host(), new.host()), (Some(&[7; 3][..]), Some(&[8; 3][..])));
        assert_eq!(p.reallocs(), 1);
    }

    #[test]
    fn slices_share_memory() {
        let v = View::from_vec(vec![1i32, 2, 3, 4]);
        let s = v.slice(1..3);
        assert_eq!(s.host(), Some(&[2, 3][..]));
        assert_eq!(s.addr(), v.addr() + 4);
    }
}
