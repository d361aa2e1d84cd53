//! Memory of NumPy (or PyTorch) read and written by headway in place, and headway's handed to NumPy,
//! by DLPack: a C library that `dlpack_numpy.py` calls.
//!
//! ```text
//! cargo build --release -p headway-tensor --example dlpack_numpy
//! python3 crates/headway-tensor/examples/dlpack_numpy.py target/release/examples
//! ```
#![expect(unsafe_code, reason = "a C library")]

use headway_tensor::{
    Device, DeviceMem, Exec, Tensor,
    dlpack::{DLManagedTensor, DLManagedTensorVersioned, DlTensor, to_dlpack},
};
use std::{error::Error, sync::Arc};

/// The host.
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

/// Divides each row of a `[rows, width]` float32 tensor by its root mean square, in place.
fn normalise(x: &mut DlTensor) -> Result<(), Box<dyn Error>> {
    let &[rows, width] = x.shape() else {
        return Err(format!("shape {:?}, expected 2 dimensions", x.shape()).into());
    };
    for r in 0..rows {
        let row = x.view_mut()?.rows(r..r + 1)?.into_host::<f32>()?;
        let mean = row[..width].iter().map(|x| x * x).sum::<f32>() / width as f32;
        row[..width].iter_mut().for_each(|x| *x /= mean.sqrt());
    }
    Ok(())
}

fn status(r: Result<(), Box<dyn Error>>) -> i32 {
    match r {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("headway: {e}");
            1
        }
    }
}

/// Takes a capsule's `dltensor` over and normalises its rows in place; 0 when all went well.
///
/// # Safety
/// As [`DlTensor::from_dlpack`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn headway_normalise(managed: *mut DLManagedTensor) -> i32 {
    // SAFETY: passed on from the caller.
    let x = unsafe { DlTensor::from_dlpack(managed) };
    status(x.map_err(Into::into).and_then(|mut x| normalise(&mut x)))
}

/// As [`headway_normalise`], for a `dltensor_versioned`.
///
/// # Safety
/// As [`DlTensor::from_dlpack_versioned`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn headway_normalise_versioned(managed: *mut DLManagedTensorVersioned) -> i32 {
    // SAFETY: passed on from the caller.
    let x = unsafe { DlTensor::from_dlpack_versioned(managed) };
    status(x.map_err(Into::into).and_then(|mut x| normalise(&mut x)))
}

/// A `[rows, width]` tensor of headway's that counts up; null where it can't be made. The caller owns
/// it.
#[unsafe(no_mangle)]
pub extern "C" fn headway_count(rows: usize, width: usize) -> *mut DLManagedTensor {
    let data: Vec<f32> = (0..rows.saturating_mul(width)).map(|i| i as f32).collect();
    let made = Tensor::from_slice(&Cpu, &data, &[rows, width]).and_then(to_dlpack);
    made.map_or(std::ptr::null_mut(), headway_tensor::dlpack::DlExport::into_raw)
}
