//! A writer of small GGUF files, for tests: sound ones and, by way of its raw fields, unsound ones.
//!
//! Not for model files.

use super::tensors::type_id;
use headway_tensor::Weight;

/// The parts of a file to be written.
#[derive(Debug, Clone)]
pub struct GgufWriter {
    /// Version of the format.
    pub version: u32,
    /// Data alignment; `general.alignment` must be among the entries if it is not 32.
    pub alignment: usize,
    /// Metadata entries, encoded.
    entries: Vec<Vec<u8>>,
    /// Name, dimensions (innermost first), type number, offset (`None`: the next free place), data.
    tensors: Vec<RawTensor>,
}

/// A tensor to be written as it is told, sound or not.
#[derive(Debug, Clone)]
pub struct RawTensor {
    /// Its name.
    pub name: String,
    /// Its dimensions, innermost first.
    pub dims: Vec<u64>,
    /// Its ggml type number.
    pub type_id: u32,
    /// Its offset in the data; `None` for the next aligned place.
    pub offset: Option<u64>,
    /// Its bytes.
    pub data: Vec<u8>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self { version: 3, alignment: 32, entries: Vec::new(), tensors: Vec::new() }
    }
}

fn text(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl GgufWriter {
    /// A writer whose file names the architecture `arch`.
    pub fn new(arch: &str) -> Self {
        Self::default().text("general.architecture", arch)
    }

    fn entry(mut self, key: &str, type_id: u32, value: impl FnOnce(&mut Vec<u8>)) -> Self {
        let mut out = Vec::new();
        text(key, &mut out);
        out.extend(type_id.to_le_bytes());
        value(&mut out);
        self.entries.push(out);
        self
    }

    /// Adds an entry whose value is `type_id` followed by these bytes.
    pub fn raw(self, key: &str, type_id: u32, bytes: &[u8]) -> Self {
        self.entry(key, type_id, |out| out.extend(bytes))
    }

    /// Adds an unsigned 32-bit integer.
    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    /// Adds an unsigned 16-bit integer.
    pub fn u16(self, key: &str, value: u16) -> Self {
        self.raw(key, 2, &value.to_le_bytes())
    }

    /// Adds a signed 32-bit integer.
    pub fn i32(self, key: &str, value: i32) -> Self {
        self.raw(key, 5, &value.to_le_bytes())
    }

    /// Adds a float.
    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    /// Adds a boolean.
    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, &[u8::from(value)])
    }

    /// Adds a string.
    pub fn text(self, key: &str, value: &str) -> Self {
        self.entry(key, 8, |out| text(value, out))
    }

    /// Adds an array of strings.
    pub fn strings(self, key: &str, values: &[&str]) -> Self {
        self.entry(key, 9, |out| {
            array_head(8, values.len(), out);
            values.iter().for_each(|value| text(value, out));
        })
    }

    /// Adds an array of floats.
    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        self.entry(key, 9, |out| {
            array_head(6, values.len(), out);
            out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        })
    }

    /// Adds an array of signed 32-bit integers.
    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        self.entry(key, 9, |out| {
            array_head(5, values.len(), out);
            out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        })
    }

    /// Adds a tensor as it is told.
    pub fn raw_tensor(mut self, tensor: RawTensor) -> Self {
        self.tensors.push(tensor);
        self
    }

    /// Adds a weight.
    pub fn tensor(self, weight: &Weight) -> Self {
        self.raw_tensor(RawTensor {
            name: weight.name().to_owned(),
            dims: weight.shape().iter().rev().map(|&dim| dim as u64).collect(),
            type_id: type_id(weight.dtype()),
            offset: None,
            data: weight.bytes().as_slice().to_vec(),
        })
    }

    /// The bytes of the file.
    pub fn finish(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        self.entries.iter().for_each(|entry| out.extend(entry));
        let mut data: Vec<u8> = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            text(&tensor.name, &mut out);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }
}

fn array_head(type_id: u32, len: usize, out: &mut Vec<u8>) {
    out.extend(type_id.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}
