//! The driver itself: whether it is there, how new it is, which devices it shows. Everything here comes before the
//! first call that cudarc would end with a panic for want of a library.

use super::error::{CudaError, Doing, Result};
use cudarc::driver::{CudaContext, DriverError, result, sys};

/// The CUDA version whose entry points and cubins this crate uses.
const NEEDED: i32 = 13000;
/// The first release of the driver that offers it.
pub(crate) const RELEASE: u32 = 580;

/// A CUDA version as the driver counts it, 1000 times the major number, as people write it.
fn written(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn check(version: i32) -> Result<()> {
    if version < NEEDED {
        return Err(CudaError::DriverTooOld { found: written(version), needed: written(NEEDED) });
    }
    Ok(())
}

/// The version of the driver, initialised.
///
/// # Errors
/// No driver, too old a driver, no device.
pub(crate) fn start(ordinal: u32) -> Result<String> {
    // SAFETY: looks for a library by its name; its initialisers are NVIDIA's.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the pointer is to a live integer.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().doing("asking for the driver's version")?;
    check(version)?;
    let count = result::init().and_then(|()| CudaContext::device_count());
    match count {
        Ok(count) if (ordinal as i64) < i64::from(count) => Ok(written(version)),
        Ok(count) if count > 0 => {
            Err(CudaError::NoDevice { ordinal, count: count as u32, says: String::new() })
        }
        Ok(_) => Err(none(ordinal, "it counts none".into())),
        Err(e) => Err(none(ordinal, said(e))),
    }
}

fn none(ordinal: u32, says: String) -> CudaError {
    CudaError::NoDevice { ordinal, count: 0, says }
}

fn said(e: DriverError) -> String {
    match CudaError::driver("", e) {
        CudaError::Driver { name, words, .. } => format!("{name}: {words}"),
        e => e.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_is_named() {
        let e = check(12080).unwrap_err().to_string();
        assert!(e.contains("it offers CUDA 12.8, and CUDA 13.0 is needed"), "{e}");
        assert!(e.contains("580"), "{e}");
        assert!(check(13000).is_ok() && check(13020).is_ok());
    }
}
