//! Device memory: plain allocations with an address for life.

use super::{
    error::{CudaError, Doing, Result, is_out_of_memory},
    ledger::Ledger,
};
use cudarc::driver::{CudaContext, result};
use headway_tensor::{Device, DeviceMem};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What allocations and graphs of a device share.
#[derive(Debug)]
pub(super) struct Heap {
    pub context: Arc<CudaContext>,
    pub device: Device,
    ledger: Mutex<Ledger>,
}

impl Heap {
    pub fn new(context: Arc<CudaContext>, device: Device) -> Arc<Self> {
        Arc::new(Self { context, device, ledger: Mutex::default() })
    }

    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes free and in all.
    pub fn free_and_total(&self) -> Result<(u64, u64)> {
        let (free, total) = self.context.mem_get_info().doing("asking for free memory")?;
        Ok((free as u64, total as u64))
    }

    /// `bytes` of memory, whose contents are anything.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<CudaMem> {
        self.context.bind_to_thread().doing("binding the context")?;
        // SAFETY: the context is bound; a size of 0 is refused by the driver, so there is at least a byte.
        let addr = match unsafe { result::malloc_sync(bytes.max(1)) } {
            Ok(addr) => addr,
            Err(e) if is_out_of_memory(&e) => {
                let (free, total) = self.free_and_total()?;
                return Err(CudaError::OutOfMemory { device: self.device, bytes: bytes as u64, free, total });
            }
            Err(e) => return Err(CudaError::driver(format!("allocating {bytes} bytes"), e)),
        };
        let serial = self.ledger().allocated();
        Ok(CudaMem { heap: Arc::clone(self), addr, bytes, serial })
    }

    /// Gives addresses back. The driver waits for what runs on them.
    pub fn free(&self, addresses: &[u64]) {
        self.context.record_err(self.context.bind_to_thread());
        for addr in addresses {
            // SAFETY: the address came of `malloc_sync`; the ledger hands it out once, with no owner or graph left.
            self.context.record_err(unsafe { result::free_sync(*addr) });
        }
    }
}

/// An allocation of a device; freed when dropped, or with the last graph that may name it.
#[derive(Debug)]
pub struct CudaMem {
    heap: Arc<Heap>,
    addr: u64,
    bytes: usize,
    serial: u64,
}

impl DeviceMem for CudaMem {
    fn device(&self) -> Device {
        self.heap.device
    }

    fn addr(&self) -> u64 {
        self.addr
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for CudaMem {
    fn drop(&mut self) {
        let now = self.heap.ledger().dropped(self.serial, self.addr);
        if now {
            self.heap.free(&[self.addr]);
        }
    }
}
