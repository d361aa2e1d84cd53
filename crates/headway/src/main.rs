//! The headway binary.
fn main() {}
