//! DLPack both ways: what goes out comes in unchanged, deleters run once, and what headway's views
//! can't express is refused and given back.
#![expect(unsafe_code, reason = "plays the other library, which has raw pointers")]

use headway_tensor::{
    DType, Device, DeviceMem, Exec, Tensor,
    dlpack::{
        DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
        DlPackError, DlTensor, FLAG_READ_ONLY, to_dlpack, to_dlpack_versioned,
    },
};
use std::{
    ffi::c_void,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

struct Cpu;
impl Exec for Cpu {
    fn device(&self) -> Device {
        Device::CPU
    }
    fn alloc(&self, _: usize) -> headway_tensor::Result<Option<Arc<dyn DeviceMem>>> {
        Ok(None)
    }
    fn upload(&self, _: &Arc<dyn DeviceMem>, _: usize, _: &[u8]) {}
}

/// A tensor of another library: a 4 x 6 matrix of float32 counting up, aligned to 16 bytes.
struct Other {
    data: Box<[u128; 6]>,
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    ndim: i32,
    dtype: DLDataType,
    device: DLDevice,
    byte_offset: u64,
    freed: Arc<AtomicUsize>,
}

const F32: DLDataType = DLDataType { code: 2, bits: 32, lanes: 1 };
const CPU: DLDevice = DLDevice { device_type: 1, device_id: 0 };

impl Other {
    fn new(shape: &[i64], strides: Option<&[i64]>) -> Self {
        let mut data = Box::new([0u128; 6]);
        for (i, x) in bytemuck::cast_slice_mut::<u128, f32>(&mut data[..]).iter_mut().enumerate() {
            *x = i as f32;
        }
        Self {
            data,
            shape: shape.to_vec(),
            strides: strides.map(<[i64]>::to_vec),
            ndim: shape.len() as i32,
            dtype: F32,
            device: CPU,
            byte_offset: 0,
            freed: Arc::default(),
        }
    }

    fn tensor(&mut self) -> DLTensor {
        DLTensor {
            data: self.data.as_mut_ptr().cast(),
            device: self.device,
            ndim: self.ndim,
            dtype: self.dtype,
            shape: self.shape.as_mut_ptr(),
            strides: self.strides.as_mut().map_or(std::ptr::null_mut(), Vec::as_mut_ptr),
            byte_offset: self.byte_offset,
        }
    }

    fn hand_over(self) -> *mut DLManagedTensor {
        unsafe extern "C" fn free(m: *mut DLManagedTensor) {
            // SAFETY: both boxes are leaked below, and the deleter runs once.
            unsafe {
                let other = Box::from_raw((*m).manager_ctx.cast::<Other>());
                other.freed.fetch_add(1, Ordering::Relaxed);
                drop(Box::from_raw(m));
            }
        }
        let this = Box::leak(Box::new(self));
        let dl_tensor = this.tensor();
        let manager_ctx: *mut c_void = std::ptr::from_mut(this).cast();
        Box::into_raw(Box::new(DLManagedTensor { dl_tensor, manager_ctx, deleter: Some(free) }))
    }

    fn hand_over_versioned(self, major: u32, flags: u64) -> *mut DLManagedTensorVersioned {
        unsafe extern "C" fn free(m: *mut DLManagedTensorVersioned) {
            // SAFETY: as above.
            unsafe {
                let other = Box::from_raw((*m).manager_ctx.cast::<Other>());
                other.freed.fetch_add(1, Ordering::Relaxed);
                drop(Box::from_raw(m));
            }
        }
        let this = Box::leak(Box::new(self));
        let dl_tensor = this.tensor();
        let version = DLPackVersion { major, minor: 0 };
        let manager_ctx: *mut c_void = std::ptr::from_mut(this).cast();
        let m = DLManagedTensorVersioned { version, manager_ctx, deleter: Some(free), flags, dl_tensor };
        Box::into_raw(Box::new(m))
    }

    /// Takes the tensor over; with the number of times that it was given back.
    fn take(self) -> (Result<DlTensor, DlPackError>, Arc<AtomicUsize>) {
        let freed = self.freed.clone();
        // SAFETY: the struct and its data are as it says.
        (unsafe { DlTensor::from_dlpack(self.hand_over()) }, freed)
    }
}

#[test]
fn another_librarys_rows_are_read_and_written_in_place() {
    let (t, freed) = Other::new(&[4, 3], Some(&[6, 1])).take();
    let mut t = t.unwrap();
    assert_eq!((t.shape(), t.dtype(), t.view().strides()), (&[4, 3][..], DType::F32, &[6, 1][..]));
    let v = t.view();
    let h = v.into_host::<f32>().unwrap();
    assert_eq!((h[0], h[2], h[6], h[20], h.len()), (0.0, 2.0, 6.0, 20.0, 21));
    t.view_mut().unwrap().rows(1..2).unwrap().zero_host().unwrap();
    let h = t.view().into_host::<f32>().unwrap();
    assert_eq!(h[5..10], [5.0, 0.0, 0.0, 0.0, 9.0]);
    assert_eq!(freed.load(Ordering::Relaxed), 0);
    drop(t);
    assert_eq!(freed.load(Ordering::Relaxed), 1);
}

#[test]
fn offsets_missing_strides_and_singletons() {
    let mut o = Other::new(&[2, 3], None);
    o.byte_offset = 8;
    let t = o.take().0.unwrap();
    assert_eq!(t.view().into_host::<f32>().unwrap(), [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    // A dimension of one element may carry any stride; it comes in row-major.
    let t = Other::new(&[2, 1, 3], Some(&[6, -77, 1])).take().0.unwrap();
    assert_eq!(t.view().strides(), [6, 3, 1]);
    let t = Other::new(&[], None).take().0.unwrap();
    assert_eq!(t.view().into_host::<f32>().unwrap(), [0.0]);
    let t = Other::new(&[0, 6], None).take().0.unwrap();
    assert!(t.view().into_host::<f32>().unwrap().is_empty());
}

fn refused(change: impl FnOnce(&mut Other)) -> DlPackError {
    let mut o = Other::new(&[4, 6], Some(&[6, 1]));
    change(&mut o);
    let (t, freed) = o.take();
    assert_eq!(freed.load(Ordering::Relaxed), 1, "a refused tensor is given back once");
    t.unwrap_err()
}

#[test]
fn what_views_cannot_express_is_refused_and_given_back() {
    assert_eq!(refused(|o| o.device.device_type = 4), DlPackError::Device(4));
    let double = DLDataType { code: 2, bits: 64, lanes: 1 };
    assert_eq!(refused(|o| o.dtype = double), DlPackError::DType { code: 2, bits: 64, lanes: 1 });
    assert!(matches!(refused(|o| o.dtype.lanes = 4), DlPackError::DType { lanes: 4, .. }));
    for s in [[1, 4], [-6, 1], [0, 1], [6, 2]] {
        assert!(matches!(refused(|o| o.strides = Some(s.to_vec())), DlPackError::Strides { .. }), "{s:?}");
    }
    assert_eq!(refused(|o| o.ndim = -1), DlPackError::Rank(-1));
    assert_eq!(refused(|o| o.ndim = 5), DlPackError::Rank(5));
    for shape in [[-1, 6], [i64::MAX, 6], [1 << 40, 1 << 40]] {
        assert_eq!(refused(|o| o.shape = shape.to_vec()), DlPackError::Shape(shape.to_vec()));
    }
    assert!(matches!(refused(|o| o.strides = Some(vec![i64::MAX, 1])), DlPackError::Shape(_)));
    assert!(matches!(refused(|o| o.byte_offset = 2), DlPackError::Alignment { size: 4, .. }));
    // SAFETY: null is allowed.
    let null = unsafe { DlTensor::from_dlpack(std::ptr::null_mut()) };
    assert_eq!(null.unwrap_err(), DlPackError::Null("the tensor"));
}

#[test]
fn versions_and_read_only() {
    let o = Other::new(&[4, 6], None);
    let freed = o.freed.clone();
    // SAFETY: a valid struct.
    let mut t = unsafe { DlTensor::from_dlpack_versioned(o.hand_over_versioned(1, FLAG_READ_ONLY)) }.unwrap();
    assert!(t.is_read_only() && t.view().into_host::<f32>().unwrap()[23] == 23.0);
    assert_eq!(t.view_mut().err(), Some(DlPackError::ReadOnly));
    drop(t);
    assert_eq!(freed.load(Ordering::Relaxed), 1);
    let o = Other::new(&[4, 6], None);
    let freed = o.freed.clone();
    // SAFETY: a valid struct, whatever its version says.
    let t = unsafe { DlTensor::from_dlpack_versioned(o.hand_over_versioned(2, 0)) };
    assert_eq!((t.unwrap_err(), freed.load(Ordering::Relaxed)), (DlPackError::Version(2, 0), 1));
}

#[test]
fn device_memory_is_an_address() {
    let mut o = Other::new(&[2, 6], None);
    o.device = DLDevice { device_type: 2, device_id: 3 };
    o.byte_offset = 16;
    let addr = o.data.as_ptr() as u64 + 16;
    let t = o.take().0.unwrap();
    assert_eq!(t.view().device(), Device { kind: "cuda", index: 3 });
    assert_eq!(t.view().device_addr(), Some(addr));
    assert!(t.view().into_host::<f32>().is_err());
}

#[test]
fn a_round_trip_keeps_the_memory() {
    let data: Vec<half::bf16> = (0..24).map(|i| half::bf16::from_f32(i as f32)).collect();
    let tensor = Tensor::from_slice(&Cpu, &data, &[2, 3, 4]).unwrap();
    let addr = tensor.host::<half::bf16>().unwrap().as_ptr();
    let out = to_dlpack(tensor).unwrap().into_raw();
    // SAFETY: just made, and handed over once.
    let back = unsafe { DlTensor::from_dlpack(out) }.unwrap();
    let v = back.view().into_host::<half::bf16>().unwrap();
    assert_eq!((v, v.as_ptr(), back.shape()), (&data[..], addr, &[2, 3, 4][..]));

    let tensor = Tensor::from_slice(&Cpu, &[1i64, 2], &[2]).unwrap();
    let out = to_dlpack_versioned(tensor, true).unwrap().into_raw();
    // SAFETY: as above.
    let mut back = unsafe { DlTensor::from_dlpack_versioned(out) }.unwrap();
    assert_eq!(back.view().into_host::<i64>().unwrap(), [1, 2]);
    assert!(back.view_mut().is_err());
}

#[test]
fn an_export_that_is_not_handed_over_is_freed() {
    let tensor = Tensor::zeros(&Cpu, DType::F8E4M3, &[8]).unwrap();
    let out = to_dlpack(tensor).unwrap();
    // SAFETY: still owned by `out`.
    let t = unsafe { &(*out.as_ptr()).dl_tensor };
    assert_eq!((t.dtype, t.device, t.ndim), (DLDataType { code: 10, bits: 8, lanes: 1 }, CPU, 1));
    drop(out);
}
