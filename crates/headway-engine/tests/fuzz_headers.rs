//! The fuzz bodies over seeded mutations of weight-file headers: no panic, no absurd allocation.
//!
//! Small sound files are built here and mutated 100,000 times each; with `HEADWAY_MODELS_DIR` set, the
//! headers of the files there are mutated too, 300 times each. `HEADWAY_FUZZ_SEED` and
//! `HEADWAY_FUZZ_MUTATIONS` choose another seed and count.
//!
//! Not a replacement for coverage-guided runs: `fuzz/` has those, with the same bodies.

use headway_engine::loading::gguf::write::GgufWriter;
use headway_engine::loading::{GgufFile, fuzz};
use headway_tensor::quant::{QuantFormat, quantize};
use headway_tensor::{SharedBytes, Weight, WeightType};
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// More than the test itself, its threads and small files can take.
const ABSURD_KIB: u64 = 1 << 20;
const HUGE: [u64; 12] = [
    u64::MAX,
    i64::MAX as u64,
    1 << 63,
    1 << 62,
    1 << 61,
    1 << 40,
    u32::MAX as u64,
    1 << 31,
    1 << 20,
    513,
    1,
    0,
];

/// A fuzz body.
type Body = fn(&[u8]) -> fuzz::Accepted;

/// A splitmix64 generator: enough for choosing mutations, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next() % n as u64) as usize }
    }
}

/// Changes `bytes` in one to five places inside `region`.
fn mutate(bytes: &mut Vec<u8>, region: &Range<usize>, random: &mut Random) {
    for _ in 0..=random.below(4) {
        let len = bytes.len();
        let at = region.start.min(len) + random.below(region.end.min(len).saturating_sub(region.start));
        match random.below(8) {
            0 => bytes.iter_mut().skip(at).take(1).for_each(|b| *b ^= 1 << random.below(8)),
            1 => bytes.iter_mut().skip(at).take(1).for_each(|b| *b = random.next() as u8),
            2 => bytes.truncate(at),
            3 | 4 => {
                let huge = HUGE[random.below(HUGE.len())].to_le_bytes();
                let size = [4, 8][random.below(2)];
                bytes.iter_mut().skip(at).zip(&huge[..size]).for_each(|(b, huge)| *b = *huge);
            }
            5 => {
                let end = (at + random.below(16)).min(bytes.len());
                bytes.drain(at..end);
            }
            6 => {
                let piece: Vec<u8> =
                    bytes.iter().skip(random.below(len)).take(random.below(24)).copied().collect();
                bytes.splice(at..at, piece);
            }
            _ => replace_digits(bytes, at, random),
        }
    }
}

/// Puts another number in the place of the next decimal digits, as JSON headers need.
fn replace_digits(bytes: &mut Vec<u8>, from: usize, random: &mut Random) {
    let Some(start) = (from..bytes.len()).find(|&i| bytes[i].is_ascii_digit()) else { return };
    let end = (start..bytes.len()).find(|&i| !bytes[i].is_ascii_digit()).unwrap_or(bytes.len());
    let number = match random.below(4) {
        0 => format!("-{}", HUGE[random.below(HUGE.len())]),
        1 => "1e308".to_owned(),
        _ => HUGE[random.below(HUGE.len())].to_string(),
    };
    bytes.splice(start..end, number.into_bytes());
}

/// The most address space this process has had, in KiB, where the system tells.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}

/// What is mutated, and where.
struct Case<'a> {
    name: &'a str,
    bytes: &'a [u8],
    regions: Vec<Range<usize>>,
    count: u64,
    body: Body,
}

impl Case<'_> {
    /// Mutates each region in turn and runs the body on the result.
    fn run(&self) {
        let name = self.name;
        let seed = number("HEADWAY_FUZZ_SEED", 20_240_607);
        let (before, mut random, mut accepted) = (peak_kib(), Random(seed), 0u64);
        for (_, region) in (0..self.count).zip(self.regions.iter().cycle()) {
            let mut bytes = self.bytes.to_vec();
            mutate(&mut bytes, region, &mut random);
            accepted += u64::from((self.body)(&bytes));
        }
        let (count, grown) = (self.count, peak_kib() - before);
        println!(
            "{name}: {count} mutations with seed {seed}, {accepted} accepted, address space grew by {grown} KiB"
        );
        assert!(grown < ABSURD_KIB, "{name}: address space grew by {grown} KiB");
        assert!(accepted < count, "{name}: no mutation was refused");
    }
}

/// The number in an environment variable, or `default`.
fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().map_or(default, |text| text.parse().expect("a number"))
}

/// A whole small file.
fn small(name: &str, bytes: &[u8], body: Body) {
    assert!(body(bytes), "{name}: the sound file is refused");
    let (regions, count) =
        (vec![Range { start: 0, end: bytes.len() }], number("HEADWAY_FUZZ_MUTATIONS", 100_000));
    Case { name, bytes, regions, count, body }.run();
}

fn small_gguf() -> Vec<u8> {
    let values: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let quantised = SharedBytes::from(quantize(QuantFormat::Q4_0, &values).unwrap());
    GgufWriter::new("llama")
        .u32("general.alignment", 32)
        .u32("llama.block_count", 2)
        .u32("llama.embedding_length", 32)
        .u32("llama.attention.head_count", 4)
        .u32("llama.attention.head_count_kv", 2)
        .f32("llama.rope.freq_base", 1e4)
        .bool("tokenizer.ggml.add_bos_token", false)
        .strings("tokenizer.ggml.tokens", &["a", "b", "cd", "日"])
        .f32s("tokenizer.ggml.scores", &[0.0, 1.0, 2.0, 3.0])
        .i32s("tokenizer.ggml.token_type", &[1, 1, 1, 1])
        .tensor(&Weight::from_f32("norm.weight", vec![64], &values).unwrap())
        .tensor(
            &Weight::new("blk.0.w", WeightType::Quant(QuantFormat::Q4_0), vec![2, 32], quantised).unwrap(),
        )
        .finish()
}

fn small_safetensors() -> Vec<u8> {
    let json = r#"{"__metadata__":{"format":"pt"},"model.norm.weight":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"model.layers.0.w":{"dtype":"BF16","shape":[4,2],"data_offsets":[16,32]},"ids":{"dtype":"I64","shape":[1],"data_offsets":[32,40]}}"#;
    [(json.len() as u64).to_le_bytes().as_slice(), json.as_bytes(), &[0; 40]].concat()
}

#[test]
fn mutated_gguf_headers() {
    small("small GGUF", &small_gguf(), fuzz::gguf_header);
}

#[test]
fn mutated_safetensors_headers() {
    small("small safetensors", &small_safetensors(), fuzz::safetensors_header);
}

/// Every number that stands at a byte boundary replaced by every huge one.
#[test]
fn huge_numbers_everywhere() {
    let bodies: [(Vec<u8>, Body); 2] =
        [(small_gguf(), fuzz::gguf_header), (small_safetensors(), fuzz::safetensors_header)];
    for (file, body) in bodies {
        let mut accepted = 0;
        for at in 0..file.len().saturating_sub(8) {
            for huge in HUGE {
                let mut bytes = file.clone();
                bytes[at..at + 8].copy_from_slice(&huge.to_le_bytes());
                accepted += u32::from(body(&bytes));
            }
        }
        assert!(accepted > 0);
    }
}

#[test]
fn mutated_headers_of_given_files() {
    let Some(dir) = std::env::var_os("HEADWAY_MODELS_DIR") else {
        println!("HEADWAY_MODELS_DIR is not set: only small built files are mutated");
        return;
    };
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        let file = if path.is_dir() { path.join("model.safetensors") } else { path };
        match file.extension().and_then(|e| e.to_str()) {
            Some("safetensors") if file.is_file() => given_safetensors(&file),
            Some("gguf") => given_gguf(&file),
            _ => {}
        }
    }
}

fn given_safetensors(path: &Path) {
    let bytes = std::fs::read(path).unwrap();
    assert!(fuzz::safetensors_header(&bytes));
    let end = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let (name, count) = (&*path.to_string_lossy(), number("HEADWAY_FUZZ_MUTATIONS", 300));
    let regions = vec![Range { start: 0, end }];
    Case { name, bytes: &bytes, regions, count, body: fuzz::safetensors_header }.run();
}

/// Mutates the front of the header (counts, metadata) and its end (the tensor directory). The data is left
/// off, since it is hundreds of megabytes: what still reads well is refused as truncated at the end.
fn given_gguf(path: &Path) {
    let file = GgufFile::open(path).unwrap();
    let header = file.tensors().map(|tensor| tensor.range.start).min().unwrap();
    let mut bytes = vec![0; header];
    std::fs::File::open(path).unwrap().read_exact(&mut bytes).unwrap();
    let (name, count) = (&*path.to_string_lossy(), number("HEADWAY_FUZZ_MUTATIONS", 300));
    let regions = vec![0..4096.min(header), header.saturating_sub(16_384)..header];
    Case { name, bytes: &bytes, regions, count, body: fuzz::gguf_header }.run();
}
