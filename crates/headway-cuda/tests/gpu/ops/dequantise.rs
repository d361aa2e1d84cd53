//! Blocks of every format as weights on the device, bit for bit what the host makes of them.

use crate::{
    Outcome, ensure,
    reference::{FLOATS, Random},
    text,
};
use headway_cuda::{CudaExec, CudaLinear};
use headway_tensor::{DType, LinearPart, SharedBytes, Weight, WeightType, quant::QuantFormat};

/// Zeros, the least and the largest subnormal and normal numbers, 1, infinities, NaN.
const SCALES: [u16; 12] =
    [0, 0x8000, 0x0001, 0x83ff, 0x0400, 0x7bff, 0xfbff, 0x3c00, 0xbc00, 0x7c00, 0xfc00, 0x7e01];

/// Where a block's binary16 numbers stand.
fn scale_places(format: QuantFormat) -> &'static [usize] {
    match format {
        QuantFormat::Q4_0 | QuantFormat::Q5_0 | QuantFormat::Q8_0 => &[0],
        QuantFormat::Q4_1 | QuantFormat::Q5_1 | QuantFormat::Q4_K | QuantFormat::Q5_K => &[0, 2],
        QuantFormat::Q2_K => &[80, 82],
        QuantFormat::Q3_K => &[108],
        QuantFormat::Q6_K => &[208],
    }
}

/// Random integers; the scales are extreme in some blocks, moderate in half of them and random in the rest.
fn blocks(random: &mut Random, format: QuantFormat, [rows, cols]: [usize; 2]) -> Result<Weight, String> {
    let count = rows * cols / format.block_elems();
    let mut bytes = vec![0u8; count * format.block_bytes()];
    bytes.chunks_mut(8).for_each(|c| c.copy_from_slice(&random.bits().to_le_bytes()[..c.len()]));
    for (i, block) in bytes.chunks_exact_mut(format.block_bytes()).enumerate() {
        for &at in scale_places(format) {
            let scale = match i % 4 {
                0 => SCALES[random.below(SCALES.len())],
                1 => continue,
                _ => random.bits() as u16 & 0x83ff | 0x2800,
            };
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    Weight::new(format.name(), WeightType::Quant(format), vec![rows, cols], SharedBytes::new(bytes))
        .map_err(text)
}

/// A value's bits in a type; all NaN are one.
fn bits(x: f32, dtype: DType) -> u32 {
    match dtype {
        _ if x.is_nan() => u32::MAX,
        DType::BF16 => u32::from(half::bf16::from_f32(x).to_bits()),
        DType::F16 => u32::from(half::f16::from_f32(x).to_bits()),
        _ => x.to_bits(),
    }
}

/// The bits of a layer's weights as the device holds them.
fn held(cx: &CudaExec, layer: &CudaLinear) -> Result<Vec<u32>, String> {
    let dtype = layer.dtype();
    let mut bytes = vec![0u8; layer.weight().bytes()];
    cx.read(layer.weight(), 0, &mut bytes).map_err(text)?;
    let one = |b: &[u8]| match (dtype, b) {
        (DType::F32, &[a, b, c, d]) => bits(f32::from_le_bytes([a, b, c, d]), dtype),
        (DType::BF16, &[a, b]) => bits(half::bf16::from_le_bytes([a, b]).to_f32(), dtype),
        (_, &[a, b]) => bits(half::f16::from_le_bytes([a, b]).to_f32(), dtype),
        _ => 0,
    };
    Ok(bytes.chunks_exact(dtype.size()).map(one).collect())
}

/// Loads these parts as one layer and holds its weights against the host's.
fn compare(cx: &CudaExec, parts: Vec<Weight>, dtype: DType) -> Result<usize, String> {
    let exact: Vec<u32> = parts.iter().flat_map(Weight::to_f32).map(|x| bits(x, dtype)).collect();
    let names: Vec<String> = parts.iter().map(|w| w.name().to_owned()).collect();
    let parts = parts.into_iter().map(|weight| LinearPart { weight, bias: None }).collect();
    let layer = CudaLinear::load(cx, parts, Some(dtype)).map_err(text)?;
    let found = held(cx, &layer)?;
    ensure(found.len() == exact.len(), || format!("{} weights for {}", found.len(), exact.len()))?;
    match found.iter().zip(&exact).position(|(f, e)| f != e) {
        Some(i) => {
            Err(format!("{names:?} as {dtype}: weight {i} has bits {:#x}, not {:#x}", found[i], exact[i]))
        }
        None => Ok(found.len()),
    }
}

/// Every format in every type.
pub fn formats(cx: &CudaExec) -> Outcome {
    let (mut random, mut weights) = (Random(41), 0);
    for format in QuantFormat::ALL {
        for dtype in FLOATS {
            weights += compare(cx, vec![blocks(&mut random, format, [96, 512])?], dtype)?;
        }
    }
    Ok(format!("{weights} weights of {} formats, every bit", QuantFormat::ALL.len()))
}

/// Formats beside each other and beside dense parts in one layer, as files have them in q, k and v.
pub fn parts(cx: &CudaExec) -> Outcome {
    let mut random = Random(42);
    let dense = random.values(40 * 256, 2.0);
    let mut all = vec![Weight::from_f32("dense", vec![40, 256], &dense).map_err(text)?];
    for (rows, format) in [(64, QuantFormat::Q4_K), (8, QuantFormat::Q6_K), (1, QuantFormat::Q5_0)] {
        all.push(blocks(&mut random, format, [rows, 256])?);
    }
    Ok(format!("{} weights of 4 parts", compare(cx, all, DType::BF16)?))
}

/// More blocks than are on the device at once.
pub fn pieces(cx: &CudaExec) -> Outcome {
    let w = blocks(&mut Random(43), QuantFormat::Q8_0, [2100, 16_384])?;
    let bytes = w.bytes().len();
    Ok(format!("{} weights of {bytes} bytes", compare(cx, vec![w], DType::BF16)?))
}
