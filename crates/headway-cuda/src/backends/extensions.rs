//! Extension modules as backends ask for them, each in its own name; and what their kernels rely on of a step.

use super::common::refuse;
use crate::modules::{
    ModuleError, ModuleFolder,
    extension::{Extension, Extensions},
    installed,
};
use headway_attention::{AttentionError, CommonAttentionMetadata, Refusal, Result};
use std::sync::Arc;

/// What brings the modules.
const COMMAND: &str = "run headway kernels fetch flash-attn";

/// The module, opened once a process.
///
/// # Errors
/// It was not fetched, in the backend's name; what is wrong with it.
pub(super) fn open(backend: &str, which: Extensions) -> Result<Arc<Extension>> {
    let folder =
        installed().as_ref().map_err(|e| refuse(backend, e.to_string(), "mend or remove that folder"))?;
    let entry = folder.extension(which);
    let entry = entry.ok_or_else(|| refuse(backend, format!("{which} is not fetched"), COMMAND))?;
    Ok(Extension::open(folder, entry).map_err(crate::CudaError::from)?)
}

/// Why every layer is refused: the module was not fetched.
pub(super) fn not_fetched(
    installed: &std::result::Result<ModuleFolder, ModuleError>,
    which: Extensions,
) -> Option<Refusal> {
    match installed {
        Err(e) => Some(e.to_string().into()),
        Ok(folder) => folder.extension(which).is_none().then(|| format!("not fetched: {COMMAND}").into()),
    }
}

/// One more than the highest page that one of the first requests has.
///
/// # Errors
/// A request longer than its row of the table; a page below 0.
pub(super) fn pages_end(common: &CommonAttentionMetadata, reqs: usize, page_size: usize) -> Result<usize> {
    let mut highest = -1;
    for (i, &len) in common.inputs.seq_lens_upper_bound.iter().take(reqs).enumerate() {
        let table = common.blocks_of(i);
        let pages = usize::try_from(len).unwrap_or(0).div_ceil(page_size);
        let held = table.get(..pages).filter(|held| held.iter().all(|&p| p >= 0));
        let Some(held) = held else {
            return Err(AttentionError::Inputs(format!(
                "request {i} of {len} tokens has no {pages} pages of {page_size} in a row of {}",
                table.len()
            )));
        };
        highest = held.iter().copied().max().unwrap_or(-1).max(highest);
    }
    Ok((highest + 1) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::extension::ExtensionEntry;
    use headway_attention::StepInputs;
    use headway_tensor::{Dual, View};

    #[test]
    fn without_its_module_every_layer_is_refused_with_the_command() {
        let dir = tempfile::tempdir().unwrap();
        let mut folder = ModuleFolder::open(dir.path()).unwrap();
        let says = |folder: &ModuleFolder| {
            not_fetched(&Ok(folder.clone()), Extensions::FlashAttention3).map(|r| r.to_string())
        };
        assert_eq!(says(&folder).as_deref(), Some("not fetched: run headway kernels fetch flash-attn"));
        folder.put_extension(ExtensionEntry::of(Extensions::FlashMla)).unwrap();
        assert!(says(&folder).is_some());
        folder.put_extension(ExtensionEntry::of(Extensions::FlashAttention3)).unwrap();
        assert_eq!(says(&ModuleFolder::open(dir.path()).unwrap()), None);
        std::fs::write(dir.path().join("manifest.json"), "{").unwrap();
        let refused = not_fetched(&ModuleFolder::open(dir.path()), Extensions::FlashMla).unwrap().to_string();
        assert!(refused.contains("manifest.json: not JSON"), "{refused}");
    }

    #[test]
    fn pages_that_are_not_there_are_refused() {
        let common = |table: Vec<i32>| {
            let (starts, lens) = (Dual::from_vec(vec![0, 1, 2]), vec![9, 9]);
            let inputs = StepInputs::new(starts, View::from_vec(lens.clone()), lens).unwrap();
            let slots = View::from_vec(vec![-1; 2]);
            CommonAttentionMetadata::new(inputs.into(), Dual::from_vec(table), 2, slots).unwrap()
        };
        assert_eq!(pages_end(&common(vec![7, 0, 3, 99]), 2, 16).unwrap(), 8);
        assert_eq!(pages_end(&common(vec![7, 5, 3, 9]), 2, 8).unwrap(), 10);
        assert_eq!(pages_end(&common(vec![7, 5, 3, 9]), 1, 8).unwrap(), 8);
        assert!(pages_end(&common(vec![7, -1, 3, 9]), 2, 8).is_err());
        let short = pages_end(&common(vec![7, 1, 3, 9]), 2, 4).unwrap_err().to_string();
        assert!(short.contains("3 pages of 4"), "{short}");
    }
}
