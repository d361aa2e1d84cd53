//! Modules as backends ask for them, each in its own name.

use super::common::refuse;
use crate::{
    CudaExec,
    modules::{Module, ModuleError, ModuleFolder, Want, installed},
};
use headway_attention::{Refusal, Result};
use std::sync::Arc;

/// Whether a module of this kind and form is there for the device.
pub(super) fn is_built(cx: &CudaExec, want: Want<'_>) -> bool {
    let arch = cx.info().arch().to_string();
    installed().as_ref().is_ok_and(|folder| folder.find(&Want { arch: Some(&arch), ..want }).is_some())
}

/// Opens the module of a kind and form, as builder and layer do.
///
/// # Errors
/// None was built, in the backend's name; what is wrong with it.
pub(super) fn open(backend: &str, cx: &CudaExec, want: Want<'_>) -> Result<Arc<Module>> {
    let folder =
        installed().as_ref().map_err(|e| refuse(backend, e.to_string(), "mend or remove that folder"))?;
    let arch = cx.info().arch().to_string();
    let want = Want { arch: Some(&arch), ..want };
    let entry = folder.find(&want);
    let entry =
        entry.ok_or_else(|| refuse(backend, format!("{} is not built", want.file()), &want.command()))?;
    Ok(Module::open(folder, entry, Some(&arch)).map_err(crate::CudaError::from)?)
}

/// Why a layer is refused: none of the modules that would serve it is built. The last one's command is named.
pub(super) fn not_built(
    installed: &std::result::Result<ModuleFolder, ModuleError>,
    wants: &[Want<'_>],
) -> Option<Refusal> {
    let folder = match installed {
        Ok(folder) => folder,
        Err(e) => return Some(e.to_string().into()),
    };
    if wants.iter().any(|want| folder.find(want).is_some()) {
        return None;
    }
    wants.last().map(|want| format!("not built: run {}", want.command()).into())
}
