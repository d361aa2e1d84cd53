//! Tensors: [`Tensor`] owns a contiguous buffer; [`TensorRef`] and [`TensorMut`] borrow one with a
//! shape and strides (in elements). At most four dimensions, the innermost contiguous.

use crate::{DType, Device, DeviceMem, Element, Exec, HostBuf, Result, TensorError};
use std::{fmt, ops::Range, sync::Arc};

/// Up to four dimensions (or strides), outermost first, without an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dims {
    d: [usize; 4],
    rank: u8,
}

impl Dims {
    /// The dimensions of `s`.
    ///
    /// # Panics
    /// With more than four: ranks are written in code, never taken from input.
    pub fn new(s: &[usize]) -> Self {
        assert!(s.len() <= 4, "at most 4 dimensions, got {s:?}");
        let mut d = [1; 4];
        d[..s.len()].copy_from_slice(s);
        Self { d, rank: s.len() as u8 }
    }

    /// As a slice, outermost first.
    pub fn as_slice(&self) -> &[usize] {
        &self.d[..self.rank as usize]
    }

    /// Product of all dimensions.
    pub fn elements(&self) -> usize {
        self.as_slice().iter().product()
    }

    /// Row-major strides of these dimensions.
    pub fn contiguous_strides(&self) -> Self {
        let mut s = *self;
        let mut step = 1;
        for i in (0..self.rank as usize).rev() {
            s.d[i] = step;
            step *= self.d[i];
        }
        s
    }
}

impl std::ops::Index<usize> for Dims {
    type Output = usize;
    fn index(&self, i: usize) -> &usize {
        &self.as_slice()[i]
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().fmt(f)
    }
}

#[derive(Debug)]
enum Mem {
    Host(HostBuf),
    Dev(Arc<dyn DeviceMem>),
}

/// An owned, contiguous tensor on the host or a device.
#[derive(Debug)]
pub struct Tensor {
    mem: Mem,
    dtype: DType,
    shape: Dims,
}

impl Tensor {
    /// Zeros on `cx`'s device.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`], the device's own.
    pub fn zeros(cx: &dyn Exec, dtype: DType, shape: &[usize]) -> Result<Self> {
        let shape = Dims::new(shape);
        let bytes = shape.elements() * dtype.size();
        match cx.alloc(bytes)? {
            None => Ok(Self { mem: Mem::Host(HostBuf::zeroed(bytes)?), dtype, shape }),
            Some(d) => {
                cx.zero(&d, 0, bytes);
                Ok(Self { mem: Mem::Dev(d), dtype, shape })
            }
        }
    }

    /// A copy of host elements on `cx`'s device.
    ///
    /// # Errors
    /// [`TensorError::WrongShape`] when the count differs, [`TensorError::OutOfMemory`].
    pub fn from_slice<T: Element>(cx: &dyn Exec, data: &[T], shape: &[usize]) -> Result<Self> {
        let shape = Dims::new(shape);
        if shape.elements() != data.len() {
            return Err(TensorError::WrongShape {
                what: "tensor from a slice".into(),
                found: shape.as_slice().to_vec(),
                expected: format!("{} elements", data.len()),
            });
        }
        match cx.alloc(size_of_val(data))? {
            None => Ok(Self { mem: Mem::Host(HostBuf::copy_of(data)?), dtype: T::DTYPE, shape }),
            Some(d) => {
                cx.upload(&d, 0, bytemuck::cast_slice(data));
                Ok(Self { mem: Mem::Dev(d), dtype: T::DTYPE, shape })
            }
        }
    }

    /// Shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        self.shape.as_slice()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.shape.elements() * self.dtype.size()
    }

    /// The allocation, where it lies on a device.
    pub fn device_mem(&self) -> Option<&Arc<dyn DeviceMem>> {
        match &self.mem {
            Mem::Host(_) => None,
            Mem::Dev(d) => Some(d),
        }
    }

    /// Borrowed for reading.
    pub fn view(&self) -> TensorRef<'_> {
        let mem = match &self.mem {
            Mem::Host(b) => MemRef::Host(b.as_bytes()),
            Mem::Dev(d) => MemRef::Dev(d, 0),
        };
        TensorRef { mem, dtype: self.dtype, shape: self.shape, strides: self.shape.contiguous_strides() }
    }

    /// Borrowed for writing.
    pub fn view_mut(&mut self) -> TensorMut<'_> {
        let mem = match &mut self.mem {
            Mem::Host(b) => MemMut::Host(b.as_bytes_mut()),
            Mem::Dev(d) => MemMut::Dev(d, 0),
        };
        TensorMut { mem, dtype: self.dtype, shape: self.shape, strides: self.shape.contiguous_strides() }
    }

    /// The first elements as a contiguous tensor of another shape: how a buffer that was sized for the
    /// largest step serves a smaller one.
    ///
    /// # Errors
    /// [`TensorError::WrongShape`] when the shape has more elements than the tensor.
    pub fn view_as(&self, shape: &[usize]) -> Result<TensorRef<'_>> {
        let (shape, range) = self.prefix(shape)?;
        let mem = match &self.mem {
            Mem::Host(b) => MemRef::Host(&b.as_bytes()[range]),
            Mem::Dev(d) => MemRef::Dev(d, 0),
        };
        Ok(TensorRef { mem, dtype: self.dtype, shape, strides: shape.contiguous_strides() })
    }

    /// As [`Tensor::view_as`], for writing.
    ///
    /// # Errors
    /// As [`Tensor::view_as`].
    pub fn view_mut_as(&mut self, shape: &[usize]) -> Result<TensorMut<'_>> {
        let (shape, range) = self.prefix(shape)?;
        let mem = match &mut self.mem {
            Mem::Host(b) => MemMut::Host(&mut b.as_bytes_mut()[range]),
            Mem::Dev(d) => MemMut::Dev(d, 0),
        };
        Ok(TensorMut { mem, dtype: self.dtype, shape, strides: shape.contiguous_strides() })
    }

    fn prefix(&self, shape: &[usize]) -> Result<(Dims, Range<usize>)> {
        let shape = Dims::new(shape);
        let n = shape.elements();
        if n > self.shape.elements() {
            return Err(shape_error(
                "prefix of a buffer".into(),
                &shape,
                &format!("at most {} elements", self.shape.elements()),
            ));
        }
        Ok((shape, 0..n * self.dtype.size()))
    }

    /// The elements, where they lie on the host in this type.
    ///
    /// # Errors
    /// [`TensorError::WrongDevice`], [`TensorError::WrongDType`].
    pub fn host<T: Element>(&self) -> Result<&[T]> {
        self.view().into_host()
    }

    /// The elements for writing, where they lie on the host in this type.
    ///
    /// # Errors
    /// As [`Tensor::host`].
    pub fn host_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        self.view_mut().into_host()
    }
}

#[derive(Clone, Copy)]
pub(crate) enum MemRef<'a> {
    Host(&'a [u8]),
    Dev(&'a Arc<dyn DeviceMem>, usize),
}

pub(crate) enum MemMut<'a> {
    Host(&'a mut [u8]),
    Dev(&'a Arc<dyn DeviceMem>, usize),
}

/// A borrowed tensor for reading. The memory begins at the first element; what lies between rows
/// (where a stride is larger than the row) belongs to others.
#[derive(Clone, Copy)]
pub struct TensorRef<'a> {
    mem: MemRef<'a>,
    dtype: DType,
    shape: Dims,
    strides: Dims,
}

/// A borrowed tensor for writing; as [`TensorRef`] otherwise.
pub struct TensorMut<'a> {
    mem: MemMut<'a>,
    dtype: DType,
    shape: Dims,
    strides: Dims,
}

fn span(shape: &Dims, strides: &Dims) -> usize {
    if shape.as_slice().contains(&0) {
        return 0;
    }
    // Beyond any memory where it would wrap.
    let steps = shape.as_slice().iter().zip(strides.as_slice()).map(|(n, s)| (n - 1).saturating_mul(*s));
    steps.fold(1, usize::saturating_add)
}

fn shape_error(what: String, found: &Dims, expected: &str) -> TensorError {
    TensorError::WrongShape { what, found: found.as_slice().to_vec(), expected: expected.into() }
}

/// Splits the last dimension of `shape` into `[heads, width / heads]`.
fn split_last(shape: &Dims, strides: &Dims, heads: usize) -> Result<(Dims, Dims)> {
    let (s, t) = (shape.as_slice(), strides.as_slice());
    match (s, t) {
        (&[n, w], &[row, 1]) if heads > 0 && w % heads == 0 => {
            Ok((Dims::new(&[n, heads, w / heads]), Dims::new(&[row, w / heads, 1])))
        }
        _ => Err(shape_error(
            format!("split into {heads} heads"),
            shape,
            "[tokens, heads x head size], rows contiguous",
        )),
    }
}

fn check_cols(shape: &Dims, strides: &Dims, r: &Range<usize>) -> Result<()> {
    match (shape.as_slice(), strides.as_slice()) {
        (&[_, w], &[_, 1]) if r.start <= r.end && r.end <= w => Ok(()),
        _ => Err(shape_error(format!("columns {r:?}"), shape, "[rows, columns] with that many columns")),
    }
}

impl<'a> TensorRef<'a> {
    /// Memory that begins at the first element and reaches past the last, with its shape.
    pub(crate) fn from_mem(mem: MemRef<'a>, dtype: DType, shape: Dims, strides: Dims) -> Self {
        Self { mem, dtype, shape, strides }
    }

    /// Host elements with a shape, contiguous.
    ///
    /// # Errors
    /// [`TensorError::WrongShape`] when the count differs.
    pub fn from_host<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        let shape = Dims::new(shape);
        Self::from_host_strided(data, shape.as_slice(), shape.contiguous_strides().as_slice())
    }

    /// Host elements with a shape and strides in elements.
    ///
    /// # Errors
    /// [`TensorError::WrongShape`] when the strides reach past the end of `data`.
    pub fn from_host_strided<T: Element>(data: &'a [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        let (shape, strides) = (Dims::new(shape), Dims::new(strides));
        if shape.rank != strides.rank || span(&shape, &strides) > data.len() {
            return Err(shape_error(
                "tensor over host memory".into(),
                &shape,
                &format!("at most {} elements", data.len()),
            ));
        }
        Ok(Self { mem: MemRef::Host(bytemuck::cast_slice(data)), dtype: T::DTYPE, shape, strides })
    }

    /// Shape, outermost first.
    pub fn shape(&self) -> &[usize] {
        self.shape.as_slice()
    }

    /// Strides in elements, outermost first.
    pub fn strides(&self) -> &[usize] {
        self.strides.as_slice()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the memory lies.
    pub fn device(&self) -> Device {
        match self.mem {
            MemRef::Host(_) => Device::CPU,
            MemRef::Dev(d, _) => d.device(),
        }
    }

    /// Device address of the first element, where it lies on a device.
    pub fn device_addr(&self) -> Option<u64> {
        match self.mem {
            MemRef::Host(_) => None,
            MemRef::Dev(d, off) => Some(d.addr() + off as u64),
        }
    }

    /// The host elements from the first on; the last row may be followed by others' elements.
    ///
    /// # Errors
    /// [`TensorError::WrongDevice`], [`TensorError::WrongDType`].
    pub fn into_host<T: Element>(self) -> Result<&'a [T]> {
        if T::DTYPE != self.dtype {
            return Err(TensorError::WrongDType {
                what: "host view",
                found: self.dtype,
                supported: T::DTYPE.name(),
            });
        }
        match self.mem {
            MemRef::Host(b) => {
                bytemuck::try_cast_slice(b).map_err(|e| TensorError::Unsupported(format!("host view: {e}")))
            }
            MemRef::Dev(d, _) => {
                Err(TensorError::WrongDevice { what: "host view", found: d.device(), expected: Device::CPU })
            }
        }
    }

    /// The bytes of the host elements from the first on, of whatever type.
    ///
    /// # Errors
    /// [`TensorError::WrongDevice`].
    pub fn into_host_bytes(self) -> Result<&'a [u8]> {
        match self.mem {
            MemRef::Host(b) => Ok(b),
            MemRef::Dev(d, _) => {
                Err(TensorError::WrongDevice { what: "host view", found: d.device(), expected: Device::CPU })
            }
        }
    }

    /// Rows `r` of the outermost dimension.
    ///
    /// # Errors
    /// [`TensorError::WrongShape`] past the end.
    pub fn rows(&self, r: Range<usize>) -> Result<Self> {
        let (shape, range) = row_range(&self.shape, &self.strides, self.dtype, r)?;
        let mem = match self.mem {
            MemRef::Host(b) => MemRef::Host(&b[range]),
            MemRef::Dev(d, off) => MemRef::Dev(d, off + range.start),
        };
        Ok(Self { mem, shape, ..*self })
    }

    /// Columns `r` of a `[rows, columns]` tensor, without a copy.
    ///
    /// # Errors
    /// [`TensorError::WrongShape`] for another rank or past the end.
    pub fn cols(&self, r: Range<usize>) -> Result<Self> {
        check_cols(&self.shape, &self.strides, &r)?;
        let shape = Dims::new(&[self.shape[0], r.len()]);
        let range = byte_range(&shape, &self.strides, self.dtype, r.start);
        let mem = match self.mem {
            MemRef::Host(b) => MemRef::Host(&b[range]),
            MemRef::Dev(d, off) => MemRef::Dev(d, off + range.start),
        };
        Ok(Self { mem, shape, ..*self })
    }

    /// `[tokens, heads x size]` as `[tokens, heads, size]`.
    ///
    /// # Errors
    /// [`TensorError::WrongShape`] where that does not divide.
    pub fn heads(&self, heads: usize) -> Result<Self> {
        let (shape, strides) = split_last(&self.shape, &self.strides, heads)?;
        Ok(Self { shape, strides, ..*self })
    }
}

fn byte_range(shape: &Dims, strides: &Dims, dtype: DType, first: usize) -> Range<usize> {
    let n = span(shape, strides);
    if n == 0 { 0..0 } else { first * dtype.size()..(first + n) * dtype.size() }
}

fn row_range(shape: &Dims, strides: &Dims, dtype: DType, r: Range<usize>) -> Result<(Dims, Range<usize>)> {
    if shape.rank == 0 || r.start > r.end || r.end > shape[0] {
        return Err(shape_error(format!("rows {r:?}"), shape, "at least that many rows"));
    }
    let mut s = *shape;
    s.d[0] = r.len();
    Ok((s, byte_range(&s, strides, dtype, r.start * strides[0])))
}

impl<'a> TensorMut<'a> {
    /// As [`TensorRef::from_mem`].
    pub(crate) fn from_mem(mem: MemMut<'a>, dtype: DType, shape: Dims, strides: Dims) -> Self {
        Self { mem, dtype, shape, strides }
    }

    /// The memory alone.
    pub(crate) fn into_mem(self) -> MemMut<'a> {
        self.mem
    }

    /// Host elements with a shape, contiguous.
    ///
    /// # Errors
    /// [`TensorError::WrongShape`] when the count differs.
    pub fn from_host<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        let shape = Dims::new(shape);
        Self::from_host_strided(data, shape.as_slice(), shape.contiguous_strides().as_slice())
    }

    /// Over host memory with these strides, in elements.
    ///
    /// # Errors
    /// A slice that is shorter than the last element needs.
    pub fn from_host_strided<T: Element>(
        data: &'a mut [T],
        shape: &[usize],
        strides: &[usize],
    ) -> Result<Self> {
        let (shape, strides) = (Dims::new(shape), Dims::new(strides));
        if shape.rank != strides.rank || span(&shape, &strides) > data.len() {
            return Err(shape_error(
                "tensor over host memory".into(),
                &shape,
                &format!("at most {} elements", data.len()),
            ));
        }
        Ok(Self { mem: MemMut::Host(bytemuck::cast_slice_mut(data)), dtype: T::DTYPE, shape, strides })
    }

    /// Shape, outermost first.
    pub fn shape(&self) -> &[usize] {
        self.shape.as_slice()
    }

    /// Strides in elements, outermost first.
    pub fn strides(&self) -> &[usize] {
        self.strides.as_slice()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the memory lies.
    pub fn device(&self) -> Device {
        match &self.mem {
            MemMut::Host(_) => Device::CPU,
            MemMut::Dev(d, _) => d.device(),
        }
    }

    /// Device address of the first element, where it lies on a device.
    pub fn device_addr(&self) -> Option<u64> {
        match &self.mem {
            MemMut::Host(_) => None,
            MemMut::Dev(d, off) => Some(d.addr() + *off as u64),
        }
    }

    /// Borrowed for reading.
    pub fn as_ref(&self) -> TensorRef<'_> {
        let mem = match &self.mem {
            MemMut::Host(b) => MemRef::Host(b),
            MemMut::Dev(d, off) => MemRef::Dev(d, *off),
        };
        TensorRef { mem, dtype: self.dtype, shape: self.shape, strides: self.strides }
    }

    /// Borrowed again, for a callee that takes it by value.
    pub fn reborrow(&mut self) -> TensorMut<'_> {
        let mem = match &mut self.mem {
            MemMut::Host(b) => MemMut::Host(b),
            MemMut::Dev(d, off) => MemMut::Dev(d, *off),
        };
        TensorMut { mem, dtype: self.dtype, shape: self.shape, strides: self.strides }
    }

    /// The host elements from the first on; the last row may be followed by others' elements.
    ///
    /// # Errors
    /// [`TensorError::WrongDevice`], [`TensorError::WrongDType`].
    pub fn into_host<T: Element>(self) -> Result<&'a mut [T]> {
        if T::DTYPE != self.dtype {
            return Err(TensorError::WrongDType {
                what: "host view",
                found: self.dtype,
                supported: T::DTYPE.name(),
            });
        }
        match self.mem {
            MemMut::Host(b) => bytemuck::try_cast_slice_mut(b)
                .map_err(|e| TensorError::Unsupported(format!("host view: {e}"))),
            MemMut::Dev(d, _) => {
                Err(TensorError::WrongDevice { what: "host view", found: d.device(), expected: Device::CPU })
            }
        }
    }

    /// The bytes of the host elements from the first on, of whatever type.
    ///
    /// # Errors
    /// [`TensorError::WrongDevice`].
    pub fn into_host_bytes(self) -> Result<&'a mut [u8]> {
        match self.mem {
            MemMut::Host(b) => Ok(b),
            MemMut::Dev(d, _) => {
                Err(TensorError::WrongDevice { what: "host view", found: d.device(), expected: Device::CPU })
            }
        }
    }

    /// Rows `r` of the outermost dimension.
    ///
    /// # Errors
    /// [`TensorError::WrongShape`] past the end.
    pub fn rows(self, r: Range<usize>) -> Result<Self> {
        let (shape, range) = row_range(&self.shape, &self.strides, self.dtype, r)?;
        let mem = match self.mem {
            MemMut::Host(b) => MemMut::Host(&mut b[range]),
            MemMut::Dev(d, off) => MemMut::Dev(d, off + range.start),
        };
        Ok(Self { mem, shape, dtype: self.dtype, strides: self.strides })
    }

    /// Columns `r` of a `[rows, columns]` tensor, without a copy.
    ///
    /// # Errors
    /// [`TensorError::WrongShape`] for another rank or past the end.
    pub fn cols(self, r: Range<usize>) -> Result<Self> {
        check_cols(&self.shape, &self.strides, &r)?;
        let shape = Dims::new(&[self.shape[0], r.len()]);
        let range = byte_range(&shape, &self.strides, self.dtype, r.start);
        let mem = match self.mem {
            MemMut::Host(b) => MemMut::Host(&mut b[range]),
            MemMut::Dev(d, off) => MemMut::Dev(d, off + range.start),
        };
        Ok(Self { mem, shape, dtype: self.dtype, strides: self.strides })
    }

    /// `[tokens, heads x size]` as `[tokens, heads, size]`.
    ///
    /// # Errors
    /// [`TensorError::WrongShape`] where that does not divide.
    pub fn heads(self, heads: usize) -> Result<Self> {
        let (shape, strides) = split_last(&self.shape, &self.strides, heads)?;
        Ok(Self { mem: self.mem, dtype: self.dtype, shape, strides })
    }

    /// The elements `r` of each head of `[tokens, heads, size]`.
    ///
    /// # Errors
    /// Another rank, elements past a head's end.
    pub fn within_heads(self, r: Range<usize>) -> Result<Self> {
        let shape = match (self.shape.as_slice(), self.strides.as_slice()) {
            (&[n, h, w], &[_, _, 1]) if r.start <= r.end && r.end <= w => Dims::new(&[n, h, r.len()]),
            _ => {
                let expected = "[tokens, heads, size] with that many elements a head";
                return Err(shape_error(format!("elements {r:?} of each head"), &self.shape, expected));
            }
        };
        let range = byte_range(&shape, &self.strides, self.dtype, r.start);
        let mem = match self.mem {
            MemMut::Host(b) => MemMut::Host(&mut b[range]),
            MemMut::Dev(d, off) => MemMut::Dev(d, off + range.start),
        };
        Ok(Self { mem, shape, dtype: self.dtype, strides: self.strides })
    }

    /// Zeros every element (host memory; a device crate zeroes its own).
    ///
    /// # Errors
    /// [`TensorError::WrongDevice`] for device memory.
    pub fn zero_host(&mut self) -> Result<()> {
        let (shape, strides, size) = (self.shape, self.strides, self.dtype.size());
        let MemMut::Host(b) = &mut self.mem else {
            return Err(TensorError::WrongDevice {
                what: "zero",
                found: self.device(),
                expected: Device::CPU,
            });
        };
        let inner = shape.as_slice().last().copied().unwrap_or(1) * size;
        let outer = &shape.as_slice()[..shape.rank.saturating_sub(1) as usize];
        let rows: usize = outer.iter().product();
        for i in 0..rows {
            let (mut rest, mut off) = (i, 0);
            for (n, s) in outer.iter().zip(strides.as_slice()).rev() {
                off += rest % n * s * size;
                rest /= n;
            }
            b[off..off + inner].fill(0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_and_heads_of_a_fused_projection() -> Result<()> {
        let data: Vec<f32> = (0..24).map(|x| x as f32).collect();
        let t = TensorRef::from_host(&data, &[2, 12])?;
        let k = t.cols(4..8)?.heads(2)?;
        assert_eq!((k.shape(), k.strides()), (&[2, 2, 2][..], &[12, 2, 1][..]));
        let h = k.into_host::<f32>()?;
        assert_eq!((h[0], h[12]), (4.0, 16.0));
        assert!(t.cols(4..13).is_err());
        assert!(t.rows(1..3).is_err());
        Ok(())
    }

    #[test]
    fn zeroing_a_strided_view_spares_the_neighbours() -> Result<()> {
        let mut data = vec![1f32; 12];
        TensorMut::from_host(&mut data, &[3, 4])?.cols(1..3)?.heads(2)?.zero_host()?;
        assert_eq!(data, [1., 0., 0., 1., 1., 0., 0., 1., 1., 0., 0., 1.]);
        Ok(())
    }

    #[test]
    fn shapes_that_wrap_are_longer_than_any_memory() {
        let of = |shape: &[usize], strides: &[usize]| span(&Dims::new(shape), &Dims::new(strides));
        assert_eq!(of(&[usize::MAX, 0], &[1, 1]), 0);
        assert_eq!(of(&[1 << 33, 1 << 33], &[1 << 33, 1]), usize::MAX);
        assert_eq!(of(&[3, usize::MAX], &[usize::MAX, 1]), usize::MAX);
        assert_eq!(of(&[2, 3], &[12, 1]), 15);
    }

    #[test]
    fn the_wrong_type_is_an_error() {
        let data = [0f32; 4];
        let t = TensorRef::from_host(&data, &[4]).unwrap();
        assert!(matches!(t.into_host::<i32>(), Err(TensorError::WrongDType { .. })));
    }
}
