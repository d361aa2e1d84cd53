//! What holds of builder arithmetic whatever the batch. The tables of `conformance` say what single
//! batches give.

mod batches;
mod chunks;
mod pages;
mod refused;
mod steps;
