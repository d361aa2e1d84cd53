//! Memory of a group's kernels: the convolution's output and each worker's buffers. Made once by the builder;
//! a call locks it for as long as it runs. The system commits a page when it is first touched, so a group
//! that only swaps block tables, and runs in another group's workspace, costs nothing.

use super::scan::{Buffers, Room};
use headway_attention::group::arith::mamba2_dims::Mamba2Dims;
use headway_tensor::{HostBuf, Result};
use std::sync::Mutex;

/// Most heads of one task: they share C Bᵀ.
pub(super) const HEADS: usize = 8;
/// Most channels of one task of the convolution.
pub(super) const CHANNELS: usize = 4096;

/// Memory for one call at a time.
#[derive(Debug)]
pub struct Workspace {
    pub(super) dims: Mamba2Dims,
    pub(super) room: Room,
    pub(super) max_tokens: usize,
    pub(super) inner: Mutex<Inner>,
}

#[derive(Debug)]
pub(super) struct Inner {
    /// `[max_tokens, conv_dim]`, float32.
    pub xbc: HostBuf,
    pub workers: Vec<Mutex<Worker>>,
}

#[derive(Debug)]
pub(super) struct Worker {
    /// `[conv_kernel - 1, channels]`: the tokens before the request's first.
    pub before: Vec<f32>,
    /// `[head_dim, state]`.
    pub state: Vec<f32>,
    pub scan: Buffers,
}

impl Workspace {
    /// Memory for steps of `max_tokens` tokens, chunks of `chunk` tokens and `workers` threads.
    ///
    /// # Errors
    /// No memory.
    pub fn new(dims: &Mamba2Dims, chunk: usize, max_tokens: usize, workers: usize) -> Result<Self> {
        let room = Room::new(dims, chunk);
        let worker = || Worker {
            before: vec![0.0; dims.memory() * CHANNELS.min(dims.conv_dim())],
            state: vec![0.0; dims.head_dim * dims.state],
            scan: Buffers::new(dims, room, HEADS.min(dims.heads_per_group())),
        };
        let inner = Inner {
            xbc: HostBuf::zeroed(max_tokens * dims.conv_dim() * size_of::<f32>())?,
            workers: (0..workers).map(|_| Mutex::new(worker())).collect(),
        };
        Ok(Self { dims: *dims, room, max_tokens, inner: Mutex::new(inner) })
    }

    /// Bytes that [`Workspace::new`] asks for.
    pub fn bytes(dims: &Mamba2Dims, chunk: usize, max_tokens: usize, workers: usize) -> usize {
        let before = dims.memory() * CHANNELS.min(dims.conv_dim());
        let floats = before + dims.head_dim * dims.state;
        let scan = Buffers::bytes(dims, Room::new(dims, chunk), HEADS.min(dims.heads_per_group()));
        max_tokens * dims.conv_dim() * size_of::<f32>() + workers * (floats * size_of::<f32>() + scan)
    }

    /// The sizes that it was made for.
    pub fn dims(&self) -> &Mamba2Dims {
        &self.dims
    }
}
