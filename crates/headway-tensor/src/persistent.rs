//! [`Persistent`]: the one writer of an array that lives as long as the model.

use crate::{DeviceMem, Dual, Exec, Pod, Result, View, view::Mem};
use std::{ops::Range, sync::Arc};

/// The one writer of a buffer that views are handed out of. Not `Clone`.
///
/// On the host the buffer is recycled when no view of it is left; a view that is still alive costs a
/// fresh allocation (counted in [`Persistent::reallocs`]), never a torn read. On a device it is
/// written in place, stream-ordered, at an address that stays the same for life.
#[derive(Debug)]
pub struct Persistent<T> {
    device: Option<Arc<dyn DeviceMem>>,
    /// On the host the buffer; on a device what it holds.
    host: Arc<Vec<T>>,
    changes: Changes,
    reallocs: usize,
}

/// What of a buffer was changed: ranges of elements, ascending, neighbours joined.
#[derive(Debug)]
pub struct Changes {
    ranges: Vec<Range<usize>>,
    /// Elements that are rather copied than left out, because they cost less than another upload.
    gap: usize,
}

/// Bytes that are copied in about the time that an upload takes to begin.
const GAP: usize = 16 << 10;

impl Changes {
    fn new(size: usize) -> Self {
        Self { ranges: Vec::with_capacity(8), gap: GAP / size.max(1) }
    }

    /// These elements were changed. Ranges come in ascending order.
    pub fn add(&mut self, range: Range<usize>) {
        match self.ranges.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if range.start <= last.end + self.gap => last.end = last.end.max(range.end),
            _ => self.ranges.push(range),
        }
    }
}

impl<T: Pod> Persistent<T> {
    /// Room for `cap` elements on `cx`'s device, zeros at first on both sides: an update sends what it changed alone.
    ///
    /// # Errors
    /// [`crate::TensorError::OutOfMemory`], the device's own.
    pub fn new(cx: &dyn Exec, cap: usize) -> Result<Self> {
        let bytes = cap * size_of::<T>();
        let device = cx.alloc(bytes)?;
        if let Some(device) = &device {
            cx.zero(device, 0, bytes);
        }
        Ok(Self { device, ..Self::host(cap) })
    }

    /// Room for `cap` elements on the host.
    pub fn host(cap: usize) -> Self {
        Self {
            device: None,
            host: Arc::new(vec![T::default(); cap]),
            changes: Changes::new(size_of::<T>()),
            reallocs: 0,
        }
    }

    /// Elements that fit.
    pub fn capacity(&self) -> usize {
        self.host.len()
    }

    /// How often a view that was still alive forced a fresh host allocation.
    pub fn reallocs(&self) -> usize {
        self.reallocs
    }

    /// Writes the first `n` elements with `fill` (which sees what the buffer held before) and returns a view of them.
    ///
    /// # Panics
    /// When `n` is over the capacity: capacities come from the model's limits at start-up.
    pub fn write(&mut self, cx: &dyn Exec, n: usize, fill: impl FnOnce(&mut [T])) -> View<T> {
        self.write_dual(cx, n, fill).dev
    }

    /// As [`Persistent::write`], with the host side that builders plan from: on a CPU both are one memory.
    ///
    /// # Panics
    /// As [`Persistent::write`].
    pub fn write_dual(&mut self, cx: &dyn Exec, n: usize, fill: impl FnOnce(&mut [T])) -> Dual<T> {
        self.update(cx, n, |o, changes| {
            fill(o);
            changes.add(0..n);
        })
    }

    /// As [`Persistent::write_dual`], where `fill` says which elements it changed: a device gets those alone.
    ///
    /// # Panics
    /// As [`Persistent::write`].
    pub fn update(&mut self, cx: &dyn Exec, n: usize, fill: impl FnOnce(&mut [T], &mut Changes)) -> Dual<T> {
        assert!(n <= self.host.len(), "{n} elements into a persistent buffer of {}", self.host.len());
        if Arc::get_mut(&mut self.host).is_none() {
            self.reallocs += 1;
            self.host = Arc::new(self.host.to_vec());
        }
        self.changes.ranges.clear();
        if let Some(host) = Arc::get_mut(&mut self.host) {
            fill(&mut host[..n], &mut self.changes);
        }
        if let Some(device) = &self.device {
            for range in &self.changes.ranges {
                let at = range.start * size_of::<T>();
                cx.upload(device, at, bytemuck::cast_slice(&self.host[range.clone()]));
            }
        }
        self.dual(n)
    }

    /// The first `n` elements as they were written last.
    ///
    /// # Panics
    /// As [`Persistent::write`].
    pub fn dual(&self, n: usize) -> Dual<T> {
        assert!(n <= self.host.len(), "{n} elements of a persistent buffer of {}", self.host.len());
        let host = View { mem: Mem::Host(self.host.clone()), off: 0, len: n };
        match &self.device {
            None => Dual { dev: host.clone(), host },
            Some(device) => Dual { host, dev: View { mem: Mem::Dev(device.clone()), off: 0, len: n } },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Copied, Cpu, Npu};

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
    fn a_device_gets_what_changed_and_the_host_sees_all() {
        let npu = Npu::default();
        let mut p = Persistent::<i32>::new(&npu, 3 * GAP).unwrap();
        // What nobody changes is zero there too, whatever the memory held.
        assert_eq!(npu.copies(), [Copied { at: 0, bytes: 12 * GAP }]);
        let n = 2 * GAP;
        let first = p.write_dual(&npu, n, |o| o.fill(1));
        assert_eq!(npu.copies(), [Copied { at: 0, bytes: 4 * n }]);
        let addr = first.dev().addr();
        drop(first);
        let second = p.update(&npu, n, |o, changes| {
            (o[3], o[5], o[GAP]) = (2, 2, 2);
            [3..4, 5..6, 9..9, GAP..GAP + 1].into_iter().for_each(|r| changes.add(r));
        });
        // Near ones in one upload, a far one by itself.
        assert_eq!(npu.copies(), [Copied { at: 12, bytes: 12 }, Copied { at: 4 * GAP, bytes: 4 }]);
        assert_eq!((second.host()[2..6].to_vec(), second.host()[GAP]), (vec![1, 2, 1, 2], 2));
        assert_eq!((second.dev().addr(), p.reallocs()), (addr, 0));
        // What an owner still plans from is not changed under its hands; the rest of it is taken along.
        let third = p.update(&npu, n, |o, changes| {
            o[3] = 4;
            changes.add(3..4);
        });
        assert_eq!((second.host()[3], third.host()[3], third.host()[GAP]), (2, 4, 2));
        assert_eq!((npu.copies(), p.reallocs()), (vec![Copied { at: 12, bytes: 4 }], 1));
    }
}
