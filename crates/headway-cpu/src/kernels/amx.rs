//! AMX tiles: eight registers of up to 16 rows of 64 bytes, and the product of bfloat16 pairs. Stable Rust
//! has no intrinsics for them, so these are the instructions themselves.
//!
//! A thread has tiles only while it holds a [`Tiles`]: made where the work begins, dropped where it ends,
//! so that an idle worker has no tile state for the system to save. Not for choosing tile shapes: see who
//! calls.
//!
//! `dot` is, for each row m of A and each column n of B,
//!
//! ```text
//! even = odd = 0
//! for k in 0..A's pairs: even = fma(A[m][2k], B[k][2n], even); odd = fma(A[m][2k+1], B[k][2n+1], odd)
//! C[m][n] = C[m][n] + (even + odd)
//! ```
//!
//! rounded to nearest even, denormals taken and left as zeros, whatever MXCSR says. No row or column has a
//! part in another's result.

use std::arch::asm;

/// Rows of a tile at most; also 4-byte columns.
pub(crate) const SIDE: usize = 16;
/// Bytes of a tile's row at most.
pub(crate) const ROW: usize = 64;
/// Bytes of a full tile.
pub(crate) const FULL: usize = SIDE * ROW;

/// Shapes of the eight tiles, as `ldtilecfg` reads them.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// Tiles of `(rows, bytes of a row)`: 1 to 16 and a multiple of 4 up to 64, or 0 and 0 for a tile that
    /// isn't used.
    pub(crate) const fn new(shapes: [(usize, usize); 8]) -> Self {
        let mut c = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut t = 0;
        while t < 8 {
            let (rows, bytes) = shapes[t];
            assert!(rows <= SIDE && bytes <= ROW && bytes.is_multiple_of(4) && (rows == 0) == (bytes == 0));
            c.rows[t] = rows as u8;
            c.row_bytes[t] = bytes as u16;
            t += 1;
        }
        c
    }
}

/// This thread's tiles, configured until it is dropped.
pub(crate) struct Tiles(std::marker::PhantomData<*const ()>);

impl Tiles {
    /// Configures this thread's tiles; all are zero.
    ///
    /// # Safety
    /// [`ready`] was `Ok`; the thread holds no other `Tiles`.
    #[inline(always)]
    pub(crate) unsafe fn new(config: &Config) -> Self {
        // SAFETY: the caller's: the instruction is there; it reads 64 bytes, which `Config` has.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, preserves_flags, readonly)) };
        Self(std::marker::PhantomData)
    }

    /// The tiles that this thread holds already, by a value that is out of reach.
    ///
    /// # Safety
    /// There is such a value, and it is not used while this one is.
    #[inline(always)]
    pub(crate) unsafe fn held() -> std::mem::ManuallyDrop<Self> {
        std::mem::ManuallyDrop::new(Self(std::marker::PhantomData))
    }

    /// Other shapes; all tiles are zero again.
    #[inline(always)]
    pub(crate) fn configure(&mut self, config: &Config) {
        // SAFETY: as in `new`, whose caller had the instruction.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, preserves_flags, readonly)) };
    }

    /// Tile T = 0.
    #[inline(always)]
    pub(crate) fn zero<const T: usize>(&mut self) {
        const { assert!(T < 8) };
        // SAFETY: there are tiles while there is a `Tiles`.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, preserves_flags, nomem)) };
    }

    /// Tile T from memory, rows `stride` bytes apart.
    ///
    /// # Safety
    /// As many rows and bytes of a row as the tile has are readable.
    #[inline(always)]
    pub(crate) unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize) {
        const { assert!(T < 8) };
        // SAFETY: the caller's.
        unsafe {
            asm!("tileloadd tmm{t}, [{p} + {s} * 1]", t = const T, p = in(reg) from, s = in(reg) stride,
                options(nostack, preserves_flags, readonly));
        }
    }

    /// Tile T to memory, rows `stride` bytes apart.
    ///
    /// # Safety
    /// As many rows and bytes of a row as the tile has are writable.
    #[inline(always)]
    pub(crate) unsafe fn store<const T: usize>(&self, to: *mut u8, stride: usize) {
        const { assert!(T < 8) };
        // SAFETY: the caller's.
        unsafe {
            asm!("tilestored [{p} + {s} * 1], tmm{t}", t = const T, p = in(reg) to, s = in(reg) stride,
                options(nostack, preserves_flags));
        }
    }

    /// Tile C += tile A · tile B: `[m, k]` bfloat16, `[k / 2, n]` pairs, `[m, n]` float32.
    ///
    /// # Panics
    /// Never; but shapes that don't match, and equal numbers, are an invalid instruction.
    #[inline(always)]
    pub(crate) fn dot<const C: usize, const A: usize, const B: usize>(&mut self) {
        const { assert!(C < 8 && A < 8 && B < 8 && C != A && C != B && A != B) };
        // SAFETY: there are tiles while there is a `Tiles`; they are the only state that changes.
        unsafe {
            asm!("tdpbf16ps tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nostack, preserves_flags, nomem));
        }
    }
}

impl Drop for Tiles {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the instruction is there, as `new`'s caller said.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }
}

/// Whether this process can use tiles; asks the system for the permission that tile data need. Once is
/// enough: it holds for every thread, those that are there already too.
///
/// # Errors
/// What is missing, in words.
pub(crate) fn ready() -> Result<(), String> {
    let leaf = std::arch::x86_64::__cpuid_count(7, 0);
    let lacks: Vec<_> = [(24, "amx-tile"), (22, "amx-bf16")]
        .into_iter()
        .filter(|(bit, _)| leaf.edx >> bit & 1 == 0)
        .collect();
    if !lacks.is_empty() {
        let names: Vec<_> = lacks.iter().map(|(_, name)| *name).collect();
        return Err(format!("this processor lacks {}", names.join(", ")));
    }
    const TILE_STATE: u32 = 3 << 17;
    if std::arch::x86_64::__cpuid(1).ecx >> 27 & 1 == 0 || saved_state() & TILE_STATE != TILE_STATE {
        return Err("the operating system does not save tiles".into());
    }
    permission()
}

/// The low half of XCR0: what state the system saves.
fn saved_state() -> u32 {
    let (low, _high): (u32, u32);
    // SAFETY: the caller looked for OSXSAVE, with which the instruction is there.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _high, options(nostack, preserves_flags, nomem));
    }
    low
}

#[cfg(target_os = "linux")]
fn permission() -> Result<(), String> {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XTILEDATA: libc::c_long = 18;
    // SAFETY: a system call that takes two numbers and touches no memory.
    let refused = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) } != 0;
    match refused {
        true => Err(format!(
            "the kernel gives no permission for tiles (Linux 5.16 or later does): {}",
            std::io::Error::last_os_error()
        )),
        false => Ok(()),
    }
}

#[cfg(not(target_os = "linux"))]
fn permission() -> Result<(), String> {
    Err("tiles are used on Linux alone".into())
}

#[cfg(test)]
pub(crate) mod model;
#[cfg(test)]
mod tests;
