//! Rows of tensors as kernels get them (`csrc/ops/rows.cuh`), checked: on this device, of a type that kernels know,
//! contiguous within a row.

use super::super::kernel_params;
use crate::{
    CudaExec,
    device::{CudaError, Result},
};
use headway_tensor::{DType, Device, DeviceMem, Exec, TensorError, TensorMut, TensorRef, View};
use std::sync::Arc;

kernel_params! {
    /// Address, and strides in bytes.
    pub(crate) struct RowsArg { pub at: u64, pub row: i64, pub head: i64 }
}

/// `[tokens, width]` or `[tokens, heads, width]`; rows are numbered heads first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub arg: RowsArg,
    pub tokens: usize,
    pub heads: usize,
    pub width: usize,
    pub dtype: DType,
}

impl Rows {
    /// For reading.
    pub fn of(cx: &CudaExec, what: &'static str, x: TensorRef<'_>) -> Result<Self> {
        Self::layout(cx.device(), what, x)
    }

    /// For writing.
    pub fn of_mut(cx: &CudaExec, what: &'static str, x: &TensorMut<'_>) -> Result<Self> {
        Self::layout(cx.device(), what, x.as_ref())
    }

    fn layout(device: Device, what: &'static str, x: TensorRef<'_>) -> Result<Self> {
        let at = match x.device_addr() {
            Some(at) if x.device() == device => at,
            _ => return Err(TensorError::WrongDevice { what, found: x.device(), expected: device }.into()),
        };
        let (tokens, heads, width, row, head) = match (x.shape(), x.strides()) {
            (&[n, w], &[row, 1]) => (n, 1, w, row, w),
            (&[n, h, w], &[row, head, 1]) => (n, h, w, row, head),
            _ => return Err(wrong(what, x, "[tokens, width] or [tokens, heads, width], rows contiguous")),
        };
        let span = heads.saturating_sub(1).saturating_mul(head).saturating_add(width);
        let apart = (heads <= 1 || head >= width) && (tokens <= 1 || row >= span);
        if !apart || tokens.saturating_mul(heads).max(width) > i32::MAX as usize {
            return Err(wrong(what, x, "rows that don't overlap, fewer than 2^31 of them"));
        }
        let size = x.dtype().size() as i64;
        let arg = RowsArg { at, row: row as i64 * size, head: head as i64 * size };
        Ok(Self { arg, tokens, heads, width, dtype: x.dtype() })
    }

    /// The rows of a contiguous matrix.
    pub fn matrix(
        cx: &CudaExec,
        what: &'static str,
        mem: &Arc<dyn DeviceMem>,
        dtype: DType,
        [tokens, width]: [usize; 2],
    ) -> Result<Self> {
        if mem.device() != cx.device() {
            return Err(TensorError::WrongDevice { what, found: mem.device(), expected: cx.device() }.into());
        }
        let row = width * dtype.size();
        if tokens.max(width) > i32::MAX as usize || row.checked_mul(tokens).is_none_or(|n| n > mem.bytes()) {
            return Err(CudaError::Argument(format!(
                "{what}: {tokens} rows of {width} {dtype} in {} bytes",
                mem.bytes()
            )));
        }
        let arg = RowsArg { at: mem.addr(), row: row as i64, head: row as i64 };
        Ok(Self { arg, tokens, heads: 1, width, dtype })
    }

    /// Rows of all tokens.
    pub fn count(&self) -> usize {
        self.tokens * self.heads
    }

    /// Whether every row begins at a multiple of so many bytes.
    pub fn aligned(&self, bytes: i64) -> bool {
        let fits = |n: i64| n % bytes == 0;
        fits(self.arg.at.cast_signed())
            && (self.tokens <= 1 || fits(self.arg.row))
            && (self.heads <= 1 || fits(self.arg.head))
    }

    /// Each row in `parts` equal ones, as heads of it.
    pub fn split(mut self, parts: usize) -> Option<Self> {
        if self.heads != 1 || parts == 0 || !self.width.is_multiple_of(parts) {
            return None;
        }
        self.width /= parts;
        self.heads = parts;
        self.arg.head = (self.width * self.dtype.size()) as i64;
        Some(self)
    }

    /// Refuses a type that no kernel computes in.
    pub fn float(self, what: &'static str) -> Result<Self> {
        match self.dtype.is_compute_float() {
            true => Ok(self),
            false => {
                let supported = "bfloat16, float16, float32";
                Err(TensorError::WrongDType { what, found: self.dtype, supported }.into())
            }
        }
    }

    /// Refuses another type than these rows'.
    pub fn same_type(&self, what: &'static str, other: &Self) -> Result<()> {
        match self.dtype == other.dtype {
            true => Ok(()),
            false => Err(CudaError::Argument(format!(
                "{what}: {} beside {}; both must have one type",
                other.dtype, self.dtype
            ))),
        }
    }

    /// Refuses other rows than these: as many, as wide, as many a token.
    pub fn same_shape(&self, what: &'static str, other: &Self) -> Result<()> {
        let shape = |r: &Self| [r.tokens, r.heads, r.width];
        match shape(self) == shape(other) {
            true => Ok(()),
            false => Err(TensorError::WrongShape {
                what: what.into(),
                found: shape(other).into(),
                expected: format!("{:?}", shape(self)),
            }
            .into()),
        }
    }
}

fn wrong(what: &'static str, x: TensorRef<'_>, expected: &str) -> CudaError {
    TensorError::WrongShape {
        what: format!("{what} (strides {:?})", x.strides()),
        found: x.shape().to_vec(),
        expected: expected.into(),
    }
    .into()
}

/// Address of a contiguous float32 tensor of this shape on this device.
pub(super) fn floats(
    cx: &CudaExec,
    what: &'static str,
    t: &headway_tensor::Tensor,
    shape: &[usize],
) -> Result<u64> {
    if t.dtype() != DType::F32 {
        return Err(TensorError::WrongDType { what, found: t.dtype(), supported: "float32" }.into());
    }
    if t.shape() != shape {
        return Err(TensorError::WrongShape {
            what: what.into(),
            found: t.shape().to_vec(),
            expected: format!("{shape:?}"),
        }
        .into());
    }
    match t.view().device_addr() {
        Some(addr) if t.view().device() == cx.device() => Ok(addr),
        _ => Err(TensorError::WrongDevice { what, found: t.view().device(), expected: cx.device() }.into()),
    }
}

/// Address of indices on this device.
pub(super) fn indices(cx: &CudaExec, what: &'static str, ids: &View<i32>) -> Result<u64> {
    let found = ids.device_mem().map_or(Device::CPU, |m| m.device());
    match found == cx.device() {
        true => Ok(ids.addr()),
        false => Err(TensorError::WrongDevice { what, found, expected: cx.device() }.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_tensor::Tensor;

    const CUDA: Device = Device { kind: "cuda", index: 0 };

    /// A device that has addresses and no memory.
    struct Paper;
    #[derive(Debug)]
    struct Sheet(usize);
    impl DeviceMem for Sheet {
        fn device(&self) -> Device {
            CUDA
        }
        fn addr(&self) -> u64 {
            0x1000
        }
        fn bytes(&self) -> usize {
            self.0
        }
    }
    impl Exec for Paper {
        fn device(&self) -> Device {
            CUDA
        }
        fn alloc(&self, bytes: usize) -> headway_tensor::Result<Option<Arc<dyn DeviceMem>>> {
            Ok(Some(Arc::new(Sheet(bytes))))
        }
        fn upload(&self, _: &Arc<dyn DeviceMem>, _: usize, _: &[u8]) {}
    }

    #[test]
    fn strides_are_in_bytes_and_alignment_is_of_every_row() {
        let t = Tensor::zeros(&Paper, DType::BF16, &[4, 48]).unwrap();
        let rows = Rows::layout(CUDA, "x", t.view()).unwrap();
        assert_eq!((rows.count(), rows.width, rows.arg.row), (4, 48, 96));
        assert!(rows.aligned(16));
        let part = t.view().cols(8..40).unwrap().heads(4).unwrap();
        let rows = Rows::layout(CUDA, "x", part).unwrap();
        assert_eq!((rows.arg.at, rows.arg.row, rows.arg.head, rows.heads), (0x1010, 96, 16, 4));
        assert!(rows.aligned(16) && !rows.aligned(32));
        let odd = t.view().cols(1..41).unwrap();
        assert!(!Rows::layout(CUDA, "x", odd).unwrap().aligned(16));
        let parts = Rows::layout(CUDA, "x", t.view()).unwrap().split(3).unwrap();
        assert_eq!((parts.heads, parts.width, parts.arg.head), (3, 16, 32));
        assert!(Rows::layout(CUDA, "x", t.view()).unwrap().split(5).is_none());
    }

    #[test]
    fn another_device_and_other_types_are_refused() {
        let t = Tensor::zeros(&Paper, DType::I32, &[4, 48]).unwrap();
        let other = Device { kind: "cuda", index: 1 };
        let e = Rows::layout(other, "x", t.view()).unwrap_err().to_string();
        assert_eq!(e, "x: memory is on cuda:0, but the operation runs on cuda:1");
        let e = Rows::layout(CUDA, "x", t.view()).and_then(|r| r.float("x")).unwrap_err().to_string();
        assert!(e.contains("int32") && e.contains("bfloat16"), "{e}");
        let host = TensorRef::from_host(&[0f32; 4], &[2, 2]).unwrap();
        assert!(Rows::layout(CUDA, "x", host).unwrap_err().to_string().contains("memory is on cpu"));
        let a = Tensor::zeros(&Paper, DType::F32, &[4, 48]).unwrap();
        let rows = |t: &Tensor| Rows::layout(CUDA, "x", t.view()).unwrap();
        assert!(rows(&a).same_type("x", &rows(&t)).is_err());
        let b = Tensor::zeros(&Paper, DType::F32, &[4, 47]).unwrap();
        let e = rows(&a).same_shape("x", &rows(&b)).unwrap_err().to_string();
        assert_eq!(e, "x: shape [4, 1, 47], expected [4, 1, 48]");
    }
}
