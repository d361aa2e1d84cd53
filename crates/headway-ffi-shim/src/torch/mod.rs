//! The part of PyTorch's stable C ABI that kernels' extension modules import: vLLM's builds of FlashAttention-3 and
//! FlashMLA know tensors by these functions alone.
//!
//! Follows `torch/csrc/inductor/aoti_torch/c/shim.h` and `torch/csrc/stable/c/shim.h` of PyTorch 2.14. A tensor here is a
//! place with sizes and strides: it owns no memory. What modules allocate comes out of memory that the caller gives for
//! one call ([`Call`]), so nothing is allocated on the device, and a call can be part of a CUDA graph. The functions that
//! are not torch's begin with `headway_torch_`: they are for that caller.
//!
//! | file | what |
//! |---|---|
//! | `abi.rs` | values, statuses, the numbers of types, devices and layouts |
//! | `tensor.rs` | a tensor and its views |
//! | `call.rs` | what a call runs on: device, stream, memory; the words of the last failure |
//! | `constants.rs`, `getters.rs`, `tensors.rs`, `lists.rs`, `library.rs`, `dispatcher.rs` | the functions |
//!
//! A function that fails says why to [`headway_torch_error`] and returns a status; the module then throws.

mod abi;
mod call;
mod constants;
mod dispatcher;
mod getters;
mod library;
mod lists;
mod tensor;
mod tensors;

pub use abi::{ABI_VERSION, CUDA, FAILED, OK, Status, Value, dtype};
pub use call::{
    Call, aoti_torch_create_device_guard, aoti_torch_delete_device_guard, aoti_torch_get_current_cuda_stream,
    aoti_torch_get_current_device_index, headway_torch_alive, headway_torch_enter, headway_torch_error,
};
pub use constants::*;
pub use dispatcher::torch_call_dispatcher;
pub use getters::*;
pub use library::{
    Library, aoti_torch_delete_library_object, aoti_torch_library_def, aoti_torch_library_init_def,
    aoti_torch_library_init_impl, headway_torch_kernel, headway_torch_schema, torch_library_impl,
};
pub use lists::{
    List, headway_torch_list_values, torch_delete_list, torch_list_push_back, torch_new_list_reserve_size,
};
pub use tensor::{MOST_DIMENSIONS, Tensor};
pub use tensors::{
    aoti_torch_aten_fill__Scalar, aoti_torch_aten_narrow, aoti_torch_aten_pad,
    aoti_torch_delete_tensor_object, aoti_torch_new_tensor_handle, aoti_torch_new_uninitialized_tensor,
    headway_torch_tensor,
};
