//! CPU kernels: the only folder of this crate with `unsafe` code. Every public function is a safe
//! wrapper that checks shapes, strides and dtypes before a pointer exists.
//!
//! A kernel is written once over a small vector trait and compiled for each [`isa::Isa`] behind one
//! `#[target_feature]` entry; the portable level is the reference for the others.

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "instructions that Rust has no intrinsics for")]
pub(crate) mod amx;
#[expect(unsafe_code, reason = "vector intrinsics and raw rows; attention/mod.rs checks before they exist")]
pub mod attention;
#[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "functions compiled for an instruction set"))]
pub mod ceiling;
#[expect(unsafe_code, reason = "functions compiled for an instruction set, and rows split over threads")]
pub(crate) mod elementwise;
pub mod isa;
#[expect(unsafe_code, reason = "SIMD loads from weights of any alignment, and columns split over threads")]
pub(crate) mod linear;
pub mod mla;
#[expect(unsafe_code, reason = "functions compiled for an instruction set, and states split over threads")]
pub mod state_space;
