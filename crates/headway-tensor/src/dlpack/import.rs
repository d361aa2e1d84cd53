//! Tensors of another library, borrowed until they are given back.

use super::{
    DlPackError,
    ffi::{DLManagedTensor, DLManagedTensorVersioned, DLTensor, FLAG_READ_ONLY, device_in, dtype_in},
};
use crate::{
    DType, Device, DeviceMem, TensorMut, TensorRef,
    tensor::{Dims, MemMut, MemRef},
};
use std::{ptr::NonNull, sync::Arc};

/// The struct that came in; its deleter runs once, when this is dropped.
#[derive(Debug)]
enum Owner {
    Plain(NonNull<DLManagedTensor>),
    Versioned(NonNull<DLManagedTensorVersioned>),
}

impl Owner {
    fn tensor(&self) -> &DLTensor {
        match self {
            // SAFETY: whoever made this owner promised a valid struct until its deleter has run, which
            // happens in `drop` alone.
            Self::Plain(p) => unsafe { &p.as_ref().dl_tensor },
            // SAFETY: as above.
            Self::Versioned(p) => unsafe { &p.as_ref().dl_tensor },
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        match self {
            Self::Plain(p) => {
                // SAFETY: the struct is valid until its deleter has run; this is the only call, since
                // an owner is neither cloned nor dropped twice.
                unsafe {
                    if let Some(deleter) = p.as_ref().deleter {
                        deleter(p.as_ptr());
                    }
                }
            }
            Self::Versioned(p) => {
                // SAFETY: as above.
                unsafe {
                    if let Some(deleter) = p.as_ref().deleter {
                        deleter(p.as_ptr());
                    }
                }
            }
        }
    }
}

/// Address and length of memory on a device, kept alive by the [`DlTensor`] that holds it.
#[derive(Debug)]
struct Foreign {
    device: Device,
    addr: u64,
    bytes: usize,
}

impl DeviceMem for Foreign {
    fn device(&self) -> Device {
        self.device
    }
    fn addr(&self) -> u64 {
        self.addr
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
}

#[derive(Debug)]
enum Mem {
    Host { first: NonNull<u8>, bytes: usize },
    Dev(Arc<dyn DeviceMem>),
}

/// A tensor of another library. Dropping it gives the memory back, by the producer's deleter.
///
/// Neither `Send` nor `Sync`: a producer may want its deleter called on the thread that handed the
/// tensor over.
#[derive(Debug)]
pub struct DlTensor {
    mem: Mem,
    dtype: DType,
    shape: Dims,
    strides: Dims,
    read_only: bool,
    // Last: fields are dropped in this order, and this one frees what the others point to.
    _owner: Owner,
}

impl DlTensor {
    /// Takes a tensor of the unversioned protocol over. On an error it is given back at once.
    ///
    /// # Errors
    /// What headway's views can't express: see [`DlPackError`].
    ///
    /// # Safety
    /// `managed` is null or a valid struct that nobody else gives back; its shape and strides have
    /// `ndim` entries, its data is as large as they say, initialised, and stays so until its deleter is
    /// called. While the returned value lives nobody else writes the data, and where
    /// [`DlTensor::view_mut`] is used nobody else reads it.
    pub unsafe fn from_dlpack(managed: *mut DLManagedTensor) -> Result<Self, DlPackError> {
        let owner = Owner::Plain(NonNull::new(managed).ok_or(DlPackError::Null("the tensor"))?);
        // SAFETY: passed on from the caller.
        unsafe { Self::take(owner, false) }
    }

    /// Takes a tensor of version 1 over. On an error it is given back at once.
    ///
    /// # Errors
    /// As [`DlTensor::from_dlpack`]; another major version.
    ///
    /// # Safety
    /// As [`DlTensor::from_dlpack`]; of another major version the version, context and deleter alone
    /// need be valid.
    pub unsafe fn from_dlpack_versioned(managed: *mut DLManagedTensorVersioned) -> Result<Self, DlPackError> {
        let managed = NonNull::new(managed).ok_or(DlPackError::Null("the tensor"))?;
        let owner = Owner::Versioned(managed);
        // SAFETY: the version and the deleter lie at the same place in every version.
        let version = unsafe { (&raw const (*managed.as_ptr()).version).read() };
        if version.major != 1 {
            return Err(DlPackError::Version(version.major, version.minor));
        }
        // SAFETY: a struct of version 1, valid by the caller's promise.
        let flags = unsafe { managed.as_ref().flags };
        // SAFETY: passed on from the caller.
        unsafe { Self::take(owner, flags & FLAG_READ_ONLY != 0) }
    }

    /// # Safety
    /// As [`DlTensor::from_dlpack`].
    unsafe fn take(owner: Owner, read_only: bool) -> Result<Self, DlPackError> {
        let t = owner.tensor();
        let (device, dtype) = (device_in(t.device)?, dtype_in(t.dtype)?);
        let rank = usize::try_from(t.ndim).ok().filter(|r| *r <= 4).ok_or(DlPackError::Rank(t.ndim))?;
        // SAFETY: `shape` and `strides` have `ndim` entries where they aren't null.
        let shape = unsafe { entries(t.shape, rank) };
        // SAFETY: as above.
        let strides = unsafe { entries(t.strides, rank) };
        let shape = shape.ok_or(DlPackError::Null("the shape"))?;
        let (shape, strides, bytes) = layout(shape, strides, dtype)?;
        let addr = (t.data as u64).checked_add(t.byte_offset).ok_or(DlPackError::Null("the data"))?;
        if t.data.is_null() && bytes > 0 {
            return Err(DlPackError::Null("the data"));
        }
        if bytes > 0 && !addr.is_multiple_of(dtype.size() as u64) {
            return Err(DlPackError::Alignment { addr, size: dtype.size() });
        }
        let mem = if device == Device::CPU {
            let first = t.data.cast::<u8>().wrapping_add(t.byte_offset as usize);
            let first = NonNull::new(first).filter(|_| bytes > 0);
            // An empty slice wants an aligned address that isn't null.
            Mem::Host { first: first.unwrap_or(NonNull::<u64>::dangling().cast()), bytes }
        } else {
            Mem::Dev(Arc::new(Foreign { device, addr, bytes }))
        };
        Ok(Self { mem, dtype, shape, strides, read_only, _owner: owner })
    }

    /// Shape, outermost first.
    pub fn shape(&self) -> &[usize] {
        self.shape.as_slice()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether the producer forbids writing (the unversioned protocol can't say).
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The tensor for reading, in place.
    pub fn view(&self) -> TensorRef<'_> {
        let mem = match &self.mem {
            Mem::Host { first, bytes } => {
                // SAFETY: `bytes` bytes from `first` on are initialised and written by nobody while
                // `self` lives, by the promise of `from_dlpack`; `layout` made sure that they fit an
                // isize.
                MemRef::Host(unsafe { std::slice::from_raw_parts(first.as_ptr(), *bytes) })
            }
            Mem::Dev(d) => MemRef::Dev(d, 0),
        };
        TensorRef::from_mem(mem, self.dtype, self.shape, self.strides)
    }

    /// The tensor for writing, in place.
    ///
    /// # Errors
    /// [`DlPackError::ReadOnly`].
    pub fn view_mut(&mut self) -> Result<TensorMut<'_>, DlPackError> {
        if self.read_only {
            return Err(DlPackError::ReadOnly);
        }
        let mem = match &self.mem {
            Mem::Host { first, bytes } => {
                // SAFETY: as in `view`; nobody else reads or writes them while this borrow of `self`
                // lives.
                MemMut::Host(unsafe { std::slice::from_raw_parts_mut(first.as_ptr(), *bytes) })
            }
            Mem::Dev(d) => MemMut::Dev(d, 0),
        };
        Ok(TensorMut::from_mem(mem, self.dtype, self.shape, self.strides))
    }
}

/// The first `n` entries, copied; `None` for null where there should be some.
///
/// # Safety
/// `p` is null or has `n` entries.
unsafe fn entries(p: *const i64, n: usize) -> Option<Vec<i64>> {
    if n == 0 {
        return Some(vec![]);
    }
    // SAFETY: passed on from the caller; an array of int64 of a C struct is aligned.
    (!p.is_null()).then(|| unsafe { std::slice::from_raw_parts(p, n) }.to_vec())
}

/// Shape, strides and bytes from the first element to past the last. Strides of dimensions of one
/// element mean nothing and are made row-major.
fn layout(
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    dtype: DType,
) -> Result<(Dims, Dims, usize), DlPackError> {
    let bad = || DlPackError::Shape(shape.clone());
    let sizes: Vec<usize> =
        shape.iter().map(|&n| usize::try_from(n)).collect::<Result<_, _>>().map_err(|_| bad())?;
    let fits = |n: usize| n.checked_mul(dtype.size()).filter(|b| isize::try_from(*b).is_ok());
    // Row-major strides grow with every dimension, empty ones too: their product must fit as well.
    let grown = sizes.iter().try_fold(1usize, |p, &n| p.checked_mul(n.max(1)));
    grown.and_then(fits).ok_or_else(bad)?;
    let dims = Dims::new(&sizes);
    let mut steps = dims.contiguous_strides().as_slice().to_vec();
    if let Some(given) = strides {
        let wrong = || DlPackError::Strides { shape: shape.clone(), strides: given.clone() };
        for (i, (&n, &s)) in sizes.iter().zip(&given).enumerate() {
            if n > 1 {
                steps[i] = usize::try_from(s).ok().filter(|s| *s > 0).ok_or_else(wrong)?;
                if i + 1 == sizes.len() && s != 1 {
                    return Err(wrong());
                }
            }
        }
    }
    let empty = sizes.contains(&0);
    let last = sizes
        .iter()
        .zip(&steps)
        .try_fold(0usize, |at, (&n, &s)| at.checked_add(n.saturating_sub(1).checked_mul(s)?));
    let elements = if empty { Some(0) } else { last.and_then(|l| l.checked_add(1)) };
    let bytes = elements.and_then(fits).ok_or_else(bad)?;
    Ok((dims, Dims::new(&steps), bytes))
}
