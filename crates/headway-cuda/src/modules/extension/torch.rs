//! The shim's functions for those who call extension modules.

use super::ExtensionError;
use crate::modules::shim;
use headway_ffi_shim::torch::{Call, List, Status, Tensor, Value};
use std::{
    ffi::{CStr, CString, c_char, c_void},
    ptr::null_mut,
    sync::OnceLock,
};

type Enter = unsafe extern "C" fn(*mut Call) -> *mut Call;
type Words = unsafe extern "C" fn(*mut u8, usize) -> usize;
type NewTensor = unsafe extern "C" fn(*const Tensor) -> *mut Tensor;
type EndTensor = unsafe extern "C" fn(*mut Tensor) -> Status;
type Values = unsafe extern "C" fn(*const List, *mut Value, usize) -> usize;
type EndList = unsafe extern "C" fn(*mut List) -> Status;
type Find = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut c_void;
type Alive = unsafe extern "C" fn() -> usize;

/// What callers of extension modules need of the shim.
#[derive(Debug)]
pub(super) struct Torch {
    enter: Enter,
    words: Words,
    new_tensor: NewTensor,
    end_tensor: EndTensor,
    values: Values,
    end_list: EndList,
    kernel: Find,
    schema: Find,
    alive: Alive,
}

/// The shim's functions.
///
/// # Errors
/// No shim; a library in its place that has TVM-FFI's functions alone.
pub(super) fn torch() -> Result<&'static Torch, ExtensionError> {
    static TORCH: OnceLock<Torch> = OnceLock::new();
    if let Some(torch) = TORCH.get() {
        return Ok(torch);
    }
    let shim = shim().map_err(|e| ExtensionError::Folder(e.to_string()))?;
    let find = |name: &str| {
        let none = || {
            ExtensionError::Folder(format!(
                "the shim that is loaded has no function {name}: give the path of {} of this headway",
                headway_ffi_shim::FILE
            ))
        };
        shim.symbol(name).ok_or_else(none)
    };
    // SAFETY: the symbols are the shim's, whose signatures these are.
    let found = unsafe {
        use std::mem::transmute as function;
        Torch {
            enter: function::<*mut c_void, Enter>(find("headway_torch_enter")?),
            words: function::<*mut c_void, Words>(find("headway_torch_error")?),
            new_tensor: function::<*mut c_void, NewTensor>(find("headway_torch_tensor")?),
            end_tensor: function::<*mut c_void, EndTensor>(find("aoti_torch_delete_tensor_object")?),
            values: function::<*mut c_void, Values>(find("headway_torch_list_values")?),
            end_list: function::<*mut c_void, EndList>(find("torch_delete_list")?),
            kernel: function::<*mut c_void, Find>(find("headway_torch_kernel")?),
            schema: function::<*mut c_void, Find>(find("headway_torch_schema")?),
            alive: function::<*mut c_void, Alive>(find("headway_torch_alive")?),
        }
    };
    Ok(TORCH.get_or_init(|| found))
}

impl Torch {
    /// Whether the shim has a function.
    pub fn has(&self, name: &str) -> bool {
        shim().is_ok_and(|s| s.symbol(name).is_some())
    }

    /// Sets this thread's call while `f` runs. The words of the last failure, where one was kept.
    pub fn during<R>(&self, call: &mut Call, f: impl FnOnce() -> R) -> (R, Option<String>) {
        // SAFETY: the call stays where it is until another is set; the shim alone writes to it meanwhile.
        unsafe {
            let before = (self.enter)(call);
            let result = f();
            let mut bytes = [0; 512];
            let len = (self.words)(bytes.as_mut_ptr(), bytes.len()).min(bytes.len());
            (self.enter)(before);
            (result, (len > 0).then(|| String::from_utf8_lossy(&bytes[..len]).into_owned()))
        }
    }

    /// A handle of a tensor; `None` for one that can't be.
    pub fn handle(&self, tensor: &Tensor) -> Option<*mut Tensor> {
        // SAFETY: alive during the call.
        let handle = unsafe { (self.new_tensor)(tensor) };
        (!handle.is_null()).then_some(handle)
    }

    /// Frees a handle.
    ///
    /// # Safety
    /// Null, or a handle that is used no more.
    pub unsafe fn end(&self, handle: *mut Tensor) {
        // SAFETY: the caller's word.
        unsafe { (self.end_tensor)(handle) };
    }

    /// The tensor of a handle, which is freed.
    ///
    /// # Safety
    /// Null, or a handle that is used no more.
    pub unsafe fn tensor(&self, handle: *mut Tensor) -> Option<Tensor> {
        // SAFETY: the caller's word.
        unsafe {
            let tensor = handle.as_ref().copied();
            self.end(handle);
            tensor
        }
    }

    /// The tensors of a list of up to eight, which is freed with them.
    ///
    /// # Safety
    /// Null, or a list of handles, none of which is used any more.
    pub unsafe fn tensors(&self, list: *mut List) -> Vec<Tensor> {
        let mut values = [0; 8];
        // SAFETY: the caller's word.
        unsafe {
            let n = (self.values)(list, values.as_mut_ptr(), values.len()).min(values.len());
            (self.end_list)(list);
            values[..n].iter().filter_map(|&v| self.tensor(v as *mut Tensor)).collect()
        }
    }

    fn find(&self, find: Find, namespace: &str, name: &str) -> *mut c_void {
        match (CString::new(namespace), CString::new(name)) {
            // SAFETY: texts.
            (Ok(namespace), Ok(name)) => unsafe { find(namespace.as_ptr(), name.as_ptr()) },
            _ => null_mut(),
        }
    }

    /// The kernel that was registered by this name; null where none was.
    pub fn kernel(&self, namespace: &str, name: &str) -> *mut c_void {
        self.find(self.kernel, namespace, name)
    }

    /// The schema that was registered by this name.
    pub fn schema(&self, namespace: &str, name: &str) -> Option<String> {
        let schema = self.find(self.schema, namespace, name);
        // SAFETY: null, or a text that stays.
        (!schema.is_null()).then(|| unsafe { CStr::from_ptr(schema.cast()) }.to_string_lossy().into_owned())
    }

    /// Handles that are alive.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests count"))]
    pub fn alive(&self) -> usize {
        // SAFETY: it only counts.
        unsafe { (self.alive)() }
    }
}
