//! The server over an engine that tests slow down and break: shapes of answers, refusals, clients that leave, the end.

mod answers;
mod ending;
mod fake;
mod faults;
mod guard;
mod load;
mod refusals;
mod support;
