//! [`CudaExec`]: a device, one stream on it, and what kernels and operations need of both.

use super::{
    driver,
    error::{CudaError, Doing, Result},
    fault::Fault,
    info::DeviceInfo,
    memory::Heap,
    options::CudaOptions,
    staging::Staging,
};
use crate::{
    compile::Compiler,
    kernels::{
        Loaded,
        ops::{Gemm, OpKernels},
    },
};
use cudarc::driver::{CudaContext, CudaStream, result};
use headway_tensor::{Device, DeviceMem, Exec, Graphs};
use std::{
    cell::{Cell, OnceCell, RefCell},
    rc::Rc,
    sync::Arc,
};

/// A CUDA device with one stream. Everything that is queued runs in order; one thread drives it.
///
/// Uploads can't return errors: a failure is kept, and the next call that can return one returns it.
pub struct CudaExec {
    // Dropped in this order: what uses the stream before the stream.
    staging: RefCell<Staging>,
    pub(crate) kernels: Rc<Loaded>,
    pub(crate) op_kernels: OpKernels,
    pub(crate) gemm: OnceCell<Gemm>,
    fault: Fault,
    stream: Arc<CudaStream>,
    heap: Arc<Heap>,
    info: DeviceInfo,
    batch_invariant: bool,
    /// The ledger's number of the graph that is being recorded.
    recording: Cell<Option<u64>>,
    failure: RefCell<Option<CudaError>>,
}

impl CudaExec {
    /// Opens a device.
    ///
    /// # Errors
    /// No driver, or one too old; no such device; the driver's own; no NVRTC.
    pub fn open(options: CudaOptions) -> Result<Self> {
        let version = driver::start(options.ordinal)?;
        let device = Device { kind: "cuda", index: options.ordinal };
        let context = CudaContext::new(options.ordinal as usize).doing("opening the device")?;
        // SAFETY: there is one stream, so nothing needs events to be ordered. Events recorded outside of a capture
        // would break it.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().doing("creating a stream")?;
        let info = DeviceInfo::ask(&context, version)?.limited(options.shared_limit);
        let compiler = Compiler::new(info.arch(), options.kernel_cache, options.progress)?;
        Ok(Self {
            staging: RefCell::new(Staging::new(Arc::clone(&stream))?),
            kernels: Rc::new(Loaded::new(compiler)),
            op_kernels: OpKernels::default(),
            gemm: OnceCell::new(),
            fault: Fault::new(Arc::clone(&context))?,
            heap: Heap::new(context, device, options.memory_limit),
            stream,
            info,
            batch_invariant: options.batch_invariant,
            recording: Cell::new(None),
            failure: RefCell::new(None),
        })
    }

    /// The device's name and sizes.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Whether batch invariance was asked for.
    pub fn batch_invariant(&self) -> bool {
        self.batch_invariant
    }

    /// Bytes of device memory that are free, and all there are.
    ///
    /// # Errors
    /// The driver's.
    pub fn free_and_total_memory(&self) -> Result<(u64, u64)> {
        self.heap.free_and_total()
    }

    /// The driver's refusal of something that takes so many bytes of the device's memory.
    pub(crate) fn refused(
        &self,
        doing: impl Into<String>,
        bytes: usize,
        e: cudarc::driver::DriverError,
    ) -> CudaError {
        self.heap.refused(doing, bytes as u64, e)
    }

    /// The stream, for calls into other libraries.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The context, for calls into other libraries.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.heap.context
    }

    pub(super) fn heap(&self) -> &Arc<Heap> {
        &self.heap
    }

    pub(super) fn recording(&self) -> Option<u64> {
        self.recording.get()
    }

    pub(super) fn set_recording(&self, graph: Option<u64>) {
        self.recording.set(graph);
    }

    /// Returns a failure that an earlier upload kept, or an index that a kernel found to be out of range by now.
    ///
    /// # Errors
    /// That failure.
    pub fn check(&self) -> Result<()> {
        self.kept()?;
        self.fault.take()
    }

    /// Returns a failure that an earlier upload kept.
    pub(super) fn kept(&self) -> Result<()> {
        self.failure.borrow_mut().take().map_or(Ok(()), Err)
    }

    /// An index that a kernel found to be out of range by now.
    pub(super) fn fault(&self) -> Result<()> {
        self.fault.take()
    }

    /// Where kernels say that an index is out of range.
    pub(crate) fn fault_addr(&self) -> u64 {
        self.fault.addr()
    }

    /// Refuses what can't be part of a graph.
    pub(crate) fn not_recording(&self, what: &str) -> Result<()> {
        match self.recording.get() {
            Some(_) => Err(CudaError::Argument(format!(
                "{what} while a graph is being captured: it would not be replayed; do it before"
            ))),
            None => Ok(()),
        }
    }

    /// Waits for everything that was queued.
    ///
    /// # Errors
    /// A failure kept from an earlier upload; that of work on the device, an index out of range included; a capture
    /// under way.
    pub fn synchronize(&self) -> Result<()> {
        self.kept()?;
        self.not_recording("waiting for the stream")?;
        self.stream.synchronize().doing("waiting for the stream")?;
        self.fault.take()
    }

    /// The address of a range that is inside of memory on this device.
    pub(super) fn place(
        &self,
        what: &'static str,
        mem: &Arc<dyn DeviceMem>,
        offset: usize,
        len: usize,
    ) -> Result<u64> {
        if mem.device() != self.heap.device {
            return Err(self.foreign(what, mem.device()));
        }
        match offset.checked_add(len) {
            Some(end) if end <= mem.bytes() => Ok(mem.addr() + offset as u64),
            _ => Err(CudaError::Argument(format!(
                "{what}: {len} bytes from byte {offset} on, in memory of {} bytes",
                mem.bytes()
            ))),
        }
    }

    pub(super) fn foreign(&self, what: &'static str, found: Device) -> CudaError {
        headway_tensor::TensorError::WrongDevice { what, found, expected: self.heap.device }.into()
    }

    /// Keeps the first failure of calls that can't return one.
    fn keep(&self, outcome: Result<()>) {
        if let Err(e) = outcome {
            self.failure.borrow_mut().get_or_insert(e);
        }
    }

    fn try_upload(&self, to: &Arc<dyn DeviceMem>, offset: usize, from: &[u8]) -> Result<()> {
        self.not_recording("an upload")?;
        let addr = self.place("upload", to, offset, from.len())?;
        self.staging.borrow_mut().upload(addr, from)
    }

    fn try_zero(&self, to: &Arc<dyn DeviceMem>, offset: usize, bytes: usize) -> Result<()> {
        let addr = self.place("zero", to, offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        self.heap.context.bind_to_thread().doing("binding the context")?;
        // SAFETY: the range is inside an allocation of this device.
        unsafe { result::memset_d8_async(addr, 0, bytes, self.stream.cu_stream()) }.doing("zeroing memory")
    }
}

impl Exec for CudaExec {
    fn device(&self) -> Device {
        self.heap.device
    }

    fn alloc(&self, bytes: usize) -> headway_tensor::Result<Option<Arc<dyn DeviceMem>>> {
        self.check()?;
        self.not_recording("an allocation")?;
        Ok(Some(Arc::new(self.heap.allocate(bytes)?)))
    }

    fn upload(&self, to: &Arc<dyn DeviceMem>, offset: usize, from: &[u8]) {
        self.keep(self.try_upload(to, offset, from));
    }

    fn zero(&self, to: &Arc<dyn DeviceMem>, offset: usize, bytes: usize) {
        self.keep(self.try_zero(to, offset, bytes));
    }

    fn capturing(&self) -> bool {
        self.recording.get().is_some()
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        Some(self)
    }
}

impl std::fmt::Debug for CudaExec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaExec({}, {})", self.heap.device, self.info.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_is_told_so() {
        match CudaExec::open(CudaOptions::default()) {
            Err(e @ CudaError::NoDriver) => {
                let e = e.to_string();
                assert!(e.starts_with("no NVIDIA driver") && e.contains("--device cpu"), "{e}");
            }
            // With a driver the tests of `tests/gpu.rs` say more.
            Err(e) => assert!(!e.to_string().is_empty()),
            Ok(cx) => assert_eq!(cx.device().to_string(), "cuda:0"),
        }
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        assert!(CudaExec::open(CudaOptions { ordinal: 4000, ..CudaOptions::default() }).is_err());
    }
}
