//! Triton kernels as backends ask for them, each in its own name.

use super::common::refuse;
use crate::{
    CudaExec,
    device::shared_per_block,
    kernels::triton::LoadError,
    modules::triton::{TritonError, TritonFolder, TritonWant, installed_triton},
};
use headway_attention::{Refusal, process::rules::ComputeCapability};

/// Loads a layer's kernels for the device.
///
/// # Errors
/// None were built, in the backend's name; what is wrong with them; the driver's.
pub(super) fn load<T>(
    backend: &str,
    cx: &CudaExec,
    want: TritonWant<'_>,
    kernels: impl FnOnce(&CudaExec, &TritonFolder, &TritonWant<'_>) -> Result<T, LoadError>,
) -> headway_attention::Result<T> {
    let arch = cx.info().arch().to_string();
    let want = TritonWant { arch: Some(&arch), ..want };
    let folder = installed_triton();
    let folder = folder.as_ref().map_err(|e| refuse(backend, e.to_string(), "mend or remove that file"))?;
    kernels(cx, folder, &want).map_err(|e| match e {
        LoadError::Cuda(e) => e.into(),
        other => refuse(backend, other.to_string(), &format!("run {}", want.command())),
    })
}

/// Why no kernels serve a layer on a device of this capability: they are not built, their files are not there any more, or
/// they take more shared memory than a block has there. No file is opened.
pub(super) fn not_built(
    installed: &Result<TritonFolder, TritonError>,
    want: &TritonWant<'_>,
    capability: Option<ComputeCapability>,
) -> Option<Refusal> {
    let folder = match installed {
        Ok(folder) => folder,
        Err(e) => return Some(e.to_string().into()),
    };
    if !folder.has(want) {
        return Some(format!("not built: run {}", want.command()).into());
    }
    match folder.lies(want) {
        Ok(()) => {}
        Err(e @ TritonError::File { .. }) => return Some(e.to_string().into()),
        // It ends with the command, which lacks what to build.
        Err(e) => return Some(format!("{e}{}", want.options()).into()),
    }
    let capability = capability?;
    let most = shared_per_block((capability.0, capability.1))?;
    let takes = want.kinds().iter().filter_map(|&kind| folder.find(&want.form(kind), want.arch));
    let large = takes.filter(|e| e.shared as usize > most).max_by_key(|e| e.shared)?;
    Some(
        format!(
            "{}: a block takes {} bytes of shared memory, the device has {most} (compute capability {capability})",
            large.file, large.shared
        )
        .into(),
    )
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::modules::triton::{TRITON, TRITON_MANIFEST, TritonEntry, TritonManifest, recipe};

    /// A folder whose manifest has what a layer wants, for Hopper, each entry changed.
    pub(in crate::backends) fn folder(
        want: TritonWant<'_>,
        change: impl Fn(&mut TritonEntry),
    ) -> (tempfile::TempDir, Result<TritonFolder, TritonError>) {
        let dir = tempfile::tempdir().unwrap();
        let kernels = want.kinds().iter().map(|&kind| {
            let form = want.form(kind);
            let mut entry = TritonEntry {
                file: form.name("sm_90a") + ".cubin",
                function: kind.function().into(),
                kind,
                dtype: want.dtype.into(),
                head_size: form.head_size,
                soft_cap: form.soft_cap,
                arch: "sm_90a".into(),
                rows: form.rows(),
                keys: form.keys(),
                num_warps: form.warps(),
                num_stages: 1,
                shared: 0,
                arguments: form.arguments(),
                triton: TRITON.into(),
                recipe: recipe().into(),
                bytes: 1,
                sha256: String::new(),
                sum: String::new(),
            };
            change(&mut entry);
            std::fs::write(dir.path().join(&entry.file), "x").unwrap();
            entry.sealed()
        });
        let manifest = TritonManifest { kernels: kernels.collect(), ..TritonManifest::default() };
        std::fs::write(dir.path().join(TRITON_MANIFEST), manifest.write()).unwrap();
        let folder = TritonFolder::open(dir.path());
        (dir, folder)
    }
}
