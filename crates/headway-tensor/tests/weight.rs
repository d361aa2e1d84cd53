//! Weights: size checks, conversion to float32, slicing without a copy.

use headway_tensor::quant::{QuantFormat, quantize};
use headway_tensor::{SharedBytes, Weight, WeightError, WeightType};

fn weight(dtype: WeightType, shape: &[usize], bytes: usize) -> Result<Weight, WeightError> {
    Weight::new("w", dtype, shape.to_vec(), SharedBytes::new(vec![0u8; bytes]))
}

#[test]
fn sizes_are_checked() {
    assert!(weight(WeightType::F32, &[2, 3], 24).is_ok());
    assert!(matches!(
        weight(WeightType::F32, &[2, 3], 23),
        Err(WeightError::ByteLength { expected: 24, actual: 23, .. })
    ));
    assert!(matches!(weight(WeightType::F32, &[2, 0], 0), Err(WeightError::Shape { .. })));
    assert!(matches!(weight(WeightType::F32, &[usize::MAX, 2], 8), Err(WeightError::Shape { .. })));
    assert!(matches!(weight(WeightType::F32, &[usize::MAX / 2], 8), Err(WeightError::Shape { .. })));
    let q = WeightType::Quant(QuantFormat::Q4_K);
    assert!(matches!(weight(q, &[256, 32], 144), Err(WeightError::PartialBlock { block: 256, .. })));
    assert!(weight(q, &[32, 256], 32 * 144).is_ok());
}

#[test]
fn plain_types_convert() {
    let halves: Vec<u8> = [0x3c00u16, 0xc000].iter().flat_map(|b| b.to_le_bytes()).collect();
    let w = Weight::new("h", WeightType::F16, vec![2], SharedBytes::new(halves)).unwrap();
    assert_eq!(w.to_f32(), [1.0, -2.0]);
    let brains: Vec<u8> = [0x3f80u16, 0xc040].iter().flat_map(|b| b.to_le_bytes()).collect();
    let w = Weight::new("b", WeightType::BF16, vec![2], SharedBytes::new(brains)).unwrap();
    assert_eq!(w.to_f32(), [1.0, -3.0]);
    let w = Weight::from_f32("f", vec![], &[7.5]).unwrap();
    assert_eq!((w.rows(), w.cols(), w.to_f32()), (1, 1, vec![7.5]));
}

#[test]
fn rows_and_slices_share_the_bytes() {
    let values: Vec<f32> = (0..6 * 64).map(|i| i as f32 - 100.0).collect();
    let bytes = quantize(QuantFormat::Q8_0, &values).unwrap();
    let w =
        Weight::new("experts", WeightType::Quant(QuantFormat::Q8_0), vec![2, 3, 64], SharedBytes::new(bytes))
            .unwrap();
    assert_eq!((w.rows(), w.cols(), w.row_bytes()), (6, 64, 68));
    let all = w.to_f32();

    let rows = w.slice_rows(2..4).unwrap();
    assert_eq!(rows.shape(), [2, 64]);
    assert_eq!(rows.to_f32(), all[128..256]);
    assert_eq!(rows.bytes().as_slice().as_ptr(), w.bytes().as_slice()[2 * 68..].as_ptr());

    let expert = w.slice_outer(1).unwrap();
    assert_eq!((expert.name(), expert.shape()), ("experts[1]", &[3usize, 64][..]));
    assert_eq!(expert.to_f32(), all[192..]);

    let mut row = vec![0f32; 64];
    w.dequantize_row(5, &mut row).unwrap();
    assert_eq!(row, all[320..]);
    assert!(matches!(w.dequantize_row(6, &mut row), Err(WeightError::Rows { rows: 6, .. })));
    assert!(matches!(w.dequantize_row(0, &mut row[1..]), Err(WeightError::RowLength { actual: 63, .. })));
    assert!(w.slice_rows(5..7).is_err());
    assert!(w.slice_outer(2).is_err());
    assert!(w.row(usize::MAX).is_none());
}

#[test]
fn casts_need_alignment() {
    let bytes = SharedBytes::from([1.0f32, 2.0].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    if let Some(values) = bytes.try_cast::<f32>() {
        assert_eq!(values, [1.0, 2.0]);
    }
    let odd = bytes.slice(1..5).unwrap();
    let aligned = (odd.as_slice().as_ptr() as usize).is_multiple_of(4);
    assert_eq!(odd.try_cast::<f32>().is_some(), aligned);
    assert!(bytes.slice(5..9).is_none());
}
