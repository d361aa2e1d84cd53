//! Any bytes as a chat template and its messages, separated by zeros. The body also runs on stable, in
//! the engine's `chat_template` test.
#![no_main]

use headway_engine::text::fuzz_chat;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    fuzz_chat(data);
});
