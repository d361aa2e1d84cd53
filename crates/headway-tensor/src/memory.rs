//! Where bytes lie: host buffers that are safe to read as slices, device allocations that are an
//! address with a keep-alive, and [`Exec`], what a kernel call needs of its device.

use memmap2::MmapMut;
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

/// Plain data that step inputs are made of. Implemented for every type that can be one; nothing to write.
///
/// ```
/// use headway_tensor::{Pod, View};
/// /// A view of `n` values of any such type.
/// fn blank<T: Pod>(n: usize) -> View<T> {
///     View::from_vec(vec![T::default(); n])
/// }
///
/// assert_eq!(blank::<i32>(2).host(), Some(&[0, 0][..]));
/// assert_eq!(blank::<[f32; 2]>(1).host(), Some(&[[0.0, 0.0]][..]));
/// ```
pub trait Pod: bytemuck::Pod + Default + Send + Sync + fmt::Debug + 'static {}
impl<T: bytemuck::Pod + Default + Send + Sync + fmt::Debug + 'static> Pod for T {}

/// One device allocation. Freeing is stream-ordered, in `Drop`.
///
/// ```
/// use headway_tensor::{DType, Device, DeviceMem, Exec, Tensor};
/// use std::sync::Arc;
/// const NPU: Device = Device { kind: "npu", index: 0 };
/// /// Memory of a device that is not there: an address and a length.
/// #[derive(Debug)]
/// struct Region(u64, usize);
/// impl DeviceMem for Region {
///     fn device(&self) -> Device {
///         NPU
///     }
///     fn addr(&self) -> u64 {
///         self.0
///     }
///     fn bytes(&self) -> usize {
///         self.1
///     }
/// }
/// struct Npu;
/// impl Exec for Npu {
///     fn device(&self) -> Device {
///         NPU
///     }
///     fn alloc(&self, bytes: usize) -> headway_tensor::Result<Option<Arc<dyn DeviceMem>>> {
///         Ok(Some(Arc::new(Region(0x1000, bytes))))
///     }
///     fn upload(&self, dst: &Arc<dyn DeviceMem>, offset: usize, src: &[u8]) {
///         assert!(offset + src.len() <= dst.bytes()); // and a copy, on a real device
///     }
/// }
///
/// let tensor = Tensor::zeros(&Npu, DType::F32, &[2, 3])?;
/// assert_eq!(tensor.view().rows(1..2)?.device_addr(), Some(0x1000 + 12));
/// assert!(tensor.host::<f32>().is_err()); // not the host's to read
/// # Ok::<(), headway_tensor::TensorError>(())
/// ```
pub trait DeviceMem: Send + Sync + Any + fmt::Debug {
    /// The device that holds the memory.
    fn device(&self) -> Device;
    /// Address on that device; constant for the life of the allocation.
    fn addr(&self) -> u64;
    /// Length in bytes.
    fn bytes(&self) -> usize;
}

/// What a kernel call needs from its device: a stream or a thread pool. One thread drives a step, so
/// the trait asks for neither `Send` nor `Sync`; an engine that holds a `dyn Exec` stays on the thread
/// that opened it. Upcasts to `dyn Any`: the erasing layer of the contract downcasts it once to the
/// backend's own type.
///
/// ```
/// use headway_tensor::{Device, DeviceMem, Exec, Tensor};
/// use std::{any::Any, sync::Arc};
/// /// The host, with a number of threads.
/// struct Threads(usize);
/// impl Exec for Threads {
///     fn device(&self) -> Device {
///         Device::CPU
///     }
///     fn alloc(&self, _: usize) -> headway_tensor::Result<Option<Arc<dyn DeviceMem>>> {
///         Ok(None) // host memory is this device's memory
///     }
///     fn upload(&self, _: &Arc<dyn DeviceMem>, _: usize, _: &[u8]) {
///         unreachable!("alloc gives no device memory to copy to")
///     }
/// }
///
/// let cx: &dyn Exec = &Threads(4);
/// let tensor = Tensor::from_slice(cx, &[1f32, 2.0], &[2])?;
/// assert_eq!((tensor.host::<f32>()?, cx.capturing()), (&[1.0, 2.0][..], false));
/// let threads = (cx as &dyn Any).downcast_ref::<Threads>().map(|t| t.0);
/// assert_eq!(threads, Some(4));
/// # Ok::<(), headway_tensor::TensorError>(())
/// ```
pub trait Exec: Any {
    /// The device that calls run on.
    fn device(&self) -> Device;
    /// Allocates device memory, whose bytes are anything. `None`: host memory is the device's memory.
    ///
    /// # Errors
    /// [`crate::TensorError::OutOfMemory`], and the device's own.
    fn alloc(&self, bytes: usize) -> crate::Result<Option<Arc<dyn DeviceMem>>>;
    /// Copies host bytes to device memory, stream-ordered; the source is staged before this returns. A device whose
    /// copy can fail keeps the failure, and its next call that can return an error returns it.
    fn upload(&self, dst: &Arc<dyn DeviceMem>, offset: usize, src: &[u8]);
    /// Zeros device memory, stream-ordered. By default an upload of zeros; devices have something better.
    fn zero(&self, dst: &Arc<dyn DeviceMem>, offset: usize, bytes: usize) {
        const PIECE: usize = 1 << 20;
        let zeros = vec![0; bytes.min(PIECE)];
        for start in (0..bytes).step_by(PIECE) {
            self.upload(dst, offset + start, &zeros[..PIECE.min(bytes - start)]);
        }
    }
    /// Whether calls are being recorded into a graph now.
    fn capturing(&self) -> bool {
        false
    }
    /// What records graphs. `None`: the device has none.
    fn graphs(&self) -> Option<&dyn crate::Graphs> {
        None
    }
}

/// Alignment of host buffers in bytes: a cache line, and a full AVX-512 register.
const ALIGN: usize = 64;
/// Bytes of a large page of memory, on x86-64 and on ARM with small ones of 4 KiB.
const LARGE_PAGE: usize = 2 << 20;
/// Buffers from this size on ask for large pages.
const LARGE_BUFFER: usize = 4 * LARGE_PAGE;

/// Host bytes aligned to 64, zero at first. The system commits a page when it is first touched, so a
/// large buffer costs what is used of it.
///
/// Buffers of 8 MiB and more ask the system (Linux) for pages of 2 MiB: scattered reads of a KV cache then find
/// their addresses without walks through the page tables. Where it has none they are of the usual size.
pub struct HostBuf {
    memory: Memory,
    start: usize,
    bytes: usize,
}

/// Longer than asked: an allocation that asked for the alignment itself would be zeroed by hand, and so
/// committed at once.
enum Memory {
    Heap(Vec<u8>),
    Mapped(MmapMut),
}

impl Memory {
    fn zeroed(bytes: usize) -> Option<(Self, usize)> {
        if bytes < LARGE_BUFFER {
            let memory = bytemuck::allocation::try_zeroed_vec::<u8>(bytes.checked_add(ALIGN)?).ok()?;
            return Some((Self::Heap(memory), ALIGN));
        }
        let memory = MmapMut::map_anon(bytes.checked_add(LARGE_PAGE)?).ok()?;
        // A wish: a system without large pages, or out of them, gives small ones.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        Some((Self::Mapped(memory), LARGE_PAGE))
    }

    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Heap(m) => m,
            Self::Mapped(m) => m,
        }
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(m) => m,
            Self::Mapped(m) => m,
        }
    }
}

impl HostBuf {
    /// `bytes` zero bytes.
    ///
    /// # Errors
    /// [`crate::TensorError::OutOfMemory`] where the allocator refuses.
    pub fn zeroed(bytes: usize) -> crate::Result<Self> {
        let refused =
            || crate::TensorError::OutOfMemory { what: "a host buffer".into(), bytes: bytes as u64 };
        let (memory, align) = Memory::zeroed(bytes).ok_or_else(refused)?;
        let start = memory.as_bytes().as_ptr().align_offset(align);
        if start > align {
            return Err(refused());
        }
        Ok(Self { memory, start, bytes })
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
        &self.memory.as_bytes()[self.start..self.start + self.bytes]
    }

    /// All bytes, writable.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory.as_bytes_mut()[self.start..self.start + self.bytes]
    }
}

impl fmt::Debug for HostBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuf({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zero() -> crate::Result<()> {
        for n in [0, 1, 63, 64, 1000] {
            let b = HostBuf::zeroed(n)?;
            assert_eq!((b.len(), b.as_bytes().as_ptr() as usize % ALIGN), (n, 0));
            assert!(b.as_bytes().iter().all(|x| *x == 0));
        }
        assert_eq!(HostBuf::copy_of(&[1.5f32, 2.5])?.as_bytes()[..4], 1.5f32.to_ne_bytes());
        for n in [usize::MAX, usize::MAX / 2, usize::MAX - LARGE_PAGE] {
            assert!(HostBuf::zeroed(n).is_err());
        }
        Ok(())
    }

    #[test]
    fn a_large_buffer_begins_at_a_large_page() -> crate::Result<()> {
        let mut b = HostBuf::zeroed(LARGE_BUFFER)?;
        assert_eq!((b.len(), b.as_bytes().as_ptr() as usize % LARGE_PAGE), (LARGE_BUFFER, 0));
        b.as_bytes_mut()[LARGE_BUFFER - 1] = 7;
        assert_eq!(b.as_bytes().iter().map(|x| usize::from(*x)).sum::<usize>(), 7);
        Ok(())
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_large_buffer_is_not_committed_before_it_is_used() -> crate::Result<()> {
        let resident = || {
            let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
            let line = text.lines().find(|l| l.starts_with("VmRSS:")).unwrap_or_default().to_owned();
            line.split_whitespace().nth(1).and_then(|n| n.parse::<usize>().ok()).unwrap_or(0)
        };
        let before = resident();
        let buf = HostBuf::zeroed(1 << 30)?;
        assert!(
            resident() < before + (100 << 10),
            "1 GiB zeroed: {} KiB resident before, {} after",
            before,
            resident()
        );
        assert_eq!(buf.as_bytes()[1 << 29], 0);
        Ok(())
    }
}
