//! headway's command line with one more backend:
//! `headway-damped generate "…" --attention-backend DAMPED_ATTN --config damped.toml`.

use std::process::ExitCode;

fn main() -> ExitCode {
    headway::cli::main(add_a_backend::register)
}
