//! The operations that models call, on CUDA.

#[derive(Default)]
pub(crate) struct OpKernels;
pub(crate) struct Gemm;
