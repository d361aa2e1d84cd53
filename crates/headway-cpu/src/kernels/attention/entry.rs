//! The kernels for an instruction set and a cache's element type, picked once a call.

#[cfg(target_arch = "aarch64")]
use super::level::NeonLevel;
#[cfg(target_arch = "x86_64")]
use super::{
    elem::Bf16InTiles,
    level::{Avx2Level, Avx512Level},
    tiles,
};
use super::{
    elem::{Bf16, E4m3, E5m2, F16, F32},
    item::process,
    job::{Job, Work},
    level::{Level, PortableLevel},
    pack::Tokens,
    shape::Shape,
};
use crate::Isa;
use headway_tensor::DType;

/// Runs one work item. Safety: as [`process`].
pub(super) type Run = unsafe fn(&Job<'_>, Work<'_>, *mut f32);

fn of_level<A: Level>(cache: DType) -> Option<Run> {
    Some(match cache {
        DType::F32 => process::<A, F32>,
        DType::F16 => process::<A, F16>,
        DType::BF16 => process::<A, Bf16>,
        DType::F8E4M3 => process::<A, E4m3>,
        DType::F8E5M2 => process::<A, E5m2>,
        _ => return None,
    })
}

/// The kernel for a level, a cache's element type and a layer's heads; `None` for a type that caches don't have.
pub(super) fn kernel(isa: Isa, cache: DType, shape: &Shape) -> Option<Run> {
    #[cfg(not(target_arch = "x86_64"))]
    let _ = shape;
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx if cache == DType::BF16 && tiles::fit(shape) => Some(process::<Avx512Level, Bf16InTiles>),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => of_level::<Avx2Level>(cache),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => of_level::<Avx512Level>(cache),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => of_level::<NeonLevel>(cache),
        _ => of_level::<PortableLevel>(cache),
    }
}

/// What puts rows into a page. Safety: as in [`pack`](super::pack), on a machine with the level.
#[derive(Clone, Copy)]
pub(super) struct Pack {
    pub(super) keys_of_four: unsafe fn(Tokens, usize, *mut u8),
    pub(super) pairs: unsafe fn(Tokens, bool, usize, *mut u8),
}

fn pack_of<A: Level>() -> Pack {
    Pack { keys_of_four: A::keys_of_four, pairs: A::pairs }
}

/// The packing of a level.
pub(super) fn pack(isa: Isa) -> Pack {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => pack_of::<Avx2Level>(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => pack_of::<Avx512Level>(),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => pack_of::<NeonLevel>(),
        _ => pack_of::<PortableLevel>(),
    }
}
