//! Where bytes lie: host buffers that are safe to read as slices, device allocations that are an
//! address with a keep-alive, and [`Exec`], what a kernel call needs of its device.

use std::{any::Any, fmt, sync::Arc};

/// A device by kind and index, as users write it (`cpu`, `cuda:0`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Device {
    /// `cpu`, `cuda`, or what a plugin's device crate calls itself.
    pub kind: &'static str,
    /// Index among the devices of that kind.
    pub index: u32,
}

impl Device {
    /// The host processor.
    pub const CPU: Self = Self { kind: "cpu", index: 0 };
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self { kind: "cpu", .. } => f.write_str("cpu"),
            Self { kind, index } => write!(f, "{kind}:{index}"),
        }
    }
}

/// Plain data that step inputs are made of.
pub trait Pod: bytemuck::Pod + Default + Send + Sync + fmt::Debug + 'static {}
impl<T: bytemuck::Pod + Default + Send + Sync + fmt::Debug + 'static> Pod for T {}

/// One device allocation. Freeing is stream-ordered, in `Drop`.
pub trait DeviceMem: Send + Sync + Any + fmt::Debug {
    /// The device that holds the memory.
    fn device(&self) -> Device;
    /// Address on that device; constant for the life of the allocation.
    fn addr(&self) -> u64;
    /// Length in bytes.
    fn bytes(&self) -> usize;
}

/// What a kernel call needs from its device: a stream or a thread pool. One thread drives a step,
/// so an implementation is `Send` but need not be `Sync`. Upcasts to `dyn Any`: the erasing layer of
/// the contract downcasts it once to the backend's own type.
pub trait Exec: Any {
    /// The device that calls run on.
    fn device(&self) -> Device;
    /// Allocates device memory. `None`: host memory is the device's memory.
    fn alloc(&self, bytes: usize) -> Option<Arc<dyn DeviceMem>>;
    /// Copies host bytes to device memory, stream-ordered; the source is staged before this returns.
    fn upload(&self, dst: &Arc<dyn DeviceMem>, offset: usize, src: &[u8]);
    /// Whether calls are being recorded into a graph now.
    fn capturing(&self) -> bool {
        false
    }
}

#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Host bytes aligned to 64, zeroed at first (lazily, by the operating system, for large buffers).
pub struct HostBuf {
    lines: Box<[Line]>,
    bytes: usize,
}

impl HostBuf {
    /// `bytes` zero bytes.
    ///
    /// # Errors
    /// [`crate::TensorError::OutOfMemory`] where the allocator refuses.
    pub fn zeroed(bytes: usize) -> crate::Result<Self> {
        let lines = bytemuck::allocation::try_zeroed_slice_box::<Line>(bytes.div_ceil(64)).map_err(|()| {
            crate::TensorError::OutOfMemory { what: "a host buffer".into(), bytes: bytes as u64 }
        })?;
        Ok(Self { lines, bytes })
    }

    /// A copy of `src`.
    ///
    /// # Errors
    /// As [`HostBuf::zeroed`].
    pub fn copy_of<T: bytemuck::NoUninit>(src: &[T]) -> crate::Result<Self> {
        let src: &[u8] = bytemuck::cast_slice(src);
        let mut buf = Self::zeroed(src.len())?;
        buf.as_bytes_mut().copy_from_slice(src);
        Ok(buf)
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// All bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.bytes]
    }

    /// All bytes, writable.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.bytes]
    }
}

impl fmt::Debug for HostBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuf({} bytes)", self.bytes)
    }
}
