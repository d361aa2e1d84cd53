//! An open extension module, and a call of one of its kernels.

use super::{
    ExtensionEntry, ExtensionError, Returns,
    catch::{Catch, Kernel},
    check::check,
    stub,
    torch::{Torch, torch},
};
use crate::modules::{
    ModuleFolder,
    library::{Library, Linking},
};
use headway_ffi_shim::torch::{Call, OK, Status, Tensor, Value};
use std::{
    collections::HashMap,
    ffi::c_void,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

/// Most values of a kernel's stack.
const MOST: usize = 40;

/// A module whose kernels can be called.
#[derive(Debug)]
pub struct Extension {
    path: PathBuf,
    torch: &'static Torch,
    catch: Catch,
    kernels: Vec<(&'static str, Kernel, usize, Returns)>,
}

/// Where a call runs, and the device's memory for what the kernel allocates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The device's number.
    pub device: u32,
    /// The stream.
    pub stream: *mut c_void,
    /// Where the first tensor that the kernel makes goes: address and bytes; `None`: into the scratch memory.
    pub first: Option<(u64, u64)>,
    /// Where the others go: address and bytes.
    pub scratch: (u64, u64),
}

/// Zeros device memory on a stream: for kernels that ask for it.
unsafe extern "C" fn zero(stream: *mut c_void, addr: u64, bytes: u64) -> Status {
    // SAFETY: the kernel's own tensor, which lies in the memory of its call.
    let outcome = unsafe { cudarc::driver::result::memset_d8_async(addr, 0, bytes as usize, stream.cast()) };
    if outcome.is_ok() { OK } else { headway_ffi_shim::torch::FAILED }
}

impl Extension {
    /// Opens a folder's module, once a process.
    ///
    /// # Errors
    /// As [`check`]; PyTorch in the process; what the dynamic linker says; functions that are missing or others.
    pub fn open(folder: &ModuleFolder, entry: &ExtensionEntry) -> Result<Arc<Self>, ExtensionError> {
        static OPEN: Mutex<Option<HashMap<PathBuf, Arc<Extension>>>> = Mutex::new(None);
        let path = folder.path().join(&entry.file);
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.get_or_insert_default();
        if let Some(module) = open.get(&path) {
            return Ok(Arc::clone(module));
        }
        check(folder, entry)?;
        static STUBS: OnceLock<Result<(), ExtensionError>> = OnceLock::new();
        STUBS.get_or_init(stub::load).clone()?;
        let module = Arc::new(Self::load(&path, entry)?);
        open.insert(path, Arc::clone(&module));
        Ok(module)
    }

    fn load(path: &std::path::Path, entry: &ExtensionEntry) -> Result<Self, ExtensionError> {
        let (torch, pin) = (torch()?, entry.extension.pin());
        let failed = |why: String| ExtensionError::Open {
            path: path.to_owned(),
            remedy: match () {
                () if why.contains("libcudart") => {
                    "install it (pip install 'nvidia-cuda-runtime==13.0.*' will do) and put its folder into LD_LIBRARY_PATH"
                }
                () if why.contains("libcuda.so") => "install the NVIDIA driver (release 580 or later)",
                () => "the library that it names is missing or too old on this machine",
            },
            why,
        };
        // One symbol is Python's, and never called.
        let library = Library::open(path, Linking { lazy: true, ..Linking::LOCAL }).map_err(failed)?;
        let catch = Catch::of(&library).ok_or_else(|| failed("it brings no libstdc++".into()))?;
        let mut kernels = vec![];
        for &(function, expected, returns) in pin.functions {
            let wrong =
                |found: String| ExtensionError::Function { path: path.to_owned(), function, found, expected };
            let kernel = torch.kernel(pin.namespace, function);
            let schema = torch.schema(pin.namespace, function).filter(|_| !kernel.is_null());
            let schema = schema.ok_or_else(|| wrong("was not registered".into()))?;
            let found = parameters(&schema);
            if found != expected {
                return Err(wrong(format!("takes {found} arguments")));
            }
            // SAFETY: what modules register has this type.
            let kernel = unsafe { std::mem::transmute::<*mut c_void, Kernel>(kernel) };
            kernels.push((function, kernel, expected, returns));
        }
        Ok(Self { path: path.to_owned(), torch, catch, kernels })
    }

    /// The file.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Calls a kernel. Its results are tensors: what they describe, in the kernel's memory or the call's.
    ///
    /// # Errors
    /// What the kernel threw, with the shim's words.
    ///
    /// # Safety
    /// The arguments are those of the kernel's schema; tensors lie where they say for as long as the device works on
    /// them, and so does the memory of the call; the device's context is bound to this thread.
    pub(crate) unsafe fn call(
        &self,
        function: &'static str,
        place: &Place,
        arguments: Arguments<'_>,
    ) -> Result<Vec<Tensor>, ExtensionError> {
        let failed = |why: String| ExtensionError::Failed { path: self.path.clone(), function, why };
        let Some(&(_, kernel, inputs, returns)) = self.kernels.iter().find(|k| k.0 == function) else {
            return Err(failed("headway does not call such a function".into()));
        };
        if arguments.len != inputs || arguments.broken {
            return Err(failed(format!(
                "{} arguments, of {inputs}, or a tensor that is none",
                arguments.len
            )));
        }
        let (addr, bytes) = place.first.unwrap_or((0, 0));
        let mut call = Call {
            device: place.device as i32,
            stream: place.stream,
            first: addr,
            first_bytes: bytes,
            scratch: place.scratch.0,
            scratch_bytes: place.scratch.1,
            used: 0,
            zero,
        };
        let mut stack = arguments.stack;
        // From here on the values are the kernel's.
        std::mem::forget(arguments);
        // SAFETY: the caller's word; the stack has room for more results than any kernel has.
        let (outcome, words) = self.torch.during(&mut call, || unsafe {
            self.catch.call(kernel, &mut stack, inputs as u64, returns.values())
        });
        outcome.map_err(|why| match words {
            Some(words) => failed(format!("{words} ({why})")),
            None => failed(why),
        })?;
        // SAFETY: the kernel's results, which nobody else has.
        Ok(unsafe { self.results(returns, &stack) })
    }

    /// The tensors that a kernel left on its stack, whose handles are freed.
    ///
    /// # Safety
    /// The kernel's results, which nobody else has.
    unsafe fn results(&self, returns: Returns, stack: &[Value; MOST]) -> Vec<Tensor> {
        // SAFETY: the caller's word.
        unsafe {
            match returns {
                Returns::Tensor => self.torch.tensor(stack[0] as *mut _).into_iter().collect(),
                Returns::List => self.torch.tensors(stack[0] as *mut _),
                Returns::TwoAndTwo => {
                    let optional = |cell: Value| {
                        let cell = cell as *mut Value;
                        let handle = cell.as_ref().map_or(0, |h| *h);
                        libc::free(cell.cast());
                        handle
                    };
                    let handles = [stack[0], stack[1], optional(stack[2]), optional(stack[3])];
                    handles.into_iter().filter_map(|h| self.torch.tensor(h as *mut _)).collect()
                }
            }
        }
    }
}

/// Parameters of a schema.
fn parameters(schema: &str) -> usize {
    let inside = schema.split_once('(').map_or("", |s| s.1);
    let inside = inside.split_once(") ->").map_or(inside, |s| s.0);
    match inside.trim() {
        "" => 0,
        // `Tensor(a!)?` has no comma of its own.
        list => list.matches(',').count() + 1,
    }
}

/// A kernel's arguments, in its schema's order.
pub(crate) struct Arguments<'a> {
    torch: &'a Torch,
    stack: [Value; MOST],
    len: usize,
    /// Handles and cells to free where no kernel takes them.
    owned: Vec<(usize, Owned)>,
    broken: bool,
}

#[derive(Clone, Copy)]
enum Owned {
    Tensor,
    Cell,
    CellOfTensor,
}

impl Extension {
    /// Arguments for a call of this module.
    pub(crate) fn arguments(&self) -> Arguments<'_> {
        Arguments { torch: self.torch, stack: [0; MOST], len: 0, owned: vec![], broken: false }
    }
}

impl Arguments<'_> {
    fn push(&mut self, value: Value, owned: Option<Owned>) {
        match self.stack.get_mut(self.len) {
            Some(to) => {
                *to = value;
                self.owned.extend(owned.map(|o| (self.len, o)));
                self.len += 1;
            }
            None => self.broken = true,
        }
    }

    fn handle(&mut self, tensor: &Tensor) -> Value {
        let handle = self.torch.handle(tensor);
        self.broken |= handle.is_none();
        handle.map_or(0, |h| h as Value)
    }

    /// A cell of the C library's memory, which the kernel frees: C++'s `delete` is its `free`.
    fn cell(&mut self, value: Value) -> Value {
        // SAFETY: eight bytes, written before anybody reads them.
        unsafe {
            let cell = libc::malloc(size_of::<Value>()).cast::<Value>();
            match cell.as_mut() {
                Some(to) => *to = value,
                None => self.broken = true,
            }
            cell as Value
        }
    }

    /// A tensor.
    pub fn tensor(&mut self, tensor: &Tensor) -> &mut Self {
        let value = self.handle(tensor);
        self.push(value, Some(Owned::Tensor));
        self
    }

    /// An optional tensor.
    pub fn tensor_or(&mut self, tensor: Option<&Tensor>) -> &mut Self {
        let Some(tensor) = tensor else { return self.none(1) };
        let handle = self.handle(tensor);
        let cell = self.cell(handle);
        self.push(cell, Some(Owned::CellOfTensor));
        self
    }

    /// A whole number, or a yes or no.
    pub fn int(&mut self, x: impl Into<i64>) -> &mut Self {
        self.push(x.into() as Value, None);
        self
    }

    /// An optional whole number that is there.
    pub fn some_int(&mut self, x: i64) -> &mut Self {
        let cell = self.cell(x as Value);
        self.push(cell, Some(Owned::Cell));
        self
    }

    /// A number.
    pub fn float(&mut self, x: f32) -> &mut Self {
        self.push(f64::from(x).to_bits(), None);
        self
    }

    /// So many optional values that are not there.
    pub fn none(&mut self, count: usize) -> &mut Self {
        (0..count).for_each(|_| self.push(0, None));
        self
    }
}

impl Drop for Arguments<'_> {
    fn drop(&mut self) {
        for &(i, owned) in &self.owned {
            let value = self.stack[i];
            // SAFETY: handles and cells of this list, which no kernel took.
            unsafe {
                match owned {
                    Owned::Tensor => self.torch.end(value as *mut Tensor),
                    Owned::Cell => libc::free(value as *mut c_void),
                    Owned::CellOfTensor => {
                        if let Some(handle) = (value as *const Value).as_ref() {
                            self.torch.end(*handle as *mut Tensor);
                        }
                        libc::free(value as *mut c_void);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_ffi_shim::torch::dtype;

    #[test]
    fn parameters_of_schemas_are_counted() {
        assert_eq!(parameters("f() -> Tensor"), 0);
        assert_eq!(parameters("fwd(Tensor!  q,  Tensor k, Tensor(a!)? out) -> (Tensor(c!), Tensor)"), 3);
    }

    #[test]
    fn arguments_that_no_kernel_takes_are_freed() {
        let torch = torch().unwrap();
        let before = torch.alive();
        let x = Tensor::contiguous(64, dtype::F32, 0, &[4]).unwrap();
        let mut a = Arguments { torch, stack: [0; MOST], len: 0, owned: vec![], broken: false };
        a.tensor(&x).tensor_or(Some(&x)).tensor_or(None).some_int(-3).int(true).float(0.5).none(2);
        assert_eq!((a.len, torch.alive(), a.broken), (8, before + 2, false));
        assert_eq!((a.stack[4], a.stack[5], a.stack[6]), (1, 0.5f64.to_bits(), 0));
        a.tensor(&Tensor { dtype: 12, ..x });
        assert!(a.broken);
        drop(a);
        assert_eq!(torch.alive(), before);
    }
}
