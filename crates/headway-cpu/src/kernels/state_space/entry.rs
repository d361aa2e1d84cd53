//! The parts of the kernels that work on vectors, compiled for each instruction set and chosen by [`Isa`].

use super::{
    conv::{self, Taps},
    elem::Elem,
    product::Plain,
    scan::{self, Buffers, Chunk, Room},
    step::{self, Token},
};
use crate::Isa;
use headway_attention::group::arith::mamba2_dims::Mamba2Dims;

/// Declares safe functions that run a generic body compiled for the instruction set given.
macro_rules! per_isa {
    ($( $(#[$doc:meta])* fn $name:ident of $module:ident ($($arg:ident: $type:ty),*); )*) => { $(
        $(#[$doc])*
        pub(super) fn $name(isa: Isa, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                use super::product::Fused;
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $type),*) { $module::$name::<Fused>($($arg),*) }
                #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($arg: $type),*) { $module::$name::<Fused>($($arg),*) }
                match isa {
                    // SAFETY: `mix` refuses a level that the machine lacks.
                    Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    // SAFETY: as above.
                    Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => return unsafe { avx512($($arg),*) },
                    _ => {}
                }
            }
            // Advanced SIMD, and its fused multiply-add, is part of what every AArch64 target has.
            #[cfg(target_arch = "aarch64")]
            if isa == Isa::Neon {
                return $module::$name::<super::product::Fused>($($arg),*);
            }
            let _ = isa;
            $module::$name::<Plain>($($arg),*)
        }
    )* };
}

per_isa! {
    /// [`conv::conv`].
    fn conv of conv
        (out: &mut [f32], bias: &[f32], weight: &[f32], row: usize, taps: &Taps<'_>, width: usize);
    /// [`scan::chunk`].
    fn chunk of scan (dims: &Mamba2Dims, room: &Room, chunk: &Chunk<'_>, buffers: &mut Buffers);
    /// [`step::step`].
    fn step of step (elem: Elem, state: &mut [u8], token: &Token<'_>, y: &mut [f32]);
}
