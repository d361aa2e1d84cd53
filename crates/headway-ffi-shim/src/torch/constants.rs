//! Numbers of device types, element types and layouts. Modules ask for them and compare; the numbers are PyTorch's own.

use super::abi::{ABI_VERSION, CUDA, dtype};

macro_rules! constants {
    ($($name:ident = $value:expr;)*) => {$(
        #[doc = concat!("The number that `", stringify!($name), "` names.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> i32 {
            $value
        }
    )*};
}

constants! {
    aoti_torch_device_type_cpu = 0;
    aoti_torch_device_type_cuda = CUDA;
    aoti_torch_device_type_xpu = 12;
    aoti_torch_device_type_mps = 13;
    aoti_torch_device_type_meta = 14;
    aoti_torch_device_type_privateuse1 = 20;
    aoti_torch_dtype_uint8 = dtype::U8;
    aoti_torch_dtype_int8 = 1;
    aoti_torch_dtype_int16 = 2;
    aoti_torch_dtype_int32 = dtype::I32;
    aoti_torch_dtype_int64 = 4;
    aoti_torch_dtype_float16 = dtype::F16;
    aoti_torch_dtype_float32 = dtype::F32;
    aoti_torch_dtype_float64 = 7;
    aoti_torch_dtype_complex32 = 8;
    aoti_torch_dtype_complex64 = 9;
    aoti_torch_dtype_complex128 = 10;
    aoti_torch_dtype_bool = 11;
    aoti_torch_dtype_bfloat16 = dtype::BF16;
    aoti_torch_dtype_float8_e5m2 = 23;
    aoti_torch_dtype_float8_e4m3fn = dtype::F8E4M3;
    aoti_torch_dtype_float8_e5m2fnuz = 25;
    aoti_torch_dtype_float8_e4m3fnuz = 26;
    aoti_torch_dtype_uint16 = 27;
    aoti_torch_dtype_uint32 = 28;
    aoti_torch_dtype_uint64 = 29;
    torch_dtype_float8_e8m0fnu = 44;
    torch_dtype_float4_e2m1fn_x2 = 45;
    aoti_torch_layout_strided = 0;
    aoti_torch_layout_sparse_coo = 1;
    aoti_torch_layout_sparse_csr = 2;
    aoti_torch_layout__mkldnn = 3;
    aoti_torch_layout_sparse_csc = 4;
    aoti_torch_layout_sparse_bsr = 5;
    aoti_torch_layout_sparse_bsc = 6;
    aoti_torch_layout_jagged = 7;
}

/// The version of the ABI.
#[unsafe(no_mangle)]
pub extern "C" fn aoti_torch_abi_version() -> u64 {
    ABI_VERSION
}
