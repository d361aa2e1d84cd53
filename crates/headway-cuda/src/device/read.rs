//! From the device to the host: the one direction that waits.

use super::{
    CudaExec,
    error::{CudaError, Doing, Result},
};
use cudarc::driver::result;
use headway_tensor::{DeviceMem, TensorRef};
use std::sync::Arc;

impl CudaExec {
    /// Copies device memory to the host behind everything that was queued, and waits for it.
    ///
    /// # Errors
    /// Memory of another device, a range past its end; as [`CudaExec::synchronize`].
    pub fn read(&self, mem: &Arc<dyn DeviceMem>, offset: usize, to: &mut [u8]) -> Result<()> {
        self.kept()?;
        self.not_recording("reading device memory")?;
        let addr = self.place("read", mem, offset, to.len())?;
        self.read_at(addr, to)
    }

    /// Copies the elements of a tensor to the host, rows in order without what lies between them.
    ///
    /// # Errors
    /// As [`CudaExec::read`].
    pub fn read_tensor(&self, x: TensorRef<'_>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; x.shape().iter().product::<usize>() * x.dtype().size()];
        self.read_tensor_into(x, &mut bytes)?;
        Ok(bytes)
    }

    /// As [`CudaExec::read_tensor`], to memory that is there already.
    ///
    /// # Errors
    /// As [`CudaExec::read`]; another length.
    pub fn read_tensor_into(&self, x: TensorRef<'_>, bytes: &mut [u8]) -> Result<()> {
        self.kept()?;
        self.not_recording("reading device memory")?;
        let Some(addr) = x.device_addr().filter(|_| x.device() == self.heap().device) else {
            return Err(self.foreign("read", x.device()));
        };
        let size = x.dtype().size();
        let (inner, outer) = match (x.shape().split_last(), x.strides().split_last()) {
            (Some((n, outer)), Some((1, strides))) => (n * size, outer.iter().zip(strides).collect()),
            (None, _) => (size, vec![]),
            (_, strides) => {
                return Err(CudaError::Argument(format!("read: innermost stride {strides:?}, expected 1")));
            }
        };
        let rows: usize = outer.iter().map(|(n, _)| **n).product();
        if bytes.len() != rows * inner {
            return Err(CudaError::Argument(format!(
                "read: {} bytes for a tensor of {}",
                bytes.len(),
                rows * inner
            )));
        }
        let contiguous = x
            .strides()
            .iter()
            .rev()
            .zip(x.shape().iter().rev())
            .try_fold(1, |step, (s, n)| (*s == step || *n <= 1).then_some(step * n));
        if contiguous.is_some() {
            return self.read_at(addr, bytes);
        }
        for (i, row) in bytes.chunks_exact_mut(inner.max(1)).enumerate() {
            let (mut rest, mut off) = (i, 0);
            for (n, stride) in outer.iter().rev() {
                off += rest % **n * **stride * size;
                rest /= **n;
            }
            self.read_at(addr + off as u64, row)?;
        }
        Ok(())
    }

    fn read_at(&self, addr: u64, to: &mut [u8]) -> Result<()> {
        self.heap().context.bind_to_thread().doing("binding the context")?;
        if !to.is_empty() {
            // SAFETY: the range is inside an allocation, and `to` stays borrowed until the stream has come so far.
            unsafe { result::memcpy_dtoh_async(to, addr, self.stream().cu_stream()) }.doing("reading")?;
        }
        self.stream().synchronize().doing("reading")?;
        self.fault()
    }
}
