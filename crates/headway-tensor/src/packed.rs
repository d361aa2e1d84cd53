//! [`Packed`]: the arrays of a step one behind another in one buffer, so that a device gets them with one copy.

use crate::{DeviceMem, Dual, Exec, HostBuf, Pod, Result, View, view::Mem};
use std::{marker::PhantomData, sync::Arc};

/// Arrays begin at multiples of this many bytes: a cache line, and the widest load of a kernel.
const ALIGN: usize = 64;

/// A buffer that is written anew each step, array by array. Where an array lies follows from the lengths of those before
/// it: steps that write the same lengths find the same addresses.
///
/// On the host the buffer is recycled when no view of it is left; one that is still alive costs a fresh allocation
/// (counted in [`Packed::reallocs`]), never a torn read.
#[derive(Debug)]
pub struct Packed {
    device: Option<Arc<dyn DeviceMem>>,
    /// On the host the buffer; on a device what is uploaded.
    host: Arc<HostBuf>,
    used: usize,
    reallocs: usize,
}

/// An array of the step that is being written.
#[derive(Clone, Copy, Debug)]
pub struct Part<T> {
    /// In bytes.
    at: usize,
    len: usize,
    of: PhantomData<T>,
}

impl Packed {
    /// Room for `bytes`, the sum of [`Packed::room`] over a step's arrays.
    ///
    /// # Errors
    /// [`crate::TensorError::OutOfMemory`], the device's own.
    pub fn new(cx: &dyn Exec, bytes: usize) -> Result<Self> {
        Ok(Self { device: cx.alloc(bytes)?, host: Arc::new(HostBuf::zeroed(bytes)?), used: 0, reallocs: 0 })
    }

    /// Bytes that an array of at most `len` elements takes.
    pub const fn room<T>(len: usize) -> usize {
        (len * size_of::<T>()).next_multiple_of(ALIGN)
    }

    /// How often a view that was still alive forced a fresh host allocation.
    pub fn reallocs(&self) -> usize {
        self.reallocs
    }

    /// Begins a step: its first array lies at the beginning.
    ///
    /// # Errors
    /// No host memory beside that of views that are still alive.
    pub fn begin(&mut self) -> Result<()> {
        self.used = 0;
        if Arc::get_mut(&mut self.host).is_none() {
            self.reallocs += 1;
            self.host = Arc::new(HostBuf::zeroed(self.host.len())?);
        }
        Ok(())
    }

    /// Writes the step's next array of `n` elements. `fill` writes them all: what they are before it is anything.
    ///
    /// # Panics
    /// When there is no room (it comes from the model's limits at start-up), or after the step's views were made.
    pub fn write<T: Pod>(&mut self, n: usize, fill: impl FnOnce(&mut [T])) -> Part<T> {
        let (at, bytes) = (self.used, n * size_of::<T>());
        let (room, host) = (self.host.len(), Arc::get_mut(&mut self.host));
        assert!(at + bytes <= room, "{bytes} bytes behind {at} of a buffer of {room}");
        let Some(host) = host else { panic!("an array of a step whose views were made already") };
        fill(bytemuck::cast_slice_mut(&mut host.as_bytes_mut()[at..at + bytes]));
        self.used = (at + bytes).next_multiple_of(ALIGN).min(room);
        Part { at, len: n, of: PhantomData }
    }

    /// What was written.
    pub fn host<T: Pod>(&self, part: Part<T>) -> &[T] {
        bytemuck::cast_slice(&self.host.as_bytes()[part.at..part.at + part.len * size_of::<T>()])
    }

    /// Ends the writing: a device gets all arrays with one copy.
    pub fn upload(&self, cx: &dyn Exec) {
        if let Some(device) = &self.device {
            cx.upload(device, 0, &self.host.as_bytes()[..self.used]);
        }
    }

    /// An array where kernels read it.
    pub fn view<T: Pod>(&self, part: Part<T>) -> View<T> {
        let mem = match &self.device {
            Some(d) => Mem::Dev(d.clone()),
            None => Mem::Shared(self.host.clone()),
        };
        View { mem, off: part.at / size_of::<T>(), len: part.len }
    }

    /// As [`Packed::view`], with the host side that builders plan from: on a CPU both are one memory.
    pub fn dual<T: Pod>(&self, part: Part<T>) -> Dual<T> {
        let host = View { mem: Mem::Shared(self.host.clone()), off: part.at / size_of::<T>(), len: part.len };
        Dual { host, dev: self.view(part) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Copied, Cpu, Npu};

    fn step(p: &mut Packed, cx: &dyn Exec, lens: [usize; 3]) -> (View<i32>, Dual<i64>, View<u8>) {
        p.begin().unwrap();
        let a = p.write(lens[0], |o: &mut [i32]| o.fill(1));
        let b = p.write(lens[1], |o: &mut [i64]| o.fill(-1));
        let c = p.write(lens[2], |o: &mut [u8]| o.fill(3));
        assert_eq!(p.host(a), vec![1; lens[0]]);
        p.upload(cx);
        (p.view(a), p.dual(b), p.view(c))
    }

    fn room() -> usize {
        Packed::room::<i32>(20) + Packed::room::<i64>(20) + Packed::room::<u8>(20)
    }

    #[test]
    fn arrays_of_a_step_go_up_with_one_copy_to_where_they_were() {
        let npu = Npu::default();
        let mut p = Packed::new(&npu, room()).unwrap();
        assert_eq!(room(), 128 + 192 + 64);
        let (a, b, c) = step(&mut p, &npu, [3, 9, 5]);
        assert_eq!(npu.copies(), [Copied { at: 0, bytes: 64 + 128 + 64 }]);
        let at = |a: &View<i32>, b: &Dual<i64>, c: &View<u8>| [a.addr(), b.dev().addr(), c.addr()];
        let first = at(&a, &b, &c);
        assert_eq!([first[1] - first[0], first[2] - first[0]], [64, 192]);
        assert_eq!((b.host(), a.host(), c.len()), (&[-1; 9][..], None, 5));
        drop((a, b, c));
        step(&mut p, &npu, [20, 20, 20]);
        let (a, b, c) = step(&mut p, &npu, [3, 9, 5]);
        assert_eq!((at(&a, &b, &c), p.reallocs()), (first, 0));
    }

    #[test]
    fn on_the_host_a_view_is_the_buffer_and_outlives_its_step() {
        let mut p = Packed::new(&Cpu, room()).unwrap();
        let (a, b, _) = step(&mut p, &Cpu, [3, 9, 5]);
        assert_eq!((a.host(), b.dev().host()), (Some(&[1; 3][..]), Some(&[-1; 9][..])));
        assert_eq!(a.slice(1..3).addr(), a.addr() + 4);
        p.begin().unwrap();
        p.write(8, |o: &mut [i32]| o.fill(9));
        assert_eq!((a.host(), p.reallocs()), (Some(&[1; 3][..]), 1));
    }
}
