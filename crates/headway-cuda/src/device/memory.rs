//! Device memory: plain allocations with an address for life.

use super::{
    error::{CudaError, Doing, Result, is_out_of_memory},
    ledger::Ledger,
};
use cudarc::driver::{CudaContext, DriverError, result};
use headway_tensor::{Device, DeviceMem};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// What allocations and graphs of a device share.
#[derive(Debug)]
pub(super) struct Heap {
    pub context: Arc<CudaContext>,
    pub device: Device,
    ledger: Mutex<Ledger>,
    /// Bytes that owners hold.
    held: AtomicU64,
    limit: u64,
}

impl Heap {
    pub fn new(context: Arc<CudaContext>, device: Device, limit: Option<u64>) -> Arc<Self> {
        let (ledger, held) = (Mutex::default(), AtomicU64::new(0));
        Arc::new(Self { context, device, ledger, held, limit: limit.unwrap_or(u64::MAX) })
    }

    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes free and in all.
    pub fn free_and_total(&self) -> Result<(u64, u64)> {
        let (free, total) = self.context.mem_get_info().doing("asking for free memory")?;
        Ok((free as u64, total as u64))
    }

    /// The driver's refusal of something that takes so many bytes.
    pub fn refused(&self, doing: impl Into<String>, bytes: u64, e: DriverError) -> CudaError {
        if !is_out_of_memory(&e) {
            return CudaError::driver(doing, e);
        }
        match self.free_and_total() {
            Ok((free, total)) => CudaError::OutOfMemory { device: self.device, bytes, free, total },
            Err(e) => e,
        }
    }

    /// `bytes` of memory, whose contents are anything.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<CudaMem> {
        let left = self.limit.saturating_sub(self.held.load(Relaxed));
        if bytes as u64 > left {
            let (device, bytes) = (self.device, bytes as u64);
            return Err(CudaError::OutOfMemory { device, bytes, free: left, total: self.limit });
        }
        self.context.bind_to_thread().doing("binding the context")?;
        // SAFETY: the context is bound; a size of 0 is refused by the driver, so there is at least a byte.
        let addr = unsafe { result::malloc_sync(bytes.max(1)) }
            .map_err(|e| self.refused(format!("allocating {bytes} bytes"), bytes as u64, e))?;
        self.held.fetch_add(bytes as u64, Relaxed);
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
        self.heap.held.fetch_sub(self.bytes as u64, Relaxed);
        let now = self.heap.ledger().dropped(self.serial, self.addr);
        if now {
            self.heap.free(&[self.addr]);
        }
    }
}
