//! Lifetime: the program. The rule books, the registry, selection, and the erasing layer.

pub mod backend;
pub mod catalog;
pub mod composed;
pub mod erased;
pub mod registry;
pub mod rules;
pub mod select;
