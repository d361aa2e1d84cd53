//! Any bytes as a safetensors file. The body also runs on stable, in the engine's `fuzz_headers` test.
#![no_main]

use headway_engine::loading::fuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    fuzz::safetensors_header(data);
});
