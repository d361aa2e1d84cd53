//! Activations to float32 and back: latent attention computes in float32 whatever the activations are.

use half::{bf16, f16};
use headway_tensor::{DType, Result, TensorError, TensorMut, TensorRef};

/// `[tokens, heads, size]` in float32: as it lies where it is float32, otherwise widened into `room`.
///
/// # Errors
/// A dtype that is no activation's, another rank.
pub fn widen<'a>(x: TensorRef<'a>, room: &'a mut Vec<f32>) -> Result<TensorRef<'a>> {
    if x.dtype() == DType::F32 {
        return Ok(x);
    }
    let (&[tokens, heads, size], &[t, h, 1]) = (x.shape(), x.strides()) else {
        return Err(wrong("activations", x.shape()));
    };
    room.clear();
    let rows = (0..tokens * heads).map(|i| i / heads * t + i % heads * h);
    match x.dtype() {
        DType::F16 => {
            let x = x.into_host::<f16>()?;
            rows.for_each(|at| room.extend(x[at..at + size].iter().map(|x| x.to_f32())));
        }
        DType::BF16 => {
            let x = x.into_host::<bf16>()?;
            rows.for_each(|at| room.extend(x[at..at + size].iter().map(|x| x.to_f32())));
        }
        found => return Err(unknown(found)),
    }
    TensorRef::from_host(room, &[tokens, heads, size])
}

/// Writes float32 rows, given by token and head, into `out` `[tokens, heads, size]`, rounded to nearest even.
///
/// # Errors
/// As [`widen`].
pub fn narrow<'a>(row: impl Fn(usize, usize) -> &'a [f32], out: TensorMut<'_>) -> Result<()> {
    let shape = out.shape().to_vec();
    let (&[tokens, heads, size], &[t, h, 1]) = (&shape[..], out.as_ref().strides()) else {
        return Err(wrong("output", &shape));
    };
    let each = (0..tokens * heads).map(|i| (i / heads * t + i % heads * h, row(i / heads, i % heads)));
    match out.dtype() {
        DType::F32 => {
            let out = out.into_host::<f32>()?;
            each.for_each(|(at, x)| out[at..at + size].copy_from_slice(x));
        }
        DType::F16 => {
            let out = out.into_host::<f16>()?;
            each.for_each(|(at, x)| put(&mut out[at..at + size], x, f16::from_f32));
        }
        DType::BF16 => {
            let out = out.into_host::<bf16>()?;
            each.for_each(|(at, x)| put(&mut out[at..at + size], x, bf16::from_f32));
        }
        found => return Err(unknown(found)),
    }
    Ok(())
}

fn put<T>(to: &mut [T], from: &[f32], f: impl Fn(f32) -> T) {
    for (o, x) in to.iter_mut().zip(from) {
        *o = f(*x);
    }
}

fn wrong(what: &str, found: &[usize]) -> TensorError {
    TensorError::WrongShape {
        what: format!("latent attention {what}"),
        found: found.to_vec(),
        expected: "[tokens, heads, size] with contiguous heads".into(),
    }
}

fn unknown(found: DType) -> TensorError {
    TensorError::WrongDType { what: "latent attention", found, supported: "float32, float16, bfloat16" }
}
