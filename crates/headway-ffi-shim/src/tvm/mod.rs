//! TVM-FFI's C ABI (0.1): the types of its calls, and the functions that modules import.
//!
//! Follows `tvm/ffi/c_api.h` and `tvm/ffi/extra/c_env_api.h` of apache-tvm-ffi 0.1.15. What is per thread there is per
//! thread here.

mod abi;
mod exports;
mod object;

pub use abi::{Any, ByteArray, DLDataType, DLDevice, DLTensor, SafeCall, type_index};
pub use exports::{
    TVMFFIBacktrace, TVMFFIDataTypeToString, TVMFFIEnvGetStream, TVMFFIEnvSetStream,
    TVMFFIErrorMoveFromRaised, TVMFFIErrorSetRaised, TVMFFIGetTypeInfo, TypeInfo,
};
pub use object::{ErrorObject, Object, Sequence, release, retain};
