//! Any bytes as the manifest of a folder of kernel modules, and of one of Triton kernels.
#![no_main]

use headway_cuda::modules::{Manifest, triton::TritonManifest};
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|data: &[u8]| {
    let path = Path::new("manifest.json");
    if let Ok(manifest) = Manifest::parse(data, path) {
        assert_eq!(Manifest::parse(manifest.write().as_bytes(), path).ok(), Some(manifest));
    }
    let _ = TritonManifest::parse(data, path);
});
