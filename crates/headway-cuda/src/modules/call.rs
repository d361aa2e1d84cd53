//! One call of a module's function: arguments in, a result or the raised error out.

use super::{ModuleError, shim};
use headway_ffi_shim::tvm::{
    Any, DLDataType, DLDevice, DLTensor, ErrorObject, Object, SafeCall, Sequence, release, type_index,
};
use headway_tensor::DType;
use std::{ffi::c_void, mem::MaybeUninit, path::Path, ptr::null_mut};

/// Most arguments of a function.
const MOST: usize = 32;
/// Most tensors among them.
const MOST_TENSORS: usize = 16;

/// A tensor argument: where it lies, with its sizes and strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct TensorArg {
    addr: u64,
    device: DLDevice,
    dtype: DLDataType,
    rank: usize,
    shape: [i64; 4],
    strides: [i64; 4],
}

impl TensorArg {
    fn new(device: DLDevice, addr: u64, dtype: DLDataType, shape: &[usize], strides: &[usize]) -> Self {
        let mut arg = Self { addr, device, dtype, rank: shape.len().min(4), shape: [0; 4], strides: [0; 4] };
        for (i, (&n, &s)) in shape.iter().zip(strides).take(4).enumerate() {
            (arg.shape[i], arg.strides[i]) = (n as i64, s as i64);
        }
        arg
    }

    /// Address of the first element.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// On a CUDA device, with up to 4 dimensions.
    pub fn device(ordinal: u32, addr: u64, dtype: DType, shape: &[usize], strides: &[usize]) -> Self {
        let device = DLDevice { device_type: 2, device_id: ordinal as i32 };
        Self::new(device, addr, element(dtype), shape, strides)
    }

    /// So many elements in a row on a CUDA device.
    pub fn row(ordinal: u32, addr: u64, dtype: DType, len: usize) -> Self {
        Self::device(ordinal, addr, dtype, &[len], &[1])
    }

    /// So many bytes on the host.
    pub fn host_bytes(addr: *const u8, len: usize) -> Self {
        Self::new(DLDevice { device_type: 1, device_id: 0 }, addr as u64, element(DType::U8), &[len], &[1])
    }

    /// Numbers on the host, which must outlive the call.
    pub fn host(x: &[i32]) -> Self {
        let device = DLDevice { device_type: 1, device_id: 0 };
        Self::new(device, x.as_ptr() as u64, element(DType::I32), &[x.len()], &[1])
    }
}

const fn element(dtype: DType) -> DLDataType {
    let (code, bits) = match dtype {
        DType::BF16 => (4, 16),
        DType::F16 => (2, 16),
        DType::F32 => (2, 32),
        DType::I32 => (0, 32),
        DType::I64 => (0, 64),
        // Bytes, and what modules take as such.
        _ => (1, 8),
    };
    DLDataType { code, bits, lanes: 1 }
}

/// An argument.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// An optional one that is left out.
    None,
    /// A whole number.
    Int(i64),
    /// Yes or no.
    Bool(bool),
    /// A number.
    Float(f64),
    /// A tensor.
    Tensor(&'a TensorArg),
    /// What an earlier call returned.
    Object(&'a Returned),
    /// An element of the array or tuple that an earlier call returned; left out where there is no such element.
    Item(&'a Returned, usize),
}

/// What a call returned: a number, or an object that is released with this.
#[derive(Debug)]
pub struct Returned(Any);

// SAFETY: objects that calls return are not written to after that, and their counts are atomic.
unsafe impl Send for Returned {}
// SAFETY: as above.
unsafe impl Sync for Returned {}

impl Drop for Returned {
    fn drop(&mut self) {
        if self.0.is_object() {
            // SAFETY: the reference that came with the result is this value's own.
            unsafe { release(self.0.payload as *mut Object) }
        }
    }
}

impl Returned {
    /// The numbers of an array of whole numbers.
    pub fn ints(&self) -> Option<Vec<i64>> {
        ints(&self.0)
    }

    /// The numbers of an array of whole numbers, and the number behind it, of a tuple of the two.
    pub fn ints_and_int(&self) -> Option<(Vec<i64>, i64)> {
        match elements(&self.0)? {
            [list, number] => Some((ints(list)?, int(number)?)),
            _ => None,
        }
    }
}

/// The elements of an array or tuple that its holder keeps alive; `None` for something else.
fn elements(x: &Any) -> Option<&[Any]> {
    if x.type_index != type_index::ARRAY {
        return None;
    }
    // SAFETY: an object of this type begins as `Sequence` does, and lives as long as what refers to it; its elements lie
    // at `data`.
    unsafe {
        let list = (x.payload as *const Sequence).as_ref()?;
        let len = usize::try_from(list.size).ok()?;
        if len == 0 { Some(&[]) } else { Some(std::slice::from_raw_parts(list.data, len)) }
    }
}

fn int(x: &Any) -> Option<i64> {
    (x.type_index == type_index::INT).then_some(x.payload as i64)
}

fn ints(x: &Any) -> Option<Vec<i64>> {
    elements(x)?.iter().map(int).collect()
}

/// A function of an open module.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    pub(super) name: &'static str,
    pub(super) call: SafeCall,
}

impl Function {
    /// Calls it on a stream.
    ///
    /// # Errors
    /// What it raised, with the file's name.
    ///
    /// # Safety
    /// The arguments are what its signature says, tensors lie where they say for as long as the device works on them,
    /// and the device's context is bound to this thread.
    pub unsafe fn call(
        &self,
        path: &Path,
        device: u32,
        stream: *mut c_void,
        args: &[Arg<'_>],
    ) -> Result<Returned, ModuleError> {
        let failed = |kind: &str, message: String| ModuleError::Raised {
            path: path.to_owned(),
            function: self.name.into(),
            kind: kind.into(),
            message,
        };
        let shim = shim()?;
        if !shim.set_stream(device, stream) {
            return Err(failed("device", format!("the shim keeps no stream for device {device}")));
        }
        let mut values = [Any::NONE; MOST];
        let mut tensors: [MaybeUninit<DLTensor>; MOST_TENSORS] =
            [const { MaybeUninit::uninit() }; MOST_TENSORS];
        let mut used = 0;
        if args.len() > MOST {
            return Err(failed("arguments", format!("{} of at most {MOST}", args.len())));
        }
        for (to, arg) in values.iter_mut().zip(args) {
            *to = match arg {
                Arg::None => Any::NONE,
                Arg::Int(x) => Any::int(*x),
                Arg::Bool(x) => Any::bool(*x),
                Arg::Float(x) => Any::float(*x),
                Arg::Object(x) => x.0,
                Arg::Item(x, i) => elements(&x.0).and_then(|all| all.get(*i)).copied().unwrap_or(Any::NONE),
                Arg::Tensor(x) => {
                    let Some(place) = tensors.get_mut(used) else {
                        return Err(failed("arguments", format!("over {MOST_TENSORS} tensors")));
                    };
                    used += 1;
                    Any::tensor(place.write(DLTensor {
                        data: x.addr as *mut c_void,
                        device: x.device,
                        ndim: x.rank as i32,
                        dtype: x.dtype,
                        shape: x.shape.as_ptr(),
                        strides: x.strides.as_ptr(),
                        byte_offset: 0,
                    }))
                }
            };
        }
        let mut result = Any::NONE;
        // SAFETY: the arguments are the caller's word; the values and what they point to outlive the call.
        let status = unsafe { (self.call)(null_mut(), values.as_ptr(), args.len() as i32, &mut result) };
        let result = Returned(result);
        if status == 0 {
            return Ok(result);
        }
        let error = shim.raised();
        // SAFETY: null, or an error that is ours to release and to read until then.
        let (kind, message) = unsafe {
            let words = error_words(error);
            release(error);
            words
        };
        Err(failed(&kind, message))
    }
}

/// Kind and words of an error object.
///
/// # Safety
/// Null, or alive.
unsafe fn error_words(error: *mut Object) -> (String, String) {
    // SAFETY: the caller's word.
    match unsafe { error.as_ref() } {
        None => ("an error".into(), "no words were given".into()),
        Some(e) if e.type_index != type_index::ERROR => {
            ("an error".into(), format!("an object of type {} was given", e.type_index))
        }
        Some(_) => {
            // SAFETY: an object of this type begins as `ErrorObject` does.
            let (kind, message) =
                unsafe { ((*error.cast::<ErrorObject>()).kind, (*error.cast::<ErrorObject>()).message) };
            let text = |b: headway_ffi_shim::tvm::ByteArray| match b.data.is_null() || b.size == 0 {
                true => String::new(),
                // SAFETY: the error's own bytes.
                false => String::from_utf8_lossy(unsafe {
                    std::slice::from_raw_parts(b.data.cast::<u8>(), b.size)
                })
                .trim_end()
                .to_owned(),
            };
            (text(kind), text(message))
        }
    }
}
