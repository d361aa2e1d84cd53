//! Operations by name. Arguments are on the stack and belong to the operation; its result takes the first one's place.

use super::{
    abi::{OK, Status, Value},
    call::{allocate, fail, give, take, zero},
    lists::List,
    tensor::Tensor,
};
use std::ffi::{CStr, c_char, c_void};

unsafe extern "C" {
    /// The C library's: modules allocate optional values with `new`, which is `malloc`.
    fn free(x: *mut c_void);
}

/// An operation's arguments.
struct Arguments<'a> {
    stack: &'a mut [Value],
}

impl Arguments<'_> {
    /// The first, a tensor.
    ///
    /// # Safety
    /// It is null or a tensor's handle, and was not taken.
    unsafe fn tensor(&mut self) -> Result<Tensor, String> {
        // SAFETY: the caller's word.
        let found = unsafe { take(std::mem::take(&mut self.stack[0]) as *mut Tensor) };
        found.ok_or_else(|| "a tensor's handle that is null".into())
    }

    /// A list of numbers.
    ///
    /// # Safety
    /// It is null or a list's handle, and was not taken.
    unsafe fn numbers(&mut self, i: usize) -> Result<Vec<i64>, String> {
        // SAFETY: the caller's word.
        let found = unsafe { take(std::mem::take(&mut self.stack[i]) as *mut List) };
        let list = found.ok_or("a list's handle that is null")?;
        Ok(list.0.into_iter().map(|x| x as i64).collect())
    }

    /// An optional number.
    ///
    /// # Safety
    /// It is null or a cell, and was not taken.
    unsafe fn optional(&mut self, i: usize) -> Option<Value> {
        let cell = std::mem::take(&mut self.stack[i]) as *mut Value;
        if cell.is_null() {
            return None;
        }
        // SAFETY: the caller's word; the cell is freed once.
        unsafe {
            let value = *cell;
            free(cell.cast());
            Some(value)
        }
    }

    fn number(&self, i: usize) -> i64 {
        self.stack[i] as i64
    }
}

/// What an operation does.
///
/// # Safety
/// The arguments are those of its schema.
type Operation = unsafe fn(&mut Arguments<'_>) -> Result<Tensor, String>;

/// The operations: name, overload, arguments.
const OPERATIONS: [(&str, &str, usize, Operation); 7] = [
    ("aten::new_empty", "", 6, new_empty),
    ("aten::empty_like", "", 6, empty_like),
    ("aten::zero_", "", 1, zero_),
    ("aten::transpose", "int", 3, transpose),
    ("aten::view", "", 2, view),
    ("aten::reshape", "", 2, view),
    ("aten::squeeze", "dim", 2, squeeze),
];

/// Calls an operation. One that is not offered keeps its arguments, which nobody frees.
///
/// # Safety
/// Names are null or texts; the stack has the arguments of the operation's schema.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_call_dispatcher(
    name: *const c_char,
    overload: *const c_char,
    stack: *mut Value,
    _: u64,
) -> Status {
    if name.is_null() || overload.is_null() || stack.is_null() {
        return fail("an operation without a name or arguments");
    }
    // SAFETY: the caller's word.
    let [name, overload] = [name, overload].map(|x| unsafe { CStr::from_ptr(x) }.to_string_lossy());
    let Some(&(_, _, count, operation)) = OPERATIONS.iter().find(|o| o.0 == name && o.1 == overload) else {
        return fail(
            format!("the operation {name} {overload}: headway does not offer it").replace(" :", ":"),
        );
    };
    // SAFETY: the caller's word: so many values are there.
    let mut arguments = Arguments { stack: unsafe { std::slice::from_raw_parts_mut(stack, count) } };
    // SAFETY: the caller's word.
    match unsafe { operation(&mut arguments) } {
        Ok(tensor) => {
            arguments.stack[0] = give(tensor) as Value;
            OK
        }
        Err(words) => fail(format!("{name}: {words}")),
    }
}

/// Self, sizes; dtype, layout, device and pinned memory optional.
unsafe fn new_empty(a: &mut Arguments<'_>) -> Result<Tensor, String> {
    // SAFETY: the caller's word; what is optional is taken in any case.
    let (like, sizes, kind, _) =
        unsafe { (a.tensor(), a.numbers(1), a.optional(2), [3, 4, 5].map(|i| a.optional(i))) };
    let (like, sizes) = (like?, sizes?);
    allocate(kind.map_or(like.dtype, |k| k as i32), &sizes)
}

/// Self; dtype, layout, device, pinned memory and memory format optional. Without gaps, whatever gaps there were.
unsafe fn empty_like(a: &mut Arguments<'_>) -> Result<Tensor, String> {
    // SAFETY: the caller's word.
    let (like, kind, _) = unsafe { (a.tensor(), a.optional(1), [2, 3, 4, 5].map(|i| a.optional(i))) };
    let like = like?;
    allocate(kind.map_or(like.dtype, |k| k as i32), like.sizes())
}

unsafe fn zero_(a: &mut Arguments<'_>) -> Result<Tensor, String> {
    // SAFETY: the caller's word.
    let x = unsafe { a.tensor() }?;
    zero(&x).map(|()| x)
}

unsafe fn transpose(a: &mut Arguments<'_>) -> Result<Tensor, String> {
    let (one, other) = (a.number(1), a.number(2));
    // SAFETY: the caller's word.
    let x = unsafe { a.tensor() }?;
    x.transpose(one, other).ok_or_else(|| format!("dimensions {one} and {other} of {:?}", x.sizes()))
}

unsafe fn view(a: &mut Arguments<'_>) -> Result<Tensor, String> {
    // SAFETY: the caller's word.
    let (x, sizes) = unsafe { (a.tensor(), a.numbers(1)) };
    let (x, sizes) = (x?, sizes?);
    let wrong =
        || format!("sizes {sizes:?} of a tensor with sizes {:?} and strides {:?}", x.sizes(), x.strides());
    x.view(&sizes).ok_or_else(wrong)
}

unsafe fn squeeze(a: &mut Arguments<'_>) -> Result<Tensor, String> {
    let d = a.number(1);
    // SAFETY: the caller's word.
    let x = unsafe { a.tensor() }?;
    x.squeeze(d).ok_or_else(|| format!("dimension {d} of {:?}", x.sizes()))
}
