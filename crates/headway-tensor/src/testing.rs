//! Devices for this crate's own tests.

use crate::{Device, DeviceMem, Exec, Result};
use std::{cell::RefCell, sync::Arc};

/// The host.
pub(crate) struct Cpu;
impl Exec for Cpu {
    fn device(&self) -> Device {
        Device::CPU
    }
    fn alloc(&self, _: usize) -> Result<Option<Arc<dyn DeviceMem>>> {
        Ok(None)
    }
    fn upload(&self, _: &Arc<dyn DeviceMem>, _: usize, _: &[u8]) {}
}

const NPU: Device = Device { kind: "npu", index: 0 };

#[derive(Debug)]
struct Region(u64, usize);
impl DeviceMem for Region {
    fn device(&self) -> Device {
        NPU
    }
    fn addr(&self) -> u64 {
        self.0
    }
    fn bytes(&self) -> usize {
        self.1
    }
}

/// A copy to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    pub at: usize,
    pub bytes: usize,
}

/// A device that remembers what was copied to it.
#[derive(Default)]
pub(crate) struct Npu(RefCell<Vec<Copied>>);

impl Npu {
    /// The copies since the last call.
    pub fn copies(&self) -> Vec<Copied> {
        self.0.take()
    }
}

impl Exec for Npu {
    fn device(&self) -> Device {
        NPU
    }
    fn alloc(&self, bytes: usize) -> Result<Option<Arc<dyn DeviceMem>>> {
        Ok(Some(Arc::new(Region(0x1000, bytes))))
    }
    fn upload(&self, dst: &Arc<dyn DeviceMem>, at: usize, src: &[u8]) {
        assert!(at + src.len() <= dst.bytes());
        self.0.borrow_mut().push(Copied { at, bytes: src.len() });
    }
}
