//! Any bytes as a profile of `headway tune`: what is read is written and read again as the same.
#![no_main]

use headway_engine::tuning::Profile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(profile) = Profile::parse(data) {
        assert_eq!(Profile::parse(profile.text().as_bytes()).as_ref(), Ok(&profile));
    }
});
