//! The functions of torch's stable ABI as an extension module calls them: handles, cells and stacks of this test's own.

#![expect(unsafe_code, reason = "the functions are C's")]

use headway_ffi_shim::torch::*;
use std::{
    ffi::{CStr, c_void},
    ptr::{null, null_mut},
    sync::{Mutex, MutexGuard},
};

unsafe extern "C" {
    fn malloc(bytes: usize) -> *mut c_void;
}

/// Handles are counted for the whole process: tests that count take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|e| e.into_inner())
}

/// A handle of a tensor at an address, and its end.
#[derive(Debug)]
struct Handle(*mut Tensor);

impl Handle {
    fn new(t: &Tensor) -> Self {
        // SAFETY: alive.
        let handle = unsafe { headway_torch_tensor(t) };
        assert!(!handle.is_null());
        Self(handle)
    }

    fn of(dtype: i32, sizes: &[i64]) -> Self {
        Self::new(&Tensor::contiguous(0x1000, dtype, 3, sizes).unwrap())
    }

    fn get(&self) -> Tensor {
        // SAFETY: alive.
        unsafe { *self.0 }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: alive, and gone after this.
        assert_eq!(unsafe { aoti_torch_delete_tensor_object(self.0) }, OK);
    }
}

/// The words of the last failure.
fn words() -> String {
    let mut bytes = [0; 512];
    // SAFETY: so much room.
    let n = unsafe { headway_torch_error(bytes.as_mut_ptr(), bytes.len()) };
    String::from_utf8_lossy(&bytes[..n.min(512)]).into_owned()
}

/// What `zero` was called with.
static ZEROED: Mutex<Vec<(usize, u64, u64)>> = Mutex::new(vec![]);

unsafe extern "C" fn zero(stream: *mut c_void, addr: u64, bytes: u64) -> Status {
    ZEROED.lock().unwrap().push((stream as usize, addr, bytes));
    if bytes > 1000 { FAILED } else { OK }
}

fn call() -> Call {
    Call {
        device: 3,
        stream: 0x77 as *mut c_void,
        first: 0,
        first_bytes: 0,
        scratch: 0x10_0000,
        scratch_bytes: 4096,
        used: 0,
        zero,
    }
}

/// Runs with this thread's call set.
fn during<R>(call: &mut Call, f: impl FnOnce() -> R) -> R {
    // SAFETY: the call outlives its being set.
    unsafe {
        assert!(headway_torch_enter(call).is_null());
        let result = f();
        assert!(!headway_torch_enter(null_mut()).is_null());
        result
    }
}

/// A cell for an optional value, as modules make them.
fn cell(x: u64) -> Value {
    // SAFETY: eight bytes, written at once; the operation frees them.
    unsafe {
        let place = malloc(8).cast::<Value>();
        *place = x;
        place as Value
    }
}

fn list(values: &[i64]) -> *mut List {
    let mut list = null_mut();
    // SAFETY: a place on the stack, and the list that came out.
    unsafe {
        assert_eq!(torch_new_list_reserve_size(values.len(), &mut list), OK);
        values.iter().for_each(|&v| assert_eq!(torch_list_push_back(list, v as Value), OK));
    }
    list
}

/// Calls an operation; its tensor.
fn dispatch(name: &CStr, overload: &CStr, stack: &mut [Value]) -> Result<Handle, String> {
    // SAFETY: the tests give what the schemas say.
    match unsafe { torch_call_dispatcher(name.as_ptr(), overload.as_ptr(), stack.as_mut_ptr(), ABI_VERSION) }
    {
        OK => Ok(Handle(stack[0] as *mut Tensor)),
        _ => Err(words()),
    }
}

/// Another handle, for an operation to take.
fn given(x: &Handle) -> Value {
    let mut to = null_mut();
    // SAFETY: alive, and a place on the stack.
    assert_eq!(unsafe { aoti_torch_new_tensor_handle(x.0, &mut to) }, OK);
    to as Value
}

#[test]
fn numbers_are_pytorchs() {
    let dtypes = [
        aoti_torch_dtype_uint8(),
        aoti_torch_dtype_int8(),
        aoti_torch_dtype_int16(),
        aoti_torch_dtype_int32(),
        aoti_torch_dtype_int64(),
        aoti_torch_dtype_float16(),
        aoti_torch_dtype_float32(),
        aoti_torch_dtype_float64(),
        aoti_torch_dtype_complex32(),
        aoti_torch_dtype_complex64(),
        aoti_torch_dtype_complex128(),
        aoti_torch_dtype_bool(),
    ];
    assert_eq!(dtypes, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    let eight = [
        aoti_torch_dtype_float8_e5m2(),
        aoti_torch_dtype_float8_e4m3fn(),
        aoti_torch_dtype_float8_e5m2fnuz(),
        aoti_torch_dtype_float8_e4m3fnuz(),
        aoti_torch_dtype_uint16(),
        aoti_torch_dtype_uint32(),
        aoti_torch_dtype_uint64(),
    ];
    assert_eq!((aoti_torch_dtype_bfloat16(), eight), (15, [23, 24, 25, 26, 27, 28, 29]));
    assert_eq!([torch_dtype_float8_e8m0fnu(), torch_dtype_float4_e2m1fn_x2()], [44, 45]);
    let devices = [
        aoti_torch_device_type_cpu(),
        aoti_torch_device_type_cuda(),
        aoti_torch_device_type_xpu(),
        aoti_torch_device_type_mps(),
        aoti_torch_device_type_meta(),
        aoti_torch_device_type_privateuse1(),
    ];
    assert_eq!(devices, [0, 1, 12, 13, 14, 20]);
    let layouts = [
        aoti_torch_layout_strided(),
        aoti_torch_layout_sparse_coo(),
        aoti_torch_layout_sparse_csr(),
        aoti_torch_layout__mkldnn(),
        aoti_torch_layout_sparse_csc(),
        aoti_torch_layout_sparse_bsr(),
        aoti_torch_layout_sparse_bsc(),
        aoti_torch_layout_jagged(),
    ];
    assert_eq!(layouts, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(aoti_torch_abi_version(), 0x020e_0000_0000_0000);
    let sizes = [0, 2, 3, 4, 10, 15, 24, 29].map(dtype::size);
    assert_eq!(sizes, [1, 2, 4, 8, 16, 2, 1, 8].map(Some));
    assert_eq!(dtype::size(12), None);
}

#[test]
fn a_tensor_answers_what_it_is_asked() {
    let _turn = alone();
    let x = Handle::of(dtype::BF16, &[5, 1, 7]);
    let (mut p, mut m, mut c) = (null_mut(), null_mut(), null());
    let (mut n, mut size, mut stride) = (0, 0, 0);
    let (mut kind, mut on, mut index) = (0, 0, 0);
    let (mut whole, mut there, mut sizes) = (false, false, null_mut());
    // SAFETY: alive, and places on the stack.
    unsafe {
        assert_eq!(aoti_torch_get_data_ptr(x.0, &mut p), OK);
        assert_eq!(torch_get_mutable_data_ptr(x.0, &mut m), OK);
        assert_eq!(torch_get_const_data_ptr(x.0, &mut c), OK);
        assert_eq!((p as u64, m as u64, c as u64), (0x1000, 0x1000, 0x1000));
        assert_eq!(aoti_torch_get_dim(x.0, &mut n), OK);
        assert_eq!(aoti_torch_get_sizes(x.0, &mut sizes), OK);
        assert_eq!(std::slice::from_raw_parts(sizes, n as usize), [5, 1, 7]);
        for (d, wanted) in [(0, (5, 7)), (2, (7, 1)), (-1, (7, 1)), (-3, (5, 7))] {
            assert_eq!(aoti_torch_get_size(x.0, d, &mut size), OK);
            assert_eq!(aoti_torch_get_stride(x.0, d, &mut stride), OK);
            assert_eq!((size, stride), wanted, "dimension {d}");
        }
        for d in [3, -4, i64::MIN, i64::MAX] {
            assert_eq!(aoti_torch_get_size(x.0, d, &mut size), FAILED);
            assert_eq!(aoti_torch_get_stride(x.0, d, &mut stride), FAILED);
            assert!(words().contains("of a tensor that has 3"), "{}", words());
        }
        assert_eq!(aoti_torch_get_dtype(x.0, &mut kind), OK);
        assert_eq!(aoti_torch_get_device_type(x.0, &mut on), OK);
        assert_eq!(aoti_torch_get_device_index(x.0, &mut index), OK);
        assert_eq!((kind, on, index), (dtype::BF16, CUDA, 3));
        assert_eq!(aoti_torch_is_contiguous(x.0, &mut whole), OK);
        assert_eq!(aoti_torch_is_defined(x.0, &mut there), OK);
        assert!(whole && there);
        assert_eq!(aoti_torch_get_dim(null_mut(), &mut n), FAILED);
        assert!(words().contains("null"));
        assert_eq!(aoti_torch_get_dim(x.0, null_mut()), FAILED);
    }
}

#[test]
fn handles_are_freed_once_each() {
    let _turn = alone();
    let before = headway_torch_alive();
    let x = Handle::of(dtype::F16, &[2, 3]);
    let again = Handle(given(&x) as *mut Tensor);
    assert_eq!(again.get(), x.get());
    let mut none = null_mut();
    // SAFETY: places on the stack; null is allowed.
    unsafe {
        assert_eq!(aoti_torch_new_uninitialized_tensor(&mut none), OK);
        let mut there = true;
        assert_eq!(aoti_torch_is_defined(none, &mut there), OK);
        assert!(!there);
        let mut n = 9;
        assert_eq!(aoti_torch_get_dim(none, &mut n), OK);
        assert_eq!(n, 0);
        assert_eq!(headway_torch_alive(), before + 3);
        assert_eq!(aoti_torch_delete_tensor_object(none), OK);
        assert_eq!(aoti_torch_delete_tensor_object(null_mut()), OK);
        assert_eq!(aoti_torch_new_tensor_handle(null_mut(), &mut none), FAILED);
        assert_eq!(aoti_torch_new_tensor_handle(x.0, null_mut()), FAILED);
    }
    drop((x, again));
    // The handle that had no place for it is lost.
    assert_eq!(headway_torch_alive(), before + 1);
    let described = |t: Tensor| {
        // SAFETY: alive.
        unsafe { headway_torch_tensor(&t) }.is_null()
    };
    let t = Tensor::contiguous(0x1000, dtype::F16, 0, &[2]).unwrap();
    assert!(described(Tensor { rank: 9, ..t }) && described(Tensor { dtype: 12, ..t }));
    assert!(
        described(Tensor { device_type: 0, ..t }) && described(Tensor { sizes: [i64::MAX; 8], rank: 2, ..t })
    );
    // SAFETY: null is allowed.
    assert!(unsafe { headway_torch_tensor(null()) }.is_null());
    assert_eq!(Tensor::contiguous(0, dtype::F16, 0, &[1; 9]), None);
    assert_eq!(Tensor::contiguous(0, dtype::F16, 0, &[-1]), None);
}

#[test]
fn a_call_lends_its_stream_and_its_device() {
    let _turn = alone();
    let (mut stream, mut device, mut guard) = (null_mut(), 0, null_mut());
    // SAFETY: places on the stack.
    unsafe {
        assert_eq!(aoti_torch_get_current_cuda_stream(3, &mut stream), FAILED);
        assert!(words().contains("no call"), "{}", words());
        during(&mut call(), || {
            assert_eq!(aoti_torch_get_current_cuda_stream(3, &mut stream), OK);
            assert_eq!(stream as usize, 0x77);
            assert_eq!(aoti_torch_get_current_cuda_stream(-1, &mut stream), OK);
            assert_eq!(aoti_torch_get_current_cuda_stream(0, &mut stream), FAILED);
            assert_eq!(words(), "device 0, and the call runs on device 3");
            assert_eq!(aoti_torch_get_current_device_index(&mut device), OK);
            assert_eq!(device, 3);
            assert_eq!(aoti_torch_create_device_guard(3, &mut guard), OK);
            assert!(!guard.is_null());
            assert_eq!(aoti_torch_delete_device_guard(guard), OK);
            assert_eq!(aoti_torch_create_device_guard(1, &mut guard), FAILED);
            // Another thread has no call.
            let other = std::thread::spawn(|| {
                let mut stream = null_mut();
                aoti_torch_get_current_cuda_stream(3, &mut stream)
            });
            assert_eq!(other.join().unwrap(), FAILED);
        });
        assert_eq!(aoti_torch_get_current_device_index(&mut device), FAILED);
        assert_eq!(headway_torch_error(null_mut(), 0), words().len());
    }
}

#[test]
fn new_tensors_lie_in_the_calls_memory() {
    let _turn = alone();
    let before = headway_torch_alive();
    let x = Handle::of(dtype::BF16, &[4]);
    let empty = |sizes: &[i64], kind: Value| {
        let mut stack = [given(&x), list(sizes) as Value, kind, 0, 0, 0];
        dispatch(c"aten::new_empty", c"", &mut stack)
    };
    let mut c = call();
    (c.first, c.first_bytes) = (0x5000, 96);
    during(&mut c, || {
        let first = empty(&[3, 8], cell(dtype::F32 as u64)).unwrap().get();
        assert_eq!((first.data, first.dtype, first.device_index), (0x5000, dtype::F32, 3));
        assert_eq!((first.sizes(), first.strides()), (&[3, 8][..], &[8, 1][..]));
        let second = empty(&[5], 0).unwrap().get();
        assert_eq!((second.data, second.dtype), (0x10_0000, dtype::BF16));
        // Places begin at multiples of 256.
        assert_eq!(empty(&[1], cell(dtype::I32 as u64)).unwrap().get().data, 0x10_0100);
        assert_eq!(empty(&[0, 7], 0).unwrap().get().elements(), Some(0));
        let none = empty(&[4096], 0).unwrap_err();
        assert!(none.starts_with("aten::new_empty: 8192 bytes for a new tensor of sizes [4096]"), "{none}");
        assert!(empty(&[-1], 0).is_err() && empty(&[i64::MAX, 2], 0).is_err());
        assert!(empty(&[1], cell(12)).unwrap_err().contains("type 12"));
    });
    let mut c = call();
    (c.first, c.first_bytes) = (0x5000, 10);
    during(&mut c, || {
        assert!(empty(&[8], 0).unwrap_err().contains("16 bytes for the first new tensor, and 10"))
    });
    assert!(empty(&[1], 0).unwrap_err().contains("no call"));
    during(&mut call(), || {
        let gaps =
            Tensor { strides: [64, 1, 0, 0, 0, 0, 0, 0], ..Tensor::contiguous(64, 6, 3, &[2, 3]).unwrap() };
        let gaps = Handle::new(&gaps);
        let like =
            |kind| dispatch(c"aten::empty_like", c"", &mut [given(&gaps), kind, 0, 0, 0, 0]).unwrap().get();
        assert_eq!((like(0).strides(), like(0).dtype), (&[3, 1][..], 6));
        assert_eq!(like(cell(5)).dtype, 5);
    });
    drop(x);
    assert_eq!(headway_torch_alive(), before);
}

#[test]
fn views_are_the_same_elements() {
    let _turn = alone();
    let before = headway_torch_alive();
    let x = Handle::of(dtype::F32, &[2, 3, 4]);
    let sizes = |h: Handle| (h.get().sizes().to_vec(), h.get().strides().to_vec(), h.get().data);
    let flip = |x: &Handle, a: i64, b: i64| {
        dispatch(c"aten::transpose", c"int", &mut [given(x), a as u64, b as u64])
    };
    let swapped = flip(&x, 0, -1).unwrap();
    assert_eq!(sizes(flip(&x, 1, 1).unwrap()), (vec![2, 3, 4], vec![12, 4, 1], 0x1000));
    assert_eq!((swapped.get().sizes(), swapped.get().strides()), (&[4, 3, 2][..], &[1, 4, 12][..]));
    assert!(!swapped.get().is_contiguous());
    assert!(flip(&x, 0, 3).err().unwrap().contains("dimensions 0 and 3"));
    let seen = |x: &Handle, to: &[i64]| {
        let viewed = dispatch(c"aten::view", c"", &mut [given(x), list(to) as u64]);
        let shaped = dispatch(c"aten::reshape", c"", &mut [given(x), list(to) as u64]);
        assert_eq!(viewed.as_ref().map(Handle::get).ok(), shaped.map(|h| h.get()).ok());
        viewed.map(sizes)
    };
    assert_eq!(seen(&x, &[6, 4]).unwrap().1, [4, 1]);
    assert_eq!(seen(&x, &[-1]).unwrap(), (vec![24], vec![1], 0x1000));
    assert_eq!(seen(&x, &[2, 1, -1, 2]).unwrap().0, [2, 1, 6, 2]);
    for wrong in [&[5, 5][..], &[-1, -1], &[-1, 7], &[-2, -12]] {
        assert!(seen(&x, wrong).unwrap_err().contains("sizes"), "{wrong:?}");
    }
    // Strides can't say it: the runs are 4, 3 and 2.
    assert!(seen(&swapped, &[24]).is_err());
    assert_eq!(seen(&swapped, &[2, 2, 3, 2]).unwrap().1, [2, 1, 4, 12]);
    // A dimension of one element has no say, whatever its stride.
    let odd =
        Tensor { strides: [12, 999, 1, 0, 0, 0, 0, 0], ..Tensor::contiguous(64, 6, 3, &[2, 1, 12]).unwrap() };
    let odd = Handle::new(&odd);
    assert!(odd.get().is_contiguous());
    assert_eq!(seen(&odd, &[24]).unwrap().1, [1]);
    let squeezed = |x: &Handle, d: i64| dispatch(c"aten::squeeze", c"dim", &mut [given(x), d as u64]);
    assert_eq!(sizes(squeezed(&odd, 1).unwrap()).0, [2, 12]);
    assert_eq!(sizes(squeezed(&odd, -1).unwrap()).0, [2, 1, 12]);
    assert!(squeezed(&odd, 4).is_err());
    let narrow = |d, start, len| {
        let mut to = null_mut();
        // SAFETY: alive, and a place on the stack.
        (unsafe { aoti_torch_aten_narrow(x.0, d, start, len, &mut to) } == OK).then(|| Handle(to).get())
    };
    let part = narrow(1, 1, 2).unwrap();
    assert_eq!((part.data, part.sizes(), part.is_contiguous()), (0x1000 + 16, &[2, 2, 4][..], false));
    assert_eq!(narrow(-1, -1, 1).unwrap().data, 0x1000 + 12);
    assert_eq!(
        [(0, 1, 2), (3, 0, 1), (0, -5, 1), (0, 0, -1), (0, i64::MAX, 1)].map(|(d, s, n)| narrow(d, s, n)),
        [None; 5]
    );
    drop((x, swapped, odd));
    assert_eq!(headway_torch_alive(), before);
}

#[test]
fn zeros_go_through_the_caller() {
    let _turn = alone();
    let x = Handle::of(dtype::I32, &[3]);
    // SAFETY: alive.
    let fill = |x: &Handle, value| unsafe { aoti_torch_aten_fill__Scalar(x.0, value) };
    during(&mut call(), || {
        ZEROED.lock().unwrap().clear();
        let same = dispatch(c"aten::zero_", c"", &mut [given(&x)]).unwrap();
        assert_eq!(same.get(), x.get());
        assert_eq!(fill(&x, 0.0), OK);
        assert_eq!(*ZEROED.lock().unwrap(), [(0x77, 0x1000, 12); 2]);
        assert_eq!(fill(&x, f64::INFINITY), FAILED);
        assert!(words().contains("fill_ with inf"));
        assert_eq!(fill(&Handle::of(dtype::U8, &[0]), 0.0), OK);
        assert_eq!(fill(&Handle::of(dtype::U8, &[2000]), 0.0), FAILED);
        assert!(words().contains("could not be zeroed"));
        let column = Handle::new(&Tensor { strides: [2, 0, 0, 0, 0, 0, 0, 0], ..x.get() });
        assert_eq!(fill(&column, 0.0), FAILED);
        // SAFETY: null is allowed.
        assert_eq!(unsafe { aoti_torch_aten_fill__Scalar(null_mut(), 0.0) }, FAILED);
    });
    assert_eq!(fill(&x, 0.0), FAILED);
}

#[test]
fn what_is_not_offered_is_refused_by_name() {
    let _turn = alone();
    let mut stack = [7];
    assert_eq!(
        dispatch(c"aten::softmax", c"int", &mut stack).err().unwrap(),
        "the operation aten::softmax int: headway does not offer it"
    );
    assert!(dispatch(c"aten::zero_", c"out", &mut stack).is_err());
    assert_eq!(stack, [7]);
    // SAFETY: null is allowed.
    assert_eq!(unsafe { torch_call_dispatcher(null(), null(), null_mut(), 0) }, FAILED);
    assert_eq!(aoti_torch_aten_pad(null_mut(), null(), 0, null(), null_mut(), null_mut()), FAILED);
    assert!(words().contains("pad"));
}

#[test]
fn lists_keep_their_values_in_order() {
    let _turn = alone();
    let before = headway_torch_alive();
    let x = list(&[4, -1, 9]);
    let mut to = [0; 2];
    // SAFETY: alive until it is freed, and so much room.
    unsafe {
        assert_eq!(headway_torch_list_values(x, to.as_mut_ptr(), 2), 3);
        assert_eq!(to.map(|v| v as i64), [4, -1]);
        assert_eq!(headway_torch_list_values(null(), null_mut(), 0), 0);
        assert_eq!(torch_list_push_back(null_mut(), 1), FAILED);
        assert_eq!(torch_new_list_reserve_size(1, null_mut()), FAILED);
        assert_eq!(torch_delete_list(x), OK);
        assert_eq!(torch_delete_list(null_mut()), OK);
    }
    // The one without a place for it is lost.
    assert_eq!(headway_torch_alive(), before + 1);
}

#[test]
fn kernels_are_found_by_what_they_were_registered_as() {
    let _turn = alone();
    let before = headway_torch_alive();
    let (mut def, mut imp) = (null_mut(), null_mut());
    let here = c"file.cpp".as_ptr();
    // SAFETY: texts that stay, places on the stack, and the libraries that came out.
    unsafe {
        assert_eq!(aoti_torch_library_init_def(c"_test_C".as_ptr(), here, 1, &mut def), OK);
        assert_eq!(aoti_torch_library_def(def, c"fwd(Tensor q, int n) -> Tensor".as_ptr()), OK);
        assert!(headway_torch_kernel(c"_test_C".as_ptr(), c"fwd".as_ptr()).is_null());
        assert_eq!(
            aoti_torch_library_init_impl(c"_test_C".as_ptr(), c"CUDA".as_ptr(), here, 2, &mut imp),
            OK
        );
        assert_eq!(torch_library_impl(imp, c"fwd".as_ptr(), 0x40 as *mut c_void, ABI_VERSION), OK);
        assert_eq!(torch_library_impl(imp, c"_test_C::other".as_ptr(), 0x41 as *mut c_void, ABI_VERSION), OK);
        assert_eq!(headway_torch_kernel(c"_test_C".as_ptr(), c"fwd".as_ptr()) as usize, 0x40);
        assert_eq!(headway_torch_kernel(c"_test_C".as_ptr(), c"other".as_ptr()) as usize, 0x41);
        assert!(headway_torch_kernel(c"_other_C".as_ptr(), c"fwd".as_ptr()).is_null());
        let schema = CStr::from_ptr(headway_torch_schema(c"_test_C".as_ptr(), c"fwd".as_ptr()));
        assert_eq!(schema, c"fwd(Tensor q, int n) -> Tensor");
        assert!(headway_torch_schema(c"_test_C".as_ptr(), c"other".as_ptr()).is_null());
        assert!(headway_torch_schema(null(), null()).is_null());
        assert_eq!(aoti_torch_library_def(null_mut(), c"f()".as_ptr()), FAILED);
        assert_eq!(aoti_torch_library_def(def, null()), FAILED);
        assert_eq!(torch_library_impl(imp, null(), null_mut(), 0), FAILED);
        assert_eq!(aoti_torch_library_init_def(null(), here, 1, &mut def), FAILED);
        assert_eq!(aoti_torch_library_init_impl(null(), null(), here, 1, &mut imp), FAILED);
        for library in [def, imp] {
            assert_eq!(aoti_torch_delete_library_object(library), OK);
        }
        assert_eq!(aoti_torch_delete_library_object(null_mut()), OK);
    }
    assert_eq!(headway_torch_alive(), before);
}

/// The symbols that vLLM 0.33.0's two modules import of torch's, by `nm -D --undefined-only`.
const IMPORTED: &str = include_str!("torch-symbols.txt");

#[test]
fn the_shared_library_exports_every_symbol_that_modules_import() {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let library = [folder.join(headway_ffi_shim::FILE), folder.join("..").join(headway_ffi_shim::FILE)]
        .into_iter()
        .find(|p| p.is_file())
        .expect("cargo makes the shared library before this test");
    let bytes = std::fs::read(library).unwrap();
    let has = |name: &str| {
        let text = [b"\0", name.as_bytes(), b"\0"].concat();
        bytes.windows(text.len()).any(|w| w == text)
    };
    let missing: Vec<_> = IMPORTED.lines().filter(|s| !has(s)).collect();
    assert_eq!((IMPORTED.lines().count(), missing), (68, vec![]));
}
