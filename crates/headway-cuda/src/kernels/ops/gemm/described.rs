//! What cuBLASLt is told of a product: the operation, its operands, and what a choice of algorithm depends on.

use crate::device::{CudaError, Result};
use cudarc::cublaslt::{
    result::{self, CublasError},
    sys::{
        cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulDesc_t,
        cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulPreference_t, cublasLtMatrixLayout_t,
        cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cudaDataType,
    },
};
use headway_tensor::DType;

/// The library's number for a transposed operand.
const TRANSPOSED: i32 = 1;
/// The largest alignment that the library makes use of.
const MOST_ALIGN: u64 = 256;

/// What a choice of algorithm depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub rows: u64,
    pub shape: [usize; 2],
    /// Elements from one row to the next.
    pub x_row: i64,
    pub out_row: i64,
    pub dtype: DType,
    pub out_dtype: DType,
    pub bias: bool,
    /// Products side by side, each of a weight of its own.
    pub batch: u64,
    /// Elements from one product's weight, input and output to the next's.
    pub batch_steps: [i64; 3],
    /// The weight lies `[in, out]`.
    pub by_input: bool,
    /// Of weight, input and output.
    pub align: [u32; 3],
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [n_out, n_in] = self.shape;
        let of = if self.batch > 1 { format!("{} products", self.batch) } else { "a product".into() };
        write!(f, "{of} of {} rows, {n_in} to {n_out}, {} to {}", self.rows, self.dtype, self.out_dtype)
    }
}

/// Descriptions of an operation and its operands, destroyed in the end.
pub(super) struct Described {
    pub desc: cublasLtMatmulDesc_t,
    pub layouts: Vec<cublasLtMatrixLayout_t>,
}

impl Drop for Described {
    fn drop(&mut self) {
        // SAFETY: made by the library, and not used after this. What it might say is of no use here.
        let _ = unsafe { result::destroy_matmul_desc(self.desc) };
        for layout in &self.layouts {
            // SAFETY: as above.
            let _ = unsafe { result::destroy_matrix_layout(*layout) };
        }
    }
}

/// Preferences, destroyed in the end.
pub(super) struct Preferences(pub cublasLtMatmulPreference_t);

impl Drop for Preferences {
    fn drop(&mut self) {
        // SAFETY: made by the library, and not used after this.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

pub(super) fn failed(doing: &str, e: CublasError) -> CudaError {
    CudaError::Blas { doing: doing.into(), words: format!("{:?}", e.0) }
}

fn data_type(dtype: DType) -> Result<cudaDataType> {
    match dtype {
        DType::F32 => Ok(cudaDataType::CUDA_R_32F),
        DType::F16 => Ok(cudaDataType::CUDA_R_16F),
        DType::BF16 => Ok(cudaDataType::CUDA_R_16BF),
        other => Err(CudaError::Argument(format!(
            "a linear layer on {other} is not supported on CUDA; bfloat16, float16 and float32 are"
        ))),
    }
}

/// The largest power of two, up to 256, that divides all.
pub(super) fn alignment(values: [u64; 2]) -> u32 {
    values.iter().fold(MOST_ALIGN, |a, v| a.min(1 << v.trailing_zeros().min(8))) as u32
}

impl Described {
    /// Row-major `out = x · wᵀ` is column-major `outᵀ = w · xᵀ`, of which `w` lies transposed unless it is `[in, out]`.
    pub fn new(key: &Key, rows: u64) -> Result<Self> {
        let doing = "describing a product";
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let desc =
            result::create_matmul_desc(compute, cudaDataType::CUDA_R_32F).map_err(|e| failed(doing, e))?;
        let mut made = Self { desc, layouts: vec![] };
        if !key.by_input {
            made.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        }
        if key.bias {
            made.set(
                DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
                &cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            )?;
            made.set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &data_type(key.out_dtype)?)?;
        }
        let [n_out, n_in] = key.shape.map(|n| n as u64);
        let weight = match key.by_input {
            true => (key.dtype, n_out, n_in, n_out as i64),
            false => (key.dtype, n_in, n_out, n_in as i64),
        };
        let operands =
            [weight, (key.dtype, n_in, rows, key.x_row), (key.out_dtype, n_out, rows, key.out_row)];
        for ((dtype, height, width, step), batch_step) in operands.into_iter().zip(key.batch_steps) {
            let layout = result::create_matrix_layout(data_type(dtype)?, height, width, step);
            made.layouts.push(layout.map_err(|e| failed(doing, e))?);
            if key.batch > 1 {
                let count = key.batch as i32;
                made.set_layout(LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count)?;
                made.set_layout(LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch_step)?;
            }
        }
        Ok(made)
    }

    /// Sets an attribute of the last operand.
    fn set_layout<T>(&self, attribute: LayoutAttribute, value: &T) -> Result<()> {
        let Some(&layout) = self.layouts.last() else { return Ok(()) };
        // SAFETY: the layout lives, and the value has the size that is said; attributes are set to their types.
        unsafe {
            result::set_matrix_layout_attribute(
                layout,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        }
        .map_err(|e| failed("describing a product", e))
    }

    pub fn set<T>(&self, attribute: DescAttribute, value: &T) -> Result<()> {
        // SAFETY: the description lives, and the value has the size that is said; attributes are set to their types.
        unsafe {
            result::set_matmul_desc_attribute(
                self.desc,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        }
        .map_err(|e| failed("describing a product", e))
    }
}

#[cfg(test)]
mod tests {
    use super::alignment;

    #[test]
    fn alignment_is_the_least_of_address_and_row() {
        assert_eq!(alignment([0x1000, 512]), 256);
        assert_eq!(alignment([0x1000, 24]), 8);
        assert_eq!(alignment([0x1002, 512]), 2);
        assert_eq!(alignment([0, 0]), 256);
    }
}
