//! Block formats against the reference decoder of the `gguf` package (committed fixture), against a slow
//! decoder written weight by weight from the published layouts, and round trips of the encoders.
//!
//! Not for speed.

use headway_tensor::quant::{
    self, MAX_BLOCK_ELEMS, MAX_SUB_BLOCKS, QuantError, QuantFormat, dequantize, quantize, unpack_block,
};
use proptest::prelude::*;

const FIXTURE: &[u8] = include_bytes!("data/quant_blocks.bin");

struct Record {
    format: QuantFormat,
    kind: u32,
    bytes: Vec<u8>,
    values: Vec<f32>,
}

fn take<'a>(rest: &mut &'a [u8], n: usize) -> &'a [u8] {
    let (head, tail) = rest.split_at(n);
    *rest = tail;
    head
}

fn fixture() -> Vec<Record> {
    let (mut rest, mut records) = (FIXTURE, Vec::new());
    while !rest.is_empty() {
        let header: Vec<u32> =
            (0..4).map(|_| u32::from_le_bytes(*take(&mut rest, 4).first_chunk().unwrap())).collect();
        let bytes = take(&mut rest, header[2] as usize).to_vec();
        let values = take(&mut rest, header[3] as usize * 4);
        records.push(Record {
            format: QuantFormat::from_ggml_type_id(header[0]).unwrap(),
            kind: header[1],
            bytes,
            values: values.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        });
    }
    records
}

#[test]
fn decodes_as_the_gguf_package_does() {
    let mut seen = 0;
    for record in fixture().iter().filter(|r| r.kind == 0) {
        let mut out = vec![f32::NAN; record.values.len()];
        dequantize(record.format, &record.bytes, &mut out).unwrap();
        for (i, (ours, theirs)) in out.iter().zip(&record.values).enumerate() {
            assert_eq!(ours, theirs, "{} weight {i}", record.format);
        }
        seen += 1;
    }
    assert_eq!(seen, QuantFormat::ALL.len());
}

#[test]
fn encodes_as_the_gguf_package_does() {
    let mut seen = 0;
    for record in fixture().iter().filter(|r| r.kind == 1) {
        assert_eq!(quantize(record.format, &record.values).unwrap(), record.bytes, "{}", record.format);
        seen += 1;
    }
    assert_eq!(seen, 5);
}

/// The bits `at..at + n` of byte `index`.
fn bits(block: &[u8], index: usize, at: usize, n: usize) -> i32 {
    i32::from(block[index] >> at) & ((1 << n) - 1)
}

fn half_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_bits(u16::from_le_bytes([block[at], block[at + 1]])).to_f32()
}

/// Six-bit scale and minimum of sub-block `s` out of the 12 bytes at `at`.
fn scale_min(block: &[u8], at: usize, s: usize) -> (f32, f32) {
    let (scale, min) = if s < 4 {
        (bits(block, at + s, 0, 6), bits(block, at + 4 + s, 0, 6))
    } else {
        (
            bits(block, at + 4 + s, 0, 4) | (bits(block, at + s - 4, 6, 2) << 4),
            bits(block, at + 4 + s, 4, 4) | (bits(block, at + s, 6, 2) << 4),
        )
    };
    (scale as f32, min as f32)
}

/// Weight `i` of a block, computed on its own in the order of operations that ggml has.
fn slow_weight(format: QuantFormat, b: &[u8], i: usize) -> f32 {
    let nibble = |at: usize| bits(b, at + i % 16, if i < 16 { 0 } else { 4 }, 4);
    let fifth = |at: usize| bits(b, at + i / 8, i % 8, 1) << 4;
    let (half, in_half) = (i / 128, i % 128);
    let pair = |at: usize| bits(b, at + half * 32 + i % 32, 2 * (in_half / 32), 2);
    let k_nibble = |at: usize| bits(b, at + i / 64 * 32 + i % 32, if i % 64 < 32 { 0 } else { 4 }, 4);
    match format {
        QuantFormat::Q8_0 => f32::from(b[2 + i] as i8) * half_at(b, 0),
        QuantFormat::Q4_0 => (nibble(2) - 8) as f32 * half_at(b, 0),
        QuantFormat::Q4_1 => nibble(4) as f32 * half_at(b, 0) + half_at(b, 2),
        QuantFormat::Q5_0 => ((nibble(6) | fifth(2)) - 16) as f32 * half_at(b, 0),
        QuantFormat::Q5_1 => (nibble(8) | fifth(4)) as f32 * half_at(b, 0) + half_at(b, 2),
        QuantFormat::Q2_K => {
            let (scale, min) = (bits(b, i / 16, 0, 4) as f32, bits(b, i / 16, 4, 4) as f32);
            half_at(b, 80) * scale * pair(16) as f32 - half_at(b, 82) * min
        }
        QuantFormat::Q3_K => {
            let s = i / 16;
            let low = bits(b, 96 + s % 8, if s < 8 { 0 } else { 4 }, 4);
            let scale = (low | (bits(b, 104 + s % 4, 2 * (s / 4), 2) << 4)) - 32;
            let q = pair(32) - if bits(b, i % 32, i / 32, 1) == 1 { 0 } else { 4 };
            half_at(b, 108) * scale as f32 * q as f32
        }
        QuantFormat::Q4_K => {
            let (scale, min) = scale_min(b, 4, i / 32);
            half_at(b, 0) * scale * k_nibble(16) as f32 - half_at(b, 2) * min
        }
        QuantFormat::Q5_K => {
            let (scale, min) = scale_min(b, 4, i / 32);
            let q = k_nibble(48) | (bits(b, 16 + i % 32, i / 32, 1) << 4);
            half_at(b, 0) * scale * q as f32 - half_at(b, 2) * min
        }
        QuantFormat::Q6_K => {
            let quarter = in_half / 32;
            let low = bits(b, half * 64 + in_half % 64, if quarter < 2 { 0 } else { 4 }, 4);
            let high = bits(b, 128 + half * 32 + i % 32, 2 * quarter, 2);
            half_at(b, 208) * f32::from(b[192 + i / 16] as i8) * ((low | (high << 4)) - 32) as f32
        }
    }
}

/// Byte offsets of the half-precision numbers in a block.
fn halves(format: QuantFormat) -> &'static [usize] {
    match format {
        QuantFormat::Q8_0 | QuantFormat::Q4_0 | QuantFormat::Q5_0 => &[0],
        QuantFormat::Q4_1 | QuantFormat::Q5_1 | QuantFormat::Q4_K | QuantFormat::Q5_K => &[0, 2],
        QuantFormat::Q2_K => &[80, 82],
        QuantFormat::Q3_K => &[108],
        QuantFormat::Q6_K => &[208],
    }
}

fn valid_block() -> impl Strategy<Value = (QuantFormat, Vec<u8>)> {
    let format = prop::sample::select(&QuantFormat::ALL[..]);
    format.prop_flat_map(|format| {
        prop::collection::vec(any::<u8>(), format.block_bytes()).prop_map(move |mut block| {
            for &at in halves(format) {
                // an exponent of all ones would be infinity or NaN
                if block[at + 1] & 0x7c == 0x7c {
                    block[at + 1] &= !0x40;
                }
            }
            (format, block)
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn unpacked_and_decoded_and_slow_agree((format, block) in valid_block()) {
        let mut out = vec![f32::NAN; format.block_elems()];
        dequantize(format, &block, &mut out).unwrap();
        let (mut q, mut d, mut m) = ([0xa5; MAX_BLOCK_ELEMS], [f32::NAN; MAX_SUB_BLOCKS], [f32::NAN; MAX_SUB_BLOCKS]);
        unpack_block(format, &block, &mut q, &mut d, &mut m);
        for (i, &w) in out.iter().enumerate() {
            let s = i / format.sub_block();
            let qi = if format.signed() { i32::from(q[i] as i8) } else { i32::from(q[i]) };
            prop_assert!(qi.unsigned_abs() <= u32::from(format.max_q()));
            prop_assert_eq!(w, d[s] * qi as f32 + m[s], "{} weight {}", format, i);
            prop_assert_eq!(w, slow_weight(format, &block, i), "{} weight {}", format, i);
            if let Some(zero) = format.zero_point() {
                prop_assert_eq!(m[s], -f32::from(zero) * d[s]);
            }
            prop_assert!(format.has_min() || m[s] == 0.0);
        }
        // nothing beyond the block is written
        prop_assert!(q[format.block_elems()..].iter().all(|&q| q == 0xa5));
        prop_assert!(d[format.sub_blocks()..].iter().all(|d| d.is_nan()));
    }

    #[test]
    fn encoding_is_within_a_step(
        which in 0usize..5,
        scale in 1e-3f32..100.0,
        x in prop::collection::vec(-1f32..1.0, 64),
    ) {
        let formats = [QuantFormat::Q8_0, QuantFormat::Q4_0, QuantFormat::Q4_1, QuantFormat::Q5_0, QuantFormat::Q5_1];
        let format = formats[which];
        let x: Vec<f32> = x.iter().map(|v| v * scale).collect();
        let bytes = quantize(format, &x).unwrap();
        let mut back = vec![0f32; 64];
        dequantize(format, &bytes, &mut back).unwrap();
        for (block, (x, back)) in bytes.chunks(format.block_bytes()).zip(x.chunks(32).zip(back.chunks(32))) {
            // symmetric formats clip the side opposite to the extreme by up to a whole step
            let steps = if matches!(format, QuantFormat::Q4_0 | QuantFormat::Q5_0) { 2.05 } else { 1.05 };
            let bound = quant::encode::half_step(block) * steps + scale * 2e-3;
            for (x, back) in x.iter().zip(back) {
                prop_assert!((x - back).abs() <= bound, "{}: {} became {}, bound {}", format, x, back, bound);
            }
        }
    }
}

#[test]
fn wrong_lengths_are_errors() {
    let mut out = vec![0f32; 33];
    let error = dequantize(QuantFormat::Q4_0, &[0; 18], &mut out).unwrap_err();
    assert!(matches!(error, QuantError::PartialBlock { elems: 33, block: 32, .. }), "{error}");
    let error = dequantize(QuantFormat::Q4_0, &[0; 17], &mut out[..32]).unwrap_err();
    assert_eq!(error.to_string(), "32 weights in Q4_0 take 18 bytes, but 17 were given");
    assert!(matches!(
        quantize(QuantFormat::Q4_K, &[0.0; 256]),
        Err(QuantError::NoEncoder(QuantFormat::Q4_K))
    ));
    assert!(matches!(quantize(QuantFormat::Q8_0, &[0.0; 31]), Err(QuantError::PartialBlock { .. })));
}

#[test]
fn type_numbers_are_unique_and_reversible() {
    for format in QuantFormat::ALL {
        assert_eq!(QuantFormat::from_ggml_type_id(format.ggml_type_id()), Some(format));
        assert_eq!(format.sub_blocks() * format.sub_block(), format.block_elems());
    }
    assert_eq!(QuantFormat::from_ggml_type_id(39), None);
}
