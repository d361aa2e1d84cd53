//! A compiled function on the device.

use crate::{
    CudaExec,
    compile::{Compiler, Defines, KernelSpec},
    device::{CudaError, Doing, Result},
};
use cudarc::{
    driver::{CudaFunction, CudaModule, result, sys::CUfunction_attribute_enum as Attribute},
    nvrtc::Ptx,
};
use std::{
    cell::RefCell,
    collections::HashMap,
    ffi::c_void,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

/// Bytes of shared memory that a block has without asking.
const SHARED_UNASKED: u32 = 48 << 10;
/// The most parameters of a launch by words.
pub(crate) const MOST_WORDS: usize = 32;

/// What is loaded already, and the compiler for the rest.
pub struct Loaded {
    compiler: Compiler,
    modules: RefCell<HashMap<(&'static str, Defines), Arc<CudaModule>>>,
    kernels: RefCell<HashMap<KernelSpec, Arc<Kernel>>>,
    /// What was compiled elsewhere, by a hash of its code and launch.
    compiled: RefCell<HashMap<String, Arc<Kernel>>>,
}

impl Loaded {
    pub(crate) fn new(compiler: Compiler) -> Self {
        Self {
            compiler,
            modules: RefCell::default(),
            kernels: RefCell::default(),
            compiled: RefCell::default(),
        }
    }
}

/// A kernel that can be launched.
#[derive(Debug)]
pub struct Kernel {
    function: CudaFunction,
    spec: KernelSpec,
    /// Bytes of shared memory that it may ask for so far.
    shared: AtomicU32,
}

impl CudaExec {
    /// The kernel: compiled where no folder has it, loaded once.
    ///
    /// # Errors
    /// The compiler's words; no such function; the driver's.
    pub fn kernel(&self, spec: &KernelSpec) -> Result<Arc<Kernel>> {
        if let Some(kernel) = self.kernels.kernels.borrow().get(spec) {
            return Ok(Arc::clone(kernel));
        }
        let module = self.module(spec)?;
        let function = module
            .load_function(spec.entry)
            .map_err(|e| CudaError::driver(format!("finding {} in {}", spec.entry, spec.file), e))?;
        let kernel =
            Arc::new(Kernel { function, spec: spec.clone(), shared: AtomicU32::new(SHARED_UNASKED) });
        self.kernels.kernels.borrow_mut().insert(spec.clone(), Arc::clone(&kernel));
        Ok(kernel)
    }

    /// A kernel out of machine code that was compiled elsewhere, loaded once for every layer: `code` is called where none was
    /// loaded by this hash. `spec` names it in errors.
    ///
    /// # Errors
    /// What `code` says; code for other devices; no such function; the driver's.
    pub(crate) fn compiled<E: From<CudaError>>(
        &self,
        hash: &str,
        spec: KernelSpec,
        code: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Arc<Kernel>, E> {
        if let Some(kernel) = self.kernels.compiled.borrow().get(hash) {
            return Ok(Arc::clone(kernel));
        }
        let code = code()?;
        let bytes = code.len();
        let module = self
            .context()
            .load_module(Ptx::from_binary(code))
            .map_err(|e| self.refused(format!("loading {}", spec.file), bytes, e))?;
        let function = module
            .load_function(spec.entry)
            .map_err(|e| CudaError::driver(format!("finding {} in {}", spec.entry, spec.file), e))?;
        let kernel = Arc::new(Kernel { function, spec, shared: AtomicU32::new(SHARED_UNASKED) });
        self.kernels.compiled.borrow_mut().insert(hash.to_owned(), Arc::clone(&kernel));
        Ok(kernel)
    }

    fn module(&self, spec: &KernelSpec) -> Result<Arc<CudaModule>> {
        let key = (spec.file, spec.defines.clone());
        if let Some(module) = self.kernels.modules.borrow().get(&key) {
            return Ok(Arc::clone(module));
        }
        let code = self.kernels.compiler.cubin(spec.file, &spec.defines)?;
        let bytes = code.len();
        let module = self
            .context()
            .load_module(Ptx::from_binary(code))
            .map_err(|e| self.refused(format!("loading {}", spec.file), bytes, e))?;
        self.kernels.modules.borrow_mut().insert(key, Arc::clone(&module));
        Ok(module)
    }
}

impl Kernel {
    /// What it was made of.
    pub fn spec(&self) -> &KernelSpec {
        &self.spec
    }

    /// Allows blocks with so much dynamic shared memory.
    fn allow(&self, cx: &CudaExec, shared_bytes: u32) -> Result<()> {
        if shared_bytes <= self.shared.load(Relaxed) {
            return Ok(());
        }
        let most = cx.info().shared_per_block;
        if shared_bytes > most {
            return Err(CudaError::Argument(format!(
                "{}: {shared_bytes} bytes of shared memory a block; {} has {most}",
                self.spec.entry,
                cx.info().name
            )));
        }
        self.function
            .set_attribute(
                Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                shared_bytes.cast_signed(),
            )
            .map_err(|e| CudaError::driver(format!("shared memory for {}", self.spec.entry), e))?;
        self.shared.store(shared_bytes, Relaxed);
        Ok(())
    }

    /// Queues a launch of `grid` blocks of `block` threads. An empty grid is no work.
    ///
    /// # Errors
    /// More shared memory than the device has; the driver's; a failure kept from an earlier upload.
    ///
    /// # Safety
    /// `P` is the layout of the kernel's one parameter, and every address in it is of device memory that holds what
    /// the kernel reads and writes there, until the stream has come so far.
    pub unsafe fn launch<P: bytemuck::Pod>(
        &self,
        cx: &CudaExec,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        params: &P,
    ) -> Result<()> {
        let mut params = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's promise.
        unsafe { self.queue(cx, grid, block, shared_bytes, &mut params) }
    }

    /// [`Kernel::launch`] of a kernel with several parameters of up to 8 bytes: each lies in the first bytes of its word.
    ///
    /// # Errors
    /// More words than [`MOST_WORDS`]; as [`Kernel::launch`].
    ///
    /// # Safety
    /// As [`Kernel::launch`]; there are as many words as the kernel has parameters.
    pub(crate) unsafe fn launch_words(
        &self,
        cx: &CudaExec,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        words: &[u64],
    ) -> Result<()> {
        let mut params = [std::ptr::null_mut(); MOST_WORDS];
        let Some(params) = params.get_mut(..words.len()) else {
            return Err(CudaError::Argument(format!(
                "{}: {} parameters: {MOST_WORDS} are the most",
                self.spec.entry,
                words.len()
            )));
        };
        params.iter_mut().zip(words).for_each(|(p, w)| *p = std::ptr::from_ref(w).cast_mut().cast());
        // SAFETY: the caller's promise.
        unsafe { self.queue(cx, grid, block, shared_bytes, params) }
    }

    /// # Safety
    /// As [`Kernel::launch`]; `params` are addresses of the kernel's parameters.
    unsafe fn queue(
        &self,
        cx: &CudaExec,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        params: &mut [*mut c_void],
    ) -> Result<()> {
        cx.check()?;
        if grid.contains(&0) {
            return Ok(());
        }
        cx.context().bind_to_thread().doing("binding the context")?;
        self.allow(cx, shared_bytes)?;
        // SAFETY: the caller's promise; the driver copies the parameters before it returns.
        unsafe {
            result::launch_kernel(
                self.function.cu_function(),
                grid.into(),
                (block, 1, 1),
                shared_bytes,
                cx.stream().cu_stream(),
                params,
            )
        }
        .map_err(|e| {
            CudaError::driver(format!("launching {} on {grid:?} blocks of {block}", self.spec.entry), e)
        })
    }

    /// Blocks of so many threads that a multiprocessor holds at once.
    ///
    /// # Errors
    /// As [`Kernel::launch`].
    pub fn occupancy(&self, cx: &CudaExec, block: u32, shared_bytes: u32) -> Result<u32> {
        cx.context().bind_to_thread().doing("binding the context")?;
        self.allow(cx, shared_bytes)?;
        self.function
            .occupancy_max_active_blocks_per_multiprocessor(block, shared_bytes as usize, None)
            .map_err(|e| CudaError::driver(format!("occupancy of {}", self.spec.entry), e))
    }
}
