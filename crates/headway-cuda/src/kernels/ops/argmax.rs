//! Greedy choice (`csrc/ops/argmax.cu`).

use super::{
    super::kernel_params,
    launch::{Op, entries, lanes},
    rows::{Rows, RowsArg},
};
use crate::{CudaExec, device::Result};
use headway_tensor::{DType, Exec, TensorError, TensorMut, TensorRef};

pub(super) const FILE: &str = "ops/argmax.cu";

kernel_params! {
    struct Params { x: RowsArg, out: u64, count: i32, width: i32 }
}

impl CudaExec {
    /// The column of each row's largest element, the first of several: x `[rows, columns]`, out `[rows]` of int32. NaN
    /// counts for nothing; a row without a number gives 0.
    ///
    /// # Errors
    /// Shapes, types, devices; the driver's.
    pub fn argmax(&self, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
        let x = Rows::of(self, "argmax", x)?.float("argmax")?;
        let at = match out.device_addr() {
            Some(at) if out.device() == self.device() => at,
            _ => {
                let (found, expected) = (out.device(), self.device());
                return Err(TensorError::WrongDevice { what: "argmax output", found, expected }.into());
            }
        };
        if out.dtype() != DType::I32 {
            let (found, supported) = (out.dtype(), "int32");
            return Err(TensorError::WrongDType { what: "argmax output", found, supported }.into());
        }
        if out.shape() != [x.tokens] || x.heads != 1 || x.width == 0 {
            return Err(TensorError::WrongShape {
                what: format!("argmax of [{}, {}]", x.count(), x.width),
                found: out.shape().to_vec(),
                expected: format!("[{}], of rows with at least one column", x.tokens),
            }
            .into());
        }
        let wide = x.aligned(16) && x.width.is_multiple_of(lanes(x.dtype));
        let params = Params { x: x.arg, out: at, count: x.tokens as i32, width: x.width as i32 };
        let op = Op { file: FILE, entries: entries!("argmax"), dtype: x.dtype, table: None };
        // SAFETY: both lie in tensors of this device, one number for each row; alignment as `wide` says.
        unsafe { op.launch(self, wide, [x.tokens as u32, 1, 1], &params) }
    }
}
