//! The built program, run as a user runs it: on the tiny checkpoints of the project and on files made
//! for a test. Not for right answers: the engine's golden tests hold those.

mod bad_files;
mod bad_options;
mod batch;
mod bench;
mod chat;
mod commands;
mod embed;
mod explain;
mod explain_start;
mod generate;
mod kernels;
mod kernels_triton;
mod pressure;
mod serve;
mod serve_load;
mod serve_text;
mod serving;
mod startup;
mod support;
mod tune;
