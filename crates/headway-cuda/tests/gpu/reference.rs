//! What tests compare with: numbers from a counter, tensors of any activation type, float64 on the host, and the worst
//! error in units of what the type can hold.

use crate::text;
use headway_cuda::CudaExec;
use headway_tensor::{DType, Element, Persistent, Tensor, View};

/// The types that activations may have.
pub const FLOATS: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

/// Uniform numbers, the same for the same seed (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `-by` to `by`.
    pub fn value(&mut self, by: f32) -> f32 {
        ((self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0) * by
    }

    pub fn values(&mut self, n: usize, by: f32) -> Vec<f32> {
        (0..n).map(|_| self.value(by)).collect()
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }
}

/// A value as a type holds it.
pub fn rounded(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => half::bf16::from_f32(x).to_f32(),
        DType::F16 => half::f16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// A tensor of these values, and the values as it holds them.
pub fn tensor(
    cx: &CudaExec,
    dtype: DType,
    values: &[f32],
    shape: &[usize],
) -> Result<(Tensor, Vec<f32>), String> {
    fn of<T: Element>(cx: &CudaExec, values: &[f32], shape: &[usize]) -> Result<Tensor, String> {
        let elements: Vec<T> = values.iter().map(|x| T::from_f32(*x)).collect();
        Tensor::from_slice(cx, &elements, shape).map_err(text)
    }
    let tensor = match dtype {
        DType::BF16 => of::<half::bf16>(cx, values, shape),
        DType::F16 => of::<half::f16>(cx, values, shape),
        DType::F32 => of::<f32>(cx, values, shape),
        other => Err(format!("no test data of {other}")),
    }?;
    Ok((tensor, values.iter().map(|x| rounded(*x, dtype)).collect()))
}

/// A tensor full of NaN: what an output holds before it is written.
pub fn poisoned(cx: &CudaExec, dtype: DType, shape: &[usize]) -> Result<Tensor, String> {
    Ok(tensor(cx, dtype, &vec![f32::NAN; shape.iter().product()], shape)?.0)
}

/// All elements of a tensor as float32.
pub fn read(cx: &CudaExec, t: &Tensor) -> Result<Vec<f32>, String> {
    let bytes = cx.read_tensor(t.view()).map_err(text)?;
    Ok(match t.dtype() {
        DType::BF16 => {
            bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        }
        DType::F16 => {
            bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        }
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        DType::I32 => {
            bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f32).collect()
        }
        _ => bytes.iter().map(|b| f32::from(*b)).collect(),
    })
}

/// Indices on the device.
pub fn ids(cx: &CudaExec, values: &[i32]) -> Result<View<i32>, String> {
    let mut buffer = Persistent::new(cx, values.len().max(1)).map_err(text)?;
    Ok(buffer.write(cx, values.len(), |o| o.copy_from_slice(values)))
}

/// The distance from one value of a type to the next, near `x`.
fn step(x: f64, dtype: DType) -> f64 {
    let (bits, least) = match dtype {
        DType::BF16 => (8, -126),
        DType::F16 => (11, -14),
        _ => (24, -126),
    };
    let exponent = if x == 0.0 { least } else { (x.abs().log2().floor() as i32).max(least) };
    2f64.powi(exponent - bits + 1)
}

/// The worst errors of a test: in steps of the type, beside what float32 sums may lose.
#[derive(Default)]
pub struct Worst {
    steps: f64,
    at: String,
    values: usize,
}

impl Worst {
    /// Compares; `loss` is what the operation may lose in float32, absolute.
    pub fn see(
        &mut self,
        what: &str,
        found: &[f32],
        exact: &[f64],
        dtype: DType,
        loss: f64,
    ) -> Result<(), String> {
        if found.len() != exact.len() {
            return Err(format!("{what}: {} values, {} expected", found.len(), exact.len()));
        }
        for (i, (f, e)) in found.iter().zip(exact).enumerate() {
            let off = (f64::from(*f) - e).abs();
            let steps = (off - loss).max(0.0) / step(*e, dtype);
            let most = if dtype == DType::F32 { 4.0 } else { 0.51 };
            if !f.is_finite() || steps > most {
                return Err(format!(
                    "{what}: element {i} is {f}, exactly {e}: {steps:.2} steps of {dtype} off"
                ));
            }
            if steps > self.steps {
                self.steps = steps;
                self.at = format!("{what}: {f} for {e}");
            }
        }
        self.values += found.len();
        Ok(())
    }

    /// In words.
    pub fn found(&self) -> String {
        format!("{} values, at worst {:.2} steps ({})", self.values, self.steps, self.at)
    }
}
