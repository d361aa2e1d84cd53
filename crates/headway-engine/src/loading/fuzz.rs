//! Bodies of the fuzz targets for weight files, shared by `cargo fuzz` and the mutation tests.
//!
//! Each takes any bytes, runs the parser, and checks what must hold of every answer: ranges inside the
//! file, sizes that agree with shapes, messages of one line. They panic when it does not.
//!
//! Not for use outside tests.

use super::LoadError;
use super::gguf::{self, check::check_hyperparameters};
use super::safetensors;
use std::ops::Range;
use std::path::Path;

/// What a parser made of some bytes: `true` when it accepted them.
pub type Accepted = bool;

/// Parses `data` as a GGUF file.
pub fn gguf_header(data: &[u8]) -> Accepted {
    match gguf::Header::parse(Path::new("fuzz.gguf"), data) {
        Ok(header) => {
            for tensor in &header.tensors {
                let elems = tensor.shape.iter().product();
                check_range(&tensor.range, tensor.dtype.bytes_for(elems), data);
            }
            for (key, _) in header.metadata.iter() {
                assert!(header.metadata.contains(key));
            }
            if let Err(error) = check_hyperparameters(&header.metadata) {
                check_message(&error);
            }
            true
        }
        Err(error) => {
            check_message(&error);
            false
        }
    }
}

/// Parses `data` as a safetensors file.
pub fn safetensors_header(data: &[u8]) -> Accepted {
    match safetensors::Header::parse(Path::new("fuzz.safetensors"), data) {
        Ok(header) => {
            for entry in &header.entries {
                let bits = entry.shape.iter().product::<usize>() * entry.dtype.bitsize();
                check_range(&entry.range, Some(bits / 8), data);
            }
            true
        }
        Err(error) => {
            check_message(&error);
            false
        }
    }
}

fn check_range(range: &Range<usize>, size: Option<usize>, data: &[u8]) {
    assert_eq!(Some(range.len()), size);
    assert!(data.get(range.clone()).is_some());
}

fn check_message(error: &LoadError) {
    let message = error.to_string();
    assert!(message.contains("fuzz."), "the message does not name the file: {message}");
    assert!(!message.contains(char::is_control), "the message is not one line: {message:?}");
    assert!(message.len() < 4096, "the message is too long: {message}");
}
