//! The `headway` program. All of it is in the library, so that a program with backends of its own can
//! offer the same commands: see [`headway::cli::main`].

use std::process::ExitCode;

fn main() -> ExitCode {
    headway::cli::main(|_| Ok(()))
}
