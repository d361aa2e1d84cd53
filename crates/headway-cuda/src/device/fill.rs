//! Zeros in a tensor.

use super::{
    error::{CudaError, Doing, Result},
    exec::CudaExec,
};
use cudarc::driver::sys;
use headway_tensor::{Exec, TensorMut};

impl CudaExec {
    /// Zeros every element, and nothing that lies between them.
    ///
    /// # Errors
    /// A tensor elsewhere; one whose innermost dimension is not contiguous; the driver's.
    pub fn fill_zero(&self, x: &mut TensorMut<'_>) -> Result<()> {
        self.check()?;
        let Some(addr) = x.device_addr().filter(|_| x.device() == self.device()) else {
            return Err(headway_tensor::TensorError::WrongDevice {
                what: "zeros",
                found: x.device(),
                expected: self.device(),
            }
            .into());
        };
        let (shape, strides, size) = (x.shape(), x.strides(), x.dtype().size());
        if shape.iter().product::<usize>() == 0 {
            return Ok(());
        }
        // Runs of contiguous dimensions are one row; what is left outside of them are rows a stride apart.
        let mut run = 1;
        let mut outer = shape.len();
        while outer > 0 && (strides[outer - 1] == run || shape[outer - 1] == 1) {
            run *= shape[outer - 1];
            outer -= 1;
        }
        let (rows, pitch, rest) = match outer {
            0 => (1, run, &[][..]),
            _ if run == 1 && strides[outer - 1] != 1 => {
                return Err(CudaError::Argument(format!("zeros: innermost stride {}", strides[outer - 1])));
            }
            _ => (shape[outer - 1], strides[outer - 1], &shape[..outer - 1]),
        };
        self.context().bind_to_thread().doing("binding the context")?;
        for i in 0..rest.iter().product::<usize>() {
            let (mut left, mut off) = (i, 0);
            for (n, s) in rest.iter().zip(strides).rev() {
                off += left % n * s;
                left /= n;
            }
            // SAFETY: the rows are elements of the tensor, which is on this device.
            unsafe {
                sys::cuMemsetD2D8Async(
                    addr + (off * size) as u64,
                    pitch * size,
                    0,
                    run * size,
                    rows,
                    self.stream().cu_stream(),
                )
            }
            .result()
            .doing("zeroing a tensor")?;
        }
        Ok(())
    }
}
